//! Runs with the lives of all that they make, from which extra runs can be taken out again: live
//! bytes are kept up to date in a segment tree.

use super::model::{Model, NONE};
use crate::graph::Residency;
use crate::segment_tree::SegmentTree;
use std::ops::Range;

/// One making of a tensor.
#[derive(Clone, Debug)]
struct Instance {
    tensor: u32,
    /// The entry that makes it, or 0 where it was there before the step.
    start: u32,
    /// The last entry that it lives in.
    end: u32,
    /// Who uses it, ascending; some may have been taken out.
    users: Vec<u32>,
    /// Those of the users that change it.
    changes: Vec<u32>,
    /// The instance before it of the same tensor, or [`NONE`].
    before: u32,
    /// Whether it is no more, because its run has been taken out.
    is_gone: bool,
}

#[derive(Clone, Debug)]
struct Entry {
    op: u32,
    is_extra: bool,
    is_gone: bool,
    /// Where the instances that it uses begin, and the first that it makes; they follow each other.
    used: u32,
    made: u32,
    /// What reuse saves while it runs.
    saved: u64,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct Timeline<'a> {
    model: &'a Model,
    limit: u64,
    entries: Vec<Entry>,
    /// The instances that entries use, as `model.uses` lists them; [`NONE`] for what they leave
    /// alone.
    used: Vec<u32>,
    instances: Vec<Instance>,
    live: Live,
    pub(super) extra_ns: u64,
}

/// Which extra runs are taken out first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Rank {
    /// Those that take longest.
    Time,
    /// Those that take longest for the bytes times entries that must be kept alive instead.
    TimePerArea,
}

/// What must be put back if a change turns out to be impossible or too much.
#[derive(Default)]
struct Undo {
    ends: Vec<(u32, u32)>,
    gone: Vec<u32>,
    gone_instances: Vec<u32>,
    merges: Vec<(u32, u32)>,
    saved: Vec<(u32, u64)>,
    /// Stretches of entries where more lives than before.
    risen: Vec<(u32, u32)>,
}

impl<'a> Timeline<'a> {
    pub(super) fn new(model: &'a Model, limit: u64, runs: &[u32]) -> Self {
        let tensors = model.size.len();
        let mut instances: Vec<Instance> = Vec::with_capacity(2 * tensors);
        let mut latest = vec![NONE; tensors];
        let make = |instances: &mut Vec<Instance>, latest: &mut Vec<u32>, tensor: u32, start: u32| {
            let index = instances.len() as u32;
            let before = std::mem::replace(&mut latest[tensor as usize], index);
            let (users, changes) = (Vec::new(), Vec::new());
            instances.push(Instance { tensor, start, end: start, users, changes, before, is_gone: false });
        };
        for tensor in (0..tensors as u32).filter(|&t| model.creator[t as usize] == NONE) {
            make(&mut instances, &mut latest, tensor, 0);
        }
        let mut has_run = vec![false; model.len()];
        let mut entries = Vec::with_capacity(runs.len());
        let mut used = Vec::with_capacity(4 * runs.len());
        let mut extra_ns = 0;
        for (at, &op) in runs.iter().enumerate() {
            let at = at as u32;
            let is_extra = std::mem::replace(&mut has_run[op as usize], true);
            extra_ns += if is_extra { model.again_ns[op as usize] } else { 0 };
            let first_used = used.len() as u32;
            for one in model.uses.row(op) {
                if is_extra && one.first_only {
                    used.push(NONE);
                    continue;
                }
                let index = latest[one.tensor as usize];
                let instance = &mut instances[index as usize];
                instance.users.push(at);
                if one.mutates {
                    instance.changes.push(at);
                }
                instance.end = at;
                used.push(index);
            }
            let made = instances.len() as u32;
            for &tensor in model.creates.row(op) {
                make(&mut instances, &mut latest, tensor, at);
            }
            entries.push(Entry { op, is_extra, is_gone: false, used: first_used, made, saved: 0 });
        }
        let last = runs.len() as u32 - 1;
        for instance in &mut instances {
            if model.residency[instance.tensor as usize] == Residency::Leaves {
                instance.end = last;
            }
        }
        let mut timeline = Timeline { model, limit, used, instances, live: Live::new(Vec::new()), extra_ns, entries };
        for at in 0..=last {
            timeline.entries[at as usize].saved = timeline.saving(at);
        }
        let mut changes = vec![0i64; runs.len() + 1];
        for instance in &timeline.instances {
            let size = model.size[instance.tensor as usize] as i64;
            changes[instance.start as usize] += size;
            changes[instance.end as usize + 1] -= size;
        }
        let mut now = 0;
        let live = timeline.entries.iter().zip(changes).map(|(entry, change)| {
            now += change;
            now + model.workspace[entry.op as usize] as i64 - entry.saved as i64
        });
        timeline.live = Live::new(live.collect());
        timeline
    }

