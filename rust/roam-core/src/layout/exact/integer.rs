//! A layout as an integer program: an offset per block, and for each two blocks that meet which
//! lies below.
//!
//! The disjunctive formulation, as MODeL (Steiner et al., ICML 2023) and ROAM (Shu et al., arXiv
//! 2310.19295, section 4) have it, with rows per time that say more than its pairs: a block lies
//! above all that lies below it together. Let a(i) be 1, or block i's alignment where that matters,
//! and s(i) its size:
//!
//! - y(i) >= 0, block i's offset divided by a(i), whole where a(i) is above 1; below(i, j), for
//!   each two blocks that meet: 1 if i lies below j, else 0; pool, the one column that costs,
//!   between the floor and the present pool H.
//! - a(i) y(i) + s(i) <= a(j) y(j) + H (1 - below(i, j)), and the same the other way round with
//!   below(i, j) for 1 - below(i, j).
//! - For every time whose set of live blocks is not a subset of another time's, and each block i of
//!   it: a(i) y(i) >= the sum of s(j) over the j below it, and pool - a(i) y(i) - s(i) >= the sum
//!   over those above it. These rows make the linear relaxation much tighter.
//! - Of equal blocks the one with the lower number lies below. Where no alignment matters, a layout
//!   may be turned upside down: so of one pair of blocks that have no equals, it is fixed which
//!   lies below.

use crate::graph::round_up;
use crate::layout::blocks::{Block, Blocks};
use crate::mip::{Column, Program, Sense, common_divisor};
use std::cmp::Reverse;

/// Which of two blocks lies below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Below {
    /// They never meet.
    Apart,
    /// The one with the lower number.
    First,
    /// The column says whether it is the one with the lower number.
    Column(usize),
}

/// A layout of some blocks as a program.
pub(crate) struct LayoutProgram<'a> {
    all: &'a [Block],
    /// Bytes per unit of the program's cost.
    pub(crate) unit: u64,
    /// The pool's size is the one column that costs, and the first.
    pub(crate) program: Program,
    /// The present layout as values of the columns.
    pub(crate) start: Vec<i64>,
    /// Per two blocks, the larger number first.
    below: Vec<Vec<Below>>,
}

impl<'a> LayoutProgram<'a> {
    /// The program whose cost is the pool, or `floor` where that is higher, to begin at a layout;
    /// `None` where it would have more than `most` entries, or numbers that a solver cannot hold.
    pub(crate) fn new(blocks: &'a Blocks, offsets: &[u64], floor: u64, most: u64) -> Option<Self> {
        let all = &blocks.all[..];
        // The two rows of each pair alone have six entries.
        if blocks.pairs().saturating_mul(6) > most {
            return None;
        }
        let aligned = blocks.unit().is_none();
        let sizes = all.iter().map(|block| block.size);
        let alignments = all.iter().filter(|_| aligned).map(|block| block.alignment);
        let unit = common_divisor(sizes.chain(alignments)).max(1);
        let mut this = LayoutProgram { all, unit, program: Program::default(), start: Vec::new(), below: Vec::new() };
        let fixed = if aligned { None } else { this.unlike_pair() };
        let offsets = this.representative(offsets, fixed);
        let most_units = i64::try_from(blocks.pool_bytes(&offsets) / unit).ok()?;
        let floor = i64::try_from(floor.div_ceil(unit)).ok()?.min(most_units);
        this.program.column(Column { lower: floor, upper: most_units, cost: 1, integer: true });
        this.start.push(most_units);
        for (block, offset) in all.iter().zip(&offsets) {
            let step = if aligned { block.alignment } else { unit };
            let upper = (most_units - this.units(block.size)) * unit as i64 / step as i64;
            // With whole sizes and without alignments the lowest offsets are whole by themselves.
            this.program.column(Column { lower: 0, upper, cost: 0, integer: step > unit });
            this.start.push((offset / step) as i64);
        }
        for second in 0..all.len() {
            let row = (0..second).map(|first| this.decide([first, second], &offsets, fixed)).collect();
            this.below.push(row);
        }
        let steps =
            all.iter().map(|block| if aligned { (block.alignment / unit) as i64 } else { 1 }).collect::<Vec<_>>();
        this.keep_apart(most_units, &steps);
        this.keep_sums(blocks.times, &steps);
        let is_small = this.program.entries() <= most;
        debug_assert!(this.program.admits(&this.start), "the start breaks a row");
        (is_small && this.program.is_exact() && this.program.admits(&this.start)).then_some(this)
    }

    /// The offsets that the values of a solution stand for: each block as low as what lies below it
    /// permits. `None` where they say that some block lies below itself.
    pub(crate) fn offsets(&self, values: &[f64]) -> Option<Vec<u64>> {
        if values.len() != self.program.columns.len() {
            return None;
        }
        let count = self.all.len();
        let lies_below = |a: usize, b: usize| match self.below[a.max(b)][a.min(b)] {
            Below::Apart => false,
            Below::First => a < b,
            Below::Column(at) => (values[at] > 0.5) == (a < b),
        };
        let mut open: Vec<usize> = (0..count).collect();
        let mut offsets = vec![0; count];
        while !open.is_empty() {
            let lowest = open.iter().position(|&at| !open.iter().any(|&other| other != at && lies_below(other, at)))?;
            let at = open.remove(lowest);
            let placed = (0..count).filter(|other| !open.contains(other) && *other != at && lies_below(*other, at));
            let top = placed.map(|other| offsets[other] + self.all[other].size).max().unwrap_or(0);
            offsets[at] = round_up(top, self.all[at].alignment);
        }
        Some(offsets)
    }

