//! The JSON form of a plan, documented in `docs/reference/formats.md`.

use super::contents::{BoundRoute, Candidate, ExactReport, Plan, Recomputation, Schedule, Settings, Status};
use crate::graph::envelope::{BUFFER_BYTES, read_body, save, write_field, write_header, write_rows};
use crate::graph::{FormatError, OperatorId, ReusePair, strict};
use serde::Deserialize;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

/// Name of the plan format.
pub const PLAN_FORMAT: &str = "roam.plan";
/// The newest version of plans that this release reads, and writes for plans in which operators run
/// again or that were asked to keep within a limit.
pub const PLAN_VERSION: u64 = 3;
/// What it writes for all others, so that their bytes stay.
const PLAIN_VERSION: u64 = 2;

/// Writes the JSON of a plan: equal plans give equal bytes.
pub fn write_plan(out: impl Write, plan: &Plan) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, out);
    let is_plain = plan.recomputation.is_none() && plan.settings.memory_limit_bytes.is_none();
    write_header(&mut out, PLAN_FORMAT, if is_plain { PLAIN_VERSION } else { PLAN_VERSION })?;
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
    if let Some(recomputation) = &plan.recomputation {
        write_field(&mut out, "recomputation", recomputation)?;
    }
    out.write_all(b"}\n")?;
    out.flush()
}

/// Reads a plan of at most `max_bytes` (after decompression). Whether it fits a graph is
/// [`crate::verify`]'s matter.
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
    let candidates = body.candidates.iter().flat_map(|tried| [tried.peak_bytes, tried.pool_bytes, tried.outside_bytes]);
    let repeats = body.recomputation.iter().flat_map(|again| {
        [again.extra_ns, again.step_ns, again.least_extra_ns, again.floor_bytes, again.plain_total_bytes]
    });
    let offsets = body.offsets.iter().flatten().copied();
    if let Some(value) = figures
        .into_iter()
        .chain(candidates)
        .chain(offsets)
        .chain(times)
        .chain(repeats)
        .find(|&figure| figure > i64::MAX as u64)
    {
        return Err(FormatError::Value { what: format!("{value} does not fit a signed 64-bit number") });
    }
    // What version 1 called not needed could have left a gap, and what it called used could have
    // come to nothing.
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
        recomputation: body.recomputation,
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
    #[serde(default, deserialize_with = "strict::some")]
    recomputation: Option<Recomputation>,
}
