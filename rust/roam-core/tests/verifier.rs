//! The verifier catches every kind of fault, and refuses nothing else.

use crate::common::corruptions::{Corruption, catch_each, pick};
use crate::common::{SETTINGS, peaks_by_definition, random_graph, with_total};
use roam_core::graph::{Graph, OperatorId, Residency, ReusePair, TensorId};
use roam_core::optimize::{Control, optimize};
use roam_core::plan::{Exact, ExactReport, ExactStatus, Plan, Settings, Status};
use roam_core::rng::Random;
use roam_core::verify::verify;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Steps at which a tensor is live in an order, both ends inclusive; `None` for persistent ones.
fn live_steps(graph: &Graph, order: &[OperatorId], tensor: TensorId) -> Option<(usize, usize)> {
    let step_of = |id: OperatorId| order.iter().position(|&other| other == id).expect("a permutation");
    let created = graph.creator(tensor).map(step_of);
    let last = graph.users(tensor).iter().map(|&user| step_of(user)).max();
    match graph.tensor(tensor).residency {
        Residency::Persistent => None,
        Residency::Leaves => created.map(|from| (from, order.len() - 1)),
        _ => Some((created.unwrap_or(0), last.or(created).unwrap_or(0))),
    }
}

/// Two pool tensors of non-zero size, live at one step, that no used reuse pair connects there.
fn live_together(graph: &Graph, plan: &Plan) -> Vec<(TensorId, TensorId)> {
    let ids: Vec<TensorId> = (0..graph.tensors().len() as u32)
        .map(TensorId)
        .filter(|&id| plan.offsets[id.index()].is_some() && graph.counted_bytes(id) > 0)
        .collect();
    let steps: BTreeMap<TensorId, (usize, usize)> =
        ids.iter().map(|&id| (id, live_steps(graph, &plan.order, id).expect("in the pool"))).collect();
    let mut together = Vec::new();
    for (at, &a) in ids.iter().enumerate() {
        for &b in &ids[at + 1..] {
            let ((a_first, a_last), (b_first, b_last)) = (steps[&a], steps[&b]);
            let paired = plan.reuse.iter().any(|pair| [(a, b), (b, a)].contains(&(pair.input, pair.output)));
            if a_first <= b_last && b_first <= a_last && !paired {
                together.push((a, b));
            }
        }
    }
    together
}

fn edited(plan: &Plan, edit: impl FnOnce(&mut Plan)) -> Plan {
    let mut plan = plan.clone();
    edit(&mut plan);
    plan
}

fn pooled_pairs(plan: &Plan) -> Vec<ReusePair> {
    plan.reuse.iter().copied().filter(|pair| plan.offsets[pair.input.index()].is_some()).collect()
}

fn pool_tensors(graph: &Graph, plan: &Plan, in_pool: bool) -> Vec<usize> {
    (0..graph.tensors().len()).filter(|&at| plan.offsets[at].is_some() == in_pool).collect()
}

