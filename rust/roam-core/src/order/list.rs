//! List scheduling, O(log n) a step.
//!
//! LESCEA (the baseline of Shu et al., arXiv 2310.19295; the rule of Inductor's
//! `topological_sort_lpmf`): among the ready operators that keep live bytes within the peak so far
//! take the one that leaves the fewest live bytes; if there is none, the one with the least live
//! bytes while it runs. Ties go to the earlier program position.
//!
//! What an operator adds while it runs (outputs and workspace) is known beforehand, so operators
//! are ranked by it once; a tournament tree over the ranks holds how each ready operator would
//! change the live bytes. "Keeps within the peak" is a prefix of the ranks.

use crate::control::{STRIDE, Stop, Watch};
use crate::graph::Residency;
use crate::liveness::largest_matching;
use crate::problem::{Index, Op, Problem, Ten};
use crate::segment_tree::Tournament;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Which operator goes next when several keep within the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preference {
    /// The one that leaves the fewest live bytes.
    LeastLive,
    /// One that adds none to the live bytes, else the first in program order.
    ProgramOrder,
}

/// What a schedule starts from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start<'a> {
    /// Bytes that count as reached before the first step.
    pub(super) ceiling: u64,
    /// Per operator a stage; no operator runs before all those of earlier stages. The stages must
    /// not contradict the constraints. Empty: a single stage.
    pub(super) stages: &'a [u32],
}

impl Start<'_> {
    /// The start where nothing is known.
    pub(super) const PLAIN: Start<'static> = Start { ceiling: 0, stages: &[] };

    fn stage(&self, op: Op) -> usize {
        self.stages.get(op as usize).map_or(0, |&stage| stage as usize)
    }
}

pub(super) fn schedule(
    problem: &Problem,
    preference: Preference,
    start: Start<'_>,
    watch: &Watch,
) -> Result<Vec<Op>, Stop> {
    let operators = 0..problem.len() as Op;
    let last_stage = operators.clone().map(|op| start.stage(op)).max().unwrap_or(0);
    // Per stage the operators yet to run, and those that wait for nothing but their stage.
    let mut left = vec![0u32; last_stage + 1];
    let mut held: Vec<Vec<Op>> = vec![Vec::new(); last_stage + 1];
    let mut front = Front::new(problem, start.ceiling);
    for op in operators {
        left[start.stage(op)] += 1;
        if front.waiting[op as usize] == 0 {
            held[start.stage(op)].push(op);
        }
    }
    let mut by_position = BinaryHeap::new();
    let mut done = vec![false; problem.len()];
    let mut order = Vec::with_capacity(problem.len());
    for stage in 0..=last_stage {
        for op in std::mem::take(&mut held[stage]) {
            front.enter(op);
            by_position.push(Reverse(op));
        }
        while left[stage] > 0 {
            if order.len() % STRIDE == 0 {
                watch.check()?;
            }
            let fitting = front.ready.least_within(front.peak.saturating_sub(front.live));
            let next = match preference {
                Preference::LeastLive => fitting.map(|(_, op)| op).or_else(|| front.ready.smallest()),
                Preference::ProgramOrder => {
                    while by_position.peek().is_some_and(|Reverse(op)| done[*op as usize]) {
                        by_position.pop();
                    }
                    let shrinking = fitting.filter(|&(delta, _)| delta <= 0).map(|(_, op)| op);
                    shrinking.or_else(|| by_position.peek().map(|&Reverse(op)| op))
                }
            };
            let Some(op) = next else {
                // The constraints are acyclic and the stages keep to them.
                unreachable!("no operator is ready");
            };
            done[op as usize] = true;
            left[stage] -= 1;
            order.push(op);
            front.run(op);
            for &after in problem.successors.row(op) {
                front.waiting[after as usize] -= 1;
                if front.waiting[after as usize] > 0 {
                    continue;
                }
                if start.stage(after) == stage {
                    front.enter(after);
                    by_position.push(Reverse(after));
                } else {
                    held[start.stage(after)].push(after);
                }
            }
        }
    }
    Ok(order)
}

/// The state of a schedule under construction.
struct Front<'a> {
    problem: &'a Problem,
    /// Predecessors yet to run, per operator.
    waiting: Vec<u32>,
    /// Whether the operator has become ready.
    entered: Vec<bool>,
    /// Users yet to run, per tensor: how many, and their ids xor-ed (the id itself once one is
    /// left).
    users_left: Vec<(u32, u32)>,
    /// How each operator would change the live bytes if it ran now.
    delta: Vec<i64>,
    /// The most that reuse can save at each operator; empty where there are no permissions.
    most_saved: Vec<u64>,
    live: u64,
    peak: u64,
    ready: ReadyTree,
}

