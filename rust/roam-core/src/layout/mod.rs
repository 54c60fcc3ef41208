//! Memory layouts: an offset for every pool tensor of one order.
//!
//! No layout can take less than the most live bytes of the pool's tensors, so the search ends as
//! soon as one takes just that.
//!
//! Plans come from `packers` and, where these miss the bound, from `search`. `exact` seldom gains
//! anything; `published` and `puzzles` have no part in a plan.

pub(crate) mod blocks;
mod exact;
mod incumbent;
pub(crate) mod packers;
mod portfolio;
mod published;
mod puzzles;
mod search;
mod work;

pub(crate) use blocks::Layout;
pub(crate) use portfolio::{
    Method, alike, best, best_fit, best_of_quick, by_method, finish_exactly, first_fit, search,
};
pub use puzzles::check::PackError;
pub use puzzles::pack::{pack, pack_requests};
pub use puzzles::solid::Goal;
pub(crate) use search::decide::{Decider, Decision};
pub(crate) use work::portfolio_work;
