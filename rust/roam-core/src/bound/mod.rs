//! Lower bounds of the peak of every order.

mod bounds;
pub(crate) mod flow;

pub(crate) use bounds::*;
