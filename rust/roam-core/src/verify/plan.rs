//! The whole check of a plan.

use super::checks::{check_constraints, check_figures, check_offsets, check_overlaps, check_reuse, steps};
use super::lives::Lives;
use super::violation::PlanViolation;
use super::{repeats, streams};
use crate::graph::{Graph, OperatorId};
use crate::plan::{MAX_STREAMS, Plan};

/// Checks that the plan is one for this graph, respects every constraint, never lets two live
/// tensors share bytes, and claims nothing that is not so. Near-linear in the graph's size.
///
/// # Errors
/// The first [`PlanViolation`] found.
pub fn verify(graph: &Graph, plan: &Plan) -> Result<(), PlanViolation> {
    if plan.graph_digest != graph.digest() {
        let (expected, found) = (graph.digest().to_owned(), plan.graph_digest.clone());
        return Err(PlanViolation::GraphDigest { expected, found });
    }
    if let Some(limit_bytes) = plan.settings.memory_limit_bytes.filter(|&limit| plan.total_bytes > limit) {
        return Err(PlanViolation::OverLimit { total_bytes: plan.total_bytes, limit_bytes });
    }
    if plan.estimate != graph.estimate() {
        return Err(PlanViolation::Estimate);
    }
    let (expanded, step) = match &plan.recomputation {
        None => (None, steps(graph, &plan.order)?),
        Some(recomputation) => {
            let (expanded, step) = repeats::expanded(graph, plan, recomputation)?;
            (Some(expanded), step)
        }
    };
    let original = graph;
    let graph = expanded.as_ref().unwrap_or(graph);
    match (plan.settings.streams, &plan.schedule) {
        (2.., _) if expanded.is_some() => {
            return Err(PlanViolation::Streams { streams: plan.settings.streams });
        }
        (1, None) => {}
        (2..=MAX_STREAMS, Some(schedule)) => return streams::verify(graph, plan, schedule, &step),
        (streams, _) => return Err(PlanViolation::Streams { streams }),
    }
    let runs_before = |first: OperatorId, second: OperatorId| step[first.index()] < step[second.index()];
    check_constraints(graph, runs_before)?;
    check_offsets(graph, plan)?;
    let pairs = check_reuse(graph, plan, runs_before)?;
    let lives = Lives::new(graph, &step);
    check_overlaps(graph, plan, &lives, &pairs)?;
    check_figures(original, graph, plan, lives.peaks(graph, &pairs))
}
