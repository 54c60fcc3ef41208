//! When weight updates run: as early as possible, or where memory permits.

use crate::control::{STRIDE, Stop, Watch};
use crate::graph::Residency;
use crate::problem::{Index, NONE, Op, Problem, Ten};
use crate::update_phase::{SHARED, Updates};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Program order, except that every update runs as soon as its gradients are ready, so that they
/// are used up at once.
pub(super) fn eager_updates(problem: &Problem, watch: &Watch) -> Result<Vec<Op>, Stop> {
    eager_in(problem, &Updates::new(problem), &problem.program_order(), watch)
}

/// The same for the order `base` instead of program order.
pub(super) fn eager_in(problem: &Problem, updates: &Updates, base: &[Op], watch: &Watch) -> Result<Vec<Op>, Stop> {
    schedule(problem, updates, &trunk(problem, updates, base), |pending, _, _| pending.oldest(), watch)
}

/// The published rule (Shu et al., arXiv 2310.19295, section 4): an update that would not fit under
/// the estimated peak together with what is live is delayed, and a delay radius bounds for how
/// long.
///
/// The *estimated peak* is that of the other phases in program order, as if updates needed nothing
/// and freed their gradients at once. The *radius* follows from the graph: an update waits for as
/// long as there is a later moment at which less is live, all gradients counted that are made until
/// then. So it does not wait where gradients pile up faster than activations die.
pub(super) fn memory_aware_updates(problem: &Problem, watch: &Watch) -> Result<Vec<Op>, Stop> {
    let updates = Updates::new(problem);
    let Outlook { peak, improves } = Outlook::new(problem, &updates);
    let fits = |update: u32, live: u64| live.saturating_add(updates.added[update as usize]) <= peak;
    let next = |pending: &Pending, op: Op, live: u64| {
        pending.oldest().filter(|&update| fits(update, live) || !improves[op as usize])
    };
    schedule(problem, &updates, &trunk(problem, &updates, &problem.program_order()), next, watch)
}

/// An order, with what its other phases need if no update ever ran, which is the same for all
/// limits under which updates are to fit.
pub(crate) struct FittingUpdates<'a> {
    problem: &'a Problem,
    updates: Updates,
    trunk: Vec<Op>,
    /// For each operator of the trunk.
    without: Vec<Without>,
}

/// Live bytes if no update ever ran.
struct Without {
    /// While the operator runs, and after it.
    meanwhile: u64,
    after: u64,
}

impl<'a> FittingUpdates<'a> {
    pub(crate) fn new(problem: &'a Problem, order: &[Op]) -> Self {
        let updates = Updates::thrifty(problem);
        let trunk = trunk(problem, &updates, order);
        let mut memory = Memory::new(problem);
        let mut run = |&op: &Op| Without { meanwhile: memory.run(problem, op), after: memory.live };
        let without = trunk.iter().map(&mut run).collect();
        FittingUpdates { problem, updates, trunk, without }
    }

    /// The order, except that updates run as soon as live bytes stay within `most` with them, then
    /// and at every later step; those that need the most first.
    pub(crate) fn under(&self, most: u64, watch: &Watch) -> Result<Vec<Op>, Stop> {
        let FittingUpdates { problem, updates, trunk, without } = self;
        // Per operator the live bytes after it, and the most while later ones run.
        let mut ahead = vec![(0, 0); problem.len()];
        let mut highest = 0;
        for (&op, &Without { meanwhile, after }) in trunk.iter().zip(without).rev() {
            highest = highest.max(after);
            ahead[op as usize] = (after, highest);
            highest = highest.max(meanwhile);
        }
        let next = |pending: &Pending, op: Op, live: u64| {
            let (without, highest) = ahead[op as usize];
            // What updates that have run add to every later step, or take off. One that leaves no
            // more than it finds is welcome anyway.
            let later = i128::from(most) - (i128::from(highest) + i128::from(live) - i128::from(without));
            pending.largest_within(most.saturating_sub(live), |update| updates.keeps[update as usize] <= later.max(0))
        };
        schedule(problem, updates, trunk, next, watch)
    }

