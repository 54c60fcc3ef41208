//! Plans of several streams: everything is proved from what happens before what, under every
//! timing.
//!
//! An operator has completed before another one starts, whatever time either takes, exactly if that
//! follows from the order of each stream and from the waits. Two tensors may share bytes only if
//! every last use of one has completed before the other's creator starts
//! (docs/explanation/streams.md). Plans in the time-step model are checked by time steps instead,
//! as that model has it; nothing may run them.

use super::checks::{check_constraints, check_figures, check_offsets, check_overlaps, check_reuse, expect};
use super::happens_before::{Ends, Knowledge, is_past};
use super::lives::{Lives, Pairs, Peaks, name, site, tensors};
use super::unpooled;
use super::violation::PlanViolation;
use crate::cost;
use crate::graph::{Graph, OperatorId, Residency, TensorId};
use crate::plan::{Plan, Schedule, StreamModel};
use std::collections::BTreeMap;

/// `launch` is every operator's place in the plan's order.
pub(super) fn verify(graph: &Graph, plan: &Plan, schedule: &Schedule, launch: &[usize]) -> Result<(), PlanViolation> {
    let streams = plan.settings.streams;
    check_length("streams", graph.operators().len(), schedule.streams.len())?;
    for (&stream, index) in schedule.streams.iter().zip(0..) {
        if stream >= streams {
            return Err(PlanViolation::UnknownStream { site: site(graph, OperatorId(index)), stream, streams });
        }
    }
    let makespan_ns = match plan.settings.stream_model {
        StreamModel::HappensBefore => {
            check_length("time_steps", 0, schedule.time_steps.len())?;
            let waits = waits(graph, schedule, launch)?;
            verify_under_every_timing(graph, plan, schedule, &waits)?
        }
        StreamModel::TimeStep => {
            check_length("syncs", 0, schedule.syncs.len())?;
            verify_by_time_steps(graph, plan, schedule)?
        }
    };
    expect("makespan_ns", schedule.makespan_ns, makespan_ns)?;
    expect("serial_ns", schedule.serial_ns, cost::serial_ns(graph))?;
    expect("critical_path_ns", schedule.critical_path_ns, cost::critical_path_ns(graph))?;
    let asked = plan.settings.speed.unwrap_or(0.0);
    let speed = if makespan_ns == 0 { 1.0 } else { schedule.serial_ns as f64 / makespan_ns as f64 };
    if speed < asked {
        return Err(PlanViolation::SpeedTarget { speed, asked });
    }
    Ok(())
}

fn check_length(list: &'static str, expected: usize, found: usize) -> Result<(), PlanViolation> {
    if found == expected { Ok(()) } else { Err(PlanViolation::ScheduleCount { list, expected, found }) }
}

/// Per operator what it waits for; a wait goes back in the order of launching, so none can wait for
/// ever.
fn waits(graph: &Graph, schedule: &Schedule, launch: &[usize]) -> Result<Vec<Vec<OperatorId>>, PlanViolation> {
    let mut waits = vec![Vec::new(); launch.len()];
    for &(before, after) in &schedule.syncs {
        if let Some(unknown) = [before, after].into_iter().find(|id| id.index() >= launch.len()) {
            return Err(PlanViolation::UnknownOperator { operator: unknown.0 });
        }
        let same = schedule.streams[before.index()] == schedule.streams[after.index()];
        if same || launch[before.index()] >= launch[after.index()] {
            return Err(PlanViolation::SyncInvalid { site: site(graph, after), before: site(graph, before) });
        }
        waits[after.index()].push(before);
    }
    Ok(waits)
}

/// Returns the makespan.
fn verify_under_every_timing(
    graph: &Graph,
    plan: &Plan,
    schedule: &Schedule,
    waits: &[Vec<OperatorId>],
) -> Result<u64, PlanViolation> {
    let knowledge = Knowledge::new(plan, schedule, waits);
    let runs_before = |first, second| knowledge.runs_before(first, second);
    check_constraints(graph, runs_before)?;
    check_offsets(graph, plan)?;
    let pairs = check_reuse(graph, plan, runs_before)?;
    let ends = Ends::new(graph, plan, &knowledge);
    check_shared_bytes(graph, plan, &knowledge, &ends, &pairs)?;
    let times = plan.times_ns(graph);
    let mut peaks = peaks_by_times(graph, plan, &times, &pairs);
    peaks.unpooled = unpooled::bytes(graph, plan, &knowledge, &ends);
    check_figures(graph, graph, plan, peaks)?;
    Ok(makespan_ns(&times))
}

fn makespan_ns(times: &[(u64, u64)]) -> u64 {
    times.iter().map(|&(_, end)| end).max().unwrap_or(0)
}

/// In the order of launching, every new tensor is compared with the last holders of its bytes. Who
/// held them before was dead when those came, so it need not be looked at.
fn check_shared_bytes(
    graph: &Graph,
    plan: &Plan,
    knowledge: &Knowledge,
    ends: &Ends,
    pairs: &Pairs,
) -> Result<(), PlanViolation> {
    // Disjoint spans of bytes: from their start to their end and holder.
    let mut holders: BTreeMap<u64, (u64, TensorId)> = BTreeMap::new();
    for &id in &plan.order {
        for &tensor in &graph.operator(id).creates {
            let size = graph.counted_bytes(tensor);
            let Some(begin) = plan.offsets[tensor.index()].filter(|_| size > 0) else { continue };
            let end = begin + size;
            let mut from = holders.range(..=begin).next_back().map_or(begin, |(&start, _)| start);
            while let Some((&start, &(until, other))) = holders.range(from..end).next() {
                from = start + 1;
                if until <= begin {
                    continue;
                }
                let takes_over = pairs.get(&tensor) == Some(&other);
                if !takes_over && !is_past(knowledge.at(id), ends.of(other)) {
                    let (tensor, other) = (name(graph, tensor), name(graph, other));
                    return Err(PlanViolation::Overlap { tensor, other, site: site(graph, id) });
                }
                // What sticks out on either side keeps its holder.
                holders.remove(&start);
                if start < begin {
                    holders.insert(start, (begin, other));
                }
                if until > end {
                    holders.insert(end, (until, other));
                }
            }
            holders.insert(begin, (end, tensor));
        }
    }
    Ok(())
}

