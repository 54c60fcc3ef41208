//! Bare layout problems: made at random, checked, solved by brute force.

use roam_core::packing::{Buffer, Packing};
use roam_core::rng::Random;

/// No two buffers share a byte at any time, and the figures are what they claim to be.
pub(crate) fn check(buffers: &[Buffer], packing: &Packing) {
    assert_eq!(buffers.len(), packing.offsets.len());
    let mut top = 0;
    let end = |at: usize| packing.offsets[at] + buffers[at].size_bytes;
    let mut by_lower: Vec<usize> = (0..buffers.len()).collect();
    by_lower.sort_by_key(|&at| buffers[at].lower);
    for (place, &a) in by_lower.iter().enumerate() {
        assert_eq!(packing.offsets[a] % buffers[a].alignment_bytes, 0, "buffer {a} is not aligned");
        top = top.max(end(a));
        let later = by_lower[place + 1..].iter().take_while(|&&b| buffers[b].lower < buffers[a].upper);
        for &b in later {
            let apart = end(a) <= packing.offsets[b] || end(b) <= packing.offsets[a];
            let empty = buffers[a].size_bytes == 0 || buffers[b].size_bytes == 0;
            assert!(apart || empty, "buffers {a} and {b} share bytes");
        }
    }
    assert_eq!(top, packing.pool_bytes);
    assert_eq!(live_bytes(buffers), packing.live_bytes);
    assert!(packing.pool_bytes >= packing.live_bytes);
    assert!(packing.optimal || packing.pool_bytes > packing.live_bytes);
}

/// Most bytes at any buffer's first time.
pub(crate) fn live_bytes(buffers: &[Buffer]) -> u64 {
    let at = |time| buffers.iter().filter(|b| b.lower <= time && time < b.upper).map(|b| b.size_bytes).sum();
    buffers.iter().map(|buffer| at(buffer.lower)).max().unwrap_or(0)
}

/// The smallest pool below `limit`, or `limit`. Some sequence, each buffer at the lowest offset
/// that it can have and none below the one before, makes it: take the buffers of a smallest packing
/// whose offsets have the least sum, in the sequence of their offsets.
pub(crate) fn brute_force(buffers: &[Buffer], limit: u64) -> u64 {
    fn extend(buffers: &[Buffer], placed: &mut Vec<(usize, u64)>, top: u64, best: &mut u64) {
        if top >= *best {
            return;
        }
        if placed.len() == buffers.len() {
            *best = top;
            return;
        }
        let last = placed.last().map_or(0, |&(_, offset)| offset);
        for (at, buffer) in buffers.iter().enumerate() {
            if placed.iter().any(|&(other, _)| other == at) {
                continue;
            }
            let meets = |other: &Buffer| other.lower < buffer.upper && buffer.lower < other.upper;
            let tops = placed.iter().filter(|&&(other, _)| meets(&buffers[other]));
            let top_below = tops.map(|&(other, offset)| offset + buffers[other].size_bytes).max().unwrap_or(0);
            let offset = top_below.next_multiple_of(buffer.alignment_bytes);
            if offset < last {
                continue;
            }
            placed.push((at, offset));
            extend(buffers, placed, top.max(offset + buffer.size_bytes), best);
            placed.pop();
        }
    }
    let mut best = limit;
    extend(buffers, &mut Vec::new(), 0, &mut best);
    best
}

/// At every time the same bytes are needed: two of the alive buffers are replaced by two others at
/// each. Nothing may be wasted anywhere, so that many such problems have no packing at the bound.
pub(crate) fn full(random: &mut Random, count: usize, alive: usize, sizes: u64) -> Vec<Buffer> {
    let buffer = |lower, size_bytes| Buffer { lower, upper: u64::MAX, size_bytes, alignment_bytes: 1 };
    let mut buffers: Vec<Buffer> = (0..alive).map(|_| buffer(0, 1 + random.below(sizes))).collect();
    let mut held: Vec<usize> = (0..alive).collect();
    let mut time = 0;
    while buffers.len() < count {
        time += 1;
        let mut bytes = 0;
        for _ in 0..2 {
            let at = held.swap_remove(random.below(held.len() as u64) as usize);
            buffers[at].upper = time;
            bytes += buffers[at].size_bytes;
        }
        let part = 1 + random.below(bytes - 1);
        for size in [part, bytes - part] {
            held.push(buffers.len());
            buffers.push(buffer(time, size));
        }
    }
    buffers
}

/// Random lifetimes within a horizon, sizes up to `sizes` units, one of the alignments each.
pub(crate) fn random(
    random: &mut Random,
    count: u64,
    horizon: u64,
    sizes: u64,
    unit: u64,
    alignments: &[u64],
) -> Vec<Buffer> {
    (0..count)
        .map(|_| {
            let lower = random.below(horizon);
            Buffer {
                lower,
                upper: lower + 1 + random.below(horizon / 2 + 1),
                size_bytes: unit * (1 + random.below(sizes)),
                alignment_bytes: alignments[random.below(alignments.len() as u64) as usize],
            }
        })
        .collect()
}

/// Four to seven buffers, each with an alignment of its own: some are empty, and sizes seldom fill
/// what alignment parts.
pub(crate) fn mixed(random: &mut Random) -> Vec<Buffer> {
    let (count, horizon, sizes) = (4 + random.below(4), 3 + random.below(7), 2 + random.below(12));
    let most = 1 + random.below(5);
    let buffer = |random: &mut Random| {
        let lower = random.below(horizon);
        Buffer {
            lower,
            upper: lower + 1 + random.below(horizon / 2 + 1),
            size_bytes: random.below(sizes + 1),
            alignment_bytes: 1 << random.below(most + 1),
        }
    };
    (0..count).map(|_| buffer(random)).collect()
}
