//! A stretch of an order, whose operators may be put in any other sequence while all before and
//! after it stays.
//!
//! Operators are numbered by their place in the stretch. A state is the set of those that have run.

use crate::liveness::{Profile, largest_matching};
use crate::problem::{Index, NONE, Op, Problem, Ten};
use std::collections::BTreeMap;
use std::ops::Range;

/// A set of the window's operators, one bit each.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Set(Box<[u64]>);

impl Set {
    fn none(count: usize) -> Self {
        Set(vec![0; count.div_ceil(64)].into())
    }

    pub(super) fn contains(&self, op: usize) -> bool {
        self.0[op / 64] >> (op % 64) & 1 != 0
    }

    /// Puts the operator in, or takes it out.
    pub(super) fn toggle(&mut self, op: usize) {
        self.0[op / 64] ^= 1 << (op % 64);
    }

    fn is_subset(&self, other: &Set) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a & !b == 0)
    }

    fn meets(&self, other: &Set) -> bool {
        self.0.iter().zip(&other.0).any(|(a, b)| a & b != 0)
    }

    /// Whether `op` is the only one of these operators that is not in `other`.
    fn lacks_only(&self, other: &Set, op: usize) -> bool {
        self.0.iter().zip(&other.0).enumerate().all(|(word, (a, b))| {
            let lacking = a & !b;
            lacking == if word == op / 64 { 1 << (op % 64) } else { 0 }
        })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(word, &bits)| {
            std::iter::successors((bits != 0).then_some(bits), |&bits| {
                let rest = bits & (bits - 1);
                (rest != 0).then_some(rest)
            })
            .map(move |bits| 64 * word + bits.trailing_zeros() as usize)
        })
    }

    fn include(&mut self, other: &Set) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }

    /// The operators in one of the two sets alone.
    pub(super) fn difference(&self, other: &Set) -> Set {
        Set(self.0.iter().zip(&other.0).map(|(a, b)| a ^ b).collect())
    }
}

/// A tensor that not all states of the window have alike.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Local {
    pub(super) size: u64,
    /// `None` where it exists before the window.
    pub(super) creator: Option<usize>,
    /// Users in the window.
    pub(super) users: Set,
    /// Whether it is needed after the window.
    pub(super) stays: bool,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct Window {
    /// In the present sequence.
    pub(super) ops: Vec<Op>,
    pub(super) tensors: Vec<Local>,
    /// Per operator what must run before it and after it in the window.
    pub(super) before: Vec<Set>,
    after: Vec<Set>,
    /// Per operator the tensors it creates that outlive it, and those it uses.
    pub(super) creates: Vec<Vec<usize>>,
    pub(super) uses: Vec<Vec<usize>>,
    /// Per operator its outputs and workspace.
    transient: Vec<u64>,
    /// Per operator the permitted pairs whose input can die there: the input's number in the
    /// window, the output's rank.
    permissions: Vec<Vec<(Ten, Ten)>>,
    /// Bytes that cross the window's beginning and its end.
    pub(super) first_bytes: u64,
    pub(super) last_bytes: u64,
    /// Bytes of entering tensors without use: live during the first step alone, and only if the
    /// window begins there.
    pub(super) unused_bytes: u64,
}

/// All of a window that decides which of its sequences have which live bytes, apart from the bytes
/// that are live all the time. Windows of one shape, as repeated layers make them, have the same
/// solutions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    before: Vec<Set>,
    tensors: Vec<Local>,
    creates: Vec<Vec<usize>>,
    uses: Vec<Vec<usize>>,
    transient: Vec<u64>,
    /// Outputs counted from the operator's first.
    permissions: Vec<Vec<(Ten, Ten)>>,
    unused_bytes: u64,
}

/// What running one operator costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cost {
    /// Live bytes while it runs.
    pub(super) during: u64,
    /// Bytes that cross the state on the other side of it.
    pub(super) beyond: u64,
}

