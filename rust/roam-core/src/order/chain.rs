//! A chain of cuts: an order that passes the least down-set at many of its peaks.
//!
//! A split (see [`super::refine`]) mends one peak and may raise another. Where many are as high, as
//! in steps that sum the gradients of micro-batches, it gains nothing. Here the operators at the
//! peaks keep their sequence (the chain), and at each of them a cut is made in which those before
//! it have run and those after it have not. Such cuts are nested (docs/explanation/theory.md), so
//! one order passes all of them. It has other peaks. Their operators join the chain, in the places
//! that they have in the first order, until the new order is low enough, or as high as the first.

use super::refine::{Aim, Ordered};
use crate::bound::{self, Cut, Side};
use crate::control::{Stop, Watch};
use crate::problem::{Op, Problem, step_by_operator};
use rayon::prelude::*;
use std::ops::Range;

/// Operators, tensors and arcs looked at, over all chains of one portfolio: a second's work at most.
/// With a quarter, a step of 46,708 operators (transformers' `hy_v3`) has a gap of 7.1 instead of
/// 0.6 %.
pub(super) const WORK: u64 = 40_000_000;
/// How many times operators join one chain.
const MOST_ROUNDS: usize = 24;

/// Which of the sets that attain a cut is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Smallest,
    Largest,
}

/// The best order on the way to a peak of `goal`; `None` where none is better than `start`.
pub(super) fn chain(
    aim: Aim,
    start: &Ordered,
    goal: u64,
    choice: Choice,
    work: &mut u64,
    watch: &Watch,
) -> Result<Option<Ordered>, Stop> {
    let problem = aim.problem;
    let step = step_by_operator(&start.order);
    let mut is_chained = vec![false; problem.len()];
    let mut chained: Vec<Op> = Vec::new();
    let mut current = start.clone();
    let mut best: Option<Ordered> = None;
    for _ in 0..MOST_ROUNDS {
        let steps = current.order.iter().zip(&current.profile.live);
        // Live bytes at operators that have joined the chain do not fall any more.
        let settled = steps.filter(|(op, _)| is_chained[**op as usize]).map(|(_, &live)| live).max().unwrap_or(0);
        let goal = goal.max(settled);
        let known = best.as_ref().unwrap_or(start).profile.peak;
        let mut joining = peaks(problem, &current, goal);
        joining.retain(|&op| !is_chained[op as usize]);
        if goal >= known || *work == 0 || joining.is_empty() {
            break;
        }
        joining.iter().for_each(|&op| is_chained[op as usize] = true);
        chained.extend(joining);
        chained.sort_unstable_by_key(|&op| step[op as usize]);
        current = Ordered::new(problem, pass(problem, &start.order, &chained, choice, work, watch)?);
        let height = |ordered: &Ordered| (ordered.profile.least_total(), ordered.profile.peak);
        if height(&current) < height(best.as_ref().unwrap_or(start)) && aim.allows(&current.order) {
            best = Some(current.clone());
        }
    }
    Ok(best)
}

/// For each run of steps with more than `goal` live bytes, the operator that touches the most
/// bytes, because it is the one that needs live bytes most.
fn peaks(problem: &Problem, ordered: &Ordered, goal: u64) -> Vec<Op> {
    let Ordered { order, profile } = ordered;
    let steps: Vec<usize> = (0..order.len()).collect();
    let runs = steps.chunk_by(|&a, &b| (profile.live[a] > goal) == (profile.live[b] > goal));
    let high = runs.filter(|run| profile.live[run[0]] > goal);
    let neediest = |run: &[usize]| {
        run.iter().copied().rev().max_by_key(|&step| (bound::touched(problem, order[step]), profile.live[step]))
    };
    high.filter_map(neediest).map(|step| order[step]).collect()
}

/// A stretch of an order, and the operators in it that are still to be cut at, in their sequence.
struct Stretch<'a> {
    range: Range<usize>,
    chained: &'a [Op],
}

/// The order in which each operator of `chained` (at least one) runs right after the least down-set
/// that their sequence permits; all else keeps its old sequence.
fn pass(
    problem: &Problem,
    order: &[Op],
    chained: &[Op],
    choice: Choice,
    work: &mut u64,
    watch: &Watch,
) -> Result<Vec<Op>, Stop> {
    let mut order = order.to_vec();
    let mut stretches = vec![Stretch { range: 0..order.len(), chained }];
    while !stretches.is_empty() && *work > 0 {
        let divide = |stretch: &Stretch<'_>| divide(problem, &order, stretch, choice, watch);
        let divided: Vec<(Vec<Op>, usize, u64)> = stretches.par_iter().map(divide).collect::<Result<_, _>>()?;
        let mut smaller = Vec::new();
        for (Stretch { range, chained }, (ops, place, looked_at)) in stretches.into_iter().zip(divided) {
            *work = work.saturating_sub(looked_at);
            order[range.clone()].copy_from_slice(&ops);
            let (step, middle) = (range.start + place, chained.len() / 2);
            smaller.push(Stretch { range: range.start..step, chained: &chained[..middle] });
            smaller.push(Stretch { range: step + 1..range.end, chained: &chained[middle + 1..] });
        }
        smaller.retain(|stretch| !stretch.chained.is_empty());
        stretches = smaller;
    }
    Ok(order)
}