const CORRUPTIONS: [(&str, Corruption); 27] = [
    ("operator moved before what it waits for", |graph, plan, random| {
        let waiting: Vec<usize> =
            (0..plan.order.len()).filter(|&step| !graph.predecessors(plan.order[step]).is_empty()).collect();
        let step = pick(&waiting, random)?;
        let id = plan.order[step];
        let before = pick(graph.predecessors(id), random)?;
        let plan = edited(plan, |plan| {
            plan.order.remove(step);
            let to = plan.order.iter().position(|&other| other == before).expect("present");
            plan.order.insert(to, id);
        });
        Some((plan, &["read_too_early", "mutated_too_early", "sequence_broken", "control_broken"]))
    }),
    ("operator missing", |_, plan, random| {
        let id = pick(&plan.order, random)?;
        Some((edited(plan, |plan| plan.order.retain(|&other| other != id)), &["operator_missing"]))
    }),
    ("operator doubled", |_, plan, random| {
        let id = pick(&plan.order, random)?;
        let to = random.below(plan.order.len() as u64 + 1) as usize;
        Some((edited(plan, |plan| plan.order.insert(to, id)), &["operator_doubled"]))
    }),
    ("operator unknown", |graph, plan, _| {
        let unknown = OperatorId(graph.operators().len() as u32);
        Some((edited(plan, |plan| plan.order.push(unknown)), &["unknown_operator"]))
    }),
    ("live tensors overlapped", |graph, plan, random| {
        let (a, b) = pick(&live_together(graph, plan), random)?;
        let plan = edited(plan, |plan| plan.offsets[a.index()] = plan.offsets[b.index()]);
        // Moving the topmost tensor changes the pool; a partner by reuse is left behind.
        Some((plan, &["overlap", "figure", "misaligned", "outside_pool", "reuse_offsets"]))
    }),
    ("offset beyond the pool", |graph, plan, random| {
        let sized = |&at: &usize| graph.counted_bytes(TensorId(at as u32)) > 0;
        let tensors: Vec<usize> = pool_tensors(graph, plan, true).into_iter().filter(sized).collect();
        let at = pick(&tensors, random)?;
        let far = if random.once_in(2) { plan.pool_bytes.next_multiple_of(128) } else { u64::MAX - 127 };
        Some((edited(plan, |plan| plan.offsets[at] = Some(far)), &["outside_pool"]))
    }),
    ("offset misaligned", |graph, plan, random| {
        let at = pick(&pool_tensors(graph, plan, true), random)?;
        let aligned = graph.alignment_bytes().max(graph.tensors()[at].alignment_bytes) > 1;
        let off = || edited(plan, |plan| plan.offsets[at] = plan.offsets[at].map(|offset| offset + 1));
        aligned.then(|| (off(), &["misaligned"][..]))
    }),
    ("offset missing", |graph, plan, random| {
        let at = pick(&pool_tensors(graph, plan, true), random)?;
        Some((edited(plan, |plan| plan.offsets[at] = None), &["offset_missing"]))
    }),
    ("offset of an unpooled tensor", |graph, plan, random| {
        let at = pick(&pool_tensors(graph, plan, false), random)?;
        Some((edited(plan, |plan| plan.offsets[at] = Some(0)), &["offset_unexpected"]))
    }),
    ("one offset too many", |_, plan, _| Some((edited(plan, |plan| plan.offsets.push(None)), &["offset_count"]))),
    ("reuse pair forgotten", |graph, plan, random| {
        let pair = pick(&pooled_pairs(plan), random)?;
        assert!(graph.counted_bytes(pair.input) > 0, "reuse of nothing saves nothing");
        Some((edited(plan, |plan| plan.reuse.retain(|&other| other != pair)), &["overlap"]))
    }),
    ("reuse pair doubled", |_, plan, random| {
        let pair = pick(&plan.reuse, random)?;
        Some((edited(plan, |plan| plan.reuse.push(pair)), &["reuse_doubled"]))
    }),
    ("reuse pair turned round", |_, plan, random| {
        let at = random.below(plan.reuse.len() as u64) as usize;
        let turned = || {
            edited(plan, |plan| {
                let pair = &mut plan.reuse[at];
                std::mem::swap(&mut pair.input, &mut pair.output);
            })
        };
        (!plan.reuse.is_empty()).then(|| (turned(), &["reuse_not_permitted"][..]))
    }),
    ("reuse of a tensor that is used later", |graph, plan, random| {
        let end = |id| live_steps(graph, &plan.order, id).map(|(_, last)| last);
        let start = |id| live_steps(graph, &plan.order, id).map(|(first, _)| first);
        let early: Vec<_> = graph
            .operators()
            .iter()
            .flat_map(|operator| operator.reuse.iter().copied())
            .filter(|pair| end(pair.input) > start(pair.output))
            .filter(|pair| plan.reuse.iter().all(|used| used.input != pair.input && used.output != pair.output))
            .collect();
        let pair = pick(&early, random)?;
        Some((edited(plan, |plan| plan.reuse.push(pair)), &["reuse_of_live"]))
    }),
    ("reuse pair apart", |graph, plan, random| {
        let pair = pick(&pooled_pairs(plan), random)?;
        let plan = edited(plan, |plan| {
            plan.pool_bytes = (2 * plan.pool_bytes).next_multiple_of(128) + graph.counted_bytes(pair.output);
            plan.offsets[pair.output.index()] = Some(plan.pool_bytes - graph.counted_bytes(pair.output));
        });
        Some((plan, &["reuse_offsets"]))
    }),
    ("reuse though off", |_, plan, _| {
        let off = || edited(plan, |plan| plan.settings.reuse = false);
        (!plan.reuse.is_empty()).then(|| (off(), &["reuse_off"][..]))
    }),
    ("wrong figure", |_, plan, random| {
        let change = if random.once_in(2) { 1u64 } else { 1u64.wrapping_neg() };
        let which = random.below(7);
        let plan = edited(plan, |plan| {
            let figure = match which {
                0 => &mut plan.program_order_peak_bytes,
                1 => &mut plan.peak_bytes,
                2 => &mut plan.pool_peak_bytes,
                3 => &mut plan.pool_bytes,
                4 => &mut plan.outside_bytes,
                5 => &mut plan.persistent_bytes,
                _ => &mut plan.total_bytes,
            };
            *figure = figure.wrapping_add(change);
        });
        Some((plan, &["figure", "outside_pool"]))
    }),
    ("bound above the peak", |_, plan, _| {
        Some((edited(plan, |plan| plan.lower_bound_bytes = plan.peak_bytes + 1), &["bound_above_peak"]))
    }),
    ("total's bound above the total", |_, plan, _| {
        Some((edited(plan, |plan| plan.total_lower_bound_bytes = plan.total_bytes + 1), &["total_bound"]))
    }),
    ("total's bound below the peak's", |_, plan, _| {
        let least = plan.lower_bound_bytes + plan.persistent_bytes;
        let below = || edited(plan, |plan| plan.total_lower_bound_bytes = least - 1);
        (least > 0).then(|| (below(), &["total_bound"][..]))
    }),
    ("bound without its operator", |_, plan, _| {
        let without = || edited(plan, |plan| plan.bound_operator = None);
        (plan.lower_bound_bytes > 0).then(|| (without(), &["bound_operator"][..]))
    }),
    ("status contradicted", |_, plan, _| {
        let status = if plan.status == Status::Optimal { Status::Feasible } else { Status::Optimal };
        Some((edited(plan, |plan| plan.status = status), &["status"]))
    }),
    ("integer programs contradicted", |graph, plan, random| {
        let is_proved = plan.status == Status::Optimal;
        let lost = || Some("lost".to_owned());
        let report = |status, programs, gains, failed, timed_out, reason| ExactReport {
            status,
            programs,
            gains,
            failed,
            timed_out,
            reason,
        };
        let told = |report: ExactReport| edited(plan, |plan| plan.exact = report);
        let without = if is_proved { ExactStatus::NotNeeded } else { ExactStatus::NotTried };
        for consistent in [
            report(without, 0, 0, 0, 0, None),
            report(ExactStatus::TooLarge, 0, 0, 0, 0, None),
            report(ExactStatus::Unavailable, 0, 0, 0, 0, lost()),
            report(ExactStatus::Used, 3, 1, 1, 1, lost()),
            report(ExactStatus::NoAnswer, 2, 0, 1, 1, lost()),
        ] {
            verify(graph, &told(consistent)).expect("nothing contradicts it");
        }
        let other = if is_proved { ExactStatus::NotTried } else { ExactStatus::NotNeeded };
        let contradicted = [
            report(other, 0, 0, 0, 0, None),
            report(ExactStatus::Off, 0, 0, 0, 0, None),
            report(without, 1, 0, 0, 0, None),
            report(ExactStatus::TooLarge, 1, 0, 0, 0, None),
            report(ExactStatus::Used, 0, 0, 0, 0, None),
            report(ExactStatus::Used, 2, 0, 1, 1, lost()),
            report(ExactStatus::Used, 2, 2, 1, 0, lost()),
            report(ExactStatus::Used, 2, 0, 1, 0, None),
            report(ExactStatus::Used, 2, 0, 0, 1, lost()),
            report(ExactStatus::NoAnswer, 2, 0, 1, 0, lost()),
            report(ExactStatus::NoAnswer, 0, 0, 0, 0, None),
            report(ExactStatus::Unavailable, 0, 0, 0, 0, None),
        ];
        let at = random.below(contradicted.len() as u64) as usize;
        Some((told(contradicted[at].clone()), &["exact"]))
    }),
    ("programs though off", |_, plan, _| Some((edited(plan, |plan| plan.settings.exact = Exact::Off), &["exact"]))),
    ("digest of another graph", |_, plan, _| {
        Some((edited(plan, |plan| plan.graph_digest.replace_range(0..1, "x")), &["graph_digest"]))
    }),
    ("an estimate of something else", |_, plan, _| {
        Some((edited(plan, |plan| plan.estimate.push_str("guessed")), &["estimate"]))
    }),
    ("two streams", |_, plan, _| Some((edited(plan, |plan| plan.settings.streams = 2), &["streams"]))),
];

