//! Bounds that ask more than a single cut: [`probe`] supposes an order with a lower peak than a known
//! one, derives on which side of an operator others must lie, and cuts again.

use super::cut::{BATCH, Cut, Side, cut_between, fix, least_between, sides, touched};
use crate::control::{Stop, Watch};
use crate::plan::BoundRoute;
use crate::problem::{Op, Problem, step_by_operator};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Operators that one bound may probe.
const MOST_PROBES: usize = 64;
/// Operators that are probed together. With 16, one of 19 plans is 1.2 % larger and not proved
/// (`benches/constants.py`).
const MOST_JOINT: usize = 64;
/// Operators looked at, over all probes of one bound; very large graphs get fewer.
const PROBE_WORK: usize = 1_500_000;
/// Probes in a row that may ask in vain whether a limit is broken.
pub(super) const MOST_UNDER_LIMIT: usize = 64;

/// Operators, tensors and arcs that probing may still look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) alone: u64,
    /// For probing operators together, where the target is a falling one.
    pub(super) jointly: u64,
    /// How many more probes in a row may ask about the limit in vain.
    pub(super) under_limit: usize,
}

impl Work {
    /// As much as is wanted.
    pub(crate) const UNLIMITED: Work = Work { alone: u64::MAX, jointly: u64::MAX, under_limit: usize::MAX };
}

/// A further condition that orders must meet: the most bytes that may be live in another problem
/// with the same constraints, such as the one in which all tensors have a size.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) problem: Arc<Problem>,
    pub(crate) peak: u64,
}

/// A peak below which some order is supposed to stay.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// This one.
    Firm(u64),
    /// This one, or the highest below it from which something follows.
    Falling(u64),
}

/// A bound that asks more than a single cut: it assumes that some order has a peak below `target`,
/// the peak of `order`, and draws conclusions.
///
/// Where the cut at `op` wants an operator on the other side of `op` than `order` has it, that
/// operator is probed: if with it there its own cut reaches the target, no order below the target
/// has it there, and it is fixed on its present side. Then the cut is made anew. The result, at
/// most the target, bounds every order; its sets are what an order below the target could still
/// pass.
///
/// Where no probe reaches a falling target, it falls to the highest that one of them reaches, or
/// several together, as long as that is above the cut.
///
/// What the probes look at is counted off `work`; when that is used up, no more are made.
///
/// Under a limit it bounds only the orders that keep to it: operators are fixed where they would
/// break it, too.
pub(crate) fn probe(
    problem: &Problem,
    limit: Option<&Limit>,
    op: Op,
    order: &[Op],
    target: Target,
    work: &mut Work,
    watch: &Watch,
) -> Result<Cut, Stop> {
    let (mut target, falls) = match target {
        Target::Firm(peak) => (peak, false),
        Target::Falling(peak) => (peak, true),
    };
    let step = step_by_operator(order);
    let distance = |other: Op| step[other as usize].abs_diff(step[op as usize]);
    let mut side = sides(problem, op);
    let mut left = (PROBE_WORK / problem.len().max(1)).clamp(BATCH, MOST_PROBES);
    let mut route = BoundRoute::Cut;
    // Per operator and side what its probes reached.
    let mut reached: BTreeMap<(Op, bool), u64> = BTreeMap::new();
    loop {
        let mut cut = Cut { route, ..cut_between(problem, op, &side, watch)? };
        work.alone = work.alone.saturating_sub(cut.work);
        cut.bytes = cut.bytes.min(target);
        let Some(done) = cut.done.first().filter(|_| cut.bytes < target) else { return Ok(cut) };
        let mut moved: Vec<Op> = (0..problem.len() as Op)
            .filter(|&other| side[other as usize] == Side::Free)
            .filter(|&other| done[other as usize] != (step[other as usize] < step[op as usize]))
            .collect();
        moved.sort_by_cached_key(|&other| (Reverse(touched(problem, other)), distance(other), other));
        let mut fixed = false;
        for batch in moved.chunks(BATCH) {
            if fixed || left < batch.len() || work.alone == 0 {
                break;
            }
            left -= batch.len();
            let limit = limit.filter(|_| work.under_limit > 0);
            let needs: Vec<Need> = batch
                .par_iter()
                .map(|&other| {
                    let probed = Probed { op, earlier: done[other as usize], side: &side, known: target };
                    probed.least(problem, limit, other, &[], watch)
                })
                .collect::<Result<_, _>>()?;
            work.alone = work.alone.saturating_sub(needs.iter().map(|need| need.work).sum());
            for (&other, &Need { bytes, breaks_limit, .. }) in batch.iter().zip(&needs) {
                match breaks_limit {
                    Some(true) => work.under_limit = work.under_limit.max(MOST_UNDER_LIMIT),
                    Some(false) => work.under_limit = work.under_limit.saturating_sub(1),
                    None => {}
                }
                reached.insert((other, done[other as usize]), bytes);
                if bytes >= target {
                    let stays = if done[other as usize] { Side::After } else { Side::Before };
                    fix(other, stays, problem, &mut side);
                    fixed = true;
                }
            }
        }
        if !fixed {
            if !falls {
                return Ok(cut);
            }
            let highest = moved
                .iter()
                .filter_map(|&other| Some((*reached.get(&(other, done[other as usize]))?, Reverse(other))))
                .max()
                .filter(|&(bytes, _)| bytes > cut.bytes);
            let mut next = highest.map(|(bytes, Reverse(other))| (bytes, vec![other]));
            for earlier in [true, false] {
                let known = next.as_ref().map_or(cut.bytes, |&(bytes, _)| bytes);
                let set: Vec<Op> =
                    moved.iter().copied().filter(|&other| done[other as usize] == earlier).take(MOST_JOINT).collect();
                let probed = Probed { op, earlier, side: &side, known: target };
                let limit = limit.filter(|_| work.under_limit > 0);
                if let Some(better) = probed.jointly(problem, limit, set, known, &mut work.jointly, watch)? {
                    next = Some(better);
                }
            }
            let Some((bytes, others)) = next else { return Ok(cut) };
            target = target.min(bytes);
            for other in others {
                let stays = if done[other as usize] { Side::After } else { Side::Before };
                fix(other, stays, problem, &mut side);
            }
        }
        route = BoundRoute::Probe;
    }
}

