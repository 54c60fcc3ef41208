//! When weight updates run: as early as possible, or where memory permits.

use super::STRIDE;
use crate::control::{Stop, Watch};
use crate::graph::Residency;
use crate::problem::{NONE, Op, Problem, Ten};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Program order, except that every update runs as soon as its gradients are ready, so that they are used up at once.
pub(super) fn eager_updates(problem: &Problem, watch: &Watch) -> Result<Vec<Op>, Stop> {
    eager_in(problem, &Parts::new(problem), &problem.program_order(), watch)
}

/// The same in another order than program order.
pub(super) fn eager_in(problem: &Problem, parts: &Parts, base: &[Op], watch: &Watch) -> Result<Vec<Op>, Stop> {
    schedule(problem, parts, base, |pending, _, _| pending.oldest(), watch)
}

/// The published rule (Shu et al., arXiv 2310.19295, section 4): an update that would not fit under the estimated
/// peak together with what is live is delayed, and a delay radius bounds for how long.
///
/// The *estimated peak* is that of the other phases in program order, as if updates needed nothing and freed their
/// gradients at once. The *radius* follows from the graph: an update waits for as long as there is a later moment at
/// which less is live, all gradients counted that are made until then. So it does not wait where gradients pile up
/// faster than activations die.
pub(super) fn memory_aware_updates(problem: &Problem, watch: &Watch) -> Result<Vec<Op>, Stop> {
    let parts = Parts::new(problem);
    let Outlook { peak, improves } = Outlook::new(problem, &parts);
    let fits = |part: u32, live: u64| live.saturating_add(parts.added[part as usize]) <= peak;
    let next = |pending: &Pending, op: Op, live: u64| {
        pending.oldest().filter(|&part| fits(part, live) || !improves[op as usize])
    };
    schedule(problem, &parts, &problem.program_order(), next, watch)
}

/// The order given, except that updates run as soon as they fit under `most` live bytes, then and at every step to come;
/// those that need the most first.
pub(crate) fn fitting_updates(problem: &Problem, order: &[Op], most: u64, watch: &Watch) -> Result<Vec<Op>, Stop> {
    let parts = Parts::new(problem);
    // As if no update ever ran: per operator the live bytes after it, and the most while later ones run.
    let mut memory = Memory::new(problem);
    let mut steps: Vec<(Op, u64, u64)> = Vec::new();
    for &op in order.iter().filter(|&&op| !problem.is_update[op as usize]) {
        let meanwhile = memory.run(problem, op);
        steps.push((op, meanwhile, memory.live));
    }
    let mut ahead = vec![(0, 0); problem.len()];
    let mut highest = memory.live;
    for (op, meanwhile, live) in steps.into_iter().rev() {
        ahead[op as usize] = (live, highest);
        highest = highest.max(meanwhile);
    }
    let next = |pending: &Pending, op: Op, live: u64| {
        let (without, highest) = ahead[op as usize];
        // What updates that have run add to every later step, or take off. One that leaves no more than it finds is welcome anyway.
        let later = i128::from(most) - (i128::from(highest) + i128::from(live) - i128::from(without));
        pending.largest_within(most.saturating_sub(live), |part| parts.keeps[part as usize] <= later.max(0))
    };
    schedule(problem, &parts, order, next, watch)
}

/// How many of the waiting updates are looked at in one place.
const MOST_ASKED: usize = 64;

/// Updates whose gradients are ready.
#[derive(Default)]
struct Pending {
    by_age: BTreeSet<(usize, u32)>,
    by_need: BTreeSet<(u64, Reverse<usize>, u32)>,
    /// When each part came; by its number.
    age: BTreeMap<u32, usize>,
}

impl Pending {
    fn oldest(&self) -> Option<u32> {
        self.by_age.first().map(|&(_, part)| part)
    }

    /// The one that adds the most bytes while it runs, of those that add no more than `room` and are `fit`; of equals
    /// the oldest. Only the first few are asked.
    fn largest_within(&self, room: u64, fit: impl Fn(u32) -> bool) -> Option<u32> {
        let largest_first = self.by_need.range(..=(room, Reverse(0), u32::MAX)).rev().map(|&(_, _, part)| part);
        largest_first.take(MOST_ASKED).find(|&part| fit(part))
    }

    fn add(&mut self, part: u32, added: u64) {
        let age = self.age.len();
        self.age.insert(part, age);
        self.by_age.insert((age, part));
        self.by_need.insert((added, Reverse(age), part));
    }

    fn remove(&mut self, part: u32, added: u64) {
        if let Some(&age) = self.age.get(&part) {
            self.by_age.remove(&(age, part));
            self.by_need.remove(&(added, Reverse(age), part));
        }
    }
}

