//! Layouts from the subgraph tree (Shu et al., arXiv 2310.19295): in each subgraph's space
//! long-lived activations at the bottom, in order of decreasing free time, temporaries above; the
//! spaces stacked, each nested one on its parent's activations; of two blocks that collide the
//! smaller one evicted and placed again where it fits. In the end everything sinks as far as it
//! can.

use crate::control::{Stop, Watch};
use crate::graph::round_up;
use crate::layout::blocks::{Block, Blocks};
use crate::layout::packers::gaps::Gaps;
use crate::layout::packers::greedy::Sequence;
use crate::layout::published::tree::{self, Subgraph, grow};
use crate::layout::search::canonical::{Canonical, Outcome};
use crate::layout::work::portfolio_work;
use std::cmp::Reverse;

/// Comparisons that the searches in all leaves may make together. The node limit follows from it.
const WORK: u64 = 1 << 26;
/// Leaves are not made larger, whatever is asked for: their tables grow with the square.
const MOST_NODES: usize = 4096;

/// Offsets per block; `None` where one would reach `limit` or beyond.
pub(crate) fn place(
    blocks: &Blocks,
    node_limit: Option<usize>,
    limit: u64,
    watch: &Watch,
) -> Result<Option<Vec<u64>>, Stop> {
    let node_limit = node_limit.unwrap_or_else(|| tree::node_limit(WORK, blocks.all.len())).min(MOST_NODES);
    let mut spans = portfolio_work(blocks.all.len()) / 4;
    let settled = settle(&blocks.all, &stack(blocks, WORK, node_limit, watch)?, blocks.times, &mut spans, watch)?;
    let offsets = sink(&blocks.all, settled, blocks.times, spans, watch)?;
    Ok((blocks.pool_bytes(&offsets) < limit).then_some(offsets))
}

/// Where the subgraphs would have their blocks; `None` for those of subgraphs too large to search.
fn stack(blocks: &Blocks, work: u64, node_limit: usize, watch: &Watch) -> Result<Vec<Option<u64>>, Stop> {
    let all = &blocks.all;
    let floor = blocks.floor();
    let mut wanted = vec![None; all.len()];
    let tree = grow(all, node_limit, watch)?;
    // Per subgraph where those nested in it begin.
    let mut tops: Vec<u64> = Vec::with_capacity(tree.len());
    for subgraph in &tree {
        let base = subgraph.parent.map_or(0, |parent| tops[parent]);
        let (bottom, above) = bottom(all, subgraph, base);
        tops.push(bottom.last().map_or(base, |&(at, offset)| offset + all[at as usize].size));
        for &(at, offset) in &bottom {
            wanted[at as usize] = Some(offset);
        }
        if above.is_empty() || above.len() > node_limit {
            continue;
        }
        let share = (u128::from(work) * above.len() as u128 / all.len() as u128) as u64;
        let leaf = Leaf::new(all, &above, &bottom, base);
        for (&at, offset) in above.iter().zip(leaf.solve(floor, share, watch)?) {
            wanted[at as usize] = Some(offset);
        }
    }
    Ok(wanted)
}

/// A subgraph's activations with their offsets from `base` up, those freed last at the bottom, and
/// its other blocks.
fn bottom(all: &[Block], subgraph: &Subgraph, base: u64) -> (Vec<(u32, u64)>, Vec<u32>) {
    let is_activation = |at: &u32| subgraph.is_activation(&all[*at as usize]);
    let (mut activations, above): (Vec<u32>, Vec<u32>) = subgraph.blocks.iter().partition(|at| is_activation(at));
    activations.sort_unstable_by_key(|&at| {
        let block = &all[at as usize];
        (Reverse(block.end), block.start, at)
    });
    let mut top = base;
    let stacked = activations.into_iter().map(|at| {
        let offset = round_up(top, all[at as usize].alignment);
        top = offset + all[at as usize].size;
        (at, offset)
    });
    (stacked.collect(), above)
}

/// A subgraph's blocks that are no activations, above what is fixed below them.
struct Leaf {
    blocks: Blocks,
    /// Per time the height below which nothing may lie.
    ground: Vec<u64>,
}

impl Leaf {
    fn new(all: &[Block], above: &[u32], bottom: &[(u32, u64)], base: u64) -> Self {
        let blocks = Blocks::bare(above.iter().map(|&at| all[at as usize]).collect());
        let mut starts: Vec<u32> = above.iter().map(|&at| all[at as usize].start).collect();
        starts.sort_unstable();
        starts.dedup();
        let mut ground = vec![base; starts.len()];
        for &(at, offset) in bottom {
            let block = &all[at as usize];
            // From the last start that is not after the block's own, until the block is freed.
            let from = starts.partition_point(|&start| start <= block.start).saturating_sub(1);
            let to = starts.partition_point(|&start| start < block.end);
            for height in &mut ground[from..to.max(from)] {
                *height = (*height).max(offset + block.size);
            }
        }
        Leaf { blocks, ground }
    }

