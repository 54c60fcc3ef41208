//! Finds which operators run again, and when, so that a step fits a limit: many evictions by
//! different policies, each with the extra runs taken out that are not needed after all, and then
//! a local search over what the best of them prefer to drop.
//!
//! The work is counted, so that the result depends on the graph, the order and the limit alone;
//! only a watch that stops the search changes it.

use super::base::base_order;
use super::deferral::deferred_sums;
use super::evict::{Exponents, Failure, Policy, evict};
use super::model::{Model, NONE};
use super::segments;
use super::timeline::{Rank, Timeline};
use crate::control::Watch;
use crate::graph::{Graph, Operator, OperatorId, Sequence};
use crate::rng::Random;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

/// A sequence that fits the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// All runs, views included.
    pub sequence: Vec<OperatorId>,
    /// The most live bytes, persistent tensors left out, with reuse.
    pub peak_bytes: u64,
    /// Nanoseconds of all extra runs.
    pub extra_ns: u64,
}

/// How many sequences are returned at most.
const MOST_FOUND: usize = 4;
/// Work granted to one eviction or to taking runs out of it once, per operator of the order.
const WORK_PER_OPERATOR: u64 = 400;
/// Beside what it does, an attempt counts as work the number of operators times how many of them it
/// reaches, divided by this: so small graphs have thousands of attempts, and large ones do not take
/// minutes.
const SQUARES_PER_WORK: u64 = 2000;
/// Work granted to the policies, and to the local search; a run, a link of a chain or an extra run
/// that might be taken out is about one unit. Together about three seconds.
const POLICY_WORK: u64 = 24_000_000;
const LOCAL_WORK: u64 = 40_000_000;
/// How often an attempt begins again with what it must keep.
const MOST_RETRIES: usize = 6;
/// The local search ends after so many attempts that improve nothing.
const MOST_IN_VAIN: usize = 300;

/// The search ends once the extra time exceeds the least by no more than 1 / `WORTHWHILE` of the
/// least plus 1 / `WORTHWHILE_OF_STEP` of the step's time.
const WORTHWHILE: u64 = 100;
const WORTHWHILE_OF_STEP: u64 = 5000;

/// Scores by which tensors are dropped when there is no room: the powers of bytes, gap and time, in
/// halves. Found on training steps of transformers, convolutional networks and U-Nets.
const FORCED: [[u8; 3]; 8] = [[2, 2, 2], [2, 1, 2], [2, 0, 2], [2, 1, 3], [1, 2, 2], [2, 2, 1], [2, 2, 4], [1, 1, 2]];
/// By which factor tensors are preferred that the proof of the least extra time advises to drop:
/// they are dropped before all others.
const ADVICE: f64 = 1000.0;
/// Into how many segments the forward pass is cut; 0 means that none is told apart.
const SEGMENTS: [usize; 11] = [0, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24];
/// The power of the gap, in halves, and the least score, in bytes a nanosecond, for what is dropped
/// although there is room.
const EARLY: [(u8, f64); 12] = [
    (0, 300.0),
    (0, 100.0),
    (0, 30.0),
    (1, 100.0),
    (1, 30.0),
    (1, 10.0),
    (1, 3.0),
    (2, 30.0),
    (2, 10.0),
    (2, 3.0),
    (4, 30.0),
    (4, 3.0),
];
/// How many of the best policies without early drops are also tried with early drops.
const MOST_EARLY: usize = 3;
/// From how many of the best attempts the local search sets out.
const MOST_SEARCHED: usize = 3;

