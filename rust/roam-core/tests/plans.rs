//! Plans of random graphs: valid, bounded by what brute force finds, never worse than program
//! order, the same on any number of threads and under any numbering.

use crate::common::solver::Always;
use crate::common::totals::least_total;
use crate::common::{
    Peaks, SETTINGS, accumulating_graph, best_by_brute_force, least_peak_over_sets, peaks_by_definition, pending_graph,
    random_graph, swept, total_and_bound,
};
use roam_core::graph::{
    Graph, GraphBuilder, Kind, Operator, OperatorId, Phase, Residency, ReusePair, Tensor, TensorId,
};
use roam_core::liveness::live_bytes;
use roam_core::mip::Outcome;
use roam_core::optimize::{Control, optimize};
use roam_core::plan::{Exact, ExactReport, ExactStatus, Settings, Status};
use roam_core::rng::Random;
use roam_core::stages::Prepared;
use roam_core::verify::verify;
use std::collections::BTreeMap;
use std::sync::Arc;

#[test]
fn every_bound_is_below_and_every_plan_above_the_best_order() {
    let mut random = Random::new(1);
    let (mut tight, mut optimal, mut graphs) = (0, 0, 0);
    for _ in 0..3000 {
        let graph = random_graph(&mut random, 7);
        for reuse in [false, true] {
            let best = best_by_brute_force(&graph, reuse);
            let plan = optimize(&graph, &Settings { reuse, ..SETTINGS }, &Control::default()).expect("a plan");
            verify(&graph, &plan).expect("valid");
            assert!(plan.lower_bound_bytes <= best, "{} > {best}", plan.lower_bound_bytes);
            assert!(best <= plan.peak_bytes);
            let prepared = Prepared::new(&graph, reuse);
            let program = prepared.order("program").expect("a known order");
            for position in 0..graph.operators().len() as u32 {
                assert!(prepared.cut_bytes(position).expect("not stopped") <= best);
                assert!(prepared.probed_bytes(&program, position).expect("not stopped") <= best);
            }
            graphs += 1;
            tight += u32::from(plan.lower_bound_bytes == best);
            optimal += u32::from(plan.peak_bytes == best || plan.status == Status::Optimal);
        }
    }
    // Neither the bound nor the plans are just valid: both are nearly always exact. A plan's peak
    // may be above the least where that is proved to pay in all.
    assert!(
        tight * 100 >= graphs * 95 && optimal * 100 >= graphs * 99,
        "of {graphs} bounds {tight} were met and of as many peaks {optimal} optimal"
    );
}

/// Order, reuse and layout together.
#[test]
fn totals_of_small_graphs_are_the_least_and_proved() {
    let mut random = Random::new(4);
    let mut enumerated = 0;
    for round in 0..1000 {
        let graph = random_graph(&mut random, 10);
        let settings = Settings { reuse: round % 3 > 0, ..SETTINGS };
        let plan = optimize(&graph, &settings, &Control::default()).expect("a plan");
        let (total, bound) = total_and_bound(&plan);
        let least = least_total(&graph, settings.reuse, total + 1);
        assert_eq!((total, bound, plan.status), (least, least, Status::Optimal), "round {round}");
        enumerated += u32::from(plan.candidates.iter().any(|candidate| candidate.order == "enumerated"));
    }
    assert!(enumerated > 2, "{enumerated} enumerated");
}

