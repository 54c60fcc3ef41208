//! Plans of several streams: safe under every timing, as fast as asked for, never worse than
//! program order.

use crate::common::corruptions::{Corruption, catch_each, pick};
use crate::common::simulator::execute;
use crate::common::{SETTINGS, check_streams, random_graph, speed, swept, with_total};
use roam_core::graph::{Graph, OperatorId, Residency, ReusePair, TensorId};
use roam_core::optimize::{Control, OptimizeError, optimize};
use roam_core::plan::{Plan, Schedule, Settings, Status, StreamModel};
use roam_core::rng::Random;
use roam_core::stages::Prepared;
use roam_core::synthetic::{Transformer, transformer_step};
use roam_core::verify::verify;
use std::sync::atomic::Ordering;

fn planned(graph: &Graph, settings: &Settings) -> Plan {
    optimize(graph, settings, &Control::default()).expect("a plan")
}

fn syncs(plan: &Plan) -> &[(OperatorId, OperatorId)] {
    &plan.schedule.as_ref().expect("several streams").syncs
}

#[test]
fn plans_are_safe_under_every_timing() {
    let mut random = Random::new(21);
    let (mut faster, mut waiting) = (0, 0);
    for round in 0..200 {
        let graph = random_graph(&mut random, 40);
        let settings = Settings { streams: 2 + round % 3, reuse: round % 2 == 0, ..SETTINGS };
        let plan = check_streams(&graph, &settings, &mut random);
        faster += u32::from(speed(&plan) > 1.05);
        waiting += u32::from(!syncs(&plan).is_empty());
    }
    assert!(faster > 70 && waiting > 70, "{faster} plans are faster, {waiting} have waits");
}

/// The simulator would notice: without one of its waits nearly every plan fails under some timing.
#[test]
fn no_wait_is_needless() {
    let mut random = Random::new(22);
    let (mut tried, mut failed) = (0, 0);
    while tried < 60 {
        let graph = random_graph(&mut random, 30);
        let mut plan = planned(&graph, &Settings { streams: 2, ..SETTINGS });
        let count = syncs(&plan).len() as u64;
        if count == 0 {
            continue;
        }
        let schedule = plan.schedule.as_mut().expect("several streams");
        schedule.syncs.remove(random.below(count) as usize);
        verify(&graph, &plan).expect_err("a wait is missing");
        tried += 1;
        failed += u32::from((0..200).any(|_| execute(&graph, &plan, &mut random).is_err()));
    }
    assert!(failed * 10 >= tried * 9, "{failed} of {tried}");
}

#[test]
fn a_real_step_becomes_faster_within_the_bytes_of_program_order() {
    let graph = transformer_step(Transformer { layers: 4, ..Transformer::XL }).expect("a valid step");
    let program = Prepared::new(&graph, false).order("program").expect("a known order");
    let mut random = Random::new(23);
    let mut totals = Vec::new();
    for asked in [None, Some(1.1), Some(1.4)] {
        let plan = check_streams(&graph, &Settings { streams: 2, speed: asked, ..SETTINGS }, &mut random);
        assert!(speed(&plan) >= asked.unwrap_or(1.3), "{}", speed(&plan));
        assert!(plan.pool_bytes + plan.outside_bytes <= program.pool_peak_bytes() + program.unpooled_peak_bytes());
        let of_first = plan.schedule.expect("several streams").streams.iter().filter(|&&stream| stream == 0).count();
        assert!(of_first > 0 && of_first < graph.operators().len());
        totals.push(plan.total_bytes);
    }
    assert!(totals[1] <= totals[2], "less speed takes no more bytes: {totals:?}");
    let settings = Settings { streams: 2, speed: Some(2.1), ..SETTINGS };
    match optimize(&graph, &settings, &Control::default()) {
        Err(OptimizeError::SpeedTarget { streams: 2, fastest, most, .. }) => {
            assert!(fastest > 1.3 && fastest <= 2.0 && most >= fastest);
        }
        other => panic!("{other:?}"),
    }
}

