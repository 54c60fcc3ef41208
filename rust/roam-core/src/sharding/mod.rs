//! A strategy for each operator of a program, so that all together cost least within a memory limit
//! at every time.
//!
//! This is what automatic parallelism comes down to: how each operator is split over devices has a
//! cost and takes bytes while its result is alive, and what two operators choose has a cost
//! together (a collective between them). The contest on intra-operator parallelism (IOPDDL,
//! ASPLOS and EuroSys 2025) is the same problem.
//!
//! problem -> presolve -> reduced -> prices and messages (a bound), forests (choices)
//! problem -> alike (exactly, where there is no limit and the problem repeats itself)

mod alike;
mod branch;
mod eliminate;
mod fit;
mod forest;
mod improve;
mod marginals;
mod messages;
mod presolve;
mod prices;
mod problem;
mod read;
mod reduced;
#[cfg(test)]
mod small;
mod solve;

pub use alike::solve_alike;
pub use improve::Solution;
pub use problem::{Edge, FORBIDDEN, Node, Problem};
pub use read::ReadError;
pub use solve::{Outcome, solve};
