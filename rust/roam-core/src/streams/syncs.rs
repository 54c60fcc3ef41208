//! What waits for what: vector clocks over streams, and the fewest waits that a plan needs.
//!
//! An operator's clock says per stream how many of its operators have completed before the operator
//! starts, under every timing. It follows from the order of each stream and from the waits
//! (Fidge 1988; Mattern 1989).

use super::schedule::Timed;
use crate::cost;
use crate::graph::Residency;
use crate::problem::{Index, NONE, Op, Problem, Rows, Ten, step_by_operator};
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

/// Operators in launch order on their streams.
pub(super) struct Clocks<'a> {
    streams: usize,
    stream: &'a [u32],
    /// Per operator its place on its stream.
    place: Vec<u32>,
    /// The operators of each stream.
    lanes: Vec<Vec<Op>>,
    /// Per operator a clock, one after another.
    clocks: Vec<u32>,
}

impl<'a> Clocks<'a> {
    /// The clocks before any wait is known: all are zero.
    fn new(timed: &'a Timed, streams: u32) -> Self {
        let streams = streams as usize;
        let mut lanes: Vec<Vec<Op>> = vec![Vec::new(); streams];
        let mut place = vec![0; timed.order.len()];
        for &op in &timed.order {
            let lane = &mut lanes[timed.stream[op as usize] as usize];
            place[op as usize] = lane.len() as u32;
            lane.push(op);
        }
        Clocks { streams, stream: &timed.stream, place, lanes, clocks: vec![0; streams * timed.order.len()] }
    }

    fn clock(&self, op: Op) -> &[u32] {
        let from = op as usize * self.streams;
        &self.clocks[from..from + self.streams]
    }

    /// How many operators of the stream have completed before `op` starts.
    fn completed(&self, op: Op, stream: usize) -> u32 {
        self.clocks[op as usize * self.streams + stream]
    }

    /// Notes that `before`, and all that it came after, has completed when `after` starts.
    fn follow(&mut self, after: Op, before: Op) {
        for stream in 0..self.streams {
            let known = self.completed(before, stream);
            let own = &mut self.clocks[after as usize * self.streams + stream];
            *own = known.max(*own);
        }
        let own = &mut self.clocks[after as usize * self.streams + self.stream[before as usize] as usize];
        *own = (self.place[before as usize] + 1).max(*own);
    }

    /// The operator that precedes on the same stream.
    fn previous(&self, op: Op) -> Option<Op> {
        let before = self.place[op as usize].checked_sub(1)?;
        Some(self.lanes[self.stream[op as usize] as usize][before as usize])
    }

    /// Raises `needs` so that all operators up to `op` on its stream must have completed.
    fn require(&self, needs: &mut [u32], op: Op) {
        let need = &mut needs[self.stream[op as usize] as usize];
        *need = (self.place[op as usize] + 1).max(*need);
    }

    /// The state of the operator's stream while it runs.
    fn running(&self, op: Op) -> usize {
        2 * self.place[op as usize] as usize + 1
    }

    /// The first state of the stream in which so many operators of each stream are known to have
    /// completed; one more than the last where there is none.
    fn first_state_past(&self, stream: usize, needs: &[u32]) -> usize {
        let lane = &self.lanes[stream];
        let lacks = |op: &Op| self.clock(*op).iter().zip(needs).any(|(has, need)| has < need);
        let at = lane.partition_point(lacks);
        // Perhaps nothing but the operator before `at` was missing.
        let before = at.checked_sub(1).map(|at| lane[at]);
        let completes = before.is_some_and(|op| {
            let others = self.clock(op).iter().zip(needs).enumerate().filter(|(other, _)| *other != stream);
            others.into_iter().all(|(_, (has, need))| has >= need) && needs[stream] <= at as u32
        });
        if completes { 2 * at } else { 2 * at + 1 }
    }

    /// The uses of a tensor, the last of which end its life; its creation where it has none.
    fn finishers<'p>(problem: &'p Problem, tensor: Ten) -> impl Iterator<Item = Op> + 'p {
        let users = problem.users.row(tensor);
        let creator = Some(problem.tensors[tensor.index()].creator).filter(|&op| users.is_empty() && op != NONE);
        users.iter().copied().chain(creator)
    }
}

/// Waits (before, after) by `after` in launch order, and the clocks that follow from them.
pub(super) struct Syncs<'a> {
    pub(super) pairs: Vec<(Op, Op)>,
    clocks: Clocks<'a>,
}

