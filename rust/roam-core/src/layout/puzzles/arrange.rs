//! Packing of buffers that are not solid rectangles free to lie anywhere: with gaps, and at fixed
//! offsets.
//!
//! What is fixed comes first. Every other buffer goes, in some sequence, to the lowest offset at
//! which none of its *pieces* (its bytes between gaps, or in a gap's window) meets a piece in its
//! way. A packing of the same buffers without regard to gaps and fixed offsets comes first: where
//! nothing is fixed it is a packing all the same, and else everything is placed as near to it as
//! what is fixed permits. Then a local search changes the sequence: what ends highest, or holds up
//! what does, is placed earlier.

use super::check::PackError;
use super::solid::{Goal, blocks, solid};
use crate::control::{Control, Stop, Watch};
use crate::exact::ExactTier;
use crate::graph::round_up;
use crate::layout::blocks::Blocks;
use crate::layout::packers::gaps::Gaps;
use crate::layout::packers::weighted;
use crate::layout::work::portfolio_work;
use crate::packing::{Buffer, Packing, Request};
use crate::plan::{BoundRoute, Exact};
use crate::rng::Random;
use std::cmp::Reverse;
use std::ops::Range;
use std::time::{Duration, Instant};

/// 1 / `SOLID_SHARE` of the work goes into a packing that ignores gaps.
const SOLID_SHARE: u64 = 2;
/// One greedy packing may use 1 / `GREEDY_SHARE` of what is left.
const GREEDY_SHARE: u64 = 8;
/// Most buffers that change their places in the sequence at once.
const MOST_MOVES: u64 = 3;
/// How many comparisons looking at one address span counts as, and how many more placing a piece
/// does.
const PER_SPAN: u64 = 8;
const PER_PIECE: u64 = 256;
/// Changed sequences in a row without a smaller pool after which the search gives up.
const MOST_FRUITLESS: u32 = 50_000;
/// Seed of the search's random numbers.
const SEED: u64 = 1;

/// The requests as pieces.
struct Pieces<'a> {
    requests: &'a [Request],
    blocks: Blocks,
    /// Per piece how far its first byte is from its request's.
    above: Vec<u64>,
    /// Per request the number of its first piece; the last entry is the number of all pieces.
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

    /// The requests that are not fixed, the largest key first, and among equals the earliest.
    fn sorted_by<K: Ord>(&self, key: impl Fn(usize) -> K) -> Vec<usize> {
        let mut free: Vec<usize> = (0..self.requests.len()).filter(|&request| !self.is_fixed(request)).collect();
        free.sort_by_cached_key(|&request| (Reverse(key(request)), self.requests[request].buffer.lower, request));
        free
    }

    /// The request's bytes, multiplied by how long it needs them.
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

    /// What is fixed, in its place.
    fn fixed(&self) -> Result<Gaps, PackError> {
        let mut gaps = Gaps::new(self.blocks.times);
        for (request, offset) in
            self.requests.iter().enumerate().filter_map(|(at, request)| Some((at, request.offset?)))
        {
            let pieces = self.of(request);
            if !pieces.clone().all(|at| gaps.is_free(&self.blocks.all[at], offset + self.above[at])) {
                let in_the_way = |&other: &usize| {
                    self.requests[other].offset.is_some_and(|beside| self.share([request, other], [offset, beside]).0)
                };
                let first = (0..request).find(in_the_way).unwrap_or(request);
                return Err(PackError::FixedOverlap { first, second: request });
            }
            pieces.for_each(|at| gaps.insert(&self.blocks.all[at], offset + self.above[at]));
        }
        Ok(gaps)
    }

    /// Whether two requests at these offsets need a byte at the same time, and how many pieces this
    /// looked at. A request's pieces come one after another in time.
    fn share(&self, [one, other]: [usize; 2], offsets: [u64; 2]) -> (bool, u64) {
        let (mut a, mut b) = (self.of(one), self.of(other));
        let mut looked_at = 0;
        while !a.is_empty() && !b.is_empty() {
            looked_at += 1;
            let pieces = [a.start, b.start].map(|at| &self.blocks.all[at]);
            let begins = [offsets[0] + self.above[a.start], offsets[1] + self.above[b.start]];
            let collide = begins[0] < begins[1] + pieces[1].size && begins[1] < begins[0] + pieces[0].size;
            if collide && pieces[0].meets(pieces[1]) {
                return (true, looked_at);
            }
            let first_to_end = if pieces[0].end <= pieces[1].end { &mut a } else { &mut b };
            first_to_end.start += 1;
        }
        (false, looked_at)
    }

    /// The work that the first placements may take, however little the caller grants.
    fn first_work(&self) -> u64 {
        PER_SPAN * portfolio_work(self.blocks.all.len())
    }

    /// Offsets where nothing is placed yet but what is fixed.
    fn unplaced(&self) -> Vec<u64> {
        self.requests.iter().map(|request| request.offset.unwrap_or(0)).collect()
    }

    /// Places all that is not fixed, as solid rectangles, above all that is fixed: this is always
    /// possible, and quick.
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

    /// Those that end highest, and what each of them rests on, down to what rests on nothing: one
    /// such chain, by chance. Cut short where the work is used up.
    fn critical(&self, offsets: &[u64], random: &mut Random, work: &mut u64) -> Vec<usize> {
        let pool = self.pool_bytes(offsets);
        let mut chain: Vec<usize> = Vec::new();
        let mut holds: Vec<usize> = (0..offsets.len()).filter(|&at| self.end(at, offsets[at]) == pool).collect();
        while !holds.is_empty() && *work > 0 {
            let request = holds[random.below(holds.len() as u64) as usize];
            chain.push(request);
            *work = work.saturating_sub(offsets.len() as u64);
            holds = match offsets[request].checked_sub(self.requests[request].buffer.alignment_bytes) {
                Some(lower) => self.just_below(request, lower, offsets, work),
                None => Vec::new(),
            };
        }
        chain.retain(|&request| !self.is_fixed(request));
        chain
    }

    /// What lies in a request's way if it sinks to `lower`.
    fn just_below(&self, request: usize, lower: u64, offsets: &[u64], work: &mut u64) -> Vec<usize> {
        let Buffer { lower: begin, upper: end, .. } = self.requests[request].buffer;
        let touches = |other: usize| {
            let Buffer { lower: other_begin, upper: other_end, .. } = self.requests[other].buffer;
            offsets[other] < offsets[request]
                && lower < self.end(other, offsets[other])
                && begin < other_end
                && other_begin < end
        };
        let in_the_way = |&other: &usize| {
            touches(other) && {
                let (share, looked_at) = self.share([request, other], [lower, offsets[other]]);
                *work = work.saturating_sub(looked_at);
                share
            }
        };
        (0..offsets.len()).filter(in_the_way).collect()
    }
}

