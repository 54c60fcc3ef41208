//! The lower bound: what must be live when one operator runs, whatever the order.
//!
//! When operator v runs, the operators already done form a down-set that holds v's ancestors and
//! neither v nor its descendants. Live are the tensors that cross this set, v's outputs and its
//! workspace. The least such set is a minimum cut (docs/explanation/theory.md has the network and
//! the proofs, with reuse, with tensors that enter or leave the step). Every cut bounds the peak of
//! every order.
//!
//! [`probe`] goes further: supposing an order with a lower peak than a known one, it derives on
//! which side of v other operators must lie, and cuts again. [`Bounds::bound_first_of_set`] asks
//! which of several weight updates runs first: whichever it is, the others are still to come.

use super::flow::{self, INFINITE, Network};
use crate::control::{Stop, Watch};
use crate::graph::Residency;
use crate::liveness::largest_matching;
use crate::plan::BoundRoute;
use crate::problem::{Index, NONE, Op, Problem, Ten, step_by_operator};
use crate::tolerance::is_within;
use crate::update_phase::LONGEST_UPDATE;
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Arcs that one cut may look at.
const WORK_PER_CUT: u64 = 4_000_000;
/// Cuts that one inspection may make on a very large graph.
const FEWEST_CUTS: usize = 48;
/// Operators looked at, over all cuts of one inspection; small graphs get more cuts.
const INSPECT_WORK: usize = 1_000_000;
/// Operators, tensors, nodes and arcs looked at, networks built included, over all cuts of one
/// inspection. Graphs of some 100 000 operators reach it.
const ALL_CUTS_WORK: u64 = 250_000_000;
/// Operators that one bound may probe.
const MOST_PROBES: usize = 64;
/// Operators that are probed together. With 16, one of 19 plans is 1.2 % larger and not proved
/// (`benches/constants.py`).
const MOST_JOINT: usize = 64;
/// Operators looked at, over all probes of one bound; very large graphs get fewer.
const PROBE_WORK: usize = 1_500_000;
/// Operators, tensors and arcs looked at, over all probes for one problem.
const ALL_PROBES_WORK: u64 = 50_000_000;
/// The same with falling targets, for operators probed alone and for those probed together.
const FALLING_WORK: u64 = 200_000_000;
const JOINT_WORK: u64 = 100_000_000;
/// Probes in a row that may ask in vain whether a limit is broken.
const MOST_UNDER_LIMIT: usize = 64;
/// Cuts that comparing first updates may make for each other operator, and operators that they may
/// look at.
const MOST_IN_FIRST_SET: usize = 512;
const FIRST_OF_SET_WORK: usize = 2_000_000;
/// Sets of them in a row that may prove nothing new.
const MOST_IN_VAIN: usize = 16;
/// Cuts made side by side; fixed, so that plans do not depend on the number of threads.
const BATCH: usize = 8;
/// Inputs up to which every choice of reuse is cut on its own.
const MOST_CHOICES: usize = 4;

/// The least that can be live while one operator runs.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    pub(crate) bytes: u64,
    /// Whether other operators had to be probed for it.
    pub(crate) route: BoundRoute,
    /// Sets of operators that would have run before, each attaining the cut, or nearly where the
    /// search for it was cut short: the smallest and the largest.
    pub(crate) done: Vec<Vec<bool>>,
    /// How many operators, tensors and arcs were looked at.
    pub(crate) work: u64,
}

/// What is proved about all orders, by operator.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    proved: BTreeMap<Op, (u64, BoundRoute)>,
    /// What one operator needs for itself, what enters or what leaves the step: bounds that cost
    /// nothing.
    floor: Option<(Op, u64)>,
    /// What probing may still look at.
    pub(crate) probe_work: Work,
    /// The same for falling targets.
    pub(crate) falling_work: Work,
}

/// Operators, tensors and arcs that probing may still look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) alone: u64,
    /// Where a target falls and operators are probed together.
    jointly: u64,
    /// How many more probes in a row may ask about the limit in vain.
    under_limit: usize,
}

impl Work {
    /// As much as is wanted.
    pub(crate) const UNLIMITED: Work = Work { alone: u64::MAX, jointly: u64::MAX, under_limit: usize::MAX };
}

