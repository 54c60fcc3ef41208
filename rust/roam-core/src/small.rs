//! The least total of a small graph: all its orders and uses of reuse, each with its smallest pool.
//!
//! The sets of operators that can have run are nodes, and orders are the paths through them.
//! Backwards from the end, every set gets the pairs (pool peak, unpooled peak) that paths from
//! there have, without pairs that another is no worse than in both. Then all paths are walked whose
//! total may still be below the best so far, and their tensors are laid out by complete search.
//! docs/explanation/theory.md shows that nothing is left out.

use crate::control::{Stop, Watch};
use crate::graph::Residency;
use crate::layout::{Decider, Decision, Layout};
use crate::liveness::{Profile, largest_matching};
use crate::order::Ordered;
use crate::problem::{Index, NONE, Op, Problem, Ten};
use std::collections::HashMap;

/// Sets of operators that can have run; a graph with more is not small.
const MOST_STATES: usize = 1 << 13;
/// Steps of ways and comparisons of layouts in all.
const WORK: u64 = 1 << 25;
/// The work that a way counts that has come to its end, apart from its layout.
const PER_ORDER: u64 = 64;
/// Permitted pairs at one operator of which every choice is tried.
const MOST_PAIRS: usize = 6;

/// Most live bytes in the pool, and unpooled ones.
type Peaks = (u64, u64);

/// What is known of a small graph in the end.
pub(crate) struct Outcome {
    /// An order and its layout that take less than what was known, the least if there are several.
    pub(crate) found: Option<(Ordered, Layout)>,
    /// No order of a peak within the limit takes less in all, however it is laid out.
    pub(crate) bound: u64,
}

/// An operator that runs next.
struct Move {
    op: Op,
    next: u32,
    /// Live unpooled bytes.
    unpooled: u64,
    /// What may be reused, with the live bytes in the pool; the first leaves the fewest.
    choices: Vec<(Vec<(Ten, Ten)>, u64)>,
}

/// A set of operators that can have run.
struct State {
    done: u64,
    moves: Vec<Move>,
    /// The peaks of the ways from here to the end, without those that are no better in either peak
    /// than some other.
    to_go: Vec<Peaks>,
}

/// Looks for less than `total`; `None` where the graph is not small.
pub(crate) fn search(problem: &Problem, total: u64, watch: &Watch) -> Result<Option<Outcome>, Stop> {
    let Some((states, every_choice)) = states(problem, total, watch)? else { return Ok(None) };
    let floor = states[0].to_go.iter().map(|(pool, unpooled)| pool + unpooled).min().unwrap_or(0);
    let mut walk = Walk {
        problem,
        states: &states,
        floor,
        best: total,
        found: None,
        is_complete: every_choice,
        order: Vec::new(),
        pairs: Vec::new(),
        decider: Decider::default(),
        work: WORK,
        watch,
    };
    walk.go(0, (0, 0))?;
    Ok(Some(Outcome { bound: if walk.is_complete { walk.best } else { floor.min(walk.best) }, found: walk.found }))
}

/// All sets that can have run, from none to all, and whether every choice of reuse is among their
/// moves; `None` if there are too many.
fn states(problem: &Problem, limit: u64, watch: &Watch) -> Result<Option<(Vec<State>, bool)>, Stop> {
    let count = problem.len();
    if count > 64 {
        return Ok(None);
    }
    let set = |ops: &[Op]| ops.iter().fold(0u64, |set, op| set | 1 << op);
    let before: Vec<u64> = (0..count as Op).map(|op| set(problem.predecessors.row(op))).collect();
    let users: Vec<u64> = problem.tensor_ranks().map(|tensor| set(problem.users.row(tensor))).collect();
    let mut numbers = HashMap::from([(0u64, 0u32)]);
    let mut states = vec![State { done: 0, moves: Vec::new(), to_go: Vec::new() }];
    let mut every_choice = true;
    let mut at = 0;
    // A set comes after all that are smaller.
    while at < states.len() {
        watch.check()?;
        let done = states[at].done;
        let crossing = crossing(problem, &users, done);
        for op in (0..count as Op).filter(|&op| done >> op & 1 == 0 && before[op as usize] & !done == 0) {
            let after = done | 1 << op;
            let next = *numbers.entry(after).or_insert_with(|| {
                states.push(State { done: after, moves: Vec::new(), to_go: Vec::new() });
                states.len() as u32 - 1
            });
            if states.len() > MOST_STATES {
                return Ok(None);
            }
            let dies = |&&(_, input, _): &&(Op, Ten, Ten)| users[input.index()] & !after == 0;
            let dying = problem.permissions(op).iter().filter(dies).map(|&(_, input, output)| (input, output));
            let (in_pool, beside): (Vec<_>, Vec<_>) =
                dying.partition(|&(input, _)| problem.tensors[input.index()].in_pool());
            let bytes = |pairs: &[(Ten, Ten)]| pairs.iter().map(|&(input, _)| problem.size(input)).sum::<u64>();
            let created = |is_counted: bool| -> u64 {
                let made = problem.creates.row(op).iter().map(|&tensor| &problem.tensors[tensor.index()]);
                made.filter(|item| item.in_pool() == is_counted).map(|item| item.size).sum()
            };
            let beside = largest_matching(&beside);
            let unpooled = crossing.1 + created(false) + problem.workspace[op as usize] - bytes(&beside);
            every_choice &= in_pool.len() <= MOST_PAIRS;
            let choices = matchings(&in_pool).into_iter().map(|chosen| {
                let pool = crossing.0 + created(true) - bytes(&chosen);
                let mut pairs: Vec<(Ten, Ten)> = chosen.into_iter().chain(beside.iter().copied()).collect();
                pairs.sort_unstable();
                (pairs, pool)
            });
            let mut choices: Vec<_> = choices.filter(|(_, pool)| pool + unpooled <= limit).collect();
            choices.sort_by_key(|&(_, pool)| pool);
            if !choices.is_empty() {
                states[at].moves.push(Move { op, next, unpooled, choices });
            }
        }
        at += 1;
    }
    for at in (0..states.len()).rev() {
        let mut to_go: Vec<Peaks> = Vec::new();
        if states[at].done.count_ones() as usize == count {
            to_go.push((0, 0));
        }
        for Move { next, unpooled, choices, .. } in &states[at].moves {
            let after = states[*next as usize].to_go.iter();
            to_go.extend(after.map(|&(pool, beside)| (pool.max(choices[0].1), beside.max(*unpooled))));
        }
        to_go.sort_unstable();
        let mut least = u64::MAX;
        to_go.retain(|&(_, unpooled)| {
            let is_less = unpooled < least;
            least = least.min(unpooled);
            is_less
        });
        states[at].to_go = to_go;
    }
    Ok(Some((states, every_choice)))
}

