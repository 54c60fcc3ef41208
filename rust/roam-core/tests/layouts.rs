//! Bare layout problems: the instance files at their bounds, random ones against brute force, and
//! what packing promises.

use crate::common::buffers::{brute_force, check, full, live_bytes, mixed, random};
use roam_core::layout::{PackError, pack};
use roam_core::optimize::Control;
use roam_core::packing::{Buffer, Instance, Packing};
use roam_core::rng::Random;
use roam_core::synthetic::buffers::Style;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Comparisons; enough for every small problem here.
const WORK: u64 = 2_000_000_000;

fn packed(buffers: &[Buffer], work: u64) -> Packing {
    let packing = pack(buffers, work, &Control::default()).expect("a packing");
    check(buffers, &packing);
    packing
}

fn buffers_of(instance: &Instance) -> Vec<Buffer> {
    instance.requests.iter().map(|request| request.buffer).collect()
}

/// The lowest top of all sequences, each buffer just above those before it that it meets.
fn least_of_all_sequences(left: &[Buffer], placed: &[(Buffer, u64)]) -> u64 {
    let tops = placed.iter().map(|&(_, top)| top);
    let ways = (0..left.len()).map(|at| {
        let (buffer, mut others) = (left[at], left.to_vec());
        others.remove(at);
        let meets = |other: &Buffer| other.lower < buffer.upper && buffer.lower < other.upper;
        let below = placed.iter().filter(|(other, _)| meets(other)).map(|&(_, top)| top).max().unwrap_or(0);
        let top = below.next_multiple_of(buffer.alignment_bytes) + buffer.size_bytes;
        least_of_all_sequences(&others, &[placed, &[(buffer, top)]].concat())
    });
    ways.min().unwrap_or_else(|| tops.max().unwrap_or(0))
}

/// Brute force leaves off nothing that matters, and keeps to its limit.
#[test]
fn brute_force_finds_what_all_sequences_find() {
    let mut numbers = Random::new(6);
    for round in 0..500 {
        let buffers = match round % 3 {
            0 => full(&mut numbers, 6, 3, 12),
            1 => mixed(&mut numbers).split_off(1),
            _ => random(&mut numbers, 6, 9, 9, 1, &[1, 2, 4, 8]),
        };
        let least = least_of_all_sequences(&buffers, &[]);
        for limit in [u64::MAX, least + 1, least, least / 2] {
            assert_eq!(brute_force(&buffers, limit), least.min(limit), "{buffers:?}");
        }
    }
}

#[test]
fn small_problems_are_solved_as_brute_force_solves_them() {
    let mut numbers = Random::new(1);
    for _ in 0..1000 {
        let (count, horizon) = (2 + numbers.below(6), 3 + numbers.below(8));
        let sizes = 2 + numbers.below(9);
        let buffers = random(&mut numbers, count, horizon, sizes, 8, &[1, 4, 8]);
        let packing = packed(&buffers, WORK);
        assert_eq!(packing.pool_bytes, brute_force(&buffers, u64::MAX), "{buffers:?}");
        assert!(packing.optimal, "{buffers:?}");
    }
}

#[test]
fn what_cannot_meet_its_live_bytes_is_solved_as_brute_force_solves_it() {
    let mut numbers = Random::new(2);
    let mut above_live = 0;
    for at in 0.. {
        if above_live == 10 {
            break;
        }
        let buffers = full(&mut numbers, 12, 4 + at % 2, 8);
        let packing = packed(&buffers, WORK);
        assert!(packing.optimal, "{buffers:?}");
        if packing.pool_bytes > packing.live_bytes {
            above_live += 1;
            assert_eq!(packing.pool_bytes, brute_force(&buffers, packing.pool_bytes), "{buffers:?}");
        }
    }
}

