//! `roam.optimize`.

use crate::apart::apart;
use crate::errors::{Class, Fault, interrupted};
use crate::graph::graph_argument;
use crate::plan::PyPlan;
use crate::solver::Cbc;
use pyo3::prelude::*;
use roam_core::optimize::{Control, OptimizeError, optimize_timed};
use roam_core::plan::{Exact, MAX_STREAMS, Settings, StreamModel};
use std::sync::Arc;

/// Finds an execution order and a memory layout that use little memory, and proves how little is possible.
///
/// The same graph and settings give the same plan on any number of threads, unless the time limit cuts the search short.
/// No plan is worse than program order. Other Python threads run meanwhile. Ctrl-C ends the search: `PlanningInterrupted`, a
/// ``KeyboardInterrupt``, brings the best plan so far.
///
/// Args:
///     graph: what to plan: a graph, or a `torch.fx.GraphModule` (see `Graph.from_fx`).
///     streams: how many operators may run at once, from 1 to 64.
///     reuse: whether an output may take the memory of an input that dies, where the graph permits it.
///     time_limit_s: wall-clock limit in seconds; at its end the best plan so far is returned, with status
///         ``timed_out``. No limit where None.
///     exact: whether integer programs are solved where that can lower the total or raise the bound, by CBC in processes
///         of their own: ``auto`` (where CBC can be used; the plan says so if not), ``required`` (an error where it cannot, or
///         fails on every program) or ``off``.
///     speed: with several streams, how many times as fast as one stream the plan must be, by the model of time. Of
///         the plans found that are, and that take no more bytes than program order, it is the one with the fewest. Where
///         None, those count that are at most five percent slower than the fastest.
///     stream_model: ``happens_before``, whose plans are safe under every timing, or ``time_step``, the model of the
///         literature, for comparison: its plans must not be run.
///     enough_bytes: the search ends once a plan takes no more than this in all, persistent tensors included.
///     worth_bytes: the search ends where it is proved that no plan takes so many bytes less than the best so far.
///     progress: called on the calling thread with the stage that begins and the share of the work done, in [0, 1].
///         What it raises ends planning and is raised here.
///
/// Raises:
///     PlanError: the graph cannot be planned as asked.
///     PlanningInterrupted: Ctrl-C; its ``plan`` is the best so far. A second Ctrl-C is a plain ``KeyboardInterrupt``.
///     SolverUnavailable: `exact` is ``required``, and CBC cannot be used, or has failed on every program.
#[pyfunction]
#[pyo3(signature = (
    graph, streams = 1, reuse = true, time_limit_s = None, exact = "auto", progress = None, *,
    speed = None, stream_model = "happens_before", enough_bytes = 0, worth_bytes = 0
))]
#[allow(clippy::too_many_arguments)] // Keyword arguments of the Python function.
pub(crate) fn optimize(
    py: Python<'_>,
    graph: &Bound<'_, PyAny>,
    streams: i64,
    reuse: bool,
    time_limit_s: Option<f64>,
    exact: &str,
    progress: Option<Py<PyAny>>,
    speed: Option<f64>,
    stream_model: &str,
    enough_bytes: u64,
    worth_bytes: u64,
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
    let settings = Settings { streams, reuse, exact, time_limit_s, speed, stream_model, enough_bytes, worth_bytes };
    settings.check().map_err(|fault| refuse(fault.code(), fault.to_string()))?;
    let graph = graph_argument(graph)?;
    let control = Control { solver: Some(Arc::new(Cbc)), ..Control::default() };
    let (interrupt, result) = apart(py, control, progress, move |control| optimize_timed(&graph, &settings, control))?;
    match (interrupt, result) {
        (Some(_), Ok((plan, timings))) => Err(interrupted(py, "PlanningInterrupted", PyPlan::new(plan, timings))),
        (Some(interrupt), Err(_)) => Err(interrupt),
        (None, Ok((plan, timings))) => Ok(PyPlan::new(plan, timings)),
        (None, Err(error @ (OptimizeError::SolverUnavailable { .. } | OptimizeError::SolverFailed { .. }))) => {
            Err(Fault { class: Class::Solver, message: error.to_string(), code: error.code(), site: None }.raise(py))
        }
        (None, Err(error)) => Err(refuse(error.code(), error.to_string())),
    }
}
