//! PyTorch's caching allocator for CUDA (`c10/cuda/CUDACachingAllocator.cpp`) with default
//! settings, or with `expandable_segments`: what it reserves for a sequence of allocations and
//! frees on one stream.
//!
//! Memory pressure never happens here: nothing cached is given back, and no allocation is tried
//! again.

use std::collections::{BTreeSet, HashMap};
use thiserror::Error;

const MIB: u64 = 1 << 20;
/// All sizes are rounded up to a multiple of this.
const SMALLEST: u64 = 512;
/// The largest request that the small pool serves.
const SMALL: u64 = MIB;
/// A segment of the small pool; segments of the large one, made for one request, are a multiple of
/// this.
const SMALL_SEGMENT: u64 = 2 * MIB;
/// A segment for requests below [`LARGE`]; what expandable segments of the large pool grow by.
const LARGE_SEGMENT: u64 = 20 * MIB;
/// Requests from here on get a segment of their own size.
const LARGE: u64 = 10 * MIB;

/// How an allocator reserves memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segments {
    /// One `cudaMalloc` per segment, never resized.
    Fixed,
    /// One segment per pool that grows page by page: 2 MiB in the small pool, 20 MiB in the large
    /// one.
    Expandable,
}

/// What a program asks of its allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Memory for something new; 0 bytes take none.
    Alloc {
        /// Its name until it is freed.
        id: u64,
        /// As requested.
        size_bytes: u64,
    },
    /// It is not needed any more.
    Free {
        /// Its name.
        id: u64,
    },
}

/// Why no program can ask for these events.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TraceError {
    /// An id that is in use.
    #[error("allocation {0} is made again before it is freed")]
    MadeTwice(u64),
    /// An id that is not in use.
    #[error("allocation {0} is freed, but it is not there")]
    NotThere(u64),
    /// Sizes that no address space holds.
    #[error("allocation {id} of {size_bytes} bytes is too large")]
    TooLarge {
        /// Its name.
        id: u64,
        /// As requested.
        size_bytes: u64,
    },
}

/// Bytes reserved after every event.
///
/// # Errors
/// [`TraceError`] if an event is impossible.
pub fn replay(events: &[Event], segments: Segments) -> Result<Vec<u64>, TraceError> {
    let mut allocator = CachingAllocator::new(segments);
    let reserved = |event: &Event| allocator.apply(*event).map(|()| allocator.reserved_bytes());
    events.iter().map(reserved).collect()
}

/// The allocator of one device and one stream.
#[derive(Clone, Debug)]
pub struct CachingAllocator {
    small: Pool,
    large: Pool,
    /// Per id in use: whether the small pool serves it, and its block. `None` where it has no
    /// bytes.
    in_use: HashMap<u64, Option<(bool, usize)>>,
}

impl CachingAllocator {
    /// Nothing reserved.
    pub fn new(segments: Segments) -> Self {
        let small = Pool::new(segments, SMALL_SEGMENT, SMALLEST);
        let large = Pool::new(segments, LARGE_SEGMENT, if segments == Segments::Fixed { SMALL + 1 } else { SMALLEST });
        CachingAllocator { small, large, in_use: HashMap::new() }
    }

    /// Bytes held from the device, in use or not. They never shrink.
    pub fn reserved_bytes(&self) -> u64 {
        self.small.reserved + self.large.reserved
    }

    /// Does what the program asks.
    ///
    /// # Errors
    /// [`TraceError`] if that is impossible; nothing has changed then.
    pub fn apply(&mut self, event: Event) -> Result<(), TraceError> {
        match event {
            Event::Alloc { id, .. } if self.in_use.contains_key(&id) => Err(TraceError::MadeTwice(id)),
            Event::Alloc { id, size_bytes } => {
                // A quarter of all addresses, so that no sum of a few of them overflows.
                let total = self.reserved_bytes().saturating_add(size_bytes);
                if total >= 1 << 62 {
                    return Err(TraceError::TooLarge { id, size_bytes });
                }
                let block = (size_bytes > 0).then(|| {
                    let size = size_bytes.next_multiple_of(SMALLEST);
                    let is_small = size <= SMALL;
                    (is_small, self.pool(is_small).take(size))
                });
                self.in_use.insert(id, block);
                Ok(())
            }
            Event::Free { id } => {
                let block = self.in_use.remove(&id).ok_or(TraceError::NotThere(id))?;
                if let Some((is_small, block)) = block {
                    self.pool(is_small).give_back(block);
                }
                Ok(())
            }
        }
    }