#[test]
fn every_corruption_is_caught() {
    catch_each(&CORRUPTIONS, 100, &mut Random::new(4), 1500, |_, random| {
        let graph = random_graph(random, 12);
        let plan = optimize(&graph, &SETTINGS, &Control::default()).expect("a plan");
        (graph, plan)
    });
}

/// Program order with each pool tensor in the smallest gap that holds it when it is made, from the
/// definition.
fn allocated(graph: &Graph, plan: &Plan) -> Plan {
    let order = graph.program_order().to_vec();
    let mut offsets: Vec<Option<u64>> = plan.offsets.iter().map(|offset| offset.map(|_| 0)).collect();
    let mut made: Vec<(TensorId, (usize, usize))> = (0..offsets.len() as u32)
        .map(TensorId)
        .filter(|&id| offsets[id.index()].is_some() && graph.counted_bytes(id) > 0)
        .map(|id| (id, live_steps(graph, &order, id).expect("in the pool")))
        .collect();
    let alignment = |id: TensorId| graph.alignment_bytes().max(graph.tensor(id).alignment_bytes);
    made.sort_by_key(|&(id, (first, last))| (first, Reverse((graph.counted_bytes(id), alignment(id))), last));
    for at in 0..made.len() {
        let (id, (first, _)) = made[at];
        let alive = made[..at].iter().filter(|(_, (_, last))| *last >= first);
        let span = |id: TensorId| {
            let offset = offsets[id.index()].expect("in the pool");
            (offset, offset + graph.counted_bytes(id))
        };
        let mut taken: Vec<(u64, u64)> = alive.map(|&(other, _)| span(other)).collect();
        taken.sort_unstable();
        let begins = [0].into_iter().chain(taken.iter().map(|&(_, end)| end));
        let ends = taken.iter().map(|&(begin, _)| begin).chain([u64::MAX]);
        let fitting = begins.zip(ends).filter_map(|(begin, end)| {
            let offset = begin.next_multiple_of(alignment(id));
            (offset + graph.counted_bytes(id) <= end).then_some((end - begin, offset))
        });
        offsets[id.index()] = Some(fitting.min().expect("there is room at the end").1);
    }
    let peaks = peaks_by_definition(graph, &order, false);
    let end = |id: u32| offsets[id as usize].map(|offset| offset + graph.counted_bytes(TensorId(id)));
    let pool_bytes = (0..offsets.len() as u32).filter_map(end).max().unwrap_or(0);
    with_total(Plan {
        order,
        offsets,
        reuse: Vec::new(),
        peak_bytes: peaks.whole,
        pool_peak_bytes: peaks.pool,
        outside_bytes: peaks.unpooled,
        pool_bytes,
        ..plan.clone()
    })
}

