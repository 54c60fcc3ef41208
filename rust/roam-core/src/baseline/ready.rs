//! What the orders of Inductor have in common.

use crate::problem::{Op, Problem};

/// Bytes that an operator creates; workspace is not among them.
pub(super) fn created_bytes(problem: &Problem, op: Op) -> u64 {
    problem.creates.row(op).iter().map(|&tensor| problem.size(tensor)).sum()
}

/// Predecessors yet to run, per operator.
pub(super) fn waiting(problem: &Problem) -> Vec<u32> {
    (0..problem.len() as Op).map(|op| problem.predecessors.row(op).len() as u32).collect()
}