/// The supposition that other operators run earlier (or later) than `op`.
struct Probed<'a> {
    op: Op,
    earlier: bool,
    side: &'a [Side],
    /// Bytes beyond which nobody asks how much is needed.
    known: u64,
}

/// What a probe found out.
struct Need {
    /// The least that can be live; [`Probed::known`] where the limit is broken.
    bytes: u64,
    /// Operators, tensors and arcs that were looked at.
    work: u64,
    /// Whether the limit is broken; `None` where that was not asked.
    breaks_limit: Option<bool>,
}

impl Probed<'_> {
    /// What is needed while `other` runs, if those of `set` that are still free run even later than
    /// that (or earlier).
    fn least(
        &self,
        problem: &Problem,
        limit: Option<&Limit>,
        other: Op,
        set: &[Op],
        watch: &Watch,
    ) -> Result<Need, Stop> {
        let Probed { op, earlier, side, known } = *self;
        let mut across = sides_across(problem, op, other, earlier, side);
        let (near, far) = if earlier { (Side::Before, Side::After) } else { (Side::After, Side::Before) };
        for &member in set.iter().filter(|&&member| member != other) {
            if across[member as usize] == near {
                // `other` is never the first (or last) of the set.
                return Ok(Need { bytes: known, work: 0, breaks_limit: None });
            }
            if across[member as usize] == Side::Free {
                fix(member, far, problem, &mut across);
            }
        }
        let least = least_between(problem, other, &across, watch)?;
        let (bytes, mut work) = (least.bytes, least.cost(problem));
        let mut breaks_limit = None;
        if let (true, Some(Limit { problem, peak })) = (bytes < known, limit) {
            // The limit holds where the other operator runs, and where this one does.
            let mut moved = side.to_vec();
            fix(other, near, problem, &mut moved);
            for (at, side) in [(op, &moved), (other, &across)] {
                if breaks_limit != Some(true) {
                    let cut = least_between(problem, at, side, watch)?;
                    work += cut.cost(problem);
                    breaks_limit = Some(cut.bytes > *peak);
                }
            }
        }
        Ok(Need { bytes: if breaks_limit == Some(true) { known } else { bytes }, work, breaks_limit })
    }

    /// The subset of `set` whose first (or last) operator to run needs the most, and how much that
    /// needs at least; `None` where that is no more than `least`.
    fn jointly(
        &self,
        problem: &Problem,
        limit: Option<&Limit>,
        mut set: Vec<Op>,
        mut least: u64,
        work: &mut u64,
        watch: &Watch,
    ) -> Result<Option<(u64, Vec<Op>)>, Stop> {
        let mut best = None;
        while !set.is_empty() && *work > 0 {
            let mut needs: Vec<Need> = Vec::with_capacity(set.len());
            // A set that is begun is finished, except in large graphs, where one of its cuts takes
            // long.
            for batch in set.chunks(if problem.is_large() { BATCH } else { set.len() }) {
                if *work == 0 {
                    return Ok(best);
                }
                let least = |&other: &Op| self.least(problem, limit, other, &set, watch);
                needs.extend(batch.par_iter().map(least).collect::<Result<Vec<_>, _>>()?);
                let looked_at = needs[needs.len() - batch.len()..].iter().map(|need| need.work).sum();
                *work = work.saturating_sub(looked_at);
            }
            let lowest = needs.iter().map(|need| need.bytes).min().unwrap_or(0);
            if lowest > least {
                least = lowest;
                best = Some((lowest, set.clone()));
            }
            // Without these operators, the others need no more than before.
            let mut needs = needs.iter();
            set.retain(|_| needs.next().is_some_and(|need| need.bytes > least));
        }
        Ok(best)
    }
}

