//! The candidate orders of one problem, and what is proved about all of its orders: simple orders,
//! refinement of the best, a lower bound, and exact search where the lowest peak and the bound
//! still differ.

use super::chain::{self, Choice};
use super::method::Method;
use super::peaks::{Answers, Open, lower_peaks};
use super::programs::lower_by_programs;
use super::refine::{Aim, Ordered, probe_peaks, rounds, split, stage};
use super::updates::FittingUpdates;
use crate::bound::{Bounds, Limit};
use crate::control::{Stop, Watch};
use crate::exact::ExactTier;
use crate::liveness::Profile;
use crate::plan::BoundRoute;
use crate::problem::{Op, Problem};
use crate::tolerance::is_within;
use crate::update_phase::updates_of;
use rayon::prelude::*;
use std::sync::Arc;

/// How many of the best orders are split at their cuts in any case.
const SPLIT: usize = 2;
/// How many others are split where much may be gained.
const MOST_OTHERS: usize = 2;

/// How many of the best orders have their updates moved.
const MOST_FITTED: usize = 4;
/// How many of the best orders have the cuts at their peaks chained.
const MOST_CHAINED: usize = 3;
/// Limits tried for one order's updates; very large graphs get fewer.
const MOST_LIMITS: usize = 16;
/// How many times exact search begins anew from updates moved.
const MOST_SEARCHES: usize = 4;

/// Operators before which updates may have to run.
const MOST_NEEDIEST: usize = 4;

/// The order with updates as soon as they fit under a limit, the lowest that bisection between
/// `floor` and its peak finds to hold; `None` where none lowers the peak.
fn lowest_fitting(problem: &Problem, start: &Ordered, floor: u64, watch: &Watch) -> Result<Option<Vec<Op>>, Stop> {
    let (mut low, mut lowest) = (floor, start.profile.peak);
    let mut best = None;
    let updates = FittingUpdates::new(problem, &start.order);
    for _ in 0..rounds(problem, MOST_LIMITS) {
        if is_within(lowest, low) {
            break;
        }
        let limit = low + (lowest - low) / 2;
        let order = match updates.under(limit, watch) {
            Ok(order) => order,
            // What has been found counts; whoever looks at the watch next stops.
            Err(_) if best.is_some() => break,
            Err(stop) => return Err(stop),
        };
        let peak = Profile::new(problem, &order).peak;
        if peak < lowest {
            (lowest, best) = (peak, Some(order));
        }
        if peak > limit {
            low = limit;
        }
    }
    Ok(best)
}

/// An order on trial.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    pub(crate) name: &'static str,
    pub(crate) ordered: Ordered,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Portfolio {
    pub(crate) problem: Arc<Problem>,
    /// What the orders on trial keep to.
    limit: Option<Limit>,
    pub(crate) trials: Vec<Trial>,
    /// What is proved about all orders within the limit.
    pub(crate) bounds: Bounds,
    /// Per operator the fewest bytes that are live while it runs in any order seen, within the
    /// limit or not.
    least_live: Vec<u64>,
    /// An order and the stretch of it for which the search could not tell whether the peak can be
    /// lowered.
    open: Option<(Ordered, Open)>,
}

impl Portfolio {
    pub(crate) fn new(problem: Problem, limit: Option<Limit>) -> Self {
        Portfolio {
            bounds: Bounds::new(&problem),
            least_live: vec![u64::MAX; problem.len()],
            problem: Arc::new(problem),
            limit,
            trials: Vec::new(),
            open: None,
        }
    }

    /// Puts an order on trial, unless it breaks the limit.
    pub(crate) fn add(&mut self, name: &'static str, order: Vec<Op>) {
        let ordered = Ordered::new(&self.problem, order);
        for (&op, &bytes) in ordered.order.iter().zip(&ordered.profile.live) {
            self.least_live[op as usize] = bytes.min(self.least_live[op as usize]);
        }
        if self.aim().allows(&ordered.order) {
            self.trials.push(Trial { name, ordered });
        }
    }

