//! Exact lifetimes and live bytes of an order.
//!
//! A step-local tensor is live from its creator's step to its last use inclusive, one that leaves
//! from its creation to the end, one that enters from step 0 to its last use. While an operator
//! runs, its inputs, its outputs and its workspace coexist; a used reuse pair counts once there.

use crate::graph::{Graph, Residency};
use crate::ids::OperatorId;
use crate::problem::{NONE, Op, Problem, Ten};
use thiserror::Error;

/// Why a list of operators is no order of a graph.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OrderError {
    /// The list is too short or too long.
    #[error("an order of this graph has {expected} operators, not {found}")]
    Length {
        /// Operators in the graph.
        expected: usize,
        /// Operators in the list.
        found: usize,
    },
    /// The graph has no such operator.
    #[error("operator {0:?} does not exist")]
    Unknown(OperatorId),
    /// An operator is listed twice.
    #[error("operator {0:?} is listed twice")]
    Twice(OperatorId),
    /// A constraint is broken.
    #[error("operator {after:?} must run after operator {before:?}")]
    Constraint {
        /// Must run first.
        before: OperatorId,
        /// Must run later.
        after: OperatorId,
    },
}

/// Live bytes at every step of an order, persistent tensors left out, workspace included, without
/// reuse. One entry per operator.
///
/// # Errors
/// [`OrderError`] where the list is not an order that the graph permits.
pub fn live_bytes(graph: &Graph, order: &[OperatorId]) -> Result<Vec<u64>, OrderError> {
    let order = positions(graph, order)?;
    Ok(Profile::new(&Problem::new(graph, false), &order).live)
}

/// The order in program positions, checked.
fn positions(graph: &Graph, order: &[OperatorId]) -> Result<Vec<Op>, OrderError> {
    let expected = graph.operators().len();
    if order.len() != expected {
        return Err(OrderError::Length { expected, found: order.len() });
    }
    let mut done = vec![false; expected];
    for &id in order {
        match done.get(id.index()) {
            None => return Err(OrderError::Unknown(id)),
            Some(true) => return Err(OrderError::Twice(id)),
            Some(false) => {}
        }
        if let Some(&before) = graph.predecessors(id).iter().find(|before| !done[before.index()]) {
            return Err(OrderError::Constraint { before, after: id });
        }
        done[id.index()] = true;
    }
    Ok(order.iter().map(|&id| graph.operator(id).position).collect())
}

/// When each tensor is live: the half-open interval of steps [start, end).
#[derive(Clone, Debug)]
pub(crate) struct Lifetimes {
    pub(crate) start: Vec<u32>,
    pub(crate) end: Vec<u32>,
}

impl Lifetimes {
    pub(crate) fn new(problem: &Problem, order: &[Op]) -> Self {
        let steps = order.len() as u32;
        let mut step = vec![0u32; order.len()];
        for (at, &op) in order.iter().enumerate() {
            step[op as usize] = at as u32;
        }
        let mut start = Vec::with_capacity(problem.tensors.len());
        let mut end = Vec::with_capacity(problem.tensors.len());
        for (tensor, item) in problem.tensors.iter().enumerate() {
            let from = if item.creator == NONE { 0 } else { step[item.creator as usize] };
            let last = problem.users.row(tensor as u32).iter().map(|&op| step[op as usize]).max();
            start.push(from);
            end.push(match item.residency {
                Residency::Leaves => steps,
                _ => (last.unwrap_or(0).max(from) + 1).min(steps),
            });
        }
        Lifetimes { start, end }
    }
}

/// What an order costs.
#[derive(Clone, Debug)]
pub(crate) struct Profile {
    pub(crate) lifetimes: Lifetimes,
    /// Live bytes per step: the pool's tensors, the others, workspace.
    pub(crate) live: Vec<u64>,
    /// Reuse pairs (input, output), in execution order.
    pub(crate) pairs: Vec<(Ten, Ten)>,
    /// Most live bytes.
    pub(crate) peak: u64,
    /// Most live bytes of the pool's tensors.
    pub(crate) pool_peak: u64,
    /// Most live bytes of everything else.
    pub(crate) outside_peak: u64,
}

