//! What can be wrong with a plan.

use crate::expansion::SequenceError;
use crate::graph::Site;
use crate::plan::{ExactReport, Status};
use thiserror::Error;

/// What is wrong with a plan. Tensors are named by their names, operators by their [`Site`].
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PlanViolation {
    /// The plan was made for another graph.
    #[error("the plan was made for the graph with digest {found}, this one has {expected}")]
    GraphDigest {
        /// This graph's digest.
        expected: String,
        /// The plan's digest.
        found: String,
    },
    /// What runs again makes no sense for this graph.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// A run is not the same as the operator that it repeats.
    #[error("a run of {site} has other {what} than the operator")]
    RunDiffers {
        /// The operator.
        site: Box<Site>,
        /// In what they differ.
        what: &'static str,
    },
    /// A run would use another value than the operator does in program order.
    #[error("a run of {site} uses tensor `{tensor}` when it has another value than in program order")]
    RunUsesOther {
        /// The operator.
        site: Box<Site>,
        /// The tensor.
        tensor: String,
    },
    /// An operator runs again that may not, or changes again what only its first run may change.
    #[error("{site} runs again, which it must not")]
    RunsAgain {
        /// The operator.
        site: Box<Site>,
    },
    /// What a collective changes is not changed next by what waits for it.
    #[error("a run of {site} launches a collective on tensor `{tensor}`, and no run waits for it")]
    LaunchNotWaited {
        /// The operator that launches it.
        site: Box<Site>,
        /// The tensor.
        tensor: String,
    },
    /// A run does not wait for what the operator waits for.
    #[error("a run of {site} does not wait for {before}, or uses a view of another instance")]
    RunDoesNotWait {
        /// The operator.
        site: Box<Site>,
        /// What it must wait for.
        before: Box<Site>,
    },
    /// The plan takes more than its settings allow.
    #[error("the plan takes {total_bytes} bytes, its settings allow {limit_bytes}")]
    OverLimit {
        /// Bytes of the plan in all.
        total_bytes: u64,
        /// What is allowed.
        limit_bytes: u64,
    },
    /// The plan passes off an estimate as exact, or gives other reasons for being one.
    #[error("the plan and the graph disagree about what the figures may be wrong about")]
    Estimate,
    /// A number of streams that cannot be, or that does not go with the plan's schedule or its
    /// lack.
    #[error(
        "{streams} streams are not possible, or the plan has no schedule, or a schedule for another number of streams"
    )]
    Streams {
        /// Streams in the plan's settings.
        streams: u32,
    },
    /// The schedule has too few or too many entries.
    #[error("the schedule's {list} has {found} entries for {expected} operators")]
    ScheduleCount {
        /// Which list.
        list: &'static str,
        /// Entries that there must be.
        expected: usize,
        /// Entries in the plan.
        found: usize,
    },
    /// An operator runs on a stream that the plan does not have.
    #[error("{site} runs on stream {stream}, the plan has {streams}")]
    UnknownStream {
        /// The operator.
        site: Box<Site>,
        /// Its stream.
        stream: u32,
        /// How many there are.
        streams: u32,
    },
    /// An operator waits for one of its own stream, or for one that is launched later: that would
    /// never end, or not be a wait at all.
    #[error("{site} waits for {before}, which is on its own stream or launched later")]
    SyncInvalid {
        /// The operator that waits.
        site: Box<Site>,
        /// What it waits for.
        before: Box<Site>,
    },
    /// Time steps that do not follow the order, that leave one out, or in which a stream runs two
    /// operators.
    #[error("{site} cannot run in time step {time_step}")]
    TimeStep {
        /// The operator.
        site: Box<Site>,
        /// Its time step.
        time_step: u32,
    },
    /// The plan is slower than its settings ask for.
    #[error("the plan is {speed} times as fast as one stream, its settings ask for {asked}")]
    SpeedTarget {
        /// What it is.
        speed: f64,
        /// What was asked for.
        asked: f64,
    },
    /// The order names an operator that the graph does not have.
    #[error("the order names unknown operator {operator}")]
    UnknownOperator {
        /// The number.
        operator: u32,
    },
    /// The order runs an operator twice.
    #[error("the order runs {site} twice")]
    OperatorDoubled {
        /// The operator.
        site: Box<Site>,
    },
    /// The order leaves an operator out.
    #[error("the order leaves out {site}")]
    OperatorMissing {
        /// The operator.
        site: Box<Site>,
    },
    /// An operator runs before the one that writes what it reads.
    #[error("{site} reads tensor `{tensor}` before {before} has written it")]
    ReadTooEarly {
        /// The reader.
        site: Box<Site>,
        /// The creator or mutator whose value it needs.
        before: Box<Site>,
        /// The tensor.
        tensor: String,
    },
    /// An operator changes a tensor while its old value is still needed or not yet written.
    #[error("{site} mutates tensor `{tensor}` before {before} has used it")]
    MutatedTooEarly {
        /// The mutator.
        site: Box<Site>,
        /// The creator, mutator or reader that must come first.
        before: Box<Site>,
        /// The tensor.
        tensor: String,
    },
    /// Operators of one sequence are not in program order.
    #[error("{site} runs before {before}, but both belong to one sequence")]
    SequenceBroken {
        /// Runs too early.
        site: Box<Site>,
        /// Must come first.
        before: Box<Site>,
    },
    /// A control edge is not respected.
    #[error("{site} runs before {before}, against a control edge")]
    ControlBroken {
        /// Runs too early.
        site: Box<Site>,
        /// Must come first.
        before: Box<Site>,
    },
    /// There must be one offset, or its absence, per tensor.
    #[error("the plan has {found} offsets for {expected} tensors")]
    OffsetCount {
        /// Tensors in the graph.
        expected: usize,
        /// Offsets in the plan.
        found: usize,
    },
    /// A step-local tensor has no place in the pool.
    #[error("step-local tensor `{tensor}` has no offset")]
    OffsetMissing {
        /// The tensor.
        tensor: String,
    },
    /// A tensor that outlives the step, or comes from before, is in the pool.
    #[error("tensor `{tensor}` is not step-local, yet has an offset")]
    OffsetUnexpected {
        /// The tensor.
        tensor: String,
    },
    /// An offset is not a multiple of the alignment.
    #[error("offset {offset} of tensor `{tensor}` is not a multiple of {alignment_bytes}")]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Its offset.
        offset: u64,
        /// What it must be a multiple of.
        alignment_bytes: u64,
    },
    /// A tensor reaches beyond the pool.
    #[error("tensor `{tensor}` at offset {offset} with {size_bytes} bytes does not fit a pool of {pool_bytes}")]
    OutsidePool {
        /// The tensor.
        tensor: String,
        /// Its offset.
        offset: u64,
        /// Its counted size.
        size_bytes: u64,
        /// The pool.
        pool_bytes: u64,
    },
    /// Two tensors are live at once and share bytes.
    #[error("tensors `{tensor}` and `{other}` share bytes while {site} runs")]
    Overlap {
        /// One tensor.
        tensor: String,
        /// The other.
        other: String,
        /// The operator at which both are live.
        site: Box<Site>,
    },
    /// The plan reuses memory although its settings forbid it.
    #[error("the plan lists reuse pairs although reuse is off")]
    ReuseOff,
    /// No operator permits this reuse.
    #[error("no operator permits `{output}` to take the memory of `{input}`")]
    ReuseNotPermitted {
        /// The input.
        input: String,
        /// The output.
        output: String,
    },
    /// The input of a reuse pair is still needed afterwards.
    #[error("`{output}` takes the memory of `{input}` at {site}, but `{input}` is used later")]
    ReuseOfLive {
        /// The operator.
        site: Box<Site>,
        /// The input.
        input: String,
        /// The output.
        output: String,
    },
    /// A tensor is the input, or the output, of two reuse pairs.
    #[error("tensor `{tensor}` is in two reuse pairs on the same side")]
    ReuseDoubled {
        /// The tensor.
        tensor: String,
    },
    /// The two tensors of a reuse pair lie at different offsets.
    #[error("`{output}` reuses the memory of `{input}` but has another offset")]
    ReuseOffsets {
        /// The input.
        input: String,
        /// The output.
        output: String,
    },
    /// A figure of the plan is not what the graph says.
    #[error("{figure} is {actual}, not {claimed}")]
    Figure {
        /// The plan's attribute.
        figure: &'static str,
        /// What the plan says.
        claimed: u64,
        /// What it is.
        actual: u64,
    },
    /// The plan needs more than program order without reuse.
    #[error("the plan's total of {total_bytes} is above program order's, {program_order_total_bytes}")]
    WorseThanProgramOrder {
        /// The plan's total.
        total_bytes: u64,
        /// Program order's, laid out as an ordinary allocator does.
        program_order_total_bytes: u64,
    },
    /// The plan undercuts its own lower bound.
    #[error("the lower bound {lower_bound_bytes} is above the plan's peak {peak_bytes}")]
    BoundAbovePeak {
        /// The bound.
        lower_bound_bytes: u64,
        /// The peak.
        peak_bytes: u64,
    },
    /// The total's lower bound is above the total, or below what the peak's lower bound says of it.
    #[error("the total's lower bound {total_lower_bound_bytes} is not between {least} and {total_bytes}")]
    TotalBound {
        /// The bound.
        total_lower_bound_bytes: u64,
        /// Persistent bytes and the peak's lower bound.
        least: u64,
        /// The total.
        total_bytes: u64,
    },
    /// The bound's operator does not exist, or is not named although there is a bound.
    #[error("the lower bound's operator is missing or unknown")]
    BoundOperator,
    /// The status contradicts the figures.
    #[error(
        "status {status:?} does not go with a total of {total_bytes} and its lower bound {total_lower_bound_bytes}"
    )]
    Status {
        /// The plan's status.
        status: Status,
        /// The total.
        total_bytes: u64,
        /// Its lower bound.
        total_lower_bound_bytes: u64,
    },
    /// What the plan says of integer programs contradicts itself, the settings or the figures.
    #[error(
        "what the plan says of integer programs, {:?} ({} stated, {} gains, {} failed, {} timed out), contradicts its settings, its \
         counts, or its total of {total_bytes} with the lower bound {total_lower_bound_bytes}",
        report.status, report.programs, report.gains, report.failed, report.timed_out
    )]
    Exact {
        /// What the plan says.
        report: ExactReport,
        /// The total.
        total_bytes: u64,
        /// Its lower bound.
        total_lower_bound_bytes: u64,
    },
}

