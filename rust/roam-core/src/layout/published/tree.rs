//! The subgraph tree of Shu et al. (arXiv 2310.19295) for the layout of one order, from the
//! lifetimes alone.
//!
//! A part of the forward pass and the part of the backward pass that frees what the first one made
//! belong together, and what runs between the two is nested in them. Seen from the *loss*, the time
//! at which most blocks are alive, these pairs lie around it like rings: the mirror of a time
//! before the loss is the time by which everything is freed that was made since and lives through
//! the loss. Subgraphs across whose border nothing lives are independent of each other: siblings.

use crate::control::{Stop, Watch};
use crate::layout::blocks::Block;
use std::ops::Range;

/// Comparisons per pair of a leaf's blocks in one descent of branch and bound: a decision looks at
/// all times and all blocks of the leaf, and a block takes a decision and a lift.
const COMPARISONS: u64 = 4;

/// The most blocks a leaf may have so that `work` comparisons, shared out by blocks, let branch and
/// bound take back one choice per block: `n` descents of `COMPARISONS * n * n` for a leaf of `n`
/// blocks out of `blocks`.
pub(crate) fn node_limit(work: u64, blocks: usize) -> usize {
    (work / (COMPARISONS * blocks.max(1) as u64)).isqrt().max(1) as usize
}

/// Where a block is made and freed, seen from a subgraph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relation {
    /// Made and freed inside.
    InsideInside,
    /// Made inside, freed outside.
    InsideOutside,
    /// Made outside, freed inside.
    OutsideInside,
    /// Made and freed outside; it may live across the subgraph all the same.
    OutsideOutside,
}

/// Two stretches of time that belong together, and what lives nowhere outside them but between
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Subgraph {
    /// From the begin of the first stretch to the end of the second.
    pub(crate) outer: Range<u32>,
    /// What lies between the two: the span of the subgraph nested in this one. Empty in the
    /// innermost.
    pub(crate) inner: Range<u32>,
    /// The subgraph that this one is nested in; it comes earlier in the tree.
    pub(crate) parent: Option<usize>,
    /// The blocks that live within `outer` and in no subgraph nested in this one alone.
    pub(crate) blocks: Vec<u32>,
}

impl Subgraph {
    fn holds(&self, time: u32) -> bool {
        self.outer.contains(&time) && !self.inner.contains(&time)
    }

    pub(crate) fn relation(&self, block: &Block) -> Relation {
        match (self.holds(block.start), self.holds(block.end - 1)) {
            (true, true) => Relation::InsideInside,
            (true, false) => Relation::InsideOutside,
            (false, true) => Relation::OutsideInside,
            (false, false) => Relation::OutsideOutside,
        }
    }

    /// Whether the block is made in the first stretch and freed in the second.
    pub(crate) fn is_activation(&self, block: &Block) -> bool {
        !self.inner.is_empty()
            && self.relation(block) == Relation::InsideInside
            && block.start < self.inner.start
            && self.inner.end < block.end
    }
}

/// The subgraphs, parents first. Every block belongs to just one. None has more blocks than
/// `limit`, unless most of them cannot be parted: because they are made or freed at one time.
pub(crate) fn grow(blocks: &[Block], limit: usize, watch: &Watch) -> Result<Vec<Subgraph>, Stop> {
    let mut tree = Vec::new();
    let mut open = vec![((0..blocks.len() as u32).collect(), None)];
    while let Some((set, parent)) = open.pop() {
        for part in independent(blocks, set) {
            watch.check()?;
            nest(blocks, &part, parent, limit, &mut tree, &mut open);
        }
    }
    Ok(tree)
}

/// Blocks in one span of time across whose ends none of a set lives.
struct Part {
    span: Range<u32>,
    blocks: Vec<u32>,
}

fn independent(blocks: &[Block], mut set: Vec<u32>) -> Vec<Part> {
    set.sort_unstable_by_key(|&at| (blocks[at as usize].start, at));
    let mut parts: Vec<Part> = Vec::new();
    for at in set {
        let block = &blocks[at as usize];
        match parts.last_mut() {
            Some(part) if block.start < part.span.end => {
                part.span.end = part.span.end.max(block.end);
                part.blocks.push(at);
            }
            _ => parts.push(Part { span: block.start..block.end, blocks: vec![at] }),
        }
    }
    parts
}

