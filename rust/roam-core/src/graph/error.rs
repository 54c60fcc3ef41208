//! What can be wrong with a graph. One variant per fault.

use super::site::Site;
use std::fmt;
use thiserror::Error;

/// Lists at most this many members of a cycle in its message; the error itself holds them all.
const SHOWN: usize = 12;

fn chain(members: &[impl ToString], kind: &str) -> String {
    let mut text = members.iter().take(SHOWN).map(ToString::to_string).collect::<Vec<_>>().join(" -> ");
    if members.len() > SHOWN {
        text.push_str(&format!(" -> ... ({} {kind} in all)", members.len()));
    }
    text
}

/// Why a reuse permission makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReuseFault {
    /// The operator does not read the input.
    InputNotRead,
    /// The operator changes the input in place.
    InputMutated,
    /// The operator does not make the output.
    OutputNotCreated,
    /// One of the two may lie in the pool and the other not, or the input does not live in the step
    /// alone.
    NotStepLocal,
    /// Their counted sizes differ.
    SizesDiffer,
    /// The same pair is listed twice.
    Doubled,
}

impl fmt::Display for ReuseFault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::InputNotRead => "the operator does not read the input",
            Self::InputMutated => "the operator mutates the input",
            Self::OutputNotCreated => "the operator does not create the output",
            Self::NotStepLocal => {
                "both tensors must be step-local, or the input unpooled and the output unpooled or leaving"
            }
            Self::SizesDiffer => "the two tensors differ in counted size",
            Self::Doubled => "the pair is listed twice",
        })
    }
}