/// Activations that pile up, and gradients of many sizes whose updates can run at any time: at most
/// steps of a good order an update runs that could as well run elsewhere, so only cuts at the few
/// other operators prove anything.
#[test]
fn the_bound_is_found_among_operators_that_can_run_anywhere() {
    let mut random = Random::new(5);
    let mut builder = GraphBuilder::new("updates", "cpu", 64);
    let mut tensor = |builder: &mut GraphBuilder, blocks: u64| {
        let size_bytes = 64 * (1 + random.below(blocks));
        let (kind, residency) = (Kind::Temporary, Residency::StepLocal);
        let made = Tensor { name: String::new(), size_bytes, kind, residency, alignment_bytes: 0 };
        builder.tensor(made).expect("few tensors")
    };
    let call = |builder: &mut GraphBuilder, reads: &[TensorId], creates: &[TensorId]| {
        let operator = Operator {
            reads: reads.to_vec(),
            creates: creates.to_vec(),
            ..Operator::new("", builder.num_operators() as u32, Phase::Backward)
        };
        builder.operator(operator).expect("few operators");
    };
    let mut activations = vec![tensor(&mut builder, 100)];
    call(&mut builder, &[], &activations);
    for layer in 0..150 {
        let next = tensor(&mut builder, 100);
        call(&mut builder, &[activations[layer]], &[next]);
        activations.push(next);
    }
    let mut gradients = Vec::new();
    let mut back = tensor(&mut builder, 1);
    call(&mut builder, &activations[150..], &[back]);
    for &activation in activations.iter().rev() {
        let (before, gradient) = (tensor(&mut builder, 100), tensor(&mut builder, 1000));
        call(&mut builder, &[back, activation], &[before]);
        call(&mut builder, &[back, activation], &[gradient]);
        gradients.push(gradient);
        back = before;
    }
    for gradient in gradients {
        let scaled = tensor(&mut builder, 1000);
        call(&mut builder, &[gradient], &[scaled]);
        call(&mut builder, &[scaled], &[]);
    }
    let graph = builder.build().expect("valid");
    let plan = optimize(&graph, &SETTINGS, &Control::default()).expect("a plan");
    let prepared = Prepared::new(&graph, true);
    let cuts = (0..graph.operators().len() as u32).map(|position| prepared.cut_bytes(position).expect("not stopped"));
    assert!(cuts.max() <= Some(plan.lower_bound_bytes));
}

/// Of 300 random graphs cuts alone prove at most, and probes at least, so many percent of the least
/// peaks; neither ever proves more.
fn compare_probes_with_cuts(
    mut random: Random,
    make: impl Fn(&mut Random) -> Graph,
    most_by_cuts: u32,
    least_by_probes: u32,
) {
    let (mut by_cuts, mut by_probes, graphs) = (0, 0, 300);
    for _ in 0..graphs {
        let graph = make(&mut random);
        let best = least_peak_over_sets(&graph);
        let plan = optimize(&graph, &Settings { reuse: false, ..SETTINGS }, &Control::default()).expect("a plan");
        assert!(plan.lower_bound_bytes <= best && best <= plan.peak_bytes);
        let prepared = Prepared::new(&graph, false);
        let ordered = prepared.measure(plan.order.iter().map(|&id| graph.operator(id).position).collect());
        let positions = 0..graph.operators().len() as u32;
        let cuts = positions.clone().map(|position| prepared.cut_bytes(position).expect("not stopped")).max();
        let probes = positions.map(|position| prepared.probed_bytes(&ordered, position).expect("not stopped")).max();
        assert!(cuts <= probes && probes <= Some(best), "{cuts:?}, {probes:?}, {best}");
        by_cuts += u32::from(cuts == Some(best));
        by_probes += u32::from(probes == Some(best));
    }
    assert!(
        by_cuts * 100 <= graphs * most_by_cuts && by_probes * 100 >= graphs * least_by_probes,
        "cuts alone prove {by_cuts} of {graphs} peaks, probes {by_probes}"
    );
}

/// Of gradients that are summed several have to coexist at some moment, though not at any one
/// operator.
#[test]
fn probes_see_gradients_that_are_summed() {
    compare_probes_with_cuts(Random::new(6), accumulating_graph, 20, 50);
}

/// Gradients wait in pieces, each of which could be done with early if only the others were.
#[test]
fn probes_see_that_one_of_several_gradients_is_the_first() {
    compare_probes_with_cuts(Random::new(14), pending_graph, 60, 95);
}

/// Never worse than program order, its layout included, whatever reuse makes of it.
#[test]
fn no_plan_takes_more_than_program_order_laid_out() {
    let mut random = Random::new(10);
    for _ in 0..swept(500) {
        let graph = random_graph(&mut random, 40);
        let plan = optimize(&graph, &SETTINGS, &Control::default()).expect("a plan");
        for reuse in [false, true] {
            let prepared = Prepared::new(&graph, reuse);
            let program = prepared.order("program").expect("a known order");
            let pool = Prepared::portfolio().filter_map(|layout| prepared.pool_bytes(&program, layout)).min();
            let total = pool.expect("several layouts") + program.unpooled_peak_bytes();
            assert!(plan.pool_bytes + plan.outside_bytes <= total);
        }
    }
}