/// Alignments that leave gaps are no exception: the smallest pool is found, and proved.
#[test]
fn small_problems_of_mixed_alignments_are_solved_as_brute_force_solves_them() {
    let mut numbers = Random::new(3);
    let mut above_live = 0;
    for _ in 0..500 {
        let buffers = mixed(&mut numbers);
        let packing = packed(&buffers, 400_000);
        assert_eq!(packing.pool_bytes, brute_force(&buffers, u64::MAX), "{buffers:?}");
        assert!(packing.optimal && packing.bound_bytes == packing.pool_bytes, "{buffers:?}");
        above_live += usize::from(packing.pool_bytes > packing.live_bytes);
    }
    assert!(above_live > 50, "{above_live}");
}

/// Seven buffers, the strictest of which leave gaps that the others fill.
#[test]
fn what_alignment_leaves_free_is_filled() {
    let buffers: Vec<Buffer> =
        [(2, 3, 2, 2), (3, 7, 2, 16), (0, 2, 0, 1), (4, 7, 1, 1), (3, 5, 1, 16), (4, 9, 3, 1), (1, 4, 8, 8)]
            .map(|(lower, upper, size_bytes, alignment_bytes)| Buffer { lower, upper, size_bytes, alignment_bytes })
            .into();
    let packing = packed(&buffers, WORK);
    assert_eq!((packing.pool_bytes, packing.bound_bytes, packing.optimal), (17, 17, true));
}

/// All but `J`, of which it is not known whether it can be.
#[test]
fn every_instance_file_is_packed_to_its_live_bytes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/layout");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("the instance folder exists") {
        let path = entry.expect("a readable folder").path();
        if path.extension().is_none_or(|extension| extension != "csv") || path.ends_with("J.1048576.csv") {
            continue;
        }
        let buffers = buffers_of(&Instance::read(&std::fs::read_to_string(&path).expect("readable")).expect("valid"));
        let packing = packed(&buffers, WORK);
        assert_eq!(packing.pool_bytes, packing.live_bytes, "{}", path.display());
        count += 1;
    }
    assert_eq!(count, 7);
}

#[test]
fn thousands_of_random_buffers_come_within_one_percent() {
    for (seed, horizon) in [(3, 50), (4, 1000), (5, 100_000)] {
        let mut buffers = random(&mut Random::new(seed), 1500, horizon, 2000, 64, &[64]);
        for buffer in &mut buffers {
            buffer.upper = buffer.upper.min(buffer.lower + 1 + horizon / 20);
        }
        let packing = packed(&buffers, 400_000_000);
        let gap = packing.pool_bytes as f64 / packing.live_bytes as f64 - 1.0;
        assert!(gap <= 0.01, "seed {seed}: {gap}");
    }
}

#[test]
fn buffers_of_every_style_are_packed_closely() {
    for (style, count, gap_percent) in [
        (Style::Wide, 3000, 3.0),
        (Style::Narrow, 3000, 4.0),
        (Style::Skewed, 3000, 3.0),
        (Style::Training, 3000, 0.0),
        (Style::Replaced, 500, 30.0),
        (Style::Dissected, 1000, 15.0),
    ] {
        let packing = packed(&style.buffers(count, 1), 30_000_000);
        let gap = 100.0 * (packing.pool_bytes as f64 / packing.live_bytes as f64 - 1.0);
        assert!(gap <= gap_percent, "{}: {gap}%", style.name());
    }
}

#[test]
fn dissected_buffers_fill_a_rectangle() {
    for count in [1, 2, 3, 50, 5000] {
        let buffers = Style::Dissected.buffers(count, u64::from(count));
        assert_eq!(buffers.len(), count as usize);
        let area: u64 = buffers.iter().map(|buffer| (buffer.upper - buffer.lower) * (buffer.size_bytes / 512)).sum();
        assert_eq!(area, 1 << 40);
        assert_eq!(live_bytes(&buffers), 512 << 20);
    }
}

