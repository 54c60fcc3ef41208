//! The weight updates that the update phase consists of.

use crate::graph::Residency;
use crate::problem::{Index, NONE, Op, Problem, Ten};

/// An update of more operators than this is not that of a single parameter.
pub(crate) const LONGEST_UPDATE: usize = 64;

/// The updates, each as its operators in program order.
pub(crate) fn updates_of(problem: &Problem) -> Vec<Vec<Op>> {
    Updates::new(problem).members
}

/// Stands for all updates together.
pub(crate) const SHARED: u32 = NONE - 1;

/// The update phase, taken apart into updates: one for each parameter, or for all that share a
/// gradient.
pub(crate) struct Updates {
    /// Per operator its update; [`NONE`] outside the update phase, [`SHARED`] where several need
    /// it, such as what reads the learning rate.
    pub(crate) of: Vec<u32>,
    /// Per update its operators as they run.
    pub(crate) members: Vec<Vec<Op>>,
    /// Per update the constraints that lead into it from other phases.
    pub(crate) waits_for: Vec<u32>,
    /// Per update the most bytes that it adds while it runs by itself.
    pub(crate) added: Vec<u64>,
    /// Per update the bytes by which more are live once it has run.
    pub(crate) keeps: Vec<i128>,
    /// Per update the bytes from elsewhere that it is the last update to use.
    pub(crate) holds: Vec<u64>,
}

impl Updates {
    /// Operators of the update phase that wait for other phases are of one update if they are
    /// connected. Those that do not wait, such as counting the step, belong to the update that
    /// needs them.
    pub(crate) fn new(problem: &Problem) -> Self {
        Updates::gather(problem, Updates::of_updates(problem)).measured(problem)
    }

    /// The same updates, made to need less. Each update comes with the operators that make nothing
    /// but its gradients, out of fewer bytes than the gradients have, such as those of a linear
    /// layer for few samples: they had better wait with the update. And the operators of an update
    /// run in an order that leaves few bytes live.
    pub(crate) fn thrifty(problem: &Problem) -> Self {
        let mut of = Updates::of_updates(problem);
        let bytes = |tensors: &[Ten]| tensors.iter().map(|&t| problem.size(t)).sum::<u64>();
        for op in (0..problem.len() as Op).rev().filter(|&op| !problem.is_update[op as usize]) {
            let (idle, users): (Vec<Op>, Vec<Op>) =
                problem.successors.row(op).iter().partition(|&&next| problem.is_idle(next));
            let mut needed_by = users.into_iter().map(|next| of[next as usize]);
            let Some(update) = needed_by.next().filter(|&update| update != NONE && update != SHARED) else { continue };
            if needed_by.all(|other| other == update) && bytes(problem.uses.row(op)) < bytes(problem.creates.row(op)) {
                idle.into_iter().chain([op]).for_each(|op| of[op as usize] = update);
            }
        }
        let mut updates = Updates::gather(problem, of);
        updates.arrange(problem);
        updates.measured(problem)
    }

    /// Per operator its update.
    fn of_updates(problem: &Problem) -> Vec<u32> {
        let count = problem.len();
        let operators = (0..count as Op).filter(|&op| problem.is_update[op as usize]);
        let mut waits = vec![false; count];
        for op in operators.clone() {
            let mut before = problem.predecessors.row(op).iter();
            waits[op as usize] = before.any(|&before| !problem.is_update[before as usize] || waits[before as usize]);
        }
        let mut of = vec![NONE; count];
        let mut updates = 0;
        let mut stack = Vec::new();
        for first in operators.clone().filter(|&op| waits[op as usize]) {
            if of[first as usize] != NONE {
                continue;
            }
            of[first as usize] = updates;
            stack.push(first);
            while let Some(op) = stack.pop() {
                for &next in problem.predecessors.row(op).iter().chain(problem.successors.row(op)) {
                    if waits[next as usize] && of[next as usize] == NONE {
                        of[next as usize] = updates;
                        stack.push(next);
                    }
                }
            }
            updates += 1;
        }
        for op in operators.clone().rev().filter(|&op| !waits[op as usize]) {
            let mut needed_by = problem.successors.row(op).iter().map(|&next| of[next as usize]);
            let first = needed_by.next().filter(|&update| update != NONE);
            of[op as usize] = first.filter(|&update| needed_by.all(|other| other == update)).unwrap_or(SHARED);
        }
        of
    }

    /// Operators by their updates, in program order.
    fn gather(problem: &Problem, of: Vec<u32>) -> Self {
        let in_updates = (0..problem.len() as Op).filter(|&op| of[op as usize] < SHARED);
        let count = in_updates.clone().map(|op| of[op as usize] + 1).max().unwrap_or(0);
        let mut members: Vec<Vec<Op>> = vec![Vec::new(); count as usize];
        for op in in_updates {
            members[of[op as usize] as usize].push(op);
        }
        Updates { of, members, waits_for: Vec::new(), added: Vec::new(), keeps: Vec::new(), holds: Vec::new() }
    }

