//! Exact search where it counts: in the stretch of an order that holds its peak.
//!
//! The stretch is first the trunk's segment around the peak, then more segments around that, up to
//! the whole segment of the graph: what lies between two operators that have the same place in
//! every order. As long as a sequence with a lower peak is found, the search goes on at the new
//! peak. Where the whole segment has none, its peak bounds all orders.

use super::exact::{self, Answer};
use super::refine::{Aim, Ordered};
use super::segments;
use super::window::{Shape, Window};
use crate::bound::Bounds;
use crate::control::{Stop, Watch};
use crate::plan::BoundRoute;
use crate::problem::{Op, Problem};
use std::collections::HashMap;
use std::ops::Range;

/// Work granted to all searches for one order; an operator looked at, or an arc of a cut, is one
/// unit.
const WORK: u64 = 20_000_000;
/// Windows are not made larger than this.
const MOST_OPERATORS: usize = 1024;

/// A window's shape, the floor and the peak, counted from the bytes that cross its beginning.
type Question = (Shape, [i128; 2]);

/// What windows asked for. Windows of one shape that ask the same have the same answer, which is
/// searched for once.
#[derive(Default)]
pub(crate) struct Answers {
    /// Per question the sequence found, and the bytes proved, counted as in the question.
    known: HashMap<Question, (Option<Vec<usize>>, i128)>,
    /// How many windows asked.
    pub(crate) asked: usize,
}

impl Answers {
    /// How many windows were searched.
    pub(crate) fn searched(&self) -> usize {
        self.known.len()
    }

    fn least_peak(
        &mut self,
        window: &Window,
        [floor, peak]: [u64; 2],
        work: &mut u64,
        watch: &Watch,
    ) -> Result<Found, Stop> {
        self.asked += 1;
        let base = i128::from(window.first_bytes);
        let key = (window.shape(), [floor, peak].map(|bytes| i128::from(bytes) - base));
        if let Some((sequence, proved)) = self.known.get(&key) {
            // That nothing was proved is said by a number far below 0.
            let proved = u64::try_from(base + proved).unwrap_or(0);
            return Ok(Found { sequence: sequence.clone(), proved });
        }
        let found = least_peak(window, floor, peak, work, watch)?;
        let proved = if found.proved == 0 { i128::MIN / 2 } else { i128::from(found.proved) - base };
        self.known.insert(key, (found.sequence.clone(), proved));
        Ok(found)
    }
}

/// A stretch of an order, with its peak, of which the search could not tell whether another
/// sequence has a lower one.
#[derive(Clone, Debug)]
pub(crate) struct Open {
    pub(super) range: Range<usize>,
    /// Whether every order passes the stretch's two ends.
    pub(super) is_segment: bool,
}

impl Open {
    /// A whole order.
    pub(crate) fn whole(order: &[Op]) -> Self {
        Open { range: 0..order.len(), is_segment: true }
    }
}

/// Lowers the peak of an order as far as the work allows, and says where it gave up. What is proved
/// about all orders goes into `bounds`.
pub(crate) fn lower_peaks(
    aim: Aim,
    mut best: Ordered,
    bounds: &mut Bounds,
    answers: &mut Answers,
    watch: &Watch,
) -> Result<(Ordered, Option<Open>), Stop> {
    let problem = aim.problem;
    let whole = segments::insensitive(problem);
    let on_trunk = segments::insensitive_on_trunk(problem);
    let mut work = WORK;
    loop {
        match improve(problem, &best, [&whole, &on_trunk], bounds, answers, &mut work, watch)? {
            Next::Better(better) if aim.allows(&better.order) => best = better,
            Next::Better(_) => return Ok((best, None)),
            Next::Settled => return Ok((best, None)),
            Next::Open(open) => return Ok((best, Some(open))),
        }
    }
}

/// What a look at an order's peak leads to.
enum Next {
    /// An order with a lower peak, or at least with one place less at the peak.
    Better(Ordered),
    /// No other sequence of the stretch has a lower peak.
    Settled,
    /// The work was not enough.
    Open(Open),
}

