//! Made-up steps and buffers, for benchmarks and tests.

use crate::errors::graph_error;
use crate::graph::PyGraph;
use crate::guard::detached;
use crate::layout::PyBuffers;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use roam_core::packing::Instance;
use roam_core::synthetic::buffers::Style;
use roam_core::synthetic::steps::Family;

/// A made-up graph, the same every time.
///
/// Args:
///     family: a training step: ``deep`` (a transformer of as many layers as it takes), ``wide`` (very
///         many branches of one layer that are added up) or ``branching`` (a chain of cells of several
///         unequal branches each); or operators without phases: ``parallel`` (chains of 100 operators
///         each), ``linked`` (each reads two results from anywhere before it) or ``window`` (each reads
///         up to three of the last 64 results).
///     operators: about how many.
///
/// Raises:
///     ValueError: there is no such family.
#[pyfunction]
pub(crate) fn synthetic_step(py: Python<'_>, family: &str, operators: u64) -> PyResult<PyGraph> {
    let Some(family) = Family::ALL.into_iter().find(|known| known.name() == family) else {
        return Err(unknown("family", family, Family::ALL.map(Family::name)));
    };
    let graph = detached(py, || family.step(operators))?.map_err(|error| graph_error(py, &error))?;
    Ok(PyGraph::new(graph))
}

/// Made-up buffers; equal seeds give equal buffers.
///
/// Args:
///     style: ``wide``, ``narrow``, ``skewed``, ``training``, ``replaced`` or ``dissected`` (docs/benchmarks/index.md).
///     count: about how many.
///     seed: of the random numbers.
///
/// Raises:
///     ValueError: there is no such style.
#[pyfunction]
#[pyo3(signature = (style, count, seed = 1))]
pub(crate) fn synthetic_buffers(py: Python<'_>, style: &str, count: u32, seed: u64) -> PyResult<PyBuffers> {
    let Some(style) = Style::ALL.into_iter().find(|known| known.name() == style) else {
        return Err(unknown("style", style, Style::ALL.map(Style::name)));
    };
    detached(py, || Instance::from(style.buffers(count, seed))).map(PyBuffers::new)
}

fn unknown<const N: usize>(what: &str, name: &str, names: [&str; N]) -> PyErr {
    PyValueError::new_err(format!("there is no {what} {name:?}, only {}", names.join(", ")))
}
