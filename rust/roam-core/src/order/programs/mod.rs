//! Integer programs for orders, where exact search gave up. They run only if a caller gives a
//! solver; on steps of the zoo none is made.

mod integer;
mod lower;

pub(crate) use lower::lower_by_programs;
