//! What every schedule needs while an operator runs for the first time, whatever runs again.
//!
//! Then all its ancestors have run, and none of its descendants. A tensor that an ancestor made and
//! a descendant uses is live, or its creator runs again later, which needs what that one reads, and
//! so on. The least of bytes kept and time of further runs, weighed against each other, is a
//! minimum cut (docs/explanation/theory.md).

use super::repeats::Repeats;
use crate::bound::flow::{INFINITE, Network, SINK, SOURCE};
use crate::control::{Stop, Watch};
use crate::graph::Residency;
use crate::liveness::largest_matching;
use crate::problem::{Index, Op, Ten};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Operators and accesses looked at to make the moments of one bound.
const MOMENTS_WORK: usize = 40_000_000;
/// Moments that are made however large the graph is.
const FEWEST_MOMENTS: usize = 32;
/// Nodes and arcs looked at over all cuts of one bound.
pub(super) const CUTS_WORK: u64 = 200_000_000;
/// Sums of weighed bytes and times stay below this.
const MOST_WEIGHED: u128 = 1 << 62;

/// What cutting an arc means: to keep a tensor, for so many bytes and so much time of further runs
/// that were needed to have it; or to run an operator later, for so much time. A `Must` is never
/// cut.
#[derive(Clone, Copy, Debug)]
enum Arc {
    Keep(u64, u64),
    Run(u64),
    Must,
}

/// One choice of what is kept and what runs again.
#[derive(Clone, Debug)]
struct Choice {
    /// Bytes kept beyond [`Outlook::bytes`].
    bytes: u64,
    /// Nanoseconds of further runs.
    ns: u64,
    /// Per node whether it is wanted or runs again.
    wanted: Vec<bool>,
}

/// A supposition about a tensor: the node that stands for its loss, and whether it is lost.
type Supposed = (u32, bool);

/// What holds at a moment within a limit if some tensors are supposed to be kept or lost.
#[derive(Clone, Debug)]
pub(super) struct Least {
    /// Further runs take at least so many nanoseconds.
    pub(super) ns: u64,
    /// Nanoseconds that further runs take in a known choice for this moment alone.
    most_ns: u64,
    /// Per node whether that choice wants it.
    wanted: Vec<bool>,
    /// The largest tensor that is neither kept nor lost as a whole.
    undecided: Option<u32>,
}

/// The moment at which an operator runs for the first time.
#[derive(Clone, Debug, Default)]
pub(super) struct Moment {
    pub(super) outlook: Outlook,
    /// Those tensors of [`Outlook::bytes`] that are needed after this moment, each at the version
    /// that is held.
    pub(super) held: Vec<(Ten, usize)>,
    nodes: u32,
    arcs: Vec<(u32, u32, Arc)>,
    /// Operators that have run before, so that a later run is a further one, and their nodes.
    makers: Vec<(u32, Op)>,
    /// Sums over all arcs.
    all_bytes: u64,
    all_ns: u64,
}

/// What a [`Moment`] promises. There are many moments, and few are worth their arcs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outlook {
    /// What is live in every schedule, persistent tensors left out: the operator's own working set
    /// and tensors that nothing can bring back.
    pub(super) bytes: u64,
    /// Bytes kept beyond `bytes` if nothing runs again.
    pub(super) keep_all: u64,
    /// The part of `keep_all` that has been made for certain: what may as well be made later costs
    /// nothing.
    made: u64,
    /// Bytes kept where everything is dropped that can be brought back.
    single: u64,
}

impl Outlook {
    /// The bytes that are live if nothing runs again, and that have been made for certain.
    pub(super) fn promise(&self) -> u64 {
        self.bytes + self.made
    }

    /// The most that [`Moment::floor`] can be.
    pub(super) fn most_floor(&self) -> u64 {
        self.bytes + self.keep_all.min(self.single)
    }
}

