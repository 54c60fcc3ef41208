//! Peak-driven refinement: let the order pass the minimum cut at its peak.
//!
//! The cut at an operator says which operators should have run before it, so that the fewest bytes
//! are live when it runs. Two ways to use it:
//!
//! - *split* an order: run what the cut says first, then the operator, then the others, each part
//!   in its old order. At that operator no order has fewer live bytes; the new order is kept if it
//!   is better as a whole.
//! - *stage* the list scheduler: let it begin anew, but not pass the operator before the cut's set
//!   is done, nor anything else before the operator. The new schedule's peak gives the next cut,
//!   within the stages made so far, and so on.
//!
//! docs/explanation/theory.md shows that both respect every constraint.

use super::list::{self, Preference, Start};
use crate::bound::{self, Bounds, Cut, Limit, Target};
use crate::control::{Stop, Watch};
use crate::liveness::Profile;
use crate::problem::{Op, Problem};
use crate::tolerance::is_within;
use std::cmp::Reverse;

/// Splits tried on one order; each makes one cut and two profiles.
const MOST_SPLITS: usize = 24;
/// Cuts by which the scheduler is staged; each makes one cut and two schedules.
const MOST_STAGES: usize = 16;
/// Operators probed along the peak of one order.
const MOST_PROBED: usize = 16;
/// Operators looked at, over all rounds; very large graphs get fewer rounds.
const WORK: usize = 500_000;

/// How many rounds are affordable, where one round's work grows with the problem.
pub(super) fn rounds(problem: &Problem, most: usize) -> usize {
    (WORK / problem.len().max(1)).clamp(1, most)
}

/// Where the peak is to be lowered, and what must be kept meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Aim<'a> {
    pub(crate) problem: &'a Problem,
    pub(crate) limit: Option<&'a Limit>,
}

impl Aim<'_> {
    pub(crate) fn allows(&self, order: &[Op]) -> bool {
        self.limit.is_none_or(|limit| Profile::new(&limit.problem, order).peak <= limit.peak)
    }
}

/// An order and what it costs.
#[derive(Clone, Debug)]
pub(crate) struct Ordered {
    pub(crate) order: Vec<Op>,
    pub(crate) profile: Profile,
}

impl Ordered {
    pub(super) fn new(problem: &Problem, order: Vec<Op>) -> Self {
        debug_assert!(problem.is_valid_order(&order));
        let profile = Profile::new(problem, &order);
        Ordered { order, profile }
    }

    /// Better orders have smaller scores.
    fn score(&self, bound: u64) -> (u64, u64, u128) {
        let excess = self.profile.live.iter().map(|&live| u128::from(live.saturating_sub(bound))).sum();
        (self.profile.least_total(), self.profile.peak, excess)
    }

    /// The first operator at the peak.
    fn peak_operator(&self) -> Option<Op> {
        let highest = (0..self.order.len()).min_by_key(|&step| (Reverse(self.profile.live[step]), step));
        highest.map(|step| self.order[step])
    }

    /// The cut at the peak; `None` where it shows that no order has a lower peak.
    fn cut(&self, aim: &Aim, bounds: &mut Bounds, watch: &Watch) -> Result<Option<(Op, Cut)>, Stop> {
        let Some(op) = self.peak_operator() else { return Ok(None) };
        let cut = self.probe(aim.problem, None, op, bounds, watch)?;
        bounds.record(op, cut.bytes, cut.route);
        Ok((cut.bytes < self.profile.peak).then_some((op, cut)))
    }

    /// What is known about orders that have a lower peak and keep to the limit.
    fn probe(
        &self,
        problem: &Problem,
        limit: Option<&Limit>,
        op: Op,
        bounds: &mut Bounds,
        watch: &Watch,
    ) -> Result<Cut, Stop> {
        let target = Target::Firm(self.profile.peak);
        bound::probe(problem, limit, op, &self.order, target, &mut bounds.probe_work, watch)
    }

    /// The best order that passes one of the cut's sets right before the operator, if it is better
    /// than this one.
    fn split_at(&self, aim: &Aim, op: Op, cut: &Cut, bound: u64) -> Option<Ordered> {
        let parted = cut.done.iter().map(|done| {
            let first = self.order.iter().filter(|&&other| done[other as usize]);
            let rest = self.order.iter().filter(|&&other| !done[other as usize] && other != op);
            Ordered::new(aim.problem, first.chain([&op]).chain(rest).copied().collect())
        });
        let allowed = parted.filter(|ordered| aim.allows(&ordered.order));
        allowed.min_by_key(|ordered| ordered.score(bound)).filter(|best| best.score(bound) < self.score(bound))
    }
}