/// A packing under way.
struct Board<'a> {
    pieces: &'a Pieces<'a>,
    gaps: Gaps,
    offsets: Vec<u64>,
    /// The work that was left when `spans` spans had been looked at.
    work: u64,
    spans: u64,
}

impl<'a> Board<'a> {
    /// Nothing is placed but what is fixed.
    fn new(pieces: &'a Pieces<'a>, fixed: &Gaps, work: u64) -> Self {
        Board {
            pieces,
            gaps: fixed.clone(),
            offsets: pieces.unplaced(),
            work: work.saturating_sub(fixed.lists_kept()),
            spans: fixed.looked_at(),
        }
    }

    /// The work left.
    fn left(&mut self) -> u64 {
        let spans = self.gaps.looked_at();
        self.work = self.work.saturating_sub(PER_SPAN * (spans - self.spans));
        self.spans = spans;
        self.work
    }

    fn is_free(&mut self, request: usize, offset: u64) -> bool {
        let Pieces { blocks, above, .. } = self.pieces;
        self.pieces.of(request).all(|at| self.gaps.is_free(&blocks.all[at], offset + above[at]))
    }

    /// The lowest offset at which nothing is in a request's way; `None` where it would end above
    /// `most`, or once the work is used up.
    fn lowest(&mut self, request: usize, most: u64) -> Option<u64> {
        let alignment = self.pieces.requests[request].buffer.alignment_bytes;
        let mut offset = 0;
        loop {
            let before = offset;
            for at in self.pieces.of(request) {
                let above = self.pieces.above[at];
                let address = self.gaps.lowest_from(&self.pieces.blocks.all[at], offset + above);
                if address > offset + above {
                    offset = round_up(address - above, alignment);
                }
                if self.left() == 0 || self.pieces.end(request, offset) > most {
                    return None;
                }
            }
            if offset == before {
                return (self.pieces.end(request, offset) <= most).then_some(offset);
            }
        }
    }

