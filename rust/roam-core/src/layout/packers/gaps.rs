//! Which addresses are taken when: finds the lowest gap for a block.
//!
//! A segment tree over time. A node keeps, as merged address spans, what the blocks take that cover
//! its whole time range (`cover`) and what all blocks take that touch it (`touch`). A query over a
//! time range reads the `touch` of the nodes that make it up and the `cover` of the nodes above its
//! two ends: O(log times) lists. In a tight layout merged spans are few, so a placement costs
//! O(log^2) in practice, where comparing with every overlapping block is linear. Where spans stay
//! many it is linear too; spans looked at are counted, so that the caller can give up.

use crate::graph::round_up;
use crate::layout::blocks::Block;
use crate::segment_tree::SegmentTree;

/// Disjoint spans of addresses that do not touch each other, ascending.
#[derive(Clone, Debug, Default)]
struct Spans(Vec<(u64, u64)>);

impl Spans {
    /// Says how many spans this looked at or moved, moves being quick.
    fn insert(&mut self, from: u64, to: u64) -> u64 {
        let first = self.0.partition_point(|&(_, end)| end < from);
        let last = first + self.0[first..].partition_point(|&(start, _)| start <= to);
        if first == last {
            self.0.insert(first, (from, to));
        } else {
            let merged = (from.min(self.0[first].0), to.max(self.0[last - 1].1));
            self.0[first] = merged;
            self.0.drain(first + 1..last);
        }
        ((self.0.len() - first) / 32) as u64
    }
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Gaps {
    cover: Vec<Spans>,
    touch: Vec<Spans>,
    tree: SegmentTree,
    looked_at: u64,
}

impl Gaps {
    pub(crate) fn new(times: u32) -> Self {
        let tree = SegmentTree::new(times as usize);
        let none = vec![Spans::default(); tree.node_count()];
        Gaps { cover: none.clone(), touch: none, tree, looked_at: 0 }
    }

    /// How many lists of spans there are: a copy copies all of them.
    pub(crate) fn lists_kept(&self) -> u64 {
        2 * self.tree.node_count() as u64
    }

    /// How many spans have been looked at so far.
    pub(crate) fn looked_at(&self) -> u64 {
        self.looked_at
    }

    /// All lists that can hold something in the block's way.
    fn lists(&self, block: &Block) -> Vec<&[(u64, u64)]> {
        let mut lists: Vec<&[(u64, u64)]> = Vec::with_capacity(64);
        for node in self.tree.ends(block.times()) {
            if !self.cover[node].0.is_empty() {
                lists.push(&self.cover[node].0);
            }
        }
        for node in self.tree.cover(block.times()) {
            if !self.touch[node].0.is_empty() {
                lists.push(&self.touch[node].0);
            }
        }
        lists
    }

    /// Whether nothing is in the block's way at an offset.
    pub(crate) fn is_free(&mut self, block: &Block, offset: u64) -> bool {
        let lists = self.lists(block);
        let looked_at = lists.len() as u64;
        let is_free = lists.iter().all(|spans| {
            let past = spans.partition_point(|&(_, end)| end <= offset);
            spans.get(past).is_none_or(|&(start, _)| offset + block.size <= start)
        });
        self.looked_at += looked_at;
        is_free
    }

    /// The lowest aligned offset at which nothing is in the block's way.
    pub(crate) fn lowest(&mut self, block: &Block) -> u64 {
        self.lowest_from(block, 0)
    }

    /// The same as [`Self::lowest`], but not below `from`, which is aligned.
    pub(crate) fn lowest_from(&mut self, block: &Block, from: u64) -> u64 {
        let mut lists = self.lists(block);
        let (mut offset, mut looked_at) = (from, 0);
        let lowest = loop {
            let before = offset;
            looked_at += lists.len() as u64;
            lists.retain_mut(|spans| {
                let past = match spans {
                    [(_, end), ..] if *end > offset => 0,
                    _ => spans.partition_point(|&(_, end)| end <= offset),
                };
                *spans = &spans[past..];
                while let [(start, end), rest @ ..] = *spans {
                    if *start >= offset + block.size {
                        break;
                    }
                    offset = round_up(*end, block.alignment);
                    *spans = rest;
                    looked_at += 1;
                }
                !spans.is_empty()
            });
            if offset == before {
                break offset;
            }
        };
        self.looked_at += looked_at;
        lowest
    }

    pub(crate) fn insert(&mut self, block: &Block, offset: u64) {
        let to = offset + block.size;
        for node in self.tree.cover(block.times()) {
            self.looked_at += self.cover[node].insert(offset, to);
            self.looked_at += self.touch[node].insert(offset, to);
        }
        for node in self.tree.ends(block.times()) {
            self.looked_at += self.touch[node].insert(offset, to);
        }
    }
}
