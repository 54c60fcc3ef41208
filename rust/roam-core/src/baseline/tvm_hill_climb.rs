//! TVM's `hill_climb` (`src/tir/usmp/algo/hill_climb.cc`): a sequence of blocks, each at the lowest
//! offset that is free when it lives, improved by swaps.
//!
//! It begins with the sequence of `greedy_by_size`. An attempt swaps two blocks: one that meets a
//! block at the very top and was placed before it, and another such, or, three times in four, one
//! that meets a neighbour of that block and was placed before this neighbour. A smaller pool is
//! kept, a larger one with a small chance, else the swap is undone. It ends after 500 attempts, or
//! once no pool can be smaller.
//!
//! What differs: the random numbers, which are the same on every machine; every neighbour is as
//! likely to bring a neighbour of its own, where TVM prefers those with many; an attempt that finds
//! no two blocks leaves everything as it is; the best of all attempts counts, where TVM takes the
//! last one kept; and on large graphs [`WORK`] ends the attempts.

use super::tvm;
use crate::layout::blocks::Blocks;
use crate::layout::packers::gaps::Gaps;
use crate::rng::Random;

const ATTEMPTS: u64 = 500;

/// How many blocks may be placed before no further attempt begins: 500 attempts for up to 8 000
/// blocks.
const WORK: u64 = 4_000_000;

/// From this attempt on no larger pool is kept: the chance of that, in whole percent, is 0.
const NO_LARGER: u64 = 50;

pub(super) fn place(blocks: &Blocks) -> Vec<u64> {
    let mut climb = Climb::new(blocks);
    let Some(mut kept) = climb.lay_out(u64::MAX) else { unreachable!("nothing is beyond all addresses") };
    let mut best = kept.clone();
    let floor = blocks.floor();
    for attempt in 1..ATTEMPTS {
        if blocks.pool_bytes(&best) <= floor || climb.work > WORK {
            break;
        }
        let Some(swap) = climb.choose(&kept) else { continue };
        climb.swap(swap);
        let kept_bytes = blocks.pool_bytes(&kept);
        let laid_out = climb.lay_out(if attempt < NO_LARGER { u64::MAX } else { kept_bytes });
        let is_kept = laid_out.as_ref().is_some_and(|offsets| {
            let pool_bytes = blocks.pool_bytes(offsets);
            pool_bytes < kept_bytes || climb.takes_worse(pool_bytes, kept_bytes, attempt)
        });
        match laid_out.filter(|_| is_kept) {
            Some(offsets) => kept = offsets,
            None => climb.swap(swap),
        }
        if blocks.pool_bytes(&kept) < blocks.pool_bytes(&best) {
            best.clone_from(&kept);
        }
    }
    best
}

/// A sequence under improvement.
struct Climb<'a> {
    blocks: &'a Blocks,
    sequence: Vec<u32>,
    /// Each block's place in the sequence.
    turn: Vec<u32>,
    random: Random,
    /// Blocks placed so far.
    work: u64,
}

impl<'a> Climb<'a> {
    fn new(blocks: &'a Blocks) -> Self {
        let sequence = tvm::by_size(blocks);
        let mut turn = vec![0; sequence.len()];
        for (place, &at) in sequence.iter().enumerate() {
            turn[at as usize] = place as u32;
        }
        Climb { blocks, sequence, turn, random: Random::new(0), work: 0 }
    }

    /// Offsets of the blocks in the present sequence; `None` where a block would end at `limit` or
    /// beyond.
    fn lay_out(&mut self, limit: u64) -> Option<Vec<u64>> {
        let mut offsets = vec![0; self.blocks.all.len()];
        let mut gaps = Gaps::new(self.blocks.times);
        let fits = self.sequence.iter().all(|&at| {
            let block = &self.blocks.all[at as usize];
            let offset = gaps.lowest(block);
            gaps.insert(block, offset);
            offsets[at as usize] = offset;
            self.work += 1;
            offset + block.size < limit
        });
        fits.then_some(offsets)
    }

    fn swap(&mut self, [a, b]: [u32; 2]) {
        let (place_a, place_b) = (self.turn[a as usize], self.turn[b as usize]);
        self.sequence.swap(place_a as usize, place_b as usize);
        self.turn.swap(a as usize, b as usize);
    }