/// The waits from which every constraint follows and everything that sharing bytes asks for: that
/// a tensor's last uses have completed when another one takes its bytes.
///
/// A wait that follows from stream order and other waits is left out; of several waits for one
/// stream, the latest is kept. `offsets` are per tensor of the problem.
pub(super) fn syncs<'a>(problem: &Problem, timed: &'a Timed, streams: u32, offsets: &[u64]) -> Syncs<'a> {
    let mut clocks = Clocks::new(timed, streams);
    let memory = displaced(problem, &timed.order, offsets);
    let launch = step_by_operator(&timed.order);
    let mut found = Vec::new();
    let mut needs = vec![0u32; clocks.streams];
    let mut open: Vec<Op> = Vec::new();
    for &op in &timed.order {
        if let Some(previous) = clocks.previous(op) {
            clocks.follow(op, previous);
        }
        needs.fill(0);
        for &before in problem.predecessors.row(op) {
            clocks.require(&mut needs, before);
        }
        for &tensor in memory.row(op) {
            Clocks::finishers(problem, tensor)
                .filter(|&last| last != op)
                .for_each(|last| clocks.require(&mut needs, last));
        }
        open.clear();
        let own = timed.stream[op as usize] as usize;
        open.extend(
            (0..clocks.streams)
                .filter(|&stream| stream != own && needs[stream] > 0)
                .map(|stream| clocks.lanes[stream][needs[stream] as usize - 1]),
        );
        // The operator launched latest may have waited for the others already.
        open.sort_unstable_by_key(|&before| Reverse(launch[before as usize]));
        for &before in &open {
            if clocks.completed(op, timed.stream[before as usize] as usize) <= clocks.place[before as usize] {
                clocks.follow(op, before);
                found.push((before, op));
            }
        }
    }
    Syncs { pairs: found, clocks }
}

/// Per operator the tensors whose bytes its outputs take, each byte's last holder only: who held it
/// before has been waited for already. An input that is reused by an output is listed too.
fn displaced(problem: &Problem, order: &[Op], offsets: &[u64]) -> Rows<Op, Ten> {
    let mut rows: Vec<Vec<Ten>> = vec![Vec::new(); problem.len()];
    // Disjoint spans by start: their end and holder.
    let mut held: BTreeMap<u64, (u64, Ten)> = BTreeMap::new();
    for &op in order {
        for &tensor in problem.creates.row(op) {
            let item = &problem.tensors[tensor.index()];
            if !item.in_pool() {
                continue;
            }
            let (from, to) = (offsets[tensor.index()], offsets[tensor.index()] + item.size);
            // A span that reaches into this one from below is cut off where this one begins.
            let below = held.range(..from).next_back().map(|(&start, &span)| (start, span));
            if let Some((start, (end, holder))) = below.filter(|&(_, (end, _))| end > from) {
                held.insert(start, (from, holder));
                held.insert(from, (end, holder));
            }
            let within: Vec<u64> = held.range(from..to).map(|(&start, _)| start).collect();
            for start in within {
                let Some((end, holder)) = held.remove(&start) else { continue };
                rows[op as usize].push(holder);
                if end > to {
                    held.insert(to, (end, holder));
                }
            }
            held.insert(from, (to, tensor));
        }
    }
    Rows::collect(rows.into_iter())
}

