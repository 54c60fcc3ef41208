//! The JSON form of graphs and plans: documented in `docs/formats.md`, versioned, stable byte for byte.
//!
//! Both ways are streamed: a file is never held as one text. Paths that end in `.gz` are written compressed; when
//! reading, compression is recognized by its first bytes. Readers trust nothing: they stop at a limit of bytes,
//! know no recursion, and refuse what they do not know.

use crate::builder::GraphBuilder;
use crate::error::FormatError;
use crate::graph::{Graph, Operator, Region, ReusePair, Tensor};
use crate::ids::OperatorId;
use crate::plan::{BoundRoute, Candidate, ExactReport, Plan, Schedule, Settings, Status};
use flate2::{Compression, GzBuilder, bufread::MultiGzDecoder};
use serde::de::{self, DeserializeOwned, DeserializeSeed, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::marker::PhantomData;
use std::path::Path;

/// Name of the graph format.
pub const GRAPH_FORMAT: &str = "roam.graph";
/// Name of the plan format.
pub const PLAN_FORMAT: &str = "roam.plan";
/// The version of graphs that this release writes and reads.
pub const GRAPH_VERSION: u64 = 1;
/// The version of plans that this release writes. It reads version 1 as well.
pub const PLAN_VERSION: u64 = 2;
/// How many bytes, after decompression, a reader takes by default: about a million operators.
pub const DEFAULT_MAX_BYTES: u64 = 512 << 20;

const BUFFER_BYTES: usize = 64 << 10;

// Graphs ------------------------------------------------------------------------------------------------------------

/// Writes a graph's JSON: the canonical one, and its notes.
pub fn write_graph(out: impl Write, graph: &Graph) -> io::Result<()> {
    write_with(out, graph, graph.notes())
}

/// Writes the canonical JSON of a graph: equal graphs give equal bytes.
pub(crate) fn write_canonical(out: impl Write, graph: &Graph) -> io::Result<()> {
    write_with(out, graph, &[])
}

fn write_with(out: impl Write, graph: &Graph, notes: &[(String, String)]) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, out);
    write_header(&mut out, GRAPH_FORMAT, GRAPH_VERSION)?;
    write_field(&mut out, "name", graph.name())?;
    write_field(&mut out, "device", graph.device())?;
    write_field(&mut out, "alignment_bytes", &graph.alignment_bytes())?;
    if !graph.estimate().is_empty() {
        write_field(&mut out, "estimate", graph.estimate())?;
    }
    if !graph.accounting().is_empty() {
        write_field(&mut out, "accounting", graph.accounting())?;
    }
    write_rows(&mut out, "tensors", graph.tensors())?;
    write_rows(&mut out, "operators", graph.operators())?;
    write_rows(&mut out, "control", graph.control())?;
    write_rows(&mut out, "regions", graph.regions())?;
    if !notes.is_empty() {
        write_rows(&mut out, "notes", notes)?;
    }
    out.write_all(b"}\n")?;
    out.flush()
}

/// Reads a graph of at most `max_bytes` (after decompression) and checks it as the builder does.
///
/// # Errors
/// See [`FormatError`]; never panics, whatever the bytes.
pub fn read_graph(input: impl Read, max_bytes: u64) -> Result<Graph, FormatError> {
    let (_, body): (u64, GraphBody) = read_body(input, GRAPH_FORMAT, GRAPH_VERSION, max_bytes)?;
    let mut builder = GraphBuilder::new(body.name, body.device, body.alignment_bytes);
    builder.estimate = body.estimate;
    builder.accounting = body.accounting;
    builder.notes = body.notes;
    Ok(builder.with_parts(body.tensors, body.operators, body.control, body.regions).build()?)
}

/// Writes a graph to a file, compressed if the path ends in `.gz`.
pub fn save_graph(path: &Path, graph: &Graph) -> Result<(), FormatError> {
    save(path, |out| write_graph(out, graph))
}

