//! When a gap to a lower bound is too small to be worth more effort.

/// Improvement stops when the gap to the lower bound is at most 1 / `WORTHWHILE` of the whole.
const WORTHWHILE: u64 = 1000;

/// Whether the gap is so small that only cheap ways of closing it are worth trying.
pub(crate) fn is_within(bytes: u64, bound: u64) -> bool {
    bytes.saturating_sub(bound) <= bytes / WORTHWHILE
}
