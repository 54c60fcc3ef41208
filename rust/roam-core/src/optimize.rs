//! From a graph to a plan: tries a portfolio of orders, refines the best, proves a bound, lays the
//! best orders out, and takes the plan with the fewest bytes. Program order is always among them,
//! so no plan is worse.
//!
//! The result depends on the graph and the settings alone, not on the number of threads: work is
//! counted, candidates are compared in a fixed order, and the first of equals wins. Only a deadline
//! that cuts the search short can change a plan, and its status says so.

mod limit;
mod overlap;

use crate::bound::Limit;
pub use crate::control::{Control, Progress};
use crate::control::{Stop, Watch};
use crate::exact::ExactTier;
use crate::expansion::{Expanded, SequenceError, expand};
use crate::graph::{Graph, Residency, Sequence, Site};
use crate::layout::{self, Layout};
use crate::liveness::Profile;
use crate::order::{self, Ordered, Portfolio, Trial};
use crate::plan::{Candidate, Exact, ExactReport, ExactStatus, Plan, Settings, SettingsError, Status};
use crate::problem::{Problem, Scope};
use crate::small;
use crate::streams;
use crate::tolerance::is_within;
use crate::verify::{PlanViolation, verify};
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
    /// The settings demand integer programs, which were needed, and there is no solver.
    #[error("integer programs are required, and their solver cannot be used: {reason}")]
    SolverUnavailable {
        /// Why not.
        reason: String,
    },
    /// The settings demand integer programs, some were needed, and the solver broke down on every
    /// one.
    #[error("integer programs are required, and their solver failed on all {programs}; the first time: {reason}")]
    SolverFailed {
        /// How many there were.
        programs: u32,
        /// What became of the first.
        reason: String,
    },
    /// No plan takes so little, however often operators run.
    #[error(
        "no plan takes as little as {limit_bytes} bytes, however often operators run again; at least {floor_bytes} \
         bytes are needed{}",
        .site.as_ref().map(|site| format!(", at {site}")).unwrap_or_default()
    )]
    BelowFloor {
        /// What was asked for.
        limit_bytes: u64,
        /// What every plan needs.
        floor_bytes: u64,
        /// The operator that needs it.
        site: Option<Box<Site>>,
    },
    /// No plan was found that takes so little, nor is it proved that there is none.
    #[error(
        "no plan was found that takes at most {limit_bytes} bytes; the least that was found takes {least_bytes}, and \
         {floor_bytes} are needed by any"
    )]
    LimitNotFound {
        /// What was asked for.
        limit_bytes: u64,
        /// Bytes of the smallest plan that was found.
        least_bytes: u64,
        /// What every plan needs.
        floor_bytes: u64,
    },
    /// The search made a sequence of runs that is none: a defect of this library.
    #[error("the planner made an invalid sequence of runs, please report it: {0}")]
    InvalidSequence(#[source] SequenceError),
    /// The planner made a plan that its own verifier refuses: a defect of this library.
    #[error("the planner made an invalid plan, please report it: {0}")]
    SelfCheck(#[source] PlanViolation),
}

impl OptimizeError {
    /// The least memory limit that may be enough where one is refused: the floor, or what the smallest plan takes that
    /// was found.
    #[must_use]
    pub fn least_bytes(&self) -> Option<u64> {
        match self {
            Self::BelowFloor { floor_bytes, .. } => Some(*floor_bytes),
            Self::LimitNotFound { least_bytes, .. } => Some(*least_bytes),
            _ => None,
        }
    }

    /// The variant's name for programs, in snake case; stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::InvalidSettings(fault) => fault.code(),
            Self::SpeedTarget { .. } => "speed_target",
            Self::SolverUnavailable { .. } => "solver_unavailable",
            Self::SolverFailed { .. } => "solver_failed",
            Self::BelowFloor { .. } => "memory_floor",
            Self::LimitNotFound { .. } => "memory_limit_not_found",
            Self::InvalidSequence(_) | Self::SelfCheck(_) => "self_check",
        }
    }

    /// The operator at fault, where there is one.
    pub fn site(&self) -> Option<&Site> {
        match self {
            Self::BelowFloor { site, .. } => site.as_deref(),
            Self::InvalidSequence(error) => error.site(),
            Self::SelfCheck(violation) => violation.site(),
            _ => None,
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
/// The plan has been verified. Its total is never above program order's; where the deadline or the
/// settings' time limit ended the search it is the best found so far, with [`Status::TimedOut`].
///
/// # Errors
/// See [`OptimizeError`].
pub fn optimize_timed(graph: &Graph, settings: &Settings, control: &Control) -> Result<(Plan, Timings), OptimizeError> {
    settings.check()?;
    let limit = match settings.time_limit_s {
        None => None,
        // A limit beyond what an instant can hold counts as no limit.
        Some(seconds) => Duration::try_from_secs_f64(seconds).ok().and_then(|limit| Instant::now().checked_add(limit)),
    };
    let deadline = match (limit, control.deadline) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    };
    let watch = Watch::new(control, deadline);
    let mut stages = Stages { control, timings: Vec::new() };
    let mut plan = search_plan(graph, settings, control, &watch, &mut stages)?;
    if let Some(limit_bytes) = settings.memory_limit_bytes.filter(|&limit| plan.total_bytes > limit) {
        // The stages of the plans that are made on the way are not told apart.
        let quiet = Control { solver: control.solver.clone(), ..Control::default() };
        let plan_of = |graph: &Graph, settings: &Settings| {
            let mut stages = Stages { control: &quiet, timings: Vec::new() };
            search_plan(graph, settings, &quiet, &watch, &mut stages)
        };
        plan =
            stages.time("recompute", 0.88, || limit::within(graph, &plan, settings, limit_bytes, &watch, plan_of))?;
    }
    if settings.streams == 1 && graph.operators().iter().any(|one| one.sequence == Some(Sequence::Collective)) {
        stages.time("overlap", 0.89, || hide_communication(graph, &mut plan, &watch))?;
    }
    stages.time("verify", 0.9, || verify(graph, &plan)).map_err(OptimizeError::SelfCheck)?;
    Ok((plan, stages.timings))
}

/// Has the plan launch collectives earlier, and wait for them later, where that takes no memory.
fn hide_communication(graph: &Graph, plan: &mut Plan, watch: &Watch) -> Result<(), OptimizeError> {
    match &plan.recomputation {
        None => overlap::hide(graph, |id| overlap::is_launch(graph, id), plan, watch),
        Some(recomputation) => {
            let Expanded { graph: runs, operator_of, .. } =
                expand(graph, &recomputation.sequence).map_err(OptimizeError::InvalidSequence)?;
            overlap::hide(&runs, |id| overlap::is_launch(graph, operator_of[id.index()]), plan, watch);
        }
    }
    Ok(())
}

/// A plan in which each operator runs once, not yet verified.
fn search_plan(
    graph: &Graph,
    settings: &Settings,
    control: &Control,
    watch: &Watch,
    stages: &mut Stages<'_>,
) -> Result<Plan, OptimizeError> {
    let mut search = Search::new(graph, settings, control, watch, stages)?;
    search.run(stages)?;
    search.keep_promise(search.total(search.best()));
    let plan =
        if settings.streams == 1 { search.plan() } else { stages.time("streams", 0.85, || search.plan_streams())? };
    let ExactReport { status, programs, failed, reason, .. } = &plan.exact;
    if settings.exact == Exact::Required && *status == ExactStatus::NoAnswer && *failed > 0 {
        let reason = reason.clone().unwrap_or_default();
        return Err(OptimizeError::SolverFailed { programs: *programs, reason });
    }
    Ok(plan)
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

/// A layout found for a trial.
struct Placed {
    trial: usize,
    layout: Layout,
}

struct Search<'a> {
    graph: &'a Graph,
    settings: &'a Settings,
    watch: &'a Watch,
    /// Orders of the whole step; the first trial is eager execution, measured in `plain`.
    whole: Portfolio,
    /// The step without reuse.
    plain: Problem,
    program_peak: u64,
    /// No plan has a smaller step-local total, as far as proved apart from the bounds of the whole.
    total_bound: u64,
    /// The pool and the unpooled bytes as problems of their own, where they matter, each with how
    /// many of the whole's trials it has taken over.
    parts: Vec<(Portfolio, usize)>,
    placed: Vec<Placed>,
    exact: ExactTier<'a>,
    timed_out: bool,
}

/// A part of the search that a deadline may end early.
type Stage<'a> = fn(&mut Search<'a>) -> Result<(), Stop>;

