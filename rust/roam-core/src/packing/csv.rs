//! Layout instances as comma-separated values, in the format of MiniMalloc
//! (docs/reference/formats.md).

use super::requests::{Gap, Request};
use super::types::Buffer;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::fmt::Write;
use std::ops::Range;
use thiserror::Error;

/// Why a text is no layout instance.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CsvError {
    /// A column that must be there is not.
    #[error("line 1: there is no column {column:?}")]
    MissingColumn {
        /// Its usual name.
        column: &'static str,
    },
    /// A column of which nothing is known: what it asks for could not be respected.
    #[error("line 1: unknown column {column:?}")]
    UnknownColumn {
        /// As it stands there.
        column: String,
    },
    /// Two columns that mean the same.
    #[error("line 1: two columns mean {column:?}")]
    DuplicateColumn {
        /// Its usual name.
        column: &'static str,
    },
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
    /// A field is not a whole number in [0, 2^63).
    #[error("line {line}: {column} must be a whole number below 2^63")]
    Number {
        /// Counted from 1.
        line: usize,
        /// The usual name of its column.
        column: &'static str,
    },
    /// A gap is not of the form that it must have.
    #[error("line {line}: a gap must be LOWER-UPPER or LOWER-UPPER@FIRST:END, not {gap:?}")]
    Gap {
        /// Counted from 1.
        line: usize,
        /// As it stands there.
        gap: String,
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

impl CsvError {
    /// The kind of fault, in snake case and stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            CsvError::MissingColumn { .. } => "missing_column",
            CsvError::UnknownColumn { .. } => "unknown_column",
            CsvError::DuplicateColumn { .. } => "duplicate_column",
            CsvError::Fields { .. } => "fields",
            CsvError::Number { .. } => "number",
            CsvError::Gap { .. } => "gap",
            CsvError::EmptyId { .. } => "empty_id",
            CsvError::DuplicateId { .. } => "duplicate_id",
        }
    }
}

/// Requests and the names that a file gives them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instance {
    /// Per request.
    pub ids: Vec<String>,
    /// In the file's sequence.
    pub requests: Vec<Request>,
}

impl From<Vec<Buffer>> for Instance {
    /// The ids are the places in the list.
    fn from(buffers: Vec<Buffer>) -> Self {
        Instance {
            ids: (0..buffers.len()).map(|at| at.to_string()).collect(),
            requests: buffers.into_iter().map(Request::from).collect(),
        }
    }
}

/// The columns by their usual names.
const COLUMNS: [&str; 8] = ["id", "lower", "upper", "size", "alignment", "hint", "gaps", "offset"];
/// So many of them must be there.
const REQUIRED: usize = 4;

/// Where each column stands in a line.
struct Header {
    /// By place in [`COLUMNS`].
    places: [Option<usize>; COLUMNS.len()],
    count: usize,
    /// Added to the ends of lifetimes and gaps, which a column `end` gives as the last time instead
    /// of the first after it.
    beyond: u64,
}

impl Header {
    fn read(line: &str) -> Result<Self, CsvError> {
        let mut header = Header { places: [None; COLUMNS.len()], count: 0, beyond: 0 };
        for (place, name) in line.split(',').enumerate() {
            let usual = match name {
                "begin" | "start" => "lower",
                "buffer" | "buffer_id" => "id",
                "end" => {
                    header.beyond = 1;
                    "upper"
                }
                name => name,
            };
            let Some(at) = COLUMNS.iter().position(|&column| column == usual) else {
                return Err(CsvError::UnknownColumn { column: name.to_owned() });
            };
            if header.places[at].replace(place).is_some() {
                return Err(CsvError::DuplicateColumn { column: COLUMNS[at] });
            }
            header.count += 1;
        }
        match (0..REQUIRED).find(|&at| header.places[at].is_none()) {
            Some(missing) => Err(CsvError::MissingColumn { column: COLUMNS[missing] }),
            None => Ok(header),
        }
    }
}

