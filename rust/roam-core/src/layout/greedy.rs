//! Greedy layouts: each block, in a fixed sequence, at the lowest offset that is free all its life.

use super::blocks::{Block, Blocks};
use super::gaps::Gaps;
use crate::control::{Stop, Watch};
use std::cmp::Reverse;

/// Which blocks go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sequence {
    /// The largest.
    Size,
    /// The largest product of size and lifetime.
    Area,
    /// The longest-lived.
    Lifetime,
    /// The first created: first fit, as an allocator that sees the whole address space would do.
    Start,
}

impl Sequence {
    pub(super) fn name(self) -> &'static str {
        match self {
            Sequence::Size => "size",
            Sequence::Area => "area",
            Sequence::Lifetime => "lifetime",
            Sequence::Start => "first_fit",
        }
    }

    pub(super) fn sorted(self, blocks: &Blocks) -> Vec<u32> {
        let lifetime = |block: &Block| u64::from(block.end - block.start);
        // Larger keys go first.
        let key = |block: &Block| -> (u128, u64) {
            match self {
                Sequence::Size => (u128::from(block.size), lifetime(block)),
                Sequence::Area => (u128::from(block.size) * u128::from(lifetime(block)), block.size),
                Sequence::Lifetime => (u128::from(lifetime(block)), block.size),
                Sequence::Start => (u128::from(u32::MAX - block.start), block.size),
            }
        };
        let mut sequence: Vec<u32> = (0..blocks.all.len() as u32).collect();
        sequence.sort_by_cached_key(|&at| {
            let block = &blocks.all[at as usize];
            (Reverse(key(block)), block.start, at)
        });
        sequence
    }
}

/// Offsets per block; `None` where one would reach beyond `limit`, or up to it.
pub(super) fn place(blocks: &Blocks, sequence: Sequence, limit: u64, watch: &Watch) -> Result<Option<Vec<u64>>, Stop> {
    let (placed, _) = place_in(blocks, &sequence.sorted(blocks), limit, watch)?;
    Ok(placed.ok())
}

/// What a sequence gives: offsets per block, or the place in the sequence of the first block that
/// does not end below the limit.
pub(super) type Placed = Result<Vec<u64>, usize>;

/// Places the blocks in the given sequence; also says how many were looked at.
pub(super) fn place_in(blocks: &Blocks, sequence: &[u32], limit: u64, watch: &Watch) -> Result<(Placed, usize), Stop> {
    let mut offsets = vec![0; blocks.all.len()];
    let mut gaps = Gaps::new(blocks.times);
    for (at, &index) in sequence.iter().enumerate() {
        if at % 64 == 0 {
            watch.check()?;
        }
        let block = &blocks.all[index as usize];
        let offset = gaps.lowest(block);
        if offset + block.size >= limit {
            return Ok((Err(at), at + 1));
        }
        gaps.insert(block, offset);
        offsets[index as usize] = offset;
    }
    Ok((Ok(offsets), sequence.len()))
}
