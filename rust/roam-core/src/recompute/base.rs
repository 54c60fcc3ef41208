//! Orders that the search starts from: without recomputation the place of an update matters little,
//! with it much.

use super::model::MUCH_LARGER;
use crate::graph::{Graph, Operator, OperatorId, Phase, Residency, Sequence, TensorId};

/// The order with operators that only change a tensor, such as a weight's decay, right before they
/// are needed: what reads the weight can run again until then, and a gradient is scaled right before
/// its update, so that it need not be made again for each of the two. With `early_updates`, what
/// else the optimizer does runs as soon as it can, so that gradients do not wait.
pub(super) fn base_order(graph: &Graph, order: &[OperatorId], early_updates: bool) -> Vec<OperatorId> {
    let mut base =
        Base { graph, early_updates, has_run: vec![false; order.len()], order: Vec::with_capacity(order.len()) };
    if early_updates {
        // Arithmetic on numbers, such as rates, keeps no update waiting.
        for &id in order {
            let Operator { reads, creates, mutates, .. } = graph.operator(id);
            if reads.is_empty() && creates.is_empty() && mutates.is_empty() && base.is_ready(id) {
                base.run(id);
            }
        }
    }
    let (last, first): (Vec<OperatorId>, Vec<OperatorId>) = order.iter().partition(|&&id| base.can_wait(id));
    first.into_iter().chain(last).for_each(|id| base.run(id));
    base.order
}

struct Base<'a> {
    graph: &'a Graph,
    early_updates: bool,
    has_run: Vec<bool>,
    order: Vec<OperatorId>,
}

impl Base<'_> {
    /// Whether the operator makes nothing, and changes something by means of persistent or of much
    /// smaller tensors.
    fn can_wait(&self, id: OperatorId) -> bool {
        let Operator { reads, creates, mutates, .. } = self.graph.operator(id);
        let bytes = |tensors: &[TensorId], without: &[TensorId]| -> u64 {
            let counted = |tensor: &&TensorId| {
                self.graph.tensor(**tensor).residency != Residency::Persistent && !without.contains(tensor)
            };
            tensors.iter().filter(counted).map(|&tensor| self.graph.counted_bytes(tensor)).sum()
        };
        creates.is_empty() && !mutates.is_empty() && bytes(reads, mutates) * MUCH_LARGER <= bytes(mutates, &[])
    }

    /// Runs the operator after all that it waits for, and then the updates that waited for it.
    fn run(&mut self, id: OperatorId) {
        let mut stack = vec![id];
        while let Some(&id) = stack.last() {
            let waiting = stack.len();
            if !self.has_run[id.index()] {
                let before = self.graph.predecessors(id).iter().rev();
                stack.extend(before.filter(|before| !self.has_run[before.index()]));
            }
            if stack.len() > waiting {
                continue;
            }
            stack.pop();
            if !std::mem::replace(&mut self.has_run[id.index()], true) {
                self.order.push(id);
                stack.extend(self.wait_for(id));
                if self.early_updates {
                    self.push_ready(id, &mut stack);
                }
            }
        }
    }

    /// The operator that waits for a collective that may run again: it is the next to change what
    /// the collective makes or changes. It comes right after the collective, because nothing can be
    /// dropped and made again between the two.
    fn wait_for(&self, id: OperatorId) -> Option<OperatorId> {
        let launch = self.graph.operator(id);
        let is_wait = |after: &&OperatorId| {
            let changes = &self.graph.operator(**after).mutates;
            let mut before = self.graph.predecessors(**after).iter();
            !self.has_run[after.index()]
                && changes.iter().any(|tensor| launch.mutates.contains(tensor) || launch.creates.contains(tensor))
                && before.all(|&before| self.has_run[before.index()])
        };
        let may_run_again = launch.repeatable && launch.sequence == Some(Sequence::Collective);
        self.graph.successors(id).iter().filter(|_| may_run_again).find(is_wait).copied()
    }

    /// Pushes the updates that only operators that can wait keep from running, the first on top.
    fn push_ready(&self, id: OperatorId, stack: &mut Vec<OperatorId>) {
        for &after in self.graph.successors(id).iter().rev() {
            if self.has_run[after.index()] {
                continue;
            }
            if self.can_wait(after) {
                self.push_ready(after, stack);
            } else if self.graph.operator(after).phase == Phase::Update && self.is_ready(after) {
                stack.push(after);
            }
        }
    }

    fn is_ready(&self, id: OperatorId) -> bool {
        let mut before = self.graph.predecessors(id).iter();
        before.all(|&before| self.has_run[before.index()] || (self.can_wait(before) && self.is_ready(before)))
    }
}
