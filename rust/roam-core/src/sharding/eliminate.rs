//! The best choice, exactly, where that is quick: nodes are eliminated one after the other (bucket
//! elimination; Bertelè and Brioschi, "Nonserial Dynamic Programming", 1972; Dechter, "Bucket
//! Elimination", 1999).
//!
//! A node that is eliminated leaves a table: the least that it costs, with those eliminated before,
//! for each choice of the nodes that they still have to do with. In a good order all tables are small
//! where the graph is nearly a tree or a chain of blocks.

use super::marginals::{Marginals, least};
use super::reduced::Reduced;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Stands for infinity where choices that are not allowed have to be compared: the fewer such costs
/// a choice has, the better.
pub(super) const FAR: f64 = 1e30;

/// A node to be eliminated.
struct Step {
    node: usize,
    /// The nodes for whose choices its table has entries: they are eliminated later, and the last
    /// of them comes first.
    around: Vec<usize>,
}

/// In which order nodes are eliminated, and what that takes.
pub(super) struct Order {
    steps: Vec<Step>,
    /// Per node its place in `steps`.
    place: Vec<usize>,
    /// Per step the earlier steps whose tables it adds up: of the nodes of such a table, the node
    /// of this step is the next to be eliminated.
    taken: Vec<Vec<usize>>,
    /// Entries of sums in all.
    pub(super) work: u64,
}

impl Order {
    /// The order in which the next node is always the one with the fewest entries of sums; `None`
    /// if these are more than `most` in all.
    pub(super) fn new(reduced: &Reduced, most: u64) -> Option<Order> {
        let count = reduced.len();
        let mut around: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); count];
        for link in &reduced.edges {
            let [a, b] = link.nodes;
            around[a].insert(b);
            around[b].insert(a);
        }
        let size = |node: usize| reduced.size(node) as u64;
        let weigh = |around: &BTreeSet<usize>, node: usize| {
            around.iter().fold(size(node), |product, &other| product.saturating_mul(size(other)))
        };
        let mut open: BTreeSet<(u64, usize)> = (0..count).map(|node| (weigh(&around[node], node), node)).collect();
        let mut order = Order { steps: Vec::new(), place: vec![0; count], taken: vec![Vec::new(); count], work: 0 };
        while let Some((weight, gone)) = open.pop_first() {
            order.work = order.work.saturating_add(weight);
            if order.work > most {
                return None;
            }
            let others = std::mem::take(&mut around[gone]);
            for &other in &others {
                open.remove(&(weigh(&around[other], other), other));
                around[other].remove(&gone);
                around[other].extend(others.iter().filter(|&&more| more != other));
                open.insert((weigh(&around[other], other), other));
            }
            order.place[gone] = order.steps.len();
            order.steps.push(Step { node: gone, around: others.into_iter().collect() });
        }
        for (number, step) in order.steps.iter_mut().enumerate() {
            step.around.sort_unstable_by_key(|&node| Reverse(order.place[node]));
            if let Some(&next) = step.around.last() {
                order.taken[order.place[next]].push(number);
            }
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

/// Eliminates nodes in an order.
pub(super) struct Elimination<'a> {
    reduced: &'a Reduced,
    pub(super) order: Order,
    /// The problem's matrices without infinities.
    matrices: Vec<f64>,
}

impl<'a> Elimination<'a> {
    pub(super) fn new(reduced: &'a Reduced, order: Order) -> Self {
        Elimination { reduced, order, matrices: reduced.matrices.iter().map(|cost| cost.min(FAR)).collect() }
    }

