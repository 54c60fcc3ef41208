//! The search over base orders, preferences and ceilings.

use super::outcome::{Found, Input, Recipe, Single, Tried, speed};
use super::schedule::{self, Preference, Task, Timed};
use super::{syncs, windows};
use crate::control::{Stop, Watch};
use crate::cost;
use crate::layout::{self, Layout};
use crate::plan::{Schedule, StreamModel};
use crate::problem::{Op, Problem, Ten};
use rayon::prelude::*;

/// How often the stretch between the lowest and the highest ceiling is halved.
const HALVINGS: usize = 8;
/// Base orders that are scheduled.
const BASES: usize = 3;
/// A saving of 1 / `NEARLY` of the time is not worth more memory.
pub(super) const NEARLY: u64 = 20;
/// How many comparisons the search for a better layout of the best schedule may make.
const SEARCH_WORK: u64 = 50_000_000;

/// Which base order is scheduled, by which preference, and between which ceilings.
#[derive(Clone, Copy, Debug)]
struct Flavour {
    base: usize,
    preference: Preference,
    lowest: u64,
    highest: u64,
}

pub(super) struct Search<'a> {
    input: &'a Input<'a>,
    watch: &'a Watch,
    /// Nanoseconds per operator.
    ns: Vec<u64>,
    /// What the scheduler takes for these: the same, or one time step for each operator.
    durations: Vec<u64>,
    tails: Vec<u64>,
    serial_ns: u64,
    critical_path_ns: u64,
}

impl<'a> Search<'a> {
    pub(super) fn new(input: &'a Input<'a>, watch: &'a Watch) -> Self {
        let problem = input.problem;
        let ns: Vec<u64> = input.graph.program_order().iter().map(|&id| cost::operator_ns(input.graph, id)).collect();
        let durations = match input.settings.stream_model {
            StreamModel::HappensBefore => ns.clone(),
            StreamModel::TimeStep => vec![1; ns.len()],
        };
        Search {
            watch,
            tails: schedule::tails(problem, &durations),
            ns,
            durations,
            serial_ns: cost::serial_ns(input.graph),
            critical_path_ns: cost::critical_path_ns(input.graph),
            input,
        }
    }

    fn speed(&self, makespan_ns: u64) -> f64 {
        speed(self.serial_ns, makespan_ns)
    }

    /// Everything on the first stream.
    pub(super) fn alone(&self, single: &Single<'_>) -> Found {
        let Single { problem, ordered, layout, .. } = *single;
        let timed = Timed::serial(&ordered.order, &self.durations);
        self.finish(problem, timed, layout.clone(), ordered.profile.pairs.clone())
    }

    /// All base orders by all preferences, each under the lowest ceilings under which plans are as
    /// fast as asked for.
    pub(super) fn try_at_speed(&self, speed: f64) -> Result<Vec<Tried>, Stop> {
        self.on_all_flavours(&|flavour| self.leanest(flavour, |makespan_ns| self.speed(makespan_ns) >= speed))
    }

    /// All base orders by all preferences under several ceilings, the fastest first.
    pub(super) fn try_all(&self) -> Result<Vec<Tried>, Stop> {
        let mut tried = self.on_all_flavours(&|flavour| self.fastest(flavour))?;
        let fastest = tried.iter().map(|tried| tried.makespan_ns).min().unwrap_or(self.serial_ns);
        tried.extend(self.on_all_flavours(&|flavour| {
            // There is no need to be slower than under a ceiling at the base order's own peak.
            let flavour = Flavour { lowest: self.input.bases[flavour.base].1.profile.peak, ..*flavour };
            self.leanest(&flavour, |makespan_ns| is_nearly(makespan_ns, fastest))
        })?);
        Ok(tried)
    }

