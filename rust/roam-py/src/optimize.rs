//! `roam.optimize`.

use crate::errors::{Class, Fault, interrupted};
use crate::graph::PyGraph;
use crate::plan::PyPlan;
use crate::solver::Cbc;
use crate::worker::on_worker;
use pyo3::prelude::*;
use roam_core::optimize::{Control, OptimizeError, optimize_timed};
use roam_core::plan::{Exact, MAX_STREAMS, Settings, StreamModel};
use std::sync::Arc;

/// Plans a graph; see `roam.optimize`, which takes a `torch.fx.GraphModule` as well.
#[pyfunction]
#[pyo3(signature = (
    graph, streams = 1, reuse = true, time_limit_s = None, exact = "auto", progress = None, *,
    speed = None, stream_model = "happens_before", enough_bytes = 0, worth_bytes = 0, memory_limit_bytes = None
))]
#[allow(clippy::too_many_arguments)] // Keyword arguments of the Python function.
pub(crate) fn optimize(
    py: Python<'_>,
    graph: &PyGraph,
    streams: i64,
    reuse: bool,
    time_limit_s: Option<f64>,
    exact: &str,
    progress: Option<Py<PyAny>>,
    speed: Option<f64>,
    stream_model: &str,
    enough_bytes: u64,
    worth_bytes: u64,
    memory_limit_bytes: Option<u64>,
) -> PyResult<PyPlan> {
    let refuse = |code: &str, message: String| Fault { class: Class::Plan, message, code, site: None }.raise(py);
    let Some(streams) = u32::try_from(streams).ok().filter(|streams| (1..=MAX_STREAMS).contains(streams)) else {
        let message = format!("streams must be between 1 and {MAX_STREAMS}, not {streams}");
        return Err(refuse("invalid_streams", message));
    };
    let stream_model = match stream_model {
        "happens_before" => StreamModel::HappensBefore,
        "time_step" => StreamModel::TimeStep,
        other => {
            let message = format!("stream_model must be \"happens_before\" or \"time_step\", not {other:?}");
            return Err(refuse("invalid_stream_model", message));
        }
    };
    let exact = match exact {
        "auto" => Exact::Auto,
        "off" => Exact::Off,
        "required" => Exact::Required,
        _ => {
            let message = format!("exact must be \"auto\", \"required\" or \"off\", not {exact:?}");
            return Err(refuse("invalid_exact", message));
        }
    };
    let settings = Settings {
        streams,
        reuse,
        exact,
        time_limit_s,
        speed,
        stream_model,
        enough_bytes,
        worth_bytes,
        memory_limit_bytes,
    };
    settings.check().map_err(|fault| refuse(fault.code(), fault.to_string()))?;
    let graph = graph.inner().clone();
    let control = Control { solver: Some(Arc::new(Cbc)), ..Control::default() };
    let (interrupt, result) =
        on_worker(py, control, progress, move |control| optimize_timed(&graph, &settings, control))?;
    match (interrupt, result) {
        (Some(_), Ok((plan, timings))) => Err(interrupted(py, "PlanningInterrupted", PyPlan::new(plan, timings))),
        (Some(interrupt), Err(_)) => Err(interrupt),
        (None, Ok((plan, timings))) => Ok(PyPlan::new(plan, timings)),
        (None, Err(error @ (OptimizeError::SolverUnavailable { .. } | OptimizeError::SolverFailed { .. }))) => {
            Err(Fault { class: Class::Solver, message: error.to_string(), code: error.code(), site: None }.raise(py))
        }
        (None, Err(error)) => {
            let (message, code, site) = (error.to_string(), error.code(), error.site());
            let raised = Fault { class: Class::Plan, message, code, site }.raise(py);
            if let Some(bytes) = error.least_bytes() {
                raised.value(py).setattr("least_bytes", bytes)?;
            }
            Err(raised)
        }
    }
}