/// The name of the candidate that no order method makes.
const PROGRAM_WITHOUT_REUSE: &str = "program_without_reuse";
/// In graphs of up to so many operators the peak of all bytes is still lowered when the total is
/// already proved to be the least.
const SMALL: usize = 2000;
/// How many orders of a large graph are laid out.
const MOST_LAID_OUT: usize = 4;
/// The pool and the unpooled bytes are searched a second time if more than 1 / `NEAR` of the total
/// may be gained.
const NEAR: u64 = 100;
/// Weights of the pool, and of all that is live, by which the pool is bounded under a limit. With
/// equal weights, AdamW's updates, which make twice as many bytes of state as they free of
/// gradients, change nothing.
const WEIGHTS: [(u64, u64); 2] = [(1, 1), (2, 1)];
/// How many of the best orders have their updates moved for the pool's sake.
const MOST_FITTED: usize = 4;
/// How many comparisons the search for layouts may make: some seconds' work at most.
const SEARCH_WORK: u64 = 100_000_000;
/// How many comparisons per operator a search for one order's layout must be granted at least,
/// because it finds nothing with fewer.
const LEAST_SEARCH: u64 = 32;
/// How many of the best orders have their layout improved by core refinement.
const MOST_FINISHED: usize = 2;

impl<'a> Search<'a> {
    /// Starts with program order laid out by first fit, so that there is always a plan.
    fn new(
        graph: &'a Graph,
        settings: &'a Settings,
        control: &'a Control,
        watch: &'a Watch,
        stages: &mut Stages<'_>,
    ) -> Result<Self, OptimizeError> {
        let patient = watch.patient();
        stages.time("program_order", 0.0, || {
            let plain = Problem::new(graph, false);
            let program = plain.program_order();
            let profile = Profile::new(&plain, &program);
            let layout = layout::first_fit(&plain, &profile, &patient).map_err(|_| OptimizeError::Cancelled)?;
            let mut whole =
                Portfolio::new(if settings.reuse { Problem::new(graph, true) } else { plain.clone() }, None);
            let program_peak = profile.peak;
            whole.trials.push(Trial { name: PROGRAM_WITHOUT_REUSE, ordered: Ordered { order: program, profile } });
            Ok(Search {
                graph,
                settings,
                watch,
                whole,
                total_bound: 0,
                parts: Vec::new(),
                plain,
                program_peak,
                placed: vec![Placed { trial: 0, layout }],
                exact: ExactTier::new(settings.exact, control.solver.as_deref()),
                timed_out: false,
            })
        })
    }

