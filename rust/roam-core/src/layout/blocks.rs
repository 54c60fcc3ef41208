//! What is laid out: tensors that share memory by reuse, merged into one block.

use crate::liveness::Profile;
use crate::problem::{Index, NONE, Problem, Ten};
use std::ops::Range;

/// Where every pool tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// How it was found.
    pub(crate) method: &'static str,
    /// Largest offset plus size.
    pub(crate) pool_bytes: u64,
    /// Per tensor of the problem; 0 for tensors that are not in the pool.
    pub(crate) offsets: Vec<u64>,
}

/// A piece of memory held over a half-open interval of times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Block {
    pub(crate) size: u64,
    pub(crate) alignment: u64,
    pub(crate) start: u32,
    pub(crate) end: u32,
}

impl Block {
    /// The times over which it is held.
    pub(crate) fn times(&self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    /// Whether both are held at some time.
    pub(crate) fn meets(&self, other: &Block) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// All blocks of an order, in a sequence that depends on positions and sizes alone.
///
/// Times are ranks of the steps at which some block begins: two blocks overlap in steps exactly if
/// they overlap in ranks, since of two that overlap one is alive when the other begins.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    pub(crate) all: Vec<Block>,
    /// How many times there are.
    pub(crate) times: u32,
    /// Per tensor its block, [`NONE`] if it is not in the pool.
    block_of: Vec<u32>,
}

impl Blocks {
    pub(crate) fn new(problem: &Problem, profile: &Profile) -> Self {
        let lifetimes = &profile.lifetimes;
        let mut takes_over = vec![Ten::NONE; problem.tensors.len()];
        for &(input, output) in &profile.pairs {
            takes_over[output.index()] = input;
        }
        let mut block_of = vec![NONE; problem.tensors.len()];
        let mut all: Vec<Block> = Vec::new();
        for (tensor, item) in problem.tensors.iter().enumerate() {
            if item.in_pool() && takes_over[tensor] == Ten::NONE {
                block_of[tensor] = all.len() as u32;
                all.push(Block {
                    size: item.size,
                    alignment: item.alignment,
                    start: lifetimes.start[tensor],
                    end: lifetimes.end[tensor],
                });
            }
        }
        // Pairs come in execution order, so an input's block is known before its output asks.
        for &(input, output) in &profile.pairs {
            let at = block_of[input.index()];
            if at == NONE {
                continue; // Both unpooled.
            }
            block_of[output.index()] = at;
            let block = &mut all[at as usize];
            block.alignment = block.alignment.max(problem.tensors[output.index()].alignment);
            block.end = lifetimes.end[output.index()];
        }
        let times = rank(&mut all);
        Blocks { all, times, block_of }
    }

    /// Blocks that are not tensors of a graph.
    pub(crate) fn bare(mut all: Vec<Block>) -> Self {
        let times = rank(&mut all);
        let block_of = (0..all.len() as u32).collect();
        Blocks { all, times, block_of }
    }

    /// Bytes held per time.
    pub(crate) fn held(&self) -> Vec<u64> {
        let mut change = vec![(0u64, 0u64); self.times as usize + 1];
        for block in &self.all {
            change[block.start as usize].0 += block.size;
            change[block.end as usize].1 += block.size;
        }
        change.pop();
        let held = change.into_iter().scan(0, |held, (more, less)| {
            *held = *held + more - less;
            Some(*held)
        });
        held.collect()
    }

    /// The most bytes held at any time: no layout takes less.
    pub(crate) fn floor(&self) -> u64 {
        self.held().into_iter().max().unwrap_or(0)
    }

    /// How many pairs of blocks have lifetimes that meet.
    pub(crate) fn pairs(&self) -> u64 {
        let mut change = vec![(0u64, 0u64); self.times as usize + 1];
        for block in &self.all {
            change[block.start as usize].0 += 1;
            change[block.end as usize].1 += 1;
        }
        let pairs = change.into_iter().scan(0, |alive, (begin, end)| {
            *alive -= end;
            let pairs = *alive * begin + begin * begin.saturating_sub(1) / 2;
            *alive += begin;
            Some(pairs)
        });
        pairs.sum()
    }

    /// What the pool of some smallest layout is a multiple of; `None` where alignment can leave
    /// gaps.
    ///
    /// Where every size is a multiple of every alignment, pushing blocks down as far as they go
    /// makes each offset a sum of sizes.
    pub(crate) fn unit(&self) -> Option<u64> {
        let strictest = self.all.iter().map(|block| block.alignment).max()?;
        let gcd = |mut a: u64, mut b: u64| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        let unit = self.all.iter().fold(0, |unit, block| gcd(unit, block.size));
        let divides = |block: &Block| block.size % block.alignment == 0 && strictest % block.alignment == 0;
        (unit % strictest == 0 && self.all.iter().all(divides)).then_some(unit)
    }

    /// The sum of all lifetimes, in times.
    pub(crate) fn area(&self) -> u64 {
        self.all.iter().map(|block| u64::from(block.end - block.start)).sum()
    }

    /// Largest offset plus size.
    pub(crate) fn pool_bytes(&self, offsets: &[u64]) -> u64 {
        self.all.iter().zip(offsets).map(|(block, offset)| offset + block.size).max().unwrap_or(0)
    }

    /// Per block its offset, from those of the tensors.
    pub(crate) fn offsets(&self, of_tensors: &[u64]) -> Vec<u64> {
        let mut offsets = vec![0; self.all.len()];
        for (&at, &offset) in self.block_of.iter().zip(of_tensors).filter(|&(&at, _)| at != NONE) {
            offsets[at as usize] = offset;
        }
        offsets
    }

    pub(crate) fn layout(&self, method: &'static str, offsets: &[u64]) -> Layout {
        Layout {
            method,
            pool_bytes: self.pool_bytes(offsets),
            offsets: self.block_of.iter().map(|&at| if at == NONE { 0 } else { offsets[at as usize] }).collect(),
        }
    }
}

/// Turns steps into ranks; says how many there are.
fn rank(all: &mut [Block]) -> u32 {
    let mut starts: Vec<u32> = all.iter().map(|block| block.start).collect();
    starts.sort_unstable();
    starts.dedup();
    for block in all {
        block.start = starts.partition_point(|&start| start < block.start) as u32;
        block.end = starts.partition_point(|&start| start < block.end) as u32;
    }
    starts.len() as u32
}

/// The first open number from `from` on, in a list in which an open number names itself and every
/// other number names a later one. Shortens the way for later calls.
pub(crate) fn first_open(open: &mut [u32], from: u32) -> u32 {
    let mut found = from;
    while open[found as usize] != found {
        found = open[found as usize];
    }
    let mut at = from;
    while open[at as usize] != found {
        at = std::mem::replace(&mut open[at as usize], found);
    }
    found
}
