//! List scheduling from the step's end backwards.
//!
//! Seen backwards, a tensor comes to life at its last use and dies at its creation. Of the
//! operators whose successors have all been placed, take the one before which the fewest bytes are
//! live; ties go to the one that needs the least while it runs, then to the later program position.

use crate::control::{STRIDE, Stop, Watch};
use crate::graph::Residency;
use crate::problem::{Index, Op, Problem};
use std::cmp::Reverse;
use std::collections::BTreeSet;

type Key = (i64, u64, Reverse<Op>);

pub(super) fn reversed(problem: &Problem, watch: &Watch) -> Result<Vec<Op>, Stop> {
    let mut waiting: Vec<u32> = (0..problem.len() as Op).map(|op| problem.successors.row(op).len() as u32).collect();
    // Leaving tensors are live from the start, seen backwards.
    let mut live: Vec<bool> = problem.tensors.iter().map(|item| item.residency == Residency::Leaves).collect();
    // What each operator would do now: change of the live bytes, bytes added while it runs.
    let mut effect: Vec<(i64, u64)> = (0..problem.len() as Op)
        .map(|op| {
            let (mut delta, mut added) = (0i64, problem.workspace[op as usize]);
            for &tensor in problem.uses.row(op) {
                if !live[tensor.index()] {
                    delta += problem.size(tensor) as i64;
                    added += problem.size(tensor);
                }
            }
            for &tensor in problem.creates.row(op) {
                // A tensor with users is live before its creator's turn comes, seen backwards.
                if live[tensor.index()] || !problem.users.row(tensor).is_empty() {
                    delta -= problem.size(tensor) as i64;
                } else {
                    added += problem.size(tensor);
                }
            }
            (delta, added)
        })
        .collect();
    let key = |op: Op, effect: &[(i64, u64)]| -> Key {
        let (delta, added) = effect[op as usize];
        (delta, added, Reverse(op))
    };
    let mut ready: BTreeSet<Key> =
        (0..problem.len() as Op).filter(|&op| waiting[op as usize] == 0).map(|op| key(op, &effect)).collect();
    let mut order = Vec::with_capacity(problem.len());
    while let Some((_, _, Reverse(op))) = ready.pop_first() {
        if order.len() % STRIDE == 0 {
            watch.check()?;
        }
        order.push(op);
        for &tensor in problem.uses.row(op) {
            if std::mem::replace(&mut live[tensor.index()], true) {
                continue;
            }
            // From here on the tensor costs its other users nothing.
            let size = problem.size(tensor);
            for &user in problem.users.row(tensor) {
                let was_ready = user != op && ready.remove(&key(user, &effect));
                let (delta, added) = &mut effect[user as usize];
                *delta -= size as i64;
                *added -= size;
                if was_ready {
                    ready.insert(key(user, &effect));
                }
            }
        }
        for &before in problem.predecessors.row(op) {
            waiting[before as usize] -= 1;
            if waiting[before as usize] == 0 {
                ready.insert(key(before, &effect));
            }
        }
    }
    order.reverse();
    Ok(order)
}
