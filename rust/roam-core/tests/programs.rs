//! Integer programs: what they say against brute force and against the search, and what becomes of
//! bad answers.

use crate::common::buffers::{brute_force, check, full, random};
use crate::common::solver::{Always, Enumerate};
use crate::common::{SETTINGS, each_order, peaks_by_definition, random_graph};
use roam_core::graph::Graph;
use roam_core::graph::json::load_graph;
use roam_core::layout::pack;
use roam_core::mip::{Outcome, Solver};
use roam_core::optimize::{Control, OptimizeError, optimize};
use roam_core::packing::{Buffer, Packing};
use roam_core::plan::{BoundRoute, Exact, ExactStatus, Settings, Status};
use roam_core::rng::Random;
use roam_core::stages::Prepared;
use roam_core::verify::verify;
use std::path::Path;
use std::sync::Arc;

#[test]
fn an_order_program_is_as_low_as_the_best_of_all_orders() {
    let mut random = Random::new(21);
    let (mut lowered, mut reused) = (0, 0);
    for round in 0..500 {
        let graph = random_graph(&mut random, 7);
        if graph.operators().is_empty() {
            continue;
        }
        let mut least = [u64::MAX; 2];
        each_order(&graph, &mut |order| {
            for (reuse, least) in [false, true].into_iter().zip(&mut least) {
                *least = peaks_by_definition(&graph, order, reuse).whole.min(*least);
            }
        });
        for (reuse, least) in [false, true].into_iter().zip(least) {
            let prepared = Prepared::new(&graph, reuse);
            let program_order = prepared.order("program").expect("there is one");
            let (solved, bound, report) = prepared.solve_peaks(&program_order, &Enumerate).expect("no deadline");
            assert_eq!(solved.peak_bytes(), least, "round {round}, reuse {reuse}");
            assert_eq!(bound, least, "round {round}, reuse {reuse}");
            assert_eq!(report.failed, 0);
            lowered += u32::from(solved.peak_bytes() < program_order.peak_bytes());
            // The search says the same.
            let (searched, proved) = prepared.lower_peaks(&program_order).expect("no deadline");
            assert_eq!((searched.peak_bytes(), proved), (least, least));
        }
        reused += u32::from(least[1] < least[0]);
    }
    assert!(lowered > 40 && reused > 40, "{lowered} peaks lowered, {reused} by reuse");
}

/// What a solver should not say, and what it may say when it could not finish.
fn bad_outcomes() -> Vec<Outcome> {
    let solved = |values: Vec<f64>, bound| Outcome::Solved { values, bound };
    vec![
        Outcome::Failed("killed".into()),
        Outcome::TimedOut,
        solved(Vec::new(), f64::NEG_INFINITY),
        solved(vec![f64::NAN; 10_000], f64::NAN),
        solved(vec![0.5; 3], f64::INFINITY),
        solved(Vec::new(), 1e300),
    ]
}

#[test]
fn answers_that_make_no_sense_change_nothing() {
    let mut random = Random::new(22);
    for _ in 0..100 {
        let graph = random_graph(&mut random, 20);
        if graph.operators().is_empty() {
            continue;
        }
        let prepared = Prepared::new(&graph, true);
        let program_order = prepared.order("program").expect("there is one");
        for outcome in bad_outcomes() {
            let (solved, bound, report) = prepared.solve_peaks(&program_order, &Always(outcome)).expect("no deadline");
            assert_eq!(solved.positions(), program_order.positions());
            assert!(bound <= solved.peak_bytes());
            assert_eq!(report.gains, 0);
        }
    }
}

fn packed(buffers: &[Buffer], work: u64, solver: impl Solver + 'static) -> Packing {
    let control = Control { solver: Some(Arc::new(solver)), ..Control::default() };
    let packing = pack(buffers, work, &control).expect("a packing");
    check(buffers, &packing);
    packing
}

#[test]
fn a_layout_program_is_as_small_as_brute_force_finds_and_proves_it() {
    let mut numbers = Random::new(23);
    let (mut solved, mut raised) = (0, 0);
    for round in 0..300 {
        let alignments: &[u64] = [&[1][..], &[1, 2, 4, 8], &[4, 16]][round % 3];
        let buffers = if round % 2 == 0 {
            let count = 3 + numbers.below(4);
            random(&mut numbers, count, 6, 12, 1, alignments)
        } else {
            full(&mut numbers, 8, 4, 6)
        };
        // Without work the program has everything to do.
        let packing = packed(&buffers, 0, Enumerate);
        let least = brute_force(&buffers, u64::MAX);
        assert_eq!(packing.pool_bytes, least, "{buffers:?}");
        assert!(packing.optimal && packing.bound_bytes == least, "{buffers:?}");
        // The search says the same.
        let searched = pack(&buffers, 1_000_000, &Control::default()).expect("a packing");
        assert!(searched.optimal && searched.pool_bytes == least, "{buffers:?}");
        solved += u32::from(packing.exact.programs > 0);
        raised += u32::from(packing.bound_route == BoundRoute::IntegerProgram);
    }
    assert!(solved > 50 && raised > 25, "{solved} solved, {raised} bounds raised");
}

