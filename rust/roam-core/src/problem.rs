//! The graph as the planner's algorithms see it: operators are named by their program position,
//! tensors by a rank that depends only on positions and sizes, and tensors that never count
//! (persistent or empty ones, or those of another [`Part`]) are left out.
//!
//! Algorithms that work on a [`Problem`] cannot let ids or names reach a plan: permuting either
//! gives the same problem.

use crate::graph::{Graph, Phase, Residency, ReusePair};
use crate::ids::{OperatorId, TensorId};

/// An operator's program position.
pub(crate) type Op = u32;
/// A tensor's rank in the problem.
pub(crate) type Ten = u32;

/// Stands for "no operator".
pub(crate) const NONE: u32 = u32::MAX;

/// Lists of small integers, one list a row, in one allocation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    starts: Vec<u32>,
    items: Vec<u32>,
}

impl Rows {
    pub(crate) fn collect<I: IntoIterator<Item = u32>>(rows: impl Iterator<Item = I>) -> Self {
        let mut starts = vec![0];
        let mut items = Vec::new();
        for row in rows {
            items.extend(row);
            starts.push(items.len() as u32);
        }
        Rows { starts, items }
    }

    /// The rows turned round: row `v` of the result lists, ascending, the rows that hold `v`.
    fn transposed(&self, width: usize) -> Self {
        let mut starts = vec![0u32; width + 1];
        for &item in &self.items {
            starts[item as usize + 1] += 1;
        }
        for i in 0..width {
            starts[i + 1] += starts[i];
        }
        let mut next = starts.clone();
        let mut items = vec![0; self.items.len()];
        for row in 0..self.starts.len() - 1 {
            for &item in self.row(row as u32) {
                items[next[item as usize] as usize] = row as u32;
                next[item as usize] += 1;
            }
        }
        Rows { starts, items }
    }

    #[inline]
    pub(crate) fn row(&self, index: u32) -> &[u32] {
        &self.items[self.starts[index as usize] as usize..self.starts[index as usize + 1] as usize]
    }
}

/// A tensor that counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    /// Bytes as counted, never 0.
    pub(crate) size: u64,
    /// What its offset must be a multiple of.
    pub(crate) alignment: u64,
    /// Who makes it, [`NONE`] where it enters the step.
    pub(crate) creator: Op,
    /// Never persistent.
    pub(crate) residency: Residency,
}

impl Item {
    pub(crate) fn in_pool(&self) -> bool {
        self.residency == Residency::StepLocal
    }
}

/// Per operator its step in the order.
pub(crate) fn step_by_operator(order: &[Op]) -> Vec<u32> {
    let mut steps = vec![0; order.len()];
    for (at, &op) in order.iter().enumerate() {
        steps[op as usize] = at as u32;
    }
    steps
}

/// What a problem counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Every tensor that is not persistent, and workspace.
    Whole,
    /// Step-local tensors, which the pool holds.
    Pool,
    /// All others: unpooled tensors, those that enter or leave the step, and workspace.
    Outside,
}

impl Part {
    fn counts(self, residency: Residency) -> bool {
        match residency {
            Residency::StepLocal => self != Part::Outside,
            Residency::Unpooled | Residency::Enters | Residency::Leaves => self != Part::Pool,
            Residency::Persistent => false,
        }
    }
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    /// Every ordering constraint.
    pub(crate) predecessors: Rows,
    /// The same, turned round.
    pub(crate) successors: Rows,
    /// Counted workspace per operator.
    pub(crate) workspace: Vec<u64>,
    /// Whether the operator belongs to the update phase.
    pub(crate) is_update: Vec<bool>,
    pub(crate) tensors: Vec<Item>,
    /// Per tensor the operators that read or mutate it, ascending.
    pub(crate) users: Rows,
    /// Per operator the tensors that it reads or mutates.
    pub(crate) uses: Rows,
    /// Per operator the tensors that it makes.
    pub(crate) creates: Rows,
    /// Permissions (operator, input, output), sorted. Empty where reuse is off.
    pub(crate) reuse: Vec<(Op, Ten, Ten)>,
    tensor_ids: Vec<TensorId>,
    operator_ids: Vec<OperatorId>,
}

impl Problem {
    pub(crate) fn new(graph: &Graph, reuse: bool) -> Self {
        Self::of(graph, Part::Whole, reuse)
    }

