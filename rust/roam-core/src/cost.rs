//! The cost model: how long an operator takes.
//!
//! An operator takes as long as moving its bytes or computing its floating-point operations takes,
//! whichever is longer, plus the time to launch it. Bytes moved are those of the tensors that it
//! reads and of those that it writes; what it mutates counts twice. An operator that writes nothing
//! (a view, arithmetic on the host) takes no time. Operators that run at once do not slow each
//! other. The constants are those of a data-centre GPU (NVIDIA A100: 1555 GB/s, 19.5 TFLOP/s in
//! 32-bit floats); they decide which plan is called faster, not whether a plan is right.

use crate::graph::{Graph, OperatorId, TensorId};
use std::collections::BTreeSet;

/// Memory bandwidth, in bytes per nanosecond.
pub const BYTES_PER_NS: u64 = 1555;
/// Arithmetic throughput, in floating-point operations per nanosecond.
pub const FLOPS_PER_NS: u64 = 19_500;
/// From one kernel to the next on one stream, in nanoseconds.
pub const LAUNCH_NS: u64 = 2000;
/// What one wait for another stream costs the operator that waits, in nanoseconds.
pub const SYNC_NS: u64 = 1000;
/// No time is longer, so that every time fits a signed 64-bit number.
pub const MAX_NS: u64 = i64::MAX as u64;

/// Nanoseconds that an operator takes: as measured, or else by the model, rounded up.
pub fn operator_ns(graph: &Graph, id: OperatorId) -> u64 {
    run_ns(graph, id, &[])
}

/// Nanoseconds that a further run of an operator takes, which leaves alone what only the first
/// touches.
pub fn rerun_ns(graph: &Graph, id: OperatorId) -> u64 {
    run_ns(graph, id, &graph.operator(id).first_only)
}

fn run_ns(graph: &Graph, id: OperatorId, left_alone: &[TensorId]) -> u64 {
    let operator = graph.operator(id);
    if operator.creates.is_empty() && operator.mutates.is_empty() {
        return 0;
    }
    if operator.time_ns > 0 {
        return operator.time_ns;
    }
    let left_alone: BTreeSet<_> = left_alone.iter().collect();
    // A tensor that is mutated may be listed as read or not; it counts the same.
    let mutated: BTreeSet<_> = operator.mutates.iter().filter(|tensor| !left_alone.contains(*tensor)).collect();
    let read = operator.reads.iter().filter(|tensor| !mutated.contains(tensor) && !left_alone.contains(tensor));
    let touched = read.chain(&operator.creates).chain(mutated.iter().copied()).chain(mutated.iter().copied());
    let bytes: u128 = touched.map(|tensor| u128::from(graph.tensor(*tensor).size_bytes)).sum();
    let moving = u64::try_from(bytes.div_ceil(u128::from(BYTES_PER_NS))).unwrap_or(MAX_NS);
    after(moving.max(operator.flops.div_ceil(FLOPS_PER_NS)), LAUNCH_NS)
}

/// The sum of two times, at most [`MAX_NS`].
pub fn after(ns: u64, more_ns: u64) -> u64 {
    ns.saturating_add(more_ns).min(MAX_NS)
}

/// Nanoseconds of all operators one after another.
pub fn serial_ns(graph: &Graph) -> u64 {
    graph.program_order().iter().fold(0, |sum, &id| after(sum, operator_ns(graph, id)))
}

/// Nanoseconds of all runs of a sequence beyond the first of each operator.
pub fn extra_ns(graph: &Graph, sequence: &[OperatorId]) -> u64 {
    let mut has_run = vec![false; graph.operators().len()];
    sequence.iter().fold(0, |sum, &id| match std::mem::replace(&mut has_run[id.index()], true) {
        true => after(sum, rerun_ns(graph, id)),
        false => sum,
    })
}

/// Nanoseconds of the longest chain of operators that must wait for each other: no number of
/// streams is faster.
pub fn critical_path_ns(graph: &Graph) -> u64 {
    let mut end = vec![0u64; graph.operators().len()];
    for &id in graph.program_order() {
        let ready = graph.predecessors(id).iter().map(|before| end[before.index()]).max().unwrap_or(0);
        end[id.index()] = after(ready, operator_ns(graph, id));
    }
    end.into_iter().max().unwrap_or(0)
}
