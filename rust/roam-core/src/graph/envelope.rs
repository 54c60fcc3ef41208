//! What the JSON forms of graphs and plans have in common: they are documented in
//! `docs/reference/formats.md`, versioned, and stable byte for byte.
//!
//! Both ways are streamed: a file is never held as one text. Paths that end in `.gz` are written
//! compressed; when reading, compression is recognized by its first bytes. Readers trust nothing:
//! they stop at a limit of bytes, know no recursion, and refuse what they do not know.

use super::error::GraphError;
use flate2::{Compression, GzBuilder, bufread::MultiGzDecoder};
use serde::de::{self, DeserializeOwned, DeserializeSeed, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::marker::PhantomData;
use std::path::Path;
use thiserror::Error;

/// How many bytes, after decompression, a reader takes by default: about a million operators.
pub const DEFAULT_MAX_BYTES: u64 = 512 << 20;

pub(crate) const BUFFER_BYTES: usize = 64 << 10;

/// Why a file could not be read as a graph or a plan, or not be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The operating system refused.
    #[error("{0}")]
    Io(#[source] std::io::Error),
    /// Not JSON, cut off, or not of the documented shape.
    #[error("{message} at line {line} column {column}")]
    Syntax {
        /// What is wrong.
        message: String,
        /// Line, counted from 1.
        line: usize,
        /// Column in bytes.
        column: usize,
    },
    /// The gzip stream is damaged or cut off.
    #[error("damaged gzip stream: {0}")]
    Compression(#[source] std::io::Error),
    /// Another kind of file.
    #[error("expected format `{expected}`, found {found}")]
    WrongFormat {
        /// The format asked for.
        expected: &'static str,
        /// What the file says, or what stands in its place.
        found: String,
    },
    /// A version that this release does not know.
    #[error("version {found} of `{format}` is not supported; this release reads versions up to {supported}")]
    WrongVersion {
        /// The format.
        format: &'static str,
        /// The file's version.
        found: u64,
        /// The newest version that can be read.
        supported: u64,
    },
    /// More bytes, after decompression, than the reader was allowed.
    #[error("more than {max_bytes} bytes after decompression")]
    TooLarge {
        /// The limit.
        max_bytes: u64,
    },
    /// Well-formed JSON of the documented shape, but not a valid graph.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// Well-formed JSON of the documented shape, but a value makes no sense.
    #[error("{what}")]
    Value {
        /// Which value, and what is wrong with it.
        what: String,
    },
}

impl FormatError {
    /// The variant's name for programs, in snake case; stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Io(_) => "io",
            Self::Syntax { .. } => "syntax",
            Self::Compression(_) => "compression",
            Self::WrongFormat { .. } => "wrong_format",
            Self::WrongVersion { .. } => "wrong_version",
            Self::TooLarge { .. } => "too_large",
            Self::Graph(error) => error.code(),
            Self::Value { .. } => "value",
        }
    }
}

// Writing -----------------------------------------------------------------------------------------------------------

pub(crate) fn write_header(out: &mut impl Write, format: &str, version: u64) -> io::Result<()> {
    write!(out, "{{\"format\":\"{format}\",\"version\":{version}")
}

pub(crate) fn write_field(out: &mut impl Write, key: &str, value: &(impl Serialize + ?Sized)) -> io::Result<()> {
    write!(out, ",\n\"{key}\":")?;
    Ok(serde_json::to_writer(out, value)?)
}

/// A list with one entry a line, so that files can be read and compared.
pub(crate) fn write_rows(
    out: &mut impl Write,
    key: &str,
    rows: impl IntoIterator<Item = impl Serialize>,
) -> io::Result<()> {
    write!(out, ",\n\"{key}\":[")?;
    for (index, row) in rows.into_iter().enumerate() {
        out.write_all(if index == 0 { b"\n" } else { b",\n" })?;
        serde_json::to_writer(&mut *out, &row)?;
    }
    out.write_all(b"]")
}

pub(crate) fn save(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), FormatError> {
    let save = || {
        let mut file = File::create(path)?;
        if path.extension().is_some_and(|extension| extension == "gz") {
            // No time and no file name in the header: equal graphs give equal files.
            let mut out = GzBuilder::new().mtime(0).write(file, Compression::default());
            write(&mut out)?;
            out.finish()?;
            Ok(())
        } else {
            write(&mut file)
        }
    };
    save().map_err(FormatError::Io)
}