    fn pool(&mut self, is_small: bool) -> &mut Pool {
        if is_small { &mut self.small } else { &mut self.large }
    }
}

/// A piece of a segment.
#[derive(Clone, Copy, Debug)]
struct Block {
    address: u64,
    size: u64,
    is_free: bool,
    /// Its neighbours in the segment.
    before: Option<usize>,
    after: Option<usize>,
}

/// Segments for small or for large requests.
#[derive(Clone, Debug)]
struct Pool {
    segments: Segments,
    /// A fixed segment for requests below [`LARGE`]; a page of the expandable one.
    segment: u64,
    /// A block is split where at least so much is left over.
    least_rest: u64,
    /// Segments lie one after another at rising addresses.
    reserved: u64,
    blocks: Vec<Block>,
    /// Places in `blocks` of blocks that are no more.
    unused: Vec<usize>,
    /// Size, address and place of all free blocks: the smallest that fits is the best.
    free: BTreeSet<(u64, u64, usize)>,
    /// The block with the highest address.
    last: Option<usize>,
}

impl Pool {
    fn new(segments: Segments, segment: u64, least_rest: u64) -> Self {
        let (blocks, unused, free) = (Vec::new(), Vec::new(), BTreeSet::new());
        Pool { segments, segment, least_rest, reserved: 0, blocks, unused, free, last: None }
    }

    fn take(&mut self, size: u64) -> usize {
        let block = self.best_fit(size).unwrap_or_else(|| self.reserve(size));
        self.unlist(block);
        self.blocks[block].is_free = false;
        if self.blocks[block].size - size >= self.least_rest {
            self.split(block, size);
        }
        block
    }

    /// The smallest free block that fits, of equals the one with the lowest address. The last block
    /// of an expandable segment counts as large as it can become, so it comes after all others.
    fn best_fit(&self, size: u64) -> Option<usize> {
        let mut fits = self.free.range((size, 0, 0)..).map(|&(_, _, block)| block);
        let best = fits.next()?;
        let can_grow = self.segments == Segments::Expandable && self.last == Some(best);
        Some(if can_grow { fits.next().unwrap_or(best) } else { best })
    }

    /// A new free block that is large enough.
    fn reserve(&mut self, size: u64) -> usize {
        match self.segments {
            Segments::Fixed => {
                let rounded = size.next_multiple_of(SMALL_SEGMENT);
                self.add(if size < LARGE { self.segment } else { rounded }, None)
            }
            Segments::Expandable => {
                let tail = self.last.filter(|&last| self.blocks[last].is_free);
                let missing = size - tail.map_or(0, |tail| self.blocks[tail].size);
                let grown = self.add(missing.next_multiple_of(self.segment), self.last);
                self.merge(grown)
            }
        }
    }

    /// A free block at the highest address, after `before` in the same segment.
    fn add(&mut self, size: u64, before: Option<usize>) -> usize {
        let block = self.insert(Block { address: self.reserved, size, is_free: true, before, after: None });
        if let Some(before) = before {
            self.blocks[before].after = Some(block);
        }
        self.reserved += size;
        self.last = Some(block);
        self.list(block);
        block
    }

    /// Cuts off what is beyond `size` as a free block.
    fn split(&mut self, block: usize, size: u64) {
        let Block { address, size: whole, after, .. } = self.blocks[block];
        let rest = Block { address: address + size, size: whole - size, is_free: true, before: Some(block), after };
        let rest = self.insert(rest);
        if let Some(after) = after {
            self.blocks[after].before = Some(rest);
        }
        self.blocks[block].size = size;
        self.blocks[block].after = Some(rest);
        if self.last == Some(block) {
            self.last = Some(rest);
        }
        self.list(rest);
    }

