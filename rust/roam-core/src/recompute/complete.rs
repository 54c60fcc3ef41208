//! All schedules of a small graph, any number of runs of each operator: the least extra time within
//! a limit, and the least limit that any schedule keeps to.
//!
//! A plan takes the most live bytes of the pool and, beside it, the most unpooled bytes that are ever
//! live, at another moment perhaps. So the limit is divided between them in every way that may matter:
//! those that leave to unpooled tensors as many bytes as they have in some state.
//!
//! What a schedule can do next depends on which operators have run and on which tensors are alive,
//! at which version; both together are a *state*. The best way to a state is found by Dijkstra's
//! algorithm, which ends with the best schedule, or with the proof that there is none.
//!
//! A state holds one instance of each tensor. Of a tensor that nothing changes more are of no use:
//! of two that are alive at once, either serves whatever reads the other, so the older one can be
//! dropped. A tensor that is changed may be needed in two versions at once, so where such a tensor
//! may be made again the best schedule that is found proves nothing.

use super::model::{Model, NONE, Use};
use super::search::Found;
use crate::control::Watch;
use crate::graph::{Graph, Operator, OperatorId, Residency, Sequence};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};

/// A graph of more operators or tensors is not small.
const MOST_OPERATORS: usize = 24;
const MOST_TENSORS: usize = 64;
/// A graph with more states is not small either.
const MOST_STATES: usize = 1 << 17;
/// Permitted pairs of one operator of which every choice is tried.
const MOST_PAIRS: usize = 4;

/// The most divisions of a limit between pool and unpooled bytes that are tried.
const MOST_DIVISIONS: usize = 32;

/// Marks a tensor that is not alive.
const GONE: u8 = u8::MAX;

/// All schedules of a small graph in which no tensor has two instances at once.
pub(crate) struct Complete<'a> {
    model: Model,
    /// Per operator those that its first run waits for beside what it touches.
    waits_for: Vec<u64>,
    may_repeat: Vec<bool>,
    is_proof: bool,
    watch: &'a Watch,
    /// The results of [`Complete::cheapest`], by limit.
    known: RefCell<HashMap<u64, Option<Option<Found>>>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    /// Which operators have had their first run, a bit per operator.
    done: u64,
    /// Per tensor the version of its instance.
    version: Vec<u8>,
}

/// The best known way to a state.
struct Way {
    state: State,
    /// Nanoseconds of extra runs, or the most live bytes.
    cost: u64,
    /// The state before, and the operator that has run since, if one has.
    before: (usize, u32),
    is_final: bool,
}

/// Live bytes in the pool, and unpooled ones.
type Live = (u64, u64);

/// What is looked for.
#[derive(Clone, Copy)]
enum Aim {
    /// The least extra time within limits of both.
    LeastTime(Live),
    /// The least peak in the pool within a limit of unpooled bytes.
    LeastPool(u64),
}

impl<'a> Complete<'a> {
    /// `None` where the graph is not small.
    pub(crate) fn new(graph: &Graph, watch: &'a Watch) -> Option<Self> {
        let operators = || graph.program_order().iter().map(|&id| graph.operator(id));
        let is_small = graph.operators().len() <= MOST_OPERATORS
            && graph.tensors().len() <= MOST_TENSORS
            && operators().all(|operator| operator.reuse.len() <= MOST_PAIRS);
        // A further run of a collective asks for a run of what waits for it, which states do not tell.
        let launches_again =
            |operator: &Operator| operator.repeatable && operator.sequence == Some(Sequence::Collective);
        if !is_small || operators().any(launches_again) || has_views(graph) {
            return None;
        }
        let mut waits_for = vec![0u64; graph.operators().len()];
        for &(before, after) in graph.control() {
            waits_for[graph.operator(after).position as usize] |= 1 << graph.operator(before).position;
        }
        let mut in_sequence: HashMap<_, u64> = HashMap::new();
        for operator in operators() {
            if let Some(sequence) = operator.sequence {
                let before = in_sequence.entry(sequence as usize).or_default();
                waits_for[operator.position as usize] |= *before;
                *before |= 1 << operator.position;
            }
        }
        let leaves = |&tensor| graph.tensor(tensor).residency == Residency::Leaves;
        let may_repeat: Vec<bool> = operators().map(|op| op.repeatable && !op.creates.iter().any(leaves)).collect();
        let model = Model::new(graph, graph.program_order());
        let has_versions = |op: u32| model.creates.row(op).iter().any(|&tensor| !model.mutators.row(tensor).is_empty());
        Some(Complete {
            is_proof: !(0..model.len() as u32).any(|op| may_repeat[op as usize] && has_versions(op)),
            model,
            waits_for,
            may_repeat,
            watch,
            known: RefCell::default(),
        })
    }

