//! What is laid out: tensors that share memory by reuse, merged into one block.

use super::Layout;
use crate::liveness::Profile;
use crate::problem::{NONE, Problem};

/// A piece of memory held over a half-open interval of times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) size: u64,
    pub(super) alignment: u64,
    pub(super) start: u32,
    pub(super) end: u32,
}

/// All blocks of an order, in a sequence that depends on positions and sizes alone.
///
/// Times are ranks of the steps at which some block begins: two blocks overlap in steps just when
/// they overlap in ranks, since of two that overlap one holds the other's beginning.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    pub(super) all: Vec<Block>,
    /// How many times there are.
    pub(super) times: u32,
    /// Per tensor its block, [`NONE`] outside the pool.
    block_of: Vec<u32>,
}

impl Blocks {
    pub(super) fn new(problem: &Problem, profile: &Profile) -> Self {
        let lifetimes = &profile.lifetimes;
        let mut takes_over = vec![NONE; problem.tensors.len()];
        for &(input, output) in &profile.pairs {
            takes_over[output as usize] = input;
        }
        let mut block_of = vec![NONE; problem.tensors.len()];
        let mut all: Vec<Block> = Vec::new();
        for (tensor, item) in problem.tensors.iter().enumerate() {
            if item.in_pool() && takes_over[tensor] == NONE {
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
            let at = block_of[input as usize];
            block_of[output as usize] = at;
            let block = &mut all[at as usize];
            block.alignment = block.alignment.max(problem.tensors[output as usize].alignment);
            block.end = lifetimes.end[output as usize];
        }
        let mut starts: Vec<u32> = all.iter().map(|block| block.start).collect();
        starts.sort_unstable();
        starts.dedup();
        for block in &mut all {
            block.start = starts.partition_point(|&start| start < block.start) as u32;
            block.end = starts.partition_point(|&start| start < block.end) as u32;
        }
        Blocks { all, times: starts.len() as u32, block_of }
    }

    /// Largest offset plus size.
    pub(super) fn pool_bytes(&self, offsets: &[u64]) -> u64 {
        self.all.iter().zip(offsets).map(|(block, offset)| offset + block.size).max().unwrap_or(0)
    }

    pub(super) fn layout(&self, method: &'static str, offsets: &[u64]) -> Layout {
        Layout {
            method,
            pool_bytes: self.pool_bytes(offsets),
            offsets: self.block_of.iter().map(|&at| if at == NONE { 0 } else { offsets[at as usize] }).collect(),
        }
    }

    /// The offsets per block that a layout gives.
    pub(super) fn offsets(&self, layout: &Layout) -> Vec<u64> {
        let mut offsets = vec![0; self.all.len()];
        for (tensor, &at) in self.block_of.iter().enumerate() {
            if at != NONE {
                offsets[at as usize] = layout.offsets[tensor];
            }
        }
        offsets
    }
}
