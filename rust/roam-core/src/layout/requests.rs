//! What a caller may ask of a buffer beyond size and lifetime: times at which it needs less, a fixed offset, a hint.

use super::buffers::{Buffer, PackError};
use std::ops::Range;

/// Times within a buffer's life at which it needs none of its bytes, or only some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// First time of the gap.
    pub lower: u64,
    /// First time after it.
    pub upper: u64,
    /// The bytes that are needed all the same, counted from the buffer's beginning; none where `None`.
    pub window: Option<Range<u64>>,
}

/// A buffer and all that its place must, or should, respect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Lifetime, size and alignment.
    pub buffer: Buffer,
    /// By time, apart from each other, within the lifetime.
    pub gaps: Vec<Gap>,
    /// The only offset at which it may lie.
    pub offset: Option<u64>,
    /// An offset at which a search may begin. It decides nothing.
    pub hint: Option<u64>,
}

impl From<Buffer> for Request {
    fn from(buffer: Buffer) -> Self {
        Request { buffer, gaps: Vec::new(), offset: None, hint: None }
    }
}

/// Some of a request's bytes over some of its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) lower: u64,
    pub(super) upper: u64,
    /// Counted from the request's offset.
    pub(super) bytes: Range<u64>,
}

impl Request {
    /// Whether it is a solid rectangle that may lie anywhere.
    pub(super) fn is_free_and_solid(&self) -> bool {
        self.gaps.is_empty() && self.offset.is_none()
    }

    /// What it needs and when, by time; nothing that is empty.
    pub(super) fn pieces(&self) -> Vec<Piece> {
        let Buffer { lower, upper, size_bytes, .. } = self.buffer;
        let mut pieces = Vec::with_capacity(2 * self.gaps.len() + 1);
        let mut from = lower;
        for gap in &self.gaps {
            pieces.push(Piece { lower: from, upper: gap.lower, bytes: 0..size_bytes });
            if let Some(bytes) = gap.window.clone() {
                pieces.push(Piece { lower: gap.lower, upper: gap.upper, bytes });
            }
            from = gap.upper;
        }
        pieces.push(Piece { lower: from, upper, bytes: 0..size_bytes });
        pieces.retain(|piece| piece.lower < piece.upper && !piece.bytes.is_empty());
        pieces
    }

    fn check(&self, index: usize) -> Result<(), PackError> {
        let Buffer { lower, upper, size_bytes, alignment_bytes } = self.buffer;
        if lower >= upper {
            return Err(PackError::EmptyInterval { index, lower, upper });
        }
        if !alignment_bytes.is_power_of_two() {
            return Err(PackError::Alignment { index, alignment_bytes });
        }
        let mut from = lower;
        for gap in &self.gaps {
            if gap.lower < from || gap.lower >= gap.upper || gap.upper > upper {
                return Err(PackError::Gap { index, lower: gap.lower, upper: gap.upper });
            }
            from = gap.upper;
            if let Some(window) =
                gap.window.as_ref().filter(|window| window.start > window.end || window.end > size_bytes)
            {
                return Err(PackError::Window { index, lower: window.start, upper: window.end, size_bytes });
            }
        }
        match self.offset.filter(|offset| offset % alignment_bytes != 0) {
            Some(offset) => Err(PackError::FixedAlignment { index, offset, alignment_bytes }),
            None => Ok(()),
        }
    }
}

/// Whether every request can be met by itself, and all of them by numbers of 63 bits.
pub(super) fn check(requests: &[Request]) -> Result<(), PackError> {
    let (mut reach, mut fixed): (u64, u64) = (0, 0);
    for (index, request) in requests.iter().enumerate() {
        request.check(index)?;
        let Buffer { size_bytes, alignment_bytes, .. } = request.buffer;
        // The height of all buffers on top of each other, each with its padding: no method goes higher above what is fixed.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Needed over [2, 10), 8 bytes, aligned to 4.
    fn request(gaps: &[(u64, u64, Option<Range<u64>>)]) -> Request {
        let gap = |(lower, upper, window): &(u64, u64, Option<Range<u64>>)| Gap {
            lower: *lower,
            upper: *upper,
            window: window.clone(),
        };
        let buffer = Buffer { lower: 2, upper: 10, size_bytes: 8, alignment_bytes: 4 };
        Request { gaps: gaps.iter().map(gap).collect(), ..buffer.into() }
    }

    fn piece(lower: u64, upper: u64, bytes: Range<u64>) -> Piece {
        Piece { lower, upper, bytes }
    }

    #[test]
    fn gaps_cut_a_life_into_pieces() {
        assert_eq!(request(&[]).pieces(), [piece(2, 10, 0..8)]);
        assert_eq!(
            request(&[(3, 5, None), (5, 6, Some(2..4)), (8, 10, Some(0..0))]).pieces(),
            [piece(2, 3, 0..8), piece(5, 6, 2..4), piece(6, 8, 0..8)]
        );
        assert_eq!(request(&[(2, 10, None)]).pieces(), []);
    }

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
