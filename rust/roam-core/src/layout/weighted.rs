//! Valley filling by weighted times, in O(log n) per placement whatever the blocks look like.
//!
//! The lowest line of the skyline is filled first. Of the blocks that fit into its time span, those nearest to its two
//! ends are compared: the one that covers most, less what the gaps to the two ends cost, goes there. A gap that is
//! too narrow for anything is lost, a wide one will be filled: so a gap costs as its square root grows. If nothing fits, the
//! line is lifted to its lower neighbour.
//!
//! Covers and gaps are measured in weighted times. All times weigh the same at first. After a run those weigh more
//! above which the layout is too high, and less those at which it need not be tight: bytes are then wasted where
//! there are bytes to spare. (A multiplicative-weights update, as in Arora, Hazan and Kale, Theory of Computing 8, 2012.)

use super::blocks::{Block, Blocks, first_open};
use crate::control::{Stop, Watch};
use crate::graph::round_up;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// How many blocks nearest to each end of a line are compared.
const NEAREST: usize = 24;
/// How fast weights change, and what share of the excess bytes a time may have without becoming heavier.
const RATE: f64 = 0.5;
const PERMITTED: f64 = 0.8;
/// Weights stay between this part and this multiple of their mean.
const RANGE: f64 = 1000.0;

/// What all runs over the same blocks share.
pub(super) struct Lines<'a> {
    blocks: &'a Blocks,
    by_start: Shelf,
    /// By end, the latest first.
    by_end: Shelf,
    /// Mean lifetime.
    mean: f64,
    floor: u64,
}

/// Blocks in a sequence, of which some have been taken.
#[derive(Clone)]
struct Shelf {
    blocks: Vec<u32>,
    /// Per block its place.
    place: Vec<u32>,
    /// Per time the first place at which to look for what fits there.
    first: Vec<u32>,
    /// A tree of the least key of each range of places; a block that is taken has the largest.
    least: Vec<u32>,
    /// Leaves begin here.
    width: usize,
}

impl Shelf {
    /// `before` says whether a block lies before all that fit at a time; `key` is what fitting blocks have least of.
    fn new(blocks: Vec<u32>, times: u32, before: impl Fn(u32, u32) -> bool, key: impl Fn(u32) -> u32) -> Self {
        let width = blocks.len().next_power_of_two();
        let mut place = vec![0; blocks.len()];
        let mut least = vec![u32::MAX; 2 * width];
        for (at, &block) in blocks.iter().enumerate() {
            place[block as usize] = at as u32;
            least[width + at] = key(block);
        }
        for node in (1..width).rev() {
            least[node] = least[2 * node].min(least[2 * node + 1]);
        }
        let first = (0..=times).map(|time| blocks.partition_point(|&block| before(block, time)) as u32).collect();
        Shelf { blocks, place, first, least, width }
    }

    /// The first place from this one on with a key of at most `most`.
    fn next(&self, place: usize, most: u32) -> Option<usize> {
        if place >= self.width {
            return None;
        }
        let mut node = self.width + place;
        while self.least[node] > most {
            // To the right, from as high up as possible.
            while node % 2 == 1 {
                node /= 2;
            }
            if node == 0 {
                return None;
            }
            node += 1;
        }
        while node < self.width {
            node *= 2;
            if self.least[node] > most {
                node += 1;
            }
        }
        Some(node - self.width)
    }

    /// Up to [`NEAREST`] blocks with a key of at most `most`, from the first that may fit at the time on.
    fn nearest(&self, time: u32, most: u32, found: &mut Vec<u32>) {
        let mut place = self.first[time as usize] as usize;
        for _ in 0..NEAREST {
            let Some(next) = self.next(place, most) else { break };
            found.push(self.blocks[next]);
            place = next + 1;
        }
    }

    fn take(&mut self, block: u32) {
        let mut node = self.width + self.place[block as usize] as usize;
        self.least[node] = u32::MAX;
        while node > 1 {
            node /= 2;
            self.least[node] = self.least[2 * node].min(self.least[2 * node + 1]);
        }
    }
}

/// A level stretch of the skyline.
#[derive(Clone, Copy)]
struct Line {
    start: u32,
    end: u32,
    height: u64,
}

