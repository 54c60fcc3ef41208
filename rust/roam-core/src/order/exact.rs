//! Exact search for an order of a window below a budget: over down-sets, depth first.
//!
//! A state is the set of operators that have run; only states that are reached with all live bytes
//! within the budget are looked at, and none twice. Let the search reach, from one state, another
//! that no more bytes cross. Live bytes over states are submodular, so the first state need only be
//! left towards the least state between the two: the search *commits* to it. Running an operator
//! that adds nothing to the live bytes is the simplest case. docs/explanation/theory.md has the
//! proofs, with reuse. The search can also begin at the end of the window and undo operators: often
//! one direction finds at once that there is no sequence, and the other late.

use super::window::{Set, Window};
use crate::bound::flow::{self, INFINITE, Network};
use crate::control::{Stop, Watch};
use std::collections::HashSet;

/// What a search found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// A sequence of the window's operators within the budget.
    Order(Vec<usize>),
    /// There is none: every sequence has a step of at least this many live bytes, more than the
    /// budget.
    AtLeast(u64),
    /// The work was used up.
    Unknown,
}

/// The work of the first attempt in each direction; later ones have a multiple of it.
const FIRST_ATTEMPT: u64 = 50_000;
const GROWTH: u64 = 4;

/// Looks for a sequence of the window's operators with at most `budget` live bytes at every step,
/// forwards and backwards by turns with growing effort. The work done is taken off `work`.
pub(super) fn within(window: &Window, budget: u64, work: &mut u64, watch: &Watch) -> Result<Answer, Stop> {
    let mut share = FIRST_ATTEMPT;
    while *work > 0 {
        for forward in [true, false] {
            // Bytes that are live during the first step alone spoil the symmetry.
            if !forward && window.unused_bytes > 0 {
                continue;
            }
            let mut granted = share.min(*work);
            *work -= granted;
            let answer = one_way(window, forward, budget, &mut granted, watch)?;
            *work += granted;
            if answer != Answer::Unknown {
                return Ok(answer);
            }
        }
        share = share.saturating_mul(GROWTH);
    }
    Ok(Answer::Unknown)
}

/// One attempt in one direction.
fn one_way(window: &Window, forward: bool, budget: u64, work: &mut u64, watch: &Watch) -> Result<Answer, Stop> {
    let mut search = Search { window, forward, budget, work: *work, seen: HashSet::new(), least_refused: u64::MAX };
    let answer = search.run(watch);
    *work = search.work;
    answer
}

/// A state on the current path, with the moves that are still to be tried, the best last.
struct Frame {
    done: Set,
    bytes: u64,
    moves: Vec<(u64, usize)>,
    /// Length of the path that leads here.
    depth: usize,
    /// States from which the search has committed to this one: the window can be finished from this
    /// one within the budget exactly if it can be from them.
    stands_for: Vec<Set>,
}

/// The state that the search goes on from.
struct Target {
    state: Set,
    bytes: u64,
    stands_for: Vec<Set>,
}

struct Search<'a> {
    window: &'a Window,
    forward: bool,
    budget: u64,
    work: u64,
    seen: HashSet<Set>,
    /// The fewest live bytes of all steps refused for being above the budget.
    least_refused: u64,
}

