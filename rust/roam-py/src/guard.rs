//! Runs the planner's code without the interpreter, and keeps its panics from crossing into Python.

use crate::errors::{Class, Fault};
use pyo3::prelude::*;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `work` with the interpreter released; a panic becomes a `RoamError`.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    // Nothing that `work` leaves half done can be seen afterwards: `work` owns its results, and
    // only reads everything else.
    py.detach(|| catch_unwind(AssertUnwindSafe(work))).map_err(|panic| internal_error(py, &*panic))
}

/// The `RoamError` that stands for a panic.
pub(crate) fn internal_error(py: Python<'_>, panic: &(dyn Any + Send)) -> PyErr {
    let text = (panic.downcast_ref::<&str>().copied())
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    let message = format!("internal error in the planner, please report it: {text}");
    Fault { class: Class::Roam, message, code: "internal", site: None }.raise(py)
}
