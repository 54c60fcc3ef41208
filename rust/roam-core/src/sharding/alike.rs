//! Programs that repeat themselves: the cheapest choice of all, and whether it is as cheap if nodes in
//! equal places choose alike.
//!
//! Nodes are eliminated, as in `eliminate.rs`, but in rounds of nodes that have nothing to do with each
//! other, and equal sums are computed once: of a chain of equal blocks each round leaves one of
//! about
//! half as many. So the sums grow with the logarithm of the number of blocks, and what grows in
//! proportion to it is looking them up.

use super::improve::Solution;
use super::presolve::NEVER;
use super::problem::{Edge, FORBIDDEN, Node, Problem};
use super::solve::{Outcome, solve};
use crate::control::Control;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;

/// The sums may have at most 1 / `SHARE` as many entries as the search may look at, because they
/// take longer.
const SHARE: u64 = 4;

/// Searches for the cheapest choice, and for the cheapest one in which nodes of the same group choose
/// alike. That is taken if it costs no more; the second value says whether it is.
///
/// Nodes of the same group have the same strategies. `groups` has a number per node, from 0, and each
/// number's first node is after those of all lower numbers. There is no memory limit.
pub fn solve_alike(problem: &Problem, groups: &[usize], work: u64, control: &Control) -> (Outcome, bool) {
    let folded = solve(&folded(problem, groups), work, control);
    let alike = folded.solution.and_then(|found| {
        let choice: Vec<usize> = groups.iter().map(|&group| found.choice[group]).collect();
        problem.cost(&choice).map(|cost| Solution { choice, cost })
    });
    let apart = match cheapest(problem, work / SHARE) {
        Some((solution, _)) => {
            let bound = solution.as_ref().map(|solution| solution.cost);
            Outcome { solution, bound, nodes: folded.nodes, edges: folded.edges, passes: folded.passes }
        }
        None => solve(problem, work, control),
    };
    let best = apart.solution.as_ref().map(|solution| solution.cost);
    match alike {
        Some(alike) if best.is_none_or(|cost| alike.cost <= cost) => (Outcome { solution: Some(alike), ..apart }, true),
        _ => (apart, false),
    }
}

/// The problem in which a group is one node.
fn folded(problem: &Problem, groups: &[usize]) -> Problem {
    let mut alike = Problem { name: problem.name.clone(), ..Problem::default() };
    let told = |cost: i128| if cost >= i128::from(FORBIDDEN) { FORBIDDEN } else { cost as i64 };
    let plus =
        |sum: &mut i64, more: i64, times: i64| *sum = told(i128::from(*sum) + i128::from(more) * i128::from(times));
    for (node, &group) in problem.nodes.iter().zip(groups) {
        match alike.nodes.get_mut(group) {
            Some(known) => known.costs.iter_mut().zip(&node.costs).for_each(|(sum, &cost)| plus(sum, cost, 1)),
            None => alike.nodes.push(Node { bytes: vec![0; node.costs.len()], lifetime: 0..0, ..node.clone() }),
        }
    }
    let mut counts: BTreeMap<([usize; 2], usize), i64> = BTreeMap::new();
    for edge in &problem.edges {
        *counts.entry((edge.nodes.map(|node| groups[node]), edge.matrix)).or_default() += 1;
    }
    let mut known = HashMap::new();
    for (([first, second], matrix), count) in counts {
        let costs = &problem.matrices[matrix];
        if first == second {
            let own = &mut alike.nodes[first].costs;
            let step = own.len() + 1;
            own.iter_mut().zip(costs.iter().step_by(step)).for_each(|(sum, &cost)| plus(sum, cost, count));
            continue;
        }
        let matrix = *known.entry((matrix, count)).or_insert_with(|| {
            alike.matrices.push(costs.iter().map(|&cost| told(i128::from(cost) * i128::from(count))).collect());
            alike.matrices.len() - 1
        });
        alike.edges.push(Edge { nodes: [first, second], matrix });
    }
    alike
}

/// What some nodes cost together, for each choice of their strategies; those of the last node
/// change fastest.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Table {
    sizes: Vec<usize>,
    costs: Vec<i64>,
}

