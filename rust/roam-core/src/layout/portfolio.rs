//! The portfolio of layouts, and what the planner asks of it.

use super::blocks::{Blocks, Layout};
use super::exact::core_refinement;
use super::incumbent::Incumbent;
use super::packers::greedy::{self, Sequence};
use super::packers::{best_fit, skyline, weighted};
use super::published::concatenate;
use super::search::escalate;
use super::work::{SHARE, portfolio_work};
use crate::control::{Stop, Watch};
use crate::exact::ExactTier;
use crate::liveness::Profile;
use crate::problem::Problem;
use rayon::prelude::*;

/// How a layout is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// Each block at the lowest free offset, in a fixed sequence.
    Greedy(Sequence),
    /// Longest lifetime on the lowest line of a skyline (LLFB).
    Skyline,
    /// Valleys filled by what covers most and leaves the narrowest gaps.
    Weighted,
    /// Leaves of the subgraph tree solved one by one and stacked. Not in the portfolio: its
    /// searches take too long for that. A leaf has at most `node_limit` blocks; without a limit, as
    /// many as the work allows.
    Tree { node_limit: Option<usize> },
}

impl Method {
    /// The planner's portfolio, in the order in which it is tried: those that are quick whatever
    /// the blocks look like first.
    pub(crate) const ALL: [Method; 6] = [
        Method::Weighted,
        Method::Skyline,
        Method::Greedy(Sequence::Size),
        Method::Greedy(Sequence::Area),
        Method::Greedy(Sequence::Lifetime),
        Method::Greedy(Sequence::Start),
    ];

    /// The methods of the portfolio that are quick.
    const QUICK: &[Method] = Method::ALL.split_at(2).0;

    /// All methods, those outside the portfolio included.
    pub(crate) fn known() -> impl Iterator<Item = Method> {
        Method::ALL.into_iter().chain([Method::Tree { node_limit: None }])
    }

    /// The method of this name. The name of the tree may end in its node limit: `tree:100`.
    pub(crate) fn by_name(name: &str) -> Option<Method> {
        let node_limit =
            name.strip_prefix("tree:").and_then(|limit| limit.parse().ok()).filter(|&limit: &usize| limit > 0);
        let tree = node_limit.map(|limit| Method::Tree { node_limit: Some(limit) });
        tree.or_else(|| Method::known().find(|method| method.name() == name))
    }

    /// The name under which plans list it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Method::Greedy(sequence) => sequence.name(),
            Method::Skyline => "skyline",
            Method::Weighted => "weighted",
            Method::Tree { .. } => "tree",
        }
    }

    /// Offsets of the blocks; `None` where they would reach `limit` or beyond, or where `work` is
    /// used up. Valleys filled by weighted times, which are near-linear, and the subgraph tree,
    /// which has a budget of its own, do not count against it.
    fn place(self, blocks: &Blocks, limit: u64, work: &mut u64, watch: &Watch) -> Result<Option<Vec<u64>>, Stop> {
        match self {
            Method::Greedy(sequence) => greedy::place(blocks, sequence, limit, work, watch),
            Method::Skyline => skyline::place(blocks, limit, work, watch),
            Method::Tree { node_limit } => concatenate::place(blocks, node_limit, limit, watch),
            Method::Weighted => {
                let offsets = weighted::place(blocks, watch)?;
                Ok((blocks.pool_bytes(&offsets) < limit).then_some(offsets))
            }
        }
    }
}

/// The quickest layout: creation order, lowest free offset; another where that would take long.
/// Always found.
pub(crate) fn first_fit(problem: &Problem, profile: &Profile, watch: &Watch) -> Result<Layout, Stop> {
    let blocks = Blocks::new(problem, profile);
    let method = Method::Greedy(Sequence::Start);
    let mut work = portfolio_work(blocks.all.len()) / SHARE;
    Ok(match method.place(&blocks, u64::MAX, &mut work, watch)? {
        Some(offsets) => blocks.layout(method.name(), &offsets),
        None => blocks.layout(Method::Weighted.name(), &weighted::place(&blocks, watch)?),
    })
}

/// The layout that an ordinary allocator would come to, quick whatever the blocks look like: what
/// program order takes at most.
pub(crate) fn best_fit(problem: &Problem, profile: &Profile) -> Layout {
    let blocks = Blocks::new(problem, profile);
    blocks.layout("best_fit", &best_fit::place(&blocks))
}

/// One method's layout, for comparison, however long it takes.
pub(crate) fn by_method(
    problem: &Problem,
    profile: &Profile,
    method: Method,
    watch: &Watch,
) -> Result<Option<Layout>, Stop> {
    let blocks = Blocks::new(problem, profile);
    let offsets = method.place(&blocks, u64::MAX, &mut { u64::MAX }, watch)?;
    Ok(offsets.map(|offsets| blocks.layout(method.name(), &offsets)))
}

/// The best layout of the portfolio that takes less than `limit`, if one does of those that are
/// found before `work`, at first [`portfolio_work`], is used up.
pub(crate) fn best(
    problem: &Problem,
    profile: &Profile,
    limit: u64,
    work: &mut u64,
    watch: &Watch,
) -> Result<Option<Layout>, Stop> {
    improve(problem, profile, limit, |incumbent| portfolio(incumbent, work, watch))
}

