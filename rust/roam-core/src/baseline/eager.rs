//! What eager PyTorch reserves on CUDA when it runs a step in a given order, by the
//! [`caching_allocator`] alone.
//!
//! [`caching_allocator`]: super::caching_allocator

use super::caching_allocator::{CachingAllocator, Event, Segments, TraceError};
use crate::liveness::Profile;
use crate::problem::{Index, NONE, Op, Problem, Ten};

/// How often the step is repeated at most. It is repeated because a training loop keeps its cache
/// from step to step.
const MOST_REPEATS: usize = 3;

/// Most bytes reserved for all that is not persistent, workspace included. The step is repeated
/// until it reserves no more.
///
/// Persistent tensors are left out, and with them the spare room in their segments: it is neither
/// counted nor used.
pub(super) fn reserved_bytes(
    problem: &Problem,
    order: &[Op],
    profile: &Profile,
    segments: Segments,
) -> Result<u64, TraceError> {
    let events = events(problem, order, profile);
    let mut allocator = CachingAllocator::new(segments);
    let mut reserved = 0;
    for _ in 0..MOST_REPEATS {
        for &event in &events {
            allocator.apply(event)?;
        }
        if allocator.reserved_bytes() == reserved {
            break;
        }
        reserved = allocator.reserved_bytes();
    }
    Ok(reserved)
}

/// The step's allocations and frees: what enters comes first; an operator's outputs come before its
/// workspace; when it has run, first its workspace goes and then what it was the last to use. An
/// output that takes an input's memory asks for none.
fn events(problem: &Problem, order: &[Op], profile: &Profile) -> Vec<Event> {
    let tensors = problem.tensor_ranks();
    let mut holder: Vec<Ten> = tensors.clone().collect();
    let mut passed_on = vec![false; holder.len()];
    for &(input, output) in &profile.pairs {
        holder[output.index()] = holder[input.index()];
        passed_on[input.index()] = true;
    }
    let mut dying: Vec<Vec<Ten>> = vec![Vec::new(); order.len()];
    for tensor in tensors.clone().filter(|&tensor| !passed_on[tensor.index()]) {
        if let Some(last) = profile.lifetimes.end[tensor.index()].checked_sub(1) {
            dying[last as usize].push(holder[tensor.index()]);
        }
    }
    let alloc = |tensor: Ten| Event::Alloc { id: tensor.index() as u64, size_bytes: problem.size(tensor) };
    let is_own = |tensor: &Ten| holder[tensor.index()] == *tensor;
    let workspace_id = problem.tensors.len() as u64;
    let mut events = Vec::with_capacity(2 * (problem.tensors.len() + order.len()));
    if !order.is_empty() {
        events.extend(tensors.filter(|&tensor| problem.tensors[tensor.index()].creator == NONE).map(alloc));
    }
    for (&op, dying) in order.iter().zip(&dying) {
        events.extend(problem.creates.row(op).iter().copied().filter(is_own).map(alloc));
        let size_bytes = problem.workspace[op as usize];
        if size_bytes > 0 {
            events.push(Event::Alloc { id: workspace_id, size_bytes });
            events.push(Event::Free { id: workspace_id });
        }
        events.extend(dying.iter().map(|&holder| Event::Free { id: holder.index() as u64 }));
    }
    events
}
