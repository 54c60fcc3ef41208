//! List scheduling on several streams, by the cost model, under a ceiling of live bytes.
//!
//! The schedule follows a base order, an order for one stream whose live bytes are known. Whenever
//! a stream is idle, the first operator by preference is started there that is ready and fits: one
//! that is ahead of its turn in the base order must leave the steps until its turn, as the base
//! order would run them, under the ceiling with its outputs added. The next operator in turn fits
//! if it does beside what is running, and in any case when nothing is running; so the schedule
//! never gets stuck. Whether the ceiling is kept exactly is measured afterwards.

use super::headroom::Headroom;
use crate::control::{STRIDE, Stop, Watch};
use crate::cost;
use crate::graph::Residency;
use crate::order::Ordered;
use crate::problem::{Index, Op, Problem, Ten, step_by_operator};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// Ready operators that are looked at before a stream is left idle.
const LOOK: usize = 16;

/// What to start first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preference {
    /// The operator that comes first in the base order.
    BaseOrder,
    /// The operator for which the longest chain of operators waits.
    CriticalPath,
}

impl Preference {
    pub(super) const ALL: [Preference; 2] = [Preference::CriticalPath, Preference::BaseOrder];

    pub(super) fn name(self) -> &'static str {
        match self {
            Preference::BaseOrder => "base_order",
            Preference::CriticalPath => "critical_path",
        }
    }
}

/// Operators on streams, with the times at which they run by the model if waits cost nothing.
#[derive(Clone, Debug)]
pub(super) struct Timed {
    /// In the order of starting.
    pub(super) order: Vec<Op>,
    /// Per operator its stream.
    pub(super) stream: Vec<u32>,
    /// Per operator when it starts.
    pub(super) start: Vec<u64>,
    /// Per operator when it has completed.
    pub(super) end: Vec<u64>,
}

impl Timed {
    /// One after another on the first stream.
    pub(super) fn serial(order: &[Op], ns: &[u64]) -> Self {
        let mut timed = Timed {
            order: order.to_vec(),
            stream: vec![0; ns.len()],
            start: vec![0; ns.len()],
            end: vec![0; ns.len()],
        };
        let mut now = 0;
        for &op in order {
            timed.start[op as usize] = now;
            now = cost::after(now, ns[op as usize]);
            timed.end[op as usize] = now;
        }
        timed
    }
}

/// The longest time from an operator's start to the end of what waits for it, per operator.
pub(super) fn tails(problem: &Problem, ns: &[u64]) -> Vec<u64> {
    let mut tail = vec![0; ns.len()];
    for op in (0..ns.len()).rev() {
        let after = problem.successors.row(op as Op).iter().map(|&next| tail[next as usize]).max().unwrap_or(0);
        tail[op] = cost::after(after, ns[op]);
    }
    tail
}

/// What a schedule is made from.
pub(super) struct Task<'a> {
    pub(super) problem: &'a Problem,
    /// Nanoseconds per operator.
    pub(super) ns: &'a [u64],
    /// See [`tails`].
    pub(super) tails: &'a [u64],
    pub(super) streams: u32,
    pub(super) base: &'a Ordered,
    pub(super) preference: Preference,
}

impl Task<'_> {
    /// A schedule under the ceiling, as far as the ceiling can be kept.
    pub(super) fn schedule(&self, ceiling: u64, watch: &Watch) -> Result<Timed, Stop> {
        let count = self.ns.len();
        let operators = 0..count as Op;
        let mut memory = Memory::new(self.problem, self.base, ceiling);
        let mut waiting: Vec<u32> =
            operators.clone().map(|op| self.problem.predecessors.row(op).len() as u32).collect();
        let ranks: Vec<(u64, u32)> = operators.clone().map(|op| self.rank(op, memory.turn[op as usize])).collect();
        let mut ready: BTreeSet<((u64, u32), Op)> =
            operators.filter(|&op| waiting[op as usize] == 0).map(|op| (ranks[op as usize], op)).collect();
        let mut timed = Timed {
            order: Vec::with_capacity(count),
            stream: vec![0; count],
            start: vec![0; count],
            end: vec![0; count],
        };
        let mut idle: BTreeSet<u32> = (0..self.streams).collect();
        let mut running: BinaryHeap<Reverse<(u64, Op)>> = BinaryHeap::new();
        let mut now = 0;
        while timed.order.len() < count {
            while let Some(&Reverse((_, op))) = running.peek().filter(|Reverse((end, _))| *end <= now) {
                running.pop();
                idle.insert(timed.stream[op as usize]);
                memory.complete(op);
                for &after in self.problem.successors.row(op) {
                    waiting[after as usize] -= 1;
                    if waiting[after as usize] == 0 {
                        ready.insert((ranks[after as usize], after));
                    }
                }
            }
            let fitting = || ready.iter().take(LOOK).map(|&(_, op)| op).find(|&op| memory.fits(op));
            let in_turn = || {
                let front = memory.front_op().filter(|&op| waiting[op as usize] == 0)?;
                (running.is_empty() || memory.fits(front)).then_some(front)
            };
            match if idle.is_empty() { None } else { fitting().or_else(in_turn) } {
                Some(op) => {
                    if timed.order.len() % STRIDE == 0 {
                        watch.check()?;
                    }
                    ready.remove(&(ranks[op as usize], op));
                    let stream = self.stream_for(op, &idle, &timed);
                    let end = cost::after(now, self.ns[op as usize]);
                    timed.order.push(op);
                    timed.stream[op as usize] = stream;
                    timed.start[op as usize] = now;
                    timed.end[op as usize] = end;
                    memory.start(op);
                    idle.remove(&stream);
                    running.push(Reverse((end, op)));
                }
                // Whatever waits, waits for something that runs: if nothing runs, the next operator
                // in turn always starts.
                None => match running.peek() {
                    Some(&Reverse((end, _))) => now = end,
                    None => unreachable!("nothing runs and nothing can start"),
                },
            }
        }
        Ok(timed)
    }

    /// A smaller rank is better; no two operators have the same rank.
    fn rank(&self, op: Op, turn: u32) -> (u64, u32) {
        match self.preference {
            Preference::BaseOrder => (0, turn),
            Preference::CriticalPath => (u64::MAX - self.tails[op as usize], turn),
        }
    }

    /// An idle stream: that of the predecessor which completed last, so that there is nothing to
    /// wait for, or the first.
    fn stream_for(&self, op: Op, idle: &BTreeSet<u32>, timed: &Timed) -> u32 {
        let before = self.problem.predecessors.row(op).iter().copied();
        let latest = before.max_by_key(|&before| (timed.end[before as usize], timed.start[before as usize], before));
        let own = latest.map(|before| timed.stream[before as usize]).filter(|stream| idle.contains(stream));
        own.or_else(|| idle.first().copied()).unwrap_or(0)
    }
}