    /// The runs that are left, without those first runs whose results nobody uses before the
    /// operator runs again: the next run is then the first. `None` where there is no such run.
    pub(super) fn without_unused(&self) -> Option<Vec<u32>> {
        let mut left: Vec<u32> = vec![0; self.instances.len()];
        let is_there = |at: &usize| !self.entries[*at].is_gone;
        for at in (0..self.entries.len()).filter(is_there) {
            self.used(at as u32).filter(|&index| self.used[index] != NONE).for_each(|index| {
                left[self.used[index] as usize] += 1;
            });
        }
        let mut runs_later = vec![false; self.model.len()];
        let mut runs = Vec::with_capacity(self.entries.len());
        let mut has_changed = false;
        for at in (0..self.entries.len()).rev().filter(is_there) {
            let Entry { op, is_extra, .. } = self.entries[at];
            let is_unused = |made: u32| left[made as usize] == 0 && !self.instances[made as usize].is_gone;
            let can_go = !is_extra && runs_later[op as usize] && self.model.can_wait[op as usize];
            if can_go && self.made(at as u32).all(is_unused) {
                has_changed = true;
                for index in self.used(at as u32).filter(|&index| self.used[index] != NONE) {
                    left[self.used[index] as usize] -= 1;
                }
                continue;
            }
            runs_later[op as usize] = true;
            runs.push(op);
        }
        runs.reverse();
        has_changed.then_some(runs)
    }

    /// Live bytes while each of the runs goes on.
    pub(super) fn live_bytes(&self) -> Vec<u64> {
        (0..self.entries.len() as u32).map(|at| self.live.most(at, at).max(0) as u64).collect()
    }

    /// The most bytes that are ever live.
    pub(super) fn peak(&self) -> u64 {
        self.live.most(0, self.entries.len() as u32 - 1).max(0) as u64
    }

    /// The runs that are left.
    pub(super) fn runs(&self) -> Vec<u32> {
        self.entries.iter().filter(|entry| !entry.is_gone).map(|entry| entry.op).collect()
    }

    /// Where the instances that the entry uses lie in `used`.
    fn used(&self, at: u32) -> Range<usize> {
        let entry = &self.entries[at as usize];
        entry.used as usize..entry.used as usize + self.model.uses.row(entry.op).len()
    }

    /// The instances that the entry makes.
    fn made(&self, at: u32) -> Range<u32> {
        let entry = &self.entries[at as usize];
        entry.made..entry.made + self.model.creates.row(entry.op).len() as u32
    }

    /// What reuse saves while the entry runs: disjoint pairs of an input that dies there and an
    /// output.
    fn saving(&self, at: u32) -> u64 {
        let entry = &self.entries[at as usize];
        let pairs = self.model.reuse.row(entry.op);
        if pairs.is_empty() || entry.is_gone {
            return 0;
        }
        let dies = |&&(input, _): &&(u32, u32)| {
            let row = self.model.uses.row(entry.op);
            row.binary_search_by_key(&input, |one| one.tensor).is_ok_and(|place| {
                let instance = self.used[entry.used as usize + place];
                instance != NONE && self.instances[instance as usize].end == at
            })
        };
        let dying: Vec<(u32, u32)> = pairs.iter().filter(dies).copied().collect();
        if dying.len() == 1 {
            return self.model.size[dying[0].0 as usize];
        }
        if dying.is_empty() {
            return 0;
        }
        most_bytes(&dying, &self.model.size)
    }

    /// Takes extra runs out wherever what they make can be kept alive instead: in the order of
    /// `rank`, until no more can be taken out, or the work is used up.
    pub(super) fn cancel(&mut self, rank: Rank, work: &mut u64) {
        loop {
            let mut extra: Vec<(f64, u32)> = (0..self.entries.len() as u32)
                .filter(|&at| {
                    let entry = &self.entries[at as usize];
                    entry.is_extra && !entry.is_gone && !self.made(at).is_empty()
                })
                .map(|at| (self.rank(at, rank), at))
                .collect();
            extra.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            let mut has_changed = false;
            for (_, at) in extra {
                let Some(left) = work.checked_sub(1) else { return };
                *work = left;
                if !self.entries[at as usize].is_gone {
                    has_changed |= self.take_out(at);
                }
            }
            if !has_changed {
                return;
            }
        }
    }