// Reading -----------------------------------------------------------------------------------------------------------

/// Reads one object that opens with the format's name and version, and nothing after it. Versions
/// are those from 1 to the newest.
pub(crate) fn read_body<T: DeserializeOwned>(
    input: impl Read,
    format: &'static str,
    newest: u64,
    max_bytes: u64,
) -> Result<(u64, T), FormatError> {
    let mut input = BufReader::with_capacity(BUFFER_BYTES, input);
    let is_gzip = input.fill_buf().map_err(FormatError::Io)?.starts_with(&[0x1f, 0x8b]);
    if is_gzip {
        // Takes several members as gzip does, and refuses anything else after the first.
        read_json(MultiGzDecoder::new(input), format, newest, max_bytes)
    } else {
        read_json(input, format, newest, max_bytes)
    }
}

fn read_json<T: DeserializeOwned>(
    input: impl Read,
    format: &'static str,
    newest: u64,
    max_bytes: u64,
) -> Result<(u64, T), FormatError> {
    let input = BufReader::with_capacity(BUFFER_BYTES, Limited { input, left: max_bytes, max_bytes });
    let mut refusal = None;
    let mut deserializer = serde_json::Deserializer::from_reader(input);
    let envelope = Envelope { format, newest, refusal: &mut refusal, body: PhantomData };
    let body = envelope.deserialize(&mut deserializer).and_then(|body| deserializer.end().map(|()| body));
    body.map_err(|error| refusal.unwrap_or_else(|| reading_failed(error)))
}

fn reading_failed(error: serde_json::Error) -> FormatError {
    if !error.is_io() {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        let place = format!(" at line {line} column {column}");
        let message = text.strip_suffix(&place).unwrap_or(&text).to_owned();
        return FormatError::Syntax { message, line, column };
    }
    let error = io::Error::from(error);
    if let Some(&LimitReached { max_bytes }) = error.get_ref().and_then(|inner| inner.downcast_ref()) {
        return FormatError::TooLarge { max_bytes };
    }
    match error.kind() {
        // What the decompressor says of damaged and of truncated streams; files themselves do not
        // fail so.
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
            FormatError::Compression(error)
        }
        _ => FormatError::Io(error),
    }
}

/// Passes on at most `left` bytes, then fails if there are more.
struct Limited<R> {
    input: R,
    left: u64,
    max_bytes: u64,
}

#[derive(Debug)]
struct LimitReached {
    max_bytes: u64,
}

impl fmt::Display for LimitReached {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "more than {} bytes", self.max_bytes)
    }
}

impl std::error::Error for LimitReached {}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.left = (self.left.checked_sub(count as u64))
            .ok_or_else(|| io::Error::other(LimitReached { max_bytes: self.max_bytes }))?;
        Ok(count)
    }
}

/// The object around a body: `format` and `version` come first, so that a reader knows at once what
/// it reads.
struct Envelope<'a, T> {
    format: &'static str,
    newest: u64,
    /// Where to leave a refusal that serde's own error type cannot carry.
    refusal: &'a mut Option<FormatError>,
    body: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Envelope<'_, T> {
    type Value = (u64, T);
    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Envelope<'_, T> {
    type Value = (u64, T);

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "an object of format `{}`", self.format)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let expected = self.format;
        let mut refuse = |error: FormatError| {
            let text = error.to_string();
            *self.refusal = Some(error);
            de::Error::custom(text)
        };
        match map.next_key::<String>()?.as_deref() {
            Some("format") => {}
            _ => return Err(refuse(FormatError::WrongFormat { expected, found: "no `format` as first key".into() })),
        }
        let format: String = map.next_value()?;
        if format != expected {
            return Err(refuse(FormatError::WrongFormat { expected, found: format!("`{format}`") }));
        }
        match map.next_key::<String>()?.as_deref() {
            Some("version") => {}
            _ => return Err(de::Error::custom("`version` must be the second key")),
        }
        let found: u64 = map.next_value()?;
        if !(1..=self.newest).contains(&found) {
            return Err(refuse(FormatError::WrongVersion { format: expected, found, supported: self.newest }));
        }
        Ok((found, T::deserialize(de::value::MapAccessDeserializer::new(map))?))
    }
}