    /// The operators of the trunk that need the most if no update ever ran, each with another need,
    /// the neediest first.
    pub(crate) fn neediest(&self, most: usize) -> Vec<Op> {
        // Among equals, the last one has the most operators before it.
        let mut needs: Vec<(u64, Op)> =
            self.without.iter().zip(&self.trunk).rev().map(|(without, &op)| (without.meanwhile, op)).collect();
        needs.sort_by_key(|&(bytes, _)| Reverse(bytes));
        needs.dedup_by_key(|&mut (bytes, _)| bytes);
        needs.into_iter().take(most).map(|(_, op)| op).collect()
    }
}

/// How many of the waiting updates are looked at in one place.
const MOST_ASKED: usize = 64;

/// Updates whose gradients are ready.
#[derive(Default)]
struct Pending {
    by_age: BTreeSet<(usize, u32)>,
    by_need: BTreeSet<(u64, Reverse<usize>, u32)>,
    /// When each update came; by its number.
    age: BTreeMap<u32, usize>,
}

impl Pending {
    fn oldest(&self) -> Option<u32> {
        self.by_age.first().map(|&(_, update)| update)
    }

    /// The update that adds the most bytes while it runs, among those that add no more than `room`
    /// and are `fit`; among equals the oldest. Only the first few are asked whether they are fit.
    fn largest_within(&self, room: u64, fit: impl Fn(u32) -> bool) -> Option<u32> {
        let largest_first = self.by_need.range(..=(room, Reverse(0), u32::MAX)).rev().map(|&(_, _, update)| update);
        largest_first.take(MOST_ASKED).find(|&update| fit(update))
    }

    fn add(&mut self, update: u32, added: u64) {
        let age = self.age.len();
        self.age.insert(update, age);
        self.by_age.insert((age, update));
        self.by_need.insert((added, Reverse(age), update));
    }

    fn remove(&mut self, update: u32, added: u64) {
        if let Some(&age) = self.age.get(&update) {
            self.by_age.remove(&(age, update));
            self.by_need.remove(&(added, Reverse(age), update));
        }
    }
}

/// What the other phases need in program order, as if updates needed nothing and freed their
/// gradients at once.
struct Outlook {
    peak: u64,
    /// Per operator of the other phases, whether fewer bytes are live at some moment after the one
    /// that follows it, if all gradients made until then are kept.
    improves: Vec<bool>,
}

impl Outlook {
    fn new(problem: &Problem, updates: &Updates) -> Self {
        let mut memory = Memory::new(problem);
        for (tensor, left) in memory.left.iter_mut().enumerate() {
            let users = problem.users.row(Ten::at(tensor)).iter();
            *left -= users.filter(|&&user| problem.is_update[user as usize]).count() as u32;
        }
        let mut waits_for = updates.waits_for.clone();
        let (mut peak, mut held) = (0, 0);
        let mut kept = vec![u64::MAX; problem.len()];
        for op in (0..problem.len() as Op).filter(|&op| !problem.is_update[op as usize]) {
            peak = peak.max(memory.run(problem, op));
            updates.ready_after(problem, op, &mut waits_for, |update| held += updates.holds[update as usize]);
            kept[op as usize] = memory.live + held;
        }
        let mut improves = vec![false; problem.len()];
        let mut least = u64::MAX;
        for op in (0..problem.len()).rev() {
            improves[op] = least < kept[op];
            least = least.min(kept[op]);
        }
        Outlook { peak, improves }
    }
}

/// The other phases as in `base`, but each idle operator right after the operator that it waits
/// for, if that is one of them.
fn trunk(problem: &Problem, updates: &Updates, base: &[Op]) -> Vec<Op> {
    let is_ours = |op: Op| !updates.contain(op);
    let is_moved = |op: Op| problem.is_idle(op) && problem.predecessors.row(op).iter().all(|&before| is_ours(before));
    let others = base.iter().copied().filter(|&op| is_ours(op) && !is_moved(op));
    let with_idle = |op: Op| {
        let next = problem.successors.row(op).iter().copied();
        std::iter::once(op).chain(next.filter(|&next| is_ours(next) && is_moved(next)))
    };
    others.flat_map(with_idle).collect()
}

