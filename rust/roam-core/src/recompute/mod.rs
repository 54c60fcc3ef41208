//! Plans in which operators run again: what bounds all of them (docs/explanation/theory.md), and
//! which are found.

pub mod floor;
pub mod least_time;

mod base;
mod evict;
mod model;
mod moment;
mod repeats;
mod search;
mod timeline;

pub use search::Found;
pub(crate) use search::search;
