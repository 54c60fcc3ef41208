//! The bare layout problem, without a graph: buffers with given lifetimes.

use super::blocks::{Block, Blocks};
use super::incumbent::Incumbent;
use super::requests::{self, Request};
use super::{Method, anneal, arrange, hard_core, portfolio, portfolio_work, search, weighted};
use crate::control::{Control, Stop, Watch};
use crate::exact::ExactTier;
use crate::plan::{BoundRoute, Exact, ExactReport};
use crate::verify::{PackingViolation, verify_packing};
use thiserror::Error;

/// These parts of the work are kept for the hard core and for annealing.
const PART_FOR_CORES: u64 = 8;
const PART_FOR_ANNEALING: u64 = 4;

/// The method whose offsets are the caller's hints.
const HINT: &str = "hint";

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
    /// No packing takes less: `live_bytes`, or more where smaller pools were refuted or a fixed buffer ends higher. It holds for these buffers and their times; another
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
#[non_exhaustive]
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
    /// A gap that holds no time, goes beyond its buffer's life, or begins before the gap listed before it ends.
    #[error(
        "buffer {index} has a gap from time {lower} to before time {upper}: gaps lie within the life, one after another"
    )]
    Gap {
        /// Place in the list.
        index: usize,
        /// The gap's first time.
        lower: u64,
        /// Its end.
        upper: u64,
    },
    /// A gap's window goes beyond its buffer's bytes.
    #[error("buffer {index} of {size_bytes} bytes needs bytes {lower} to before {upper} in a gap")]
    Window {
        /// Place in the list.
        index: usize,
        /// The window's first byte.
        lower: u64,
        /// Its end.
        upper: u64,
        /// Bytes that the buffer has.
        size_bytes: u64,
    },
    /// A fixed offset that the buffer's own alignment forbids.
    #[error("buffer {index} is fixed at {offset}, which is not a multiple of its alignment, {alignment_bytes}")]
    FixedAlignment {
        /// Place in the list.
        index: usize,
        /// Where it is fixed.
        offset: u64,
        /// Its alignment.
        alignment_bytes: u64,
    },
    /// Two buffers are fixed at offsets at which they share bytes.
    #[error("buffers {first} and {second} need the same bytes at the same time where they are fixed")]
    FixedOverlap {
        /// Place of the earlier in the list.
        first: usize,
        /// Place of the later.
        second: usize,
    },
    /// Sizes so large that offsets may not fit into 63 bits, or too many buffers.
    #[error("the buffers are too large or too many: offsets might not fit into 63 bits")]
    TooLarge,
    /// The caller asked to stop.
    #[error("packing was cancelled")]
    Cancelled,
    /// A packing was found, and the verifier says that it is none.
    #[error("internal error, please report it: the packing found is invalid: {0}")]
    SelfCheck(PackingViolation),
}

impl PackError {
    /// The kind of fault, in snake case and stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            PackError::EmptyInterval { .. } => "empty_interval",
            PackError::Alignment { .. } => "alignment",
            PackError::Gap { .. } => "gap",
            PackError::Window { .. } => "window",
            PackError::FixedAlignment { .. } => "fixed_alignment",
            PackError::FixedOverlap { .. } => "fixed_overlap",
            PackError::TooLarge => "too_large",
            PackError::Cancelled => "cancelled",
            PackError::SelfCheck(_) => "internal",
        }
    }
}

/// How long a packing is improved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Goal {
    /// Comparisons, of which a core makes some 10^9 in two or three seconds.
    pub work: u64,
    /// A pool that is not larger is small enough; 0 where it should be as small as can be.
    pub target_bytes: u64,
}

/// Packs buffers into the smallest pool that is found before `work` is used up: [`pack_requests`] of solid buffers that may lie anywhere.
///
/// # Errors
/// See [`PackError`].
pub fn pack(buffers: &[Buffer], work: u64, control: &Control) -> Result<Packing, PackError> {
    let requests: Vec<Request> = buffers.iter().copied().map(Request::from).collect();
    pack_requests(&requests, Goal { work, target_bytes: 0 }, control)
}

