//! A plan: an execution order and a memory layout for one graph, with what they cost.

use crate::graph::{OperatorId, ReusePair};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How a plan relates to the best one there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The total equals its lower bound: no plan can use less.
    Optimal,
    /// A valid plan; the gap says how far from the bound it may be.
    Feasible,
    /// As feasible, but the time limit cut the search short.
    TimedOut,
}

/// What may run at once where there is more than one stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamModel {
    /// Whatever stream order and waits do not order. Plans are safe under every timing.
    #[default]
    HappensBefore,
    /// The operators of one time step, and nothing else: the model of Shu et al. (arXiv
    /// 2310.19295). For comparison; no device runs in lockstep, so such a plan is not safe to run.
    TimeStep,
}

/// The most streams that a plan can have.
pub const MAX_STREAMS: u32 = 64;
/// How a lower bound was proved; docs/explanation/theory.md has the proofs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundRoute {
    /// What one operator needs for itself, what enters or what leaves the step.
    Floor,
    /// A minimum cut at an operator.
    Cut,
    /// Minimum cuts that follow from each other.
    Probe,
    /// Minimum cuts at all operators of a set: one of them runs first, before all the others.
    First,
    /// A search over all orders of a segment.
    Exhaustive,
    /// An integer program of a segment: as certain as its solver's floating point.
    IntegerProgram,
}

/// Whether integer programs are solved where that can lower a plan's total or raise its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exact {
    /// Never.
    Off,
    /// Where there is a solver.
    Auto,
    /// Wherever one is needed; without a solver that is an error.
    Required,
}

/// What became of integer programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExactStatus {
    /// Nobody asked for them.
    Off,
    /// They had nothing to gain: the plan met its bound.
    NotNeeded,
    /// A gap is left, but no program was made: almost nothing could be gained, the searches had
    /// already decided what a program can ask, or the search ended too early.
    NotTried,
    /// Every program for what was open would have been too large to solve.
    TooLarge,
    /// There was no solver.
    Unavailable,
    /// Some were given to the solver, and not all of them without an answer.
    Used,
    /// Some were given to the solver, and none had an answer: it broke down, was killed, or ran out
    /// of time.
    NoAnswer,
}

/// What integer programs did for a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExactReport {
    /// What became of them.
    pub status: ExactStatus,
    /// How many were given to the solver.
    pub programs: u32,
    /// How many of their answers lowered the peak or the pool, or raised the bound.
    pub gains: u32,
    /// How many were lost because the solver broke down or was killed.
    pub failed: u32,
    /// How many were given up because the time was up.
    pub timed_out: u32,
    /// Why there was no solver, or why the first program was lost.
    #[serde(deserialize_with = "Option::deserialize")] // Without this serde takes an absent key for null.
    pub reason: Option<String>,
}

impl ExactReport {
    /// Says what became of all programs in the end; `is_proved` is whether the plan meets its
    /// bound.
    pub(crate) fn conclude(&mut self, is_proved: bool) {
        self.status = match self.status {
            ExactStatus::NotNeeded if !is_proved => ExactStatus::NotTried,
            ExactStatus::NotTried if is_proved => ExactStatus::NotNeeded,
            ExactStatus::Used if self.failed.saturating_add(self.timed_out) >= self.programs => ExactStatus::NoAnswer,
            status => status,
        };
    }
}

impl Status {
    /// How a plan of so many bytes relates to the least that is possible.
    pub(crate) fn of(bytes: u64, least: u64, timed_out: bool) -> Self {
        match (bytes == least, timed_out) {
            (true, _) => Status::Optimal,
            (false, true) => Status::TimedOut,
            (false, false) => Status::Feasible,
        }
    }
}

