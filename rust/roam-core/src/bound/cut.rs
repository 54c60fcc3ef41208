//! The least that can be live while one operator runs, whatever the order: a minimum cut.
//!
//! When operator v runs, the operators already done form a down-set that holds v's ancestors and
//! neither v nor its descendants. Live are the tensors that cross this set, v's outputs and its
//! workspace. The least such set is a minimum cut (docs/explanation/theory.md has the network and
//! the proofs, with reuse, with tensors that enter or leave the step). Every cut bounds the peak of
//! every order.

use super::flow::{self, INFINITE, Network};
use crate::control::{Stop, Watch};
use crate::graph::Residency;
use crate::liveness::largest_matching;
use crate::plan::BoundRoute;
use crate::problem::{Index, NONE, Op, Problem, Ten};

/// Arcs that one cut may look at.
const WORK_PER_CUT: u64 = 4_000_000;
/// Inputs up to which every choice of reuse is cut on its own.
const MOST_CHOICES: usize = 4;
/// Cuts made side by side; fixed, so that plans do not depend on the number of threads.
pub(super) const BATCH: usize = 8;

/// The least that can be live while one operator runs.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    pub(crate) bytes: u64,
    /// Whether other operators had to be probed for it.
    pub(crate) route: BoundRoute,
    /// The smallest and the largest set of operators that may have run before so that as few bytes
    /// are live (or nearly as few, where the search for the cut was cut short).
    pub(crate) done: Vec<Vec<bool>>,
    /// How many operators, tensors and arcs were looked at.
    pub(crate) work: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Runs before in every order.
    Before,
    /// The operator itself, and what runs after it in every order.
    After,
    Free,
}

/// The least that can be live while `op` runs.
pub(crate) fn cut(problem: &Problem, op: Op, watch: &Watch) -> Result<u64, Stop> {
    Ok(least_between(problem, op, &sides(problem, op), watch)?.bytes)
}

/// The least that can be live while `op` runs, if some operators are known to run before it and
/// others after it.
pub(crate) fn cut_at(problem: &Problem, op: Op, side: &mut [Side], watch: &Watch) -> Result<Cut, Stop> {
    spread(op, Side::Before, problem, side);
    spread(op, Side::After, problem, side);
    cut_between(problem, op, side, watch)
}

/// What must run before an operator, and what after it.
pub(super) fn sides(problem: &Problem, op: Op) -> Vec<Side> {
    let mut side = vec![Side::Free; problem.len()];
    spread(op, Side::Before, problem, &mut side);
    spread(op, Side::After, problem, &mut side);
    side
}

/// Puts the operator on one side, and with it what must be there too.
pub(crate) fn fix(op: Op, at: Side, problem: &Problem, side: &mut [Side]) {
    side[op as usize] = at;
    spread(op, at, problem, side);
}

/// Bytes of the operator's inputs, outputs and workspace.
pub(crate) fn touched(problem: &Problem, op: Op) -> u64 {
    problem.transient(op) + problem.uses.row(op).iter().map(|&tensor| problem.size(tensor)).sum::<u64>()
}

/// A cut whose sets have not been asked for.
pub(super) struct Least {
    pub(super) bytes: u64,
    /// Operators and tensors, and arcs that the flow looked at.
    pub(super) work: u64,
    /// Nodes and arcs of the networks.
    pub(super) built: u64,
    /// The flow, and per free operator its node; `None` where nothing was cut.
    solved: Option<(flow::Flow, Vec<u32>)>,
}

impl Least {
    /// The work that the cut counts against a budget. In large graphs this includes building the
    /// networks; for smaller graphs they are quick to build.
    pub(super) fn cost(&self, problem: &Problem) -> u64 {
        if problem.is_large() { self.work + self.built } else { self.work }
    }
}

/// The least that can be live while `op` runs, if what runs before and after it is as given, and
/// the sets.
pub(super) fn cut_between(problem: &Problem, op: Op, side: &[Side], watch: &Watch) -> Result<Cut, Stop> {
    let least = least_between(problem, op, side, watch)?;
    let (bytes, work, solved) = (least.bytes, least.cost(problem), least.solved);
    let done = solved.map_or_else(Vec::new, |(flow, index)| {
        let set = |reached: Vec<bool>| {
            let is_done = |(at, &node): (&Side, &u32)| match at {
                Side::Before => true,
                Side::After => false,
                Side::Free => reached[node as usize],
            };
            side.iter().zip(&index).map(is_done).collect()
        };
        flow.sides().map(set).into()
    });
    Ok(Cut { bytes, route: BoundRoute::Cut, done, work })
}

/// The same as [`cut_between`], without the sets.
pub(super) fn least_between(problem: &Problem, op: Op, side: &[Side], watch: &Watch) -> Result<Least, Stop> {
    // An input can be reused only if no other user must come later.
    let pairs: Vec<(Ten, Ten)> = problem
        .permissions(op)
        .iter()
        .filter(|&&(_, input, _)| {
            problem.users.row(input).iter().all(|&user| user == op || side[user as usize] != Side::After)
        })
        .map(|&(_, input, output)| (input, output))
        .collect();
    let (choices, discount) = reuse_choices(problem, &pairs);

    let (mut work, mut built) = (WORK_PER_CUT, 0);
    let mut least = Least { bytes: 0, work: 0, built: 0, solved: None };
    for reused in &choices {
        let (network, index, fixed) = network(problem, op, side, reused);
        built += network.size();
        let flow = network.solve(&mut work, watch)?;
        let bytes = (fixed + flow.value + problem.transient(op)) - discount;
        if least.solved.is_none() || bytes < least.bytes {
            least = Least { bytes, solved: Some((flow, index)), ..least };
        }
    }
    least.work = (problem.len() + problem.tensors.len()) as u64 * choices.len() as u64 + (WORK_PER_CUT - work);
    least.built = built;
    Ok(least)
}

