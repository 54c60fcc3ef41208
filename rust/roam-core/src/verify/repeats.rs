//! Whether a plan in which operators run again makes the very values that the step makes.
//!
//! The graph of the plan's sequence comes from the planner's own code and is not believed: every
//! run is compared with the operator that it repeats, and then the runs are followed in the plan's
//! order, each tensor holding a value that is named by what it is an instance of and by how many
//! operators have changed it.

use super::checks::steps;
use super::lives::{name, site, tensors};
use super::violation::PlanViolation;
use crate::cost;
use crate::expansion::{Expanded, expand};
use crate::graph::{Graph, Operator, OperatorId, Residency, ReusePair, Sequence, TensorId};
use crate::plan::{Plan, Recomputation};
use std::collections::{BTreeMap, BTreeSet};

/// The graph of the plan's sequence, checked, and the step of every run; its constraints, lifetimes
/// and layout are not.
pub(super) fn expanded(
    graph: &Graph,
    plan: &Plan,
    recomputation: &Recomputation,
) -> Result<(Graph, Vec<usize>), PlanViolation> {
    let expanded = expand(graph, &recomputation.sequence)?;
    let step = steps(&expanded.graph, &plan.order)?;
    check_tensors(graph, &expanded)?;
    check_runs(graph, &expanded)?;
    check_waits(graph, &expanded)?;
    check_values(graph, &expanded, &plan.order)?;
    check_claims(graph, plan, recomputation)?;
    Ok((expanded.graph, step))
}

fn differs(graph: &Graph, id: OperatorId, what: &'static str) -> PlanViolation {
    PlanViolation::RunDiffers { site: site(graph, id), what }
}

/// The original operator of a run.
fn origin(expanded: &Expanded, run: usize) -> OperatorId {
    expanded.operator_of[run]
}

/// The original tensors are there as they were, and each further instance is as large, and lies
/// where its original does.
fn check_tensors(graph: &Graph, expanded: &Expanded) -> Result<(), PlanViolation> {
    let first = OperatorId(0);
    if expanded.tensor_of.len() != expanded.graph.tensors().len() || graph.tensors().len() > expanded.tensor_of.len() {
        return Err(differs(graph, first, "tensors"));
    }
    for instance in tensors(&expanded.graph) {
        let of = expanded.tensor_of[instance.index()];
        let is_original = instance.index() < graph.tensors().len();
        let (one, other) = (expanded.graph.tensor(instance), graph.tensor(of));
        let is_same = (one.size_bytes, one.residency, one.alignment_bytes)
            == (other.size_bytes, other.residency, other.alignment_bytes);
        let may_be_two = !matches!(other.residency, Residency::Persistent | Residency::Enters | Residency::Leaves);
        if !is_same || (is_original && of != instance) || (!is_original && !may_be_two) {
            return Err(differs(graph, graph.creator(of).unwrap_or(first), "tensors"));
        }
    }
    Ok(())
}