/// What the caller may choose.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// How many operators may run at once, from 1 to [`MAX_STREAMS`].
    pub streams: u32,
    /// Whether outputs may take the memory of dying inputs where the graph permits it.
    pub reuse: bool,
    /// Whether integer programs are solved.
    pub exact: Exact,
    /// Wall-clock safety limit in seconds; `None` for none.
    pub time_limit_s: Option<f64>,
    /// How many times as fast as one stream the plan must be, by the cost model
    /// ([`crate::cost`]). Where `None`, it is at most one part in twenty slower than the fastest
    /// that takes no more bytes than program order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<f64>,
    /// What may run at once.
    #[serde(default, skip_serializing_if = "is_default")]
    pub stream_model: StreamModel,
    /// The search ends once a plan takes no more bytes than this in all, persistent ones included.
    #[serde(default, skip_serializing_if = "is_default")]
    pub enough_bytes: u64,
    /// The search ends where it is proved that no plan takes fewer bytes by this many or more.
    #[serde(default, skip_serializing_if = "is_default")]
    pub worth_bytes: u64,
    /// The most bytes that the plan may take in all, persistent ones included. Where order and
    /// layout need more, operators run again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Default for Settings {
    /// [`Settings::SINGLE`].
    fn default() -> Self {
        Settings::SINGLE
    }
}

impl Settings {
    /// One stream, with reuse, without a time limit.
    pub const SINGLE: Settings = Settings {
        streams: 1,
        reuse: true,
        exact: Exact::Auto,
        time_limit_s: None,
        speed: None,
        stream_model: StreamModel::HappensBefore,
        enough_bytes: 0,
        worth_bytes: 0,
        memory_limit_bytes: None,
    };

    /// Whether the settings make sense.
    ///
    /// # Errors
    /// The first setting that does not make sense.
    pub fn check(&self) -> Result<(), SettingsError> {
        let Settings { streams, time_limit_s, speed, .. } = *self;
        if !(1..=MAX_STREAMS).contains(&streams) {
            return Err(SettingsError::Streams { streams });
        }
        if let Some(limit) = time_limit_s.filter(|limit| !limit.is_finite() || *limit < 0.0) {
            return Err(SettingsError::TimeLimit { limit });
        }
        if self.memory_limit_bytes.is_some() && streams > 1 {
            return Err(SettingsError::MemoryLimit { streams });
        }
        match speed {
            Some(speed) if !speed.is_finite() || speed <= 0.0 || streams == 1 => Err(SettingsError::Speed { speed }),
            _ => Ok(()),
        }
    }
}

/// What makes no sense about settings.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SettingsError {
    /// No stream, or more than [`MAX_STREAMS`].
    #[error("streams must be between 1 and {MAX_STREAMS}; found {streams}")]
    Streams {
        /// What was asked for.
        streams: u32,
    },
    /// A time limit that is negative or no number.
    #[error("time_limit_s must be a finite number of seconds, not negative; found {limit}")]
    TimeLimit {
        /// What was asked for.
        limit: f64,
    },
    /// A memory limit for more than one stream.
    #[error("a memory limit is for plans of one stream; found {streams} streams")]
    MemoryLimit {
        /// How many streams were asked for.
        streams: u32,
    },
    /// A speed that is not a finite number above 0, or is asked of one stream.
    #[error("speed must be a finite number above 0, and needs more than one stream; found {speed}")]
    Speed {
        /// What was asked for.
        speed: f64,
    },
}

impl SettingsError {
    /// The variant's name for programs, in snake case; stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Streams { .. } => "invalid_streams",
            Self::TimeLimit { .. } => "invalid_time_limit",
            Self::MemoryLimit { .. } => "invalid_memory_limit",
            Self::Speed { .. } => "invalid_speed",
        }
    }
}

/// One order and layout that was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// How the order was found, for example `program`, `lescea`, `depth_first`.
    pub order: String,
    /// The best layout heuristic for it, for example `size`, `area`.
    pub layout: String,
    /// Most live bytes over the steps, persistent tensors left out.
    pub peak_bytes: u64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Most live bytes over the steps of what is not in the pool, workspace included.
    pub outside_bytes: u64,
}

/// What runs where, and what waits for what, in a plan of more than one stream.
///
/// Each stream runs its operators one after another in the plan's order, which is also the order of
/// launching.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Per operator id its stream, counted from 0.
    pub streams: Vec<u32>,
    /// Pairs (before, after) on different streams: `after` starts when `before` has completed. By
    /// `after` in the plan's order. Empty in the time-step model.
    pub syncs: Vec<(OperatorId, OperatorId)>,
    /// Per operator id its time step, counted from 0. Empty but in the time-step model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub time_steps: Vec<u32>,
    /// Nanoseconds of the whole step, by the cost model.
    pub makespan_ns: u64,
    /// Nanoseconds of all operators one after another.
    pub serial_ns: u64,
    /// Nanoseconds of the longest chain of operators that wait for each other.
    pub critical_path_ns: u64,
}

