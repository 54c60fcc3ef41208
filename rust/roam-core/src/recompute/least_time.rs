//! The least time that further runs take in any schedule within a limit of bytes.

use super::floor::at_the_ends;
use super::moment::{CUTS_WORK, Moment, Outlook, outlooks_at};
use super::repeats::Repeats;
use crate::control::{Stop, Watch};
use crate::graph::OperatorId;
use crate::liveness::Profile;
use crate::problem::Op;
use std::cmp::Reverse;

/// Moments in a row that may prove nothing new.
const MOST_IN_VAIN: usize = 24;
/// Moments, the best ones, at which tensors are supposed to be kept or lost.
const MOST_DIVIDED: usize = 8;
/// Cases that are divided in two at one of these moments.
const MOST_CASES: usize = 64;
/// Nodes and arcs looked at for that.
const DIVIDING_WORK: u64 = 20_000_000;

/// What every schedule within the limit pays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeastTime {
    /// Nanoseconds of all further runs together; `None` where no schedule keeps to the limit while
    /// some operator runs for the first time.
    pub ns: Option<u64>,
    /// The operator at whose first run this is proved; `None` where nothing is.
    pub operator: Option<OperatorId>,
    /// The operators that run again in a choice that is made for that moment alone, and that takes
    /// little more time than `ns`.
    pub again: Vec<OperatorId>,
}

/// The least time of further runs of all schedules that never have more than `limit_bytes` live,
/// persistent tensors included. A watch that stops it makes it weaker.
pub(crate) fn least_extra_ns(repeats: &Repeats, limit_bytes: u64, watch: &Watch) -> LeastTime {
    let mut best = Best { ns: Some(0), operator: None, again: Vec::new() };
    // What was proved until then holds.
    let _ = raise(repeats, limit_bytes, &mut best, watch);
    let id = |op| repeats.problem.operator_id(op);
    LeastTime { ns: best.ns, operator: best.operator.map(id), again: best.again.into_iter().map(id).collect() }
}

/// As [`LeastTime`], by program position.
struct Best {
    ns: Option<u64>,
    operator: Option<Op>,
    again: Vec<Op>,
}

/// Raises what is proved by what holds while single operators run; the time is `None` once no
/// schedule keeps to the limit.
fn raise(repeats: &Repeats, limit_bytes: u64, best: &mut Best, watch: &Watch) -> Result<(), Stop> {
    let (ends, at) = at_the_ends(repeats);
    let Some(limit) = limit_bytes.checked_sub(repeats.persistent_bytes).filter(|&limit| ends <= limit) else {
        (best.ns, best.operator) = (None, at);
        return Ok(());
    };
    let live = Profile::new(&repeats.problem, &repeats.problem.program_order()).live;
    let mut outlooks = outlooks_at(repeats, &live, watch)?;
    // The most time is to be expected where the most bytes would have to be given up.
    let needed = |outlook: &Outlook| outlook.bytes + outlook.keep_all;
    outlooks.retain(|(_, outlook)| needed(outlook) > limit);
    outlooks.sort_by_key(|(op, outlook)| (Reverse(outlook.promise()), *op));
    let mut work = CUTS_WORK;
    let mut in_vain = 0;
    let mut found = Vec::new();
    for (op, _) in outlooks {
        if in_vain == MOST_IN_VAIN || work == 0 {
            break;
        }
        in_vain += 1;
        let moment = Moment::new(repeats, op);
        let Some(least) = moment.least_ns(limit, &[], &mut work, watch)? else {
            (best.ns, best.operator) = (None, Some(op));
            return Ok(());
        };
        if Some(least.ns) > best.ns {
            (best.ns, best.operator) = (Some(least.ns), Some(op));
            in_vain = 0;
        }
        found.push((op, moment, least));
    }
    found.sort_by_key(|(op, _, least)| (Reverse(least.ns), *op));
    let mut work = DIVIDING_WORK;
    for (op, moment, least) in found.into_iter().take(MOST_DIVIDED) {
        let (ns, again) = moment.divide(limit, least, MOST_CASES, &mut work, watch)?;
        if Some(ns) > best.ns {
            (best.ns, best.operator) = (Some(ns), Some(op));
        }
        if best.operator == Some(op) {
            best.again = again;
        }
    }
    Ok(())
}
