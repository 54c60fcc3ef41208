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
/// A graph with more states, in all divisions of a limit together, is not small either.
const MOST_STATES: usize = 1 << 19;
/// Permitted pairs of one operator of which every choice is tried.
const MOST_PAIRS: usize = 4;

/// Tensors that one operator uses or makes, and of which every choice is dropped after it.
const MOST_TOUCHED: usize = 12;

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
    /// Per tensor whether it can end before the step does.
    ends: Vec<bool>,
    /// What exists before the step, and nothing uses: it ends with the first run.
    unused: Vec<usize>,
    watch: &'a Watch,
    /// The results of [`Complete::cheapest`], by limit.
    known: RefCell<HashMap<u64, Option<Option<Found>>>>,
    /// Bytes that the pool needs, by how many unpooled bytes are permitted.
    least_pool: RefCell<HashMap<u64, u64>>,
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
    /// The state before, and the operator that has run since.
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

/// What a search has come to.
enum Outcome {
    Best(Found),
    /// There is no schedule of such a cost.
    None,
    /// There are too many states to know.
    Unknown,
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
        let ends: Vec<bool> =
            model.residency.iter().map(|one| !matches!(one, Residency::Leaves | Residency::Persistent)).collect();
        let touched =
            |op: u32| model.used(op, false).map(|used| used.tensor).chain(model.creates.row(op).iter().copied());
        if (0..model.len() as u32).any(|op| touched(op).filter(|&tensor| ends[tensor as usize]).count() > MOST_TOUCHED)
        {
            return None;
        }
        let mut is_unused: Vec<bool> = ends.clone();
        (0..model.len() as u32).flat_map(touched).for_each(|tensor| is_unused[tensor as usize] = false);
        let has_versions = |op: u32| model.creates.row(op).iter().any(|&tensor| !model.mutators.row(tensor).is_empty());
        Some(Complete {
            ends,
            unused: (0..is_unused.len()).filter(|&tensor| is_unused[tensor]).collect(),
            is_proof: !(0..model.len() as u32).any(|op| may_repeat[op as usize] && has_versions(op)),
            model,
            waits_for,
            may_repeat,
            watch,
            known: RefCell::default(),
            least_pool: RefCell::default(),
        })
    }

    /// Whether no schedule at all is better than the best that is found.
    pub(crate) fn is_proof(&self) -> bool {
        self.is_proof
    }

    /// The cheapest schedule that keeps to a limit, persistent tensors left out. `Some(None)` where
    /// there is no such schedule, `None` where there are too many to know. The search
    /// ends at one whose extra time is at most `least_ns`: within the limit none has less, or the
    /// caller does not ask for less.
    pub(crate) fn cheapest(&self, limit_bytes: u64, least_ns: u64) -> Option<Option<Found>> {
        if let Some(known) = self.known.borrow().get(&limit_bytes) {
            return known.clone();
        }
        let found = self.cheapest_of_divisions(limit_bytes, least_ns);
        if least_ns < u64::MAX {
            self.known.borrow_mut().insert(limit_bytes, found.clone());
        }
        found
    }

    fn cheapest_of_divisions(&self, limit_bytes: u64, least_ns: u64) -> Option<Option<Found>> {
        let (mut best, mut states): (Option<Found>, _) = (None, MOST_STATES);
        for unpooled in self.unpooled_bytes()?.into_iter().filter(|&unpooled| unpooled <= limit_bytes) {
            if best.as_ref().is_some_and(|best| best.extra_ns <= least_ns) {
                break;
            }
            let pool = limit_bytes - unpooled;
            if self.least_pool.borrow().get(&unpooled).is_some_and(|&least| least > pool) {
                continue;
            }
            let below_ns = best.as_ref().map_or(u64::MAX, |best| best.extra_ns);
            match self.search(Aim::LeastTime((pool, unpooled)), below_ns, &mut states) {
                Outcome::Best(found) => best = Some(found),
                Outcome::None => {}
                Outcome::Unknown => return None,
            }
        }
        Some(best)
    }

    /// The least limit, persistent tensors left out, that a schedule keeps to. It is not below
    /// `floor_bytes`.
    pub(crate) fn least_bytes(&self, floor_bytes: u64) -> Option<u64> {
        let (mut least, mut states) = (u64::MAX, MOST_STATES);
        for unpooled in self.unpooled_bytes()? {
            if least <= floor_bytes || unpooled >= least {
                break;
            }
            let below = least - unpooled;
            let pool = match self.search(Aim::LeastPool(unpooled), below, &mut states) {
                Outcome::Best(found) => found.peak_bytes,
                Outcome::None => below,
                Outcome::Unknown => return None,
            };
            self.least_pool.borrow_mut().insert(unpooled, pool);
            least = least.min(unpooled.saturating_add(pool));
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

    /// The best schedule of a cost below another one, by no more states than are left.
    fn search(&self, aim: Aim, below: u64, states: &mut usize) -> Outcome {
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
                *states = states.saturating_sub(ways.len());
                return Outcome::Best(found);
            }
            if ways.len() > *states || self.watch.check().is_err() {
                return Outcome::Unknown;
            }
            self.moves(&ways[at].state, &mut next);
            for (state, op, live) in next.drain(..) {
                let is_extra = ways[at].state.done >> op & 1 == 1;
                let cost = match aim {
                    Aim::LeastPool(unpooled) if live.1 > unpooled => continue,
                    Aim::LeastPool(_) => cost.max(live.0),
                    Aim::LeastTime((pool, unpooled)) if live.0 > pool || live.1 > unpooled => continue,
                    Aim::LeastTime(_) => cost + if is_extra { self.model.again_ns[op as usize] } else { 0 },
                };
                if cost >= below {
                    continue;
                }
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
        *states = states.saturating_sub(ways.len());
        Outcome::None
    }

    /// The states after the next run, with the live bytes meanwhile. A tensor that is used no more is
    /// dropped right after its last use, or after the run that makes it: nothing is gained by waiting.
    fn moves(&self, state: &State, next: &mut Vec<(State, u32, Live)>) {
        let model = &self.model;
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
            let touched = model.used(op, is_again).map(|used| used.tensor).chain(creates.iter().copied());
            let ends: Vec<usize> = touched.map(|tensor| tensor as usize).filter(|&tensor| self.ends[tensor]).collect();
            for (mut after, live, _) in choices {
                if state.done == 0 {
                    self.unused.iter().for_each(|&tensor| after.version[tensor] = GONE);
                }
                let ends: Vec<usize> = ends.iter().copied().filter(|&tensor| after.version[tensor] != GONE).collect();
                for dropped in 0..1u32 << ends.len() {
                    let mut after = after.clone();
                    for (at, &tensor) in ends.iter().enumerate() {
                        if dropped >> at & 1 == 1 {
                            after.version[tensor] = GONE;
                        }
                    }
                    next.push((after, op, live));
                }
            }
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
            ops.push(op);
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
