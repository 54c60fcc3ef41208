//! A smaller problem with the same optimum.
//!
//! Strategies that are not allowed, or for which another does as well whatever the neighbours
//! choose, are left out. An edge whose costs are a sum of one per end becomes costs of its ends. A
//! node whose strategy follows from that of a neighbour is *joined* with it: what it costs and takes
//! becomes the neighbour's. Programs consist of chains of operators that are split alike, so of tens
//! of thousands of nodes a few hundred may be left.
//!
//! docs/explanation/sharding.md proves that no optimum is lost.

use super::problem::{FORBIDDEN, Problem};
use crate::control::{Stop, Watch};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::mem;
use std::ops::Range;

/// Nodes, and which of their strategies may be chosen.
pub(super) type Kept = Vec<(usize, Vec<usize>)>;

/// The cost of what is not allowed; no sum of allowed costs comes near it.
pub(super) const NEVER: i64 = i64::MAX / 4;

/// Bytes that a node takes for a while, per strategy.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    pub(super) lifetime: Range<usize>,
    pub(super) bytes: Vec<i64>,
}

/// A node, with those that were joined with it.
#[derive(Clone, Debug, Default)]
pub(super) struct Joined {
    pub(super) costs: Vec<i64>,
    pub(super) demands: Vec<Demand>,
    /// (node of the problem, its strategy per strategy of this one); none once this one was joined
    /// with another.
    pub(super) members: Vec<(usize, Vec<usize>)>,
}

/// The smaller problem.
#[derive(Clone)]
pub(super) struct Presolve {
    pub(super) nodes: Vec<Joined>,
    /// Per node its neighbours, each with the cost matrix: a row per strategy of the node. Both ends
    /// have it.
    pub(super) links: Vec<BTreeMap<usize, Vec<i64>>>,
    /// Nodes to look at, those with few neighbours first: what is done to them changes the others.
    open: BinaryHeap<Reverse<(usize, usize)>>,
    is_open: Vec<bool>,
    /// Times at which some choice takes more than the room. A choice that keeps to the room at
    /// these times keeps to it at all other times, too.
    pub(super) times: Vec<usize>,
    /// What is left of the limit at each of these times beside what every choice takes.
    pub(super) room: Vec<i64>,
}

fn sum(a: i64, b: i64) -> i64 {
    if a >= NEVER || b >= NEVER { NEVER } else { a + b }
}

fn turned(matrix: &[i64], columns: usize) -> Vec<i64> {
    (0..columns).flat_map(|column| matrix.iter().skip(column).step_by(columns).copied()).collect()
}

impl Presolve {
    /// `None` where no choice is allowed, whatever it takes.
    pub(super) fn new(problem: &Problem, watch: &Watch) -> Result<Option<Presolve>, Stop> {
        let told = |cost: i64| if cost >= FORBIDDEN { NEVER } else { cost };
        let times = if problem.limit_bytes.is_some() { problem.end() } else { 0 };
        let is_felt =
            |demand: &Demand| times > 0 && !demand.lifetime.is_empty() && demand.bytes.iter().any(|&bytes| bytes > 0);
        let nodes: Vec<Joined> = (0..)
            .zip(&problem.nodes)
            .map(|(number, node)| Joined {
                costs: node.costs.iter().map(|&cost| told(cost)).collect(),
                demands: Some(Demand { lifetime: node.lifetime.clone(), bytes: node.bytes.clone() })
                    .filter(is_felt)
                    .into_iter()
                    .collect(),
                members: vec![(number, (0..node.costs.len()).collect())],
            })
            .collect();
        let count = nodes.len();
        let links = vec![BTreeMap::new(); count];
        let mut presolve = Presolve {
            nodes,
            links,
            open: BinaryHeap::new(),
            is_open: vec![false; count],
            times: (0..times).collect(),
            room: vec![problem.limit_bytes.unwrap_or(0); times],
        };
        for edge in &problem.edges {
            let matrix = problem.matrices[edge.matrix].iter().map(|&cost| told(cost)).collect();
            presolve.link(edge.nodes[0], edge.nodes[1], matrix);
        }
        (0..count).for_each(|node| presolve.look_at(node));
        if presolve.narrow().is_none() {
            return Ok(None);
        }
        presolve.simplified(watch)
    }

    /// Makes the problem as small as possible; `None` where no choice is allowed and keeps to the
    /// limit.
    fn simplified(mut self, watch: &Watch) -> Result<Option<Presolve>, Stop> {
        loop {
            while let Some(Reverse((_, node))) = self.open.pop() {
                watch.check()?;
                self.is_open[node] = false;
                if !self.nodes[node].members.is_empty() && !self.simplify(node) {
                    return Ok(None);
                }
            }
            if self.leave_out_large(watch)?.is_none() {
                return Ok(None);
            }
            if self.open.is_empty() {
                return Ok(Some(self));
            }
        }
    }

