//! Packing of buffers that are not solid rectangles free to lie anywhere: with gaps, and at fixed offsets.
//!
//! What is fixed comes first. Every other buffer goes, in some sequence, to the lowest offset at which none of its *pieces* (its bytes
//! between gaps, or in a gap's window) meets a piece in its way. A packing of the same buffers without regard to gaps and fixed offsets comes
//! first: where nothing is fixed it is a packing all the same, and else everything is placed as near to it as what is fixed permits. Then
//! a local search changes the sequence: what ends highest, or holds up what does, is placed earlier.

use super::blocks::Blocks;
use super::buffers::{Buffer, Goal, PackError, Packing, blocks, solid};
use super::gaps::Gaps;
use super::requests::Request;
use super::weighted;
use crate::control::{Control, Stop, Watch};
use crate::exact::ExactTier;
use crate::graph::round_up;
use crate::plan::{BoundRoute, Exact};
use crate::synthetic::Random;
use std::cmp::Reverse;
use std::ops::Range;
use std::time::{Duration, Instant};

/// One part in so many of the work goes into a packing without regard to gaps.
const SOLID_SHARE: u64 = 2;
/// One greedy packing may use up one part in so many of what is left.
const GREEDY_SHARE: u64 = 8;
/// Most buffers that change their places in the sequence at once.
const MOST_MOVES: u64 = 3;
/// What looking at one address span counts, and what placing a buffer does beside that, in comparisons.
const PER_SPAN: u64 = 8;
const PER_BUFFER: u64 = 256;
/// Changed sequences in a row without a smaller pool after which the search gives up.
const MOST_FRUITLESS: u32 = 50_000;
/// Of the search's random numbers.
const SEED: u64 = 1;

/// The requests as pieces.
struct Pieces<'a> {
    requests: &'a [Request],
    blocks: Blocks,
    /// Per piece how far its first byte is from its request's.
    above: Vec<u64>,
    /// Per request the first of its pieces, and how many there are in the end.
    first: Vec<usize>,
}

impl<'a> Pieces<'a> {
    fn new(requests: &'a [Request]) -> Self {
        let (mut rectangles, mut above, mut first) = (Vec::new(), Vec::new(), vec![0]);
        for request in requests {
            for piece in request.pieces() {
                let size_bytes = piece.bytes.end - piece.bytes.start;
                rectangles.push(Buffer { lower: piece.lower, upper: piece.upper, size_bytes, alignment_bytes: 1 });
                above.push(piece.bytes.start);
            }
            first.push(rectangles.len());
        }
        Pieces { requests, blocks: blocks(rectangles.into_iter()), above, first }
    }

    fn of(&self, request: usize) -> Range<usize> {
        self.first[request]..self.first[request + 1]
    }

    fn end(&self, request: usize, offset: u64) -> u64 {
        offset + self.requests[request].buffer.size_bytes
    }

    fn is_fixed(&self, request: usize) -> bool {
        self.requests[request].offset.is_some()
    }

    /// Those that are not fixed, the largest key first, and among equals the earliest.
    fn sorted_by<K: Ord>(&self, key: impl Fn(usize) -> K) -> Vec<usize> {
        let mut free: Vec<usize> = (0..self.requests.len()).filter(|&request| !self.is_fixed(request)).collect();
        free.sort_by_cached_key(|&request| (Reverse(key(request)), self.requests[request].buffer.lower, request));
        free
    }

    /// Bytes times times.
    fn area(&self, request: usize) -> u128 {
        let areas = self.of(request).map(|at| &self.blocks.all[at]);
        areas.map(|block| u128::from(block.size) * u128::from(block.end - block.start)).sum()
    }

    fn pool_bytes(&self, offsets: &[u64]) -> u64 {
        (0..offsets.len()).map(|request| self.end(request, offsets[request])).max().unwrap_or(0)
    }

    /// No packing takes less than what is live at once, than what is fixed, than the largest.
    fn bound_bytes(&self) -> u64 {
        let alone = |request: usize| self.end(request, self.requests[request].offset.unwrap_or(0));
        (0..self.requests.len()).map(alone).max().unwrap_or(0).max(self.blocks.floor())
    }

    fn is_free(&self, gaps: &mut Gaps, request: usize, offset: u64) -> bool {
        self.of(request).all(|at| gaps.is_free(&self.blocks.all[at], offset + self.above[at]))
    }

