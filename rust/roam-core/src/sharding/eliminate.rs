//! The best choice for some nodes while the others keep their strategies: nodes are eliminated one
//! after the other (bucket elimination; Bertelè and Brioschi, "Nonserial Dynamic Programming", 1972;
//! Dechter, "Bucket elimination", 1999).
//!
//! A node that is eliminated leaves a table: the least that it costs for each choice of the nodes
//! that it still has to do with. Where all tables are small, which depends on the order, the least
//! cost of all nodes together is found exactly. Where they are not, some nodes are *kept*: they hold
//! their strategies, and whatever is left between them is small.

use super::reduced::Reduced;
use crate::rng::Random;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Stands for infinity where what is not allowed has to be compared: the less of it, the better.
pub(super) const FAR: f64 = 1e30;

/// A node to be eliminated.
struct Step {
    node: usize,
    /// Nodes that are eliminated later and that its table is about, the last of them first.
    around: Vec<usize>,
}

/// In which order nodes are eliminated.
pub(super) struct Order {
    steps: Vec<Step>,
    /// Per node its place in `steps`; none if it keeps its strategy.
    place: Vec<Option<usize>>,
    /// Entries of sums that one elimination of all computes.
    pub(super) work: u64,
}

impl Order {
    /// Orders nodes so that the next table is always the smallest, more or less; keeps nodes where
    /// no table is small.
    ///
    /// Args:
    ///     among: nodes that may be eliminated.
    ///     most: entries of sums that a node's elimination may take.
    ///     random: changes the order; `None` where no node may be kept.
    ///
    /// Returns `None` if a node would have to be kept and none may.
    pub(super) fn new(reduced: &Reduced, among: &[usize], most: u64, mut random: Option<&mut Random>) -> Option<Order> {
        let count = reduced.len();
        let mut is_left = vec![false; count];
        among.iter().for_each(|&node| is_left[node] = true);
        let mut around: Vec<Vec<usize>> = vec![Vec::new(); count];
        for link in reduced.edges.iter().filter(|link| link.nodes.iter().all(|&node| is_left[node])) {
            let [a, b] = link.nodes;
            around[a].push(b);
            around[b].push(a);
        }
        let size = |node: usize| reduced.size(node) as u64;
        let weigh = |around: &[Vec<usize>], node: usize| {
            around[node].iter().fold(size(node), |product, &other| product.saturating_mul(size(other)))
        };
        let mut noise = vec![4; count];
        if let Some(random) = &mut random {
            noise.iter_mut().for_each(|noise| *noise += random.below(5));
        }
        let key = |around: &[Vec<usize>], node: usize| weigh(around, node).saturating_mul(noise[node]);
        let mut open: BinaryHeap<_> = among.iter().map(|&node| Reverse((key(&around, node), node))).collect();
        let mut order = Order { steps: Vec::new(), place: vec![None; count], work: 0 };
        let mut left = among.to_vec();
        while let Some(Reverse((known, node))) = open.pop() {
            if !is_left[node] || known != key(&around, node) {
                continue;
            }
            let weight = weigh(&around, node);
            let (gone, is_kept) = if weight <= most {
                (node, false)
            } else {
                open.push(Reverse((known, node)));
                left.retain(|&node| is_left[node]);
                let random = random.as_deref_mut()?;
                // Of some, the one with the largest table makes most others smaller.
                let drawn = [0; 3].map(|_| left[random.below(left.len() as u64) as usize]);
                (drawn.into_iter().max_by_key(|&node| weigh(&around, node)).unwrap_or(node), true)
            };
            is_left[gone] = false;
            let others = std::mem::take(&mut around[gone]);
            for &other in &others {
                around[other].retain(|&node| node != gone);
                if !is_kept {
                    for &more in &others {
                        if more != other && !around[other].contains(&more) {
                            around[other].push(more);
                        }
                    }
                }
            }
            others.iter().for_each(|&other| open.push(Reverse((key(&around, other), other))));
            if !is_kept {
                order.place[gone] = Some(order.steps.len());
                order.work = order.work.saturating_add(weight);
                order.steps.push(Step { node: gone, around: others });
            }
        }
        for step in &mut order.steps {
            step.around.sort_unstable_by_key(|&node| Reverse(order.place[node]));
        }
        Some(order)
    }
}

/// A term of a sum: where its row for the node's strategies begins, by the strategies around.
struct Term<'a> {
    values: &'a [f64],
    /// Per node around, how far the row moves for each of its strategies.
    strides: Vec<usize>,
    /// Which table it is; `None` for an edge's costs.
    table: Option<usize>,
}

