//! The bare layout problem, without a graph: buffers with given lifetimes.

use super::arrange;
use super::check::{PackError, check};
use super::solid::{Goal, solid};
use crate::control::Control;
use crate::packing::{Buffer, Packing, Request};
use crate::verify::verify_packing;

/// Packs buffers into the smallest pool that is found before `work` is used up: [`pack_requests`]
/// of solid buffers that may lie anywhere.
///
/// # Errors
/// See [`PackError`].
pub fn pack(buffers: &[Buffer], work: u64, control: &Control) -> Result<Packing, PackError> {
    let requests: Vec<Request> = buffers.iter().copied().map(Request::from).collect();
    pack_requests(&requests, Goal { work, target_bytes: 0 }, control)
}

/// Packs buffers as requested into the smallest pool that is found before the goal's work is used
/// up; the same work gives the same packing on any number of threads. The packing has passed
/// [`verify_packing`].
///
/// At the control's deadline, or when the caller has had enough, it returns the best packing so
/// far. Progress is not reported.
///
/// # Errors
/// See [`PackError`].
pub fn pack_requests(requests: &[Request], goal: Goal, control: &Control) -> Result<Packing, PackError> {
    check(requests)?;
    let packing = if requests.iter().all(Request::is_free_and_solid) {
        let is_hinted = requests.iter().any(|request| request.hint.is_some());
        let start = if is_hinted { arrange::hinted(requests, control)? } else { None };
        solid(requests, start.as_deref(), goal, control)?
    } else {
        arrange::arrange(requests, goal, control)?
    };
    verify_packing(requests, &packing).map_err(PackError::SelfCheck)?;
    Ok(packing)
}
