//! Segments of the forward pass, as checkpointing cuts it: what crosses a cut is held until the
//! backward pass of the segment behind it has ended, so that every other tensor of the segment can
//! be made again from it.
//!
//! Cuts lie where few bytes cross them, which is between layers, or between the time steps of a
//! recurrent network.

use super::model::{Model, NONE};

/// Per tensor the place until which it is held where the forward pass is cut into `count` segments,
/// or 0. Without a forward pass nothing is held.
pub(super) fn holds(model: &Model, count: usize) -> Vec<u32> {
    let mut held_until = vec![0; model.size.len()];
    let forward: Vec<u32> = (0..model.len() as u32).filter(|&op| model.is_forward[op as usize]).collect();
    let cuts = cuts(model, &forward, count);
    let last_use = |&tensor: &u32| model.users.row(tensor).last().copied().unwrap_or(0);
    for (from, to) in cuts.iter().zip(cuts.iter().skip(1)) {
        let segment = &forward[*from..*to];
        let Some(&first) = segment.first() else { continue };
        let end = segment.iter().flat_map(|&op| model.creates.row(op)).map(last_use).max().unwrap_or(0);
        for used in segment.iter().flat_map(|&op| model.uses.row(op)) {
            let at = used.tensor as usize;
            if model.can_remake[at] && model.creator[at] < first {
                held_until[at] = end.max(held_until[at]);
            }
        }
    }
    held_until
}

/// Where segments begin among the forward operators, and the end of the last one: about each even
/// division the place that the fewest bytes cross.
fn cuts(model: &Model, forward: &[u32], count: usize) -> Vec<usize> {
    let index = |op: u32| forward.partition_point(|&other| other < op);
    let mut changes = vec![0i64; forward.len() + 1];
    for (tensor, &creator) in model.creator.iter().enumerate() {
        if creator == NONE || !model.is_forward[creator as usize] {
            continue;
        }
        let users = model.users.row(tensor as u32).iter().rev();
        if let Some(last) = users.copied().find(|&user| model.is_forward[user as usize]) {
            changes[index(creator) + 1] += model.size[tensor] as i64;
            changes[index(last) + 1] -= model.size[tensor] as i64;
        }
    }
    let mut now = 0;
    let crossing: Vec<i64> = changes
        .into_iter()
        .map(|change| {
            now += change;
            now
        })
        .collect();
    // Half a segment to each side of an even division.
    let division = |halves: usize| forward.len() * halves / (2 * count);
    let inner = (1..count).filter_map(|at| {
        let even = division(2 * at);
        (division(2 * at - 1)..division(2 * at + 1)).min_by_key(|&place| (crossing[place], place.abs_diff(even)))
    });
    std::iter::once(0).chain(inner).chain([forward.len()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Residency, Tensor, TensorId};

    /// Blocks of two operators each, of which the inner tensors are large; the backward pass reads
    /// all of them.
    fn blocks(count: u32) -> Model {
        let mut builder = GraphBuilder::new("blocks", "cpu", 64);
        let mut tensor = |size_bytes, residency| {
            let tensor =
                Tensor { name: String::new(), size_bytes, kind: Kind::Temporary, residency, alignment_bytes: 0 };
            builder.tensor(tensor).unwrap()
        };
        let mut now = tensor(64, Residency::Enters);
        let mut operators: Vec<(Phase, Vec<TensorId>, TensorId)> = Vec::new();
        for _ in 0..count {
            let (inner, out) = (tensor(640, Residency::StepLocal), tensor(64, Residency::StepLocal));
            operators.push((Phase::Forward, vec![now], inner));
            operators.push((Phase::Forward, vec![inner], out));
            now = out;
        }
        let mut gradient = tensor(64, Residency::StepLocal);
        operators.push((Phase::Loss, vec![now], gradient));
        for at in (0..2 * count as usize).rev() {
            let next = tensor(64, Residency::StepLocal);
            operators.push((Phase::Backward, vec![gradient, operators[at].1[0], operators[at].2], next));
            gradient = next;
        }
        let loss = tensor(64, Residency::Leaves);
        operators.push((Phase::Update, vec![gradient], loss));
        for (position, (phase, reads, made)) in operators.into_iter().enumerate() {
            let repeatable = phase != Phase::Update;
            let operator =
                Operator { reads, creates: vec![made], repeatable, ..Operator::new("", position as u32, phase) };
            builder.operator(operator).unwrap();
        }
        let graph = builder.build().unwrap();
        Model::new(&graph, graph.program_order())
    }

    #[test]
    fn what_crosses_cuts_between_blocks_is_held_until_the_backward_pass_of_the_block() {
        let model = blocks(6);
        let held = holds(&model, 3);
        let tensors: Vec<u32> = (0..held.len() as u32).filter(|&tensor| held[tensor as usize] > 0).collect();
        // The outputs of the second and of the fourth block: places 3 and 7.
        assert_eq!(tensors.iter().map(|&tensor| model.creator[tensor as usize]).collect::<Vec<_>>(), [3, 7]);
        assert!(tensors.iter().all(|&tensor| model.size[tensor as usize] == 64));
        // The backward operator of place p has the place 24 - p, and that of a segment's first
        // operator is the last to need what the segment makes.
        assert_eq!(tensors.iter().map(|&tensor| held[tensor as usize]).collect::<Vec<_>>(), [20, 16]);
    }

    #[test]
    fn more_segments_than_operators_are_no_harm() {
        for count in 1..40 {
            assert_eq!(holds(&blocks(3), count).len(), 15);
        }
    }
}
