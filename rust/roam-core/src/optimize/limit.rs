//! Plans within a memory limit: where order and layout alone need more, operators run again.

use super::OptimizeError;
use crate::control::{Stop, Watch};
use crate::cost;
use crate::expansion::{SequenceError, expand};
use crate::graph::{Graph, OperatorId, Site};
use crate::plan::{Plan, Recomputation, Settings, Status};
use crate::recompute::{self, Complete, Found, Repeats, search};

/// Every limit is searched together with the lesser ones of a ladder: so many even shares of the
/// step-local bytes of the plan without extra runs.
const RUNGS: u64 = 20;
/// Where nothing is found, the least limit for which something is found is sought to one part in so
/// many of these bytes.
const PARTS: u64 = 200;
/// How often the search is asked for less, because a layout took more than was live.
const ATTEMPTS: usize = 6;
/// How many sequences of one search are planned: the cheapest ones first.
const MOST_PLANNED: usize = 2;

/// A plan of at most so many bytes in all, made from the plan without extra runs. `plan_of` plans a
/// graph, and may stop at a plan of the limit.
///
/// The plan is the cheapest of those that are found for the limit and for all rungs below, and what
/// is found for a rung does not depend on the limit. So no plan has more extra time than the plan of
/// a rung below its limit. A rung is left out only where its bound shows that nothing cheaper can be
/// found there, or when the watch stops the search.
pub(super) fn within(
    graph: &Graph,
    plain: &Plan,
    settings: &Settings,
    limit_bytes: u64,
    watch: &Watch,
    plan_of: impl Fn(&Graph, &Settings) -> Result<Plan, OptimizeError>,
) -> Result<Plan, OptimizeError> {
    if graph.operators().is_empty() {
        // Without operators there is one plan.
        return Err(OptimizeError::BelowFloor { limit_bytes, floor_bytes: plain.total_bytes, site: None });
    }
    let repeats = Repeats::new(graph);
    let mut floor = recompute::floor(&repeats, watch);
    let mut limits = Limits {
        graph,
        plain,
        settings,
        watch,
        plan_of,
        complete: Complete::new(graph, watch),
        persistent_bytes: graph.persistent_bytes(),
    };
    // Whether all schedules can be searched must not depend on the limit: of a lesser one, no plan may
    // be found that is better.
    let floor_bytes = floor.bytes.saturating_sub(limits.persistent_bytes);
    let least = limits.complete.as_ref().and_then(|complete| complete.least_bytes(floor_bytes));
    if least.is_none() || limits.cheapest(limits.share(RUNGS - 1, RUNGS), 0).is_none() {
        limits.complete = None;
    }
    let is_proof = limits.complete.as_ref().is_some_and(Complete::is_proof);
    if let Some(least) = least.filter(|_| is_proof) {
        floor.bytes = floor.bytes.max(limits.persistent_bytes.saturating_add(least));
    }
    let least_ns = |limit_bytes| {
        let least = recompute::least_extra_ns(&repeats, limit_bytes, watch);
        let ns = least.ns?;
        let ns = match limits.cheapest(limit_bytes, ns).filter(|_| is_proof) {
            None => ns,
            Some(cheapest) => cheapest?.extra_ns.max(ns),
        };
        Some((ns, least.again))
    };
    let rungs = (1..RUNGS).rev().map(|rung| limits.share(rung, RUNGS)).filter(|&rung| rung < limit_bytes);
    let mut best: Option<Within> = None;
    for limit in std::iter::once(limit_bytes).chain(rungs).take_while(|&limit| limit >= floor.bytes) {
        // Where nothing keeps to the limit, neither does the search find anything.
        let Some((least_ns, again)) = least_ns(limit) else { break };
        // Late is better than nothing, but rungs are for plans that are better still.
        let is_over = match watch.check() {
            Ok(()) => false,
            Err(Stop::TimedOut) => limit < limit_bytes,
            Err(Stop::Cancelled) => true,
        };
        if is_over || best.as_ref().is_some_and(|best| best.extra_ns <= least_ns) {
            break;
        }
        let found = limits.find(limit, least_ns, &again)?;
        best = best.into_iter().chain(found).min_by_key(|one| one.extra_ns);
    }
    let mut least_bytes = plain.total_bytes;
    if best.is_none() && limit_bytes >= floor.bytes {
        let least = limits.least_above(limit_bytes)?;
        least_bytes = least.as_ref().map_or(least_bytes, |least| least.plan.total_bytes);
        // By another order than that of the search it may take less than was asked for.
        best = least.filter(|least| least.plan.total_bytes <= limit_bytes);
    }
    if let Some(best) = best {
        return Ok(finished(graph, plain, best, settings, least_ns(limit_bytes).map_or(0, |(ns, _)| ns), floor.bytes));
    }
    if watch.check() == Err(Stop::Cancelled) {
        return Err(OptimizeError::Cancelled);
    }
    let floor_bytes = floor.bytes;
    if limit_bytes >= floor_bytes {
        return Err(OptimizeError::LimitNotFound { limit_bytes, least_bytes, floor_bytes });
    }
    let site = floor.operator.map(|id| Site::of(graph.operator(id)));
    Err(OptimizeError::BelowFloor { limit_bytes, floor_bytes, site })
}

