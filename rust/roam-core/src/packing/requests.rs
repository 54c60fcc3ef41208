//! What a caller may ask of a buffer beyond size and lifetime: times at which it needs less, a
//! fixed offset, a hint.

use super::types::Buffer;
use std::ops::Range;

/// Times within a buffer's life at which it needs none of its bytes, or only some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// First time of the gap.
    pub lower: u64,
    /// First time after it.
    pub upper: u64,
    /// The bytes that are needed all the same, counted from the buffer's beginning; none where
    /// `None`.
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
pub(crate) struct Piece {
    pub(crate) lower: u64,
    pub(crate) upper: u64,
    /// Counted from the request's offset.
    pub(crate) bytes: Range<u64>,
}

impl Request {
    /// Whether it is a solid rectangle that may lie anywhere.
    pub(crate) fn is_free_and_solid(&self) -> bool {
        self.gaps.is_empty() && self.offset.is_none()
    }

    /// What it needs and when, by time; nothing that is empty.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
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
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Needed over [2, 10), 8 bytes, aligned to 4.
    pub(crate) fn request(gaps: &[(u64, u64, Option<Range<u64>>)]) -> Request {
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
}
