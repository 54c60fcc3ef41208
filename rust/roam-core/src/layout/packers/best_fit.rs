//! Layout by the rule of an ordinary allocator: blocks in the sequence in which they are made, each
//! in the smallest free gap that holds it.

use crate::graph::round_up;
use crate::layout::blocks::Blocks;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Offsets per block, in time O(n log n) but for alignments. Of blocks made at one time the largest
/// go first; of equal gaps the lowest is taken.
pub(crate) fn place(blocks: &Blocks) -> Vec<u64> {
    let mut offsets = vec![0; blocks.all.len()];
    let mut sequence: Vec<u32> = (0..blocks.all.len() as u32).filter(|&at| blocks.all[at as usize].size > 0).collect();
    sequence.sort_by_key(|&at| {
        let block = &blocks.all[at as usize];
        (block.start, Reverse((block.size, block.alignment)), block.end, at)
    });
    let mut deaths: BTreeSet<(u32, u32)> = BTreeSet::new();
    let mut free = Free::default();
    for at in sequence {
        let block = &blocks.all[at as usize];
        while let Some((_, dead)) = deaths.first().copied().filter(|&(end, _)| end <= block.start) {
            deaths.pop_first();
            free.give_back(offsets[dead as usize], blocks.all[dead as usize].size);
        }
        offsets[at as usize] = free.take(block.size, block.alignment);
        deaths.insert((block.end, at));
    }
    offsets
}

/// What is free below the end of the highest block, and where that is.
#[derive(Default)]
struct Free {
    end: u64,
    /// Gaps by offset: their sizes.
    gaps: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Free {
    fn add(&mut self, offset: u64, size: u64) {
        if size > 0 {
            self.gaps.insert(offset, size);
            self.by_size.insert((size, offset));
        }
    }

    fn remove(&mut self, offset: u64, size: u64) {
        self.gaps.remove(&offset);
        self.by_size.remove(&(size, offset));
    }

    fn take(&mut self, size: u64, alignment: u64) -> u64 {
        let holds = |&&(gap, offset): &&(u64, u64)| round_up(offset, alignment) + size <= offset + gap;
        if let Some((gap, offset)) = self.by_size.range((size, 0)..).find(holds).copied() {
            let start = round_up(offset, alignment);
            self.remove(offset, gap);
            self.add(offset, start - offset);
            self.add(start + size, offset + gap - start - size);
            return start;
        }
        let start = round_up(self.end, alignment);
        self.add(self.end, start - self.end);
        self.end = start + size;
        start
    }

    fn give_back(&mut self, mut offset: u64, mut size: u64) {
        if let Some((before, gap)) = self.gaps.range(..offset).next_back().map(|(&at, &gap)| (at, gap)) {
            if before + gap == offset {
                self.remove(before, gap);
                (offset, size) = (before, gap + size);
            }
        }
        if let Some(gap) = self.gaps.get(&(offset + size)).copied() {
            self.remove(offset + size, gap);
            size += gap;
        }
        // Nothing above a gap at the end: the end falls.
        if offset + size == self.end { self.end = offset } else { self.add(offset, size) }
    }
}
