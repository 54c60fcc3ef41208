//! `roam.Plan` and its candidates.

use crate::convert::{array, max_bytes_or_default, to_i64};
use crate::entries::word;
use crate::errors::{Class, Fault, format_error, plan_error};
use crate::graph::PyGraph;
use crate::guard::detached;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyTuple, PyType};
use roam_core::expansion::{SequenceError, expand};
use roam_core::liveness::live_bytes;
use roam_core::optimize::Timings;
use roam_core::plan::json::{load_plan, read_plan, save_plan, write_plan};
use roam_core::plan::{Candidate, ExactReport, Plan, Schedule, StreamModel};
use roam_core::verify::{PlanViolation, verify};
use std::path::PathBuf;
use std::sync::Arc;

type Numbers<'py> = Bound<'py, PyArray1<i64>>;

/// One order and layout that was tried.
#[pyclass(name = "Candidate", module = "roam", frozen, eq)]
#[derive(PartialEq)]
pub(crate) struct PyCandidate {
    candidate: Candidate,
}

impl PyCandidate {
    pub(crate) fn new(candidate: Candidate) -> Self {
        Self { candidate }
    }
}

#[pymethods]
impl PyCandidate {
    /// How the order was found.
    #[getter]
    fn order(&self) -> &str {
        &self.candidate.order
    }
    /// How the layout was found.
    #[getter]
    fn layout(&self) -> &str {
        &self.candidate.layout
    }
    /// Most live bytes over the steps.
    #[getter]
    fn peak_bytes(&self) -> u64 {
        self.candidate.peak_bytes
    }
    /// Bytes of the pool.
    #[getter]
    fn pool_bytes(&self) -> u64 {
        self.candidate.pool_bytes
    }
    /// Most live bytes over the steps of what is not in the pool.
    #[getter]
    fn outside_bytes(&self) -> u64 {
        self.candidate.outside_bytes
    }
    fn __repr__(&self) -> String {
        let Candidate { order, layout, peak_bytes, pool_bytes, outside_bytes } = &self.candidate;
        format!(
            "Candidate(order={order:?}, layout={layout:?}, peak_bytes={peak_bytes}, pool_bytes={pool_bytes}, \
             outside_bytes={outside_bytes})"
        )
    }
}

/// An execution order and a memory layout for one graph, with what they cost.
#[pyclass(name = "Plan", module = "roam", frozen, eq)]
pub(crate) struct PyPlan {
    plan: Arc<Plan>,
    timings_s: Timings,
    order: PyOnceLock<Py<PyArray1<i64>>>,
    offsets: PyOnceLock<Py<PyArray1<i64>>>,
    streams: PyOnceLock<Py<PyArray1<i64>>>,
}

/// Timings are no part of a plan: they differ from run to run.
impl PartialEq for PyPlan {
    fn eq(&self, other: &Self) -> bool {
        self.plan == other.plan
    }
}

impl PyPlan {
    pub(crate) fn new(plan: Plan, timings_s: Timings) -> Self {
        let (order, offsets, streams) = (PyOnceLock::new(), PyOnceLock::new(), PyOnceLock::new());
        Self { plan: Arc::new(plan), timings_s, order, offsets, streams }
    }

    /// A time of the schedule in seconds.
    fn seconds(&self, ns: impl Fn(&Schedule) -> u64) -> Option<f64> {
        self.plan.schedule.as_ref().map(|schedule| ns(schedule) as f64 / 1e9)
    }

    pub(crate) fn inner(&self) -> &Arc<Plan> {
        &self.plan
    }
}

/// What integer programs did, by key.
pub(crate) fn report<'py>(py: Python<'py>, exact: &ExactReport) -> PyResult<Bound<'py, PyDict>> {
    let report = PyDict::new(py);
    report.set_item("status", word(exact.status))?;
    report.set_item("programs", exact.programs)?;
    report.set_item("gains", exact.gains)?;
    report.set_item("failed", exact.failed)?;
    report.set_item("timed_out", exact.timed_out)?;
    report.set_item("reason", &exact.reason)?;
    Ok(report)
}