    fn on_all_flavours(
        &self,
        work: &(dyn Fn(&Flavour) -> Result<Vec<Tried>, Stop> + Sync),
    ) -> Result<Vec<Tried>, Stop> {
        let bases = 0..self.input.bases.len().min(BASES);
        let flavours: Vec<Flavour> = bases
            .flat_map(|base| {
                let peak = self.input.bases[base].1.profile.peak;
                // Under a ceiling below the peak, only operators far from the peak run side by
                // side.
                let (lowest, highest) = (peak / 2, self.input.program_total.max(peak));
                Preference::ALL.map(|preference| Flavour { base, preference, lowest, highest })
            })
            .collect();
        let tried = flavours.par_iter().map(work).collect::<Vec<_>>().into_iter();
        tried.collect::<Result<Vec<_>, Stop>>().map(|tried| tried.into_iter().flatten().collect())
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

    /// Halves the stretch between two ceilings again and again, and goes on with the half that
    /// `wants_more` points to, unless one of the ends decides the question. `wants_more` is told
    /// what came of a ceiling, or `None` where that took more than program order.
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

    /// The plan of a recipe with the windows that it was laid out by; `None` where it takes more
    /// than program order.
    fn make(&self, recipe: Recipe, watch: &Watch) -> Result<Option<(Timed, Found)>, Stop> {
        let problem = self.input.problem;
        let timed = self.schedule(recipe, watch)?;
        let profile = windows::profile(problem, &timed);
        if profile.pool_peak > self.input.program_total {
            return Ok(None);
        }
        let mut work = layout::portfolio_work(problem.len());
        let Some(layout) = layout::best(problem, &profile, self.input.program_total + 1, &mut work, watch)? else {
            return Ok(None);
        };
        let found = self.finish(problem, timed.clone(), layout, profile.pairs);
        Ok((found.total() <= self.input.program_total).then_some((timed, found)))
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

    /// The plan of a recipe that has been tried, its layout searched for longer; and whether a
    /// deadline ended that.
    pub(super) fn make_again(&self, recipe: Recipe) -> Result<(Found, bool), Stop> {
        let made = self.make(recipe, &self.watch.patient())?;
        let Some((timed, mut found)) = made else { unreachable!("a recipe gives the same plan again") };
        match self.lay_out_again(&timed, &mut found) {
            Ok(()) => Ok((found, false)),
            Err(Stop::TimedOut) => Ok((found, true)),
            Err(Stop::Cancelled) => Err(Stop::Cancelled),
        }
    }

    /// Looks for a smaller layout of a schedule, or for one of the same size that asks for less
    /// waiting.
    fn lay_out_again(&self, timed: &Timed, found: &mut Found) -> Result<(), Stop> {
        let problem = self.input.problem;
        let profile = windows::profile(problem, timed);
        let pool_bytes = found.layout.pool_bytes;
        if pool_bytes > profile.pool_peak {
            let layout = layout::search(problem, &profile, pool_bytes, &mut { SEARCH_WORK }, self.watch)?;
            if let Some(layout) = layout {
                let better = self.finish(problem, timed.clone(), layout, profile.pairs.clone());
                if better.total() < found.total() && self.is_as_good(&better, found) {
                    *found = better;
                    return Ok(());
                }
            }
        }
        let rating = |found: &Found| (found.total(), found.schedule.makespan_ns, found.schedule.syncs.len());
        let mut work = layout::portfolio_work(problem.len());
        for layout in layout::alike(problem, &profile, pool_bytes, &mut work, self.watch)? {
            let other = self.finish(problem, timed.clone(), layout, profile.pairs.clone());
            if rating(&other) < rating(found) && self.is_as_good(&other, found) {
                *found = other;
            }
        }
        Ok(())
    }

    /// Whether a plan that takes less is still as fast as the other one was chosen to be: it shares
    /// other bytes, so it makes other waits.
    fn is_as_good(&self, better: &Found, found: &Found) -> bool {
        match self.input.settings.speed {
            Some(_) => self.is_fast_enough(better.schedule.makespan_ns),
            None => is_nearly(better.schedule.makespan_ns, found.schedule.makespan_ns),
        }
    }

    /// Whether a plan is as fast as asked for.
    pub(super) fn is_fast_enough(&self, makespan_ns: u64) -> bool {
        self.input.settings.speed.is_none_or(|speed| self.speed(makespan_ns) >= speed)
    }

    /// The speed of the fastest plan that was found.
    pub(super) fn fastest_speed(&self, tried: &[Tried], found: &Found) -> f64 {
        let least = tried.iter().map(|tried| tried.makespan_ns).fold(found.schedule.makespan_ns, u64::min);
        self.speed(least)
    }

    /// Of the plans that are as fast as asked for the one of the least total; `None` where none is.
    pub(super) fn best_at_speed<'t>(&self, tried: &'t [Tried], speed: f64) -> Option<&'t Tried> {
        let is_fast = |tried: &&Tried| self.speed(tried.makespan_ns) >= speed;
        tried.iter().filter(is_fast).min_by_key(|tried| (tried.total, tried.makespan_ns))
    }

    /// Of the plans that are nearly as fast as the fastest the one of the least total.
    pub(super) fn best<'t>(&self, tried: &'t [Tried]) -> Option<&'t Tried> {
        let fastest = tried.iter().map(|tried| tried.makespan_ns).min()?;
        let is_fast = |tried: &&Tried| is_nearly(tried.makespan_ns, fastest);
        tried.iter().filter(is_fast).min_by_key(|tried| (tried.total, tried.makespan_ns))
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
        let (profile, unpooled_bytes) = match settings.stream_model {
            StreamModel::HappensBefore => {
                let syncs = syncs::syncs(problem, &timed, settings.streams, &layout.offsets);
                let id = |op| problem.operator_id(op);
                schedule.syncs = syncs.pairs.iter().map(|&(before, after)| (id(before), id(after))).collect();
                let real = syncs.timed(&timed, &self.ns);
                schedule.makespan_ns = real.end.iter().copied().max().unwrap_or(0);
                (windows::profile_with(problem, &real, pairs), syncs.unpooled_bytes(problem, &timed.order))
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
                let unpooled_bytes = profile.unpooled_peak;
                (profile, unpooled_bytes)
            }
        };
        Found {
            order: timed.order,
            layout,
            pairs: profile.pairs,
            schedule,
            peak: profile.peak,
            pool_peak: profile.pool_peak,
            unpooled_bytes,
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
