//! The checks of a plan that are the same for one stream and for several.

use super::lives::{Lives, Pairs, Peaks, name, site, tensors};
use super::violation::PlanViolation;
use super::{exact, promise};
use crate::graph::{Graph, OperatorId, Residency, ReusePair, Sequence, TensorId};
use crate::plan::{Plan, Status};
use std::collections::{BTreeMap, BTreeSet};

/// Who touched a tensor last, as program order goes by.
#[derive(Clone, Default)]
struct Access {
    writer: Option<OperatorId>,
    /// The readers since the last write.
    readers: Vec<OperatorId>,
}

/// `runs_before` says whether the first operator has completed when the second one starts.
pub(super) fn check_constraints(
    graph: &Graph,
    runs_before: impl Fn(OperatorId, OperatorId) -> bool,
) -> Result<(), PlanViolation> {
    let mut by_position: Vec<OperatorId> = (0..graph.operators().len() as u32).map(OperatorId).collect();
    by_position.sort_unstable_by_key(|&id| graph.operator(id).position);

    let mut access = vec![Access::default(); graph.tensors().len()];
    let mut last_random: Option<OperatorId> = None;
    let mut last_collective: Option<OperatorId> = None;
    for &id in &by_position {
        let operator = graph.operator(id);
        for &tensor in &operator.reads {
            let known = &mut access[tensor.index()];
            if let Some(writer) = known.writer.filter(|&writer| !runs_before(writer, id)) {
                let (site, before) = (site(graph, id), site(graph, writer));
                return Err(PlanViolation::ReadTooEarly { site, before, tensor: name(graph, tensor) });
            }
            known.readers.push(id);
        }
        for &tensor in &operator.mutates {
            let known = &mut access[tensor.index()];
            // The operator may have been noted as a reader just above.
            let mut earlier = known.writer.iter().chain(known.readers.iter().filter(|&&reader| reader != id));
            if let Some(&before) = earlier.find(|&&earlier| !runs_before(earlier, id)) {
                let (site, before) = (site(graph, id), site(graph, before));
                return Err(PlanViolation::MutatedTooEarly { site, before, tensor: name(graph, tensor) });
            }
            known.writer = Some(id);
            known.readers.clear();
        }
        for &tensor in &operator.creates {
            access[tensor.index()].writer = Some(id);
        }
        let last = match operator.sequence {
            Some(Sequence::Random) => &mut last_random,
            Some(Sequence::Collective) => &mut last_collective,
            None => continue,
        };
        if let Some(before) = last.replace(id).filter(|&before| !runs_before(before, id)) {
            return Err(PlanViolation::SequenceBroken { site: site(graph, id), before: site(graph, before) });
        }
    }
    for &(before, after) in graph.control() {
        if !runs_before(before, after) {
            return Err(PlanViolation::ControlBroken { site: site(graph, after), before: site(graph, before) });
        }
    }
    Ok(())
}

pub(super) fn check_offsets(graph: &Graph, plan: &Plan) -> Result<(), PlanViolation> {
    if plan.offsets.len() != graph.tensors().len() {
        return Err(PlanViolation::OffsetCount { expected: graph.tensors().len(), found: plan.offsets.len() });
    }
    let mut pool_bytes = 0;
    for id in tensors(graph) {
        let tensor = graph.tensor(id);
        let is_local = tensor.residency == Residency::StepLocal;
        let offset = match plan.offsets[id.index()] {
            Some(offset) if is_local => offset,
            Some(_) => return Err(PlanViolation::OffsetUnexpected { tensor: name(graph, id) }),
            None if is_local => return Err(PlanViolation::OffsetMissing { tensor: name(graph, id) }),
            None => continue,
        };
        let alignment_bytes = graph.alignment_bytes().max(tensor.alignment_bytes);
        if offset % alignment_bytes != 0 {
            return Err(PlanViolation::Misaligned { tensor: name(graph, id), offset, alignment_bytes });
        }
        let size_bytes = graph.counted_bytes(id);
        match offset.checked_add(size_bytes).filter(|&end| end <= plan.pool_bytes) {
            Some(end) => pool_bytes = end.max(pool_bytes),
            None => {
                let (tensor, pool_bytes) = (name(graph, id), plan.pool_bytes);
                return Err(PlanViolation::OutsidePool { tensor, offset, size_bytes, pool_bytes });
            }
        }
    }
    expect("pool_bytes", plan.pool_bytes, pool_bytes)
}