    fn aim(&self) -> Aim<'_> {
        Aim { problem: &self.problem, limit: self.limit.as_ref() }
    }

    /// Trials from the most promising on.
    pub(crate) fn ranking(&self) -> Vec<usize> {
        let mut ranking: Vec<usize> = (0..self.trials.len()).collect();
        ranking.sort_by_key(|&at| {
            let profile = &self.trials[at].ordered.profile;
            (profile.least_total(), profile.peak, at)
        });
        ranking
    }

    pub(crate) fn lowest_peak(&self) -> u64 {
        self.trials.iter().map(|trial| trial.ordered.profile.peak).min().unwrap_or(0)
    }

    /// Tries every order [`Method`].
    pub(crate) fn find(&mut self, watch: &Watch) -> Result<(), Stop> {
        let found: Vec<_> = Method::ALL.par_iter().map(|method| method.order(&self.problem, watch)).collect();
        // Whatever is found before a stop counts.
        let mut stopped = Ok(());
        for (method, order) in Method::ALL.iter().zip(found) {
            match order {
                Ok(order) => self.add(method.name(), order),
                Err(stop) => stopped = Err(stop),
            }
        }
        stopped
    }

    /// Moves updates, then splits and stages at the minimum cuts.
    pub(crate) fn refine(&mut self, watch: &Watch) -> Result<(), Stop> {
        self.fit_updates(MOST_FITTED, watch)?;
        self.refine_at_cuts(watch)?;
        // What the cuts have changed may leave room elsewhere.
        if self.fit_updates(1, watch)? {
            let best: Vec<usize> = self.ranking().into_iter().take(1).collect();
            self.split(&best, watch)?;
        }
        Ok(())
    }

    /// Lets the updates of the best orders run as soon as they fit under the lowest limit that this
    /// finds. Says whether the best order of all is a new one.
    pub(crate) fn fit_updates(&mut self, most: usize, watch: &Watch) -> Result<bool, Stop> {
        let before = self.lowest_peak();
        if before <= self.bounds.best().0 || !self.problem.is_update.contains(&true) {
            return Ok(false);
        }
        let mut bases = self.ranking();
        bases.dedup_by_key(|at| self.trials[*at].ordered.profile.peak);
        bases.truncate(most);
        let floor = self.bounds.best().0;
        let fitted: Vec<_> =
            bases.par_iter().map(|&at| lowest_fitting(&self.problem, &self.trials[at].ordered, floor, watch)).collect();
        let mut stopped = Ok(());
        for order in fitted {
            match order {
                Ok(order) => order.into_iter().for_each(|order| self.add("fitting_updates", order)),
                Err(stop) => stopped = Err(stop),
            }
        }
        stopped.map(|()| self.lowest_peak() < before)
    }

    fn refine_at_cuts(&mut self, watch: &Watch) -> Result<(), Stop> {
        let ranking = self.ranking();
        let (best, others) = ranking.split_at(SPLIT.min(ranking.len()));
        self.split(best, watch)?;
        if self.lowest_peak() <= self.bounds.best().0 {
            return Ok(());
        }
        let aim = Aim { problem: &self.problem, limit: self.limit.as_ref() };
        let staged = stage(aim, &mut self.bounds, watch)?;
        if let Some(staged) = staged {
            self.add("staged", staged.order);
        }
        // Equal peaks are nearly always the same order.
        let peak = |at: usize| self.trials[at].ordered.profile.peak;
        let mut others: Vec<usize> =
            others.iter().copied().filter(|&at| best.iter().all(|&b| peak(b) != peak(at))).collect();
        others.dedup_by_key(|at| peak(*at));
        for other in others.into_iter().take(MOST_OTHERS) {
            if is_within(self.lowest_peak(), self.bounds.best().0) {
                break;
            }
            self.split(&[other], watch)?;
        }
        Ok(())
    }

    fn split(&mut self, trials: &[usize], watch: &Watch) -> Result<(), Stop> {
        for &at in trials {
            let ordered = self.trials[at].ordered.clone();
            let before = ordered.profile.least_total();
            let aim = Aim { problem: &self.problem, limit: self.limit.as_ref() };
            let ordered = split(aim, ordered, &mut self.bounds, watch)?;
            if ordered.profile.least_total() < before {
                self.add("split", ordered.order);
            }
        }
        Ok(())
    }

    /// Cuts at the operators where every order on trial is high, then at updates of which one must
    /// be the first, or come after what needs the most while they wait.
    pub(crate) fn prove(&mut self, watch: &Watch) -> Result<(), Stop> {
        self.bounds.inspect(&self.problem, &self.least_live, watch)?;
        let Some(&best) = self.ranking().first() else { return Ok(()) };
        let peak = self.lowest_peak();
        if is_within(peak, self.bounds.best().0) {
            return Ok(());
        }
        let neediest = FittingUpdates::new(&self.problem, &self.trials[best].ordered.order).neediest(MOST_NEEDIEST);
        self.bounds.bound_first_of_set(&self.problem, &updates_of(&self.problem), &neediest, peak, watch)
    }

    /// A bound of what orders need in the pool if they never have more than `most` live. The sum of
    /// `more` times the pooled bytes and `all` times all live bytes has a peak in every order; at
    /// most `all * most` of that peak are the second term. Names an operator that reaches the
    /// bound.
    pub(crate) fn bound_pool(
        &self,
        most: u64,
        more: u64,
        all: u64,
        watch: &Watch,
    ) -> Result<Option<(Op, u64, BoundRoute)>, Stop> {
        let Some(problem) = self.problem.weighted(more + all, all) else { return Ok(None) };
        let mut weighted = Portfolio::new(problem, Some(Limit { problem: self.problem.clone(), peak: most }));
        for trial in &self.trials {
            weighted.add(trial.name, trial.ordered.order.clone());
        }
        weighted.prove(watch)?;
        let (bytes, op) = weighted.bounds.best();
        let bytes = bytes.saturating_sub(all * most).div_ceil(more);
        Ok(op.map(|op| (op, bytes, weighted.bounds.route())))
    }

    /// Probes along the peak of the lowest order, with falling targets.
    pub(crate) fn probe_peaks(&mut self, watch: &Watch) -> Result<(), Stop> {
        let all = self.trials.iter().map(|trial| &trial.ordered);
        let Some(lowest) = all.min_by_key(|ordered| ordered.profile.peak).cloned() else { return Ok(()) };
        let aim = Aim { problem: &self.problem, limit: self.limit.as_ref() };
        let before = lowest.profile.least_total();
        let ordered = probe_peaks(aim, lowest, &mut self.bounds, watch)?;
        if ordered.profile.least_total() < before {
            self.add("split", ordered.order);
        }
        Ok(())
    }

    /// Chains cuts at the peaks of the best orders, again and again where that helps.
    pub(crate) fn chain(&mut self, watch: &Watch) -> Result<(), Stop> {
        let mut bases = self.ranking();
        bases.dedup_by_key(|at| self.trials[*at].ordered.profile.peak);
        let mut work = chain::WORK;
        for at in bases.into_iter().take(MOST_CHAINED) {
            for choice in [Choice::Smallest, Choice::Largest] {
                let mut next = Some(self.trials[at].ordered.clone());
                while let Some(start) = next {
                    let goal = self.bounds.best().0;
                    if is_within(self.lowest_peak(), goal) {
                        return Ok(());
                    }
                    next = chain::chain(self.aim(), &start, goal, choice, &mut work, watch)?;
                    next.iter().for_each(|better| self.add("chained", better.order.clone()));
                }
            }
        }
        Ok(())
    }

    /// Where no order meets the bound: exact search in the stretch that holds the lowest peak, as
    /// long as moving updates then leaves another.
    pub(crate) fn search(&mut self, watch: &Watch) -> Result<(), Stop> {
        for _ in 0..MOST_SEARCHES {
            self.search_once(watch)?;
            if is_within(self.lowest_peak(), self.bounds.best().0) || !self.fit_updates(1, watch)? {
                break;
            }
        }
        Ok(())
    }

    fn search_once(&mut self, watch: &Watch) -> Result<(), Stop> {
        let all = self.trials.iter().map(|trial| &trial.ordered);
        let Some(lowest) = all.min_by_key(|ordered| (ordered.profile.peak, ordered.profile.least_total())) else {
            return Ok(());
        };
        let before = lowest.profile.peak;
        if before > self.bounds.best().0 {
            let start = Ordered::new(&self.problem, lowest.order.clone());
            let aim = Aim { problem: &self.problem, limit: self.limit.as_ref() };
            let (ordered, open) = lower_peaks(aim, start, &mut self.bounds, &mut Answers::default(), watch)?;
            self.open = open.map(|open| (ordered.clone(), open));
            if ordered.profile.peak < before {
                self.add("exact", ordered.order);
            }
        }
        Ok(())
    }

    /// Where that search gave up: integer programs.
    pub(crate) fn solve(&mut self, exact: &mut ExactTier<'_>, watch: &Watch) -> Result<(), Stop> {
        let Some((ordered, open)) = self.open.take() else { return Ok(()) };
        let before = ordered.profile.peak;
        if is_within(before, self.bounds.best().0) {
            return Ok(());
        }
        let ordered = lower_by_programs(&self.problem, ordered, &open, &mut self.bounds, exact, watch)?;
        if ordered.profile.peak < before {
            self.add("integer_program", ordered.order);
        }
        // Answers that came before the deadline count, but do not hide it.
        watch.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Residency, Tensor, TensorId};
    use crate::problem::Scope;
    use crate::rng::Random;

    /// Layers with an activation and a gradient each; updates free the gradients and make
    /// unpooled state.
    fn first_step(random: &mut Random) -> crate::graph::Graph {
        let mut builder = GraphBuilder::new("", "cpu", 1);
        let tensor = |builder: &mut GraphBuilder, size_bytes, residency| {
            let (name, kind) = (String::new(), Kind::Temporary);
            builder.tensor(Tensor { name, size_bytes, kind, residency, alignment_bytes: 0 }).expect("few")
        };
        let call = |builder: &mut GraphBuilder, phase, reads: &[TensorId], creates: &[TensorId]| {
            let position = builder.num_operators() as u32;
            let (reads, creates) = (reads.to_vec(), creates.to_vec());
            builder.operator(Operator { reads, creates, ..Operator::new("", position, phase) }).expect("few");
        };
        let mut saved = Vec::new();
        for _ in 0..3 {
            let activation = tensor(&mut builder, 1 + random.below(20), Residency::StepLocal);
            let before: Vec<TensorId> = saved.last().copied().into_iter().collect();
            call(&mut builder, Phase::Forward, &before, &[activation]);
            saved.push(activation);
        }
        let mut token: Vec<TensorId> = Vec::new();
        let mut gradients = Vec::new();
        for activation in saved.into_iter().rev() {
            let next = tensor(&mut builder, random.below(3), Residency::StepLocal);
            let gradient = tensor(&mut builder, 1 + random.below(20), Residency::StepLocal);
            call(&mut builder, Phase::Backward, &[&token[..], &[activation]].concat(), &[next, gradient]);
            token = vec![next];
            gradients.push(gradient);
        }
        for gradient in gradients {
            let state = tensor(&mut builder, random.below(40), Residency::Leaves);
            call(&mut builder, Phase::Update, &[gradient], &[state]);
        }
        builder.build().expect("valid")
    }

    #[test]
    fn under_a_limit_the_pool_needs_no_less_than_its_weighted_bound() {
        let mut random = Random::new(12);
        let watch = Watch::default();
        let (mut raised, mut met, rounds) = (0, 0, 400);
        for _ in 0..rounds {
            let graph = first_step(&mut random);
            let mut whole = Portfolio::new(Problem::new(&graph, false), None);
            whole.find(&watch).expect("not stopped");
            let program = Profile::new(&whole.problem, &whole.problem.program_order());
            let (mut least, mut least_of_all) = (u64::MAX, u64::MAX);
            whole.problem.for_each_order(&mut |order| {
                let profile = Profile::new(&whole.problem, order);
                least_of_all = least_of_all.min(profile.pool_peak);
                if profile.peak <= program.peak {
                    least = least.min(profile.pool_peak);
                }
            });
            let bounds = [(1, 1), (2, 1), (1, 3)].map(|(more, all)| {
                let found = whole.bound_pool(program.peak, more, all, &watch).expect("not stopped");
                let (_, bytes, _) = found.expect("small enough");
                assert!(bytes <= least, "{bytes} > {least} by {more} and {all}");
                bytes
            });
            let mut pool = Portfolio::new(Problem::of(&graph, Scope::Pool, false), None);
            pool.find(&watch).expect("not stopped");
            pool.prove(&watch).expect("not stopped");
            let bound = bounds.into_iter().max().unwrap_or(0);
            raised += u32::from(bound > pool.bounds.best().0 && bound > least_of_all);
            met += u32::from(bound.max(pool.bounds.best().0) == least);
        }
        assert!(raised > 8 && met * 100 >= rounds * 90, "raised {raised}, met {met} of {rounds}");
    }
}
