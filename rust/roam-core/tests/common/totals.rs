//! The least total of a small graph: order, reuse and layout together, apart from the planner.

use super::buffers;
use roam_core::graph::{Graph, OperatorId, Residency, ReusePair, TensorId};
use roam_core::packing::Buffer;
use std::collections::{BTreeSet, HashMap};

/// A set of operators or tensors, by the bits of their ids.
type Set = u64;

/// Most bytes in the pool, and unpooled ones.
type Bytes = (u64, u64);

/// The least pool and unpooled bytes together, of all orders, all choices of reuse and all
/// layouts, if that is less than `below`; else `below`.
pub(crate) fn least_total(graph: &Graph, reuse: bool, below: u64) -> u64 {
    let mut totals = Totals {
        graph,
        reuse,
        best: below,
        order: Vec::new(),
        pairs: Vec::new(),
        ahead: HashMap::new(),
        packed: HashMap::new(),
    };
    totals.extend(0, (0, 0));
    totals.best
}

/// All ways to run a graph, one after another, but for those that cannot come to less than what is
/// known.
struct Totals<'a> {
    graph: &'a Graph,
    reuse: bool,
    best: u64,
    order: Vec<OperatorId>,
    pairs: Vec<ReusePair>,
    /// By what has run, the most live bytes from there to the end: of every way, or of one that is
    /// no worse in either.
    ahead: HashMap<Set, Vec<Bytes>>,
    /// The smallest pool of these buffers below a limit, or the limit, and that limit.
    packed: HashMap<Vec<[u64; 4]>, (u64, u64)>,
}