/// One line's fields.
struct Line<'a> {
    header: &'a Header,
    fields: Vec<&'a str>,
    /// Counted from 1.
    line: usize,
}

impl<'a> Line<'a> {
    /// A column's field; empty where there is no such column.
    fn field(&self, column: &'static str) -> &'a str {
        let at = COLUMNS.iter().position(|&name| name == column);
        at.and_then(|at| self.header.places[at]).map_or("", |place| self.fields[place])
    }

    fn number(&self, column: &'static str) -> Result<u64, CsvError> {
        number(self.field(column)).ok_or(CsvError::Number { line: self.line, column })
    }

    /// The first time after the last.
    fn end(&self, column: &'static str, text: &str) -> Result<u64, CsvError> {
        let end = number(text).map(|end| end + self.header.beyond).filter(|&end| end <= i64::MAX as u64);
        end.ok_or(CsvError::Number { line: self.line, column })
    }

    /// A number that need not be there.
    fn choice(&self, column: &'static str, none: &str) -> Result<Option<u64>, CsvError> {
        let text = self.field(column);
        if text.is_empty() || text == none { Ok(None) } else { self.number(column).map(Some) }
    }

    fn gaps(&self) -> Result<Vec<Gap>, CsvError> {
        let texts = self.field("gaps").split(' ').filter(|text| !text.is_empty());
        let mut gaps = texts
            .map(|text| self.gap(text).ok_or_else(|| CsvError::Gap { line: self.line, gap: text.to_owned() }))
            .collect::<Result<Vec<_>, _>>()?;
        gaps.sort_by_key(|gap| (gap.lower, gap.upper));
        Ok(gaps)
    }

    fn gap(&self, text: &str) -> Option<Gap> {
        let (times, window) = match text.split_once('@') {
            Some((times, window)) => (times, Some(pair(window, ':')?)),
            None => (text, None),
        };
        let (lower, last) = pair(times, '-')?;
        let upper = last + self.header.beyond;
        (upper <= i64::MAX as u64).then(|| Gap {
            lower,
            upper,
            window: window.map(|(from, to)| Range { start: from, end: to }),
        })
    }
}

/// A whole number below 2^63: digits and nothing else.
fn number(text: &str) -> Option<u64> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|&value| is_plain && value <= i64::MAX as u64)
}

fn pair(text: &str, between: char) -> Option<(u64, u64)> {
    let (one, other) = text.split_once(between)?;
    Some((number(one)?, number(other)?))
}

impl Instance {
    /// Reads an instance. What is read is well-formed; whether it can be packed is for
    /// [`pack_requests`](crate::layout::pack_requests) to say.
    ///
    /// # Errors
    /// See [`CsvError`].
    pub fn read(text: &str) -> Result<Self, CsvError> {
        let text = text.trim_end_matches(['\n', '\r']);
        let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
        let header = Header::read(lines.next().map_or("", |(_, line)| line))?;
        let mut instance = Instance::default();
        let mut seen = HashSet::new();
        for (line, text) in lines {
            let fields: Vec<&str> = text.split(',').collect();
            if fields.len() != header.count {
                return Err(CsvError::Fields { line, expected: header.count, found: fields.len() });
            }
            let fields = Line { header: &header, fields, line };
            let id = fields.field("id");
            if id.is_empty() {
                return Err(CsvError::EmptyId { line });
            }
            if !seen.insert(id) {
                return Err(CsvError::DuplicateId { line, id: id.to_owned() });
            }
            let buffer = Buffer {
                lower: fields.number("lower")?,
                upper: fields.end("upper", fields.field("upper"))?,
                size_bytes: fields.number("size")?,
                alignment_bytes: if header.places[REQUIRED].is_some() { fields.number("alignment")? } else { 1 },
            };
            instance.ids.push(id.to_owned());
            instance.requests.push(Request {
                buffer,
                gaps: fields.gaps()?,
                offset: fields.choice("offset", "")?,
                hint: fields.choice("hint", "-1")?,
            });
        }
        Ok(instance)
    }

