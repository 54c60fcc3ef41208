//! Hides communication behind computation where that takes no memory: launches of collectives move
//! forward in a plan's order, and waits for them back, as long as no figure of the plan rises.
//!
//! A *launch* is an operator of the sequence of collectives; its *wait* is the first operator that
//! a control edge leads to from it and that uses all tensors of the launch. A launch takes no time.
//! The collective then goes over its link when those before it there have ended, and the wait lasts
//! until it has ended; see the explanation of the model of communication.
//!
//! Launches keep their order among themselves, so every rank still launches the same sequence.

use crate::control::Watch;
use crate::cost::{self, after};
use crate::graph::{Graph, OperatorId, Residency, Sequence};
use crate::liveness::{Lifetimes, Profile};
use crate::plan::{Plan, Status};
use crate::problem::{Index, NONE, Op, Problem, Ten, step_by_operator};
use std::collections::BTreeMap;

/// How often launches and waits are looked at in turns.
const ROUNDS: usize = 3;
/// How many steps of orders may be looked at in all: some seconds' work at most.
const WORK: u64 = 2_000_000_000;

/// Moves launches and waits of a plan for one stream, and keeps what it promises: no byte more,
/// and no wait that is longer in all.
///
/// `graph` has an operator for each run, and `launches` says which of them launch collectives.
pub(super) fn hide(graph: &Graph, launches: impl Fn(OperatorId) -> bool, plan: &mut Plan, watch: &Watch) {
    let pairs = pairs(graph, launches);
    if pairs.is_empty() {
        return;
    }
    let problem = Problem::new(graph, plan.settings.reuse);
    let mut overlap = Overlap::new(graph, &problem, &pairs, plan);
    let before = overlap.order.clone();
    overlap.run(watch);
    if overlap.order != before {
        overlap.write(plan);
    }
}

/// Launches and their waits, by program position.
fn pairs(graph: &Graph, launches: impl Fn(OperatorId) -> bool) -> Vec<(OperatorId, OperatorId)> {
    let mut found: BTreeMap<u32, (OperatorId, OperatorId)> = BTreeMap::new();
    for &(launch, wait) in graph.control() {
        let (first, second) = (graph.operator(launch), graph.operator(wait));
        let uses = |tensor| second.reads.contains(tensor) || second.mutates.contains(tensor);
        let mut used = first.reads.iter().chain(&first.mutates).peekable();
        if launches(launch) && !launches(wait) && used.peek().is_some() && used.all(uses) {
            let known = found.entry(first.position).or_insert((launch, wait));
            if graph.operator(known.1).position > second.position {
                known.1 = wait;
            }
        }
    }
    found.into_values().collect()
}

/// Whether an operator of the graph is a launch.
pub(super) fn is_launch(graph: &Graph, id: OperatorId) -> bool {
    graph.operator(id).sequence == Some(Sequence::Collective)
}

/// A collective under way.
struct Transfer {
    launch: Op,
    wait: Op,
    ns: u64,
    link: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Computes,
    Launches,
    Waits,
}

/// When operators run, by the cost model.
struct Timeline {
    /// Per step when it is reached; the last entry is the end.
    reached: Vec<u64>,
    /// Per transfer when it is launched, when the link carries it, and when it has ended.
    launched: Vec<u64>,
    begins: Vec<u64>,
    ends: Vec<u64>,
    /// How long waits last in all.
    exposed: u64,
}

/// What a move has changed.
struct Undo {
    from: usize,
    window: Vec<Op>,
    sums: Vec<(u64, u64)>,
    tensors: Vec<(Ten, u32, u32, u64)>,
}

struct Overlap<'a> {
    problem: &'a Problem,
    /// In the order of their launches.
    transfers: Vec<Transfer>,
    role: Vec<Role>,
    /// Nanoseconds of every operator; 0 for launches and waits.
    ns: Vec<u64>,
    order: Vec<Op>,
    step: Vec<u32>,
    lives: Lifetimes,
    /// Per tensor its place in the pool.
    offset: Vec<u64>,
    pool_bytes: u64,
    /// Per tensor the operator at which another takes its memory, and that one.
    heir: Vec<Option<(Op, Ten)>>,
    /// Per tensor the one whose memory it takes.
    from: Vec<Option<Ten>>,
    /// Bytes that reuse saves at each operator, in the pool and beside it.
    saved: Vec<(u64, u64)>,
    /// Per step the bytes that are live, in the pool and beside it, without what reuse saves and
    /// without workspace.
    sums: Vec<(u64, u64)>,
    /// What no step exceeds: in the pool, beside it, both together.
    limits: (u64, u64, u64),
    /// Marks operators, by the number of the search that has met them.
    mark: Vec<u32>,
    searches: u32,
    work: u64,
}

