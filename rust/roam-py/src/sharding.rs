//! A strategy per operator: the search, on problems from files.

use crate::errors::{Class, Fault, file_error};
use crate::guard::detached;
use crate::worker::on_worker;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use roam_core::optimize::Control;
use roam_core::sharding::{Edge, FORBIDDEN, Node, Outcome, Problem, ReadError, solve, solve_alike};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Nodes with strategies, costs of pairs, and a memory limit.
#[pyclass(name = "ShardingProblem", module = "roam._core", frozen)]
pub(crate) struct PyShardingProblem {
    problem: Arc<Problem>,
}

#[pymethods]
impl PyShardingProblem {
    /// A strategy, or a pair of strategies, that is not allowed costs this much or more.
    #[classattr]
    const FORBIDDEN: i64 = FORBIDDEN;

    /// Makes a problem from lists: per node the costs and the bytes of its strategies, and its
    /// lifetime; per edge two nodes and the number of a matrix, which has a row for each strategy
    /// of the first node.
    #[new]
    #[pyo3(signature = (name, costs, bytes, lifetimes, edges, matrices, limit_bytes = None))]
    fn new(
        name: String,
        costs: Vec<Vec<i64>>,
        bytes: Vec<Vec<i64>>,
        lifetimes: Vec<(usize, usize)>,
        edges: Vec<(usize, usize, usize)>,
        matrices: Vec<Vec<i64>>,
        limit_bytes: Option<i64>,
    ) -> PyResult<Self> {
        let wrong = |message: &str| Err(PyValueError::new_err(message.to_owned()));
        if costs.len() != bytes.len() || costs.len() != lifetimes.len() {
            return wrong("each node must have costs, bytes and a lifetime");
        }
        if costs.iter().zip(&bytes).any(|(costs, bytes)| costs.is_empty() || costs.len() != bytes.len()) {
            return wrong("each node must have at least one strategy, and a cost and bytes for each of its strategies");
        }
        let bytes_in_all: u128 = bytes.iter().flatten().map(|&bytes| u128::from(bytes.unsigned_abs())).sum();
        if bytes.iter().flatten().any(|&bytes| bytes < 0) || bytes_in_all > i64::MAX as u128 {
            return wrong("bytes must not be negative, and their sum must fit 63 bits");
        }
        if lifetimes.iter().any(|&(start, end)| start > end) {
            return wrong("a lifetime must not end before it starts");
        }
        let fits = |&(first, second, matrix): &(usize, usize, usize)| {
            let size = costs.get(first).zip(costs.get(second)).map(|(rows, columns)| rows.len() * columns.len());
            first != second && size.is_some() && matrices.get(matrix).map(Vec::len) == size
        };
        if !edges.iter().all(fits) {
            return wrong("an edge must have two different nodes, and a matrix entry for each pair of strategies");
        }
        let nodes = costs.into_iter().zip(bytes).zip(lifetimes);
        let nodes = nodes.map(|((costs, bytes), (start, end))| Node { costs, bytes, lifetime: start..end }).collect();
        let edges = edges.into_iter().map(|(first, second, matrix)| Edge { nodes: [first, second], matrix }).collect();
        Ok(Self { problem: Arc::new(Problem { name, nodes, edges, matrices, limit_bytes }) })
    }

    /// Reads a file in the format of the contest (JSON, with or without gzip).
    #[classmethod]
    fn read(_class: &Bound<'_, pyo3::types::PyType>, py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let file = File::open(&path).map_err(|error| file_error(py, &error, &path))?;
        match detached(py, || Problem::read(file))? {
            Ok(problem) => Ok(Self { problem: Arc::new(problem) }),
            Err(ReadError::Io(error)) => Err(file_error(py, &error, &path)),
            Err(error) => {
                let message = format!("{}: {error}", path.display());
                Err(Fault { class: Class::Format, message, code: "sharding_problem", site: None }.raise(py))
            }
        }
    }

    #[getter]
    fn name(&self) -> &str {
        &self.problem.name
    }

    #[getter]
    fn nodes(&self) -> usize {
        self.problem.nodes.len()
    }