/// What would be live if the operators that have not been started ran one after another in the base
/// order.
struct Memory<'a> {
    problem: &'a Problem,
    base: &'a [Op],
    ceiling: i64,
    /// Per operator its place in the base order.
    turn: Vec<u32>,
    /// The first place in the base order whose operator has not been started.
    front: usize,
    started: Vec<bool>,
    ahead: Headroom,
    /// Per tensor its users by turn, those from the end that have been started taken off.
    users: Vec<Vec<u32>>,
    /// Per tensor the users that have not been started.
    users_left: Vec<u32>,
    /// What running operators hold although the steps ahead do not count it any more, and per
    /// operator its part.
    held: i64,
    held_by: Vec<i64>,
}

impl<'a> Memory<'a> {
    fn new(problem: &'a Problem, base: &'a Ordered, ceiling: u64) -> Self {
        let turn = step_by_operator(&base.order);
        let users: Vec<Vec<u32>> = problem
            .tensor_ranks()
            .map(|tensor| {
                let mut turns: Vec<u32> = problem.users.row(tensor).iter().map(|&op| turn[op as usize]).collect();
                turns.sort_unstable();
                turns
            })
            .collect();
        Memory {
            problem,
            base: &base.order,
            ceiling: ceiling as i64,
            turn,
            front: 0,
            started: vec![false; problem.len()],
            ahead: Headroom::new(&base.profile.live),
            users_left: users.iter().map(|turns| turns.len() as u32).collect(),
            users,
            held: 0,
            held_by: vec![0; problem.len()],
        }
    }

    /// The next operator in turn.
    fn front_op(&self) -> Option<Op> {
        self.base.get(self.front).copied()
    }

    /// Whether live bytes keep below the ceiling if the operator starts now.
    fn fits(&self, op: Op) -> bool {
        let turn = self.turn[op as usize] as usize;
        let now = self.ahead.most(self.front, self.front + 1) + self.held;
        if turn == self.front {
            return now <= self.ceiling;
        }
        let made: u64 = self.problem.creates.row(op).iter().map(|&tensor| self.problem.size(tensor)).sum();
        now + self.problem.transient(op) as i64 <= self.ceiling
            && self.ahead.most(self.front, turn) + made as i64 <= self.ceiling
    }

    fn start(&mut self, op: Op) {
        let turn = self.turn[op as usize] as usize;
        let mut held = self.problem.workspace[op as usize] as i64;
        self.ahead.add(turn, turn + 1, -held);
        for &tensor in self.problem.creates.row(op) {
            let size = self.problem.size(tensor) as i64;
            if self.users[tensor.index()].is_empty() && !self.stays(tensor) {
                held += size;
                self.ahead.add(turn, turn + 1, -size);
            } else {
                self.ahead.add(self.front, turn, size);
            }
        }
        self.started[op as usize] = true;
        for &tensor in self.problem.uses.row(op) {
            let (size, stays) = (self.problem.size(tensor) as i64, self.stays(tensor));
            self.users_left[tensor.index()] -= 1;
            let users = &mut self.users[tensor.index()];
            let last = users.last().copied().unwrap_or(0) as usize;
            while users.last().is_some_and(|&turn| self.started[self.base[turn as usize] as usize]) {
                users.pop();
            }
            if stays {
                continue;
            }
            match users.last() {
                Some(&left) => self.ahead.add(left as usize + 1, last + 1, -size),
                None => {
                    self.ahead.add(self.front, last + 1, -size);
                    held += size;
                }
            }
        }
        self.held += held;
        self.held_by[op as usize] = held;
        while self.front < self.base.len() && self.started[self.base[self.front] as usize] {
            self.front += 1;
        }
    }

    fn complete(&mut self, op: Op) {
        self.held -= std::mem::take(&mut self.held_by[op as usize]);
    }

    /// Whether the tensor outlives the step.
    fn stays(&self, tensor: Ten) -> bool {
        self.problem.tensors[tensor.index()].residency == Residency::Leaves
    }
}