/// Sequences within the limit, cheapest first; empty where none was found. `order` is an order that
/// the graph permits, without recomputation; `limit_bytes` is for everything but what is
/// persistent. The search ends early near `least_ns`, below which no extra time can be; `again` are
/// the operators that run again where this was proved.
pub(crate) fn search(
    graph: &Graph,
    order: &[OperatorId],
    limit_bytes: u64,
    least_ns: u64,
    again: &[OperatorId],
    watch: &Watch,
) -> Vec<Found> {
    if order.is_empty() {
        return Vec::new();
    }
    // An order of least memory may gather all parameters before it uses the first, and whatever is
    // dropped then is gathered once more before its first use. The program does so right before.
    let gathers_again = |one: &Operator| one.repeatable && one.sequence == Some(Sequence::Collective);
    // Where further runs load what has been stored, such an order may keep all that the backward pass
    // makes until most is loaded. The program uses it at once.
    let loads = |one: &Operator| one.repeatable && one.first_only.iter().any(|tensor| one.reads.contains(tensor));
    let has_own = |one: &Operator| gathers_again(one) || loads(one);
    let mut orders = vec![order];
    orders.extend(graph.operators().iter().any(has_own).then(|| graph.program_order()));
    let usual = bases(graph, &orders);
    let deferred = deferred_sums(graph, limit_bytes).map_or_else(Vec::new, |order| bases(graph, &[&order]));
    let share = usual.len() as u64;
    // Attempts with deferred sums are long, and many fail: they do not share what is granted.
    let granted = usual.iter().map(|base| (base, share)).chain(deferred.iter().map(|base| (base, 1)));
    let from_base = |(base, share): (&Vec<OperatorId>, u64)| {
        let model = Model::new(graph, base);
        let mut search = Search::new(&model, limit_bytes, least_ns, again, watch);
        search.try_policies(POLICY_WORK / share);
        search.improve(LOCAL_WORK / share);
        let found = search.best.iter().map(|solution| Found {
            sequence: model.with_views(&solution.runs),
            peak_bytes: solution.peak_bytes,
            extra_ns: solution.extra_ns,
        });
        found.collect::<Vec<_>>()
    };
    let granted: Vec<(&Vec<OperatorId>, u64)> = granted.collect();
    let mut found: Vec<Found> = granted.into_par_iter().map(from_base).collect::<Vec<_>>().concat();
    found.sort_by_key(|found| (found.extra_ns, found.peak_bytes));
    found.dedup_by(|a, b| a.sequence == b.sequence);
    found.truncate(MOST_FOUND);
    found
}

/// The orders, changed to those that the search starts from; of equal neighbours only one.
fn bases(graph: &Graph, orders: &[&[OperatorId]]) -> Vec<Vec<OperatorId>> {
    let ways: Vec<(&[OperatorId], bool)> = orders.iter().flat_map(|&order| [(order, false), (order, true)]).collect();
    let base = |(order, early_updates)| base_order(graph, order, early_updates);
    let mut bases: Vec<Vec<OperatorId>> = ways.into_par_iter().map(base).collect();
    bases.dedup();
    bases
}

#[derive(Clone, Debug)]
struct Solution {
    runs: Vec<u32>,
    peak_bytes: u64,
    extra_ns: u64,
}

/// One way to drop tensors.
#[derive(Clone, Debug)]
struct Attempt {
    weight: usize,
    forced: Exponents,
    early: Option<(Exponents, f64)>,
    /// Which of [`SEGMENTS`].
    segments: usize,
    /// Per tensor by how much it is preferred.
    taste: Vec<f64>,
    rank: Rank,
}

struct Search<'a> {
    model: &'a Model,
    limit: u64,
    watch: &'a Watch,
    /// The choices for [`Policy::weight`].
    weights: Vec<Vec<f64>>,
    /// The choices for [`Policy::held_until`], one for each of [`SEGMENTS`].
    holds: Vec<Vec<u32>>,
    /// Per tensor its class: tensors of different layers that are alike are of one class.
    class: Vec<u32>,
    /// Per tensor whether an operator makes or changes it that runs again where the least extra time
    /// was proved.
    is_advised: Vec<bool>,
    /// Tensors that can be made again and take memory.
    droppable: Vec<u32>,
    /// Less extra time than this is impossible, or not worth more effort.
    enough_ns: u64,
    /// The best solutions, cheapest first.
    best: Vec<Solution>,
    /// What was tried with success, cheapest first, with the cost.
    tried: Vec<(u64, Attempt)>,
    /// [`Policy::kept_until`], as learned from failures.
    kept_until: Vec<u32>,
    work: u64,
    /// What came of an eviction's runs, by the digest of the runs and the rank: many different
    /// attempts drop the same tensors.
    outcomes: HashMap<u64, Outcome>,
}