#[test]
fn live_bytes_follow_the_definition() {
    let mut random = Random::new(2);
    for _ in 0..2000 {
        let graph = random_graph(&mut random, 12);
        for name in Prepared::orders() {
            for reuse in [false, true] {
                let ordered = Prepared::new(&graph, reuse).order(name).expect("a known order");
                let order: Vec<OperatorId> =
                    ordered.positions().iter().map(|&position| graph.program_order()[position as usize]).collect();
                let Peaks { whole: expected, pool, unpooled } = peaks_by_definition(&graph, &order, reuse);
                assert_eq!(ordered.peak_bytes(), expected, "{name}");
                assert_eq!((ordered.pool_peak_bytes(), ordered.unpooled_peak_bytes()), (pool, unpooled), "{name}");
                if !reuse {
                    let live = live_bytes(&graph, &order).expect("a valid order");
                    assert_eq!(live.into_iter().max().unwrap_or(0), expected);
                }
            }
        }
    }
}

/// What is said of integer programs is what became of them, with a solver that never has an answer.
#[test]
fn only_what_meets_its_bound_needs_no_programs() {
    let mut random = Random::new(12);
    let control = || Control { solver: Some(Arc::new(Always(Outcome::Failed("broken".into())))), ..Control::default() };
    let mut seen = BTreeMap::new();
    for _ in 0..swept(100) {
        let graph = random_graph(&mut random, 90);
        let plan = optimize(&graph, &SETTINGS, &control()).expect("a plan");
        let required = optimize(&graph, &Settings { exact: Exact::Required, ..SETTINGS }, &control());
        let ExactReport { status, programs, failed, .. } = plan.exact;
        assert!(status != ExactStatus::NotNeeded || plan.status == Status::Optimal);
        assert!(status != ExactStatus::NotTried || plan.status == Status::Feasible);
        assert_eq!((status == ExactStatus::NoAnswer, failed), (programs > 0, programs));
        match required {
            Ok(required) => assert_eq!((programs, required.total_bytes), (0, plan.total_bytes)),
            Err(error) => assert_eq!((error.code(), programs > 0), ("solver_failed", true)),
        }
        *seen.entry(format!("{status:?}")).or_insert(0) += 1;
    }
    for status in ["NotNeeded", "NotTried", "NoAnswer"] {
        assert!(seen.get(status).is_some_and(|&count| count > 1), "{seen:?}");
    }
}

#[test]
fn larger_plans_are_valid_and_repeatable() {
    let mut random = Random::new(3);
    for round in 0..swept(40) {
        let graph = random_graph(&mut random, 150);
        let settings = Settings { reuse: round % 2 == 0, ..SETTINGS };
        let plan = optimize(&graph, &settings, &Control::default()).expect("a plan");
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
        let again = one_thread.install(|| optimize(&graph, &settings, &Control::default())).expect("a plan");
        assert_eq!(plan, again);
    }
}

/// The same step under other numbers and names; only program positions stay.
fn renumbered(graph: &Graph, random: &mut Random) -> Graph {
    let mut shuffled = |count: usize| {
        let mut numbers: Vec<u32> = (0..count as u32).collect();
        for at in (1..count).rev() {
            numbers.swap(at, random.below(at as u64 + 1) as usize);
        }
        numbers
    };
    let (new_operator, new_tensor) = (shuffled(graph.operators().len()), shuffled(graph.tensors().len()));
    let mut builder = GraphBuilder::new("other", graph.device(), graph.alignment_bytes());
    let inverse = |numbers: &[u32]| {
        let mut old: Vec<usize> = (0..numbers.len()).collect();
        old.sort_by_key(|&at| numbers[at]);
        old
    };
    for old in inverse(&new_tensor) {
        let tensor = Tensor { name: format!("x{}", random.below(1000)), ..graph.tensors()[old].clone() };
        builder.tensor(tensor).expect("few tensors");
    }
    let tensor = |id: &TensorId| TensorId(new_tensor[id.index()]);
    for old in inverse(&new_operator) {
        let mut operator = graph.operators()[old].clone();
        operator.name = format!("y{}", random.below(1000));
        for list in [&mut operator.reads, &mut operator.mutates, &mut operator.creates] {
            *list = list.iter().map(tensor).collect();
        }
        // The order of inputs and permissions means nothing.
        operator.reads.sort();
        for pair in &mut operator.reuse {
            *pair = ReusePair { input: tensor(&pair.input), output: tensor(&pair.output) };
        }
        operator.reuse.sort();
        builder.operator(operator).expect("few operators");
    }
    for (before, after) in graph.control() {
        let operator = |id: &OperatorId| OperatorId(new_operator[id.index()]);
        builder.control(operator(before), operator(after));
    }
    builder.build().expect("as valid as before")
}

