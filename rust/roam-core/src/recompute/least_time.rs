//! The least time that further runs take in any schedule within a limit of bytes.

use super::floor::at_the_ends;
use super::moment::{CUTS_WORK, Moment, moments_at};
use super::repeats::Repeats;
use crate::control::{Stop, Watch};
use crate::graph::{Graph, OperatorId};
use crate::liveness::Profile;
use crate::problem::Op;
use std::cmp::Reverse;

/// Moments in a row that may prove nothing new.
const MOST_IN_VAIN: usize = 24;
/// Moments, the best ones, at which tensors are supposed to be kept or lost.
const MOST_DIVIDED: usize = 8;
/// Cases that are divided in two at one of them.
const MOST_CASES: usize = 64;
/// Nodes and arcs looked at for that.
const DIVIDING_WORK: u64 = 20_000_000;

/// What every schedule within the limit pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeastTime {
    /// Nanoseconds of all further runs together; `None` where no schedule keeps to the limit.
    pub ns: Option<u64>,
    /// The operator at whose first run this is proved; `None` where nothing is.
    pub operator: Option<OperatorId>,
}

/// The least time of further runs of all schedules that never have more than `limit_bytes` live,
/// persistent tensors included.
pub fn least_extra_ns(graph: &Graph, limit_bytes: u64) -> LeastTime {
    let repeats = Repeats::new(graph);
    let watch = Watch::default();
    match of(&repeats, limit_bytes, &watch) {
        Ok((ns, op)) => LeastTime { ns, operator: op.map(|op| repeats.problem.operator_id(op)) },
        // Nothing stops this watch.
        Err(Stop::Cancelled | Stop::TimedOut) => LeastTime { ns: Some(0), operator: None },
    }
}

fn of(repeats: &Repeats, limit_bytes: u64, watch: &Watch) -> Result<(Option<u64>, Option<Op>), Stop> {
    let Some(limit) = limit_bytes.checked_sub(repeats.persistent_bytes) else { return Ok((None, None)) };
    let (ends, at) = at_the_ends(repeats);
    if ends > limit {
        return Ok((None, at));
    }
    let live = Profile::new(&repeats.problem, &repeats.problem.program_order()).live;
    let mut moments = moments_at(repeats, &live, watch)?;
    // Where most would have to be given up if nothing ran again, most time is to be expected.
    let needed = |moment: &Moment| moment.bytes + moment.keep_all;
    moments.retain(|(_, moment)| needed(moment) > limit);
    moments.sort_by_key(|(op, moment)| (Reverse(needed(moment)), *op));
    let mut work = CUTS_WORK;
    let mut best = (0, None);
    let mut in_vain = 0;
    let mut found = Vec::new();
    for (op, moment) in &moments {
        if in_vain == MOST_IN_VAIN || work == 0 {
            break;
        }
        in_vain += 1;
        let Some(least) = moment.least_ns(limit, &[], &mut work, watch)? else { return Ok((None, Some(*op))) };
        if least.ns > best.0 {
            best = (least.ns, Some(*op));
            in_vain = 0;
        }
        found.push((*op, moment, least));
    }
    found.sort_by_key(|(op, _, least)| (Reverse(least.ns), *op));
    let mut work = DIVIDING_WORK;
    for (op, moment, least) in found.into_iter().take(MOST_DIVIDED) {
        let ns = moment.divide(limit, least, MOST_CASES, &mut work, watch)?;
        if ns > best.0 {
            best = (ns, Some(op));
        }
    }
    Ok((Some(best.0), best.1))
}