    /// Keeps some strategies of some nodes, and makes the problem smaller where that permits it;
    /// `None` where no choice of these strategies is allowed and keeps to the limit.
    pub(super) fn restricted(&self, kept: &Kept, watch: &Watch) -> Result<Option<Presolve>, Stop> {
        let mut presolve = self.clone();
        kept.iter().for_each(|(node, kept)| presolve.keep(*node, kept));
        presolve.simplified(watch)
    }

    pub(super) fn empty() -> Presolve {
        Presolve {
            nodes: Vec::new(),
            links: Vec::new(),
            open: BinaryHeap::new(),
            is_open: Vec::new(),
            times: Vec::new(),
            room: Vec::new(),
        }
    }

    /// Some of the nodes, which have no edges to others, as a problem of their own.
    pub(super) fn part(mut self, nodes: &[usize]) -> Presolve {
        let places: BTreeMap<usize, usize> = nodes.iter().copied().zip(0..).collect();
        let own = |(place, &node): (usize, &usize)| {
            let gone = mem::take(&mut self.nodes[node]);
            Joined { members: vec![(place, (0..gone.costs.len()).collect())], ..gone }
        };
        let joined = nodes.iter().enumerate().map(own).collect();
        let links = nodes.iter().map(|&node| {
            mem::take(&mut self.links[node]).into_iter().map(|(other, matrix)| (places[&other], matrix)).collect()
        });
        Presolve {
            nodes: joined,
            links: links.collect(),
            open: BinaryHeap::new(),
            is_open: vec![false; nodes.len()],
            times: self.times,
            room: self.room,
        }
    }

    pub(super) fn look_at(&mut self, node: usize) {
        if !mem::replace(&mut self.is_open[node], true) {
            self.open.push(Reverse((self.links[node].len(), node)));
        }
    }

    fn size(&self, node: usize) -> usize {
        self.nodes[node].costs.len()
    }

    /// A row per strategy of the node, a column per strategy of a neighbour's.
    fn rows(&self, node: usize, other: usize) -> impl Iterator<Item = &[i64]> {
        self.links[node][&other].chunks(self.size(other))
    }

    pub(super) fn neighbours(&self, node: usize) -> Vec<usize> {
        self.links[node].keys().copied().collect()
    }

    /// Adds the costs of a pair of nodes.
    pub(super) fn link(&mut self, a: usize, b: usize, matrix: Vec<i64>) {
        let back = turned(&matrix, self.size(b));
        for (from, to, matrix) in [(a, b, matrix), (b, a, back)] {
            let known = self.links[from].entry(to).or_insert_with(|| vec![0; matrix.len()]);
            known.iter_mut().zip(matrix).for_each(|(cost, more)| *cost = sum(*cost, more));
        }
    }

    /// Returns whether the node has a strategy that is allowed.
    fn simplify(&mut self, node: usize) -> bool {
        self.leave_out_forbidden(node);
        match self.size(node) {
            0 => return false,
            1 => self.fix(node),
            _ => {
                self.separate(node);
                match self.leader(node) {
                    Some((leader, follows)) => self.join(node, leader, &follows),
                    None => self.leave_out_dominated(node),
                }
            }
        }
        true
    }

    /// Keeps some of a node's strategies.
    pub(super) fn keep(&mut self, node: usize, kept: &[usize]) {
        if kept.len() == self.size(node) {
            return;
        }
        let pick = |values: &mut Vec<i64>| *values = kept.iter().map(|&strategy| values[strategy]).collect();
        let joined = &mut self.nodes[node];
        pick(&mut joined.costs);
        joined.demands.iter_mut().for_each(|demand| pick(&mut demand.bytes));
        for (_, strategies) in &mut joined.members {
            *strategies = kept.iter().map(|&strategy| strategies[strategy]).collect();
        }
        for other in self.neighbours(node) {
            let columns = self.size(other);
            let matrix = &self.links[node][&other];
            let matrix: Vec<i64> = kept.iter().flat_map(|&row| &matrix[row * columns..][..columns]).copied().collect();
            self.links[other].insert(node, turned(&matrix, columns));
            self.links[node].insert(other, matrix);
            self.look_at(other);
        }
        self.look_at(node);
    }

    /// Leaves out strategies that are not allowed, alone or with any strategy of some neighbour.
    fn leave_out_forbidden(&mut self, node: usize) {
        let mut is_allowed: Vec<bool> = self.nodes[node].costs.iter().map(|&cost| cost < NEVER).collect();
        for &other in self.links[node].keys() {
            for (is_allowed, row) in is_allowed.iter_mut().zip(self.rows(node, other)) {
                *is_allowed &= row.iter().any(|&cost| cost < NEVER);
            }
        }
        let kept: Vec<usize> = (0..is_allowed.len()).filter(|&strategy| is_allowed[strategy]).collect();
        self.keep(node, &kept);
    }

