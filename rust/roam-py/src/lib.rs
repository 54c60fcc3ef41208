//! The private Python module `roam._core`: thin bindings, one file per bound concept.

mod builder;
mod convert;
mod entries;
mod errors;
mod graph;
mod guard;
mod plan;

/// The planner. Use it through the package `roam`.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::builder::PyGraphBuilder;
    #[pymodule_export]
    use crate::entries::{PyOperator, PyTensor};
    #[pymodule_export]
    use crate::graph::PyGraph;
    #[pymodule_export]
    use crate::plan::{PyCandidate, PyPlan};
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