/// Tables of an elimination.
pub(super) struct Elimination<'a> {
    reduced: &'a Reduced,
    /// The problem's matrices without infinities.
    matrices: Vec<f64>,
}

/// What all choices of eliminated nodes cost at least.
pub(super) struct Marginals {
    /// The least cost of all.
    pub(super) least: f64,
    /// Per strategy the least cost of all choices that have it.
    pub(super) by_strategy: Vec<f64>,
}

impl<'a> Elimination<'a> {
    pub(super) fn new(reduced: &'a Reduced) -> Self {
        Elimination { reduced, matrices: reduced.matrices.iter().map(|cost| cost.min(FAR)).collect() }
    }

    /// What a node's strategies cost with those that are kept around it.
    fn own(&self, order: &Order, costs: &[f64], choice: &[usize], node: usize) -> Vec<f64> {
        let reduced = self.reduced;
        let mut own = costs[reduced.first[node]..reduced.first[node + 1]].to_vec();
        for &edge in &reduced.at_node[node] {
            let link = reduced.edges[edge];
            let (side, other) = link.ends(node);
            if order.place[other].is_none() {
                let at = link.matrix[1 - side] + choice[other] * own.len();
                own.iter_mut().zip(&self.matrices[at..]).for_each(|(sum, cost)| *sum += cost);
            }
        }
        own
    }

    /// What is added for a step: edges to later nodes, and tables about the node.
    fn terms<'t>(&'t self, order: &Order, at: usize, tables: &'t [Vec<f64>], of: &[Vec<usize>]) -> Vec<Term<'t>> {
        let reduced = self.reduced;
        let Step { node, around } = &order.steps[at];
        let size = reduced.size(*node);
        let mut terms = Vec::new();
        for &edge in &reduced.at_node[*node] {
            let link = reduced.edges[edge];
            let (side, other) = link.ends(*node);
            if order.place[other].is_some_and(|place| place > at) {
                let strides = around.iter().map(|&node| if node == other { size } else { 0 }).collect();
                let values = &self.matrices[link.matrix[1 - side]..][..size * reduced.size(other)];
                terms.push(Term { values, strides, table: None });
            }
        }
        for &table in &of[at] {
            let about = &order.steps[table].around;
            let mut strides = vec![0; around.len()];
            let mut stride = 1;
            for &node in about.iter().rev() {
                if let Some(place) = around.iter().position(|&other| other == node) {
                    strides[place] = stride;
                }
                stride *= reduced.size(node);
            }
            terms.push(Term { values: &tables[table], strides, table: Some(table) });
        }
        terms
    }

    /// Per step the steps whose tables it takes up: those of which its node is eliminated first.
    fn taken(order: &Order) -> Vec<Vec<usize>> {
        let mut of = vec![Vec::new(); order.steps.len()];
        for (number, step) in order.steps.iter().enumerate() {
            if let Some(place) = step.around.last().and_then(|&next| order.place[next]) {
                of[place].push(number);
            }
        }
        of
    }

