//! Valley filling by weighted times.
//!
//! The lowest line of the skyline is filled first. Of the blocks that fit into its time span, those
//! nearest to its two ends are compared: the one that covers most, less what the gaps to the two
//! ends cost, goes there. A gap that is too narrow for anything is lost, a wide one will be filled:
//! so a gap costs as its square root grows. If nothing fits, the line is lifted to its lower
//! neighbour.
//!
//! Covers and gaps are measured in weighted times. The top of a time will be its line's height plus
//! all that is still to be placed there, or more; a time weighs more the higher that is,
//! exponentially, so that bytes are wasted where there are bytes to spare. The sum of all weights
//! is a smooth maximum of the tops (as in Arora, Hazan and Kale, Theory of Computing 8, 2012).

use crate::control::{Stop, Watch};
use crate::graph::round_up;
use crate::layout::blocks::{Block, Blocks};
use crate::layout::packers::shelf::{Sequence, Shelf};
use crate::rng::Random;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How many blocks nearest to each end of a line are compared. With 6, one of 27 plans and packings
/// is 1.8 % smaller and one 0.1 % larger (`benches/constants.py`).
const NEAREST: usize = 24;
/// Weights stay below this.
const HEAVIEST: f64 = 1e100;

/// The exponential, at most [`HEAVIEST`] squared; by sums and products alone, which every machine
/// rounds alike.
fn exp(x: f64) -> f64 {
    let x = x.clamp(-460.0, 460.0) / 1024.0;
    let root = (1..=12).rev().fold(1.0, |sum, term| 1.0 + sum * x / f64::from(term));
    (0..10).fold(root, |power, _| power * power)
}

/// What all layouts of the same blocks share.
pub(crate) struct Lines<'a> {
    pub(crate) blocks: &'a Blocks,
    by_start: Sequence,
    /// By end, the latest first.
    by_end: Sequence,
    /// Mean lifetime.
    mean: f64,
    /// Per block the fourth root of its size in mean sizes.
    bulk: Vec<f64>,
    pub(crate) floor: u64,
}

/// How to choose among blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    /// A gap costs that many times the square root of its share of a mean lifetime, in mean
    /// lifetimes.
    pub(crate) gap_cost: f64,
    /// Up to that many mean lifetimes are added to each cost by chance.
    pub(crate) noise: f64,
    /// Whether what covers little may go first because it is large.
    pub(crate) bulky: bool,
}

/// Some blocks placed, the others waiting.
#[derive(Clone)]
pub(crate) struct Filling {
    by_start: Shelf,
    by_end: Shelf,
    skyline: Skyline,
    /// Whether all times weigh the same for ever: then sums of weights never change.
    is_even: bool,
    /// By how much the logarithm of a time's weight grows per byte.
    steepness: f64,
    weights: Vec<f64>,
    /// Per time the sum of the weights of the times before it in the same line, up to a constant
    /// per line.
    before: Vec<f64>,
    pub(crate) offsets: Vec<u64>,
    left: usize,
    /// Comparisons so far.
    pub(crate) steps: u64,
}

/// A level stretch of the skyline.
#[derive(Clone, Copy)]
struct Line {
    start: u32,
    end: u32,
    height: u64,
}

/// Offsets of all blocks, all times weighing the same. Always found.
pub(crate) fn place(blocks: &Blocks, watch: &Watch) -> Result<Vec<u64>, Stop> {
    let lines = Lines::new(blocks);
    let mut filling = lines.filling(0.0);
    lines.fill(&mut filling, Rule { gap_cost: 1.0, noise: 0.0, bulky: false }, u64::MAX, &mut Random::new(0), watch)?;
    Ok(filling.offsets)
}