/// Looks at ever larger stretches around the peak.
fn improve(
    problem: &Problem,
    ordered: &Ordered,
    [whole, on_trunk]: [&[Op]; 2],
    bounds: &mut Bounds,
    answers: &mut Answers,
    work: &mut u64,
    watch: &Watch,
) -> Result<Next, Stop> {
    let Ordered { order, profile } = ordered;
    let Some(step) = profile.live.iter().position(|&live| live == profile.peak) else { return Ok(Next::Settled) };
    let mut step_of = vec![0; order.len()];
    for (step, &op) in order.iter().enumerate() {
        step_of[op as usize] = step;
    }
    let segment = around(step, 1, whole, &step_of);
    let mut reach = 1;
    let mut last = 0..0;
    loop {
        let wanted = around(step, reach, on_trunk, &step_of);
        let range = wanted.start.max(segment.start).max(step.saturating_sub(MOST_OPERATORS / 2))
            ..wanted.end.min(segment.end).min(step + MOST_OPERATORS / 2);
        reach *= 2;
        if range == last {
            if range == segment || wanted == (0..order.len()) || range.len() + 1 >= MOST_OPERATORS {
                return Ok(Next::Settled);
            }
            continue;
        }
        let (bound, _) = bounds.best();
        let elsewhere = profile.live[..range.start].iter().chain(&profile.live[range.end..]).max();
        if profile.peak <= bound {
            return Ok(Next::Settled);
        }
        // Where the peak is reached elsewhere too, it is progress enough that it is reached at one
        // place less.
        let floor = bound.max(elsewhere.copied().unwrap_or(0).min(profile.peak - 1));
        *work = work.saturating_sub((problem.len() + problem.tensors.len()) as u64);
        let window = Window::new(problem, order, profile, range.clone());
        let found = answers.least_peak(&window, [floor, profile.peak], work, watch)?;
        if range == segment && found.proved > bound {
            bounds.record(order[step], found.proved, BoundRoute::Exhaustive);
        }
        if let Some(sequence) = found.sequence {
            let mut order = order.clone();
            for (place, at) in range.clone().zip(sequence) {
                order[place] = window.ops[at];
            }
            return Ok(Next::Better(Ordered::new(problem, order)));
        }
        if found.proved < profile.peak {
            return Ok(Next::Open(Open { is_segment: range == segment, range }));
        }
        last = range;
    }
}

/// The steps from after the `reach`-th cut before `step` up to the `reach`-th cut after it.
fn around(step: usize, reach: usize, cuts: &[Op], step_of: &[usize]) -> Range<usize> {
    // Cuts keep their order in every order.
    let next = cuts.partition_point(|&cut| step_of[cut as usize] < step);
    let start = next.checked_sub(reach).map_or(0, |at| step_of[cuts[at] as usize] + 1);
    let end = cuts.get(next + reach - 1).map_or(step_of.len(), |&cut| step_of[cut as usize] + 1);
    start..end
}

struct Found {
    /// The best sequence, if it has a lower peak than the present one.
    sequence: Option<Vec<usize>>,
    /// No sequence of the window has a lower peak than this, or than the floor.
    proved: u64,
}

/// Lowers the window's peak from `peak` towards `floor`, halving what lies between.
fn least_peak(window: &Window, floor: u64, peak: u64, work: &mut u64, watch: &Watch) -> Result<Found, Stop> {
    let mut found = Found { sequence: None, proved: 0 };
    let (mut low, mut high) = (floor, peak);
    let mut budget = floor;
    while low < high && budget < high && *work > 0 {
        // A hard question may not use up all that easier ones need.
        let mut share = (*work / 3).max(1);
        *work -= share;
        let answer = exact::within(window, budget, &mut share, watch)?;
        *work += share;
        match answer {
            Answer::Order(sequence) => {
                high = window.peak(&sequence).max(floor);
                debug_assert!(high <= budget);
                found.sequence = Some(sequence);
                budget = low + (high - low) / 2;
            }
            Answer::AtLeast(bytes) => {
                low = bytes.min(high);
                found.proved = low;
                budget = low + (high - low) / 2;
            }
            Answer::Unknown => budget += (high - budget).div_ceil(2),
        }
    }
    Ok(found)
}
