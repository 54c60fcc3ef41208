//! Exact lifetimes and live bytes of an order.
//!
//! A step-local tensor is live from its creator's step to its last use inclusive, one that leaves
//! from its creation to the end, one that enters from step 0 to its last use. While an operator
//! runs, its inputs, its outputs and its workspace coexist; a used reuse pair counts once there.

use crate::graph::{Graph, OperatorId, Residency};
use crate::problem::{Index, NONE, Op, Problem, Ten, step_by_operator};
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
        let step = step_by_operator(order);
        let mut start = Vec::with_capacity(problem.tensors.len());
        let mut end = Vec::with_capacity(problem.tensors.len());
        for (tensor, item) in problem.tensors.iter().enumerate() {
            let from = if item.creator == NONE { 0 } else { step[item.creator as usize] };
            let last = problem.users.row(Ten::at(tensor)).iter().map(|&op| step[op as usize]).max();
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
    pub(crate) unpooled_peak: u64,
}

impl Profile {
    /// Uses reuse wherever the problem permits it, at every operator as much as can be.
    pub(crate) fn new(problem: &Problem, order: &[Op]) -> Self {
        Self::choosing(problem, order, largest_matching)
    }

    /// At every step with permitted pairs whose inputs die there, reuses those that `choose` says,
    /// in execution order.
    pub(crate) fn choosing(
        problem: &Problem,
        order: &[Op],
        mut choose: impl FnMut(&[(Ten, Ten)]) -> Vec<(Ten, Ten)>,
    ) -> Self {
        let lifetimes = Lifetimes::new(problem, order);
        let steps = order.len();
        // Changes at each step; wrapping, since a sum that is exact modulo 2^64 and below 2^63 is
        // exact.
        let mut pool = vec![0u64; steps + 1];
        let mut unpooled = vec![0u64; steps + 1];
        for (tensor, item) in problem.tensors.iter().enumerate() {
            let changes = if item.in_pool() { &mut pool } else { &mut unpooled };
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
            unpooled_peak: 0,
        };
        let (mut pool_now, mut unpooled_now) = (0u64, 0u64);
        for (step, &op) in order.iter().enumerate() {
            pool_now = pool_now.wrapping_add(pool[step]);
            unpooled_now = unpooled_now.wrapping_add(unpooled[step]);
            let (mut saved, mut saved_unpooled) = (0, 0);
            if !problem.reuse.is_empty() {
                let end = &profile.lifetimes.end;
                let dying = problem
                    .permissions(op)
                    .iter()
                    .filter(|(_, input, _)| end[input.index()] as usize == step + 1)
                    .map(|&(_, input, output)| (input, output))
                    .collect::<Vec<_>>();
                for pair in choose(&dying) {
                    let input = &problem.tensors[pair.0.index()];
                    *if input.in_pool() { &mut saved } else { &mut saved_unpooled } += input.size;
                    profile.pairs.push(pair);
                }
            }
            let in_pool = pool_now - saved;
            let beside = unpooled_now - saved_unpooled + problem.workspace[op as usize];
            profile.live.push(in_pool + beside);
            profile.peak = profile.peak.max(in_pool + beside);
            profile.pool_peak = profile.pool_peak.max(in_pool);
            profile.unpooled_peak = profile.unpooled_peak.max(beside);
        }
        profile
    }

    /// No layout of this order has a smaller step-local total.
    pub(crate) fn least_total(&self) -> u64 {
        self.pool_peak + self.unpooled_peak
    }
}

