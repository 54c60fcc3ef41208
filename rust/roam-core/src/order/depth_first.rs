//! Depth-first order from the step's ends, after Sethi and Ullman (The generation of optimal code
//! for arithmetic expressions, 1970): of an operator's inputs, compute first the one whose
//! computation needs much and leaves little.
//!
//! On trees this is optimal without in-place effects; on the graphs of training steps, which share
//! their intermediate results, it is a heuristic. Updates go right after the last operator of the
//! other phases that they wait for.

use crate::control::{STRIDE, Stop, Watch};
use crate::problem::{Op, Problem};
use std::cmp::Reverse;

pub(super) fn depth_first(problem: &Problem, watch: &Watch) -> Result<Vec<Op>, Stop> {
    let count = problem.len();
    // Per operator: bytes it needs if nothing is shared, bytes it leaves, and the position of the
    // last operator outside the update phase that it waits for.
    let mut need = vec![0u64; count];
    let mut left = vec![0u64; count];
    let mut since = vec![0u32; count];
    let mut inputs: Vec<Vec<Op>> = Vec::with_capacity(count);
    for op in 0..count as Op {
        if op as usize % STRIDE == 0 {
            watch.check()?;
        }
        let at = op as usize;
        let mut before = problem.predecessors.row(op).to_vec();
        before.sort_by_key(|&p| (Reverse(need[p as usize].saturating_sub(left[p as usize])), p));
        let mut held = 0u64;
        for &p in &before {
            need[at] = need[at].max(held.saturating_add(need[p as usize]));
            held = held.saturating_add(left[p as usize]);
        }
        need[at] = need[at].max(held.saturating_add(problem.transient(op)));
        left[at] = problem.creates.row(op).iter().map(|&t| problem.size(t)).sum();
        since[at] =
            if problem.is_update[at] { before.iter().map(|&p| since[p as usize]).max().unwrap_or(0) } else { op };
        inputs.push(before);
    }

    let mut ends: Vec<Op> = (0..count as Op).filter(|&op| problem.successors.row(op).is_empty()).collect();
    ends.sort_by_key(|&op| (since[op as usize], op));
    let mut order = Vec::with_capacity(count);
    let mut seen = vec![false; count];
    let mut stack: Vec<(Op, usize)> = Vec::new();
    for end in ends {
        seen[end as usize] = true;
        stack.push((end, 0));
        while let Some((op, next)) = stack.pop() {
            let Some(&input) = inputs[op as usize].get(next) else {
                order.push(op);
                continue;
            };
            stack.push((op, next + 1));
            if !seen[input as usize] {
                seen[input as usize] = true;
                stack.push((input, 0));
            }
        }
    }
    Ok(order)
}