    /// Offsets of the blocks: the best greedy ones, or better ones if `work` comparisons find some.
    /// It is of no use to end below `floor`.
    fn solve(&self, floor: u64, mut work: u64, watch: &Watch) -> Result<Vec<u64>, Stop> {
        let [mut best, others @ ..] =
            [Sequence::Size, Sequence::Area, Sequence::Lifetime, Sequence::Start].map(|sequence| self.greedy(sequence));
        let top = |offsets: &[u64]| self.blocks.pool_bytes(offsets);
        for other in others {
            if top(&other) < top(&best) {
                best = other;
            }
        }
        let (mut low, mut high) = (floor.max(self.floor()), top(&best));
        if high <= low {
            return Ok(best);
        }
        let canonical = Canonical::new(&self.blocks);
        let mut rank = vec![0; best.len()];
        for (place, &at) in Sequence::Area.sorted(&self.blocks).iter().enumerate() {
            rank[at as usize] = place as u32;
        }
        let mut blame = vec![1; self.ground.len()];
        let mut capacity = low;
        while low < high && work > 0 {
            match canonical.search_above(&self.ground, &rank, capacity, &mut blame, &mut work, watch)? {
                Outcome::Found(offsets) => (high, best) = (top(&offsets), offsets),
                Outcome::Refuted => low = capacity + 1,
                Outcome::Exhausted => break,
            }
            capacity = low + high.saturating_sub(low) / 2;
        }
        Ok(best)
    }

    fn greedy(&self, sequence: Sequence) -> Vec<u64> {
        let all = &self.blocks.all;
        let mut gaps = Gaps::new(self.blocks.times);
        for (time, &size) in (0..).zip(&self.ground) {
            if size > 0 {
                gaps.insert(&Block { size, alignment: 1, start: time, end: time + 1 }, 0);
            }
        }
        let mut offsets = vec![0; all.len()];
        for at in sequence.sorted(&self.blocks) {
            let offset = gaps.lowest(&all[at as usize]);
            gaps.insert(&all[at as usize], offset);
            offsets[at as usize] = offset;
        }
        offsets
    }

    /// No layout above the ground ends lower.
    fn floor(&self) -> u64 {
        let mut heights = self.ground.clone();
        for block in &self.blocks.all {
            for height in &mut heights[block.times()] {
                *height += block.size;
            }
        }
        heights.into_iter().max().unwrap_or(0)
    }
}

/// Places every block where it is wanted, except the smaller one of two that collide and those that
/// are wanted nowhere: these go to the lowest offset that is free in the end, or on top of all else
/// once more than `spans` address spans have been looked at. Takes the spans that it looks at off
/// `spans`.
fn settle(all: &[Block], wanted: &[Option<u64>], times: u32, spans: &mut u64, watch: &Watch) -> Result<Vec<u64>, Stop> {
    let mut largest_first: Vec<u32> = (0..all.len() as u32).collect();
    largest_first.sort_by_key(|&at| {
        let block = &all[at as usize];
        (Reverse(block.size), Reverse(block.end - block.start), block.start, at)
    });
    let mut gaps = Gaps::new(times);
    let mut offsets = vec![0; all.len()];
    let mut top = 0;
    let mut evicted = Vec::new();
    for (turn, at) in largest_first.into_iter().enumerate() {
        if turn % 64 == 0 {
            watch.check()?;
        }
        let block = &all[at as usize];
        match wanted[at as usize] {
            Some(offset) if gaps.looked_at() < *spans && gaps.is_free(block, offset) => {
                gaps.insert(block, offset);
                offsets[at as usize] = offset;
                top = top.max(offset + block.size);
            }
            _ => evicted.push(at),
        }
    }
    for (turn, &at) in evicted.iter().enumerate() {
        if turn % 64 == 0 {
            watch.check()?;
        }
        let block = &all[at as usize];
        let offset = if gaps.looked_at() < *spans { gaps.lowest(block) } else { round_up(top, block.alignment) };
        if gaps.looked_at() < *spans {
            gaps.insert(block, offset);
        }
        offsets[at as usize] = offset;
        top = top.max(offset + block.size);
    }
    *spans = spans.saturating_sub(gaps.looked_at());
    Ok(offsets)
}

