//! Buffers, and where they lie.

use crate::plan::{BoundRoute, ExactReport};

/// A piece of memory needed over the half-open interval of times [lower, upper).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// First time at which it is needed.
    pub lower: u64,
    /// First time at which it is not needed any more; above `lower`.
    pub upper: u64,
    /// Bytes; may be 0.
    pub size_bytes: u64,
    /// What its offset must be a multiple of; a power of two.
    pub alignment_bytes: u64,
}

/// Offsets for all buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Per buffer its offset in bytes; 0 for empty buffers that may lie anywhere.
    pub offsets: Vec<u64>,
    /// The largest offset + size.
    pub pool_bytes: u64,
    /// Most bytes needed at any time: no packing takes less.
    pub live_bytes: u64,
    /// No packing takes less: `live_bytes`, or more where smaller pools were refuted or a fixed
    /// buffer ends higher. It holds for these buffers and their times; another order of a graph has
    /// others.
    pub bound_bytes: u64,
    /// How that was proved.
    pub bound_route: BoundRoute,
    /// What integer programs did, which are solved where the control has a solver and all else
    /// leaves a gap.
    pub exact: ExactReport,
    /// What found it, for example `size`, `local`, `canonical`.
    pub method: &'static str,
    /// Whether no smaller pool exists: it meets `live_bytes`, or the search has refuted every
    /// smaller one.
    pub optimal: bool,
    /// Whether the deadline cut the search short.
    pub timed_out: bool,
}
