//! The unpooled bytes of a plan for several streams: an upper bound for every timing
//! (docs/explanation/streams.md).

use super::happens_before::{Ends, Knowledge, is_past};
use super::lives::tensors;
use crate::graph::{Graph, OperatorId, Residency, TensorId};
use crate::plan::Plan;
use std::collections::BTreeMap;

/// Bytes that what is not in the pool never exceeds. A stream is in state 2i + 1 while its operator
/// i runs and in state 2i + 2 from its completion to the next start. Every tensor and workspace is
/// charged to one stream, from the state in which it begins to the first in which it is dead
/// whatever the other streams do. Two streams can be in two states at once unless one has started
/// what waits for something that the other has not completed.
pub(super) fn bytes(graph: &Graph, plan: &Plan, knowledge: &Knowledge, ends: &Ends) -> u64 {
    if plan.order.is_empty() {
        return 0;
    }
    let mut launch = vec![0; plan.order.len()];
    for (at, id) in plan.order.iter().enumerate() {
        launch[id.index()] = at;
    }
    let running = |id: OperatorId| 2 * knowledge.lane[id.index()].1 as usize + 1;
    let mut creator: BTreeMap<TensorId, OperatorId> = BTreeMap::new();
    for (operator, index) in graph.operators().iter().zip(0..) {
        creator.extend(operator.creates.iter().map(|&tensor| (tensor, OperatorId(index))));
    }
    // (came, went) per stream and state.
    let mut changes: Vec<Vec<(u64, u64)>> =
        knowledge.lanes.iter().map(|lane| vec![(0, 0); 2 * lane.len() + 2]).collect();
    for tensor in tensors(graph) {
        let residency = graph.tensor(tensor).residency;
        let last_use = || {
            let last =
                |stream: usize| ends.of(tensor)[stream].checked_sub(1).map(|at| knowledge.lanes[stream][at as usize]);
            (0..knowledge.streams).filter_map(last).max_by_key(|id| launch[id.index()])
        };
        let (begin, stream) = match residency {
            Residency::StepLocal | Residency::Persistent => continue,
            Residency::Enters => (0, last_use().map(|id| knowledge.lane[id.index()].0)),
            Residency::Unpooled | Residency::Leaves => {
                let by = creator.get(&tensor).copied();
                (by.map_or(0, running), by.map(|id| knowledge.lane[id.index()].0))
            }
        };
        let stream = stream.unwrap_or(0);
        let lane = &knowledge.lanes[stream];
        let gone = if residency == Residency::Leaves {
            2 * lane.len() + 1
        } else {
            // Dead at an operator's start, or at the completion of the one before if that was all
            // that was missing.
            let at = lane.partition_point(|&id| !is_past(knowledge.at(id), ends.of(tensor)));
            let at_completion = at.checked_sub(1).is_some_and(|before| {
                let mut known = knowledge.at(lane[before]).to_vec();
                known[stream] = at as u32;
                is_past(&known, ends.of(tensor))
            });
            2 * at + usize::from(!at_completion)
        };
        changes[stream][begin].0 += graph.counted_bytes(tensor);
        changes[stream][gone].1 += graph.counted_bytes(tensor);
    }
    for &id in &plan.order {
        let changes = &mut changes[knowledge.lane[id.index()].0];
        changes[running(id)].0 += graph.workspace_bytes(id);
        changes[running(id) + 1].1 += graph.workspace_bytes(id);
    }
    let held: Vec<Vec<u64>> = changes
        .iter()
        .map(|changes| {
            let sums = changes.iter().scan(0u64, |sum, &(came, went)| {
                *sum = *sum + came - went;
                Some(*sum)
            });
            sums.take(changes.len() - 1).collect()
        })
        .collect();
    let with_anchor = |anchor: usize| {
        let states = 0..held[anchor].len();
        let mut sums = held[anchor].clone();
        for other in (0..knowledge.streams).filter(|&other| other != anchor) {
            let most = Ranges::new(&held[other]);
            for state in states.clone() {
                let (from, to) = knowledge.beside(anchor, state, other);
                sums[state] += most.over(from, to);
            }
        }
        sums.into_iter().max().unwrap_or(0)
    };
    (0..knowledge.streams).map(with_anchor).min().unwrap_or(0)
}

impl Knowledge {
    /// The states, from the first to the last, in which the other stream may be while the anchor is
    /// in one.
    fn beside(&self, anchor: usize, state: usize, other: usize) -> (usize, usize) {
        let (mine, theirs) = (&self.lanes[anchor], &self.lanes[other]);
        let (started, completed) = (state.div_ceil(2), state / 2);
        let first = if started == 0 { 0 } else { 2 * self.at(mine[started - 1])[other] as usize };
        let can_start = theirs.partition_point(|&id| self.at(id)[anchor] as usize <= completed);
        (first, 2 * can_start)
    }
}

/// The most over any range of a list, from the most over ranges of every power of two (a sparse
/// table).
struct Ranges(Vec<Vec<u64>>);

impl Ranges {
    fn new(values: &[u64]) -> Self {
        let mut levels = vec![values.to_vec()];
        let mut width = 1;
        while 2 * width <= values.len() {
            let below = &levels[levels.len() - 1];
            let next = (0..=values.len() - 2 * width).map(|at| below[at].max(below[at + width])).collect();
            levels.push(next);
            width *= 2;
        }
        Ranges(levels)
    }

    /// From the first place to the last one, both included.
    fn over(&self, first: usize, last: usize) -> u64 {
        let level = (last + 1 - first).ilog2() as usize;
        self.0[level][first].max(self.0[level][last + 1 - (1 << level)])
    }
}
