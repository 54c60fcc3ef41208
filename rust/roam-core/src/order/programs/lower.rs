//! Integer programs for the stretch of an order that holds its peak, where the search in
//! [`crate::order::peaks`] gave up.

use super::integer::OrderProgram;
use crate::bound::Bounds;
use crate::control::{Stop, Watch};
use crate::exact::{ExactTier, MOST_ENTRIES};
use crate::order::peaks::Open;
use crate::order::refine::Ordered;
use crate::order::window::Window;
use crate::plan::BoundRoute;
use crate::problem::Problem;
use crate::tolerance::is_within;
use std::ops::Range;

/// How often the peak may be lowered; it is nearly always at its least after the first time.
const MOST_ROUNDS: usize = 4;
/// Ever smaller lengths tried: 5/6 to the power of this is one in a few hundred.
const MOST_LENGTHS: usize = 32;
/// Stretches of fewer operators are left to the search.
const FEWEST_OPERATORS: usize = 8;
/// So are stretches that are less than 1 / `FEWEST_PART` of what the search left open: they hardly
/// ever hold the answer, and take as long as others.
const FEWEST_PART: usize = 8;

/// Lowers the peak of an order in and around the stretch that a search left open. What is proved
/// about all orders goes into `bounds`.
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
    let hopes = Hopes { live: &profile.live, peak: profile.peak, open, bound };
    if !hopes.are_worthwhile(&open.range) {
        return Ok(None);
    }
    let state = |range: &Range<usize>| {
        let window = Window::new(problem, order, profile, range.clone());
        let floor = hopes.floor(range).min(profile.peak - 1);
        Some((range.clone(), OrderProgram::new(window, floor, MOST_ENTRIES)?))
    };
    // The longest stretches that are not too large for a program.
    let programs = stretches(&open.range, step).take(MOST_LENGTHS).find_map(|ranges| {
        let programs: Vec<_> = ranges.iter().filter(|range| hopes.are_worthwhile(range)).filter_map(state).collect();
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
        if hopes.can_prove(range) && answer.bound > stated.floor() {
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
            exact.gain(&answer);
        }
    }
    Ok(best)
}

/// What stretches of an order can be hoped to gain.
struct Hopes<'a> {
    /// Live bytes at every step, and the most of them.
    live: &'a [u64],
    peak: u64,
    open: &'a Open,
    /// No order has a lower peak than this.
    bound: u64,
}

impl Hopes<'_> {
    /// The peak does not fall below this, whatever the stretch's sequence.
    fn floor(&self, range: &Range<usize>) -> u64 {
        self.live[..range.start].iter().chain(&self.live[range.end..]).copied().fold(self.bound, u64::max)
    }

    /// Whether a bound for the stretch is one for all orders: if all of them pass its two ends.
    fn can_prove(&self, range: &Range<usize>) -> bool {
        self.open.is_segment && *range == self.open.range
    }

    /// Whether there is more to gain than next to nothing, by lowering the peak or by raising the
    /// bound.
    fn are_worthwhile(&self, range: &Range<usize>) -> bool {
        let least = if self.can_prove(range) { self.bound } else { self.floor(range) };
        !is_within(self.peak, least)
    }
}

/// The peak, and how often it is reached.
fn height(ordered: &Ordered) -> (u64, usize) {
    let peak = ordered.profile.peak;
    (peak, ordered.profile.live.iter().filter(|&&live| live == peak).count())
}

/// The whole stretch, then ever smaller ones: per length the step in their middle, and in their
/// last and first quarter.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_beside_another_peak_gains_nothing() {
        let live = [1000, 9000, 1000, 10_000, 2000, 9999, 1000];
        let hopes = |open| Hopes { live: &live, peak: 10_000, open, bound: 5000 };
        let part = Open { range: 1..6, is_segment: false };
        let worthwhile = |range| hopes(&part).are_worthwhile(&range);
        assert!(worthwhile(1..6) && worthwhile(3..6), "down to 9000 at least");
        assert!(!worthwhile(1..5) && !worthwhile(3..4), "9999 stays");
        assert_eq!((hopes(&part).floor(&(1..5)), hopes(&part).floor(&(0..7))), (9999, 5000));
    }

    #[test]
    fn a_segment_may_gain_a_bound() {
        let live = [10_000, 1000, 10_000, 1000];
        let hopes = |is_segment, bound| {
            Hopes { live: &live, peak: 10_000, open: &Open { range: 2..4, is_segment }, bound }.are_worthwhile(&(2..4))
        };
        assert!(hopes(true, 5000) && !hopes(true, 9995));
        assert!(!hopes(false, 5000), "the other peak stays");
    }
}
