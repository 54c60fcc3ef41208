//! The smaller problem in arrays, for the searches.

use super::presolve::{Demand, Kept, NEVER, Presolve};
use super::problem::Problem;
use crate::control::{Stop, Watch};
use std::collections::HashMap;
use std::sync::Arc;

/// Whole numbers below this are added without rounding.
pub(super) const EXACT: f64 = (1u64 << f64::MANTISSA_DIGITS) as f64 / 2.0;

/// Nodes of at least two strategies, each with at least one edge or demand that others share.
pub(super) struct Reduced {
    /// The same problem in whole numbers.
    presolve: Presolve,
    /// What this was made of by leaving strategies out; the problem itself if `None`.
    outer: Option<Arc<Reduced>>,
    /// Per node (node of what this was made of, its strategy per strategy of this one), first the one
    /// that the others were joined with.
    members: Vec<Vec<(usize, Vec<usize>)>>,
    /// Where a node's strategies begin in `costs`; one more than nodes.
    pub(super) first: Vec<usize>,
    pub(super) costs: Vec<f64>,
    pub(super) demands: Vec<Vec<Demand>>,
    pub(super) edges: Vec<Link>,
    /// Cost matrices, row by row; infinite where not allowed.
    pub(super) matrices: Vec<f64>,
    /// Per node its edges, those to earlier nodes first.
    pub(super) at_node: Vec<Vec<usize>>,
    /// The strategies of those nodes, of what this was made of, that have only one left.
    fixed: Vec<usize>,
    /// What these strategies cost.
    pub(super) fixed_cost: i64,
    /// What is left of the limit, beside what any choice takes, at each time at which that matters.
    pub(super) room: Vec<i64>,
}

/// An edge between nodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    /// The earlier node first.
    pub(super) nodes: [usize; 2],
    /// Where the matrix with a row per strategy of that node begins, for either node.
    pub(super) matrix: [usize; 2],
}

impl Link {
    /// Which end a node is, and the other end.
    pub(super) fn ends(self, node: usize) -> (usize, usize) {
        let side = usize::from(self.nodes[1] == node);
        (side, self.nodes[1 - side])
    }
}

impl Reduced {
    /// `None` where there is no choice that is allowed and keeps to the limit.
    pub(super) fn new(problem: &Problem, watch: &Watch) -> Result<Option<Reduced>, Stop> {
        Ok(Presolve::new(problem, watch)?.and_then(|presolve| Reduced::of(presolve, None)))
    }

    /// This with only some strategies of some nodes; `None` where no choice is left.
    pub(super) fn restricted(self: &Arc<Self>, kept: &Kept, watch: &Watch) -> Result<Option<Reduced>, Stop> {
        let presolve = self.presolve.restricted(kept, watch)?;
        Ok(presolve.and_then(|presolve| Reduced::of(presolve, Some(self.clone()))))
    }

