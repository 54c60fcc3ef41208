//! `roam.Graph`.

use crate::convert::{array, max_bytes_or_default, order_of, to_i64};
use crate::entries::{PyOperator, PyTensor};
use crate::errors::{Class, Fault, format_error};
use crate::guard::detached;
use crate::plan::shown;
use numpy::PyArray1;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyTuple, PyType};
use roam_core::cost::operator_ns;
use roam_core::expansion::{SequenceError, expand};
use roam_core::graph::json::{load_graph, read_graph, save_graph, write_graph};
use roam_core::graph::{Graph, OperatorId, TensorId};
use roam_core::liveness;
use std::path::PathBuf;
use std::sync::Arc;

type Column = PyOnceLock<Py<PyArray1<i64>>>;

/// A training step; immutable and valid.
#[pyclass(name = "Graph", module = "roam", frozen, eq)]
pub(crate) struct PyGraph {
    graph: Arc<Graph>,
    // Made when first asked for.
    operators: PyOnceLock<Py<PyTuple>>,
    tensors: PyOnceLock<Py<PyTuple>>,
    tensor_sizes_bytes: Column,
    tensor_counted_bytes: Column,
    workspaces_bytes: Column,
    times_ns: Column,
    positions: Column,
    program_order: Column,
}

impl PartialEq for PyGraph {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.graph, &other.graph) || self.graph == other.graph
    }
}

impl PyGraph {
    /// Another object for the same graph.
    pub(crate) fn sharing(other: &Self) -> Self {
        Self::of(other.graph.clone())
    }

    pub(crate) fn new(graph: Graph) -> Self {
        Self::of(Arc::new(graph))
    }

    fn of(graph: Arc<Graph>) -> Self {
        Self {
            graph,
            operators: PyOnceLock::new(),
            tensors: PyOnceLock::new(),
            tensor_sizes_bytes: PyOnceLock::new(),
            tensor_counted_bytes: PyOnceLock::new(),
            workspaces_bytes: PyOnceLock::new(),
            times_ns: PyOnceLock::new(),
            positions: PyOnceLock::new(),
            program_order: PyOnceLock::new(),
        }
    }

    pub(crate) fn inner(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// All tensors' numbers. The builder has seen to it that they fit 32 bits.
    fn tensor_ids(&self) -> impl Iterator<Item = TensorId> + use<> {
        (0..self.graph.tensors().len() as u32).map(TensorId)
    }

    fn operator_ids(&self) -> impl Iterator<Item = OperatorId> + use<> {
        (0..self.graph.operators().len() as u32).map(OperatorId)
    }

    /// A number in `[0, count)`, as sequences take it: negative ones count from the end.
    fn index(what: &str, number: isize, count: usize) -> PyResult<u32> {
        let number = if number < 0 { number.checked_add_unsigned(count) } else { Some(number) };
        (number.filter(|&number| number >= 0 && (number as usize) < count).map(|number| number as u32))
            .ok_or_else(|| PyIndexError::new_err(format!("{what} number out of range; the graph has {count}")))
    }

    fn operator_id(&self, number: isize) -> PyResult<OperatorId> {
        Self::index("operator", number, self.graph.operators().len()).map(OperatorId)
    }

    fn tensor_id(&self, number: isize) -> PyResult<TensorId> {
        Self::index("tensor", number, self.graph.tensors().len()).map(TensorId)
    }
}

fn numbers<'py>(py: Python<'py>, operators: &[OperatorId]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, operators.iter().map(|operator| operator.0))
}

fn column<'py>(
    cell: &Column,
    py: Python<'py>,
    values: impl FnOnce() -> Vec<i64>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    Ok(cell.get_or_try_init(py, || array(py, values()))?.bind(py).clone())
}

