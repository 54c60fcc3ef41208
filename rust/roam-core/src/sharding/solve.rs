//! The search: prices and messages give a bound, forests better choices, and what is left between
//! the two is split into parts.

use super::branch::{Part, around, look, solved, without_worse};
use super::improve::{Begin, Best, Solution, improve};
use super::prices::{Known, Prices};
use super::problem::Problem;
use super::reduced::{Kept, Reduced};
use crate::control::{Control, Watch};
use crate::rng::Random;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// In each round messages pass so often, and so many tasks look for better choices.
const PASSES: usize = 10;
const TASKS: u64 = 2;
/// Each so many rounds choices begin from what the messages chose, otherwise mostly from the best.
const AFRESH: u64 = 10;
/// Before anything is split, the bound has not grown by that share of the gap in so many rounds.
const GROWS: f64 = 0.01;
const PATIENCE: u64 = 10;
/// So many parts are looked at in each round.
const PARTS: usize = 4;
/// And at so many about the best choice.
const AROUND: usize = 1;
/// After so many rounds without a better choice, only each so many rounds look for one.
const IDLE: u64 = 20;
const SELDOM: u64 = 8;

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
/// cost matrices, or as the control says. The same problem and work give the same outcome on any
/// number of threads, unless time cuts the search short.
pub fn solve(problem: &Problem, work: u64, control: &Control) -> Outcome {
    let mut outcome = Outcome { solution: None, bound: None, nodes: 0, edges: 0, passes: 0 };
    let watch = Watch::new(control, control.deadline);
    let Some(reduced) = Reduced::new(problem) else { return outcome };
    (outcome.nodes, outcome.edges) = (reduced.len(), reduced.edges.len());
    let mut search = Search {
        problem,
        watch,
        best: Best::new(problem),
        bound: i64::MIN,
        rounds: 0,
        idle: 0,
        passes: 0,
        work: 0,
        most_work: work,
    };
    search.run(reduced);
    outcome.passes = search.passes;
    outcome.bound = match search.best.cost() {
        Some(cost) => Some(search.bound.min(cost)),
        None => Some(search.bound).filter(|&bound| bound < i64::MAX),
    };
    outcome.solution = search.best.solution;
    outcome
}

struct Search<'a> {
    problem: &'a Problem,
    watch: Watch,
    best: Best<'a>,
    /// No choice costs less, unless it is as bad as the best.
    bound: i64,
    rounds: u64,
    /// Rounds since the best choice.
    idle: u64,
    passes: usize,
    /// Matrix entries that were looked at.
    work: u64,
    most_work: u64,
}

/// What the passes of a round found, for the next one's tasks.
struct Found {
    choice: Vec<usize>,
    prices: Vec<f64>,
}

impl<'a> Search<'a> {
    fn run(&mut self, reduced: Reduced) {
        let mut reduced = Arc::new(reduced);
        let mut known = Known::default();
        loop {
            if let Some(work) = solved(&reduced, &mut self.best) {
                self.work += work;
                // What was left out before is as bad as the best.
                self.bound = i64::MAX;
                return;
            }
            let (kept, prices, found) = self.bound_whole(&reduced, &known);
            known.prices = prices;
            if self.is_over() {
                return;
            }
            match kept {
                Some(kept) => match reduced.restricted(&kept) {
                    Some(smaller) => reduced = Arc::new(smaller),
                    None => {
                        self.bound = i64::MAX;
                        return;
                    }
                },
                None => return self.branch(&reduced, known, &found),
            }
        }
    }

    fn is_over(&self) -> bool {
        self.work >= self.most_work
            || self.best.cost().is_some_and(|cost| cost <= self.bound)
            || self.watch.check().is_err()
    }

