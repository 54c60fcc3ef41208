//! `roam.layout`: buffers without a graph, packed into one pool.

use crate::convert::{array, to_i64};
use crate::entries::word;
use crate::errors::{Class, Fault, file_error, interrupted};
use crate::guard::detached;
use crate::worker::on_worker;
use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use roam_core::layout::{Goal, PackError, pack_requests};
use roam_core::optimize::Control;
use roam_core::packing::{Buffer, Gap, Instance, Packing, Request};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

fn layout_error(py: Python<'_>, message: String, code: &str) -> PyErr {
    Fault { class: Class::Layout, message, code, site: None }.raise(py)
}

/// Buffers to pack: pieces of memory, each needed over a time.
#[pyclass(name = "Buffers", module = "roam.layout", frozen, eq)]
pub(crate) struct PyBuffers {
    instance: Arc<Instance>,
    digest: OnceLock<String>,
}

impl PartialEq for PyBuffers {
    fn eq(&self, other: &Self) -> bool {
        self.instance == other.instance
    }
}

impl PyBuffers {
    pub(crate) fn new(instance: Instance) -> Self {
        PyBuffers { instance: Arc::new(instance), digest: OnceLock::new() }
    }

    fn column(&self, py: Python<'_>, value: fn(&Request) -> u64) -> PyResult<Py<PyArray1<i64>>> {
        array(py, self.instance.requests.iter().map(|request| to_i64(value(request))).collect())
    }
}

/// A number that counts bytes or times.
fn number(value: &Bound<'_, PyAny>, what: &str) -> PyResult<u64> {
    let number: i64 = value.extract()?;
    u64::try_from(number)
        .map_err(|_| layout_error(value.py(), format!("{what} must not be negative, and is {number}"), "out_of_range"))
}

