//! Better choices from a choice to begin with: parts choose anew, at prices that rise where a choice
//! takes more than the limit and fall where it does not.

use super::forest::Forest;
use super::problem::Problem;
use super::reduced::{EXACT, Reduced};
use crate::control::Watch;
use crate::rng::Random;

/// Rounds of forests from one beginning, and forests in each.
const ROUNDS: usize = 30;
const FORESTS: usize = 3;
/// The most nodes that get a random strategy at the beginning, and the rounds for which they keep
/// it.
const MOST_KICKED: u64 = 3;
const KICKED_ROUNDS: usize = 6;
/// By which factor prices fall after a choice within the limit.
const FALL: f64 = 0.9;
/// By which factor prices rise where a choice takes too much, and what is added to them, as a share
/// of the cost of a choice per byte of the limit.
const RISE: f64 = 1.1;
const MORE: f64 = 0.01;

/// A choice of a strategy per node, and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// Per node of the problem.
    pub choice: Vec<usize>,
    /// What it costs.
    pub cost: i64,
}

/// The best choice so far.
#[derive(Clone)]
pub(super) struct Best<'a> {
    problem: &'a Problem,
    pub(super) solution: Option<Solution>,
}

impl<'a> Best<'a> {
    pub(super) fn new(problem: &'a Problem) -> Self {
        Best { problem, solution: None }
    }

    pub(super) fn cost(&self) -> Option<i64> {
        self.solution.as_ref().map(|solution| solution.cost)
    }

    /// Takes another if it is better.
    pub(super) fn take(&mut self, other: Best<'a>) {
        if other.cost().is_some_and(|cost| self.cost().is_none_or(|known| cost < known)) {
            self.solution = other.solution;
        }
    }

    /// Takes a choice if it is better; returns by how much it is above the limit at each time, and
    /// whether it is allowed.
    pub(super) fn meet(&mut self, reduced: &Reduced, choice: &[usize]) -> (Vec<i64>, bool) {
        let excess = reduced.excess(choice);
        let cost = reduced.cost(choice);
        let is_within = excess.iter().all(|&bytes| bytes <= 0);
        // Sums of large costs are rounded.
        let error =
            if cost.abs() < EXACT { 0.0 } else { cost.abs() * f64::EPSILON * (2 * reduced.edges.len() + 9) as f64 };
        if is_within && cost.is_finite() && self.cost().is_none_or(|best| cost - error < best as f64) {
            let whole = reduced.whole(choice);
            // The searches count in floating point: what they find is checked by the problem itself.
            if let Some(cost) = self.problem.cost(&whole).filter(|_| self.problem.is_within(&whole))
                && self.cost().is_none_or(|best| cost < best)
            {
                self.solution = Some(Solution { choice: whole, cost });
            }
        }
        (excess, cost.is_finite())
    }
}

/// Where an improvement begins.
pub(super) struct Begin {
    pub(super) choice: Vec<usize>,
    pub(super) prices: Vec<f64>,
    /// Whether some strategies are changed at random first.
    pub(super) is_kicked: bool,
}

/// Lets parts choose anew, again and again; returns how many matrix entries were looked at.
///
/// Args:
///     scale: what a choice costs, more or less.
pub(super) fn improve(
    reduced: &Reduced,
    begin: Begin,
    scale: f64,
    best: &mut Best<'_>,
    random: &mut Random,
    watch: &Watch,
) -> u64 {
    let Begin { mut choice, mut prices, is_kicked } = begin;
    let count = reduced.len() as u64;
    let mut forest = Forest::new(reduced);
    let mut kept = Vec::new();
    if is_kicked && count > 0 {
        for _ in 0..=random.below(MOST_KICKED) {
            let node = random.below(count) as usize;
            choice[node] = random.below(reduced.size(node) as u64) as usize;
            kept.push(node);
        }
    }
    let limit = best.problem.limit_bytes.unwrap_or(0).max(1) as f64;
    let mut work = 0;
    for round in 0..ROUNDS {
        let costs = reduced.priced(&prices);
        if round == KICKED_ROUNDS {
            kept.clear();
        }
        for _ in 0..FORESTS {
            if watch.check().is_err() {
                return work;
            }
            work += forest.choose(&costs, &mut choice, random, &kept);
        }
        let (excess, is_allowed) = best.meet(reduced, &choice);
        let most = excess.iter().copied().max().unwrap_or(0);
        if most <= 0 && is_allowed {
            prices.iter_mut().for_each(|price| *price *= FALL);
        } else if most > 0 {
            let more = MORE * (1.0 + 0.1 * round as f64) * scale.max(1.0) / limit;
            for (price, &bytes) in prices.iter_mut().zip(&excess).filter(|(_, bytes)| **bytes > 0) {
                *price = *price * RISE + more * bytes as f64 / most as f64;
            }
        }
    }
    work
}
