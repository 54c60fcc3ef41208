//! The graph as the planner reads it.

use super::entries::{Operator, Region, Residency, Tensor, round_up};
use super::ids::{OperatorId, TensorId};
use std::sync::OnceLock;

/// A valid training step. See the module's documentation.
#[derive(Clone, Debug)]
pub struct Graph {
    pub(crate) name: String,
    pub(crate) device: String,
    pub(crate) alignment_bytes: u64,
    pub(crate) estimate: String,
    pub(crate) accounting: String,
    pub(crate) notes: Vec<(String, String)>,
    pub(crate) operators: Vec<Operator>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) control: Vec<(OperatorId, OperatorId)>,
    pub(crate) regions: Vec<Region>,
    // Derived by the builder.
    /// Operators by program position.
    pub(crate) program_order: Vec<OperatorId>,
    /// Who makes each tensor; `None` for those that exist before the step.
    pub(crate) creator: Vec<Option<OperatorId>>,
    /// Who reads or mutates each tensor, by program position, no doubles.
    pub(crate) users: Adjacency,
    /// Every ordering constraint (data, mutation, sequence, control), no doubles, by program
    /// position.
    pub(crate) predecessors: Adjacency,
    /// The same constraints, turned round.
    pub(crate) successors: Adjacency,
    /// Computed when first asked for.
    pub(crate) digest: OnceLock<String>,
}

/// Equal in what the caller said; the rest follows from it.
impl PartialEq for Graph {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
            && self.device == other.device
            && self.alignment_bytes == other.alignment_bytes
            && self.estimate == other.estimate
            && self.accounting == other.accounting
            && self.operators == other.operators
            && self.tensors == other.tensors
            && self.control == other.control
            && self.regions == other.regions
    }
}

impl Eq for Graph {}

/// Lists of operators, one list a row, in one allocation.
#[derive(Clone, Debug, Default)]
pub struct Adjacency {
    pub(crate) starts: Vec<u32>,
    pub(crate) items: Vec<OperatorId>,
}

impl Adjacency {
    /// The row's operators.
    #[inline]
    pub fn row(&self, index: usize) -> &[OperatorId] {
        &self.items[self.starts[index] as usize..self.starts[index + 1] as usize]
    }
}

impl Graph {
    /// For people.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// The device that the step runs on, for example `cpu` or `cuda`.
    pub fn device(&self) -> &str {
        &self.device
    }
    /// Every size is rounded up to a multiple of this wherever bytes are counted.
    pub fn alignment_bytes(&self) -> u64 {
        self.alignment_bytes
    }
    /// What the step's figures may be wrong about; empty where they are exact.
    pub fn estimate(&self) -> &str {
        &self.estimate
    }
    /// The rules by which its tensors are counted, if these are not the rules of a real step, for
    /// example `paper`; otherwise empty.
    pub fn accounting(&self) -> &str {
        &self.accounting
    }
    /// What the maker of the graph tells people about it: (topic, text) in order. Graphs that
    /// differ in nothing else are equal.
    pub fn notes(&self) -> &[(String, String)] {
        &self.notes
    }
    /// All operators, by id.
    pub fn operators(&self) -> &[Operator] {
        &self.operators
    }
    /// All tensors, by id.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
    /// The caller's own ordering constraints: (before, after).
    pub fn control(&self) -> &[(OperatorId, OperatorId)] {
        &self.control
    }
    /// All conditional regions, by id.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }
    /// One operator.
    pub fn operator(&self, id: OperatorId) -> &Operator {
        &self.operators[id.index()]
    }
    /// One tensor.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }
    /// Operators by program position.
    pub fn program_order(&self) -> &[OperatorId] {
        &self.program_order
    }
    /// Who makes the tensor; `None` if it exists before the step.
    pub fn creator(&self, id: TensorId) -> Option<OperatorId> {
        self.creator[id.index()]
    }
    /// Who reads or mutates the tensor, by program position.
    pub fn users(&self, id: TensorId) -> &[OperatorId] {
        self.users.row(id.index())
    }
    /// What must run before the operator.
    pub fn predecessors(&self, id: OperatorId) -> &[OperatorId] {
        self.predecessors.row(id.index())
    }
    /// What must run after the operator.
    pub fn successors(&self, id: OperatorId) -> &[OperatorId] {
        self.successors.row(id.index())
    }
    /// The tensor's bytes as counted everywhere: rounded up to the graph's and its own alignment.
    /// The builder has checked that the sum over all tensors and workspaces stays below 2^63.
    #[inline]
    pub fn counted_bytes(&self, id: TensorId) -> u64 {
        let tensor = self.tensor(id);
        round_up(tensor.size_bytes, self.alignment_bytes.max(tensor.alignment_bytes))
    }
    /// The operator's workspace as counted everywhere.
    #[inline]
    pub fn workspace_bytes(&self, id: OperatorId) -> u64 {
        round_up(self.operator(id).workspace_bytes, self.alignment_bytes)
    }
    /// Sum of all persistent tensors.
    pub fn persistent_bytes(&self) -> u64 {
        (0..self.tensors.len() as u32)
            .map(TensorId)
            .filter(|&id| self.tensor(id).residency == Residency::Persistent)
            .map(|id| self.counted_bytes(id))
            .sum()
    }
}