#[pymethods]
impl PyGraph {
    /// For people.
    #[getter]
    fn name(&self) -> &str {
        self.graph.name()
    }
    /// The device that the step runs on.
    #[getter]
    fn device(&self) -> &str {
        self.graph.device()
    }
    /// Every size is rounded up to a multiple of this wherever bytes are counted.
    #[getter]
    fn alignment_bytes(&self) -> u64 {
        self.graph.alignment_bytes()
    }
    /// What the step's figures may be wrong about; empty where they are exact.
    #[getter]
    fn estimate(&self) -> &str {
        self.graph.estimate()
    }
    /// The rules by which its tensors are counted, if these are not the rules of a real step, for
    /// example ``paper``; otherwise empty.
    #[getter]
    fn accounting(&self) -> &str {
        self.graph.accounting()
    }
    /// What the maker of the graph tells people about it, as pairs (topic, text); digest and
    /// equality leave these out.
    #[getter]
    fn notes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.graph.notes())
    }
    /// How many operators there are.
    #[getter]
    fn num_operators(&self) -> usize {
        self.graph.operators().len()
    }
    /// How many tensors there are.
    #[getter]
    fn num_tensors(&self) -> usize {
        self.graph.tensors().len()
    }
    /// Sum of all persistent tensors, in bytes.
    #[getter]
    fn persistent_bytes(&self) -> u64 {
        self.graph.persistent_bytes()
    }
    /// SHA-256 of the canonical JSON, in hexadecimal.
    #[getter]
    fn digest(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || self.graph.digest().to_owned())
    }
    /// SHA-256 of the canonical JSON without the names of graph and tensors and without the places
    /// in the user's program, in hexadecimal.
    #[getter]
    fn structure_digest(&self, py: Python<'_>) -> PyResult<String> {
        detached(py, || self.graph.structure_digest())
    }

    /// One operator.
    fn operator(&self, operator: isize) -> PyResult<PyOperator> {
        Ok(PyOperator::new(self.graph.clone(), self.operator_id(operator)?))
    }
    /// One tensor.
    fn tensor(&self, tensor: isize) -> PyResult<PyTensor> {
        Ok(PyTensor::new(self.graph.clone(), self.tensor_id(tensor)?))
    }
    /// All operators, by number.
    #[getter]
    fn operators<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let make = || {
            let entries = self.operator_ids().map(|id| Py::new(py, PyOperator::new(self.graph.clone(), id)));
            Ok::<_, PyErr>(PyTuple::new(py, entries.collect::<PyResult<Vec<_>>>()?)?.unbind())
        };
        Ok(self.operators.get_or_try_init(py, make)?.bind(py).clone())
    }
    /// All tensors, by number.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let make = || {
            let entries = self.tensor_ids().map(|id| Py::new(py, PyTensor::new(self.graph.clone(), id)));
            Ok::<_, PyErr>(PyTuple::new(py, entries.collect::<PyResult<Vec<_>>>()?)?.unbind())
        };
        Ok(self.tensors.get_or_try_init(py, make)?.bind(py).clone())
    }

    /// Bytes of every tensor's storage, before rounding.
    #[getter]
    fn tensor_sizes_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let sizes = || self.graph.tensors().iter().map(|tensor| to_i64(tensor.size_bytes)).collect();
        column(&self.tensor_sizes_bytes, py, sizes)
    }
    /// Bytes of every tensor as counted everywhere: rounded up to its alignment.
    #[getter]
    fn tensor_counted_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let sizes = || self.tensor_ids().map(|id| to_i64(self.graph.counted_bytes(id))).collect();
        column(&self.tensor_counted_bytes, py, sizes)
    }
    /// Bytes of every operator's workspace as counted everywhere: rounded up to the alignment.
    #[getter]
    fn workspaces_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let sizes = || self.operator_ids().map(|id| to_i64(self.graph.workspace_bytes(id))).collect();
        column(&self.workspaces_bytes, py, sizes)
    }
    /// Nanoseconds that every operator takes: as measured, or else by the cost model.
    #[getter]
    fn times_ns<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let times = || self.operator_ids().map(|id| to_i64(operator_ns(&self.graph, id))).collect();
        column(&self.times_ns, py, times)
    }
    /// Every operator's place in program order.
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let places = || self.graph.operators().iter().map(|operator| to_i64(operator.position)).collect();
        column(&self.positions, py, places)
    }
    /// Numbers of the operators in program order.
    #[getter]
    fn program_order<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let order = || self.graph.program_order().iter().map(|id| to_i64(id.0)).collect();
        column(&self.program_order, py, order)
    }

    /// Numbers of the operators that must run before the operator, by program position.
    fn predecessors<'py>(&self, py: Python<'py>, operator: isize) -> PyResult<Bound<'py, PyTuple>> {
        numbers(py, self.graph.predecessors(self.operator_id(operator)?))
    }
    /// Numbers of the operators that must run after the operator, by program position.
    fn successors<'py>(&self, py: Python<'py>, operator: isize) -> PyResult<Bound<'py, PyTuple>> {
        numbers(py, self.graph.successors(self.operator_id(operator)?))
    }
    /// Numbers of the operators that read or mutate the tensor, by program position.
    fn users<'py>(&self, py: Python<'py>, tensor: isize) -> PyResult<Bound<'py, PyTuple>> {
        numbers(py, self.graph.users(self.tensor_id(tensor)?))
    }
    /// Number of the operator that makes the tensor; None if it exists before the step.
    fn creator(&self, tensor: isize) -> PyResult<Option<u32>> {
        Ok(self.graph.creator(self.tensor_id(tensor)?).map(|operator| operator.0))
    }
    /// The caller's own ordering constraints, as pairs (before, after).
    #[getter]
    fn control<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.graph.control().iter().map(|(before, after)| (before.0, after.0)))
    }
    /// Conditional regions, as triples (name, predicate tensor, parent region or None).
    #[getter]
    fn regions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let triples = self.graph.regions().iter();
        let triples = triples.map(|region| (&region.name, region.predicate.0, region.parent.map(|parent| parent.0)));
        PyTuple::new(py, triples)
    }

    /// Live bytes at every step of an order (program order by default), without reuse.
    #[pyo3(signature = (order = None))]
    fn live_bytes<'py>(
        &self,
        py: Python<'py>,
        order: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let order = match order {
            Some(order) => order_of(order)?,
            None => self.graph.program_order().to_vec(),
        };
        let live = detached(py, || liveness::live_bytes(&self.graph, &order))?;
        let live = live.map_err(|error| {
            Fault { class: Class::Plan, message: error.to_string(), code: "order", site: None }.raise(py)
        })?;
        Ok(array(py, live.into_iter().map(to_i64).collect())?.into_bound(py))
    }

    /// The graph of a sequence: a list of operators in which each occurs at least once, and runs as
    /// often as it occurs.
    ///
    /// What a run reads comes from the latest run before it. Operator i of the result is entry i of
    /// the sequence. The tensors of this graph keep their numbers; those of extra runs follow.
    ///
    /// Raises:
    ///     PlanError: the list is no such sequence; `code` tells why.
    fn expanded(&self, py: Python<'_>, sequence: &Bound<'_, PyAny>) -> PyResult<Self> {
        let sequence = order_of(sequence)?;
        let expanded = detached(py, || expand(&self.graph, &sequence))?;
        let raise = |error: SequenceError| {
            let (message, code, site) = (error.to_string(), error.code(), error.site());
            Fault { class: Class::Plan, message, code, site }.raise(py)
        };
        Ok(Self::new(expanded.map_err(raise)?.graph))
    }

    /// Writes the graph to a file, compressed if the path ends in `.gz`.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        detached(py, || save_graph(&path, &self.graph))?.map_err(|error| format_error(py, &error, Some(&path)))
    }
    /// Reads a graph from a file, compressed or not.
    #[classmethod]
    #[pyo3(signature = (path, *, max_bytes = None))]
    fn load(_class: &Bound<'_, PyType>, py: Python<'_>, path: PathBuf, max_bytes: Option<u64>) -> PyResult<Self> {
        let graph = detached(py, || load_graph(&path, max_bytes_or_default(max_bytes)))?;
        Ok(Self::new(graph.map_err(|error| format_error(py, &error, Some(&path)))?))
    }
    /// The canonical JSON.
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut bytes = Vec::new();
        detached(py, || write_graph(&mut bytes, &self.graph))??;
        Ok(PyBytes::new(py, &bytes))
    }
    /// Reads a graph from its JSON, compressed or not.
    #[classmethod]
    #[pyo3(signature = (data, *, max_bytes = None))]
    fn from_json(_class: &Bound<'_, PyType>, py: Python<'_>, data: &[u8], max_bytes: Option<u64>) -> PyResult<Self> {
        let graph = detached(py, || read_graph(data, max_bytes_or_default(max_bytes)))?;
        Ok(Self::new(graph.map_err(|error| format_error(py, &error, None))?))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        Ok((slf.get_type().getattr("from_json")?, (slf.get().to_json(slf.py())?,)))
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<u64> {
        let digest = self.digest(py)?;
        Ok(u64::from_str_radix(digest.get(..16).unwrap_or_default(), 16).unwrap_or_default())
    }

    fn __repr__(&self) -> String {
        format!(
            "Graph(name={:?}, device={:?}, operators={}, tensors={}, persistent_bytes={}{}{})",
            self.graph.name(),
            self.graph.device(),
            self.graph.operators().len(),
            self.graph.tensors().len(),
            self.graph.persistent_bytes(),
            shown("estimate", self.graph.estimate()),
            shown("accounting", self.graph.accounting())
        )
    }
}