impl<'a> Overlap<'a> {
    fn new(graph: &Graph, problem: &'a Problem, pairs: &[(OperatorId, OperatorId)], plan: &Plan) -> Self {
        let position = |id: OperatorId| graph.operator(id).position;
        let order: Vec<Op> = plan.order.iter().map(|&id| position(id)).collect();
        let step = step_by_operator(&order);
        let mut ns: Vec<u64> = graph.program_order().iter().map(|&id| cost::operator_ns(graph, id)).collect();
        let mut role = vec![Role::Computes; order.len()];
        for &id in graph.program_order().iter().filter(|&&id| is_launch(graph, id)) {
            role[position(id) as usize] = Role::Launches;
        }
        let mut transfers: Vec<Transfer> = Vec::with_capacity(pairs.len());
        for &(launch, wait) in pairs {
            let link = graph.operator(launch).link;
            let (launch, wait) = (position(launch), position(wait));
            transfers.push(Transfer { launch, wait, ns: std::mem::take(&mut ns[launch as usize]), link });
            (role[launch as usize], role[wait as usize]) = (Role::Launches, Role::Waits);
            ns[wait as usize] = 0;
        }
        transfers.sort_by_key(|transfer| step[transfer.launch as usize]);
        let count = problem.tensors.len();
        let mut rank = vec![Ten::NONE; graph.tensors().len()];
        let mut offset = vec![0; count];
        for tensor in problem.tensor_ranks() {
            let id = problem.tensor_id(tensor);
            rank[id.index()] = tensor;
            offset[tensor.index()] = plan.offsets[id.index()].unwrap_or(0);
        }
        let (mut heir, mut from) = (vec![None; count], vec![None; count]);
        let mut saved = vec![(0, 0); order.len()];
        for pair in &plan.reuse {
            let (input, output) = (rank[pair.input.index()], rank[pair.output.index()]);
            let item = problem.tensors[output.index()];
            heir[input.index()] = Some((item.creator, output));
            from[output.index()] = Some(input);
            let saved: &mut (u64, u64) = &mut saved[item.creator as usize];
            *if item.in_pool() { &mut saved.0 } else { &mut saved.1 } += item.size;
        }
        let lives = Lifetimes::new(problem, &order);
        let mut overlap = Overlap {
            problem,
            transfers,
            role,
            ns,
            sums: vec![(0, 0); order.len()],
            mark: vec![0; order.len()],
            order,
            step,
            lives,
            offset,
            pool_bytes: plan.pool_bytes,
            heir,
            from,
            saved,
            limits: (plan.pool_peak_bytes, plan.outside_bytes, plan.peak_bytes),
            searches: 0,
            work: WORK,
        };
        overlap.sums = overlap.summed();
        overlap
    }

    /// Live bytes per step.
    fn summed(&self) -> Vec<(u64, u64)> {
        let mut changes = vec![(0u64, 0u64); self.order.len() + 1];
        for (tensor, item) in self.problem.tensors.iter().enumerate() {
            let (start, end) = (self.lives.start[tensor] as usize, self.lives.end[tensor] as usize);
            for (at, sign) in [(start, 1), (end, u64::MAX)] {
                let change = if item.in_pool() { &mut changes[at].0 } else { &mut changes[at].1 };
                *change = change.wrapping_add(item.size.wrapping_mul(sign));
            }
        }
        let mut now = (0u64, 0u64);
        let sum = changes.iter().map(|change| {
            now = (now.0.wrapping_add(change.0), now.1.wrapping_add(change.1));
            now
        });
        sum.take(self.order.len()).collect()
    }

    fn run(&mut self, watch: &Watch) {
        let mut exposed = self.timeline().exposed;
        for _ in 0..ROUNDS {
            for at in 0..self.transfers.len() {
                if self.work == 0 || watch.check().is_err() {
                    return;
                }
                self.launch_earlier(at);
            }
            for at in (0..self.transfers.len()).rev() {
                if self.work == 0 || watch.check().is_err() {
                    return;
                }
                self.wait_later(at);
            }
            let now = self.timeline().exposed;
            if now == exposed {
                return;
            }
            exposed = now;
        }
    }

