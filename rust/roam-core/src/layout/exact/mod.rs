//! Exact methods: branch and bound, then integer programs, for the blocks around a layout's highest
//! place. On steps of the zoo they gain nothing; they close gaps of layouts with mixed alignments.

pub(crate) mod core_refinement;
pub(crate) mod integer;
