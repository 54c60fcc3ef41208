//! The search: prices and messages give a bound, forests better choices, and what is left between
//! the two is split into parts.

use super::branch::{Part, around, look, solved, without_worse};
use super::improve::{Begin, Best, Solution, improve};
use super::presolve::Kept;
use super::prices::{Known, Prices};
use super::problem::Problem;
use super::reduced::Reduced;
use crate::control::{Control, Watch};
use crate::rng::Random;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// In each round messages pass `PASSES` times, and `TASKS` tasks look for better choices.
const PASSES: usize = 10;
const TASKS: u64 = 2;
/// Once every `AFRESH` rounds, tasks begin with what the messages chose, otherwise mostly with the
/// best choice.
const AFRESH: u64 = 10;
/// The problem is split once the bound has not grown by `GROWS` of the gap for `PATIENCE` rounds.
const GROWS: f64 = 0.01;
const PATIENCE: u64 = 10;
/// How many parts are looked at in each round.
const PARTS: usize = 4;
/// How many parts around the best choice are looked at in each round, besides.
const AROUND: usize = 1;
/// After `IDLE` rounds without a better choice, only every `SELDOM`-th round looks for one.
const IDLE: u64 = 20;
const SELDOM: u64 = 8;

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The best choice that is allowed and keeps to the limit; `None` where none was found.
    pub solution: Option<Solution>,
    /// No such choice costs less; `None` where it is proved that there is none.
    pub bound: Option<i64>,
    /// Nodes that were left to search.
    pub nodes: usize,
    /// Edges that were left to search.
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
    let reduced = match Reduced::new(problem, &watch) {
        Ok(Some(reduced)) => reduced,
        Ok(None) => return outcome,
        Err(_) => return Outcome { bound: Some(i64::MIN), ..outcome },
    };
    (outcome.nodes, outcome.edges) = (reduced.len(), reduced.edges.len());
    let mut search = Search {
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
    watch: Watch,
    best: Best<'a>,
    /// No choice that is better than the best so far costs less than this.
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
                // What was left out before is no better than the best choice.
                self.bound = i64::MAX;
                return;
            }
            let (kept, prices, found) = self.bound_whole(&reduced, &known);
            known.prices = prices;
            if self.is_over() {
                return;
            }
            match kept {
                Some(kept) => match reduced.restricted(&kept, &self.watch) {
                    Ok(Some(smaller)) => reduced = Arc::new(smaller),
                    Ok(None) => {
                        self.bound = i64::MAX;
                        return;
                    }
                    Err(_) => return,
                },
                None => return self.branch(&reduced, known, &found),
            }
        }
    }

    fn is_over(&self) -> bool {
        self.work >= self.most_work || self.best.cost().unwrap_or(i64::MAX) <= self.bound || self.watch.check().is_err()
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

    /// What separate tasks find, beginning with the best choice or with what the messages chose.
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
        while !self.is_over() && !parts.is_empty() {
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
    use super::super::small::{layers, least_cost, made};
    use super::*;
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    #[test]
    fn no_bound_is_above_the_least_cost_and_all_choices_are_proved_to_be_the_best() {
        let mut random = Random::new(1);
        let (mut possible, mut best, mut proved) = (0, 0, 0);
        for case in 0..2000 {
            let problem = made(&mut random);
            let found = solve(&problem, 200_000, &Control::default());
            let least = least_cost(&problem, |_| true);
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
        assert!(possible > 1000 && best == possible && proved == possible, "{possible} {best} {proved}");
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

    #[test]
    fn parts_hold_the_best_choice_and_end() {
        let mut random = Random::new(3);
        for case in 0..500 {
            let problem = made(&mut random);
            let least = least_cost(&problem, |_| true);
            let watch = Watch::default();
            let mut best = Best::new(&problem);
            if let Ok(Some(reduced)) = Reduced::new(&problem, &watch) {
                let reduced = Arc::new(reduced);
                let known = Arc::default();
                let mut parts = vec![Part { kept: reduced.all(|_| true), known, bound: i64::MIN }];
                while let Some(part) = parts.pop() {
                    assert!(parts.len() < 100, "{case}");
                    let looked = look(&reduced, &part, &best, &mut random, &watch);
                    best.take(looked.best);
                    parts.extend(looked.parts);
                }
            }
            assert_eq!(best.cost(), least, "{case}");
        }
    }

    #[test]
    fn costs_that_floating_point_rounds_are_still_told_apart() {
        let mut random = Random::new(5);
        for case in 0..300 {
            let mut problem = made(&mut random);
            let allowed = problem.nodes.iter_mut().flat_map(|node| &mut node.costs);
            allowed.filter(|cost| **cost < 1000).for_each(|cost| *cost = *cost / 9 + 10_000_000_000_000_000);
            let found = solve(&problem, 20_000, &Control::default());
            let least = least_cost(&problem, |_| true);
            let cost = found.solution.map(|solution| solution.cost);
            assert!(
                found.bound.is_none_or(|bound| least.is_some_and(|least| bound <= least) || cost.is_none()),
                "{case}"
            );
            assert!(cost.is_none_or(|cost| Some(cost) >= least), "{case}");
            if cost.is_some() && cost == found.bound {
                assert_eq!(cost, least, "{case}");
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_nothing() {
        for seed in 0..4 {
            let problem = layers(6, 80 + 10 * seed as i64, seed);
            let found = [1, 2, 5].map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| solve(&problem, 3_000_000, &Control::default()))
            });
            assert!(found[0].solution.is_some());
            assert_eq!(found[0], found[1]);
            assert_eq!(found[0], found[2]);
        }
    }

    #[test]
    fn a_search_ends_soon_after_it_is_told_to() {
        let problem = layers(200, 3000, 1);
        let control = Control::default();
        let cancel = control.cancel.clone();
        let start = Instant::now();
        let timer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            cancel.store(true, Ordering::Relaxed);
        });
        solve(&problem, u64::MAX, &control);
        timer.join().unwrap();
        assert!(start.elapsed() < Duration::from_secs(5));
        let control = Control { deadline: Some(start), ..Control::default() };
        assert_eq!(solve(&problem, u64::MAX, &control).bound, Some(i64::MIN));
    }
}