    fn give_back(&mut self, block: usize) {
        self.blocks[block].is_free = true;
        self.list(block);
        self.merge(block);
    }

    /// Joins a free block with its free neighbours; returns the block that it is part of then.
    fn merge(&mut self, block: usize) -> usize {
        let mut first = block;
        if let Some(before) = self.blocks[block].before.filter(|&before| self.blocks[before].is_free) {
            self.join(before, block);
            first = before;
        }
        if let Some(after) = self.blocks[first].after.filter(|&after| self.blocks[after].is_free) {
            self.join(first, after);
        }
        first
    }

    /// Makes one free block of two neighbours.
    fn join(&mut self, first: usize, second: usize) {
        self.unlist(first);
        self.unlist(second);
        let Block { size, after, .. } = self.blocks[second];
        self.blocks[first].size += size;
        self.blocks[first].after = after;
        if let Some(after) = after {
            self.blocks[after].before = Some(first);
        }
        if self.last == Some(second) {
            self.last = Some(first);
        }
        self.unused.push(second);
        self.list(first);
    }

    fn insert(&mut self, block: Block) -> usize {
        if let Some(place) = self.unused.pop() {
            self.blocks[place] = block;
            return place;
        }
        self.blocks.push(block);
        self.blocks.len() - 1
    }

    fn list(&mut self, block: usize) {
        let Block { address, size, .. } = self.blocks[block];
        self.free.insert((size, address, block));
    }

