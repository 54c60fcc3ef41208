//! Plans of more than one stream.
//!
//! A list scheduler puts operators on streams by the model of time, under a ceiling of live bytes.
//! Its tensors are laid out by the times at which they are live there. The waits are then derived
//! from the layout: whatever shares bytes in that schedule is held apart by waits, so that the plan
//! is safe under every timing (docs/theory.md has the proof), and by no more waits than that and the
//! constraints ask for. Such a wait is for something that has completed by then in the schedule, so
//! it costs next to no time. The search is over ceilings, base orders and preferences.

mod headroom;
mod schedule;
mod syncs;
mod windows;

use crate::control::{Stop, Watch};
use crate::cost;
use crate::graph::{Graph, ReusePair};
use crate::layout::{self, Layout};
use crate::liveness::Profile;
use crate::order::Ordered;
use crate::plan::{Candidate, Plan, Schedule, Settings, Status, StreamModel};
use crate::problem::{Op, Problem, Ten};
use rayon::prelude::*;
use schedule::{Preference, Task, Timed};

/// How often the ceiling between the lowest and the highest is halved.
const HALVINGS: usize = 7;
/// Base orders that are scheduled.
const BASES: usize = 3;
/// One part in so many of the time is not worth more memory.
const NEARLY: u64 = 100;
/// How many comparisons the search for a better layout of the best schedule may make.
const SEARCH_WORK: u64 = 50_000_000;

/// What streams are planned from.
pub(crate) struct Input<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) problem: &'a Problem,
    /// The same without reuse.
    pub(crate) plain: &'a Problem,
    pub(crate) settings: &'a Settings,
    /// Orders for one stream by name, the most promising first.
    pub(crate) bases: Vec<(&'static str, &'a Ordered)>,
    /// The peak of program order without reuse.
    pub(crate) program_peak: u64,
}

/// A plan but for what does not depend on streams.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) order: Vec<Op>,
    pub(crate) layout: Layout,
    pub(crate) pairs: Vec<(Ten, Ten)>,
    pub(crate) schedule: Schedule,
    pub(crate) peak: u64,
    pub(crate) pool_peak: u64,
    pub(crate) outside_bytes: u64,
}

impl Found {
    fn total(&self) -> u64 {
        self.layout.pool_bytes + self.outside_bytes
    }

    /// The plan; what does not depend on streams is that of the plan for one.
    pub(crate) fn into_plan(self, problem: &Problem, single: Plan, tried: &[Tried], timed_out: bool) -> Plan {
        let total = self.total();
        let mut offsets = single.offsets;
        for (tensor, item) in problem.tensors.iter().enumerate() {
            if item.in_pool() {
                offsets[problem.tensor_id(tensor as Ten).index()] = Some(self.layout.offsets[tensor]);
            }
        }
        let pair = |&(input, output): &(Ten, Ten)| ReusePair {
            input: problem.tensor_id(input),
            output: problem.tensor_id(output),
        };
        let candidate = |tried: &Tried| Candidate {
            order: tried.name.clone(),
            layout: tried.layout.into(),
            peak_bytes: tried.peak,
            pool_bytes: tried.pool_bytes,
        };
        Plan {
            order: self.order.iter().map(|&op| problem.operator_id(op)).collect(),
            offsets,
            reuse: self.pairs.iter().map(pair).collect(),
            peak_bytes: self.peak,
            pool_peak_bytes: self.pool_peak,
            pool_bytes: self.layout.pool_bytes,
            outside_bytes: self.outside_bytes,
            total_bytes: total + single.persistent_bytes,
            status: match (total + single.persistent_bytes == single.total_lower_bound_bytes, timed_out) {
                (true, _) => Status::Optimal,
                (false, true) => Status::TimedOut,
                (false, false) => Status::Feasible,
            },
            candidates: tried.iter().map(candidate).collect(),
            schedule: Some(self.schedule),
            ..single
        }
    }
}

/// How many times as fast as one stream any number of streams can be at most, by the model of time.
pub(crate) fn most_speed(graph: &Graph) -> f64 {
    speed(cost::serial_ns(graph), cost::critical_path_ns(graph))
}

/// 1 where nothing takes time.
fn speed(serial_ns: u64, makespan_ns: u64) -> f64 {
    if makespan_ns == 0 { 1.0 } else { serial_ns as f64 / makespan_ns as f64 }
}

/// What one schedule came to.
#[derive(Clone, Debug)]
pub(crate) struct Tried {
    /// How the order was found.
    pub(crate) name: String,
    pub(crate) layout: &'static str,
    pub(crate) peak: u64,
    pub(crate) pool_bytes: u64,
    total: u64,
    makespan_ns: u64,
    /// How to make it again; `None` for the plan for one stream.
    recipe: Option<Recipe>,
}

