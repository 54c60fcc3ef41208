//! Plans of more than one stream.
//!
//! A list scheduler puts operators on streams by the cost model, under a ceiling of live bytes.
//! Its tensors are laid out by the times at which they are live there. The waits are then derived
//! from the layout: whatever shares bytes in that schedule is held apart by waits, so that the plan
//! is safe under every timing (docs/explanation/streams.md has the proof), and by no more waits
//! than that and the constraints ask for. Such a wait is for something that has completed by then
//! in the schedule, so it costs next to no time. The search is over ceilings, base orders and
//! preferences.

mod headroom;
mod outcome;
mod portfolio;
mod schedule;
mod search;
mod syncs;
mod windows;

pub(crate) use outcome::{Input, Single, most_speed};
pub(crate) use portfolio::search;