/// Marks all that must run before (or after) `op` too; for After `op` itself as well, which does
/// not belong to what has been done when it runs.
pub(super) fn spread(op: Op, mark: Side, problem: &Problem, side: &mut [Side]) {
    let next = if mark == Side::Before { &problem.predecessors } else { &problem.successors };
    if mark == Side::After {
        side[op as usize] = mark;
    }
    let mut stack = vec![op];
    while let Some(at) = stack.pop() {
        for &to in next.row(at) {
            if side[to as usize] == Side::Free {
                side[to as usize] = mark;
                stack.push(to);
            }
        }
    }
}

/// The sets of inputs of which at least one holds all that are reused in the best case, and what
/// to take off the cut for reuse that the sets do not tell apart.
fn reuse_choices(problem: &Problem, pairs: &[(Ten, Ten)]) -> (Vec<Vec<Ten>>, u64) {
    let mut inputs: Vec<Ten> = pairs.iter().map(|&(input, _)| input).collect();
    inputs.dedup();
    let all = largest_matching(pairs);
    if all.len() == inputs.len() {
        return (vec![inputs], 0);
    }
    if inputs.len() > MOST_CHOICES {
        return (vec![Vec::new()], all.iter().map(|&(input, _)| problem.size(input)).sum());
    }
    let sets = (0u32..1 << inputs.len())
        .filter(|set| set.count_ones() as usize == all.len())
        .map(|set| (0..inputs.len()).filter(|i| set >> i & 1 != 0).map(|i| inputs[i]).collect::<Vec<_>>())
        .filter(|chosen| {
            let among: Vec<(Ten, Ten)> = pairs.iter().copied().filter(|(input, _)| chosen.contains(input)).collect();
            largest_matching(&among).len() == all.len()
        })
        .collect();
    (sets, 0)
}

/// The network whose minimum cut, added to the returned bytes, is what crosses the best down-set;
/// and the node of every free operator. The inputs in `reused`, sorted, count only if another user
/// is still to come: else an output takes their memory.
fn network(problem: &Problem, op: Op, side: &[Side], reused: &[Ten]) -> (Network, Vec<u32>, u64) {
    let mut network = Network::new();
    let mut index = vec![NONE; problem.len()];
    for (other, &at) in side.iter().enumerate() {
        if at == Side::Free {
            index[other] = network.add_node();
        }
    }
    let mut fixed = 0;
    for (tensor, item) in problem.tensors.iter().enumerate() {
        let creator = if item.creator == NONE { Side::Before } else { side[item.creator as usize] };
        if creator == Side::After {
            continue;
        }
        let forgives = reused.binary_search(&Ten::at(tensor)).is_ok();
        let users = problem.users.row(Ten::at(tensor)).iter().filter(|&&user| !(forgives && user == op));
        let must_cross =
            item.residency == Residency::Leaves || users.clone().any(|&user| side[user as usize] == Side::After);
        let from = if creator == Side::Before { flow::SOURCE } else { index[item.creator as usize] };
        if must_cross {
            if creator == Side::Before {
                fixed += item.size;
            } else {
                network.add_arc(from, flow::SINK, item.size, 0);
            }
            continue;
        }
        let mut free = users.filter(|&&user| side[user as usize] == Side::Free).peekable();
        let Some(&first) = free.next() else { continue };
        if free.peek().is_none() {
            network.add_arc(from, index[first as usize], item.size, 0);
        } else {
            let node = network.add_node();
            network.add_arc(from, node, item.size, 0);
            network.add_arc(node, index[first as usize], INFINITE, 0);
            for &user in free {
                network.add_arc(node, index[user as usize], INFINITE, 0);
            }
        }
    }
    for (other, &at) in side.iter().enumerate() {
        if at == Side::Free {
            for &before in problem.predecessors.row(other as u32) {
                if side[before as usize] == Side::Free {
                    network.add_arc(index[other], index[before as usize], INFINITE, 0);
                }
            }
        }
    }
    (network, index, fixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In large graphs the time that networks take to build would not be seen by budgets that count
    /// what the flow looks at alone.
    #[test]
    fn networks_count_against_budgets_in_large_graphs() {
        let watch = Watch::default();
        for (operators, is_large) in [(1000, false), (26_000, true)] {
            let step = crate::synthetic::steps::Family::Parallel.step(operators).expect("few bytes");
            let problem = Problem::new(&step, false);
            assert_eq!(problem.is_large(), is_large);
            let least = least_between(&problem, 50, &sides(&problem, 50), &watch).expect("not stopped");
            // All but one chain is free: a node each, and arcs for constraints and tensors.
            assert!(least.built > 3 * operators, "{}", least.built);
            assert_eq!(least.cost(&problem), least.work + if is_large { least.built } else { 0 });
        }
    }
}
