//! Lower bounds of the peak of every order: cuts at single operators, probes, sets of operators of
//! which one runs first.

mod bounds;
mod cut;
mod first_of_set;
pub(crate) mod flow;
mod probe;

pub(crate) use bounds::Bounds;
pub(crate) use cut::{Cut, Side, cut, cut_at, fix, touched};
pub(crate) use probe::{Limit, Target, Work, probe};