impl Profile {
    /// Uses reuse wherever the problem permits it, at every operator as much as can be.
    pub(crate) fn new(problem: &Problem, order: &[Op]) -> Self {
        let lifetimes = Lifetimes::new(problem, order);
        let steps = order.len();
        // Changes at each step; wrapping, since a sum that is exact modulo 2^64 and below 2^63 is exact.
        let mut pool = vec![0u64; steps + 1];
        let mut outside = vec![0u64; steps + 1];
        for (tensor, item) in problem.tensors.iter().enumerate() {
            let changes = if item.in_pool() { &mut pool } else { &mut outside };
            let (from, to) = (lifetimes.start[tensor] as usize, lifetimes.end[tensor] as usize);
            changes[from] = changes[from].wrapping_add(item.size);
            changes[to] = changes[to].wrapping_sub(item.size);
        }
        let mut profile = Profile {
            lifetimes,
            live: Vec::with_capacity(steps),
            pairs: Vec::new(),
            peak: 0,
            pool_peak: 0,
            outside_peak: 0,
        };
        let (mut pool_now, mut outside_now) = (0u64, 0u64);
        for (step, &op) in order.iter().enumerate() {
            pool_now = pool_now.wrapping_add(pool[step]);
            outside_now = outside_now.wrapping_add(outside[step]);
            let mut saved = 0;
            if !problem.reuse.is_empty() {
                let end = &profile.lifetimes.end;
                let dying = problem
                    .permissions(op)
                    .iter()
                    .filter(|(_, input, _)| end[*input as usize] as usize == step + 1)
                    .map(|&(_, input, output)| (input, output))
                    .collect::<Vec<_>>();
                for pair in largest_matching(&dying) {
                    saved += problem.size(pair.0);
                    profile.pairs.push(pair);
                }
            }
            let in_pool = pool_now - saved;
            let beside = outside_now + problem.workspace[op as usize];
            profile.live.push(in_pool + beside);
            profile.peak = profile.peak.max(in_pool + beside);
            profile.pool_peak = profile.pool_peak.max(in_pool);
            profile.outside_peak = profile.outside_peak.max(beside);
        }
        profile
    }

    /// No layout of this order takes fewer bytes inside and outside the pool.
    pub(crate) fn least_total(&self) -> u64 {
        self.pool_peak + self.outside_peak
    }
}

/// Disjoint pairs with the most bytes, out of pairs sorted by input. Paired tensors have equal sizes, so tensors of different
/// sizes never compete, and the most pairs are the most bytes: augmenting paths (Kuhn) find them.
pub(crate) fn largest_matching(pairs: &[(Ten, Ten)]) -> Vec<(Ten, Ten)> {
    if pairs.len() <= 1 {
        return pairs.to_vec();
    }
    let mut inputs: Vec<Ten> = pairs.iter().map(|&(input, _)| input).collect();
    inputs.dedup();
    let mut outputs: Vec<Ten> = pairs.iter().map(|&(_, output)| output).collect();
    outputs.sort_unstable();
    outputs.dedup();
    if inputs.len() == pairs.len() && outputs.len() == pairs.len() {
        // Disjoint already, as in operators over whole lists of tensors.
        return pairs.to_vec();
    }
    let choices: Vec<Vec<usize>> = inputs
        .iter()
        .map(|wanted| {
            pairs
                .iter()
                .filter(|(input, _)| input == wanted)
                .filter_map(|(_, output)| outputs.binary_search(output).ok())
                .collect()
        })
        .collect();
    let mut taken_by = vec![usize::MAX; outputs.len()];
    for input in 0..inputs.len() {
        let mut seen = vec![false; outputs.len()];
        augment(input, &choices, &mut taken_by, &mut seen);
    }
    let mut matched: Vec<(Ten, Ten)> = taken_by
        .iter()
        .zip(&outputs)
        .filter(|(input, _)| **input != usize::MAX)
        .map(|(&input, &output)| (inputs[input], output))
        .collect();
    matched.sort_unstable();
    matched
}

/// One augmenting path from a free input, breadth-first so that no recursion can run deep.
fn augment(input: usize, choices: &[Vec<usize>], taken_by: &mut [usize], seen: &mut [bool]) {
    let mut reached_from = vec![usize::MAX; taken_by.len()];
    let mut queue = vec![input];
    let mut head = 0;
    while head < queue.len() {
        let from = queue[head];
        head += 1;
        for &output in &choices[from] {
            if seen[output] {
                continue;
            }
            seen[output] = true;
            reached_from[output] = from;
            if taken_by[output] != usize::MAX {
                queue.push(taken_by[output]);
                continue;
            }
            // Turn the path round, back to the free input.
            let mut end = output;
            loop {
                let owner = reached_from[end];
                let previous = taken_by.iter().position(|&holder| holder == owner);
                taken_by[end] = owner;
                match previous {
                    Some(earlier) if owner != input => end = earlier,
                    _ => return,
                }
            }
        }
    }
}