#[test]
fn bad_answers_cost_a_packing_nothing() {
    let mut numbers = Random::new(24);
    let mut asked = 0;
    for _ in 0..100 {
        let buffers = random(&mut numbers, 12, 8, 12, 1, &[1, 4, 16]);
        let without = pack(&buffers, 0, &Control::default()).expect("a packing");
        for outcome in bad_outcomes() {
            let bad = packed(&buffers, 0, Always(outcome));
            asked += bad.exact.programs;
            assert!(bad.pool_bytes <= without.pool_bytes, "{buffers:?}");
            assert!(bad.bound_route != BoundRoute::IntegerProgram && bad.exact.gains == 0, "{buffers:?}");
            assert_eq!(bad.optimal, bad.pool_bytes == bad.bound_bytes);
        }
    }
    assert!(asked > 100, "{asked}");
}

#[test]
fn a_core_proves_what_the_whole_needs() {
    let mut numbers = Random::new(25);
    let mut raised = 0;
    for _ in 0..100 {
        let mut buffers = random(&mut numbers, 6, 6, 12, 4, &[16, 64]);
        let end = buffers.iter().map(|buffer| buffer.upper).max().unwrap_or(0);
        let least = brute_force(&buffers, u64::MAX);
        // So many pairs that no core holds them, and one buffer that outlives the core.
        let small = Buffer { lower: end, upper: end + 9, size_bytes: 1, alignment_bytes: 1 };
        buffers.extend([small; 30]);
        if let Some(last) = buffers.iter_mut().find(|buffer| buffer.upper == end) {
            last.upper = end + 1;
        }
        let packing = packed(&buffers, 0, Enumerate);
        if packing.live_bytes < least {
            assert!(packing.optimal, "{buffers:?}");
            assert_eq!((packing.pool_bytes, packing.bound_route), (least, BoundRoute::IntegerProgram), "{buffers:?}");
            raised += 1;
        }
    }
    assert!(raised > 20, "{raised}");
}

/// A graph on which the search gives up.
fn hard_graph() -> Graph {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/exact/irregular-100-open.json.gz");
    load_graph(&path, u64::MAX).expect("an instance file")
}

#[test]
fn what_becomes_of_the_solver_is_in_the_plan() {
    let graph = hard_graph();
    let plan = |exact, solver: Option<Outcome>| {
        let settings = Settings { exact, ..SETTINGS };
        let solver = solver.map(|outcome| Arc::new(Always(outcome)) as Arc<dyn Solver>);
        optimize(&graph, &settings, &Control { solver, ..Control::default() })
    };
    let off = plan(Exact::Off, None).expect("a plan");
    assert_eq!(off.exact.status, ExactStatus::Off);
    for outcome in bad_outcomes() {
        let bad = plan(Exact::Auto, Some(outcome.clone())).expect("a plan");
        let required = plan(Exact::Required, Some(outcome.clone()));
        verify(&graph, &bad).expect("valid");
        assert_eq!(
            (&bad.order, &bad.offsets, bad.lower_bound_bytes),
            (&off.order, &off.offsets, off.lower_bound_bytes)
        );
        let programs = bad.exact.programs;
        let status =
            if bad.exact.failed + bad.exact.timed_out == programs { ExactStatus::NoAnswer } else { ExactStatus::Used };
        assert_eq!((bad.exact.status, bad.exact.gains), (status, 0));
        assert!(programs > 0);
        match required {
            Ok(plan) => assert!(bad.exact.failed < programs && plan.order == bad.order),
            Err(error) => {
                let reason = bad.exact.reason.clone().expect("a reason");
                assert_eq!((bad.exact.failed, error), (programs, OptimizeError::SolverFailed { programs, reason }));
            }
        }
        match outcome {
            Outcome::Failed(reason) => {
                assert_eq!((bad.exact.failed, bad.exact.reason), (programs, Some(reason)));
            }
            // The safety limit, not the caller's: the plan counts as one like any other.
            Outcome::TimedOut => {
                assert_eq!((bad.exact.timed_out, bad.status), (bad.exact.programs, Status::Feasible));
            }
            _ => {}
        }
    }
    for (outcome, reason) in
        [(None, "no solver was given"), (Some(Outcome::Unavailable("not here".into())), "not here")]
    {
        let without = plan(Exact::Auto, outcome.clone()).expect("a plan");
        assert_eq!((without.exact.status, without.exact.programs), (ExactStatus::Unavailable, 0));
        assert_eq!(without.exact.reason.as_deref(), Some(reason));
        let refused = plan(Exact::Required, outcome).expect_err("required");
        assert_eq!(refused, OptimizeError::SolverUnavailable { reason: reason.into() });
    }
}
