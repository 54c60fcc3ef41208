//! Executes plans of several streams as a device would, under random timings: every stream is a
//! queue that runs its operators one after another, and an operator waits for what the plan's waits
//! name and for nothing else.

use roam_core::graph::{Graph, OperatorId, Residency, TensorId};
use roam_core::plan::Plan;
use roam_core::rng::Random;
use std::collections::BTreeMap;

/// What went wrong in one execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The second operator started before the first had completed, against a constraint.
    Constraint(OperatorId, OperatorId),
    /// Two tensors were live at once and shared bytes.
    Overlap(TensorId, TensorId),
    /// So many unpooled bytes were live, more than the plan says.
    Unpooled(u64),
}

/// One execution: durations and delays are drawn so that now this, now that stream is far ahead.
pub(crate) fn execute(graph: &Graph, plan: &Plan, random: &mut Random) -> Result<(), Fault> {
    let schedule = plan.schedule.as_ref().expect("a plan of several streams");
    let count = graph.operators().len();
    let mut waits: Vec<Vec<OperatorId>> = vec![Vec::new(); count];
    for &(before, after) in &schedule.syncs {
        waits[after.index()].push(before);
    }
    let pace: Vec<u64> = (0..plan.settings.streams).map(|_| [1, 3, 50, 1000][random.below(4) as usize]).collect();
    let (mut start, mut end) = (vec![0u64; count], vec![0u64; count]);
    let mut free = vec![0u64; plan.settings.streams as usize];
    for &id in &plan.order {
        let stream = schedule.streams[id.index()] as usize;
        let ready = waits[id.index()].iter().map(|before| end[before.index()]).max().unwrap_or(0).max(free[stream]);
        let delay = if random.once_in(4) { random.below(pace[stream]) } else { 0 };
        start[id.index()] = ready + delay;
        end[id.index()] = ready + delay + 1 + random.below(pace[stream]);
        free[stream] = end[id.index()];
    }
    for (index, id) in (0..count).zip((0..).map(OperatorId)) {
        if let Some(&before) = graph.predecessors(id).iter().find(|before| end[before.index()] > start[index]) {
            return Err(Fault::Constraint(before, id));
        }
    }
    check_memory(graph, plan, &start, &end)
}

/// Walks through time: at equal times completions come before starts.
fn check_memory(graph: &Graph, plan: &Plan, start: &[u64], end: &[u64]) -> Result<(), Fault> {
    let last = end.iter().copied().max().unwrap_or(0);
    // (time, whether it begins, tensor); and unpooled bytes.
    let mut events: Vec<(u64, bool, TensorId)> = Vec::new();
    let mut unpooled: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut hold = |from: u64, to: u64, bytes: u64| {
        unpooled.entry(from).or_default().0 += bytes;
        unpooled.entry(to).or_default().1 += bytes;
    };
    for id in (0..graph.tensors().len() as u32).map(TensorId) {
        let created = graph.creator(id).map_or(0, |creator| start[creator.index()]);
        let made = graph.creator(id).map(|creator| end[creator.index()]);
        let dead = graph.users(id).iter().map(|user| end[user.index()]).max().or(made).unwrap_or(0);
        match graph.tensor(id).residency {
            Residency::Persistent => {}
            Residency::Unpooled => hold(created, dead, graph.counted_bytes(id)),
            Residency::Enters => hold(0, dead, graph.counted_bytes(id)),
            Residency::Leaves => hold(created, last + 1, graph.counted_bytes(id)),
            Residency::StepLocal if graph.counted_bytes(id) > 0 => {
                events.push((created, true, id));
                // A tensor whose memory is taken over hands it on when the operator that does so
                // starts.
                let heir = plan.reuse.iter().find(|pair| pair.input == id).and_then(|pair| graph.creator(pair.output));
                events.push((heir.map_or(dead, |heir| start[heir.index()]), false, id));
                if let Some(heir) = heir {
                    let late =
                        graph.users(id).iter().find(|&&user| user != heir && end[user.index()] > start[heir.index()]);
                    if let Some(&late) = late {
                        return Err(Fault::Constraint(late, heir));
                    }
                }
            }
            Residency::StepLocal => {}
        }
    }
    for (index, id) in (0..start.len()).zip((0..).map(OperatorId)) {
        hold(start[index], end[index], graph.workspace_bytes(id));
    }
    let mut held = 0;
    for (came, went) in unpooled.into_values() {
        held = held + came - went;
        if held > plan.outside_bytes {
            return Err(Fault::Unpooled(held));
        }
    }
    events.sort();
    let mut live: BTreeMap<u64, (u64, TensorId)> = BTreeMap::new();
    for (_, begins, id) in events {
        let from = plan.offsets[id.index()].expect("step-local");
        if !begins {
            live.remove(&from);
            continue;
        }
        let to = from + graph.counted_bytes(id);
        let below = live.range(..=from).next_back().filter(|&(_, &(end, _))| end > from);
        let above = live.range(from..to).next();
        if let Some((_, &(_, other))) = below.or(above) {
            return Err(Fault::Overlap(id, other));
        }
        live.insert(from, (to, id));
    }
    Ok(())
}