    /// The least cost that the program allows, whatever the blocks need.
    pub(crate) fn floor(&self) -> i64 {
        self.program.columns[0].lower
    }

    fn units(&self, bytes: u64) -> i64 {
        (bytes / self.unit) as i64
    }

    /// The largest two blocks that meet and have no equals. A layout turned upside down is a
    /// layout, too: so one may choose which of the two lies below.
    fn unlike_pair(&self) -> Option<[usize; 2]> {
        let mut unlike: Vec<usize> = (0..self.all.len())
            .filter(|&at| (0..self.all.len()).all(|other| other == at || !self.are_equal(at, other)))
            .collect();
        unlike.sort_by_key(|&at| (Reverse(self.all[at].size), at));
        let first = *unlike.first()?;
        let second = unlike.into_iter().find(|&other| other != first && self.all[first].meets(&self.all[other]))?;
        Some([first.min(second), first.max(second)])
    }

    fn are_equal(&self, a: usize, b: usize) -> bool {
        self.all[a] == self.all[b]
    }

    /// Offsets of a layout that is no higher, in which of equal blocks the one with the lower
    /// number lies below, and the first of a pair below the second.
    fn representative(&self, offsets: &[u64], pair: Option<[usize; 2]>) -> Vec<u64> {
        let mut offsets = offsets.to_vec();
        if pair.is_some_and(|[first, second]| offsets[first] > offsets[second]) {
            let pool = self.all.iter().zip(&offsets).map(|(block, offset)| offset + block.size).max().unwrap_or(0);
            offsets = self.all.iter().zip(&offsets).map(|(block, offset)| pool - offset - block.size).collect();
        }
        // As low as possible, from the bottom up.
        let mut sequence: Vec<usize> = (0..self.all.len()).collect();
        sequence.sort_by_key(|&at| (offsets[at], at));
        for (place, &at) in sequence.iter().enumerate() {
            let meeting = sequence[..place].iter().filter(|&&other| self.all[other].meets(&self.all[at]));
            let top = meeting.map(|&other| offsets[other] + self.all[other].size).max().unwrap_or(0);
            offsets[at] = round_up(top, self.all[at].alignment);
        }
        for at in 0..self.all.len() {
            for other in at + 1..self.all.len() {
                if self.are_equal(at, other) && offsets[other] < offsets[at] {
                    offsets.swap(at, other);
                }
            }
        }
        offsets
    }

    fn decide(&mut self, [first, second]: [usize; 2], offsets: &[u64], fixed: Option<[usize; 2]>) -> Below {
        if !self.all[first].meets(&self.all[second]) {
            return Below::Apart;
        }
        if fixed == Some([first, second]) || self.are_equal(first, second) {
            return Below::First;
        }
        self.start.push(i64::from(offsets[first] < offsets[second]));
        Below::Column(self.program.column(Column { lower: 0, upper: 1, cost: 0, integer: true }))
    }

    /// Of two blocks that meet, the lower ends where the upper begins or before.
    fn keep_apart(&mut self, most: i64, steps: &[i64]) {
        for second in 0..self.all.len() {
            for first in 0..second {
                let column = match self.below[second][first] {
                    Below::Apart => continue,
                    Below::First => None,
                    Below::Column(at) => Some(at),
                };
                let difference = vec![(1 + first, steps[first]), (1 + second, -steps[second])];
                let sizes = [first, second].map(|at| self.units(self.all[at].size));
                let Some(column) = column else {
                    self.program.row(difference, Sense::Less, -sizes[0]);
                    continue;
                };
                let mut below = difference.clone();
                below.push((column, most));
                self.program.row(below, Sense::Less, most - sizes[0]);
                let mut above = difference;
                above.push((column, most));
                self.program.row(above, Sense::Greater, sizes[1]);
            }
        }
    }

    /// At every time: what lies below a block takes no more than there is below it, and so above.
    fn keep_sums(&mut self, times: u32, steps: &[i64]) {
        for time in 0..times {
            // Where nothing ends, all that is alive is also alive at the next time.
            if !self.all.iter().any(|block| block.end == time + 1) {
                continue;
            }
            let is_alive = |at: &usize| self.all[*at].times().contains(&(time as usize));
            let alive: Vec<usize> = (0..self.all.len()).filter(is_alive).collect();
            for &at in &alive {
                let mut under = (vec![(1 + at, steps[at])], 0);
                let mut over = (vec![(0, 1), (1 + at, -steps[at])], self.units(self.all[at].size));
                for &other in alive.iter().filter(|&&other| other != at) {
                    let size = self.units(self.all[other].size);
                    match self.below[at.max(other)][at.min(other)] {
                        Below::Apart => {}
                        Below::First if other < at => under.1 += size,
                        Below::First => over.1 += size,
                        // The column is 1 where the lower number lies below.
                        Below::Column(column) if other < at => {
                            under.0.push((column, -size));
                            over.0.push((column, size));
                            over.1 += size;
                        }
                        Below::Column(column) => {
                            under.0.push((column, size));
                            under.1 += size;
                            over.0.push((column, -size));
                        }
                    }
                }
                self.program.row(under.0, Sense::Greater, under.1);
                self.program.row(over.0, Sense::Greater, over.1);
            }
        }
    }
}