/// Disjoint pairs with the most bytes, out of pairs sorted by input. Paired tensors have equal
/// sizes, so tensors of different sizes never compete, and the most pairs are the most bytes:
/// augmenting paths (Kuhn) find them.
pub(crate) fn largest_matching(pairs: &[(Ten, Ten)]) -> Vec<(Ten, Ten)> {
    if pairs.len() <= 1 {
        return pairs.to_vec();
    }
    let mut outputs: Vec<Ten> = pairs.iter().map(|&(_, output)| output).collect();
    outputs.sort_unstable();
    outputs.dedup();
    let by_input: Vec<&[(Ten, Ten)]> = pairs.chunk_by(|a, b| a.0 == b.0).collect();
    if by_input.len() == pairs.len() && outputs.len() == pairs.len() {
        // Disjoint already, as in operators over whole lists of tensors.
        return pairs.to_vec();
    }
    let place = |&(_, output): &(Ten, Ten)| outputs.partition_point(|&other| other < output);
    let choices = by_input.iter().map(|of_input| of_input.iter().map(place).collect()).collect();
    let mut matching = Matching::new(choices, outputs.len());
    for input in 0..by_input.len() {
        matching.augment(input);
    }
    let matched = by_input.iter().zip(&matching.holds).filter(|(_, output)| **output != NOBODY);
    matched.map(|(of_input, &output)| (of_input[0].0, outputs[output])).collect()
}

/// Stands for no input, and for no output.
const NOBODY: usize = usize::MAX;

/// A matching of inputs with outputs that grows input by input.
struct Matching {
    /// The outputs that each input may take.
    choices: Vec<Vec<usize>>,
    /// The output of each input.
    holds: Vec<usize>,
    /// The input of each output.
    held_by: Vec<usize>,
    /// The input from which this search came to the output.
    reached_from: Vec<usize>,
    /// The last search that came to the output.
    seen_by: Vec<usize>,
    /// Outputs from which a search has found no end. None ever will, so they are left out from then
    /// on.
    closed: Vec<bool>,
}

impl Matching {
    fn new(choices: Vec<Vec<usize>>, outputs: usize) -> Self {
        Matching {
            holds: vec![NOBODY; choices.len()],
            choices,
            held_by: vec![NOBODY; outputs],
            reached_from: vec![NOBODY; outputs],
            seen_by: vec![NOBODY; outputs],
            closed: vec![false; outputs],
        }
    }

    /// One augmenting path from a free input, breadth-first so that no recursion can run deep.
    fn augment(&mut self, input: usize) {
        let mut queue = vec![input];
        let mut met = Vec::new();
        let mut head = 0;
        while head < queue.len() {
            let from = queue[head];
            head += 1;
            for &output in &self.choices[from] {
                if self.closed[output] || self.seen_by[output] == input {
                    continue;
                }
                self.seen_by[output] = input;
                self.reached_from[output] = from;
                met.push(output);
                if self.held_by[output] == NOBODY {
                    return self.turn_round(output);
                }
                queue.push(self.held_by[output]);
            }
        }
        for output in met {
            self.closed[output] = true;
        }
    }

    /// Matches every input on the way back with the output that was reached from it.
    fn turn_round(&mut self, mut output: usize) {
        while output != NOBODY {
            let input = self.reached_from[output];
            self.held_by[output] = input;
            output = std::mem::replace(&mut self.holds[input], output);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Random;

    fn most(pairs: &[(Ten, Ten)]) -> usize {
        let Some((first, others)) = pairs.split_first() else { return 0 };
        let apart: Vec<_> = others.iter().copied().filter(|pair| pair.0 != first.0 && pair.1 != first.1).collect();
        most(others).max(1 + most(&apart))
    }

    #[test]
    fn matchings_are_disjoint_and_largest() {
        let mut random = Random::new(3);
        for _ in 0..5000 {
            let (inputs, outputs) = (1 + random.below(6), 1 + random.below(6));
            let mut pairs: Vec<(Ten, Ten)> = (0..random.below(14))
                .map(|_| (Ten::at(random.below(inputs) as usize), Ten::at(100 + random.below(outputs) as usize)))
                .collect();
            pairs.sort_unstable();
            pairs.dedup();
            let matched = largest_matching(&pairs);
            assert_eq!(matched.len(), most(&pairs));
            assert!(matched.iter().all(|pair| pairs.contains(pair)));
            assert!(matched.windows(2).all(|two| two[0].0 < two[1].0));
            let mut taken: Vec<Ten> = matched.iter().map(|pair| pair.1).collect();
            taken.sort_unstable();
            taken.dedup();
            assert_eq!(taken.len(), matched.len());
        }
    }
}