/// The first time of the span at which most blocks are alive.
fn loss(blocks: &[Block], part: &Part) -> u32 {
    let mut change = vec![0i64; part.span.len() + 1];
    for &at in &part.blocks {
        change[(blocks[at as usize].start - part.span.start) as usize] += 1;
        change[(blocks[at as usize].end - part.span.start) as usize] -= 1;
    }
    let (mut alive, mut most, mut loss) = (0, 0, part.span.start);
    for (time, change) in part.span.clone().zip(change) {
        alive += change;
        if alive > most {
            (most, loss) = (alive, time);
        }
    }
    loss
}

/// Spans around the loss, each within the one before: the whole part, then each time up to the loss
/// with its mirror.
fn spans(blocks: &[Block], part: &Part, loss: u32) -> Vec<Range<u32>> {
    let mut mirror = vec![loss + 1; (loss - part.span.start) as usize + 1];
    for block in part.blocks.iter().map(|&at| &blocks[at as usize]) {
        if block.start <= loss && loss < block.end {
            let mirror = &mut mirror[(block.start - part.span.start) as usize];
            *mirror = (*mirror).max(block.end);
        }
    }
    for at in (1..mirror.len()).rev() {
        mirror[at - 1] = mirror[at - 1].max(mirror[at]);
    }
    let mirrored = (part.span.start..).zip(mirror).map(|(start, end)| start..end);
    std::iter::once(part.span.clone()).chain(mirrored).collect()
}

/// Appends a part's subgraphs to the tree, and what must be parted further to `open`.
fn nest(
    blocks: &[Block],
    part: &Part,
    parent: Option<usize>,
    limit: usize,
    tree: &mut Vec<Subgraph>,
    open: &mut Vec<(Vec<u32>, Option<usize>)>,
) {
    if part.blocks.len() <= limit {
        let inner = part.span.end..part.span.end;
        tree.push(Subgraph { outer: part.span.clone(), inner, parent, blocks: part.blocks.clone() });
        return;
    }
    let loss = loss(blocks, part);
    let spans = spans(blocks, part, loss);
    // Per block the first span that does not hold all its life; it lies outside that one and all
    // later ones.
    let mut leaving: Vec<Vec<u32>> = vec![Vec::new(); spans.len() + 1];
    for &at in &part.blocks {
        let block = &blocks[at as usize];
        let by_start = spans.partition_point(|span| span.start <= block.start);
        let by_end = spans.partition_point(|span| block.end <= span.end);
        leaving[by_start.min(by_end)].push(at);
    }
    let (mut parent, mut from) = (parent, 0);
    while from < spans.len() {
        // As many rings as a leaf may have blocks for, and one at least.
        let mut within = std::mem::take(&mut leaving[from + 1]);
        let mut to = from + 1;
        while to < spans.len() && within.len() + leaving[to + 1].len() <= limit {
            to += 1;
            within.append(&mut leaving[to]);
        }
        let outer = spans[from].clone();
        let inner = spans.get(to).cloned().unwrap_or(outer.end..outer.end);
        from = to;
        if within.is_empty() {
            continue;
        }
        if within.len() > limit {
            let middle = if inner.is_empty() { loss..loss + 1 } else { inner.clone() };
            let before = |at: &u32| blocks[*at as usize].end <= middle.start;
            let after = |at: &u32| middle.end <= blocks[*at as usize].start;
            let [early, late] = [split_off(&mut within, before), split_off(&mut within, after)];
            for side in [late, early] {
                // Only what is at most half as large, so that parting everything takes n log n.
                if 2 * side.len() <= part.blocks.len() {
                    open.push((side, Some(tree.len())));
                } else {
                    within.extend(side);
                }
            }
        }
        tree.push(Subgraph { outer, inner, parent, blocks: within });
        parent = Some(tree.len() - 1);
    }
}

