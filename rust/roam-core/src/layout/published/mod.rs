//! The subgraph tree of Shu et al. (arXiv 2310.19295), for comparison.

pub(crate) mod concatenate;
pub(crate) mod tree;