    fn lowest(&self, gaps: &mut Gaps, request: usize) -> u64 {
        let alignment = self.requests[request].buffer.alignment_bytes;
        let mut offset = 0;
        loop {
            let before = offset;
            for at in self.of(request) {
                let from = offset + self.above[at];
                let address = gaps.lowest_from(&self.blocks.all[at], from);
                if address > from {
                    offset = round_up(address - self.above[at], alignment);
                }
            }
            if offset == before {
                return offset;
            }
        }
    }

    fn insert(&self, gaps: &mut Gaps, request: usize, offset: u64) {
        for at in self.of(request) {
            gaps.insert(&self.blocks.all[at], offset + self.above[at]);
        }
    }

    /// What is fixed, in its place.
    fn fixed(&self) -> Result<Gaps, PackError> {
        let mut gaps = Gaps::new(self.blocks.times);
        for (request, offset) in
            self.requests.iter().enumerate().filter_map(|(at, request)| Some((at, request.offset?)))
        {
            if !self.is_free(&mut gaps, request, offset) {
                let in_the_way = |&other: &usize| {
                    self.requests[other].offset.is_some_and(|beside| self.share(request, offset, other, beside))
                };
                let first = (0..request).find(in_the_way).unwrap_or(request);
                return Err(PackError::FixedOverlap { first, second: request });
            }
            self.insert(&mut gaps, request, offset);
        }
        Ok(gaps)
    }

    /// Whether two requests at these offsets need a byte at the same time.
    fn share(&self, one: usize, offset: u64, other: usize, beside: u64) -> bool {
        let span = |at: usize, offset: u64| offset + self.above[at]..offset + self.above[at] + self.blocks.all[at].size;
        self.of(one).any(|a| {
            self.of(other).any(|b| {
                let (a_span, b_span) = (span(a, offset), span(b, beside));
                self.blocks.all[a].meets(&self.blocks.all[b]) && a_span.start < b_span.end && b_span.start < a_span.end
            })
        })
    }

    /// Offsets where nothing is placed yet but what is fixed.
    fn unplaced(&self) -> Vec<u64> {
        self.requests.iter().map(|request| request.offset.unwrap_or(0)).collect()
    }

    /// Each of a sequence at its lowest offset; `None` where one ends above `most`, or once `work` is used up.
    fn place(
        &self,
        fixed: &Gaps,
        sequence: &[usize],
        most: u64,
        work: &mut u64,
        watch: &Watch,
    ) -> Result<Option<Vec<u64>>, Stop> {
        let mut gaps = fixed.clone();
        let mut offsets = self.unplaced();
        let (before, begun) = (gaps.looked_at(), *work);
        for (at, &request) in sequence.iter().enumerate() {
            if at % 64 == 0 {
                watch.check()?;
            }
            offsets[request] = self.lowest(&mut gaps, request);
            *work = begun.saturating_sub(PER_SPAN * (gaps.looked_at() - before) + PER_BUFFER * (at as u64 + 1));
            if self.end(request, offsets[request]) > most || *work == 0 {
                return Ok(None);
            }
            self.insert(&mut gaps, request, offsets[request]);
        }
        Ok(Some(offsets))
    }

    /// Each where it is wished, if that is possible; all others after them, the largest area first.
    fn place_as_wished(
        &self,
        fixed: &Gaps,
        wish: impl Fn(usize) -> Option<u64>,
        watch: &Watch,
    ) -> Result<Vec<u64>, Stop> {
        let mut gaps = fixed.clone();
        let mut offsets = self.unplaced();
        let mut others = Vec::new();
        for request in self.sorted_by(|request| self.area(request)) {
            watch.check()?;
            let Buffer { size_bytes, alignment_bytes, .. } = self.requests[request].buffer;
            let can_be = |wish: &u64| {
                let end = wish.checked_add(size_bytes);
                wish % alignment_bytes == 0 && end.is_some_and(|end| end <= i64::MAX as u64)
            };
            match wish(request).filter(can_be) {
                Some(offset) if self.is_free(&mut gaps, request, offset) => {
                    self.insert(&mut gaps, request, offset);
                    offsets[request] = offset;
                }
                _ => others.push(request),
            }
        }
        for request in others {
            watch.check()?;
            offsets[request] = self.lowest(&mut gaps, request);
            self.insert(&mut gaps, request, offsets[request]);
        }
        Ok(offsets)
    }