    fn run(&mut self, stages: &mut Stages<'_>) -> Result<(), OptimizeError> {
        let orders: [(&'static str, f64, Stage<'a>); 7] = [
            ("order", 0.1, |search| search.whole.find(search.watch)),
            ("parts", 0.2, Self::look_at_parts),
            ("refine", 0.3, |search| search.whole.refine(search.watch)),
            ("bound", 0.5, Self::prove),
            ("exact", 0.55, |search| search.whole.search(search.watch)),
            ("search_parts", 0.6, Self::look_at_parts_again),
            ("programs", 0.65, Self::solve_orders),
        ];
        let layouts: [(&'static str, f64, Stage<'a>); 4] = [
            ("layout", 0.7, Self::lay_out),
            ("enumerate", 0.75, Self::enumerate),
            ("search", 0.8, Self::search_layouts),
            ("hard_core", 0.83, Self::finish_layouts),
        ];
        let all = orders.map(|stage| (true, stage)).into_iter().chain(layouts.map(|stage| (false, stage)));
        for (seeks_orders, (name, share_done, stage)) in all {
            if seeks_orders && self.is_done() && self.whole.problem.len() > SMALL {
                continue;
            }
            // Cheap orders and layouts are always tried: they take no longer than to find out that
            // they need not be.
            let total = if seeks_orders { self.least_total() } else { self.total(self.best()) };
            let is_proved = !seeks_orders && total <= self.bound();
            if !matches!(name, "order" | "layout") && (is_proved || self.suffices(total)) {
                continue;
            }
            match stages.time(name, share_done, || stage(self)) {
                Ok(()) => {}
                Err(Stop::TimedOut) => {
                    self.timed_out = true;
                    self.lay_out_at_once();
                    return Ok(());
                }
                Err(Stop::Cancelled) => return Err(OptimizeError::Cancelled),
            }
            let report = &self.exact.report;
            if self.settings.exact == Exact::Required && report.status == ExactStatus::Unavailable {
                return Err(OptimizeError::SolverUnavailable { reason: report.reason.clone().unwrap_or_default() });
            }
        }
        Ok(())
    }