/// A term of a sum: a table, where its nodes are among those of the sum (0 is the node that is
/// eliminated), and how many times the term is there.
type Term = (usize, Vec<usize>, i64);

fn sum(a: i64, b: i64) -> i64 {
    if a >= NEVER || b >= NEVER { NEVER } else { a.saturating_add(b).min(NEVER) }
}

/// The cheapest choice (the inner `None` where none is allowed), and how many entries of sums it
/// took to find it; the outer `None` if these are more than `most`.
fn cheapest(problem: &Problem, most: u64) -> Option<(Option<Solution>, u64)> {
    let mut sums = Sums::new(problem);
    let mut live: Vec<usize> = (0..problem.nodes.len()).collect();
    let mut threshold = 0;
    while !live.is_empty() {
        let mut next = u64::MAX;
        let before = live.len();
        let mut touched = vec![false; problem.nodes.len()];
        let mut left = Vec::with_capacity(before);
        for node in live {
            if !touched[node] && sums.weight(node) <= threshold {
                for other in sums.eliminate(node) {
                    touched[other] = true;
                }
            } else {
                next = next.min(sums.weight(node));
                left.push(node);
            }
        }
        live = left;
        if sums.work > most {
            return None;
        }
        if live.len() == before {
            if next > most {
                return None;
            }
            // Nodes of nearly equal weight are eliminated in the same round, so that the ends of a
            // chain are not ahead of what is between them.
            threshold = next.next_power_of_two();
        }
    }
    let solution = (sums.constant < NEVER).then(|| Solution { choice: sums.choice(), cost: sums.constant });
    Some((solution, sums.work))
}

struct Sums {
    tables: Vec<Table>,
    numbers: HashMap<Table, usize>,
    /// Costs of choices: the nodes that choose, and the number of the table.
    factors: Vec<(Vec<usize>, usize)>,
    /// Per node how many strategies it has, and the factors in which it occurs.
    sizes: Vec<usize>,
    at: Vec<BTreeSet<usize>>,
    /// Per node how many entries the sum has that eliminates it, once that is known.
    weights: Vec<Option<u64>>,
    /// Sums that were computed, by their terms: the place in `computed` of the sum's table and of
    /// the best strategy per entry.
    known: HashMap<Vec<Term>, usize>,
    computed: Vec<(usize, Vec<usize>)>,
    /// Nodes that were eliminated, each with the nodes around it and its place in `computed`.
    steps: Vec<(usize, Vec<usize>, usize)>,
    /// What those nodes cost that have been eliminated and have no edges to nodes that are left.
    constant: i64,
    work: u64,
}

impl Sums {
    fn new(problem: &Problem) -> Sums {
        let count = problem.nodes.len();
        let mut sums = Sums {
            tables: Vec::new(),
            numbers: HashMap::new(),
            factors: Vec::new(),
            sizes: problem.nodes.iter().map(|node| node.costs.len()).collect(),
            at: vec![BTreeSet::new(); count],
            weights: vec![None; count],
            known: HashMap::new(),
            computed: Vec::new(),
            steps: Vec::new(),
            constant: 0,
            work: 0,
        };
        let told = |costs: &[i64]| costs.iter().map(|&cost| if cost >= FORBIDDEN { NEVER } else { cost }).collect();
        for (number, node) in problem.nodes.iter().enumerate() {
            let table = sums.number(Table { sizes: vec![node.costs.len()], costs: told(&node.costs) });
            sums.add(vec![number], table);
        }
        let mut matrices: Vec<Option<usize>> = vec![None; problem.matrices.len()];
        for edge in &problem.edges {
            let table = *matrices[edge.matrix].get_or_insert_with(|| {
                let sizes = edge.nodes.map(|node| problem.nodes[node].costs.len()).to_vec();
                sums.number(Table { sizes, costs: told(&problem.matrices[edge.matrix]) })
            });
            sums.add(edge.nodes.to_vec(), table);
        }
        sums
    }

    fn number(&mut self, table: Table) -> usize {
        if let Some(&number) = self.numbers.get(&table) {
            return number;
        }
        self.tables.push(table.clone());
        self.numbers.insert(table, self.tables.len() - 1);
        self.tables.len() - 1
    }

