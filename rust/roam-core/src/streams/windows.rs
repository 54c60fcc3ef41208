//! When tensors are live in a timed schedule, counted in starts: the half-open interval from the
//! start of the creator to the first start at which every last use has completed.
//!
//! Only starts make live bytes grow, so looking at starts alone finds every peak.

use super::schedule::Timed;
use crate::graph::Residency;
use crate::liveness::{Lifetimes, Profile, largest_matching};
use crate::problem::{Index, NONE, Op, Problem, Ten, step_by_operator};

/// The lifetimes in a timed schedule; all reuse that its times permit is made use of.
///
/// Times may be those of the model, or time steps. An operator precedes another one where it has
/// completed when that one starts and was launched before it.
pub(super) fn profile(problem: &Problem, timed: &Timed) -> Profile {
    let starts = Starts::new(timed);
    let mut pairs = Vec::new();
    if !problem.reuse.is_empty() {
        for &op in &timed.order {
            let dies = |input: Ten| {
                let others = problem.users.row(input).iter().filter(|&&other| other != op);
                others.clone().all(|&other| {
                    timed.end[other as usize] <= timed.start[op as usize]
                        && starts.rank[other as usize] < starts.rank[op as usize]
                })
            };
            let permitted: Vec<(Ten, Ten)> = problem
                .permissions(op)
                .iter()
                .filter(|&&(_, input, _)| dies(input))
                .map(|&(_, input, output)| (input, output))
                .collect();
            pairs.extend(largest_matching(&permitted));
        }
    }
    measure(problem, timed, &starts, pairs)
}

/// What is live in a timed schedule with the given reuse pairs.
pub(super) fn profile_with(problem: &Problem, timed: &Timed, pairs: Vec<(Ten, Ten)>) -> Profile {
    measure(problem, timed, &Starts::new(timed), pairs)
}

fn measure(problem: &Problem, timed: &Timed, starts: &Starts, mut pairs: Vec<(Ten, Ten)>) -> Profile {
    // For unpooled memory no stream waits for another one's last use of the input.
    pairs.retain(|&(input, _)| problem.tensors[input.index()].in_pool());
    let count = timed.order.len();
    let lifetimes = starts.lifetimes(problem, timed);
    // Changes at each start; wrapping, since a sum that is exact modulo 2^64 and below 2^63 is
    // exact.
    let mut pool = vec![0u64; count + 1];
    let mut unpooled = vec![0u64; count + 1];
    let add = |changes: &mut [u64], from: u32, to: u32, bytes: u64| {
        changes[from as usize] = changes[from as usize].wrapping_add(bytes);
        changes[to as usize] = changes[to as usize].wrapping_sub(bytes);
    };
    for (tensor, item) in problem.tensors.iter().enumerate() {
        let changes = if item.in_pool() { &mut pool } else { &mut unpooled };
        add(changes, lifetimes.start[tensor], lifetimes.end[tensor], item.size);
    }
    for &(input, output) in &pairs {
        let (from, to) = (lifetimes.start[output.index()], lifetimes.end[input.index()]);
        add(&mut pool, to, from, problem.size(input));
    }
    for op in 0..count as Op {
        add(&mut unpooled, starts.rank[op as usize], starts.done(timed, op), problem.workspace[op as usize]);
    }
    let mut profile =
        Profile { lifetimes, live: Vec::with_capacity(count), pairs, peak: 0, pool_peak: 0, unpooled_peak: 0 };
    let (mut in_pool, mut beside) = (0u64, 0u64);
    for rank in 0..count {
        in_pool = in_pool.wrapping_add(pool[rank]);
        beside = beside.wrapping_add(unpooled[rank]);
        profile.live.push(in_pool + beside);
        profile.peak = profile.peak.max(in_pool + beside);
        profile.pool_peak = profile.pool_peak.max(in_pool);
        profile.unpooled_peak = profile.unpooled_peak.max(beside);
    }
    profile
}

/// The starts of a timed schedule, by time and then by launch.
struct Starts {
    /// Per operator the place of its start.
    rank: Vec<u32>,
    /// When they are, ascending.
    times: Vec<u64>,
}

impl Starts {
    fn new(timed: &Timed) -> Self {
        let mut order = timed.order.clone();
        order.sort_by_key(|&op| timed.start[op as usize]);
        Starts { rank: step_by_operator(&order), times: order.iter().map(|&op| timed.start[op as usize]).collect() }
    }

    /// The first start, after the operator's own, at which the operator has completed.
    fn done(&self, timed: &Timed, op: Op) -> u32 {
        let completed = self.times.partition_point(|&time| time < timed.end[op as usize]) as u32;
        completed.max(self.rank[op as usize] + 1)
    }

    fn lifetimes(&self, problem: &Problem, timed: &Timed) -> Lifetimes {
        let count = self.times.len() as u32;
        // A tensor that enters and is not used is gone once the first operator has completed.
        let first = timed.order.first().map_or(0, |&op| self.done(timed, op));
        let (mut start, mut end) = (Vec::new(), Vec::new());
        for (tensor, item) in problem.tensors.iter().enumerate() {
            let from = if item.creator == NONE { 0 } else { self.rank[item.creator as usize] };
            start.push(from);
            let users = problem.users.row(Ten::at(tensor)).iter().map(|&user| self.done(timed, user)).max();
            let unused = || if item.creator == NONE { first } else { self.done(timed, item.creator) };
            end.push(match item.residency {
                Residency::Leaves => count,
                _ => users.unwrap_or_else(unused).min(count),
            });
        }
        Lifetimes { start, end }
    }
}