/// What an ordinary allocator makes of program order is the most that a plan may take in all, to
/// the byte.
#[test]
fn a_plan_may_take_as_much_as_program_order_and_no_more() {
    let mut random = Random::new(6);
    let (mut wasteful, mut refused) = (0, 0);
    for _ in 0..1500 {
        let graph = random_graph(&mut random, 24);
        let plan = optimize(&graph, &SETTINGS, &Control::default()).expect("a plan");
        let program = allocated(&graph, &plan);
        verify(&graph, &program).expect("as much as program order");
        assert!(plan.total_bytes <= program.total_bytes);
        wasteful += u32::from(program.pool_bytes > program.pool_peak_bytes);
        let highest = program.offsets.iter().zip(0..).filter_map(|(offset, at)| Some(((*offset)?, TensorId(at))));
        let end = |&(offset, id): &(u64, TensorId)| offset + graph.counted_bytes(id);
        let Some((offset, id)) = highest.max_by_key(end).filter(|at| end(at) > 0) else { continue };
        let more = graph.alignment_bytes().max(graph.tensor(id).alignment_bytes);
        let above = with_total(edited(&program, |plan| {
            plan.offsets[id.index()] = Some(offset + more);
            plan.pool_bytes += more;
        }));
        assert_eq!(verify(&graph, &above).expect_err("more than program order").code(), "worse_than_program_order");
        refused += 1;
    }
    assert!(wasteful > 100 && refused > 1000, "{wasteful} with waste, {refused} refused");
}

