//! `roam.GraphBuilder`.

use crate::convert::Where;
use crate::errors::graph_error;
use crate::graph::PyGraph;
use crate::guard::detached;
use pyo3::prelude::*;
use roam_core::graph::{
    GraphBuilder, Operator, OperatorId, Region, RegionId, ReusePair, Site, Source, Tensor, TensorId,
};

const MAX_BYTES: u64 = i64::MAX as u64;

/// Builds a graph by hand.
///
/// The numbers that `tensor`, `operator` and `region` return name what was added. Operators may
/// refer to tensors that are added later; everything is checked together by `build`.
///
/// Args:
///     name: for people.
///     device: the device that the step runs on.
///     alignment_bytes: a power of two; 64 on ``cpu`` and 512 elsewhere where None.
#[pyclass(name = "GraphBuilder", module = "roam")]
pub(crate) struct PyGraphBuilder {
    builder: GraphBuilder,
}

#[pymethods]
impl PyGraphBuilder {
    /// An empty graph.
    #[new]
    #[pyo3(signature = (name = "", device = "cpu", alignment_bytes = None))]
    fn new(name: &str, device: &str, alignment_bytes: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let alignment_bytes = match alignment_bytes {
            Some(value) => Where::new("alignment_bytes", None).integer(value, MAX_BYTES)?,
            None if device.split(':').next() == Some("cpu") => 64,
            None => 512,
        };
        Ok(Self { builder: GraphBuilder::new(name, device, alignment_bytes) })
    }

    /// Marks the graph as an estimate.
    ///
    /// Args:
    ///     reason: what its figures may be wrong about.
    fn estimate(&mut self, reason: String) {
        self.builder.estimate = reason;
    }

    /// Says that the graph is counted by other rules than a real step's.
    ///
    /// Args:
    ///     name: what the rules are called, for example ``paper``.
    fn accounting(&mut self, name: String) {
        self.builder.accounting = name;
    }

    /// Tells people something about the graph; plans, digests and equality leave it out.
    ///
    /// Args:
    ///     topic: what it is about, in a word or two.
    ///     text: what to say about it.
    fn note(&mut self, topic: String, text: String) {
        self.builder.notes.push((topic, text));
    }