    /// The problem in which nothing but the given part has a size.
    pub(crate) fn of(graph: &Graph, part: Part, reuse: bool) -> Self {
        let operator_ids = graph.program_order().to_vec();
        let position = |id: &OperatorId| graph.operator(*id).position;
        let mut slot = vec![0u32; graph.tensors().len()];
        for operator in graph.operators() {
            for (place, tensor) in operator.creates.iter().enumerate() {
                slot[tensor.index()] = place as u32;
            }
        }

        let mut counted: Vec<(Item, Vec<Op>, TensorId)> = (0..graph.tensors().len() as u32)
            .map(TensorId)
            .filter_map(|id| {
                let tensor = graph.tensor(id);
                let size = graph.counted_bytes(id);
                (size > 0 && part.counts(tensor.residency)).then(|| {
                    let item = Item {
                        size,
                        alignment: graph.alignment_bytes().max(tensor.alignment_bytes),
                        creator: graph.creator(id).as_ref().map_or(NONE, position),
                        residency: tensor.residency,
                    };
                    (item, graph.users(id).iter().map(position).collect(), id)
                })
            })
            .collect();
        // Tensors that tie on everything but the slot are alike in every count.
        counted.sort_by(|(a, a_users, a_id), (b, b_users, b_id)| {
            (a.creator, a_users, a.size, a.alignment, a.residency as u8, slot[a_id.index()]).cmp(&(
                b.creator,
                b_users,
                b.size,
                b.alignment,
                b.residency as u8,
                slot[b_id.index()],
            ))
        });

        let mut rank = vec![NONE; graph.tensors().len()];
        for (index, (_, _, id)) in counted.iter().enumerate() {
            rank[id.index()] = index as u32;
        }
        let users = Rows::collect(counted.iter().map(|(_, users, _)| users.iter().copied()));
        let uses = users.transposed(operator_ids.len());
        let creates = Rows::collect(operator_ids.iter().map(|&id| {
            let mut made: Vec<Ten> = graph.operator(id).creates.iter().map(|t| rank[t.index()]).collect();
            made.retain(|&t| t != NONE);
            made.sort_unstable();
            made
        }));
        let predecessors = Rows::collect(operator_ids.iter().map(|&id| graph.predecessors(id).iter().map(position)));
        let successors = predecessors.transposed(operator_ids.len());

        let mut permissions = Vec::new();
        if reuse {
            for (op, &id) in operator_ids.iter().enumerate() {
                for pair in &graph.operator(id).reuse {
                    let (input, output) = (rank[pair.input.index()], rank[pair.output.index()]);
                    // Pairs of empty tensors save nothing.
                    if input != NONE && output != NONE {
                        permissions.push((op as u32, input, output));
                    }
                }
            }
            permissions.sort_unstable();
            permissions.dedup();
        }

        Problem {
            predecessors,
            successors,
            workspace: match part {
                Part::Pool => vec![0; operator_ids.len()],
                Part::Whole | Part::Outside => operator_ids.iter().map(|&id| graph.workspace_bytes(id)).collect(),
            },
            is_update: operator_ids.iter().map(|&id| graph.operator(id).phase == Phase::Update).collect(),
            tensors: counted.iter().map(|(item, _, _)| *item).collect(),
            users,
            uses,
            creates,
            reuse: permissions,
            tensor_ids: counted.iter().map(|&(_, _, id)| id).collect(),
            operator_ids,
        }
    }

    /// The same with all bytes in the pool and all others multiplied by whole numbers; `None` where that is too much to count.
    pub(crate) fn weighted(&self, in_pool: u64, outside: u64) -> Option<Self> {
        let all = self.tensors.iter().map(|item| item.size).chain(self.workspace.iter().copied()).sum::<u64>();
        all.checked_mul(in_pool.max(outside)).filter(|&all| all < 1 << 62)?;
        let mut weighted = self.clone();
        weighted.tensors.iter_mut().for_each(|item| item.size *= if item.in_pool() { in_pool } else { outside });
        weighted.workspace.iter_mut().for_each(|bytes| *bytes *= outside);
        Some(weighted)
    }

    /// How many operators.
    pub(crate) fn len(&self) -> usize {
        self.operator_ids.len()
    }

    pub(crate) fn program_order(&self) -> Vec<Op> {
        (0..self.len() as u32).collect()
    }

    pub(crate) fn size(&self, tensor: Ten) -> u64 {
        self.tensors[tensor as usize].size
    }

    pub(crate) fn tensor_id(&self, tensor: Ten) -> TensorId {
        self.tensor_ids[tensor as usize]
    }

    /// Reuse pairs by tensor id.
    pub(crate) fn pair_ids(&self, pairs: &[(Ten, Ten)]) -> Vec<ReusePair> {
        let pair = |&(input, output)| ReusePair { input: self.tensor_id(input), output: self.tensor_id(output) };
        pairs.iter().map(pair).collect()
    }

    /// Offsets by tensor id, of tensors that count; the others have none yet or keep theirs.
    pub(crate) fn write_offsets(&self, offsets: &[u64], by_id: &mut [Option<u64>]) {
        for ((item, &id), &offset) in self.tensors.iter().zip(&self.tensor_ids).zip(offsets) {
            if item.in_pool() {
                by_id[id.index()] = Some(offset);
            }
        }
    }

    pub(crate) fn operator_id(&self, op: Op) -> OperatorId {
        self.operator_ids[op as usize]
    }

    /// The permissions of one operator.
    pub(crate) fn permissions(&self, op: Op) -> &[(Op, Ten, Ten)] {
        let from = self.reuse.partition_point(|&(other, _, _)| other < op);
        let to = from + self.reuse[from..].partition_point(|&(other, _, _)| other == op);
        &self.reuse[from..to]
    }

    /// Bytes that come to life when the operator runs: its outputs and its workspace.
    pub(crate) fn transient(&self, op: Op) -> u64 {
        self.workspace[op as usize] + self.creates.row(op).iter().map(|&t| self.size(t)).sum::<u64>()
    }

    /// Whether the operator takes no memory, nobody waits for it, and it waits for one other alone, such as a view that is not used: it had
    /// better run at once, since it may hold what it reads.
    pub(crate) fn is_idle(&self, op: Op) -> bool {
        !self.is_update[op as usize]
            && self.transient(op) == 0
            && self.successors.row(op).is_empty()
            && self.predecessors.row(op).len() == 1
    }

    /// Whether the order is a permutation that keeps every constraint.
    pub(crate) fn is_valid_order(&self, order: &[Op]) -> bool {
        let mut step = vec![NONE; self.len()];
        for (at, &op) in order.iter().enumerate() {
            if op as usize >= self.len() || step[op as usize] != NONE {
                return false;
            }
            step[op as usize] = at as u32;
        }
        order.len() == self.len()
            && order
                .iter()
                .all(|&op| self.predecessors.row(op).iter().all(|&before| step[before as usize] < step[op as usize]))
    }
}
