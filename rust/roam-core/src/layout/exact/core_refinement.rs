//! The last means against a gap: the *core* of a layout, the blocks alive around the time at which
//! it is highest, laid out exactly, and all others around them.
//!
//! A core needs no more than the whole, so what is proved of it holds for the whole. Branch and
//! bound comes first, then, where that has no answer, an integer program.
//! docs/explanation/layouts.md shows why blocks of a core never collide outside of it.

use crate::control::{Stop, Watch};
use crate::exact::ExactTier;
use crate::layout::blocks::{Block, Blocks};
use crate::layout::exact::integer::LayoutProgram;
use crate::layout::incumbent::Incumbent;
use crate::layout::packers::gaps::Gaps;
use crate::layout::packers::greedy::Sequence;
use crate::layout::search::canonical::{Canonical, Outcome};
use crate::plan::BoundRoute;
use std::cmp::Reverse;

/// Pairs of blocks that meet in the cores tried, one after another; a core has as many or fewer.
const PAIRS: [u64; 4] = [50, 100, 200, 400];
/// Comparisons of branch and bound per core.
const WORK: u64 = 1 << 22;
/// Most entries of a program: above, there is hardly ever an answer within a few seconds.
const MOST_ENTRIES: u64 = 2000;
/// Address spans that may be looked at where a core's other blocks are placed once.
const MOST_SPANS: u64 = 1 << 22;
/// How many of the cores that branch and bound leaves open become programs, the largest first.
const MOST_PROGRAMS: usize = 2;

/// Blocks alive within a stretch of time, as a layout problem of their own.
struct Core {
    /// Their numbers in the whole.
    members: Vec<usize>,
    blocks: Blocks,
}

impl Core {
    fn new(all: &[Block], from: u32, to: u32) -> Self {
        let members: Vec<usize> = (0..all.len()).filter(|&at| all[at].start < to && from < all[at].end).collect();
        let within = |at: &usize| {
            let block = all[*at];
            Block { start: block.start.max(from), end: block.end.min(to), ..block }
        };
        Core { blocks: Blocks::bare(members.iter().map(within).collect()), members }
    }
}

/// Lowers the incumbent and raises its floor as far as cores go. `offsets` are those of some layout
/// of the blocks.
pub(crate) fn finish(
    incumbent: &mut Incumbent<'_>,
    offsets: &[u64],
    work: &mut u64,
    exact: &mut ExactTier<'_>,
    watch: &Watch,
) -> Result<(), Stop> {
    let blocks = incumbent.blocks;
    let mut open = Vec::new();
    for core in cores(blocks, offsets) {
        if incumbent.is_done() {
            return Ok(());
        }
        // Where alignment leaves gaps, a search proves nothing, and the one of the whole was
        // enough.
        if blocks.unit().is_none() || !branch(incumbent, &core, work, watch)? {
            open.push(core);
        }
    }
    if incumbent.is_done() || !exact.is_on() {
        return Ok(());
    }
    let of_core = |core: &Core| core.members.iter().map(|&at| offsets[at]).collect::<Vec<_>>();
    let stated: Vec<_> = open
        .iter()
        .rev()
        .filter_map(|core| {
            Some((core, LayoutProgram::new(&core.blocks, &of_core(core), incumbent.floor, MOST_ENTRIES)?))
        })
        .take(MOST_PROGRAMS)
        .collect();
    if stated.is_empty() {
        exact.too_large();
        return Ok(());
    }
    let questions = stated.iter().map(|(_, stated)| (stated.program.clone(), stated.start.clone()));
    let answers = exact.solve(questions, watch)?;
    for ((core, stated), answer) in stated.iter().zip(answers) {
        let Some(answer) = answer else { continue };
        let before = (incumbent.floor, incumbent.limit);
        if answer.bound > stated.floor() {
            let proved = stated.unit.saturating_mul(answer.bound.unsigned_abs());
            // A layout that exists disproves any higher bound of a solver.
            incumbent.raise(proved.min(core.blocks.pool_bytes(&of_core(core))), BoundRoute::IntegerProgram);
        }
        if let Some(found) = stated.offsets(&answer.values) {
            extend(incumbent, core, &found, "integer_program");
        }
        if before != (incumbent.floor, incumbent.limit) {
            exact.gain(&answer);
        }
    }
    Ok(())
}