impl Syncs<'_> {
    /// The times at which operators run by the cost model, if waits are counted.
    pub(super) fn timed(&self, timed: &Timed, ns: &[u64]) -> Timed {
        let mut result = timed.clone();
        let mut waits = self.pairs.iter().peekable();
        for &op in &timed.order {
            let mut start = self.clocks.previous(op).map_or(0, |before| result.end[before as usize]);
            let mut count = 0;
            while let Some(&(before, _)) = waits.next_if(|&&(_, after)| after == op) {
                start = start.max(result.end[before as usize]);
                count += 1;
            }
            start = cost::after(start, cost::SYNC_NS * count);
            result.start[op as usize] = start;
            result.end[op as usize] = cost::after(start, ns[op as usize]);
        }
        result
    }

    /// No timing lets more unpooled bytes than this be live.
    ///
    /// A stream passes through states: state 2i + 1 while its operator i runs, 2i + 2 once that has
    /// completed. What an operator makes or needs unpooled is charged to its stream, from
    /// its own state to the first one in which every last use is known to have completed; what
    /// enters is charged to the stream of its last use by launch. So each stream holds a known sum
    /// in each state, and two streams can be in two states at once only where neither has yet to
    /// reach what the other one has waited for.
    pub(super) fn unpooled_bytes(&self, problem: &Problem, order: &[Op]) -> u64 {
        let streams = 0..self.clocks.streams;
        let held = self.held(problem, order);
        let anchored = |anchor: usize| {
            let others: Vec<Vec<u64>> = streams
                .clone()
                .filter(|&stream| stream != anchor)
                .map(|stream| self.most_beside(anchor, stream, &held[stream]))
                .collect();
            let sum = |state: usize| held[anchor][state] + others.iter().map(|most| most[state]).sum::<u64>();
            (0..held[anchor].len()).map(sum).max().unwrap_or(0)
        };
        streams.clone().map(anchored).min().unwrap_or(0)
    }

    /// Per stream what it holds in each of its states.
    fn held(&self, problem: &Problem, order: &[Op]) -> Vec<Vec<u64>> {
        let clocks = &self.clocks;
        let mut held: Vec<Vec<u64>> = clocks.lanes.iter().map(|lane| vec![0u64; 2 * lane.len() + 2]).collect();
        let mut add = |stream: usize, from: usize, to: usize, bytes: u64| {
            // Wrapping, since a sum that is exact modulo 2^64 and below 2^63 is exact.
            held[stream][from] = held[stream][from].wrapping_add(bytes);
            held[stream][to] = held[stream][to].wrapping_sub(bytes);
        };
        let launch = step_by_operator(order);
        let mut needs = vec![0u32; clocks.streams];
        for (tensor, item) in problem.tensors.iter().enumerate().filter(|(_, item)| !item.in_pool()) {
            let Some(mut last) = order.first().copied() else { break };
            needs.fill(0);
            let mut finishers = Clocks::finishers(problem, Ten::at(tensor)).peekable();
            if finishers.peek().is_none() {
                clocks.require(&mut needs, last); // Enters and is not used: gone after the first operator.
            }
            for op in finishers {
                clocks.require(&mut needs, op);
                last = if launch[op as usize] > launch[last as usize] { op } else { last };
            }
            let by = if item.creator == NONE { last } else { item.creator };
            let stream = clocks.stream[by as usize] as usize;
            let from = if item.creator == NONE { 0 } else { clocks.running(by) };
            let gone = if item.residency == Residency::Leaves {
                held_states(&clocks.lanes[stream])
            } else {
                clocks.first_state_past(stream, &needs)
            };
            add(stream, from, gone, item.size);
        }
        for &op in order {
            let state = clocks.running(op);
            add(clocks.stream[op as usize] as usize, state, state + 1, problem.workspace[op as usize]);
        }
        for states in &mut held {
            let mut now = 0u64;
            for change in states.iter_mut() {
                now = now.wrapping_add(*change);
                *change = now;
            }
            states.pop();
        }
        held
    }

    /// Per state of the stream `anchor`, the most that the stream `other` may hold meanwhile.
    fn most_beside(&self, anchor: usize, other: usize, held: &[u64]) -> Vec<u64> {
        let clocks = &self.clocks;
        let (mine, theirs) = (&clocks.lanes[anchor], &clocks.lanes[other]);
        // A window over `held` whose two ends only move forward, with its falling maxima in a
        // queue.
        let mut queue: VecDeque<usize> = VecDeque::new();
        let mut next = 0;
        (0..held_states(mine))
            .map(|state| {
                // The other stream has completed all that had to precede what the anchor has
                // started last,
                let started = state.div_ceil(2).checked_sub(1).map(|at| mine[at]);
                let least = 2 * started.map_or(0, |op| clocks.completed(op, other) as usize);
                // and started nothing that follows what the anchor has not completed.
                let may = |theirs_started: usize| {
                    let latest = theirs_started.checked_sub(1).map(|at| theirs[at]);
                    latest.is_none_or(|op| clocks.completed(op, anchor) as usize <= state / 2)
                };
                while next < held.len() && may(next.div_ceil(2)) {
                    while queue.back().is_some_and(|&at| held[at] <= held[next]) {
                        queue.pop_back();
                    }
                    queue.push_back(next);
                    next += 1;
                }
                while queue.front().is_some_and(|&at| at < least) {
                    queue.pop_front();
                }
                queue.front().map_or(0, |&at| held[at])
            })
            .collect()
    }
}

/// How many states a stream passes through.
fn held_states(lane: &[Op]) -> usize {
    2 * lane.len() + 1
}
