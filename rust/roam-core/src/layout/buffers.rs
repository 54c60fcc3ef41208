//! The bare layout problem, without a graph: buffers with given lifetimes.

use super::blocks::{Block, Blocks};
use super::incumbent::Incumbent;
use super::{Method, hard_core, portfolio, portfolio_work, search, weighted};
use crate::control::{Control, Stop, Watch};
use crate::exact::ExactTier;
use crate::plan::{BoundRoute, Exact, ExactReport};
use thiserror::Error;

/// This part of the work is kept for the hard core.
const PART_FOR_CORES: u64 = 8;

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
    /// Per buffer its offset in bytes; 0 for empty buffers.
    pub offsets: Vec<u64>,
    /// The largest offset + size.
    pub pool_bytes: u64,
    /// Most bytes needed at any time: no packing takes less.
    pub live_bytes: u64,
    /// No packing takes less: `live_bytes`, or more where smaller pools were refuted. It holds for these buffers and their times; another
    /// order of a graph has others.
    pub bound_bytes: u64,
    /// How that was proved.
    pub bound_route: BoundRoute,
    /// What integer programs did, which are solved where the control has a solver and all else leaves a gap.
    pub exact: ExactReport,
    /// What found it, for example `size`, `local`, `canonical`.
    pub method: &'static str,
    /// Whether no smaller pool exists: it meets `live_bytes`, or the search has refuted every smaller one.
    pub optimal: bool,
    /// Whether the deadline cut the search short.
    pub timed_out: bool,
}

/// Why there is no packing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PackError {
    /// A buffer's interval holds no time.
    #[error("buffer {index} is needed from time {lower} to before time {upper}: that is never")]
    EmptyInterval {
        /// Place in the list.
        index: usize,
        /// Its first time.
        lower: u64,
        /// Its end.
        upper: u64,
    },
    /// An alignment that is not a power of two.
    #[error("buffer {index} has an alignment of {alignment_bytes} bytes, which is not a power of two")]
    Alignment {
        /// Place in the list.
        index: usize,
        /// What was asked for.
        alignment_bytes: u64,
    },
    /// Sizes so large that offsets may not fit into 63 bits, or too many buffers.
    #[error("the buffers are too large or too many: offsets might not fit into 63 bits")]
    TooLarge,
    /// The caller asked to stop.
    #[error("packing was cancelled")]
    Cancelled,
}

/// Packs buffers into the smallest pool that is found before `work` is used up. It counts comparisons,
/// of which a core makes some 10^9 in two or three seconds; the same work gives the same packing on any
/// number of threads.
///
/// At the control's deadline, or when the caller has had enough, it returns the best packing so far. Progress is not reported.
///
/// # Errors
/// See [`PackError`].
pub fn pack(buffers: &[Buffer], work: u64, control: &Control) -> Result<Packing, PackError> {
    let mut reach: u64 = 0;
    for (index, buffer) in buffers.iter().enumerate() {
        if buffer.lower >= buffer.upper {
            return Err(PackError::EmptyInterval { index, lower: buffer.lower, upper: buffer.upper });
        }
        if !buffer.alignment_bytes.is_power_of_two() {
            return Err(PackError::Alignment { index, alignment_bytes: buffer.alignment_bytes });
        }
        // The height of all buffers on top of each other, each with its padding: no method goes higher.
        let padded = buffer.size_bytes.checked_add(buffer.alignment_bytes);
        reach = padded.and_then(|padded| reach.checked_add(padded)).ok_or(PackError::TooLarge)?;
    }
    if reach > i64::MAX as u64 || buffers.len() >= u32::MAX as usize / 2 {
        return Err(PackError::TooLarge);
    }
    let mut times: Vec<u64> = buffers.iter().map(|buffer| buffer.lower).collect();
    times.sort_unstable();
    times.dedup();
    let rank = |time: u64| times.partition_point(|&other| other < time) as u32;
    // Sorted, so that the sequence in which buffers come decides nothing but among equals.
    let mut counted: Vec<usize> = (0..buffers.len()).filter(|&index| buffers[index].size_bytes > 0).collect();
    counted.sort_by_key(|&index| {
        let buffer = &buffers[index];
        (buffer.lower, buffer.upper, buffer.size_bytes, buffer.alignment_bytes, index)
    });
    let all = counted.iter().map(|&index| {
        let Buffer { lower, upper, size_bytes, alignment_bytes } = buffers[index];
        Block { size: size_bytes, alignment: alignment_bytes, start: rank(lower), end: rank(upper) }
    });
    let blocks = Blocks::bare(all.collect());
    let watch = Watch::new(control, control.deadline);
    let mut incumbent = Incumbent::new(&blocks, u64::MAX);
    let exact = if control.solver.is_some() { Exact::Auto } else { Exact::Off };
    let mut exact = ExactTier::new(exact, control.solver.as_deref());
    let timed_out = match find(&mut incumbent, work, &mut exact, &watch) {
        Ok(()) => false,
        Err(Stop::TimedOut) => true,
        Err(Stop::Cancelled) => return Err(PackError::Cancelled),
    };
    let optimal = incumbent.is_done();
    let (method, found) = incumbent.found.unwrap_or_default();
    let mut offsets = vec![0; buffers.len()];
    for (&index, offset) in counted.iter().zip(found) {
        offsets[index] = offset;
    }
    Ok(Packing {
        offsets,
        pool_bytes: incumbent.limit,
        live_bytes: blocks.floor(),
        bound_bytes: incumbent.floor,
        bound_route: incumbent.route,
        exact: exact.report,
        method,
        optimal,
        timed_out,
    })
}

/// Everything there is, one after another. The quickest is done in any case.
fn find(incumbent: &mut Incumbent<'_>, mut work: u64, exact: &mut ExactTier<'_>, watch: &Watch) -> Result<(), Stop> {
    let mut first = portfolio_work(incumbent.blocks.all.len());
    let mut for_cores = work / PART_FOR_CORES;
    work -= for_cores;
    let ended = portfolio(incumbent, &mut first, watch).and_then(|()| search::improve(incumbent, &mut work, watch));
    if incumbent.found.is_none() {
        incumbent.offer(Method::Weighted.name(), weighted::place(incumbent.blocks, &watch.patient())?);
    }
    ended?;
    let Some((_, offsets)) = incumbent.found.clone() else { return Ok(()) };
    hard_core::finish(incumbent, &offsets, &mut for_cores, exact, watch)
}