    fn add(&mut self, nodes: Vec<usize>, table: usize) {
        for &node in &nodes {
            self.at[node].insert(self.factors.len());
        }
        self.factors.push((nodes, table));
    }

    /// The nodes that occur in a factor together with `node`, in their order.
    fn around(&self, node: usize) -> Vec<usize> {
        let all = self.at[node].iter().flat_map(|&factor| &self.factors[factor].0);
        let mut around: Vec<usize> = all.copied().filter(|&other| other != node).collect();
        around.sort_unstable();
        around.dedup();
        around
    }

    /// How many entries the sum has that eliminates a node, or some number that is as hopeless.
    fn weight(&mut self, node: usize) -> u64 {
        const HOPELESS: u64 = 1 << 32;
        const MANY: usize = 64;
        if let Some(weight) = self.weights[node] {
            return weight;
        }
        let size = |node: usize| self.sizes[node] as u64;
        let weight = match self.at[node].len() {
            many if many > MANY => HOPELESS + many as u64,
            _ => self.around(node).into_iter().fold(size(node), |product, other| product.saturating_mul(size(other))),
        };
        self.weights[node] = Some(weight);
        weight
    }

    /// Takes a node away, and returns the nodes around it.
    fn eliminate(&mut self, node: usize) -> Vec<usize> {
        let around = self.around(node);
        let mut terms: Vec<Term> = Vec::new();
        for factor in mem::take(&mut self.at[node]) {
            let (nodes, table) = mem::take(&mut self.factors[factor]);
            for other in nodes.iter().filter(|&&other| other != node) {
                self.at[*other].remove(&factor);
            }
            let place = |other: &usize| around.binary_search(other).map_or(0, |place| place + 1);
            terms.push((table, nodes.iter().map(place).collect(), 1));
        }
        terms.sort_unstable();
        terms.dedup_by(|more, kept| {
            let is_equal = (more.0, &more.1) == (kept.0, &kept.1);
            kept.2 += if is_equal { more.2 } else { 0 };
            is_equal
        });
        around.iter().for_each(|&other| self.weights[other] = None);
        let number = match self.known.get(&terms) {
            Some(&number) => number,
            None => {
                let sizes = around.iter().map(|&other| self.sizes[other]).collect();
                let (table, best) = self.least(self.sizes[node], sizes, &terms);
                let table = self.number(table);
                self.known.insert(terms, self.computed.len());
                self.computed.push((table, best));
                self.computed.len() - 1
            }
        };
        self.steps.push((node, around.clone(), number));
        let table = self.computed[number].0;
        if around.is_empty() {
            self.constant = sum(self.constant, self.tables[table].costs[0]);
        } else {
            self.add(around.clone(), table);
        }
        around
    }

    /// The best choice: nodes choose in the other order than they were eliminated.
    fn choice(&self) -> Vec<usize> {
        let mut choice = vec![0; self.sizes.len()];
        for (node, around, number) in self.steps.iter().rev() {
            let entry = around.iter().fold(0, |entry, &other| entry * self.sizes[other] + choice[other]);
            choice[*node] = self.computed[*number].1[entry];
        }
        choice
    }

    /// The least sum over the strategies of a node, for each choice of those around, and the strategy.
    fn least(&mut self, size: usize, sizes: Vec<usize>, terms: &[Term]) -> (Table, Vec<usize>) {
        let strides: Vec<Vec<usize>> = terms
            .iter()
            .map(|(table, places, _)| {
                let mut strides = vec![0; sizes.len() + 1];
                let mut stride = 1;
                for (&place, size) in places.iter().zip(&self.tables[*table].sizes).rev() {
                    strides[place] += stride;
                    stride *= size;
                }
                strides
            })
            .collect();
        let entries = sizes.iter().product::<usize>();
        self.work = self.work.saturating_add((size * entries) as u64);
        let (mut costs, mut best) = (Vec::with_capacity(entries), Vec::with_capacity(entries));
        let mut choice = vec![0; sizes.len()];
        let mut row = vec![0; size];
        for _ in 0..entries {
            row.fill(0);
            for ((table, _, count), strides) in terms.iter().zip(&strides) {
                let first: usize = choice.iter().zip(&strides[1..]).map(|(strategy, stride)| strategy * stride).sum();
                let values = &self.tables[*table].costs;
                for (strategy, total) in row.iter_mut().enumerate() {
                    let cost = values[first + strategy * strides[0]];
                    *total = sum(*total, if cost >= NEVER { NEVER } else { cost.saturating_mul(*count) });
                }
            }
            let (strategy, cost) = row.iter().copied().enumerate().min_by_key(|&(_, cost)| cost).unwrap_or((0, NEVER));
            costs.push(cost);
            best.push(strategy);
            for (strategy, &size) in choice.iter_mut().zip(&sizes).rev() {
                *strategy += 1;
                if *strategy < size {
                    break;
                }
                *strategy = 0;
            }
        }
        (Table { sizes, costs }, best)
    }
}

