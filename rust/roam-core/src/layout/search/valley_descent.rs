//! Fast placement valley by valley, for any number of blocks.
//!
//! The skyline of what is placed has *valleys*: stretches lower than both sides. Only what lies
//! wholly within a valley can rest on its floor. Of all valleys the one with the fewest choices for
//! some time goes first: the time is covered by the first in rank of the blocks that can rest
//! there. A valley on whose floor nothing fits is lifted to its lower side. That leaves a hole;
//! times that cannot afford it are blamed, and blamed times are served earlier in later descents,
//! as in squeaky wheel optimization (Joslin and Clements, 1999) and in weighted degree heuristics
//! (Boussemart et al., 2004).

use crate::control::{Stop, Watch};
use crate::graph::round_up;
use crate::layout::blocks::{Block, Blocks, first_open};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// What all descents over the same blocks share.
pub(crate) struct ValleySearch<'a> {
    blocks: &'a Blocks,
    /// Blocks by start.
    by_start: Vec<u32>,
    /// Per time the place in `by_start` of the first block that starts then or later; one more at
    /// the end.
    first: Vec<u32>,
    /// Bytes held per time.
    held: Vec<u64>,
}

impl<'a> ValleySearch<'a> {
    pub(crate) fn new(blocks: &'a Blocks) -> Self {
        let times = blocks.times as usize;
        let mut by_start: Vec<u32> = (0..blocks.all.len() as u32).collect();
        by_start.sort_by_key(|&at| blocks.all[at as usize].start);
        let first = (0..=blocks.times)
            .map(|time| by_start.partition_point(|&at| blocks.all[at as usize].start < time) as u32)
            .collect();
        let mut held = vec![0u64; times + 1];
        for block in &blocks.all {
            held[block.start as usize] = held[block.start as usize].wrapping_add(block.size);
            held[block.end as usize] = held[block.end as usize].wrapping_sub(block.size);
        }
        for time in 0..times {
            held[time + 1] = held[time + 1].wrapping_add(held[time]);
        }
        ValleySearch { blocks, by_start, first, held }
    }

    /// Offsets below `limit`, if one descent finds them. It tries to stay within `target`, places
    /// blocks of a lower rank first, and adds to the blame of times. It gives up after `most`
    /// comparisons, and says how many it made.
    pub(crate) fn descend(
        &self,
        rank: &[u32],
        blame: &mut [u32],
        target: u64,
        limit: u64,
        most: u64,
        watch: &Watch,
    ) -> Result<(Option<Vec<u64>>, u64), Stop> {
        let times = self.blocks.times as usize;
        let mut descent = Descent {
            search: self,
            rank,
            blame,
            target,
            limit,
            most,
            steps: 0,
            left: self.held.clone(),
            end: vec![0; times],
            begin: vec![0; times],
            height: vec![0; times],
            version: vec![0; times],
            open: (0..=self.by_start.len() as u32).collect(),
            offsets: vec![0; self.blocks.all.len()],
            waiting: BinaryHeap::new(),
            choices: vec![0; times + 1],
        };
        if times > 0 {
            descent.set(0..times, 0);
            descent.look(0);
        }
        let found = descent.run(watch)?;
        Ok((found.then_some(descent.offsets), descent.steps))
    }
}

/// What to do in a valley, and how urgent it is: the lowest first.
type Entry = Reverse<(u64, u64, u32, u32, u32)>;

struct Descent<'a> {
    search: &'a ValleySearch<'a>,
    rank: &'a [u32],
    blame: &'a mut [u32],
    target: u64,
    limit: u64,
    most: u64,
    steps: u64,
    /// Per time the bytes still to be placed.
    left: Vec<u64>,
    /// The skyline: for the first time of a stretch its end and height, for the last its begin.
    end: Vec<u32>,
    begin: Vec<u32>,
    height: Vec<u64>,
    /// Per first time of a stretch how often it changed.
    version: Vec<u32>,
    /// Per place in `by_start` one from which on to look for a block not yet placed.
    open: Vec<u32>,
    offsets: Vec<u64>,
    /// (choices per blame, slack, time, begin of the valley, its version).
    waiting: BinaryHeap<Entry>,
    /// Scratch: per time how many blocks may rest there.
    choices: Vec<i32>,
}