    fn total(&self, placed: &Placed) -> u64 {
        placed.layout.pool_bytes + self.whole.trials[placed.trial].ordered.profile.unpooled_peak
    }

    /// The layout with the fewest bytes; of equals the one with the lowest peak, then the first.
    fn best(&self) -> &Placed {
        let key = |placed: &&Placed| (self.total(placed), self.whole.trials[placed.trial].ordered.profile.peak);
        // `min_by_key` takes the first of equals, and there is always the first one.
        self.placed.iter().min_by_key(key).unwrap_or(&self.placed[0])
    }

    fn lay_out(&mut self) -> Result<(), Stop> {
        let operators = self.whole.problem.len();
        // No plan takes more than program order by the same layouts, so that has work of its own.
        let [mut for_program, mut for_others] = [layout::portfolio_work(operators); 2];
        let is_large = self.whole.problem.is_large();
        let mut left = if is_large { MOST_LAID_OUT } else { usize::MAX };
        for at in self.whole.ranking() {
            let work = if at == 0 { &mut for_program } else { &mut for_others };
            // Too little work is left for another layout.
            if *work < operators as u64 {
                continue;
            }
            let profile = &self.whole.trials[at].ordered.profile;
            let best = self.best();
            let (total, peak) = (self.total(best), self.whole.trials[best.trial].ordered.profile.peak);
            // Only fewer bytes are better, or as many with a lower peak.
            if (profile.least_total(), profile.peak) >= (total, peak) {
                continue;
            }
            if at > 0 && left == 0 {
                continue;
            }
            left = left.saturating_sub(usize::from(at > 0));
            let limit = total - profile.unpooled_peak + u64::from(profile.peak < peak);
            // Where greedy layouts take long, only the most promising order and program order get
            // them.
            let is_quick = is_large && at > 0 && left + 1 < MOST_LAID_OUT;
            let find = if is_quick { layout::best_of_quick } else { layout::best };
            if let Some(layout) = find(self.problem_of(at), profile, limit, work, self.watch)? {
                self.placed.push(Placed { trial: at, layout });
            }
        }
        Ok(())
    }

