//! `roam.verify`.

use crate::errors::plan_error;
use crate::graph::PyGraph;
use crate::guard::detached;
use crate::plan::PyPlan;
use pyo3::prelude::*;

/// Checks that a plan is valid for a graph and that every figure it claims is true.
///
/// Shares no code with the planner.
///
/// Raises:
///     PlanError: it is not; `code` tells how.
#[pyfunction]
pub(crate) fn verify(py: Python<'_>, graph: &Bound<'_, PyGraph>, plan: &Bound<'_, PyPlan>) -> PyResult<()> {
    let (graph, plan) = (graph.get().inner(), plan.get().inner());
    detached(py, || roam_core::verify::verify(graph, plan))?.map_err(|error| plan_error(py, &error))
}
