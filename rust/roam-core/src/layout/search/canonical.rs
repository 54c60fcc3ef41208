//! Branch and bound over canonical layouts: is there a layout below a given capacity?
//!
//! In a *canonical* layout every block lies at the lowest place its neighbours below allow
//! (Moffitt, "MiniMalloc", ASPLOS 2023). The search fills such layouts from the bottom. What is
//! placed so far forms a *skyline* over time. A *valley* is a stretch of it that is lower than what
//! is on both sides. What rests on a valley's floor must lie wholly within it, so any valley may be
//! decided before any other: the search takes the one with the fewest choices. Each choice is "this
//! block rests here" or "it does not". A valley on which nothing can rest is lifted to its lower
//! side.
//!
//! A branch ends where some time holds more than fits between the lowest place any of its open
//! blocks can have and the capacity. Times that no open block needs any more divide the rest into
//! independent parts, and one part without a layout ends the branch. docs/explanation/layouts.md
//! has the proofs.

use crate::control::{Stop, Watch};
use crate::graph::round_up;
use crate::layout::blocks::{Block, Blocks};
use std::cmp::Reverse;
use std::ops::Range;

/// Choices are compared per blame, as whole numbers of this fineness.
const BLAME_SCALE: u64 = 1 << 32;

/// What became of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Offsets per block, none of which ends above the capacity.
    Found(Vec<u64>),
    /// There is no such layout; meant only where all sizes are multiples of all alignments.
    Refuted,
    /// The work was used up first.
    Exhausted,
}

/// A change to take back.
#[derive(Clone, Copy, Debug)]
enum Change {
    Placed(u32),
    Lowest(u32, u64),
    Sky(u32, u64),
}

/// How a branch ended, if it did not find a layout.
enum Halt {
    DeadEnd,
    Exhausted,
    Stopped(Stop),
}

impl From<Stop> for Halt {
    fn from(stop: Stop) -> Self {
        Halt::Stopped(stop)
    }
}

/// How far a part could be filled without a choice.
enum Turn {
    /// It is full.
    Done,
    /// It has come apart into these.
    Split(Vec<Range<usize>>),
    /// This block of the part rests where it could, or it does not.
    Choose(Range<usize>, u32),
}

/// What is still open above the present part.
enum Frame {
    /// The block was placed; `mark` is the trail's length before. If that fails it is excluded.
    Choice { part: Range<usize>, block: u32, mark: usize },
    /// Parts that have yet to be filled, after others beside them.
    Parts(Vec<Range<usize>>),
}

/// What to do next in a part.
enum Move {
    /// Nothing can rest on these times' floor: lift it to this height.
    Lift(Range<usize>, u64),
    /// Decide on this block. It is the only choice if `forced`.
    Decide { block: u32, forced: bool },
}

/// What never changes: who meets whom.
pub(crate) struct Canonical<'a> {
    blocks: &'a [Block],
    /// Per block those whose lifetimes meet its own.
    meets: Vec<Vec<u32>>,
    /// Per time the blocks alive.
    alive: Vec<Vec<u32>>,
    /// Blocks by start.
    by_start: Vec<u32>,
}

impl<'a> Canonical<'a> {
    pub(crate) fn new(blocks: &'a Blocks) -> Self {
        let all = &blocks.all;
        let mut alive = vec![Vec::new(); blocks.times as usize];
        for (at, block) in all.iter().enumerate() {
            for time in block.times() {
                alive[time].push(at as u32);
            }
        }
        let mut by_start: Vec<u32> = (0..all.len() as u32).collect();
        by_start.sort_by_key(|&at| all[at as usize].start);
        // Of two that meet, one holds the other's beginning.
        let mut meets = vec![Vec::new(); all.len()];
        for (at, block) in all.iter().enumerate() {
            let at = at as u32;
            for &other in &alive[block.start as usize] {
                if (all[other as usize].start, other) < (block.start, at) {
                    meets[at as usize].push(other);
                    meets[other as usize].push(at);
                }
            }
        }
        meets.iter_mut().for_each(|others: &mut Vec<u32>| others.sort_unstable());
        Canonical { blocks: all, meets, alive, by_start }
    }