/// What is left of an eviction's runs once those that are not needed are taken out.
#[derive(Clone, Copy)]
struct Outcome {
    extra_ns: u64,
    fits: bool,
    /// What it took to find out. An attempt that comes to the same runs counts it again, so that the
    /// search ends where it would without this memory.
    work: u64,
}

impl<'a> Search<'a> {
    fn new(model: &'a Model, limit: u64, least_ns: u64, again: &[OperatorId], watch: &'a Watch) -> Self {
        let places = 0..model.len() as u32;
        let runs: Vec<u32> = places.clone().filter(|&op| !model.is_late[op as usize]).collect();
        let live = Timeline::new(model, u64::MAX, &runs).live_bytes();
        let mut excess = vec![0.0; model.len()];
        for (&op, live) in runs.iter().zip(live) {
            excess[op as usize] = live.saturating_sub(limit) as f64;
        }
        let made = |op: u32| model.creates.row(op).iter().map(|&tensor| model.size[tensor as usize] as f64).sum();
        let ns = |op: u32| model.ns[op as usize] as f64;
        Search {
            model,
            limit,
            watch,
            weights: vec![
                shares(places.clone().map(|_| 1.0)),
                shares(places.clone().map(ns)),
                shares(places.clone().map(made)),
                shares(places.map(|op| excess[op as usize] * ns(op))),
            ],
            holds: SEGMENTS
                .iter()
                .map(|&count| if count == 0 { vec![0; model.size.len()] } else { segments::holds(model, count) })
                .collect(),
            class: classes(model),
            is_advised: advised(model, again),
            droppable: (0..model.size.len() as u32)
                .filter(|&tensor| model.can_remake[tensor as usize] && model.size[tensor as usize] > 0)
                .collect(),
            enough_ns: least_ns
                .saturating_add(least_ns / WORTHWHILE)
                .saturating_add(model.ns.iter().sum::<u64>() / WORTHWHILE_OF_STEP),
            best: Vec::new(),
            tried: Vec::new(),
            kept_until: vec![0; model.size.len()],
            work: 0,
            outcomes: HashMap::new(),
        }
    }

    /// Whether there is no work left, or nothing to gain.
    fn is_over(&self) -> bool {
        self.work == 0
            || self.watch.check().is_err()
            || self.best.first().is_some_and(|best| best.extra_ns <= self.enough_ns)
    }

    /// Tries all policies of the tables.
    fn try_policies(&mut self, work: u64) {
        self.work = work;
        let even = vec![1.0; self.class.len()];
        let attempt = |forced, weight, segments| {
            let (forced, taste) = (exponents(forced), even.clone());
            Attempt { weight, forced, early: None, segments, taste, rank: Rank::Time }
        };
        for (at, forced) in FORCED.into_iter().enumerate() {
            for weight in 0..self.weights.len() {
                self.attempt(attempt(forced, weight, 0));
            }
            if at == 0 && self.is_advised.contains(&true) {
                let taste = self.is_advised.iter().map(|&is_advised| if is_advised { ADVICE } else { 1.0 });
                let taste: Vec<f64> = taste.collect();
                for weight in 0..self.weights.len() {
                    self.attempt(Attempt { taste: taste.clone(), ..attempt(forced, weight, 0) });
                }
            }
            if at == 0 {
                // The more segments, the shorter are the chains that make tensors again, and the less
                // work an attempt takes that fails.
                let share = if self.best.is_empty() { 2 } else { 4 };
                let rest = self.work - self.work / share;
                self.work /= share;
                for segments in (1..SEGMENTS.len()).rev() {
                    self.attempt(attempt(forced, 0, segments));
                }
                self.work += rest;
            }
        }
        // Where no attempt fits without early drops, they are tried with every weight.
        let mut starts: Vec<Attempt> = self.tried.iter().take(MOST_EARLY).map(|(_, attempt)| attempt.clone()).collect();
        if starts.is_empty() {
            let forced = exponents(FORCED[0]);
            starts = (0..self.weights.len())
                .map(|weight| Attempt {
                    weight,
                    forced,
                    early: None,
                    segments: 0,
                    taste: even.clone(),
                    rank: Rank::Time,
                })
                .collect();
        }
        for start in starts {
            for (gap, least) in EARLY {
                let early = Some((Exponents { bytes: 2, gap, time: 2 }, least));
                self.attempt(Attempt { early, ..start.clone() });
            }
            self.attempt(Attempt { rank: Rank::TimePerArea, ..start.clone() });
        }
    }

