//! Search for a better layout: rounds of beam search, of valley descents and of branch and bound,
//! the latter two from several rankings of the blocks side by side, with more and more work until
//! the floor is met.

use crate::control::{Stop, Watch};
use crate::layout::blocks::Blocks;
use crate::layout::incumbent::Incumbent;
use crate::layout::packers::greedy::Sequence;
use crate::layout::packers::weighted::{Lines, Rule};
use crate::layout::search::beam::Beam;
use crate::layout::search::canonical::{Canonical, Outcome};
use crate::layout::search::joined;
use crate::layout::search::normal;
use crate::layout::search::valley_descent::ValleySearch;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Which blocks are tried first.
const RANKINGS: [Sequence; 4] = [Sequence::Lifetime, Sequence::Area, Sequence::Size, Sequence::Start];
/// By what rules beam search goes on from each layout.
const PLAIN: [Rule; 4] = [plain(1.0), plain(2.0), plain(4.0), plain(0.5)];
const MIXED: [Rule; 6] =
    [noisy(1.0, false), noisy(2.0, false), noisy(0.5, false), noisy(1.0, true), noisy(0.5, true), noisy(2.0, true)];
/// Rules and steepness of weights in one round after the other.
const BEAMS: [(&[Rule], f64); 3] = [(&PLAIN, 100.0), (&MIXED, 200.0), (&MIXED, 400.0)];
/// What beam search widens to, by doubling. Without widening, one of eight instances that get a fifth
/// of `SEARCH_WORK` is packed 0.8 % better, the others alike (`benches/constants.py`).
const WIDEST: usize = 4;
/// Comparisons that branch and bound may make per ranking in the first round. Each round doubles
/// them. With a fifth of `SEARCH_WORK` for all, a quarter packs two of eight instances 2.7 % better
/// (`benches/constants.py`).
const FIRST_BUDGET: u64 = 1 << 20;
/// Rounds without branch and bound that may pass without a better layout.
const MOST_FRUITLESS: u32 = 50;
/// Joined blocks get 1 / `WHOLE_SHARE` of the work.
const WHOLE_SHARE: u64 = 4;
/// The most comparisons of complete search for few blocks with mixed alignments; and of the whole
/// work, at most 1 / `NORMAL_SHARE`.
const NORMAL_WORK: u64 = 1 << 24;
const NORMAL_SHARE: u64 = 2;
/// With more blocks than this a valley descent may make twice the comparisons that are left; with
/// fewer it always comes to its end.
const MANY: usize = 30_000;
/// The work that the begin of a search counts, so that very many small searches cannot take for
/// ever.
const BEGIN: u64 = 1000;
/// Most pairs of blocks that meet, and most sums of lifetimes, for which branch and bound keeps
/// tables; as many pairs for valley descents.
const MOST_PAIRS: u64 = 1 << 22;

const fn plain(gap_cost: f64) -> Rule {
    Rule { gap_cost, noise: 0.05, bulky: false }
}

const fn noisy(gap_cost: f64, bulky: bool) -> Rule {
    Rule { gap_cost, noise: 0.1, bulky }
}

/// A ranking, and what the searches that use it have learned.
struct Ranking {
    rank: Vec<u32>,
    descent_blame: Vec<u32>,
    branch_blame: Vec<u32>,
}

impl Ranking {
    fn new(blocks: &Blocks, sequence: Sequence) -> Self {
        let mut rank = vec![0; blocks.all.len()];
        for (place, &at) in sequence.sorted(blocks).iter().enumerate() {
            rank[at as usize] = place as u32;
        }
        let blame = vec![1; blocks.times as usize];
        Ranking { rank, descent_blame: blame.clone(), branch_blame: blame }
    }
}

/// Improves on the incumbent until the floor is met or `work`, counted in comparisons, is used up.
pub(crate) fn improve(incumbent: &mut Incumbent<'_>, work: &mut u64, watch: &Watch) -> Result<(), Stop> {
    if incumbent.is_done() {
        return Ok(());
    }
    let blocks = incumbent.blocks;
    // Where alignment leaves gaps, branch and bound proves nothing.
    if blocks.unit().is_none() {
        let mut share = NORMAL_WORK.min(*work / NORMAL_SHARE);
        *work -= share;
        let ended = normal::settle(incumbent, &mut share, watch);
        *work += share;
        ended?;
        if incumbent.is_done() {
            return Ok(());
        }
    }
    join(incumbent, work, watch)?;
    let mut rankings = RANKINGS.map(|sequence| Ranking::new(blocks, sequence));
    let lines = Lines::new(blocks);
    let valleys = ValleySearch::new(blocks);
    let pairs = blocks.pairs();
    let canonical = (pairs <= MOST_PAIRS && blocks.area() <= MOST_PAIRS).then(|| Canonical::new(blocks));
    let mut budget = FIRST_BUDGET;
    let (mut fruitless, mut round) = (0, 0u64);
    while *work > 0 && !incumbent.is_done() && fruitless < MOST_FRUITLESS {
        watch.check()?;
        let before = incumbent.limit;
        fill(incumbent, &lines, round, work, watch)?;
        round += 1;
        // Valley descents take time in proportion to the pairs that meet, and seldom find the
        // better layout of many blocks.
        if canonical.is_some() || (pairs <= MOST_PAIRS && round.is_power_of_two()) {
            descend(incumbent, &valleys, &mut rankings, work, watch)?;
        }
        fruitless = if incumbent.limit < before { 0 } else { fruitless + 1 };
        let Some(canonical) = &canonical else { continue };
        fruitless = 0;
        // The floor itself, and, in case that is out of reach, half the way.
        for parts in [u64::MAX, 2] {
            if *work == 0 || incumbent.is_done() {
                break;
            }
            let capacity = incumbent.floor + (incumbent.limit - 1 - incumbent.floor) / parts;
            if branch(incumbent, canonical, capacity, budget, &mut rankings, work, watch)? {
                continue;
            }
            // Where alignment leaves gaps, a search that ends without a layout proves nothing, but
            // there is little hope in more of it.
            return Ok(());
        }
        budget = budget.saturating_mul(2);
    }
    Ok(())
}