impl Bounds {
    /// Begins with the operator whose own inputs, outputs and workspace, less all it may reuse, are
    /// the most; or with all that enters, which is live when the first operator runs, used or not;
    /// or with all that leaves, which is live when the last one runs.
    pub(crate) fn new(problem: &Problem) -> Self {
        let own = |op: Op| {
            let inputs: u64 = problem.uses.row(op).iter().map(|&tensor| problem.size(tensor)).sum();
            let pairs: Vec<(Ten, Ten)> = problem.permissions(op).iter().map(|&(_, i, o)| (i, o)).collect();
            let saved: u64 = largest_matching(&pairs).iter().map(|&(input, _)| problem.size(input)).sum();
            inputs + problem.transient(op) - saved
        };
        let total = |residency: Residency| -> u64 {
            problem.tensors.iter().filter(|item| item.residency == residency).map(|item| item.size).sum()
        };
        let (entering, leaving) = (total(Residency::Enters), total(Residency::Leaves));
        let floor = (0..problem.len() as Op)
            .map(|op| {
                let at_begin = if op == 0 { entering } else { 0 };
                let at_end = if op as usize + 1 == problem.len() { leaving } else { 0 };
                (op, own(op).max(at_begin).max(at_end))
            })
            .max_by_key(|&(op, bytes)| (bytes, Reverse(op)));
        let probe_work = Work { alone: ALL_PROBES_WORK, jointly: 0, under_limit: usize::MAX };
        let [alone, jointly] = [FALLING_WORK, JOINT_WORK].map(|work| problem.share_if_large(work));
        let falling_work = Work { alone, jointly, under_limit: MOST_UNDER_LIMIT };
        Bounds { proved: BTreeMap::new(), floor, probe_work, falling_work }
    }

    /// The best bound so far and its operator.
    pub(crate) fn best(&self) -> (u64, Option<Op>) {
        match self.source() {
            Some((op, bytes, _)) => (bytes, Some(op)),
            None => (0, None),
        }
    }

    /// How the best bound so far was proved.
    pub(crate) fn route(&self) -> BoundRoute {
        self.source().map_or(BoundRoute::Floor, |(_, _, route)| route)
    }

    fn source(&self) -> Option<(Op, u64, BoundRoute)> {
        let floor = self.floor.map(|(op, bytes)| (op, bytes, BoundRoute::Floor));
        let proved = self.proved.iter().map(|(&op, &(bytes, route))| (op, bytes, route));
        // The first operator in program order wins ties, and what needed no proof.
        floor.into_iter().chain(proved).max_by_key(|&(op, bytes, route)| (bytes, Reverse(op), Reverse(route)))
    }

    /// Notes that no order has a peak below `bytes`, which `op` reaches.
    pub(crate) fn record(&mut self, op: Op, bytes: u64, route: BoundRoute) {
        let known = self.proved.entry(op).or_insert((bytes, route));
        if bytes > known.0 {
            *known = (bytes, route);
        }
    }

    /// Looks at the operators by what is live in known orders while they run, highest first, until
    /// none of the others could give more than what is proved, or enough have been looked at.
    /// `least_live` says per operator the fewest bytes in any of these orders: no cut exceeds them,
    /// so the others need no look.
    pub(crate) fn inspect(&mut self, problem: &Problem, least_live: &[u64], watch: &Watch) -> Result<(), Stop> {
        let mut ops: Vec<Op> = (0..problem.len() as Op).filter(|op| !self.proved.contains_key(op)).collect();
        ops.sort_unstable_by_key(|&op| (Reverse(least_live[op as usize]), op));
        let mut ops = ops.into_iter().peekable();
        let mut pending = Vec::new();
        let most = (INSPECT_WORK / problem.len().max(1)).max(FEWEST_CUTS);
        let mut made = 0;
        let mut best = self.best().0;
        let mut batch = 1;
        let mut work = ALL_CUTS_WORK;
        while made < most && work > 0 {
            pending.clear();
            while pending.len() < batch.min(most - made) {
                match ops.next_if(|&op| least_live[op as usize] > best) {
                    Some(op) => pending.push(op),
                    None => break,
                }
            }
            if pending.is_empty() {
                break;
            }
            // Networks are large: none is kept.
            let cut = |&op: &Op| {
                let least = least_between(problem, op, &sides(problem, op), watch)?;
                Ok((least.bytes, least.work + least.built))
            };
            let cuts: Vec<(u64, u64)> = pending.par_iter().map(cut).collect::<Result<_, _>>()?;
            for (&op, (bytes, used)) in pending.iter().zip(cuts) {
                best = best.max(bytes);
                self.record(op, bytes, BoundRoute::Cut);
                work = work.saturating_sub(used);
            }
            made += pending.len();
            batch = (2 * batch).min(BATCH);
        }
        Ok(())
    }
}