impl Descent<'_> {
    fn run(&mut self, watch: &Watch) -> Result<bool, Stop> {
        let mut rounds = 0u32;
        while let Some(Reverse((_, _, time, start, version))) = self.waiting.pop() {
            rounds += 1;
            if rounds % 64 == 0 {
                watch.check()?;
            }
            if self.steps > self.most {
                return Ok(false);
            }
            let start = start as usize;
            if self.version[start] != version {
                continue;
            }
            let valley = start..self.end[start] as usize;
            match self.pick(time as usize, &valley) {
                Some(at) => self.place(at, valley),
                None => {
                    if !self.lift(valley) {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    /// Makes the times one stretch of that height.
    fn set(&mut self, times: Range<usize>, height: u64) {
        self.end[times.start] = times.end as u32;
        self.begin[times.end - 1] = times.start as u32;
        self.height[times.start] = height;
        self.version[times.start] += 1;
    }

    /// As `set`; joins neighbours of the same height. Returns where the stretch begins.
    fn join(&mut self, times: Range<usize>, height: u64) -> usize {
        let Range { mut start, mut end } = times;
        if start > 0 {
            let before = self.begin[start - 1] as usize;
            if self.height[before] == height {
                start = before;
            }
        }
        if end < self.end.len() && self.height[end] == height {
            self.version[end] += 1;
            end = self.end[end] as usize;
        }
        self.version[times.start] += 1;
        self.set(start..end, height);
        start
    }

    /// The heights of both sides; the largest number where there is none.
    fn sides(&self, start: usize) -> (u64, u64) {
        let end = self.end[start] as usize;
        let left = if start > 0 { self.height[self.begin[start - 1] as usize] } else { u64::MAX };
        let right = if end < self.end.len() { self.height[end] } else { u64::MAX };
        (left, right)
    }

    /// The first open place at or after this one.
    fn next_open(&mut self, place: u32) -> u32 {
        first_open(&mut self.open, place)
    }

    fn block(&self, at: u32) -> &Block {
        &self.search.blocks.all[at as usize]
    }

    /// If the stretch is a valley, finds the time with the fewest choices and puts it on the list.
    fn look(&mut self, start: usize) {
        let floor = self.height[start];
        let (left, right) = self.sides(start);
        if left <= floor || right <= floor {
            return;
        }
        let end = self.end[start] as usize;
        self.choices[start..=end].fill(0);
        let side = left.min(right);
        let mut waste = if side == u64::MAX { u64::MAX } else { side - floor };
        let last = self.search.first[end];
        let mut any = false;
        let mut place = self.next_open(self.search.first[start]);
        while place < last {
            self.steps += 1;
            let block = *self.block(self.search.by_start[place as usize]);
            if block.end as usize <= end {
                any = true;
                waste = waste.min(block.size);
                self.choices[block.start as usize] += 1;
                self.choices[block.end as usize] -= 1;
            }
            place = self.next_open(place + 1);
        }
        let version = self.version[start];
        if !any {
            if side != u64::MAX {
                self.waiting.push(Reverse((0, 0, start as u32, start as u32, version)));
            }
            return;
        }
        self.steps += (end - start) as u64;
        let mut best = (u64::MAX, u64::MAX, 0);
        let mut choices = 0;
        for time in start..end {
            choices += self.choices[time];
            if choices == 0 {
                continue;
            }
            let slack = self.target.saturating_sub(floor + self.left[time]);
            let must = slack < waste;
            let key = (u64::from(choices as u32 + u32::from(!must)) << 32) / u64::from(self.blame[time]);
            best = best.min((key, slack, time));
        }
        let (key, slack, time) = best;
        self.waiting.push(Reverse((key, slack, time as u32, start as u32, version)));
    }

    /// The first in rank of the open blocks within the valley that cover the time.
    fn pick(&mut self, time: usize, valley: &Range<usize>) -> Option<u32> {
        let last = self.search.first[time + 1];
        let mut best: Option<u32> = None;
        let mut place = self.next_open(self.search.first[valley.start]);
        while place < last {
            self.steps += 1;
            let at = self.search.by_start[place as usize];
            let block = self.block(at);
            let covers = block.end as usize > time && block.end as usize <= valley.end;
            if covers && best.is_none_or(|best| self.rank[at as usize] < self.rank[best as usize]) {
                best = Some(at);
            }
            place = self.next_open(place + 1);
        }
        best
    }

    fn place(&mut self, at: u32, valley: Range<usize>) {
        let block = *self.block(at);
        let floor = self.height[valley.start];
        let offset = round_up(floor, block.alignment);
        self.offsets[at as usize] = offset;
        for time in block.times() {
            self.left[time] -= block.size;
        }
        self.steps += u64::from(block.end - block.start);
        let from = self.search.first[block.start as usize];
        let place = (from..).find(|&place| self.search.by_start[place as usize] == at).unwrap_or(from);
        self.open[place as usize] = place + 1;
        let (start, end) = (block.start as usize, block.end as usize);
        if valley.start < start {
            self.set(valley.start..start, floor);
        }
        if end < valley.end {
            self.set(end..valley.end, floor);
        }
        let middle = self.join(start..end, offset + block.size);
        self.look_around(middle);
    }

    /// Looks at a changed stretch and its neighbours.
    fn look_around(&mut self, start: usize) {
        self.look(start);
        if start > 0 {
            let before = self.begin[start - 1] as usize;
            self.version[before] += 1;
            self.look(before);
        }
        let end = self.end[start] as usize;
        if end < self.end.len() {
            self.version[end] += 1;
            self.look(end);
        }
    }

    /// Nothing rests on the valley's floor. Says whether the limit still holds.
    fn lift(&mut self, valley: Range<usize>) -> bool {
        let (left, right) = self.sides(valley.start);
        let side = left.min(right);
        let mut holds = true;
        for time in valley.clone() {
            let top = side + self.left[time];
            if self.left[time] > 0 && top > self.target {
                self.blame[time] = self.blame[time].saturating_add(1);
                holds &= top < self.limit;
            }
        }
        self.steps += (valley.end - valley.start) as u64;
        let start = self.join(valley, side);
        self.look_around(start);
        holds
    }
}
