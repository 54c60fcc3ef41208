//! The subgraph tree of Shu et al. (arXiv 2310.19295), for comparison: it runs only where a caller
//! asks for it by name (`tree`), and no plan is made of it.

pub(crate) mod concatenate;
pub(crate) mod tree;