impl Bounds {
    /// Of any set of operators one runs first, while all the others are still to come; so the least
    /// over the set of the cuts at each of them, with the others on the far side, bounds every
    /// order. The sets looked at are the weight updates that need the most by themselves, ever more
    /// of them: where gradients pile up faster than activations die, one has to run while both are
    /// there. Then the same together with each of `others`: either one of the updates runs before
    /// it, or it finds all their gradients.
    ///
    /// Sets are given up once they cannot raise the bound, and none is needed beyond `peak`, the
    /// lowest known.
    pub(crate) fn bound_first_of_set(
        &mut self,
        problem: &Problem,
        updates: &[Vec<Op>],
        others: &[Op],
        peak: u64,
        watch: &Watch,
    ) -> Result<(), Stop> {
        let most = (FIRST_OF_SET_WORK / problem.len().max(1)).min(MOST_IN_FIRST_SET);
        let updates = largest_working_sets(problem, updates, most, watch)?;
        for other in std::iter::once(None).chain(others.iter().copied().map(Some)) {
            if is_within(peak, self.best().0) {
                break;
            }
            self.grow_first_of_set(problem, &updates, other, most, peak, watch)?;
        }
        Ok(())
    }

    /// The same with at most `most` cuts.
    fn grow_first_of_set(
        &mut self,
        problem: &Problem,
        updates: &[(Op, u64)],
        other: Option<Op>,
        mut most: usize,
        peak: u64,
        watch: &Watch,
    ) -> Result<(), Stop> {
        let side = other.map(|other| sides(problem, other));
        let is_later = |op: Op| side.as_ref().is_some_and(|side| side[op as usize] == Side::After);
        let updates: Vec<(Op, u64)> = updates.iter().copied().filter(|&(op, _)| !is_later(op)).collect();
        let mut set: Vec<Op> = other.into_iter().collect();
        let mut in_vain = 0;
        for next in updates.chunk_by(|(_, one), (_, other)| one == other) {
            set.extend(next.iter().map(|&(op, _)| op));
            let best = self.best().0;
            if best >= peak || most < set.len() || in_vain == MOST_IN_VAIN {
                break;
            }
            most -= set.len();
            match least_first(problem, &set, best, watch)? {
                Some((bytes, op)) => {
                    self.record(op, bytes.min(peak), BoundRoute::First);
                    in_vain = 0;
                }
                None => in_vain += 1,
            }
        }
        Ok(())
    }
}

/// The least that can be live while the first of the operators runs, and which that is; `None` once
/// it is no more than `known`.
fn least_first(problem: &Problem, set: &[Op], known: u64, watch: &Watch) -> Result<Option<(u64, Op)>, Stop> {
    let mut least: Option<(u64, Op)> = None;
    for batch in set.chunks(BATCH) {
        let cuts: Vec<Option<u64>> =
            batch.par_iter().map(|&op| cut_as_first(problem, op, set, watch)).collect::<Result<_, _>>()?;
        for (&op, bytes) in batch.iter().zip(cuts) {
            least = least.into_iter().chain(bytes.map(|bytes| (bytes, op))).min();
        }
        if least.is_some_and(|(bytes, _)| bytes <= known) {
            return Ok(None);
        }
    }
    Ok(least)
}