    /// Whether no schedule at all is better than the best that is found.
    pub(crate) fn is_proof(&self) -> bool {
        self.is_proof
    }

    /// The cheapest schedule that keeps to a limit, persistent tensors left out. `Some(None)` where
    /// there is no such schedule, `None` where there are too many to know.
    pub(crate) fn cheapest(&self, limit_bytes: u64) -> Option<Option<Found>> {
        if let Some(known) = self.known.borrow().get(&limit_bytes) {
            return known.clone();
        }
        let found = self.cheapest_of_divisions(limit_bytes);
        self.known.borrow_mut().insert(limit_bytes, found.clone());
        found
    }

    fn cheapest_of_divisions(&self, limit_bytes: u64) -> Option<Option<Found>> {
        let mut best: Option<Found> = None;
        for unpooled in self.unpooled_bytes()?.into_iter().filter(|&unpooled| unpooled <= limit_bytes) {
            let found = self.search(Aim::LeastTime((limit_bytes - unpooled, unpooled)))?;
            best = best.into_iter().chain(found).min_by_key(|found| found.extra_ns);
        }
        Some(best)
    }

    /// The least limit, persistent tensors left out, that a schedule keeps to.
    pub(crate) fn least_bytes(&self) -> Option<u64> {
        let mut least = u64::MAX;
        for unpooled in self.unpooled_bytes()? {
            let found = self.search(Aim::LeastPool(unpooled))?;
            least = least.min(found.map_or(u64::MAX, |found| unpooled + found.peak_bytes));
        }
        Some(least)
    }

    /// How many unpooled bytes can be live at once; `None` where there are too many ways.
    fn unpooled_bytes(&self) -> Option<Vec<u64>> {
        let model = &self.model;
        let is_unpooled = |&tensor: &usize| model.residency[tensor] != Residency::StepLocal && model.size[tensor] > 0;
        let mut sums = BTreeSet::from([0]);
        for tensor in (0..model.size.len()).filter(is_unpooled) {
            sums.extend(sums.clone().iter().map(|sum| sum + model.size[tensor]));
            if sums.len() > MOST_DIVISIONS {
                return None;
            }
        }
        let workspaces: BTreeSet<u64> = model.workspace.iter().copied().chain([0]).collect();
        let totals: BTreeSet<u64> = sums.iter().flat_map(|sum| workspaces.iter().map(move |one| sum + one)).collect();
        (totals.len() <= MOST_DIVISIONS).then(|| totals.into_iter().collect())
    }

    fn search(&self, aim: Aim) -> Option<Option<Found>> {
        let tensors = self.model.size.len();
        let all = (1 << self.model.len()) - 1;
        let version = (0..tensors).map(|t| if self.model.creator[t] == NONE { 0 } else { GONE }).collect();
        let start = State { done: 0, version };
        let mut known = HashMap::from([(start.clone(), 0)]);
        let mut ways = vec![Way { state: start, cost: 0, before: (0, NONE), is_final: false }];
        let mut open = BinaryHeap::from([Reverse((0, 0))]);
        let mut next = Vec::new();
        while let Some(Reverse((cost, at))) = open.pop() {
            if std::mem::replace(&mut ways[at].is_final, true) {
                continue;
            }
            if ways[at].state.done == all {
                let mut found = self.found(&ways, at);
                if let Aim::LeastPool(_) = aim {
                    found.peak_bytes = cost;
                }
                return Some(Some(found));
            }
            if ways.len() > MOST_STATES || self.watch.check().is_err() {
                return None;
            }
            self.moves(&ways[at].state, &mut next);
            for (state, op, live) in next.drain(..) {
                let is_extra = op != NONE && ways[at].state.done >> op & 1 == 1;
                let cost = match aim {
                    Aim::LeastPool(unpooled) if live.1 > unpooled => continue,
                    Aim::LeastPool(_) => cost.max(live.0),
                    Aim::LeastTime((pool, unpooled)) if live.0 > pool || live.1 > unpooled => continue,
                    Aim::LeastTime(_) => cost + if is_extra { self.model.again_ns[op as usize] } else { 0 },
                };
                let way = *known.entry(state.clone()).or_insert(ways.len());
                if way == ways.len() {
                    ways.push(Way { state, cost: u64::MAX, before: (0, NONE), is_final: false });
                }
                if cost < ways[way].cost && !ways[way].is_final {
                    (ways[way].cost, ways[way].before) = (cost, (at, op));
                    open.push(Reverse((cost, way)));
                }
            }
        }
        Some(None)
    }

