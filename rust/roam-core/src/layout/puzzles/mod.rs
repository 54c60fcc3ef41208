//! Puzzles: buffers without a graph, as `roam.layout` packs them, with gaps, fixed offsets, and
//! annealing for a few blocks. No step's plan is made here.

pub(crate) mod anneal;
pub(crate) mod arrange;
pub(crate) mod check;
pub(crate) mod pack;
pub(crate) mod solid;
