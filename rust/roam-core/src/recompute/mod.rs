//! Plans in which operators run again: what bounds all of them (docs/explanation/theory.md).

pub mod floor;
pub mod least_time;

mod moment;
mod repeats;