/// What the moments of the operators promise that promise the most by `promise`, by program
/// position; of all operators where they are few.
pub(super) fn outlooks_at(repeats: &Repeats, promise: &[u64], watch: &Watch) -> Result<Vec<(Op, Outlook)>, Stop> {
    let most = (MOMENTS_WORK / repeats.size().max(1)).max(FEWEST_MOMENTS);
    let mut ops: Vec<Op> = (0..promise.len() as Op).collect();
    ops.sort_by_key(|&op| (Reverse(promise[op as usize]), op));
    ops.truncate(most);
    ops.into_par_iter()
        .map_init(
            || (Moment::default(), Marks::default()),
            |(moment, marks), op| {
                watch.check()?;
                moment.fill(repeats, op, marks);
                Ok((op, moment.outlook))
            },
        )
        .collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Before,
    After,
    Free,
}

/// Marks operators and tensors that have no node, and the end of a tensor's nodes.
const NO_NODE: u32 = u32::MAX;

/// Room for what is known of operators and tensors while a moment is made.
#[derive(Default)]
struct Marks {
    side: Vec<Side>,
    /// By operator.
    node_of: Vec<u32>,
    /// By tensor the first of its `versions`.
    first: Vec<u32>,
    /// The versions that have nodes, each with its node and the next one of the same tensor.
    versions: Vec<(usize, u32, u32)>,
    pending: Vec<(Ten, usize, u32)>,
    stack: Vec<Op>,
}

impl Marks {
    fn clear(&mut self, ops: usize, tensors: usize) {
        for (marks, len) in [(&mut self.node_of, ops), (&mut self.first, tensors)] {
            marks.clear();
            marks.resize(len, NO_NODE);
        }
        self.side.clear();
        self.side.resize(ops, Side::Free);
        self.versions.clear();
    }

    /// The node of a version of a tensor.
    fn node_of_version(&self, tensor: Ten, version: usize) -> Option<u32> {
        let mut at = self.first[tensor.index()];
        while at != NO_NODE {
            let (other, node, next) = self.versions[at as usize];
            if other == version {
                return Some(node);
            }
            at = next;
        }
        None
    }

    fn know(&mut self, tensor: Ten, version: usize, node: u32) {
        let first = &mut self.first[tensor.index()];
        self.versions.push((version, node, *first));
        *first = self.versions.len() as u32 - 1;
        self.pending.push((tensor, version, node));
    }
}

impl Moment {
    pub(super) fn new(repeats: &Repeats, op: Op) -> Self {
        let mut moment = Moment::default();
        moment.fill(repeats, op, &mut Marks::default());
        moment
    }