impl Window {
    pub(super) fn new(problem: &Problem, order: &[Op], profile: &Profile, range: Range<usize>) -> Self {
        let ops: Vec<Op> = order[range.clone()].to_vec();
        let place: BTreeMap<Op, usize> = ops.iter().enumerate().map(|(at, &op)| (op, at)).collect();
        let set = |members: &[Op]| {
            let mut set = Set::none(ops.len());
            members.iter().filter_map(|op| place.get(op)).for_each(|&at| set.toggle(at));
            set
        };
        let mut window = Window {
            tensors: Vec::new(),
            before: ops.iter().map(|&op| set(problem.predecessors.row(op))).collect(),
            after: ops.iter().map(|&op| set(problem.successors.row(op))).collect(),
            creates: vec![Vec::new(); ops.len()],
            uses: vec![Vec::new(); ops.len()],
            transient: ops.iter().map(|&op| problem.transient(op)).collect(),
            permissions: vec![Vec::new(); ops.len()],
            first_bytes: 0,
            last_bytes: 0,
            unused_bytes: 0,
            ops: Vec::new(),
        };
        for (tensor, item) in problem.tensors.iter().enumerate() {
            let users = problem.users.row(Ten::at(tensor));
            let leaves = item.residency == crate::graph::Residency::Leaves;
            if users.is_empty() && !leaves {
                if item.creator == NONE && range.start == 0 {
                    window.unused_bytes += item.size;
                }
                continue;
            }
            let start = profile.lifetimes.start[tensor] as usize;
            if (item.creator == NONE || start < range.start) && profile.lifetimes.end[tensor] as usize > range.start {
                window.first_bytes += item.size;
            }
        }
        let mut numbers: BTreeMap<Ten, usize> = BTreeMap::new();
        for (at, &op) in ops.iter().enumerate() {
            for &tensor in problem.creates.row(op).iter().chain(problem.uses.row(op)) {
                let item = &problem.tensors[tensor.index()];
                let users = problem.users.row(tensor);
                let creator = place.get(&item.creator).copied();
                let stays = item.residency == crate::graph::Residency::Leaves
                    || profile.lifetimes.end[tensor.index()] as usize > range.end;
                if (stays && creator.is_none()) || (!stays && users.is_empty()) {
                    continue;
                }
                let number = *numbers.entry(tensor).or_insert_with(|| {
                    window.tensors.push(Local { size: item.size, creator, users: set(users), stays });
                    window.tensors.len() - 1
                });
                let list = if creator == Some(at) { &mut window.creates } else { &mut window.uses };
                list[at].push(number);
            }
            for &(_, input, output) in problem.permissions(op) {
                if let Some(&number) = numbers.get(&input).filter(|&&number| !window.tensors[number].stays) {
                    window.permissions[at].push((Ten::at(number), output));
                }
            }
        }
        window.ops = ops;
        let mut done = window.start();
        window.last_bytes = window.first_bytes;
        for op in 0..window.len() {
            window.last_bytes = window.run(op, &done, window.last_bytes).beyond;
            done.toggle(op);
        }
        window
    }

    /// Per operator all in the window that must run before it, or after it.
    pub(super) fn closure(&self, before: bool) -> Vec<Set> {
        let mut closed = if before { self.before.clone() } else { self.after.clone() };
        // Constraints go forward in the present sequence.
        let mut extend = |op: usize| {
            for next in closed[op].clone().iter() {
                let further = closed[next].clone();
                closed[op].include(&further);
            }
        };
        if before {
            (0..self.len()).for_each(&mut extend)
        } else {
            (0..self.len()).rev().for_each(&mut extend)
        }
        closed
    }

    /// Bytes that live only while the operator runs.
    pub(super) fn passing_bytes(&self, op: usize) -> u64 {
        self.transient[op] - self.born(op)
    }

    /// Permitted pairs (input's number, output) whose input is not needed after the window.
    pub(super) fn permissions(&self, op: usize) -> &[(Ten, Ten)] {
        &self.permissions[op]
    }

