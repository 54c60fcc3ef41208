//! Execution orders: simple heuristics, each a pure function of the problem; refinement of the
//! best; exact search at the peak. `programs`, by a solver of integer programs, seldom gains anything.

mod chain;
mod depth_first;
mod exact;
mod hill_valley;
mod list;
mod method;
mod peaks;
mod portfolio;
mod programs;
mod refine;
mod reversed;
mod segments;
mod updates;
mod window;

pub(crate) use method::Method;
pub(crate) use peaks::{Answers, Open, lower_peaks};
pub(crate) use portfolio::{Portfolio, Trial};
pub(crate) use programs::lower_by_programs;
pub(crate) use refine::{Aim, Ordered, split, stage};
pub(crate) use updates::FittingUpdates;
