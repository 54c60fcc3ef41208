//! The graph as the planner's algorithms see it: operators are named by their program position,
//! tensors by a rank that depends only on positions and sizes, and tensors that never count
//! (persistent or empty ones, or those of another [`Scope`]) are left out.
//!
//! Algorithms that work on a [`Problem`] cannot let ids or names reach a plan: permuting either
//! gives the same problem.

use crate::graph::{Graph, OperatorId, Phase, Residency, ReusePair, TensorId};
use std::marker::PhantomData;

/// An operator's program position.
pub(crate) type Op = u32;

/// A tensor's rank in the problem. A type of its own, so that it is never taken for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ten(u32);

/// A type whose values number the rows or the entries of lists.
pub(crate) trait Index: Copy {
    /// The number as a place in a list.
    fn index(self) -> usize;

    /// The number of a place.
    fn at(index: usize) -> Self;
}

impl Index for Op {
    #[inline]
    fn index(self) -> usize {
        self as usize
    }

    #[inline]
    fn at(index: usize) -> Self {
        index as u32
    }
}

impl Index for Ten {
    #[inline]
    fn index(self) -> usize {
        self.0 as usize
    }

    #[inline]
    fn at(index: usize) -> Self {
        Ten(index as u32)
    }
}

impl Ten {
    /// Stands for "no tensor".
    pub(crate) const NONE: Ten = Ten(u32::MAX);
}

/// In graphs of more operators, what takes time in proportion to their size is done less often.
const LARGE: usize = 25_000;
/// In such graphs, budgets of work that are often used up to little effect are divided by this.
const LARGE_SHARE: u64 = 4;

/// Stands for "no operator".
pub(crate) const NONE: u32 = u32::MAX;

/// Lists of operators or tensors, one list a row, in one allocation. Rows are numbered by `K`.
#[derive(Clone, Debug)]
pub(crate) struct Rows<K, V> {
    starts: Vec<u32>,
    items: Vec<V>,
    by: PhantomData<K>,
}

impl<K: Index, V: Index> Rows<K, V> {
    pub(crate) fn collect<I: IntoIterator<Item = V>>(rows: impl Iterator<Item = I>) -> Self {
        let mut starts = vec![0];
        let mut items = Vec::new();
        for row in rows {
            items.extend(row);
            starts.push(items.len() as u32);
        }
        Rows { starts, items, by: PhantomData }
    }

    /// The rows turned round: row `v` of the result lists, ascending, the rows that hold `v`.
    pub(crate) fn transposed(&self, width: usize) -> Rows<V, K> {
        let mut starts = vec![0u32; width + 1];
        for &item in &self.items {
            starts[item.index() + 1] += 1;
        }
        for i in 0..width {
            starts[i + 1] += starts[i];
        }
        let mut next = starts.clone();
        let mut items = vec![K::at(0); self.items.len()];
        for row in (0..self.starts.len() - 1).map(K::at) {
            for &item in self.row(row) {
                items[next[item.index()] as usize] = row;
                next[item.index()] += 1;
            }
        }
        Rows { starts, items, by: PhantomData }
    }

