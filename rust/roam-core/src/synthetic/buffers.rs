//! Made-up layout problems: bare buffers in several styles, easy and hard to pack.

use crate::packing::Buffer;
use crate::rng::Random;

/// How the lifetimes and sizes of made-up buffers come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Sizes, starts and lifetimes drawn evenly; each buffer meets nearly a fifth of the others.
    Wide,
    /// As `Wide`, with lifetimes so short that some fifty buffers are alive at a time.
    Narrow,
    /// As `Wide`, with few large and many small sizes, few long and many short lifetimes, each over
    /// several orders of magnitude.
    Skewed,
    /// A training step: activations freed in the reverse of the sequence in which they were made,
    /// short-lived temporaries of all sizes between, and gradients that wait for one update at the
    /// end.
    Training,
    /// As many bytes at every time: again and again two of the alive buffers give way to two others
    /// of together the same size. Nothing may be wasted anywhere, and whether a packing without
    /// waste exists is not known.
    Replaced,
    /// A rectangle of bytes and times cut into pieces: a packing without any waste exists, and only
    /// such a one meets the bound.
    Dissected,
}

impl Style {
    /// All of them.
    pub const ALL: [Style; 6] =
        [Style::Wide, Style::Narrow, Style::Skewed, Style::Training, Style::Replaced, Style::Dissected];

    /// The name in lists.
    pub fn name(self) -> &'static str {
        match self {
            Style::Wide => "wide",
            Style::Narrow => "narrow",
            Style::Skewed => "skewed",
            Style::Training => "training",
            Style::Replaced => "replaced",
            Style::Dissected => "dissected",
        }
    }

    /// About `count` buffers of this style; equal seeds give equal buffers.
    pub fn buffers(self, count: u32, seed: u64) -> Vec<Buffer> {
        let mut random = Random::new(seed);
        let count = u64::from(count);
        match self {
            Style::Wide => even(&mut random, count, count / 5 + 1),
            Style::Narrow => even(&mut random, count, 100),
            Style::Skewed => skewed(&mut random, count),
            Style::Training => training(&mut random, count),
            Style::Replaced => replaced(&mut random, count, 24),
            Style::Dissected => dissected(&mut random, count),
        }
    }
}

/// Bytes that all sizes of made-up buffers are multiples of.
const UNIT: u64 = 512;

fn buffer(lower: u64, lifetime: u64, units: u64) -> Buffer {
    Buffer { lower, upper: lower + lifetime, size_bytes: UNIT * units, alignment_bytes: UNIT }
}

/// As many times as buffers; lifetimes of up to `longest`.
fn even(random: &mut Random, count: u64, longest: u64) -> Vec<Buffer> {
    (0..count)
        .map(|_| {
            let lower = random.below(count);
            buffer(lower, 1 + random.below(longest), 1 + random.below(2000))
        })
        .collect()
}

/// A number of [1, 2^bits), small ones as likely as large ones on a logarithmic scale.
fn logarithmic(random: &mut Random, bits: u64) -> u64 {
    let magnitude = 1 << random.below(bits);
    magnitude + random.below(magnitude)
}

fn skewed(random: &mut Random, count: u64) -> Vec<Buffer> {
    let bits = u64::from(count.max(2).ilog2());
    (0..count)
        .map(|_| {
            let lower = random.below(count);
            let lifetime = logarithmic(random, bits);
            buffer(lower, lifetime, logarithmic(random, 16))
        })
        .collect()
}

/// Layers of 10 buffers: of each, 2 activations, 2 temporaries in the forward and 4 in the backward
/// pass, 2 gradients.
fn training(random: &mut Random, count: u64) -> Vec<Buffer> {
    let layers = count / 10;
    let end = 20 * layers;
    let mut buffers = Vec::new();
    for layer in 0..layers {
        let width = 1 << random.below(4);
        let (forward, backward) = (8 * layer, end - 12 * (layer + 1));
        for at in 0..2 {
            let lower = forward + 2 * at;
            let upper = backward + 10 - 3 * at - random.below(3);
            buffers.push(buffer(lower, upper - lower, width * (60 + random.below(8))));
            buffers.push(buffer(lower + 1, 1 + random.below(6), width * (1 + random.below(400))));
            let lower = backward + 4 * at + random.below(4);
            buffers.push(buffer(lower, end + layer - lower, 1 + random.below(4)));
        }
        for at in 0..4 {
            buffers.push(buffer(backward + 2 * at, 1 + random.below(5), width * (1 + random.below(400))));
        }
    }
    buffers
}

fn replaced(random: &mut Random, count: u64, alive: u64) -> Vec<Buffer> {
    let mut buffers: Vec<Buffer> = (0..alive).map(|_| buffer(0, 1, 1 + random.below(2000))).collect();
    let mut held: Vec<usize> = (0..buffers.len()).collect();
    let mut time = 0;
    while (buffers.len() as u64) < count {
        time += 1;
        let mut units = 0;
        for _ in 0..2 {
            let at = held.swap_remove(random.below(held.len() as u64) as usize);
            buffers[at].upper = time;
            units += buffers[at].size_bytes / UNIT;
        }
        let part = 1 + random.below(units - 1);
        for units in [part, units - part] {
            held.push(buffers.len());
            buffers.push(buffer(time, 1, units));
        }
    }
    for at in held {
        buffers[at].upper = time + 1;
    }
    buffers
}

/// Pieces are cut in two, the largest first, at a random place across their longer side, until
/// there are enough.
fn dissected(random: &mut Random, count: u64) -> Vec<Buffer> {
    let side = 1 << 20;
    // Area and, for a fixed sequence among equals, number; times and units.
    let mut pieces = std::collections::BinaryHeap::from([(side * side, 0u64, 0u64, side, side)]);
    while (pieces.len() as u64) < count {
        let Some((_, number, lower, lifetime, units)) = pieces.pop() else { break };
        let next = number + 2 * pieces.len() as u64 + 1;
        let longer = lifetime.max(units);
        if longer < 4 {
            pieces.push((0, number, lower, lifetime, units));
            break;
        }
        let cut = longer / 4 + random.below(longer / 2) + 1;
        let parts = if lifetime >= units {
            [(lower, cut, units), (lower + cut, lifetime - cut, units)]
        } else {
            [(lower, lifetime, cut), (lower, lifetime, units - cut)]
        };
        for ((lower, lifetime, units), number) in parts.into_iter().zip([next, next + 1]) {
            pieces.push((lifetime * units, number, lower, lifetime, units));
        }
    }
    pieces.into_sorted_vec().into_iter().map(|(_, _, lower, lifetime, units)| buffer(lower, lifetime, units)).collect()
}
