//! The JSON form of a graph, documented in `docs/reference/formats.md`.

use super::builder::GraphBuilder;
use super::entries::{Operator, Region, Source, Tensor};
use super::envelope::{BUFFER_BYTES, FormatError, read_body, save, write_field, write_header, write_rows};
use super::ids::OperatorId;
use super::step::Graph;
use super::strict;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

/// Name of the graph format.
pub const GRAPH_FORMAT: &str = "roam.graph";
/// The newest version of graphs that this release reads, and writes for graphs that say which of
/// their operators may run again or how long they take.
pub const GRAPH_VERSION: u64 = 2;
/// What it writes for all others, so that their bytes and digests stay.
const PLAIN_VERSION: u64 = 1;

/// Writes a graph's JSON: the canonical one, and its notes.
pub fn write_graph(out: impl Write, graph: &Graph) -> io::Result<()> {
    write_with(out, graph, graph.name(), graph.tensors(), graph.operators(), graph.notes())
}

/// Writes the canonical JSON of a graph: equal graphs give equal bytes.
pub(crate) fn write_canonical(out: impl Write, graph: &Graph) -> io::Result<()> {
    write_with(out, graph, graph.name(), graph.tensors(), graph.operators(), &[])
}

/// Writes what plans depend on: the canonical JSON without the names of graph and tensors, and
/// without the places in the user's program that operators come from.
pub(crate) fn write_structure(out: impl Write, graph: &Graph) -> io::Result<()> {
    let tensors = graph.tensors().iter().map(|tensor| Tensor { name: String::new(), ..tensor.clone() });
    let operators = graph.operators().iter().map(|one| Operator { source: Source::default(), ..one.clone() });
    write_with(out, graph, "", tensors, operators, &[])
}

fn write_with(
    out: impl Write,
    graph: &Graph,
    name: &str,
    tensors: impl IntoIterator<Item = impl Serialize>,
    operators: impl IntoIterator<Item = impl Serialize>,
    notes: &[(String, String)],
) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, out);
    let is_plain = |operator: &Operator| {
        let is_timed = operator.time_ns != 0 || operator.link != 0;
        !operator.repeatable && operator.first_only.is_empty() && !is_timed
    };
    let version = if graph.operators().iter().all(is_plain) { PLAIN_VERSION } else { GRAPH_VERSION };
    write_header(&mut out, GRAPH_FORMAT, version)?;
    write_field(&mut out, "name", name)?;
    write_field(&mut out, "device", graph.device())?;
    write_field(&mut out, "alignment_bytes", &graph.alignment_bytes())?;
    if !graph.estimate().is_empty() {
        write_field(&mut out, "estimate", graph.estimate())?;
    }
    if !graph.accounting().is_empty() {
        write_field(&mut out, "accounting", graph.accounting())?;
    }
    write_rows(&mut out, "tensors", tensors)?;
    write_rows(&mut out, "operators", operators)?;
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
