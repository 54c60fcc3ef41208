//! Integer programs by CBC, in processes that `roam.exact` starts.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use roam_core::mip::{Outcome, Sense, Solver, Task};
use serde::Deserialize;
use std::thread;
use std::time::Duration;

/// How often running processes are looked at.
const LOOK: Duration = Duration::from_millis(5);

/// Solves each program in a process of its own, as many side by side as there are cores.
pub(crate) struct Cbc;

impl Solver for Cbc {
    fn solve(&self, tasks: &[Task], seconds_left: &(dyn Fn() -> Option<f64> + Sync)) -> Vec<Outcome> {
        let most = thread::available_parallelism().map_or(1, usize::from);
        let mut outcomes: Vec<Option<Outcome>> = vec![None; tasks.len()];
        let mut running: Vec<(usize, Py<PyAny>)> = Vec::new();
        let mut waiting = tasks.iter().map(question).enumerate();
        let mut next = waiting.next();
        while next.is_some() || !running.is_empty() {
            if seconds_left() == Some(0.0) {
                break;
            }
            Python::attach(|py| {
                while let Some((at, question)) = next.take_if(|_| running.len() < most) {
                    match start(py, &question) {
                        Ok(child) => running.push((at, child)),
                        Err(error) => outcomes[at] = Some(unavailable(&error)),
                    }
                    next = waiting.next();
                }
                running.retain(|(at, child)| {
                    outcomes[*at] = poll(py, child).unwrap_or_else(|error| Some(Outcome::Failed(error.to_string())));
                    let goes_on = outcomes[*at].is_none();
                    if !goes_on {
                        close(py, child);
                    }
                    goes_on
                });
            });
            if !running.is_empty() {
                thread::sleep(LOOK);
            }
        }
        Python::attach(|py| running.iter().for_each(|(_, child)| close(py, child)));
        outcomes.into_iter().map(|outcome| outcome.unwrap_or(Outcome::TimedOut)).collect()
    }
}

fn start(py: Python<'_>, question: &[u8]) -> PyResult<Py<PyAny>> {
    let child = py.import("roam.exact")?.getattr("Child")?;
    Ok(child.call1((PyBytes::new(py, question),))?.unbind())
}

fn poll(py: Python<'_>, child: &Py<PyAny>) -> PyResult<Option<Outcome>> {
    let answer = child.call_method0(py, "poll")?;
    let answer: Option<Vec<u8>> = answer.extract(py)?;
    Ok(answer.map(|answer| outcome(&answer)))
}

fn close(py: Python<'_>, child: &Py<PyAny>) {
    // Nothing can be done about a process that cannot be killed.
    let _ = child.call_method0(py, "close");
}

fn unavailable(error: &PyErr) -> Outcome {
    Outcome::Unavailable(error.to_string())
}

/// The question's JSON, see `python/roam/exact/child.py`.
fn question(task: &Task) -> Vec<u8> {
    let columns = &task.program.columns;
    let rows = task.program.rows.iter().map(|row| {
        let (at, by): (Vec<usize>, Vec<i64>) = row.terms.iter().copied().unzip();
        let sense = match row.sense {
            Sense::Less => "<",
            Sense::Greater => ">",
            Sense::Equal => "=",
        };
        serde_json::json!([at, by, sense, row.limit])
    });
    let question = serde_json::json!({
        "lower": columns.iter().map(|column| column.lower).collect::<Vec<_>>(),
        "upper": columns.iter().map(|column| column.upper).collect::<Vec<_>>(),
        "cost": columns.iter().map(|column| column.cost).collect::<Vec<_>>(),
        "integer": columns.iter().map(|column| column.integer).collect::<Vec<_>>(),
        "rows": rows.collect::<Vec<_>>(),
        "start": task.start,
        "nodes": task.nodes,
    });
    question.to_string().into_bytes()
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Solved { values: Vec<f64>, bound: Option<f64> },
    Unavailable(String),
    Failed(String),
}

fn outcome(answer: &[u8]) -> Outcome {
    match serde_json::from_slice(answer) {
        Ok(Answer::Solved { values, bound }) => Outcome::Solved { values, bound: bound.unwrap_or(f64::NEG_INFINITY) },
        Ok(Answer::Unavailable(reason)) => Outcome::Unavailable(reason),
        Ok(Answer::Failed(reason)) => Outcome::Failed(reason),
        Err(error) => Outcome::Failed(format!("the solver's process gave no answer: {error}")),
    }
}
