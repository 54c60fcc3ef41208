//! The planner of roam: plain Rust that knows no Python.
//!
//! graph -> liveness -> order -> layout -> plan -> verify

pub mod builder;
mod digest;
pub mod error;
pub mod graph;
pub mod ids;
pub mod json;
pub mod plan;
