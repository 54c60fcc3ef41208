//! What a graph lists: operators and tensors (storages), and what is said of each.

use super::ids::{RegionId, TensorId};
use super::strict;
use serde::{Deserialize, Serialize};

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A trained weight.
    Parameter,
    /// A module's buffer.
    Buffer,
    /// What an optimizer keeps from step to step.
    OptimizerState,
    /// Given to the step by its caller.
    Input,
    /// The derivative of the loss with respect to a parameter.
    Gradient,
    /// Made in the forward pass or the loss, used in the backward pass.
    Activation,
    /// Anything else that lives only inside the step.
    Temporary,
    /// Returned by the step.
    Output,
}

/// Where a tensor is alive beyond the step, and whether it lives in the pool: only step-local
/// tensors do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Residency {
    /// Made and dead within the step.
    StepLocal,
    /// The same, but in memory that its kernel takes from the allocator.
    Unpooled,
    /// Exists before the step, dies at its last use in it.
    Enters,
    /// Made in the step, exists after it.
    Leaves,
    /// Exists before and after the step: a constant of the memory count.
    Persistent,
}

/// The part of the step that an operator belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The model's forward pass.
    Forward,
    /// The loss.
    Loss,
    /// The backward pass.
    Backward,
    /// The optimizer, gradient clipping included.
    Update,
    /// Communication between ranks.
    Collective,
}

/// Operators of one sequence keep their program order among themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sequence {
    /// Draws from a random-number generator.
    Random,
    /// Communicates with other ranks.
    Collective,
}

/// Where in the user's program an operator comes from. Empty strings and line 0 mean unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Dotted path of the module, for example `transformer.h.3.mlp`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub module: String,
    /// The user's file.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub file: String,
    /// The user's line in that file, counted from 1.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub line: u32,
}

impl Source {
    fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
}

/// Fields that say nothing are left out of files.
fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A storage. Two views of one storage are one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// For people; no rule depends on it.
    pub name: String,
    /// Bytes of the storage, before rounding.
    pub size_bytes: u64,
    /// What it is for.
    pub kind: Kind,
    /// Whether it is alive before or after the step.
    pub residency: Residency,
    /// Least alignment of its own, a power of two; the graph's where 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub alignment_bytes: u64,
}

/// Permission for an output to take the memory of an input that dies at this operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "(TensorId, TensorId)", into = "(TensorId, TensorId)")]
pub struct ReusePair {
    /// A step-local tensor the operator reads and does not mutate.
    pub input: TensorId,
    /// A step-local tensor the operator creates, of the same size.
    pub output: TensorId,
}

impl From<(TensorId, TensorId)> for ReusePair {
    fn from((input, output): (TensorId, TensorId)) -> Self {
        Self { input, output }
    }
}

impl From<ReusePair> for (TensorId, TensorId) {
    fn from(pair: ReusePair) -> Self {
        (pair.input, pair.output)
    }
}

/// One call of one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operator {
    /// The kernel, for example `aten.add.Tensor`.
    pub name: String,
    /// Its place in program order; a permutation over all operators.
    pub position: u32,
    /// The part of the step it belongs to.
    pub phase: Phase,
    /// Tensors whose value it uses, in any order, no doubles. A tensor that is mutated need not be
    /// listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reads: Vec<TensorId>,
    /// Tensors it makes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub creates: Vec<TensorId>,
    /// Tensors it changes in place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mutates: Vec<TensorId>,
    /// Bytes that live only while it runs.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub workspace_bytes: u64,
    /// Floating-point operations that it takes, for the cost model; 0 where they do not matter
    /// or are not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub flops: u64,
    /// Nanoseconds that it was measured to take; 0 where nobody measured it, so that the model of
    /// time is asked.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub time_ns: u64,
    /// Which outputs may take which inputs' memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reuse: Vec<ReusePair>,
    /// Whether it may run again: from the same inputs it makes the same bits, and it changes
    /// nothing but what it lists. One that draws random numbers reads the state of its generator
    /// as a tensor, and its extra runs draw from that state: they belong to no sequence.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub repeatable: bool,
    /// Those of the tensors that it reads or mutates that only its first run touches, such as the
    /// running statistics of a batch norm.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub first_only: Vec<TensorId>,
    /// The sequence it belongs to, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<Sequence>,
    /// For an operator that launches a collective, the link between ranks that the collective goes
    /// over: the collectives of one link run one after another.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub link: u32,
    /// The conditional region it belongs to, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<RegionId>,
    /// Where it comes from.
    #[serde(default, skip_serializing_if = "Source::is_unknown", deserialize_with = "strict::one")]
    pub source: Source,
}

impl Operator {
    /// An operator that reads, makes and needs nothing.
    pub fn new(name: impl Into<String>, position: u32, phase: Phase) -> Self {
        Operator {
            name: name.into(),
            position,
            phase,
            reads: Vec::new(),
            creates: Vec::new(),
            mutates: Vec::new(),
            workspace_bytes: 0,
            flops: 0,
            time_ns: 0,
            reuse: Vec::new(),
            repeatable: false,
            first_only: Vec::new(),
            sequence: None,
            link: 0,
            region: None,
            source: Source::default(),
        }
    }
}

/// A part of the step that runs only if a tensor's value says so. Reserved: the first format
/// version stores regions, planning takes every region as run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// For people.
    pub name: String,
    /// The tensor whose value decides.
    pub predicate: TensorId,
    /// The region around this one, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<RegionId>,
}

/// Rounds up to a multiple of a power of two.
#[inline]
pub(crate) fn round_up(bytes: u64, alignment: u64) -> u64 {
    (bytes + (alignment - 1)) & !(alignment - 1)
}
