//! Integer programs for the stretch of an order that holds its peak, where the search in [`super::peaks`] gave up.

use super::integer::OrderProgram;
use super::peaks::Open;
use super::refine::Ordered;
use super::window::Window;
use crate::bound::Bounds;
use crate::control::{Stop, Watch};
use crate::exact::{ExactTier, MOST_ENTRIES};
use crate::plan::BoundRoute;
use crate::problem::Problem;
use std::ops::Range;

/// How often the peak may be lowered; it is nearly always at its least after the first time.
const MOST_ROUNDS: usize = 4;
/// Ever smaller lengths tried: 5/6 to the power of this is one in a few hundred.
const MOST_LENGTHS: usize = 32;
/// Stretches of fewer operators are left to the search.
const FEWEST_OPERATORS: usize = 8;
/// And those that are less than this part of what it left open: they hardly ever hold the answer, and take as long as any.
const FEWEST_PART: usize = 8;

/// Lowers the peak of an order in and around the stretch that a search left open. What is proved about all orders goes
/// into `bounds`.
pub(crate) fn lower_by_programs(
    problem: &Problem,
    mut best: Ordered,
    open: &Open,
    bounds: &mut Bounds,
    exact: &mut ExactTier<'_>,
    watch: &Watch,
) -> Result<Ordered, Stop> {
    for _ in 0..MOST_ROUNDS {
        match improve(problem, &best, open, bounds, exact, watch)? {
            Some(better) => best = better,
            None => break,
        }
    }
    Ok(best)
}

fn improve(
    problem: &Problem,
    ordered: &Ordered,
    open: &Open,
    bounds: &mut Bounds,
    exact: &mut ExactTier<'_>,
    watch: &Watch,
) -> Result<Option<Ordered>, Stop> {
    let Ordered { order, profile } = ordered;
    let Some(step) = profile.live.iter().position(|&live| live == profile.peak) else { return Ok(None) };
    let (bound, _) = bounds.best();
    if profile.peak <= bound || !open.range.contains(&step) || !exact.is_on() {
        return Ok(None);
    }
    let window = |range: &Range<usize>| {
        let elsewhere = profile.live[..range.start].iter().chain(&profile.live[range.end..]).max();
        let floor = bound.max(elsewhere.copied().unwrap_or(0).min(profile.peak - 1));
        (range.clone(), Window::new(problem, order, profile, range.clone()), floor)
    };
    // The longest stretches that are not too large for a program.
    let programs = stretches(&open.range, step).take(MOST_LENGTHS).find_map(|ranges| {
        let windows = ranges.iter().map(window);
        let programs: Vec<_> = windows
            .filter_map(|(range, window, floor)| Some((range, OrderProgram::new(window, floor, MOST_ENTRIES)?)))
            .collect();
        (!programs.is_empty()).then_some(programs)
    });
    let Some(programs) = programs else {
        exact.too_large();
        return Ok(None);
    };
    let stated = programs.iter().map(|(_, stated)| (stated.program.clone(), stated.start.clone()));
    let answers = exact.solve(stated, watch)?;
    let mut best: Option<Ordered> = None;
    for ((range, stated), answer) in programs.iter().zip(answers) {
        let Some(answer) = answer else { continue };
        let mut gains = false;
        // Every order passes the two ends of a segment of the graph, so the bound holds for all of them.
        if open.is_segment && *range == open.range && answer.bound > stated.floor() {
            let proved = stated.unit.saturating_mul(answer.bound.unsigned_abs()).min(profile.peak);
            gains |= proved > bounds.best().0;
            bounds.record(order[step], proved, BoundRoute::IntegerProgram);
        }
        if let Some(sequence) = stated.sequence(&answer.values) {
            let mut order = order.clone();
            let ops: Vec<_> = sequence.into_iter().map(|at| order[range.start + at]).collect();
            order[range.clone()].copy_from_slice(&ops);
            let better = Ordered::new(problem, order);
            if height(&better) < height(best.as_ref().unwrap_or(ordered)) {
                gains = true;
                best = Some(better);
            }
        }
        if gains {
            exact.gain();
        }
    }
    Ok(best)
}

/// The peak, and how often it is reached.
fn height(ordered: &Ordered) -> (u64, usize) {
    let peak = ordered.profile.peak;
    (peak, ordered.profile.live.iter().filter(|&&live| live == peak).count())
}

/// The whole stretch, then ever smaller ones: per length the step in their middle, and in their last and first quarter.
fn stretches(whole: &Range<usize>, step: usize) -> impl Iterator<Item = Vec<Range<usize>>> {
    let whole = whole.clone();
    let lengths = std::iter::successors(Some(whole.len()), |&length| Some(length * 5 / 6));
    let fewest = FEWEST_OPERATORS.max(whole.len().div_ceil(FEWEST_PART));
    let is_of_use = move |&length: &usize| length >= fewest;
    let smaller = lengths.skip(1).take_while(is_of_use);
    std::iter::once(whole.len()).chain(smaller).map(move |length| {
        let mut placed: Vec<Range<usize>> = Vec::new();
        for quarter in [2, 3, 1] {
            let start = step.saturating_sub(length * quarter / 4).max(whole.start).min(whole.end - length);
            if placed.iter().all(|other| other.start != start) {
                placed.push(start..start + length);
            }
        }
        placed
    })
}