/// Why a graph is not a valid training step.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GraphError {
    /// Operators that wait for each other, in the order of the waiting.
    #[error("operators wait for each other: {}", chain(.sites, "operators"))]
    Cycle {
        /// The operators on the cycle; the last one must run before the first.
        sites: Vec<Site>,
    },
    /// An operator names a tensor that the graph does not have.
    #[error("{site} {role} unknown tensor {tensor}")]
    UnknownTensor {
        /// The operator.
        site: Box<Site>,
        /// What it does to the tensor: `reads`, `creates`, `mutates` or `reuses`.
        role: &'static str,
        /// The tensor's number.
        tensor: u64,
    },
    /// An operator names a region that the graph does not have.
    #[error("{site} belongs to unknown region {region}")]
    UnknownRegion {
        /// The operator.
        site: Box<Site>,
        /// The region's number.
        region: u64,
    },
    /// A control edge names an operator that the graph does not have.
    #[error("control edge {before} -> {after} names an unknown operator; the graph has {operators}{}", known.as_ref().map(|site| format!(" (the other end is {site})")).unwrap_or_default())]
    UnknownOperator {
        /// First end of the edge.
        before: u64,
        /// Second end of the edge.
        after: u64,
        /// How many operators the graph has.
        operators: usize,
        /// The end that is known.
        known: Option<Box<Site>>,
    },
    /// A number that must not be negative, or does not fit its type.
    #[error("{what}{} must be between 0 and {max}, not {value}", site.as_ref().map(|site| format!(" of {site}")).unwrap_or_default())]
    OutOfRange {
        /// Which number, with the tensor or region it belongs to.
        what: String,
        /// The operator it belongs to, if it is one.
        site: Option<Box<Site>>,
        /// The value as given.
        value: String,
        /// The largest value allowed.
        max: u64,
    },
    /// A word that is none of those allowed, for example of a kind or a phase.
    #[error("{what}{}: {message}", site.as_ref().map(|site| format!(" of {site}")).unwrap_or_default())]
    UnknownName {
        /// Which word, with the tensor it belongs to.
        what: String,
        /// The operator it belongs to, if it is one.
        site: Option<Box<Site>>,
        /// The word and those allowed.
        message: String,
    },
    /// All sizes and workspaces together do not fit a signed 64-bit number.
    #[error("all tensors and workspaces together reach 2^63 bytes at {at}")]
    TotalTooLarge {
        /// The tensor or operator that passes the limit.
        at: String,
        /// The operator, if it is one.
        site: Option<Box<Site>>,
    },
    /// Two operators make one tensor.
    #[error("tensor `{tensor}` is created by {first} and again by {site}")]
    CreatedTwice {
        /// The tensor's name.
        tensor: String,
        /// The operator listed first.
        first: Box<Site>,
        /// The operator listed second.
        site: Box<Site>,
    },
    /// No operator makes a tensor that must be made in the step.
    #[error("tensor `{tensor}` is made in the step, but no operator creates it{}", user.as_ref().map(|site| format!("; {site} uses it")).unwrap_or_default())]
    NeverCreated {
        /// The tensor's name.
        tensor: String,
        /// An operator that uses it.
        user: Option<Box<Site>>,
    },
    /// An operator makes a tensor that exists before the step.
    #[error("{site} creates tensor `{tensor}`, which exists before the step")]
    CreatedThoughPresent {
        /// The operator.
        site: Box<Site>,
        /// The tensor's name.
        tensor: String,
    },
    /// An operator reads a tensor before it is made.
    #[error("{site} reads tensor `{tensor}` before {creator} creates it")]
    ReadBeforeWrite {
        /// The reader.
        site: Box<Site>,
        /// The tensor's name.
        tensor: String,
        /// Who makes it.
        creator: Box<Site>,
    },
    /// An operator changes a tensor before it is made.
    #[error("{site} mutates tensor `{tensor}` before {creator} creates it")]
    MutatedBeforeWrite {
        /// The mutator.
        site: Box<Site>,
        /// The tensor's name.
        tensor: String,
        /// Who makes it.
        creator: Box<Site>,
    },
    /// An operator makes and changes one tensor.
    #[error("{site} both creates and mutates tensor `{tensor}`")]
    CreatesAndMutates {
        /// The operator.
        site: Box<Site>,
        /// The tensor's name.
        tensor: String,
    },
    /// An operator reads what it makes itself.
    #[error("{site} reads tensor `{tensor}`, which it creates itself")]
    ReadsOwnOutput {
        /// The operator.
        site: Box<Site>,
        /// The tensor's name.
        tensor: String,
    },
    /// An operator lists a tensor twice in one list.
    #[error("{site} {role} tensor `{tensor}` twice")]
    Doubled {
        /// The operator.
        site: Box<Site>,
        /// `reads`, `creates`, `mutates` or `first_only`.
        role: &'static str,
        /// The tensor's name.
        tensor: String,
    },
    /// A reuse permission that makes no sense.
    #[error("{site} cannot let `{output}` reuse the memory of `{input}`: {fault}")]
    Reuse {
        /// The operator.
        site: Box<Site>,
        /// Name of the input.
        input: String,
        /// Name of the output.
        output: String,
        /// What is wrong.
        fault: ReuseFault,
    },
    /// An operator lists as first-only a tensor that it does not touch.
    #[error("{site} lists tensor `{tensor}` as first_only, but neither reads nor mutates it")]
    FirstOnlyUntouched {
        /// The operator.
        site: Box<Site>,
        /// The tensor's name.
        tensor: String,
    },
    /// A program position beyond the last one.
    #[error("{site} lies beyond the last position of a graph of {operators} operators")]
    PositionOutOfRange {
        /// The operator.
        site: Box<Site>,
        /// How many operators there are.
        operators: usize,
    },
    /// Two operators at one program position.
    #[error("{site} has the position of operator `{other}`")]
    PositionTaken {
        /// The operator listed second.
        site: Box<Site>,
        /// Name of the operator listed first.
        other: String,
    },
    /// An alignment that is not a power of two, or too large.
    #[error("alignment of {what} must be a power of two up to {max}, not {alignment_bytes}")]
    Alignment {
        /// The graph, or which tensor.
        what: String,
        /// The alignment as given.
        alignment_bytes: u64,
        /// The largest alignment allowed.
        max: u64,
    },
    /// A control edge from an operator to itself.
    #[error("{site} has a control edge to itself")]
    ControlSelf {
        /// The operator.
        site: Box<Site>,
    },
    /// A control edge that contradicts program order.
    #[error("control edge from {before} to {site} goes against program order")]
    ControlAgainstProgramOrder {
        /// The end that would have to run first.
        before: Box<Site>,
        /// The end that would have to run second, but comes first in program order.
        site: Box<Site>,
    },
    /// A region's predicate is not a tensor of the graph.
    #[error("region `{region}` has unknown predicate tensor {tensor}")]
    RegionPredicate {
        /// The region's name.
        region: String,
        /// The tensor's number.
        tensor: u64,
    },
    /// A region's parent is not a region of the graph.
    #[error("region `{region}` has unknown parent region {parent}")]
    RegionParent {
        /// The region's name.
        region: String,
        /// The parent's number.
        parent: u64,
    },
    /// Regions that contain each other.
    #[error("regions contain each other: {}", chain(.regions, "regions"))]
    RegionCycle {
        /// Names of the regions on the cycle, each inside the next.
        regions: Vec<String>,
    },
    /// More entries than 32-bit numbers can name.
    #[error("more than {max} {what}")]
    TooMany {
        /// `operators`, `tensors`, `regions` or `ordering constraints`.
        what: &'static str,
        /// How many are allowed.
        max: u64,
    },
}

