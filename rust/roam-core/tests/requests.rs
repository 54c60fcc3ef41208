//! Packing with gaps, fixed offsets and hints: cases worked out by hand, random ones against brute
//! force.

use roam_core::layout::{Goal, PackError, pack_requests};
use roam_core::optimize::Control;
use roam_core::packing::{Buffer, Gap, Instance, Packing, Request};
use roam_core::rng::Random;
use roam_core::synthetic::buffers::Style;
use roam_core::verify::verify_packing;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

const GOAL: Goal = Goal { work: 2_000_000, target_bytes: 0 };

fn request(lower: u64, upper: u64, size_bytes: u64) -> Request {
    Buffer { lower, upper, size_bytes, alignment_bytes: 1 }.into()
}

fn gap(lower: u64, upper: u64) -> Gap {
    Gap { lower, upper, window: None }
}

fn packed(requests: &[Request]) -> Packing {
    let packing = pack_requests(requests, GOAL, &Control::default()).expect("a packing");
    assert_eq!(verify_packing(requests, &packing), Ok(()));
    packing
}

#[test]
fn a_gap_lets_another_buffer_in() {
    // Over [0, 3) the first needs 8 bytes, but none at time 1, when the second needs 6: without the
    // gap 14.
    let mut requests = vec![request(0, 3, 8), request(1, 2, 6)];
    assert_eq!(packed(&requests).pool_bytes, 14);
    requests[0].gaps = vec![gap(1, 2)];
    let packing = packed(&requests);
    assert_eq!((packing.live_bytes, packing.pool_bytes, packing.optimal), (8, 8, true));
    // A gap at another time is of no use.
    requests[0].gaps = vec![gap(0, 1)];
    assert_eq!(packed(&requests).pool_bytes, 14);
}

#[test]
fn a_window_keeps_its_bytes() {
    // At time 1 the first still needs its bytes 2 to 5: the second of 3 bytes must lie above them,
    // that of 2 fits below.
    let mut requests = vec![request(0, 3, 8), request(1, 2, 3), request(1, 2, 2)];
    requests[0].gaps = vec![Gap { window: Some(2..5), ..gap(1, 2) }];
    let packing = packed(&requests);
    assert_eq!((packing.live_bytes, packing.pool_bytes, packing.optimal), (8, 8, true));
    assert_eq!(packing.offsets, [0, 5, 0]);
}

#[test]
fn two_whose_gaps_alternate_may_share_all_bytes() {
    let mut requests = vec![request(0, 4, 8), request(0, 4, 8)];
    requests[0].gaps = vec![gap(1, 2), gap(3, 4)];
    requests[1].gaps = vec![gap(0, 1), gap(2, 3)];
    let packing = packed(&requests);
    assert_eq!((packing.offsets.as_slice(), packing.pool_bytes), ([0, 0].as_slice(), 8));
}

#[test]
fn what_is_fixed_stays() {
    // The fixed buffer of [4, 8) leaves 4 bytes below: of the others, alive with it, one fits
    // there, and one goes on top.
    let requests =
        vec![request(0, 2, 3), Request { offset: Some(4), ..request(0, 2, 4) }, request(0, 2, 4), request(2, 3, 9)];
    let packing = packed(&requests);
    assert_eq!(packing.offsets, [8, 4, 0, 0]);
    assert_eq!((packing.pool_bytes, packing.live_bytes, packing.bound_bytes), (11, 11, 11));
    // Alone it still ends at 8, and no packing takes less.
    let alone = packed(&requests[1..2]);
    assert_eq!((alone.pool_bytes, alone.live_bytes, alone.bound_bytes, alone.optimal), (8, 4, 8, true));
    assert_eq!(alone.method, "fixed");
}

#[test]
fn alignment_holds_above_what_is_fixed() {
    let aligned = Request::from(Buffer { lower: 0, upper: 1, size_bytes: 4, alignment_bytes: 8 });
    let packing = packed(&[Request { offset: Some(1), ..request(0, 1, 2) }, aligned]);
    assert_eq!(packing.offsets, [1, 8]);
}

#[test]
fn fixed_buffers_that_share_bytes_are_refused() {
    let fixed = |lower, upper, offset| Request { offset: Some(offset), ..request(lower, upper, 4) };
    let mut requests = vec![request(0, 9, 1), fixed(0, 2, 0), fixed(2, 4, 0), fixed(1, 3, 3)];
    let refused = |requests: &[Request]| pack_requests(requests, GOAL, &Control::default()).expect_err("refused");
    assert_eq!(refused(&requests), PackError::FixedOverlap { first: 1, second: 3 });
    // Out of each other's way by a gap, or by a byte more.
    requests[3].gaps = vec![gap(1, 3)];
    assert_eq!(packed(&requests).offsets[1..], [0, 0, 3]);
    requests[3] = fixed(1, 3, 4);
    assert_eq!(packed(&requests).offsets[1..], [0, 0, 4]);
}