impl<'a> Lines<'a> {
    pub(crate) fn new(blocks: &'a Blocks) -> Self {
        let (all, times) = (&blocks.all, blocks.times);
        let mut by_start: Vec<u32> = (0..all.len() as u32).collect();
        by_start.sort_by_key(|&at| (all[at as usize].start, Reverse(all[at as usize].end), at));
        let mut by_end = by_start.clone();
        by_end.sort_by_key(|&at| (Reverse(all[at as usize].end), all[at as usize].start, at));
        let size = all.iter().map(|block| block.size as f64).sum::<f64>() / all.len().max(1) as f64;
        Lines {
            blocks,
            by_start: Sequence::new(by_start, times, |block, time| all[block as usize].start < time),
            by_end: Sequence::new(by_end, times, |block, time| all[block as usize].end > time),
            mean: blocks.area() as f64 / all.len().max(1) as f64,
            bulk: all.iter().map(|block| (block.size as f64 / size).sqrt().sqrt()).collect(),
            floor: blocks.floor(),
        }
    }

    /// About how many comparisons it takes to place all blocks, weights and their sums included.
    pub(crate) fn steps(&self) -> u64 {
        2 * NEAREST as u64 * self.blocks.all.len() as u64 + self.blocks.area() / 4
    }

    /// The filling in which nothing is placed. Where the top will be one floor higher, a time
    /// weighs more by the factor exp(`steepness`).
    pub(crate) fn filling(&self, steepness: f64) -> Filling {
        let Blocks { all, times, .. } = self.blocks;
        let ends = self.by_start.blocks.iter().map(|&at| all[at as usize].end);
        let starts = self.by_end.blocks.iter().map(|&at| times - all[at as usize].start);
        let steepness = steepness / self.floor.max(1) as f64;
        let weight = |held: u64| exp(-steepness * (self.floor - held) as f64);
        let mut filling = Filling {
            is_even: steepness == 0.0,
            by_start: Shelf::new(ends.collect()),
            by_end: Shelf::new(starts.collect()),
            skyline: Skyline::new(*times),
            steepness,
            weights: self.blocks.held().into_iter().map(weight).collect(),
            before: vec![0.0; *times as usize],
            offsets: vec![0; all.len()],
            left: all.len(),
            steps: 0,
        };
        filling.sum(0, *times);
        filling
    }

    /// Places blocks until the lowest line is at `height` or above, or all are placed.
    pub(crate) fn fill(
        &self,
        filling: &mut Filling,
        rule: Rule,
        height: u64,
        random: &mut Random,
        watch: &Watch,
    ) -> Result<(), Stop> {
        let scale = filling.weights.len() as f64 / filling.weights.iter().sum::<f64>();
        // The rule, converted from mean lifetimes to the present weights.
        let rule = Rule {
            gap_cost: rule.gap_cost * (self.mean / scale).sqrt(),
            noise: rule.noise * self.mean / scale,
            ..rule
        };
        let mut rounds = 0u32;
        while filling.left > 0 {
            if rounds % 64 == 0 {
                watch.check()?;
            }
            rounds = rounds.wrapping_add(1);
            let Some(line) = filling.skyline.lowest() else { break };
            if line.height >= height {
                break;
            }
            match self.best(filling, line, rule, random) {
                Some(at) => self.put(filling, line, at),
                None if filling.lift(line) => {}
                None => break,
            }
        }
        Ok(())
    }