    /// No plan takes more than program order by an ordinary allocator, without reuse: what the
    /// verifier compares it with. Nearly every plan takes no more than program order would by a
    /// layout without waste.
    fn keep_promise(&mut self, total: u64) {
        let profile = &self.whole.trials[0].ordered.profile;
        if total > profile.least_total() {
            let layout = layout::best_fit(&self.plain, profile);
            self.placed.push(Placed { trial: 0, layout });
        }
    }

    /// When the time limit has passed: lays the most promising order out by the quickest method, so
    /// that the search for it was of use.
    fn lay_out_at_once(&mut self) {
        if let Some(at) = self.whole.ranking().first().copied().filter(|&at| at > 0) {
            let profile = &self.whole.trials[at].ordered.profile;
            let layout = layout::best_fit(self.problem_of(at), profile);
            self.placed.push(Placed { trial: at, layout });
        }
    }

    /// Where a small graph's best total is not proved: all orders, each with its smallest pool.
    fn enumerate(&mut self) -> Result<(), Stop> {
        let total = self.total(self.best());
        let Some(outcome) = small::search(&self.whole.problem, total, self.watch)? else {
            return Ok(());
        };
        self.total_bound = self.total_bound.max(outcome.bound);
        if let Some((ordered, layout)) = outcome.found {
            self.placed.push(Placed { trial: self.whole.trials.len(), layout });
            self.whole.trials.push(Trial { name: "enumerated", ordered });
        }
        Ok(())
    }

    /// Where no layout met its order's floor: searches, the most promising orders first; each again
    /// below what it has found.
    fn search_layouts(&mut self) -> Result<(), Stop> {
        let mut work = if self.whole.problem.is_large() { SEARCH_WORK / 2 } else { SEARCH_WORK };
        for at in self.whole.ranking() {
            if self.suffices(self.total(self.best())) {
                break;
            }
            while self.search_layout(at, &mut work)? {}
        }
        // A search that found something before the deadline does not say that it was cut short.
        self.watch.check()
    }

    /// Searches with half of the work that is left; says whether a smaller layout was found.
    fn search_layout(&mut self, at: usize, work: &mut u64) -> Result<bool, Stop> {
        let profile = &self.whole.trials[at].ordered.profile;
        let total = self.total(self.best());
        let mut share = *work / 2;
        if profile.least_total() >= total || share < LEAST_SEARCH * self.whole.problem.len() as u64 {
            return Ok(false);
        }
        let limit = total - profile.unpooled_peak;
        *work -= share;
        let layout = layout::search(self.problem_of(at), profile, limit, &mut share, self.watch)?;
        *work += share;
        let is_smaller = layout.is_some();
        self.placed.extend(layout.map(|layout| Placed { trial: at, layout }));
        Ok(is_smaller)
    }

    /// Where a gap is left: exact methods for the layouts of the most promising orders.
    fn finish_layouts(&mut self) -> Result<(), Stop> {
        self.exact.renew_budget();
        for at in self.whole.ranking().into_iter().take(MOST_FINISHED) {
            let profile = &self.whole.trials[at].ordered.profile;
            let total = self.total(self.best());
            if profile.least_total() >= total {
                break;
            }
            let known = self.placed.iter().filter(|placed| placed.trial == at);
            let start = known.min_by_key(|placed| placed.layout.pool_bytes).map(|placed| &placed.layout);
            let problem = if at == 0 { &self.plain } else { &*self.whole.problem };
            let limit = total - profile.unpooled_peak;
            let layout = layout::finish_exactly(problem, profile, start, limit, &mut self.exact, self.watch)?;
            self.placed.extend(layout.map(|layout| Placed { trial: at, layout }));
        }
        // Answers that came before the deadline count, but do not hide it.
        self.watch.check()
    }

    /// Bounds the peak, with more effort, and another try to reach it, where that can raise the
    /// bound of the total.
    fn prove(&mut self) -> Result<(), Stop> {
        self.whole.prove(self.watch)?;
        if self.whole.lowest_peak() > self.total_bound {
            self.whole.probe_peaks(self.watch)?;
            self.whole.chain(self.watch)?;
        }
        Ok(())
    }