#[derive(Clone, Copy, Debug)]
struct Recipe {
    base: usize,
    preference: Preference,
    ceiling: u64,
}

/// What is scheduled how, and between which ceilings.
#[derive(Clone, Copy, Debug)]
struct Flavour {
    base: usize,
    preference: Preference,
    lowest: u64,
    highest: u64,
}

/// What the search came to.
pub(crate) struct Outcome {
    /// Every schedule that takes no more than program order; the first is for one stream.
    pub(crate) tried: Vec<Tried>,
    /// The best plan, or the speed of the fastest where none is as fast as asked for.
    pub(crate) best: Result<Found, f64>,
    /// Whether a deadline cut the search short.
    pub(crate) timed_out: bool,
}

/// An order for one stream as it has been laid out.
pub(crate) struct Single<'a> {
    pub(crate) name: &'static str,
    pub(crate) problem: &'a Problem,
    pub(crate) ordered: &'a Ordered,
    pub(crate) layout: &'a Layout,
}

/// Searches for the plan of the least total that is as fast as asked for. Where nothing is asked for,
/// that is one part in [`NEARLY`] short of the fastest plan that is found. No plan takes more than
/// program order; `single` is the plan for one stream.
///
/// # Errors
/// [`Stop::Cancelled`].
pub(crate) fn search(input: &Input<'_>, single: &Single<'_>, watch: &Watch) -> Result<Outcome, Stop> {
    let search = Search::new(input, single, watch)?;
    let alone = search.alone(single);
    let mut tried = vec![Tried::new(single.name.into(), &alone, None)];
    let mut timed_out = match search.try_all() {
        Ok(more) => {
            tried.extend(more);
            false
        }
        Err(Stop::TimedOut) => true,
        Err(Stop::Cancelled) => return Err(Stop::Cancelled),
    };
    let best = match search.best(&tried) {
        Err(fastest) => Err(fastest),
        Ok(Tried { recipe: None, .. }) => Ok(alone),
        Ok(Tried { recipe: Some(recipe), .. }) => {
            let (found, was_cut_short) = search.make_again(*recipe)?;
            timed_out |= was_cut_short;
            Ok(found)
        }
    };
    Ok(Outcome { tried, best, timed_out })
}

impl Tried {
    fn new(name: String, found: &Found, recipe: Option<Recipe>) -> Self {
        Tried {
            name,
            layout: found.layout.method,
            peak: found.peak,
            pool_bytes: found.layout.pool_bytes,
            total: found.total(),
            makespan_ns: found.schedule.makespan_ns,
            recipe,
        }
    }
}

struct Search<'a> {
    input: &'a Input<'a>,
    watch: &'a Watch,
    /// Nanoseconds per operator.
    ns: Vec<u64>,
    /// What the scheduler takes for them: the same, or one time step each.
    durations: Vec<u64>,
    tails: Vec<u64>,
    serial_ns: u64,
    critical_path_ns: u64,
    /// What program order takes, laid out.
    most_total: u64,
}

impl<'a> Search<'a> {
    fn new(input: &'a Input<'a>, single: &Single<'_>, watch: &'a Watch) -> Result<Self, Stop> {
        let problem = input.problem;
        let ns: Vec<u64> = input.graph.program_order().iter().map(|&id| cost::operator_ns(input.graph, id)).collect();
        let durations = match input.settings.stream_model {
            StreamModel::HappensBefore => ns.clone(),
            StreamModel::TimeStep => vec![1; ns.len()],
        };
        let program = Profile::new(input.plain, &input.plain.program_order());
        let mut pool = layout::first_fit(input.plain, &program, &watch.patient())?.pool_bytes;
        match layout::best(input.plain, &program, pool, watch) {
            Ok(layout) => pool = layout.map_or(pool, |layout| layout.pool_bytes),
            Err(Stop::TimedOut) => {}
            Err(Stop::Cancelled) => return Err(Stop::Cancelled),
        }
        // The plan for one stream may come from layouts that were searched for longer; it never takes more.
        let single_total = single.layout.pool_bytes + single.ordered.profile.outside_peak;
        Ok(Search {
            watch,
            tails: schedule::tails(problem, &durations),
            ns,
            durations,
            serial_ns: cost::serial_ns(input.graph),
            critical_path_ns: cost::critical_path_ns(input.graph),
            most_total: (pool + program.outside_peak).max(single_total),
            input,
        })
    }

    fn speed(&self, makespan_ns: u64) -> f64 {
        speed(self.serial_ns, makespan_ns)
    }

