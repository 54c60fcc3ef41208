//! The best layout so far, and what a better one has to keep below.

use crate::layout::blocks::Blocks;
use crate::plan::BoundRoute;

/// What all searches for a layout of the same blocks share.
#[derive(Clone, Debug)]
pub(crate) struct Incumbent<'a> {
    pub(crate) blocks: &'a Blocks,
    /// The most bytes held at any time, or more where a search has shown that no layout takes so
    /// few.
    pub(crate) floor: u64,
    /// How the floor was proved.
    pub(crate) route: BoundRoute,
    /// Only a smaller pool than this is of use.
    pub(crate) limit: u64,
    /// A pool of this size is small enough, whatever the floor; 0 where only the smallest is.
    pub(crate) target: u64,
    /// The best layout: what found it, and its offsets per block. Its pool is the limit.
    pub(crate) found: Option<(&'static str, Vec<u64>)>,
}

impl<'a> Incumbent<'a> {
    /// Nothing found yet.
    pub(crate) fn new(blocks: &'a Blocks, limit: u64) -> Self {
        Incumbent { blocks, floor: blocks.floor(), route: BoundRoute::Floor, limit, target: 0, found: None }
    }

    /// Takes the offsets if they are better.
    pub(crate) fn offer(&mut self, method: &'static str, offsets: Vec<u64>) {
        let pool_bytes = self.blocks.pool_bytes(&offsets);
        if pool_bytes < self.limit {
            self.limit = pool_bytes;
            self.found = Some((method, offsets));
        }
    }

    /// Notes that no layout takes `capacity` or less, and that the smallest takes a multiple of
    /// `unit`.
    pub(crate) fn refute(&mut self, capacity: u64, unit: u64) {
        self.raise((capacity / unit + 1) * unit, BoundRoute::Exhaustive);
    }

    /// Notes that no layout takes less than `floor`.
    pub(crate) fn raise(&mut self, floor: u64, route: BoundRoute) {
        if floor > self.floor {
            (self.floor, self.route) = (floor, route);
        }
    }

    /// Whether nothing better is possible, or asked for.
    pub(crate) fn is_done(&self) -> bool {
        self.limit <= self.floor.max(self.target)
    }
}
