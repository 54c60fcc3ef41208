//! Parts of the problem, each with fewer strategies, that together hold every choice that may still
//! be better than the best: branch and bound.
//!
//! A part is bounded by prices and messages. Strategies whose bound is as high as the cost of the
//! best choice are left out, which makes the part smaller. Where memory no longer matters and tables
//! are small, the part is solved exactly; otherwise it is split in two, mostly by the bytes that a
//! node takes.

use super::eliminate::{Elimination, Order};
use super::improve::{Begin, Best, improve};
use super::marginals::Marginals;
use super::presolve::Kept;
use super::prices::{Known, Prices};
use super::reduced::Reduced;
use crate::control::Watch;
use crate::rng::Random;
use std::sync::Arc;

/// Messages pass `PASSES` times before it is seen whether a part can be made smaller. They go on,
/// up to `MOST_PASSES` times in all, while the bound has grown by `GROWS` of the gap since the last
/// look.
const PASSES: usize = 20;
const MOST_PASSES: usize = 200;
const GROWS: f64 = 0.03;
/// A part is made smaller once this share of its strategies can be left out.
const SHARE: f64 = 0.05;
/// Tables of a part that is solved exactly have at most so many entries in all.
const ENTRIES: u64 = 1 << 22;
/// Strategies that cost up to this share of the gap more than the least are taken to be equally
/// good.
const AS_GOOD: f64 = 0.1;

/// A part that is to be looked at.
#[derive(Clone)]
pub(super) struct Part {
    /// The strategies that are left, for all nodes of the root, in order.
    pub(super) kept: Kept,
    pub(super) known: Arc<Known>,
    /// No choice in it costs less.
    pub(super) bound: i64,
}

impl Part {
    /// Keeps only some strategies of the nodes that are left; which strategies of the other nodes
    /// are kept follows from these.
    fn keep(&mut self, left: &Reduced, is_kept: impl Fn(usize, usize) -> bool) {
        for (node, strategies) in left.kept(is_kept) {
            self.kept[node].1 = strategies;
        }
    }
}

/// What came of looking at a part.
pub(super) struct Looked<'a> {
    pub(super) best: Best<'a>,
    /// What is left of the part, in one part or more.
    pub(super) parts: Vec<Part>,
    pub(super) work: u64,
    pub(super) passes: usize,
}

/// Finds the exactly best choice where memory does not matter and tables are small, and returns the
/// work that this took.
pub(super) fn solved(reduced: &Reduced, best: &mut Best<'_>) -> Option<u64> {
    if reduced.len() > 0 && !(reduced.room.is_empty() && reduced.is_exact()) {
        return None;
    }
    let elimination = Elimination::new(reduced, Order::new(reduced, ENTRIES)?);
    let (choice, _) = elimination.choose(&reduced.costs);
    best.meet(reduced, &choice);
    Some(elimination.order.work)
}

/// Which strategies have a bound below the cost of the best choice; `None` where so few others can
/// be left out that it is not worth while to begin anew.
pub(super) fn without_worse(marginals: &Marginals, cost: i64) -> Option<Vec<bool>> {
    let is_kept: Vec<bool> = marginals.by_strategy.iter().map(|&bound| bound <= (cost - 1) as f64).collect();
    let gone = is_kept.iter().filter(|&&is_kept| !is_kept).count();
    (gone > 0 && gone as f64 >= SHARE * is_kept.len() as f64).then_some(is_kept)
}

/// Which of a node's strategies go to the first of two parts.
fn split(reduced: &Reduced, marginals: &Marginals, prices: &[f64], gap: f64) -> Option<(usize, Vec<bool>)> {
    let is_good = |place: usize| marginals.by_strategy[place] <= marginals.least + AS_GOOD * gap;
    let mut until = vec![0.0; prices.len() + 1];
    for (time, price) in prices.iter().enumerate() {
        until[time + 1] = until[time] + price;
    }
    let mut chosen: Option<(f64, usize, Vec<bool>)> = None;
    for node in 0..reduced.len() {
        let first = reduced.first[node];
        for demand in &reduced.demands[node] {
            let good = demand.bytes.iter().enumerate().filter(|(strategy, _)| is_good(first + strategy));
            let mut levels: Vec<i64> = good.map(|(_, &bytes)| bytes).collect();
            levels.sort_unstable();
            let Some(jump) = levels.windows(2).max_by_key(|pair| pair[1] - pair[0]).filter(|pair| pair[1] > pair[0])
            else {
                continue;
            };
            let score = (until[demand.lifetime.end] - until[demand.lifetime.start]) * (jump[1] - jump[0]) as f64;
            if score > 0.0 && chosen.as_ref().is_none_or(|(known, _, _)| score > *known) {
                chosen = Some((score, node, demand.bytes.iter().map(|&bytes| bytes <= jump[0]).collect()));
            }
        }
    }
    if let Some((_, node, is_first)) = chosen {
        return Some((node, is_first));
    }
    // Otherwise, the node with most strategies that are equally good: the better half of its
    // strategies.
    let count = |node: usize| (reduced.first[node]..reduced.first[node + 1]).filter(|&place| is_good(place)).count();
    let node = (0..reduced.len()).rev().max_by_key(|&node| (count(node), reduced.size(node)))?;
    let bounds = &marginals.by_strategy[reduced.first[node]..reduced.first[node + 1]];
    let mut order: Vec<usize> = (0..bounds.len()).collect();
    order.sort_by(|&a, &b| bounds[a].total_cmp(&bounds[b]));
    let mut is_first = vec![false; bounds.len()];
    order[..bounds.len() / 2].iter().for_each(|&strategy| is_first[strategy] = true);
    Some((node, is_first))
}

