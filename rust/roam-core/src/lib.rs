//! The planner of roam: plain Rust that knows no Python.
//!
//! graph -> liveness -> order -> layout -> plan -> verify

pub mod baseline;
pub mod builder;
pub mod cost;
mod digest;
pub mod error;
pub mod graph;
pub mod ids;
pub mod json;
pub mod layout;
pub mod liveness;
pub mod mip;
pub mod optimize;
pub mod plan;
pub mod stages;
pub mod synthetic;
pub mod verify;

mod bound;
mod control;
mod exact;
mod flow;
mod order;
mod problem;
mod segment_tree;
mod small;
mod streams;