    /// Changes what the best attempts prefer to drop, as long as that helps.
    fn improve(&mut self, work: u64) {
        let mut random = Random::new(1);
        let starts: Vec<(u64, Attempt)> = self.tried.iter().take(MOST_SEARCHED).cloned().collect();
        let share = work / starts.len().max(1) as u64;
        for (mut cost, mut attempt) in starts {
            self.work = share;
            let mut in_vain = 0;
            while in_vain < MOST_IN_VAIN && !self.is_over() {
                let next = self.neighbour(&attempt, &mut random);
                match self.attempt(next.clone()) {
                    Some(new) if new <= cost => {
                        in_vain = if new < cost { 0 } else { in_vain + 1 };
                        (cost, attempt) = (new, next);
                    }
                    _ => in_vain += 1,
                }
            }
        }
    }

    fn neighbour(&self, attempt: &Attempt, random: &mut Random) -> Attempt {
        let mut next = attempt.clone();
        match random.below(11) {
            10 => next.segments = random.below(SEGMENTS.len() as u64) as usize,
            0 => next.forced = exponents(FORCED[random.below(FORCED.len() as u64) as usize]),
            1 => next.weight = random.below(self.weights.len() as u64) as usize,
            2 => {
                next.early = (!random.once_in(4)).then(|| {
                    let (gap, least) = EARLY[random.below(EARLY.len() as u64) as usize];
                    (Exponents { bytes: 2, gap, time: 2 }, least)
                });
            }
            3 => next.rank = if next.rank == Rank::Time { Rank::TimePerArea } else { Rank::Time },
            kind => {
                if self.droppable.is_empty() {
                    return next;
                }
                for _ in 0..=random.below(3) {
                    let chosen = random.below(self.droppable.len() as u64) as usize;
                    let factor = [0.25, 0.5, 0.8, 1.25, 2.0, 4.0][random.below(6) as usize];
                    // All tensors that are alike, or neighbours, or a single one.
                    let reach = if kind < 7 { self.droppable.len() } else { random.below(20) as usize };
                    let class = self.class[self.droppable[chosen] as usize];
                    let last = (chosen + reach).min(self.droppable.len() - 1);
                    for &tensor in &self.droppable[chosen.saturating_sub(reach)..=last] {
                        if kind > 8 || self.class[tensor as usize] == class {
                            next.taste[tensor as usize] *= factor;
                        }
                    }
                }
            }
        }
        next
    }

    /// The runs of an attempt. Where an eviction fails because it gave up a tensor that could not
    /// be made again later, that tensor is kept from then on.
    fn evicted(&mut self, attempt: &Attempt) -> Option<Vec<u32>> {
        let none = vec![0; self.kept_until.len()];
        let length = self.model.len() as u64;
        for retry in 0..=MOST_RETRIES {
            let policy = Policy {
                forced: attempt.forced,
                early: attempt.early,
                weight: &self.weights[attempt.weight],
                taste: &attempt.taste,
                kept_until: if retry == 0 { &none } else { &self.kept_until },
                held_until: &self.holds[attempt.segments],
            };
            let granted = WORK_PER_OPERATOR * length;
            let mut work = granted;
            let result = evict(self.model, self.limit, &policy, &mut work);
            let reached = result.as_ref().err().map_or(length, |failure| u64::from(failure.place));
            self.work = self.work.saturating_sub(granted - work + length * reached / SQUARES_PER_WORK);
            let Failure { missed, place } = match result {
                Ok(runs) => return Some(runs),
                Err(failure) => failure,
            };
            if missed.is_empty() || self.is_over() {
                return None;
            }
            for tensor in missed {
                let until = &mut self.kept_until[tensor as usize];
                *until = place.max(*until);
            }
        }
        None
    }