    /// Everything on the first stream.
    fn alone(&self, single: &Single<'_>) -> Found {
        let Single { problem, ordered, layout, .. } = *single;
        let timed = Timed::serial(&ordered.order, &self.durations);
        self.finish(problem, timed, layout.clone(), ordered.profile.pairs.clone())
    }

    /// All base orders by all preferences under several ceilings.
    fn try_all(&self) -> Result<Vec<Tried>, Stop> {
        let bases = 0..self.input.bases.len().min(BASES);
        let flavours: Vec<Flavour> = bases
            .flat_map(|base| {
                let lowest = self.input.bases[base].1.profile.peak;
                let highest = self.most_total.max(lowest);
                Preference::ALL.map(|preference| Flavour { base, preference, lowest, highest })
            })
            .collect();
        let on_all = |work: &(dyn Fn(&Flavour) -> Result<Vec<Tried>, Stop> + Sync)| {
            let tried = flavours.par_iter().map(work).collect::<Vec<_>>().into_iter();
            tried.collect::<Result<Vec<_>, Stop>>().map(|tried| tried.into_iter().flatten().collect::<Vec<_>>())
        };
        if let Some(speed) = self.input.settings.speed {
            return on_all(&|flavour| self.leanest(flavour, |makespan_ns| self.speed(makespan_ns) >= speed));
        }
        let mut tried = on_all(&|flavour| self.fastest(flavour))?;
        let fastest = tried.iter().map(|tried| tried.makespan_ns).min().unwrap_or(self.serial_ns);
        tried.extend(on_all(&|flavour| self.leanest(flavour, |makespan_ns| is_nearly(makespan_ns, fastest)))?);
        Ok(tried)
    }

    /// Looks for the highest ceiling under which a plan takes no more than program order.
    fn fastest(&self, flavour: &Flavour) -> Result<Vec<Tried>, Stop> {
        self.try_ceilings(flavour, [flavour.highest, flavour.lowest], |made| made.is_some())
    }

    /// Looks for the lowest ceiling under which a plan is fast.
    fn leanest(&self, flavour: &Flavour, is_fast: impl Fn(u64) -> bool) -> Result<Vec<Tried>, Stop> {
        let is_slow = |made: Option<&Tried>| made.is_some_and(|tried| !is_fast(tried.makespan_ns));
        self.try_ceilings(flavour, [flavour.lowest, flavour.highest], is_slow)
    }

    /// Halves the stretch between two ceilings, on the side that `wants_more` points to, unless an end decides it. It is
    /// told what came of a ceiling, nothing where that took more than program order.
    fn try_ceilings(
        &self,
        flavour: &Flavour,
        ends: [u64; 2],
        wants_more: impl Fn(Option<&Tried>) -> bool,
    ) -> Result<Vec<Tried>, Stop> {
        let Flavour { base, preference, mut lowest, mut highest } = *flavour;
        let mut tried = Vec::new();
        let mut tries_more = |ceiling: u64| {
            let recipe = Recipe { base, preference, ceiling };
            let name = || format!("{}/{}", self.input.bases[base].0, preference.name());
            let made = self.make(recipe, self.watch)?.map(|(_, found)| Tried::new(name(), &found, Some(recipe)));
            let more = wants_more(made.as_ref());
            tried.extend(made);
            Ok(more)
        };
        for end in ends {
            let more = tries_more(end)?;
            if (end == lowest && !more) || (end == highest && more) {
                return Ok(tried);
            }
        }
        for _ in 0..HALVINGS {
            let middle = lowest + (highest - lowest) / 2;
            if middle == lowest {
                break;
            }
            if tries_more(middle)? {
                lowest = middle;
            } else {
                highest = middle;
            }
        }
        Ok(tried)
    }

    /// The plan of a recipe with the windows that it was laid out by; `None` where it takes more than program order.
    fn make(&self, recipe: Recipe, watch: &Watch) -> Result<Option<(Timed, Found)>, Stop> {
        let problem = self.input.problem;
        let timed = self.schedule(recipe, watch)?;
        let profile = windows::profile(problem, &timed);
        if profile.pool_peak > self.most_total {
            return Ok(None);
        }
        let Some(layout) = layout::best(problem, &profile, self.most_total + 1, watch)? else { return Ok(None) };
        let found = self.finish(problem, timed.clone(), layout, profile.pairs);
        let is_no_worse = found.total() <= self.most_total && found.peak <= self.input.program_peak;
        Ok(is_no_worse.then_some((timed, found)))
    }

    fn schedule(&self, recipe: Recipe, watch: &Watch) -> Result<Timed, Stop> {
        let task = Task {
            problem: self.input.problem,
            ns: &self.durations,
            tails: &self.tails,
            streams: self.input.settings.streams,
            base: self.input.bases[recipe.base].1,
            preference: recipe.preference,
        };
        task.schedule(recipe.ceiling, watch)
    }

