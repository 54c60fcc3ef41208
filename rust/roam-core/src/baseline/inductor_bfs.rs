//! Inductor's `topological_sort_bfs`: first in, first out. Of the ready operators the one whose
//! predecessors ran earliest goes next: the ascending lists of their steps are compared like words;
//! ties go to the earlier program position.

use super::ready::waiting;
use crate::problem::{Op, Problem};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

pub(super) fn order(problem: &Problem) -> Vec<Op> {
    let mut waiting = waiting(problem);
    let mut step = vec![0u32; problem.len()];
    let mut ready: BinaryHeap<Reverse<(Vec<u32>, Op)>> =
        (0..problem.len() as Op).filter(|&op| waiting[op as usize] == 0).map(|op| Reverse((Vec::new(), op))).collect();
    let mut order = Vec::with_capacity(problem.len());
    while let Some(Reverse((_, op))) = ready.pop() {
        step[op as usize] = order.len() as u32;
        order.push(op);
        for &after in problem.successors.row(op) {
            waiting[after as usize] -= 1;
            if waiting[after as usize] == 0 {
                let mut steps: Vec<u32> =
                    problem.predecessors.row(after).iter().map(|&before| step[before as usize]).collect();
                steps.sort_unstable();
                ready.push(Reverse((steps, after)));
            }
        }
    }
    order
}