    /// All that is not fixed as solid rectangles above all that is: always found, and quickly.
    fn above_fixed(&self, watch: &Watch) -> Result<Vec<u64>, Stop> {
        let free: Vec<usize> = (0..self.requests.len())
            .filter(|&request| !self.is_fixed(request) && self.requests[request].buffer.size_bytes > 0)
            .collect();
        let strictest = free.iter().map(|&request| self.requests[request].buffer.alignment_bytes).max().unwrap_or(1);
        let fixed =
            (0..self.requests.len()).filter_map(|request| Some(self.end(request, self.requests[request].offset?)));
        let base = round_up(fixed.max().unwrap_or(0), strictest);
        let placed = weighted::place(&blocks(free.iter().map(|&request| self.requests[request].buffer)), watch)?;
        let mut offsets = self.unplaced();
        for (request, offset) in free.into_iter().zip(placed) {
            offsets[request] = base + offset;
        }
        Ok(offsets)
    }

    /// Those that end highest, and what each of them rests on, down to what rests on nothing: one such chain, by chance.
    fn critical(&self, offsets: &[u64], random: &mut Random) -> Vec<usize> {
        let pool = self.pool_bytes(offsets);
        let mut chain: Vec<usize> = Vec::new();
        let mut holds: Vec<usize> = (0..offsets.len()).filter(|&at| self.end(at, offsets[at]) == pool).collect();
        while !holds.is_empty() {
            let request = holds[random.below(holds.len() as u64) as usize];
            chain.push(request);
            let just_below = |&other: &usize| {
                let slack = self.requests[request].buffer.alignment_bytes;
                let lower = offsets[request].checked_sub(slack);
                offsets[other] < offsets[request]
                    && lower.is_some_and(|lower| self.share(request, lower, other, offsets[other]))
            };
            holds = (0..offsets.len()).filter(just_below).collect();
        }
        chain.retain(|&request| !self.is_fixed(request));
        chain
    }
}

/// The best so far.
struct Best {
    method: &'static str,
    offsets: Vec<u64>,
    pool_bytes: u64,
    /// A pool of this size is small enough.
    enough: u64,
}

impl Best {
    fn offer(&mut self, method: &'static str, offsets: Vec<u64>, pieces: &Pieces<'_>) {
        let pool_bytes = pieces.pool_bytes(&offsets);
        if pool_bytes < self.pool_bytes {
            (self.method, self.offsets, self.pool_bytes) = (method, offsets, pool_bytes);
        }
    }

    fn is_done(&self) -> bool {
        self.pool_bytes <= self.enough
    }
}

/// Offsets at the hints, where these are possible together, of requests of which none is fixed. None where the time is over.
pub(super) fn hinted(requests: &[Request], control: &Control) -> Result<Option<Vec<u64>>, PackError> {
    let pieces = Pieces::new(requests);
    match pieces.place_as_wished(
        &pieces.fixed()?,
        |request| requests[request].hint,
        &Watch::new(control, control.deadline),
    ) {
        Ok(offsets) => Ok(Some(offsets)),
        Err(Stop::TimedOut) => Ok(None),
        Err(Stop::Cancelled) => Err(PackError::Cancelled),
    }
}

/// See the module's documentation.
pub(super) fn arrange(requests: &[Request], goal: Goal, control: &Control) -> Result<Packing, PackError> {
    let pieces = Pieces::new(requests);
    let fixed = pieces.fixed()?;
    let watch = Watch::new(control, control.deadline);
    let bound_bytes = pieces.bound_bytes();
    let above = pieces.above_fixed(&watch.patient()).map_err(|_| PackError::Cancelled)?;
    let pool_bytes = pieces.pool_bytes(&above);
    let method = if requests.iter().all(|request| request.offset.is_some()) { "fixed" } else { "weighted" };
    let mut best = Best { method, offsets: above, pool_bytes, enough: bound_bytes.max(goal.target_bytes) };
    let timed_out = match improve(&pieces, &fixed, &mut best, goal.work, control, &watch) {
        Ok(()) => false,
        Err(Stop::TimedOut) => true,
        Err(Stop::Cancelled) => return Err(PackError::Cancelled),
    };
    Ok(Packing {
        offsets: best.offsets,
        pool_bytes: best.pool_bytes,
        live_bytes: pieces.blocks.floor(),
        bound_bytes,
        bound_route: BoundRoute::Floor,
        exact: ExactTier::new(Exact::Off, None).report,
        method: best.method,
        optimal: best.pool_bytes <= bound_bytes,
        timed_out,
    })
}

