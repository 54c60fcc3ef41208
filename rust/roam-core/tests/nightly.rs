//! Long random sweeps, for a machine that has the night: `make nightly`. Ignored by `cargo test`.
//!
//! Every case has a number of its own from which it is made, and a failure names it. `ROAM_CASES`
//! says how many cases a sweep has (100 000 where it is not set), `ROAM_FIRST` with which it begins
//! (0): `ROAM_FIRST=123 ROAM_CASES=1` repeats one case.

use crate::common::buffers::{brute_force, check, full, mixed, random};
use crate::common::totals::least_total;
use crate::common::{SETTINGS, best_by_brute_force, check_streams, random_graph, total_and_bound};
use roam_core::layout::pack;
use roam_core::optimize::{Control, optimize};
use roam_core::plan::{Settings, Status};
use roam_core::rng::Random;
use roam_core::verify::verify;
use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Runs a check on every case, and says in the end which failed and how.
#[expect(clippy::disallowed_methods, reason = "how long a sweep is depends on who runs it")]
fn sweep(check: impl Fn(u64, &mut Random) + Sync + std::panic::RefUnwindSafe) {
    let number = |name: &str, otherwise: u64| match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")),
        Err(_) => otherwise,
    };
    let (first, count) = (number("ROAM_FIRST", 0), number("ROAM_CASES", 100_000));
    let next = AtomicU64::new(first);
    let failed = Mutex::new(Vec::new());
    let work = || {
        loop {
            let case = next.fetch_add(1, Ordering::Relaxed);
            if case >= first + count {
                return;
            }
            let Err(panic) = catch_unwind(|| check(case, &mut Random::new(case << 20))) else { continue };
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("?");
            failed.lock().expect("no panic while locked").push(format!("case {case}: {text}"));
        }
    };
    // Not by rayon, whose threads would begin one case while they wait for the planner's tasks in
    // another, and so on until their stacks are full.
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let mut failed = failed.into_inner().expect("no panic while locked");
    failed.sort();
    assert!(failed.is_empty(), "{} of {count} cases failed:\n{}", failed.len(), failed.join("\n"));
}

/// One graph in a hundred is too large for brute force: there the verifier and the bound must
/// agree, and another thread pool must give the same plan.
#[test]
#[ignore = "takes minutes"]
fn random_graphs() {
    sweep(|case, random| {
        let large = case % 100 == 0;
        let graph = random_graph(random, if large { 120 } else { 7 });
        let settings = Settings { reuse: case % 3 > 0, ..SETTINGS };
        let plan = optimize(&graph, &settings, &Control::default()).expect("a plan");
        verify(&graph, &plan).expect("valid");
        let (total, total_bound) = total_and_bound(&plan);
        assert!(plan.lower_bound_bytes <= plan.peak_bytes && total_bound <= total);
        assert_eq!(plan.status == Status::Optimal, total == total_bound);
        if large {
            let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
            assert_eq!(plan, one.install(|| optimize(&graph, &settings, &Control::default())).expect("a plan"));
        } else {
            let best = best_by_brute_force(&graph, settings.reuse);
            assert!(plan.lower_bound_bytes <= best, "a bound of {} above {best}", plan.lower_bound_bytes);
            assert!(best <= plan.peak_bytes);
        }
    });
}

/// Small graphs: where the status says so, the total is the least there is, order, reuse and layout
/// together; and it says so in at least 99 of 100.
#[test]
#[ignore = "takes minutes"]
#[expect(clippy::print_stdout, reason = "what the sweep found")]
fn random_totals() {
    let [all, least, proved] = [const { AtomicU64::new(0) }; 3];
    sweep(|case, random| {
        let graph = random_graph(random, 12);
        let settings = Settings { reuse: case % 3 > 0, ..SETTINGS };
        let plan = optimize(&graph, &settings, &Control::default()).expect("a plan");
        verify(&graph, &plan).expect("valid");
        let (total, bound) = total_and_bound(&plan);
        let best = least_total(&graph, settings.reuse, total + 1);
        let is_proved = plan.status == Status::Optimal;
        assert!(bound <= best && best <= total, "{best} is not within {bound} and {total}");
        assert!(!is_proved || bound == total, "a proof by the bound {bound} of {total}");
        all.fetch_add(1, Ordering::Relaxed);
        least.fetch_add(u64::from(total == best), Ordering::Relaxed);
        proved.fetch_add(u64::from(is_proved), Ordering::Relaxed);
    });
    let [all, least, proved] = [all, least, proved].map(AtomicU64::into_inner);
    println!("of {all} totals {least} are the least, {proved} proved");
    assert!(proved * 100 >= all * 99, "of {all} totals only {proved} are proved");
}

/// Plans of two streams, some of three and four, executed under random timings without a fault.
#[test]
#[ignore = "takes minutes"]
fn random_streams() {
    sweep(|case, random| {
        let graph = random_graph(random, if case % 100 == 0 { 120 } else { 20 });
        let streams = if case % 4 == 0 { 3 + (case / 4 % 2) as u32 } else { 2 };
        check_streams(&graph, &Settings { streams, reuse: case % 3 > 0, ..SETTINGS }, random);
    });
}

/// Small instances against brute force; larger ones, random and full to the brim, for what packing
/// promises.
#[test]
#[ignore = "takes minutes"]
fn random_layouts() {
    sweep(|case, numbers| {
        let buffers = match case % 10 {
            0 => {
                let (count, horizon) = (20 + numbers.below(200), 5 + numbers.below(60));
                random(numbers, count, horizon, 1000, 1, &[1, 1, 64])
            }
            1 => {
                let (count, alive) = (8 + numbers.below(60) as usize, 3 + numbers.below(5) as usize);
                full(numbers, count, alive, 64)
            }
            2 | 3 => mixed(numbers),
            style => {
                let (count, horizon, sizes) = (1 + numbers.below(7), 2 + numbers.below(9), 2 + numbers.below(9));
                let alignments: &[u64] = if style == 4 { &[1, 2, 4, 8] } else { &[1, 4, 8] };
                random(numbers, count, horizon, sizes, if style == 4 { 1 } else { 8 }, alignments)
            }
        };
        let packing = pack(&buffers, 300_000, &Control::default()).expect("a packing");
        check(&buffers, &packing);
        if buffers.len() < 8 {
            let best = brute_force(&buffers, u64::MAX);
            assert!(
                packing.optimal && packing.pool_bytes == best,
                "{} is not {best}, or not proved",
                packing.pool_bytes
            );
        }
    });
}