    /// Makes this the moment of an operator.
    fn fill(&mut self, repeats: &Repeats, op: Op, marks: &mut Marks) {
        let problem = &repeats.problem;
        marks.clear(problem.len(), problem.tensors.len());
        let (mut side, mut stack) = (std::mem::take(&mut marks.side), std::mem::take(&mut marks.stack));
        for (rows, mark) in [(&repeats.before, Side::Before), (&repeats.after, Side::After)] {
            stack.push(op);
            while let Some(at) = stack.pop() {
                for &next in rows.row(at) {
                    if side[next as usize] == Side::Free {
                        side[next as usize] = mark;
                        stack.push(next);
                    }
                }
            }
        }
        // Whether an ancestor may run again after this moment.
        let has_passed = |end: &Op| *end == op || side[*end as usize] == Side::Before;
        let is_blocked = |other: Op| repeats.once[other as usize] || repeats.ends.row(other).iter().any(has_passed);

        // Whether the instance that the operator uses may be used later.
        let is_wanted = |tensor: Ten| {
            let at = repeats.version(tensor, op);
            let is_later = |&user: &Op| side[user as usize] == Side::After && repeats.version(tensor, user) >= at;
            problem.tensors[tensor.index()].residency == Residency::Leaves
                || problem.users.row(tensor).iter().any(is_later)
        };
        // Who makes a tensor, if it may be made again.
        let maker = |tensor: Ten| repeats.creator(tensor).filter(|&creator| !is_blocked(creator));

        // What keeping the operator's inputs costs beyond its own working set: nothing, unless the
        // memory of those that die here can be reused.
        let inputs = repeats.needs.row(op);
        let is_used = |tensor: Ten| inputs.contains(&tensor);
        let pairs: Vec<(Ten, Ten)> = problem
            .permissions(op)
            .iter()
            .map(|&(_, input, output)| (input, output))
            .filter(|&(input, _)| is_used(input) && (!is_wanted(input) || maker(input).is_some()))
            .collect();
        let matching = largest_matching(&pairs);
        let saved: u64 = matching.iter().map(|&(input, _)| problem.size(input)).sum();
        let is_disjoint = pairs.iter().all(|(input, _)| matching.iter().any(|(other, _)| other == input));
        let is_priced = |tensor: Ten| is_disjoint && pairs.iter().any(|&(input, _)| input == tensor);
        // An instance that the operator uses serves its own version and later ones.
        let price = |tensor: Ten, version: usize| {
            let serves = is_used(tensor) && version == repeats.version(tensor, op);
            if serves && !is_priced(tensor) { 0 } else { problem.size(tensor) }
        };
        // An instance that a mutator has passed over is not the one that it has changed: its creator
        // has made two. The time counts for one tensor of each creator.
        let another_instance = |tensor: Ten, version: usize| {
            let has_changed =
                |other: Ten| repeats.mutators.row(other).iter().any(|&change| side[change as usize] == Side::Before);
            let next = repeats.mutators.row(tensor).get(version);
            let is_old = next.is_some_and(|&next| side[next as usize] == Side::Before);
            match repeats.creator(tensor).filter(|_| is_old) {
                Some(creator)
                    if problem.creates.row(creator).iter().find(|&&other| has_changed(other)) == Some(&tensor) =>
                {
                    repeats.time_ns[creator as usize]
                }
                _ => 0,
            }
        };

        self.clear();
        self.outlook.bytes =
            inputs.iter().map(|&tensor| problem.size(tensor)).sum::<u64>() + problem.transient(op) - saved;
        // Who makes a version of a tensor; `None` where it enters.
        let maker_of = |tensor: Ten, version: usize| match version.checked_sub(1) {
            None => repeats.creator(tensor),
            Some(change) => Some(repeats.mutators.row(tensor)[change]),
        };
        let is_made = |tensor: Ten, version: usize| {
            maker_of(tensor, version).is_none_or(|maker| side[maker as usize] == Side::Before)
        };
        // What was made before and is used later, unless it is made later in any case.
        let is_past = |maker: Option<Op>| maker.is_none_or(|maker| maker != op && side[maker as usize] != Side::After);
        for tensor in problem.tensor_ranks() {
            let users = problem.users.row(tensor).iter().copied();
            let later = users.filter(|&user| side[user as usize] == Side::After);
            let leaves = problem.tensors[tensor.index()].residency == Residency::Leaves;
            let last = leaves.then(|| repeats.mutators.row(tensor).len());
            for version in later.map(|user| repeats.version(tensor, user)).chain(last) {
                if is_past(maker_of(tensor, version)) && marks.node_of_version(tensor, version).is_none() {
                    marks.know(tensor, version, SOURCE);
                    self.outlook.keep_all += price(tensor, version);
                    self.outlook.made += if is_made(tensor, version) { price(tensor, version) } else { 0 };
                }
            }
        }
        while let Some((tensor, version, from)) = marks.pending.pop() {
            let bytes = price(tensor, version);
            let maker =
                maker_of(tensor, version).filter(|&maker| side[maker as usize] != Side::Before || !is_blocked(maker));
            let Some(maker) = maker.filter(|_| bytes > 0) else {
                // Nothing brings it back, or nothing is gained by that.
                if from == SOURCE {
                    self.outlook.bytes += bytes;
                    self.outlook.keep_all -= bytes;
                    self.outlook.made -= if is_made(tensor, version) { bytes } else { 0 };
                    self.held.push((tensor, version));
                } else if bytes > 0 {
                    self.outlook.single += bytes;
                    self.arc(from, SINK, Arc::Keep(bytes, 0));
                }
                continue;
            };
            let lost_node = self.node();
            self.arc(from, lost_node, Arc::Keep(bytes, another_instance(tensor, version)));
            let mut node = marks.node_of[maker as usize];
            if node == NO_NODE {
                node = self.node();
                marks.node_of[maker as usize] = node;
                // The first run of an operator is no further one.
                if side[maker as usize] == Side::Before {
                    self.arc(node, SINK, Arc::Run(repeats.time_ns[maker as usize]));
                    self.makers.push((node, maker));
                }
                for &input in repeats.needs.row(maker) {
                    let version = repeats.version(input, maker);
                    if !is_past(maker_of(input, version)) {
                        continue;
                    }
                    let to = match marks.node_of_version(input, version) {
                        Some(to) => to,
                        None => {
                            let to = self.node();
                            marks.know(input, version, to);
                            to
                        }
                    };
                    if to != SOURCE {
                        self.arc(node, to, Arc::Must);
                    }
                }
            }
            self.arc(lost_node, node, Arc::Must);
        }
        (marks.side, marks.stack) = (side, stack);
    }

