//! The search: prices and messages give a bound and choices to begin with, forests better ones.

use super::forest::Forest;
use super::prices::Prices;
use super::problem::Problem;
use super::reduced::Reduced;
use crate::control::{Control, Watch};
use crate::rng::Random;

/// Forests follow each so many passes.
const EVERY: usize = 5;
/// Each so many passes they begin from what the messages chose, otherwise mostly from the best.
const AFRESH: usize = 50;
/// Rounds of forests from one beginning, and forests in each.
const ROUNDS: usize = 30;
const FORESTS: usize = 3;
/// At most so many nodes get a random strategy at the beginning, and keep it for some rounds.
const MOST_KICKED: u64 = 3;
const KICKED_ROUNDS: usize = 6;
/// By how much prices fall after a choice within the limit.
const FALL: f64 = 0.9;
/// By how much they rise where a choice takes too much, and what is added, as a share of the cost of
/// a choice per byte of the limit.
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

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The best choice that is allowed and keeps to the limit; `None` where none was found.
    pub solution: Option<Solution>,
    /// No such choice costs less; `None` where it is proved that there is none.
    pub bound: Option<i64>,
    /// Nodes and edges that were left to search.
    pub nodes: usize,
    /// See `nodes`.
    pub edges: usize,
    /// How many times messages passed.
    pub passes: usize,
}

/// Searches for the cheapest choice until one is proved, or until it has looked at `work` entries of
/// cost matrices, or as the control says. The same problem and work give the same outcome, unless
/// time cuts the search short.
pub fn solve(problem: &Problem, work: u64, control: &Control) -> Outcome {
    let Some(reduced) = Reduced::new(problem) else {
        return Outcome { solution: None, bound: None, nodes: 0, edges: 0, passes: 0 };
    };
    let watch = Watch::new(control, control.deadline);
    let mut search = Search {
        problem,
        reduced: &reduced,
        forest: Forest::new(&reduced),
        random: Random::new(0),
        watch,
        best: None,
        best_choice: vec![0; reduced.len()],
        bound: i64::MIN,
        work: 0,
    };
    let passes = search.run(work);
    Outcome {
        solution: search.best,
        bound: Some(search.bound),
        nodes: reduced.len(),
        edges: reduced.edges.len(),
        passes,
    }
}

struct Search<'a> {
    problem: &'a Problem,
    reduced: &'a Reduced,
    forest: Forest<'a>,
    random: Random,
    watch: Watch,
    best: Option<Solution>,
    /// The best among the nodes that are left.
    best_choice: Vec<usize>,
    bound: i64,
    /// Matrix entries that were looked at.
    work: u64,
}

