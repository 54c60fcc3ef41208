//! The problem: nodes with strategies, costs of pairs, and a memory limit.

use std::ops::Range;

/// A cost from here on means that something is not allowed.
pub const FORBIDDEN: i64 = 100_000_000_000_000_000;

/// An operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// What each strategy costs.
    pub costs: Vec<i64>,
    /// Bytes that each strategy takes while the node is alive.
    pub bytes: Vec<i64>,
    /// Times at which it is alive.
    pub lifetime: Range<usize>,
}

/// What the strategies of two nodes cost together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// Two different nodes.
    pub nodes: [usize; 2],
    /// Which of the problem's matrices: a row per strategy of the first node.
    pub matrix: usize,
}

/// One strategy per node is to be chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problem {
    /// For people.
    pub name: String,
    /// All nodes.
    pub nodes: Vec<Node>,
    /// All edges; two nodes may have several.
    pub edges: Vec<Edge>,
    /// Cost matrices, row by row.
    pub matrices: Vec<Vec<i64>>,
    /// The most bytes at any time; `None` where there is no limit.
    pub limit_bytes: Option<i64>,
}

impl Problem {
    /// All nodes are dead from this time on.
    pub fn end(&self) -> usize {
        self.nodes.iter().map(|node| node.lifetime.end).max().unwrap_or(0)
    }

    /// What a choice of a strategy per node costs; `None` where it is not allowed, whatever it takes.
    pub fn cost(&self, choice: &[usize]) -> Option<i64> {
        let of_nodes = self.nodes.iter().zip(choice).map(|(node, &strategy)| node.costs[strategy]);
        let of_edges = self.edges.iter().map(|edge| {
            let [row, column] = edge.nodes.map(|node| choice[node]);
            self.matrices[edge.matrix][row * self.nodes[edge.nodes[1]].costs.len() + column]
        });
        of_nodes
            .chain(of_edges)
            .try_fold(0i64, |sum, cost| if cost >= FORBIDDEN { None } else { sum.checked_add(cost) })
    }

    /// The most bytes that a choice takes at any time.
    pub fn peak_bytes(&self, choice: &[usize]) -> i64 {
        let mut bytes = vec![0i64; self.end() + 1];
        for (node, &strategy) in self.nodes.iter().zip(choice) {
            bytes[node.lifetime.start] += node.bytes[strategy];
            bytes[node.lifetime.end] -= node.bytes[strategy];
        }
        let mut live = 0;
        bytes
            .iter()
            .map(|more| {
                live += more;
                live
            })
            .max()
            .unwrap_or(0)
    }

    /// Whether a choice keeps to the memory limit.
    pub fn is_within(&self, choice: &[usize]) -> bool {
        self.limit_bytes.is_none_or(|limit| self.peak_bytes(choice) <= limit)
    }
}
