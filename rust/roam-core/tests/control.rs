//! Limits and interruptions.

use crate::common::{SETTINGS, random_graph};
use roam_core::graph::Graph;
use roam_core::optimize::{Control, OptimizeError, optimize, optimize_timed};
use roam_core::plan::{MAX_STREAMS, Settings, Status};
use roam_core::rng::Random;
use roam_core::synthetic::{Transformer, transformer_step};
use roam_core::verify::verify;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn step() -> Graph {
    transformer_step(Transformer { layers: 12, ..Transformer::XL }).expect("a valid step")
}

#[test]
fn no_time_gives_program_order() {
    let graph = step();
    let settings = Settings { time_limit_s: Some(0.0), ..SETTINGS };
    let plan = optimize(&graph, &settings, &Control::default()).expect("a plan all the same");
    verify(&graph, &plan).expect("valid");
    assert_eq!(plan.status, Status::TimedOut);
    assert_eq!(plan.order, graph.program_order());
    // Reuse takes no search.
    assert!(plan.peak_bytes < plan.program_order_peak_bytes);
    // Even without any time there is some bound.
    assert!(plan.lower_bound_bytes > 0);
}

#[test]
fn a_deadline_anywhere_gives_a_valid_plan() {
    let graph = step();
    let full = optimize(&graph, &SETTINGS, &Control::default()).expect("a plan");
    let mut cut_short = 0;
    for micros in (0..20_000).step_by(400) {
        let control = Control { deadline: Some(Instant::now() + Duration::from_micros(micros)), ..Control::default() };
        let plan = optimize(&graph, &SETTINGS, &control).expect("a plan");
        verify(&graph, &plan).expect("valid");
        if plan.status == Status::TimedOut { cut_short += 1 } else { assert_eq!(plan, full) }
    }
    assert!(cut_short > 0);
}

/// What was found before the time was up is laid out and counts.
#[test]
fn orders_found_in_time_are_used() {
    let graph = step();
    let deadline = Instant::now() + Duration::from_secs(2);
    let wait = move |stage: &str, _: f64| {
        if stage == "refine" {
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
        }
    };
    let control = Control { deadline: Some(deadline), progress: Some(Box::new(wait)), ..Control::default() };
    // Where this is done before it is refined, there is nothing to cut short.
    let settings = Settings { reuse: false, ..SETTINGS };
    let plan = optimize(&graph, &settings, &control).expect("a plan");
    verify(&graph, &plan).expect("valid");
    assert_eq!(plan.status, Status::TimedOut);
    let full = optimize(&graph, &settings, &Control::default()).expect("a plan");
    assert!(full.peak_bytes < full.program_order_peak_bytes);
    assert!(plan.peak_bytes < plan.program_order_peak_bytes);
}

/// The stages that a plan with such settings took more than cheap orders and layouts.
fn stages(graph: &Graph, settings: &Settings) -> (u64, Vec<String>) {
    let begun = Arc::new(Mutex::new(Vec::new()));
    let seen = begun.clone();
    let note = move |stage: &str, _: f64| seen.lock().expect("a list").push(stage.to_owned());
    let control = Control { progress: Some(Box::new(note)), ..Control::default() };
    let plan = optimize(graph, settings, &control).expect("a plan");
    verify(graph, &plan).expect("valid");
    let begun = begun.lock().expect("a list").clone();
    (plan.total_bytes, begun)
}

#[test]
fn a_search_ends_at_what_is_enough_or_not_worth_going_on() {
    let mut random = Random::new(11);
    let mut graph = random_graph(&mut random, 60);
    let searched = |graph: &Graph| stages(graph, &SETTINGS).1.iter().any(|stage| stage == "refine");
    while !searched(&graph) {
        graph = random_graph(&mut random, 60);
    }
    let (best, _) = stages(&graph, &SETTINGS);
    let cheap = ["program_order", "order", "layout", "verify"];
    for settings in [Settings { enough_bytes: u64::MAX, ..SETTINGS }, Settings { worth_bytes: u64::MAX, ..SETTINGS }] {
        let (total, begun) = stages(&graph, &settings);
        assert!(total >= best);
        assert_eq!(begun, cheap);
    }
    // What no plan reaches ends no search early.
    let (total, begun) = stages(&graph, &Settings { enough_bytes: 1, worth_bytes: 0, ..SETTINGS });
    assert_eq!((total, begun), stages(&graph, &SETTINGS));
}

