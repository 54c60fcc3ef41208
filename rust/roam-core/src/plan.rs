//! A plan: an execution order and a memory layout for one graph, with what they cost.

use crate::graph::ReusePair;
use crate::ids::OperatorId;
use serde::{Deserialize, Serialize};

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

/// What the caller may choose.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// How many operators may run at once. Only 1 is planned so far.
    pub streams: u32,
    /// Whether outputs may take the memory of dying inputs where the graph permits it.
    pub reuse: bool,
    /// Wall-clock safety limit in seconds; `None` for none.
    pub time_limit_s: Option<f64>,
}

impl Default for Settings {
    /// One stream, with reuse, without a time limit.
    fn default() -> Self {
        Settings { streams: 1, reuse: true, time_limit_s: None }
    }
}

impl Settings {
    /// Whether the settings make sense; otherwise what does not.
    pub fn check(&self) -> Result<(), String> {
        match self.time_limit_s {
            Some(limit) if !limit.is_finite() || limit < 0.0 => {
                Err(format!("time_limit_s must be a finite number of seconds, not negative; found {limit}"))
            }
            _ => Ok(()),
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
}

/// An execution order and a memory layout. Bytes everywhere; persistent tensors count only where said.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// SHA-256 of the graph's canonical JSON, in hexadecimal.
    pub graph_digest: String,
    /// What was asked for.
    pub settings: Settings,
    /// Operators in execution order.
    pub order: Vec<OperatorId>,
    /// Offset in the pool per tensor id; `None` where it is not in the pool.
    pub offsets: Vec<Option<u64>>,
    /// Reuse pairs that the layout makes use of.
    pub reuse: Vec<ReusePair>,
    /// Most live bytes over the steps in program order, without reuse.
    pub program_order_peak_bytes: u64,
    /// Most live bytes over the steps: pool tensors, outside tensors, workspace.
    pub peak_bytes: u64,
    /// Most live bytes over the steps of the tensors in the pool; `pool_bytes` less this is fragmentation.
    pub pool_peak_bytes: u64,
    /// Bytes of the pool: the largest offset + counted size.
    pub pool_bytes: u64,
    /// Most live bytes over the steps of what is not in the pool, workspace included.
    pub outside_bytes: u64,
    /// Bytes of all persistent tensors.
    pub persistent_bytes: u64,
    /// persistent + pool + outside.
    pub total_bytes: u64,
    /// No order can have a lower peak.
    pub lower_bound_bytes: u64,
    /// No plan can have a smaller total: at least persistent + the lower bound, more where the pool and
    /// what stays outside it cannot but have their peaks at different steps.
    pub total_lower_bound_bytes: u64,
    /// The operator whose cut gives the lower bound.
    pub bound_operator: Option<OperatorId>,
    /// How the plan relates to the best one there is.
    pub status: Status,
    /// What was tried, in a fixed order.
    pub candidates: Vec<Candidate>,
}

impl Plan {
    /// By which share the step-local total, pool + outside, exceeds the least that any plan can have; 0 where both are 0.
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
