//! The planner of roam: plain Rust that knows no Python.
//!
//! graph -> liveness -> order -> layout -> plan -> verify

pub mod baseline;
pub mod cost;
pub mod expansion;
pub mod graph;
pub mod layout;
pub mod liveness;
pub mod mip;
pub mod optimize;
pub mod packing;
pub mod plan;
pub mod recompute;
pub mod residency;
pub mod rng;
pub mod sharding;
pub mod stages;
pub mod synthetic;
pub mod verify;

mod bound;
mod control;
mod exact;
mod order;
mod problem;
mod segment_tree;
mod small;
mod streams;
mod tolerance;
mod update_phase;
