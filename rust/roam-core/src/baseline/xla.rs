//! XLA's heaps (`xla/service/heap_simulator/heap_simulator.cc`): the best of several
//! `GlobalDecreasingSizeBestFitHeap`s, as `ChooseBestHeapAlgorithm` takes it.
//!
//! Blocks go by size (`kSpatial`), by lifetime (`kTemporal`) or by their product
//! (`kSpatialTemporal`), each into the smallest gap that fits for its life (`kBestFit`), of equals
//! the lowest, or into the lowest (`kLowestOffset`). By default XLA tries best fit by size and by
//! lifetime; with its packing search all six, as here. As in XLA, lifetimes count allocations and
//! frees.

use crate::graph::round_up;
use crate::layout::blocks::{Block, Blocks};
use std::cmp::Reverse;

#[derive(Clone, Copy)]
enum Sequence {
    Size,
    Lifetime,
    Area,
}

#[derive(Clone, Copy)]
enum Fit {
    Best,
    Lowest,
}

pub(super) fn place(blocks: &Blocks) -> Vec<u64> {
    let lifetimes = lifetimes(blocks);
    let mut best: Option<Vec<u64>> = None;
    for fit in [Fit::Best, Fit::Lowest] {
        for sequence in [Sequence::Size, Sequence::Lifetime, Sequence::Area] {
            let offsets = heap(blocks, &sorted(blocks, &lifetimes, sequence), fit);
            let is_better = |best: &Vec<u64>| blocks.pool_bytes(&offsets) < blocks.pool_bytes(best);
            if best.as_ref().is_none_or(is_better) {
                best = Some(offsets);
            }
        }
    }
    best.unwrap_or_default()
}

/// How many allocations and frees there are from each block's allocation to its free. At every time
/// the new blocks are allocated first; then the blocks that are not needed any more are freed.
fn lifetimes(blocks: &Blocks) -> Vec<u64> {
    let mut events: Vec<(u32, bool, usize)> = Vec::with_capacity(2 * blocks.all.len());
    for (at, block) in blocks.all.iter().enumerate() {
        events.push((block.start, false, at));
        events.push((block.end - 1, true, at));
    }
    events.sort_unstable();
    let mut lifetimes = vec![0u64; blocks.all.len()];
    for (now, &(_, is_free, at)) in (0u64..).zip(&events) {
        lifetimes[at] = if is_free { now - lifetimes[at] } else { now };
    }
    lifetimes
}

fn sorted(blocks: &Blocks, lifetimes: &[u64], by: Sequence) -> Vec<u32> {
    // Larger keys go first, of equals the first made.
    let key = |at: usize| -> (u128, u64) {
        let (size, lifetime) = (blocks.all[at].size, lifetimes[at]);
        match by {
            Sequence::Size => (size.into(), lifetime),
            Sequence::Lifetime => (lifetime.into(), size),
            Sequence::Area => (u128::from(size) * u128::from(lifetime + 1), 0),
        }
    };
    let mut sequence: Vec<u32> = (0..blocks.all.len() as u32).collect();
    sequence.sort_by_key(|&at| (Reverse(key(at as usize)), blocks.all[at as usize].start));
    sequence
}

fn heap(blocks: &Blocks, sequence: &[u32], fit: Fit) -> Vec<u64> {
    let mut offsets = vec![0; blocks.all.len()];
    // What is placed and its offset, by offset.
    let mut placed: Vec<(u64, Block)> = Vec::with_capacity(sequence.len());
    for &at in sequence {
        let block = blocks.all[at as usize];
        let mut best: Option<(u64, u64)> = None;
        let mut end = 0;
        for &(from, other) in placed.iter().filter(|(_, other)| other.meets(&block)) {
            let offset = round_up(end, block.alignment);
            if offset + block.size <= from && best.is_none_or(|(gap, _)| from - offset < gap) {
                best = Some((from - offset, offset));
                if matches!(fit, Fit::Lowest) {
                    break;
                }
            }
            end = end.max(from + other.size);
        }
        let offset = best.map_or(round_up(end, block.alignment), |(_, offset)| offset);
        offsets[at as usize] = offset;
        placed.insert(placed.partition_point(|&(from, _)| from < offset), (offset, block));
    }
    offsets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(size: u64, start: u32, end: u32) -> Block {
        Block { size, alignment: 1, start, end }
    }

    #[test]
    fn the_smallest_gap_is_taken_or_the_lowest() {
        // At time 0: 5, 1, 3 and 1, one above another. At time 1 the 5 and the 3 are gone.
        let blocks = Blocks::bare(vec![block(5, 0, 1), block(1, 0, 2), block(3, 0, 1), block(1, 0, 2), block(3, 1, 2)]);
        let sequence = [0, 1, 2, 3, 4];
        assert_eq!(heap(&blocks, &sequence, Fit::Best), [0, 5, 6, 9, 6]);
        assert_eq!(heap(&blocks, &sequence, Fit::Lowest), [0, 5, 6, 9, 0]);
        // What fits no gap lies on top.
        let blocks = Blocks::bare(vec![block(5, 0, 1), block(1, 0, 2), block(6, 1, 2)]);
        assert_eq!(heap(&blocks, &[0, 1, 2], Fit::Best), [0, 5, 6]);
    }

    #[test]
    fn gaps_begin_at_aligned_offsets() {
        // The gap from 3 to 12 has 8 aligned bytes, that from 15 to 24 as many; of equals the
        // lowest.
        let mut all =
            vec![block(3, 0, 2), block(9, 0, 1), block(3, 0, 2), block(9, 0, 1), block(1, 0, 2), block(8, 1, 2)];
        all[5].alignment = 4;
        let blocks = Blocks::bare(all);
        assert_eq!(heap(&blocks, &[0, 1, 2, 3, 4, 5], Fit::Best)[5], 4);
    }

    #[test]
    fn lifetimes_count_events() {
        // Events: 0 made, 1 made, 0 freed (2), 2 made (3), 1 freed (4), 2 freed (5).
        let blocks = Blocks::bare(vec![block(1, 0, 1), block(9, 0, 2), block(5, 1, 2)]);
        assert_eq!(lifetimes(&blocks), [2, 3, 2]);
        let lifetimes = lifetimes(&blocks);
        assert_eq!(sorted(&blocks, &lifetimes, Sequence::Size), [1, 2, 0]);
        assert_eq!(sorted(&blocks, &lifetimes, Sequence::Lifetime), [1, 2, 0]);
        // 1 x 3, 9 x 4 and 5 x 3.
        assert_eq!(sorted(&blocks, &lifetimes, Sequence::Area), [1, 2, 0]);
    }
}