    /// Adds a tensor (a storage, not a view) and returns its number.
    ///
    /// Args:
    ///     name: for people.
    ///     size_bytes: bytes of the storage, before rounding.
    ///     kind: ``parameter``, ``buffer``, ``optimizer_state``, ``input``, ``gradient``, ``activation``, ``temporary``
    ///         or ``output``.
    ///     residency: ``step_local``, ``unpooled``, ``enters``, ``leaves`` or ``persistent``.
    ///     alignment_bytes: least alignment of its own, a power of two; the graph's where None or 0.
    #[pyo3(signature = (name, size_bytes, *, kind = "temporary", residency = "step_local", alignment_bytes = None))]
    fn tensor(
        &mut self,
        name: String,
        size_bytes: &Bound<'_, PyAny>,
        kind: &str,
        residency: &str,
        alignment_bytes: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u32> {
        let py = size_bytes.py();
        let of = |field: &str| format!("{field} of tensor `{name}`");
        let tensor = Tensor {
            size_bytes: Where::new(&of("size_bytes"), None).integer(size_bytes, MAX_BYTES)?,
            kind: Where::new(&of("kind"), None).name(py, kind)?,
            residency: Where::new(&of("residency"), None).name(py, residency)?,
            alignment_bytes: match alignment_bytes {
                Some(value) => Where::new(&of("alignment_bytes"), None).integer(value, MAX_BYTES)?,
                None => 0,
            },
            name,
        };
        Ok(self.builder.tensor(tensor).map_err(|error| graph_error(py, &error))?.0)
    }

    /// Adds an operator and returns its number.
    ///
    /// Args:
    ///     name: the kernel.
    ///     reads: numbers of the tensors whose value it uses; one that it mutates need not be listed.
    ///     creates: numbers of the tensors that it makes.
    ///     mutates: numbers of the tensors that it changes in place.
    ///     workspace_bytes: bytes that live only while it runs; 0 where None.
    ///     reuse: pairs (input, output): the output may take the memory of the input where that dies here.
    ///     phase: ``forward``, ``loss``, ``backward``, ``update`` or ``collective``.
    ///     sequence: ``random`` or ``collective``; operators of one sequence keep their program order.
    ///     region: number of its conditional region.
    ///     module: dotted path of the module it belongs to.
    ///     file: the user's file.
    ///     line: the user's line, counted from 1; unknown where None or 0.
    ///     position: its place in program order; as many operators as there are already where None.
    ///     flops: floating-point operations that it takes, for the cost model; 0 where None.
    ///     time_ns: nanoseconds that it was measured to take; where None, the cost model tells.
    ///     repeatable: whether it may run again: from the same inputs it makes the same bits, and it changes nothing
    ///         but what it lists.
    ///     first_only: those of the tensors that it reads or mutates that only its first run touches.
    ///     link: for an operator that launches a collective, the link between ranks that the collective goes over: the
    ///         collectives of one link run one after another.
    #[pyo3(signature = (
        name, *, reads = None, creates = None, mutates = None, workspace_bytes = None, reuse = None,
        phase = "forward", sequence = None, region = None, module = "", file = "",
        line = None, position = None, flops = None, time_ns = None, repeatable = false, first_only = None,
        link = None
    ))]
    #[allow(clippy::too_many_arguments)] // Keyword arguments of the Python function.
    fn operator(
        &mut self,
        py: Python<'_>,
        name: String,
        reads: Option<&Bound<'_, PyAny>>,
        creates: Option<&Bound<'_, PyAny>>,
        mutates: Option<&Bound<'_, PyAny>>,
        workspace_bytes: Option<&Bound<'_, PyAny>>,
        reuse: Option<&Bound<'_, PyAny>>,
        phase: &str,
        sequence: Option<&str>,
        region: Option<&Bound<'_, PyAny>>,
        module: &str,
        file: &str,
        line: Option<&Bound<'_, PyAny>>,
        position: Option<&Bound<'_, PyAny>>,
        flops: Option<&Bound<'_, PyAny>>,
        time_ns: Option<&Bound<'_, PyAny>>,
        repeatable: bool,
        first_only: Option<&Bound<'_, PyAny>>,
        link: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u32> {
        let next = u32::try_from(self.builder.num_operators()).unwrap_or(u32::MAX);
        let mut site = Site { name, position: next, file: file.to_owned(), line: 0 };
        if let Some(value) = line {
            site.line = Where::new("line", Some(&site)).integer32(value)?;
        }
        if let Some(value) = position {
            site.position = Where::new("position", Some(&site)).integer32(value)?;
        }
        let at = |what| Where::new(what, Some(&site));
        let tensors = |what, values: Option<&Bound<'_, PyAny>>| match values {
            Some(values) => at(what).tensors(values),
            None => Ok(Vec::new()),
        };
        let pair = |pair: Bound<'_, PyAny>| -> PyResult<ReusePair> {
            let (input, output): (Bound<'_, PyAny>, Bound<'_, PyAny>) = pair.extract()?;
            let number = |value| Ok::<_, PyErr>(TensorId(at("reuse").integer32(value)?));
            Ok(ReusePair { input: number(&input)?, output: number(&output)? })
        };
        let operator = Operator {
            reads: tensors("reads", reads)?,
            creates: tensors("creates", creates)?,
            mutates: tensors("mutates", mutates)?,
            workspace_bytes: match workspace_bytes {
                Some(value) => at("workspace_bytes").integer(value, MAX_BYTES)?,
                None => 0,
            },
            flops: match flops {
                Some(value) => at("flops").integer(value, MAX_BYTES)?,
                None => 0,
            },
            time_ns: match time_ns {
                Some(value) => at("time_ns").integer(value, MAX_BYTES)?,
                None => 0,
            },
            repeatable,
            first_only: tensors("first_only", first_only)?,
            reuse: match reuse {
                Some(pairs) => pairs.try_iter()?.map(|item| pair(item?)).collect::<PyResult<_>>()?,
                None => Vec::new(),
            },
            phase: at("phase").name(py, phase)?,
            sequence: sequence.map(|text| at("sequence").name(py, text)).transpose()?,
            link: link.map_or(Ok(0), |value| at("link").integer32(value))?,
            region: region.map(|value| at("region").integer32(value)).transpose()?.map(RegionId),
            position: site.position,
            source: Source { module: module.to_owned(), file: file.to_owned(), line: site.line },
            name: site.name,
        };
        Ok(self.builder.operator(operator).map_err(|error| graph_error(py, &error))?.0)
    }

    /// Demands that operator `before` runs before operator `after`.
    fn control(&mut self, before: &Bound<'_, PyAny>, after: &Bound<'_, PyAny>) -> PyResult<()> {
        let end = |value| Ok::<_, PyErr>(OperatorId(Where::new("end of a control edge", None).integer32(value)?));
        self.builder.control(end(before)?, end(after)?);
        Ok(())
    }

    /// Adds a conditional region and returns its number.
    #[pyo3(signature = (name, predicate, parent = None))]
    fn region(
        &mut self,
        py: Python<'_>,
        name: String,
        predicate: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u32> {
        let of = |field: &str| format!("{field} of region `{name}`");
        let predicate = TensorId(Where::new(&of("predicate"), None).integer32(predicate)?);
        let what = of("parent");
        let parent = parent.map(|value| Where::new(&what, None).integer32(value)).transpose()?.map(RegionId);
        let region = Region { name, predicate, parent };
        Ok(self.builder.region(region).map_err(|error| graph_error(py, &error))?.0)
    }

    /// Checks everything and returns the graph. The builder may go on.
    ///
    /// Raises:
    ///     GraphError: the graph is not a valid training step; `code` tells how, `operator` where.
    fn build(&self, py: Python<'_>) -> PyResult<PyGraph> {
        let builder = self.builder.clone();
        let graph = detached(py, || builder.build())?.map_err(|error| graph_error(py, &error))?;
        Ok(PyGraph::new(graph))
    }

    fn __repr__(&self) -> String {
        format!(
            "GraphBuilder(name={:?}, device={:?}, operators={}, tensors={})",
            self.builder.name,
            self.builder.device,
            self.builder.num_operators(),
            self.builder.num_tensors()
        )
    }
}