/// What runs again in a plan that would otherwise take more bytes than its settings allow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recomputation {
    /// The operators, each as often as it runs. `expansion::expand` makes a graph of this sequence;
    /// the plan's order, offsets and reuse pairs are those of that graph.
    pub sequence: Vec<OperatorId>,
    /// Nanoseconds that the extra runs take, as measured or by the cost model.
    pub extra_ns: u64,
    /// Nanoseconds of the step without them.
    pub step_ns: u64,
    /// No plan within the limit has extra runs that take less.
    pub least_extra_ns: u64,
    /// No plan with any number of extra runs takes fewer bytes in all.
    pub floor_bytes: u64,
    /// Bytes in all of the plan without extra runs that this one was made from.
    pub plain_total_bytes: u64,
}

/// An execution order and a memory layout. Bytes everywhere; persistent tensors count only where
/// said.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// SHA-256 of the graph's canonical JSON, in hexadecimal.
    pub graph_digest: String,
    /// What the graph says that its figures may be wrong about; empty where they are exact.
    pub estimate: String,
    /// What was asked for.
    pub settings: Settings,
    /// Operators in execution order.
    pub order: Vec<OperatorId>,
    /// Offset in the pool per tensor id; `None` where it is not in the pool.
    pub offsets: Vec<Option<u64>>,
    /// Reuse pairs that the layout makes use of.
    pub reuse: Vec<ReusePair>,
    /// Streams and waits; `None` for one stream.
    pub schedule: Option<Schedule>,
    /// What runs again; `None` where nothing does. If there is one, the operators and tensors of
    /// this plan are those of the graph of its sequence, and the lower bounds are of plans with the
    /// same extra runs.
    pub recomputation: Option<Recomputation>,
    /// Most live bytes over the steps in program order, without reuse.
    pub program_order_peak_bytes: u64,
    /// Most live bytes over the steps: pool tensors, unpooled tensors, workspace.
    pub peak_bytes: u64,
    /// Most live bytes over the steps of the tensors in the pool; `pool_bytes` less this is
    /// fragmentation.
    pub pool_peak_bytes: u64,
    /// Bytes of the pool: the largest offset + counted size.
    pub pool_bytes: u64,
    /// Most live bytes over the steps of what is not in the pool, workspace included.
    pub outside_bytes: u64,
    /// Bytes of all persistent tensors.
    pub persistent_bytes: u64,
    /// persistent + pool + unpooled.
    pub total_bytes: u64,
    /// No order can have a lower peak.
    pub lower_bound_bytes: u64,
    /// No plan can have a smaller total: at least persistent + the lower bound, more where the pool
    /// and the unpooled bytes cannot but have their peaks at different steps.
    pub total_lower_bound_bytes: u64,
    /// The operator that sets the lower bound.
    pub bound_operator: Option<OperatorId>,
    /// How the lower bound was proved.
    pub bound_route: BoundRoute,
    /// How the plan relates to the best one there is.
    pub status: Status,
    /// What integer programs did.
    pub exact: ExactReport,
    /// What was tried, in a fixed order.
    pub candidates: Vec<Candidate>,
}

impl Plan {
    /// By which share the step-local total, pool + unpooled, exceeds the least that any plan can
    /// have; 0 where both are 0.
    pub fn gap(&self) -> f64 {
        // As floating point, since a plan that was read from a file may claim anything.
        let local = self.pool_bytes as f64 + self.outside_bytes as f64;
        let least = self.total_lower_bound_bytes as f64 - self.persistent_bytes as f64;
        if local == 0.0 { 0.0 } else { local / least - 1.0 }
    }

    /// (pool - peak of the pool's tensors) / pool; 0 for an empty pool.
    pub fn fragmentation(&self) -> f64 {
        if self.pool_bytes == 0 {
            0.0
        } else {
            (self.pool_bytes as f64 - self.pool_peak_bytes as f64) / self.pool_bytes as f64
        }
    }
}