/// Offsets of all blocks, all times weighing the same. Always found.
pub(super) fn place(blocks: &Blocks, watch: &Watch) -> Result<Vec<u64>, Stop> {
    let (offsets, _) = Lines::new(blocks).place(&vec![1.0; blocks.times as usize], 1.0, watch)?;
    Ok(offsets)
}

impl<'a> Lines<'a> {
    pub(super) fn new(blocks: &'a Blocks) -> Self {
        let (all, times) = (&blocks.all, blocks.times);
        let mut by_start: Vec<u32> = (0..all.len() as u32).collect();
        by_start.sort_by_key(|&at| (all[at as usize].start, Reverse(all[at as usize].end), at));
        let mut by_end = by_start.clone();
        by_end.sort_by_key(|&at| (Reverse(all[at as usize].end), all[at as usize].start, at));
        Lines {
            blocks,
            by_start: Shelf::new(
                by_start,
                times,
                |block, time| all[block as usize].start < time,
                |block| all[block as usize].end,
            ),
            by_end: Shelf::new(
                by_end,
                times,
                |block, time| all[block as usize].end > time,
                |block| times - all[block as usize].start,
            ),
            mean: blocks.area() as f64 / all.len().max(1) as f64,
            floor: blocks.floor(),
        }
    }

    /// Offsets of all blocks, and how many comparisons that took. A gap costs `cost` times the square root of its share of a mean
    /// lifetime, in mean lifetimes.
    pub(super) fn place(&self, weights: &[f64], cost: f64, watch: &Watch) -> Result<(Vec<u64>, u64), Stop> {
        let scale = self.blocks.times as f64 / weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let mut before = Vec::with_capacity(weights.len() + 1);
        before.push(0.0);
        before.extend(weights.iter().map(|weight| {
            sum += weight * scale;
            sum
        }));
        let cost = cost * self.mean.sqrt();
        let loss = |block: &Block, line: &Line| {
            let span = |from: u32, to: u32| before[to as usize] - before[from as usize];
            let gaps = [span(line.start, block.start), span(block.end, line.end)];
            cost * (gaps[0].sqrt() + gaps[1].sqrt()) - span(block.start, block.end)
        };
        self.fill(loss, watch)
    }

    fn fill(&self, loss: impl Fn(&Block, &Line) -> f64, watch: &Watch) -> Result<(Vec<u64>, u64), Stop> {
        let all = &self.blocks.all;
        let (mut by_start, mut by_end) = (self.by_start.clone(), self.by_end.clone());
        let mut offsets = vec![0; all.len()];
        let mut skyline = Skyline::new(self.blocks.times);
        let mut fitting = Vec::with_capacity(2 * NEAREST);
        let mut steps = all.len() as u64;
        let mut left = all.len();
        let mut rounds = 0u32;
        while left > 0 {
            if rounds % 64 == 0 {
                watch.check()?;
            }
            rounds = rounds.wrapping_add(1);
            let Some(line) = skyline.pop_lowest() else { break };
            fitting.clear();
            by_start.nearest(line.start, line.end, &mut fitting);
            by_end.nearest(line.end, self.blocks.times - line.start, &mut fitting);
            steps += 1 + fitting.len() as u64;
            let best = fitting.iter().map(|&at| (loss(&all[at as usize], &line), at));
            let Some((_, at)) = best.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))) else {
                if !skyline.lift(line) {
                    break;
                }
                continue;
            };
            by_start.take(at);
            by_end.take(at);
            let block = &all[at as usize];
            offsets[at as usize] = round_up(line.height, block.alignment);
            skyline.cover(line, block, offsets[at as usize] + block.size);
            left -= 1;
        }
        Ok((offsets, steps))
    }

    /// Weights for the next run, after one that gave these offsets.
    pub(super) fn update(&self, weights: &mut [f64], offsets: &[u64]) {
        let excess = |height: u64| height.saturating_sub(self.floor) as f64;
        let tops = self.tops(offsets);
        let most = excess(tops.iter().copied().max().unwrap_or(0));
        let mean = weights.iter().sum::<f64>() / weights.len().max(1) as f64;
        for (weight, top) in weights.iter_mut().zip(tops) {
            // A time whose top is below the floor may go on wasting.
            let share = if top < self.floor { -1.0 } else { excess(top) / most.max(1.0) };
            let factor = 1.0 + RATE * (share - PERMITTED).max(-1.0);
            *weight = (*weight * factor).clamp(mean / RANGE, mean * RANGE);
        }
    }

    /// Per time the end of the highest block.
    fn tops(&self, offsets: &[u64]) -> Vec<u64> {
        let mut tops = vec![0; self.blocks.times as usize];
        let top = |at: u32| offsets[at as usize] + self.blocks.all[at as usize].size;
        let mut highest_first: Vec<u32> = (0..offsets.len() as u32).collect();
        highest_first.sort_unstable_by_key(|&at| (Reverse(top(at)), at));
        // Per time one from which on to look for a time without a top yet.
        let mut open: Vec<u32> = (0..=self.blocks.times).collect();
        for at in highest_first {
            let block = &self.blocks.all[at as usize];
            let mut time = first_open(&mut open, block.start);
            while time < block.end {
                tops[time as usize] = top(at);
                open[time as usize] = time + 1;
                time = first_open(&mut open, time);
            }
        }
        tops
    }
}