    fn put(&mut self, request: usize, offset: u64) {
        let pieces = self.pieces.of(request);
        self.work = self.work.saturating_sub(PER_PIECE * pieces.len().max(1) as u64);
        self.offsets[request] = offset;
        for at in pieces {
            self.gaps.insert(&self.pieces.blocks.all[at], offset + self.pieces.above[at]);
        }
    }

    /// Places each request of a sequence at its lowest offset; false where one ends above `most`,
    /// or once the work is used up.
    fn place(&mut self, sequence: &[usize], most: u64, watch: &Watch) -> Result<bool, Stop> {
        for &request in sequence {
            watch.check()?;
            match self.lowest(request, most) {
                Some(offset) => self.put(request, offset),
                None => return Ok(false),
            }
        }
        Ok(self.left() > 0)
    }

    /// Places each request where it is wished, if that is possible, and then all others, the
    /// largest area first. The result is false in the same cases as that of [`Board::place`].
    fn place_as_wished(&mut self, wish: impl Fn(usize) -> Option<u64>, most: u64, watch: &Watch) -> Result<bool, Stop> {
        let mut others = Vec::new();
        for request in self.pieces.sorted_by(|request| self.pieces.area(request)) {
            watch.check()?;
            let Buffer { size_bytes, alignment_bytes, .. } = self.pieces.requests[request].buffer;
            let can_be =
                |wish: &u64| wish % alignment_bytes == 0 && wish.checked_add(size_bytes).is_some_and(|end| end <= most);
            match wish(request).filter(can_be) {
                Some(offset) if self.is_free(request, offset) => self.put(request, offset),
                _ => others.push(request),
            }
            if self.left() == 0 {
                return Ok(false);
            }
        }
        self.place(&others, most, watch)
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

/// Offsets at the hints, where these are possible together, of requests of which none is fixed.
/// None where that would take long, or the time is over.
pub(crate) fn hinted(requests: &[Request], control: &Control) -> Result<Option<Vec<u64>>, PackError> {
    let pieces = Pieces::new(requests);
    let mut board = Board::new(&pieces, &pieces.fixed()?, pieces.first_work());
    let watch = Watch::new(control, control.deadline);
    match board.place_as_wished(|request| requests[request].hint, i64::MAX as u64, &watch) {
        Ok(is_placed) => Ok(is_placed.then_some(board.offsets)),
        Err(Stop::TimedOut) => Ok(None),
        Err(Stop::Cancelled) => Err(PackError::Cancelled),
    }
}

/// See the module's documentation.
pub(crate) fn arrange(requests: &[Request], goal: Goal, control: &Control) -> Result<Packing, PackError> {
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

/// Tries all methods, one after another, until the best packing is good enough or the work is used
/// up.
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
    let offer_wished = |method, wish: &dyn Fn(usize) -> Option<u64>, best: &mut Best| {
        let mut board = Board::new(pieces, fixed, pieces.first_work());
        if board.place_as_wished(wish, best.pool_bytes, watch)? {
            best.offer(method, board.offsets, pieces);
        }
        Ok(())
    };
    if requests.iter().any(|request| request.hint.is_some()) {
        offer_wished("hint", &|request| requests[request].hint, best)?;
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
    offer_wished(free.method, &|request| Some(free.offsets[request]), best)?;
    let by_offset = pieces.sorted_by(|request| Reverse(free.offsets[request]));
    greedy(pieces, fixed, by_offset, best, &mut work, watch)?;
    search(pieces, fixed, best, &mut work, watch)
}

/// A packing of the same buffers as solid rectangles that may lie anywhere, within half of the time
/// that is left.
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

/// A portfolio of sequences, one of which is given; the last is that of the best packing's own
/// offsets, which pushes everything down as far as it goes.
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
        let share = *work / GREEDY_SHARE;
        *work -= share;
        let mut board = Board::new(pieces, fixed, share);
        let is_placed = board.place(sequence, best.pool_bytes, watch)?;
        *work += board.left();
        if is_placed {
            best.offer(method, board.offsets, pieces);
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
        let chain = pieces.critical(&offsets, &mut random, work);
        *work = work.saturating_sub(2 * changed.len() as u64);
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
        let mut board = Board::new(pieces, fixed, *work);
        let is_placed = board.place(&changed, best.pool_bytes, watch)?;
        *work = board.left();
        if is_placed {
            best.offer("local", board.offsets.clone(), pieces);
            (sequence, offsets) = (changed, board.offsets);
        }
        fruitless = if best.pool_bytes < before { 0 } else { fruitless + 1 };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packing::Gap;

    /// So many with so many gaps each, all alive at the same times but in their gaps.
    fn gapped(count: u64, gaps: u64) -> Vec<Request> {
        let request = |at: u64| Request {
            gaps: (0..gaps).map(|gap| Gap { lower: 4 * gap + 1, upper: 4 * gap + 2 + at % 2, window: None }).collect(),
            ..Buffer { lower: 0, upper: 4 * gaps + 1, size_bytes: 8 + at % 3, alignment_bytes: 1 }.into()
        };
        (0..count).map(request).collect()
    }

    #[test]
    fn a_placement_takes_no_more_than_its_work() {
        let requests = gapped(60, 40);
        let pieces = Pieces::new(&requests);
        let fixed = pieces.fixed().expect("nothing is fixed");
        let watch = Watch::default();
        let all: Vec<usize> = (0..requests.len()).collect();
        let needed = {
            let mut board = Board::new(&pieces, &fixed, u64::MAX);
            assert_eq!(board.place(&all, u64::MAX, &watch), Ok(true));
            u64::MAX - board.left()
        };
        assert!(needed > PER_PIECE * pieces.blocks.all.len() as u64);
        for (work, is_enough) in [(0, false), (needed / 10, false), (needed / 2, false), (needed + 1, true)] {
            let mut board = Board::new(&pieces, &fixed, work);
            assert_eq!(board.place(&all, u64::MAX, &watch), Ok(is_enough));
            assert_eq!(board.left() > 0, is_enough);
            // What one question and one placement may take beyond it.
            let beyond = PER_SPAN * 64 * (1 + pieces.of(0).len() as u64);
            assert!(PER_SPAN * board.gaps.looked_at() <= work + beyond, "{} spans of {work}", board.gaps.looked_at());
            let mut board = Board::new(&pieces, &fixed, work);
            assert_eq!(board.place_as_wished(|_| Some(0), u64::MAX, &watch), Ok(is_enough && board.left() > 0));
            assert!(PER_SPAN * board.gaps.looked_at() <= work + beyond, "{} spans of {work}", board.gaps.looked_at());
        }
    }

    #[test]
    fn a_chain_takes_as_much_work_as_its_links_have_pieces() {
        let requests = gapped(60, 40);
        let pieces = Pieces::new(&requests);
        // On top of each other, so that each rests on the one below alone.
        let offsets: Vec<u64> = requests
            .iter()
            .scan(0, |top, request| Some(std::mem::replace(top, *top + request.buffer.size_bytes)))
            .collect();
        let mut work = u64::MAX;
        let chain = pieces.critical(&offsets, &mut Random::new(1), &mut work);
        assert_eq!(chain, (0..requests.len()).rev().collect::<Vec<_>>());
        let taken = u64::MAX - work;
        let (count, most) = (requests.len() as u64, 2 * pieces.of(0).len() as u64);
        assert!(taken <= count * (count + most), "{taken}");
        let mut work = taken / 2;
        let part = pieces.critical(&offsets, &mut Random::new(1), &mut work);
        assert!(work == 0 && part.len() < chain.len() && chain.starts_with(&part), "cut short with its work");
    }

    #[test]
    fn sharing_is_as_by_all_pairs_of_pieces() {
        let mut random = Random::new(3);
        let mut shared = 0;
        for _ in 0..500 {
            let request = |random: &mut Random| {
                let lower = random.below(10);
                let mut request = Request::from(Buffer { lower, upper: lower + 9, size_bytes: 6, alignment_bytes: 1 });
                for from in [lower, lower + 4].map(|from| from + random.below(3)) {
                    let window = random.once_in(2).then(|| random.below(3)..3 + random.below(3));
                    request.gaps.push(Gap { lower: from, upper: from + 1 + random.below(2), window });
                }
                request
            };
            let requests = [request(&mut random), request(&mut random)];
            let pieces = Pieces::new(&requests);
            let offsets = [random.below(12), random.below(12)];
            let cells = |at: usize| {
                let of = requests[at].pieces().into_iter();
                of.flat_map(move |piece| {
                    (piece.lower..piece.upper)
                        .flat_map(move |time| piece.bytes.clone().map(move |byte| (time, offsets[at] + byte)))
                })
            };
            let expected = cells(0).any(|cell| cells(1).any(|other| cell == other));
            assert_eq!(pieces.share([0, 1], offsets).0, expected, "{requests:?} {offsets:?}");
            shared += u32::from(expected);
        }
        assert!(shared > 100 && shared < 400, "{shared}");
    }
}