/// One value per buffer of any iterable.
fn per_buffer<T>(
    values: &Bound<'_, PyAny>,
    what: &str,
    count: Option<usize>,
    read: impl Fn(&Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let read: Vec<T> = values.try_iter()?.map(|value| read(&value?)).collect::<PyResult<_>>()?;
    match count.filter(|&count| count != read.len()) {
        Some(count) => {
            let message = format!("{what} has {} values for {count} buffers", read.len());
            Err(layout_error(values.py(), message, "count"))
        }
        None => Ok(read),
    }
}

/// `(lower, upper)`, or `(lower, upper, first, end)` where the bytes from `first` to before `end`
/// are needed all the same.
fn gap(value: &Bound<'_, PyAny>) -> PyResult<Gap> {
    let numbers = value.try_iter()?.map(|value| number(&value?, "gaps")).collect::<PyResult<Vec<_>>>()?;
    match *numbers.as_slice() {
        [lower, upper] => Ok(Gap { lower, upper, window: None }),
        [lower, upper, first, end] => Ok(Gap { lower, upper, window: Some(first..end) }),
        _ => Err(layout_error(value.py(), "a gap has two numbers, or four".into(), "gap")),
    }
}

#[pymethods]
impl PyBuffers {
    #[new]
    #[pyo3(signature = (lower, upper, size_bytes, *, alignment_bytes = None, gaps = None, offsets = None, hints = None, ids = None))]
    #[allow(clippy::too_many_arguments)] // Keyword arguments of the Python class.
    fn build(
        lower: &Bound<'_, PyAny>,
        upper: &Bound<'_, PyAny>,
        size_bytes: &Bound<'_, PyAny>,
        alignment_bytes: Option<&Bound<'_, PyAny>>,
        gaps: Option<&Bound<'_, PyAny>>,
        offsets: Option<&Bound<'_, PyAny>>,
        hints: Option<&Bound<'_, PyAny>>,
        ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let lower = per_buffer(lower, "lower", None, |value| number(value, "lower"))?;
        let count = Some(lower.len());
        let upper = per_buffer(upper, "upper", count, |value| number(value, "upper"))?;
        let sizes = per_buffer(size_bytes, "size_bytes", count, |value| number(value, "size_bytes"))?;
        let buffer = |at: usize, alignment_bytes| Buffer {
            lower: lower[at],
            upper: upper[at],
            size_bytes: sizes[at],
            alignment_bytes,
        };
        let mut instance: Instance = (0..lower.len()).map(|at| buffer(at, 1)).collect::<Vec<_>>().into();
        let requests = &mut instance.requests;
        if let Some(values) = alignment_bytes {
            let values = per_buffer(values, "alignment_bytes", count, |value| number(value, "alignment_bytes"))?;
            requests.iter_mut().zip(values).for_each(|(request, value)| request.buffer.alignment_bytes = value);
        }
        if let Some(values) = gaps {
            let values = per_buffer(values, "gaps", count, |value| value.try_iter()?.map(|one| gap(&one?)).collect())?;
            for (request, mut value) in requests.iter_mut().zip::<Vec<Vec<Gap>>>(values) {
                value.sort_by_key(|gap| (gap.lower, gap.upper));
                request.gaps = value;
            }
        }
        let choice = |what: &'static str| {
            move |value: &Bound<'_, PyAny>| if value.is_none() { Ok(None) } else { number(value, what).map(Some) }
        };
        if let Some(values) = offsets {
            let values = per_buffer(values, "offsets", count, choice("offsets"))?;
            requests.iter_mut().zip(values).for_each(|(request, value)| request.offset = value);
        }
        if let Some(values) = hints {
            let values = per_buffer(values, "hints", count, choice("hints"))?;
            requests.iter_mut().zip(values).for_each(|(request, value)| request.hint = value);
        }
        if let Some(values) = ids {
            instance.ids = per_buffer(values, "ids", count, |value| value.extract())?;
            check_ids(values.py(), &instance.ids)?;
        }
        Ok(Self::new(instance))
    }

    /// Reads a CSV file.
    #[classmethod]
    fn read_csv(_class: &Bound<'_, pyo3::types::PyType>, py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let bytes = detached(py, || std::fs::read(&path))?.map_err(|error| file_error(py, &error, &path))?;
        let refuse = |message: String, code: &str| {
            let message = format!("{}: {message}", path.display());
            Fault { class: Class::Format, message, code, site: None }.raise(py)
        };
        let text = String::from_utf8(bytes).map_err(|error| refuse(error.to_string(), "encoding"))?;
        let instance = detached(py, || Instance::read(&text))?;
        instance.map(Self::new).map_err(|error| refuse(error.to_string(), error.code()))
    }

    /// Writes a CSV file.
    #[pyo3(signature = (path, packing = None))]
    fn write_csv(&self, py: Python<'_>, path: PathBuf, packing: Option<&Bound<'_, PyPacking>>) -> PyResult<()> {
        if let Some(packing) = packing {
            check_packing(py, self, packing.get())?;
        }
        let offsets = packing.map(|packing| packing.get().packing.offsets.as_slice());
        let text = self.instance.write(offsets);
        detached(py, || std::fs::write(&path, text))?.map_err(|error| file_error(py, &error, &path))
    }

    /// The names.
    #[getter]
    fn ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.instance.ids)
    }
    /// First time at which each buffer is needed.
    #[getter]
    fn lower(&self, py: Python<'_>) -> PyResult<Py<PyArray1<i64>>> {
        self.column(py, |request| request.buffer.lower)
    }
    /// First time at which each buffer is not needed any more.
    #[getter]
    fn upper(&self, py: Python<'_>) -> PyResult<Py<PyArray1<i64>>> {
        self.column(py, |request| request.buffer.upper)
    }
    /// Sizes.
    #[getter]
    fn size_bytes(&self, py: Python<'_>) -> PyResult<Py<PyArray1<i64>>> {
        self.column(py, |request| request.buffer.size_bytes)
    }
    /// Alignments.
    #[getter]
    fn alignment_bytes(&self, py: Python<'_>) -> PyResult<Py<PyArray1<i64>>> {
        self.column(py, |request| request.buffer.alignment_bytes)
    }
    /// Times between `lower` and `upper` at which each buffer is not needed.
    #[getter]
    fn gaps<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let gap = |Gap { lower, upper, window }: &Gap| match window {
            Some(window) => PyTuple::new(py, [*lower, *upper, window.start, window.end]),
            None => PyTuple::new(py, [*lower, *upper]),
        };
        let gaps = |request: &Request| PyTuple::new(py, request.gaps.iter().map(gap).collect::<PyResult<Vec<_>>>()?);
        PyTuple::new(py, self.instance.requests.iter().map(gaps).collect::<PyResult<Vec<_>>>()?)
    }
    /// Fixed offsets.
    #[getter]
    fn offsets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.instance.requests.iter().map(|request| request.offset))
    }
    /// Offset of each buffer to begin the search with, or None.
    #[getter]
    fn hints<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.instance.requests.iter().map(|request| request.hint))
    }
    /// SHA-256 of the canonical CSV.
    #[getter]
    fn digest(&self) -> &str {
        self.digest.get_or_init(|| self.instance.digest())
    }
    fn __len__(&self) -> usize {
        self.instance.requests.len()
    }
    fn __repr__(&self) -> String {
        format!("Buffers({} buffers, digest={:?})", self.instance.requests.len(), self.digest())
    }
}

fn check_ids(py: Python<'_>, ids: &[String]) -> PyResult<()> {
    let mut seen = std::collections::HashSet::new();
    for id in ids {
        if id.is_empty() || id.contains([',', '\n', '\r']) {
            return Err(layout_error(
                py,
                format!("{id:?} cannot be an id: it is empty, or has commas or line ends"),
                "id",
            ));
        }
        if !seen.insert(id) {
            return Err(layout_error(py, format!("the id {id:?} is used twice"), "id"));
        }
    }
    Ok(())
}

