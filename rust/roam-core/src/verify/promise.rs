//! What program order takes when an ordinary allocator lays it out, which no plan may exceed.

use super::lives::{Lives, tensors};
use crate::graph::{Graph, Residency, TensorId, round_up};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Bytes of a pool in which each tensor lies in the smallest gap that holds it when it is made, the
/// lowest of equals, and the largest of those made at one step goes first. `lives` is of one
/// operator a step, without reuse.
pub(super) fn allocated_bytes(graph: &Graph, lives: &Lives) -> u64 {
    let is_pooled = |id: &TensorId| graph.tensor(*id).residency == Residency::StepLocal && graph.counted_bytes(*id) > 0;
    let made = |id: TensorId| {
        let alignment = graph.alignment_bytes().max(graph.tensor(id).alignment_bytes);
        Some((lives.first[id.index()]?, Reverse((graph.counted_bytes(id), alignment)), lives.last[id.index()]))
    };
    let mut made: Vec<_> = tensors(graph).filter(is_pooled).filter_map(made).collect();
    made.sort_unstable();
    let mut dead: BTreeSet<(usize, u64, u64)> = BTreeSet::new();
    // Free stretches, by place and by size. The last one has no end.
    let mut places: BTreeSet<(u64, u64)> = BTreeSet::from([(0, u64::MAX)]);
    let mut sizes: BTreeSet<(u64, u64)> = BTreeSet::from([(u64::MAX, 0)]);
    let mut most = 0;
    for (first, Reverse((size, alignment)), last) in made {
        while let Some((_, mut from, mut to)) = dead.first().copied().filter(|&(end, ..)| end < first) {
            dead.pop_first();
            let below = places.range(..(from, 0)).next_back().copied().filter(|&(_, end)| end == from);
            let above = places.range((to, 0)..).next().copied().filter(|&(start, _)| start == to);
            for (start, end) in below.into_iter().chain(above) {
                places.remove(&(start, end));
                sizes.remove(&(end - start, start));
                (from, to) = (from.min(start), to.max(end));
            }
            places.insert((from, to));
            sizes.insert((to - from, from));
        }
        let fits = |&(room, start): &(u64, u64)| {
            let aligned = round_up(start, alignment);
            (aligned + size <= start.saturating_add(room)).then_some((start, start.saturating_add(room), aligned))
        };
        let Some((start, end, at)) = sizes.range((size, 0)..).find_map(fits) else {
            unreachable!("the last stretch holds all")
        };
        places.remove(&(start, end));
        sizes.remove(&(end - start, start));
        for (from, to) in [(start, at), (at + size, end)] {
            if from < to {
                places.insert((from, to));
                sizes.insert((to - from, from));
            }
        }
        dead.insert((last, at, at + size));
        most = most.max(at + size);
    }
    most
}
