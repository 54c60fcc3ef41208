//! `roam.baseline`.

use crate::errors::{Class, Fault};
use crate::graph::PyGraph;
use crate::guard::detached;
use crate::plan::PyCandidate;
use pyo3::prelude::*;
use roam_core::plan::Candidate;
use roam_core::stages::Prepared;

/// What one order and one layout need by themselves, without any search: to compare with, or to show what a method does.
///
/// The result is no plan. It may well need more than program order, and nothing can run it.
///
/// Args:
///     graph: the step.
///     order: ``program``, ``lescea``, ``depth_first``, ``eager_updates``, ``memory_aware_updates`` (the published rule
///         for weight updates; Shu et al., arXiv 2310.19295), ``early_frees``, ``reversed`` or ``hill_valley``.
///     layout: ``size``, ``area``, ``lifetime``, ``first_fit`` (each in that sequence, the last by creation, at the lowest free
///         offset), ``skyline`` (LLFB), ``weighted`` (valleys filled by weighted times) or ``tree`` (the published subgraph tree).
///     reuse: whether an output may take the memory of an input that dies, where the graph permits it.
///
/// Raises:
///     PlanError: there is no order or layout of that name.
#[pyfunction]
#[pyo3(signature = (graph, order = "program", layout = "size", *, reuse = true))]
pub(crate) fn baseline(
    py: Python<'_>,
    graph: &Bound<'_, PyGraph>,
    order: &str,
    layout: &str,
    reuse: bool,
) -> PyResult<PyCandidate> {
    let known = |what: &str, name: &str, names: Vec<&str>| {
        if names.contains(&name) {
            return Ok(());
        }
        let message = format!("there is no {what} {name:?}, only {}", names.join(", "));
        Err(Fault { class: Class::Plan, message, code: "unknown_method", site: None }.raise(py))
    };
    known("order", order, Prepared::orders().collect())?;
    known("layout", layout, Prepared::layouts().collect())?;
    let graph = graph.get().inner().clone();
    let found = detached(py, || {
        let prepared = Prepared::new(&graph, reuse);
        let ordered = prepared.order(order)?;
        let pool_bytes = prepared.pool_bytes(&ordered, layout)?;
        Some(Candidate {
            order: order.to_owned(),
            layout: layout.to_owned(),
            peak_bytes: ordered.peak_bytes(),
            pool_bytes,
            outside_bytes: ordered.outside_peak_bytes(),
        })
    })?;
    // Names are known and nothing stops the work, so there is something.
    found.map(PyCandidate::new).ok_or_else(|| {
        let message = format!("the order {order:?} cannot be laid out by {layout:?}");
        Fault { class: Class::Plan, message, code: "unknown_method", site: None }.raise(py)
    })
}