/// What the other phases need in program order, as if updates needed nothing and freed their gradients at once.
struct Outlook {
    peak: u64,
    /// Per operator of the other phases, whether fewer bytes are live at some moment after the one that follows it, if all
    /// gradients made until then are kept.
    improves: Vec<bool>,
}

impl Outlook {
    fn new(problem: &Problem, parts: &Parts) -> Self {
        let mut memory = Memory::new(problem);
        for (tensor, left) in memory.left.iter_mut().enumerate() {
            let users = problem.users.row(tensor as Ten).iter();
            *left -= users.filter(|&&user| problem.is_update[user as usize]).count() as u32;
        }
        let mut waits_for = parts.waits_for.clone();
        let (mut peak, mut held) = (0, 0);
        let mut kept = vec![u64::MAX; problem.len()];
        for op in (0..problem.len() as Op).filter(|&op| !problem.is_update[op as usize]) {
            peak = peak.max(memory.run(problem, op));
            parts.ready_after(problem, op, &mut waits_for, |part| held += parts.holds[part as usize]);
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

/// The other phases as in `base`. After each of their operators updates run whose gradients are ready, as long as `next`
/// names one: it is told the operator and the live bytes.
fn schedule(
    problem: &Problem,
    parts: &Parts,
    base: &[Op],
    next: impl Fn(&Pending, Op, u64) -> Option<u32>,
    watch: &Watch,
) -> Result<Vec<Op>, Stop> {
    let count = problem.len();
    let mut memory = Memory::new(problem);
    // Per operator after how many of the other phases' it is to run; all of them, where nothing says otherwise.
    let mut after = vec![count as Op; count];
    let mut waits_for = parts.waits_for.clone();
    let mut pending = Pending::default();
    // Per part its place among all updates.
    let mut turn: Vec<u32> = (0..parts.members.len() as u32).map(|part| NONE / 2 + part).collect();
    let mut taken = 0;
    let others = base.iter().copied().filter(|&op| !problem.is_update[op as usize]);
    for (place, op) in others.enumerate() {
        if place % STRIDE == 0 {
            watch.check()?;
        }
        after[op as usize] = place as Op;
        memory.run(problem, op);
        parts.ready_after(problem, op, &mut waits_for, |part| pending.add(part, parts.added[part as usize]));
        while let Some(part) = next(&pending, op, memory.live) {
            pending.remove(part, parts.added[part as usize]);
            turn[part as usize] = taken;
            taken += 1;
            for &update in &parts.members[part as usize] {
                memory.run(problem, update);
                after[update as usize] = place as Op;
            }
        }
    }
    // What several updates share runs right before the first of them.
    for op in (0..count as Op).rev().filter(|&op| parts.of[op as usize] == SHARED) {
        let first = problem.successors.row(op).iter().map(|&next| after[next as usize]).min();
        after[op as usize] = first.unwrap_or(count as Op);
    }
    Ok(by_place(problem, |op| {
        let part = parts.of[op as usize];
        // After the operator that made them possible: first what is shared, then one update after the other.
        let turn = turn.get(part as usize).map_or(0, |turn| turn + 1);
        (after[op as usize], problem.is_update[op as usize], turn)
    }))
}

/// The operators by their keys, as far as the constraints permit; of equals the first in program order.
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

/// The updates, each as its operators in program order.
pub(crate) fn update_parts(problem: &Problem) -> Vec<Vec<Op>> {
    Parts::new(problem).members
}

/// Stands for all updates together.
pub(super) const SHARED: u32 = NONE - 1;

/// The update phase in its parts: one for each parameter, or for all that share a gradient.
pub(super) struct Parts {
    /// Per operator its part; [`NONE`] outside the update phase, [`SHARED`] where several need it, such as what reads the learning
    /// rate.
    pub(super) of: Vec<u32>,
    /// Per part its operators in program order.
    pub(super) members: Vec<Vec<Op>>,
    /// Per part the constraints that lead into it from other phases.
    pub(super) waits_for: Vec<u32>,
    /// Per part the most bytes that it adds while it runs by itself.
    added: Vec<u64>,
    /// Per part the bytes by which more are live once it has run.
    keeps: Vec<i128>,
    /// Per part the bytes from elsewhere that it is the last update to use.
    holds: Vec<u64>,
}

impl Parts {
    /// Connected are updates that wait for the other phases; those that do not, such as counting the step, prepare
    /// the part that needs them.
    pub(super) fn new(problem: &Problem) -> Self {
        let count = problem.len();
        let updates = (0..count as Op).filter(|&op| problem.is_update[op as usize]);
        let mut waits = vec![false; count];
        for op in updates.clone() {
            let mut before = problem.predecessors.row(op).iter();
            waits[op as usize] = before.any(|&before| !problem.is_update[before as usize] || waits[before as usize]);
        }
        let mut of = vec![NONE; count];
        let mut parts = 0;
        let mut stack = Vec::new();
        for first in updates.clone().filter(|&op| waits[op as usize]) {
            if of[first as usize] != NONE {
                continue;
            }
            of[first as usize] = parts;
            stack.push(first);
            while let Some(op) = stack.pop() {
                for &next in problem.predecessors.row(op).iter().chain(problem.successors.row(op)) {
                    if waits[next as usize] && of[next as usize] == NONE {
                        of[next as usize] = parts;
                        stack.push(next);
                    }
                }
            }
            parts += 1;
        }
        for op in updates.clone().rev().filter(|&op| !waits[op as usize]) {
            let mut needed_by = problem.successors.row(op).iter().map(|&next| of[next as usize]);
            let first = needed_by.next().filter(|&part| part != NONE);
            of[op as usize] = first.filter(|&part| needed_by.all(|other| other == part)).unwrap_or(SHARED);
        }
        let mut members: Vec<Vec<Op>> = vec![Vec::new(); parts as usize];
        for op in updates.filter(|&op| of[op as usize] != SHARED) {
            members[of[op as usize] as usize].push(op);
        }
        let mut parts = Parts {
            waits_for: vec![0; members.len()],
            added: Vec::new(),
            keeps: Vec::new(),
            holds: Vec::new(),
            of,
            members,
        };
        // Per tensor the updates that use it and are still to come.
        let updates_of = |t: Ten| problem.users.row(t).iter().filter(|&&user| problem.is_update[user as usize]).count();
        let mut left: Vec<usize> = (0..problem.tensors.len() as Ten).map(updates_of).collect();
        for (part, members) in parts.members.iter().enumerate() {
            let (mut live, mut most, mut held) = (0i128, 0i128, 0u64);
            for &op in members {
                let outside =
                    problem.predecessors.row(op).iter().filter(|&&before| !problem.is_update[before as usize]);
                parts.waits_for[part] += outside.count() as u32;
                most = most.max(live + i128::from(problem.transient(op)));
                for &made in problem.creates.row(op) {
                    let item = &problem.tensors[made as usize];
                    let stays = !problem.users.row(made).is_empty() || item.residency == Residency::Leaves;
                    live += if stays { i128::from(item.size) } else { 0 };
                }
                for &used in problem.uses.row(op) {
                    left[used as usize] -= 1;
                    let item = &problem.tensors[used as usize];
                    if left[used as usize] == 0 && item.residency != Residency::Leaves {
                        live -= i128::from(item.size);
                        let is_own = item.creator != NONE && problem.is_update[item.creator as usize];
                        held += if is_own { 0 } else { item.size };
                    }
                }
            }
            parts.added.push(u64::try_from(most).unwrap_or(0));
            parts.keeps.push(live);
            parts.holds.push(held);
        }
        parts
    }

    /// Tells which parts can run once the operator has run.
    pub(super) fn ready_after(&self, problem: &Problem, op: Op, waits_for: &mut [u32], mut tell: impl FnMut(u32)) {
        for &next in problem.successors.row(op).iter().filter(|&&next| problem.is_update[next as usize]) {
            let part = self.of[next as usize];
            waits_for[part as usize] -= 1;
            if waits_for[part as usize] == 0 {
                tell(part);
            }
        }
    }
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
        let left: Vec<u32> = (0..problem.tensors.len() as Ten).map(|t| problem.users.row(t).len() as u32).collect();
        let is_live: Vec<bool> =
            problem.tensors.iter().zip(&left).map(|(item, &left)| item.creator == NONE && left > 0).collect();
        let entering = problem.tensors.iter().zip(&is_live).filter(|(_, is_live)| **is_live);
        Memory { live: entering.map(|(item, _)| item.size).sum(), left, is_live }
    }

    /// Runs the operator; returns the live bytes meanwhile. Operators may run before others that they wait for.
    fn run(&mut self, problem: &Problem, op: Op) -> u64 {
        let meanwhile = self.live + problem.transient(op);
        for &made in problem.creates.row(op) {
            if self.left[made as usize] > 0 || problem.tensors[made as usize].residency == Residency::Leaves {
                self.live += problem.size(made);
                self.is_live[made as usize] = true;
            }
        }
        for &used in problem.uses.row(op) {
            let item = &problem.tensors[used as usize];
            self.left[used as usize] -= 1;
            if self.left[used as usize] == 0 && self.is_live[used as usize] && item.residency != Residency::Leaves {
                self.live -= item.size;
                self.is_live[used as usize] = false;
            }
        }
        meanwhile
    }
}
