//! When tensors that may lie in files are in memory, so that a step in a given order moves few bytes
//! within a limit, and a proof of how many bytes have to be moved.
//!
//! Each tensor has some *ways*: to stay in memory, or to be in it for some intervals of the order,
//! for a number of bytes that are then moved. With a price for a byte of memory at each moment, each
//! tensor takes its cheapest way; what these ways cost, less the price of the room that there is,
//! bounds from below what any choice moves (Lagrangian duality). Prices rise where ways need more
//! than the room and fall where they need less. A choice within the room is made of the ways by these
//! prices: where it is above the room tensors leave that cost least for the bytes that they free, and
//! then others come back as far as there is room.

use std::cmp::Reverse;

/// So many moments at most have a price.
const MOMENTS: usize = 24;
/// Changes of the prices after each new moment.
const STEPS: usize = 60;
/// So often are prices changed anew from the best ones at the end, each time so many times.
const LAST_ROUNDS: usize = 8;
const LAST_STEPS: usize = 400;
/// After so many changes without a better bound they become smaller.
const STALE: usize = 12;

/// How a tensor is kept in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    /// What is read and written for it.
    pub moved_bytes: u64,
    /// (first moment, last moment) for each time that it is in memory.
    pub intervals: Vec<(usize, usize)>,
}

impl Way {
    fn is_at(&self, moment: usize) -> bool {
        self.intervals.iter().any(|&(first, last)| first <= moment && moment <= last)
    }

    /// Whether the tensor is in memory only when it is so by another way.
    fn is_within(&self, other: &Way) -> bool {
        let has = |&(first, last): &(usize, usize)| other.intervals.iter().any(|one| one.0 <= first && last <= one.1);
        self.intervals.iter().all(has)
    }
}

/// A choice.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Found {
    /// By how much the choice exceeds the room at its worst moment; 0 if it fits.
    pub most_over_bytes: u64,
    /// What the ways move.
    pub moved_bytes: u64,
    /// For each tensor, the place of the chosen way in its list.
    pub ways: Vec<usize>,
    /// No choice moves less.
    pub least_bytes: u64,
}

/// A choice of ways of few moved bytes, and a bound on all choices.
///
/// `ways` tells for each tensor how it may be kept; of these at least one, and the first is in memory
/// wherever another one is. `room` tells for each moment the bytes that there are for them; intervals
/// end before its end. Where there is no moment, everything stays in memory.
pub fn choose(sizes: &[u64], ways: &[Vec<Way>], room: &[i64]) -> Found {
    let (ways, room) = between_changes(ways, room);
    let sizes: Vec<i64> = sizes.iter().map(|&size| i64::try_from(size).unwrap_or(i64::MAX)).collect();
    let mut prices = Prices::new(&sizes, &ways, &room);
    let mut chosen = vec![0; ways.len()];
    let mut best: Option<Found> = None;
    for _ in 0..MOMENTS {
        let left = left(&sizes, &ways, &chosen, &room);
        let unpriced = (0..room.len()).filter(|moment| !prices.moments.contains(moment));
        let Some(worst) = unpriced.min_by_key(|&moment| left[moment]) else { break };
        if best.is_some() && left[worst] >= 0 {
            break;
        }
        prices.add(worst);
        let most: f64 = sizes.iter().map(|&size| size as f64).sum();
        prices.rise(STEPS, best.as_ref().map_or(most + 2.0 * prices.best, |best| best.moved_bytes as f64));
        chosen = prices.cheapest();
        let found = repaired(&sizes, &ways, chosen.clone(), &prices, &room);
        best = Some(best.map_or_else(|| found.clone(), |best| best.min(found.clone())));
    }
    let Some(mut best) = best else {
        return Found { most_over_bytes: 0, moved_bytes: 0, ways: chosen, least_bytes: 0 };
    };
    for _ in 0..LAST_ROUNDS {
        prices.rise(LAST_STEPS, best.moved_bytes as f64);
        best = repaired(&sizes, &ways, prices.cheapest(), &prices, &room).min(best);
    }
    best.least_bytes = (prices.best - 1e-6).ceil().max(0.0) as u64;
    best
}

