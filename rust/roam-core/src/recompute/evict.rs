//! Eviction with knowledge of the future: runs the operators in their order, drops tensors where
//! the limit asks for it or where they had better be dropped anyway, and makes them again when they
//! are needed.
//!
//! Terms:
//!
//! - *free, drop*: to give up memory because nothing needs the tensor any more; although it is
//!   needed again.
//! - *chain*: the operators that have to run to make a tensor again: its creator, its mutators, and
//!   the same for inputs that are not alive at a version that serves. A tensor is not dropped if
//!   its chain is too long, or has an operator that may not run again, or not as late.
//! - *score*: b^i g^j / t^k times a factor, the *taste*; the *candidate* with the highest is
//!   dropped first. g is the *gap*, the time until the next use, measured by weights of the places;
//!   t is the time of the chain; b is the tensor's bytes less those of inputs that have to live
//!   longer, averaged over the gap.
//! - *wanted*: a live input of a dropped tensor's chain, at the place of that tensor's next use; it
//!   counts as a use.
//! - *replay, hold*: the runs that make a missing input again; what they and the operator use is
//!   held meanwhile, and dropped only if nothing else makes room for an extra run.
//! - *pin*: an input of a run whose inputs are all alive is not dropped until the run is over,
//!   except as the last resort.
//! - *settle*: after a run, each tensor that it used or made, unless held or pinned, is freed,
//!   dropped at once (if the policy drops early and the score is high), or becomes a candidate.
//! - *scrape*: if candidates do not make enough room: look at all live tensors that can be made
//!   again; for an extra run, drop held ones, those held for the outermost runs first; as the last
//!   resort the run drops an input whose memory its output takes. If this is not enough, the
//!   eviction fails.
//!
//! An eviction also fails if a dropped tensor cannot be made again because a mutator changed
//! for good what it is made of. Then a new one begins, which keeps this tensor until the place of
//! the failure.

use super::model::{Model, NONE, Use};
use crate::graph::Residency;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Exponents of a score are halves, so that scores are made of products and square roots alone and
/// are the same on every machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exponents {
    pub(super) bytes: u8,
    pub(super) gap: u8,
    pub(super) time: u8,
}

/// What is dropped.
#[derive(Clone, Debug)]
pub(super) struct Policy<'a> {
    /// Exponents of the score by which the tensor to drop is chosen when there is no room.
    pub(super) forced: Exponents,
    /// Exponents of the score by which tensors are dropped although there is room, and the least
    /// score at which they are.
    pub(super) early: Option<(Exponents, f64)>,
    /// Per place how much holding a byte there counts, summed up to the place; one more entry than
    /// operators.
    pub(super) weight: &'a [f64],
    /// Per tensor a factor by which its scores are multiplied.
    pub(super) taste: &'a [f64],
    /// Per tensor the place until which it is kept once it cannot be made again; 0 for most.
    pub(super) kept_until: &'a [u32],
    /// Per tensor the place before which it is not dropped; 0 for most.
    pub(super) held_until: &'a [u32],
}

/// Why an eviction went no further: tensors that were given up, and later could not be made again
/// because what they are made of had changed for good; empty where something else was the reason.
pub(super) struct Failure {
    pub(super) missed: Vec<u32>,
    pub(super) place: u32,
}

/// The most operators that a tensor that is dropped may need to be made again.
const LONGEST_CHAIN: usize = 300;
/// How deep runs that are made for other runs may be nested.
const DEEPEST: u32 = 300;
/// How many times the inputs of a run are made at most: one of them may have to be dropped to make
/// another.
const ROUNDS: usize = 4;
/// A tensor is needed soon if it is needed before 1 / `SOON` of the step's operators have run.
const SOON: usize = 64;

/// The runs, late views left out; a failure where there was no room, or the work was used up.
pub(super) fn evict(model: &Model, limit: u64, policy: &Policy<'_>, work: &mut u64) -> Result<Vec<u32>, Failure> {
    let mut eviction = Eviction::new(model, limit, policy, *work);
    let result = (0..model.len() as u32).try_for_each(|op| eviction.first_run(op));
    *work = eviction.work;
    match result {
        Some(()) => Ok(eviction.runs),
        None => Err(Failure { missed: eviction.missed, place: eviction.now }),
    }
}

/// What a part of an eviction returns: `None` where the eviction cannot go on.
type Step = Option<()>;