/// What is live when operators start, by the model's times; of those that start at once the first
/// launched counts as first.
fn peaks_by_times(graph: &Graph, plan: &Plan, times: &[(u64, u64)], pairs: &Pairs) -> Peaks {
    let mut starts = plan.order.clone();
    starts.sort_by_key(|id| times[id.index()].0);
    let mut place = vec![0; starts.len()];
    for (at, id) in starts.iter().enumerate() {
        place[id.index()] = at;
    }
    // The first start at which an operator has completed.
    let gone = |id: OperatorId| {
        let end = times[id.index()].1;
        starts.partition_point(|other| times[other.index()].0 < end).max(place[id.index()] + 1)
    };
    let gone: Vec<usize> = (0..starts.len() as u32).map(|index| gone(OperatorId(index))).collect();
    let count = graph.tensors().len();
    let mut first: Vec<Option<usize>> = vec![None; count];
    let mut until = vec![0; count];
    for tensor in tensors(graph) {
        match graph.tensor(tensor).residency {
            Residency::Enters => first[tensor.index()] = Some(0),
            Residency::Leaves => until[tensor.index()] = starts.len(),
            Residency::StepLocal | Residency::Unpooled | Residency::Persistent => {}
        }
    }
    for (index, operator) in graph.operators().iter().enumerate() {
        for tensor in &operator.creates {
            first[tensor.index()] = Some(place[index]);
        }
        for tensor in operator.creates.iter().chain(&operator.reads).chain(&operator.mutates) {
            until[tensor.index()] = gone[index].max(until[tensor.index()]);
        }
    }
    // What enters and is never used is gone once the first operator has completed.
    let unused = |tensor: &TensorId| until[tensor.index()] == 0;
    for tensor in tensors(graph).filter(unused).collect::<Vec<_>>() {
        until[tensor.index()] = starts.first().map_or(0, |id| gone[id.index()]);
    }
    // (came, went) per start.
    let mut pool = vec![(0u64, 0u64); starts.len() + 1];
    let mut beside = pool.clone();
    for tensor in tensors(graph) {
        let Some(first) = first[tensor.index()].filter(|_| !starts.is_empty()) else { continue };
        let is_local = graph.tensor(tensor).residency == Residency::StepLocal;
        let changes = if is_local { &mut pool } else { &mut beside };
        changes[first].0 += graph.counted_bytes(tensor);
        changes[until[tensor.index()]].1 += graph.counted_bytes(tensor);
    }
    for (&output, &input) in pairs {
        // Counted once from the output's creation on.
        let Some(first) = first[output.index()] else { continue };
        let is_local = graph.tensor(input).residency == Residency::StepLocal;
        let changes = if is_local { &mut pool } else { &mut beside };
        changes[first].1 += graph.counted_bytes(input);
        changes[until[input.index()]].0 += graph.counted_bytes(input);
    }
    for (index, &gone) in gone.iter().enumerate() {
        let workspace = graph.workspace_bytes(OperatorId(index as u32));
        beside[place[index]].0 += workspace;
        beside[gone].1 += workspace;
    }
    let (mut in_pool, mut unpooled) = (0, 0);
    let mut peaks = Peaks::default();
    for at in 0..starts.len() {
        in_pool = in_pool + pool[at].0 - pool[at].1;
        unpooled = unpooled + beside[at].0 - beside[at].1;
        peaks.pool = in_pool.max(peaks.pool);
        peaks.unpooled = unpooled.max(peaks.unpooled);
        peaks.whole = (in_pool + unpooled).max(peaks.whole);
    }
    peaks
}

/// Returns the makespan: each time step takes as long as its slowest operator.
fn verify_by_time_steps(graph: &Graph, plan: &Plan, schedule: &Schedule) -> Result<u64, PlanViolation> {
    check_length("time_steps", graph.operators().len(), schedule.time_steps.len())?;
    let step: Vec<usize> = schedule.time_steps.iter().map(|&step| step as usize).collect();
    // In the plan's order steps never fall and never leave one out; no stream runs two operators in
    // one.
    let mut busy = vec![None; plan.settings.streams as usize];
    let mut begun = 0;
    for &id in &plan.order {
        let at = step[id.index()];
        if at == begun {
            begun += 1;
        }
        let taken = busy[schedule.streams[id.index()] as usize].replace(at) == Some(at);
        if at + 1 != begun || taken {
            let time_step = schedule.time_steps[id.index()];
            return Err(PlanViolation::TimeStep { site: site(graph, id), time_step });
        }
    }
    let runs_before = |first: OperatorId, second: OperatorId| step[first.index()] < step[second.index()];
    check_constraints(graph, runs_before)?;
    check_offsets(graph, plan)?;
    let pairs = check_reuse(graph, plan, runs_before)?;
    let lives = Lives::new(graph, &step);
    check_overlaps(graph, plan, &lives, &pairs)?;
    check_figures(graph, graph, plan, lives.peaks(graph, &pairs))?;
    Ok(makespan_ns(&plan.times_ns(graph)))
}
