//! Independent segments: where every order is in the same state.
//!
//! An operator is *memory-insensitive* (Shu et al., arXiv 2310.19295, section 4) if every other
//! operator must run before it or after it. It has the same place in every order, so what runs
//! before it and what runs after it can be ordered on their own, and the peak is the larger of the
//! two.
//!
//! Training steps have hardly any such operator, because weight gradients and their updates hang
//! off the backward pass and may wait as long as they like. So segments are looked for on the
//! *trunk* only; all other operators are set *aside*. The trunk is all that lies on a path between
//! the two ends of the longest chain of operators outside the update phase. (In
//! [`super::hill_valley`] a trunk is all operators outside the updates.)

use crate::problem::{NONE, Op, Problem};

/// Operators that have the same place in every order, in program order.
pub(super) fn insensitive(problem: &Problem) -> Vec<Op> {
    cuts(problem, &vec![true; problem.len()])
}

/// Operators of the trunk that have the same place in every order of the trunk, in program order.
pub(super) fn insensitive_on_trunk(problem: &Problem) -> Vec<Op> {
    cuts(problem, &trunk(problem))
}

/// The operators inside that are comparable with all others inside, in program order; ways between
/// operators inside must stay inside. Takes time linear in operators and constraints.
///
/// Program order is topological, so what must run before an operator lies before it there. All that
/// lies before `op` must run before it just if nothing but `op` ends what lies up to it: if each
/// earlier operator has a successor not behind `op`. In the same way for what lies behind.
fn cuts(problem: &Problem, inside: &[bool]) -> Vec<Op> {
    let count = problem.len();
    let first_after = |op: Op| problem.successors.row(op).iter().copied().filter(|&o| inside[o as usize]).min();
    let last_before = |op: Op| problem.predecessors.row(op).iter().copied().filter(|&o| inside[o as usize]).max();
    // The farthest place that an operator behind `op` must wait for; `None` where one waits for
    // nothing.
    let mut waits_for = vec![Some(NONE); count];
    let mut least = Some(NONE);
    for op in (0..count as Op).rev().filter(|&op| inside[op as usize]) {
        waits_for[op as usize] = least;
        least = least.min(last_before(op));
    }
    let mut cuts = Vec::new();
    // The place by which every operator so far has been followed by another.
    let mut followed_by = 0;
    for op in 0..count as Op {
        if !inside[op as usize] {
            continue;
        }
        if followed_by <= op && waits_for[op as usize] >= Some(op) {
            cuts.push(op);
        }
        followed_by = followed_by.max(first_after(op).unwrap_or(NONE));
    }
    cuts
}

/// All operators on a way from the first to the last of the longest chain outside the update phase,
/// these included. Ways between two of them stay among them.
fn trunk(problem: &Problem) -> Vec<bool> {
    let count = problem.len();
    let mut depth = vec![0u32; count];
    let mut deepest_before = vec![NONE; count];
    let mut end = NONE;
    let only_updates = problem.is_update.iter().all(|&is_update| is_update);
    for op in 0..count as Op {
        for &before in problem.predecessors.row(op) {
            if depth[before as usize] + 1 > depth[op as usize] {
                depth[op as usize] = depth[before as usize] + 1;
                deepest_before[op as usize] = before;
            }
        }
        let may_end = only_updates || !problem.is_update[op as usize];
        if may_end && (end == NONE || depth[op as usize] >= depth[end as usize]) {
            end = op;
        }
    }
    if end == NONE {
        return Vec::new();
    }
    let mut start = end;
    while deepest_before[start as usize] != NONE {
        start = deepest_before[start as usize];
    }
    let mut follows_start = vec![false; count];
    follows_start[start as usize] = true;
    for op in start..count as Op {
        follows_start[op as usize] |= problem.predecessors.row(op).iter().any(|&before| follows_start[before as usize]);
    }
    let mut precedes_end = vec![false; count];
    precedes_end[end as usize] = true;
    for op in (0..end).rev() {
        precedes_end[op as usize] |= problem.successors.row(op).iter().any(|&after| precedes_end[after as usize]);
    }
    (0..count).map(|op| follows_start[op] && precedes_end[op]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Operator, Phase};
    use crate::rng::Random;

    /// Operators without tensors, ordered by random control edges.
    fn random_problem(random: &mut Random) -> Problem {
        let count = 1 + random.below(24);
        let mut builder = crate::graph::GraphBuilder::new("random", "cpu", 1);
        for position in 0..count {
            let operator =
                Operator::new("", position as u32, if random.once_in(4) { Phase::Update } else { Phase::Forward });
            builder.operator(operator).expect("few operators");
        }
        let near = 1 + random.below(4);
        for after in 1..count {
            for _ in 0..random.below(4) {
                let before = after - 1 - random.below(near).min(after - 1);
                let id = |at: u64| crate::graph::OperatorId(at as u32);
                builder.control(id(before), id(after));
            }
        }
        Problem::new(&builder.build().expect("valid by construction"), false)
    }

    /// `reaches[a][b]`: a must run before b.
    fn closure(problem: &Problem) -> Vec<Vec<bool>> {
        let count = problem.len();
        let mut reaches = vec![vec![false; count]; count];
        for a in (0..count).rev() {
            for &next in problem.successors.row(a as Op) {
                reaches[a][next as usize] = true;
                let further = reaches[next as usize].clone();
                reaches[a].iter_mut().zip(further).for_each(|(reached, via_next)| *reached |= via_next);
            }
        }
        reaches
    }

    #[test]
    fn cuts_are_the_operators_comparable_with_all_others() {
        let mut random = Random::new(1);
        let (mut with_branches, mut found) = (0, 0);
        for _ in 0..4000 {
            let problem = random_problem(&mut random);
            let reaches = closure(&problem);
            let trunk = trunk(&problem);
            with_branches += usize::from(trunk.contains(&false));
            let all = vec![true; problem.len()];
            for (inside, cuts) in [(all, insensitive(&problem)), (trunk, insensitive_on_trunk(&problem))] {
                let inside: Vec<usize> = (0..problem.len()).filter(|&op| inside[op]).collect();
                let expected: Vec<Op> = inside
                    .iter()
                    .filter(|&&a| inside.iter().all(|&b| a == b || reaches[a][b] || reaches[b][a]))
                    .map(|&op| op as Op)
                    .collect();
                assert_eq!(cuts, expected);
                found += cuts.len();
            }
        }
        assert!(with_branches > 1000 && found > 10_000, "{with_branches} graphs with branches, {found} cuts");
    }

    #[test]
    fn the_trunk_is_convex() {
        let mut random = Random::new(2);
        for _ in 0..2000 {
            let problem = random_problem(&mut random);
            let (reaches, inside) = (closure(&problem), trunk(&problem));
            for a in (0..problem.len()).filter(|&a| inside[a]) {
                for b in (0..problem.len()).filter(|&b| inside[b]) {
                    assert!((0..problem.len()).all(|via| inside[via] || !(reaches[a][via] && reaches[via][b])));
                }
            }
        }
    }
}
