//! Inductor's `topological_sort_lpmf`, least peak memory first: list scheduling that keeps to the
//! most live bytes so far. These begin as all that enters the step or all that leaves it, whichever
//! is more.
//!
//! Among the ready operators whose outputs keep within those bytes, the one that leaves the fewest
//! goes next; where there is none, the one with the smallest outputs, of these the one that leaves
//! the fewest. Ties go to the earlier program position. This differs from LESCEA in its start, in
//! its second key, and in that workspace and reuse do not count. Inductor's
//! `size_threshold_for_succ_based_strategy` is off, as it is by default.

use super::ready::{created_bytes, waiting};
use crate::graph::Residency;
use crate::problem::{Index, NONE, Op, Problem, Ten};
use crate::segment_tree::Tournament;

pub(super) fn order(problem: &Problem) -> Vec<Op> {
    let mut waiting = waiting(problem);
    let mut live = Live::new(problem);
    let mut ready = Ready::new(&live.created);
    for op in (0..problem.len() as Op).filter(|&op| waiting[op as usize] == 0) {
        ready.insert(op, live.change(op));
    }
    let mut order = Vec::with_capacity(problem.len());
    while let Some(op) = ready.take_best(live.room()) {
        order.push(op);
        for last_user in live.run(op) {
            if ready.contains(last_user) {
                ready.insert(last_user, live.change(last_user));
            }
        }
        for &after in problem.successors.row(op) {
            waiting[after as usize] -= 1;
            if waiting[after as usize] == 0 {
                ready.insert(after, live.change(after));
            }
        }
    }
    order
}

/// What is live, and what each operator would change.
struct Live<'a> {
    problem: &'a Problem,
    /// Bytes of each operator's outputs.
    created: Vec<u64>,
    /// Bytes that die if the operator runs now.
    freed: Vec<u64>,
    /// Users yet to run, per tensor.
    users_left: Vec<usize>,
    done: Vec<bool>,
    now: u64,
    most: u64,
}

impl<'a> Live<'a> {
    fn new(problem: &'a Problem) -> Self {
        let created: Vec<u64> = (0..problem.len() as Op).map(|op| created_bytes(problem, op)).collect();
        let mut freed = vec![0; problem.len()];
        let (mut enters, mut leaves) = (0, 0);
        for (tensor, item) in problem.tensors.iter().enumerate() {
            let users = problem.users.row(Ten::at(tensor));
            match (item.residency, users) {
                (Residency::Leaves, _) => leaves += item.size,
                (_, []) if item.creator != NONE => freed[item.creator as usize] += item.size,
                (_, [only_user]) => freed[*only_user as usize] += item.size,
                _ => {}
            }
            if item.creator == NONE && !users.is_empty() {
                enters += item.size;
            }
        }
        let users_left = problem.tensor_ranks().map(|tensor| problem.users.row(tensor).len()).collect();
        let done = vec![false; problem.len()];
        Live { problem, created, freed, users_left, done, now: enters, most: enters.max(leaves) }
    }

    /// How many bytes can be added without raising the most so far.
    fn room(&self) -> u64 {
        self.most - self.now
    }

    /// How the operator would change the live bytes if it ran now.
    fn change(&self, op: Op) -> i64 {
        self.created[op as usize].wrapping_sub(self.freed[op as usize]) as i64
    }

    /// Runs the operator; says which operators have thereby become some tensor's last user.
    fn run(&mut self, op: Op) -> Vec<Op> {
        let problem = self.problem;
        self.done[op as usize] = true;
        self.now += self.created[op as usize];
        self.most = self.most.max(self.now);
        self.now -= self.freed[op as usize];
        let mut last_users = Vec::new();
        for &tensor in problem.uses.row(op) {
            self.users_left[tensor.index()] -= 1;
            let item = &problem.tensors[tensor.index()];
            if self.users_left[tensor.index()] == 1 && item.residency != Residency::Leaves {
                let users = problem.users.row(tensor).iter();
                for &last in users.filter(|&&user| !self.done[user as usize]) {
                    self.freed[last as usize] += item.size;
                    last_users.push(last);
                }
            }
        }
        last_users
    }
}

/// The ready operators by the size of their outputs, with the least change over any range of sizes.
struct Ready {
    /// Output bytes and operator, ascending: the ranks.
    ranked: Vec<(u64, Op)>,
    rank_of: Vec<usize>,
    /// Per rank the change and the operator.
    changes: Tournament<(i64, Op)>,
}

impl Ready {
    fn new(created: &[u64]) -> Self {
        let mut ranked: Vec<(u64, Op)> = created.iter().copied().zip(0..).collect();
        ranked.sort_unstable();
        let mut rank_of = vec![0; ranked.len()];
        for (rank, &(_, op)) in ranked.iter().enumerate() {
            rank_of[op as usize] = rank;
        }
        let changes = Tournament::new(ranked.len(), (i64::MAX, Op::MAX));
        Ready { ranked, rank_of, changes }
    }

    fn contains(&self, op: Op) -> bool {
        self.changes.has(self.rank_of[op as usize])
    }

    /// Makes the operator ready, or brings its change up to date.
    fn insert(&mut self, op: Op, change: i64) {
        self.changes.put(self.rank_of[op as usize], (change, op));
    }

    /// The operator that goes next where `room` bytes can be added for nothing; it is ready no
    /// more.
    fn take_best(&mut self, room: u64) -> Option<Op> {
        let smallest = self.ranked[self.changes.first()?].0;
        let ranks = |least: u64, most: u64| {
            self.ranked.partition_point(|&(size, _)| size < least)
                ..self.ranked.partition_point(|&(size, _)| size <= most)
        };
        let fitting = if smallest <= room { ranks(0, room) } else { ranks(smallest, smallest) };
        let (_, op) = self.changes.least_in(fitting)?;
        self.changes.remove(self.rank_of[op as usize]);
        Some(op)
    }
}
