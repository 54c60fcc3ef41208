//! Orders and layouts of other projects, to compare with. They can be asked for by name; no plan is
//! made of them.
//!
//! Each follows its source's rules; where a rule needs what our graphs do not have, its
//! documentation says so.

pub mod caching_allocator;

mod eager;
mod executorch;
mod inductor_bfs;
mod inductor_dfs;
mod inductor_lpmf;
mod methods;
mod ready;
mod tvm;
mod tvm_hill_climb;
mod xla;

pub(crate) use methods::{Eager, Layout, Order};
