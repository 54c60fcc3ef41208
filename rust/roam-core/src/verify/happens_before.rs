//! What has completed when an operator starts, by the order of each stream and the waits between
//! them.

use super::lives::tensors;
use crate::graph::{Graph, OperatorId, Residency, TensorId};
use crate::plan::{Plan, Schedule};

/// What has completed when an operator starts: per stream how many of its operators.
pub(super) struct Knowledge {
    pub(super) streams: usize,
    /// Per operator its stream, and how many of that stream come before it.
    pub(super) lane: Vec<(usize, u32)>,
    /// Per operator and stream.
    known: Vec<u32>,
    /// The operators of each stream.
    pub(super) lanes: Vec<Vec<OperatorId>>,
}

impl Knowledge {
    pub(super) fn new(plan: &Plan, schedule: &Schedule, waits: &[Vec<OperatorId>]) -> Self {
        let streams = plan.settings.streams as usize;
        let mut lanes: Vec<Vec<OperatorId>> = vec![Vec::new(); streams];
        let mut lane = vec![(0, 0); plan.order.len()];
        let mut known = vec![0u32; plan.order.len() * streams];
        for &id in &plan.order {
            let stream = schedule.streams[id.index()] as usize;
            lane[id.index()] = (stream, lanes[stream].len() as u32);
            // What is waited for was launched before, so its own knowledge is complete.
            for &before in waits[id.index()].iter().chain(lanes[stream].last()) {
                let (of, place) = lane[before.index()];
                for other in 0..streams {
                    let through = known[before.index() * streams + other].max(if other == of { place + 1 } else { 0 });
                    let own = &mut known[id.index() * streams + other];
                    *own = through.max(*own);
                }
            }
            lanes[stream].push(id);
        }
        Knowledge { streams, lane, known, lanes }
    }

    /// When the operator starts.
    pub(super) fn at(&self, id: OperatorId) -> &[u32] {
        &self.known[id.index() * self.streams..(id.index() + 1) * self.streams]
    }

    pub(super) fn runs_before(&self, first: OperatorId, second: OperatorId) -> bool {
        let (stream, place) = self.lane[first.index()];
        self.at(second)[stream] > place
    }
}

/// Per tensor and stream: how many of the stream's operators must have completed for the tensor to
/// be dead.
pub(super) struct Ends {
    streams: usize,
    needs: Vec<u32>,
}

impl Ends {
    pub(super) fn new(graph: &Graph, plan: &Plan, knowledge: &Knowledge) -> Self {
        let streams = knowledge.streams;
        let mut ends = Ends { streams, needs: vec![0; graph.tensors().len() * streams] };
        let mut require = |tensor: TensorId, id: OperatorId| {
            let (stream, place) = knowledge.lane[id.index()];
            let need = &mut ends.needs[tensor.index() * streams + stream];
            *need = (place + 1).max(*need);
        };
        for (operator, index) in graph.operators().iter().zip(0..) {
            for &tensor in operator.creates.iter().chain(&operator.reads).chain(&operator.mutates) {
                require(tensor, OperatorId(index));
            }
        }
        // What enters and is never used is gone once the first operator has completed.
        for tensor in tensors(graph).filter(|&tensor| graph.tensor(tensor).residency == Residency::Enters) {
            if ends.of(tensor).iter().all(|&need| need == 0) {
                if let Some(&first) = plan.order.first() {
                    let (stream, _) = knowledge.lane[first.index()];
                    ends.needs[tensor.index() * streams + stream] = 1;
                }
            }
        }
        ends
    }

    pub(super) fn of(&self, tensor: TensorId) -> &[u32] {
        &self.needs[tensor.index() * self.streams..(tensor.index() + 1) * self.streams]
    }
}

pub(super) fn is_past(known: &[u32], needs: &[u32]) -> bool {
    known.iter().zip(needs).all(|(known, need)| known >= need)
}
