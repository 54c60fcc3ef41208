//! `roam.baseline`.

use crate::convert::{array, to_i64};
use crate::errors::{Class, Fault};
use crate::graph::PyGraph;
use crate::guard::detached;
use crate::plan::PyCandidate;
use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use roam_core::baseline::caching_allocator::{Event, Segments, replay};
use roam_core::plan::Candidate;
use roam_core::stages::{Needs, Prepared};

/// What one order and one layout need by themselves, without any search: to compare with, or to
/// show what a method does.
///
/// The result is no plan. It may well need more than program order, and nothing can run it.
///
/// Args:
///     graph: the step.
///     order: ``program``, ``lescea``, ``depth_first``, ``eager_updates``, ``memory_aware_updates`` (the published rule
///         for weight updates; Shu et al., arXiv 2310.19295), ``early_frees``, ``reversed`` or ``hill_valley``; or one of
///         PyTorch's Inductor: ``inductor_lpmf``, ``inductor_bfs`` or ``inductor_dfs``.
///     layout: ``size``, ``area``, ``lifetime``, ``first_fit`` (blocks by falling size, size times lifetime, or lifetime,
///         or as they are made; each at the lowest free offset), ``skyline`` (LLFB), ``weighted`` (valleys filled by
///         weighted times) or ``tree`` (the published subgraph tree; ``tree:100`` searches no leaf of more than 100 tensors); or one of another project: ``executorch``, ``tvm_size``, ``tvm_conflicts``, ``tvm_hill_climb`` or ``xla``. With
///         ``caching_allocator`` or ``caching_allocator_expandable`` (with expandable segments) there is no pool but PyTorch's
///         allocator for CUDA: ``pool_bytes`` is what it reserves in the long run for all but the persistent tensors (in
///         program order and without reuse, this is what eager PyTorch reserves), and ``outside_bytes`` is 0. See docs/reference/baselines.md.
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
    check_known(py, "order", order, Prepared::orders())?;
    if !Prepared::has_layout(layout) {
        check_known(py, "layout", layout, Prepared::layouts())?;
    }
    let graph = graph.get().inner().clone();
    let found = detached(py, || {
        let prepared = Prepared::new(&graph, reuse);
        let ordered = prepared.order(order)?;
        let Needs { pool_bytes, unpooled_bytes } = prepared.needs(&ordered, layout)?;
        Some(Candidate {
            order: order.to_owned(),
            layout: layout.to_owned(),
            peak_bytes: ordered.peak_bytes(),
            pool_bytes,
            outside_bytes: unpooled_bytes,
        })
    })?;
    // The names are known and nothing stops the work, so there is a result unless the tensors are
    // too large for the caching allocator.
    found
        .map(PyCandidate::new)
        .ok_or_else(|| unknown(py, format!("the order {order:?} cannot be laid out by {layout:?}")))
}

/// The order that one method finds: the numbers of the operators, first to last. The methods have
/// the names that :func:`roam.baseline` lists for `order`.
#[pyfunction]
#[pyo3(signature = (graph, order, *, reuse = true))]
pub(crate) fn baseline_order(
    py: Python<'_>,
    graph: &Bound<'_, PyGraph>,
    order: &str,
    reuse: bool,
) -> PyResult<Py<PyArray1<i64>>> {
    check_known(py, "order", order, Prepared::orders())?;
    let graph = graph.get().inner().clone();
    let found = detached(py, || {
        let ordered = Prepared::new(&graph, reuse).order(order)?;
        let id = |&position: &u32| to_i64(graph.program_order()[position as usize].0);
        Some(ordered.positions().iter().map(id).collect())
    })?;
    array(py, found.ok_or_else(|| unknown(py, format!("there is no order {order:?}")))?)
}

/// What PyTorch's caching allocator for CUDA reserves after each of a sequence of events, by its
/// rules (see `roam_core::baseline::caching_allocator`). It serves to check the simulator of these
/// rules against a recorded sequence.
///
/// Args:
///     events: (id, bytes) for an allocation, (id, None) for its free.
///     expandable: whether segments are expandable.
///
/// Raises:
///     ValueError: an id is in use already, or is freed while it is not there, or is too large.
#[pyfunction]
#[pyo3(signature = (events, *, expandable = false))]
pub(crate) fn caching_allocator_bytes(
    py: Python<'_>,
    events: Vec<(u64, Option<u64>)>,
    expandable: bool,
) -> PyResult<Py<PyArray1<i64>>> {
    let event = |(id, size)| match size {
        Some(size_bytes) => Event::Alloc { id, size_bytes },
        None => Event::Free { id },
    };
    let events: Vec<Event> = events.into_iter().map(event).collect();
    let segments = if expandable { Segments::Expandable } else { Segments::Fixed };
    let reserved = detached(py, || replay(&events, segments))?;
    let reserved = reserved.map_err(|error| PyValueError::new_err(error.to_string()))?;
    array(py, reserved.into_iter().map(to_i64).collect())
}

fn check_known<'a>(py: Python<'_>, what: &str, name: &str, names: impl Iterator<Item = &'a str>) -> PyResult<()> {
    let names: Vec<&str> = names.collect();
    if names.contains(&name) {
        return Ok(());
    }
    Err(unknown(py, format!("there is no {what} {name:?}, only {}", names.join(", "))))
}

fn unknown(py: Python<'_>, message: String) -> PyErr {
    Fault { class: Class::Plan, message, code: "unknown_method", site: None }.raise(py)
}
