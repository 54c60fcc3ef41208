//! How many comparisons the portfolio of layouts may make.

/// What the portfolio may look at per block, on average over all orders laid out, in addition to
/// [`FEW_BLOCKS`] of them. Ordinary steps need a hundred or two per order; where the address space
/// falls into thousands of pieces, greedy layouts are slow and poor alike.
const WORK: u64 = 1 << 9;
const FEW_BLOCKS: u64 = 1 << 15;
/// One greedy layout may use 1 / `SHARE` of what is left: there are four of them, and other orders.
pub(crate) const SHARE: u64 = 8;

/// How many address spans and ranges of blocks the portfolio may look at, whatever number of orders
/// it lays out.
pub(crate) fn portfolio_work(blocks: usize) -> u64 {
    WORK * (FEW_BLOCKS + blocks as u64)
}