    /// The block to be placed on a line.
    fn best(&self, filling: &mut Filling, line: Line, rule: Rule, random: &mut Random) -> Option<u32> {
        let Line { start, end, .. } = line;
        let before = |time: u32| filling.before[time as usize];
        let through = |time: u32| before(time - 1) + filling.weights[time as usize - 1];
        let (begin, through_end) = (before(start), through(end));
        let mut best = (f64::INFINITY, u32::MAX);
        let mut compared = 0;
        let mut compare = |at: u32| {
            let block = &self.blocks.all[at as usize];
            let (from, to) = (before(block.start), through(block.end));
            let gaps = (from - begin).max(0.0).sqrt() + (through_end - to).max(0.0).sqrt();
            let bulk = if rule.bulky { self.bulk[at as usize] } else { 1.0 };
            let mut loss = rule.gap_cost * gaps - (to - from) * bulk;
            if rule.noise > 0.0 {
                loss += rule.noise * random.below(1 << 20) as f64 / f64::from(1 << 20);
            }
            if loss < best.0 || (loss == best.0 && at < best.1) {
                best = (loss, at);
            }
            compared += 1;
        };
        let (by_start, by_end) = (&self.by_start, &self.by_end);
        let place = by_start.first[start as usize] as usize;
        filling.by_start.nearest(place, end, NEAREST, |place| compare(by_start.blocks[place]));
        let (place, most) = (by_end.first[end as usize] as usize, self.blocks.times - start);
        filling.by_end.nearest(place, most, NEAREST, |place| compare(by_end.blocks[place]));
        filling.steps += compared + 1;
        (best.1 < u32::MAX).then_some(best.1)
    }

    fn put(&self, filling: &mut Filling, line: Line, at: u32) {
        let block = &self.blocks.all[at as usize];
        filling.by_start.take(self.by_start.place[at as usize] as usize);
        filling.by_end.take(self.by_end.place[at as usize] as usize);
        let offset = round_up(line.height, block.alignment);
        filling.offsets[at as usize] = offset;
        filling.left -= 1;
        let joined = filling.skyline.cover(line, block, offset + block.size);
        filling.connect(block.start, block.end, joined);
    }
}

impl Filling {
    /// A copy, in the memory of one that is of no more use.
    pub(crate) fn copy_into(&self, dropped: Option<Filling>) -> Filling {
        let Some(mut copy) = dropped else { return self.clone() };
        let Filling { is_even, by_start, by_end, skyline, steepness, weights, before, offsets, left, steps } = self;
        copy.by_start.clone_from(by_start);
        copy.by_end.clone_from(by_end);
        copy.skyline.clone_from(skyline);
        copy.weights.clone_from(weights);
        copy.before.clone_from(before);
        copy.offsets.clone_from(offsets);
        (copy.is_even, copy.steepness, copy.left, copy.steps) = (*is_even, *steepness, *left, *steps);
        copy
    }

    /// A smooth maximum of what the tops will be at least.
    pub(crate) fn potential(&self) -> f64 {
        self.weights.iter().sum()
    }

    /// Whether some top will be a pool's limit or more.
    pub(crate) fn exceeds(&self, floor: u64, limit: u64) -> bool {
        // A little more, as weights are rounded.
        let most = exp(self.steepness * (limit.saturating_sub(floor) as f64 + 0.5));
        self.steepness > 0.0 && self.weights.iter().any(|&weight| weight > most)
    }

    /// Raises a line on which nothing fits to its lower neighbour; says whether there is one.
    fn lift(&mut self, line: Line) -> bool {
        let Some(height) = self.skyline.lower_side(line) else { return false };
        let factor = exp(self.steepness * (height - line.height) as f64);
        if factor > 1.0 {
            self.steps += u64::from(line.end - line.start) / 8;
            for weight in &mut self.weights[line.start as usize..line.end as usize] {
                *weight = (*weight * factor).min(HEAVIEST);
            }
        }
        let joined = self.skyline.join(Line { height, ..line });
        self.connect(line.start, line.end, joined);
        true
    }

    /// Sums the weights of the times `start..end` anew, now that they are part of a line, and of
    /// others of that line if need be.
    fn connect(&mut self, start: u32, end: u32, line: Line) {
        if self.is_even {
            return;
        }
        if line.start < start {
            self.sum(start, line.end);
        } else if end < line.end {
            self.sum_back(start, end);
        } else {
            self.sum(start, end);
        }
    }