/// Splits the order at its peaks as long as it becomes better. The cuts go into `bounds`, which
/// hold within the limit only.
pub(crate) fn split(aim: Aim, mut best: Ordered, bounds: &mut Bounds, watch: &Watch) -> Result<Ordered, Stop> {
    for _ in 0..rounds(aim.problem, MOST_SPLITS) {
        let Some((op, cut)) = best.cut(&aim, bounds, watch)? else { break };
        let (bound, _) = bounds.best();
        let mut better = best.split_at(&aim, op, &cut, bound);
        if better.is_none() && aim.limit.is_some() {
            let cut = best.probe(aim.problem, aim.limit, op, bounds, watch)?;
            bounds.record(op, cut.bytes, cut.route);
            better = best.split_at(&aim, op, &cut, bound);
        }
        match better {
            Some(better) => best = better,
            None => break,
        }
    }
    Ok(best)
}

/// Probes operators that lie far apart at the order's peak, with falling targets, and splits the
/// order there as long as it becomes better. What is proved goes into `bounds`.
pub(crate) fn probe_peaks(aim: Aim, mut best: Ordered, bounds: &mut Bounds, watch: &Watch) -> Result<Ordered, Stop> {
    let mut left = rounds(aim.problem, MOST_PROBED);
    'orders: loop {
        let peak = best.profile.peak;
        let steps: Vec<usize> =
            (0..best.order.len()).filter(|&step| is_within(peak, best.profile.live[step])).collect();
        for step in spread(&steps) {
            if left == 0 || bounds.falling_work.alone == 0 || is_within(peak, bounds.best().0) {
                break 'orders;
            }
            left -= 1;
            let op = best.order[step];
            let (target, work) = (Target::Falling(peak), &mut bounds.falling_work);
            let cut = bound::probe(aim.problem, aim.limit, op, &best.order, target, work, watch)?;
            bounds.record(op, cut.bytes, cut.route);
            if let Some(better) = best.split_at(&aim, op, &cut, bounds.best().0) {
                best = better;
                continue 'orders;
            }
        }
        break;
    }
    Ok(best)
}

/// The items, first the middle one, then the middle of either half, and so on.
fn spread(items: &[usize]) -> impl Iterator<Item = usize> + '_ {
    let halvings = (0..usize::BITS).take_while(|&level| items.len() >> level > 0);
    let places = halvings
        .flat_map(move |level| (0..1usize << level).map(move |part| (2 * part + 1) * items.len() / (2usize << level)));
    places.map(|place| items[place])
}

/// The best schedule found in stages. The cuts go into `bounds`.
pub(crate) fn stage(aim: Aim, bounds: &mut Bounds, watch: &Watch) -> Result<Option<Ordered>, Stop> {
    let problem = aim.problem;
    let mut best: Option<Ordered> = None;
    // The smallest of the sets that attain a cut, then the largest.
    for which in 0..2 {
        let mut stages = vec![0u32; problem.len()];
        for _ in 0..rounds(problem, MOST_STAGES) {
            let (bound, _) = bounds.best();
            let start = Start { ceiling: bound, stages: &stages };
            let mut found: Option<Ordered> = None;
            for preference in [Preference::LeastLive, Preference::ProgramOrder] {
                let ordered = Ordered::new(problem, list::schedule(problem, preference, start, watch)?);
                if found.as_ref().is_none_or(|other| ordered.score(bound) < other.score(bound)) {
                    found = Some(ordered);
                }
            }
            let Some(found) = found else { break };
            let is_better = best.as_ref().is_none_or(|best| found.score(bound) < best.score(bound));
            if is_better && aim.allows(&found.order) {
                best = Some(found.clone());
            }
            let Some((op, cut)) = found.cut(&aim, bounds, watch)? else { return Ok(best) };
            // Where stages have not helped, further ones seldom do.
            if problem.is_large() && !is_better && bounds.best().0 == bound {
                break;
            }
            let Some(done) = cut.done.get(which) else { break };
            if !insert(&mut stages, op, done) {
                break;
            }
        }
    }
    Ok(best)
}

/// Divides the operator's stage into what is done, the operator itself, and the rest. Returns
/// whether that changes anything: an operator is alone in its stage once it has been inserted.
fn insert(stages: &mut [u32], op: Op, done: &[bool]) -> bool {
    let divided = stages[op as usize];
    let mut alone = true;
    for (other, stage) in stages.iter_mut().enumerate() {
        if *stage > divided {
            *stage += 2;
        } else if *stage == divided && other != op as usize {
            alone = false;
            *stage += if done[other] { 0 } else { 2 };
        }
    }
    stages[op as usize] = divided + 1;
    !alone
}