/// The other phases as in `trunk`. After each of their operators updates run whose gradients are
/// ready, as long as `next` names one: it is told the operator and the live bytes.
fn schedule(
    problem: &Problem,
    updates: &Updates,
    trunk: &[Op],
    next: impl Fn(&Pending, Op, u64) -> Option<u32>,
    watch: &Watch,
) -> Result<Vec<Op>, Stop> {
    let count = problem.len();
    let mut memory = Memory::new(problem);
    // Per operator after how many of the other phases' it is to run; all of them, where nothing
    // says otherwise.
    let mut after = vec![count as Op; count];
    let mut waits_for = updates.waits_for.clone();
    let mut pending = Pending::default();
    // Per update its place among all updates.
    let mut turn: Vec<u32> = (0..updates.members.len() as u32).map(|update| NONE / 2 + update).collect();
    let mut taken = 0;
    for (place, &op) in trunk.iter().enumerate() {
        if place % STRIDE == 0 {
            watch.check()?;
        }
        after[op as usize] = place as Op;
        memory.run(problem, op);
        updates.ready_after(problem, op, &mut waits_for, |update| pending.add(update, updates.added[update as usize]));
        if trunk.get(place + 1).is_some_and(|&next| problem.is_idle(next)) {
            continue;
        }
        while let Some(update) = next(&pending, op, memory.live) {
            pending.remove(update, updates.added[update as usize]);
            turn[update as usize] = taken;
            taken += 1;
            for &member in &updates.members[update as usize] {
                memory.run(problem, member);
                after[member as usize] = place as Op;
            }
        }
    }
    let mut place_in_update = vec![0; count];
    for members in &updates.members {
        members.iter().enumerate().for_each(|(place, &op)| place_in_update[op as usize] = place);
    }
    // What several updates share runs right before the first of them.
    for op in (0..count as Op).rev().filter(|&op| updates.of[op as usize] == SHARED) {
        let first = problem.successors.row(op).iter().map(|&next| after[next as usize]).min();
        after[op as usize] = first.unwrap_or(count as Op);
    }
    Ok(by_place(problem, |op| {
        let update = updates.of[op as usize];
        // After the operator that made them possible: first what is shared, then one update after
        // the other.
        let turn = turn.get(update as usize).map_or(0, |turn| turn + 1);
        (after[op as usize], updates.contain(op), turn, place_in_update[op as usize])
    }))
}

/// The operators by their keys, as far as the constraints permit; of equals the first in program
/// order.
pub(super) fn by_place<K: Ord>(problem: &Problem, key: impl Fn(Op) -> K) -> Vec<Op> {
    let mut missing: Vec<usize> = (0..problem.len() as Op).map(|op| problem.predecessors.row(op).len()).collect();
    let free = (0..problem.len() as Op).filter(|&op| missing[op as usize] == 0);
    let mut ready: BinaryHeap<_> = free.map(|op| Reverse((key(op), op))).collect();
    let mut order = Vec::with_capacity(problem.len());
    while let Some(Reverse((_, op))) = ready.pop() {
        order.push(op);
        for &next in problem.successors.row(op) {
            missing[next as usize] -= 1;
            if missing[next as usize] == 0 {
                ready.push(Reverse((key(next), next)));
            }
        }
    }
    order
}

/// Live bytes while operators run one by one, without reuse.
struct Memory {
    live: u64,
    /// Per tensor the users to come.
    left: Vec<u32>,
    /// Per tensor whether it counts among the live bytes.
    is_live: Vec<bool>,
}

impl Memory {
    fn new(problem: &Problem) -> Self {
        let left: Vec<u32> = problem.tensor_ranks().map(|t| problem.users.row(t).len() as u32).collect();
        let is_live: Vec<bool> =
            problem.tensors.iter().zip(&left).map(|(item, &left)| item.creator == NONE && left > 0).collect();
        let entering = problem.tensors.iter().zip(&is_live).filter(|(_, is_live)| **is_live);
        Memory { live: entering.map(|(item, _)| item.size).sum(), left, is_live }
    }

    /// Runs the operator; returns the live bytes meanwhile. Operators may run before others that
    /// they wait for.
    fn run(&mut self, problem: &Problem, op: Op) -> u64 {
        let meanwhile = self.live + problem.transient(op);
        for &made in problem.creates.row(op) {
            if self.left[made.index()] > 0 || problem.tensors[made.index()].residency == Residency::Leaves {
                self.live += problem.size(made);
                self.is_live[made.index()] = true;
            }
        }
        for &used in problem.uses.row(op) {
            let item = &problem.tensors[used.index()];
            self.left[used.index()] -= 1;
            if self.left[used.index()] == 0 && self.is_live[used.index()] && item.residency != Residency::Leaves {
                self.live -= item.size;
                self.is_live[used.index()] = false;
            }
        }
        meanwhile
    }
}