#[pymethods]
impl PyPlan {
    /// SHA-256 of the JSON of the graph that the plan is for.
    #[getter]
    fn graph_digest(&self) -> &str {
        &self.plan.graph_digest
    }
    /// What its figures may be wrong about, as the graph says; empty where they are exact.
    #[getter]
    fn estimate(&self) -> &str {
        &self.plan.estimate
    }
    /// What was asked for.
    #[getter]
    fn settings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let settings = PyDict::new(py);
        settings.set_item("streams", self.plan.settings.streams)?;
        settings.set_item("reuse", self.plan.settings.reuse)?;
        settings.set_item("exact", word(self.plan.settings.exact))?;
        settings.set_item("time_limit_s", self.plan.settings.time_limit_s)?;
        settings.set_item("speed", self.plan.settings.speed)?;
        settings.set_item("stream_model", word(self.plan.settings.stream_model))?;
        // As in files, these are there only where they were given.
        for (name, bytes) in
            [("enough_bytes", self.plan.settings.enough_bytes), ("worth_bytes", self.plan.settings.worth_bytes)]
        {
            if bytes > 0 {
                settings.set_item(name, bytes)?;
            }
        }
        if let Some(bytes) = self.plan.settings.memory_limit_bytes {
            settings.set_item("memory_limit_bytes", bytes)?;
        }
        Ok(settings)
    }
    /// What runs again, by key, or None: `sequence`, `extra_s`, `step_s`, `least_extra_s`,
    /// `floor_bytes`, `plain_total_bytes`.
    #[getter]
    fn recomputation<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(again) = &self.plan.recomputation else { return Ok(None) };
        let entries = PyDict::new(py);
        entries.set_item("sequence", array(py, again.sequence.iter().map(|id| to_i64(id.0)).collect())?)?;
        for (name, ns) in
            [("extra_s", again.extra_ns), ("step_s", again.step_ns), ("least_extra_s", again.least_extra_ns)]
        {
            entries.set_item(name, ns as f64 / 1e9)?;
        }
        entries.set_item("floor_bytes", again.floor_bytes)?;
        entries.set_item("plain_total_bytes", again.plain_total_bytes)?;
        Ok(Some(entries))
    }
    /// The graph in which each run is an operator of its own, and this plan as a plan of that
    /// graph: both as given where nothing runs again.
    fn expanded(&self, py: Python<'_>, graph: &PyGraph) -> PyResult<(PyGraph, Self)> {
        let plan = (*self.plan).clone();
        let Some(again) = &self.plan.recomputation else {
            return Ok((PyGraph::sharing(graph), Self::new(plan, self.timings_s.clone())));
        };
        let work = || -> Result<_, SequenceError> {
            let expanded = expand(graph.inner(), &again.sequence)?.graph;
            let order = expanded.program_order().to_vec();
            Ok((expanded.digest().to_owned(), order, expanded))
        };
        let (graph_digest, order, expanded) = detached(py, work)?.map_err(|error| {
            let (message, code, site) = (error.to_string(), error.code(), error.site());
            Fault { class: Class::Plan, message, code, site }.raise(py)
        })?;
        let peak = live_bytes(&expanded, &order).ok().and_then(|live| live.into_iter().max()).unwrap_or(0);
        let plan = Plan { graph_digest, recomputation: None, program_order_peak_bytes: peak, ..plan };
        Ok((PyGraph::new(expanded), Self::new(plan, self.timings_s.clone())))
    }
    /// Numbers of the operators in execution order.
    #[getter]
    fn order<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let values = || self.plan.order.iter().map(|id| to_i64(id.0)).collect();
        Ok(self.order.get_or_try_init(py, || array(py, values()))?.bind(py).clone())
    }
    /// Offset in the pool per tensor; -1 where it is not in the pool.
    #[getter]
    fn offsets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let values = || self.plan.offsets.iter().map(|offset| offset.map_or(-1, to_i64)).collect();
        Ok(self.offsets.get_or_try_init(py, || array(py, values()))?.bind(py).clone())
    }
    /// Pairs (input, output): the output takes the memory of the input.
    #[getter]
    fn reuse<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.plan.reuse.iter().map(|pair| (pair.input.0, pair.output.0)))
    }
    /// Stream per operator; 0 for all where there is one.
    #[getter]
    fn streams<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let values = || match &self.plan.schedule {
            Some(schedule) => schedule.streams.iter().copied().map(to_i64).collect(),
            None => vec![0; self.plan.order.len()],
        };
        Ok(self.streams.get_or_try_init(py, || array(py, values()))?.bind(py).clone())
    }
    /// Pairs (before, after) of operators on different streams: `after` starts when `before` has
    /// completed.
    #[getter]
    fn syncs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let syncs = self.plan.schedule.iter().flat_map(|schedule| &schedule.syncs);
        PyTuple::new(py, syncs.map(|(before, after)| (before.0, after.0)).collect::<Vec<_>>())
    }
    /// Time step per operator in the time-step model, else None.
    #[getter]
    fn time_steps(&self) -> Option<Vec<u32>> {
        let is_stepped = self.plan.settings.stream_model == StreamModel::TimeStep;
        self.plan.schedule.as_ref().filter(|_| is_stepped).map(|schedule| schedule.time_steps.clone())
    }
    /// Seconds that the whole step takes by the cost model; None for one stream, like the next
    /// two.
    #[getter]
    fn makespan_s(&self) -> Option<f64> {
        self.seconds(|schedule| schedule.makespan_ns)
    }
    /// Seconds of all operators one after another.
    #[getter]
    fn serial_s(&self) -> Option<f64> {
        self.seconds(|schedule| schedule.serial_ns)
    }
    /// Seconds of the longest chain of operators that wait for each other.
    #[getter]
    fn critical_path_s(&self) -> Option<f64> {
        self.seconds(|schedule| schedule.critical_path_ns)
    }
    /// Start and end of each run of an operator of the graph that this is a plan of, in nanoseconds
    /// from the start of the step, by the cost model.
    fn times_ns<'py>(&self, py: Python<'py>, graph: &Bound<'py, PyGraph>) -> PyResult<(Numbers<'py>, Numbers<'py>)> {
        let (graph, plan) = (graph.get().inner(), &self.plan);
        let times = detached(py, || {
            verify(graph, plan)?;
            Ok::<_, PlanViolation>(match &plan.recomputation {
                None => plan.times_ns(graph),
                Some(recomputation) => plan.times_ns(&expand(graph, &recomputation.sequence)?.graph),
            })
        })?;
        let (start, end) = times.map_err(|error| plan_error(py, &error))?.into_iter().unzip();
        let numbers =
            |times: Vec<u64>| array(py, times.into_iter().map(to_i64).collect()).map(|one| one.into_bound(py));
        Ok((numbers(start)?, numbers(end)?))
    }
    /// Most live bytes over the steps in program order, without reuse.
    #[getter]
    fn program_order_peak_bytes(&self) -> u64 {
        self.plan.program_order_peak_bytes
    }
    /// Most live bytes over the steps.
    #[getter]
    fn peak_bytes(&self) -> u64 {
        self.plan.peak_bytes
    }
    /// Most live bytes over the steps of the tensors in the pool.
    #[getter]
    fn pool_peak_bytes(&self) -> u64 {
        self.plan.pool_peak_bytes
    }
    /// Bytes of the pool.
    #[getter]
    fn pool_bytes(&self) -> u64 {
        self.plan.pool_bytes
    }
    /// Most live bytes over the steps of what is not in the pool, workspace included.
    #[getter]
    fn outside_bytes(&self) -> u64 {
        self.plan.outside_bytes
    }
    /// Bytes of all persistent tensors.
    #[getter]
    fn persistent_bytes(&self) -> u64 {
        self.plan.persistent_bytes
    }
    /// Persistent + pool + unpooled.
    #[getter]
    fn total_bytes(&self) -> u64 {
        self.plan.total_bytes
    }
    /// No order can have a lower peak.
    #[getter]
    fn lower_bound_bytes(&self) -> u64 {
        self.plan.lower_bound_bytes
    }
    /// No plan can have a smaller total.
    #[getter]
    fn total_lower_bound_bytes(&self) -> u64 {
        self.plan.total_lower_bound_bytes
    }
    /// Number of the operator that sets the lower bound, or None.
    #[getter]
    fn bound_operator(&self) -> Option<u32> {
        self.plan.bound_operator.map(|operator| operator.0)
    }
    /// How the lower bound was proved: `floor`, `cut`, `probe`, `first`, `exhaustive` or
    /// `integer_program`.
    #[getter]
    fn bound_route(&self) -> String {
        word(self.plan.bound_route)
    }
    /// By which share the step-local total exceeds the least that any plan can have.
    #[getter]
    fn gap(&self) -> f64 {
        self.plan.gap()
    }
    /// (pool - peak of the pool's tensors) / pool.
    #[getter]
    fn fragmentation(&self) -> f64 {
        self.plan.fragmentation()
    }
    /// `optimal`, `feasible` or `timed_out`.
    #[getter]
    fn status(&self) -> String {
        word(self.plan.status)
    }
    /// What integer programs did.
    #[getter]
    fn exact<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        report(py, &self.plan.exact)
    }
    /// What was tried.
    #[getter]
    fn candidates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let entry = |candidate: &Candidate| Py::new(py, PyCandidate { candidate: candidate.clone() });
        PyTuple::new(py, self.plan.candidates.iter().map(entry).collect::<PyResult<Vec<_>>>()?)
    }
    /// Seconds per stage of planning; empty for a plan that was read from a file.
    #[getter]
    fn timings_s<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let timings = PyDict::new(py);
        for (stage, seconds) in &self.timings_s {
            timings.set_item(stage, seconds)?;
        }
        Ok(timings)
    }

    /// Writes the plan to a file, compressed if the path ends in `.gz`.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        detached(py, || save_plan(&path, &self.plan))?.map_err(|error| format_error(py, &error, Some(&path)))
    }
    /// Reads a plan from a file, compressed or not.
    #[classmethod]
    #[pyo3(signature = (path, *, max_bytes = None))]
    fn load(_class: &Bound<'_, PyType>, py: Python<'_>, path: PathBuf, max_bytes: Option<u64>) -> PyResult<Self> {
        let plan = detached(py, || load_plan(&path, max_bytes_or_default(max_bytes)))?;
        Ok(Self::new(plan.map_err(|error| format_error(py, &error, Some(&path)))?, Vec::new()))
    }
    /// The JSON.
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut bytes = Vec::new();
        detached(py, || write_plan(&mut bytes, &self.plan))??;
        Ok(PyBytes::new(py, &bytes))
    }
    /// Reads a plan from its JSON, compressed or not.
    #[classmethod]
    #[pyo3(signature = (data, *, max_bytes = None))]
    fn from_json(_class: &Bound<'_, PyType>, py: Python<'_>, data: &[u8], max_bytes: Option<u64>) -> PyResult<Self> {
        let plan = detached(py, || read_plan(data, max_bytes_or_default(max_bytes)))?;
        Ok(Self::new(plan.map_err(|error| format_error(py, &error, None))?, Vec::new()))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        Ok((slf.get_type().getattr("from_json")?, (slf.get().to_json(slf.py())?,)))
    }

    fn __repr__(&self) -> String {
        format!(
            "Plan(status={}, operators={}, pool_bytes={}, outside_bytes={}, persistent_bytes={}, total_bytes={}, \
             program_order_peak_bytes={}, lower_bound_bytes={}, total_lower_bound_bytes={}, gap={:.4}{})",
            word(self.plan.status),
            self.plan.order.len(),
            self.plan.pool_bytes,
            self.plan.outside_bytes,
            self.plan.persistent_bytes,
            self.plan.total_bytes,
            self.plan.program_order_peak_bytes,
            self.plan.lower_bound_bytes,
            self.plan.total_lower_bound_bytes,
            self.plan.gap(),
            shown("estimate", &self.plan.estimate)
        )
    }
}

/// The last part of a graph's and of a plan's `repr`.
pub(crate) fn shown(name: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(", {name}={text:?}") }
}
