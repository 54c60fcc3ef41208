//! The floor: bytes that no schedule does without, however often operators run again.

use super::makings::Held;
use super::moment::{CUTS_WORK, Moment, outlooks_at};
use super::repeats::Repeats;
use crate::control::{Stop, Watch};
use crate::graph::{OperatorId, Residency};
use crate::problem::Op;
use std::cmp::Reverse;

/// What every schedule needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Floor {
    /// Live at once in every schedule, persistent tensors included.
    pub bytes: u64,
    /// The operator at whose first run these bytes are live, or before it, while what it uses is
    /// made; `None` in a graph without operators.
    pub operator: Option<OperatorId>,
}

/// Bytes that every schedule has live at once, whatever runs again, in whatever order,
/// with whatever reuse and layout. A watch that stops it makes it weaker.
pub(crate) fn floor(repeats: &Repeats, watch: &Watch) -> Floor {
    let mut best = at_the_ends(repeats);
    // What was proved until then holds.
    let _ = raise(repeats, &mut best, watch);
    let operator = best.1.map(|op| repeats.problem.operator_id(op));
    Floor { bytes: best.0 + repeats.persistent_bytes, operator }
}

/// All that enters, which is live when the first operator runs, or all that leaves, which is live
/// when the last one runs, persistent tensors left out; with that operator.
pub(super) fn at_the_ends(repeats: &Repeats) -> (u64, Option<Op>) {
    let problem = &repeats.problem;
    let total = |residency: Residency| -> u64 {
        problem.tensors.iter().filter(|item| item.residency == residency).map(|item| item.size).sum()
    };
    let last = problem.len().checked_sub(1).map(|last| last as Op);
    let (enters, leaves) = (total(Residency::Enters), total(Residency::Leaves));
    if enters >= leaves { (enters, last.map(|_| 0)) } else { (leaves, last) }
}

/// Per round, before how many moments every schedule is looked at, and at how many earlier moments
/// for each of these.
const ROUNDS: [(usize, usize); 3] = [(256, 200), (48, 1000), (12, 5000)];
/// Tensors looked at for that.
const MAKINGS_WORK: u64 = 5_000_000;

/// Raises what is proved by what holds while single operators run, and before they run.
fn raise(repeats: &Repeats, best: &mut (u64, Option<Op>), watch: &Watch) -> Result<(), Stop> {
    let mut outlooks = outlooks_at(repeats, &repeats.most_single_bytes(), watch)?;
    outlooks.sort_by_key(|(op, outlook)| (Reverse(outlook.most_floor()), *op));
    let mut work = CUTS_WORK;
    for (op, outlook) in &outlooks {
        if outlook.most_floor() <= best.0 || work == 0 {
            break;
        }
        let bytes = Moment::new(repeats, *op).floor(&mut work, watch)?;
        if bytes > best.0 {
            *best = (bytes, Some(*op));
        }
    }
    outlooks.sort_by_key(|(op, outlook)| (Reverse(outlook.bytes), *op));
    let held = outlooks.iter().take(ROUNDS[0].0).map(|(op, _)| {
        let moment = Moment::new(repeats, *op);
        (0, Held::new(repeats, *op, moment.outlook.bytes, &moment.held))
    });
    let mut held: Vec<(u64, Held)> = held.collect();
    let mut work = MAKINGS_WORK;
    for (operators, moments) in ROUNDS {
        held.truncate(operators);
        for (bytes, held) in &mut held {
            *bytes = held.before(repeats, best.0, moments, &mut work, watch)?;
            if *bytes > best.0 {
                *best = (*bytes, Some(held.op));
            }
        }
        held.sort_by_key(|(bytes, held)| (Reverse(*bytes), held.op));
    }
    Ok(())
}
