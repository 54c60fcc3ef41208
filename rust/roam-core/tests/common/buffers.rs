//! Bare layout problems: made at random, checked, solved by brute force.

use roam_core::packing::{Buffer, Packing};
use roam_core::rng::Random;
use std::collections::HashSet;

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
/// whose offsets have the least sum, in the sequence of their offsets, and of their numbers where
/// these are equal. Empty buffers are at 0.
pub(crate) fn brute_force(buffers: &[Buffer], limit: u64) -> u64 {
    let mut buffers = buffers.to_vec();
    buffers.retain(|buffer| buffer.size_bytes > 0);
    let mut times: Vec<u64> = buffers.iter().map(|buffer| buffer.lower).collect();
    times.sort_unstable();
    times.dedup();
    let alive = |buffer: &Buffer| {
        let is_alive = |&time: &usize| buffer.lower <= times[time] && times[time] < buffer.upper;
        (0..times.len()).filter(is_alive).collect()
    };
    let mut sequences = Sequences {
        alive: buffers.iter().map(alive).collect(),
        left: (0..buffers.len()).collect(),
        tops: vec![0; times.len()],
        best: limit,
        seen: HashSet::new(),
        buffers,
    };
    sequences.extend((0, 0));
    sequences.best
}

/// What is left, the tops, and the last offset and number: what can follow depends on no more.
type Situation = (Vec<usize>, Vec<u64>, (u64, usize));

/// Sequences of buffers, each placed in turn.
struct Sequences {
    buffers: Vec<Buffer>,
    /// Per buffer, at which of the times that begin one it is alive.
    alive: Vec<Vec<usize>>,
    /// What is not placed yet.
    left: Vec<usize>,
    /// Where the placed buffers end, by time.
    tops: Vec<u64>,
    best: u64,
    seen: HashSet<Situation>,
}

impl Sequences {
    /// Tries all that can follow the last offset and number.
    fn extend(&mut self, last: (u64, usize)) {
        if self.least(last) >= self.best || !self.seen.insert((self.left.clone(), self.tops.clone(), last)) {
            return;
        }
        if self.left.is_empty() {
            self.best = self.tops.iter().copied().max().unwrap_or(0);
        }
        for place in 0..self.left.len() {
            let at = self.left[place];
            let offset = self.offset(at);
            // Of equal buffers the first comes first.
            let is_first = self.left[..place].iter().all(|&other| self.buffers[other] != self.buffers[at]);
            if (offset, at) < last || !is_first {
                continue;
            }
            let before = self.tops.clone();
            self.alive[at].iter().for_each(|&time| self.tops[time] = offset + self.buffers[at].size_bytes);
            self.left.remove(place);
            self.extend((offset, at));
            self.left.insert(place, at);
            self.tops = before;
        }
    }

    /// The lowest offset on top of what is placed.
    fn offset(&self, at: usize) -> u64 {
        let tops = self.alive[at].iter().map(|&time| self.tops[time]);
        tops.max().unwrap_or(0).next_multiple_of(self.buffers[at].alignment_bytes)
    }

    /// No pool that follows is smaller.
    fn least(&self, last: (u64, usize)) -> u64 {
        // What would be too low now comes on top of another one that is left.
        let lowest = |&at: &usize| {
            let (offset, buffer) = (self.offset(at), &self.buffers[at]);
            if (offset, at) >= last {
                return offset;
            }
            let meets = |other: &Buffer| other.lower < buffer.upper && buffer.lower < other.upper;
            let others = self.left.iter().filter(|&&other| other != at && meets(&self.buffers[other]));
            let top = others.map(|&other| last.0 + self.buffers[other].size_bytes).min();
            top.map_or(u64::MAX, |top| top.next_multiple_of(buffer.alignment_bytes))
        };
        let lowest: Vec<(usize, u64)> = self.left.iter().map(|at| (*at, lowest(at))).collect();
        let least = |time: usize| {
            let alive = lowest.iter().filter(|(at, _)| self.alive[*at].contains(&time));
            let sizes = alive.clone().map(|&(at, _)| self.buffers[at].size_bytes).sum();
            alive.map(|&(_, offset)| offset).min().map_or(self.tops[time], |offset| offset.saturating_add(sizes))
        };
        (0..self.tops.len()).map(least).max().unwrap_or(0)
    }
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