    /// Whether a larger pool is kept: this is left to chance, and the more likely the larger the
    /// pool, which may lead out of a dead end.
    fn takes_worse(&mut self, pool_bytes: u64, kept_bytes: u64, attempt: u64) -> bool {
        let percent =
            u128::from(50u8) * u128::from(pool_bytes - kept_bytes) / u128::from(pool_bytes) / u128::from(attempt);
        u128::from(self.random.below(100)) < percent
    }

    /// Two blocks worth swapping.
    fn choose(&mut self, offsets: &[u64]) -> Option<[u32; 2]> {
        let pool_bytes = self.blocks.pool_bytes(offsets);
        let reaches_top = |&at: &u32| offsets[at as usize] + self.blocks.all[at as usize].size == pool_bytes;
        let tops: Vec<u32> = self.sequence.iter().copied().filter(reaches_top).collect();
        let top = self.any(&tops)?;
        let neighbours = self.neighbours(top);
        let earlier = self.before(&neighbours, top);
        let first = self.any(&earlier)?;
        let others: Vec<u32> = earlier.into_iter().filter(|&at| at != first).collect();
        if self.random.below(100) > 25 || others.is_empty() {
            let neighbour = self.any(&neighbours)?;
            let beyond = self.neighbours(neighbour);
            let mut beyond = self.before(&beyond, neighbour);
            beyond.retain(|&at| at != first);
            if let Some(second) = self.any(&beyond) {
                return Some([first, second]);
            }
        }
        Some([first, self.any(&others)?])
    }

    /// The blocks that meet this one.
    fn neighbours(&self, of: u32) -> Vec<u32> {
        let block = self.blocks.all[of as usize];
        let all = self.blocks.all.iter().zip(0..);
        all.filter(|&(other, at)| at != of && other.meets(&block)).map(|(_, at)| at).collect()
    }

    /// Those that are placed before this one.
    fn before(&self, blocks: &[u32], this: u32) -> Vec<u32> {
        blocks.iter().copied().filter(|&at| self.turn[at as usize] < self.turn[this as usize]).collect()
    }

    fn any(&mut self, of: &[u32]) -> Option<u32> {
        of.get(self.random.below(of.len() as u64) as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baseline::methods::tests::random_blocks;

    #[test]
    fn swaps_lead_to_smaller_pools_and_never_to_larger_ones() {
        let mut random = Random::new(8);
        let mut improved = 0;
        for _ in 0..200 {
            let blocks = random_blocks(&mut random, 12);
            let before = blocks.pool_bytes(&Climb::new(&blocks).lay_out(u64::MAX).expect("no limit"));
            let after = blocks.pool_bytes(&place(&blocks));
            assert!(after <= before);
            improved += u32::from(after < before);
        }
        assert!(improved > 50, "only {improved} pools were improved");
    }

    #[test]
    fn swapped_blocks_change_turns() {
        let blocks = random_blocks(&mut Random::new(1), 12);
        let mut climb = Climb::new(&blocks);
        let (a, b) = (climb.sequence[0], climb.sequence[3]);
        let before = climb.sequence.clone();
        climb.swap([a, b]);
        assert_eq!((climb.sequence[0], climb.sequence[3]), (b, a));
        assert!(climb.sequence.iter().enumerate().all(|(place, &at)| climb.turn[at as usize] == place as u32));
        climb.swap([a, b]);
        assert_eq!(climb.sequence, before);
    }

    #[test]
    fn only_what_lies_under_the_top_is_swapped() {
        // 4, 3 and 2 over one time, 2 at the top; 1 meets none of them.
        let block = |size, start| crate::layout::blocks::Block { size, alignment: 1, start, end: start + 1 };
        let blocks = Blocks::bare(vec![block(4, 0), block(3, 0), block(2, 0), block(1, 1)]);
        let mut climb = Climb::new(&blocks);
        let offsets = climb.lay_out(u64::MAX).expect("no limit");
        assert_eq!(offsets, [0, 4, 7, 0]);
        for _ in 0..50 {
            let mut swap = climb.choose(&offsets).expect("two lie below");
            swap.sort_unstable();
            assert_eq!(swap, [0, 1]);
        }
    }
}