    /// Searches for a layout in which no block ends above `capacity`, trying blocks of a lower rank
    /// first and times with more blame. Adds to the blame of times that end a branch, and takes the
    /// comparisons it makes from `work`.
    pub(crate) fn search(
        &self,
        rank: &[u32],
        capacity: u64,
        blame: &mut [u32],
        work: &mut u64,
        watch: &Watch,
    ) -> Result<Outcome, Stop> {
        self.search_above(&vec![0; self.alive.len()], rank, capacity, blame, work, watch)
    }

    /// The same where nothing may lie below the `ground`, a height per time.
    pub(crate) fn search_above(
        &self,
        ground: &[u64],
        rank: &[u32],
        capacity: u64,
        blame: &mut [u32],
        work: &mut u64,
        watch: &Watch,
    ) -> Result<Outcome, Stop> {
        let times = 0..self.alive.len();
        let lowest = |block: &Block| {
            let ground = ground[block.times()].iter().copied().max().unwrap_or(0);
            round_up(ground, block.alignment)
        };
        let held = |alive: &Vec<u32>| alive.iter().map(|&at| self.blocks[at as usize].size).sum();
        let lowest: Vec<u64> = self.blocks.iter().map(lowest).collect();
        if self.blocks.iter().zip(&lowest).any(|(block, lowest)| lowest + block.size > capacity) {
            return Ok(Outcome::Refuted);
        }
        let mut search = Search {
            canonical: self,
            rank,
            capacity,
            blame,
            lowest,
            placed: vec![false; self.blocks.len()],
            sky: ground.to_vec(),
            left: self.alive.iter().map(held).collect(),
            trail: Vec::new(),
            steps: 0,
            budget: *work,
            valley: vec![usize::MAX; times.end],
            choices: vec![0; times.end + 1],
        };
        let result = search.fits(times.clone()).and_then(|()| search.run(times, watch));
        *work = work.saturating_sub(search.steps);
        match result {
            Ok(()) => Ok(Outcome::Found(search.lowest)),
            Err(Halt::DeadEnd) => Ok(Outcome::Refuted),
            Err(Halt::Exhausted) => Ok(Outcome::Exhausted),
            Err(Halt::Stopped(stop)) => Err(stop),
        }
    }
}

/// A floor of the skyline between two higher sides.
struct Valley {
    times: Range<usize>,
    floor: u64,
    /// The lower side's height; the capacity where there is none.
    side: u64,
    /// The least that stays empty above a time on whose floor nothing rests.
    waste: u64,
    candidates: usize,
}

struct Search<'a> {
    canonical: &'a Canonical<'a>,
    rank: &'a [u32],
    capacity: u64,
    /// Per time, 1 and how often it ended a branch.
    blame: &'a mut [u32],
    /// Per block its offset if placed, else the least it can have.
    lowest: Vec<u64>,
    placed: Vec<bool>,
    /// Per time the height below which nothing more will be placed.
    sky: Vec<u64>,
    /// Per time the bytes still to be placed.
    left: Vec<u64>,
    trail: Vec<Change>,
    /// Comparisons made, and after how many to give up.
    steps: u64,
    budget: u64,
    /// Scratch: per time the valley it is in.
    valley: Vec<usize>,
    /// Scratch: per time how many blocks may rest there.
    choices: Vec<i32>,
}

