//! From a graph to a plan: tries a portfolio of orders, refines the best, proves a bound, lays the
//! best orders out, and takes the plan with the fewest bytes. Program order is always among them,
//! so no plan is worse.
//!
//! The result depends on the graph and the settings alone, not on the number of threads: work is
//! counted, candidates are compared in a fixed order, and the first of equals wins. Only a deadline
//! that cuts the search short can change a plan, and its status says so.

use crate::bound::Bounds;
pub use crate::control::{Control, Progress};
use crate::control::{Stop, Watch};
use crate::graph::{Graph, Residency, ReusePair};
use crate::ids::TensorId;
use crate::layout::{self, Layout};
use crate::liveness::Profile;
use crate::order::{self, Method, Ordered};
use crate::plan::{Candidate, Plan, Settings, SettingsError, Status};
use crate::problem::{Part, Problem};
use crate::streams;
use crate::verify::{PlanViolation, verify};
use rayon::prelude::*;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum OptimizeError {
    /// The caller asked to stop.
    #[error("planning was cancelled")]
    Cancelled,
    /// Settings that make no sense.
    #[error(transparent)]
    InvalidSettings(#[from] SettingsError),
    /// No plan was found that is as fast as asked for and takes no more memory than program order.
    #[error(
        "no plan for {streams} streams within the bytes of program order is {speed} times as fast as one stream; the \
         fastest that was found is {fastest:.3} times as fast, and the longest chain of operators permits {most:.3}"
    )]
    SpeedTarget {
        /// How many streams there are.
        streams: u32,
        /// What was asked for.
        speed: f64,
        /// The most that was found.
        fastest: f64,
        /// What no number of streams exceeds.
        most: f64,
    },
    /// The planner made a plan that its own verifier refuses: a defect of this library.
    #[error("the planner made an invalid plan, please report it: {0}")]
    SelfCheck(#[source] PlanViolation),
}

impl OptimizeError {
    /// The variant's name for programs, in snake case; stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::InvalidSettings(fault) => fault.code(),
            Self::SpeedTarget { .. } => "speed_target",
            Self::SelfCheck(_) => "self_check",
        }
    }
}

/// Seconds spent per stage, in the order of the stages.
pub type Timings = Vec<(&'static str, f64)>;

/// Plans a step. See [`optimize_timed`].
///
/// # Errors
/// See [`OptimizeError`].
pub fn optimize(graph: &Graph, settings: &Settings, control: &Control) -> Result<Plan, OptimizeError> {
    optimize_timed(graph, settings, control).map(|(plan, _)| plan)
}

/// Plans a step, and says how long each stage took.
///
/// The plan has been verified. Its peak is never above program order's; where the deadline or the
/// settings' time limit ended the search it is the best found so far, with [`Status::TimedOut`].
///
/// # Errors
/// See [`OptimizeError`].
pub fn optimize_timed(graph: &Graph, settings: &Settings, control: &Control) -> Result<(Plan, Timings), OptimizeError> {
    settings.check()?;
    let limit = match settings.time_limit_s {
        None => None,
        // A limit beyond what an instant can hold is none.
        Some(seconds) => Duration::try_from_secs_f64(seconds).ok().and_then(|limit| Instant::now().checked_add(limit)),
    };
    let deadline = match (limit, control.deadline) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    };
    let watch = Watch::new(control.cancel.clone(), deadline);
    let mut stages = Stages { control, timings: Vec::new() };
    let mut search = Search::new(graph, settings, &watch, &mut stages)?;
    search.run(&mut stages)?;
    let plan =
        if settings.streams == 1 { search.plan() } else { stages.time("streams", 0.85, || search.plan_streams())? };
    stages.time("verify", 0.9, || verify(graph, &plan)).map_err(OptimizeError::SelfCheck)?;
    Ok((plan, stages.timings))
}

/// Reports stages as they begin and times them.
struct Stages<'a> {
    control: &'a Control,
    timings: Timings,
}

impl Stages<'_> {
    fn time<T>(&mut self, stage: &'static str, share_done: f64, work: impl FnOnce() -> T) -> T {
        if let Some(progress) = &self.control.progress {
            progress(stage, share_done);
        }
        let begin = Instant::now();
        let result = work();
        self.timings.push((stage, begin.elapsed().as_secs_f64()));
        result
    }
}

/// An order on trial.
struct Trial {
    name: &'static str,
    ordered: Ordered,
}

/// A layout found for a trial.
struct Placed {
    trial: usize,
    layout: Layout,
}