/// The least that can be live while `op` runs, if all others of the set are still to come; `None`
/// where one of them must come before.
fn cut_as_first(problem: &Problem, op: Op, set: &[Op], watch: &Watch) -> Result<Option<u64>, Stop> {
    let mut side = sides(problem, op);
    for &other in set {
        match side[other as usize] {
            Side::Before => return Ok(None),
            Side::After => {}
            Side::Free => fix(other, Side::After, problem, &mut side),
        }
    }
    Ok(Some(least_between(problem, op, &side, watch)?.bytes))
}

/// Per update, given as its operators in program order, the one at which it needs the most, and the
/// bytes that this touches; the largest first. Updates of as many operators are taken to be alike,
/// so that only the largest of them need be looked into; where even that takes more than `most`
/// cuts, none are named.
fn largest_working_sets(
    problem: &Problem,
    updates: &[Vec<Op>],
    most: usize,
    watch: &Watch,
) -> Result<Vec<(Op, u64)>, Stop> {
    let size = |members: &[Op]| members.iter().map(|&op| touched(problem, op)).max().unwrap_or(0);
    let mut largest: BTreeMap<usize, &Vec<Op>> = BTreeMap::new();
    for members in updates.iter().filter(|members| members.len() <= LONGEST_UPDATE) {
        let known = largest.entry(members.len()).or_insert(members);
        if size(members) > size(known) {
            *known = members;
        }
    }
    if largest.keys().sum::<usize>() > most {
        return Ok(Vec::new());
    }
    let mut place = BTreeMap::new();
    for (length, members) in largest {
        let alone =
            members.par_iter().map(|&op| cut_alone(problem, op, members, watch)).collect::<Result<Vec<_>, _>>()?;
        place.insert(length, (0..length).max_by_key(|&at| (alone[at], Reverse(at))).unwrap_or(0));
    }
    let known = updates.iter().filter_map(|members| Some(members[*place.get(&members.len())?]));
    let mut found: Vec<(Op, u64)> = known.map(|op| (op, touched(problem, op))).collect();
    found.sort_unstable_by_key(|&(op, bytes)| (Reverse(bytes), op));
    Ok(found)
}

/// The least that can be live while `op` runs, if only its own update is still open and all else is
/// done.
fn cut_alone(problem: &Problem, op: Op, members: &[Op], watch: &Watch) -> Result<u64, Stop> {
    let mut side = vec![Side::Before; problem.len()];
    members.iter().for_each(|&member| side[member as usize] = Side::Free);
    spread(op, Side::Before, problem, &mut side);
    spread(op, Side::After, problem, &mut side);
    Ok(least_between(problem, op, &side, watch)?.bytes)
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Runs before in every order.
    Before,
    /// The operator itself, and what runs after it in every order.
    After,
    Free,
}

/// The least that can be live while `op` runs.
pub(crate) fn cut(problem: &Problem, op: Op, watch: &Watch) -> Result<u64, Stop> {
    Ok(least_between(problem, op, &sides(problem, op), watch)?.bytes)
}

/// The same if some operators are known to run before it and others after it.
pub(crate) fn cut_at(problem: &Problem, op: Op, side: &mut [Side], watch: &Watch) -> Result<Cut, Stop> {
    spread(op, Side::Before, problem, side);
    spread(op, Side::After, problem, side);
    cut_between(problem, op, side, watch)
}

/// What must run before an operator, and what after it.
fn sides(problem: &Problem, op: Op) -> Vec<Side> {
    let mut side = vec![Side::Free; problem.len()];
    spread(op, Side::Before, problem, &mut side);
    spread(op, Side::After, problem, &mut side);
    side
}

/// A condition that orders must meet besides: the most that may be live in another problem of the
/// same constraints, such as the one in which all tensors have a size.
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

/// Supposes that other operators run earlier (or later) than one whose sides are given.
struct Probed<'a> {
    op: Op,
    earlier: bool,
    side: &'a [Side],
    /// No more than this is asked for.
    known: u64,
}

struct Need {
    /// The least that can be live, no more than is asked for where the limit is broken.
    bytes: u64,
    /// What was looked at.
    work: u64,
    /// Where that was asked.
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
                // Never the first (or last) of them.
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

    /// Of the set those of which the first (or last) to run needs the most, and that; `None` where
    /// it is no more than `least`.
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
            // A set that is begun is finished, but where one of its cuts takes long.
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
            // The others need no more without these.
            let mut needs = needs.iter();
            set.retain(|_| needs.next().is_some_and(|need| need.bytes > least));
        }
        Ok(best)
    }
}