/// Moves each block, from the lowest up, to the lowest offset that is free. None ends higher than
/// before: what lay below it has not risen, so its own place is free. Changes nothing if that would
/// take looking at more than `spans` address spans.
fn sink(all: &[Block], offsets: Vec<u64>, times: u32, spans: u64, watch: &Watch) -> Result<Vec<u64>, Stop> {
    let mut lowest_first: Vec<u32> = (0..all.len() as u32).collect();
    lowest_first.sort_by_key(|&at| (offsets[at as usize], at));
    let mut gaps = Gaps::new(times);
    let mut sunk = offsets.clone();
    for (turn, at) in lowest_first.into_iter().enumerate() {
        if turn % 64 == 0 {
            watch.check()?;
        }
        if gaps.looked_at() >= spans {
            return Ok(offsets);
        }
        sunk[at as usize] = gaps.lowest(&all[at as usize]);
        gaps.insert(&all[at as usize], sunk[at as usize]);
    }
    Ok(sunk)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::buffers::Style;

    fn block(size: u64, start: u32, end: u32) -> Block {
        Block { size, alignment: 1, start, end }
    }

    /// No two blocks share a byte at any time, and all are aligned.
    fn check(blocks: &Blocks, offsets: &[u64]) {
        let end = |at: usize| offsets[at] + blocks.all[at].size;
        let mut by_start: Vec<usize> = (0..blocks.all.len()).collect();
        by_start.sort_by_key(|&at| blocks.all[at].start);
        for (place, &a) in by_start.iter().enumerate() {
            assert_eq!(offsets[a] % blocks.all[a].alignment, 0);
            for &b in by_start[place + 1..].iter().take_while(|&&b| blocks.all[b].start < blocks.all[a].end) {
                assert!(end(a) <= offsets[b] || end(b) <= offsets[a], "blocks {a} and {b} share bytes");
            }
        }
    }

    /// Per layer an activation, a temporary before the next layer, and a temporary after it in the
    /// backward pass.
    fn chain(layers: u32) -> Blocks {
        let last = 6 * layers;
        let layer = |at: u32| {
            let (begin, end) = (3 * at, last - 3 * at);
            [block(10 + u64::from(at), begin, end), block(5, begin + 1, begin + 3), block(7, end - 2, end)]
        };
        Blocks::bare((0..layers).flat_map(layer).collect())
    }

    #[test]
    fn activations_lie_at_the_bottom_in_order_of_decreasing_free_time() {
        let blocks = chain(40);
        // One or two layers per leaf.
        let work = 4 * 120 * 36;
        assert_eq!(tree::node_limit(work, 120), 6);
        let watch = Watch::default();
        let node_limit = tree::node_limit(work, blocks.all.len());
        let wanted = stack(&blocks, work, node_limit, &watch).expect("not stopped");
        let mut spans = portfolio_work(blocks.all.len());
        let offsets = settle(&blocks.all, &wanted, blocks.times, &mut spans, &watch).expect("not stopped");
        check(&blocks, &offsets);
        let mut top = 0;
        for layer in 0..38 {
            assert_eq!(offsets[3 * layer], top, "activation {layer}");
            top += blocks.all[3 * layer].size;
            assert!(offsets[3 * layer + 1] >= top && offsets[3 * layer + 2] >= top, "temporaries of {layer}");
        }
        assert_eq!(blocks.pool_bytes(&offsets), blocks.floor());
    }

    #[test]
    fn of_two_that_collide_the_smaller_is_evicted() {
        let all = [block(4, 0, 2), block(6, 1, 3), block(2, 2, 4)];
        let wanted = [Some(0), Some(3), Some(1)];
        let offsets = settle(&all, &wanted, 4, &mut 1000, &Watch::default()).expect("not stopped");
        // The last one has lost nothing by the first one's eviction: they never meet.
        assert_eq!(offsets, [9, 3, 1]);
        assert_eq!(sink(&all, offsets, 4, u64::MAX, &Watch::default()), Ok(vec![8, 2, 0]));
    }

    #[test]
    fn every_layout_is_valid_whatever_the_blocks_and_the_budget() {
        let watch = Watch::default();
        for style in Style::ALL {
            for (count, alignment) in [(1, 1), (30, 4096), (400, 512), (2000, 512)] {
                let buffers = style.buffers(count, 3).into_iter().map(|buffer| {
                    let (start, end) = (buffer.lower as u32, buffer.upper as u32);
                    Block { size: buffer.size_bytes, alignment, start, end }
                });
                let blocks = Blocks::bare(buffers.collect());
                for (work, mut spans) in [(0, u64::MAX), (1 << 16, 1 << 12), (WORK, u64::MAX)] {
                    let node_limit = tree::node_limit(work, blocks.all.len());
                    let wanted = stack(&blocks, work, node_limit, &watch).expect("not stopped");
                    let settled = settle(&blocks.all, &wanted, blocks.times, &mut spans, &watch).expect("not stopped");
                    check(&blocks, &settled);
                    let sunk = sink(&blocks.all, settled.clone(), blocks.times, u64::MAX, &watch).expect("not stopped");
                    check(&blocks, &sunk);
                    assert!(sunk.iter().zip(&settled).all(|(sunk, settled)| sunk <= settled));
                }
            }
        }
    }
}