#[derive(PartialEq)]
struct Candidate {
    score: f64,
    tensor: u32,
}

impl Eq for Candidate {}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.score.total_cmp(&other.score).then(other.tensor.cmp(&self.tensor))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

struct Eviction<'a> {
    model: &'a Model,
    limit: u64,
    policy: &'a Policy<'a>,
    work: u64,
    runs: Vec<u32>,
    /// The operator of the order that runs, or that others run for.
    now: u32,
    used: u64,
    is_alive: Vec<bool>,
    version: Vec<u32>,
    pins: Vec<u32>,
    /// Per tensor how many runs that are under way will use it, and how deep the last of these is
    /// nested in runs for other runs.
    holds: Vec<u32>,
    held_at: Vec<u32>,
    /// Per tensor the first of its users that is still to run.
    cursor: Vec<u32>,
    /// Per tensor that is not alive, when it will be made again.
    needed: Vec<u32>,
    /// Per tensor when others will be made from it: (place, other).
    wanted: Vec<BinaryHeap<Reverse<(u32, u32)>>>,
    candidates: BinaryHeap<Candidate>,
    /// Marks of the current walk along a chain.
    stamp: Vec<u32>,
    stamps: u32,
    stack: Vec<(u32, u32)>,
    /// Marks of the operators of the current replay.
    mark: Vec<u32>,
    marks: u32,
    /// See [`Failure`].
    missed: Vec<u32>,
}

/// What making a tensor again takes.
struct Chain {
    ns: u64,
    /// Bytes times weight for which inputs must be held longer.
    held: f64,
}

impl<'a> Eviction<'a> {
    fn new(model: &'a Model, limit: u64, policy: &'a Policy<'a>, work: u64) -> Self {
        let tensors = model.size.len();
        let is_there = |t: usize| model.creator[t] == NONE;
        Eviction {
            model,
            limit,
            policy,
            work,
            runs: Vec::with_capacity(2 * model.len()),
            now: 0,
            used: (0..tensors).filter(|&t| is_there(t)).map(|t| model.size[t]).sum(),
            is_alive: (0..tensors).map(is_there).collect(),
            version: vec![0; tensors],
            pins: vec![0; tensors],
            holds: vec![0; tensors],
            held_at: vec![0; tensors],
            cursor: vec![0; tensors],
            needed: vec![NONE; tensors],
            wanted: vec![BinaryHeap::new(); tensors],
            candidates: BinaryHeap::new(),
            stamp: vec![0; tensors],
            stamps: 0,
            stack: Vec::new(),
            mark: vec![0; model.len()],
            marks: 0,
            missed: Vec::new(),
        }
    }

    fn first_run(&mut self, op: u32) -> Step {
        if self.model.is_late[op as usize] {
            return Some(());
        }
        self.now = op;
        self.obtain(op, false, 0)?;
        self.run(op, false)
    }

    /// Makes sure that all that the run uses is alive, of the right version, and pinned.
    ///
    /// What is missing is made in the order of the step, as the step itself made it: so no more is
    /// alive on the way than was then, apart from what is held for the runs that it is made for.
    fn obtain(&mut self, op: u32, is_again: bool, depth: u32) -> Step {
        if depth > DEEPEST {
            return None;
        }
        for _ in 0..ROUNDS {
            let replay = self.missing(op, is_again)?;
            if replay.is_empty() {
                for used in self.model.used(op, is_again) {
                    self.pins[used.tensor as usize] += 1;
                }
                return Some(());
            }
            self.hold(op, is_again, depth);
            replay.iter().for_each(|&again| self.hold(again, true, depth + 1));
            for again in replay {
                if !self.is_made(again) {
                    self.make_siblings(again, depth + 1)?;
                    self.obtain(again, true, depth + 1)?;
                    self.release(again, true);
                    self.run(again, true)?;
                } else {
                    self.release(again, true);
                    for used in self.model.used(again, true) {
                        self.settle(used.tensor);
                    }
                }
            }
            // In the next round the inputs of `op` are pinned, unless one of them had to be dropped
            // to make another.
            self.release(op, is_again);
        }
        None
    }

    fn has(&self, used: &Use) -> bool {
        self.is_alive[used.tensor as usize] && self.version[used.tensor as usize] == used.version
    }