/// A plan of a sequence's graph.
struct Within {
    sequence: Vec<OperatorId>,
    extra_ns: u64,
    plan: Plan,
}

/// Finds plans within limits.
struct Limits<'a, F> {
    graph: &'a Graph,
    plain: &'a Plan,
    settings: &'a Settings,
    watch: &'a Watch,
    plan_of: F,
    /// All schedules, where the graph is small.
    complete: Option<Complete<'a>>,
    persistent_bytes: u64,
}

impl<F: Fn(&Graph, &Settings) -> Result<Plan, OptimizeError>> Limits<'_, F> {
    /// The limit of so many parts of the step-local bytes of the plan without extra runs.
    fn share(&self, part: u64, parts: u64) -> u64 {
        let local_bytes = self.plain.total_bytes.saturating_sub(self.persistent_bytes);
        self.persistent_bytes + (u128::from(local_bytes) * u128::from(part) / u128::from(parts)) as u64
    }

    /// The cheapest of all schedules within a limit, where the graph is small; see
    /// [`Complete::cheapest`].
    fn cheapest(&self, limit_bytes: u64, least_ns: u64) -> Option<Option<Found>> {
        self.complete.as_ref()?.cheapest(limit_bytes.saturating_sub(self.persistent_bytes), least_ns)
    }

    /// Sequences within a limit of live bytes, cheapest first.
    fn sequences(&self, limit_bytes: u64, least_ns: u64, again: &[OperatorId]) -> Vec<Found> {
        match self.cheapest(limit_bytes, least_ns) {
            Some(cheapest) => cheapest.into_iter().collect(),
            None => {
                let local_bytes = limit_bytes - self.persistent_bytes;
                search(self.graph, &self.plain.order, local_bytes, least_ns, again, self.watch)
            }
        }
    }

    /// The cheapest plan that is found within a limit. The search ends early near `least_ns`, and
    /// tries to run `again` again.
    ///
    /// The live bytes of a sequence in its own order are what the search goes by; the plan of its
    /// graph may take less, by another order and reuse, or more, by fragmentation, in which case the
    /// search is asked for as much less as was missed.
    fn find(&self, limit_bytes: u64, least_ns: u64, again: &[OperatorId]) -> Result<Option<Within>, OptimizeError> {
        let mut target = limit_bytes;
        let mut attempt = Settings { memory_limit_bytes: None, ..self.settings.clone() };
        attempt.enough_bytes = attempt.enough_bytes.max(limit_bytes);
        for _ in 0..ATTEMPTS {
            let mut over = u64::MAX;
            for one in self.sequences(target, least_ns, again).into_iter().take(MOST_PLANNED) {
                let expanded = match expand(self.graph, &one.sequence) {
                    Ok(expanded) => expanded,
                    // More runs than a graph may have operators, or more bytes than it may count.
                    Err(SequenceError::Graph(_)) => continue,
                    Err(error) => return Err(OptimizeError::InvalidSequence(error)),
                };
                let plan = (self.plan_of)(&expanded.graph, &attempt)?;
                if plan.total_bytes <= limit_bytes {
                    let extra_ns = cost::extra_ns(self.graph, &one.sequence);
                    return Ok(Some(Within { sequence: one.sequence, extra_ns, plan }));
                }
                over = over.min(plan.total_bytes - limit_bytes);
            }
            let local_bytes = target.saturating_sub(self.persistent_bytes);
            match local_bytes.checked_sub(over.max(local_bytes / 500)) {
                Some(less) if over != u64::MAX && self.watch.check().is_ok() => target = self.persistent_bytes + less,
                _ => break,
            }
        }
        Ok(None)
    }

    /// A plan of few bytes, for a limit for which none is found: for the least of the higher limits
    /// for which one is found.
    fn least_above(&self, limit_bytes: u64) -> Result<Option<Within>, OptimizeError> {
        let mut least = None;
        let mut none = (0..PARTS).rev().find(|&part| self.share(part, PARTS) <= limit_bytes).unwrap_or(0);
        let (mut some, mut stride) = (PARTS, 1);
        while none + 1 < some && self.watch.check().is_ok() {
            let next = if some == PARTS { (none + stride).min(PARTS - 1) } else { none + (some - none) / 2 };
            // Any plan will do.
            match self.find(self.share(next, PARTS), u64::MAX, &[])? {
                Some(found) => (some, least) = (next, Some(found)),
                None => (none, stride) = (next, 2 * stride),
            }
        }
        Ok(least)
    }
}

/// The plan of a sequence's graph as a plan of the step itself.
fn finished(
    graph: &Graph,
    plain: &Plan,
    found: Within,
    settings: &Settings,
    least_extra_ns: u64,
    floor_bytes: u64,
) -> Plan {
    let Within { sequence, extra_ns, plan } = found;
    let (step_ns, plain_total_bytes) = (cost::serial_ns(graph), plain.total_bytes);
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
