//! Prices of memory: what a byte costs at each time.
//!
//! With prices, the memory limit becomes a cost: a choice that keeps to the limit costs no more than
//! its own cost if what it takes is charged and the whole room is paid back. So the least cost with
//! prices, less what the room is worth, is a lower bound for any prices (Lagrange). Prices rise where
//! more than the room is taken, along an average of the last excesses, by steps that get shorter when
//! the bound no longer grows.

use super::eliminate::{Elimination, Order};
use super::marginals::Marginals;
use super::messages::{self, Messages, Pass};
use super::reduced::Reduced;

/// The weight of the latest excess in the average of excesses; the rest is the weight of earlier
/// ones.
const NEW: f64 = 0.3;
/// The length of a step, as a share of the gap that is left (Polyak).
const STEP: f64 = 0.1;
const LONGEST: f64 = 1.5;
const SHORTEST: f64 = 1e-4;
/// A step is lengthened by the factor `LONGER` when the bound has grown by more than `GROWN` of
/// itself.
const GROWN: f64 = 1e-4;
const LONGER: f64 = 1.1;
/// After this many passes without a better bound, the search goes back to the best prices, with a
/// step of half the length.
const PATIENCE: usize = 20;
/// While no choice is known, the gap is supposed to be this share of the bound.
const GAP: f64 = 0.2;
/// Messages pass this often before prices change for the first time.
const FIRST: usize = 10;

/// Tables are small if they have at most this many entries in all.
const ENTRIES: u64 = 1 << 20;

/// Prices and messages to begin with.
#[derive(Clone, Default)]
pub(super) struct Known {
    /// Prices with the times of the problem that they are for, in order of time.
    pub(super) prices: Vec<(usize, f64)>,
    pub(super) messages: messages::Known,
}

pub(super) struct Prices<'a> {
    reduced: &'a Reduced,
    messages: Messages<'a>,
    /// Where tables are small, the least cost at given prices is found exactly instead.
    exact: Option<Elimination<'a>>,
    /// Present prices per time; empty where there is no limit.
    now: Vec<f64>,
    best: Vec<f64>,
    direction: Vec<f64>,
    step: f64,
    passes: usize,
    /// Passes since the best bound.
    idle: usize,
    /// No choice costs less.
    pub(super) bound: f64,
}

impl<'a> Prices<'a> {
    pub(super) fn new(reduced: &'a Reduced, known: &Known) -> Self {
        let find = |time: &usize| known.prices.binary_search_by_key(time, |&(time, _)| time);
        let price = |time: &usize| find(time).map_or(0.0, |at| known.prices[at].1);
        let mut now: Vec<f64> = reduced.times().iter().map(price).collect();
        round(&mut now);
        Prices {
            reduced,
            exact: Order::new(reduced, ENTRIES).map(|order| Elimination::new(reduced, order)),
            messages: Messages::new(reduced, &known.messages),
            best: now.clone(),
            direction: now.clone(),
            now,
            step: STEP,
            passes: 0,
            idle: 0,
            bound: f64::NEG_INFINITY,
        }
    }

    pub(super) fn now(&self) -> &[f64] {
        &self.now
    }

    /// The prices of the best bound, by the time of the problem.
    pub(super) fn best(&self) -> Vec<(usize, f64)> {
        self.reduced.times().iter().copied().zip(self.best.iter().copied()).collect()
    }

    /// What the parts of this problem begin with.
    pub(super) fn known(&self) -> Known {
        let messages = if self.exact.is_some() { messages::Known::new() } else { self.messages.known() };
        Known { prices: self.best(), messages }
    }

    /// One pass of messages at the present prices, which then change.
    ///
    /// Args:
    ///     known_cost: of the best choice so far.
    pub(super) fn pass(&mut self, known_cost: Option<f64>) -> Pass {
        let costs = self.reduced.priced(&self.now);
        let mut found = match &self.exact {
            None => self.messages.pass(&costs),
            Some(elimination) => {
                let (choice, cost) = elimination.choose(&costs);
                Pass { bound: self.reduced.fixed_cost as f64 + cost, choice, work: elimination.order.work }
            }
        };
        found.bound -= self.worth(&self.now, &costs);
        self.passes += 1;
        self.idle += 1;
        if found.bound > self.bound {
            if found.bound > self.bound + GROWN * self.bound.abs() {
                self.step = (self.step * LONGER).min(LONGEST);
            }
            self.bound = found.bound;
            self.best.copy_from_slice(&self.now);
            self.idle = 0;
        }
        if self.passes >= FIRST && !self.now.is_empty() {
            self.change(&found, known_cost);
        }
        found
    }

    /// Bounds per strategy at the best prices, with what is fixed and less what the room is worth.
    pub(super) fn marginals(&self) -> Marginals {
        let costs = self.reduced.priced(&self.best);
        let mut found = match &self.exact {
            None => self.messages.marginals(&costs),
            Some(elimination) => elimination.marginals(&costs),
        };
        let more = self.reduced.fixed_cost as f64 - self.worth(&self.best, &costs);
        found.least += more;
        found.by_strategy.iter_mut().for_each(|least| *least += more);
        found
    }

    /// What the room is worth, and by how much rounding may have raised it or costs with prices: each
    /// sum by a share of the largest.
    fn worth(&self, prices: &[f64], costs: &[f64]) -> f64 {
        let room = &self.reduced.room;
        let worth: f64 = prices.iter().zip(room).map(|(price, &bytes)| price * bytes as f64).sum();
        let demands: usize = self.reduced.demands.iter().map(Vec::len).sum();
        let largest = costs.iter().fold(0.0f64, |most, cost| most.max(cost.abs()));
        worth + f64::EPSILON * ((room.len() + 8) as f64 * worth + demands as f64 * largest)
    }

    fn change(&mut self, found: &Pass, known_cost: Option<f64>) {
        if self.idle > PATIENCE {
            self.idle = 0;
            self.step = (self.step / 2.0).max(SHORTEST);
            self.now.copy_from_slice(&self.best);
            self.direction.fill(0.0);
            return;
        }
        for (direction, bytes) in self.direction.iter_mut().zip(self.reduced.excess(&found.choice)) {
            *direction += NEW * (bytes as f64 - *direction);
        }
        let can_move = |(price, direction): &(&f64, &f64)| **price > 0.0 || **direction > 0.0;
        let square: f64 = self.now.iter().zip(&self.direction).filter(can_move).map(|(_, more)| more * more).sum();
        if square > 0.0 {
            let gap = known_cost.map_or(GAP * found.bound.abs(), |cost| cost - found.bound);
            let length = self.step * gap.max(self.bound.abs() * 1e-6) / square;
            for (price, more) in self.now.iter_mut().zip(&self.direction) {
                *price = (*price + length * more).max(0.0);
            }
            round(&mut self.now);
        }
    }
}

/// Rounds prices so that sums of them are exact.
fn round(prices: &mut [f64]) {
    let largest = prices.iter().copied().fold(0.0, f64::max);
    if largest > 0.0 {
        // A power of two that is at least the sum of all.
        let above = (largest * prices.len() as f64).log2().ceil().exp2();
        let unit = above * f64::EPSILON;
        prices.iter_mut().for_each(|price| *price = (*price / unit).round() * unit);
    }
}