#[test]
fn a_good_hint_is_kept_and_a_bad_one_does_no_harm() {
    let buffers = Style::Replaced.buffers(200, 3);
    let none = Goal { work: 0, target_bytes: 0 };
    let by = |requests: &[Request], goal| {
        let packing = pack_requests(requests, goal, &Control::default()).expect("a packing");
        assert_eq!(verify_packing(requests, &packing), Ok(()));
        packing
    };
    let plain: Vec<Request> = buffers.iter().copied().map(Request::from).collect();
    let good = by(&plain, Goal { work: 50_000_000, target_bytes: 0 });
    assert!(by(&plain, none).pool_bytes > good.pool_bytes);
    let hinted = |offsets: &[u64]| -> Vec<Request> {
        plain.iter().zip(offsets).map(|(request, &hint)| Request { hint: Some(hint), ..request.clone() }).collect()
    };
    let again = by(&hinted(&good.offsets), none);
    assert_eq!((again.pool_bytes, again.method), (good.pool_bytes, "hint"));
    // The same where something is fixed, at what is left of the packing.
    let mut fixed = hinted(&good.offsets);
    (fixed[0].offset, fixed[1].hint) = (fixed[0].hint, None);
    assert!(by(&fixed, none).pool_bytes <= good.pool_bytes);
    // All at one place, misaligned, or far away.
    for hint in [0, 7, u64::MAX - 7] {
        assert!(by(&hinted(&vec![hint; plain.len()]), none).pool_bytes <= by(&plain, none).pool_bytes);
    }
}

#[test]
fn a_search_ends_at_its_target() {
    let requests: Vec<Request> = Style::Replaced.buffers(300, 1).into_iter().map(Request::from).collect();
    let with = |work, target_bytes| {
        pack_requests(&requests, Goal { work, target_bytes }, &Control::default()).expect("a packing")
    };
    let (quick, long) = (with(0, 0), with(200_000_000, 0));
    assert!(long.pool_bytes < quick.pool_bytes);
    // Enough for the first layout; then for one between the two.
    assert_eq!(with(200_000_000, quick.pool_bytes).offsets, quick.offsets);
    let target = (long.pool_bytes + quick.pool_bytes) / 2;
    let between = with(200_000_000, target);
    assert!(between.pool_bytes <= target && !between.optimal);
    assert!(between.pool_bytes > long.pool_bytes);
}

#[test]
fn threads_change_nothing() {
    let mut requests: Vec<Request> = Style::Narrow.buffers(300, 1).into_iter().map(Request::from).collect();
    for request in requests.iter_mut().step_by(3).filter(|request| request.buffer.upper > request.buffer.lower + 2) {
        request.gaps = vec![gap(request.buffer.lower + 1, request.buffer.upper - 1)];
    }
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        pool.install(|| packed(&requests))
    };
    assert_eq!(with(1), with(4));
}

#[test]
fn a_deadline_leaves_a_packing_and_cancelling_none() {
    let mut requests: Vec<Request> = Style::Replaced.buffers(300, 1).into_iter().map(Request::from).collect();
    requests[0].offset = Some(512);
    let control = Control { deadline: Some(Instant::now()), ..Control::default() };
    let packing = pack_requests(&requests, GOAL, &control).expect("a packing");
    assert_eq!(verify_packing(&requests, &packing), Ok(()));
    assert!(packing.timed_out && !packing.optimal);
    let control = Control::default();
    control.cancel.store(true, Ordering::Relaxed);
    assert_eq!(pack_requests(&requests, GOAL, &control), Err(PackError::Cancelled));
}

/// Lives of up to 5 times, up to 6 bytes; some with a gap or two, with and without a window, some
/// fixed.
fn random_requests(numbers: &mut Random) -> Vec<Request> {
    let count = 2 + numbers.below(3);
    let mut requests = Vec::new();
    for _ in 0..count {
        let lower = numbers.below(4);
        let (upper, size) = (lower + 1 + numbers.below(5), 1 + numbers.below(6));
        let mut made = request(lower, upper, size);
        made.buffer.alignment_bytes = [1, 1, 1, 2, 4][numbers.below(5) as usize];
        let mut from = lower;
        while numbers.once_in(2) && from + 1 < upper {
            let begin = from + numbers.below(upper - from - 1);
            let end = begin + 1 + numbers.below(upper - begin);
            let first = numbers.below(size);
            let window = first..first + numbers.below(size - first + 1);
            made.gaps.push(Gap { lower: begin, upper: end, window: numbers.once_in(2).then_some(window) });
            from = end;
        }
        if numbers.once_in(4) {
            made.offset = Some(made.buffer.alignment_bytes * numbers.below(3));
        }
        requests.push(made);
    }
    requests
}