    /// The operators that must run again before a run, by place; `None` where one cannot.
    fn missing(&mut self, op: u32, is_again: bool) -> Option<Vec<u32>> {
        let model = self.model;
        let mut replay = Vec::new();
        let mut stack: Vec<Use> = model.used(op, is_again).filter(|used| !self.has(used)).collect();
        if stack.is_empty() {
            return Some(replay);
        }
        self.marks += 1;
        while let Some(Use { tensor, version, .. }) = stack.pop() {
            let at = tensor as usize;
            let is_newer = !self.is_alive[at] || self.version[at] > version;
            if is_newer && !model.can_remake[at] {
                return None;
            }
            let first = if is_newer { 0 } else { self.version[at] };
            let changes = &model.mutators.row(tensor)[first as usize..version as usize];
            for &again in model.creator[at..at + usize::from(is_newer)].iter().chain(changes) {
                if std::mem::replace(&mut self.mark[again as usize], self.marks) == self.marks {
                    continue;
                }
                if !model.can_rerun[again as usize] {
                    return None;
                }
                if model.rerun_before[again as usize] < self.now {
                    self.missed.push(tensor);
                    continue;
                }
                replay.push(again);
                stack.extend(model.used(again, true).filter(|used| used.tensor != tensor && !self.has(used)));
            }
        }
        if !self.missed.is_empty() {
            return None;
        }
        self.work = self.work.checked_sub(replay.len() as u64)?;
        replay.sort_unstable();
        Some(replay)
    }

    /// Whether what an operator of a replay makes has been made meanwhile.
    fn is_made(&self, op: u32) -> bool {
        let mut made = self.model.creates.row(op).iter();
        match self.model.creates.row(op).is_empty() {
            false => made.all(|&tensor| self.is_alive[tensor as usize] && self.version[tensor as usize] == 0),
            true => {
                self.model.used(op, true).filter(|used| used.mutates).all(|used| {
                    self.is_alive[used.tensor as usize] && self.version[used.tensor as usize] > used.version
                })
            }
        }
    }

    /// Called before a further run changes a tensor: makes what is computed from the present value
    /// of the tensor, if that will be needed soon.
    fn make_siblings(&mut self, op: u32, depth: u32) -> Step {
        let model = self.model;
        for used in model.used(op, true).filter(|used| used.mutates) {
            for &user in model.users.row(used.tensor) {
                if user >= op {
                    break;
                }
                let is_soon = |&made: &u32| {
                    let place = self.needed[made as usize];
                    !self.is_alive[made as usize]
                        && place != NONE
                        && place >= self.now
                        && (place - self.now) as usize * SOON <= model.len()
                };
                let is_wanted = model.can_rerun[user as usize]
                    && model.rerun_before[user as usize] >= self.now
                    && model.creates.row(user).iter().any(is_soon)
                    && model
                        .used(user, true)
                        .all(|one| one.tensor == used.tensor && one.version == used.version || self.has(&one));
                if is_wanted {
                    self.obtain(user, true, depth)?;
                    self.run(user, true)?;
                }
            }
        }
        Some(())
    }

    /// Holds what the run uses: once such a tensor is there, it is dropped only as a last resort.
    fn hold(&mut self, op: u32, is_again: bool, depth: u32) {
        for used in self.model.used(op, is_again) {
            self.holds[used.tensor as usize] += 1;
            self.held_at[used.tensor as usize] = depth;
        }
    }

    fn release(&mut self, op: u32, is_again: bool) {
        for used in self.model.used(op, is_again) {
            self.holds[used.tensor as usize] -= 1;
        }
    }

    /// Runs an operator whose inputs are pinned.
    fn run(&mut self, op: u32, is_again: bool) -> Step {
        let model = self.model;
        self.work = self.work.checked_sub(1 + model.uses.row(op).len() as u64)?;
        if self.runs.len() > 12 * model.len() {
            return None;
        }
        if !is_again {
            for used in model.uses.row(op) {
                self.cursor[used.tensor as usize] += 1;
            }
        }
        let sacrificed = self.make_room(op, is_again)?;
        for used in model.used(op, is_again) {
            let at = used.tensor as usize;
            self.pins[at] -= 1;
            self.version[at] += u32::from(used.mutates);
        }
        for &tensor in model.creates.row(op) {
            let at = tensor as usize;
            if !self.is_alive[at] {
                self.is_alive[at] = true;
                self.used += model.size[at];
            }
            self.version[at] = 0;
            self.needed[at] = NONE;
        }
        self.runs.push(op);
        for &tensor in model.creates.row(op) {
            self.note_wants(tensor);
        }
        if let Some(tensor) = sacrificed {
            self.drop(tensor);
        }
        for used in model.used(op, is_again) {
            self.settle(used.tensor);
        }
        for &tensor in model.creates.row(op) {
            self.settle(tensor);
        }
        Some(())
    }

