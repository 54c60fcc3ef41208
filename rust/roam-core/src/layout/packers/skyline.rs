//! LLFB, long-lived first best (the layout baseline of Shu et al., arXiv 2310.19295): keep a
//! skyline of offsets over time; on its lowest line place the longest-lived block that fits into
//! the line's time span; if none fits, lift the line to its lower neighbour.

use crate::control::{Stop, Watch};
use crate::graph::round_up;
use crate::layout::blocks::Blocks;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Offsets per block; `None` where one would reach `limit` or beyond, or once `work`, counted in
/// ranges of blocks looked at, is used up.
pub(crate) fn place(blocks: &Blocks, limit: u64, work: &mut u64, watch: &Watch) -> Result<Option<Vec<u64>>, Stop> {
    let mut offsets = vec![0; blocks.all.len()];
    let mut waiting = Waiting::new(blocks);
    // Lines by start: (end, height). They cover all times without gaps.
    let mut lines: BTreeMap<u32, (u32, u64)> = BTreeMap::from([(0, (blocks.times, 0))]);
    // Lowest first, then earliest; entries that no longer match a line are dropped when met.
    let mut lowest = BinaryHeap::from([Reverse((0u64, 0u32, blocks.times))]);
    let mut left = blocks.all.len();
    let mut rounds = 0usize;
    while left > 0 {
        if rounds % 64 == 0 {
            watch.check()?;
        }
        rounds += 1;
        let Some(Reverse((height, start, end))) = lowest.pop() else { break };
        if lines.get(&start) != Some(&(end, height)) {
            continue;
        }
        let longest = waiting.take_longest(start, end, work);
        if *work == 0 {
            return Ok(None);
        }
        if let Some(at) = longest {
            let block = &blocks.all[at as usize];
            let offset = round_up(height, block.alignment);
            if offset + block.size >= limit {
                return Ok(None);
            }
            offsets[at as usize] = offset;
            left -= 1;
            lines.remove(&start);
            for (from, to, level) in
                [(start, block.start, height), (block.start, block.end, offset + block.size), (block.end, end, height)]
            {
                if from < to {
                    lines.insert(from, (to, level));
                    lowest.push(Reverse((level, from, to)));
                }
            }
            continue;
        }
        let before = lines.range(..start).next_back().map(|(&from, &(to, level))| (from, to, level));
        let after = lines.range(end..).next().map(|(&from, &(to, level))| (from, to, level));
        let level = match (before, after) {
            (Some((_, _, a)), Some((_, _, b))) => a.min(b),
            (Some((_, _, level)), None) | (None, Some((_, _, level))) => level,
            // A single line over all times takes any block.
            (None, None) => break,
        };
        let (mut from, mut to) = (start, end);
        lines.remove(&start);
        for (neighbour_start, neighbour_end, its_level) in before.into_iter().chain(after) {
            if its_level == level {
                lines.remove(&neighbour_start);
                from = from.min(neighbour_start);
                to = to.max(neighbour_end);
            }
        }
        lines.insert(from, (to, level));
        lowest.push(Reverse((level, from, to)));
    }
    Ok(Some(offsets))
}

/// The blocks not yet placed, by start, in a tournament tree: the longest lifetime and the
/// earliest end of each range.
struct Waiting<'a> {
    blocks: &'a Blocks,
    by_start: Vec<u32>,
    longest: Vec<u32>,
    earliest_end: Vec<u32>,
    width: usize,
}

impl<'a> Waiting<'a> {
    fn new(blocks: &'a Blocks) -> Self {
        let mut by_start: Vec<u32> = (0..blocks.all.len() as u32).collect();
        by_start.sort_by_key(|&at| {
            let block = &blocks.all[at as usize];
            (block.start, Reverse(block.size), at)
        });
        let width = by_start.len().next_power_of_two();
        let mut waiting =
            Waiting { blocks, by_start, longest: vec![0; 2 * width], earliest_end: vec![u32::MAX; 2 * width], width };
        for place in 0..waiting.by_start.len() {
            let block = &blocks.all[waiting.by_start[place] as usize];
            waiting.longest[width + place] = block.end - block.start;
            waiting.earliest_end[width + place] = block.end;
        }
        for node in (1..width).rev() {
            waiting.combine(node);
        }
        waiting
    }

    fn combine(&mut self, node: usize) {
        self.longest[node] = self.longest[2 * node].max(self.longest[2 * node + 1]);
        self.earliest_end[node] = self.earliest_end[2 * node].min(self.earliest_end[2 * node + 1]);
    }

    /// Removes the longest-lived block within [start, end); of equals the largest of the earliest.
    /// Takes the ranges that it looks at from `work`.
    fn take_longest(&mut self, start: u32, end: u32, work: &mut u64) -> Option<u32> {
        let first = self.by_start.partition_point(|&at| self.blocks.all[at as usize].start < start);
        let last = self.by_start.partition_point(|&at| self.blocks.all[at as usize].start < end);
        let mut best: Option<(u32, usize)> = None;
        // Ranges of places, those to the left on top.
        let mut stack = vec![(1usize, 0usize, self.width)];
        while let Some((node, from, to)) = stack.pop() {
            *work = work.saturating_sub(1);
            let hopeless = to <= first
                || last <= from
                || self.earliest_end[node] > end
                || self.longest[node] <= best.map_or(0, |(lifetime, _)| lifetime);
            if hopeless {
                continue;
            }
            if node >= self.width {
                best = Some((self.longest[node], from));
            } else {
                let middle = (from + to) / 2;
                stack.push((2 * node + 1, middle, to));
                stack.push((2 * node, from, middle));
            }
        }
        let (_, place) = best?;
        let mut node = self.width + place;
        (self.longest[node], self.earliest_end[node]) = (0, u32::MAX);
        while node > 1 {
            node /= 2;
            self.combine(node);
        }
        Some(self.by_start[place])
    }
}
