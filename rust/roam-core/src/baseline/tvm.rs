//! TVM's unified static memory planner (`src/tir/usmp/algo/greedy.cc`): `greedy_by_size` and
//! `greedy_by_conflicts`.
//!
//! Each block, in sequence, lies on top of all that was placed before and lives when it does; gaps
//! below are not looked for. Where TVM's sequence goes on by name, ours goes on by creation.

use crate::graph::round_up;
use crate::layout::blocks::{Block, Blocks};
use crate::segment_tree::SegmentTree;
use std::cmp::Reverse;

/// The largest first; of equals those that meet the most others.
pub(super) fn by_size(blocks: &Blocks) -> Vec<u32> {
    let conflicts = conflicts(blocks);
    sorted(blocks, |at| (blocks.all[at].size, u64::from(conflicts[at])))
}

/// Those that meet the most others first; of equals the largest.
pub(super) fn by_conflicts(blocks: &Blocks) -> Vec<u32> {
    let conflicts = conflicts(blocks);
    sorted(blocks, |at| (u64::from(conflicts[at]), blocks.all[at].size))
}

fn sorted(blocks: &Blocks, key: impl Fn(usize) -> (u64, u64)) -> Vec<u32> {
    let mut sequence: Vec<u32> = (0..blocks.all.len() as u32).collect();
    sequence.sort_by_key(|&at| (Reverse(key(at as usize)), blocks.all[at as usize].start));
    sequence
}

/// How many other blocks each meets.
fn conflicts(blocks: &Blocks) -> Vec<u32> {
    let sorted = |time: fn(&Block) -> u32| {
        let mut times: Vec<u32> = blocks.all.iter().map(time).collect();
        times.sort_unstable();
        times
    };
    let (starts, ends) = (sorted(|block| block.start), sorted(|block| block.end));
    let meets = |block: &Block| {
        let begun = starts.partition_point(|&start| start < block.end);
        let over = ends.partition_point(|&end| end <= block.start);
        (begun - over - 1) as u32
    };
    blocks.all.iter().map(meets).collect()
}

/// Offsets of the blocks, stacked in the given sequence.
pub(super) fn stack(blocks: &Blocks, sequence: &[u32]) -> Vec<u64> {
    let mut offsets = vec![0; blocks.all.len()];
    let mut tops = Tops::new(blocks.times);
    for &at in sequence {
        let block = &blocks.all[at as usize];
        let offset = round_up(tops.highest(block), block.alignment);
        tops.raise(block, offset + block.size);
        offsets[at as usize] = offset;
    }
    offsets
}

/// The highest end of a block per time: a segment tree.
struct Tops {
    /// What the blocks reach that cover all of a node's times, and what any block reaches that
    /// touches one of them.
    cover: Vec<u64>,
    touch: Vec<u64>,
    tree: SegmentTree,
}

impl Tops {
    fn new(times: u32) -> Self {
        let tree = SegmentTree::new(times as usize);
        Tops { cover: vec![0; tree.node_count()], touch: vec![0; tree.node_count()], tree }
    }

    /// The highest end at any of the block's times.
    fn highest(&self, block: &Block) -> u64 {
        let over = self.tree.ends(block.times()).map(|node| self.cover[node]);
        let within = self.tree.cover(block.times()).map(|node| self.touch[node]);
        over.chain(within).max().unwrap_or(0)
    }

    fn raise(&mut self, block: &Block, end: u64) {
        for node in self.tree.cover(block.times()) {
            self.cover[node] = self.cover[node].max(end);
            self.touch[node] = self.touch[node].max(end);
        }
        for node in self.tree.ends(block.times()) {
            self.touch[node] = self.touch[node].max(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_lie_on_top_of_all_that_they_meet() {
        // 4 over [0, 2), 3 over [1, 3), 2 over [2, 4).
        let block = |size, start| Block { size, alignment: 1, start, end: start + 2 };
        let blocks = Blocks::bare(vec![block(4, 0), block(3, 1), block(2, 2)]);
        assert_eq!(conflicts(&blocks), [1, 2, 1]);
        // 4 at the bottom, 3 on it, and 2 on that, although 0 to 4 are free by then.
        assert_eq!(stack(&blocks, &by_size(&blocks)), [0, 4, 7]);
        // 3 meets two others and goes first; both lie on it.
        assert_eq!(stack(&blocks, &by_conflicts(&blocks)), [3, 0, 3]);
    }

    #[test]
    fn ties_go_to_the_other_key_and_then_to_creation() {
        let block = |size, start, end| Block { size, alignment: 1, start, end };
        // The second and third are equally large; the third meets both others.
        let blocks = Blocks::bare(vec![block(9, 0, 1), block(5, 1, 2), block(5, 0, 2)]);
        assert_eq!(by_size(&blocks), [0, 2, 1]);
        // The first two meet one other each.
        assert_eq!(by_conflicts(&blocks), [2, 0, 1]);
        let equal = Blocks::bare(vec![block(5, 1, 2), block(5, 0, 1)]);
        assert_eq!(by_size(&equal), [1, 0]);
    }
}