/// Cores around the time at which the layout is highest, ever larger ones, none twice.
fn cores(blocks: &Blocks, offsets: &[u64]) -> Vec<Core> {
    let all = &blocks.all;
    let top = |at: &usize| offsets[*at] + all[*at].size;
    let Some(highest) = (0..all.len()).max_by_key(|at| (top(at), Reverse(*at))) else { return Vec::new() };
    let held = blocks.held();
    let fullest = all[highest].times().max_by_key(|&time| (held[time], Reverse(time))).unwrap_or(0) as u32;
    let mut cores: Vec<Core> = Vec::new();
    for most in PAIRS {
        // The stretch grows towards the fuller side.
        let (mut from, mut to) = (fullest, fullest + 1);
        loop {
            let before = from.checked_sub(1).map(|time| (held[time as usize], time, to));
            let after = (to < blocks.times).then(|| (held[to as usize], from, to + 1));
            let mut wider: Vec<_> = before.into_iter().chain(after).collect();
            wider.sort_unstable_by_key(|&wider| Reverse(wider));
            let fits = |&&(_, from, to): &&(u64, u32, u32)| Core::new(all, from, to).blocks.pairs() <= most;
            let Some(&(_, wider_from, wider_to)) = wider.iter().find(fits) else { break };
            (from, to) = (wider_from, wider_to);
        }
        let core = Core::new(all, from, to);
        if core.blocks.pairs() <= most && cores.last().is_none_or(|last| last.blocks.times < core.blocks.times) {
            cores.push(core);
        }
    }
    cores
}

/// Branch and bound from the incumbent's floor upwards; says whether it has settled the core.
fn branch(incumbent: &mut Incumbent<'_>, core: &Core, work: &mut u64, watch: &Watch) -> Result<bool, Stop> {
    let canonical = Canonical::new(&core.blocks);
    let mut rank = vec![0; core.members.len()];
    for (place, &at) in Sequence::Area.sorted(&core.blocks).iter().enumerate() {
        rank[at as usize] = place as u32;
    }
    let mut blame = vec![1; core.blocks.times as usize];
    let mut share = WORK.min(*work);
    *work -= share;
    let settled = loop {
        if incumbent.is_done() {
            break true;
        }
        match canonical.search(&rank, incumbent.floor, &mut blame, &mut share, watch)? {
            Outcome::Found(offsets) => {
                extend(incumbent, core, &offsets, "canonical");
                break true;
            }
            Outcome::Refuted => {
                let Some(unit) = incumbent.blocks.unit() else { break false };
                incumbent.refute(incumbent.floor, unit);
            }
            Outcome::Exhausted => break false,
        }
    };
    *work += share;
    Ok(settled)
}

/// Offers layouts in which the core lies at these offsets, and every other block where there is
/// room.
fn extend(incumbent: &mut Incumbent<'_>, core: &Core, offsets: &[u64], method: &'static str) {
    let blocks = incumbent.blocks;
    let mut is_member = vec![false; blocks.all.len()];
    core.members.iter().for_each(|&at| is_member[at] = true);
    'sequences: for sequence in [Sequence::Size, Sequence::Area, Sequence::Lifetime, Sequence::Start] {
        let mut gaps = Gaps::new(blocks.times);
        let mut all = vec![0; blocks.all.len()];
        for (&at, &offset) in core.members.iter().zip(offsets) {
            gaps.insert(&blocks.all[at], offset);
            all[at] = offset;
        }
        let others = sequence.sorted(blocks).into_iter().map(|at| at as usize).filter(|&at| !is_member[at]);
        for at in others {
            all[at] = gaps.lowest(&blocks.all[at]);
            if all[at] + blocks.all[at].size >= incumbent.limit || gaps.looked_at() > MOST_SPANS {
                continue 'sequences;
            }
            gaps.insert(&blocks.all[at], all[at]);
        }
        incumbent.offer(method, all);
        if core.members.len() == blocks.all.len() {
            return;
        }
    }
}