    /// Nanoseconds of the attempt's extra runs, if it fits.
    fn attempt(&mut self, attempt: Attempt) -> Option<u64> {
        if self.is_over() {
            return None;
        }
        let runs = self.evicted(&attempt)?;
        let mut hasher = DefaultHasher::new();
        (&runs, attempt.rank).hash(&mut hasher);
        let digest = hasher.finish();
        let known = self.outcomes.get(&digest).copied();
        let outcome = known.unwrap_or_else(|| self.outcome(digest, &runs, attempt.rank));
        self.work = self.work.saturating_sub(outcome.work);
        let extra_ns = outcome.extra_ns;
        if !outcome.fits {
            return None;
        }
        let place = self.tried.partition_point(|&(cost, _)| cost <= extra_ns);
        if place < MOST_EARLY.max(MOST_SEARCHED) {
            self.tried.insert(place, (extra_ns, attempt));
            self.tried.truncate(MOST_EARLY.max(MOST_SEARCHED));
        }
        Some(extra_ns)
    }

    /// Takes out of the runs of an eviction those that are not needed, and keeps what is left if it
    /// is among the best.
    fn outcome(&mut self, digest: u64, runs: &[u32], rank: Rank) -> Outcome {
        let mut timeline = Timeline::new(self.model, self.limit, runs);
        let granted = WORK_PER_OPERATOR * self.model.len() as u64;
        let mut left = granted;
        timeline.cancel(rank, &mut left);
        if let Some(runs) = timeline.without_unused() {
            timeline = Timeline::new(self.model, self.limit, &runs);
        }
        let (extra_ns, peak_bytes) = (timeline.extra_ns, timeline.peak());
        let outcome = Outcome { extra_ns, fits: peak_bytes <= self.limit, work: granted - left };
        self.outcomes.insert(digest, outcome);
        let place = self.best.partition_point(|best| best.extra_ns <= extra_ns);
        if outcome.fits && place < MOST_FOUND && (place == 0 || self.best[place - 1].extra_ns < extra_ns) {
            self.best.insert(place, Solution { runs: timeline.runs(), peak_bytes, extra_ns });
            self.best.truncate(MOST_FOUND);
        }
        outcome
    }
}

fn exponents([bytes, gap, time]: [u8; 3]) -> Exponents {
    Exponents { bytes, gap, time }
}

/// The share of the whole up to each place; all places have equal shares where the whole is 0.
fn shares(amounts: impl Iterator<Item = f64> + Clone) -> Vec<f64> {
    let whole: f64 = amounts.clone().sum();
    let count = amounts.clone().count() as f64;
    let mut sum = 0.0;
    let up_to = amounts.map(|amount| {
        sum += if whole > 0.0 { amount / whole } else { 1.0 / count };
        sum
    });
    std::iter::once(0.0).chain(up_to).collect()
}

/// Per tensor whether one of the operators makes or changes it.
fn advised(model: &Model, again: &[OperatorId]) -> Vec<bool> {
    let again: BTreeSet<OperatorId> = again.iter().copied().collect();
    let mut is_advised = vec![false; model.size.len()];
    for op in (0..model.len() as u32).filter(|&op| again.contains(&model.operator(op))) {
        let changed = model.uses.row(op).iter().filter(|used| used.mutates).map(|used| used.tensor);
        changed.chain(model.creates.row(op).iter().copied()).for_each(|tensor| is_advised[tensor as usize] = true);
    }
    is_advised
}