impl Search<'_> {
    /// Places all blocks, or ends with nothing placed.
    fn run(&mut self, times: Range<usize>, watch: &Watch) -> Result<(), Halt> {
        let mut stack: Vec<Frame> = Vec::new();
        let mut turn = self.advance(times);
        let mut turns = 0u32;
        loop {
            turns = turns.wrapping_add(1);
            if turns % 64 == 0 {
                watch.check()?;
            }
            turn = match turn {
                Ok(Turn::Choose(part, block)) => {
                    stack.push(Frame::Choice { part: part.clone(), block, mark: self.trail.len() });
                    self.place(block).and_then(|()| self.advance(part))
                }
                Ok(Turn::Split(parts)) => {
                    stack.push(Frame::Parts(parts));
                    Ok(Turn::Done)
                }
                Ok(Turn::Done) => match stack.pop() {
                    None => return Ok(()),
                    // A full part stays as it is: nothing beside it could profit from another
                    // choice.
                    Some(Frame::Choice { .. }) => Ok(Turn::Done),
                    Some(Frame::Parts(mut parts)) => match parts.pop() {
                        None => Ok(Turn::Done),
                        Some(part) => {
                            stack.push(Frame::Parts(parts));
                            self.advance(part)
                        }
                    },
                },
                Err(Halt::DeadEnd) => match stack.pop() {
                    None => return Err(Halt::DeadEnd),
                    // Without this part there is no use in those beside it.
                    Some(Frame::Parts(_)) => Err(Halt::DeadEnd),
                    Some(Frame::Choice { part, block, mark }) => {
                        self.take_back(mark);
                        self.exclude(block).and_then(|()| self.advance(part))
                    }
                },
                Err(halt) => return Err(halt),
            };
        }
    }

    /// Does what leaves no choice.
    fn advance(&mut self, times: Range<usize>) -> Result<Turn, Halt> {
        loop {
            let mut parts = self.parts(times.clone());
            let Some(part) = parts.pop() else { return Ok(Turn::Done) };
            if !parts.is_empty() {
                parts.push(part);
                // The tightest last, where the next one is taken: it is the most likely to fail.
                parts.sort_by_key(|part| Reverse(part.clone().map(|time| self.slack(time)).min()));
                return Ok(Turn::Split(parts));
            }
            if self.steps >= self.budget {
                return Err(Halt::Exhausted);
            }
            match self.next(part.clone())? {
                Move::Lift(valley, height) => self.lift(valley, height)?,
                Move::Decide { block, forced: true } => self.place(block)?,
                Move::Decide { block, forced: false } => return Ok(Turn::Choose(part, block)),
            }
        }
    }

    /// The stretches of time that open blocks still need.
    fn parts(&self, times: Range<usize>) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = Vec::new();
        let mut begin = times.start;
        let mut reach = times.start;
        let from = self.canonical.by_start.partition_point(|&at| self.block(at).start < times.start as u32);
        for &at in &self.canonical.by_start[from..] {
            let block = self.block(at).times();
            if block.start >= times.end {
                break;
            }
            if self.placed[at as usize] {
                continue;
            }
            if block.start >= reach {
                if begin < reach {
                    parts.push(begin..reach);
                }
                begin = block.start;
            }
            reach = reach.max(block.end);
        }
        if begin < reach {
            parts.push(begin..reach);
        }
        parts
    }

    fn block(&self, at: u32) -> &Block {
        &self.canonical.blocks[at as usize]
    }

    fn slack(&self, time: usize) -> u64 {
        self.capacity - self.sky[time] - self.left[time]
    }

    fn valleys(&mut self, times: Range<usize>) -> Vec<Valley> {
        let mut valleys = Vec::new();
        let mut begin = times.start;
        while begin < times.end {
            let floor = self.sky[begin];
            let end = (begin..times.end).find(|&time| self.sky[time] != floor).unwrap_or(times.end);
            let left = if begin > times.start { self.sky[begin - 1] } else { u64::MAX };
            let right = if end < times.end { self.sky[end] } else { u64::MAX };
            let is_valley = left > floor && right > floor;
            self.valley[begin..end].fill(if is_valley { valleys.len() } else { usize::MAX });
            if is_valley {
                let side = left.min(right);
                let waste = if side == u64::MAX { u64::MAX } else { side - floor };
                valleys.push(Valley { times: begin..end, floor, side, waste, candidates: 0 });
            }
            begin = end;
        }
        valleys
    }

    /// The decision with the fewest choices.
    fn next(&mut self, times: Range<usize>) -> Result<Move, Halt> {
        let mut valleys = self.valleys(times.clone());
        self.choices[times.start..=times.end].fill(0);
        let from = self.canonical.by_start.partition_point(|&at| self.block(at).start < times.start as u32);
        let to = self.canonical.by_start.partition_point(|&at| self.block(at).start < times.end as u32);
        let within = &self.canonical.by_start[from..to];
        self.steps += (times.len() + within.len()) as u64;
        for &at in within {
            let block = self.block(at);
            if self.placed[at as usize] {
                continue;
            }
            let (start, last) = (block.start as usize, block.end as usize - 1);
            let valley = self.valley[start];
            if valley == usize::MAX || valley != self.valley[last] {
                continue;
            }
            let valley = &mut valleys[valley];
            valley.waste = valley.waste.min(block.size);
            if self.lowest[at as usize] <= round_up(valley.floor, block.alignment) {
                valley.candidates += 1;
                self.choices[start] += 1;
                self.choices[last + 1] -= 1;
            }
        }
        for time in times.start + 1..times.end {
            self.choices[time] += self.choices[time - 1];
        }
        let mut best: Option<(u64, u64, usize, bool)> = None;
        for valley in &valleys {
            if valley.candidates == 0 {
                if valley.side == u64::MAX {
                    return Err(Halt::DeadEnd);
                }
                return Ok(Move::Lift(valley.times.clone(), valley.side));
            }
            for time in valley.times.clone() {
                let slack = self.slack(time);
                let must = slack < valley.waste;
                let choices = self.choices[time];
                if must && choices == 0 {
                    self.blame[time] = self.blame[time].saturating_add(1);
                    return Err(Halt::DeadEnd);
                }
                if choices == 0 {
                    continue;
                }
                let key = (
                    u64::from(choices.unsigned_abs() + u32::from(!must)) * BLAME_SCALE / u64::from(self.blame[time]),
                    slack,
                    time,
                    must && choices == 1,
                );
                if best.is_none_or(|best| key < best) {
                    best = Some(key);
                }
            }
        }
        let Some((_, _, time, forced)) = best else { return Err(Halt::DeadEnd) };
        let valley = &valleys[self.valley[time]];
        let fits = |&at: &u32| {
            let block = &self.canonical.blocks[at as usize];
            !self.placed[at as usize]
                && block.start as usize >= valley.times.start
                && block.end as usize <= valley.times.end
                && self.lowest[at as usize] <= round_up(valley.floor, block.alignment)
        };
        let block = self.canonical.alive[time].iter().copied().filter(fits).min_by_key(|&at| self.rank[at as usize]);
        Ok(Move::Decide { block: block.ok_or(Halt::DeadEnd)?, forced })
    }

    /// Places a block at its lowest offset.
    fn place(&mut self, at: u32) -> Result<(), Halt> {
        let block = *self.block(at);
        let top = self.lowest[at as usize] + block.size;
        self.placed[at as usize] = true;
        self.trail.push(Change::Placed(at));
        for time in block.times() {
            self.trail.push(Change::Sky(time as u32, self.sky[time]));
            self.sky[time] = top;
            self.left[time] -= block.size;
        }
        let canonical = self.canonical;
        self.steps += canonical.meets[at as usize].len() as u64;
        self.raise(&canonical.meets[at as usize], top, block.times())
    }

    /// Nothing rests on the valley's floor.
    fn lift(&mut self, valley: Range<usize>, height: u64) -> Result<(), Halt> {
        let floor = self.sky[valley.start];
        let mut within = Vec::new();
        for time in valley.clone() {
            self.trail.push(Change::Sky(time as u32, self.sky[time]));
            self.sky[time] = height;
            within.extend_from_slice(&self.canonical.alive[time]);
        }
        within.sort_unstable();
        within.dedup();
        within.retain(|&at| !self.placed[at as usize]);
        let would_fit = |&at: &u32| {
            let block = self.block(at);
            let inside = block.start as usize >= valley.start && block.end as usize <= valley.end;
            inside && round_up(floor, block.alignment) + block.size <= height
        };
        // It could have been placed on the floor, which has been tried.
        if within.iter().any(would_fit) {
            return Err(Halt::DeadEnd);
        }
        self.raise(&within, height, valley)
    }

    /// The block does not rest where it could now: something open will come to lie below it.
    fn exclude(&mut self, at: u32) -> Result<(), Halt> {
        let canonical = self.canonical;
        let least = canonical.meets[at as usize]
            .iter()
            .filter(|&&other| !self.placed[other as usize])
            .map(|&other| self.lowest[other as usize] + self.block(other).size)
            .min()
            .ok_or(Halt::DeadEnd)?;
        let times = self.block(at).times();
        self.raise(&[at], least, times)
    }

    /// The open ones of the blocks lie at `height` at least; checks all times that this and a
    /// change at `times` touches.
    fn raise(&mut self, blocks: &[u32], height: u64, times: Range<usize>) -> Result<(), Halt> {
        let mut touched = times;
        for &at in blocks {
            let block = &self.canonical.blocks[at as usize];
            let lowest = self.lowest[at as usize];
            if self.placed[at as usize] || lowest >= height {
                continue;
            }
            let height = round_up(height, block.alignment);
            if height + block.size > self.capacity {
                return Err(Halt::DeadEnd);
            }
            self.trail.push(Change::Lowest(at, lowest));
            self.lowest[at as usize] = height;
            touched = touched.start.min(block.start as usize)..touched.end.max(block.end as usize);
        }
        self.fits(touched)
    }

    /// Whether every one of the times can still hold its open blocks.
    fn fits(&mut self, times: Range<usize>) -> Result<(), Halt> {
        for time in times {
            if self.left[time] == 0 {
                continue;
            }
            self.steps += self.canonical.alive[time].len() as u64;
            let open = self.canonical.alive[time].iter().filter(|&&at| !self.placed[at as usize]);
            let lowest = open.map(|&at| self.lowest[at as usize]).min().unwrap_or(0);
            if lowest.max(self.sky[time]) + self.left[time] > self.capacity {
                self.blame[time] = self.blame[time].saturating_add(1);
                return Err(Halt::DeadEnd);
            }
        }
        Ok(())
    }

    fn take_back(&mut self, mark: usize) {
        while self.trail.len() > mark {
            match self.trail.pop() {
                Some(Change::Placed(at)) => {
                    self.placed[at as usize] = false;
                    let block = *self.block(at);
                    for time in block.times() {
                        self.left[time] += block.size;
                    }
                }
                Some(Change::Lowest(at, lowest)) => self.lowest[at as usize] = lowest,
                Some(Change::Sky(time, height)) => self.sky[time as usize] = height,
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Random;

    #[test]
    fn blocks_meet_those_held_at_the_same_time() {
        let mut random = Random::new(1);
        for _ in 0..500 {
            let times = 1 + random.below(12);
            let random_block = |_| {
                let start = random.below(times) as u32;
                Block { size: 1, alignment: 1, start, end: start + 1 + random.below(times) as u32 }
            };
            let blocks = Blocks::bare((0..16).map(random_block).collect());
            let found = Canonical::new(&blocks).meets;
            for (at, others) in found.into_iter().enumerate() {
                let meets = |other: &usize| *other != at && blocks.all[at].meets(&blocks.all[*other]);
                let expected: Vec<u32> = (0..16).filter(meets).map(|other| other as u32).collect();
                assert_eq!(others, expected);
            }
        }
    }
}
