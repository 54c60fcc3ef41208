//! `roam.Operator` and `roam.Tensor`: read-only looks at one entry of a graph.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use roam_core::graph::{Graph, Operator, OperatorId, Tensor, TensorId};
use serde::Serialize;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// The word for an enum's value, as it stands in files.
pub(crate) fn word<T: Serialize>(value: T) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

/// One operator of a graph.
#[pyclass(name = "Operator", module = "roam", frozen, eq, hash)]
pub(crate) struct PyOperator {
    graph: Arc<Graph>,
    number: OperatorId,
}

/// Equal in number and contents, whatever else their graphs hold.
impl PartialEq for PyOperator {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number && self.get() == other.get()
    }
}

impl Hash for PyOperator {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.number, &self.get().name).hash(state);
    }
}

impl PyOperator {
    pub(crate) fn new(graph: Arc<Graph>, number: OperatorId) -> Self {
        Self { graph, number }
    }

    fn get(&self) -> &Operator {
        self.graph.operator(self.number)
    }
}

fn numbers<'py>(py: Python<'py>, tensors: &[TensorId]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, tensors.iter().map(|tensor| tensor.0))
}

#[pymethods]
impl PyOperator {
    /// Its number in the graph.
    #[getter]
    fn id(&self) -> u32 {
        self.number.0
    }
    /// The kernel.
    #[getter]
    fn name(&self) -> &str {
        &self.get().name
    }
    /// Its place in program order.
    #[getter]
    fn position(&self) -> u32 {
        self.get().position
    }
    /// The part of the step it belongs to.
    #[getter]
    fn phase(&self) -> String {
        word(self.get().phase)
    }
    /// Numbers of the tensors it reads.
    #[getter]
    fn reads<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        numbers(py, &self.get().reads)
    }
    /// Numbers of the tensors it makes.
    #[getter]
    fn creates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        numbers(py, &self.get().creates)
    }
    /// Numbers of the tensors it changes in place.
    #[getter]
    fn mutates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        numbers(py, &self.get().mutates)
    }
    /// Bytes that live only while it runs, before rounding.
    #[getter]
    fn workspace_bytes(&self) -> u64 {
        self.get().workspace_bytes
    }
    /// Floating-point operations that it takes; 0 where they do not matter or are not known.
    #[getter]
    fn flops(&self) -> u64 {
        self.get().flops
    }
    /// Nanoseconds that it was measured to take; 0 where nobody measured.
    #[getter]
    fn time_ns(&self) -> u64 {
        self.get().time_ns
    }
    /// Whether it may run again.
    #[getter]
    fn repeatable(&self) -> bool {
        self.get().repeatable
    }
    /// Numbers of the tensors that only its first run touches.
    #[getter]
    fn first_only<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        numbers(py, &self.get().first_only)
    }
    /// Pairs (input, output): the output may take the memory of the input where that dies here.
    #[getter]
    fn reuse<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.get().reuse.iter().map(|pair| (pair.input.0, pair.output.0)))
    }
    /// The sequence whose program order it keeps, or None.
    #[getter]
    fn sequence(&self) -> Option<String> {
        self.get().sequence.map(word)
    }
    /// For an operator that launches a collective, the link between ranks that the collective goes
    /// over.
    #[getter]
    fn link(&self) -> u32 {
        self.get().link
    }
    /// Number of its conditional region, or None.
    #[getter]
    fn region(&self) -> Option<u32> {
        self.get().region.map(|region| region.0)
    }
    /// Dotted path of the module it belongs to; empty where unknown.
    #[getter]
    fn module(&self) -> &str {
        &self.get().source.module
    }
    /// The user's file; empty where unknown.
    #[getter]
    fn file(&self) -> &str {
        &self.get().source.file
    }
    /// The user's line, counted from 1; 0 where unknown.
    #[getter]
    fn line(&self) -> u32 {
        self.get().source.line
    }

    fn __repr__(&self) -> String {
        let operator = self.get();
        let ids = |tensors: &[TensorId]| tensors.iter().map(|tensor| tensor.0).collect::<Vec<_>>();
        format!(
            "Operator({} {:?}, position={}, phase={}, reads={:?}, creates={:?}, mutates={:?})",
            self.number.0,
            operator.name,
            operator.position,
            word(operator.phase),
            ids(&operator.reads),
            ids(&operator.creates),
            ids(&operator.mutates)
        )
    }
}

/// One tensor (a storage, not a view) of a graph.
#[pyclass(name = "Tensor", module = "roam", frozen, eq, hash)]
pub(crate) struct PyTensor {
    graph: Arc<Graph>,
    number: TensorId,
}

/// Equal in number, contents and counted size, whatever else their graphs hold.
impl PartialEq for PyTensor {
    fn eq(&self, other: &Self) -> bool {
        let counted = |tensor: &Self| tensor.graph.counted_bytes(tensor.number);
        self.number == other.number && self.get() == other.get() && counted(self) == counted(other)
    }
}

impl Hash for PyTensor {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.number, &self.get().name).hash(state);
    }
}

impl PyTensor {
    pub(crate) fn new(graph: Arc<Graph>, number: TensorId) -> Self {
        Self { graph, number }
    }

    fn get(&self) -> &Tensor {
        self.graph.tensor(self.number)
    }
}

#[pymethods]
impl PyTensor {
    /// Its number in the graph.
    #[getter]
    fn id(&self) -> u32 {
        self.number.0
    }
    /// For people.
    #[getter]
    fn name(&self) -> &str {
        &self.get().name
    }
    /// Bytes of the storage, before rounding.
    #[getter]
    fn size_bytes(&self) -> u64 {
        self.get().size_bytes
    }
    /// Bytes as counted everywhere: rounded up to the alignment.
    #[getter]
    fn counted_bytes(&self) -> u64 {
        self.graph.counted_bytes(self.number)
    }
    /// What it is for.
    #[getter]
    fn kind(&self) -> String {
        word(self.get().kind)
    }
    /// Whether it is alive before or after the step.
    #[getter]
    fn residency(&self) -> String {
        word(self.get().residency)
    }
    /// Least alignment of its own; the graph's where 0.
    #[getter]
    fn alignment_bytes(&self) -> u64 {
        self.get().alignment_bytes
    }

    fn __repr__(&self) -> String {
        let tensor = self.get();
        format!(
            "Tensor({} {:?}, size_bytes={}, kind={}, residency={})",
            self.number.0,
            tensor.name,
            tensor.size_bytes,
            word(tensor.kind),
            word(tensor.residency)
        )
    }
}
