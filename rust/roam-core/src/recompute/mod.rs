//! Plans in which operators run again: what bounds all of them (docs/explanation/theory.md), and
//! which are found.

mod base;
mod complete;
mod deferral;
mod evict;
mod floor;
mod least_time;
mod makings;
mod model;
mod moment;
mod repeats;
mod search;
mod segments;
mod timeline;

pub(crate) use complete::Complete;
pub use floor::Floor;
pub(crate) use floor::floor;
pub use least_time::LeastTime;
pub(crate) use least_time::least_extra_ns;
pub(crate) use repeats::Repeats;
pub use search::Found;
pub(crate) use search::search;