/// Bytes of the tensors that exist once `done` has run and are still needed, in the pool and
/// unpooled; before the first step also of what enters without use.
fn crossing(problem: &Problem, users: &[u64], done: u64) -> Peaks {
    let mut crossing = (0, 0);
    for (item, users) in problem.tensors.iter().zip(users) {
        let exists = item.creator == NONE || done >> item.creator & 1 != 0;
        let is_unused = item.creator == NONE && *users == 0 && done == 0;
        if exists && (users & !done != 0 || item.residency == Residency::Leaves || is_unused) {
            *if item.in_pool() { &mut crossing.0 } else { &mut crossing.1 } += item.size;
        }
    }
    crossing
}

/// All sets of disjoint pairs, or a largest one where there are many.
fn matchings(pairs: &[(Ten, Ten)]) -> Vec<Vec<(Ten, Ten)>> {
    if pairs.len() > MOST_PAIRS {
        return vec![largest_matching(pairs)];
    }
    let mut matchings = vec![Vec::new()];
    for &(input, output) in pairs {
        for at in 0..matchings.len() {
            if matchings[at].iter().all(|&(other, made)| other != input && made != output) {
                let more = matchings[at].iter().copied().chain([(input, output)]).collect();
                matchings.push(more);
            }
        }
    }
    matchings
}

/// A way under way.
struct Walk<'a> {
    problem: &'a Problem,
    states: &'a [State],
    /// No way comes to less.
    floor: u64,
    /// The least total so far, which is to be undercut.
    best: u64,
    found: Option<(Ordered, Layout)>,
    is_complete: bool,
    order: Vec<Op>,
    /// What is reused at each step.
    pairs: Vec<&'a [(Ten, Ten)]>,
    decider: Decider,
    work: u64,
    watch: &'a Watch,
}

impl Walk<'_> {
    /// Walks on from a state, which was reached with these peaks.
    fn go(&mut self, state: usize, so_far: Peaks) -> Result<(), Stop> {
        self.watch.check()?;
        let states = self.states;
        let State { moves, .. } = &states[state];
        if self.order.len() == self.problem.len() {
            return self.lay_out(so_far);
        }
        for Move { op, next, unpooled, choices } in moves {
            for (pairs, pool) in choices {
                if self.best <= self.floor || self.work == 0 {
                    return Ok(());
                }
                let peaks = (so_far.0.max(*pool), so_far.1.max(*unpooled));
                let to_go = &states[*next as usize].to_go;
                self.spend(1 + to_go.len() as u64);
                let is_less = |&(pool, unpooled): &Peaks| pool.max(peaks.0) + unpooled.max(peaks.1) < self.best;
                if to_go.iter().any(is_less) {
                    self.order.push(*op);
                    self.pairs.push(pairs);
                    self.go(*next as usize, peaks)?;
                    self.order.pop();
                    self.pairs.pop();
                }
            }
        }
        Ok(())
    }

    fn spend(&mut self, work: u64) {
        self.work = self.work.saturating_sub(work);
        self.is_complete &= self.work > 0;
    }

    /// Called at the end of a way: looks for ever smaller layouts, as long as they take less than
    /// the best.
    fn lay_out(&mut self, (_, unpooled): Peaks) -> Result<(), Stop> {
        self.spend(PER_ORDER);
        let mut pairs = self.pairs.iter();
        let profile =
            Profile::choosing(self.problem, &self.order, |_| pairs.next().map_or(Vec::new(), |at| at.to_vec()));
        debug_assert!(profile.unpooled_peak == unpooled);
        while profile.least_total() < self.best {
            let limit = self.best - unpooled;
            match self.decider.below(self.problem, &profile, limit, &mut self.work, self.watch)? {
                Decision::Layout(layout) => {
                    self.best = layout.pool_bytes + unpooled;
                    self.found = Some((Ordered { order: self.order.clone(), profile: profile.clone() }, layout));
                }
                Decision::Refuted => break,
                Decision::Unknown => {
                    self.is_complete = false;
                    break;
                }
            }
        }
        Ok(())
    }
}