    fn of(presolve: Presolve, outer: Option<Arc<Reduced>>) -> Option<Reduced> {
        let mut reduced = Reduced {
            outer,
            members: Vec::new(),
            first: vec![0],
            costs: Vec::new(),
            demands: Vec::new(),
            edges: Vec::new(),
            matrices: Vec::new(),
            at_node: Vec::new(),
            fixed: vec![0; presolve.nodes.len()],
            fixed_cost: 0,
            room: presolve.room.clone(),
            presolve: Presolve::empty(),
        };
        let mut left = Vec::new();
        for (number, node) in presolve.nodes.iter().enumerate().filter(|(_, node)| !node.members.is_empty()) {
            if node.demands.is_empty() && presolve.links[number].is_empty() {
                let (strategy, cost) = node.costs.iter().enumerate().min_by_key(|&(_, &cost)| cost)?;
                reduced.fixed_cost += cost;
                node.members.iter().for_each(|(member, strategies)| reduced.fixed[*member] = strategies[strategy]);
                continue;
            }
            left.push(number);
            reduced.costs.extend(node.costs.iter().map(|&cost| cost as f64));
            reduced.first.push(reduced.costs.len());
            reduced.members.push(node.members.clone());
            reduced.demands.push(node.demands.clone());
        }
        reduced.fixed_cost += reduced.outer.as_ref().map_or(0, |outer| outer.fixed_cost);
        reduced.presolve = presolve.part(&left);
        let presolve = &reduced.presolve;
        let mut known: HashMap<Vec<u64>, usize> = HashMap::new();
        for a in 0..presolve.nodes.len() {
            for (&b, matrix) in presolve.links[a].range(a..) {
                let matrix = [matrix, &presolve.links[b][&a]].map(|matrix| {
                    let costs = matrix.iter().map(|&cost| if cost >= NEVER { f64::INFINITY } else { cost as f64 });
                    let costs: Vec<f64> = costs.collect();
                    *known.entry(costs.iter().map(|cost| cost.to_bits()).collect()).or_insert_with(|| {
                        reduced.matrices.extend_from_slice(&costs);
                        reduced.matrices.len() - costs.len()
                    })
                });
                reduced.edges.push(Link { nodes: [a, b], matrix });
            }
        }
        reduced.at_node = vec![Vec::new(); reduced.members.len()];
        for side in [1, 0] {
            for (number, link) in reduced.edges.iter().enumerate() {
                reduced.at_node[link.nodes[side]].push(number);
            }
        }
        Some(reduced)
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether costs of all choices are added up without rounding.
    pub(super) fn is_exact(&self) -> bool {
        let largest = |costs: &[f64]| {
            costs.iter().filter(|cost| cost.is_finite()).fold(0.0f64, |most, cost| most.max(cost.abs()))
        };
        let of_nodes = (0..self.len()).map(|node| largest(&self.costs[self.first[node]..self.first[node + 1]]));
        let of_edges = self.edges.iter().map(|link| {
            let [rows, columns] = link.nodes.map(|node| self.size(node));
            largest(&self.matrices[link.matrix[0]..][..rows * columns])
        });
        (self.fixed_cost as f64).abs() + of_nodes.chain(of_edges).sum::<f64>() < EXACT
    }

    /// How many strategies a node has.
    pub(super) fn size(&self, node: usize) -> usize {
        self.first[node + 1] - self.first[node]
    }

    /// What an edge costs for each strategy of an end, given that of the other.
    pub(super) fn row(&self, link: Link, side: usize, strategy: usize) -> &[f64] {
        let columns = self.size(link.nodes[1 - side]);
        &self.matrices[link.matrix[side] + strategy * columns..][..columns]
    }

    /// The problem's choice for one of this.
    pub(super) fn whole(&self, choice: &[usize]) -> Vec<usize> {
        let mut whole = self.fixed.clone();
        for (members, &strategy) in self.members.iter().zip(choice) {
            members.iter().for_each(|(member, strategies)| whole[*member] = strategies[strategy]);
        }
        self.outer.as_ref().map_or_else(|| whole.clone(), |outer| outer.whole(&whole))
    }

    /// A choice of this that agrees with one of the problem where it can.
    pub(super) fn near(&self, whole: &[usize]) -> Vec<usize> {
        let whole = self.outer.as_ref().map_or_else(|| whole.to_vec(), |outer| outer.near(whole));
        let near = |node: usize| {
            let members = &self.members[node];
            let agreeing =
                |&strategy: &usize| members.iter().filter(|(member, of)| whole[*member] == of[strategy]).count();
            (0..self.size(node)).rev().max_by_key(agreeing).unwrap_or(0)
        };
        (0..self.len()).map(near).collect()
    }

    /// All nodes, and their strategies that are kept.
    ///
    /// Args:
    ///     is_kept: by the place in `costs`.
    pub(super) fn all(&self, is_kept: impl Fn(usize) -> bool) -> Kept {
        let of = |node: usize| (0..self.size(node)).filter(|strategy| is_kept(self.first[node] + strategy)).collect();
        (0..self.len()).map(|node| (node, of(node))).collect()
    }

    /// A node in what this was made of, and its strategies there.
    pub(super) fn own(&self, node: usize) -> &(usize, Vec<usize>) {
        &self.members[node][0]
    }

    /// The strategies that are kept of all nodes, in terms of what this was made of.
    pub(super) fn kept(&self, is_kept: impl Fn(usize, usize) -> bool) -> Kept {
        let of = |node: usize| {
            let (number, strategies) = self.own(node);
            let kept = strategies.iter().enumerate().filter(|&(place, _)| is_kept(node, place));
            (*number, kept.map(|(_, &strategy)| strategy).collect())
        };
        (0..self.len()).map(of).collect()
    }

    /// Times of the problem that `room` is about.
    pub(super) fn times(&self) -> &[usize] {
        &self.presolve.times
    }

    /// What a choice costs; infinite where it is not allowed.
    pub(super) fn cost(&self, choice: &[usize]) -> f64 {
        let of_nodes = choice.iter().zip(&self.first).map(|(strategy, first)| self.costs[first + strategy]);
        let of_edges = self.edges.iter().map(|&link| self.row(link, 0, choice[link.nodes[0]])[choice[link.nodes[1]]]);
        self.fixed_cost as f64 + of_nodes.chain(of_edges).sum::<f64>()
    }

    /// Bytes that a choice takes beyond the room at each time, below 0 where room is left.
    pub(super) fn excess(&self, choice: &[usize]) -> Vec<i64> {
        let mut excess = vec![0i64; self.room.len() + 1];
        for (demands, &strategy) in self.demands.iter().zip(choice) {
            for Demand { lifetime, bytes } in demands {
                excess[lifetime.start] += bytes[strategy];
                excess[lifetime.end] -= bytes[strategy];
            }
        }
        let mut live = 0;
        excess.pop();
        for (bytes, room) in excess.iter_mut().zip(&self.room) {
            live += *bytes;
            *bytes = live - room;
        }
        excess
    }

    /// The costs of strategies where each byte has a price at each time.
    pub(super) fn priced(&self, prices: &[f64]) -> Vec<f64> {
        if prices.is_empty() {
            return self.costs.clone();
        }
        let mut until = vec![0.0; prices.len() + 1];
        for (time, price) in prices.iter().enumerate() {
            until[time + 1] = until[time] + price;
        }
        let mut costs = self.costs.clone();
        for (demands, &first) in self.demands.iter().zip(&self.first) {
            for Demand { lifetime, bytes } in demands {
                let price = until[lifetime.end] - until[lifetime.start];
                costs[first..].iter_mut().zip(bytes).for_each(|(cost, &bytes)| *cost += price * bytes as f64);
            }
        }
        costs
    }
}