/// Whether each of the other requests has an offset at which the pool ends at `most` or below, byte
/// by byte and time by time.
fn fits(requests: &[Request], most: u64, taken: &mut Vec<(u64, u64)>) -> bool {
    let Some((request, others)) = requests.split_first() else { return true };
    let Buffer { lower, upper, size_bytes, alignment_bytes } = request.buffer;
    (0..=most.saturating_sub(size_bytes)).any(|offset| {
        if offset % alignment_bytes != 0
            || offset + size_bytes > most
            || request.offset.is_some_and(|fixed| fixed != offset)
        {
            return false;
        }
        let needs = |time: u64, byte: u64| {
            let gap = request.gaps.iter().find(|gap| (gap.lower..gap.upper).contains(&time));
            gap.is_none_or(|gap| gap.window.as_ref().is_some_and(|window| window.contains(&byte)))
        };
        let cells: Vec<(u64, u64)> = (lower..upper)
            .flat_map(|time| (0..size_bytes).map(move |byte| (time, byte)))
            .filter(|&(time, byte)| needs(time, byte))
            .map(|(time, byte)| (time, offset + byte))
            .collect();
        if cells.iter().any(|cell| taken.contains(cell)) {
            return false;
        }
        let before = taken.len();
        taken.extend(cells);
        let fits = fits(others, most, taken);
        taken.truncate(before);
        fits
    })
}

#[test]
fn small_problems_are_solved_as_brute_force_solves_them() {
    let mut numbers = Random::new(5);
    let (mut solved, mut refused, mut missed) = (0, 0, 0);
    let goal = Goal { work: 100_000, target_bytes: 0 };
    for _ in 0..1000 {
        let requests = random_requests(&mut numbers);
        let best = (0..64).find(|&most| fits(&requests, most, &mut Vec::new()));
        match pack_requests(&requests, goal, &Control::default()) {
            Ok(packing) => {
                assert_eq!(verify_packing(&requests, &packing), Ok(()), "{requests:?}");
                let best = best.expect("brute force finds what there is");
                assert!(packing.bound_bytes <= best && best <= packing.pool_bytes, "{requests:?}");
                missed += u32::from(packing.pool_bytes > best);
                solved += 1;
            }
            Err(PackError::FixedOverlap { .. }) => {
                assert_eq!(best, None, "{requests:?}");
                refused += 1;
            }
            Err(error) => panic!("{error}: {requests:?}"),
        }
    }
    assert!(solved > 750 && refused > 25, "{solved} {refused}");
    assert!(missed <= 5, "{missed}");
}

#[test]
fn instance_files_meet_their_bounds_with_a_part_of_the_packing_fixed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/layout");
    for name in ["A.1048576.csv", "K.1048576.csv", "input.12.csv"] {
        let text = std::fs::read_to_string(folder.join(name)).expect("readable");
        let mut requests = Instance::read(&text).expect("valid").requests;
        let best = packed(&requests);
        for (request, &offset) in requests.iter_mut().zip(&best.offsets).step_by(4) {
            request.offset = Some(offset);
        }
        let packing = packed(&requests);
        assert!(packing.optimal && packing.pool_bytes == best.pool_bytes, "{name}: {packing:?}");
    }
}

#[test]
fn gaps_never_make_a_pool_larger() {
    let mut smaller = 0;
    for (style, seed) in [(Style::Narrow, 1), (Style::Replaced, 2), (Style::Training, 3)] {
        let solid: Vec<Request> = style.buffers(300, seed).into_iter().map(Request::from).collect();
        let mut gapped = solid.clone();
        for request in gapped.iter_mut().filter(|request| request.buffer.upper > request.buffer.lower + 2) {
            request.gaps = vec![gap(request.buffer.lower + 1, request.buffer.upper - 1)];
        }
        let goal = |work| Goal { work, target_bytes: 0 };
        let before = pack_requests(&solid, goal(1_000_000), &Control::default()).expect("a packing");
        let after = pack_requests(&gapped, goal(2_000_000), &Control::default()).expect("a packing");
        assert!(after.bound_bytes <= before.bound_bytes, "{}", style.name());
        assert!(after.pool_bytes <= before.pool_bytes, "{}", style.name());
        smaller += u32::from(after.pool_bytes < before.pool_bytes);
    }
    assert!(smaller > 0);
}
