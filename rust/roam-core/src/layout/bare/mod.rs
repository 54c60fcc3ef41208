//! Packing of buffers without a graph.

pub(crate) mod arrange;
pub(crate) mod check;
pub(crate) mod pack;
pub(crate) mod solid;