/// The same by the methods that are quick whatever the blocks look like.
pub(crate) fn best_of_quick(
    problem: &Problem,
    profile: &Profile,
    limit: u64,
    work: &mut u64,
    watch: &Watch,
) -> Result<Option<Layout>, Stop> {
    improve(problem, profile, limit, |incumbent| side_by_side(incumbent, Method::QUICK, work, watch))
}

/// The smallest layouts of the portfolio, one per method, all of `pool_bytes`, found before `work`
/// is used up.
pub(crate) fn alike(
    problem: &Problem,
    profile: &Profile,
    pool_bytes: u64,
    work: &mut u64,
    watch: &Watch,
) -> Result<Vec<Layout>, Stop> {
    let blocks = Blocks::new(problem, profile);
    let mut alike = Vec::new();
    for method in Method::ALL {
        let limit = pool_bytes.saturating_add(1);
        let mut share = *work / SHARE;
        *work -= share;
        let placed = method.place(&blocks, limit, &mut share, watch)?;
        *work += share;
        alike.extend(placed.map(|offsets| blocks.layout(method.name(), &offsets)));
    }
    Ok(alike)
}

/// A layout that takes less than `limit`, if the search finds one before its `work`, counted in
/// comparisons, is used up.
pub(crate) fn search(
    problem: &Problem,
    profile: &Profile,
    limit: u64,
    work: &mut u64,
    watch: &Watch,
) -> Result<Option<Layout>, Stop> {
    improve(problem, profile, limit, |incumbent| escalate::improve(incumbent, work, watch))
}

/// What branch and bound of one layout's hard core may compare.
const CORE_WORK: u64 = 16_000_000;

/// A layout that takes less than `limit`, if exact means find one where all others ended with a
/// gap. `start` is some layout of the same tensors.
pub(crate) fn finish_exactly(
    problem: &Problem,
    profile: &Profile,
    start: Option<&Layout>,
    limit: u64,
    exact: &mut ExactTier<'_>,
    watch: &Watch,
) -> Result<Option<Layout>, Stop> {
    improve(problem, profile, limit, |incumbent| {
        let offsets = match start {
            Some(layout) => incumbent.blocks.offsets(&layout.offsets),
            None => weighted::place(incumbent.blocks, watch)?,
        };
        let mut work = CORE_WORK;
        core_refinement::finish(incumbent, &offsets, &mut work, exact, watch)
    })
}

/// What a search that begins with nothing below `limit` comes to. What was found before a deadline
/// counts; a cancelled search gives nothing.
fn improve(
    problem: &Problem,
    profile: &Profile,
    limit: u64,
    search: impl FnOnce(&mut Incumbent<'_>) -> Result<(), Stop>,
) -> Result<Option<Layout>, Stop> {
    let blocks = Blocks::new(problem, profile);
    let mut incumbent = Incumbent::new(&blocks, limit);
    let ended = search(&mut incumbent);
    match (ended, incumbent.found) {
        (Ok(()), found) | (Err(Stop::TimedOut), found @ Some(_)) => {
            Ok(found.map(|(method, offsets)| blocks.layout(method, &offsets)))
        }
        (Err(stop), _) => Err(stop),
    }
}

/// Tries the methods of the portfolio.
pub(crate) fn portfolio(incumbent: &mut Incumbent<'_>, work: &mut u64, watch: &Watch) -> Result<(), Stop> {
    // The quick ones are nearly always enough; the others run if they are not, and only as long as
    // they may be better.
    side_by_side(incumbent, Method::QUICK, work, watch)?;
    side_by_side(incumbent, &Method::ALL[Method::QUICK.len()..], work, watch)
}

/// Tries some methods of the portfolio, unless there is nothing to gain.
fn side_by_side(incumbent: &mut Incumbent<'_>, methods: &[Method], work: &mut u64, watch: &Watch) -> Result<(), Stop> {
    if incumbent.is_done() {
        return Ok(());
    }
    let Incumbent { blocks, limit, .. } = *incumbent;
    let share = *work / SHARE;
    let place = |method: &Method| {
        let mut left = share;
        let placed = method.place(blocks, limit, &mut left, watch);
        (placed, share - left)
    };
    let placed: Vec<_> = methods.par_iter().map(place).collect();
    for (method, (placed, used)) in methods.iter().zip(placed) {
        *work -= used;
        if let Some(offsets) = placed? {
            incumbent.offer(method.name(), offsets);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::blocks::Block;

    #[test]
    fn a_fragmented_address_space_ends_greedy_layouts_but_not_the_surest() {
        // At time 1 every other block is gone, and nothing fits between the others.
        let count = 30_000;
        let small = (0..count).map(|at| Block { size: 1, alignment: 1, start: 0, end: 1 + at % 2 });
        let large = (0..count).map(|_| Block { size: 2, alignment: 1, start: 1, end: 2 });
        let blocks = Blocks::bare(small.chain(large).collect());
        let watch = Watch::default();
        let mut work = portfolio_work(blocks.all.len());
        let greedy = Method::Greedy(Sequence::Start).place(&blocks, u64::MAX, &mut work, &watch);
        assert_eq!((greedy, work), (Ok(None), 0));
        let offsets = weighted::place(&blocks, &watch).expect("not stopped");
        assert!(blocks.pool_bytes(&offsets) as f64 <= 1.1 * blocks.floor() as f64);
    }
}