    /// Calls with every choice of the nodes around a step, the last changing fastest: where each
    /// term's row begins, and the sum of the terms for each strategy of the node.
    fn each(&self, around: &[usize], terms: &[Term<'_>], own: &[f64], mut call: impl FnMut(&[usize], &[f64])) {
        let depth = around.len();
        // A term is added as soon as the strategies that it depends on are known.
        let known = |term: &Term<'_>| term.strides.iter().rposition(|&stride| stride > 0).map_or(0, |place| place + 1);
        let mut at_depth: Vec<Vec<usize>> = vec![Vec::new(); depth + 1];
        terms.iter().enumerate().for_each(|(number, term)| at_depth[known(term)].push(number));
        let mut sums = vec![own.to_vec(); depth + 1];
        let mut rows = vec![0; terms.len()];
        let mut strategies = vec![0; depth];
        let mut from = 0;
        loop {
            for now in from..=depth {
                let (before, after) = sums.split_at_mut(now);
                let sum = &mut after[0];
                sum.copy_from_slice(before.last().map_or(own, |sum| sum.as_slice()));
                for &term in &at_depth[now] {
                    let row = &terms[term].values[rows[term]..][..own.len()];
                    sum.iter_mut().zip(row).for_each(|(sum, cost)| *sum += cost);
                }
            }
            call(&rows, &sums[depth]);
            let mut place = depth;
            loop {
                if place == 0 {
                    return;
                }
                place -= 1;
                strategies[place] += 1;
                let is_over = strategies[place] == self.reduced.size(around[place]);
                for (row, term) in rows.iter_mut().zip(terms) {
                    *row += term.strides[place];
                    if is_over {
                        *row -= term.strides[place] * strategies[place];
                    }
                }
                if !is_over {
                    break;
                }
                strategies[place] = 0;
            }
            from = place + 1;
        }
    }

    fn tables(&self, order: &Order, of: &[Vec<usize>], owns: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let mut tables: Vec<Vec<f64>> = Vec::with_capacity(order.steps.len());
        for (at, step) in order.steps.iter().enumerate() {
            let mut table = Vec::new();
            let terms = self.terms(order, at, &tables, of);
            self.each(&step.around, &terms, &owns[at], |_, sums| {
                table.push(sums.iter().copied().fold(f64::INFINITY, f64::min));
            });
            tables.push(table);
        }
        tables
    }

    fn owns(&self, order: &Order, costs: &[f64], choice: &[usize]) -> Vec<Vec<f64>> {
        order.steps.iter().map(|step| self.own(order, costs, choice, step.node)).collect()
    }

    /// Eliminates nodes at given costs of strategies, and lets them choose the best; returns what they
    /// cost, less what rounding may add.
    pub(super) fn choose(&self, order: &Order, costs: &[f64], choice: &mut [usize]) -> f64 {
        let of = Self::taken(order);
        let owns = self.owns(order, costs, choice);
        let tables = self.tables(order, &of, &owns);
        for (at, step) in order.steps.iter().enumerate().rev() {
            let mut sums = owns[at].clone();
            for term in self.terms(order, at, &tables, &of) {
                let row: usize = step.around.iter().zip(&term.strides).map(|(&node, stride)| choice[node] * stride).sum();
                sums.iter_mut().zip(&term.values[row..]).for_each(|(sum, cost)| *sum += cost);
            }
            let mut best = choice[step.node];
            for (strategy, sum) in sums.iter().enumerate() {
                if *sum < sums[best] {
                    best = strategy;
                }
            }
            choice[step.node] = best;
        }
        let least = Self::least(order, &tables);
        least - self.error(&tables, least)
    }

    /// What the nodes cost together.
    fn least(order: &Order, tables: &[Vec<f64>]) -> f64 {
        let roots = order.steps.iter().zip(tables).filter(|(step, _)| step.around.is_empty());
        roots.map(|(_, table)| table[0]).sum()
    }

    /// By how much rounding may change what all nodes cost: each sum, of at most all costs, by a share
    /// of the largest.
    fn error(&self, tables: &[Vec<f64>], least: f64) -> f64 {
        let largest = tables.iter().flatten().filter(|cost| cost.abs() < FAR / 2.0);
        let largest = largest.fold(least.abs(), |most, cost| most.max(cost.abs()));
        let sums = 4 * (self.reduced.len() + self.reduced.edges.len() + 8);
        sums as f64 * f64::EPSILON * largest
    }

    /// The least cost for each strategy of each node, where none is kept.
    pub(super) fn marginals(&self, order: &Order, costs: &[f64]) -> Marginals {
        let of = Self::taken(order);
        let owns = self.owns(order, costs, &[]);
        let tables = self.tables(order, &of, &owns);
        let least = Self::least(order, &tables);
        let mut by_strategy = vec![f64::INFINITY; costs.len()];
        // Per step, for each entry of its table, the least cost of all that is not in the table.
        let mut outside: Vec<Vec<f64>> = tables.iter().map(|table| vec![f64::INFINITY; table.len()]).collect();
        for (at, step) in order.steps.iter().enumerate().rev() {
            let terms = self.terms(order, at, &tables, &of);
            let mut own_outside = std::mem::take(&mut outside[at]);
            if step.around.is_empty() {
                own_outside[0] = least - tables[at][0];
            }
            let marginals = &mut by_strategy[self.reduced.first[step.node]..];
            let mut entry = 0;
            self.each(&step.around, &terms, &owns[at], |rows, sums| {
                let more = own_outside[entry];
                entry += 1;
                marginals.iter_mut().zip(sums).for_each(|(least, sum)| *least = least.min(sum + more));
                for (term, &row) in terms.iter().zip(rows) {
                    let Some(table) = term.table else { continue };
                    let outside = &mut outside[table][row..][..sums.len()];
                    for ((least, sum), inside) in outside.iter_mut().zip(sums).zip(&term.values[row..]) {
                        *least = least.min(sum + more - inside);
                    }
                }
            });
        }
        let error = self.error(&tables, least);
        by_strategy.iter_mut().for_each(|least| *least -= error);
        Marginals { least: least - error, by_strategy }
    }
}
