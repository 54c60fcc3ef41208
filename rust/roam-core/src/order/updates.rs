//! Earliest-possible weight updates.

use super::STRIDE;
use crate::control::{Stop, Watch};
use crate::problem::{Op, Problem};

/// Program order, except that an operator of the update phase runs as soon as it can, and the
/// updates that it makes possible right after it: each gradient is used up when it is ready.
pub(super) fn eager_updates(problem: &Problem, watch: &Watch) -> Result<Vec<Op>, Stop> {
    let mut waiting: Vec<u32> = (0..problem.len() as Op).map(|op| problem.predecessors.row(op).len() as u32).collect();
    let mut order = Vec::with_capacity(problem.len());
    // Updates that can run now; the last one in is the first out, so that a chain runs to its end.
    let mut ready: Vec<Op> = Vec::new();
    let run = |op: Op, order: &mut Vec<Op>, waiting: &mut Vec<u32>, ready: &mut Vec<Op>| {
        order.push(op);
        for &after in problem.successors.row(op).iter().rev() {
            waiting[after as usize] -= 1;
            if waiting[after as usize] == 0 && problem.is_update[after as usize] {
                ready.push(after);
            }
        }
    };
    let mut no_inputs: Vec<Op> =
        (0..problem.len() as Op).filter(|&op| waiting[op as usize] == 0 && problem.is_update[op as usize]).collect();
    no_inputs.reverse();
    for op in 0..problem.len() as Op {
        if op as usize % STRIDE == 0 {
            watch.check()?;
        }
        if problem.is_update[op as usize] {
            // Updates that wait for nothing keep their place.
            if no_inputs.last() == Some(&op) {
                no_inputs.pop();
                run(op, &mut order, &mut waiting, &mut ready);
            }
        } else {
            run(op, &mut order, &mut waiting, &mut ready);
        }
        while let Some(update) = ready.pop() {
            run(update, &mut order, &mut waiting, &mut ready);
        }
    }
    Ok(order)
}
