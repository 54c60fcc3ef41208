//! Checks a packing against what was requested. Shares no code with the packer.

use crate::packing::{Packing, Request};
use std::collections::BTreeMap;
use thiserror::Error;

/// What is wrong with a packing. Buffers are named by their places in the list.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PackingViolation {
    /// Too few or too many offsets.
    #[error("there are {found} offsets for {expected} buffers")]
    Count {
        /// Buffers.
        expected: usize,
        /// Offsets.
        found: usize,
    },
    /// A fixed buffer lies elsewhere.
    #[error("buffer {index} is fixed at {expected} and lies at {found}")]
    Moved {
        /// The buffer.
        index: usize,
        /// Its fixed offset.
        expected: u64,
        /// Where it lies.
        found: u64,
    },
    /// A buffer that no packing can serve.
    #[error(
        "buffer {index} has an alignment of 0, or gaps outside of its lifetime, or needs bytes in a gap that it does not have"
    )]
    Senseless {
        /// The buffer.
        index: usize,
    },
    /// An offset that the alignment forbids.
    #[error("buffer {index} lies at {offset}, which is not a multiple of its alignment")]
    Misaligned {
        /// The buffer.
        index: usize,
        /// Where it lies.
        offset: u64,
    },
    /// An end beyond all numbers.
    #[error("buffer {index} ends above 2^64")]
    OutOfRange {
        /// The buffer.
        index: usize,
    },
    /// Two buffers need the same bytes at the same time.
    #[error("buffers {first} and {second} share bytes at time {time}")]
    Overlap {
        /// The earlier in the list.
        first: usize,
        /// The later.
        second: usize,
        /// When the later of the two begins to need them.
        time: u64,
    },
    /// A figure that is not so.
    #[error("the packing claims {found} {figure} bytes instead of {expected}")]
    Figure {
        /// Which.
        figure: &'static str,
        /// What it is.
        expected: u64,
        /// What is claimed.
        found: u64,
    },
    /// Figures that contradict each other.
    #[error(
        "{live} live bytes, a bound of {bound} bytes, a pool of {pool} bytes and `optimal: {optimal}` contradict each other"
    )]
    Bound {
        /// Most bytes needed at once.
        live: u64,
        /// What is claimed to be the least.
        bound: u64,
        /// The pool.
        pool: u64,
        /// Whether no smaller pool is claimed to exist.
        optimal: bool,
    },
}

impl PackingViolation {
    /// The kind of fault, in snake case and stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Count { .. } => "count",
            Self::Moved { .. } => "moved",
            Self::Senseless { .. } => "senseless",
            Self::Misaligned { .. } => "misaligned",
            Self::OutOfRange { .. } => "out_of_range",
            Self::Overlap { .. } => "overlap",
            Self::Figure { .. } => "figure",
            Self::Bound { .. } => "bound",
        }
    }
}

/// A stretch of bytes that a buffer begins or ceases to need.
struct Event {
    time: u64,
    begins: bool,
    index: usize,
    from: u64,
    to: u64,
}

/// Checks that every buffer lies where it may, that no two need a byte at the same time, and that
/// the packing claims nothing that is not so. The bound is not proved again, only not contradicted.
/// Near-linear.
///
/// # Errors
/// The first [`PackingViolation`] found.
pub fn verify_packing(requests: &[Request], packing: &Packing) -> Result<(), PackingViolation> {
    if requests.len() != packing.offsets.len() {
        return Err(PackingViolation::Count { expected: requests.len(), found: packing.offsets.len() });
    }
    let (mut top, mut fixed_top) = (0, 0);
    for (index, (request, &offset)) in requests.iter().zip(&packing.offsets).enumerate() {
        if !makes_sense(request) {
            return Err(PackingViolation::Senseless { index });
        }
        if let Some(expected) = request.offset.filter(|&fixed| fixed != offset) {
            return Err(PackingViolation::Moved { index, expected, found: offset });
        }
        if offset % request.buffer.alignment_bytes != 0 {
            return Err(PackingViolation::Misaligned { index, offset });
        }
        let end = offset.checked_add(request.buffer.size_bytes).ok_or(PackingViolation::OutOfRange { index })?;
        top = top.max(end);
        if request.offset.is_some() {
            fixed_top = fixed_top.max(end);
        }
    }
    let live = sweep(events(requests, &packing.offsets))?;
    for (figure, expected, found) in [("pool", top, packing.pool_bytes), ("live", live, packing.live_bytes)] {
        if expected != found {
            return Err(PackingViolation::Figure { figure, expected, found });
        }
    }
    let Packing { bound_bytes: bound, pool_bytes: pool, optimal, .. } = *packing;
    if bound < live.max(fixed_top) || bound > pool || optimal != (bound == pool) {
        return Err(PackingViolation::Bound { live, bound, pool, optimal });
    }
    Ok(())
}

/// Whether gaps follow each other within the buffer's life, and their windows lie within its bytes.
fn makes_sense(request: &Request) -> bool {
    let buffer = request.buffer;
    let mut time = buffer.lower;
    let gaps_fit = request.gaps.iter().all(|gap| {
        let follows = time <= gap.lower && gap.lower < gap.upper && gap.upper <= buffer.upper;
        time = gap.upper;
        follows
            && gap.window.as_ref().is_none_or(|window| window.start <= window.end && window.end <= buffer.size_bytes)
    });
    buffer.alignment_bytes > 0 && buffer.lower < buffer.upper && gaps_fit
}

