//! The graph of one training step: operators, tensors (storages), and what orders them.
//!
//! A [`Graph`] is immutable and valid by construction: the only ways to one are
//! [`GraphBuilder`] and the JSON reader, which uses it.
//! Nothing here depends on names; ties are broken by program position alone.

mod builder;
mod digest;
mod entries;
pub(crate) mod envelope;
mod error;
mod ids;
pub mod json;
mod site;
mod step;
pub(crate) mod strict;

pub use builder::{GraphBuilder, MAX_ALIGNMENT_BYTES, MAX_TOTAL_BYTES};
pub(crate) use entries::round_up;
pub use entries::{Kind, Operator, Phase, Region, Residency, ReusePair, Sequence, Source, Tensor};
pub use envelope::{DEFAULT_MAX_BYTES, FormatError};
pub use error::{GraphError, ReuseFault};
pub use ids::{OperatorId, RegionId, TensorId};
pub use site::Site;
pub use step::{Adjacency, Graph};