    /// Within each update, lets the operators that leave the fewest bytes live run first, if the
    /// update then needs less.
    fn arrange(&mut self, problem: &Problem) {
        let mut alone = Alone::new(problem, &self.of);
        for members in self.members.iter_mut().filter(|members| members.len() <= LONGEST_UPDATE) {
            let need = alone.run(members);
            alone.undo(members);
            let (arranged, least) = alone.run_least_live_first(members);
            if least.most < need.most {
                *members = arranged;
            }
        }
    }

    fn measured(mut self, problem: &Problem) -> Self {
        let mut alone = Alone::new(problem, &self.of);
        for members in &self.members {
            let is_elsewhere = |&&before: &&Op| self.of[before as usize] == NONE;
            let waits = members.iter().map(|&op| problem.predecessors.row(op).iter().filter(is_elsewhere).count());
            self.waits_for.push(waits.sum::<usize>() as u32);
            let need = alone.run(members);
            self.added.push(u64::try_from(need.most).unwrap_or(0));
            self.keeps.push(need.live);
            self.holds.push(need.held);
        }
        self
    }

    /// Whether the operator belongs to any update, or to several.
    pub(crate) fn contain(&self, op: Op) -> bool {
        self.of[op as usize] != NONE
    }

    /// Tells which updates can run once the operator has run.
    pub(crate) fn ready_after(&self, problem: &Problem, op: Op, waits_for: &mut [u32], mut tell: impl FnMut(u32)) {
        for &next in problem.successors.row(op).iter().filter(|&&next| self.contain(next)) {
            let update = self.of[next as usize];
            waits_for[update as usize] -= 1;
            if waits_for[update as usize] == 0 {
                tell(update);
            }
        }
    }
}

/// What an update needs, if nothing else runs meanwhile.
#[derive(Default)]
struct Need {
    /// Bytes live above those before the update.
    live: i128,
    /// The most of them at any time.
    most: i128,
    /// Bytes from outside all updates that nobody uses any more.
    held: u64,
}

/// Updates that run one after another, and nothing else.
struct Alone<'a> {
    problem: &'a Problem,
    of: &'a [u32],
    /// Per tensor its users in updates that are still to come.
    left: Vec<u32>,
}

impl<'a> Alone<'a> {
    fn new(problem: &'a Problem, of: &'a [u32]) -> Self {
        let users = |t: Ten| problem.users.row(t).iter().filter(|&&user| of[user as usize] != NONE).count() as u32;
        Alone { problem, of, left: problem.tensor_ranks().map(users).collect() }
    }

    fn run(&mut self, members: &[Op]) -> Need {
        let mut need = Need::default();
        members.iter().for_each(|&op| self.step(op, &mut need));
        need
    }

    fn undo(&mut self, members: &[Op]) {
        for &op in members {
            self.problem.uses.row(op).iter().for_each(|&used| self.left[used.index()] += 1);
        }
    }

    fn step(&mut self, op: Op, need: &mut Need) {
        need.most = need.most.max(need.live + i128::from(self.problem.transient(op)));
        need.live += self.change(op);
        for &used in self.problem.uses.row(op) {
            let item = &self.problem.tensors[used.index()];
            if self.is_freed_by_next(used) && (item.creator == NONE || self.of[item.creator as usize] == NONE) {
                need.held += item.size;
            }
            self.left[used.index()] -= 1;
        }
    }

    /// Bytes by which more are live once the operator has run.
    fn change(&self, op: Op) -> i128 {
        let stays = |&&made: &&Ten| {
            !self.problem.users.row(made).is_empty()
                || self.problem.tensors[made.index()].residency == Residency::Leaves
        };
        let made = self.problem.creates.row(op).iter().filter(stays);
        let freed = self.problem.uses.row(op).iter().filter(|&&used| self.is_freed_by_next(used));
        let bytes = |&tensor: &Ten| i128::from(self.problem.size(tensor));
        made.map(bytes).sum::<i128>() - freed.map(bytes).sum::<i128>()
    }

    /// Whether the tensor's next user frees it.
    fn is_freed_by_next(&self, tensor: Ten) -> bool {
        self.left[tensor.index()] == 1 && self.problem.tensors[tensor.index()].residency != Residency::Leaves
    }