    /// Empties it, and keeps its room.
    fn clear(&mut self) {
        self.held.clear();
        self.arcs.clear();
        self.makers.clear();
        self.outlook = Outlook::default();
        (self.nodes, self.all_bytes, self.all_ns) = (2, 0, 0);
    }

    fn node(&mut self) -> u32 {
        self.nodes += 1;
        self.nodes - 1
    }

    fn arc(&mut self, from: u32, to: u32, arc: Arc) {
        match arc {
            Arc::Keep(bytes, ns) => (self.all_bytes, self.all_ns) = (self.all_bytes + bytes, self.all_ns + ns),
            Arc::Run(ns) => self.all_ns += ns,
            Arc::Must => {}
        }
        self.arcs.push((from, to, arc));
    }

    /// The least of `per_byte` times the bytes kept plus `per_ns` times the time of further runs
    /// (no choice has less, even where the work ends early), and a choice, which attains it unless
    /// the work ended early.
    fn least(
        &self,
        per_byte: u64,
        per_ns: u64,
        supposed: &[Supposed],
        work: &mut u64,
        watch: &Watch,
    ) -> Result<(u64, Choice), Stop> {
        let mut network = Network::new();
        for _ in 2..self.nodes {
            network.add_node();
        }
        for &(from, to, arc) in &self.arcs {
            let capacity = match arc {
                Arc::Keep(bytes, ns) => per_byte * bytes + per_ns * ns,
                Arc::Run(ns) => per_ns * ns,
                Arc::Must => INFINITE,
            };
            network.add_arc(from, to, capacity, 0);
        }
        for &(node, is_lost) in supposed {
            let (from, to) = if is_lost { (SOURCE, node) } else { (node, SINK) };
            network.add_arc(from, to, INFINITE, 0);
        }
        *work = work.saturating_sub(network.size());
        let flow = network.solve(work, watch)?;
        let value = flow.value;
        let [wanted, _] = flow.sides();
        let (mut bytes, mut ns) = (0, 0);
        for &(from, to, arc) in &self.arcs {
            if wanted[from as usize] && !wanted[to as usize] {
                match arc {
                    Arc::Keep(kept, run) => (bytes, ns) = (bytes + kept, ns + run),
                    Arc::Run(run) => ns += run,
                    Arc::Must => {}
                }
            }
        }
        Ok((value, Choice { bytes, ns, wanted }))
    }

    /// The fewest bytes that any schedule has live here, persistent tensors left out.
    pub(super) fn floor(&self, work: &mut u64, watch: &Watch) -> Result<u64, Stop> {
        Ok(self.outlook.bytes + self.least(1, 0, &[], work, watch)?.0)
    }