/// Moves the blocks for which it holds out of the list.
fn split_off(list: &mut Vec<u32>, is_out: impl Fn(&u32) -> bool) -> Vec<u32> {
    let (out, rest) = std::mem::take(list).into_iter().partition(is_out);
    *list = rest;
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Random;

    fn block(start: u32, end: u32) -> Block {
        Block { size: 1, alignment: 1, start, end }
    }

    fn grown(blocks: &[Block], limit: usize) -> Vec<Subgraph> {
        grow(blocks, limit, &Watch::default()).expect("not stopped")
    }

    #[test]
    fn blocks_are_classified_by_where_they_are_made_and_freed() {
        // The subgraph is 2..4 and 8..10; 4..8 is nested in it.
        let subgraph = Subgraph { outer: 2..10, inner: 4..8, parent: None, blocks: Vec::new() };
        for (block, relation, is_activation) in [
            (block(2, 4), Relation::InsideInside, false),
            (block(3, 9), Relation::InsideInside, true),
            (block(8, 10), Relation::InsideInside, false),
            (block(3, 5), Relation::InsideOutside, false),
            (block(9, 11), Relation::InsideOutside, false),
            (block(5, 9), Relation::OutsideInside, false),
            (block(0, 3), Relation::OutsideInside, false),
            (block(5, 8), Relation::OutsideOutside, false),
            (block(0, 12), Relation::OutsideOutside, false),
        ] {
            assert_eq!(subgraph.relation(&block), relation, "{block:?}");
            assert_eq!(subgraph.is_activation(&block), is_activation, "{block:?}");
        }
    }

    #[test]
    fn forward_and_backward_parts_nest_around_the_loss() {
        // Two independent chains: three activations, the loss's own block, two gradients handed on.
        let chain =
            |at: u32| [(0, 7), (1, 6), (2, 5), (3, 4), (4, 6), (5, 7)].map(|(from, to)| block(at + from, at + to));
        let blocks: Vec<Block> = chain(0).into_iter().chain(chain(7)).collect();
        let tree = grown(&blocks, 2);
        assert_eq!(tree.len(), 6);
        for (at, first) in [(0, 0), (7, 6)] {
            let outer = |from: u32, to: u32| tree.iter().position(|subgraph| subgraph.outer == (at + from..at + to));
            let [root, middle, leaf] = [outer(0, 7), outer(1, 6), outer(2, 5)].map(|found| found.expect("grown"));
            assert_eq!([root, middle, leaf].map(|at| tree[at].parent), [None, Some(root), Some(middle)]);
            let owned = [root, middle, leaf].map(|at| tree[at].blocks.clone());
            assert_eq!(owned, [[0, 5], [1, 4], [2, 3]].map(|pair| pair.map(|block| first + block).to_vec()));
        }
        assert_eq!(grown(&blocks, 6).len(), 2);
    }

    #[test]
    fn every_block_belongs_to_one_subgraph_and_lives_within_it() {
        let mut random = Random::new(1);
        for round in 0..300 {
            let count = 1 + random.below(80);
            let mut made = || {
                let start = random.below(60) as u32;
                block(start, start + 1 + random.below(1 << (1 + round % 6)) as u32)
            };
            let blocks: Vec<Block> = (0..count).map(|_| made()).collect();
            let tree = grown(&blocks, 1 + round as usize % 9);
            let mut owned: Vec<u32> = tree.iter().flat_map(|subgraph| subgraph.blocks.clone()).collect();
            owned.sort_unstable();
            assert_eq!(owned, (0..count as u32).collect::<Vec<_>>());
            for (at, subgraph) in tree.iter().enumerate() {
                assert!(subgraph.parent.is_none_or(|parent| parent < at));
                for &block in &subgraph.blocks {
                    let block = &blocks[block as usize];
                    assert!(subgraph.outer.start <= block.start && block.end <= subgraph.outer.end);
                    assert_ne!(subgraph.relation(block), Relation::OutsideOutside);
                }
            }
        }
    }

    #[test]
    fn the_node_limit_falls_with_the_budget_and_with_more_blocks() {
        let limits = [1 << 30, 1 << 26, 1 << 20, 0].map(|work| node_limit(work, 1000));
        assert_eq!(limits, [518, 129, 16, 1]);
        assert_eq!([10, 10_000, 1_000_000].map(|blocks| node_limit(1 << 26, blocks)), [1295, 40, 4]);
        assert_eq!(node_limit(u64::MAX, 0), (1 << 31) - 1);
    }
}
