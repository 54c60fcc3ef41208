//! When tensors that may lie in files are in memory.

use crate::guard::detached;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use roam_core::residency::{Found, Way, choose};

type Ways = Vec<Vec<(u64, Vec<(usize, usize)>)>>;

/// Chooses for each tensor a way to be kept, so that few bytes are moved within the room.
///
/// Args:
///     sizes: bytes of each tensor.
///     ways: for each tensor, how it may be kept: what that moves, in bytes, and the first and the
///         last moment of each time that it is in memory. The first is in memory wherever another
///         one is.
///     room: for each moment, the bytes that there are for them.
///
/// Returns: for each tensor the place of the chosen way in its list; what the ways move; what any
/// choice moves at least; by how much the choice exceeds the room at its worst moment.
///
/// Raises:
///     ValueError: a tensor has no size or no way, or a way is in memory at no moment of these.
#[pyfunction]
pub(crate) fn choose_residency(
    py: Python<'_>,
    sizes: Vec<u64>,
    ways: Ways,
    room: Vec<i64>,
) -> PyResult<(Vec<usize>, u64, u64, u64)> {
    let is_known = |way: &(u64, Vec<(usize, usize)>)| way.1.iter().all(|one| one.0 <= one.1 && one.1 < room.len());
    if sizes.len() != ways.len() || !ways.iter().all(|some| !some.is_empty() && some.iter().all(is_known)) {
        return Err(PyValueError::new_err("each tensor needs a size and ways within the moments"));
    }
    let made = |(moved_bytes, intervals)| Way { moved_bytes, intervals };
    let ways: Vec<Vec<Way>> = ways.into_iter().map(|some| some.into_iter().map(made).collect()).collect();
    let Found { ways, moved_bytes, least_bytes, most_over_bytes } = detached(py, || choose(&sizes, &ways, &room))?;
    Ok((ways, moved_bytes, least_bytes, most_over_bytes))
}
