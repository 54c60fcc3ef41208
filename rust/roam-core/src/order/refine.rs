//! Peak-driven refinement: let the order pass the minimum cut at its peak.
//!
//! The cut says which operators to have done when the peak's operator runs. Running those first,
//! then the operator, then the others, each part in its old order, is a valid order that is as good
//! as can be at this operator. It is kept where the whole becomes better.

use crate::bound::{self, Bounds};
use crate::control::{Stop, Watch};
use crate::liveness::Profile;
use crate::problem::{Op, Problem};
use std::cmp::Reverse;

/// Rounds at most; every round makes one cut and two profiles.
const MOST_ROUNDS: usize = 24;

/// Better orders have smaller scores.
fn score(profile: &Profile, bound: u64) -> (u64, u64, u128) {
    let excess = profile.live.iter().map(|&live| u128::from(live.saturating_sub(bound))).sum();
    (profile.least_total(), profile.peak, excess)
}

/// An order that is no worse, and its profile. The cuts go into `bounds`.
pub(crate) fn refine(
    problem: &Problem,
    mut order: Vec<Op>,
    mut profile: Profile,
    bounds: &mut Bounds,
    watch: &Watch,
) -> Result<(Vec<Op>, Profile), Stop> {
    for _ in 0..MOST_ROUNDS {
        let Some(peak_step) = (0..order.len()).min_by_key(|&step| (Reverse(profile.live[step]), step)) else { break };
        let op = order[peak_step];
        let cut = bound::cut(problem, op, watch)?;
        bounds.record(op, cut.bytes);
        if cut.bytes >= profile.peak {
            break;
        }
        let (bound, _) = bounds.best();
        let best = cut
            .done
            .iter()
            .map(|done| {
                let first = order.iter().filter(|&&other| done[other as usize]);
                let rest = order.iter().filter(|&&other| !done[other as usize] && other != op);
                let reordered: Vec<Op> = first.chain([&op]).chain(rest).copied().collect();
                let profile = Profile::new(problem, &reordered);
                (score(&profile, bound), reordered, profile)
            })
            .min_by(|a, b| a.0.cmp(&b.0));
        match best {
            Some((better, reordered, its_profile)) if better < score(&profile, bound) => {
                debug_assert!(problem.is_valid_order(&reordered));
                (order, profile) = (reordered, its_profile);
            }
            _ => break,
        }
    }
    Ok((order, profile))
}
