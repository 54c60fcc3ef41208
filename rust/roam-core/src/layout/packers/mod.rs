//! Packers that place every block once. Most plans get their layout here.

pub(crate) mod best_fit;
pub(crate) mod gaps;
pub(crate) mod greedy;
pub(crate) mod shelf;
pub(crate) mod skyline;
pub(crate) mod weighted;