/// The same with one moment for all between which no way begins or ends: that of the least room.
fn between_changes(ways: &[Vec<Way>], room: &[i64]) -> (Vec<Vec<Way>>, Vec<i64>) {
    let mut starts: Vec<usize> = vec![0];
    starts.extend(ways.iter().flatten().flat_map(|way| &way.intervals).flat_map(|&(first, last)| [first, last + 1]));
    starts.sort_unstable();
    starts.dedup();
    starts.retain(|&start| start < room.len());
    let ends = starts.iter().skip(1).copied().chain([room.len()]);
    let least = starts.iter().zip(ends).filter_map(|(&start, end)| room[start..end].iter().min().copied()).collect();
    let place = |moment: usize| starts.partition_point(|&start| start <= moment) - 1;
    let moved = |way: &Way| Way {
        moved_bytes: way.moved_bytes,
        intervals: way.intervals.iter().map(|&(first, last)| (place(first), place(last))).collect(),
    };
    (ways.iter().map(|some| some.iter().map(moved).collect()).collect(), least)
}

/// Prices of a byte of memory at some moments, and the bound that they prove.
struct Prices<'a> {
    sizes: &'a [i64],
    ways: &'a [Vec<Way>],
    room: &'a [i64],
    moments: Vec<usize>,
    /// For each way of each tensor a bit for each of `moments`: whether it is in memory then.
    uses: Vec<Vec<u32>>,
    prices: Vec<f64>,
    best: f64,
    best_prices: Vec<f64>,
}

impl<'a> Prices<'a> {
    fn new(sizes: &'a [i64], ways: &'a [Vec<Way>], room: &'a [i64]) -> Self {
        let uses = ways.iter().map(|some| vec![0; some.len()]).collect();
        Self { sizes, ways, room, moments: vec![], uses, prices: vec![], best: 0.0, best_prices: vec![] }
    }

    /// Gives a moment a price.
    fn add(&mut self, moment: usize) {
        let bit = 1 << self.moments.len();
        for (used, way) in self.uses.iter_mut().flatten().zip(self.ways.iter().flatten()) {
            *used |= if way.is_at(moment) { bit } else { 0 };
        }
        self.moments.push(moment);
        self.best_prices.push(0.0);
        self.prices.clone_from(&self.best_prices);
    }

    /// What a way of a tensor costs, memory included.
    fn cost(&self, prices: &[f64], row: usize, way: usize) -> f64 {
        let mut price = 0.0;
        let mut left = self.uses[row][way];
        while left != 0 {
            price += prices[left.trailing_zeros() as usize];
            left &= left - 1;
        }
        self.ways[row][way].moved_bytes as f64 + self.sizes[row] as f64 * price
    }

    /// What a way costs by the best prices.
    fn reduced(&self, row: usize, way: usize) -> f64 {
        self.cost(&self.best_prices, row, way)
    }

    /// The cheapest way of a tensor, and what it costs.
    fn cheapest_of(&self, prices: &[f64], row: usize) -> (usize, f64) {
        let costs = (0..self.ways[row].len()).map(|way| (way, self.cost(prices, row, way)));
        costs.min_by(|one, other| one.1.total_cmp(&other.1)).unwrap_or((0, 0.0))
    }

    /// The cheapest way of each tensor by the best prices.
    fn cheapest(&self) -> Vec<usize> {
        (0..self.ways.len()).map(|row| self.cheapest_of(&self.best_prices, row).0).collect()
    }