impl GraphError {
    /// The variant's name for programs, in snake case; stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Cycle { .. } => "cycle",
            Self::UnknownTensor { .. } => "unknown_tensor",
            Self::UnknownRegion { .. } => "unknown_region",
            Self::UnknownOperator { .. } => "unknown_operator",
            Self::OutOfRange { .. } => "out_of_range",
            Self::UnknownName { .. } => "unknown_name",
            Self::TotalTooLarge { .. } => "total_too_large",
            Self::CreatedTwice { .. } => "created_twice",
            Self::NeverCreated { .. } => "never_created",
            Self::CreatedThoughPresent { .. } => "created_though_present",
            Self::ReadBeforeWrite { .. } => "read_before_write",
            Self::MutatedBeforeWrite { .. } => "mutated_before_write",
            Self::CreatesAndMutates { .. } => "creates_and_mutates",
            Self::ReadsOwnOutput { .. } => "reads_own_output",
            Self::Doubled { .. } => "doubled",
            Self::Reuse { fault, .. } => match fault {
                ReuseFault::InputNotRead => "reuse_input_not_read",
                ReuseFault::InputMutated => "reuse_input_mutated",
                ReuseFault::OutputNotCreated => "reuse_output_not_created",
                ReuseFault::NotStepLocal => "reuse_not_step_local",
                ReuseFault::SizesDiffer => "reuse_sizes_differ",
                ReuseFault::Doubled => "reuse_doubled",
            },
            Self::FirstOnlyUntouched { .. } => "first_only_untouched",
            Self::PositionOutOfRange { .. } => "position_out_of_range",
            Self::PositionTaken { .. } => "position_taken",
            Self::Alignment { .. } => "alignment",
            Self::ControlSelf { .. } => "control_self",
            Self::ControlAgainstProgramOrder { .. } => "control_against_program_order",
            Self::RegionPredicate { .. } => "region_predicate",
            Self::RegionParent { .. } => "region_parent",
            Self::RegionCycle { .. } => "region_cycle",
            Self::TooMany { .. } => "too_many",
        }
    }

    /// The operator at fault, where there is one.
    pub fn site(&self) -> Option<&Site> {
        match self {
            Self::Cycle { sites } => sites.first(),
            Self::UnknownTensor { site, .. }
            | Self::UnknownRegion { site, .. }
            | Self::CreatedTwice { site, .. }
            | Self::CreatedThoughPresent { site, .. }
            | Self::ReadBeforeWrite { site, .. }
            | Self::MutatedBeforeWrite { site, .. }
            | Self::CreatesAndMutates { site, .. }
            | Self::ReadsOwnOutput { site, .. }
            | Self::Doubled { site, .. }
            | Self::Reuse { site, .. }
            | Self::FirstOnlyUntouched { site, .. }
            | Self::PositionOutOfRange { site, .. }
            | Self::PositionTaken { site, .. }
            | Self::ControlSelf { site }
            | Self::ControlAgainstProgramOrder { site, .. } => Some(site),
            Self::UnknownOperator { known: site, .. }
            | Self::OutOfRange { site, .. }
            | Self::UnknownName { site, .. }
            | Self::TotalTooLarge { site, .. }
            | Self::NeverCreated { user: site, .. } => site.as_deref(),
            Self::Alignment { .. }
            | Self::RegionPredicate { .. }
            | Self::RegionParent { .. }
            | Self::RegionCycle { .. }
            | Self::TooMany { .. } => None,
        }
    }
}
