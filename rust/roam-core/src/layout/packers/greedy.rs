//! Greedy layouts: each block, in a fixed sequence, at the lowest offset that is free all its life.

use crate::control::{Stop, Watch};
use crate::layout::blocks::{Block, Blocks};
use crate::layout::packers::gaps::Gaps;
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
    pub(crate) fn name(self) -> &'static str {
        match self {
            Sequence::Size => "size",
            Sequence::Area => "area",
            Sequence::Lifetime => "lifetime",
            Sequence::Start => "first_fit",
        }
    }

    pub(crate) fn sorted(self, blocks: &Blocks) -> Vec<u32> {
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

/// Offsets per block; `None` where one would reach `limit` or beyond, or once `work`, counted in
/// address spans, is used up.
pub(crate) fn place(
    blocks: &Blocks,
    sequence: Sequence,
    limit: u64,
    work: &mut u64,
    watch: &Watch,
) -> Result<Option<Vec<u64>>, Stop> {
    let mut offsets = vec![0; blocks.all.len()];
    let mut gaps = Gaps::new(blocks.times);
    let most = *work;
    for (at, index) in sequence.sorted(blocks).into_iter().enumerate() {
        if at % 64 == 0 {
            watch.check()?;
        }
        let block = &blocks.all[index as usize];
        let offset = gaps.lowest(block);
        *work = most.saturating_sub(gaps.looked_at());
        if offset + block.size >= limit || *work == 0 {
            return Ok(None);
        }
        gaps.insert(block, offset);
        offsets[index as usize] = offset;
    }
    Ok(Some(offsets))
}