    /// Changes prices for a better bound; no choice of a cost above `target` is sought.
    fn rise(&mut self, steps: usize, target: f64) {
        let room: Vec<f64> = self.moments.iter().map(|&moment| self.room[moment] as f64).collect();
        let (mut pace, mut stale) = (1.0, 0);
        for _ in 0..steps {
            let mut over: Vec<f64> = room.iter().map(|one| -one).collect();
            let mut bound: f64 = -room.iter().zip(&self.prices).map(|(one, price)| one * price).sum::<f64>();
            for row in 0..self.ways.len() {
                let (way, cost) = self.cheapest_of(&self.prices, row);
                bound += cost;
                let used = self.uses[row].get(way).copied().unwrap_or(0);
                for (place, one) in over.iter_mut().enumerate() {
                    *one += if used & (1 << place) != 0 { self.sizes[row] as f64 } else { 0.0 };
                }
            }
            if bound > self.best {
                (self.best, stale) = (bound, 0);
                self.best_prices.clone_from(&self.prices);
            } else {
                stale += 1;
                if stale >= STALE {
                    (pace, stale) = (pace / 2.0, 0);
                    self.prices.clone_from(&self.best_prices);
                    continue;
                }
            }
            for (one, price) in over.iter_mut().zip(&self.prices) {
                if *one < 0.0 && *price <= 0.0 {
                    *one = 0.0;
                }
            }
            let norm: f64 = over.iter().map(|one| one * one).sum();
            if norm == 0.0 || pace < 1e-4 {
                break;
            }
            let ahead = (target - bound).max(1e-3 * target.abs()).max(1.0);
            for (price, one) in self.prices.iter_mut().zip(&over) {
                *price = (*price + pace * ahead / norm * one).max(0.0);
            }
        }
    }
}

/// What is left of the room at each moment.
fn left(sizes: &[i64], ways: &[Vec<Way>], chosen: &[usize], room: &[i64]) -> Vec<i64> {
    let mut changes = vec![0; room.len() + 1];
    for ((size, some), &way) in sizes.iter().zip(ways).zip(chosen) {
        for &(first, last) in some.get(way).map_or(&[][..], |way| &way.intervals) {
            changes[first] += size;
            changes[last + 1] -= size;
        }
    }
    let mut used = 0;
    let after = |(there, change): (&i64, &i64)| {
        used += change;
        there - used
    };
    room.iter().zip(&changes).map(after).collect()
}

/// A choice, and what it leaves of the room.
struct Repair<'a> {
    sizes: &'a [i64],
    ways: &'a [Vec<Way>],
    chosen: Vec<usize>,
    left: Vec<i64>,
}

impl Repair<'_> {
    fn known(&self, row: usize) -> &Way {
        &self.ways[row][self.chosen[row]]
    }

    fn put(&mut self, row: usize, way: usize) {
        for (one, change) in [(self.chosen[row], self.sizes[row]), (way, -self.sizes[row])] {
            for &(first, last) in &self.ways[row][one].intervals {
                self.left[first..=last].iter_mut().for_each(|left| *left += change);
            }
        }
        self.chosen[row] = way;
    }

    /// The moment at which the choice is furthest above the room.
    fn worst(&self) -> Option<usize> {
        let worst = (0..self.left.len()).min_by_key(|&moment| self.left[moment])?;
        (self.left[worst] < 0).then_some(worst)
    }

    /// Of the ways not to have a tensor in memory at a moment the one that costs least for the bytes
    /// that it frees; of those that cost the same, the smallest that is enough, or else the largest.
    fn leaving(&self, worst: usize, prices: &Prices<'_>) -> Option<(usize, usize)> {
        let mut best: Option<(f64, (bool, i64), usize, usize)> = None;
        for (row, some) in self.ways.iter().enumerate() {
            let (known, size) = (self.known(row), self.sizes[row]);
            if !known.is_at(worst) {
                continue;
            }
            let own = prices.reduced(row, self.chosen[row]);
            let is_short = size + self.left[worst] < 0;
            let enough = (is_short, if is_short { -size } else { size });
            for (number, way) in some.iter().enumerate() {
                if way.is_at(worst) || !way.is_within(known) {
                    continue;
                }
                let worse = ((prices.reduced(row, number) - own) / size as f64 * 1e6).round();
                let is_better = |(known, by, ..): &(f64, (bool, i64), usize, usize)| {
                    worse.total_cmp(known).then(enough.cmp(by)).is_lt()
                };
                if best.as_ref().is_none_or(is_better) {
                    best = Some((worse, enough, row, number));
                }
            }
        }
        best.map(|(_, _, row, number)| (row, number))
    }

    /// Lets tensors come back as far as there is room; says whether one did.
    fn come_back(&mut self, prices: &Prices<'_>) -> bool {
        let mut saved: Vec<(u64, f64, usize, usize)> = vec![];
        for (row, some) in self.ways.iter().enumerate() {
            let known = self.known(row).moved_bytes;
            let fewer = some.iter().enumerate().filter(|(_, way)| way.moved_bytes < known);
            saved
                .extend(fewer.map(|(number, way)| (known - way.moved_bytes, prices.reduced(row, number), row, number)));
        }
        saved.sort_unstable_by(|one, other| {
            other
                .0
                .cmp(&one.0)
                .then(one.1.total_cmp(&other.1))
                .then(Reverse((one.2, one.3)).cmp(&Reverse((other.2, other.3))))
        });
        let mut is_better = false;
        let mut full = 0;
        for (_, _, row, number) in saved {
            let (way, known) = (&self.ways[row][number], self.known(row));
            if way.moved_bytes >= known.moved_bytes {
                continue;
            }
            // Where there was no room for one there is seldom room for the next.
            if way.is_at(full) && !known.is_at(full) && self.left[full] < self.sizes[row] {
                continue;
            }
            let before = self.chosen[row];
            self.put(row, number);
            match way.intervals.iter().find_map(|&(first, last)| (first..=last).find(|&at| self.left[at] < 0)) {
                Some(at) => {
                    full = at;
                    self.put(row, before);
                }
                None => is_better = true,
            }
        }
        is_better
    }
}

