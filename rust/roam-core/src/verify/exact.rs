//! Whether what a plan says of integer programs goes with its figures.

use super::violation::PlanViolation;
use crate::plan::{Exact, ExactReport, ExactStatus, Plan};

/// The status follows from what was asked for, from the counts, and from whether the plan meets its
/// bound.
pub(super) fn check(plan: &Plan) -> Result<(), PlanViolation> {
    let ExactReport { status, programs, gains, failed, timed_out, ref reason } = plan.exact;
    let lost = u64::from(failed) + u64::from(timed_out);
    let is_proved = plan.total_bytes == plan.total_lower_bound_bytes;
    let was_asked = (status == ExactStatus::Off) == (plan.settings.exact == Exact::Off);
    let counts_agree = lost + u64::from(gains) <= u64::from(programs)
        && reason.is_some() == (failed > 0 || status == ExactStatus::Unavailable);
    let goes_with_counts = match status {
        ExactStatus::Off | ExactStatus::TooLarge => programs == 0,
        ExactStatus::NotNeeded => programs == 0 && is_proved,
        ExactStatus::NotTried => programs == 0 && !is_proved,
        ExactStatus::Used => lost < u64::from(programs),
        ExactStatus::NoAnswer => programs > 0 && lost == u64::from(programs),
        // The solver may have gone in the middle of the search.
        ExactStatus::Unavailable => true,
    };
    if was_asked && counts_agree && goes_with_counts {
        return Ok(());
    }
    let Plan { total_bytes, total_lower_bound_bytes, .. } = *plan;
    Err(PlanViolation::Exact { report: plan.exact.clone(), total_bytes, total_lower_bound_bytes })
}