    /// Where the pool and the unpooled bytes have their peaks at different steps, the common peak is
    /// not what counts.
    fn look_at_parts(&mut self) -> Result<(), Stop> {
        if self.parts_agree() { Ok(()) } else { self.search_parts() }
    }

    /// Whether the pool and the unpooled bytes have their peaks at the same step, so that they are
    /// best looked at together.
    fn parts_agree(&self) -> bool {
        let best = self.whole.ranking().first().map(|&at| &self.whole.trials[at].ordered.profile);
        best.is_none_or(|profile| is_within(profile.least_total(), profile.peak))
    }

    /// Searches the pool and the unpooled bytes once more, from the orders found since the first
    /// time.
    fn look_at_parts_again(&mut self) -> Result<(), Stop> {
        // A first search is worth more than a second one.
        let is_enough = self.is_near() || self.whole.problem.is_large();
        if (is_enough && !self.parts.is_empty()) || is_within(self.least_total(), self.bound()) {
            return Ok(());
        }
        self.search_parts()?;
        self.whole.fit_updates(1, self.watch)?;
        self.weigh_parts()
    }

    /// Bounds the pool by what it needs together with the unpooled bytes: an order whose peak
    /// exceeds the best total is of no use.
    fn weigh_parts(&mut self) -> Result<(), Stop> {
        for (more, all) in WEIGHTS {
            if self.parts.is_empty() || self.is_near() || self.whole.problem.is_large() {
                break;
            }
            if let Some((op, bytes, route)) = self.whole.bound_pool(self.least_total(), more, all, self.watch)? {
                self.parts[0].0.bounds.record(op, bytes, route);
            }
            self.note_parts();
        }
        Ok(())
    }

    /// Bounds the pool and the unpooled bytes apart, then lowers their peaks one after the other.
    fn search_parts(&mut self) -> Result<(), Stop> {
        // There are pooled or unpooled bytes alone.
        let program = &self.whole.trials[0].ordered.profile;
        if program.unpooled_peak == 0 || program.pool_peak == 0 {
            return Ok(());
        }
        // Orders with the updates where they take the least of the pool.
        let limit = self.least_total();
        for at in self.whole.ranking().into_iter().take(MOST_FITTED) {
            let order = &self.whole.trials[at].ordered.order;
            let order = order::FittingUpdates::new(&self.whole.problem, order).under(limit, self.watch)?;
            self.whole.add("fitting_updates", order);
        }
        for (at, scope) in [Scope::Pool, Scope::Unpooled].into_iter().enumerate() {
            if self.is_done() || self.suffices(self.least_total()) {
                return Ok(());
            }
            if self.parts.len() == at {
                // An order whose peak is above the best total cannot have a smaller one.
                let limit = Limit { problem: self.whole.problem.clone(), peak: self.least_total() };
                let problem = Problem::of(self.graph, scope, self.settings.reuse);
                self.parts.push((Portfolio::new(problem, Some(limit)), 0));
            }
            let (portfolio, known) = &mut self.parts[at];
            for trial in &self.whole.trials[*known..] {
                portfolio.add(trial.name, trial.ordered.order.clone());
            }
            *known = self.whole.trials.len();
            portfolio.prove(self.watch)?;
            self.note_parts();
        }
        // New bounds have been found, but new orders are unlikely.
        if self.whole.problem.is_large() && self.parts_agree() {
            return Ok(());
        }
        for at in 0..self.parts.len() {
            if self.is_done() || self.suffices(self.least_total()) {
                break;
            }
            let part = &mut self.parts[at].0;
            let before = part.trials.len();
            let stages = [
                Portfolio::find,
                Portfolio::refine,
                Portfolio::prove,
                Portfolio::probe_peaks,
                Portfolio::chain,
                Portfolio::search,
            ];
            let ended = stages.into_iter().try_for_each(|stage| stage(part, self.watch));
            // Whatever is found before a stop counts.
            self.adopt(at, before);
            ended?;
        }
        Ok(())
    }