    fn rank(&self, at: u32, rank: Rank) -> f64 {
        let ns = self.model.again_ns[self.entries[at as usize].op as usize] as f64;
        match rank {
            Rank::Time => ns,
            Rank::TimePerArea => ns / (1 + self.area(at)) as f64,
        }
    }

    /// What it would take to keep alive what the extra run makes: bytes times entries.
    fn area(&self, at: u32) -> u64 {
        let area = |instance: u32| {
            let one = &self.instances[instance as usize];
            if one.before == NONE {
                return 0;
            }
            let before = &self.instances[self.standing(one.before) as usize];
            self.model.size[one.tensor as usize] * u64::from(one.start.saturating_sub(before.end))
        };
        self.made(at).map(area).sum()
    }

    fn standing(&self, mut instance: u32) -> u32 {
        while self.instances[instance as usize].is_gone {
            instance = self.instances[instance as usize].before;
        }
        instance
    }

    /// Takes out one extra run that makes something, with whatever runs for it alone; `false`
    /// where that is too much or impossible.
    fn take_out(&mut self, at: u32) -> bool {
        let mut undo = Undo::default();
        if self.merge(at, &mut undo) && self.fits(&undo) {
            self.commit(&undo);
            true
        } else {
            self.put_back(&undo);
            false
        }
    }

    fn fits(&self, undo: &Undo) -> bool {
        undo.risen.iter().all(|&(from, to)| self.live.most(from, to).max(0) as u64 <= self.limit)
    }

    /// Merges what the run makes with the instances before.
    fn merge(&mut self, at: u32, undo: &mut Undo) -> bool {
        let mut removed = vec![at];
        for instance in self.made(at) {
            let before = self.standing(self.instances[instance as usize].before);
            let changed = self.instances[before as usize].changes.iter();
            let version = changed.filter(|&&change| !self.entries[change as usize].is_gone).count();
            let one = &self.instances[instance as usize];
            let changes: Vec<u32> =
                one.changes.iter().copied().filter(|&change| !self.entries[change as usize].is_gone).collect();
            let repeated = &changes[..version.min(changes.len())];
            // The instance before is already changed; who uses this one earlier cannot use that.
            let is_early = |&&user: &&u32| {
                !self.entries[user as usize].is_gone
                    && !repeated.contains(&user)
                    && repeated.last().is_some_and(|&last| user < last)
            };
            let too_new = changes.len() < version && self.has_users_but(instance, &changes);
            if too_new
                || one.users.iter().filter(is_early).count() > 0
                || repeated.iter().any(|&change| !self.entries[change as usize].is_extra)
            {
                return false;
            }
            removed.extend(repeated);
            undo.merges.push((instance, before));
        }
        for &entry in &removed {
            self.mark(entry, undo);
        }
        for index in 0..undo.merges.len() {
            let (instance, before) = undo.merges[index];
            self.instances[instance as usize].is_gone = true;
            undo.gone_instances.push(instance);
            let one = &self.instances[instance as usize];
            let last = one.users.iter().rev().find(|&&user| !self.entries[user as usize].is_gone).copied();
            self.clear(instance);
            let end = self.instances[before as usize].end;
            if let Some(last) = last {
                undo.risen.push((end + 1, last));
                self.set_end(before, last.max(end), undo);
            } else {
                self.set_end(before, end, undo);
            }
        }
        // Those who used the merged instances now use the instances before them.
        for &(instance, before) in &undo.merges {
            let users = std::mem::take(&mut self.instances[instance as usize].users);
            users.iter().for_each(|&user| self.exchange(user, instance, before));
            self.instances[instance as usize].users = users;
        }
        let mut queue = removed;
        while let Some(entry) = queue.pop() {
            for index in self.used(entry) {
                let instance = self.used[index];
                if instance != NONE && !self.instances[instance as usize].is_gone {
                    self.shorten(instance, &mut queue, undo);
                }
            }
        }
        self.resave(undo);
        true
    }

