//! Blocks joined into larger ones, where a layout without waste must or may have them together.
//!
//! Where the blocks freed at a time have the very sizes of those that begin then, each may take the
//! place of one of its size: the two become one block with both lifetimes. Blocks with equal
//! lifetimes become one on top of each other. At every time a joined block takes what its parts
//! take, so the floor stays as it is. A rectangle cut into pieces, again and again across its whole
//! width or height, is put together again (as series-parallel graphs are recognized; Valdes, Tarjan
//! and Lawler, SIAM J. Comput. 11, 1982).

use crate::graph::round_up;
use crate::layout::blocks::{Block, Blocks};
use std::collections::BTreeMap;

/// Blocks that may be compared per block, on average.
const MOST_COMPARED: u64 = 64;
/// Joined blocks are of use if they are that many times fewer. If they always counted as of use,
/// planning would take more than five times as long (`benches/constants.py`).
const FEWER: usize = 4;

/// The blocks that are left, and how much was compared; `None` unless they are far fewer.
pub(crate) fn join(blocks: &Blocks) -> (Option<Whole>, u64) {
    let mut joined = Joined::new(blocks);
    for &block in &blocks.all {
        joined.push(block);
    }
    for at in 0..blocks.all.len() as u32 {
        joined.enter(at);
    }
    joined.join_all(MOST_COMPARED * blocks.all.len() as u64);
    let Joined { all, part_of, compared, .. } = joined;
    let left: Vec<u32> = (0..all.len() as u32).filter(|&at| part_of[at as usize].is_none()).collect();
    let whole = (left.len() <= blocks.all.len() / FEWER).then(|| Whole {
        blocks: Blocks::bare(left.iter().map(|&at| all[at as usize]).collect()),
        left,
        part_of,
    });
    (whole, compared + blocks.all.len() as u64)
}

/// What blocks have been joined to.
pub(crate) struct Whole {
    pub(crate) blocks: Blocks,
    /// Numbers of these blocks among all blocks, those joined in between included.
    left: Vec<u32>,
    part_of: Vec<Option<(u32, u64)>>,
}

impl Whole {
    /// Offsets of the `count` blocks that there were, given those of the joined ones.
    pub(crate) fn parts(&self, placed: &[u64], count: usize) -> Vec<u64> {
        let mut offsets = vec![0; self.part_of.len()];
        for (&at, &offset) in self.left.iter().zip(placed) {
            offsets[at as usize] = offset;
        }
        // A block always became part of one with a larger number.
        for at in (0..offsets.len()).rev() {
            if let Some((whole, above)) = self.part_of[at] {
                offsets[at] = offsets[whole as usize] + above;
            }
        }
        offsets.truncate(count);
        offsets
    }
}

/// What begins or what ends at a time.
#[derive(Clone, Default)]
struct Side {
    /// The blocks; some of them may have been joined to others since.
    blocks: Vec<u32>,
    bytes: u64,
}

struct Joined {
    /// The blocks, then those joined from earlier ones.
    all: Vec<Block>,
    /// Per block the one that it has become part of, and how far above the offset of that one it
    /// is.
    part_of: Vec<Option<(u32, u64)>>,
    /// Per time what ends and what begins.
    ends: Vec<Side>,
    begins: Vec<Side>,
    /// By lifetime; the blocks that are still whole.
    whole: BTreeMap<(u32, u32), u32>,
    /// Times that have changed.
    changed: Vec<u32>,
    compared: u64,
}

impl Joined {
    fn new(blocks: &Blocks) -> Self {
        let sides = vec![Side::default(); blocks.times as usize + 1];
        Joined {
            all: Vec::with_capacity(2 * blocks.all.len()),
            part_of: Vec::with_capacity(2 * blocks.all.len()),
            ends: sides.clone(),
            begins: sides,
            whole: BTreeMap::new(),
            changed: (0..=blocks.times).collect(),
            compared: 0,
        }
    }

    fn push(&mut self, block: Block) -> u32 {
        self.all.push(block);
        self.part_of.push(None);
        self.all.len() as u32 - 1
    }

    /// Takes up a block, stacked on what has its lifetime.
    fn enter(&mut self, at: u32) {
        let block = self.all[at as usize];
        if let Some(&below) = self.whole.get(&(block.start, block.end)) {
            self.leave(below);
            let base = self.all[below as usize];
            let above = round_up(base.size, block.alignment);
            let alignment = base.alignment.max(block.alignment);
            return self.join([(below, 0), (at, above)], Block { size: above + block.size, alignment, ..block });
        }
        self.whole.insert((block.start, block.end), at);
        for (side, time) in [(&mut self.begins, block.start), (&mut self.ends, block.end)] {
            let side = &mut side[time as usize];
            side.blocks.push(at);
            side.bytes += block.size;
            self.changed.push(time);
        }
    }

    /// Two blocks, and how far above its offset they are, become parts of a new one.
    fn join(&mut self, parts: [(u32, u64); 2], block: Block) {
        let whole = self.push(block);
        for (part, above) in parts {
            self.part_of[part as usize] = Some((whole, above));
        }
        self.enter(whole);
    }

    fn leave(&mut self, at: u32) {
        let Block { size, start, end, .. } = self.all[at as usize];
        self.whole.remove(&(start, end));
        self.begins[start as usize].bytes -= size;
        self.ends[end as usize].bytes -= size;
    }

    /// First where the sizes are the very same. Times at which parts of several rectangles meet may
    /// wait for each other: then whatever is of equal size is joined, one time after the other.
    fn join_all(&mut self, most: u64) {
        self.join_changed(most);
        let mut before = 0;
        while self.all.len() > before && self.compared < most {
            before = self.all.len();
            for time in 0..self.ends.len() as u32 {
                self.join_at(time, false);
                self.join_changed(most);
            }
        }
    }

    fn join_changed(&mut self, most: u64) {
        while let Some(time) = self.changed.pop() {
            if self.compared < most {
                self.join_at(time, true);
            }
        }
    }

    /// Joins blocks that end at a time with blocks of the same size that begin then; `wholly`: all
    /// of them or none.
    fn join_at(&mut self, time: u32, wholly: bool) {
        let time = time as usize;
        if wholly && self.ends[time].bytes != self.begins[time].bytes {
            return;
        }
        let [ends, begins] = [&self.ends[time], &self.begins[time]].map(|side| self.by_size(side));
        self.compared += (ends.len() + begins.len()) as u64;
        let size = |at: u32| self.all[at as usize].size;
        let (mut pairs, mut next) = (Vec::new(), 0);
        for &before in &ends {
            next += begins[next..].partition_point(|&after| size(after) < size(before));
            if begins.get(next).is_some_and(|&after| size(after) == size(before)) {
                pairs.push((before, begins[next]));
                next += 1;
            }
        }
        if wholly && (pairs.len() < ends.len() || pairs.len() < begins.len()) {
            pairs.clear();
        }
        (self.ends[time].blocks, self.begins[time].blocks) = (ends, begins);
        for (before, after) in pairs {
            self.leave(before);
            self.leave(after);
            let [first, second] = [before, after].map(|at| self.all[at as usize]);
            let alignment = first.alignment.max(second.alignment);
            self.join([(before, 0), (after, 0)], Block { end: second.end, alignment, ..first });
        }
    }

    /// Those that are still whole.
    fn by_size(&self, side: &Side) -> Vec<u32> {
        let mut blocks: Vec<u32> =
            side.blocks.iter().copied().filter(|&at| self.part_of[at as usize].is_none()).collect();
        blocks.sort_unstable_by_key(|&at| (self.all[at as usize].size, at));
        blocks
    }
}
