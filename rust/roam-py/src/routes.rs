//! The exact routes side by side, for tests and benchmarks.

use crate::graph::PyGraph;
use crate::guard::detached;
use crate::plan::report;
use crate::solver::Cbc;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use roam_core::stages::Prepared;

/// The peak that the heuristics reach for a graph, and the peak that each exact route reaches from
/// the best order of the heuristics.
///
/// Returns: a dict of bytes (`program_order`, `heuristics`, `search`, `search_bound`; with
/// `programs` also `programs` and `programs_bound`) and `report`, what became of the integer
/// programs. Ctrl-C takes effect only once everything is done.
#[pyfunction]
#[pyo3(signature = (graph, reuse = true, programs = true))]
pub(crate) fn compare_routes<'py>(
    py: Python<'py>,
    graph: &Bound<'py, PyGraph>,
    reuse: bool,
    programs: bool,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let graph = graph.get().inner().clone();
    let compare = move || {
        let prepared = Prepared::new(&graph, reuse);
        let program_order = prepared.order("program")?;
        let start = prepared.heuristic()?;
        let search = prepared.lower_peaks(&start)?;
        let programs = if programs { Some(prepared.solve_peaks(&start, &Cbc)?) } else { None };
        Some((program_order, start, search, programs))
    };
    let Some((program_order, start, search, programs)) = detached(py, compare)? else { return Ok(None) };
    let routes = PyDict::new(py);
    routes.set_item("program_order", program_order.peak_bytes())?;
    routes.set_item("heuristics", start.peak_bytes())?;
    routes.set_item("search", search.0.peak_bytes())?;
    routes.set_item("search_bound", search.1)?;
    if let Some((ordered, bound, exact)) = programs {
        routes.set_item("programs", ordered.peak_bytes())?;
        routes.set_item("programs_bound", bound)?;
        routes.set_item("report", report(py, &exact)?)?;
    }
    Ok(Some(routes))
}