/// Reads a graph from a file, see [`read_graph`].
pub fn load_graph(path: &Path, max_bytes: u64) -> Result<Graph, FormatError> {
    read_graph(File::open(path).map_err(FormatError::Io)?, max_bytes)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GraphBody {
    name: String,
    device: String,
    alignment_bytes: u64,
    #[serde(default)]
    estimate: String,
    #[serde(default)]
    accounting: String,
    #[serde(default)]
    notes: Vec<(String, String)>,
    #[serde(deserialize_with = "strict::list")]
    tensors: Vec<Tensor>,
    #[serde(deserialize_with = "strict::list")]
    operators: Vec<Operator>,
    control: Vec<(OperatorId, OperatorId)>,
    #[serde(deserialize_with = "strict::list")]
    regions: Vec<Region>,
}

// Plans -------------------------------------------------------------------------------------------------------------

/// Writes the JSON of a plan: equal plans give equal bytes.
pub fn write_plan(out: impl Write, plan: &Plan) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, out);
    write_header(&mut out, PLAN_FORMAT, PLAN_VERSION)?;
    write_field(&mut out, "graph_digest", &plan.graph_digest)?;
    if !plan.estimate.is_empty() {
        write_field(&mut out, "estimate", &plan.estimate)?;
    }
    write_field(&mut out, "settings", &plan.settings)?;
    write_field(&mut out, "status", &plan.status)?;
    write_field(&mut out, "program_order_peak_bytes", &plan.program_order_peak_bytes)?;
    write_field(&mut out, "peak_bytes", &plan.peak_bytes)?;
    write_field(&mut out, "pool_peak_bytes", &plan.pool_peak_bytes)?;
    write_field(&mut out, "pool_bytes", &plan.pool_bytes)?;
    write_field(&mut out, "outside_bytes", &plan.outside_bytes)?;
    write_field(&mut out, "persistent_bytes", &plan.persistent_bytes)?;
    write_field(&mut out, "total_bytes", &plan.total_bytes)?;
    write_field(&mut out, "lower_bound_bytes", &plan.lower_bound_bytes)?;
    write_field(&mut out, "total_lower_bound_bytes", &plan.total_lower_bound_bytes)?;
    write_field(&mut out, "bound_operator", &plan.bound_operator)?;
    write_field(&mut out, "bound_route", &plan.bound_route)?;
    write_field(&mut out, "exact", &plan.exact)?;
    write_rows(&mut out, "candidates", &plan.candidates)?;
    write_field(&mut out, "order", &plan.order)?;
    write_field(&mut out, "offsets", &plan.offsets)?;
    write_field(&mut out, "reuse", &plan.reuse)?;
    if let Some(schedule) = &plan.schedule {
        write_field(&mut out, "schedule", schedule)?;
    }
    out.write_all(b"}\n")?;
    out.flush()
}

/// Reads a plan of at most `max_bytes` (after decompression). Whether it fits a graph is [`crate::verify`]'s matter.
///
/// # Errors
/// See [`FormatError`]; never panics, whatever the bytes.
pub fn read_plan(input: impl Read, max_bytes: u64) -> Result<Plan, FormatError> {
    let (version, mut body): (u64, PlanBody) = read_body(input, PLAN_FORMAT, PLAN_VERSION, max_bytes)?;
    body.settings.check().map_err(|fault| FormatError::Value { what: fault.to_string() })?;
    // Every figure of a real plan is below 2^63, as the graph's sizes together are.
    let figures = [
        body.program_order_peak_bytes,
        body.peak_bytes,
        body.pool_peak_bytes,
        body.pool_bytes,
        body.outside_bytes,
        body.persistent_bytes,
        body.total_bytes,
        body.lower_bound_bytes,
        body.total_lower_bound_bytes,
    ];
    let times = body.schedule.iter().flat_map(|s| [s.makespan_ns, s.serial_ns, s.critical_path_ns]);
    let candidates = body.candidates.iter().flat_map(|candidate| [candidate.peak_bytes, candidate.pool_bytes]);
    let offsets = body.offsets.iter().flatten().copied();
    if let Some(value) =
        figures.into_iter().chain(candidates).chain(offsets).chain(times).find(|&figure| figure > i64::MAX as u64)
    {
        return Err(FormatError::Value { what: format!("{value} does not fit a signed 64-bit number") });
    }
    // What version 1 called not needed could have left a gap, and what it called used could have come to nothing.
    if version == 1 {
        body.exact.conclude(body.status == Status::Optimal);
    }
    Ok(Plan {
        graph_digest: body.graph_digest,
        estimate: body.estimate,
        settings: body.settings,
        order: body.order,
        offsets: body.offsets,
        reuse: body.reuse,
        schedule: body.schedule,
        program_order_peak_bytes: body.program_order_peak_bytes,
        peak_bytes: body.peak_bytes,
        pool_peak_bytes: body.pool_peak_bytes,
        pool_bytes: body.pool_bytes,
        outside_bytes: body.outside_bytes,
        persistent_bytes: body.persistent_bytes,
        total_bytes: body.total_bytes,
        lower_bound_bytes: body.lower_bound_bytes,
        total_lower_bound_bytes: body.total_lower_bound_bytes,
        bound_operator: body.bound_operator,
        bound_route: body.bound_route,
        status: body.status,
        exact: body.exact,
        candidates: body.candidates,
    })
}