    fn own<'c>(&self, costs: &'c [f64], node: usize) -> &'c [f64] {
        &costs[self.reduced.first[node]..self.reduced.first[node + 1]]
    }

    /// What is added up in a step: edges to later nodes, and tables in which the node occurs.
    fn terms<'t>(&'t self, at: usize, tables: &'t [Vec<f64>]) -> Vec<Term<'t>> {
        let (reduced, order) = (self.reduced, &self.order);
        let Step { node, around } = &order.steps[at];
        let size = reduced.size(*node);
        let mut terms = Vec::new();
        for &edge in &reduced.at_node[*node] {
            let link = reduced.edges[edge];
            let (side, other) = link.ends(*node);
            if order.place[other] > at {
                let strides = around.iter().map(|&node| if node == other { size } else { 0 }).collect();
                let values = &self.matrices[link.matrix[1 - side]..][..size * reduced.size(other)];
                terms.push(Term { values, strides, table: None });
            }
        }
        for &table in &order.taken[at] {
            let mut strides = vec![0; around.len()];
            let mut stride = 1;
            for &node in order.steps[table].around.iter().rev() {
                if let Some(place) = around.iter().position(|&other| other == node) {
                    strides[place] = stride;
                }
                stride *= reduced.size(node);
            }
            terms.push(Term { values: &tables[table], strides, table: Some(table) });
        }
        terms
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
            for (now, known) in at_depth.iter().enumerate().skip(from) {
                let (before, after) = sums.split_at_mut(now);
                let sum = &mut after[0];
                sum.copy_from_slice(before.last().map_or(own, |sum| sum.as_slice()));
                for &term in known {
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

    fn tables(&self, costs: &[f64]) -> Vec<Vec<f64>> {
        let mut tables: Vec<Vec<f64>> = Vec::with_capacity(self.order.steps.len());
        for (at, step) in self.order.steps.iter().enumerate() {
            let mut table = Vec::new();
            self.each(&step.around, &self.terms(at, &tables), self.own(costs, step.node), |_, sums| {
                table.push(sums.iter().copied().fold(f64::INFINITY, f64::min));
            });
            tables.push(table);
        }
        tables
    }

    /// The best choice at given costs of strategies, and what it costs less what rounding may add.
    pub(super) fn choose(&self, costs: &[f64]) -> (Vec<usize>, f64) {
        let tables = self.tables(costs);
        let mut choice = vec![0; self.order.steps.len()];
        for (at, step) in self.order.steps.iter().enumerate().rev() {
            let mut sums = self.own(costs, step.node).to_vec();
            for term in self.terms(at, &tables) {
                let rows = step.around.iter().zip(&term.strides).map(|(&node, stride)| choice[node] * stride);
                sums.iter_mut().zip(&term.values[rows.sum::<usize>()..]).for_each(|(sum, cost)| *sum += cost);
            }
            choice[step.node] = least(&sums);
        }
        let cost = self.cost(&tables);
        (choice, cost - self.error(&tables, cost))
    }

    /// What the nodes cost together.
    fn cost(&self, tables: &[Vec<f64>]) -> f64 {
        let roots = self.order.steps.iter().zip(tables).filter(|(step, _)| step.around.is_empty());
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

    /// The least cost for each strategy of each node.
    pub(super) fn marginals(&self, costs: &[f64]) -> Marginals {
        let tables = self.tables(costs);
        let least_of_all = self.cost(&tables);
        let mut by_strategy = vec![f64::INFINITY; costs.len()];
        // Per step, for each entry of its table, the least cost of all that is not in the table.
        let mut outside: Vec<Vec<f64>> = tables.iter().map(|table| vec![f64::INFINITY; table.len()]).collect();
        for (at, step) in self.order.steps.iter().enumerate().rev() {
            let terms = self.terms(at, &tables);
            let mut own_outside = std::mem::take(&mut outside[at]);
            if step.around.is_empty() {
                own_outside[0] = least_of_all - tables[at][0];
            }
            let marginals = &mut by_strategy[self.reduced.first[step.node]..];
            let mut entry = 0;
            self.each(&step.around, &terms, self.own(costs, step.node), |rows, sums| {
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
        let error = self.error(&tables, least_of_all);
        by_strategy.iter_mut().for_each(|least| *least -= error);
        Marginals { least: least_of_all - error, by_strategy }
    }
}

#[cfg(test)]
mod tests {
    use super::super::messages::{Known, Messages};
    use super::super::small::{layers, least_cost, made};
    use super::*;
    use crate::control::Watch;
    use crate::rng::Random;

    /// Bounds per strategy by chains and by elimination, against all choices.
    #[test]
    fn the_least_cost_is_found_for_each_strategy_and_chains_are_below_it() {
        let mut random = Random::new(2);
        let mut tight = [0, 0];
        for case in 0..400 {
            let mut problem = made(&mut random);
            problem.limit_bytes = None;
            let Ok(Some(reduced)) = Reduced::new(&problem, &Watch::default()) else {
                assert_eq!(least_cost(&problem, |_| true), None, "{case}");
                continue;
            };
            let least = least_cost(&problem, |_| true);
            let order = Order::new(&reduced, u64::MAX).unwrap();
            let elimination = Elimination::new(&reduced, order);
            let (choice, bound) = elimination.choose(&reduced.costs);
            let fixed = reduced.fixed_cost as f64;
            let Some(least) = least else {
                assert!(bound > FAR / 2.0, "{case}");
                continue;
            };
            let whole = reduced.whole(&choice);
            assert_eq!(problem.cost(&whole), Some(least), "{case}");
            assert_eq!((fixed + bound).ceil() as i64, least, "{case}");
            let exact = elimination.marginals(&reduced.costs);
            let mut messages = Messages::new(&reduced, &Known::new());
            (0..random.below(4)).for_each(|_| drop(messages.pass(&reduced.costs)));
            let chains = messages.marginals(&reduced.costs);
            assert!(fixed + chains.least <= least as f64);
            for node in 0..reduced.len() {
                let (number, strategies) = reduced.own(node);
                for (place, &strategy) in strategies.iter().enumerate() {
                    let asked = least_cost(&problem, |choice| choice[*number] == strategy);
                    let at = reduced.first[node] + place;
                    let [exact, chains] = [&exact, &chains].map(|of| fixed + of.by_strategy[at]);
                    let Some(asked) = asked else {
                        assert!(exact > FAR / 2.0, "{case}");
                        continue;
                    };
                    // Where another node would choose worse with it, the problem left that out.
                    assert!(exact.ceil() as i64 == asked, "{case}: {exact} {asked}");
                    assert!(chains <= asked as f64, "{case}: {chains} {asked}");
                    tight[0] += usize::from(chains > asked as f64 - 0.5);
                    tight[1] += 1;
                }
            }
        }
        assert!(tight[1] > 1000 && tight[0] * 8 > tight[1], "{tight:?}");
    }

    #[test]
    fn what_equal_blocks_take_grows_with_their_number() {
        let work = |count: usize| {
            let mut problem = layers(count, 0, 1);
            problem.limit_bytes = None;
            let reduced = Reduced::new(&problem, &Watch::default()).unwrap().unwrap();
            Order::new(&reduced, u64::MAX).unwrap().work
        };
        let (few, many) = (work(12), work(96));
        assert!(many <= 9 * few, "{few} {many}");
    }
}