/// `runs_before` as for [`check_constraints`].
pub(super) fn check_reuse(
    graph: &Graph,
    plan: &Plan,
    runs_before: impl Fn(OperatorId, OperatorId) -> bool,
) -> Result<Pairs, PlanViolation> {
    if !plan.settings.reuse && !plan.reuse.is_empty() {
        return Err(PlanViolation::ReuseOff);
    }
    let mut permitted: BTreeMap<ReusePair, OperatorId> = BTreeMap::new();
    for (operator, index) in graph.operators().iter().zip(0..) {
        permitted.extend(operator.reuse.iter().map(|&pair| (pair, OperatorId(index))));
    }
    // Per input that is reused: where, and by what.
    let mut reused: BTreeMap<TensorId, (OperatorId, TensorId)> = BTreeMap::new();
    let mut pairs = Pairs::new();
    for &pair in &plan.reuse {
        let named =
            |id: TensorId| graph.tensors().get(id.index()).map_or(format!("{}", id.0), |tensor| tensor.name.clone());
        let (input, output) = (named(pair.input), named(pair.output));
        let Some(&at) = permitted.get(&pair) else {
            return Err(PlanViolation::ReuseNotPermitted { input, output });
        };
        if reused.insert(pair.input, (at, pair.output)).is_some() {
            return Err(PlanViolation::ReuseDoubled { tensor: input });
        }
        if pairs.insert(pair.output, pair.input).is_some() {
            return Err(PlanViolation::ReuseDoubled { tensor: output });
        }
    }
    for (operator, index) in graph.operators().iter().zip(0..) {
        for &input in operator.reads.iter().chain(&operator.mutates) {
            let Some(&(at, output)) = reused.get(&input) else { continue };
            if at.0 != index && !runs_before(OperatorId(index), at) {
                let (input, output) = (name(graph, input), name(graph, output));
                return Err(PlanViolation::ReuseOfLive { site: site(graph, at), input, output });
            }
        }
    }
    for (&output, &input) in &pairs {
        if plan.offsets[input.index()] != plan.offsets[output.index()] {
            let (input, output) = (name(graph, input), name(graph, output));
            return Err(PlanViolation::ReuseOffsets { input, output });
        }
    }
    Ok(pairs)
}

/// Walks through the steps with the set of live tensors by offset; a newcomer needs to be compared
/// with its two neighbours only, since those in the set do not overlap each other.
pub(super) fn check_overlaps(graph: &Graph, plan: &Plan, lives: &Lives, pairs: &Pairs) -> Result<(), PlanViolation> {
    let mut born: Vec<Vec<TensorId>> = vec![Vec::new(); lives.order.len()];
    let mut dead: Vec<Vec<TensorId>> = vec![Vec::new(); lives.order.len() + 1];
    let handed_over: BTreeSet<TensorId> = pairs.values().copied().collect();
    for id in tensors(graph) {
        if let (Some(_), Some(first)) = (plan.offsets[id.index()], lives.first[id.index()]) {
            if graph.counted_bytes(id) > 0 {
                born[first].push(id);
                // A tensor whose memory is taken over goes when its successor comes.
                let gone = lives.last[id.index()] + usize::from(!handed_over.contains(&id));
                dead[gone].push(id);
            }
        }
    }
    let mut live: BTreeMap<u64, (u64, TensorId)> = BTreeMap::new();
    for (at, newcomers) in born.iter().enumerate() {
        for id in &dead[at] {
            if let Some(offset) = plan.offsets[id.index()] {
                live.remove(&offset);
            }
        }
        for &id in newcomers {
            let Some(offset) = plan.offsets[id.index()] else { continue };
            let end = offset + graph.counted_bytes(id);
            let below = live.range(..=offset).next_back().filter(|&(_, &(end_below, _))| end_below > offset);
            let above = live.range(offset..).next().filter(|&(&start_above, _)| start_above < end);
            if let Some((_, &(_, other))) = below.or(above) {
                let (tensor, other) = (name(graph, id), name(graph, other));
                return Err(PlanViolation::Overlap { tensor, other, site: site(graph, lives.order[at]) });
            }
            live.insert(offset, (end, id));
        }
    }
    Ok(())
}

