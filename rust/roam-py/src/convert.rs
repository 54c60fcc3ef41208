//! Numbers, names and arrays on their way between Python and the planner.

use crate::errors::graph_error;
use numpy::PyArray1;
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use roam_core::graph::{DEFAULT_MAX_BYTES, GraphError, OperatorId, Site, TensorId};
use serde::de::value::{Error as NameError, StrDeserializer};
use serde::de::{Deserialize, IntoDeserializer};

/// Where a value stands, for the error message.
pub(crate) struct Where<'a> {
    pub(crate) what: &'a str,
    pub(crate) site: Option<&'a Site>,
}

impl<'a> Where<'a> {
    pub(crate) fn new(what: &'a str, site: Option<&'a Site>) -> Self {
        Self { what, site }
    }

    /// The value as an integer in `[0, max]`; raises `GraphError` if it is outside, and `TypeError`
    /// if it is not an integer at all.
    pub(crate) fn integer(&self, value: &Bound<'_, PyAny>, max: u64) -> PyResult<u64> {
        let py = value.py();
        match value.extract::<u64>() {
            Ok(number) if number <= max => return Ok(number),
            Err(error) if !error.is_instance_of::<PyOverflowError>(py) => return Err(error),
            _ => {}
        }
        let (what, site) = (self.what.to_owned(), self.site.cloned().map(Box::new));
        Err(graph_error(py, &GraphError::OutOfRange { what, site, value: value.str()?.to_string(), max }))
    }

    /// An integer that fits 32 bits.
    pub(crate) fn integer32(&self, value: &Bound<'_, PyAny>) -> PyResult<u32> {
        Ok(self.integer(value, u32::MAX.into())? as u32)
    }

    /// An iterable of tensor numbers.
    pub(crate) fn tensors(&self, values: &Bound<'_, PyAny>) -> PyResult<Vec<TensorId>> {
        values.try_iter()?.map(|value| Ok(TensorId(self.integer32(&value?)?))).collect()
    }

    /// One of an enum's names as they stand in files.
    pub(crate) fn name<'de, T: Deserialize<'de>>(&self, py: Python<'_>, text: &'de str) -> PyResult<T> {
        let deserializer: StrDeserializer<'de, NameError> = text.into_deserializer();
        T::deserialize(deserializer).map_err(|error| {
            let (what, site) = (self.what.to_owned(), self.site.cloned().map(Box::new));
            graph_error(py, &GraphError::UnknownName { what, site, message: error.to_string() })
        })
    }
}

/// Bytes and numbers as NumPy sees them. The planner keeps all of them below 2^63.
pub(crate) fn to_i64(value: impl Into<u64>) -> i64 {
    value.into() as i64
}

/// A read-only array of 64-bit integers.
pub(crate) fn array(py: Python<'_>, values: Vec<i64>) -> PyResult<Py<PyArray1<i64>>> {
    let array = PyArray1::from_vec(py, values);
    array.call_method1("setflags", (false,))?;
    Ok(array.unbind())
}

/// An order that a caller gives: any iterable of operator numbers.
pub(crate) fn order_of(order: &Bound<'_, PyAny>) -> PyResult<Vec<OperatorId>> {
    let at = Where::new("an operator's number", None);
    order.try_iter()?.map(|value| Ok(OperatorId(at.integer32(&value?)?))).collect()
}

/// The most bytes that a reader takes from a file.
pub(crate) fn max_bytes_or_default(max_bytes: Option<u64>) -> u64 {
    max_bytes.unwrap_or(DEFAULT_MAX_BYTES)
}
