//! How long tensors live by a plan, and the most bytes that are live at once.

use crate::graph::{Graph, OperatorId, Residency, Site, TensorId};
use std::collections::BTreeMap;

/// The reuse pairs by output: whose memory it takes.
pub(super) type Pairs = BTreeMap<TensorId, TensorId>;

pub(super) fn site(graph: &Graph, id: OperatorId) -> Box<Site> {
    Site::of(graph.operator(id))
}

pub(super) fn name(graph: &Graph, id: TensorId) -> String {
    graph.tensor(id).name.clone()
}

pub(super) fn tensors(graph: &Graph) -> impl Iterator<Item = TensorId> {
    (0..graph.tensors().len() as u32).map(TensorId)
}

/// Creation and last use of every tensor, by steps at which one operator runs or, in the time-step
/// model, several.
pub(super) struct Lives {
    /// Per step an operator that runs there.
    pub(super) order: Vec<OperatorId>,
    /// First step at which the tensor is live; `None` where it never is (persistent tensors).
    pub(super) first: Vec<Option<usize>>,
    /// Last step at which it is live.
    pub(super) last: Vec<usize>,
    /// Per step the workspace of what runs there.
    pub(super) workspace: Vec<u64>,
}

impl Lives {
    /// `step` is the step of every operator, by id; every step up to the last has one.
    pub(super) fn new(graph: &Graph, step: &[usize]) -> Self {
        let steps = step.iter().map(|&at| at + 1).max().unwrap_or(0);
        let mut order = vec![OperatorId(0); steps];
        let mut workspace = vec![0; steps];
        for (index, &at) in step.iter().enumerate() {
            let id = OperatorId(index as u32);
            order[at] = id;
            workspace[at] += graph.workspace_bytes(id);
        }
        let count = graph.tensors().len();
        let mut lives = Lives { order, first: vec![None; count], last: vec![0; count], workspace };
        let Some(end) = steps.checked_sub(1) else { return lives };
        for tensor in tensors(graph) {
            match graph.tensor(tensor).residency {
                Residency::Enters => lives.first[tensor.index()] = Some(0),
                Residency::Leaves => lives.last[tensor.index()] = end,
                Residency::StepLocal | Residency::Unpooled | Residency::Persistent => {}
            }
        }
        for (operator, &at) in graph.operators().iter().zip(step) {
            for tensor in &operator.creates {
                lives.first[tensor.index()] = Some(at);
            }
            for tensor in operator.creates.iter().chain(&operator.reads).chain(&operator.mutates) {
                let last = &mut lives.last[tensor.index()];
                *last = at.max(*last);
            }
        }
        lives
    }

    pub(super) fn peaks(&self, graph: &Graph, pairs: &Pairs) -> Peaks {
        // (came, went) per step, in the pool and beside it.
        let mut pool = vec![(0u64, 0u64); self.order.len() + 1];
        let mut beside = pool.clone();
        for id in tensors(graph) {
            let Some(first) = self.first[id.index()] else { continue };
            let changes = if graph.tensor(id).residency == Residency::StepLocal { &mut pool } else { &mut beside };
            let size = graph.counted_bytes(id);
            changes[first].0 += size;
            changes[self.last[id.index()] + 1].1 += size;
        }
        // Bytes that reuse saves per step, in the pool and beside it.
        let mut saved = vec![(0u64, 0u64); self.order.len()];
        for (&output, &input) in pairs {
            let saved = &mut saved[self.last[input.index()]];
            let is_pooled = graph.tensor(output).residency == Residency::StepLocal;
            *if is_pooled { &mut saved.0 } else { &mut saved.1 } += graph.counted_bytes(output);
        }
        let (mut in_pool, mut unpooled) = (0, 0);
        let mut peaks = Peaks::default();
        for at in 0..self.order.len() {
            in_pool = in_pool + pool[at].0 - pool[at].1;
            unpooled = unpooled + beside[at].0 - beside[at].1;
            let pool_now = in_pool - saved[at].0;
            let unpooled_now = unpooled - saved[at].1 + self.workspace[at];
            peaks.pool = pool_now.max(peaks.pool);
            peaks.unpooled = unpooled_now.max(peaks.unpooled);
            peaks.whole = (pool_now + unpooled_now).max(peaks.whole);
        }
        peaks
    }
}

/// Most live bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peaks {
    pub(super) whole: u64,
    pub(super) pool: u64,
    /// Of what is not in the pool.
    pub(super) unpooled: u64,
}