    /// Always what leaves the fewest bytes live, of equals what needs the least meanwhile, then the
    /// first in program order.
    fn run_least_live_first(&mut self, members: &[Op]) -> (Vec<Op>, Need) {
        let place = |op: Op| members.binary_search(&op).ok();
        let before = |&op: &Op| self.problem.predecessors.row(op).iter().filter(|&&before| place(before).is_some());
        let mut missing: Vec<usize> = members.iter().map(|op| before(op).count()).collect();
        let mut ready: Vec<Op> = members.iter().zip(&missing).filter(|&(_, &n)| n == 0).map(|(&op, _)| op).collect();
        let (mut order, mut need) = (Vec::with_capacity(members.len()), Need::default());
        let key = |alone: &Self, op: Op| (alone.change(op), alone.problem.transient(op), op);
        while let Some(at) = (0..ready.len()).min_by_key(|&at| key(self, ready[at])) {
            let op = ready.swap_remove(at);
            self.step(op, &mut need);
            order.push(op);
            for next in self.problem.successors.row(op).iter().filter_map(|&next| place(next)) {
                missing[next] -= 1;
                if missing[next] == 0 {
                    ready.push(members[next]);
                }
            }
        }
        (order, need)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Watch;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Tensor, TensorId};

    /// Tensors by their sizes; operators by their phase and the tensors that they read and create.
    fn problem(sizes: &[u64], calls: &[(Phase, &[usize], &[usize])]) -> Problem {
        let mut builder = GraphBuilder::new("", "cpu", 1);
        let mut tensor = |&size_bytes: &u64| {
            let (name, kind, residency) = (String::new(), Kind::Temporary, Residency::StepLocal);
            builder.tensor(Tensor { name, size_bytes, kind, residency, alignment_bytes: 0 }).expect("few")
        };
        let tensors: Vec<TensorId> = sizes.iter().map(&mut tensor).collect();
        for (position, &(phase, reads, creates)) in calls.iter().enumerate() {
            let [reads, creates] = [reads, creates].map(|list| list.iter().map(|&at| tensors[at]).collect());
            let operator = Operator { reads, creates, ..Operator::new("", position as u32, phase) };
            builder.operator(operator).expect("few");
        }
        Problem::new(&builder.build().expect("valid"), false)
    }

    #[test]
    fn what_makes_a_gradient_of_little_waits_with_its_update() {
        // Operator 1 makes 1 byte of 5; 2 makes of it a gradient of 10, of which 3 is a view; 4 is
        // the update.
        let linear = problem(
            &[1, 10, 5],
            &[
                (Phase::Forward, &[], &[2]),
                (Phase::Forward, &[2], &[0]),
                (Phase::Backward, &[0], &[1]),
                (Phase::Backward, &[1], &[]),
                (Phase::Update, &[1], &[]),
            ],
        );
        assert_eq!(Updates::new(&linear).members, [[4]]);
        let updates = Updates::thrifty(&linear);
        assert_eq!(updates.members, [[2, 3, 4]]);
        // It adds the gradient, and leaves nothing of what it found.
        assert_eq!((updates.waits_for[0], updates.added[0], updates.keeps[0], updates.holds[0]), (1, 10, -1, 1));
        // Not where the gradient is made of more, nor where anything else wants it.
        for (sizes, reader) in [([11, 10, 3], Phase::Update), ([1, 10, 3], Phase::Backward)] {
            let calls: [(Phase, &[usize], &[usize]); 5] = [
                (Phase::Forward, &[], &[0]),
                (Phase::Backward, &[0], &[1]),
                (Phase::Backward, &[1], &[]),
                (reader, &[1], &[2]),
                (Phase::Update, &[1], &[]),
            ];
            let updates = Updates::thrifty(&problem(&sizes, &calls));
            assert!(!updates.contain(1), "{sizes:?} {reader:?}");
        }
    }

    #[test]
    fn what_reads_an_update_runs_behind_it() {
        let problem = problem(
            &[1, 10, 10, 20],
            &[
                (Phase::Forward, &[], &[0]),
                (Phase::Backward, &[], &[1]),
                (Phase::Update, &[1], &[2]),
                // A view that nobody uses, of what the update makes.
                (Phase::Forward, &[2], &[]),
                (Phase::Backward, &[0], &[3]),
                (Phase::Update, &[3], &[]),
            ],
        );
        let order = crate::order::Method::EagerUpdates.order(&problem, &Watch::default()).expect("not stopped");
        assert_eq!(order, [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn an_update_runs_in_the_order_that_needs_the_least() {
        // Of 20 bytes a gradient of 10. The update makes a state of 10, then a decayed gradient of
        // 10 instead of the first, and joins the two.
        let update = problem(
            &[10, 10, 10, 20],
            &[
                (Phase::Forward, &[], &[3]),
                (Phase::Backward, &[3], &[0]),
                (Phase::Update, &[], &[1]),
                (Phase::Update, &[0], &[2]),
                (Phase::Update, &[1, 2], &[]),
            ],
        );
        let (plain, thrifty) = (Updates::new(&update), Updates::thrifty(&update));
        // State and decayed gradient beside the first one; the other way round only ever one of
        // them.
        assert_eq!((&plain.members[..], plain.added[0]), (&[vec![2, 3, 4]][..], 20));
        assert_eq!((&thrifty.members[..], thrifty.added[0]), (&[vec![3, 2, 4]][..], 10));
        assert_eq!((plain.keeps[0], thrifty.keeps[0]), (-10, -10));
    }
}