#[cfg(test)]
mod tests {
    use super::super::small::{layers, least_cost, made};
    use super::*;
    use crate::rng::Random;

    #[test]
    fn a_choice_is_the_cheapest_of_all() {
        let mut random = Random::new(11);
        let mut possible = 0;
        for case in 0..1000 {
            let problem = Problem { limit_bytes: None, ..made(&mut random) };
            let (found, _) = cheapest(&problem, u64::MAX).unwrap();
            let expected = least_cost(&problem, |_| true);
            assert_eq!(expected, found.as_ref().map(|found| found.cost), "{case}");
            assert_eq!(expected, found.and_then(|found| problem.cost(&found.choice)), "{case}");
            possible += usize::from(expected.is_some());
        }
        assert!(possible > 500, "{possible}");
    }

    /// Some nodes of a chain are in groups; alike they may cost more than apart.
    #[test]
    fn groups_choose_alike_only_where_nothing_is_lost() {
        let mut random = Random::new(12);
        let mut seen = [0, 0];
        for case in 0..1000 {
            let problem = Problem { limit_bytes: None, ..made(&mut random) };
            let mut groups: Vec<usize> = Vec::new();
            let mut firsts: Vec<usize> = Vec::new();
            for (number, node) in problem.nodes.iter().enumerate() {
                let like = |&group: &usize| problem.nodes[firsts[group]].costs.len() == node.costs.len();
                let group = (0..firsts.len()).find(like).filter(|_| random.once_in(2)).unwrap_or(firsts.len());
                if group == firsts.len() {
                    firsts.push(number);
                }
                groups.push(group);
            }
            let are_alike =
                |choice: &[usize]| groups.iter().zip(choice).all(|(&group, &one)| one == choice[firsts[group]]);
            let (found, is_alike) = solve_alike(&problem, &groups, 200_000, &Control::default());
            let [least, alike] = [least_cost(&problem, |_| true), least_cost(&problem, are_alike)];
            let cost = found.solution.as_ref().map(|solution| solution.cost);
            assert_eq!((cost, found.bound), (least, least), "{case}");
            assert_eq!(is_alike, least.is_some() && alike == least, "{case}");
            if let Some(solution) = found.solution {
                assert_eq!(problem.cost(&solution.choice), least, "{case}");
                assert!(!is_alike || are_alike(&solution.choice), "{case}");
                seen[usize::from(is_alike)] += 1;
            }
        }
        assert!(seen.iter().all(|&count| count > 100), "{seen:?}");
    }

    #[test]
    fn sums_of_equal_blocks_grow_with_the_logarithm_of_their_number() {
        let [few, many, most] = [12, 96, 768].map(|count| {
            let problem = Problem { limit_bytes: None, ..layers(count, 0, 1) };
            let (found, work) = cheapest(&problem, u64::MAX).unwrap();
            assert_eq!(solve(&problem, u64::MAX, &Control::default()).bound, found.map(|found| found.cost));
            work
        });
        assert!(many <= 3 * few && most <= many + 2 * (many - few), "{few} {many} {most}");
    }

    #[test]
    fn sums_of_more_entries_are_not_computed() {
        let problem = Problem { limit_bytes: None, ..layers(12, 0, 1) };
        assert!(cheapest(&problem, 20).is_none());
        let (found, _) = solve_alike(&problem, &(0..problem.nodes.len()).collect::<Vec<_>>(), 40, &Control::default());
        assert!(found.bound.is_some());
    }
}