/// The stretch's operators in an order in which the middle one of its chain follows the cut, the
/// place of that one, and how much was looked at.
fn divide(
    problem: &Problem,
    order: &[Op],
    stretch: &Stretch<'_>,
    choice: Choice,
    watch: &Watch,
) -> Result<(Vec<Op>, usize, u64), Stop> {
    let Stretch { range, chained } = stretch;
    let (earlier, [op, later @ ..]) = chained.split_at(chained.len() / 2) else { unreachable!("no stretch is empty") };
    let mut side = vec![Side::Free; problem.len()];
    order[..range.start].iter().for_each(|&other| side[other as usize] = Side::Before);
    order[range.end..].iter().for_each(|&other| side[other as usize] = Side::After);
    earlier.iter().for_each(|&other| bound::fix(other, Side::Before, problem, &mut side));
    later.iter().for_each(|&other| bound::fix(other, Side::After, problem, &mut side));
    let Cut { done, work, .. } = bound::cut_at(problem, *op, &mut side, watch)?;
    let done = &done[usize::from(choice == Choice::Largest)];
    let others = order[range.clone()].iter().copied().filter(|other| other != op);
    let (first, rest): (Vec<Op>, Vec<Op>) = others.partition(|&other| done[other as usize]);
    let place = first.len();
    Ok(([first, vec![*op], rest].concat(), place, work))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Residency, Tensor, TensorId};
    use crate::liveness::Profile;
    use crate::rng::Random;

    /// Eight operators that each make a tensor and read up to two earlier ones.
    fn random_problem(random: &mut Random) -> Problem {
        let mut builder = GraphBuilder::new("random", "cpu", 1);
        let mut present: Vec<TensorId> = Vec::new();
        for position in 0..8 {
            let mut reads: Vec<TensorId> = (0..random.below(3).min(position))
                .map(|_| present[random.below(present.len() as u64) as usize])
                .collect();
            reads.sort_unstable();
            reads.dedup();
            let (name, kind, residency) = (String::new(), Kind::Temporary, Residency::StepLocal);
            let made = Tensor { name, size_bytes: 1 + random.below(9), kind, residency, alignment_bytes: 0 };
            let creates = vec![builder.tensor(made).expect("few tensors")];
            present.extend(&creates);
            let operator = Operator { reads, creates, ..Operator::new("", position as u32, Phase::Forward) };
            builder.operator(operator).expect("few operators");
        }
        Problem::new(&builder.build().expect("valid by construction"), false)
    }

    #[test]
    fn chained_operators_have_the_least_that_their_sequence_permits() {
        let mut random = Random::new(17);
        let mut several = 0;
        for round in 0..200 {
            let problem = random_problem(&mut random);
            let mut chained: Vec<Op> = problem.program_order().into_iter().filter(|_| random.once_in(3)).collect();
            if chained.is_empty() {
                chained.push(4);
            }
            several += u32::from(chained.len() > 1);
            let mut least = vec![u64::MAX; problem.len()];
            problem.for_each_order(&mut |order| {
                if order.iter().filter(|op| chained.contains(op)).is_sorted() {
                    for (&op, &live) in order.iter().zip(&Profile::new(&problem, order).live) {
                        least[op as usize] = live.min(least[op as usize]);
                    }
                }
            });
            let choice = [Choice::Smallest, Choice::Largest][round % 2];
            let (order, mut work) = (problem.program_order(), u64::MAX);
            let order = pass(&problem, &order, &chained, choice, &mut work, &Watch::default()).expect("not stopped");
            assert!(problem.is_valid_order(&order));
            let live = Profile::new(&problem, &order).live;
            for (step, op) in order.iter().enumerate().filter(|(_, op)| chained.contains(op)) {
                assert_eq!(live[step], least[*op as usize], "operator {op} of {chained:?} in {order:?}");
            }
        }
        assert!(several > 100, "{several}");
    }

    #[test]
    fn chains_lower_peaks_and_mostly_to_the_least() {
        let mut random = Random::new(18);
        let (mut lower, mut met, rounds) = (0, 0, 300);
        for _ in 0..rounds {
            let problem = random_problem(&mut random);
            let start = Ordered::new(&problem, problem.program_order());
            let mut least = u64::MAX;
            problem.for_each_order(&mut |order| least = least.min(Profile::new(&problem, order).peak));
            let (aim, mut work) = (Aim { problem: &problem, limit: None }, u64::MAX);
            let found = chain(aim, &start, least, Choice::Smallest, &mut work, &Watch::default());
            let found = found.expect("not stopped");
            assert!(found.as_ref().is_none_or(|found| found.profile.peak < start.profile.peak));
            let peak = found.as_ref().unwrap_or(&start).profile.peak;
            lower += u32::from(found.is_some());
            met += u32::from(peak == least);
            assert!(least <= peak);
        }
        assert!(lower * 2 > rounds && met * 10 > rounds * 7, "of {rounds} peaks {lower} lowered, {met} to the least");
    }
}
