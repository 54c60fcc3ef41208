//! Complete search for a layout of few blocks below a given capacity, whatever their alignments.
//!
//! In a *normal* layout every block lies at the lowest aligned offset above all that it meets and
//! that lies below it, and none can sink into a free place. Of the layouts within a capacity the
//! one with the least sum of offsets is normal, so only such are looked at: blocks are placed by
//! rising offsets, each on the skyline. Blocks that are not placed yet are divided into independent
//! parts where none of them needs a time, and states without a layout are remembered.
//! docs/explanation/layouts.md has the proofs.

use crate::control::{Stop, Watch};
use crate::graph::round_up;
use crate::layout::blocks::{Block, Blocks};
use crate::layout::incumbent::Incumbent;
use crate::layout::search::canonical::Outcome;
use std::collections::HashMap;

/// More blocks are not searched: a set of them is one number.
pub(crate) const MOST_BLOCKS: usize = 64;
/// States that are remembered.
const MOST_STATES: usize = 1 << 16;

/// A block's offset and number: blocks are placed in this sequence.
type Place = (u64, u32);

/// Why a search ended without an answer.
enum Halt {
    Exhausted,
    Stopped(Stop),
}

/// Searches for a layout in which no block ends above `capacity`. Takes the comparisons it makes
/// from `work`.
pub(crate) fn search(blocks: &Blocks, capacity: u64, work: &mut u64, watch: &Watch) -> Result<Outcome, Stop> {
    let all = &blocks.all[..];
    if all.len() > MOST_BLOCKS {
        return Ok(Outcome::Exhausted);
    }
    let set = |is_in: &dyn Fn(&Block) -> bool| {
        (0..all.len()).filter(|&at| is_in(&all[at])).fold(0u64, |set, at| set | 1 << at)
    };
    let mut search = Search {
        all,
        alive: (0..blocks.times as usize).map(|time| set(&|block| block.times().contains(&time))).collect(),
        capacity,
        offsets: vec![0; all.len()],
        failed: HashMap::new(),
        left: *work,
        watch,
    };
    let found = search.fill(set(&|_| true), &vec![0; blocks.times as usize], None);
    *work = search.left;
    match found {
        Ok(true) => Ok(Outcome::Found(search.offsets)),
        Ok(false) => Ok(Outcome::Refuted),
        Err(Halt::Exhausted) => Ok(Outcome::Exhausted),
        Err(Halt::Stopped(stop)) => Err(stop),
    }
}

/// Lowers the incumbent as far as possible, and notes that nothing is smaller, unless the work is
/// used up before.
pub(crate) fn settle(incumbent: &mut Incumbent<'_>, work: &mut u64, watch: &Watch) -> Result<(), Stop> {
    while !incumbent.is_done() {
        match search(incumbent.blocks, incumbent.limit - 1, work, watch)? {
            Outcome::Found(offsets) => incumbent.offer("normal", offsets),
            Outcome::Refuted => incumbent.refute(incumbent.limit - 1, 1),
            Outcome::Exhausted => break,
        }
    }
    Ok(())
}

struct Search<'a> {
    all: &'a [Block],
    /// Per time the blocks alive.
    alive: Vec<u64>,
    capacity: u64,
    offsets: Vec<u64>,
    /// Open blocks and the skyline above which they could not be placed, with the least last place
    /// from which that was tried.
    failed: HashMap<(u64, Box<[u64]>), Option<Place>>,
    left: u64,
    watch: &'a Watch,
}

/// The numbers in a set.
fn members(set: u64) -> impl Iterator<Item = usize> {
    std::iter::successors((set != 0).then_some(set), |&set| {
        let rest = set & (set - 1);
        (rest != 0).then_some(rest)
    })
    .map(|set| set.trailing_zeros() as usize)
}