/// Everything there is, one after another, until the best is good enough or the work is used up.
fn improve(
    pieces: &Pieces<'_>,
    fixed: &Gaps,
    best: &mut Best,
    mut work: u64,
    control: &Control,
    watch: &Watch,
) -> Result<(), Stop> {
    if best.is_done() {
        return Ok(());
    }
    let requests = pieces.requests;
    if requests.iter().any(|request| request.hint.is_some()) {
        let offsets = pieces.place_as_wished(fixed, |request| requests[request].hint, watch)?;
        best.offer("hint", offsets, pieces);
        if best.is_done() {
            return Ok(());
        }
    }
    let share = work / SOLID_SHARE;
    work -= share;
    let free = without_regard(requests, Goal { work: share, target_bytes: best.enough }, control, watch)?;
    if requests.iter().all(|request| request.offset.is_none()) {
        best.offer(free.method, free.offsets.clone(), pieces);
    }
    let offsets = pieces.place_as_wished(fixed, |request| Some(free.offsets[request]), watch)?;
    best.offer(free.method, offsets, pieces);
    let by_offset = pieces.sorted_by(|request| Reverse(free.offsets[request]));
    greedy(pieces, fixed, by_offset, best, &mut work, watch)?;
    search(pieces, fixed, best, &mut work, watch)
}

/// A packing of the same buffers as solid rectangles that may lie anywhere, within half of the time that is left.
fn without_regard(requests: &[Request], goal: Goal, control: &Control, watch: &Watch) -> Result<Packing, Stop> {
    let half = watch.seconds_left().map(|left| Duration::from_secs_f64(left / 2.0));
    let control = Control {
        cancel: control.cancel.clone(),
        enough: control.enough.clone(),
        deadline: half.and_then(|half| Instant::now().checked_add(half)),
        ..Control::default()
    };
    solid(requests, None, goal, &control).map_err(|_| Stop::Cancelled)
}

/// A portfolio of sequences, one of which is given; the last is that of the best packing's own offsets, which pushes everything down as far
/// as it goes.
fn greedy(
    pieces: &Pieces<'_>,
    fixed: &Gaps,
    given: Vec<usize>,
    best: &mut Best,
    work: &mut u64,
    watch: &Watch,
) -> Result<(), Stop> {
    let buffer = |request: usize| pieces.requests[request].buffer;
    let lifetime = |request: usize| buffer(request).upper - buffer(request).lower;
    let sequences: [(&'static str, Vec<usize>); 5] = [
        ("by_offset", given),
        ("size", pieces.sorted_by(|request| (buffer(request).size_bytes, lifetime(request)))),
        ("area", pieces.sorted_by(|request| pieces.area(request))),
        ("lifetime", pieces.sorted_by(|request| (lifetime(request), buffer(request).size_bytes))),
        ("first_fit", pieces.sorted_by(|request| (Reverse(buffer(request).lower), buffer(request).size_bytes))),
    ];
    let mut try_one = |method, sequence: &[usize], best: &mut Best| {
        let mut share = *work / GREEDY_SHARE;
        *work -= share;
        let placed = pieces.place(fixed, sequence, best.pool_bytes, &mut share, watch);
        *work += share;
        if let Some(offsets) = placed? {
            best.offer(method, offsets, pieces);
        }
        Ok(())
    };
    for (method, sequence) in &sequences {
        if best.is_done() {
            return Ok(());
        }
        try_one(method, sequence, best)?;
    }
    let pushed = pieces.sorted_by(|request| Reverse(best.offsets[request]));
    try_one("pushed_down", &pushed, best)
}

/// Changes the sequence as long as that makes nothing worse.
fn search(pieces: &Pieces<'_>, fixed: &Gaps, best: &mut Best, work: &mut u64, watch: &Watch) -> Result<(), Stop> {
    let mut random = Random::new(SEED);
    let mut sequence = pieces.sorted_by(|request| Reverse(best.offsets[request]));
    let mut offsets = best.offsets.clone();
    let mut fruitless = 0;
    while *work > 0 && !best.is_done() && sequence.len() > 1 && fruitless < MOST_FRUITLESS {
        watch.check()?;
        let before = best.pool_bytes;
        let mut changed = sequence.clone();
        let chain = pieces.critical(&offsets, &mut random);
        *work = work.saturating_sub(((chain.len() + 2) * pieces.blocks.all.len()) as u64);
        for _ in 0..=random.below(MOST_MOVES) {
            let moved = match chain.len() {
                0 => random.below(changed.len() as u64) as usize,
                many => {
                    let request = chain[random.below(many as u64) as usize];
                    changed.iter().position(|&at| at == request).unwrap_or(0)
                }
            };
            let request = changed.remove(moved);
            changed.insert(random.below(moved as u64 + 1) as usize, request);
        }
        if let Some(placed) = pieces.place(fixed, &changed, best.pool_bytes, work, watch)? {
            best.offer("local", placed.clone(), pieces);
            (sequence, offsets) = (changed, placed);
        }
        fruitless = if best.pool_bytes < before { 0 } else { fruitless + 1 };
    }
    Ok(())
}