    /// What holds, in every schedule that keeps to the limit here, for the time of further runs
    /// after this moment; `None` where there is no such schedule.
    ///
    /// For every price of a byte, the least of time and priced bytes kept, less the price of the
    /// bytes that may be kept, is no more than the time. The best price is approached from both
    /// sides.
    pub(super) fn least_ns(
        &self,
        limit: u64,
        supposed: &[Supposed],
        work: &mut u64,
        watch: &Watch,
    ) -> Result<Option<Least>, Stop> {
        let Some(room) = limit.checked_sub(self.outlook.bytes) else { return Ok(None) };
        let (mut best, mut above) = self.least(0, 1, supposed, work, watch)?;
        if above.bytes <= room {
            let Choice { ns: most_ns, wanted, .. } = above;
            return Ok(Some(Least { ns: best, most_ns, wanted, undecided: None }));
        }
        let (fewest, mut below) = self.least(1, 0, supposed, work, watch)?;
        if fewest > room {
            return Ok(None);
        }
        while *work > 0 && below.bytes <= room && below.ns > above.ns {
            let (per_byte, per_ns) = self.weights(below.ns - above.ns, above.bytes - below.bytes);
            let weighed = |choice: &Choice| {
                u128::from(per_byte) * u128::from(choice.bytes) + u128::from(per_ns) * u128::from(choice.ns)
            };
            let (value, choice) = self.least(per_byte, per_ns, supposed, work, watch)?;
            let kept = u128::from(per_byte) * u128::from(room);
            best = best.max(u128::from(value).saturating_sub(kept).div_ceil(u128::from(per_ns)) as u64);
            if weighed(&choice) >= weighed(&above).min(weighed(&below)) {
                break;
            }
            if choice.bytes <= room {
                below = choice;
            } else {
                above = choice;
            }
        }
        let is_undecided = |&&(_, to, arc): &&(u32, u32, Arc)| {
            matches!(arc, Arc::Keep(..)) && above.wanted[to as usize] != below.wanted[to as usize]
        };
        let bytes = |&&(_, to, arc): &&(u32, u32, Arc)| match arc {
            Arc::Keep(bytes, _) => (bytes, Reverse(to)),
            Arc::Run(_) | Arc::Must => (0, Reverse(to)),
        };
        let undecided = self.arcs.iter().filter(is_undecided).max_by_key(bytes).map(|&(_, to, _)| to);
        let most_ns = if below.bytes <= room { below.ns } else { u64::MAX };
        Ok(Some(Least { ns: best, most_ns, wanted: below.wanted, undecided }))
    }

    /// Raises what was found with nothing supposed: a tensor is kept or lost as a whole, so the
    /// lesser of both cases holds; and so on in the lesser case, up to `most` times. With it come the
    /// operators that run again in the choice that takes the least.
    pub(super) fn divide(
        &self,
        limit: u64,
        found: Least,
        mut most: usize,
        work: &mut u64,
        watch: &Watch,
    ) -> Result<(u64, Vec<Op>), Stop> {
        let (mut most_ns, mut wanted) = (found.most_ns, found.wanted.clone());
        // The cases to divide, by what is proved of them, then by age.
        let mut cases: BTreeMap<(u64, usize), (Least, Vec<Supposed>)> = BTreeMap::new();
        let mut age = 0;
        cases.insert((found.ns, age), (found, Vec::new()));
        while let Some((&(ns, _), _)) = cases.first_key_value() {
            if ns >= most_ns || most == 0 || *work == 0 {
                return Ok((ns.min(most_ns), self.again(&wanted)));
            }
            most -= 1;
            let Some((_, (least, supposed))) = cases.pop_first() else { break };
            let Some(node) = least.undecided else { return Ok((ns, self.again(&wanted))) };
            for is_lost in [false, true] {
                let supposed: Vec<Supposed> = supposed.iter().copied().chain([(node, is_lost)]).collect();
                if let Some(least) = self.least_ns(limit, &supposed, work, watch)? {
                    if least.most_ns < most_ns {
                        (most_ns, wanted) = (least.most_ns, least.wanted.clone());
                    }
                    age += 1;
                    cases.insert((least.ns.max(ns), age), (least, supposed));
                }
            }
        }
        // No case is left in which the limit can be kept and less time may be possible.
        Ok((most_ns, self.again(&wanted)))
    }

    /// The operators that run again in a choice.
    fn again(&self, wanted: &[bool]) -> Vec<Op> {
        self.makers.iter().filter(|&&(node, _)| wanted[node as usize]).map(|&(_, op)| op).collect()
    }

    /// Weights of about this ratio that no sum overflows with; neither is 0.
    fn weights(&self, mut per_byte: u64, mut per_ns: u64) -> (u64, u64) {
        let sum = |per_byte: u64, per_ns: u64| {
            u128::from(per_byte) * u128::from(self.all_bytes) + u128::from(per_ns) * u128::from(self.all_ns)
        };
        while sum(per_byte, per_ns) >= MOST_WEIGHED {
            (per_byte, per_ns) = (per_byte / 2, per_ns / 2);
        }
        (per_byte.max(1), per_ns.max(1))
    }
}
