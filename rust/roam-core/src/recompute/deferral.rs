//! The program's order with sums deferred. Where a loop reads a tensor part by part, its backward
//! pass makes from the gradient of each part a tensor as large as the whole, which is zero elsewhere,
//! and adds it to a sum. The sum and a term take twice as much as all gradients of parts together, so
//! these wait until the loop has ended and what it held is gone.

use super::model::MUCH_LARGER;
use crate::graph::{Graph, OperatorId, Residency, TensorId};

/// Sums of fewer terms are not those of a loop.
const LEAST_TERMS: u32 = 4;
/// Sums that are smaller than the limit divided by this matter little.
const LIMITS_SHARE: u64 = 32;

/// The program's order, except that operators that make large tensors from small ones, and
/// operators that only add to such tensors, wait until something else needs them. `None` where no
/// large sum of several terms waits.
pub(super) fn deferred_sums(graph: &Graph, limit_bytes: u64) -> Option<Vec<OperatorId>> {
    let order = graph.program_order();
    let bytes = |tensors: &[TensorId]| -> u64 {
        let local = tensors.iter().filter(|&&tensor| graph.tensor(tensor).residency == Residency::StepLocal);
        local.map(|&tensor| graph.counted_bytes(tensor)).sum()
    };
    let mut waits = vec![false; order.len()];
    let mut has_run = vec![false; order.len()];
    let mut deferred = Vec::with_capacity(order.len());
    let mut terms = vec![1; graph.tensors().len()];
    for &id in order {
        let operator = graph.operator(id);
        let made = bytes(&operator.creates);
        let is_made_of_little = made > 0 && bytes(&operator.reads).saturating_mul(MUCH_LARGER) <= made;
        let is_waiting = |&tensor: &TensorId| graph.creator(tensor).is_some_and(|creator| waits[creator.index()]);
        let is_sum =
            operator.creates.is_empty() && !operator.mutates.is_empty() && operator.mutates.iter().all(is_waiting);
        if is_made_of_little || is_sum {
            waits[id.index()] = true;
            operator.mutates.iter().for_each(|tensor| terms[tensor.index()] += 1);
        } else {
            run(graph, id, &mut has_run, &mut waits, &mut deferred);
        }
    }
    for &id in order {
        run(graph, id, &mut has_run, &mut waits, &mut deferred);
    }
    let is_large = |&id: &TensorId| graph.counted_bytes(id) >= limit_bytes / LIMITS_SHARE;
    let mut changed = order.iter().flat_map(|&id| &graph.operator(id).mutates);
    changed.any(|id| terms[id.index()] >= LEAST_TERMS && is_large(id)).then_some(deferred)
}

/// Runs the operator after what it waits for, all in the program's order.
fn run(graph: &Graph, id: OperatorId, has_run: &mut [bool], waits: &mut [bool], order: &mut Vec<OperatorId>) {
    let mut needed = Vec::new();
    let mut stack = vec![id];
    while let Some(id) = stack.pop() {
        if !std::mem::replace(&mut has_run[id.index()], true) {
            waits[id.index()] = false;
            needed.push(id);
            stack.extend(graph.predecessors(id));
        }
    }
    needed.sort_unstable_by_key(|&id| graph.operator(id).position);
    order.extend(needed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Tensor};

    /// A loop that makes so many parts, each of which is padded to the whole; the wholes are added
    /// up, the sum is used, and the rest of the step follows.
    fn loop_of(parts: u32, whole_bytes: u64) -> Graph {
        let mut builder = GraphBuilder::new("loop", "cpu", 64);
        let mut tensor = |size_bytes| {
            let residency = Residency::StepLocal;
            let tensor =
                Tensor { name: String::new(), size_bytes, kind: Kind::Temporary, residency, alignment_bytes: 0 };
            builder.tensor(tensor).unwrap()
        };
        let (mut state, saved, used) = (tensor(64), tensor(1024), tensor(64));
        let loop_tensors: Vec<[TensorId; 3]> =
            (0..parts).map(|_| [tensor(64), tensor(64), tensor(whole_bytes)]).collect();
        let mut run = |reads: Vec<TensorId>, creates: Vec<TensorId>, mutates: Vec<TensorId>| {
            let position = builder.num_operators() as u32;
            let operator = Operator { reads, creates, mutates, ..Operator::new("", position, Phase::Backward) };
            builder.operator(operator).unwrap();
        };
        run(vec![], vec![state, saved], vec![]);
        for &[next, part, whole] in &loop_tensors {
            run(vec![state, saved], vec![next, part], vec![]);
            run(vec![part], vec![whole], vec![]);
            if whole != loop_tensors[0][2] {
                run(vec![whole], vec![], vec![loop_tensors[0][2]]);
            }
            state = next;
        }
        run(vec![loop_tensors[0][2]], vec![used], vec![]);
        run(vec![state, used], vec![], vec![]);
        builder.build().unwrap()
    }

    fn positions(graph: &Graph, limit_bytes: u64) -> Option<Vec<u32>> {
        deferred_sums(graph, limit_bytes).map(|order| order.iter().map(|&id| graph.operator(id).position).collect())
    }

    #[test]
    fn sums_and_their_terms_wait_for_what_uses_the_sum() {
        // 1, 3, 6 and 9 make parts; 2, 4, 7 and 10 wholes; 5, 8 and 11 add them.
        let order = vec![0, 1, 3, 6, 9, 2, 4, 5, 7, 8, 10, 11, 12, 13];
        assert_eq!(positions(&loop_of(4, 1024), 4096), Some(order));
    }

    #[test]
    fn nothing_is_deferred_without_large_sums() {
        assert_eq!(positions(&loop_of(4, 128), 4096), None);
        assert_eq!(positions(&loop_of(3, 1024), 4096), None);
        assert_eq!(positions(&loop_of(4, 1024), 64 * 1024), None);
    }
}