    /// Where the search for orders gave up: integer programs, which take seconds, and so only where
    /// the total is not all but proved.
    fn solve_orders(&mut self) -> Result<(), Stop> {
        if self.is_settled() {
            return Ok(());
        }
        self.whole.solve(&mut self.exact, self.watch)?;
        for at in 0..self.parts.len() {
            if self.is_settled() {
                break;
            }
            let part = &mut self.parts[at].0;
            let before = part.trials.len();
            let ended = part.solve(&mut self.exact, self.watch);
            self.adopt(at, before);
            ended?;
        }
        Ok(())
    }

    /// Takes the orders that the search of one part has tried, from the number `from` on, into the
    /// whole, and what is proved of the part.
    fn adopt(&mut self, part: usize, from: usize) {
        for trial in &self.parts[part].0.trials[from..] {
            self.whole.add(trial.name, trial.ordered.order.clone());
        }
        self.note_parts();
    }

    /// Whether a step-local total is as small as the caller asks for.
    fn suffices(&self, total: u64) -> bool {
        let Settings { enough_bytes, worth_bytes, .. } = *self.settings;
        total.saturating_add(self.graph.persistent_bytes()) <= enough_bytes
            || (worth_bytes > 0 && total.saturating_sub(self.bound()) < worth_bytes)
    }

    /// Whether little is left to gain from the best order on trial.
    fn is_near(&self) -> bool {
        let bound = self.bound();
        self.least_total().saturating_sub(bound) <= bound / NEAR
    }

    /// Whether no order can have a smaller total than the best one on trial.
    fn is_done(&self) -> bool {
        self.least_total() <= self.bound()
    }

    /// Whether the best order tried is so near to the least total that no search is worth while.
    fn is_settled(&self) -> bool {
        let total = self.least_total();
        is_within(total, self.bound()) || self.suffices(total)
    }

    /// Takes over what is proved of the parts.
    fn note_parts(&mut self) {
        for (part, _) in &self.parts {
            if let (bytes, Some(op)) = part.bounds.best() {
                // A part needs no more than the whole; and orders beyond the part's limit have
                // higher peaks anyway.
                self.whole.bounds.record(op, bytes, part.bounds.route());
            }
        }
        self.total_bound = self.total_bound.max(self.parts.iter().map(|(part, _)| part.bounds.best().0).sum());
    }

    /// No plan has a smaller step-local total.
    fn bound(&self) -> u64 {
        self.whole.bounds.best().0.max(self.total_bound)
    }

    fn least_total(&self) -> u64 {
        let profiles = self.whole.trials.iter().map(|trial| &trial.ordered.profile);
        profiles.map(Profile::least_total).min().unwrap_or(0)
    }

    /// The problem that a trial's order is laid out for.
    fn problem_of(&self, trial: usize) -> &Problem {
        if trial == 0 { &self.plain } else { &self.whole.problem }
    }

    /// What program order takes as the portfolio lays it out: plans of several streams, whose aim
    /// is speed, may take as much.
    fn program_total(&mut self) -> Result<u64, OptimizeError> {
        let profile = &self.whole.trials[0].ordered.profile;
        let least = |search: &Self| {
            let of_program = search.placed.iter().filter(|placed| placed.trial == 0);
            of_program.map(|placed| search.total(placed)).min().unwrap_or(u64::MAX)
        };
        let limit = least(self) - profile.unpooled_peak;
        let mut work = layout::portfolio_work(self.plain.len());
        match layout::best(&self.plain, profile, limit, &mut work, self.watch) {
            Ok(layout) => self.placed.extend(layout.map(|layout| Placed { trial: 0, layout })),
            Err(Stop::TimedOut) => {}
            Err(Stop::Cancelled) => return Err(OptimizeError::Cancelled),
        }
        self.keep_promise(least(self));
        Ok(least(self))
    }