    /// After a run: frees the tensor if it is not needed any more, or else makes it a candidate.
    fn settle(&mut self, tensor: u32) {
        let at = tensor as usize;
        if !self.is_alive[at] || self.pins[at] > 0 || self.holds[at] > 0 {
            return;
        }
        match self.next_use(tensor) {
            None => self.free(tensor),
            Some(next) if self.model.can_remake[at] && self.model.size[at] > 0 => {
                if let Some(score) = self.score(tensor, next, self.policy.forced) {
                    let early = self
                        .policy
                        .early
                        .and_then(|(exponents, least)| Some(self.score(tensor, next, exponents)? >= least));
                    if early == Some(true) && next > self.now {
                        self.drop(tensor);
                    } else {
                        self.candidates.push(Candidate { score, tensor });
                    }
                }
            }
            Some(_) => {}
        }
    }

    fn free(&mut self, tensor: u32) {
        if self.model.creator[tensor as usize] == NONE && self.model.size[tensor as usize] == 0 {
            return;
        }
        self.is_alive[tensor as usize] = false;
        self.used -= self.model.size[tensor as usize];
    }

    /// When the tensor is used next, by an operator of the order or to make another again; `None`
    /// where nobody needs it any more.
    fn next_use(&mut self, tensor: u32) -> Option<u32> {
        let at = tensor as usize;
        let model = self.model;
        if model.residency[at] == Residency::Leaves {
            return Some(NONE);
        }
        let wanted = loop {
            match self.wanted[at].peek() {
                None => break None,
                Some(&Reverse((place, other))) => {
                    if place >= self.now && !self.is_alive[other as usize] && self.needed[other as usize] == place {
                        break Some(place);
                    }
                    self.wanted[at].pop();
                }
            }
        };
        let used = model.users.row(tensor).get(self.cursor[at] as usize).copied();
        // A tensor that serves much larger ones is small: whether it is needed is found out when
        // the runs are known.
        let used = used.or(Some(model.serves_until[at]).filter(|&until| until != NONE && until > self.now));
        let used = used.or(Some(self.policy.kept_until[at]).filter(|&until| until > self.now));
        match (used, wanted) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Notes, for a tensor that has just been made, when other tensors will be made from it.
    fn note_wants(&mut self, tensor: u32) {
        let model = self.model;
        for &user in model.users.row(tensor) {
            if !model.can_rerun[user as usize] {
                continue;
            }
            for &other in model.creates.row(user) {
                let place = self.needed[other as usize];
                if !self.is_alive[other as usize] && place != NONE && place >= self.now {
                    self.wanted[tensor as usize].push(Reverse((place, other)));
                }
            }
        }
    }

    /// Lets go of a tensor that will be needed again.
    fn drop(&mut self, tensor: u32) {
        let Some(next) = self.next_use(tensor) else { return self.free(tensor) };
        self.free(tensor);
        // At `next`, all that is missing along the chain is needed, and what is alive is wanted to
        // make it.
        let model = self.model;
        self.stamps += 1;
        self.stack.clear();
        self.stack.push((tensor, model.version_at(tensor, next)));
        self.stamp[tensor as usize] = self.stamps;
        while let Some((tensor, version)) = self.stack.pop() {
            let at = tensor as usize;
            let place = self.needed[at];
            if place == NONE || place < self.now || place > next {
                self.needed[at] = next;
            }
            let changes = &model.mutators.row(tensor)[..version as usize];
            for &op in std::iter::once(&model.creator[at]).chain(changes) {
                for used in model.used(op, true).filter(|used| used.tensor != tensor) {
                    let input = used.tensor as usize;
                    if self.is_alive[input] {
                        self.wanted[input].push(Reverse((self.needed[at], tensor)));
                        continue;
                    }
                    if self.stamp[input] != self.stamps && model.can_remake[input] {
                        self.stamp[input] = self.stamps;
                        self.stack.push((used.tensor, used.version));
                    }
                }
            }
        }
    }

    /// What it would take to make the tensor again for a use at `next`, if it were dropped now;
    /// `None` where that cannot or must not be done.
    fn chain(&mut self, tensor: u32, next: u32) -> Option<Chain> {
        if self.policy.held_until[tensor as usize] > self.now {
            return None;
        }
        let model = self.model;
        let mut chain = Chain { ns: 0, held: 0.0 };
        self.stamps += 1;
        self.stack.clear();
        self.stack.push((tensor, model.version_at(tensor, next)));
        self.stamp[tensor as usize] = self.stamps;
        let mut length = 0;
        while let Some((tensor, version)) = self.stack.pop() {
            let changes = &model.mutators.row(tensor)[..version as usize];
            for &op in std::iter::once(&model.creator[tensor as usize]).chain(changes) {
                length += 1;
                if length > LONGEST_CHAIN || !model.can_rerun[op as usize] || model.rerun_before[op as usize] < next {
                    return None;
                }
                chain.ns += model.again_ns[op as usize];
                for used in model.used(op, true) {
                    let input = used.tensor as usize;
                    if self.stamp[input] == self.stamps {
                        continue;
                    }
                    self.stamp[input] = self.stamps;
                    if self.is_alive[input]
                        && (model.mutators.row(used.tensor).is_empty()
                            || !model.can_remake[input]
                            || model.version_at(used.tensor, next) == used.version)
                    {
                        if model.size[input] > 0 && model.residency[input] != Residency::Leaves {
                            let until = self.next_use_from(used.tensor);
                            if until < next {
                                chain.held += model.size[input] as f64 * self.weight(until, next);
                            }
                        }
                        continue;
                    }
                    if !model.can_remake[input] {
                        return None;
                    }
                    self.stack.push((used.tensor, used.version));
                }
            }
        }
        self.work = self.work.saturating_sub(length as u64);
        Some(chain)
    }

    /// Until when the tensor is needed anyway.
    fn next_use_from(&mut self, tensor: u32) -> u32 {
        let model = self.model;
        let last = model.users.row(tensor).last().copied().unwrap_or(0);
        let wanted = self.next_use(tensor).unwrap_or(self.now);
        if self.cursor[tensor as usize] as usize >= model.users.row(tensor).len() { wanted } else { last.max(wanted) }
    }

    fn weight(&self, from: u32, to: u32) -> f64 {
        let to = (to as usize).min(self.policy.weight.len() - 1);
        (self.policy.weight[to] - self.policy.weight[from as usize]).max(0.0)
    }

    /// How good it is to drop the tensor now; `None` where that is impossible or no use.
    fn score(&mut self, tensor: u32, next: u32, exponents: Exponents) -> Option<f64> {
        let chain = self.chain(tensor, next)?;
        let gap = self.weight(self.now.min(next), next);
        let bytes = self.model.size[tensor as usize] as f64;
        // Bytes that are freed on average.
        let freed = if gap > 0.0 { bytes - chain.held / gap } else { bytes };
        if freed <= 0.0 {
            return None;
        }
        Some(
            power(freed, exponents.bytes) * power(gap + 1e-9, exponents.gap)
                / power(chain.ns.max(1) as f64, exponents.time)
                * self.policy.taste[tensor as usize],
        )
    }

    /// Looks at everything that is alive, even where dropping it frees little.
    fn scrape(&mut self, op: u32, need: u64) -> Step {
        let model = self.model;
        self.work = self.work.checked_sub(model.size.len() as u64 / 8)?;
        let mut found = Vec::new();
        for tensor in 0..model.size.len() as u32 {
            let at = tensor as usize;
            if !self.is_alive[at]
                || !model.can_remake[at]
                || self.pins[at] > 0
                || self.holds[at] > 0
                || model.size[at] == 0
            {
                continue;
            }
            if model.creates.row(op).contains(&tensor) {
                continue;
            }
            let Some(next) = self.next_use(tensor) else {
                self.free(tensor);
                continue;
            };
            if next <= self.now {
                continue;
            }
            if let Some(chain) = self.chain(tensor, next) {
                let score = model.size[at] as f64 * (next - self.now) as f64 / chain.ns.max(1) as f64;
                found.push(Candidate { score, tensor });
            }
        }
        found.sort();
        while self.used + need > self.limit {
            let Some(Candidate { tensor, .. }) = found.pop() else { break };
            // Others have been dropped meanwhile, so this one may be needed earlier, or be
            // impossible to make again.
            if let Some(next) = self.next_use(tensor) {
                if self.chain(tensor, next).is_none() {
                    continue;
                }
            }
            self.drop(tensor);
        }
        Some(())
    }

    /// Drops tensors that the runs under way, or the runs that these are for, will use and must
    /// then make once more: first those that nothing holds, then those held for the outermost runs.
    fn drop_held(&mut self, op: u32, need: u64) -> Step {
        let model = self.model;
        self.work = self.work.checked_sub(model.size.len() as u64 / 8)?;
        let can_go = |tensor: &u32| {
            let at = *tensor as usize;
            self.is_alive[at]
                && self.pins[at] == 0
                && model.can_remake[at]
                && model.size[at] > 0
                && !model.creates.row(op).contains(tensor)
        };
        let depth = |at: usize| if self.holds[at] > 0 { 1 + self.held_at[at] } else { 0 };
        let mut held: Vec<(u32, Reverse<u64>, u32)> = (0..model.size.len() as u32)
            .filter(can_go)
            .map(|tensor| (depth(tensor as usize), Reverse(model.size[tensor as usize]), tensor))
            .collect();
        held.sort_unstable();
        for (_, _, tensor) in held {
            if self.used + need <= self.limit {
                break;
            }
            if self.chain(tensor, self.now).is_some() {
                self.drop(tensor);
            }
        }
        Some(())
    }

    /// Drops tensors until the run fits; `None` where that is impossible. As a last resort it
    /// returns an input that the run itself drops, because one of its outputs takes the memory of
    /// that input.
    fn make_room(&mut self, op: u32, is_again: bool) -> Option<Option<u32>> {
        let model = self.model;
        let made = model.creates.row(op).iter().filter(|&&t| !self.is_alive[t as usize]);
        let mut need = model.workspace[op as usize] + made.map(|&t| model.size[t as usize]).sum::<u64>();
        let mut taken = Vec::new();
        let mut open = Vec::new();
        for &(input, output) in model.reuse.row(op) {
            let is_held = self.holds[input as usize] > 0;
            if self.pins[input as usize] != 1
                || (is_held && !is_again)
                || taken.contains(&input)
                || taken.contains(&output)
            {
                continue;
            }
            if self.is_alive[output as usize] {
                continue;
            }
            if !is_held && self.next_use(input).is_none() {
                taken.extend([input, output]);
                need = need.saturating_sub(model.size[output as usize]);
            } else {
                open.push((input, output));
            }
        }
        let mut set_aside = Vec::new();
        while self.used + need > self.limit {
            let Some(Candidate { score, tensor }) = self.candidates.pop() else { break };
            let at = tensor as usize;
            if !self.is_alive[at] {
                continue;
            }
            if self.pins[at] > 0 || self.holds[at] > 0 || model.creates.row(op).contains(&tensor) {
                set_aside.push(Candidate { score, tensor });
                continue;
            }
            let Some(next) = self.next_use(tensor) else {
                self.free(tensor);
                continue;
            };
            if next <= self.now && !is_again {
                continue;
            }
            let Some(current) = self.score(tensor, next, self.policy.forced) else { continue };
            if current < score && self.candidates.peek().is_some_and(|other| other.score > current) {
                self.candidates.push(Candidate { score: current, tensor });
                continue;
            }
            self.drop(tensor);
        }
        self.candidates.extend(set_aside);
        if self.used + need > self.limit {
            self.scrape(op, need)?;
        }
        if is_again && self.used + need > self.limit {
            self.drop_held(op, need)?;
        }
        if self.used + need <= self.limit {
            return Some(None);
        }
        // The last resort: an input whose memory an output takes.
        for (input, output) in open {
            if taken.contains(&input) || taken.contains(&output) || !model.can_remake[input as usize] {
                continue;
            }
            let size = model.size[output as usize];
            if self.used + need - size <= self.limit {
                let next = self.next_use(input)?;
                if (is_again || next > self.now) && self.chain(input, next).is_some() {
                    return Some(Some(input));
                }
            }
        }
        None
    }
}

/// A power with an exponent given in halves.
fn power(base: f64, halves: u8) -> f64 {
    let whole = (0..halves / 2).fold(1.0, |product, _| product * base);
    if halves % 2 == 1 { whole * base.sqrt() } else { whole }
}