/// Searches among layouts of joined blocks, where these are few.
fn join(incumbent: &mut Incumbent<'_>, work: &mut u64, watch: &Watch) -> Result<(), Stop> {
    let (whole, steps) = joined::join(incumbent.blocks);
    *work = work.saturating_sub(BEGIN + steps);
    let Some(whole) = whole else { return Ok(()) };
    let mut inner = Incumbent { target: incumbent.target, ..Incumbent::new(&whole.blocks, incumbent.limit) };
    let mut share = *work / WHOLE_SHARE;
    *work -= share;
    let ended = improve(&mut inner, &mut share, watch);
    *work += share;
    if let Some((method, placed)) = inner.found {
        incumbent.offer(method, whole.parts(&placed, incumbent.blocks.all.len()));
    }
    ended
}

/// One beam search, unless even the narrowest would take more than all the work that is left.
fn fill(
    incumbent: &mut Incumbent<'_>,
    lines: &Lines<'_>,
    round: u64,
    work: &mut u64,
    watch: &Watch,
) -> Result<(), Stop> {
    let (rules, steepness) = BEAMS[round as usize % BEAMS.len()];
    let most = *work / (rules.len() as u64 * lines.steps()).max(1);
    let width = WIDEST.min(1 << round.min(16)).min(most as usize);
    if width == 0 {
        *work = 0;
        return Ok(());
    }
    let beam = Beam { width, steepness, seed: round };
    let (offsets, steps) = beam.search(lines, rules, incumbent.limit, watch)?;
    *work = work.saturating_sub(BEGIN + steps);
    if let Some(offsets) = offsets {
        incumbent.offer("beam", offsets);
    }
    Ok(())
}

/// One valley descent per ranking.
fn descend(
    incumbent: &mut Incumbent<'_>,
    valleys: &ValleySearch<'_>,
    rankings: &mut [Ranking],
    work: &mut u64,
    watch: &Watch,
) -> Result<(), Stop> {
    let Incumbent { floor, limit, .. } = *incumbent;
    let target = floor + (limit - floor) / 4;
    let most = if incumbent.blocks.all.len() > MANY { work.saturating_mul(2) } else { u64::MAX };
    let descents: Vec<_> = rankings
        .par_iter_mut()
        .map(|ranking| valleys.descend(&ranking.rank, &mut ranking.descent_blame, target, limit, most, watch))
        .collect();
    for descent in descents {
        let (offsets, steps) = descent?;
        *work = work.saturating_sub(BEGIN + steps);
        if let Some(offsets) = offsets {
            incumbent.offer("dive", offsets);
        }
    }
    Ok(())
}

/// Branch and bound per ranking, until the first one has an answer. False if more branch and bound
/// is of no use.
fn branch(
    incumbent: &mut Incumbent<'_>,
    canonical: &Canonical<'_>,
    capacity: u64,
    budget: u64,
    rankings: &mut [Ranking],
    work: &mut u64,
    watch: &Watch,
) -> Result<bool, Stop> {
    let budget = budget.min(work.div_ceil(RANKINGS.len() as u64));
    // The lowest ranking with an answer so far: those after it need not begin.
    let answered = AtomicUsize::new(usize::MAX);
    let search = |(at, ranking): (usize, &Ranking)| {
        if answered.load(Ordering::Relaxed) < at {
            return (Ok(Outcome::Exhausted), 0, Vec::new());
        }
        let (mut left, mut blame) = (budget, ranking.branch_blame.clone());
        let outcome = canonical.search(&ranking.rank, capacity, &mut blame, &mut left, watch);
        if !matches!(outcome, Ok(Outcome::Exhausted)) {
            answered.fetch_min(at, Ordering::Relaxed);
        }
        (outcome, budget - left, blame)
    };
    let outcomes: Vec<_> = rankings.par_iter().enumerate().map(search).collect();
    // Nothing that comes after the first answer counts, whether it was begun or not.
    for (ranking, (outcome, used, blame)) in rankings.iter_mut().zip(outcomes) {
        *work = work.saturating_sub(BEGIN + used);
        ranking.branch_blame = blame;
        match outcome? {
            Outcome::Found(offsets) => {
                incumbent.offer("canonical", offsets);
                break;
            }
            Outcome::Refuted => {
                let Some(unit) = incumbent.blocks.unit() else { return Ok(false) };
                incumbent.refute(capacity, unit);
                break;
            }
            Outcome::Exhausted => {}
        }
    }
    Ok(true)
}