    fn spend(&mut self, steps: usize) {
        self.work = self.work.saturating_sub(steps as u64);
    }

    /// One operator after the other; beside them the collectives of each link, one after the other.
    fn timeline(&mut self) -> Timeline {
        self.spend(self.order.len());
        let count = self.transfers.len();
        let mut number = vec![0; self.order.len()];
        for (at, transfer) in self.transfers.iter().enumerate() {
            number[transfer.launch as usize] = at;
            number[transfer.wait as usize] = at;
        }
        let mut line = Timeline {
            reached: Vec::with_capacity(self.order.len() + 1),
            launched: vec![0; count],
            begins: vec![0; count],
            ends: vec![0; count],
            exposed: 0,
        };
        let mut now = 0;
        let mut free_of: BTreeMap<u32, u64> = BTreeMap::new();
        for &op in &self.order {
            line.reached.push(now);
            let at = number[op as usize];
            let is_known = self.transfers.get(at).is_some_and(|one| one.launch == op || one.wait == op);
            match self.role[op as usize] {
                Role::Launches if is_known => {
                    line.launched[at] = now;
                    let free = free_of.entry(self.transfers[at].link).or_default();
                    line.begins[at] = now.max(*free);
                    *free = after(line.begins[at], self.transfers[at].ns);
                    line.ends[at] = *free;
                }
                Role::Waits => {
                    line.exposed = after(line.exposed, line.ends[at].saturating_sub(now));
                    now = now.max(line.ends[at]);
                }
                _ => now = after(now, self.ns[op as usize]),
            }
        }
        line.reached.push(now);
        line
    }

    /// Moves a launch, with what it needs, so far forward that its wait lasts no longer than it
    /// must, or as far as memory permits.
    fn launch_earlier(&mut self, at: usize) {
        let line = self.timeline();
        let link = self.transfers[at].link;
        // By when it has to begin so that no wait of its link lasts.
        let mut due = i128::MAX;
        for transfer in self.transfers[at..].iter().rev().filter(|one| one.link == link) {
            due = due.min(i128::from(line.reached[self.step[transfer.wait as usize] as usize]));
            due -= i128::from(transfer.ns);
        }
        let before = self.transfers[..at].iter().rposition(|one| one.link == link);
        let free = before.map_or(0, |number| line.ends[number]);
        let target = u64::try_from(due).unwrap_or(0).max(free);
        if line.launched[at] <= target {
            return;
        }
        let places = self.places_before(self.transfers[at].launch, target, &line);
        self.try_places(&places, line.exposed, |overlap, place| {
            overlap.window_before(overlap.transfers[at].launch, place)
        });
    }

    /// Moves a wait, with what needs it, so far back that it lasts no longer, or as far as memory
    /// permits.
    fn wait_later(&mut self, at: usize) {
        let line = self.timeline();
        let wait = self.transfers[at].wait;
        let lasts = line.ends[at].saturating_sub(line.reached[self.step[wait as usize] as usize]);
        if lasts == 0 {
            return;
        }
        let places = self.places_after(wait, lasts);
        self.try_places(&places, line.exposed, |overlap, place| overlap.window_after(wait, place));
    }

    /// Makes the move to the farthest of some places, the nearest first, to which it is possible;
    /// if it is possible to one, then mostly to all nearer ones.
    fn try_places(
        &mut self,
        places: &[usize],
        exposed: u64,
        window: impl Fn(&mut Self, usize) -> (usize, Vec<Op>, Vec<Op>),
    ) {
        let (mut some, mut none) = (0, places.len() + 1);
        // The number of places that are gone past; the farthest first.
        let mut next = places.len();
        while some + 1 < none && next > 0 {
            let (from, ops, moved) = window(self, places[next - 1]);
            match self.moved(from, &ops, &moved) {
                // Try farther from where it stands; the nearest places are the worst.
                Some(undo) if self.is_worth(exposed) => {
                    if next == places.len() {
                        return;
                    }
                    some = next;
                    self.undo(undo);
                }
                Some(undo) => {
                    self.undo(undo);
                    none = next;
                }
                None => none = next,
            }
            next = some + (none - some) / 2;
            if next == some {
                break;
            }
        }
        if some > 0 {
            let (from, ops, moved) = window(self, places[some - 1]);
            let _ = self.moved(from, &ops, &moved);
        }
    }