/// Puts the operator on one side, and with it what must be there too.
pub(crate) fn fix(op: Op, at: Side, problem: &Problem, side: &mut [Side]) {
    side[op as usize] = at;
    spread(op, at, problem, side);
}

/// Bytes of the operator's inputs, outputs and workspace.
pub(crate) fn touched(problem: &Problem, op: Op) -> u64 {
    problem.transient(op) + problem.uses.row(op).iter().map(|&tensor| problem.size(tensor)).sum::<u64>()
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

/// A cut whose sets have not been asked for.
struct Least {
    bytes: u64,
    /// Operators and tensors, and arcs that the flow looked at.
    work: u64,
    /// Nodes and arcs of the networks.
    built: u64,
    /// The flow, and per free operator its node; `None` where nothing was cut.
    solved: Option<(flow::Flow, Vec<u32>)>,
}

impl Least {
    /// What it counts against a budget. In large graphs that is all that was done for it; others
    /// are quick to build networks of.
    fn cost(&self, problem: &Problem) -> u64 {
        if problem.is_large() { self.work + self.built } else { self.work }
    }
}

/// The least that can be live while `op` runs, if what runs before and after it is as given, and
/// the sets.
fn cut_between(problem: &Problem, op: Op, side: &[Side], watch: &Watch) -> Result<Cut, Stop> {
    let least = least_between(problem, op, side, watch)?;
    let (bytes, work, solved) = (least.bytes, least.cost(problem), least.solved);
    let done = solved.map_or_else(Vec::new, |(flow, index)| {
        let set = |reached: Vec<bool>| {
            let is_done = |(at, &node): (&Side, &u32)| match at {
                Side::Before => true,
                Side::After => false,
                Side::Free => reached[node as usize],
            };
            side.iter().zip(&index).map(is_done).collect()
        };
        flow.sides().map(set).into()
    });
    Ok(Cut { bytes, route: BoundRoute::Cut, done, work })
}

/// The same without the sets.
fn least_between(problem: &Problem, op: Op, side: &[Side], watch: &Watch) -> Result<Least, Stop> {
    // An input can be reused only if no other user must come later.
    let pairs: Vec<(Ten, Ten)> = problem
        .permissions(op)
        .iter()
        .filter(|&&(_, input, _)| {
            problem.users.row(input).iter().all(|&user| user == op || side[user as usize] != Side::After)
        })
        .map(|&(_, input, output)| (input, output))
        .collect();
    let (choices, discount) = reuse_choices(problem, &pairs);

    let (mut work, mut built) = (WORK_PER_CUT, 0);
    let mut least = Least { bytes: 0, work: 0, built: 0, solved: None };
    for reused in &choices {
        let (network, index, fixed) = network(problem, op, side, reused);
        built += network.size();
        let flow = network.solve(&mut work, watch)?;
        let bytes = (fixed + flow.value + problem.transient(op)) - discount;
        if least.solved.is_none() || bytes < least.bytes {
            least = Least { bytes, solved: Some((flow, index)), ..least };
        }
    }
    least.work = (problem.len() + problem.tensors.len()) as u64 * choices.len() as u64 + (WORK_PER_CUT - work);
    least.built = built;
    Ok(least)
}

/// Marks all that must run before (or after) `op` too; for After `op` itself as well, which does
/// not belong to what has been done when it runs.
fn spread(op: Op, mark: Side, problem: &Problem, side: &mut [Side]) {
    let next = if mark == Side::Before { &problem.predecessors } else { &problem.successors };
    if mark == Side::After {
        side[op as usize] = mark;
    }
    let mut stack = vec![op];
    while let Some(at) = stack.pop() {
        for &to in next.row(at) {
            if side[to as usize] == Side::Free {
                side[to as usize] = mark;
                stack.push(to);
            }
        }
    }
}

/// The sets of inputs of which at least one holds all that are reused in the best case, and what
/// to take off the cut for reuse that the sets do not tell apart.
fn reuse_choices(problem: &Problem, pairs: &[(Ten, Ten)]) -> (Vec<Vec<Ten>>, u64) {
    let mut inputs: Vec<Ten> = pairs.iter().map(|&(input, _)| input).collect();
    inputs.dedup();
    let all = largest_matching(pairs);
    if all.len() == inputs.len() {
        return (vec![inputs], 0);
    }
    if inputs.len() > MOST_CHOICES {
        return (vec![Vec::new()], all.iter().map(|&(input, _)| problem.size(input)).sum());
    }
    let sets = (0u32..1 << inputs.len())
        .filter(|set| set.count_ones() as usize == all.len())
        .map(|set| (0..inputs.len()).filter(|i| set >> i & 1 != 0).map(|i| inputs[i]).collect::<Vec<_>>())
        .filter(|chosen| {
            let among: Vec<(Ten, Ten)> = pairs.iter().copied().filter(|(input, _)| chosen.contains(input)).collect();
            largest_matching(&among).len() == all.len()
        })
        .collect();
    (sets, 0)
}

/// The network whose minimum cut, added to the returned bytes, is what crosses the best down-set;
/// and the node of every free operator. The inputs in `reused`, sorted, count only if another user
/// is still to come: else an output takes their memory.
fn network(problem: &Problem, op: Op, side: &[Side], reused: &[Ten]) -> (Network, Vec<u32>, u64) {
    let mut network = Network::new();
    let mut index = vec![NONE; problem.len()];
    for (other, &at) in side.iter().enumerate() {
        if at == Side::Free {
            index[other] = network.add_node();
        }
    }
    let mut fixed = 0;
    for (tensor, item) in problem.tensors.iter().enumerate() {
        let creator = if item.creator == NONE { Side::Before } else { side[item.creator as usize] };
        if creator == Side::After {
            continue;
        }
        let forgives = reused.binary_search(&Ten::at(tensor)).is_ok();
        let users = problem.users.row(Ten::at(tensor)).iter().filter(|&&user| !(forgives && user == op));
        let must_cross =
            item.residency == Residency::Leaves || users.clone().any(|&user| side[user as usize] == Side::After);
        let from = if creator == Side::Before { flow::SOURCE } else { index[item.creator as usize] };
        if must_cross {
            if creator == Side::Before {
                fixed += item.size;
            } else {
                network.add_arc(from, flow::SINK, item.size, 0);
            }
            continue;
        }
        let mut free = users.filter(|&&user| side[user as usize] == Side::Free).peekable();
        let Some(&first) = free.next() else { continue };
        if free.peek().is_none() {
            network.add_arc(from, index[first as usize], item.size, 0);
        } else {
            let node = network.add_node();
            network.add_arc(from, node, item.size, 0);
            network.add_arc(node, index[first as usize], INFINITE, 0);
            for &user in free {
                network.add_arc(node, index[user as usize], INFINITE, 0);
            }
        }
    }
    for (other, &at) in side.iter().enumerate() {
        if at == Side::Free {
            for &before in problem.predecessors.row(other as u32) {
                if side[before as usize] == Side::Free {
                    network.add_arc(index[other], index[before as usize], INFINITE, 0);
                }
            }
        }
    }
    (network, index, fixed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Tensor, TensorId};

    /// Layers. Each forward operator makes bytes that its backward operator uses, which makes a
    /// gradient of 10; the update of a gradient holds two more pieces of 10 beside it. Operators of
    /// a pass follow each other through tokens without bytes.
    fn layers(activations: [u64; 3]) -> Problem {
        let mut builder = GraphBuilder::new("", "cpu", 1);
        let tensor = |builder: &mut GraphBuilder, size_bytes| {
            let (name, kind, residency) = (String::new(), Kind::Temporary, Residency::StepLocal);
            builder.tensor(Tensor { name, size_bytes, kind, residency, alignment_bytes: 0 }).expect("few")
        };
        let call = |builder: &mut GraphBuilder, phase, reads: &[TensorId], creates: &[TensorId]| {
            let position = builder.num_operators() as u32;
            let operator =
                Operator { reads: reads.to_vec(), creates: creates.to_vec(), ..Operator::new("", position, phase) };
            builder.operator(operator).expect("few");
        };
        let mut token: Vec<TensorId> = Vec::new();
        let mut saved = Vec::new();
        for bytes in activations {
            let (next, activation) = (tensor(&mut builder, 0), tensor(&mut builder, bytes));
            call(&mut builder, Phase::Forward, &token, &[next, activation]);
            token = vec![next];
            saved.push(activation);
        }
        for activation in saved.into_iter().rev() {
            let (next, gradient) = (tensor(&mut builder, 0), tensor(&mut builder, 10));
            let [one, other] = [0; 2].map(|_| tensor(&mut builder, 10));
            call(&mut builder, Phase::Backward, &[token[0], activation], &[next, gradient]);
            token = vec![next];
            call(&mut builder, Phase::Update, &[gradient], &[one]);
            call(&mut builder, Phase::Update, &[gradient, one], &[other]);
            call(&mut builder, Phase::Update, &[one, other], &[]);
        }
        Problem::new(&builder.build().expect("valid"), false)
    }

    #[test]
    fn one_of_the_updates_runs_first() {
        let problem = layers([6; 3]);
        let watch = Watch::default();
        let mut bounds = Bounds::new(&problem);
        for op in 0..problem.len() as Op {
            bounds.record(op, cut(&problem, op, &watch).expect("not stopped"), BoundRoute::Cut);
        }
        // The second operator of any update may run when nothing else is left: 10 + 10 + 10. The
        // first backward operator has all activations and its gradient: 3 * 6 + 10.
        assert_eq!(bounds.best().0, 30);
        let updates = crate::update_phase::updates_of(&problem);
        assert_eq!(updates.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 3]);
        bounds.bound_first_of_set(&problem, &updates, &[], u64::MAX, &watch).expect("not stopped");
        // The first of them is that of the last layer, beside two activations: 30 + 2 * 6. That of
        // another layer would run beside fewer activations and more gradients: 30 + 6 + 10, 30 +
        // 20.
        assert_eq!((bounds.best().0, bounds.route()), (42, BoundRoute::First));
        // Program order reaches it.
        assert_eq!(crate::liveness::Profile::new(&problem, &problem.program_order()).peak, 42);
    }

    /// In large graphs the time that networks take to build would not be seen by budgets that count
    /// what the flow looks at alone.
    #[test]
    fn networks_count_against_budgets_in_large_graphs() {
        let watch = Watch::default();
        for (operators, is_large) in [(1000, false), (26_000, true)] {
            let step = crate::synthetic::steps::Family::Parallel.step(operators).expect("few bytes");
            let problem = Problem::new(&step, false);
            assert_eq!(problem.is_large(), is_large);
            let least = least_between(&problem, 50, &sides(&problem, 50), &watch).expect("not stopped");
            // All but one chain is free: a node each, and arcs for constraints and tensors.
            assert!(least.built > 3 * operators, "{}", least.built);
            assert_eq!(least.cost(&problem), least.work + if is_large { least.built } else { 0 });
        }
    }

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

    #[test]
    fn updates_run_before_another_operator_or_leave_it_their_gradients() {
        let problem = layers([40, 6, 6]);
        let watch = Watch::default();
        let updates = crate::update_phase::updates_of(&problem);
        let proved = |others: &[Op]| {
            let mut bounds = Bounds::new(&problem);
            bounds.bound_first_of_set(&problem, &updates, others, u64::MAX, &watch).expect("not stopped");
            bounds.best().0
        };
        // All updates may wait for the end, the first of them with all gradients: 3 * 10 + 20.
        assert_eq!(proved(&[]), 50);
        // The last backward operator then finds 40 bytes and two gradients and makes the third. Of
        // the updates that may run before it, the first needs 30 beside 46 bytes, or the second 30
        // beside 40 and the first gradient.
        let last = problem.program_order()[11];
        assert_eq!(problem.transient(last), 10);
        assert_eq!(proved(&[last]), 70);
        let (updates, others): (Vec<Op>, Vec<Op>) =
            problem.program_order().into_iter().partition(|&op| problem.is_update[op as usize]);
        let order = [others, updates].concat();
        assert_eq!(crate::liveness::Profile::new(&problem, &order).peak, 70);
    }
}