impl<'a> Front<'a> {
    fn new(problem: &'a Problem, ceiling: u64) -> Self {
        let users_left: Vec<(u32, u32)> = problem
            .tensor_ranks()
            .map(|tensor| {
                let users = problem.users.row(tensor);
                (users.len() as u32, users.iter().fold(0, |all, user| all ^ user))
            })
            .collect();
        let mut delta = vec![0i64; problem.len()];
        let mut live = 0;
        for (tensor, item) in problem.tensors.iter().enumerate() {
            let (users, only_user) = users_left[tensor];
            let leaves = item.residency == Residency::Leaves;
            match item.residency {
                Residency::Enters => live += if users > 0 { item.size } else { 0 },
                _ if users > 0 || leaves => delta[item.creator as usize] += item.size as i64,
                _ => {}
            }
            if users == 1 && !leaves {
                delta[only_user as usize] -= item.size as i64;
            }
        }
        let most_saved: Vec<u64> = if problem.reuse.is_empty() {
            Vec::new()
        } else {
            (0..problem.len() as Op).map(|op| saving(problem, op, |_| true)).collect()
        };
        let ready = ReadyTree::new(problem, &most_saved);
        let waiting = (0..problem.len() as Op).map(|op| problem.predecessors.row(op).len() as u32).collect();
        Front {
            problem,
            waiting,
            entered: vec![false; problem.len()],
            users_left,
            delta,
            most_saved,
            live,
            peak: ceiling.max(live),
            ready,
        }
    }

    /// What reuse saves if the operator runs now.
    fn saving_now(&self, op: Op) -> u64 {
        if self.most_saved.is_empty() || self.most_saved[op as usize] == 0 {
            0
        } else {
            saving(self.problem, op, |input| self.users_left[input.index()].0 == 1)
        }
    }

    /// Makes the operator ready, or brings its entry up to date.
    fn enter(&mut self, op: Op) {
        self.entered[op as usize] = true;
        let reuses = !self.most_saved.is_empty()
            && self.most_saved[op as usize] > 0
            && self.saving_now(op) == self.most_saved[op as usize];
        self.ready.insert(op, self.delta[op as usize], reuses);
    }

    fn run(&mut self, op: Op) {
        let during = self.live + self.problem.transient(op) - self.saving_now(op);
        self.peak = self.peak.max(during);
        self.live = self.live.wrapping_add_signed(self.delta[op as usize]);
        self.ready.remove(op);
        for &tensor in self.problem.uses.row(op) {
            let (left, ids) = &mut self.users_left[tensor.index()];
            *left -= 1;
            *ids ^= op;
            let (left, last) = (*left, *ids);
            let item = &self.problem.tensors[tensor.index()];
            if left == 1 && item.residency != Residency::Leaves {
                self.delta[last as usize] -= item.size as i64;
                if self.entered[last as usize] {
                    self.enter(last);
                }
            }
        }
    }
}

/// The most bytes that the operator's permissions save if the given inputs die at it.
fn saving(problem: &Problem, op: Op, dies: impl Fn(Ten) -> bool) -> u64 {
    let pairs: Vec<(Ten, Ten)> = problem
        .permissions(op)
        .iter()
        .filter(|&&(_, input, _)| dies(input))
        .map(|&(_, input, output)| (input, output))
        .collect();
    largest_matching(&pairs).iter().map(|&(input, _)| problem.size(input)).sum()
}

/// The ready operators by rank, with the least delta over any prefix of the ranks.
///
/// An operator has one rank for the bytes that it adds without reuse, and where permissions exist
/// a second one for what it adds when they all apply.
struct ReadyTree {
    /// Bytes added per rank, ascending.
    added: Vec<u64>,
    /// The operator of each rank.
    op_at: Vec<Op>,
    /// Per operator its ranks without and with reuse.
    rank: Vec<[u32; 2]>,
    /// Per rank the delta and the operator.
    deltas: Tournament<(i64, Op)>,
}

impl ReadyTree {
    fn new(problem: &Problem, most_saved: &[u64]) -> Self {
        let mut entries: Vec<(u64, Op, usize)> = Vec::with_capacity(problem.len());
        for op in 0..problem.len() as Op {
            let added = problem.transient(op);
            entries.push((added, op, 0));
            match most_saved.get(op as usize) {
                Some(&saved) if saved > 0 => entries.push((added - saved, op, 1)),
                _ => {}
            }
        }
        entries.sort_unstable();
        let mut rank = vec![[u32::MAX; 2]; problem.len()];
        for (at, &(_, op, with_reuse)) in entries.iter().enumerate() {
            rank[op as usize][with_reuse] = at as u32;
        }
        ReadyTree {
            added: entries.iter().map(|&(added, _, _)| added).collect(),
            op_at: entries.iter().map(|&(_, op, _)| op).collect(),
            rank,
            deltas: Tournament::new(entries.len(), (i64::MAX, Op::MAX)),
        }
    }

    fn insert(&mut self, op: Op, delta: i64, reuses: bool) {
        let ranks = self.rank[op as usize];
        if reuses {
            self.deltas.remove(ranks[0] as usize);
            self.deltas.put(ranks[1] as usize, (delta, op));
        } else {
            self.deltas.put(ranks[0] as usize, (delta, op));
        }
    }

    fn remove(&mut self, op: Op) {
        for rank in self.rank[op as usize] {
            if rank != u32::MAX {
                self.deltas.remove(rank as usize);
            }
        }
    }

    /// The least (delta, operator) among those that add no more than `room`.
    fn least_within(&self, room: u64) -> Option<(i64, Op)> {
        self.deltas.least_in(0..self.added.partition_point(|&added| added <= room))
    }

    /// The ready operator that adds the least.
    fn smallest(&self) -> Option<Op> {
        self.deltas.first().map(|rank| self.op_at[rank])
    }
}