    /// Whether waits are no longer than before.
    fn is_worth(&mut self, exposed: u64) -> bool {
        self.timeline().exposed <= exposed
    }

    /// Steps before which a launch could run, the nearest first: each saves some time, and the last
    /// is early enough for the target.
    fn places_before(&mut self, launch: Op, target: u64, line: &Timeline) -> Vec<usize> {
        let (mut places, mut own) = (Vec::new(), 0);
        let search = self.search();
        self.need(launch, search);
        for step in (0..self.step[launch as usize] as usize).rev() {
            self.spend(1);
            let op = self.order[step];
            let is_needed = self.mark[op as usize] == search;
            match self.role[op as usize] {
                Role::Launches => break,
                Role::Waits if is_needed => break,
                _ if is_needed => {
                    own = after(own, self.ns[op as usize]);
                    self.need(op, search);
                }
                _ if line.reached[step] < line.reached[step + 1] => {
                    places.push(step);
                    if after(line.reached[step], own) <= target {
                        break;
                    }
                }
                _ => {}
            }
        }
        places
    }

    /// The operators from a step up to a launch, with those first that it needs and itself after
    /// these; where they begin, and which have moved.
    fn window_before(&mut self, launch: Op, place: usize) -> (usize, Vec<Op>, Vec<Op>) {
        let search = self.search();
        self.need(launch, search);
        let (mut moved, mut left) = (vec![launch], Vec::new());
        for step in (place..self.step[launch as usize] as usize).rev() {
            let op = self.order[step];
            if self.mark[op as usize] == search {
                self.need(op, search);
                moved.push(op);
            } else {
                left.push(op);
            }
        }
        self.spend(moved.len() + left.len());
        moved.reverse();
        let ops = moved.iter().copied().chain(left.into_iter().rev()).collect();
        (place, ops, moved)
    }

    /// Steps after which a wait could run, the nearest first, the last so far off that so much time
    /// has passed.
    fn places_after(&mut self, wait: Op, lasts: u64) -> Vec<usize> {
        let (mut places, mut passed) = (Vec::new(), 0);
        let search = self.search();
        self.mark[wait as usize] = search;
        for step in self.step[wait as usize] as usize + 1..self.order.len() {
            self.spend(1);
            let op = self.order[step];
            if self.problem.predecessors.row(op).iter().any(|&before| self.mark[before as usize] == search) {
                if self.role[op as usize] != Role::Computes {
                    break;
                }
                self.mark[op as usize] = search;
            } else if self.ns[op as usize] > 0 {
                places.push(step);
                passed = after(passed, self.ns[op as usize]);
                if passed >= lasts {
                    break;
                }
            }
        }
        places
    }

    /// The operators from a wait to a step, with the wait last, and before those that need it.
    fn window_after(&mut self, wait: Op, place: usize) -> (usize, Vec<Op>, Vec<Op>) {
        let search = self.search();
        self.mark[wait as usize] = search;
        let from = self.step[wait as usize] as usize;
        let (mut moved, mut ops) = (vec![wait], Vec::new());
        for step in from + 1..=place {
            let op = self.order[step];
            if self.problem.predecessors.row(op).iter().any(|&before| self.mark[before as usize] == search) {
                self.mark[op as usize] = search;
                moved.push(op);
            } else {
                ops.push(op);
            }
        }
        self.spend(moved.len() + ops.len());
        ops.extend(&moved);
        (from, ops, moved)
    }

    fn search(&mut self) -> u32 {
        self.searches += 1;
        self.searches
    }

    /// Marks what an operator needs.
    fn need(&mut self, op: Op, search: u32) {
        for &before in self.problem.predecessors.row(op) {
            self.mark[before as usize] = search;
        }
    }

