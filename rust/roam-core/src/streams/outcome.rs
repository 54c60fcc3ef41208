//! The input and the result of planning several streams.

use super::schedule::Preference;
use crate::cost;
use crate::graph::Graph;
use crate::layout::Layout;
use crate::order::Ordered;
use crate::plan::{Candidate, Plan, Schedule, Settings, Status};
use crate::problem::{Op, Problem, Ten};

/// What the planning of several streams starts from.
pub(crate) struct Input<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) problem: &'a Problem,
    pub(crate) settings: &'a Settings,
    /// Orders for one stream by name, the most promising first.
    pub(crate) bases: Vec<(&'static str, &'a Ordered)>,
    /// What program order takes without reuse, laid out: no plan may take more.
    pub(crate) program_total: u64,
}

/// Those parts of a plan that depend on streams.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) order: Vec<Op>,
    pub(crate) layout: Layout,
    pub(crate) pairs: Vec<(Ten, Ten)>,
    pub(crate) schedule: Schedule,
    pub(crate) peak: u64,
    pub(crate) pool_peak: u64,
    pub(crate) unpooled_bytes: u64,
}

impl Found {
    pub(super) fn total(&self) -> u64 {
        self.layout.pool_bytes + self.unpooled_bytes
    }

    /// The whole plan; whatever does not depend on streams is taken from the plan for one stream.
    pub(crate) fn into_plan(self, problem: &Problem, single: Plan, tried: &[Tried], timed_out: bool) -> Plan {
        let total = self.total() + single.persistent_bytes;
        let mut exact = single.exact;
        exact.conclude(total == single.total_lower_bound_bytes);
        let mut offsets = single.offsets;
        problem.write_offsets(&self.layout.offsets, &mut offsets);
        let candidate = |tried: &Tried| Candidate {
            order: tried.name.clone(),
            layout: tried.layout.into(),
            peak_bytes: tried.peak,
            pool_bytes: tried.pool_bytes,
            outside_bytes: tried.total - tried.pool_bytes,
        };
        Plan {
            order: self.order.iter().map(|&op| problem.operator_id(op)).collect(),
            offsets,
            reuse: problem.pair_ids(&self.pairs),
            peak_bytes: self.peak,
            pool_peak_bytes: self.pool_peak,
            pool_bytes: self.layout.pool_bytes,
            outside_bytes: self.unpooled_bytes,
            total_bytes: total,
            status: Status::of(total, single.total_lower_bound_bytes, timed_out),
            exact,
            candidates: tried.iter().map(candidate).collect(),
            schedule: Some(self.schedule),
            ..single
        }
    }
}

/// How many times as fast as one stream any number of streams can be at most, by the model of
/// time.
pub(crate) fn most_speed(graph: &Graph) -> f64 {
    speed(cost::serial_ns(graph), cost::critical_path_ns(graph))
}

/// 1 where nothing takes time.
pub(super) fn speed(serial_ns: u64, makespan_ns: u64) -> f64 {
    if makespan_ns == 0 { 1.0 } else { serial_ns as f64 / makespan_ns as f64 }
}

/// What one schedule came to.
#[derive(Clone, Debug)]
pub(crate) struct Tried {
    /// How the order was found.
    pub(crate) name: String,
    pub(crate) layout: &'static str,
    pub(crate) peak: u64,
    pub(crate) pool_bytes: u64,
    pub(super) total: u64,
    pub(super) makespan_ns: u64,
    /// How to make it again; `None` for the plan for one stream.
    pub(super) recipe: Option<Recipe>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Recipe {
    pub(super) base: usize,
    pub(super) preference: Preference,
    pub(super) ceiling: u64,
}

/// What the search came to.
pub(crate) struct Outcome {
    /// Every schedule that takes no more than program order; the first is for one stream.
    pub(crate) tried: Vec<Tried>,
    /// The best plan, or the speed of the fastest where none is as fast as asked for.
    pub(crate) best: Result<Found, f64>,
    /// Whether a deadline cut the search short.
    pub(crate) timed_out: bool,
}

/// An order for one stream as it has been laid out.
pub(crate) struct Single<'a> {
    pub(crate) name: &'static str,
    pub(crate) problem: &'a Problem,
    pub(crate) ordered: &'a Ordered,
    pub(crate) layout: &'a Layout,
}

impl Tried {
    pub(super) fn new(name: String, found: &Found, recipe: Option<Recipe>) -> Self {
        Tried {
            name,
            layout: found.layout.method,
            peak: found.peak,
            pool_bytes: found.layout.pool_bytes,
            total: found.total(),
            makespan_ns: found.schedule.makespan_ns,
            recipe,
        }
    }
}
