//! The one place where the planner's errors become Python's.

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};
use roam_core::graph::{FormatError, GraphError, Site};
use roam_core::verify::PlanViolation;
use std::path::Path;

/// The classes of `roam.errors` that the bindings raise.
#[derive(Clone, Copy)]
pub(crate) enum Class {
    Roam,
    Graph,
    Format,
    Plan,
    Layout,
    Solver,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Self::Roam => "RoamError",
            Self::Graph => "GraphError",
            Self::Format => "FormatError",
            Self::Plan => "PlanError",
            Self::Layout => "LayoutError",
            Self::Solver => "SolverUnavailable",
        }
    }
}

/// What an error of the package `roam` says.
pub(crate) struct Fault<'a> {
    pub(crate) class: Class,
    pub(crate) message: String,
    pub(crate) code: &'a str,
    pub(crate) site: Option<&'a Site>,
}

impl Fault<'_> {
    /// The Python exception; or, if even that fails, the reason why.
    pub(crate) fn raise(self, py: Python<'_>) -> PyErr {
        self.build(py).unwrap_or_else(|error| error)
    }

    fn build(self, py: Python<'_>) -> PyResult<PyErr> {
        let class = py.import("roam.errors")?.getattr(self.class.name())?.cast_into::<PyType>()?;
        let details = PyDict::new(py);
        details.set_item("code", self.code)?;
        if let Some(site) = self.site {
            details.set_item("operator", &site.name)?;
            details.set_item("position", site.position)?;
            details.set_item("source", site.source())?;
        }
        Ok(PyErr::from_value(class.call((self.message,), Some(&details))?))
    }
}

/// `roam.GraphError`.
pub(crate) fn graph_error(py: Python<'_>, error: &GraphError) -> PyErr {
    Fault { class: Class::Graph, message: error.to_string(), code: error.code(), site: error.site() }.raise(py)
}

/// `roam.PlanError` of a plan that the verifier refuses.
pub(crate) fn plan_error(py: Python<'_>, error: &PlanViolation) -> PyErr {
    Fault { class: Class::Plan, message: error.to_string(), code: error.code(), site: error.site() }.raise(py)
}

/// `roam.FormatError`, `roam.GraphError` or `OSError`; `path` is named where there is one.
pub(crate) fn format_error(py: Python<'_>, error: &FormatError, path: Option<&Path>) -> PyErr {
    let place = path.map(|path| format!("{}: ", path.display())).unwrap_or_default();
    match error {
        FormatError::Io(error) => match path {
            Some(path) => file_error(py, error, path),
            None => PyOSError::new_err(error.to_string()),
        },
        FormatError::Graph(inner) => {
            let message = format!("{place}{inner}");
            Fault { class: Class::Graph, message, code: inner.code(), site: inner.site() }.raise(py)
        }
        error => {
            Fault { class: Class::Format, message: format!("{place}{error}"), code: error.code(), site: None }.raise(py)
        }
    }
}

/// The class of `roam.errors` by that name, with the best found so far.
pub(crate) fn interrupted<'py>(py: Python<'py>, class: &str, best: impl IntoPyObject<'py>) -> PyErr {
    let build = || py.import("roam.errors")?.getattr(class)?.call1((best.into_py_any(py)?,));
    build().map_or_else(|error| error, PyErr::from_value)
}

/// `OSError` of the file.
pub(crate) fn file_error(py: Python<'_>, error: &std::io::Error, path: &Path) -> PyErr {
    match error.raw_os_error() {
        Some(number) => os_error(py, number, path).unwrap_or_else(|error| error),
        None => PyOSError::new_err(format!("{}: {error}", path.display())),
    }
}

/// The subclass of `OSError` that Python itself would raise, with its file name.
fn os_error(py: Python<'_>, number: i32, path: &Path) -> PyResult<PyErr> {
    let text: String = py.import("os")?.call_method1("strerror", (number,))?.extract()?;
    Ok(PyOSError::new_err((number, text, path.as_os_str().to_owned())))
}