struct Search<'a> {
    graph: &'a Graph,
    settings: &'a Settings,
    watch: &'a Watch,
    problem: Problem,
    /// The same without reuse: what program order costs eager execution.
    plain: Problem,
    program_peak: u64,
    trials: Vec<Trial>,
    bounds: Bounds,
    /// No plan has a smaller step-local total, as far as proved apart from `bounds`.
    total_bound: u64,
    placed: Vec<Placed>,
    timed_out: bool,
}

/// A part of the search that a deadline may end early.
type Stage<'a> = fn(&mut Search<'a>) -> Result<(), Stop>;

/// Names of trials that are not an order [`Method`].
const PROGRAM_WITHOUT_REUSE: &str = "program_without_reuse";
/// How many of the best orders are split at their cuts in any case.
const SPLIT: usize = 2;
/// The others are split too where more than one part in so many of the peak may be gained.
const WORTHWHILE: u64 = 1000;
/// How many comparisons the search for layouts may make: a fraction of a second's work.
const SEARCH_WORK: u64 = 100_000_000;

impl<'a> Search<'a> {
    /// Program order, laid out by first fit: what there always is.
    fn new(
        graph: &'a Graph,
        settings: &'a Settings,
        watch: &'a Watch,
        stages: &mut Stages<'_>,
    ) -> Result<Self, OptimizeError> {
        let patient = watch.patient();
        stages.time("program_order", 0.0, || {
            let plain = Problem::new(graph, false);
            let program = plain.program_order();
            let profile = Profile::new(&plain, &program);
            let layout = layout::first_fit(&plain, &profile, &patient).map_err(|_| OptimizeError::Cancelled)?;
            let problem = if settings.reuse { Problem::new(graph, true) } else { plain.clone() };
            Ok(Search {
                graph,
                settings,
                watch,
                bounds: Bounds::new(&problem),
                total_bound: 0,
                problem,
                plain,
                program_peak: profile.peak,
                trials: vec![Trial { name: PROGRAM_WITHOUT_REUSE, ordered: Ordered { order: program, profile } }],
                placed: vec![Placed { trial: 0, layout }],
                timed_out: false,
            })
        })
    }

    fn run(&mut self, stages: &mut Stages<'_>) -> Result<(), OptimizeError> {
        let all: [(&'static str, f64, Stage<'a>); 7] = [
            ("order", 0.1, Self::find_orders),
            ("refine", 0.3, Self::refine_orders),
            ("bound", 0.5, Self::prove_bound),
            ("exact", 0.55, Self::search_orders),
            ("layout", 0.6, Self::lay_out),
            ("search", 0.7, Self::search_layouts),
            ("total_bound", 0.8, Self::prove_total_bound),
        ];
        for (name, share_done, stage) in all {
            match stages.time(name, share_done, || stage(self)) {
                Ok(()) => {}
                Err(Stop::TimedOut) => {
                    self.timed_out = true;
                    break;
                }
                Err(Stop::Cancelled) => return Err(OptimizeError::Cancelled),
            }
        }
        Ok(())
    }

    fn find_orders(&mut self) -> Result<(), Stop> {
        let problem = &self.problem;
        let found: Vec<Result<Trial, Stop>> = Method::ALL
            .par_iter()
            .map(|&method| {
                let order = method.order(problem, self.watch)?;
                let profile = Profile::new(problem, &order);
                Ok(Trial { name: method.name(), ordered: Ordered { order, profile } })
            })
            .collect();
        // Whatever is found before a stop counts.
        let mut stopped = Ok(());
        for trial in found {
            match trial {
                Ok(trial) => self.trials.push(trial),
                Err(stop) => stopped = Err(stop),
            }
        }
        stopped
    }

    /// Trials from the most promising on.
    fn ranking(&self) -> Vec<usize> {
        let mut ranking: Vec<usize> = (0..self.trials.len()).collect();
        ranking.sort_by_key(|&at| {
            let profile = &self.trials[at].ordered.profile;
            (profile.least_total(), profile.peak, at)
        });
        ranking
    }

    fn refine_orders(&mut self) -> Result<(), Stop> {
        let ranking = self.ranking();
        let (best, others) = ranking.split_at(SPLIT.min(ranking.len()));
        self.split_orders(best)?;
        if self.lowest_peak() <= self.bounds.best().0 {
            return Ok(());
        }
        let staged = order::stage(&self.problem, &mut self.bounds, self.watch)?;
        self.trials.extend(staged.map(|ordered| Trial { name: "staged", ordered }));
        for other in others.chunks(1) {
            if self.lowest_peak().saturating_sub(self.bounds.best().0) <= self.lowest_peak() / WORTHWHILE {
                break;
            }
            self.split_orders(other)?;
        }
        Ok(())
    }