    /// Puts operators in another order, from a step on, and finds new places for tensors that are
    /// in the way; `None`, and nothing is changed, where that takes more memory.
    fn moved(&mut self, from: usize, ops: &[Op], moved: &[Op]) -> Option<Undo> {
        let to = from + ops.len();
        let problem = self.problem;
        let touched = |op: Op| problem.creates.row(op).iter().chain(problem.uses.row(op)).copied();
        let mut tensors: Vec<Ten> = ops.iter().flat_map(|&op| touched(op)).collect();
        tensors.sort_unstable();
        tensors.dedup();
        let undo = Undo {
            from,
            window: self.order[from..to].to_vec(),
            sums: self.sums[from..to].to_vec(),
            tensors: tensors
                .iter()
                .map(|&tensor| {
                    let at = tensor.index();
                    (tensor, self.lives.start[at], self.lives.end[at], self.offset[at])
                })
                .collect(),
        };
        self.put(from, ops);
        self.live_anew(&tensors, from, to);
        let mut by_move: Vec<Ten> = moved.iter().flat_map(|&op| touched(op)).collect();
        by_move.sort_unstable();
        by_move.dedup();
        if self.is_within(from, to) && self.hands_over(&tensors) && self.finds_places(&by_move, from, to) {
            Some(undo)
        } else {
            self.undo(undo);
            None
        }
    }

    fn put(&mut self, from: usize, ops: &[Op]) {
        self.order[from..from + ops.len()].copy_from_slice(ops);
        for (at, &op) in ops.iter().enumerate() {
            self.step[op as usize] = (from + at) as u32;
        }
    }

    fn undo(&mut self, undo: Undo) {
        self.put(undo.from, &undo.window);
        self.sums[undo.from..undo.from + undo.sums.len()].copy_from_slice(&undo.sums);
        for (tensor, start, end, offset) in undo.tensors {
            let at = tensor.index();
            (self.lives.start[at], self.lives.end[at], self.offset[at]) = (start, end, offset);
        }
    }

    /// Lifetimes of tensors that operators between two steps make or use, and live bytes there.
    fn live_anew(&mut self, tensors: &[Ten], from: usize, to: usize) {
        let mut changes = vec![(0u64, 0u64); to - from + 1];
        for &tensor in tensors {
            let at = tensor.index();
            let item = &self.problem.tensors[at];
            let users = self.problem.users.row(tensor);
            self.work = self.work.saturating_sub(users.len() as u64);
            let old = (self.lives.start[at], self.lives.end[at]);
            let start = if item.creator == NONE { 0 } else { self.step[item.creator as usize] };
            let last = users.iter().map(|&op| self.step[op as usize]).max().unwrap_or(0).max(start);
            let end = if item.residency == Residency::Leaves { self.order.len() as u32 } else { last + 1 };
            (self.lives.start[at], self.lives.end[at]) = (start, end);
            for ((start, end), sign) in [(old, u64::MAX), ((start, end), 1)] {
                let clip = |step: u32| (step as usize).clamp(from, to) - from;
                for (place, sign) in [(clip(start), sign), (clip(end), sign.wrapping_mul(u64::MAX))] {
                    let change = if item.in_pool() { &mut changes[place].0 } else { &mut changes[place].1 };
                    *change = change.wrapping_add(item.size.wrapping_mul(sign));
                }
            }
        }
        let mut more = (0u64, 0u64);
        for (sum, change) in self.sums[from..to].iter_mut().zip(&changes) {
            more = (more.0.wrapping_add(change.0), more.1.wrapping_add(change.1));
            *sum = (sum.0.wrapping_add(more.0), sum.1.wrapping_add(more.1));
        }
    }

    /// Whether no step between two takes more than the plan does.
    fn is_within(&self, from: usize, to: usize) -> bool {
        (from..to).all(|step| {
            let op = self.order[step] as usize;
            let in_pool = self.sums[step].0 - self.saved[op].0;
            let beside = self.sums[step].1 - self.saved[op].1 + self.problem.workspace[op];
            in_pool <= self.limits.0 && beside <= self.limits.1 && in_pool + beside <= self.limits.2
        })
    }

    /// Whether tensors whose memory others take still die where these are made.
    fn hands_over(&self, tensors: &[Ten]) -> bool {
        tensors.iter().all(|tensor| {
            self.heir[tensor.index()].is_none_or(|(op, _)| self.lives.end[tensor.index()] == self.step[op as usize] + 1)
        })
    }