/// By time; what ceases comes before what begins.
fn events(requests: &[Request], offsets: &[u64]) -> Vec<Event> {
    let mut events = Vec::with_capacity(2 * requests.len());
    for (index, (request, &offset)) in requests.iter().zip(offsets).enumerate() {
        let mut needs = |lower: u64, upper: u64, from: u64, to: u64| {
            if lower < upper && from < to {
                events.push(Event { time: lower, begins: true, index, from: offset + from, to: offset + to });
                events.push(Event { time: upper, begins: false, index, from: offset + from, to: offset + to });
            }
        };
        let buffer = request.buffer;
        let mut time = buffer.lower;
        for gap in &request.gaps {
            needs(time, gap.lower, 0, buffer.size_bytes);
            if let Some(window) = &gap.window {
                needs(gap.lower, gap.upper, window.start, window.end);
            }
            time = gap.upper;
        }
        needs(time, buffer.upper, 0, buffer.size_bytes);
    }
    events.sort_by_key(|event| (event.time, event.begins, event.index));
    events
}

/// Follows the bytes in use over time; returns the most there are at once.
fn sweep(events: Vec<Event>) -> Result<u64, PackingViolation> {
    // What is in use, apart from each other: by first byte the end and the buffer.
    let mut used: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
    let (mut bytes, mut most) = (0, 0);
    for Event { time, begins, index, from, to } in events {
        if !begins {
            used.remove(&from);
            bytes -= to - from;
            continue;
        }
        let below = used.range(..=from).next_back().filter(|(_, (end, _))| *end > from);
        let above = used.range(from..).next().filter(|(start, _)| **start < to);
        if let Some((_, &(_, other))) = below.or(above) {
            return Err(PackingViolation::Overlap { first: index.min(other), second: index.max(other), time });
        }
        used.insert(from, (to, index));
        bytes += to - from;
        most = most.max(bytes);
    }
    Ok(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Goal, pack_requests};
    use crate::optimize::Control;
    use crate::packing::{Buffer, Gap};

    /// Two buffers of 4 bytes over [0, 4), the first of which needs only its upper half in [1, 2),
    /// and is fixed at 0.
    fn problem() -> (Vec<Request>, Packing) {
        let buffer = Buffer { lower: 0, upper: 4, size_bytes: 4, alignment_bytes: 2 };
        let gap = Gap { lower: 1, upper: 2, window: Some(2..4) };
        let fixed = Request { gaps: vec![gap], offset: Some(0), ..buffer.into() };
        let requests = vec![fixed, buffer.into()];
        let packing =
            pack_requests(&requests, Goal { work: 1000, target_bytes: 0 }, &Control::default()).expect("a packing");
        assert_eq!((packing.offsets.as_slice(), packing.pool_bytes, packing.optimal), ([0, 4].as_slice(), 8, true));
        (requests, packing)
    }

    fn violation(change: impl FnOnce(&mut Vec<Request>, &mut Packing)) -> PackingViolation {
        let (mut requests, mut packing) = problem();
        change(&mut requests, &mut packing);
        verify_packing(&requests, &packing).expect_err("invalid")
    }

    #[test]
    fn every_corruption_is_found() {
        use PackingViolation as Wrong;
        assert_eq!(violation(|_, packing| packing.offsets.truncate(1)), Wrong::Count { expected: 2, found: 1 });
        assert_eq!(violation(|_, packing| packing.offsets[0] = 8), Wrong::Moved { index: 0, expected: 0, found: 8 });
        assert_eq!(violation(|_, packing| packing.offsets[1] = 5), Wrong::Misaligned { index: 1, offset: 5 });
        assert_eq!(violation(|_, packing| packing.offsets[1] = u64::MAX - 1), Wrong::OutOfRange { index: 1 });
        assert_eq!(violation(|_, packing| packing.offsets[1] = 2), Wrong::Overlap { first: 0, second: 1, time: 0 });
        assert_eq!(
            violation(|_, packing| packing.pool_bytes = 9),
            Wrong::Figure { figure: "pool", expected: 8, found: 9 }
        );
        assert_eq!(
            violation(|_, packing| packing.live_bytes = 7),
            Wrong::Figure { figure: "live", expected: 8, found: 7 }
        );
        for (bound, optimal) in [(7, false), (9, false), (8, false)] {
            assert_eq!(
                violation(|_, packing| (packing.bound_bytes, packing.optimal) = (bound, optimal)),
                Wrong::Bound { live: 8, bound, pool: 8, optimal }
            );
        }
    }

    #[test]
    fn bytes_in_a_window_are_in_use() {
        let alive_in_the_gap = |offset| {
            violation(move |requests, packing| {
                requests[1].buffer = Buffer { lower: 1, upper: 2, size_bytes: 2, alignment_bytes: 1 };
                packing.offsets[1] = offset;
            })
        };
        let overlap = PackingViolation::Overlap { first: 0, second: 1, time: 1 };
        assert_eq!([1, 2, 3].map(alive_in_the_gap), [overlap.clone(), overlap.clone(), overlap]);
        // Below the window there is room, and only the figures are those of the other problem.
        assert_eq!(alive_in_the_gap(0), PackingViolation::Figure { figure: "pool", expected: 4, found: 8 });
    }
}