/// Offsets for buffers.
#[pyclass(name = "Packing", module = "roam.layout", frozen, eq)]
#[derive(PartialEq)]
pub(crate) struct PyPacking {
    packing: Packing,
}

#[pymethods]
impl PyPacking {
    /// Offsets.
    #[getter]
    fn offsets(&self, py: Python<'_>) -> PyResult<Py<PyArray1<i64>>> {
        array(py, self.packing.offsets.iter().map(|&offset| to_i64(offset)).collect())
    }
    /// The largest offset + size.
    #[getter]
    fn pool_bytes(&self) -> u64 {
        self.packing.pool_bytes
    }
    /// Most bytes needed at any time.
    #[getter]
    fn live_bytes(&self) -> u64 {
        self.packing.live_bytes
    }
    /// No packing takes less.
    #[getter]
    fn lower_bound_bytes(&self) -> u64 {
        self.packing.bound_bytes
    }
    /// How the bound was proved.
    #[getter]
    fn bound_route(&self) -> String {
        word(self.packing.bound_route)
    }
    /// (pool - bound) / bound.
    #[getter]
    fn gap(&self) -> f64 {
        let Packing { pool_bytes, bound_bytes, .. } = self.packing;
        if pool_bytes == bound_bytes { 0.0 } else { pool_bytes as f64 / bound_bytes as f64 - 1.0 }
    }
    /// What found it.
    #[getter]
    fn method(&self) -> &str {
        self.packing.method
    }
    /// How the search ended.
    #[getter]
    fn status(&self) -> &str {
        match (self.packing.optimal, self.packing.timed_out) {
            (true, _) => "optimal",
            (false, true) => "timed_out",
            (false, false) => "feasible",
        }
    }
    fn __repr__(&self) -> String {
        let Packing { pool_bytes, bound_bytes, method, .. } = &self.packing;
        format!(
            "Packing({} buffers, pool_bytes={pool_bytes}, lower_bound_bytes={bound_bytes}, status={:?}, method={method:?})",
            self.packing.offsets.len(),
            self.status()
        )
    }
}

fn check_packing(py: Python<'_>, buffers: &PyBuffers, packing: &PyPacking) -> PyResult<()> {
    detached(py, || roam_core::verify::verify_packing(&buffers.instance.requests, &packing.packing))?
        .map_err(|error| layout_error(py, error.to_string(), error.code()))
}

/// Checks that a packing is valid for buffers and that every figure it claims is true.
///
/// Shares no code with the packer.
///
/// Raises:
///     LayoutError: it is not; `code` tells how.
#[pyfunction]
pub(crate) fn verify_packing(
    py: Python<'_>,
    buffers: &Bound<'_, PyBuffers>,
    packing: &Bound<'_, PyPacking>,
) -> PyResult<()> {
    check_packing(py, buffers.get(), packing.get())
}

/// Packs buffers into one pool that is as small as the search finds.
///
/// Raises:
///     LayoutError: the buffers cannot be packed as asked.
///     PackingInterrupted: Ctrl-C; its ``packing`` is the best so far.
#[pyfunction]
#[pyo3(signature = (buffers, *, work = 2_000_000_000, time_limit_s = None, target_bytes = None))]
pub(crate) fn pack(
    py: Python<'_>,
    buffers: &Bound<'_, PyBuffers>,
    work: u64,
    time_limit_s: Option<f64>,
    target_bytes: Option<u64>,
) -> PyResult<PyPacking> {
    let deadline = match time_limit_s.map(Duration::try_from_secs_f64) {
        None => None,
        Some(Ok(limit)) => Instant::now().checked_add(limit),
        Some(Err(_)) => {
            return Err(PyValueError::new_err("time_limit_s must be a number of seconds that is not negative"));
        }
    };
    let control = Control { deadline, ..Control::default() };
    let goal = Goal { work, target_bytes: target_bytes.unwrap_or(0) };
    let instance = buffers.get().instance.clone();
    let (interrupt, result) =
        on_worker(py, control, None, move |control| pack_requests(&instance.requests, goal, control))?;
    match (interrupt, result) {
        (Some(_), Ok(packing)) => Err(interrupted(py, "PackingInterrupted", PyPacking { packing })),
        (Some(interrupt), Err(_)) => Err(interrupt),
        (None, Ok(packing)) => Ok(PyPacking { packing }),
        (None, Err(error @ PackError::SelfCheck(_))) => {
            Err(Fault { class: Class::Roam, message: error.to_string(), code: error.code(), site: None }.raise(py))
        }
        (None, Err(error)) => Err(layout_error(py, error.to_string(), error.code())),
    }
}