impl Search<'_> {
    fn run(&mut self, watch: &Watch) -> Result<Answer, Stop> {
        let (start, goal, bytes) = if self.forward {
            (self.window.start(), self.window.end(), self.window.first_bytes)
        } else {
            (self.window.end(), self.window.start(), self.window.last_bytes)
        };
        if start == goal {
            return Ok(Answer::Order(Vec::new()));
        }
        // Frames of states that ever more bytes cross.
        let mut stack = vec![self.frame(start, bytes, 0)];
        let mut path: Vec<usize> = Vec::new();
        while let Some(top) = stack.last_mut() {
            watch.check()?;
            if self.work == 0 {
                return Ok(Answer::Unknown);
            }
            path.truncate(top.depth);
            let Some((bytes, op)) = top.moves.pop() else {
                stack.pop();
                continue;
            };
            let mut next = top.done.clone();
            next.toggle(op);
            path.push(op);
            if next == goal {
                if !self.forward {
                    path.reverse();
                }
                return Ok(Answer::Order(path));
            }
            let Some(target) = self.commit(next, bytes, &mut stack, &mut path, watch)? else {
                return Ok(Answer::Unknown);
            };
            if self.seen.insert(target.state.clone()) {
                let frame = self.frame(target.state, target.bytes, path.len());
                stack.push(Frame { stands_for: target.stands_for, ..frame });
            }
        }
        Ok(Answer::AtLeast(self.least_refused))
    }

    /// The state with all moves from it that keep to the budget.
    fn frame(&mut self, done: Set, bytes: u64, depth: usize) -> Frame {
        let window = self.window;
        let mut moves = Vec::new();
        let mut state = done.clone();
        for op in 0..window.len() {
            let cost = if self.forward {
                if !window.can_run(op, &done) {
                    continue;
                }
                window.run(op, &done, bytes)
            } else {
                if !window.can_undo(op, &done) {
                    continue;
                }
                state.toggle(op);
                let cost = window.undo(op, &state, bytes);
                state.toggle(op);
                cost
            };
            if cost.during > self.budget {
                self.least_refused = self.least_refused.min(cost.during);
            } else {
                moves.push((cost.beyond, op));
            }
        }
        self.work = self.work.saturating_sub(window.len() as u64);
        // Among equals, the best is the one that comes first in the present sequence, seen in the
        // direction of the search.
        let forward = self.forward;
        moves.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(if forward { b.1.cmp(&a.1) } else { a.1.cmp(&b.1) }));
        Frame { done, bytes, moves, depth, stands_for: Vec::new() }
    }

    /// Commits to the least state between `state` and the first one on the stack that no fewer
    /// bytes cross, as often as there is one. Returns the state to go on from; `None` where the
    /// work was used up.
    fn commit(
        &mut self,
        mut state: Set,
        mut bytes: u64,
        stack: &mut Vec<Frame>,
        path: &mut Vec<usize>,
        watch: &Watch,
    ) -> Result<Option<Target>, Stop> {
        let mut stands_for: Vec<Set> = Vec::new();
        loop {
            // Where the first step has bytes of its own, another first step may not take its place.
            let keeps_first =
                self.window.unused_bytes > 0 && path.len() > 1 && stack.first().is_some_and(|f| f.depth == 0);
            let kept = usize::from(keeps_first);
            let first = kept + stack[kept..].partition_point(|frame| frame.bytes < bytes);
            let Some(frame) = stack.get(first) else { return Ok(Some(Target { state, bytes, stands_for })) };
            let depth = frame.depth;
            if path.len() > depth + 1 {
                let Some(least) = self.least_between(&frame.done, &state, watch)? else { return Ok(None) };
                // The way to the least state: the same steps, without those that lead elsewhere.
                let (mut at, mut at_bytes) = (frame.done.clone(), frame.bytes);
                let steps = path.split_off(depth);
                for op in steps.into_iter().filter(|&op| least.contains(op) == self.forward) {
                    let cost = if self.forward {
                        let cost = self.window.run(op, &at, at_bytes);
                        at.toggle(op);
                        cost
                    } else {
                        at.toggle(op);
                        self.window.undo(op, &at, at_bytes)
                    };
                    debug_assert!(cost.during <= self.budget);
                    at_bytes = cost.beyond;
                    path.push(op);
                }
                debug_assert!(at == least && at_bytes <= bytes);
                (state, bytes) = (least, at_bytes);
            }
            // States left half explored may be on the new way too; the first one stands or falls
            // with the new one.
            for frame in stack.drain(first + 1..) {
                for half_explored in frame.stands_for.iter().chain([&frame.done]) {
                    self.seen.remove(half_explored);
                }
            }
            for done in stands_for.drain(..) {
                self.seen.remove(&done);
            }
            if let Some(frame) = stack.pop() {
                stands_for = frame.stands_for;
                stands_for.push(frame.done);
            }
        }
    }

    /// Of all states between two, one of which contains the other, the one nearest to `to` that the
    /// fewest bytes cross: a minimum cut. `None` where the work was used up.
    fn least_between(&mut self, from: &Set, to: &Set, watch: &Watch) -> Result<Option<Set>, Stop> {
        let window = self.window;
        let (smaller, larger) = if self.forward { (from, to) } else { (to, from) };
        let free = smaller.difference(larger);
        let mut network = Network::new();
        let mut node = vec![flow::SINK; window.len()];
        for (op, node) in node.iter_mut().enumerate() {
            if free.contains(op) {
                *node = network.add_node();
            } else if smaller.contains(op) {
                *node = flow::SOURCE;
            }
        }
        let mut touched: Vec<usize> =
            free.iter().flat_map(|op| window.creates[op].iter().chain(&window.uses[op]).copied()).collect();
        touched.sort_unstable();
        touched.dedup();
        for tensor in touched {
            let local = &window.tensors[tensor];
            let creator = local.creator.map_or(flow::SOURCE, |op| node[op]);
            if creator == flow::SINK {
                continue;
            }
            let needed_after = local.stays || local.users.iter().any(|user| node[user] == flow::SINK);
            if needed_after {
                network.add_arc(creator, flow::SINK, local.size, 0);
                continue;
            }
            let through = network.add_node();
            network.add_arc(creator, through, local.size, 0);
            for user in local.users.iter().filter(|&user| free.contains(user)) {
                network.add_arc(through, node[user], INFINITE, 0);
            }
        }
        for op in free.iter() {
            for before in window.before[op].iter().filter(|&before| free.contains(before)) {
                network.add_arc(node[op], node[before], INFINITE, 0);
            }
        }
        let flow = network.solve(&mut self.work, watch)?;
        // The farthest from where the search comes from, so that it moves even where both ends are
        // the least.
        Ok(flow.is_complete.then(|| flow.sides()).map(|[smallest, largest]| {
            let done = if self.forward { largest } else { smallest };
            let mut least = smaller.clone();
            free.iter().filter(|&op| done[node[op] as usize]).for_each(|op| least.toggle(op));
            least
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Residency, ReusePair, Tensor, TensorId};
    use crate::liveness::Profile;
    use crate::problem::{Op, Problem};
    use crate::rng::Random;

    /// Operators that each make one or two tensors and read some earlier ones, whose memory they
    /// may reuse.
    fn random_problem(random: &mut Random, count: u64) -> Problem {
        let mut builder = GraphBuilder::new("random", "cpu", 1);
        let mut present: Vec<(TensorId, u64)> = Vec::new();
        for position in 0..count {
            let mut reads: Vec<(TensorId, u64)> = Vec::new();
            for _ in 0..random.below(4).min(present.len() as u64) {
                let at = present[random.below(present.len() as u64) as usize];
                if !reads.contains(&at) {
                    reads.push(at);
                }
            }
            let creates: Vec<(TensorId, u64)> = (0..1 + random.below(2))
                .map(|_| {
                    let (size_bytes, residency) = (1 + random.below(5), Residency::StepLocal);
                    let name = String::new();
                    let made = Tensor { name, size_bytes, kind: Kind::Temporary, residency, alignment_bytes: 0 };
                    (builder.tensor(made).expect("few tensors"), size_bytes)
                })
                .collect();
            let pairs = reads.iter().flat_map(|read| creates.iter().map(move |made| (read, made)));
            let reuse = pairs
                .filter(|(read, made)| read.1 == made.1)
                .map(|(read, made)| ReusePair { input: read.0, output: made.0 })
                .collect();
            let operator = Operator {
                reads: reads.iter().map(|&(id, _)| id).collect(),
                creates: creates.iter().map(|&(id, _)| id).collect(),
                workspace_bytes: random.below(3),
                reuse,
                ..Operator::new("", position as u32, Phase::Forward)
            };
            builder.operator(operator).expect("few operators");
            present.extend(creates);
        }
        Problem::new(&builder.build().expect("valid by construction"), true)
    }

    /// The least peak over all sequences of the steps from `at` to `end`.
    fn least_peak(problem: &Problem, order: &mut Vec<Op>, at: usize, end: usize) -> u64 {
        if at == end {
            return Profile::new(problem, order).live[..end].iter().copied().max().unwrap_or(0);
        }
        let mut least = u64::MAX;
        for next in at..end {
            let before = &order[at..end];
            if problem.predecessors.row(order[next]).iter().all(|before_next| !before.contains(before_next)) {
                order.swap(at, next);
                least = least.min(least_peak(problem, order, at + 1, end));
                order.swap(at, next);
            }
        }
        least
    }

    #[test]
    fn each_direction_answers_every_budget_rightly() {
        let mut random = Random::new(3);
        let (mut found, mut refused, mut with_reuse) = (0, 0, 0);
        for _ in 0..1500 {
            let count = 1 + random.below(10);
            let problem = random_problem(&mut random, count);
            with_reuse += u32::from(!problem.reuse.is_empty());
            let count = count as usize;
            // The whole order, or seven of its steps; what comes before plays no part in the peak
            // of the window.
            let start = count.saturating_sub(7);
            let mut order = problem.program_order();
            let profile = Profile::new(&problem, &order);
            let window = Window::new(&problem, &order, &profile, start..count);
            assert_eq!(
                window.peak(&(0..count - start).collect::<Vec<_>>()),
                profile.live[start..].iter().copied().max().unwrap_or(0)
            );
            let before = profile.live[..start].iter().copied().max().unwrap_or(0);
            let least = least_peak(&problem, &mut order, start, count);
            for forward in [true, false] {
                for budget in before.max(least.saturating_sub(4))..least + 2 {
                    let answer = one_way(&window, forward, budget, &mut u64::MAX.clone(), &Watch::default());
                    match answer.expect("nothing stops it") {
                        Answer::Order(sequence) => {
                            assert!(least <= budget && window.peak(&sequence) <= budget);
                            found += 1;
                        }
                        Answer::AtLeast(bytes) => {
                            assert!(budget < bytes && bytes <= least, "{budget} {bytes} {least}");
                            refused += 1;
                        }
                        Answer::Unknown => unreachable!("the work is not limited"),
                    }
                }
            }
        }
        assert!(found > 1000 && refused > 1000 && with_reuse > 500, "{found} {refused} {with_reuse}");
    }
}