    /// Whether all of some tensors lie apart from what is live with them, if need be at other
    /// places in the pool. Others have kept their steps to each other.
    fn finds_places(&mut self, tensors: &[Ten], from: usize, to: usize) -> bool {
        let lives = |overlap: &Self, tensor: Ten| {
            let at = tensor.index();
            (overlap.lives.start[at] as usize) < to && overlap.lives.end[at] as usize > from
        };
        self.spend(self.problem.tensors.len());
        let in_pool = |&tensor: &Ten| self.problem.tensors[tensor.index()].in_pool();
        let near: Vec<Ten> =
            self.problem.tensor_ranks().filter(in_pool).filter(|&tensor| lives(self, tensor)).collect();
        for &tensor in tensors.iter().filter(|&tensor| self.problem.tensors[tensor.index()].in_pool()) {
            self.spend(near.len());
            let mut in_the_way = near.iter().filter(|&&other| self.meets(tensor, other));
            if in_the_way.all(|&other| self.lies_apart(tensor, other)) {
                continue;
            }
            // Others lie where it lies.
            if self.heir[tensor.index()].is_some() || self.from[tensor.index()].is_some() {
                return false;
            }
            let Some(offset) = self.gap(tensor) else { return false };
            self.offset[tensor.index()] = offset;
        }
        true
    }

    /// Whether two tensors are live at one time, and neither takes the other's memory.
    fn meets(&self, one: Ten, other: Ten) -> bool {
        let (a, b) = (one.index(), other.index());
        let is_heir = |from: usize, to: Ten| self.heir[from].is_some_and(|(_, heir)| heir == to);
        one != other
            && self.lives.start[a] < self.lives.end[b]
            && self.lives.start[b] < self.lives.end[a]
            && !is_heir(a, other)
            && !is_heir(b, one)
    }

    fn lies_apart(&self, one: Ten, other: Ten) -> bool {
        let (a, b) = (self.offset[one.index()], self.offset[other.index()]);
        a + self.problem.size(one) <= b || b + self.problem.size(other) <= a
    }

    /// The smallest room for a tensor among all that are live with it, the lowest of equals.
    fn gap(&mut self, tensor: Ten) -> Option<u64> {
        self.spend(self.problem.tensors.len());
        let item = &self.problem.tensors[tensor.index()];
        let others = self.problem.tensor_ranks().filter(|&other| self.problem.tensors[other.index()].in_pool());
        let met = others.filter(|&other| self.meets(tensor, other));
        let mut taken: Vec<(u64, u64)> = met
            .map(|other| {
                let offset = self.offset[other.index()];
                (offset, offset + self.problem.size(other))
            })
            .collect();
        taken.sort_unstable();
        taken.push((self.pool_bytes, self.pool_bytes));
        let (mut best, mut free) = (None, 0u64);
        for (start, end) in taken {
            let offset = free.next_multiple_of(item.alignment);
            if offset + item.size <= start {
                let room = start - free;
                if best.is_none_or(|(least, _)| room < least) {
                    best = Some((room, offset));
                }
            }
            free = free.max(end);
        }
        best.map(|(_, offset)| offset)
    }