#[test]
fn threads_change_nothing() {
    let with = |threads: usize, buffers: &[Buffer]| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        pool.install(|| packed(buffers, 60_000_000))
    };
    let mut searched = 0;
    for seed in 0..20 {
        let buffers = random(&mut Random::new(seed), 120, 60, 50, 1, &[1]);
        let one = with(1, &buffers);
        assert_eq!(one, with(4, &buffers), "seed {seed}");
        searched += usize::from(["beam", "dive", "canonical"].contains(&one.method));
    }
    assert!(searched > 5, "{searched}");
}

#[test]
fn the_sequence_of_buffers_does_not_matter() {
    for seed in 0..10 {
        let mut numbers = Random::new(seed);
        let mut buffers = random(&mut numbers, 60, 40, 50, 1, &[1]);
        let before = packed(&buffers, 10_000_000).pool_bytes;
        for at in (1..buffers.len()).rev() {
            buffers.swap(at, numbers.below(at as u64 + 1) as usize);
        }
        assert_eq!(before, packed(&buffers, 10_000_000).pool_bytes, "seed {seed}");
    }
}

#[test]
fn extreme_problems_are_packed() {
    let buffer = |lower, upper, size_bytes| Buffer { lower, upper, size_bytes, alignment_bytes: 1 };
    assert_eq!(packed(&[], WORK).pool_bytes, 0);
    assert_eq!(packed(&[buffer(0, 1, 0), buffer(0, 9, 0)], WORK).pool_bytes, 0);
    let large = 1 << 62;
    let packing = packed(&[buffer(0, 2, large), buffer(1, 3, large - 9), buffer(0, u64::MAX, 3)], WORK);
    assert_eq!(packing.pool_bytes, packing.live_bytes);
    // One after another, all at once, and a staircase.
    let many = |times: fn(u64) -> (u64, u64)| -> Vec<Buffer> {
        (0..2000).map(|at| (times(at), at)).map(|((lower, upper), at)| buffer(lower, upper, 1 + at % 7)).collect()
    };
    for buffers in [many(|at| (at, at + 1)), many(|_| (0, 1)), many(|at| (at, at + 500)), many(|at| (at, 4000 - at))] {
        let packing = packed(&buffers, 100_000_000);
        assert!(packing.pool_bytes as f64 <= 1.01 * packing.live_bytes as f64, "{}", packing.pool_bytes);
    }
}

#[test]
fn impossible_problems_are_refused() {
    let good = Buffer { lower: 0, upper: 1, size_bytes: 1, alignment_bytes: 1 };
    let error = |bad: Buffer| pack(&[good, bad], WORK, &Control::default()).expect_err("refused");
    assert_eq!(error(Buffer { lower: 3, upper: 3, ..good }), PackError::EmptyInterval { index: 1, lower: 3, upper: 3 });
    assert_eq!(error(Buffer { lower: 4, upper: 3, ..good }), PackError::EmptyInterval { index: 1, lower: 4, upper: 3 });
    assert_eq!(error(Buffer { alignment_bytes: 0, ..good }), PackError::Alignment { index: 1, alignment_bytes: 0 });
    assert_eq!(error(Buffer { alignment_bytes: 6, ..good }), PackError::Alignment { index: 1, alignment_bytes: 6 });
    assert_eq!(error(Buffer { size_bytes: u64::MAX, ..good }), PackError::TooLarge);
    assert_eq!(error(Buffer { size_bytes: 1 << 63, ..good }), PackError::TooLarge);
    assert_eq!(error(Buffer { alignment_bytes: 1 << 63, ..good }), PackError::TooLarge);
}

#[test]
fn a_deadline_leaves_a_packing_and_cancelling_none() {
    let buffers = random(&mut Random::new(7), 300, 100, 1000, 1, &[1]);
    let packing = pack(&buffers, u64::MAX, &Control { deadline: Some(Instant::now()), ..Control::default() });
    let packing = packing.expect("a packing");
    check(&buffers, &packing);
    assert!(packing.timed_out && !packing.optimal);
    let control = Control::default();
    control.cancel.store(true, Ordering::Relaxed);
    assert_eq!(pack(&buffers, WORK, &control), Err(PackError::Cancelled));
}
