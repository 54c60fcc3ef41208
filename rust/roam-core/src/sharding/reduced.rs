//! The smaller problem in arrays, for the searches.

use super::presolve::{Demand, NEVER, Presolve};
use super::problem::Problem;
use std::collections::HashMap;

/// Nodes of at least two strategies, each with at least one edge or demand that others share.
pub(super) struct Reduced {
    /// Per node (node of the problem, its strategy per strategy of this one).
    members: Vec<Vec<(usize, Vec<usize>)>>,
    /// Where a node's strategies begin in `costs`; one more than nodes.
    pub(super) first: Vec<usize>,
    pub(super) costs: Vec<f64>,
    demands: Vec<Vec<Demand>>,
    pub(super) edges: Vec<Link>,
    /// Cost matrices, row by row; infinite where not allowed.
    pub(super) matrices: Vec<f64>,
    /// Per node its edges, those to earlier nodes first.
    pub(super) at_node: Vec<Vec<usize>>,
    /// Strategies of the problem's nodes that have one left.
    fixed: Vec<usize>,
    /// What those cost.
    pub(super) fixed_cost: i64,
    /// What is left of the limit at each time beside what any choice takes; `None` without a limit.
    pub(super) room: Option<Vec<i64>>,
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
    pub(super) fn new(problem: &Problem) -> Option<Reduced> {
        let presolve = Presolve::new(problem)?;
        let mut reduced = Reduced {
            members: Vec::new(),
            first: vec![0],
            costs: Vec::new(),
            demands: Vec::new(),
            edges: Vec::new(),
            matrices: Vec::new(),
            at_node: Vec::new(),
            fixed: vec![0; problem.nodes.len()],
            fixed_cost: 0,
            room: None,
        };
        let mut taken = vec![0i64; problem.end() + 1];
        let mut places: HashMap<usize, usize> = HashMap::new();
        let mut rooted = Vec::new();
        for (number, node) in presolve.nodes.into_iter().enumerate().filter(|(_, node)| !node.members.is_empty()) {
            let mut demands = node.demands;
            for Demand { lifetime, bytes } in &mut demands {
                let least = bytes.iter().copied().min().unwrap_or(0);
                taken[lifetime.start] += least;
                taken[lifetime.end] -= least;
                bytes.iter_mut().for_each(|bytes| *bytes -= least);
            }
            demands.retain(|demand| demand.bytes.iter().any(|&bytes| bytes > 0));
            let costs = &node.costs;
            if demands.is_empty() && presolve.links[number].is_empty() {
                let (strategy, cost) = costs.iter().enumerate().min_by_key(|&(_, &cost)| cost)?;
                reduced.fixed_cost += cost;
                node.members.iter().for_each(|(member, strategies)| reduced.fixed[*member] = strategies[strategy]);
                continue;
            }
            places.insert(number, reduced.members.len());
            rooted.push(number);
            reduced.costs.extend(costs.iter().map(|&cost| cost as f64));
            reduced.first.push(reduced.costs.len());
            reduced.members.push(node.members);
            reduced.demands.push(demands);
        }
        if let Some(limit) = problem.limit_bytes {
            let mut live = 0;
            let room = taken.iter().map(|more| {
                live += more;
                limit - live
            });
            reduced.room = Some(room.collect());
            if reduced.room.iter().flatten().any(|&bytes| bytes < 0) {
                return None;
            }
        }
        let mut known: HashMap<Vec<u64>, usize> = HashMap::new();
        for &a in &rooted {
            for (&b, matrix) in presolve.links[a].range(a..) {
                let matrix = [matrix, &presolve.links[b][&a]].map(|matrix| {
                    let costs = matrix.iter().map(|&cost| if cost >= NEVER { f64::INFINITY } else { cost as f64 });
                    let costs: Vec<f64> = costs.collect();
                    *known.entry(costs.iter().map(|cost| cost.to_bits()).collect()).or_insert_with(|| {
                        reduced.matrices.extend_from_slice(&costs);
                        reduced.matrices.len() - costs.len()
                    })
                });
                reduced.edges.push(Link { nodes: [places[&a], places[&b]], matrix });
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
        whole
    }

    /// What a choice costs; infinite where it is not allowed.
    pub(super) fn cost(&self, choice: &[usize]) -> f64 {
        let of_nodes = choice.iter().zip(&self.first).map(|(strategy, first)| self.costs[first + strategy]);
        let of_edges = self.edges.iter().map(|&link| self.row(link, 0, choice[link.nodes[0]])[choice[link.nodes[1]]]);
        self.fixed_cost as f64 + of_nodes.chain(of_edges).sum::<f64>()
    }

    /// Bytes that a choice takes beyond the room at each time, below 0 where room is left.
    pub(super) fn excess(&self, room: &[i64], choice: &[usize]) -> Vec<i64> {
        let mut excess = vec![0i64; room.len()];
        for (demands, &strategy) in self.demands.iter().zip(choice) {
            for Demand { lifetime, bytes } in demands {
                excess[lifetime.start] += bytes[strategy];
                excess[lifetime.end] -= bytes[strategy];
            }
        }
        let mut live = 0;
        for (bytes, room) in excess.iter_mut().zip(room) {
            live += *bytes;
            *bytes = live - room;
        }
        excess
    }

    /// The costs of strategies where each byte has a price at each time.
    pub(super) fn priced(&self, prices: &[f64]) -> Vec<f64> {
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