    /// The plan of a recipe that has been tried, its layout searched for longer; and whether a deadline ended that.
    fn make_again(&self, recipe: Recipe) -> Result<(Found, bool), Stop> {
        let made = self.make(recipe, &self.watch.patient())?;
        let Some((timed, found)) = made else { unreachable!("a recipe gives the same plan again") };
        let profile = windows::profile(self.input.problem, &timed);
        if found.layout.pool_bytes <= profile.pool_peak {
            return Ok((found, false));
        }
        let mut work = SEARCH_WORK;
        match layout::search(self.input.problem, &profile, found.layout.pool_bytes, &mut work, self.watch) {
            Ok(None) => Ok((found, false)),
            Ok(Some(layout)) => {
                let better = self.finish(self.input.problem, timed, layout, profile.pairs);
                let is_better = better.total() < found.total() && self.is_as_good(&better, &found);
                Ok((if is_better { better } else { found }, false))
            }
            Err(Stop::TimedOut) => Ok((found, true)),
            Err(Stop::Cancelled) => Err(Stop::Cancelled),
        }
    }

    /// Whether a plan that takes less has not lost what the other one was chosen for: other bytes are shared,
    /// so other waits are made.
    fn is_as_good(&self, better: &Found, found: &Found) -> bool {
        better.peak <= self.input.program_peak
            && match self.input.settings.speed {
                Some(speed) => self.speed(better.schedule.makespan_ns) >= speed,
                None => is_nearly(better.schedule.makespan_ns, found.schedule.makespan_ns),
            }
    }

    fn best<'t>(&self, tried: &'t [Tried]) -> Result<&'t Tried, f64> {
        let fastest = tried.iter().map(|tried| tried.makespan_ns).min().unwrap_or(0);
        let is_fast = |tried: &&Tried| match self.input.settings.speed {
            Some(speed) => self.speed(tried.makespan_ns) >= speed,
            None => is_nearly(tried.makespan_ns, fastest),
        };
        let best = tried.iter().filter(is_fast).min_by_key(|tried| (tried.total, tried.makespan_ns));
        best.ok_or_else(|| self.speed(fastest))
    }

    /// Waits and figures of a schedule that has been laid out.
    fn finish(&self, problem: &Problem, timed: Timed, layout: Layout, pairs: Vec<(Ten, Ten)>) -> Found {
        let settings = self.input.settings;
        let mut schedule = Schedule {
            streams: self.by_id(&timed.stream),
            syncs: Vec::new(),
            time_steps: Vec::new(),
            makespan_ns: 0,
            serial_ns: self.serial_ns,
            critical_path_ns: self.critical_path_ns,
        };
        let (profile, outside_bytes) = match settings.stream_model {
            StreamModel::HappensBefore => {
                let syncs = syncs::syncs(problem, &timed, settings.streams, &layout.offsets);
                let id = |op| problem.operator_id(op);
                schedule.syncs = syncs.pairs.iter().map(|&(before, after)| (id(before), id(after))).collect();
                let real = syncs.timed(&timed, &self.ns);
                schedule.makespan_ns = real.end.iter().copied().max().unwrap_or(0);
                (windows::profile_with(problem, &real, pairs), syncs.outside_bytes(problem, &timed.order))
            }
            StreamModel::TimeStep => {
                let steps: Vec<u32> = timed.start.iter().map(|&step| step as u32).collect();
                let mut longest = vec![0; steps.iter().map(|&step| step as usize + 1).max().unwrap_or(0)];
                for (&step, &ns) in steps.iter().zip(&self.ns) {
                    longest[step as usize] = ns.max(longest[step as usize]);
                }
                schedule.makespan_ns = longest.into_iter().fold(0, cost::after);
                schedule.time_steps = self.by_id(&steps);
                let profile = windows::profile_with(problem, &timed, pairs);
                let outside_bytes = profile.outside_peak;
                (profile, outside_bytes)
            }
        };
        Found {
            order: timed.order,
            layout,
            pairs: profile.pairs,
            schedule,
            peak: profile.peak,
            pool_peak: profile.pool_peak,
            outside_bytes,
        }
    }

    /// Values per operator of the problem, turned into values per operator id.
    fn by_id(&self, values: &[u32]) -> Vec<u32> {
        let mut by_id = vec![0; values.len()];
        for (op, &value) in values.iter().enumerate() {
            by_id[self.input.problem.operator_id(op as Op).index()] = value;
        }
        by_id
    }
}

/// Whether a makespan is at most one part in [`NEARLY`] above the least.
fn is_nearly(makespan_ns: u64, least_ns: u64) -> bool {
    makespan_ns <= least_ns.saturating_add(least_ns / NEARLY)
}
