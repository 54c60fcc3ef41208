//! Weight updates merged into the other phases by hills and valleys.
//!
//! The other phases, in the order given, are a chain of operators, the trunk; every update is a
//! chain that hangs off it where its gradients are ready. Such a tree of chains has a best merge
//! (Liu, "An application of generalized tree pebbling to sparse matrix factorization", 1987; with
//! time reversed; Kayaaslan, Lambert, Marchal and Ucar, "Scheduling series-parallel task graphs to
//! minimize peak memory", 2018). docs/explanation/theory.md has the proof and says what it leaves
//! out.

use super::updates::{by_place, eager_in};
use crate::control::{STRIDE, Stop, Watch};
use crate::graph::Residency;
use crate::liveness::Profile;
use crate::problem::{Index, NONE, Op, Problem};
use crate::update_phase::{SHARED, Updates};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The order given, with the updates where they raise its peak the least. O(n log n).
pub(super) fn hill_valley(problem: &Problem, base: &[Op], watch: &Watch) -> Result<Vec<Op>, Stop> {
    let updates = Updates::thrifty(problem);
    // What an operator adds and frees is counted as if updates ran at once.
    let costs = costs(problem, &eager_in(problem, &updates, base, watch)?);
    let trunk: Vec<Op> = base.iter().copied().filter(|&op| !updates.contain(op)).collect();
    // The updates by the operator that makes them ready.
    let mut waits_for = updates.waits_for.clone();
    let mut released: Vec<(usize, u32)> = Vec::with_capacity(updates.members.len());
    for (place, &op) in trunk.iter().enumerate() {
        updates.ready_after(problem, op, &mut waits_for, |update| released.push((place, update)));
    }
    let mut next = vec![NONE; problem.len()];
    let mut merged = Chain::default();
    for (place, &op) in trunk.iter().enumerate().rev() {
        if place % STRIDE == 0 {
            watch.check()?;
        }
        while let Some(&(_, update)) = released.last().filter(|&&(since, _)| since == place) {
            released.pop();
            let mut branch = Chain::default();
            for &op in updates.members[update as usize].iter().rev() {
                branch.prepend(costs[op as usize], &mut next);
            }
            merged.merge(branch);
        }
        merged.prepend(costs[op as usize], &mut next);
    }
    let mut places = vec![NONE; problem.len()];
    let mut place = 0;
    for segment in merged.segments.values() {
        let mut op = segment.first;
        loop {
            places[op as usize] = place;
            place += 1;
            if op == segment.last {
                break;
            }
            op = next[op as usize];
        }
    }
    // What several updates share runs right before the first of them.
    for op in (0..problem.len() as Op).rev().filter(|&op| updates.of[op as usize] == SHARED) {
        let first = problem.successors.row(op).iter().map(|&next| places[next as usize]).min();
        places[op as usize] = first.unwrap_or(NONE);
    }
    Ok(by_place(problem, |op| (places[op as usize], updates.of[op as usize] != SHARED)))
}

/// Operators that run one right after another.
#[derive(Clone, Copy, Debug)]
struct Segment {
    /// The most bytes that are live meanwhile, above those before.
    hill: i64,
    /// Bytes live after it, above those before: the valley.
    change: i64,
    first: Op,
    last: Op,
}

impl Segment {
    /// Among segments that may run in any order, those with the smaller rank go first: first those
    /// that free bytes, by ascending hill; then those that add bytes, by descending height of the
    /// hill above the valley.
    fn rank(&self) -> (bool, i64) {
        if self.change <= 0 { (false, self.hill) } else { (true, self.change - self.hill) }
    }

    fn then(self, after: Segment) -> Segment {
        Segment {
            hill: self.hill.max(self.change + after.hill),
            change: self.change + after.change,
            first: self.first,
            last: after.last,
        }
    }
}

/// Segments in their order of running, which is that of their ranks.
#[derive(Default)]
struct Chain {
    /// The segments by rank; among equal ranks, the one that was put in last comes first.
    segments: BTreeMap<((bool, i64), Reverse<usize>), Segment>,
    inserted: usize,
}

impl Chain {
    fn insert(&mut self, segment: Segment) {
        self.inserted += 1;
        self.segments.insert((segment.rank(), Reverse(self.inserted)), segment);
    }

    /// Puts the operator before all others. Segments whose rank would put them before it are joined
    /// to it.
    fn prepend(&mut self, mut segment: Segment, next: &mut [Op]) {
        while let Some(entry) = self.segments.first_entry() {
            if segment.rank() <= entry.key().0 {
                break;
            }
            let after = entry.remove();
            next[segment.last as usize] = after.first;
            segment = segment.then(after);
        }
        self.insert(segment);
    }

    fn merge(&mut self, other: Chain) {
        for segment in other.segments.into_values().rev() {
            self.insert(segment);
        }
    }
}

/// Per operator its segment: what it adds while it runs, and what it leaves, in the order given and
/// with reuse.
fn costs(problem: &Problem, order: &[Op]) -> Vec<Segment> {
    let profile = Profile::new(problem, order);
    let own = |op: Op| Segment { hill: problem.transient(op) as i64, change: 0, first: op, last: op };
    let mut costs: Vec<Segment> = (0..problem.len() as Op).map(own).collect();
    for (item, &end) in problem.tensors.iter().zip(&profile.lifetimes.end) {
        if item.creator != NONE {
            costs[item.creator as usize].change += item.size as i64;
        }
        if item.residency != Residency::Leaves {
            if let Some(&last) = (end as usize).checked_sub(1).and_then(|step| order.get(step)) {
                costs[last as usize].change -= item.size as i64;
            }
        }
    }
    for &(input, output) in &profile.pairs {
        costs[problem.tensors[output.index()].creator as usize].hill -= problem.size(input) as i64;
    }
    costs
}
