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
mod search;
mod syncs;
mod windows;

use crate::control::{Stop, Watch};
use crate::cost;
use crate::graph::Graph;
use crate::layout::Layout;
use crate::order::Ordered;
use crate::plan::{Candidate, Plan, Schedule, Settings, Status};
use crate::problem::{Op, Problem, Ten};
use schedule::Preference;
use search::Search;

/// What streams are planned from.
pub(crate) struct Input<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) problem: &'a Problem,
    pub(crate) settings: &'a Settings,
    /// Orders for one stream by name, the most promising first.
    pub(crate) bases: Vec<(&'static str, &'a Ordered)>,
    /// What program order takes without reuse, laid out: no plan may take more.
    pub(crate) program_total: u64,
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
        let total = self.total() + single.persistent_bytes;
        let mut exact = single.exact;
        exact.conclude(total == single.total_lower_bound_bytes);
        let mut offsets = single.offsets;
        problem.write_offsets(&self.layout.offsets, &mut offsets);
        let candidate = |tried: &Tried| Candidate {
            order: tried.name.clone(),
            layout: tried.layout.into(),
            peak_bytes: tried.peak,
            pool_bytes: tried.pool_bytes,
            outside_bytes: tried.total - tried.pool_bytes,
        };
        Plan {
            order: self.order.iter().map(|&op| problem.operator_id(op)).collect(),
            offsets,
            reuse: problem.pair_ids(&self.pairs),
            peak_bytes: self.peak,
            pool_peak_bytes: self.pool_peak,
            pool_bytes: self.layout.pool_bytes,
            outside_bytes: self.outside_bytes,
            total_bytes: total,
            status: Status::of(total, single.total_lower_bound_bytes, timed_out),
            exact,
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
/// that is one part in [`search::NEARLY`] short of the fastest plan that is found. No plan takes more than
/// program order; `singles` are the plans for one stream, the best first and that in program order among them.
///
/// # Errors
/// [`Stop::Cancelled`].
pub(crate) fn search(input: &Input<'_>, singles: &[Single<'_>], watch: &Watch) -> Result<Outcome, Stop> {
    let search = Search::new(input, watch);
    // Outside the pool nothing is reused on several streams, so what needs that does not count.
    let mut found = singles.iter().map(|single| (single, search.alone(single)));
    let Some((single, alone)) = found.find(|(_, alone)| alone.total() <= input.program_total) else {
        unreachable!("program order is no worse than itself")
    };
    let mut tried = vec![Tried::new(single.name.into(), &alone, None)];
    let mut timed_out = false;
    let mut extend = |tried: &mut Vec<Tried>, more: Result<Vec<Tried>, Stop>| match more {
        Ok(more) => {
            tried.extend(more);
            Ok(())
        }
        Err(Stop::TimedOut) => {
            timed_out = true;
            Ok(())
        }
        Err(Stop::Cancelled) => Err(Stop::Cancelled),
    };
    let best = if let Some(speed) = input.settings.speed {
        extend(&mut tried, search.try_at_speed(speed))?;
        let at_speed = tried.len();
        if search.best_at_speed(&tried, speed).is_none() {
            extend(&mut tried, search.try_all())?;
        }
        // A longer search for the layout of the plan that is best without a speed may make it fast enough.
        search.best_at_speed(&tried, speed).or_else(|| search.best(&tried[at_speed..]))
    } else {
        extend(&mut tried, search.try_all())?;
        search.best(&tried)
    };
    let best = match best.map(|best| best.recipe) {
        Some(Some(recipe)) => {
            let (found, was_cut_short) = search.make_again(recipe)?;
            timed_out |= was_cut_short;
            found
        }
        _ => alone,
    };
    let best = if search.is_fast_enough(best.schedule.makespan_ns) {
        Ok(best)
    } else {
        Err(search.fastest_speed(&tried, &best))
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