/// What runs before and after `other` if it runs earlier (or later) than `op`, whose own sides are
/// given.
fn sides_across(problem: &Problem, op: Op, other: Op, earlier: bool, side: &[Side]) -> Vec<Side> {
    let mut across = sides(problem, other);
    // If `other` runs before `op`, then also before all that runs after `op`, and the other way
    // round.
    let shared = if earlier { Side::After } else { Side::Before };
    for (at, known) in across.iter_mut().enumerate() {
        if at as Op != other && (at as Op == op || side[at] == shared) {
            *known = shared;
        }
    }
    across
}

#[cfg(test)]
mod tests {
    use super::super::cut::cut;
    use super::*;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Residency, Tensor, TensorId};

    /// Two gradients of 6 bytes wait in pieces of 4 while an activation of 20 is there.
    #[test]
    fn one_of_several_probed_operators_runs_first() {
        let mut builder = GraphBuilder::new("", "cpu", 1);
        let mut tensor = |size_bytes| {
            let (name, kind, residency) = (String::new(), Kind::Temporary, Residency::StepLocal);
            builder.tensor(Tensor { name, size_bytes, kind, residency, alignment_bytes: 0 }).expect("few")
        };
        let [activation, back, piece, other_piece, gradient, other_gradient] = [20, 3, 4, 4, 6, 6].map(&mut tensor);
        let calls: [(&[TensorId], &[TensorId]); 6] = [
            (&[], &[activation, piece, other_piece]),
            (&[activation], &[back]),
            (&[piece], &[gradient]),
            (&[gradient], &[]),
            (&[other_piece], &[other_gradient]),
            (&[other_gradient], &[]),
        ];
        for (position, (reads, creates)) in calls.into_iter().enumerate() {
            let (reads, creates) = (reads.to_vec(), creates.to_vec());
            let operator = Operator { reads, creates, ..Operator::new("", position as u32, Phase::Backward) };
            builder.operator(operator).expect("few");
        }
        let problem = Problem::new(&builder.build().expect("valid"), false);
        let watch = Watch::default();
        let order = problem.program_order();
        let peak = crate::liveness::Profile::new(&problem, &order).peak;
        let probed = |jointly| {
            let mut work = Work { jointly, ..Work::UNLIMITED };
            let found = probe(&problem, None, 1, &order, Target::Falling(peak), &mut work, &watch);
            found.expect("not stopped").bytes
        };
        // While operator 1 runs, either gradient may be done with: 20 + 3 and what is left of the
        // pieces.
        assert_eq!(cut(&problem, 1, &watch).expect("not stopped"), 23);
        // The second may be made early if the first is gone: 20 + 4 + 6. But one of them is the
        // first: 20 + 4 + 4 + 6.
        assert_eq!((probed(0), probed(u64::MAX), peak), (30, 31, 31));
    }
}