/// The part in which most nodes take no more bytes than they do in a choice.
pub(super) fn around(reduced: &Reduced, whole: &Part, choice: &[usize], random: &mut Random) -> Part {
    let mut part = whole.clone();
    let times = 2 + random.below(4);
    for (node, strategies) in &mut part.kept {
        let demands = &reduced.demands[*node];
        if !demands.is_empty() && !random.once_in(times) {
            let takes_less =
                |&strategy: &usize| demands.iter().all(|demand| demand.bytes[strategy] <= demand.bytes[choice[*node]]);
            strategies.retain(takes_less);
        }
    }
    part
}

/// Bounds a part, and splits it where it may hold a better choice than the best.
///
/// Args:
///     root: the problem that the part has strategies of.
///     best: the best choice so far.
pub(super) fn look<'a>(
    root: &Arc<Reduced>,
    part: &Part,
    best: &Best<'a>,
    random: &mut Random,
    watch: &Watch,
) -> Looked<'a> {
    let mut looked = Looked { best: best.clone(), parts: Vec::new(), work: 0, passes: 0 };
    let mut part = part.clone();
    'smaller: loop {
        let reduced = match root.restricted(&part.kept, watch) {
            Ok(Some(reduced)) => reduced,
            Ok(None) => return looked,
            Err(_) => {
                looked.parts.push(part);
                return looked;
            }
        };
        looked.work += 1 + (reduced.costs.len() + reduced.matrices.len()) as u64;
        if let Some(work) = solved(&reduced, &mut looked.best) {
            looked.work += work;
            return looked;
        }
        let mut prices = Prices::new(&reduced, &part.known);
        let mut before = f64::NEG_INFINITY;
        for passes in 1..=MOST_PASSES {
            if watch.check().is_err() {
                looked.parts.push(part);
                return looked;
            }
            let cost = looked.best.cost();
            let found = prices.pass(cost.map(|cost| cost as f64));
            looked.work += found.work;
            looked.passes += 1;
            looked.best.meet(&reduced, &found.choice);
            part.bound = part.bound.max(prices.bound.ceil() as i64);
            if looked.best.cost().unwrap_or(i64::MAX) <= part.bound {
                return looked;
            }
            if passes % PASSES > 0 {
                continue;
            }
            let gap = looked.best.cost().map_or(prices.bound.abs(), |cost| cost as f64 - prices.bound).max(1.0);
            let has_grown = prices.bound > before + GROWS * gap;
            before = prices.bound;
            if has_grown && passes < MOST_PASSES {
                continue;
            }
            let begin = Begin { choice: found.choice, prices: prices.now().to_vec(), is_kicked: false };
            looked.work += improve(&reduced, begin, prices.bound.abs(), &mut looked.best, random, watch);
            let marginals = prices.marginals();
            part.bound = part.bound.max(marginals.least.ceil() as i64);
            part.known = Arc::new(prices.known());
            let cost = looked.best.cost().unwrap_or(i64::MAX);
            if cost <= part.bound {
                return looked;
            }
            if let Some(is_kept) = without_worse(&marginals, cost) {
                part.keep(&reduced, |node, strategy| is_kept[reduced.first[node] + strategy]);
                continue 'smaller;
            }
            let now: Vec<f64> = part.known.prices.iter().map(|&(_, price)| price).collect();
            let Some((node, is_first)) = split(&reduced, &marginals, &now, gap) else {
                looked.parts.push(part);
                return looked;
            };
            for side in [true, false] {
                let keeps = |other: usize, strategy: usize| {
                    let is_worse = marginals.by_strategy[reduced.first[other] + strategy] > (cost - 1) as f64;
                    !is_worse && (other != node || is_first[strategy] == side)
                };
                let mut half = part.clone();
                half.keep(&reduced, keeps);
                looked.parts.push(half);
            }
            return looked;
        }
    }
}