/// Lines that cover all times without gaps, and which is the lowest.
struct Skyline {
    /// By start.
    lines: BTreeMap<u32, Line>,
    /// Height, start and end; an entry that no longer is a line is dropped when met.
    lowest: BinaryHeap<Reverse<(u64, u32, u32)>>,
}

impl Skyline {
    fn new(times: u32) -> Self {
        let mut skyline = Skyline { lines: BTreeMap::new(), lowest: BinaryHeap::new() };
        skyline.insert(Line { start: 0, end: times, height: 0 });
        skyline
    }

    fn insert(&mut self, line: Line) {
        if line.start < line.end {
            self.lowest.push(Reverse((line.height, line.start, line.end)));
            self.lines.insert(line.start, line);
        }
    }

    /// The lowest line, of equals the first. It stays in the skyline, but does not come again unless it changes.
    fn pop_lowest(&mut self) -> Option<Line> {
        while let Some(Reverse((height, start, end))) = self.lowest.pop() {
            let line = self.lines.get(&start).filter(|line| line.end == end && line.height == height);
            if let Some(&line) = line {
                return Some(line);
            }
        }
        None
    }

    fn neighbours(&self, line: Line) -> [Option<Line>; 2] {
        let before = self.lines.range(..line.start).next_back().map(|(_, &before)| before);
        [before, self.lines.get(&line.end).copied()]
    }

    /// A block within the line's span now ends at `height`.
    fn cover(&mut self, line: Line, block: &Block, height: u64) {
        let neighbours = self.neighbours(line);
        self.lines.remove(&line.start);
        let mut middle = Line { start: block.start, end: block.end, height };
        self.insert(Line { end: block.start, ..line });
        self.insert(Line { start: block.end, ..line });
        for neighbour in neighbours.into_iter().flatten().filter(|neighbour| neighbour.height == height) {
            middle = self.join(middle, neighbour);
        }
        self.insert(middle);
    }

    /// Raises the line to its lower neighbour; says whether there is one.
    fn lift(&mut self, line: Line) -> bool {
        let neighbours = self.neighbours(line);
        let Some(height) = neighbours.iter().flatten().map(|neighbour| neighbour.height).min() else { return false };
        self.lines.remove(&line.start);
        let mut lifted = Line { height, ..line };
        for neighbour in neighbours.into_iter().flatten().filter(|neighbour| neighbour.height == height) {
            lifted = self.join(lifted, neighbour);
        }
        self.insert(lifted);
        true
    }

    /// The line with a neighbour of its height, if the two touch; the neighbour is removed.
    fn join(&mut self, line: Line, neighbour: Line) -> Line {
        if neighbour.end != line.start && neighbour.start != line.end {
            return line;
        }
        self.lines.remove(&neighbour.start);
        Line { start: line.start.min(neighbour.start), end: line.end.max(neighbour.end), height: line.height }
    }
}
