//! A lower bound on what any choice costs: sequential tree-reweighted message passing (TRW-S;
//! Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", 2006).
//!
//! A message moves costs along an edge, from what a pair costs to what an end costs. What all
//! choices cost together does not change by it, so the least that nodes and edges cost each by
//! itself is a bound for any messages; passes make it grow.

use super::marginals::{Marginals, least};
use super::reduced::{Link, Reduced};
use std::collections::BTreeMap;

/// Messages to both ends of edges. Ends and strategies are named as in the problem that a reduced
/// problem was made of.
pub(super) type Known = BTreeMap<[usize; 2], [Vec<f32>; 2]>;

pub(super) struct Messages<'a> {
    reduced: &'a Reduced,
    /// Per edge where the messages to its two ends begin, one after the other.
    at: Vec<[usize; 2]>,
    values: Vec<f64>,
    /// Per node the share of its costs that each edge takes along.
    share: Vec<f64>,
}

/// What a pass found.
pub(super) struct Pass {
    /// No choice costs less. What rounding may add is taken off.
    pub(super) bound: f64,
    /// A choice: each node chooses by what earlier nodes have chosen and by the messages of later
    /// ones.
    pub(super) choice: Vec<usize>,
    /// Matrix entries that were looked at.
    pub(super) work: u64,
}

impl<'a> Messages<'a> {
    /// Args:
    ///     known: messages to begin with.
    pub(super) fn new(reduced: &'a Reduced, known: &Known) -> Self {
        let mut end = 0;
        let mut begin = |size: usize| {
            end += size;
            end - size
        };
        let at = reduced.edges.iter().map(|link| link.nodes.map(|node| begin(reduced.size(node)))).collect();
        let share = |node: usize| {
            let edges = &reduced.at_node[node];
            let earlier = edges.iter().filter(|&&edge| reduced.edges[edge].nodes[1] == node).count();
            1.0 / earlier.max(edges.len() - earlier).max(1) as f64
        };
        let share = (0..reduced.len()).map(share).collect();
        let mut messages = Messages { reduced, at, values: vec![0.0; end], share };
        for (edge, link) in reduced.edges.iter().enumerate() {
            let owns = link.nodes.map(|node| reduced.own(node));
            let Some(known) = known.get(&owns.map(|own| own.0)) else { continue };
            for side in 0..2 {
                let at = messages.at[edge][side];
                for (place, &strategy) in owns[side].1.iter().enumerate() {
                    messages.values[at + place] = f64::from(known[side][strategy]);
                }
            }
        }
        messages
    }

    /// All messages, for problems that are made of the same problem by leaving more strategies out.
    pub(super) fn known(&self) -> Known {
        let of = |(edge, link): (usize, &Link)| {
            let owns = link.nodes.map(|node| self.reduced.own(node));
            let values = [0, 1].map(|side| {
                let mut values = vec![0.0; owns[side].1.iter().max().map_or(0, |most| most + 1)];
                let known = owns[side].1.iter().zip(self.message(edge, side));
                known.for_each(|(&strategy, &message)| values[strategy] = message as f32);
                values
            });
            (owns.map(|own| own.0), values)
        };
        self.reduced.edges.iter().enumerate().map(of).collect()
    }

    fn message(&self, edge: usize, side: usize) -> &[f64] {
        let size = self.reduced.size(self.reduced.edges[edge].nodes[side]);
        &self.values[self.at[edge][side]..][..size]
    }

    /// A node's costs with all messages to it.
    fn belief(&self, node: usize, costs: &[f64]) -> Vec<f64> {
        let mut belief = costs[self.reduced.first[node]..self.reduced.first[node + 1]].to_vec();
        for &edge in &self.reduced.at_node[node] {
            let (side, _) = self.reduced.edges[edge].ends(node);
            belief.iter_mut().zip(self.message(edge, side)).for_each(|(sum, more)| *sum += more);
        }
        belief
    }

    /// Sends a message from a node; returns the least cost, which the message leaves out, and by how
    /// much that may be wrong.
    fn send(&mut self, edge: usize, node: usize, belief: &[f64]) -> (f64, f64) {
        let reduced = self.reduced;
        let link = reduced.edges[edge];
        let (side, other) = link.ends(node);
        let mut message = vec![f64::INFINITY; reduced.size(other)];
        let mut largest = 0f64;
        for (strategy, (belief, back)) in belief.iter().zip(self.message(edge, side)).enumerate() {
            let base = self.share[node] * belief - back;
            largest = largest.max(belief.abs()).max(back.abs());
            for (least, cost) in message.iter_mut().zip(reduced.row(link, side, strategy)) {
                *least = least.min(base + cost);
            }
        }
        let least = message.iter().copied().fold(f64::INFINITY, f64::min);
        for value in &mut message {
            largest = largest.max(value.abs());
            *value -= least;
        }
        let at = self.at[edge][1 - side];
        self.values[at..at + message.len()].copy_from_slice(&message);
        (least, (reduced.at_node[node].len() + 8) as f64 * f64::EPSILON * largest)
    }