    /// The states after the next run or the end of a tensor, with the live bytes meanwhile.
    fn moves(&self, state: &State, next: &mut Vec<(State, u32, Live)>) {
        let model = &self.model;
        if state.done != 0 {
            for tensor in 0..model.size.len() {
                let stays = matches!(model.residency[tensor], Residency::Leaves | Residency::Persistent);
                if state.version[tensor] != GONE && !stays {
                    let mut without = state.clone();
                    without.version[tensor] = GONE;
                    next.push((without, NONE, (0, 0)));
                }
            }
        }
        for op in 0..model.len() as u32 {
            let is_again = state.done >> op & 1 == 1;
            let waits_for = self.waits_for[op as usize];
            let sees = |used: Use| u32::from(state.version[used.tensor as usize]) == used.version;
            let creates = model.creates.row(op);
            if !(if is_again { self.may_repeat[op as usize] } else { state.done & waits_for == waits_for })
                || !model.used(op, is_again).all(sees)
                || creates.iter().any(|&tensor| state.version[tensor as usize] != GONE)
            {
                continue;
            }
            let mut after = state.clone();
            after.done |= 1 << op;
            for used in model.used(op, is_again).filter(|used| used.mutates) {
                after.version[used.tensor as usize] += 1;
            }
            for &tensor in creates {
                after.version[tensor as usize] = 0;
            }
            let mut live = (0, model.workspace[op as usize]);
            for tensor in (0..model.size.len()).filter(|&tensor| after.version[tensor] != GONE) {
                *self.part(&mut live, tensor) += model.size[tensor];
            }
            // Every set of disjoint pairs whose inputs end here.
            let mut choices = vec![(after, live, Vec::new())];
            for &(input, output) in model.reuse.row(op) {
                if !model.used(op, is_again).any(|used| used.tensor == input) {
                    continue;
                }
                for at in 0..choices.len() {
                    let &(ref after, mut live, ref taken) = &choices[at];
                    if taken.iter().all(|&other| other != input && other != output) {
                        let mut after = after.clone();
                        after.version[input as usize] = GONE;
                        let taken = taken.iter().copied().chain([input, output]).collect();
                        *self.part(&mut live, input as usize) -= model.size[input as usize];
                        choices.push((after, live, taken));
                    }
                }
            }
            next.extend(choices.into_iter().map(|(after, live, _)| (after, op, live)));
        }
    }

    /// Where a tensor's bytes count.
    fn part<'b>(&self, live: &'b mut Live, tensor: usize) -> &'b mut u64 {
        if self.model.residency[tensor] == Residency::StepLocal { &mut live.0 } else { &mut live.1 }
    }

    /// The schedule that leads to a state.
    fn found(&self, ways: &[Way], mut at: usize) -> Found {
        let mut ops = Vec::new();
        while at != 0 {
            let (before, op) = ways[at].before;
            ops.extend(Some(op).filter(|&op| op != NONE));
            at = before;
        }
        ops.reverse();
        let timeline = super::timeline::Timeline::new(&self.model, u64::MAX, &ops);
        let sequence: Vec<OperatorId> = ops.iter().map(|&op| self.model.operator(op)).collect();
        Found { sequence, peak_bytes: timeline.peak(), extra_ns: timeline.extra_ns }
    }
}

/// Whether an operator uses a view of a tensor that it uses itself, too: both must be of one
/// instance, which states do not tell.
fn has_views(graph: &Graph) -> bool {
    graph.control().iter().any(|&(before, after)| {
        let [before, after] = [before, after].map(|id| graph.operator(id));
        let is_view = before.creates.is_empty() && before.mutates.is_empty();
        is_view && before.reads.iter().any(|tensor| after.reads.contains(tensor) || after.mutates.contains(tensor))
    })
}