    fn split_orders(&mut self, trials: &[usize]) -> Result<(), Stop> {
        for &at in trials {
            let ordered = self.trials[at].ordered.clone();
            let before = ordered.profile.least_total();
            let ordered = order::split(&self.problem, ordered, &mut self.bounds, self.watch)?;
            if ordered.profile.least_total() < before {
                self.trials.push(Trial { name: "split", ordered });
            }
        }
        Ok(())
    }

    fn lowest_peak(&self) -> u64 {
        self.trials.iter().map(|trial| trial.ordered.profile.peak).min().unwrap_or(0)
    }

    fn total(&self, placed: &Placed) -> u64 {
        placed.layout.pool_bytes + self.trials[placed.trial].ordered.profile.outside_peak
    }

    /// The layout with the fewest bytes; of equals the one with the lowest peak, then the first.
    fn best(&self) -> &Placed {
        let key = |placed: &&Placed| (self.total(placed), self.trials[placed.trial].ordered.profile.peak);
        // `min_by_key` takes the first of equals, and there is always the first one.
        self.placed.iter().min_by_key(key).unwrap_or(&self.placed[0])
    }

    fn lay_out(&mut self) -> Result<(), Stop> {
        for at in self.ranking() {
            let profile = &self.trials[at].ordered.profile;
            // An order whose peak is above program order's would break the promise never to be worse.
            if profile.peak > self.program_peak {
                continue;
            }
            let best = self.best();
            let (total, peak) = (self.total(best), self.trials[best.trial].ordered.profile.peak);
            // Only fewer bytes are better, or as many with a lower peak.
            if (profile.least_total(), profile.peak) >= (total, peak) {
                continue;
            }
            let limit = total - profile.outside_peak + u64::from(profile.peak < peak);
            if let Some(layout) = layout::best(self.problem_of(at), profile, limit, self.watch)? {
                self.placed.push(Placed { trial: at, layout });
            }
        }
        Ok(())
    }

    /// Where no layout met its order's floor: searches, the most promising orders first.
    fn search_layouts(&mut self) -> Result<(), Stop> {
        let mut work = SEARCH_WORK;
        for at in self.ranking() {
            let profile = &self.trials[at].ordered.profile;
            let total = self.total(self.best());
            if profile.peak > self.program_peak || profile.least_total() >= total {
                continue;
            }
            let limit = total - profile.outside_peak;
            let mut share = work / 2;
            work -= share;
            let layout = layout::search(self.problem_of(at), profile, limit, &mut share, self.watch)?;
            work += share;
            self.placed.extend(layout.map(|layout| Placed { trial: at, layout }));
        }
        // A search that found something before the deadline does not say that it was cut short.
        self.watch.check()
    }

    fn prove_bound(&mut self) -> Result<(), Stop> {
        let least_live = self.least_live(|ordered| ordered.profile.live.clone());
        self.bounds.inspect(&self.problem, &least_live, self.watch)
    }

    /// Per operator the fewest bytes that are live while it runs in any of the orders tried.
    fn least_live(&self, live: impl Fn(&Ordered) -> Vec<u64>) -> Vec<u64> {
        let mut least = vec![u64::MAX; self.problem.len()];
        for Trial { ordered, .. } in &self.trials {
            for (&op, bytes) in ordered.order.iter().zip(live(ordered)) {
                least[op as usize] = bytes.min(least[op as usize]);
            }
        }
        least
    }

    /// Where no order meets the bound: exact search in the stretch that holds the lowest peak.
    fn search_orders(&mut self) -> Result<(), Stop> {
        let with_reuse = self.trials.iter().skip(1).map(|trial| &trial.ordered);
        let Some(lowest) = with_reuse.min_by_key(|ordered| (ordered.profile.peak, ordered.profile.least_total()))
        else {
            return Ok(());
        };
        if lowest.profile.peak > self.bounds.best().0 {
            let before = lowest.profile.peak;
            let ordered = order::lower_peaks(&self.problem, lowest.clone(), &mut self.bounds, self.watch)?;
            if ordered.profile.peak < before {
                self.trials.push(Trial { name: "exact", ordered });
            }
        }
        Ok(())
    }