    /// Gives the plan this order and layout.
    fn write(&self, plan: &mut Plan) {
        let problem = self.problem;
        plan.order = self.order.iter().map(|&op| problem.operator_id(op)).collect();
        problem.write_offsets(&self.offset, &mut plan.offsets);
        let is_pair = |pair: &(Ten, Ten)| self.heir[pair.0.index()].is_some_and(|(_, heir)| heir == pair.1);
        let profile = Profile::choosing(problem, &self.order, |dying| dying.iter().copied().filter(is_pair).collect());
        plan.peak_bytes = profile.peak;
        plan.pool_peak_bytes = profile.pool_peak;
        plan.outside_bytes = profile.unpooled_peak;
        let ends = problem.tensor_ranks().filter(|&tensor| problem.tensors[tensor.index()].in_pool());
        plan.pool_bytes = ends.map(|tensor| self.offset[tensor.index()] + problem.size(tensor)).max().unwrap_or(0);
        let total = plan.pool_bytes + plan.outside_bytes + plan.persistent_bytes;
        if total != plan.total_bytes {
            plan.total_bytes = total;
            let timed_out = plan.status == Status::TimedOut;
            plan.status = Status::of(total, plan.total_lower_bound_bytes, timed_out);
            plan.exact.conclude(total == plan.total_lower_bound_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{GraphBuilder, Kind, Operator, Phase, Tensor, TensorId};
    use crate::optimize::{Control, Settings, Stages, search_plan};
    use crate::rng::Random;
    use crate::verify::verify;

    const UNIT_NS: u64 = 1000;

    /// A step of a few operators, some of which begin collectives on buffers that they make.
    fn step(seed: u64, residency: Residency) -> Graph {
        let mut random = Random::new(seed);
        let mut builder = GraphBuilder::new("step", "cpu", 64);
        let mut tensor = |builder: &mut GraphBuilder, residency| {
            let tensor = Tensor {
                name: format!("t{}", builder.num_tensors()),
                size_bytes: 64 * (1 + random.below(3)),
                kind: Kind::Temporary,
                residency,
                alignment_bytes: 0,
            };
            builder.tensor(tensor).unwrap()
        };
        let mut random = Random::new(seed ^ 0x55);
        let mut made = vec![tensor(&mut builder, Residency::Persistent)];
        while builder.num_operators() < 8 {
            let ns = UNIT_NS * (1 + random.below(9));
            let source = made[random.below(made.len() as u64) as usize];
            let at = builder.num_operators() as u32;
            let target = tensor(&mut builder, residency);
            let link = random.below(2) as u32;
            let mut add = |name: &str, reads: &[TensorId], creates: &[TensorId], mutates: &[TensorId], time_ns| {
                let sequence = (name == "launch").then_some(Sequence::Collective);
                let (reads, creates, mutates) = (reads.to_vec(), creates.to_vec(), mutates.to_vec());
                let position = builder.num_operators() as u32;
                let operator = Operator::new(name, position, Phase::Forward);
                let link = if name == "launch" { link } else { 0 };
                builder.operator(Operator { reads, creates, mutates, time_ns, sequence, link, ..operator }).unwrap()
            };
            if at < 6 && random.once_in(2) {
                add("empty", &[], &[target], &[], UNIT_NS);
                let launch = add("launch", &[source], &[], &[target], 3 * ns);
                let wait = add("wait", &[source], &[], &[target], 1);
                builder.control(launch, wait);
            } else {
                let other = made[random.below(made.len() as u64) as usize];
                let reads = if other == source { vec![source] } else { vec![source, other] };
                add("compute", &reads, &[target], &[], ns);
            }
            made.push(target);
        }
        builder.build().unwrap()
    }

    /// A plan that communication has no part in.
    fn planned(graph: &Graph) -> Plan {
        let (settings, control) = (Settings::default(), Control::default());
        let watch = Watch::new(&control, None);
        let mut stages = Stages { control: &control, timings: Vec::new() };
        search_plan(graph, &settings, &control, &watch, &mut stages).unwrap()
    }

    fn exposed(graph: &Graph, problem: &Problem, plan: &Plan) -> u64 {
        let pairs = pairs(graph, |id| is_launch(graph, id));
        Overlap::new(graph, problem, &pairs, plan).timeline().exposed
    }

    #[test]
    fn no_figure_rises_and_waits_are_no_longer() {
        let mut shorter = 0;
        for seed in 0..400 {
            let graph = step(seed, Residency::StepLocal);
            let problem = Problem::new(&graph, true);
            let plan = planned(&graph);
            let mut moved = plan.clone();
            hide(&graph, |id| is_launch(&graph, id), &mut moved, &Watch::default());
            verify(&graph, &moved).unwrap();
            assert!(moved.total_bytes <= plan.total_bytes && moved.peak_bytes <= plan.peak_bytes);
            assert!(moved.pool_peak_bytes <= plan.pool_peak_bytes && moved.outside_bytes <= plan.outside_bytes);
            let (before, after) = (exposed(&graph, &problem, &plan), exposed(&graph, &problem, &moved));
            assert!(after <= before, "{seed}: {before} {after}");
            shorter += u32::from(after < before);
        }
        assert!(shorter > 100, "{shorter}");
    }

    #[test]
    fn most_small_steps_wait_as_little_as_in_any_order_of_their_bytes() {
        let (mut reached, mut all) = (0, 0);
        for seed in 0..150 {
            let graph = step(seed, Residency::Unpooled);
            let problem = Problem::new(&graph, true);
            let mut plan = planned(&graph);
            let limit = plan.peak_bytes;
            hide(&graph, |id| is_launch(&graph, id), &mut plan, &Watch::default());
            let found = exposed(&graph, &problem, &plan);
            let mut least = u64::MAX;
            problem.for_each_order(&mut |order| {
                if Profile::new(&problem, order).peak <= limit {
                    let other =
                        Plan { order: order.iter().map(|&op| problem.operator_id(op)).collect(), ..plan.clone() };
                    least = least.min(exposed(&graph, &problem, &other));
                }
            });
            assert!(least <= found, "{seed}");
            all += 1;
            reached += u32::from(least == found);
        }
        assert!(reached * 10 >= all * 8, "{reached} of {all}");
    }
}