/// Each run is of its operator's kind, and touches instances of what the operator touches; runs of
/// one sequence are in program order; what runs again may do so.
fn check_runs(graph: &Graph, expanded: &Expanded) -> Result<(), PlanViolation> {
    let mut runs = vec![0u32; graph.operators().len()];
    let mut touching_all = runs.clone();
    let mut in_sequence = runs.clone();
    let mut last: [Option<u32>; 2] = [None; 2];
    for (run, operator) in expanded.graph.operators().iter().enumerate() {
        let id = origin(expanded, run);
        let original = graph.operator(id);
        let is_same = (&operator.name, operator.phase, operator.workspace_bytes, operator.flops, operator.time_ns)
            == (&original.name, original.phase, original.workspace_bytes, original.flops, original.time_ns)
            && (operator.region, operator.link) == (original.region, original.link)
            && (operator.sequence == original.sequence || operator.sequence.is_none());
        if !is_same || operator.position as usize != run {
            return Err(differs(graph, id, "properties"));
        }
        let of = |list: &[TensorId]| -> Vec<TensorId> { list.iter().map(|t| expanded.tensor_of[t.index()]).collect() };
        let without = |list: &[TensorId]| -> Vec<TensorId> {
            list.iter().filter(|tensor| !original.first_only.contains(tensor)).copied().collect()
        };
        let (reads, mutates) = (of(&operator.reads), of(&operator.mutates));
        if reads == original.reads && mutates == original.mutates {
            touching_all[id.index()] += 1;
        } else if reads != without(&original.reads) || mutates != without(&original.mutates) {
            return Err(differs(graph, id, "inputs"));
        }
        if of(&operator.creates) != original.creates {
            return Err(differs(graph, id, "outputs"));
        }
        let permitted: BTreeSet<ReusePair> = original.reuse.iter().copied().collect();
        let is_permitted = |pair: &ReusePair| {
            let (input, output) = (expanded.tensor_of[pair.input.index()], expanded.tensor_of[pair.output.index()]);
            permitted.contains(&ReusePair { input, output })
        };
        if !operator.reuse.iter().all(is_permitted) {
            return Err(differs(graph, id, "reuse"));
        }
        in_sequence[id.index()] += u32::from(operator.sequence.is_some());
        if let Some(sequence) = operator.sequence {
            let last: &mut Option<u32> = &mut last[usize::from(sequence == Sequence::Collective)];
            if last.replace(original.position).is_some_and(|before| before >= original.position) {
                return Err(PlanViolation::RunsAgain { site: site(graph, id) });
            }
        }
        runs[id.index()] += 1;
        if runs[id.index()] > 1 && !original.repeatable {
            return Err(PlanViolation::RunsAgain { site: site(graph, id) });
        }
    }
    for (index, (&count, &all)) in runs.iter().zip(&touching_all).enumerate() {
        let id = OperatorId(index as u32);
        let once = if graph.operator(id).first_only.is_empty() { count } else { 1 };
        if count == 0 {
            return Err(PlanViolation::OperatorMissing { site: site(graph, id) });
        }
        let is_in_sequence = graph.operator(id).sequence.is_some();
        if all != once || in_sequence[index] != u32::from(is_in_sequence) {
            return Err(PlanViolation::RunsAgain { site: site(graph, id) });
        }
    }
    Ok(())
}

/// Each run waits for a run of all that its operator waits for; where that one makes a view of what
/// both use, it is a view of the same instance.
fn check_waits(graph: &Graph, expanded: &Expanded) -> Result<(), PlanViolation> {
    let mut waits: BTreeMap<(OperatorId, OperatorId), Vec<OperatorId>> = BTreeMap::new();
    for &(before, after) in expanded.graph.control() {
        waits.entry((after, origin(expanded, before.index()))).or_default().push(before);
    }
    let mut before: Vec<Vec<OperatorId>> = vec![Vec::new(); graph.operators().len()];
    for &(first, second) in graph.control() {
        before[second.index()].push(first);
    }
    let touches = |operator: &Operator| -> BTreeSet<TensorId> {
        operator.reads.iter().chain(&operator.mutates).copied().collect()
    };
    // `check_runs` has found that one run touches everything, and others all but what is first-only.
    let touches_originally = |operator: &Operator, count: usize| -> BTreeSet<TensorId> {
        let mut all = touches(operator);
        if count < all.len() {
            operator.first_only.iter().for_each(|tensor| _ = all.remove(tensor));
        }
        all
    };
    for (run, operator) in expanded.graph.operators().iter().enumerate() {
        let id = origin(expanded, run);
        let used = touches(operator);
        let used_originally = touches_originally(graph.operator(id), used.len());
        for &waited in &before[id.index()] {
            let maker = graph.operator(waited);
            let is_view = maker.creates.is_empty() && maker.mutates.is_empty();
            let is_served = |&by: &OperatorId| {
                let views = &expanded.graph.operator(by).reads;
                let fits = |view: &TensorId| {
                    used.contains(view) || !used_originally.contains(&expanded.tensor_of[view.index()])
                };
                !is_view || views.iter().all(fits)
            };
            if !waits.get(&(OperatorId(run as u32), waited)).is_some_and(|runs| runs.iter().all(is_served)) {
                return Err(PlanViolation::RunDoesNotWait { site: site(graph, id), before: site(graph, waited) });
            }
        }
    }
    Ok(())
}