    /// Where the plan is not optimal yet: bounds the pool and what stays outside it apart. Their peaks may
    /// lie at different steps, where the bound of the common peak says too little of the sum.
    fn prove_total_bound(&mut self) -> Result<(), Stop> {
        if self.total(self.best()) <= self.bounds.best().0 {
            return Ok(());
        }
        let mut sum = 0;
        for part in [Part::Pool, Part::Outside] {
            let problem = Problem::of(self.graph, part, self.settings.reuse);
            let mut bounds = Bounds::new(&problem);
            let least_live = self.least_live(|ordered| Profile::new(&problem, &ordered.order).live);
            bounds.inspect(&problem, &least_live, self.watch)?;
            if let (bytes, Some(op)) = bounds.best() {
                sum += bytes;
                // A part needs no more than the whole.
                self.bounds.record(op, bytes);
            }
        }
        self.total_bound = sum;
        Ok(())
    }

    /// The problem that a trial's order is laid out for.
    fn problem_of(&self, trial: usize) -> &Problem {
        if trial == 0 { &self.plain } else { &self.problem }
    }

    /// The plan for several streams, made from the orders found for one.
    fn plan_streams(&self) -> Result<Plan, OptimizeError> {
        let Placed { trial, layout } = self.best();
        let Trial { name, ordered } = &self.trials[*trial];
        let input = streams::Input {
            graph: self.graph,
            problem: &self.problem,
            plain: &self.plain,
            settings: self.settings,
            bases: self.ranking().into_iter().map(|at| (self.trials[at].name, &self.trials[at].ordered)).collect(),
            program_peak: self.program_peak,
        };
        let single = streams::Single { name, problem: self.problem_of(*trial), ordered, layout };
        let outcome = streams::search(&input, &single, self.watch).map_err(|_| OptimizeError::Cancelled)?;
        let plan = self.plan();
        let found = outcome.best.map_err(|fastest| OptimizeError::SpeedTarget {
            streams: self.settings.streams,
            speed: self.settings.speed.unwrap_or(1.0),
            fastest,
            most: streams::most_speed(self.graph),
        })?;
        Ok(found.into_plan(&self.problem, plan, &outcome.tried, self.timed_out || outcome.timed_out))
    }

    fn plan(&self) -> Plan {
        let Placed { trial, layout } = self.best();
        let Ordered { order, profile } = &self.trials[*trial].ordered;
        let problem = self.problem_of(*trial);
        let mut offsets: Vec<Option<u64>> =
            self.graph.tensors().iter().map(|tensor| (tensor.residency == Residency::StepLocal).then_some(0)).collect();
        for (tensor, item) in problem.tensors.iter().enumerate() {
            if item.in_pool() {
                offsets[problem.tensor_id(tensor as u32).index()] = Some(layout.offsets[tensor]);
            }
        }
        let local = layout.pool_bytes + profile.outside_peak;
        let persistent_bytes = self.graph.persistent_bytes();
        let (bound, bound_operator) = self.bounds.best();
        let total_bound = bound.max(self.total_bound);
        let pair = |&(input, output): &(u32, u32)| -> ReusePair {
            let id = |tensor| -> TensorId { problem.tensor_id(tensor) };
            ReusePair { input: id(input), output: id(output) }
        };
        Plan {
            graph_digest: self.graph.digest().to_owned(),
            settings: self.settings.clone(),
            order: order.iter().map(|&op| problem.operator_id(op)).collect(),
            offsets,
            reuse: profile.pairs.iter().map(pair).collect(),
            schedule: None,
            program_order_peak_bytes: self.program_peak,
            peak_bytes: profile.peak,
            pool_peak_bytes: profile.pool_peak,
            pool_bytes: layout.pool_bytes,
            outside_bytes: profile.outside_peak,
            persistent_bytes,
            total_bytes: local + persistent_bytes,
            lower_bound_bytes: bound,
            total_lower_bound_bytes: total_bound + persistent_bytes,
            bound_operator: bound_operator.map(|op| problem.operator_id(op)),
            status: match (local == total_bound, self.timed_out) {
                (true, _) => Status::Optimal,
                (false, true) => Status::TimedOut,
                (false, false) => Status::Feasible,
            },
            candidates: self
                .placed
                .iter()
                .map(|placed| {
                    let trial = &self.trials[placed.trial];
                    Candidate {
                        order: trial.name.into(),
                        layout: placed.layout.method.into(),
                        peak_bytes: trial.ordered.profile.peak,
                        pool_bytes: placed.layout.pool_bytes,
                    }
                })
                .collect(),
        }
    }
}