    /// After users of the instance were taken out: lets it end earlier, and takes out what made it
    /// if nobody uses it any more.
    fn shorten(&mut self, instance: u32, queue: &mut Vec<u32>, undo: &mut Undo) {
        let one = &self.instances[instance as usize];
        if self.model.residency[one.tensor as usize] == Residency::Leaves {
            return;
        }
        // Another instance may just have been merged into it.
        let merged = undo.merges.iter().filter(|&&(_, before)| before == instance).map(|&(from, _)| from);
        let users = merged.flat_map(|from| &self.instances[from as usize].users).chain(&one.users);
        let last = users.copied().filter(|&user| !self.entries[user as usize].is_gone).max();
        let start = one.start;
        self.set_end(instance, last.unwrap_or(start), undo);
        let tensor = self.instances[instance as usize].tensor;
        if self.model.creator[tensor as usize] == NONE || !self.entries[start as usize].is_extra {
            return;
        }
        let idle = |made: u32| {
            let one = &self.instances[made as usize];
            one.is_gone
                || one.users.iter().all(|&user| {
                    let entry = &self.entries[user as usize];
                    entry.is_gone || (entry.is_extra && one.changes.contains(&user))
                }) && !undo.merges.iter().any(|&(_, before)| before == made)
        };
        if self.entries[start as usize].is_gone || !self.made(start).all(idle) {
            return;
        }
        let mut changes = vec![start];
        for made in self.made(start) {
            let live = self.instances[made as usize].changes.iter();
            changes.extend(live.filter(|&&change| !self.entries[change as usize].is_gone));
        }
        for &entry in &changes {
            self.mark(entry, undo);
        }
        for made in self.made(start) {
            if !self.instances[made as usize].is_gone {
                self.instances[made as usize].is_gone = true;
                undo.gone_instances.push(made);
                self.clear(made);
            }
        }
        queue.extend(changes);
    }

    fn has_users_but(&self, instance: u32, others: &[u32]) -> bool {
        let users = self.instances[instance as usize].users.iter();
        users.filter(|user| !others.contains(user)).any(|&user| !self.entries[user as usize].is_gone)
    }

    fn mark(&mut self, entry: u32, undo: &mut Undo) {
        self.entries[entry as usize].is_gone = true;
        undo.gone.push(entry);
    }

    /// Takes the bytes of an instance out.
    fn clear(&mut self, instance: u32) {
        let one = &self.instances[instance as usize];
        self.live.add(one.start, one.end, -(self.model.size[one.tensor as usize] as i64));
    }

    fn set_end(&mut self, instance: u32, end: u32, undo: &mut Undo) {
        let one = &mut self.instances[instance as usize];
        let size = self.model.size[one.tensor as usize] as i64;
        undo.ends.push((instance, one.end));
        let old = std::mem::replace(&mut one.end, end);
        if end > old {
            self.live.add(old + 1, end, size);
        } else if end < old {
            self.live.add(end + 1, old, -size);
        }
    }

    /// Counts reuse anew wherever an end has moved.
    fn resave(&mut self, undo: &mut Undo) {
        let mut places: Vec<u32> =
            undo.ends.iter().flat_map(|&(of, old)| [old, self.instances[of as usize].end]).collect();
        places.sort_unstable();
        places.dedup();
        for at in places {
            let saved = self.saving(at);
            let old = std::mem::replace(&mut self.entries[at as usize].saved, saved);
            if saved != old {
                undo.saved.push((at, old));
                self.live.add(at, at, old as i64 - saved as i64);
                if saved < old {
                    undo.risen.push((at, at));
                }
            }
        }
        for index in 0..undo.gone.len() {
            self.live.hide(undo.gone[index]);
        }
    }

    fn exchange(&mut self, user: u32, from: u32, to: u32) {
        let range = self.used(user);
        for instance in &mut self.used[range] {
            if *instance == from {
                *instance = to;
            }
        }
    }

    fn commit(&mut self, undo: &Undo) {
        for &entry in &undo.gone {
            self.extra_ns -= self.model.again_ns[self.entries[entry as usize].op as usize];
        }
        for &(instance, before) in &undo.merges {
            let one = &mut self.instances[instance as usize];
            let (mut users, mut changes) = (std::mem::take(&mut one.users), std::mem::take(&mut one.changes));
            users.retain(|&user| !self.entries[user as usize].is_gone);
            changes.retain(|&change| !self.entries[change as usize].is_gone);
            let before = &mut self.instances[before as usize];
            before.users.extend(users);
            before.changes.extend(changes);
        }
    }