    /// Sends messages along all edges forward, then back.
    ///
    /// Args:
    ///     costs: of all strategies, instead of the problem's.
    pub(super) fn pass(&mut self, costs: &[f64]) -> Pass {
        let reduced = self.reduced;
        let mut choice = vec![0; reduced.len()];
        let mut work = costs.len() as u64;
        for node in 0..reduced.len() {
            let belief = self.belief(node, costs);
            let mut met = costs[reduced.first[node]..reduced.first[node + 1]].to_vec();
            for &edge in &reduced.at_node[node] {
                let link = reduced.edges[edge];
                let (side, other) = link.ends(node);
                let said = if side == 1 { reduced.row(link, 0, choice[other]) } else { self.message(edge, 0) };
                met.iter_mut().zip(said).for_each(|(sum, more)| *sum += more);
            }
            choice[node] = least(&met);
            for at in 0..reduced.at_node[node].len() {
                let edge = reduced.at_node[node][at];
                let (side, other) = reduced.edges[edge].ends(node);
                work += 2 * (belief.len() * reduced.size(other)) as u64;
                if side == 0 {
                    self.send(edge, node, &belief);
                }
            }
        }
        let (mut bound, mut error) = (reduced.fixed_cost as f64, 0.0);
        for node in (0..reduced.len()).rev() {
            let mut belief = self.belief(node, costs);
            let lowest = belief[least(&belief)];
            error += (reduced.at_node[node].len() + 8) as f64
                * f64::EPSILON
                * belief.iter().fold(0.0, |a, b| b.abs().max(a));
            belief.iter_mut().for_each(|cost| *cost -= lowest);
            bound += lowest;
            for at in 0..reduced.at_node[node].len() {
                let edge = reduced.at_node[node][at];
                if reduced.edges[edge].nodes[1] == node {
                    let (least, wrong) = self.send(edge, node, &belief);
                    bound += least;
                    error += wrong;
                }
            }
            error += f64::EPSILON * bound.abs() * reduced.at_node[node].len().max(1) as f64;
        }
        Pass { bound: bound - error, choice, work }
    }
}

impl Messages<'_> {
    /// Bounds per strategy: the graph is taken apart into chains, each of which holds its edges, less
    /// the messages, and a share of its nodes' costs with the messages; of a chain the least cost for
    /// each strategy is known exactly.
    ///
    /// Args:
    ///     costs: of all strategies, instead of the problem's.
    pub(super) fn marginals(&self, costs: &[f64]) -> Marginals {
        let reduced = self.reduced;
        let shared: Vec<Vec<f64>> = (0..reduced.len())
            .map(|node| self.belief(node, costs).iter().map(|cost| cost * self.share[node]).collect())
            .collect();
        let mut largest = shared.iter().flatten().fold(0.0, |most: f64, cost| most.max(cost.abs()));
        // Per edge and end: the least cost of the chain's part on the other side, by the strategy here.
        let mut beyond: Vec<[Vec<f64>; 2]> = vec![Default::default(); reduced.edges.len()];
        for side in [1, 0] {
            for place in 0..reduced.len() {
                let node = if side == 1 { place } else { reduced.len() - 1 - place };
                let [before, after] = self.sides(node);
                let (from, to) = if side == 1 { (before, after) } else { (after, before) };
                for (number, &edge) in to.iter().enumerate() {
                    let link = reduced.edges[edge];
                    let mut sums = shared[node].clone();
                    if let Some(&earlier) = from.get(number) {
                        sums.iter_mut().zip(&beyond[earlier][side]).for_each(|(sum, more)| *sum += more);
                    }
                    sums.iter_mut().zip(self.message(edge, 1 - side)).for_each(|(sum, message)| *sum -= message);
                    let mut least = vec![f64::INFINITY; reduced.size(link.nodes[side])];
                    for (strategy, sum) in sums.iter().enumerate() {
                        for (least, cost) in least.iter_mut().zip(reduced.row(link, 1 - side, strategy)) {
                            *least = least.min(sum + cost);
                        }
                    }
                    for (least, message) in least.iter_mut().zip(self.message(edge, side)) {
                        *least -= message;
                        if least.is_finite() {
                            largest = largest.max(least.abs());
                        }
                    }
                    beyond[edge][side] = least;
                }
            }
        }
        let mut least = 0.0;
        let mut by_strategy = Vec::with_capacity(costs.len());
        for (node, shared) in shared.iter().enumerate() {
            let [before, after] = self.sides(node);
            let mut above = vec![0.0; shared.len()];
            for number in 0..before.len().max(after.len()).max(1) {
                let mut sums = shared.clone();
                for beyond in
                    [before.get(number).map(|&edge| &beyond[edge][1]), after.get(number).map(|&edge| &beyond[edge][0])]
                {
                    sums.iter_mut().zip(beyond.into_iter().flatten()).for_each(|(sum, more)| *sum += more);
                }
                let lowest = sums[super::marginals::least(&sums)];
                above.iter_mut().zip(sums).for_each(|(above, sum)| *above += sum - lowest);
                if before.len() <= number {
                    // A chain begins at this node.
                    least += lowest;
                }
            }
            by_strategy.extend(above);
        }
        // Each sum is rounded, and none is larger than that of a whole chain.
        let sums = 4 * (reduced.len() + reduced.edges.len() + 8);
        let error = sums as f64 * f64::EPSILON * largest.max(least.abs());
        by_strategy.iter_mut().for_each(|above| *above += least - error);
        Marginals { least: least - error, by_strategy }
    }

    /// A node's edges to earlier nodes, and those to later ones. A chain that comes in by one of
    /// the earlier edges leaves by the later edge with the same number.
    fn sides(&self, node: usize) -> [&[usize]; 2] {
        let edges = &self.reduced.at_node[node];
        let earlier = edges.iter().filter(|&&edge| self.reduced.edges[edge].nodes[1] == node).count();
        let (before, after) = edges.split_at(earlier);
        [before, after]
    }
}