    /// The text of an instance, or, with an offset per request, of its packing: in the form that
    /// MiniMalloc writes, whatever form was read.
    pub fn write(&self, offsets: Option<&[u64]>) -> String {
        let any = |is: fn(&Request) -> bool| self.requests.iter().any(is);
        let with_alignment = any(|request| request.buffer.alignment_bytes != 1);
        let with_hint = any(|request| request.hint.is_some());
        let with_gaps = any(|request| !request.gaps.is_empty());
        let with_offset = offsets.is_some() || any(|request| request.offset.is_some());
        let mut text = "id,lower,upper,size".to_owned();
        for (name, is_there) in
            [("alignment", with_alignment), ("hint", with_hint), ("gaps", with_gaps), ("offset", with_offset)]
        {
            if is_there {
                text.extend([",", name]);
            }
        }
        text.push('\n');
        for (at, (id, Request { buffer, gaps, offset, hint })) in self.ids.iter().zip(&self.requests).enumerate() {
            let _ = write!(text, "{id},{},{},{}", buffer.lower, buffer.upper, buffer.size_bytes);
            if with_alignment {
                let _ = write!(text, ",{}", buffer.alignment_bytes);
            }
            if with_hint {
                text.push(',');
                text.push_str(&hint.map_or("-1".to_owned(), |hint| hint.to_string()));
            }
            if with_gaps {
                text.push(',');
                text.push_str(&gaps.iter().map(gap_text).collect::<Vec<_>>().join(" "));
            }
            if with_offset {
                let offset = offsets.map(|offsets| offsets[at]).or(*offset);
                text.push(',');
                text.push_str(&offset.map_or(String::new(), |offset| offset.to_string()));
            }
            text.push('\n');
        }
        text
    }