    /// Messages pass and better choices are looked for, until many strategies can be left out: then
    /// returns which are kept; or until the bound no longer grows.
    fn bound_whole(&mut self, reduced: &Reduced, known: &Known) -> (Option<Kept>, Vec<(usize, f64)>, Found) {
        let mut prices = Prices::new(reduced, known);
        let mut found = Found { choice: vec![0; reduced.len()], prices: prices.now().to_vec() };
        let (mut grown_at, mut bound) = (0, f64::NEG_INFINITY);
        for round in 1.. {
            let cost = self.best.cost().map(|cost| cost as f64);
            let begin = if round == 1 { None } else { Some(&found) };
            let watch = &self.watch;
            let ((choices, work), better) = rayon::join(
                || {
                    let (mut choices, mut work) = (Vec::new(), 0);
                    while choices.len() < PASSES && watch.check().is_ok() {
                        let pass = prices.pass(cost);
                        work += pass.work;
                        choices.push(pass.choice);
                    }
                    (choices, work)
                },
                || begin.map_or_else(Vec::new, |begin| self.improved(reduced, begin)),
            );
            self.passes += choices.len();
            self.work += work;
            // Costs are whole numbers.
            self.bound = self.bound.max(prices.bound.ceil() as i64);
            let before = self.best.cost();
            choices.iter().for_each(|choice| {
                self.best.meet(reduced, choice);
            });
            self.take(better);
            self.rounds += 1;
            self.idle = if self.best.cost() == before { self.idle + 1 } else { 0 };
            if let Some(choice) = choices.into_iter().last() {
                found = Found { choice, prices: prices.now().to_vec() };
            }
            if self.is_over() {
                return (None, prices.best(), found);
            }
            let gap = self.best.cost().map_or(prices.bound.abs(), |cost| cost as f64 - prices.bound);
            if prices.bound > bound + GROWS * gap {
                (bound, grown_at) = (prices.bound, round);
            }
            let has_stopped = round >= grown_at + PATIENCE;
            if (has_stopped || round % PATIENCE == 0)
                && let Some(cost) = self.best.cost()
            {
                let marginals = prices.marginals();
                self.bound = self.bound.max(marginals.least.ceil() as i64);
                if let Some(is_kept) = without_worse(&marginals, cost) {
                    return (Some(reduced.all(|place| is_kept[place])), prices.best(), found);
                }
            }
            if has_stopped {
                return (None, prices.best(), found);
            }
        }
        unreachable!("the search ends")
    }

    /// What tasks of their own find from the best choice and from what messages chose.
    fn improved(&self, reduced: &Reduced, found: &Found) -> Vec<(Best<'a>, u64)> {
        let tasks = 0..if self.idle < IDLE || self.rounds % SELDOM == 0 { TASKS } else { 0 };
        let near = self.best.solution.as_ref().map(|best| reduced.near(&best.choice));
        tasks
            .into_par_iter()
            .map(|task| {
                let mut random = Random::new(self.rounds * TASKS + task);
                // Nearby seeds give nearby numbers at first.
                random.below(2);
                let near = near.as_ref().filter(|_| self.rounds % AFRESH > 0 && !random.once_in(4));
                let choice = near.unwrap_or(&found.choice).clone();
                // By up to a half lower or higher, for another balance of costs and bytes.
                let share = 0.5 + random.below(1025) as f64 / 1024.0;
                let prices = found.prices.iter().map(|price| price * share).collect();
                let begin = Begin { choice, prices, is_kicked: near.is_some() };
                let mut best = self.best.clone();
                let scale = self.best.cost().map_or(self.bound as f64, |cost| cost as f64).abs();
                let work = improve(reduced, begin, scale, &mut best, &mut random, &self.watch);
                (best, work)
            })
            .collect()
    }

    fn take(&mut self, better: Vec<(Best<'a>, u64)>) {
        for (best, work) in better {
            self.best.take(best);
            self.work += work;
        }
    }

    /// Looks at parts of the problem, those of the least bound first, and splits them.
    fn branch(&mut self, reduced: &Arc<Reduced>, known: Known, found: &Found) {
        let first = Part { kept: reduced.all(|_| true), known: Arc::new(known), bound: self.bound };
        let mut parts = BTreeMap::from([((first.bound, 0), first.clone())]);
        let mut number = 0;
        while !self.is_over() {
            let mut next = Vec::new();
            while next.len() < PARTS
                && let Some((_, part)) = parts.pop_first()
            {
                next.push(part);
            }
            let this: &Self = self;
            let near = this.best.solution.as_ref().map(|best| reduced.near(&best.choice));
            let (looked, better) = rayon::join(
                || {
                    let look = |task: usize| {
                        let mut random = Random::new(number + task as u64);
                        random.below(2);
                        let part = match (next.get(task), &near) {
                            (Some(part), _) => part.clone(),
                            (None, Some(near)) => around(reduced, &first, near, &mut random),
                            (None, None) => return None,
                        };
                        Some(look(reduced, &part, &this.best, &mut random, &this.watch))
                    };
                    (0..next.len() + AROUND).into_par_iter().map(look).collect::<Vec<_>>()
                },
                || this.improved(reduced, found),
            );
            let before = self.best.cost();
            self.take(better);
            for (task, looked) in looked.into_iter().enumerate() {
                let Some(looked) = looked else { continue };
                self.best.take(looked.best);
                self.work += looked.work;
                self.passes += looked.passes;
                number += 1;
                for part in looked.parts {
                    number += 1;
                    if task < next.len() {
                        parts.insert((part.bound, number), part);
                    }
                }
            }
            self.rounds += 1;
            self.idle = if self.best.cost() == before { self.idle + 1 } else { 0 };
            if let Some(cost) = self.best.cost() {
                parts.split_off(&(cost, 0));
            }
            self.bound = self.bound.max(parts.first_key_value().map_or(i64::MAX, |((bound, _), _)| *bound));
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
