//! Packing of buffers without gaps or fixed offsets: solid rectangles that may lie anywhere.

use crate::control::{Control, Stop, Watch};
use crate::exact::ExactTier;
use crate::layout::blocks::{Block, Blocks};
use crate::layout::exact::core_refinement;
use crate::layout::incumbent::Incumbent;
use crate::layout::packers::weighted;
use crate::layout::portfolio::{Method, portfolio};
use crate::layout::puzzles::anneal;
use crate::layout::puzzles::check::PackError;
use crate::layout::search::escalate;
use crate::layout::work::portfolio_work;
use crate::packing::{Buffer, Packing, Request};
use crate::plan::Exact;

/// 1 / `PART_FOR_CORES` of the work is kept for core refinement, 1 / `PART_FOR_ANNEALING` for
/// annealing.
const PART_FOR_CORES: u64 = 8;
const PART_FOR_ANNEALING: u64 = 4;

/// The method whose offsets are the caller's hints.
const HINT: &str = "hint";

/// How long a packing is improved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Goal {
    /// Comparisons, of which a core makes some 10^9 in two or three seconds.
    pub work: u64,
    /// A pool that is not larger is small enough; 0 where it should be as small as can be.
    pub target_bytes: u64,
}

/// Packs the requests' buffers without regard to gaps and fixed offsets. `start` are offsets to do
/// better than.
pub(crate) fn solid(
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
pub(crate) fn blocks(rectangles: impl Iterator<Item = Buffer> + Clone) -> Blocks {
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

/// Tries all methods, one after another. The quickest method is tried in any case.
fn find(incumbent: &mut Incumbent<'_>, mut work: u64, exact: &mut ExactTier<'_>, watch: &Watch) -> Result<(), Stop> {
    let mut first = portfolio_work(incumbent.blocks.all.len());
    let mut for_cores = work / PART_FOR_CORES;
    let for_annealing = work / PART_FOR_ANNEALING;
    work -= for_cores + for_annealing;
    let ended = portfolio(incumbent, &mut first, watch).and_then(|()| {
        escalate::improve(incumbent, &mut work, watch)?;
        work += for_annealing;
        anneal::improve(incumbent, &mut work, watch)
    });
    let is_only_hinted = incumbent.found.as_ref().is_none_or(|&(method, _)| method == HINT);
    if is_only_hinted && (ended.is_err() || incumbent.found.is_none()) {
        incumbent.offer(Method::Weighted.name(), weighted::place(incumbent.blocks, &watch.patient())?);
    }
    ended?;
    let Some((_, offsets)) = incumbent.found.clone() else { return Ok(()) };
    core_refinement::finish(incumbent, &offsets, &mut for_cores, exact, watch)
}