/// Follows the runs in the plan's order: each finds the values that its operator finds in program
/// order, and what outlives the step has its last value at the end. So has what a collective
/// changes, up to the change by the operator that waits for it: that one changes it next. What a
/// collective makes is waited for in the same way, if the first to use it changes it.
fn check_values(graph: &Graph, expanded: &Expanded, order: &[OperatorId]) -> Result<(), PlanViolation> {
    let mut by_position: Vec<OperatorId> = (0..graph.operators().len() as u32).map(OperatorId).collect();
    by_position.sort_unstable_by_key(|&id| graph.operator(id).position);
    // How often each tensor has been changed when an operator runs in program order.
    let mut changes = vec![0u32; graph.tensors().len()];
    let mut found: Vec<BTreeMap<TensorId, u32>> = vec![BTreeMap::new(); graph.operators().len()];
    for &id in &by_position {
        let operator = graph.operator(id);
        let touched = operator.reads.iter().chain(&operator.mutates);
        found[id.index()] = touched.map(|&tensor| (tensor, changes[tensor.index()])).collect();
        for tensor in &operator.mutates {
            changes[tensor.index()] += 1;
        }
    }
    let is_changed_next =
        |id: TensorId| graph.users(id).first().is_some_and(|&user| graph.operator(user).mutates.contains(&id));
    let is_there = |id: TensorId| id.index() < graph.tensors().len() && graph.creator(id).is_none();
    let mut launched: BTreeMap<TensorId, OperatorId> = BTreeMap::new();
    let mut value: Vec<Option<u32>> = tensors(&expanded.graph).map(|id| is_there(id).then_some(0)).collect();
    for &run in order {
        let operator = expanded.graph.operator(run);
        let id = origin(expanded, run.index());
        let of = |tensor: &TensorId| expanded.tensor_of[tensor.index()];
        for tensor in operator.reads.iter().chain(&operator.mutates) {
            if value[tensor.index()] != found[id.index()].get(&of(tensor)).copied() {
                return Err(PlanViolation::RunUsesOther { site: site(graph, id), tensor: name(graph, of(tensor)) });
            }
        }
        for tensor in &operator.mutates {
            value[tensor.index()] = value[tensor.index()].map(|version| version + 1);
            let is_awaited = value[tensor.index()].is_some_and(|version| version < changes[of(tensor).index()]);
            match graph.operator(id).sequence {
                Some(Sequence::Collective) if is_awaited => launched.insert(*tensor, id),
                _ => launched.remove(tensor),
            };
        }
        for tensor in &operator.creates {
            if value[tensor.index()].replace(0).is_some() {
                return Err(PlanViolation::RunsAgain { site: site(graph, id) });
            }
            if graph.operator(id).sequence == Some(Sequence::Collective) && is_changed_next(of(tensor)) {
                launched.insert(*tensor, id);
            }
        }
    }
    if let Some((tensor, &id)) = launched.first_key_value() {
        let tensor = name(graph, expanded.tensor_of[tensor.index()]);
        return Err(PlanViolation::LaunchNotWaited { site: site(graph, id), tensor });
    }
    let outlives = |id: &TensorId| matches!(graph.tensor(*id).residency, Residency::Persistent | Residency::Leaves);
    for id in tensors(graph).filter(outlives) {
        if value[id.index()] != Some(changes[id.index()]) {
            let at = graph.users(id).last().copied().or(graph.creator(id)).unwrap_or(OperatorId(0));
            return Err(PlanViolation::RunUsesOther { site: site(graph, at), tensor: name(graph, id) });
        }
    }
    Ok(())
}

/// The figures of the extra runs.
fn check_claims(graph: &Graph, plan: &Plan, recomputation: &Recomputation) -> Result<(), PlanViolation> {
    super::checks::expect("step_ns", recomputation.step_ns, cost::serial_ns(graph))?;
    super::checks::expect("extra_ns", recomputation.extra_ns, cost::extra_ns(graph, &recomputation.sequence))?;
    if recomputation.least_extra_ns > recomputation.extra_ns {
        let (claimed, actual) = (recomputation.least_extra_ns, recomputation.extra_ns);
        return Err(PlanViolation::Figure { figure: "least_extra_ns", claimed, actual });
    }
    if recomputation.floor_bytes > plan.total_bytes {
        let (claimed, actual) = (recomputation.floor_bytes, plan.total_bytes);
        return Err(PlanViolation::Figure { figure: "floor_bytes", claimed, actual });
    }
    Ok(())
}