/// Packs buffers as requested into the smallest pool that is found before the goal's work is used up; the same work gives the same
/// packing on any number of threads. The packing has passed [`verify_packing`].
///
/// At the control's deadline, or when the caller has had enough, it returns the best packing so far. Progress is not reported.
///
/// # Errors
/// See [`PackError`].
pub fn pack_requests(requests: &[Request], goal: Goal, control: &Control) -> Result<Packing, PackError> {
    requests::check(requests)?;
    let packing = if requests.iter().all(Request::is_free_and_solid) {
        let is_hinted = requests.iter().any(|request| request.hint.is_some());
        let start = if is_hinted { arrange::hinted(requests, control)? } else { None };
        solid(requests, start.as_deref(), goal, control)?
    } else {
        arrange::arrange(requests, goal, control)?
    };
    verify_packing(requests, &packing).map_err(PackError::SelfCheck)?;
    Ok(packing)
}

/// Packs the requests' buffers without regard to gaps and fixed offsets. `start` are offsets to do better than.
pub(super) fn solid(
    requests: &[Request],
    start: Option<&[u64]>,
    goal: Goal,
    control: &Control,
) -> Result<Packing, PackError> {
    let buffer = |index: usize| requests[index].buffer;
    // Sorted, so that the sequence in which buffers come decides nothing but among equals.
    let mut counted: Vec<usize> = (0..requests.len()).filter(|&index| buffer(index).size_bytes > 0).collect();
    counted.sort_by_key(|&index| {
        let Buffer { lower, upper, size_bytes, alignment_bytes } = buffer(index);
        (lower, upper, size_bytes, alignment_bytes, index)
    });
    let blocks = blocks(counted.iter().map(|&index| buffer(index)));
    let watch = Watch::new(control, control.deadline);
    let mut incumbent = Incumbent { target: goal.target_bytes, ..Incumbent::new(&blocks, u64::MAX) };
    if let Some(start) = start {
        incumbent.offer(HINT, counted.iter().map(|&index| start[index]).collect());
    }
    let exact = if control.solver.is_some() { Exact::Auto } else { Exact::Off };
    let mut exact = ExactTier::new(exact, control.solver.as_deref());
    let timed_out = match find(&mut incumbent, goal.work, &mut exact, &watch) {
        Ok(()) => false,
        Err(Stop::TimedOut) => true,
        Err(Stop::Cancelled) => return Err(PackError::Cancelled),
    };
    let optimal = incumbent.limit <= incumbent.floor;
    exact.report.conclude(optimal);
    let (method, found) = incumbent.found.unwrap_or_default();
    let mut offsets = vec![0; requests.len()];
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

/// Rectangles by rank of their times.
pub(super) fn blocks(rectangles: impl Iterator<Item = Buffer> + Clone) -> Blocks {
    let mut times: Vec<u64> = rectangles.clone().map(|rectangle| rectangle.lower).collect();
    times.sort_unstable();
    times.dedup();
    let rank = |time: u64| times.partition_point(|&other| other < time) as u32;
    let all = rectangles.map(|Buffer { lower, upper, size_bytes, alignment_bytes }| Block {
        size: size_bytes,
        alignment: alignment_bytes,
        start: rank(lower),
        end: rank(upper),
    });
    Blocks::bare(all.collect())
}

/// Everything there is, one after another. The quickest is done in any case.
fn find(incumbent: &mut Incumbent<'_>, mut work: u64, exact: &mut ExactTier<'_>, watch: &Watch) -> Result<(), Stop> {
    let mut first = portfolio_work(incumbent.blocks.all.len());
    let mut for_cores = work / PART_FOR_CORES;
    let for_annealing = work / PART_FOR_ANNEALING;
    work -= for_cores + for_annealing;
    let ended = portfolio(incumbent, &mut first, watch).and_then(|()| {
        search::improve(incumbent, &mut work, watch)?;
        work += for_annealing;
        anneal::improve(incumbent, &mut work, watch)
    });
    let is_only_hinted = incumbent.found.as_ref().is_none_or(|&(method, _)| method == HINT);
    if is_only_hinted && (ended.is_err() || incumbent.found.is_none()) {
        incumbent.offer(Method::Weighted.name(), weighted::place(incumbent.blocks, &watch.patient())?);
    }
    ended?;
    let Some((_, offsets)) = incumbent.found.clone() else { return Ok(()) };
    hard_core::finish(incumbent, &offsets, &mut for_cores, exact, watch)
}