    fn put_back(&mut self, undo: &Undo) {
        let is_complete = !undo.gone_instances.is_empty();
        if !is_complete {
            return;
        }
        for &entry in &undo.gone {
            self.entries[entry as usize].is_gone = false;
            self.live.show(entry);
        }
        for &(at, saved) in &undo.saved {
            let new = std::mem::replace(&mut self.entries[at as usize].saved, saved);
            self.live.add(at, at, new as i64 - saved as i64);
        }
        for &(instance, before) in &undo.merges {
            let users = std::mem::take(&mut self.instances[instance as usize].users);
            for &user in &users {
                self.exchange(user, before, instance);
            }
            self.instances[instance as usize].users = users;
        }
        for &instance in &undo.gone_instances {
            self.instances[instance as usize].is_gone = false;
            let one = &self.instances[instance as usize];
            self.live.add(one.start, one.end, self.model.size[one.tensor as usize] as i64);
        }
        for &(instance, old) in undo.ends.iter().rev() {
            let one = &mut self.instances[instance as usize];
            let size = self.model.size[one.tensor as usize] as i64;
            let end = std::mem::replace(&mut one.end, old);
            if end > old {
                self.live.add(old + 1, end, -size);
            } else if end < old {
                self.live.add(end + 1, old, size);
            }
        }
    }
}

/// The most bytes of disjoint pairs: few pairs, tried one input after another. Paired tensors have
/// equal sizes, so more pairs of a size are more bytes, and a pair taken never costs a larger one.
fn most_bytes(pairs: &[(u32, u32)], size: &[u64]) -> u64 {
    let mut inputs: Vec<u32> = pairs.iter().map(|pair| pair.0).collect();
    inputs.sort_unstable();
    inputs.dedup();
    let mut held_by: Vec<(u32, u32)> = Vec::new();
    fn augment(input: u32, pairs: &[(u32, u32)], held_by: &mut Vec<(u32, u32)>, met: &mut Vec<u32>) -> bool {
        for &(_, output) in pairs.iter().filter(|pair| pair.0 == input) {
            if met.contains(&output) {
                continue;
            }
            met.push(output);
            match held_by.iter().position(|held| held.0 == output) {
                None => {
                    held_by.push((output, input));
                    return true;
                }
                Some(place) => {
                    let other = held_by[place].1;
                    if augment(other, pairs, held_by, met) {
                        let place = held_by.iter().position(|held| held.0 == output).unwrap_or(place);
                        held_by[place].1 = input;
                        return true;
                    }
                }
            }
        }
        false
    }
    for input in inputs {
        augment(input, pairs, &mut held_by, &mut Vec::new());
    }
    held_by.iter().map(|held| size[held.0 as usize]).sum()
}

/// Live bytes per entry, with the most of any stretch.
#[derive(Clone, Debug)]
struct Live {
    tree: SegmentTree,
    /// Per node what is added to all its places.
    added: Vec<i64>,
    /// Per node the most of its places, what is added to the node itself included.
    most: Vec<i64>,
}

/// Hides an entry that is gone.
const HIDDEN: i64 = i64::MIN / 4;

impl Live {
    fn new(bytes: Vec<i64>) -> Self {
        let tree = SegmentTree::new(bytes.len());
        let mut live = Live { tree, added: vec![0; tree.node_count()], most: vec![HIDDEN; tree.node_count()] };
        for (place, &bytes) in bytes.iter().enumerate() {
            live.most[tree.leaf(place)] = bytes;
            live.added[tree.leaf(place)] = bytes;
        }
        for node in (1..tree.leaf(0)).rev() {
            live.most[node] = live.most[2 * node].max(live.most[2 * node + 1]);
        }
        live
    }

    /// Adds to all entries from `from` to `to` inclusive.
    fn add(&mut self, from: u32, to: u32, bytes: i64) {
        if from > to {
            return;
        }
        let range = from as usize..to as usize + 1;
        for node in self.tree.cover(range.clone()) {
            self.added[node] += bytes;
            self.most[node] += bytes;
        }
        let first_leaf = self.tree.leaf(0);
        for node in self.tree.ends(range).filter(|&node| node < first_leaf) {
            self.most[node] = self.most[2 * node].max(self.most[2 * node + 1]) + self.added[node];
        }
    }

    fn most(&self, from: u32, to: u32) -> i64 {
        if from > to {
            return HIDDEN;
        }
        let covered = self.tree.cover(from as usize..to as usize + 1).map(|node| {
            let above = std::iter::successors(Some(node / 2), |node| Some(node / 2)).take_while(|&node| node > 0);
            self.most[node] + above.map(|node| self.added[node]).sum::<i64>()
        });
        covered.max().unwrap_or(HIDDEN)
    }

    fn hide(&mut self, at: u32) {
        self.add(at, at, HIDDEN);
    }

    fn show(&mut self, at: u32) {
        self.add(at, at, -HIDDEN);
    }
}
