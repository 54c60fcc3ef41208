//! Bounds by sets of operators: one of them runs first, while all the others are still to come.

use super::bounds::Bounds;
use super::cut::{BATCH, Side, fix, least_between, sides, spread, touched};
use crate::control::{Stop, Watch};
use crate::plan::BoundRoute;
use crate::problem::{Op, Problem};
use crate::tolerance::is_within;
use crate::update_phase::LONGEST_UPDATE;
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Cuts that comparing first updates may make for each other operator, and operators that they may
/// look at.
const MOST_IN_FIRST_SET: usize = 512;
const FIRST_OF_SET_WORK: usize = 2_000_000;
/// Sets of them in a row that may prove nothing new.
const MOST_IN_VAIN: usize = 16;

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

#[cfg(test)]
mod tests {
    use super::super::cut::cut;
    use super::*;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Residency, Tensor, TensorId};

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
