//! Better choices: the nodes of a random forest choose anew, all at once and at the least cost, while
//! the others keep their strategies.
//!
//! Edges between nodes of the forest form no circle, so dynamic programming from the leaves to the
//! roots finds the best choice for all of them. A forest holds most nodes of these sparse graphs.

use super::eliminate::FAR;
use super::marginals::least;
use super::reduced::Reduced;
use crate::rng::Random;

pub(super) struct Forest<'a> {
    reduced: &'a Reduced,
    /// All nodes, shuffled.
    order: Vec<usize>,
    /// Per node another of its tree, or itself.
    root: Vec<usize>,
    is_in: Vec<bool>,
}

impl<'a> Forest<'a> {
    pub(super) fn new(reduced: &'a Reduced) -> Self {
        let count = reduced.len();
        Forest { reduced, order: (0..count).collect(), root: (0..count).collect(), is_in: vec![false; count] }
    }

    fn find(&mut self, mut node: usize) -> usize {
        while self.root[node] != node {
            self.root[node] = self.root[self.root[node]];
            node = self.root[node];
        }
        node
    }

    /// Takes nodes in random order, each unless it would close a circle.
    fn grow(&mut self, random: &mut Random, kept: &[usize]) {
        let reduced = self.reduced;
        for place in (1..self.order.len()).rev() {
            self.order.swap(place, random.below(place as u64 + 1) as usize);
        }
        self.is_in.fill(false);
        self.root.iter_mut().enumerate().for_each(|(node, root)| *root = node);
        let mut trees = Vec::new();
        for at in 0..self.order.len() {
            let node = self.order[at];
            trees.clear();
            trees.extend(reduced.at_node[node].iter().map(|&edge| reduced.edges[edge].ends(node).1));
            trees.retain(|&other| self.is_in[other]);
            for tree in &mut trees {
                *tree = self.find(*tree);
            }
            trees.sort_unstable();
            if !kept.contains(&node) && trees.windows(2).all(|pair| pair[0] != pair[1]) {
                self.is_in[node] = true;
                trees.iter().for_each(|&tree| self.root[tree] = node);
            }
        }
    }

    /// The forest's nodes, parents before children, each with the edge to its parent.
    fn visits(&self) -> Vec<(usize, Option<usize>)> {
        let reduced = self.reduced;
        let mut visits: Vec<(usize, Option<usize>)> = Vec::new();
        let mut is_seen = vec![false; reduced.len()];
        for &root in self.order.iter().filter(|&&node| self.is_in[node]) {
            let mut next = visits.len();
            if !std::mem::replace(&mut is_seen[root], true) {
                visits.push((root, None));
            }
            while next < visits.len() {
                let (node, _) = visits[next];
                next += 1;
                for &edge in &reduced.at_node[node] {
                    let (_, other) = reduced.edges[edge].ends(node);
                    if self.is_in[other] && !std::mem::replace(&mut is_seen[other], true) {
                        visits.push((other, Some(edge)));
                    }
                }
            }
        }
        visits
    }

    /// Lets a random forest choose anew; returns how many matrix entries were looked at.
    ///
    /// Args:
    ///     costs: of all strategies, instead of the problem's.
    ///     kept: nodes that keep their strategies.
    pub(super) fn choose(&mut self, costs: &[f64], choice: &mut [usize], random: &mut Random, kept: &[usize]) -> u64 {
        let reduced = self.reduced;
        self.grow(random, kept);
        let visits = self.visits();
        let mut sums = costs.to_vec();
        let mut work = sums.len() as u64;
        // Per node and strategy of its parent the best strategy.
        let mut best: Vec<Vec<u32>> = vec![Vec::new(); reduced.len()];
        for &(node, parent) in visits.iter().rev() {
            let span = reduced.first[node]..reduced.first[node + 1];
            for &edge in &reduced.at_node[node] {
                let link = reduced.edges[edge];
                let (side, other) = link.ends(node);
                if !self.is_in[other] {
                    let row = reduced.row(link, 1 - side, choice[other]);
                    sums[span.clone()].iter_mut().zip(row).for_each(|(sum, cost)| *sum += cost.min(FAR));
                }
            }
            let Some(edge) = parent else { continue };
            let link = reduced.edges[edge];
            let (side, up) = link.ends(node);
            for strategy in 0..reduced.size(up) {
                let row = reduced.row(link, 1 - side, strategy);
                let now = choice[node];
                let (mut which, mut lowest) = (now, row[now].min(FAR) + sums[span.start + now]);
                for (place, (cost, sum)) in row.iter().zip(&sums[span.clone()]).enumerate() {
                    if cost + sum < lowest {
                        (which, lowest) = (place, cost + sum);
                    }
                }
                sums[reduced.first[up] + strategy] += lowest;
                best[node].push(which as u32);
                work += row.len() as u64;
            }
        }
        for &(node, parent) in &visits {
            choice[node] = match parent {
                Some(edge) => best[node][choice[reduced.edges[edge].ends(node).1]] as usize,
                None => {
                    let sums = &sums[reduced.first[node]..reduced.first[node + 1]];
                    let lowest = least(sums);
                    if sums[lowest] < sums[choice[node]] { lowest } else { choice[node] }
                }
            };
        }
        work
    }
}
