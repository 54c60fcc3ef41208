//! The lower bound of the peak of every order: the best of what is proved at single operators.

use super::cut::{BATCH, least_between, sides};
use super::probe::{MOST_UNDER_LIMIT, Work};
use crate::control::{Stop, Watch};
use crate::graph::Residency;
use crate::liveness::largest_matching;
use crate::plan::BoundRoute;
use crate::problem::{Op, Problem, Ten};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Cuts that one inspection may make on a very large graph.
const FEWEST_CUTS: usize = 48;
/// Operators looked at, over all cuts of one inspection; small graphs get more cuts.
const INSPECT_WORK: usize = 1_000_000;
/// Operators, tensors, nodes and arcs looked at, networks built included, over all cuts of one
/// inspection. Graphs of some 100 000 operators reach it.
const ALL_CUTS_WORK: u64 = 250_000_000;
/// Operators, tensors and arcs looked at, over all probes for one problem.
const ALL_PROBES_WORK: u64 = 50_000_000;
/// The same with falling targets, for operators probed alone and for those probed together.
const FALLING_WORK: u64 = 200_000_000;
const JOINT_WORK: u64 = 100_000_000;

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