impl Totals<'_> {
    /// Tries all ways on from what has run, with the most live bytes so far.
    fn extend(&mut self, done: Set, so_far: Bytes) {
        // What is to come makes no pool smaller.
        let limit = self.best - so_far.1;
        let pool = self.pool(limit);
        if pool == limit {
            return;
        }
        if self.order.len() == self.graph.operators().len() {
            self.best = pool + so_far.1;
        }
        for id in self.ready(done) {
            let after = done | bit(id.index());
            for pairs in self.choices(done, id) {
                let peaks = higher(so_far, self.live(done, id, &pairs));
                let ahead = self.ahead(after);
                if ahead.iter().map(|&bytes| higher(peaks, bytes)).all(|(pool, unpooled)| pool + unpooled >= self.best)
                {
                    continue;
                }
                self.order.push(id);
                let before = self.pairs.len();
                self.pairs.extend(pairs);
                self.extend(after, peaks);
                self.pairs.truncate(before);
                self.order.pop();
            }
        }
    }

    /// The smallest pool of what has run, if that is below the limit; else the limit.
    fn pool(&mut self, limit: u64) -> u64 {
        let buffers = gathered(self.buffers());
        let key = buffers.iter().map(|b| [b.lower, b.upper, b.size_bytes, b.alignment_bytes]).collect();
        let (pool, known) = self.packed.entry(key).or_insert((0, 0));
        if pool == known && *known < limit {
            (*pool, *known) = (buffers::brute_force(&buffers, limit), limit);
        }
        limit.min(*pool)
    }

    /// See the field of this name.
    fn ahead(&mut self, done: Set) -> Vec<Bytes> {
        if let Some(known) = self.ahead.get(&done) {
            return known.clone();
        }
        let ready = self.ready(done);
        let mut all: Vec<Bytes> = if ready.is_empty() { vec![(0, 0)] } else { Vec::new() };
        for id in ready {
            let later = self.ahead(done | bit(id.index()));
            for pairs in self.choices(done, id) {
                let live = self.live(done, id, &pairs);
                all.extend(later.iter().map(|&bytes| higher(live, bytes)));
            }
        }
        all.sort_unstable();
        let mut least = u64::MAX;
        all.retain(|&(_, unpooled)| {
            let is_less = unpooled < least;
            least = least.min(unpooled);
            is_less
        });
        self.ahead.insert(done, all.clone());
        all
    }

    /// What can run next.
    fn ready(&self, done: Set) -> Vec<OperatorId> {
        let ids = (0..self.graph.operators().len() as u32).map(OperatorId);
        let is_ready =
            |id: &OperatorId| !has(done, *id) && self.graph.predecessors(*id).iter().all(|&id| has(done, id));
        ids.filter(is_ready).collect()
    }

    /// All sets of disjoint pairs that are permitted at an operator and whose inputs die there.
    fn choices(&self, done: Set, id: OperatorId) -> Vec<Vec<ReusePair>> {
        let mut choices = vec![Vec::new()];
        for &pair in self.graph.operator(id).reuse.iter().filter(|_| self.reuse) {
            if self.graph.users(pair.input).iter().any(|&user| user != id && !has(done, user)) {
                continue;
            }
            for at in 0..choices.len() {
                let apart = |other: &ReusePair| other.input != pair.input && other.output != pair.output;
                if choices[at].iter().all(apart) {
                    choices.push(choices[at].iter().copied().chain([pair]).collect());
                }
            }
        }
        choices
    }

    /// Live bytes while an operator runs next.
    fn live(&self, done: Set, id: OperatorId, pairs: &[ReusePair]) -> Bytes {
        let graph = self.graph;
        let (mut pool, mut unpooled) = (0, graph.workspace_bytes(id));
        for tensor in (0..graph.tensors().len() as u32).map(TensorId) {
            let residency = graph.tensor(tensor).residency;
            let exists = graph.creator(tensor).is_none_or(|creator| creator == id || has(done, creator));
            let is_needed = residency == Residency::Leaves
                || graph.creator(tensor) == Some(id)
                || (residency == Residency::Enters && done == 0)
                || graph.users(tensor).iter().any(|&user| !has(done, user));
            let is_taken = pairs.iter().any(|pair| pair.output == tensor);
            if residency != Residency::Persistent && exists && is_needed && !is_taken {
                let is_pooled = residency == Residency::StepLocal;
                *if is_pooled { &mut pool } else { &mut unpooled } += graph.counted_bytes(tensor);
            }
        }
        (pool, unpooled)
    }

    /// The pool's tensors that exist so far in the present order, up to now, with one buffer for
    /// those that take each other's memory.
    fn buffers(&self) -> Vec<Buffer> {
        let graph = self.graph;
        let now = self.order.len();
        let step = |id: OperatorId| self.order.iter().position(|&other| other == id);
        let mut buffers = Vec::new();
        for tensor in (0..graph.tensors().len() as u32).map(TensorId) {
            let is_pooled = graph.tensor(tensor).residency == Residency::StepLocal && graph.counted_bytes(tensor) > 0;
            if !is_pooled || self.pairs.iter().any(|pair| pair.output == tensor) {
                continue;
            }
            let Some(lower) = graph.creator(tensor).and_then(step) else { continue };
            let (mut last, mut alignment_bytes) = (tensor, graph.alignment_bytes());
            loop {
                alignment_bytes = alignment_bytes.max(graph.tensor(last).alignment_bytes);
                let Some(pair) = self.pairs.iter().find(|pair| pair.input == last) else { break };
                last = pair.output;
            }
            let holders = graph.users(last).iter().copied().chain(graph.creator(last));
            let upper = holders.map(|id| step(id).map_or(now, |step| step + 1)).max().unwrap_or(now);
            let (lower, upper) = (lower as u64, upper as u64);
            buffers.push(Buffer { lower, upper, size_bytes: graph.counted_bytes(tensor), alignment_bytes });
        }
        buffers
    }
}

/// The buffers at the fewest times at which the same ones are alive together, in one sequence.
fn gathered(mut buffers: Vec<Buffer>) -> Vec<Buffer> {
    let lowers: BTreeSet<u64> = buffers.iter().map(|buffer| buffer.lower).collect();
    let uppers: BTreeSet<u64> = buffers.iter().map(|buffer| buffer.upper).collect();
    // Where one ends and another has begun since one ended before, more are alive than anywhere near.
    let ends = |&time: &u64| lowers.range(..time).next_back() >= uppers.range(..time).next_back();
    let times: Vec<u64> = uppers.iter().copied().filter(ends).collect();
    for buffer in &mut buffers {
        buffer.lower = times.partition_point(|&time| time <= buffer.lower) as u64;
        buffer.upper = times.partition_point(|&time| time <= buffer.upper) as u64;
    }
    buffers.sort_unstable_by_key(|b| (b.lower, b.upper, b.size_bytes, b.alignment_bytes));
    buffers
}

fn bit(index: usize) -> Set {
    1 << index
}

fn has(set: Set, id: OperatorId) -> bool {
    set & bit(id.index()) != 0
}

fn higher(a: Bytes, b: Bytes) -> Bytes {
    (a.0.max(b.0), a.1.max(b.1))
}