/// Classes by size and by what makes the tensor.
fn classes(model: &Model) -> Vec<u32> {
    let mut known = BTreeMap::new();
    let class = |tensor: usize| {
        let creator = model.creator[tensor];
        let kind = if creator == NONE {
            None
        } else {
            let place = model.creates.row(creator).iter().position(|&made| made as usize == tensor);
            Some((model.ns[creator as usize], model.uses.row(creator).len(), place, model.size[tensor]))
        };
        let next = known.len() as u32;
        *known.entry(kind).or_insert(next)
    };
    (0..model.size.len()).map(class).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::serial_ns;
    use crate::expansion::expand;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Residency, ReusePair, Tensor, TensorId};
    use crate::liveness::Profile;
    use crate::problem::Problem;
    use crate::recompute::{Repeats, least_extra_ns};
    use std::sync::atomic::Ordering;

    /// Adds operators one after another.
    struct Made {
        builder: GraphBuilder,
    }

    impl Made {
        fn tensor(&mut self, size_bytes: u64, residency: Residency) -> TensorId {
            let tensor =
                Tensor { name: String::new(), size_bytes, kind: Kind::Temporary, residency, alignment_bytes: 0 };
            self.builder.tensor(tensor).unwrap()
        }

        fn run(&mut self, phase: Phase, reads: &[TensorId], creates: &[TensorId], mutates: &[TensorId]) -> OperatorId {
            let position = self.builder.num_operators() as u32;
            let operator = Operator {
                reads: reads.to_vec(),
                creates: creates.to_vec(),
                mutates: mutates.to_vec(),
                repeatable: phase != Phase::Update,
                ..Operator::new("", position, phase)
            };
            self.builder.operator(operator).unwrap()
        }
    }

    /// A step of `layers` layers of random sizes, with weights, in-place changes, views, norms with
    /// running statistics, reuse, workspace, and an update that decays the weight first.
    fn step(random: &mut Random, layers: usize) -> Graph {
        let mut made = Made { builder: GraphBuilder::new("step", "cpu", 64) };
        let mut saved = Vec::new();
        let mut now = made.tensor(256, Residency::Enters);
        for _ in 0..layers {
            let weight = made.tensor(64, Residency::Persistent);
            let out = made.tensor(64 * (1 + random.below(8)), Residency::StepLocal);
            let statistics = made.tensor(64, Residency::Persistent);
            let rest = made.tensor(64, Residency::StepLocal);
            let mut norm = Operator {
                reads: vec![now, weight],
                creates: vec![out, rest],
                repeatable: !random.once_in(6),
                time_ns: 1 + random.below(50),
                workspace_bytes: 64 * random.below(3),
                ..Operator::new("", made.builder.num_operators() as u32, Phase::Forward)
            };
            if random.once_in(2) {
                norm.mutates = vec![statistics];
                norm.first_only = vec![statistics];
            }
            made.builder.operator(norm).unwrap();
            let mut early = None;
            if random.once_in(3) {
                early = Some(made.run(Phase::Forward, &[out], &[], &[]));
            }
            if random.once_in(2) {
                let read: &[TensorId] = if random.once_in(2) { &[now] } else { &[] };
                let change = made.run(Phase::Forward, read, &[], &[out]);
                if let Some(view) = early {
                    made.builder.control(view, change);
                }
            }
            let view = random.once_in(2).then(|| made.run(Phase::Forward, &[out], &[], &[]));
            saved.push((weight, now, out, rest, view.or(early)));
            now = out;
        }
        let mut gradient = made.tensor(64, Residency::StepLocal);
        made.run(Phase::Loss, &[now], &[gradient], &[]);
        for &(weight, before, out, rest, view) in saved.iter().rev() {
            let of_weight = made.tensor(64, Residency::StepLocal);
            let next = made.tensor(64, Residency::StepLocal);
            let at = made.builder.num_operators() as u32;
            let backward = Operator {
                reads: vec![before, out, rest, gradient, weight],
                creates: vec![of_weight, next],
                reuse: vec![ReusePair { input: gradient, output: next }],
                time_ns: 7,
                ..Operator::new("", at, Phase::Backward)
            };
            let backward = made.builder.operator(backward).unwrap();
            if let Some(view) = view {
                made.builder.control(view, backward);
            }
            made.run(Phase::Update, &[], &[], &[weight]);
            made.run(Phase::Update, &[of_weight], &[], &[weight]);
            gradient = next;
        }
        let loss = made.tensor(64, Residency::Leaves);
        made.run(Phase::Update, &[gradient], &[loss], &[]);
        made.builder.build().unwrap()
    }

    /// A step whose gradients are scaled by the norm of all before the updates, which change first
    /// the weights of the first layers.
    fn clipped(random: &mut Random, layers: usize) -> Graph {
        let mut made = Made { builder: GraphBuilder::new("clipped", "cpu", 64) };
        let mut saved = Vec::new();
        let mut now = made.tensor(256, Residency::Enters);
        for _ in 0..layers {
            let weight = made.tensor(64, Residency::Persistent);
            let out = made.tensor(64 * (1 + random.below(8)), Residency::StepLocal);
            made.run(Phase::Forward, &[now, weight], &[out], &[]);
            saved.push((weight, now));
            now = out;
        }
        let mut gradient = made.tensor(64, Residency::StepLocal);
        made.run(Phase::Loss, &[now], &[gradient], &[]);
        let mut norms = Vec::new();
        let mut gradients = Vec::new();
        for &(weight, before) in saved.iter().rev() {
            let of_weight = made.tensor(64 * (4 + random.below(16)), Residency::StepLocal);
            let next = made.tensor(64 * (1 + random.below(8)), Residency::StepLocal);
            made.run(Phase::Backward, &[before, gradient, weight], &[of_weight, next], &[]);
            let norm = made.tensor(64, Residency::StepLocal);
            made.builder
                .operator(Operator {
                    reads: vec![of_weight],
                    creates: vec![norm],
                    repeatable: true,
                    ..Operator::new("", made.builder.num_operators() as u32, Phase::Update)
                })
                .unwrap();
            norms.push(norm);
            gradients.push((weight, of_weight));
            gradient = next;
        }
        let scale = made.tensor(64, Residency::StepLocal);
        made.run(Phase::Update, &norms, &[scale], &[]);
        for &(weight, of_weight) in gradients.iter().rev() {
            made.builder
                .operator(Operator {
                    reads: vec![scale],
                    mutates: vec![of_weight],
                    repeatable: true,
                    ..Operator::new("", made.builder.num_operators() as u32, Phase::Update)
                })
                .unwrap();
            made.run(Phase::Update, &[of_weight], &[], &[weight]);
        }
        made.builder.build().unwrap()
    }

    fn peak(graph: &Graph, order: &[OperatorId]) -> u64 {
        let order: Vec<u32> = order.iter().map(|&id| graph.operator(id).position).collect();
        Profile::new(&Problem::new(graph, true), &order).peak
    }

    /// The peak and the extra time of the sequence's own graph.
    fn measured(graph: &Graph, found: &Found) -> (u64, u64) {
        let expanded = expand(graph, &found.sequence).unwrap().graph;
        (peak(&expanded, expanded.program_order()), serial_ns(&expanded) - serial_ns(graph))
    }

    #[test]
    fn sequences_are_valid_and_cost_what_is_said() {
        let mut random = Random::new(11);
        let mut remade = 0;
        for round in 0..30 {
            let graph = step(&mut random, 2 + round % 9);
            let order = graph.program_order();
            let plain = peak(&graph, order);
            for percent in [100, 80, 65, 50] {
                let limit = plain * percent / 100;
                for found in search(&graph, order, limit, 0, &[], &Watch::default()) {
                    assert!(found.peak_bytes <= limit);
                    assert_eq!(measured(&graph, &found), (found.peak_bytes, found.extra_ns));
                    remade += usize::from(found.extra_ns > 0);
                }
            }
        }
        assert!(remade > 50, "{remade}");
    }

    #[test]
    fn what_cannot_be_made_again_later_is_kept() {
        let mut random = Random::new(17);
        let mut found = 0;
        for _ in 0..12 {
            let graph = clipped(&mut random, 6);
            let order = graph.program_order();
            let plain = peak(&graph, order);
            for percent in [70, 60, 55, 50] {
                let solutions = search(&graph, order, plain * percent / 100, 0, &[], &Watch::default());
                if let Some(best) = solutions.first() {
                    assert_eq!(measured(&graph, best), (best.peak_bytes, best.extra_ns));
                    found += 1;
                }
            }
        }
        assert!(found >= 15, "{found}");
    }

    #[test]
    fn copies_that_are_dropped_unread_are_made_once() {
        let mut made = Made { builder: GraphBuilder::new("copies", "cpu", 64) };
        let mut saved = Vec::new();
        let mut copies = Vec::new();
        let mut now = made.tensor(256, Residency::Persistent);
        for _ in 0..8 {
            let weight = made.tensor(64, Residency::Persistent);
            let [out, copy] = [0; 2].map(|_| made.tensor(256, Residency::StepLocal));
            made.run(Phase::Forward, &[now, weight], &[out], &[]);
            copies.push(made.run(Phase::Forward, &[out], &[copy], &[]));
            made.run(Phase::Forward, &[], &[], &[out]);
            saved.push(copy);
            now = out;
        }
        let mut gradient = made.tensor(256, Residency::StepLocal);
        made.run(Phase::Loss, &[now], &[gradient], &[]);
        for &copy in saved.iter().rev() {
            let next = made.tensor(256, Residency::StepLocal);
            made.run(Phase::Backward, &[copy, gradient], &[next], &[]);
            gradient = next;
        }
        let graph = made.builder.build().unwrap();
        let limit = peak(&graph, graph.program_order()) * 3 / 4;
        let found = search(&graph, graph.program_order(), limit, 0, &[], &Watch::default());
        assert_eq!(measured(&graph, &found[0]), (found[0].peak_bytes, found[0].extra_ns));
        let runs = |&copy: &OperatorId| found[0].sequence.iter().filter(|&&run| run == copy).count();
        let place = |&copy: &OperatorId| found[0].sequence.iter().position(|&run| run == copy).unwrap();
        // What each copy is made of is there at first for its change in place alone.
        assert!(copies.iter().map(runs).all(|runs| runs == 1), "{:?}", found[0].sequence);
        assert!(!copies.iter().map(place).is_sorted(), "{:?}", found[0].sequence);
    }

    #[test]
    fn what_the_proof_gives_up_is_advised() {
        let mut random = Random::new(23);
        let mut advised_graphs = 0;
        for _ in 0..20 {
            let graph = step(&mut random, 8);
            let limit = peak(&graph, graph.program_order()) * 3 / 4;
            let bytes = graph.persistent_bytes() + limit;
            let least = least_extra_ns(&Repeats::new(&graph), bytes, &Watch::default());
            assert!(least.again.iter().all(|&id| graph.operator(id).repeatable));
            assert!(least.ns == Some(0) || least.ns.is_none() || !least.again.is_empty());
            let is_advised = advised(&Model::new(&graph, graph.program_order()), &least.again);
            assert_eq!(is_advised.contains(&true), !least.again.is_empty());
            advised_graphs += usize::from(!least.again.is_empty());
            let ns = least.ns.unwrap_or(0);
            for found in search(&graph, graph.program_order(), limit, ns, &least.again, &Watch::default()) {
                assert_eq!(measured(&graph, &found), (found.peak_bytes, found.extra_ns));
                assert!(ns <= found.extra_ns);
            }
        }
        assert!(advised_graphs > 5, "{advised_graphs}");
    }

    #[test]
    fn nothing_runs_again_where_all_fits() {
        let graph = step(&mut Random::new(5), 6);
        let order = graph.program_order();
        let found = search(&graph, order, peak(&graph, order), 0, &[], &Watch::default());
        assert_eq!(found[0].extra_ns, 0);
    }

    #[test]
    fn a_limit_below_one_operator_finds_nothing() {
        let graph = step(&mut Random::new(5), 6);
        assert_eq!(search(&graph, graph.program_order(), 128, 0, &[], &Watch::default()), []);
    }

    #[test]
    fn a_stopped_search_says_what_it_has() {
        let graph = step(&mut Random::new(5), 6);
        let control = crate::control::Control::default();
        control.cancel.store(true, Ordering::Relaxed);
        let order = graph.program_order();
        assert_eq!(search(&graph, order, peak(&graph, order) / 2, 0, &[], &Watch::new(&control, None)), []);
    }
}