/// Random offsets: refused as an overlap exactly where comparing all pairs finds one.
#[test]
fn overlaps_are_found_exactly() {
    let mut random = Random::new(5);
    let (mut refused, mut accepted) = (0, 0);
    for round in 0..4000 {
        let graph = random_graph(&mut random, 10);
        let settings = Settings { reuse: round % 2 == 0, ..SETTINGS };
        let mut plan = optimize(&graph, &settings, &Control::default()).expect("a plan");
        let room = [1, 3, 6][random.below(3) as usize] * plan.pool_bytes / 128;
        let mut pool_bytes = 0;
        for at in 0..plan.offsets.len() {
            // Outputs that reuse come after their inputs in the graph's numbering.
            let id = TensorId(at as u32);
            if plan.offsets[at].is_some() {
                let input = plan.reuse.iter().find(|pair| pair.output == id).map(|pair| pair.input);
                let offset = match input {
                    Some(input) => plan.offsets[input.index()].expect("step-local"),
                    None => 128 * random.below(room + 1),
                };
                plan.offsets[at] = Some(offset);
                pool_bytes = pool_bytes.max(offset + graph.counted_bytes(id));
            }
        }
        plan.pool_bytes = pool_bytes;
        let plan = with_total(plan);
        // Alignments in a chain may differ; such offsets are refused for another reason.
        let misaligned = (0..plan.offsets.len()).any(|at| {
            let alignment = graph.alignment_bytes().max(graph.tensors()[at].alignment_bytes);
            plan.offsets[at].is_some_and(|offset| offset % alignment != 0)
        });
        assert!(!misaligned);
        let overlaps = live_together(&graph, &plan).iter().any(|&(a, b)| {
            let span = |id: TensorId| {
                let offset = plan.offsets[id.index()].expect("in the pool");
                (offset, offset + graph.counted_bytes(id))
            };
            let ((a_from, a_to), (b_from, b_to)) = (span(a), span(b));
            a_from < b_to && b_from < a_to
        });
        match verify(&graph, &plan) {
            Ok(()) => {
                assert!(!overlaps);
                accepted += 1;
            }
            Err(violation) => {
                // Offsets without an overlap may still take more than program order.
                let expected = if overlaps { "overlap" } else { "worse_than_program_order" };
                assert_eq!(violation.code(), expected, "{violation}");
                refused += u32::from(overlaps);
            }
        }
    }
    assert!(refused > 400 && accepted > 400, "{refused} refused, {accepted} accepted");
}