    pub(super) fn len(&self) -> usize {
        self.ops.len()
    }

    pub(super) fn shape(&self) -> Shape {
        let from_first = |pairs: &Vec<(Ten, Ten)>| {
            let first = pairs.iter().map(|&(_, output)| output.index()).min().unwrap_or(0);
            pairs.iter().map(|&(input, output)| (input, Ten::at(output.index() - first))).collect()
        };
        Shape {
            before: self.before.clone(),
            tensors: self.tensors.clone(),
            creates: self.creates.clone(),
            uses: self.uses.clone(),
            transient: self.transient.clone(),
            permissions: self.permissions.iter().map(from_first).collect(),
            unused_bytes: self.unused_bytes,
        }
    }

    /// The state in which nothing has run.
    pub(super) fn start(&self) -> Set {
        Set::none(self.len())
    }

    /// The state in which everything has run.
    pub(super) fn end(&self) -> Set {
        self.prefix(self.len())
    }

    /// The state in which the first `count` of the present sequence have run.
    pub(super) fn prefix(&self, count: usize) -> Set {
        let mut done = self.start();
        (0..count).for_each(|op| done.toggle(op));
        done
    }

    /// Whether the operator can run next.
    pub(super) fn can_run(&self, op: usize, done: &Set) -> bool {
        !done.contains(op) && self.before[op].is_subset(done)
    }

    /// Whether the operator can be the one that ran last.
    pub(super) fn can_undo(&self, op: usize, done: &Set) -> bool {
        done.contains(op) && !self.after[op].meets(done)
    }

    /// What it costs to run `op` in the state `done`, which `bytes` cross; beyond is the state
    /// after it.
    pub(super) fn run(&self, op: usize, done: &Set, bytes: u64) -> Cost {
        Cost { during: self.during(op, done, bytes), beyond: bytes + self.born(op) - self.dying(op, done) }
    }

    /// What it costs that `op` ran last before a state which `bytes` cross; `done` and beyond are
    /// the state before it.
    pub(super) fn undo(&self, op: usize, done: &Set, bytes: u64) -> Cost {
        let before = bytes + self.dying(op, done) - self.born(op);
        Cost { during: self.during(op, done, before), beyond: before }
    }

    /// The most live bytes while the window runs in this sequence.
    pub(super) fn peak(&self, sequence: &[usize]) -> u64 {
        let (mut done, mut bytes, mut peak) = (self.start(), self.first_bytes, 0);
        for &op in sequence {
            let cost = self.run(op, &done, bytes);
            peak = peak.max(cost.during);
            bytes = cost.beyond;
            done.toggle(op);
        }
        peak
    }

    /// The pairs that save the most if `op` runs in the state `done`.
    pub(super) fn matching(&self, op: usize, done: &Set) -> Vec<(Ten, Ten)> {
        let pairs: Vec<(Ten, Ten)> = self.permissions[op]
            .iter()
            .filter(|&&(input, _)| self.tensors[input.index()].users.lacks_only(done, op))
            .copied()
            .collect();
        largest_matching(&pairs)
    }

    fn during(&self, op: usize, done: &Set, bytes: u64) -> u64 {
        let saved: u64 = self.matching(op, done).iter().map(|&(input, _)| self.tensors[input.index()].size).sum();
        let is_first = self.unused_bytes > 0 && done.iter().next().is_none();
        bytes + self.transient[op] - saved + if is_first { self.unused_bytes } else { 0 }
    }

    fn born(&self, op: usize) -> u64 {
        self.creates[op].iter().map(|&tensor| self.tensors[tensor].size).sum()
    }

    /// Bytes of the tensors whose last use in the window is `op` if `done` ran before it.
    fn dying(&self, op: usize, done: &Set) -> u64 {
        let dies = |tensor: &&usize| {
            let local = &self.tensors[**tensor];
            !local.stays && local.users.lacks_only(done, op)
        };
        self.uses[op].iter().filter(dies).map(|&tensor| self.tensors[tensor].size).sum()
    }
}
