//! Layout instances as comma-separated values, in the format of MiniMalloc: a header
//! `id,lower,upper,size`, to which `alignment` may be added, and one buffer a line.

use super::buffers::Buffer;
use thiserror::Error;

/// Why a text is no layout instance.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CsvError {
    /// The first line is not a known header.
    #[error("the first line must be `id,lower,upper,size` or `id,lower,upper,size,alignment`")]
    Header,
    /// A line has more or fewer fields than the header.
    #[error("line {line} has {found} fields instead of {expected}")]
    Fields {
        /// Counted from 1.
        line: usize,
        /// As many as the header has.
        expected: usize,
        /// As many as there are.
        found: usize,
    },
    /// A field is not a whole number in [0, 2^64).
    #[error("line {line}: {column} must be a whole number below 2^64")]
    Number {
        /// Counted from 1.
        line: usize,
        /// The header's name for it.
        column: &'static str,
    },
    /// An id is empty.
    #[error("line {line}: the id is empty")]
    EmptyId {
        /// Counted from 1.
        line: usize,
    },
    /// Two buffers have the same id.
    #[error("line {line}: the id {id:?} has been used before")]
    DuplicateId {
        /// Counted from 1.
        line: usize,
        /// The id.
        id: String,
    },
}

/// Reads buffers and their ids, in the text's sequence. Times are half-open intervals, sizes and
/// alignments bytes; where there is no alignment column it is 1. Values are checked by
/// [`pack`](super::pack).
///
/// # Errors
/// See [`CsvError`].
pub fn read_csv(text: &str) -> Result<(Vec<String>, Vec<Buffer>), CsvError> {
    let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
    let columns = match lines.next() {
        Some((_, "id,lower,upper,size")) => 4,
        Some((_, "id,lower,upper,size,alignment")) => 5,
        _ => return Err(CsvError::Header),
    };
    let (mut ids, mut buffers) = (Vec::new(), Vec::new());
    let mut seen = std::collections::HashSet::new();
    for (line, text) in lines {
        let fields: Vec<&str> = text.split(',').collect();
        if fields.len() != columns {
            return Err(CsvError::Fields { line, expected: columns, found: fields.len() });
        }
        let number = |at: usize, column| {
            let digits = fields[at].bytes().all(|byte| byte.is_ascii_digit());
            let value = if digits { fields[at].parse().ok() } else { None };
            value.ok_or(CsvError::Number { line, column })
        };
        if fields[0].is_empty() {
            return Err(CsvError::EmptyId { line });
        }
        if !seen.insert(fields[0]) {
            return Err(CsvError::DuplicateId { line, id: fields[0].to_owned() });
        }
        ids.push(fields[0].to_owned());
        buffers.push(Buffer {
            lower: number(1, "lower")?,
            upper: number(2, "upper")?,
            size_bytes: number(3, "size")?,
            alignment_bytes: if columns == 5 { number(4, "alignment")? } else { 1 },
        });
    }
    Ok((ids, buffers))
}
