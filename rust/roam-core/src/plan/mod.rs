//! A plan: an execution order and a memory layout for one graph, with what they cost.

mod contents;
pub mod json;
mod times;

pub use contents::{
    BoundRoute, Candidate, Exact, ExactReport, ExactStatus, MAX_STREAMS, Plan, Recomputation, Schedule, Settings,
    SettingsError, Status, StreamModel,
};