impl Search<'_> {
    /// Places all open blocks above the skyline, after the last place.
    fn fill(&mut self, open: u64, sky: &[u64], last: Option<Place>) -> Result<bool, Halt> {
        self.watch.check().map_err(Halt::Stopped)?;
        for part in self.parts(open) {
            if !self.fill_part(part, sky, last)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The open blocks by stretches of time that they share.
    fn parts(&self, open: u64) -> Vec<u64> {
        let (mut parts, mut part) = (Vec::new(), 0u64);
        for time in 0..self.alive.len() {
            let here = self.alive[time] & open;
            if here & part == 0 && part != 0 {
                parts.push(part);
                part = 0;
            }
            part |= here;
        }
        parts.extend((part != 0).then_some(part));
        parts
    }

    /// The same for blocks that cannot be parted.
    fn fill_part(&mut self, open: u64, sky: &[u64], last: Option<Place>) -> Result<bool, Halt> {
        let steps = 1 + u64::from(open.count_ones()) * 4;
        self.left = self.left.checked_sub(steps).ok_or(Halt::Exhausted)?;
        let mut lowest = [0u64; MOST_BLOCKS];
        // Below this something open would sink into what it leaves free.
        let mut reach = u64::MAX;
        for at in members(open) {
            let block = &self.all[at];
            let ground = sky[block.times()].iter().copied().max().unwrap_or(0);
            lowest[at] = round_up(ground, block.alignment);
            reach = reach.min(lowest[at] + block.size);
        }
        if !self.may_fit(open, &lowest, last) {
            return Ok(false);
        }
        let needed = (0..sky.len()).map(|time| if self.alive[time] & open == 0 { 0 } else { sky[time] }).collect();
        let state = (open, needed);
        if self.failed.get(&state).is_some_and(|&from| from <= last) {
            return Ok(false);
        }
        let mut choices: Vec<Place> = members(open).map(|at| (lowest[at], at as u32)).collect();
        choices.retain(|&(offset, at)| {
            let block = &self.all[at as usize];
            let is_first = members(open & ((1 << at) - 1)).all(|other| self.all[other] != *block);
            offset < reach && Some((offset, at)) > last && is_first
        });
        choices.sort_unstable();
        let mut above = sky.to_vec();
        for place @ (offset, at) in choices {
            let block = &self.all[at as usize];
            above[block.times()].fill(offset + block.size);
            self.offsets[at as usize] = offset;
            if self.fill(open & !(1 << at), &above, Some(place))? {
                return Ok(true);
            }
            above[block.times()].copy_from_slice(&sky[block.times()]);
        }
        if self.failed.len() < MOST_STATES {
            self.failed.insert(state, last);
        }
        Ok(false)
    }

    /// Whether every time can still hold its open blocks, as far as a look at it alone can tell.
    fn may_fit(&self, open: u64, lowest: &[u64; MOST_BLOCKS], last: Option<Place>) -> bool {
        // Where the block can lie at the least: what comes too late for its lowest offset has to
        // rest on something open.
        let mut least = *lowest;
        let last_offset = last.map_or(0, |(offset, _)| offset);
        for at in members(open) {
            let block = &self.all[at];
            if Some((lowest[at], at as u32)) < last {
                let others = members(open).filter(|&other| other != at && self.all[other].meets(block));
                let below = others.map(|other| lowest[other].max(last_offset) + self.all[other].size).min();
                let Some(below) = below else { return false };
                least[at] = round_up(below, block.alignment);
            }
            if least[at] + block.size > self.capacity {
                return false;
            }
        }
        self.alive.iter().all(|alive| {
            let here = alive & open;
            members(here).all(|strict| {
                // Those at least as strict begin at multiples of its alignment, each behind the one
                // below.
                let alignment = self.all[strict].alignment;
                let (mut base, mut sum, mut spare) = (u64::MAX, 0, 0);
                for at in members(here).filter(|&at| self.all[at].alignment >= alignment) {
                    let padded = round_up(self.all[at].size, alignment);
                    base = base.min(least[at]);
                    sum += padded;
                    spare = spare.max(padded - self.all[at].size);
                }
                base + sum - spare <= self.capacity
            })
        })
    }
}