#[test]
fn a_generous_limit_changes_nothing() {
    let mut random = Random::new(6);
    for limit in [1e3, 1e18, 1e300] {
        let graph = random_graph(&mut random, 40);
        let settings = Settings { time_limit_s: Some(limit), ..SETTINGS };
        let mut plan = optimize(&graph, &settings, &Control::default()).expect("a plan");
        plan.settings.time_limit_s = None;
        assert_eq!(plan, optimize(&graph, &SETTINGS, &Control::default()).expect("a plan"));
    }
}

#[test]
fn cancelling_ends_planning_without_a_plan() {
    let control = Control::default();
    control.cancel.store(true, Ordering::Relaxed);
    assert_eq!(optimize(&step(), &SETTINGS, &control), Err(OptimizeError::Cancelled));
}

#[test]
fn cancelling_at_any_stage_ends_planning() {
    let graph = step();
    for stage in 1.. {
        let mut control = Control::default();
        let (cancel, stages) = (Arc::clone(&control.cancel), AtomicUsize::new(0));
        control.progress = Some(Box::new(move |_, _| {
            if stages.fetch_add(1, Ordering::Relaxed) + 1 == stage {
                cancel.store(true, Ordering::Relaxed);
            }
        }));
        match optimize(&graph, &SETTINGS, &control) {
            Err(error) => assert_eq!(error, OptimizeError::Cancelled),
            Ok(_) => {
                // The last stages are too short to be worth interrupting.
                assert!(stage >= 5, "stage {stage} went on");
                break;
            }
        }
    }
}

#[test]
fn progress_goes_forward_and_timings_match() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&seen);
    let progress = move |stage: &str, share: f64| heard.lock().expect("no panic").push((stage.to_owned(), share));
    let control = Control { progress: Some(Box::new(progress)), ..Control::default() };
    let (_, timings) = optimize_timed(&step(), &SETTINGS, &control).expect("a plan");
    let seen = seen.lock().expect("no panic");
    assert!(seen.windows(2).all(|pair| pair[0].1 < pair[1].1));
    assert!(seen.iter().all(|&(_, share)| (0.0..1.0).contains(&share)));
    let stages: Vec<&str> = seen.iter().map(|(stage, _)| stage.as_str()).collect();
    assert_eq!(stages, timings.iter().map(|&(stage, _)| stage).collect::<Vec<_>>());
    assert!(timings.iter().all(|&(_, seconds)| seconds >= 0.0));
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let graph = random_graph(&mut Random::new(8), 10);
    let refused = |settings: Settings, code: &str| {
        let error = optimize(&graph, &settings, &Control::default()).expect_err("refused");
        assert_eq!(error.code(), code, "{error}");
    };
    for streams in [0, MAX_STREAMS + 1] {
        refused(Settings { streams, ..SETTINGS }, "invalid_streams");
    }
    for limit in [-1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        refused(Settings { time_limit_s: Some(limit), ..SETTINGS }, "invalid_time_limit");
    }
    for speed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        refused(Settings { streams: 2, speed: Some(speed), ..SETTINGS }, "invalid_speed");
    }
    refused(Settings { speed: Some(1.5), ..SETTINGS }, "invalid_speed");
    // More streams than this do not help, so they are not worth their clocks.
    let plan = optimize(&graph, &Settings { streams: MAX_STREAMS, ..SETTINGS }, &Control::default());
    verify(&graph, &plan.expect("a plan")).expect("valid");
}