pub(super) fn expect(figure: &'static str, claimed: u64, actual: u64) -> Result<(), PlanViolation> {
    if claimed == actual { Ok(()) } else { Err(PlanViolation::Figure { figure, claimed, actual }) }
}

/// The figures that follow from the peaks, and the claims that must go with them. `original` is the
/// step, and `graph` the same with what the plan runs again.
pub(super) fn check_figures(original: &Graph, graph: &Graph, plan: &Plan, peaks: Peaks) -> Result<(), PlanViolation> {
    let Peaks { whole: peak, pool: pool_peak, unpooled } = peaks;
    expect("pool_peak_bytes", plan.pool_peak_bytes, pool_peak)?;
    expect("outside_bytes", plan.outside_bytes, unpooled)?;
    expect("peak_bytes", plan.peak_bytes, peak)?;
    let program: Vec<usize> = original.operators().iter().map(|operator| operator.position as usize).collect();
    let program = Lives::new(original, &program);
    let program_peaks = program.peaks(original, &Pairs::new());
    expect("program_order_peak_bytes", plan.program_order_peak_bytes, program_peaks.whole)?;
    let is_persistent = |id: &TensorId| graph.tensor(*id).residency == Residency::Persistent;
    let persistent = tensors(graph).filter(is_persistent).map(|id| graph.counted_bytes(id)).sum();
    expect("persistent_bytes", plan.persistent_bytes, persistent)?;
    // The pool is not bounded by the builder's limit on all sizes: a hostile plan's sum may not
    // fit.
    let total = plan.pool_bytes.checked_add(unpooled + persistent);
    if total != Some(plan.total_bytes) {
        let (claimed, actual) = (plan.total_bytes, total.unwrap_or(u64::MAX));
        return Err(PlanViolation::Figure { figure: "total_bytes", claimed, actual });
    }

    // Nearly every plan takes no more than program order would without any waste in its pool.
    if plan.total_bytes > program_peaks.pool + program_peaks.unpooled + persistent {
        let program_order_total_bytes =
            promise::allocated_bytes(original, &program) + program_peaks.unpooled + persistent;
        if plan.total_bytes > program_order_total_bytes {
            let total_bytes = plan.total_bytes;
            return Err(PlanViolation::WorseThanProgramOrder { total_bytes, program_order_total_bytes });
        }
    }
    if plan.lower_bound_bytes > peak {
        return Err(PlanViolation::BoundAbovePeak { lower_bound_bytes: plan.lower_bound_bytes, peak_bytes: peak });
    }
    let bound_operator_is_known = match plan.bound_operator {
        Some(id) => id.index() < graph.operators().len(),
        None => plan.lower_bound_bytes == 0,
    };
    if !bound_operator_is_known {
        return Err(PlanViolation::BoundOperator);
    }
    let Plan { status, total_bytes, total_lower_bound_bytes, .. } = *plan;
    // The peak never exceeds pool and unpooled bytes together, so what bounds it bounds these too.
    let least = plan.lower_bound_bytes + persistent;
    if !(least..=total_bytes).contains(&total_lower_bound_bytes) {
        return Err(PlanViolation::TotalBound { total_lower_bound_bytes, least, total_bytes });
    }
    if (status == Status::Optimal) != (total_bytes == total_lower_bound_bytes) {
        return Err(PlanViolation::Status { status, total_bytes, total_lower_bound_bytes });
    }
    exact::check(plan)
}

/// The step of every operator, by id.
pub(super) fn steps(graph: &Graph, order: &[OperatorId]) -> Result<Vec<usize>, PlanViolation> {
    let mut step: Vec<Option<usize>> = vec![None; graph.operators().len()];
    for (at, &id) in order.iter().enumerate() {
        match step.get_mut(id.index()) {
            None => return Err(PlanViolation::UnknownOperator { operator: id.0 }),
            Some(Some(_)) => return Err(PlanViolation::OperatorDoubled { site: site(graph, id) }),
            Some(step) => *step = Some(at),
        }
    }
    step.into_iter()
        .enumerate()
        .map(|(index, at)| {
            at.ok_or_else(|| PlanViolation::OperatorMissing { site: site(graph, OperatorId(index as u32)) })
        })
        .collect()
}
