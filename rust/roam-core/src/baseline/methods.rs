//! The orders, layouts and allocators by name.

use super::caching_allocator::Segments;
use super::{eager, executorch, inductor_bfs, inductor_dfs, inductor_lpmf, tvm, tvm_hill_climb, xla};
use crate::layout::blocks::Blocks;
use crate::liveness::Profile;
use crate::problem::{Op, Problem};

/// An order by the rules of PyTorch's Inductor (`torch/_inductor/memory.py`), which takes the best
/// of these and of its own.
///
/// Sizes are counted bytes, where Inductor has unpadded ones. Constraints are the graph's: a write
/// that follows reads waits for these alone, where Inductor also lists the write before them. As in
/// Inductor, workspace and reuse do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// `topological_sort_lpmf`.
    LeastPeak,
    /// `topological_sort_bfs`.
    BreadthFirst,
    /// `topological_sort_dfs`.
    DepthFirst,
}

impl Order {
    pub(crate) const ALL: [Order; 3] = [Order::LeastPeak, Order::BreadthFirst, Order::DepthFirst];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Order::LeastPeak => "inductor_lpmf",
            Order::BreadthFirst => "inductor_bfs",
            Order::DepthFirst => "inductor_dfs",
        }
    }

    /// A valid order.
    pub(crate) fn order(self, problem: &Problem) -> Vec<Op> {
        let order = match self {
            Order::LeastPeak => inductor_lpmf::order(problem),
            Order::BreadthFirst => inductor_bfs::order(problem),
            Order::DepthFirst => inductor_dfs::order(problem),
        };
        debug_assert!(problem.is_valid_order(&order), "{} breaks a constraint", self.name());
        order
    }
}

/// Offsets of the pool's tensors by another project's rules. Reuse is as in every layout; where a
/// source has its own rules for that, they are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// ExecuTorch's `greedy`.
    ExecuTorch,
    /// TVM's `greedy_by_size`.
    TvmSize,
    /// TVM's `greedy_by_conflicts`.
    TvmConflicts,
    /// TVM's `hill_climb`.
    TvmHillClimb,
    /// The best of XLA's heaps.
    Xla,
}

impl Layout {
    pub(crate) const ALL: [Layout; 5] =
        [Layout::ExecuTorch, Layout::TvmSize, Layout::TvmConflicts, Layout::TvmHillClimb, Layout::Xla];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Layout::ExecuTorch => "executorch",
            Layout::TvmSize => "tvm_size",
            Layout::TvmConflicts => "tvm_conflicts",
            Layout::TvmHillClimb => "tvm_hill_climb",
            Layout::Xla => "xla",
        }
    }

    /// Per block its offset.
    fn place(self, blocks: &Blocks) -> Vec<u64> {
        match self {
            Layout::ExecuTorch => executorch::place(blocks),
            Layout::TvmSize => tvm::stack(blocks, &tvm::by_size(blocks)),
            Layout::TvmConflicts => tvm::stack(blocks, &tvm::by_conflicts(blocks)),
            Layout::TvmHillClimb => tvm_hill_climb::place(blocks),
            Layout::Xla => xla::place(blocks),
        }
    }

    /// Largest offset plus size.
    pub(crate) fn pool_bytes(self, problem: &Problem, profile: &Profile) -> u64 {
        let blocks = Blocks::new(problem, profile);
        blocks.pool_bytes(&self.place(&blocks))
    }
}

/// PyTorch's caching allocator in place of a pool: it serves all that is not persistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Eager(Segments);

impl Eager {
    pub(crate) const ALL: [Eager; 2] = [Eager(Segments::Fixed), Eager(Segments::Expandable)];

    pub(crate) fn name(self) -> &'static str {
        match self.0 {
            Segments::Fixed => "caching_allocator",
            Segments::Expandable => "caching_allocator_expandable",
        }
    }

    /// Most bytes reserved; `None` where no address space holds them.
    pub(crate) fn reserved_bytes(self, problem: &Problem, order: &[Op], profile: &Profile) -> Option<u64> {
        eager::reserved_bytes(problem, order, profile, self.0).ok()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::layout::blocks::Block;
    use crate::rng::Random;

    /// Up to `most` blocks, and one.
    pub(in crate::baseline) fn random_blocks(random: &mut Random, most: u64) -> Blocks {
        let block = |random: &mut Random| {
            let start = random.below(most) as u32;
            let end = start + 1 + random.below(1 + most / 2) as u32;
            Block { size: 1 + random.below(20), alignment: [1, 1, 4, 16][random.below(4) as usize], start, end }
        };
        let count = 1 + random.below(most);
        Blocks::bare((0..count).map(|_| block(random)).collect())
    }

    #[test]
    fn no_two_blocks_share_bytes_at_any_time() {
        let mut random = Random::new(5);
        for round in 0..400 {
            let blocks = random_blocks(&mut random, if round % 20 == 0 { 120 } else { 12 });
            for layout in Layout::ALL {
                let offsets = layout.place(&blocks);
                let end = |at: usize| offsets[at] + blocks.all[at].size;
                for (a, block) in blocks.all.iter().enumerate() {
                    assert_eq!(offsets[a] % block.alignment, 0, "{} does not align", layout.name());
                    for b in (0..a).filter(|&b| block.meets(&blocks.all[b])) {
                        assert!(end(a) <= offsets[b] || end(b) <= offsets[a], "{} overlaps", layout.name());
                    }
                }
                assert!(blocks.pool_bytes(&offsets) >= blocks.floor());
            }
        }
    }

    #[test]
    fn nothing_takes_nothing() {
        for layout in Layout::ALL {
            assert!(layout.place(&Blocks::bare(Vec::new())).is_empty());
        }
    }
}
