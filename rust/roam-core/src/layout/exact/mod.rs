//! Exact methods: branch and bound, then integer programs, for the blocks around a layout's highest
//! place.

pub(crate) mod core_refinement;
pub(crate) mod integer;
