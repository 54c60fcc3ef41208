//! Errors of packing, and the check for requests that no packing can meet.

use crate::packing::{Buffer, Request};
use crate::verify::PackingViolation;
use thiserror::Error;

/// Why there is no packing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PackError {
    /// A buffer's interval holds no time.
    #[error("buffer {index} is needed from time {lower} to before time {upper}, which is no time at all")]
    EmptyInterval {
        /// Place in the list.
        index: usize,
        /// Its first time.
        lower: u64,
        /// Its end.
        upper: u64,
    },
    /// An alignment that is not a power of two.
    #[error("buffer {index} has an alignment of {alignment_bytes} bytes, which is not a power of two")]
    Alignment {
        /// Place in the list.
        index: usize,
        /// What was asked for.
        alignment_bytes: u64,
    },
    /// A gap that holds no time, goes beyond its buffer's life, or begins before the gap listed
    /// before it ends.
    #[error(
        "buffer {index} has a gap from time {lower} to before time {upper}: gaps lie within the life, one after another"
    )]
    Gap {
        /// Place in the list.
        index: usize,
        /// The gap's first time.
        lower: u64,
        /// Its end.
        upper: u64,
    },
    /// A gap's window goes beyond its buffer's bytes.
    #[error("buffer {index} of {size_bytes} bytes needs bytes {lower} to before {upper} in a gap")]
    Window {
        /// Place in the list.
        index: usize,
        /// The window's first byte.
        lower: u64,
        /// Its end.
        upper: u64,
        /// Bytes that the buffer has.
        size_bytes: u64,
    },
    /// A fixed offset that the buffer's own alignment forbids.
    #[error("buffer {index} is fixed at {offset}, which is not a multiple of its alignment, {alignment_bytes}")]
    FixedAlignment {
        /// Place in the list.
        index: usize,
        /// Where it is fixed.
        offset: u64,
        /// Its alignment.
        alignment_bytes: u64,
    },
    /// Two buffers are fixed at offsets at which they share bytes.
    #[error("buffers {first} and {second} need the same bytes at the same time where they are fixed")]
    FixedOverlap {
        /// Place of the earlier in the list.
        first: usize,
        /// Place of the later.
        second: usize,
    },
    /// Sizes so large that offsets may not fit into 63 bits, or too many buffers.
    #[error("the buffers are too large or too many: offsets might not fit into 63 bits")]
    TooLarge,
    /// The caller asked to stop.
    #[error("packing was cancelled")]
    Cancelled,
    /// A packing was found, and the verifier says that it is none.
    #[error("internal error, please report it: the packing found is invalid: {0}")]
    SelfCheck(PackingViolation),
}

impl PackError {
    /// The kind of fault, in snake case and stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            PackError::EmptyInterval { .. } => "empty_interval",
            PackError::Alignment { .. } => "alignment",
            PackError::Gap { .. } => "gap",
            PackError::Window { .. } => "window",
            PackError::FixedAlignment { .. } => "fixed_alignment",
            PackError::FixedOverlap { .. } => "fixed_overlap",
            PackError::TooLarge => "too_large",
            PackError::Cancelled => "cancelled",
            PackError::SelfCheck(_) => "internal",
        }
    }
}

/// Whether every request can be met by itself, and all of them by numbers of 63 bits.
pub(crate) fn check(requests: &[Request]) -> Result<(), PackError> {
    let (mut reach, mut fixed): (u64, u64) = (0, 0);
    for (index, request) in requests.iter().enumerate() {
        check_one(request, index)?;
        let Buffer { size_bytes, alignment_bytes, .. } = request.buffer;
        // The height of all buffers on top of each other, each with its padding: no method goes
        // higher above what is fixed.
        let padded = size_bytes.checked_add(alignment_bytes);
        reach = padded.and_then(|padded| reach.checked_add(padded)).ok_or(PackError::TooLarge)?;
        if let Some(offset) = request.offset {
            fixed = fixed.max(offset.checked_add(size_bytes).ok_or(PackError::TooLarge)?);
        }
    }
    let highest = reach.checked_add(fixed).ok_or(PackError::TooLarge)?;
    let too_many = requests.len() >= u32::MAX as usize / 2;
    if highest > i64::MAX as u64 || too_many { Err(PackError::TooLarge) } else { Ok(()) }
}

fn check_one(request: &Request, index: usize) -> Result<(), PackError> {
    let Buffer { lower, upper, size_bytes, alignment_bytes } = request.buffer;
    if lower >= upper {
        return Err(PackError::EmptyInterval { index, lower, upper });
    }
    if !alignment_bytes.is_power_of_two() {
        return Err(PackError::Alignment { index, alignment_bytes });
    }
    let mut from = lower;
    for gap in &request.gaps {
        if gap.lower < from || gap.lower >= gap.upper || gap.upper > upper {
            return Err(PackError::Gap { index, lower: gap.lower, upper: gap.upper });
        }
        from = gap.upper;
        if let Some(window) = gap.window.as_ref().filter(|window| window.start > window.end || window.end > size_bytes)
        {
            return Err(PackError::Window { index, lower: window.start, upper: window.end, size_bytes });
        }
    }
    match request.offset.filter(|offset| offset % alignment_bytes != 0) {
        Some(offset) => Err(PackError::FixedAlignment { index, offset, alignment_bytes }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packing::request;

    #[test]
    fn impossible_requests_are_refused() {
        let error = |request: Request| check(&[request]).expect_err("refused");
        let gap = |lower, upper| PackError::Gap { index: 0, lower, upper };
        for (lower, upper) in [(1, 3), (9, 11), (4, 4), (5, 4)] {
            assert_eq!(error(request(&[(lower, upper, None)])), gap(lower, upper));
        }
        assert_eq!(error(request(&[(3, 5, None), (4, 6, None)])), gap(4, 6));
        assert_eq!(
            error(request(&[(3, 5, Some(2..9))])),
            PackError::Window { index: 0, lower: 2, upper: 9, size_bytes: 8 }
        );
        let fixed = |offset| Request { offset: Some(offset), ..request(&[]) };
        assert_eq!(error(fixed(6)), PackError::FixedAlignment { index: 0, offset: 6, alignment_bytes: 4 });
        assert_eq!(error(fixed(u64::MAX - 3)), PackError::TooLarge);
        assert_eq!(error(fixed(1 << 63)), PackError::TooLarge);
        assert_eq!(check(&[fixed(4)]), Ok(()));
    }
}