    fn unlist(&mut self, block: usize) {
        let Block { address, size, .. } = self.blocks[block];
        self.free.remove(&(size, address, block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes reserved after a sequence in which positive numbers allocate so many bytes and
    /// negative ones free what the event of that number, counted from 1, allocated.
    fn reserved(segments: Segments, sequence: &[i64]) -> u64 {
        let event = |(id, &bytes): (u64, &i64)| match u64::try_from(bytes) {
            Ok(size_bytes) => Event::Alloc { id, size_bytes },
            Err(_) => Event::Free { id: bytes.unsigned_abs() },
        };
        let events: Vec<Event> = (1..).zip(sequence).map(event).collect();
        *replay(&events, segments).expect("a possible sequence").last().expect("events")
    }

    const M: i64 = MIB as i64;

    #[test]
    fn small_requests_share_segments_of_2_mib() {
        assert_eq!(reserved(Segments::Fixed, &[0]), 0);
        assert_eq!(reserved(Segments::Fixed, &[1]), 2 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[M]), 2 * MIB);
        // 512 bytes and 1 MiB leave 1 MiB less 512 bytes.
        assert_eq!(reserved(Segments::Fixed, &[1, M, M - 512]), 2 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[1, M, M - 511]), 4 * MIB);
    }

    #[test]
    fn large_requests_share_20_mib_or_have_their_own_segment() {
        assert_eq!(reserved(Segments::Fixed, &[M + 1]), 20 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[10 * M - 512]), 20 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[10 * M - 511]), 10 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[10 * M + 1]), 12 * MIB);
        // 6 and 4 MiB leave 10.
        assert_eq!(reserved(Segments::Fixed, &[6 * M, 4 * M, 10 * M]), 20 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[6 * M, 4 * M, 10 * M + 1]), 32 * MIB);
        // Small requests never go to the large pool.
        assert_eq!(reserved(Segments::Fixed, &[2 * M, M]), 22 * MIB);
    }

    #[test]
    fn a_rest_of_more_than_1_mib_is_split_off() {
        // 12 MiB are free. 11 leave 1 MiB, which stays unused; half a KiB less leaves enough for
        // the next request.
        assert_eq!(reserved(Segments::Fixed, &[12 * M, -1, 11 * M, M + 1]), 32 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[12 * M, -1, 11 * M - 512, M + 1]), 12 * MIB);
        // Expandable segments split off any rest. 19 and 1 MiB, the second by 512 bytes too large
        // for the small pool.
        assert_eq!(reserved(Segments::Expandable, &[19 * M - 512, M + 1]), 20 * MIB);
    }

    #[test]
    fn the_smallest_block_that_fits_is_taken_and_of_equals_the_lowest() {
        // 14 and 12 MiB are free. 12 go to the 12, so 14 find their place again.
        assert_eq!(reserved(Segments::Fixed, &[14 * M, 12 * M, -1, -2, 12 * M, 14 * M]), 26 * MIB);
        // Of 6, 2, 6 and 2 MiB in a segment of 16 the 6 are freed, the second first. 4 MiB go to
        // the first; with the 2 beside them freed, 10 MiB are in one piece, for 4 and 6. Had the 4
        // gone to the second, only 8 would be.
        let filled = [16 * M, -1, 6 * M, 2 * M, 6 * M, 2 * M];
        let freed = [-5, -3, 4 * M, -4, 4 * M, 6 * M];
        assert_eq!(reserved(Segments::Fixed, &[&filled[..], &freed[..]].concat()), 16 * MIB);
    }

    #[test]
    fn free_neighbours_become_one() {
        // 6, 6, 6 and a rest of 2 MiB.
        assert_eq!(reserved(Segments::Fixed, &[6 * M, 6 * M, 6 * M, -1, -2, 12 * M]), 20 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[6 * M, 6 * M, 6 * M, -2, -1, 12 * M]), 20 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[6 * M, 6 * M, 6 * M, -1, -3, 8 * M]), 20 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[6 * M, 6 * M, 6 * M, -1, -3, 12 * M]), 32 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[6 * M, 6 * M, 6 * M, -1, -3, -2, 20 * M]), 20 * MIB);
        // Segments are no neighbours.
        assert_eq!(reserved(Segments::Fixed, &[10 * M, 10 * M, -1, -2, 20 * M]), 40 * MIB);
        assert_eq!(reserved(Segments::Expandable, &[10 * M, 10 * M, -1, -2, 20 * M]), 20 * MIB);
    }

    #[test]
    fn expandable_segments_grow_by_pages() {
        assert_eq!(reserved(Segments::Expandable, &[1]), 2 * MIB);
        assert_eq!(reserved(Segments::Expandable, &[1, M, M]), 4 * MIB);
        // 18 MiB are free at the end, so 12 more are mapped: one page. Fixed segments are 20 and 30
        // MiB.
        assert_eq!(reserved(Segments::Expandable, &[2 * M, 30 * M]), 40 * MIB);
        assert_eq!(reserved(Segments::Fixed, &[2 * M, 30 * M]), 50 * MIB);
        assert_eq!(reserved(Segments::Expandable, &[2 * M, 38 * M + 1]), 60 * MIB);
    }

    #[test]
    fn the_end_of_an_expandable_segment_is_taken_last() {
        // 5 MiB are free in the middle and 2 at the end. 2 go to the middle, so that 5 need another
        // page.
        let filled = [5 * M, 15 * M, 18 * M, -1, 2 * M];
        assert_eq!(reserved(Segments::Expandable, &filled), 40 * MIB);
        assert_eq!(reserved(Segments::Expandable, &[&filled[..], &[5 * M]].concat()), 60 * MIB);
        assert_eq!(reserved(Segments::Expandable, &[&filled[..], &[3 * M, 2 * M]].concat()), 40 * MIB);
    }

    #[test]
    fn impossible_events_are_refused() {
        let alloc = |id, size_bytes| Event::Alloc { id, size_bytes };
        let last = |events: &[Event]| replay(events, Segments::Fixed).expect_err("not possible");
        assert_eq!(last(&[alloc(1, 5), alloc(1, 5)]), TraceError::MadeTwice(1));
        assert_eq!(last(&[alloc(1, 0), Event::Free { id: 1 }, Event::Free { id: 1 }]), TraceError::NotThere(1));
        assert_eq!(last(&[alloc(1, u64::MAX)]), TraceError::TooLarge { id: 1, size_bytes: u64::MAX });
    }
}
