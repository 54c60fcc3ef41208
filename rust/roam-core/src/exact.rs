//! The planner's use of integer programs: how much of it, and what became of it.

use crate::control::{Stop, Watch};
use crate::mip::{Outcome, Program, Solver, Task};
use crate::plan::{Exact, ExactReport, ExactStatus};
use std::time::Instant;

/// What one program may cost: nodes, times the square of the entries, as which a node takes time.
const WORK: u64 = 1_300_000_000;
/// Nodes that are always granted: programs too large for these are not solved.
const FEWEST_NODES: u64 = 200;
/// Nodes that even the smallest programs may use.
const MOST_NODES: u64 = 20_000;
/// Most entries of a program.
pub(crate) const MOST_ENTRIES: u64 = (WORK / FEWEST_NODES).isqrt();
/// Seconds after which programs are given up: nodes are the budget, this only a safety, far from what a busy machine takes.
const SAFETY_S: f64 = 300.0;
/// By how much, as a share of the largest cost, a solver's bound may be wrong. CBC keeps to rows within 10^-6.
const TOLERANCE: f64 = 1e-5;

/// The planner's hold on the solver.
pub(crate) struct ExactTier<'a> {
    solver: Option<&'a dyn Solver>,
    pub(crate) report: ExactReport,
}

/// What a solved program says.
pub(crate) struct Answer {
    /// The best values found, one per column.
    pub(crate) values: Vec<f64>,
    /// No values cost less, in whole units.
    pub(crate) bound: i64,
}

impl<'a> ExactTier<'a> {
    pub(crate) fn new(exact: Exact, solver: Option<&'a dyn Solver>) -> Self {
        let status = if exact == Exact::Off { ExactStatus::Off } else { ExactStatus::NotNeeded };
        ExactTier {
            solver,
            report: ExactReport { status, programs: 0, gains: 0, failed: 0, timed_out: 0, reason: None },
        }
    }

    /// Whether it is of use to state programs.
    pub(crate) fn is_on(&self) -> bool {
        !matches!(self.report.status, ExactStatus::Off | ExactStatus::Unavailable)
    }

    /// Notes that what is open would take too large a program.
    pub(crate) fn too_large(&mut self) {
        if self.report.status == ExactStatus::NotNeeded {
            self.report.status = ExactStatus::TooLarge;
        }
    }

    /// Notes that an answer was of use.
    pub(crate) fn gain(&mut self) {
        self.report.gains += 1;
    }

    /// Solves programs of at most [`MOST_ENTRIES`], side by side, each from values that it admits; `None` for those without an answer.
    pub(crate) fn solve(
        &mut self,
        programs: impl IntoIterator<Item = (Program, Vec<i64>)>,
        watch: &Watch,
    ) -> Result<Vec<Option<Answer>>, Stop> {
        let tasks: Vec<Task> = programs
            .into_iter()
            .map(|(program, start)| {
                let nodes = (WORK / program.entries().max(1).pow(2)).clamp(FEWEST_NODES, MOST_NODES) as u32;
                Task { program, start, nodes }
            })
            .collect();
        if tasks.is_empty() || !self.is_on() {
            return Ok(tasks.iter().map(|_| None).collect());
        }
        let Some(solver) = self.solver else {
            self.unavailable("no solver was given".into());
            return Ok(tasks.iter().map(|_| None).collect());
        };
        let begin = Instant::now();
        let seconds_left = || {
            let safety = (SAFETY_S - begin.elapsed().as_secs_f64()).max(0.0);
            Some(watch.seconds_left().map_or(safety, |left| left.min(safety)))
        };
        let mut outcomes = solver.solve(&tasks, &seconds_left).into_iter();
        // What a cancelled solver says of its programs is of no interest.
        if watch.check() == Err(Stop::Cancelled) {
            return Err(Stop::Cancelled);
        }
        let answers = tasks.iter().map(|task| {
            let outcome = outcomes.next().unwrap_or(Outcome::Failed("the solver gave too few answers".into()));
            if !matches!(outcome, Outcome::Unavailable(_)) && self.is_on() {
                self.report.status = ExactStatus::Used;
                self.report.programs += 1;
            }
            match outcome {
                Outcome::Solved { bound, .. } if bound > task.cost() as f64 + 0.5 => {
                    self.lost("the solver's bound is above what it was given to begin with".into());
                }
                Outcome::Solved { values, bound } => {
                    let reach =
                        task.program.columns.iter().map(|column| column.cost.abs() as f64 * column.upper as f64);
                    let safe = (bound - TOLERANCE * reach.sum::<f64>().max(1.0)).ceil();
                    // Neither an infinite bound nor one that is no number says anything.
                    let bound = if safe.is_finite() { safe as i64 } else { i64::MIN };
                    return Some(Answer { values, bound });
                }
                Outcome::TimedOut => self.report.timed_out += 1,
                Outcome::Failed(reason) => self.lost(reason),
                Outcome::Unavailable(reason) => self.unavailable(reason),
            }
            None
        });
        Ok(answers.collect())
    }

    fn lost(&mut self, reason: String) {
        self.report.failed += 1;
        self.report.reason.get_or_insert(reason);
    }

    fn unavailable(&mut self, reason: String) {
        if self.is_on() {
            self.report.status = ExactStatus::Unavailable;
            self.report.reason = Some(reason);
        }
    }
}
