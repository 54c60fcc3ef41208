//! Checks a plan against its graph, before anything executes it.
//!
//! Shares no code with the planner: constraints, lifetimes and figures are worked out anew from the
//! operators' own lists. The lower bound itself is not proved again (docs/explanation/theory.md has
//! the proof), only that the plan does not contradict it.

mod checks;
mod exact;
mod happens_before;
mod lives;
mod packing;
mod plan;
mod promise;
mod repeats;
mod streams;
mod unpooled;
mod violation;

pub use packing::{PackingViolation, verify_packing};
pub use plan::verify;
pub use violation::PlanViolation;