/// A speed that is asked for is met or refused; then one that was reached is met.
#[test]
fn speeds_are_met_or_refused() {
    let mut random = Random::new(24);
    let (mut met, mut refused) = (0, 0);
    for round in 0..80 {
        let graph = random_graph(&mut random, 30);
        let settings = Settings { streams: 2 + round % 2, ..SETTINGS };
        let asked = 1.0 + random.below(100) as f64 / 100.0;
        match optimize(&graph, &Settings { speed: Some(asked), ..settings.clone() }, &Control::default()) {
            Ok(plan) => {
                assert!(speed(&plan) >= asked);
                met += 1;
            }
            Err(OptimizeError::SpeedTarget { fastest, .. }) => {
                assert!(fastest < asked);
                let again = Settings { speed: Some(fastest), ..settings };
                assert!(speed(&planned(&graph, &again)) >= fastest);
                refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(met > 10 && refused > 10, "{met} met, {refused} refused");
}

#[test]
fn threads_change_nothing() {
    let mut random = Random::new(25);
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    for round in 0..swept(25) {
        let graph = random_graph(&mut random, 80);
        let settings = Settings { streams: 2 + round % 2, ..SETTINGS };
        assert_eq!(planned(&graph, &settings), one.install(|| planned(&graph, &settings)));
    }
}

#[test]
fn without_time_everything_is_on_the_first_stream() {
    let graph = transformer_step(Transformer { layers: 2, ..Transformer::XL }).expect("a valid step");
    let plan = planned(&graph, &Settings { streams: 2, time_limit_s: Some(0.0), ..SETTINGS });
    verify(&graph, &plan).expect("valid");
    assert_eq!((plan.status, plan.order.as_slice()), (Status::TimedOut, graph.program_order()));
    assert!((speed(&plan) - 1.0).abs() < 1e-9);
}

/// Plans of the time-step model by that model's own definition.
#[test]
fn time_steps_hold_what_runs_at_once() {
    let mut random = Random::new(26);
    for round in 0..120 {
        let graph = random_graph(&mut random, 25);
        let streams = 2 + round % 2;
        let settings = Settings { streams, stream_model: StreamModel::TimeStep, ..SETTINGS };
        let plan = planned(&graph, &settings);
        verify(&graph, &plan).expect("valid");
        let steps = &plan.schedule.as_ref().expect("several streams").time_steps;
        let step_of = |id: OperatorId| steps[id.index()];
        let last = steps.iter().copied().max();
        let mut peak = 0;
        for step in 0..last.map_or(0, |last| last + 1) {
            let running: Vec<OperatorId> = plan.order.iter().copied().filter(|&id| step_of(id) == step).collect();
            assert!(!running.is_empty() && running.len() <= streams as usize);
            for &id in &running {
                assert!(graph.predecessors(id).iter().all(|&before| step_of(before) < step));
            }
            let mut live = running.iter().map(|&id| graph.workspace_bytes(id)).sum::<u64>();
            for tensor in (0..graph.tensors().len() as u32).map(TensorId) {
                let from = graph.creator(tensor).map_or(0, step_of);
                let until = graph.users(tensor).iter().map(|&user| step_of(user)).max().unwrap_or(from);
                let until = if graph.tensor(tensor).residency == Residency::Leaves { u32::MAX } else { until };
                let persists = graph.tensor(tensor).residency == Residency::Persistent;
                let handed_over = plan
                    .reuse
                    .iter()
                    .any(|pair| pair.input == tensor && graph.creator(pair.output).map(step_of) == Some(step));
                if !persists && !handed_over && from <= step && step <= until {
                    live += graph.counted_bytes(tensor);
                }
            }
            peak = live.max(peak);
        }
        assert_eq!(plan.peak_bytes, peak);
    }
}

/// Everything that up to `streams` operators at once could do, whatever time they take: the least
/// that any execution needs, and the least sum of what it needs in the pool and unpooled.
struct Executions<'a> {
    graph: &'a Graph,
    streams: usize,
    reuse: bool,
    best: (u64, u64),
}

impl Executions<'_> {
    fn live(&self, done: u32, running: u32) -> (u64, u64) {
        let is = |set: u32, id: OperatorId| set >> id.0 & 1 != 0;
        let (mut pool, mut unpooled) = (0, 0);
        for tensor in (0..self.graph.tensors().len() as u32).map(TensorId) {
            let users = self.graph.users(tensor);
            let made = self.graph.creator(tensor).is_none_or(|creator| is(done | running, creator));
            let needed = match self.graph.tensor(tensor).residency {
                Residency::Persistent => false,
                Residency::Leaves => true,
                _ if users.is_empty() => self.graph.creator(tensor).map_or(done == 0, |creator| !is(done, creator)),
                _ => users.iter().any(|&user| !is(done, user)),
            };
            if made && needed {
                let part =
                    if self.graph.tensor(tensor).residency == Residency::StepLocal { &mut pool } else { &mut unpooled };
                *part += self.graph.counted_bytes(tensor);
            }
        }
        for (index, operator) in self.graph.operators().iter().enumerate() {
            let id = OperatorId(index as u32);
            if is(running, id) {
                unpooled += self.graph.workspace_bytes(id);
                // At most what each output could save alone: never less than disjoint pairs can.
                let dies = |input: TensorId| self.graph.users(input).iter().all(|&user| user == id || is(done, user));
                let saves =
                    |output: &TensorId| operator.reuse.iter().any(|pair| pair.output == *output && dies(pair.input));
                for &output in operator.creates.iter().filter(|output| self.reuse && saves(output)) {
                    let is_local = self.graph.tensor(output).residency == Residency::StepLocal;
                    let part = if is_local { &mut pool } else { &mut unpooled };
                    *part -= self.graph.counted_bytes(output).min(*part);
                }
            }
        }
        (pool, unpooled)
    }

    fn explore(&mut self, done: u32, running: u32, worst: (u64, u64, u64)) {
        let count = self.graph.operators().len() as u32;
        if worst.0 >= self.best.0 && worst.1 + worst.2 >= self.best.1 {
            return;
        }
        if done.count_ones() == count {
            self.best = (self.best.0.min(worst.0), self.best.1.min(worst.1 + worst.2));
            return;
        }
        for at in 0..count {
            let bit = 1 << at;
            if running & bit != 0 {
                self.explore(done | bit, running & !bit, worst);
            } else if done & bit == 0 && (running.count_ones() as usize) < self.streams {
                let before = self.graph.predecessors(OperatorId(at));
                if before.iter().all(|before| done >> before.0 & 1 != 0) {
                    let (pool, unpooled) = self.live(done, running | bit);
                    let worst = (worst.0.max(pool + unpooled), worst.1.max(pool), worst.2.max(unpooled));
                    self.explore(done, running | bit, worst);
                }
            }
        }
    }
}

#[test]
fn bounds_hold_for_every_execution_on_several_streams() {
    let mut random = Random::new(27);
    for round in 0..150 {
        let graph = random_graph(&mut random, 5);
        let reuse = round % 2 == 0;
        let plan = planned(&graph, &Settings { streams: 2, reuse, ..SETTINGS });
        let mut executions = Executions { graph: &graph, streams: 2, reuse, best: (u64::MAX, u64::MAX) };
        executions.explore(0, 0, (0, 0, 0));
        let total_bound = plan.total_lower_bound_bytes - plan.persistent_bytes;
        if !reuse || graph.operators().iter().all(|operator| operator.reuse.len() < 2) {
            assert!(plan.lower_bound_bytes <= executions.best.0);
            assert!(total_bound <= executions.best.1);
        }
        assert!(executions.best.0 <= plan.peak_bytes);
        assert!(executions.best.1 <= plan.total_bytes - plan.persistent_bytes);
    }
}

fn edited(plan: &Plan, edit: impl FnOnce(&mut Schedule, &mut Settings)) -> Plan {
    let mut plan = plan.clone();
    edit(plan.schedule.as_mut().expect("several streams"), &mut plan.settings);
    plan
}

/// Whether operators have completed when others start, by following waits and streams.
fn precedence(graph: &Graph, plan: &Plan) -> Vec<Vec<bool>> {
    let schedule = plan.schedule.as_ref().expect("several streams");
    let count = graph.operators().len();
    let mut before = vec![vec![false; count]; count];
    for (at, &id) in plan.order.iter().enumerate() {
        let same = |other: &OperatorId| schedule.streams[other.index()] == schedule.streams[id.index()];
        let waits = schedule.syncs.iter().filter(|(_, after)| *after == id).map(|&(before, _)| before);
        let direct: Vec<OperatorId> = plan.order[..at].iter().copied().filter(same).chain(waits).collect();
        for first in direct {
            let known = before[first.index()].clone();
            before[id.index()].iter_mut().zip(known).for_each(|(own, known)| *own |= known);
            before[id.index()][first.index()] = true;
        }
    }
    before
}

/// Pool tensors of which some timing has both live at once, that are not joined by reuse.
fn live_together(graph: &Graph, plan: &Plan) -> Vec<(TensorId, TensorId)> {
    let before = precedence(graph, plan);
    let dead_before = |one: TensorId, other: TensorId| {
        let begin = graph.creator(other).expect("step-local").index();
        let users = graph.users(one).iter().copied();
        let mut last = users.chain(graph.creator(one).filter(|_| graph.users(one).is_empty()));
        last.all(|last| before[begin][last.index()])
    };
    let in_pool: Vec<TensorId> = (0..graph.tensors().len() as u32)
        .map(TensorId)
        .filter(|&id| plan.offsets[id.index()].is_some() && graph.counted_bytes(id) > 0)
        .collect();
    let mut together = Vec::new();
    for (at, &one) in in_pool.iter().enumerate() {
        for &other in &in_pool[at + 1..] {
            let pair = |pair: &ReusePair| [(one, other), (other, one)].contains(&(pair.input, pair.output));
            if !plan.reuse.iter().any(pair) && !dead_before(one, other) && !dead_before(other, one) {
                together.push((one, other));
            }
        }
    }
    together
}

const CORRUPTIONS: [(&str, Corruption); 13] = [
    ("wait missing", |_, plan, random| {
        let sync = pick(syncs(plan), random)?;
        let codes: &[&str] =
            &["read_too_early", "mutated_too_early", "sequence_broken", "control_broken", "overlap", "reuse_of_live"];
        Some((edited(plan, |schedule, _| schedule.syncs.retain(|&other| other != sync)), codes))
    }),
    ("wait turned round", |_, plan, random| {
        let at = random.below(syncs(plan).len().max(1) as u64) as usize;
        let (before, after) = *syncs(plan).get(at)?;
        Some((edited(plan, |schedule, _| schedule.syncs[at] = (after, before)), &["sync_invalid"]))
    }),
    ("waits in a circle", |_, plan, random| {
        let (before, after) = pick(syncs(plan), random)?;
        Some((edited(plan, |schedule, _| schedule.syncs.push((after, before))), &["sync_invalid"]))
    }),
    ("wait on one stream", |_, plan, _| {
        let schedule = plan.schedule.as_ref().expect("several streams");
        let same = |two: &[OperatorId]| schedule.streams[two[0].index()] == schedule.streams[two[1].index()];
        let two = plan.order.windows(2).find(|two| same(two))?;
        let (before, after) = (two[0], two[1]);
        Some((edited(plan, |schedule, _| schedule.syncs.push((before, after))), &["sync_invalid"]))
    }),
    ("wait for nobody", |graph, plan, random| {
        let (before, _) = pick(syncs(plan), random)?;
        let unknown = OperatorId(graph.operators().len() as u32);
        Some((edited(plan, |schedule, _| schedule.syncs.push((before, unknown))), &["unknown_operator"]))
    }),
    ("unknown stream", |_, plan, random| {
        let at = pick(&plan.order, random)?.index();
        let streams = plan.settings.streams;
        Some((edited(plan, |schedule, _| schedule.streams[at] = streams), &["unknown_stream"]))
    }),
    ("stream missing", |_, plan, _| {
        pick(&plan.order, &mut Random::new(0))?;
        Some((edited(plan, |schedule, _| schedule.streams.truncate(schedule.streams.len() - 1)), &["schedule_count"]))
    }),
    ("time steps where there are none", |graph, plan, _| {
        let count = graph.operators().len();
        (count > 0).then(|| (edited(plan, |schedule, _| schedule.time_steps = vec![0; count]), &["schedule_count"][..]))
    }),
    ("one stream with a schedule", |_, plan, _| Some((edited(plan, |_, settings| settings.streams = 1), &["streams"]))),
    ("no schedule", |_, plan, _| Some((Plan { schedule: None, ..plan.clone() }, &["streams"]))),
    ("slower than asked for", |_, plan, _| {
        let asked = speed(plan) * 1.01;
        Some((edited(plan, |_, settings| settings.speed = Some(asked)), &["speed_target"]))
    }),
    ("bytes shared under some timing", |graph, plan, random| {
        let (one, other) = pick(&live_together(graph, plan), random)?;
        let mut plan = plan.clone();
        plan.offsets[one.index()] = plan.offsets[other.index()];
        Some((plan, &["overlap", "figure", "misaligned", "outside_pool", "reuse_offsets"]))
    }),
    ("wrong figure", |_, plan, random| {
        let mut plan = plan.clone();
        let schedule = plan.schedule.as_mut().expect("several streams");
        let figure = match random.below(7) {
            0 => &mut schedule.makespan_ns,
            1 => &mut schedule.serial_ns,
            2 => &mut schedule.critical_path_ns,
            3 => &mut plan.peak_bytes,
            4 => &mut plan.pool_peak_bytes,
            5 => &mut plan.outside_bytes,
            _ => &mut plan.total_bytes,
        };
        *figure += 1;
        Some((plan, &["figure"]))
    }),
];

#[test]
fn every_corruption_is_caught() {
    catch_each(&CORRUPTIONS, 20, &mut Random::new(28), 120, |round, random| {
        let graph = random_graph(random, 16);
        let plan = planned(&graph, &Settings { streams: 2 + round as u32 % 2, ..SETTINGS });
        (graph, plan)
    });
}

#[test]
fn corrupted_time_steps_are_caught() {
    let mut random = Random::new(29);
    let mut caught = [0; 3];
    for _ in 0..100 {
        let graph = random_graph(&mut random, 16);
        let settings = Settings { streams: 2, stream_model: StreamModel::TimeStep, ..SETTINGS };
        let plan = planned(&graph, &settings);
        let Some(id) = pick(&plan.order, &mut random) else { continue };
        if let Some(&before) = graph.predecessors(id).first() {
            let early =
                edited(&plan, |schedule, _| schedule.time_steps[id.index()] = schedule.time_steps[before.index()]);
            verify(&graph, &early).expect_err("at once with what it needs");
            caught[0] += 1;
        }
        let steps = &plan.schedule.as_ref().expect("several streams").time_steps;
        if let Some(two) = plan.order.windows(2).find(|two| steps[two[0].index()] == steps[two[1].index()]) {
            let crowded =
                edited(&plan, |schedule, _| schedule.streams[two[0].index()] = schedule.streams[two[1].index()]);
            assert_eq!(verify(&graph, &crowded).expect_err("one stream, two operators").code(), "time_step");
            caught[1] += 1;
        }
        let model = edited(&plan, |_, settings| settings.stream_model = StreamModel::HappensBefore);
        assert_eq!(verify(&graph, &model).expect_err("steps are no waits").code(), "schedule_count");
        caught[2] += 1;
    }
    assert!(caught.iter().all(|&count| count >= 20), "{caught:?}");
}

/// Random offsets: refused as an overlap exactly where comparing all pairs finds one.
#[test]
fn overlaps_are_found_exactly() {
    let mut random = Random::new(30);
    let (mut refused, mut accepted) = (0, 0);
    for round in 0..500 {
        let graph = random_graph(&mut random, 10);
        let mut plan = planned(&graph, &Settings { streams: 2 + round % 2, reuse: false, ..SETTINGS });
        let room = [1, 3, 6][random.below(3) as usize] * plan.pool_bytes / 128;
        let mut pool_bytes = 0;
        for at in 0..plan.offsets.len() {
            if plan.offsets[at].is_some() {
                let offset = 128 * random.below(room + 1);
                plan.offsets[at] = Some(offset);
                pool_bytes = pool_bytes.max(offset + graph.counted_bytes(TensorId(at as u32)));
            }
        }
        plan.pool_bytes = pool_bytes;
        let plan = with_total(plan);
        let overlaps = live_together(&graph, &plan).iter().any(|&(one, other)| {
            let from = |id: TensorId| plan.offsets[id.index()].expect("in the pool");
            let to = |id: TensorId| from(id) + graph.counted_bytes(id);
            from(one) < to(other) && from(other) < to(one)
        });
        match verify(&graph, &plan) {
            Ok(()) => {
                assert!(!overlaps);
                accepted += 1;
            }
            Err(violation) => {
                let expected = if overlaps { "overlap" } else { "worse_than_program_order" };
                assert_eq!(violation.code(), expected, "{violation}");
                refused += u32::from(overlaps);
            }
        }
    }
    assert!(refused > 40 && accepted > 40, "{refused} refused, {accepted} accepted");
}

#[test]
fn a_deadline_anywhere_gives_a_valid_plan() {
    let graph = transformer_step(Transformer { layers: 6, ..Transformer::XL }).expect("a valid step");
    let mut random = Random::new(31);
    for limit in [0.001, 0.01, 0.03, 0.1, 0.3] {
        let plan = planned(&graph, &Settings { streams: 2, time_limit_s: Some(limit), ..SETTINGS });
        verify(&graph, &plan).expect("valid");
        execute(&graph, &plan, &mut random).expect("no fault");
    }
}

#[test]
fn cancelling_ends_planning_without_a_plan() {
    let graph = transformer_step(Transformer { layers: 2, ..Transformer::XL }).expect("a valid step");
    let control = Control::default();
    let cancel = control.cancel.clone();
    let progress = move |stage: &str, _: f64| cancel.store(stage == "streams", Ordering::Relaxed);
    let control = Control { progress: Some(Box::new(progress)), ..control };
    let settings = Settings { streams: 2, ..SETTINGS };
    assert_eq!(optimize(&graph, &settings, &control), Err(OptimizeError::Cancelled));
}