    #[getter]
    fn edges(&self) -> usize {
        self.problem.edges.len()
    }

    #[getter]
    fn limit_bytes(&self) -> Option<i64> {
        self.problem.limit_bytes
    }

    /// What a choice costs (None where it is not allowed), and the most bytes that it takes at any
    /// time.
    fn evaluate(&self, choice: Vec<usize>) -> PyResult<(Option<i64>, i64)> {
        let nodes = &self.problem.nodes;
        if choice.len() != nodes.len()
            || nodes.iter().zip(&choice).any(|(node, &strategy)| strategy >= node.costs.len())
        {
            return Err(PyValueError::new_err("a choice must have one strategy for each node"));
        }
        Ok((self.problem.cost(&choice), self.problem.peak_bytes(&choice)))
    }

    /// Searches for the cheapest choice.
    #[pyo3(signature = (*, work, time_limit_s = None))]
    fn solve(&self, py: Python<'_>, work: u64, time_limit_s: Option<f64>) -> PyResult<PyShardingOutcome> {
        let deadline = match time_limit_s.map(Duration::try_from_secs_f64) {
            None => None,
            Some(Ok(limit)) => Instant::now().checked_add(limit),
            Some(Err(_)) => {
                return Err(PyValueError::new_err("time_limit_s must be a number of seconds that is not negative"));
            }
        };
        let problem = self.problem.clone();
        let control = Control { deadline, ..Control::default() };
        let (interrupt, outcome) = on_worker(py, control, None, move |control| solve(&problem, work, control))?;
        match interrupt {
            Some(interrupt) => Err(interrupt),
            None => Ok(PyShardingOutcome { outcome, is_alike: false }),
        }
    }

    /// Searches for the cheapest choice, in which nodes of a group choose alike if nothing is lost by
    /// it.
    #[pyo3(signature = (groups, *, work))]
    fn solve_alike(&self, py: Python<'_>, groups: Vec<usize>, work: u64) -> PyResult<PyShardingOutcome> {
        let nodes = &self.problem.nodes;
        let mut firsts: Vec<usize> = Vec::new();
        let mut fits = groups.len() == nodes.len() && self.problem.limit_bytes.is_none();
        for (number, (node, &group)) in nodes.iter().zip(&groups).enumerate() {
            if group == firsts.len() {
                firsts.push(number);
            }
            fits &= firsts.get(group).is_some_and(|&first| nodes[first].costs.len() == node.costs.len());
        }
        if !fits {
            let message = "nodes of a group must have equally many strategies, groups must be numbered in the order of \
                           their first nodes, and there must be no limit";
            return Err(PyValueError::new_err(message));
        }
        let problem = self.problem.clone();
        let search = move |control: &Control| solve_alike(&problem, &groups, work, control);
        match on_worker(py, Control::default(), None, search)? {
            (Some(interrupt), _) => Err(interrupt),
            (None, (outcome, is_alike)) => Ok(PyShardingOutcome { outcome, is_alike }),
        }
    }
}

/// What a search found.
#[pyclass(name = "ShardingOutcome", module = "roam._core", frozen)]
pub(crate) struct PyShardingOutcome {
    outcome: Outcome,
    is_alike: bool,
}

#[pymethods]
impl PyShardingOutcome {
    #[getter]
    fn choice(&self) -> Option<Vec<usize>> {
        self.outcome.solution.as_ref().map(|solution| solution.choice.clone())
    }

    #[getter]
    fn cost(&self) -> Option<i64> {
        self.outcome.solution.as_ref().map(|solution| solution.cost)
    }

    #[getter]
    fn bound(&self) -> Option<i64> {
        self.outcome.bound
    }

    #[getter]
    fn is_alike(&self) -> bool {
        self.is_alike
    }

    #[getter]
    fn nodes(&self) -> usize {
        self.outcome.nodes
    }

    #[getter]
    fn edges(&self) -> usize {
        self.outcome.edges
    }

    #[getter]
    fn passes(&self) -> usize {
        self.outcome.passes
    }
}
