//! The private Python module `roam._core`: thin bindings, one file per bound concept.

mod baseline;
mod builder;
mod convert;
mod entries;
mod errors;
mod graph;
mod guard;
mod layout;
mod optimize;
mod plan;
mod residency;
mod routes;
mod sharding;
mod solver;
mod synthetic;
mod verify;
mod worker;

/// The planner. Use it through the package `roam`.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::baseline::{baseline, baseline_order, caching_allocator_bytes};
    #[pymodule_export]
    use crate::builder::PyGraphBuilder;
    #[pymodule_export]
    use crate::entries::{PyOperator, PyTensor};
    #[pymodule_export]
    use crate::graph::PyGraph;
    #[pymodule_export]
    use crate::layout::{PyBuffers, PyPacking, pack, verify_packing};
    #[pymodule_export]
    use crate::optimize::optimize;
    #[pymodule_export]
    use crate::plan::{PyCandidate, PyPlan};
    #[pymodule_export]
    use crate::residency::choose_residency;
    #[pymodule_export]
    use crate::routes::compare_routes;
    #[pymodule_export]
    use crate::sharding::{PyShardingOutcome, PyShardingProblem};
    #[pymodule_export]
    use crate::synthetic::{synthetic_buffers, synthetic_step};
    #[pymodule_export]
    use crate::verify::verify;

    /// The version of the distribution, which is that of the crates.
    #[pymodule_export]
    #[allow(non_upper_case_globals)] // Python's name for it.
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