    /// Continues the sums from the time before.
    fn sum(&mut self, start: u32, end: u32) {
        let (start, end) = (start as usize, end as usize);
        let mut sum = if start > 0 { self.before[start - 1] + self.weights[start - 1] } else { 0.0 };
        for (before, weight) in self.before[start..end].iter_mut().zip(&self.weights[start..end]) {
            *before = sum;
            sum += weight;
        }
        self.steps += (end - start) as u64 / 8;
    }

    /// Continues the sums backwards, from the time after.
    fn sum_back(&mut self, start: u32, end: u32) {
        let (start, end) = (start as usize, end as usize);
        let mut sum = self.before[end];
        for (before, weight) in self.before[start..end].iter_mut().zip(&self.weights[start..end]).rev() {
            sum -= weight;
            *before = sum;
        }
        self.steps += (end - start) as u64 / 8;
    }
}

/// Lines that cover all times without gaps, and which is the lowest.
struct Skyline {
    /// Per first time of a line its end, per end its first time, and per first time its height. No
    /// line begins where the end is 0.
    end: Vec<u32>,
    begin: Vec<u32>,
    height: Vec<u64>,
    /// Height, start and end; an entry that no longer is a line is dropped when met.
    lowest: BinaryHeap<Reverse<(u64, u32, u32)>>,
}

impl Clone for Skyline {
    fn clone(&self) -> Self {
        let Skyline { end, begin, height, lowest } = self;
        Skyline { end: end.clone(), begin: begin.clone(), height: height.clone(), lowest: lowest.clone() }
    }

    fn clone_from(&mut self, source: &Self) {
        self.end.clone_from(&source.end);
        self.begin.clone_from(&source.begin);
        self.height.clone_from(&source.height);
        self.lowest.clone_from(&source.lowest);
    }
}

impl Skyline {
    fn new(times: u32) -> Self {
        let count = times as usize + 1;
        let (end, begin, height) = (vec![0; count], vec![0; count], vec![0; count]);
        let mut skyline = Skyline { end, begin, height, lowest: BinaryHeap::new() };
        skyline.insert(Line { start: 0, end: times, height: 0 });
        skyline
    }

    fn insert(&mut self, line: Line) {
        if line.start < line.end {
            self.end[line.start as usize] = line.end;
            self.begin[line.end as usize] = line.start;
            self.height[line.start as usize] = line.height;
            self.lowest.push(Reverse((line.height, line.start, line.end)));
        }
    }

    /// The lowest line, of equals the first.
    fn lowest(&mut self) -> Option<Line> {
        while let Some(&Reverse((height, start, end))) = self.lowest.peek() {
            if self.end[start as usize] == end && self.height[start as usize] == height {
                return Some(Line { start, end, height });
            }
            self.lowest.pop();
        }
        None
    }

    /// The heights of both neighbours.
    fn sides(&self, line: Line) -> [Option<u64>; 2] {
        let before = (line.start > 0).then(|| self.height[self.begin[line.start as usize] as usize]);
        let after = (line.end as usize + 1 < self.end.len()).then(|| self.height[line.end as usize]);
        [before, after]
    }

    fn lower_side(&self, line: Line) -> Option<u64> {
        self.sides(line).into_iter().flatten().min()
    }

    /// A block within the line's span now ends at `height`. The line that it is then part of.
    fn cover(&mut self, line: Line, block: &Block, height: u64) -> Line {
        self.insert(Line { end: block.start, ..line });
        self.insert(Line { start: block.end, ..line });
        self.join(Line { start: block.start, end: block.end, height })
    }

    /// Puts a line where there was none or a lower one, together with neighbours of its height.
    fn join(&mut self, mut line: Line) -> Line {
        let [before, after] = self.sides(line).map(|side| side == Some(line.height));
        if after {
            line.end = std::mem::take(&mut self.end[line.end as usize]);
        }
        if before {
            self.end[line.start as usize] = 0;
            line.start = self.begin[line.start as usize];
        }
        self.insert(line);
        line
    }
}
