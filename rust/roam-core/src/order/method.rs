//! The heuristics by name.

use super::list::{self, Preference, Start};
use super::{depth_first, hill_valley, reversed, updates};
use crate::control::{Stop, Watch};
use crate::problem::{Op, Problem};

/// How an order is found. The planner tries all of them, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// What eager PyTorch does.
    Program,
    /// List scheduling for the least live bytes (LESCEA).
    Lescea,
    /// Depth first from the step's ends, costly inputs first.
    DepthFirst,
    /// Program order, with every weight update as soon as its gradient is ready.
    EagerUpdates,
    /// Program order, with every weight update when it fits under the estimated peak (ROAM).
    MemoryAwareUpdates,
    /// Program order, with weight updates where they raise its peak the least (Liu).
    HillValley,
    /// Program order, with whatever does not add to the live bytes as soon as it fits.
    EarlyFrees,
    /// List scheduling from the step's end backwards.
    Reversed,
}

impl Method {
    pub(crate) const ALL: [Method; 8] = [
        Method::Program,
        Method::Lescea,
        Method::DepthFirst,
        Method::EagerUpdates,
        Method::MemoryAwareUpdates,
        Method::EarlyFrees,
        Method::Reversed,
        Method::HillValley,
    ];

    /// The name under which plans list it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Method::Program => "program",
            Method::Lescea => "lescea",
            Method::DepthFirst => "depth_first",
            Method::EagerUpdates => "eager_updates",
            Method::MemoryAwareUpdates => "memory_aware_updates",
            Method::HillValley => "hill_valley",
            Method::EarlyFrees => "early_frees",
            Method::Reversed => "reversed",
        }
    }

    /// A valid order.
    pub(crate) fn order(self, problem: &Problem, watch: &Watch) -> Result<Vec<Op>, Stop> {
        let order = match self {
            Method::Program => problem.program_order(),
            Method::Lescea => list::schedule(problem, Preference::LeastLive, Start::PLAIN, watch)?,
            Method::DepthFirst => depth_first::depth_first(problem, watch)?,
            Method::EagerUpdates => updates::eager_updates(problem, watch)?,
            Method::MemoryAwareUpdates => updates::memory_aware_updates(problem, watch)?,
            Method::HillValley => hill_valley::hill_valley(problem, &problem.program_order(), watch)?,
            Method::EarlyFrees => list::schedule(problem, Preference::ProgramOrder, Start::PLAIN, watch)?,
            Method::Reversed => reversed::reversed(problem, watch)?,
        };
        debug_assert!(problem.is_valid_order(&order), "{} breaks a constraint", self.name());
        Ok(order)
    }
}
