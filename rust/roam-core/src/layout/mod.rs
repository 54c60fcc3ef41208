//! Memory layouts: an offset for every pool tensor of one order.
//!
//! No layout can take less than the most live bytes of the pool's tensors, so the search ends as
//! soon as one takes just that.

mod blocks;
mod gaps;
mod greedy;
mod search;
mod skyline;

use crate::control::{Stop, Watch};
use crate::liveness::Profile;
use crate::problem::Problem;
use blocks::Blocks;
use greedy::Sequence;
use rayon::prelude::*;

/// Where every pool tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// How it was found.
    pub(crate) method: &'static str,
    /// Largest offset plus size.
    pub(crate) pool_bytes: u64,
    /// Per tensor of the problem; 0 for tensors outside the pool.
    pub(crate) offsets: Vec<u64>,
}

/// How a layout is found. The planner tries all of them, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// Each block at the lowest free offset, in a fixed sequence.
    Greedy(Sequence),
    /// Longest lifetime on the lowest line of a skyline (LLFB).
    Skyline,
}

impl Method {
    pub(crate) const ALL: [Method; 5] = [
        Method::Greedy(Sequence::Size),
        Method::Greedy(Sequence::Area),
        Method::Greedy(Sequence::Lifetime),
        Method::Greedy(Sequence::Start),
        Method::Skyline,
    ];

    /// The name under which plans list it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Method::Greedy(sequence) => sequence.name(),
            Method::Skyline => "skyline",
        }
    }

    /// Offsets of the blocks; `None` where they would reach `limit` or beyond.
    fn place(self, blocks: &Blocks, limit: u64, watch: &Watch) -> Result<Option<Vec<u64>>, Stop> {
        match self {
            Method::Greedy(sequence) => greedy::place(blocks, sequence, limit, watch),
            Method::Skyline => skyline::place(blocks, limit, watch),
        }
    }
}

/// The quickest layout: creation order, lowest free offset. Always found.
pub(crate) fn first_fit(problem: &Problem, profile: &Profile, watch: &Watch) -> Result<Layout, Stop> {
    let blocks = Blocks::new(problem, profile);
    let method = Method::Greedy(Sequence::Start);
    let offsets = method.place(&blocks, u64::MAX, watch)?.unwrap_or_default();
    Ok(blocks.layout(method.name(), &offsets))
}

/// One method's layout, for comparison; `None` where it would reach `limit` or beyond.
pub(crate) fn by_method(
    problem: &Problem,
    profile: &Profile,
    method: Method,
    limit: u64,
    watch: &Watch,
) -> Result<Option<Layout>, Stop> {
    let blocks = Blocks::new(problem, profile);
    Ok(method.place(&blocks, limit, watch)?.map(|offsets| blocks.layout(method.name(), &offsets)))
}

/// The best layout of the portfolio that takes less than `limit`, if any does.
pub(crate) fn best(
    problem: &Problem,
    profile: &Profile,
    mut limit: u64,
    watch: &Watch,
) -> Result<Option<Layout>, Stop> {
    let blocks = Blocks::new(problem, profile);
    let mut found: Option<Layout> = None;
    let (first, others) = Method::ALL.split_at(1);
    // The first is nearly always enough; the others run side by side if it is not.
    for methods in [first, others] {
        if limit <= profile.pool_peak {
            break;
        }
        let placed: Vec<Option<Vec<u64>>> =
            methods.par_iter().map(|method| method.place(&blocks, limit, watch)).collect::<Result<_, _>>()?;
        for (method, offsets) in methods.iter().zip(placed) {
            if let Some(layout) = offsets.map(|offsets| blocks.layout(method.name(), &offsets)) {
                if layout.pool_bytes < limit {
                    limit = layout.pool_bytes;
                    found = Some(layout);
                }
            }
        }
    }
    Ok(found)
}

/// A layout that takes less than `limit`, if the search finds one before its `work` (placements of
/// a block) is used up. It starts from `known`, a layout of the same order, or from the largest blocks.
pub(crate) fn search(
    problem: &Problem,
    profile: &Profile,
    known: Option<&Layout>,
    limit: u64,
    work: &mut u64,
    watch: &Watch,
) -> Result<Option<Layout>, Stop> {
    let blocks = Blocks::new(problem, profile);
    let sequence = match known {
        // Placed from the bottom up, every block comes to lie no higher than it did.
        Some(layout) => {
            let offsets = blocks.offsets(layout);
            let mut sequence: Vec<u32> = (0..blocks.all.len() as u32).collect();
            sequence.sort_by_key(|&at| (offsets[at as usize], blocks.all[at as usize].start, at));
            sequence
        }
        None => Sequence::Size.sorted(&blocks),
    };
    let offsets = search::improve(&blocks, sequence, profile.pool_peak, limit, work, watch)?;
    Ok(offsets.map(|offsets| blocks.layout("search", &offsets)))
}
