//! ExecuTorch's `greedy` (`exir/memory_planning.py`): shared objects, each as large as the first
//! block put into it.
//!
//! Largest blocks first. A block goes to the bottom of the first object in which nothing lives when
//! it does; else into the first object that has room for it above all that lives when it does; else
//! into an object of its own. Objects lie one after another. Of equally large blocks ExecuTorch's
//! sequence is that of a Python set; here it is that of creation.

use crate::graph::round_up;
use crate::layout::blocks::{Block, Blocks};
use std::cmp::Reverse;
use std::collections::BTreeMap;

pub(super) fn place(blocks: &Blocks) -> Vec<u64> {
    let mut sequence: Vec<usize> = (0..blocks.all.len()).collect();
    sequence.sort_by_key(|&at| (Reverse(blocks.all[at].size), blocks.all[at].start));
    let mut objects: Vec<Object> = Vec::new();
    for at in sequence {
        let block = blocks.all[at];
        let found =
            (objects.iter().position(|object| object.is_idle(&block)).map(|object| (object, 0))).or_else(|| {
                let room_in = |(at, object): (usize, &Object)| object.room(&block).map(|offset| (at, offset));
                objects.iter().enumerate().find_map(room_in)
            });
        let (object, offset) = found.unwrap_or_else(|| {
            objects.push(Object::new(block.size));
            (objects.len() - 1, 0)
        });
        objects[object].add(at, block, offset);
    }
    let mut offsets = vec![0; blocks.all.len()];
    let mut end = 0;
    for object in &objects {
        let bottom = round_up(end, object.alignment);
        for &(at, _, offset) in &object.held {
            offsets[at] = bottom + offset;
        }
        end = bottom + object.size;
    }
    offsets
}

/// A piece of memory that blocks share.
struct Object {
    size: u64,
    /// The strictest of its blocks'.
    alignment: u64,
    /// Number, block and offset of what is in it.
    held: Vec<(usize, Block, u64)>,
    /// When something lives in it: disjoint spans of time, end by begin.
    busy: BTreeMap<u32, u32>,
}

impl Object {
    fn new(size: u64) -> Self {
        Object { size, alignment: 1, held: Vec::new(), busy: BTreeMap::new() }
    }

    /// Whether nothing lives in it while the block does.
    fn is_idle(&self, block: &Block) -> bool {
        self.busy.range(..block.end).next_back().is_none_or(|(_, &end)| end <= block.start)
    }

    /// The lowest offset above all that lives in it when the block does, if the block fits there.
    fn room(&self, block: &Block) -> Option<u64> {
        let mut offset = 0;
        for (_, other, at) in self.held.iter().filter(|(_, other, _)| other.meets(block)) {
            offset = offset.max(round_up(at + other.size, block.alignment));
            if offset + block.size > self.size {
                return None;
            }
        }
        Some(offset)
    }

    fn add(&mut self, at: usize, block: Block, offset: u64) {
        self.alignment = self.alignment.max(block.alignment);
        self.held.push((at, block, offset));
        let (mut begin, mut end) = (block.start, block.end);
        while let Some((&from, &to)) = self.busy.range(..=end).next_back().filter(|&(_, &to)| begin <= to) {
            (begin, end) = (begin.min(from), end.max(to));
            self.busy.remove(&from);
        }
        self.busy.insert(begin, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets of blocks of (size, start, end).
    fn offsets(blocks: &[(u64, u32, u32)]) -> Vec<u64> {
        let block = |&(size, start, end)| Block { size, alignment: 1, start, end };
        place(&Blocks::bare(blocks.iter().map(block).collect()))
    }

    #[test]
    fn idle_objects_are_shared_from_the_bottom() {
        // 10 makes an object. 6 meets it at time 1, and 10 + 6 do not fit: another. 4 finds the
        // first one idle. 3 meets both at time 1 and fits above neither: a third object, after 10
        // and 6.
        assert_eq!(offsets(&[(10, 0, 2), (6, 1, 3), (4, 2, 4), (3, 1, 2)]), [0, 10, 0, 16]);
    }

    #[test]
    fn what_lives_at_once_is_stacked_while_it_fits() {
        // In the object of 10, idle from time 1: the first 4 at its bottom, the second above it; 3
        // meets only the first.
        assert_eq!(offsets(&[(10, 0, 1), (4, 1, 3), (4, 1, 2), (3, 2, 3)]), [0, 0, 4, 4]);
        // 7 does not fit above 4.
        assert_eq!(offsets(&[(10, 0, 1), (7, 1, 3), (4, 1, 2)]), [0, 0, 10]);
    }

    #[test]
    fn a_later_object_that_is_idle_comes_before_an_earlier_one_with_room() {
        // 9 lies in the object of 10 from time 1; 5 meets 9 and makes an object of its own. 1 meets
        // 9 alone: it would fit above it, but the other object is idle.
        assert_eq!(offsets(&[(10, 0, 1), (9, 1, 3), (5, 1, 2), (1, 2, 3)]), [0, 0, 10, 10]);
    }
}