    /// The plan for several streams, made from the orders found for one.
    fn plan_streams(&mut self) -> Result<Plan, OptimizeError> {
        let program_total = self.program_total()?;
        let input = streams::Input {
            graph: self.graph,
            problem: &self.whole.problem,
            settings: self.settings,
            bases: self
                .whole
                .ranking()
                .into_iter()
                .map(|at| (self.whole.trials[at].name, &self.whole.trials[at].ordered))
                .collect(),
            program_total,
        };
        let mut placed: Vec<&Placed> = self.placed.iter().collect();
        placed.sort_by_key(|placed| (self.total(placed), self.whole.trials[placed.trial].ordered.profile.peak));
        let singles = placed.into_iter().map(|Placed { trial, layout }| {
            let Trial { name, ordered } = &self.whole.trials[*trial];
            streams::Single { name, problem: self.problem_of(*trial), ordered, layout }
        });
        let singles: Vec<streams::Single<'_>> = singles.collect();
        let outcome = streams::search(&input, &singles, self.watch).map_err(|_| OptimizeError::Cancelled)?;
        let plan = self.plan();
        let found = outcome.best.map_err(|fastest| OptimizeError::SpeedTarget {
            streams: self.settings.streams,
            speed: self.settings.speed.unwrap_or(1.0),
            fastest,
            most: streams::most_speed(self.graph),
        })?;
        Ok(found.into_plan(&self.whole.problem, plan, &outcome.tried, self.timed_out || outcome.timed_out))
    }

    fn plan(&self) -> Plan {
        let Placed { trial, layout } = self.best();
        let Ordered { order, profile } = &self.whole.trials[*trial].ordered;
        let problem = self.problem_of(*trial);
        let mut offsets: Vec<Option<u64>> =
            self.graph.tensors().iter().map(|tensor| (tensor.residency == Residency::StepLocal).then_some(0)).collect();
        problem.write_offsets(&layout.offsets, &mut offsets);
        let local = layout.pool_bytes + profile.unpooled_peak;
        let persistent_bytes = self.graph.persistent_bytes();
        let (bound, bound_operator) = self.whole.bounds.best();
        let total_bound = self.bound();
        let mut exact = self.exact.report.clone();
        exact.conclude(local == total_bound);
        Plan {
            graph_digest: self.graph.digest().to_owned(),
            estimate: self.graph.estimate().to_owned(),
            settings: self.settings.clone(),
            order: order.iter().map(|&op| problem.operator_id(op)).collect(),
            offsets,
            reuse: problem.pair_ids(&profile.pairs),
            schedule: None,
            recomputation: None,
            program_order_peak_bytes: self.program_peak,
            peak_bytes: profile.peak,
            pool_peak_bytes: profile.pool_peak,
            pool_bytes: layout.pool_bytes,
            outside_bytes: profile.unpooled_peak,
            persistent_bytes,
            total_bytes: local + persistent_bytes,
            lower_bound_bytes: bound,
            total_lower_bound_bytes: total_bound + persistent_bytes,
            bound_operator: bound_operator.map(|op| problem.operator_id(op)),
            bound_route: self.whole.bounds.route(),
            status: Status::of(local, total_bound, self.timed_out),
            exact,
            candidates: self
                .placed
                .iter()
                .map(|placed| {
                    let trial = &self.whole.trials[placed.trial];
                    Candidate {
                        order: trial.name.into(),
                        layout: placed.layout.method.into(),
                        peak_bytes: trial.ordered.profile.peak,
                        pool_bytes: placed.layout.pool_bytes,
                        outside_bytes: trial.ordered.profile.unpooled_peak,
                    }
                })
                .collect(),
        }
    }
}
