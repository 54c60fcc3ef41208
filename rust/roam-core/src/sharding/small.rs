//! Small problems, and all their choices: what tests compare with.

use super::problem::{Edge, FORBIDDEN, Node, Problem};
use crate::rng::Random;

/// One of the two kinds below.
pub(super) fn made(random: &mut Random) -> Problem {
    if random.once_in(2) { loose(random) } else { dense(random) }
}

/// A problem of few nodes: chains and circles, equal splits that must agree, memory that is short.
fn loose(random: &mut Random) -> Problem {
    let count = 2 + random.below(5) as usize;
    let mut problem = Problem::default();
    for _ in 0..count {
        let strategies = 1 + random.below(3) as usize;
        let start = random.below(5) as usize;
        let cost = |random: &mut Random| if random.once_in(9) { FORBIDDEN } else { random.below(30) as i64 - 5 };
        problem.nodes.push(Node {
            costs: (0..strategies).map(|_| cost(random)).collect(),
            bytes: (0..strategies).map(|_| random.below(6) as i64).collect(),
            lifetime: start..start + random.below(4) as usize,
        });
    }
    for _ in 0..random.below(2 * count as u64) {
        let nodes = [0; 2].map(|_| random.below(count as u64) as usize);
        let [rows, columns] = nodes.map(|node| problem.nodes[node].costs.len());
        let must_agree = random.once_in(3);
        let cost = |at: usize, random: &mut Random| match random.below(8) {
            _ if must_agree && at / columns != at % columns => FORBIDDEN,
            0 => FORBIDDEN,
            more => 3 * more as i64 - 6,
        };
        if nodes[0] != nodes[1] {
            let matrix = (0..rows * columns).map(|at| cost(at, random)).collect();
            problem.edges.push(Edge { nodes, matrix: problem.matrices.len() });
            problem.matrices.push(matrix);
        }
    }
    problem.limit_bytes = (!random.once_in(4)).then(|| 3 + random.below(12) as i64);
    problem
}

/// A problem of few nodes that all have to do with each other, so that little follows from rules.
fn dense(random: &mut Random) -> Problem {
    let count = 4 + random.below(3) as usize;
    let mut problem = Problem { limit_bytes: Some(4 * count as i64 + random.below(20) as i64), ..Problem::default() };
    let cost = |random: &mut Random, most: u64| if random.once_in(30) { FORBIDDEN } else { random.below(most) as i64 };
    for node in 0..count {
        let start = random.below(6) as usize;
        problem.nodes.push(Node {
            costs: (0..3).map(|_| cost(random, 20)).collect(),
            bytes: (0..3).map(|_| random.below(20) as i64).collect(),
            lifetime: start..start + 2 + random.below(5) as usize,
        });
        for other in 0..node {
            if !random.once_in(3) {
                problem.edges.push(Edge { nodes: [other, node], matrix: problem.matrices.len() });
                problem.matrices.push((0..9).map(|_| cost(random, 40)).collect());
            }
        }
    }
    problem
}

/// What the cheapest choice costs that is allowed, keeps to the limit, and is one of those asked for.
pub(super) fn least_cost(problem: &Problem, is_asked: impl Fn(&[usize]) -> bool) -> Option<i64> {
    let mut least: Option<i64> = None;
    let mut choice = vec![0; problem.nodes.len()];
    loop {
        if let Some(cost) = problem.cost(&choice).filter(|_| is_asked(&choice) && problem.is_within(&choice)) {
            least = Some(least.map_or(cost, |least| least.min(cost)));
        }
        let Some(node) = (0..choice.len()).find(|&node| choice[node] + 1 < problem.nodes[node].costs.len()) else {
            return least;
        };
        choice[..node].fill(0);
        choice[node] += 1;
    }
}

/// Equal blocks one after the other, whose nodes are alive in the forward half and, the other way
/// round, in the backward half; all have to do with a node that is shared.
pub(super) fn layers(count: usize, limit_bytes: i64, seed: u64) -> Problem {
    let mut random = Random::new(seed);
    let cost = |at: usize, random: &mut Random| if at % 4 == 0 { 0 } else { 4 + random.below(9) as i64 };
    let mut problem = Problem { limit_bytes: Some(limit_bytes), ..Problem::default() };
    problem.matrices = (0..4).map(|_| (0..9).map(|at| cost(at, &mut random)).collect()).collect();
    let costs: Vec<Vec<i64>> = (0..4).map(|_| (0..3).map(|_| 1 + random.below(20) as i64).collect()).collect();
    let end = 8 * count;
    let node = |costs: &[i64], lifetime| Node { costs: costs.to_vec(), bytes: vec![9, 4, 1], lifetime };
    problem.nodes.push(node(&costs[3], 0..end));
    for layer in 0..count {
        let first = problem.nodes.len();
        for (number, costs) in costs.iter().enumerate() {
            let time = 4 * layer + number;
            problem.nodes.push(node(costs, time..if number == 3 { time + 2 } else { end - time }));
        }
        for (ends, matrix) in [([0, 1], 0), ([1, 2], 1), ([2, 3], 2), ([0, 3], 3)] {
            problem.edges.push(Edge { nodes: ends.map(|end| first + end), matrix });
        }
        problem.edges.push(Edge { nodes: [0, first + 1], matrix: 1 });
        if layer > 0 {
            problem.edges.push(Edge { nodes: [first - 1, first], matrix: 2 });
        }
    }
    problem
}
