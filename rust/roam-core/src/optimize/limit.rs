//! Plans within a memory limit: where order and layout alone need more, operators run again.

use super::OptimizeError;
use crate::control::{Stop, Watch};
use crate::cost;
use crate::expansion::expand;
use crate::graph::{Graph, OperatorId, Site};
use crate::plan::{Plan, Recomputation, Settings, Status};
use crate::recompute::{self, Repeats, search};

/// How often the search is asked for less, because a layout took more than was live.
const ATTEMPTS: usize = 6;
/// How many sequences of one search are planned: the cheapest ones first.
const MOST_PLANNED: usize = 2;

/// A plan of at most so many bytes in all, made from the plan without extra runs.
///
/// The live bytes of a sequence in its own order are what the search goes by; the plan of its graph
/// may take less, by another order and reuse, or more, by fragmentation, in which case the search
/// is asked for as much less as was missed. `plan_of` plans a graph, and may stop at a plan of the
/// limit.
pub(super) fn within(
    graph: &Graph,
    plain: Plan,
    settings: &Settings,
    limit_bytes: u64,
    watch: &Watch,
    plan_of: impl Fn(&Graph, &Settings) -> Result<Plan, OptimizeError>,
) -> Result<Plan, OptimizeError> {
    let repeats = Repeats::new(graph);
    let floor = recompute::floor(&repeats, watch);
    let refused = |least_bytes| {
        let site = floor.operator.map(|id| Site::of(graph.operator(id)));
        if watch.check() == Err(Stop::Cancelled) {
            OptimizeError::Cancelled
        } else if limit_bytes < floor.bytes {
            OptimizeError::BelowFloor { limit_bytes, floor_bytes: floor.bytes, site }
        } else {
            OptimizeError::LimitNotFound { limit_bytes, least_bytes, floor_bytes: floor.bytes }
        }
    };
    let mut least_bytes = plain.total_bytes;
    let persistent_bytes = graph.persistent_bytes();
    let Some(mut target) = limit_bytes.checked_sub(persistent_bytes).filter(|_| limit_bytes >= floor.bytes) else {
        return Err(refused(least_bytes));
    };
    let mut attempt = Settings { memory_limit_bytes: None, ..settings.clone() };
    attempt.enough_bytes = attempt.enough_bytes.max(limit_bytes);
    // Where nothing keeps to the limit, neither does the search find anything.
    let least_ns = recompute::least_extra_ns(&repeats, limit_bytes, watch).ns.unwrap_or(0);
    for _ in 0..ATTEMPTS {
        let mut over = u64::MAX;
        for one in search(graph, &plain.order, target, least_ns, watch).into_iter().take(MOST_PLANNED) {
            let expanded = expand(graph, &one.sequence).map_err(OptimizeError::InvalidSequence)?;
            let plan = plan_of(&expanded.graph, &attempt)?;
            least_bytes = least_bytes.min(plan.total_bytes);
            if plan.total_bytes <= limit_bytes {
                return Ok(finished(graph, &plain, plan, one.sequence, settings, least_ns, floor.bytes));
            }
            over = over.min(plan.total_bytes - limit_bytes);
        }
        match target.checked_sub(over.max(target / 500)) {
            Some(less) if over != u64::MAX && watch.check().is_ok() => target = less,
            _ => break,
        }
    }
    Err(refused(least_bytes))
}

/// The plan of a sequence's graph as a plan of the step itself.
fn finished(
    graph: &Graph,
    plain: &Plan,
    plan: Plan,
    sequence: Vec<OperatorId>,
    settings: &Settings,
    least_extra_ns: u64,
    floor_bytes: u64,
) -> Plan {
    let (step_ns, extra_ns) = (cost::serial_ns(graph), cost::extra_ns(graph, &sequence));
    let plain_total_bytes = plain.total_bytes;
    let status = if plain.status == Status::TimedOut && plan.status == Status::Feasible {
        Status::TimedOut
    } else {
        plan.status
    };
    let recomputation = Recomputation { sequence, extra_ns, step_ns, least_extra_ns, floor_bytes, plain_total_bytes };
    Plan {
        graph_digest: graph.digest().to_owned(),
        settings: settings.clone(),
        program_order_peak_bytes: plain.program_order_peak_bytes,
        recomputation: Some(recomputation),
        status,
        ..plan
    }
}