    /// SHA-256 of the instance's own text, in lower-case hexadecimal: files in other forms that say
    /// the same have the same.
    pub fn digest(&self) -> String {
        Sha256::digest(self.write(None)).iter().fold(String::with_capacity(64), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

fn gap_text(gap: &Gap) -> String {
    let window = gap.window.as_ref().map_or(String::new(), |window| format!("@{}:{}", window.start, window.end));
    format!("{}-{}{window}", gap.lower, gap.upper)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Instance {
        Instance::read(text).expect("valid")
    }

    fn buffer(lower: u64, upper: u64, size_bytes: u64, alignment_bytes: u64) -> Buffer {
        Buffer { lower, upper, size_bytes, alignment_bytes }
    }

    #[test]
    fn plain_columns_are_read() {
        let instance = read("id,lower,upper,size,alignment\nb1,0,3,4,2\nb 2,3,9223372036854775807,0,1\n");
        assert_eq!(instance.ids, ["b1", "b 2"]);
        assert_eq!(instance.requests[0], buffer(0, 3, 4, 2).into());
        assert_eq!(instance.requests[1], buffer(3, i64::MAX as u64, 0, 1).into());
        assert_eq!(read("id,lower,upper,size\r\na,0,1,2\r\n\r\n").requests, [buffer(0, 1, 2, 1).into()]);
        assert_eq!(read("id,lower,upper,size\n").requests, []);
    }

    #[test]
    fn columns_may_come_in_any_sequence_and_by_their_other_names() {
        let expected =
            read("id,lower,upper,size,alignment,hint,gaps,offset\na,5,10,8,4,16,6-7 8-10@2:5,12\nb,0,2,1,1,-1,,\n");
        let gap = |lower, upper, window| Gap { lower, upper, window };
        assert_eq!(
            expected.requests[0],
            Request {
                gaps: vec![gap(6, 7, None), gap(8, 10, Some(2..5))],
                offset: Some(12),
                hint: Some(16),
                ..buffer(5, 10, 8, 4).into()
            }
        );
        assert_eq!(expected.requests[1], buffer(0, 2, 1, 1).into());
        // The last time of lives and gaps, instead of the first after it, with gaps in another
        // sequence.
        let last =
            "offset,gaps,size,buffer_id,end,hint,begin,alignment\n12, 8-9@2:5  6-6 ,8,a,9,16,5,4\n,,1,b,1,,0,1\n";
        assert_eq!(read(last), expected);
        assert_eq!(read("start,size,buffer,upper\n6,18,x,12\n"), read("id,lower,upper,size\nx,6,12,18\n"));
    }

    #[test]
    fn faults_are_named() {
        let error = |text: &str| Instance::read(text).expect_err("refused");
        let missing = |column| CsvError::MissingColumn { column };
        assert_eq!(error(""), CsvError::UnknownColumn { column: String::new() });
        assert_eq!(error("id,lower,upper\n"), missing("size"));
        assert_eq!(error("start,end,size\n"), missing("id"));
        assert_eq!(error("id,lower,upper,size,color\n"), CsvError::UnknownColumn { column: "color".into() });
        assert_eq!(error("id,lower,upper,end,size\n"), CsvError::DuplicateColumn { column: "upper" });
        assert_eq!(error("id,buffer,lower,upper,size\n"), CsvError::DuplicateColumn { column: "id" });
        let error = |rows: &str| error(&format!("id,lower,upper,size,gaps,offset,hint\n{rows}"));
        let fields = |line, found| CsvError::Fields { line, expected: 7, found };
        assert_eq!(error("a,0,1,2,,,\n\nb,0,1,2,,,\n"), fields(3, 1));
        assert_eq!(error("a,0,1,2,,,,\n"), fields(2, 8));
        assert_eq!(error(",0,1,2,,,\n"), CsvError::EmptyId { line: 2 });
        assert_eq!(error("a,0,1,2,,,\na,0,1,2,,,\n"), CsvError::DuplicateId { line: 3, id: "a".into() });
        for (row, column) in [
            ("a,x,1,2,,,", "lower"),
            ("a,-1,1,2,,,", "lower"),
            ("a,0,+1,2,,,", "upper"),
            ("a,0, 1,2,,,", "upper"),
            ("a,0,1,2.5,,,", "size"),
            ("a,0,1,,,,", "size"),
            ("a,0,1,9223372036854775808,,,", "size"),
            ("a,0,1,2,,-1,", "offset"),
            ("a,0,1,2,,,-2", "hint"),
        ] {
            assert_eq!(error(row), CsvError::Number { line: 2, column }, "{row}");
        }
        for gap in ["1", "1-2-3", "A-B", "1-2@3", "1-2@3:", "1-2@3:4:5", "-1-2"] {
            assert_eq!(error(&format!("a,0,9,9,4-5 {gap},,")), CsvError::Gap { line: 2, gap: gap.into() });
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let text = "id,lower,upper,size,alignment,hint,gaps,offset\na,5,10,8,4,16,6-7 8-10@2:5,12\nb,0,2,1,1,-1,,\n";
        assert_eq!(read(text).write(None), text);
        assert_eq!(read(text).write(Some(&[12, 3])), text.replace("-1,,\n", "-1,,3\n"));
        // Columns that say nothing are left out.
        let plain = read("size,id,start,end,alignment,gaps,hint\n4,b1,0,2,1,,-1\n");
        assert_eq!(plain.write(None), "id,lower,upper,size\nb1,0,3,4\n");
        assert_eq!(plain.write(Some(&[8])), "id,lower,upper,size,offset\nb1,0,3,4,8\n");
        assert_eq!(plain.digest(), read("id,lower,upper,size\nb1,0,3,4\n").digest());
        assert_ne!(plain.digest(), read("id,lower,upper,size\nb1,0,3,5\n").digest());
    }
}