impl Search<'_> {
    fn run(&mut self, work: u64) -> usize {
        let mut prices = Prices::new(self.reduced);
        for passes in 1.. {
            let cost = self.best.as_ref().map(|best| best.cost as f64);
            let found = prices.pass(cost);
            self.work += found.work;
            // Costs are whole numbers.
            self.bound = self.bound.max(prices.bound.ceil() as i64);
            self.meet(&found.choice);
            if passes % EVERY == 0 && !self.is_over(work) {
                let begins_afresh = self.best.is_none() || passes % AFRESH == 0 || self.random.once_in(4);
                let begin = if begins_afresh { found.choice } else { self.best_choice.clone() };
                self.improve(begin, prices.now().to_vec(), !begins_afresh, work);
            }
            if self.is_over(work) {
                return passes;
            }
        }
        unreachable!("the search ends")
    }

    fn is_over(&self, work: u64) -> bool {
        self.work >= work
            || self.best.as_ref().is_some_and(|best| best.cost <= self.bound)
            || self.watch.check().is_err()
    }

    /// Keeps a choice if it is the best; returns by how much it is above the limit at each time, and
    /// whether it is allowed.
    fn meet(&mut self, choice: &[usize]) -> (Vec<i64>, bool) {
        let excess = self.reduced.room.as_deref().map_or_else(Vec::new, |room| self.reduced.excess(room, choice));
        let cost = self.reduced.cost(choice);
        let is_within = excess.iter().all(|&bytes| bytes <= 0);
        if is_within && cost.is_finite() && self.best.as_ref().is_none_or(|best| cost < best.cost as f64) {
            let whole = self.reduced.whole(choice);
            // The searches count in floating point: what they find is checked by the problem itself.
            if let Some(cost) = self.problem.cost(&whole).filter(|_| self.problem.is_within(&whole))
                && self.best.as_ref().is_none_or(|best| cost < best.cost)
            {
                self.best = Some(Solution { choice: whole, cost });
                self.best_choice.copy_from_slice(choice);
            }
        }
        (excess, cost.is_finite())
    }

    /// Lets forests choose anew, again and again, at prices that rise where the choice takes too much
    /// and fall where it does not.
    fn improve(&mut self, mut choice: Vec<usize>, mut prices: Vec<f64>, is_kicked: bool, work: u64) {
        let count = self.reduced.len() as u64;
        let mut kept = Vec::new();
        if is_kicked && count > 0 {
            for _ in 0..=self.random.below(MOST_KICKED) {
                let node = self.random.below(count) as usize;
                choice[node] = self.random.below(self.reduced.size(node) as u64) as usize;
                kept.push(node);
            }
        }
        let limit = self.problem.limit_bytes.unwrap_or(0).max(1) as f64;
        for round in 0..ROUNDS {
            let costs = if prices.is_empty() { self.reduced.costs.clone() } else { self.reduced.priced(&prices) };
            if round == KICKED_ROUNDS {
                kept.clear();
            }
            for _ in 0..FORESTS {
                self.work += self.forest.choose(&costs, &mut choice, &mut self.random, &kept);
            }
            let (excess, is_allowed) = self.meet(&choice);
            let most = excess.iter().copied().max().unwrap_or(0);
            if most <= 0 && is_allowed {
                prices.iter_mut().for_each(|price| *price *= FALL);
            } else if most > 0 {
                let scale = self.best.as_ref().map_or(self.bound as f64, |best| best.cost as f64).abs().max(1.0);
                let more = MORE * (1.0 + 0.1 * round as f64) * scale / limit;
                for (price, &bytes) in prices.iter_mut().zip(&excess).filter(|(_, bytes)| **bytes > 0) {
                    *price = *price * RISE + more * bytes as f64 / most as f64;
                }
            }
            if self.is_over(work) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Edge, FORBIDDEN, Node};
    use super::*;

    /// A problem of few nodes: chains and circles, equal splits that must agree, memory that is short.
    fn made(random: &mut Random) -> Problem {
        let count = 2 + random.below(5) as usize;
        let mut problem = Problem::default();
        for _ in 0..count {
            let strategies = 1 + random.below(3) as usize;
            let start = random.below(5) as usize;
            let cost = |random: &mut Random| if random.once_in(9) { FORBIDDEN } else { random.below(30) as i64 - 5 };
            problem.nodes.push(Node {
                costs: (0..strategies).map(|_| cost(random)).collect(),
                bytes: (0..strategies).map(|_| random.below(6) as i64).collect(),
                lifetime: start..start + random.below(4) as usize,
            });
        }
        for _ in 0..random.below(2 * count as u64) {
            let nodes = [0; 2].map(|_| random.below(count as u64) as usize);
            let [rows, columns] = nodes.map(|node| problem.nodes[node].costs.len());
            let must_agree = random.once_in(3);
            let cost = |at: usize, random: &mut Random| match random.below(8) {
                _ if must_agree && at / columns != at % columns => FORBIDDEN,
                0 => FORBIDDEN,
                more => 3 * more as i64 - 6,
            };
            if nodes[0] != nodes[1] {
                let matrix = (0..rows * columns).map(|at| cost(at, random)).collect();
                problem.edges.push(Edge { nodes, matrix: problem.matrices.len() });
                problem.matrices.push(matrix);
            }
        }
        problem.limit_bytes = (!random.once_in(4)).then(|| 3 + random.below(12) as i64);
        problem
    }

    fn least_cost(problem: &Problem) -> Option<i64> {
        let mut least: Option<i64> = None;
        let mut choice = vec![0; problem.nodes.len()];
        loop {
            if let Some(cost) = problem.cost(&choice).filter(|_| problem.is_within(&choice)) {
                least = Some(least.map_or(cost, |least| least.min(cost)));
            }
            let Some(node) = (0..choice.len()).find(|&node| choice[node] + 1 < problem.nodes[node].costs.len()) else {
                return least;
            };
            choice[..node].fill(0);
            choice[node] += 1;
        }
    }

    #[test]
    fn no_bound_is_above_the_least_cost_and_nearly_all_choices_are_the_best() {
        let mut random = Random::new(1);
        let (mut possible, mut best, mut proved) = (0, 0, 0);
        for case in 0..2000 {
            let problem = made(&mut random);
            let found = solve(&problem, 20_000, &Control::default());
            let least = least_cost(&problem);
            let cost = found.solution.as_ref().map(|solution| {
                assert!(problem.is_within(&solution.choice), "{case}");
                assert_eq!(problem.cost(&solution.choice), Some(solution.cost), "{case}");
                solution.cost
            });
            let Some(least) = least else {
                assert_eq!(cost, None, "{case}");
                continue;
            };
            assert!(found.bound.is_some_and(|bound| bound <= least), "{case}: {found:?}, least {least}");
            assert!(cost.is_none_or(|cost| cost >= least), "{case}");
            possible += 1;
            best += usize::from(cost == Some(least));
            proved += usize::from(cost.is_some() && cost == found.bound);
        }
        assert!(
            possible > 1000 && best * 100 >= possible * 98 && proved * 100 >= possible * 70,
            "{possible} {best} {proved}"
        );
    }

    #[test]
    fn the_same_work_gives_the_same_outcome() {
        let mut random = Random::new(7);
        for _ in 0..50 {
            let problem = made(&mut random);
            let [a, b] = [0; 2].map(|_| solve(&problem, 5_000, &Control::default()));
            assert_eq!(a, b);
        }
    }
}