    /// Of a node with one strategy left: makes what it costs together with each neighbour a cost of
    /// that neighbour.
    fn fix(&mut self, node: usize) {
        for (other, row) in mem::take(&mut self.links[node]) {
            self.links[other].remove(&node);
            self.nodes[other].costs.iter_mut().zip(row).for_each(|(cost, more)| *cost = sum(*cost, more));
            self.look_at(other);
        }
    }

    /// Takes away edges whose costs are sums of one per end.
    fn separate(&mut self, node: usize) {
        for other in self.neighbours(node) {
            let top: Vec<i64> = self.rows(node, other).next().unwrap_or_default().to_vec();
            let is_sum = self.rows(node, other).all(|row| {
                row.iter()
                    .zip(&top)
                    .all(|(&cost, &above)| cost < NEVER && above < NEVER && cost - above == row[0] - top[0])
            });
            if is_sum {
                let rows: Vec<i64> = self.rows(node, other).map(|row| row[0] - top[0]).collect();
                for (end, costs) in [(node, rows), (other, top)] {
                    self.nodes[end].costs.iter_mut().zip(costs).for_each(|(cost, more)| *cost = sum(*cost, more));
                }
                self.links[node].remove(&other);
                self.links[other].remove(&node);
                self.look_at(other);
            }
        }
    }

    /// A neighbour such that for each of its strategies only one strategy of the node need be
    /// looked at: no other is allowed, or, where the node has no other neighbour, it costs least
    /// and takes least. Returns that strategy of the node per strategy of the neighbour, too.
    fn leader(&self, node: usize) -> Option<(usize, Vec<usize>)> {
        let joined = &self.nodes[node];
        let is_leaf = self.links[node].len() == 1;
        let follows = |row: &[i64]| {
            let cost = |strategy: usize| sum(row[strategy], joined.costs[strategy]);
            let allowed = || (0..row.len()).filter(|&strategy| row[strategy] < NEVER);
            let taken = |strategy: usize| joined.demands.iter().map(move |demand| demand.bytes[strategy]);
            let best = allowed().min_by_key(|&strategy| (cost(strategy), taken(strategy).sum::<i64>()))?;
            let is_best = allowed().all(|other| {
                other == best || is_leaf && taken(best).zip(taken(other)).all(|(least, bytes)| least <= bytes)
            });
            is_best.then_some(best)
        };
        self.links[node]
            .keys()
            .find_map(|&other| Some((other, self.rows(other, node).map(follows).collect::<Option<_>>()?)))
    }

    /// Joins a node with a neighbour; `follows` has the node's strategy per strategy of the
    /// neighbour.
    fn join(&mut self, node: usize, leader: usize, follows: &[usize]) {
        let links = mem::take(&mut self.links[node]);
        let gone = mem::take(&mut self.nodes[node]);
        let columns = gone.costs.len();
        let between = self.links[leader].remove(&node).unwrap_or_default();
        let joined = &mut self.nodes[leader];
        for (strategy, &of_gone) in follows.iter().enumerate() {
            let more = sum(gone.costs[of_gone], between[strategy * columns + of_gone]);
            joined.costs[strategy] = sum(joined.costs[strategy], more);
        }
        for Demand { lifetime, bytes } in gone.demands {
            let bytes: Vec<i64> = follows.iter().map(|&of_gone| bytes[of_gone]).collect();
            match joined.demands.iter_mut().find(|known| known.lifetime == lifetime) {
                Some(known) => known.bytes.iter_mut().zip(bytes).for_each(|(sum, more)| *sum += more),
                None => joined.demands.push(Demand { lifetime, bytes }),
            }
        }
        for (member, strategies) in gone.members {
            joined.members.push((member, follows.iter().map(|&of_gone| strategies[of_gone]).collect()));
        }
        for (other, matrix) in links.into_iter().filter(|&(other, _)| other != leader) {
            self.links[other].remove(&node);
            let columns = self.size(other);
            let rows = follows.iter().flat_map(|&of_gone| &matrix[of_gone * columns..][..columns]);
            self.link(leader, other, rows.copied().collect());
            self.look_at(other);
        }
        self.look_at(leader);
    }

    /// Leaves out strategies for which another costs no more, whatever the neighbours choose, and
    /// never takes more bytes.
    fn leave_out_dominated(&mut self, node: usize) {
        let joined = &self.nodes[node];
        let does_as_well = |better: usize, strategy: usize| {
            joined.costs[better] <= joined.costs[strategy]
                && joined.demands.iter().all(|demand| demand.bytes[better] <= demand.bytes[strategy])
                && self.links[node].iter().all(|(&other, matrix)| {
                    let columns = self.size(other);
                    let [better, row] = [better, strategy].map(|row| &matrix[row * columns..][..columns]);
                    better.iter().zip(row).all(|(cost, other)| cost <= other)
                })
        };
        let mut kept: Vec<usize> = Vec::new();
        for strategy in 0..joined.costs.len() {
            if !kept.iter().any(|&better| does_as_well(better, strategy)) {
                kept.retain(|&worse| !does_as_well(strategy, worse));
                kept.push(strategy);
            }
        }
        self.keep(node, &kept);
    }
}