    #[inline]
    pub(crate) fn row(&self, index: K) -> &[V] {
        &self.items[self.starts[index.index()] as usize..self.starts[index.index() + 1] as usize]
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
pub(crate) enum Scope {
    /// Every tensor that is not persistent, and workspace.
    Whole,
    /// Step-local tensors, which the pool holds.
    Pool,
    /// All others: unpooled tensors, those that enter or leave the step, and workspace.
    Unpooled,
}

impl Scope {
    fn counts(self, residency: Residency) -> bool {
        match residency {
            Residency::StepLocal => self != Scope::Unpooled,
            Residency::Unpooled | Residency::Enters | Residency::Leaves => self != Scope::Pool,
            Residency::Persistent => false,
        }
    }
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    /// Every ordering constraint.
    pub(crate) predecessors: Rows<Op, Op>,
    /// The same, turned round.
    pub(crate) successors: Rows<Op, Op>,
    /// Counted workspace per operator.
    pub(crate) workspace: Vec<u64>,
    /// Whether the operator belongs to the update phase.
    pub(crate) is_update: Vec<bool>,
    pub(crate) tensors: Vec<Item>,
    /// Per tensor the operators that read or mutate it, ascending.
    pub(crate) users: Rows<Ten, Op>,
    /// Per operator the tensors that it reads or mutates.
    pub(crate) uses: Rows<Op, Ten>,
    /// Per operator the tensors that it makes.
    pub(crate) creates: Rows<Op, Ten>,
    /// Permissions (operator, input, output), sorted. Empty where reuse is off.
    pub(crate) reuse: Vec<(Op, Ten, Ten)>,
    tensor_ids: Vec<TensorId>,
    operator_ids: Vec<OperatorId>,
}

impl Problem {
    pub(crate) fn new(graph: &Graph, reuse: bool) -> Self {
        Self::of(graph, Scope::Whole, reuse)
    }

    /// The problem in which nothing but what the scope counts has a size.
    pub(crate) fn of(graph: &Graph, scope: Scope, reuse: bool) -> Self {
        let operator_ids = graph.program_order().to_vec();
        let position = |id: &OperatorId| graph.operator(*id).position;
        let mut output = vec![0u32; graph.tensors().len()];
        for operator in graph.operators() {
            for (place, tensor) in operator.creates.iter().enumerate() {
                output[tensor.index()] = place as u32;
            }
        }

        let mut counted: Vec<(Item, Vec<Op>, TensorId)> = (0..graph.tensors().len() as u32)
            .map(TensorId)
            .filter_map(|id| {
                let tensor = graph.tensor(id);
                let size = graph.counted_bytes(id);
                (size > 0 && scope.counts(tensor.residency)).then(|| {
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
        // Tensors that tie on everything but their place among the outputs are alike in every
        // count.
        counted.sort_by(|(a, a_users, a_id), (b, b_users, b_id)| {
            (a.creator, a_users, a.size, a.alignment, a.residency as u8, output[a_id.index()]).cmp(&(
                b.creator,
                b_users,
                b.size,
                b.alignment,
                b.residency as u8,
                output[b_id.index()],
            ))
        });

        let mut rank = vec![Ten::NONE; graph.tensors().len()];
        for (index, (_, _, id)) in counted.iter().enumerate() {
            rank[id.index()] = Ten::at(index);
        }
        let users = Rows::collect(counted.iter().map(|(_, users, _)| users.iter().copied()));
        let uses = users.transposed(operator_ids.len());
        let creates = Rows::collect(operator_ids.iter().map(|&id| {
            let mut made: Vec<Ten> = graph.operator(id).creates.iter().map(|t| rank[t.index()]).collect();
            made.retain(|&t| t != Ten::NONE);
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
                    if input != Ten::NONE && output != Ten::NONE {
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
            workspace: match scope {
                Scope::Pool => vec![0; operator_ids.len()],
                Scope::Whole | Scope::Unpooled => operator_ids.iter().map(|&id| graph.workspace_bytes(id)).collect(),
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

    /// The same problem with the bytes in the pool multiplied by one whole number and all others by
    /// another; `None` where the products are too large to count.
    pub(crate) fn weighted(&self, in_pool: u64, unpooled: u64) -> Option<Self> {
        let all = self.tensors.iter().map(|item| item.size).chain(self.workspace.iter().copied()).sum::<u64>();
        all.checked_mul(in_pool.max(unpooled)).filter(|&all| all < 1 << 62)?;
        let mut weighted = self.clone();
        weighted.tensors.iter_mut().for_each(|item| item.size *= if item.in_pool() { in_pool } else { unpooled });
        weighted.workspace.iter_mut().for_each(|bytes| *bytes *= unpooled);
        Some(weighted)
    }

    /// How many operators.
    pub(crate) fn len(&self) -> usize {
        self.operator_ids.len()
    }

    /// Whether there are more than [`LARGE`] operators: then what takes long is done once at most.
    pub(crate) fn is_large(&self) -> bool {
        self.len() > LARGE
    }

    /// What is left of a budget of work in large graphs.
    pub(crate) fn share_if_large(&self, work: u64) -> u64 {
        if self.is_large() { work / LARGE_SHARE } else { work }
    }

    pub(crate) fn program_order(&self) -> Vec<Op> {
        (0..self.len() as u32).collect()
    }

    /// The ranks of all tensors.
    pub(crate) fn tensor_ranks(&self) -> impl Iterator<Item = Ten> + Clone + use<> {
        (0..self.tensors.len()).map(Ten::at)
    }

    pub(crate) fn size(&self, tensor: Ten) -> u64 {
        self.tensors[tensor.index()].size
    }

    pub(crate) fn tensor_id(&self, tensor: Ten) -> TensorId {
        self.tensor_ids[tensor.index()]
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

    /// Whether the operator takes no memory, nobody waits for it, and it waits for one other alone,
    /// such as a view that is not used: it had better run at once, since it may hold what it reads.
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

#[cfg(test)]
impl Problem {
    /// Shows every order that keeps all constraints; only small problems have few enough.
    pub(crate) fn for_each_order(&self, see: &mut impl FnMut(&[Op])) {
        self.extend_orders(&mut Vec::new(), see);
    }

    fn extend_orders(&self, order: &mut Vec<Op>, see: &mut impl FnMut(&[Op])) {
        if order.len() == self.len() {
            see(order);
        }
        for op in 0..self.len() as Op {
            if !order.contains(&op) && self.predecessors.row(op).iter().all(|before| order.contains(before)) {
                order.push(op);
                self.extend_orders(order, see);
                order.pop();
            }
        }
    }
}
