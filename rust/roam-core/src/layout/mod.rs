//! Memory layouts: an offset for every pool tensor of one order.
//!
//! No layout can take less than the most live bytes of the pool's tensors, so the search ends as
//! soon as one takes just that.

mod bare;
pub(crate) mod blocks;
mod exact;
pub(crate) mod heuristics;
mod incumbent;
mod portfolio;
mod published;
mod search;
mod work;

pub use bare::check::PackError;
pub use bare::pack::{pack, pack_requests};
pub use bare::solid::Goal;
pub(crate) use blocks::Layout;
pub(crate) use portfolio::{
    Method, alike, best, best_fit, best_of_quick, by_method, finish_exactly, first_fit, search,
};
pub(crate) use search::decide::{Decider, Decision};
pub(crate) use work::portfolio_work;