/// Writes a plan to a file, compressed if the path ends in `.gz`.
pub fn save_plan(path: &Path, plan: &Plan) -> Result<(), FormatError> {
    save(path, |out| write_plan(out, plan))
}

/// Reads a plan from a file, see [`read_plan`].
pub fn load_plan(path: &Path, max_bytes: u64) -> Result<Plan, FormatError> {
    read_plan(File::open(path).map_err(FormatError::Io)?, max_bytes)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanBody {
    graph_digest: String,
    #[serde(default)]
    estimate: String,
    #[serde(deserialize_with = "strict::one")]
    settings: Settings,
    status: Status,
    program_order_peak_bytes: u64,
    peak_bytes: u64,
    pool_peak_bytes: u64,
    pool_bytes: u64,
    outside_bytes: u64,
    persistent_bytes: u64,
    total_bytes: u64,
    lower_bound_bytes: u64,
    total_lower_bound_bytes: u64,
    #[serde(deserialize_with = "Option::deserialize")] // Without this serde takes an absent key for null.
    bound_operator: Option<OperatorId>,
    bound_route: BoundRoute,
    #[serde(deserialize_with = "strict::one")]
    exact: ExactReport,
    #[serde(deserialize_with = "strict::list")]
    candidates: Vec<Candidate>,
    order: Vec<OperatorId>,
    offsets: Vec<Option<u64>>,
    reuse: Vec<ReusePair>,
    #[serde(default, deserialize_with = "strict::some")]
    schedule: Option<Schedule>,
}

// Writing -----------------------------------------------------------------------------------------------------------

fn write_header(out: &mut impl Write, format: &str, version: u64) -> io::Result<()> {
    write!(out, "{{\"format\":\"{format}\",\"version\":{version}")
}

fn write_field(out: &mut impl Write, key: &str, value: &(impl Serialize + ?Sized)) -> io::Result<()> {
    write!(out, ",\n\"{key}\":")?;
    Ok(serde_json::to_writer(out, value)?)
}

/// A list with one entry a line, so that files can be read and compared.
fn write_rows<T: Serialize>(out: &mut impl Write, key: &str, rows: &[T]) -> io::Result<()> {
    write!(out, ",\n\"{key}\":[")?;
    for (index, row) in rows.iter().enumerate() {
        out.write_all(if index == 0 { b"\n" } else { b",\n" })?;
        serde_json::to_writer(&mut *out, row)?;
    }
    out.write_all(b"]")
}

fn save(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), FormatError> {
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

/// Deserializers that take records as objects only; serde's own would take arrays of values as well.
pub(crate) mod strict {
    use super::{Deserialize, MapAccess, PhantomData, Visitor, de, fmt};
    use serde::Deserializer;
    use serde::de::value::MapAccessDeserializer;

    struct Record<T>(T);

    impl<'de, T: Deserialize<'de>> Deserialize<'de> for Record<T> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct ObjectOnly<T>(PhantomData<T>);
            impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectOnly<T> {
                type Value = T;
                fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                    out.write_str("an object")
                }
                fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                    T::deserialize(MapAccessDeserializer::new(map))
                }
            }
            deserializer.deserialize_map(ObjectOnly(PhantomData)).map(Record)
        }
    }

    pub(crate) fn one<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        Record::deserialize(deserializer).map(|Record(value)| value)
    }

    /// For a key that is left out or holds a record, never null.
    pub(crate) fn some<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
        one(deserializer).map(Some)
    }

    pub(crate) fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
        struct Records<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Records<T> {
            type Value = Vec<T>;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a list of objects")
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
                let mut records = Vec::new();
                while let Some(Record(value)) = list.next_element()? {
                    records.push(value);
                }
                Ok(records)
            }
        }
        deserializer.deserialize_seq(Records(PhantomData))
    }
}

/// Reads one object that opens with the format's name and version, and nothing after it. Versions are those from 1 to the newest.
fn read_body<T: DeserializeOwned>(
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
        // What the decompressor says of damaged and of truncated streams; files themselves do not fail so.
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

/// The object around a body: `format` and `version` come first, so that a reader knows at once what it reads.
struct Envelope<'a, T> {
    format: &'static str,
    newest: u64,
    /// Where a refusal is left that serde's own error type cannot carry.
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