impl PlanViolation {
    /// The variant's name for programs, in snake case; stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            Self::GraphDigest { .. } => "graph_digest",
            Self::Sequence(error) => error.code(),
            Self::RunDiffers { .. } => "run_differs",
            Self::RunUsesOther { .. } => "run_uses_other",
            Self::LaunchNotWaited { .. } => "launch_not_waited",
            Self::RunsAgain { .. } => "runs_again",
            Self::RunDoesNotWait { .. } => "run_does_not_wait",
            Self::OverLimit { .. } => "over_limit",
            Self::Estimate => "estimate",
            Self::Streams { .. } => "streams",
            Self::ScheduleCount { .. } => "schedule_count",
            Self::UnknownStream { .. } => "unknown_stream",
            Self::SyncInvalid { .. } => "sync_invalid",
            Self::TimeStep { .. } => "time_step",
            Self::SpeedTarget { .. } => "speed_target",
            Self::UnknownOperator { .. } => "unknown_operator",
            Self::OperatorDoubled { .. } => "operator_doubled",
            Self::OperatorMissing { .. } => "operator_missing",
            Self::ReadTooEarly { .. } => "read_too_early",
            Self::MutatedTooEarly { .. } => "mutated_too_early",
            Self::SequenceBroken { .. } => "sequence_broken",
            Self::ControlBroken { .. } => "control_broken",
            Self::OffsetCount { .. } => "offset_count",
            Self::OffsetMissing { .. } => "offset_missing",
            Self::OffsetUnexpected { .. } => "offset_unexpected",
            Self::Misaligned { .. } => "misaligned",
            Self::OutsidePool { .. } => "outside_pool",
            Self::Overlap { .. } => "overlap",
            Self::ReuseOff => "reuse_off",
            Self::ReuseNotPermitted { .. } => "reuse_not_permitted",
            Self::ReuseOfLive { .. } => "reuse_of_live",
            Self::ReuseDoubled { .. } => "reuse_doubled",
            Self::ReuseOffsets { .. } => "reuse_offsets",
            Self::Figure { .. } => "figure",
            Self::WorseThanProgramOrder { .. } => "worse_than_program_order",
            Self::BoundAbovePeak { .. } => "bound_above_peak",
            Self::TotalBound { .. } => "total_bound",
            Self::BoundOperator => "bound_operator",
            Self::Status { .. } => "status",
            Self::Exact { .. } => "exact",
        }
    }

    /// The operator at fault, where there is one.
    pub fn site(&self) -> Option<&Site> {
        match self {
            Self::Sequence(error) => error.site(),
            Self::OperatorDoubled { site }
            | Self::RunDiffers { site, .. }
            | Self::RunUsesOther { site, .. }
            | Self::LaunchNotWaited { site, .. }
            | Self::RunsAgain { site }
            | Self::RunDoesNotWait { site, .. }
            | Self::OperatorMissing { site }
            | Self::ReadTooEarly { site, .. }
            | Self::MutatedTooEarly { site, .. }
            | Self::SequenceBroken { site, .. }
            | Self::ControlBroken { site, .. }
            | Self::Overlap { site, .. }
            | Self::ReuseOfLive { site, .. }
            | Self::UnknownStream { site, .. }
            | Self::SyncInvalid { site, .. }
            | Self::TimeStep { site, .. } => Some(site),
            _ => None,
        }
    }
}