/// A choice within the room, if one is found, that differs little from one by prices.
fn repaired(sizes: &[i64], ways: &[Vec<Way>], chosen: Vec<usize>, prices: &Prices<'_>, room: &[i64]) -> Found {
    let mut repair = Repair { sizes, ways, left: left(sizes, ways, &chosen, room), chosen };
    while let Some((row, way)) = repair.worst().and_then(|worst| repair.leaving(worst, prices)) {
        repair.put(row, way);
    }
    while repair.come_back(prices) {}
    let most_over_bytes = repair.left.iter().map(|&left| (-left).max(0)).max().unwrap_or(0).unsigned_abs();
    let moved_bytes = (0..ways.len()).map(|row| repair.known(row).moved_bytes).sum();
    Found { most_over_bytes, moved_bytes, ways: repair.chosen, least_bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Random;

    #[test]
    fn one_moment_stands_for_all_between_changes() {
        let way = |intervals: &[(usize, usize)]| Way { moved_bytes: 0, intervals: intervals.to_vec() };
        let (ways, room) =
            between_changes(&[vec![way(&[(0, 9)]), way(&[(2, 3), (7, 7)])]], &[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
        assert_eq!(room, [8, 6, 3, 2, 0]);
        assert_eq!(ways[0][1].intervals, [(1, 1), (3, 3)]);
        assert_eq!(ways[0][0].intervals, [(0, 4)]);
    }

    #[test]
    fn no_tensor_stays_where_it_could_leave_and_the_room_is_kept() {
        let mut rng = Random::new(51);
        for _ in 0..200 {
            let moments = 12;
            let sizes: Vec<u64> = (0..8).map(|_| 1 + rng.below(9)).collect();
            let ways: Vec<Vec<Way>> = sizes
                .iter()
                .map(|&size| {
                    let (a, b) = (rng.below(moments) as usize, rng.below(moments) as usize);
                    let (one, other) = (a.min(b), a.max(b));
                    vec![
                        Way { moved_bytes: 0, intervals: vec![(0, moments as usize - 1)] },
                        Way { moved_bytes: 2 * size, intervals: vec![(one, other)] },
                        Way { moved_bytes: 3 * size, intervals: vec![(one, one), (other, other)] },
                    ]
                })
                .collect();
            let total: u64 = sizes.iter().sum();
            let room: Vec<i64> = (0..moments).map(|_| (total / 2 + rng.below(total / 2)) as i64).collect();
            let found = choose(&sizes, &ways, &room);
            let own: Vec<i64> = sizes.iter().map(|&size| size as i64).collect();
            let left = left(&own, &ways, &found.ways, &room);
            let over = left.iter().map(|&left| (-left).max(0)).max().unwrap_or(0).unsigned_abs();
            assert_eq!(over, found.most_over_bytes);
            assert!(found.most_over_bytes > 0 || found.least_bytes <= found.moved_bytes);
            let moved: u64 = found.ways.iter().zip(&ways).map(|(&way, some)| some[way].moved_bytes).sum();
            assert_eq!(moved, found.moved_bytes);
        }
    }
}
