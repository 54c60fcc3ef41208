//! Inductor's `topological_sort_dfs`: every operator runs as late as its turn or a successor's need
//! allows. Turns, and predecessors that are fetched first, go by ascending bytes that an operator
//! reads or creates (persistent tensors, which Inductor cannot free either, do not count); ties go
//! to the earlier program position.

use super::ready::created_bytes;
use crate::problem::{Op, Problem};

pub(super) fn order(problem: &Problem) -> Vec<Op> {
    let touched =
        |op: Op| created_bytes(problem, op) + problem.uses.row(op).iter().map(|&t| problem.size(t)).sum::<u64>();
    let key: Vec<(u64, Op)> = (0..problem.len() as Op).map(|op| (touched(op), op)).collect();
    let by_turn = |ops: &[Op]| {
        let mut ops = ops.to_vec();
        ops.sort_unstable_by_key(|&op| key[op as usize]);
        ops.into_iter()
    };
    let mut seen = vec![false; problem.len()];
    let mut order = Vec::with_capacity(problem.len());
    // Operators under way, each with the predecessors that it has yet to fetch.
    let mut stack = Vec::new();
    for root in by_turn(&problem.program_order()) {
        if !std::mem::replace(&mut seen[root as usize], true) {
            stack.push((root, by_turn(problem.predecessors.row(root))));
        }
        while let Some((op, before)) = stack.last_mut() {
            match before.next() {
                Some(next) if !std::mem::replace(&mut seen[next as usize], true) => {
                    stack.push((next, by_turn(problem.predecessors.row(next))));
                }
                Some(_) => {}
                None => {
                    order.push(*op);
                    stack.pop();
                }
            }
        }
    }
    order
}