#[test]
fn numbers_and_names_change_no_figure() {
    let mut random = Random::new(9);
    for round in 0..swept(300) {
        let graph = random_graph(&mut random, 60);
        let other = renumbered(&graph, &mut random);
        let settings = Settings { reuse: round % 2 == 0, ..SETTINGS };
        let figures = |graph: &Graph| {
            let plan = optimize(graph, &settings, &Control::default()).expect("a plan");
            let position = |id: &OperatorId| graph.operator(*id).position;
            (
                plan.order.iter().map(position).collect::<Vec<_>>(),
                [plan.peak_bytes, plan.pool_peak_bytes, plan.pool_bytes, plan.outside_bytes],
                [plan.lower_bound_bytes, plan.total_lower_bound_bytes],
                plan.bound_operator.as_ref().map(position),
                plan.candidates,
            )
        };
        assert_eq!(figures(&graph), figures(&other));
    }
}

/// First steps, where each update makes twice the state of its gradient and a counter: the pool and
/// the state have their peaks apart, and what the cuts leave open of the pool, though little, is
/// searched too.
#[test]
fn small_gaps_of_first_steps_are_closed() {
    let mut random = Random::new(15);
    for round in 0..6 {
        let mut builder = GraphBuilder::new("first", "cpu", 64);
        let tensor = |builder: &mut GraphBuilder, size_bytes, residency| {
            let (name, kind) = (String::new(), Kind::Temporary);
            builder.tensor(Tensor { name, size_bytes, kind, residency, alignment_bytes: 0 }).expect("few tensors")
        };
        let call = |builder: &mut GraphBuilder, phase, reads: &[TensorId], creates: &[TensorId]| {
            let position = builder.num_operators() as u32;
            let (reads, creates) = (reads.to_vec(), creates.to_vec());
            builder.operator(Operator { reads, creates, ..Operator::new("", position, phase) }).expect("few operators");
        };
        let mut saved: Vec<TensorId> = Vec::new();
        for _ in 0..40 {
            let activation = tensor(&mut builder, 10_000 + random.below(200_000), Residency::StepLocal);
            let statistics = tensor(&mut builder, 4 * random.below(300), Residency::StepLocal);
            let before: Vec<TensorId> = saved.iter().rev().take(2).copied().collect();
            call(&mut builder, Phase::Forward, &before, &[activation, statistics]);
            saved.extend([statistics, activation]);
        }
        let mut token: Vec<TensorId> = Vec::new();
        let mut gradients = Vec::new();
        for pair in saved.chunks(2).rev() {
            let next = tensor(&mut builder, 10_000 + random.below(200_000), Residency::StepLocal);
            let size = 64 * (1 + random.below(2_000));
            let gradient = tensor(&mut builder, size, Residency::StepLocal);
            let small = tensor(&mut builder, 64 * (1 + random.below(4)), Residency::StepLocal);
            call(&mut builder, Phase::Backward, &[&token[..], pair].concat(), &[next]);
            call(&mut builder, Phase::Backward, &[&[next], pair].concat(), &[gradient, small]);
            token = vec![next];
            gradients.push((gradient, size));
            gradients.push((small, 256));
        }
        for (gradient, size) in gradients {
            let state = tensor(&mut builder, 2 * size, Residency::Leaves);
            let step = tensor(&mut builder, 4, Residency::Leaves);
            let scaled = tensor(&mut builder, size, Residency::StepLocal);
            call(&mut builder, Phase::Update, &[], &[step]);
            call(&mut builder, Phase::Update, &[gradient, step], &[state, scaled]);
            call(&mut builder, Phase::Update, &[scaled, state], &[]);
        }
        let graph = builder.build().expect("valid");
        let plan = optimize(&graph, &SETTINGS, &Control::default()).expect("a plan");
        let gap = plan.total_bytes - plan.total_lower_bound_bytes;
        assert_eq!(plan.status, Status::Optimal, "round {round} lacks {gap} bytes of proof");
    }
}
