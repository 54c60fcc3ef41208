//! The planner's use of integer programs: their budget, and the report on what they did.

use crate::control::{Stop, Watch};
use crate::mip::{Outcome, Program, Solver, Task};
use crate::plan::{Exact, ExactReport, ExactStatus};
use std::time::Instant;

/// What one program may cost: its nodes times the square of its entries, because the time of a node
/// grows as that square.
const WORK: u64 = 1_300_000_000;
/// Nodes that are always granted: programs too large for these are not solved.
const FEWEST_NODES: u64 = 200;
/// Nodes that even the smallest programs may use.
const MOST_NODES: u64 = 20_000;
/// What all programs together may cost, for orders and again for layouts.
const BUDGET: u64 = 4 * WORK;
/// Most entries of a program.
pub(crate) const MOST_ENTRIES: u64 = (WORK / FEWEST_NODES).isqrt();
/// Seconds after which programs are given up: nodes are the budget, this only a safety, far from
/// what a busy machine takes.
const SAFETY_S: f64 = 300.0;
/// By how much, as a share of the largest cost, a solver's bound may be wrong. CBC meets the rows
/// of a program only within 10^-6.
const TOLERANCE: f64 = 1e-5;

/// The planner's hold on the solver.
pub(crate) struct ExactTier<'a> {
    solver: Option<&'a dyn Solver>,
    pub(crate) report: ExactReport,
    /// What is left of the [`BUDGET`].
    left: u64,
    /// Every program that was given to the solver, and what came of it.
    known: Vec<Known>,
}

/// A program that is not asked again: the same window of the whole step and of one of its parts is
/// the same program.
struct Known {
    task: Task,
    answer: Option<Answer>,
    was_of_use: bool,
}

/// What a solved program says.
#[derive(Clone)]
pub(crate) struct Answer {
    /// The best values found, one per column.
    pub(crate) values: Vec<f64>,
    /// No values cost less, in whole units.
    pub(crate) bound: i64,
    /// The program that this answers.
    program: usize,
}

impl<'a> ExactTier<'a> {
    pub(crate) fn new(exact: Exact, solver: Option<&'a dyn Solver>) -> Self {
        let status = if exact == Exact::Off { ExactStatus::Off } else { ExactStatus::NotNeeded };
        ExactTier {
            solver,
            report: ExactReport { status, programs: 0, gains: 0, failed: 0, timed_out: 0, reason: None },
            left: BUDGET,
            known: Vec::new(),
        }
    }

    /// Whether it is of use to state programs.
    pub(crate) fn is_on(&self) -> bool {
        !matches!(self.report.status, ExactStatus::Off | ExactStatus::Unavailable)
    }

    /// Notes that a program for what is not proved yet would be too large.
    pub(crate) fn too_large(&mut self) {
        if self.report.status == ExactStatus::NotNeeded {
            self.report.status = ExactStatus::TooLarge;
        }
    }

    /// Grants as much as at the beginning.
    pub(crate) fn renew_budget(&mut self) {
        self.left = BUDGET;
    }

    /// Notes that an answer was of use.
    pub(crate) fn gain(&mut self, answer: &Answer) {
        let known = &mut self.known[answer.program];
        self.report.gains += u32::from(!known.was_of_use);
        known.was_of_use = true;
    }

    /// Solves programs of at most [`MOST_ENTRIES`], side by side, each from values that it admits;
    /// `None` for those without an answer, and for those that the budget is too small for, from the
    /// first on.
    pub(crate) fn solve(
        &mut self,
        programs: impl IntoIterator<Item = (Program, Vec<i64>)>,
        watch: &Watch,
    ) -> Result<Vec<Option<Answer>>, Stop> {
        let mut new: Vec<Task> = Vec::new();
        let mut places = Vec::new();
        for (program, start) in programs {
            let is_same = |task: &Task| task.program == program && task.start == start;
            let place = self.known.iter().map(|known| &known.task).chain(&new).position(is_same);
            places.push(place.or_else(|| {
                new.push(self.task(program, start)?);
                Some(self.known.len() + new.len() - 1)
            }));
        }
        self.ask(new, watch)?;
        Ok(places.into_iter().map(|place| self.known.get(place?)?.answer.clone()).collect())
    }

    /// The program with as many nodes as it may use, taken from the budget.
    fn task(&mut self, program: Program, start: Vec<i64>) -> Option<Task> {
        let node = program.entries().max(1).pow(2);
        let nodes = (WORK.min(self.left) / node).min(MOST_NODES);
        if nodes < FEWEST_NODES {
            self.left = 0;
            return None;
        }
        self.left -= nodes * node;
        Some(Task { program, start, nodes: nodes as u32 })
    }

    /// Gives the solver new programs.
    fn ask(&mut self, tasks: Vec<Task>, watch: &Watch) -> Result<(), Stop> {
        if tasks.is_empty() || !self.is_on() {
            return Ok(());
        }
        let Some(solver) = self.solver else {
            self.unavailable("no solver was given".into());
            return Ok(());
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
        for task in tasks {
            let outcome = outcomes.next().unwrap_or(Outcome::Failed("the solver gave too few answers".into()));
            let answer = self.judge(&task, outcome);
            self.known.push(Known { task, answer, was_of_use: false });
        }
        Ok(())
    }

    /// The answer that an outcome gives, if any. The report counts the outcome.
    fn judge(&mut self, task: &Task, outcome: Outcome) -> Option<Answer> {
        if !matches!(outcome, Outcome::Unavailable(_)) {
            self.report.programs += 1;
            if self.is_on() {
                self.report.status = ExactStatus::Used;
            }
        }
        match outcome {
            Outcome::Solved { bound, .. } if bound > task.cost() as f64 + 0.5 => {
                self.lost("the solver's bound is above what it was given to begin with".into());
            }
            Outcome::Solved { values, bound } => {
                let reach = task.program.columns.iter().map(|column| column.cost.abs() as f64 * column.upper as f64);
                let safe = (bound - TOLERANCE * reach.sum::<f64>().max(1.0)).ceil();
                // Neither an infinite bound nor one that is no number says anything.
                let bound = if safe.is_finite() { safe as i64 } else { i64::MIN };
                return Some(Answer { values, bound, program: self.known.len() });
            }
            Outcome::TimedOut => self.report.timed_out += 1,
            Outcome::Failed(reason) => self.lost(reason),
            Outcome::Unavailable(reason) => self.unavailable(reason),
        }
        None
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Control;
    use crate::mip::{Column, Sense};
    use std::sync::Mutex;

    /// Keeps what it was given, and gives the start back.
    #[derive(Default)]
    struct Record(Mutex<Vec<Task>>);

    impl Record {
        fn given(&self) -> Vec<Task> {
            self.0.lock().expect("no panic").clone()
        }
    }

    impl Solver for Record {
        fn solve(&self, tasks: &[Task], _: &(dyn Fn() -> Option<f64> + Sync)) -> Vec<Outcome> {
            self.0.lock().expect("no panic").extend_from_slice(tasks);
            let values = |task: &Task| task.start.iter().map(|&value| value as f64).collect();
            tasks.iter().map(|task| Outcome::Solved { values: values(task), bound: 0.0 }).collect()
        }
    }

    /// A program with so many entries, and something of its own.
    fn program(entries: usize, own: i64) -> (Program, Vec<i64>) {
        let mut program = Program::default();
        let column = program.column(Column { lower: 0, upper: own, cost: 1, integer: true });
        (0..entries).for_each(|_| program.row(vec![(column, 1)], Sense::Less, own));
        (program, vec![own])
    }

    fn cost(task: &Task) -> u64 {
        u64::from(task.nodes) * task.program.entries().pow(2)
    }

    #[test]
    fn what_was_asked_is_known() {
        let solver = Record::default();
        let control = Control::default();
        let watch = Watch::new(&control, None);
        let mut tier = ExactTier::new(Exact::Auto, Some(&solver));
        let answers = tier.solve([program(5, 1), program(5, 2), program(5, 1)], &watch).expect("no deadline");
        let again = tier.solve([program(5, 2), program(5, 3)], &watch).expect("no deadline");
        assert_eq!((solver.given().len(), tier.report.programs), (3, 3));
        let values = |answers: &[Option<Answer>]| -> Vec<f64> {
            answers.iter().map(|answer| answer.as_ref().expect("solved").values[0]).collect()
        };
        assert_eq!((values(&answers), values(&again)), (vec![1.0, 2.0, 1.0], vec![2.0, 3.0]));
        for answer in answers.iter().chain(&again).flatten() {
            tier.gain(answer);
        }
        assert_eq!(tier.report.gains, 3, "each program gains once");
    }

    #[test]
    fn all_programs_together_keep_to_the_budget() {
        let solver = Record::default();
        let control = Control::default();
        let watch = Watch::new(&control, None);
        let mut tier = ExactTier::new(Exact::Auto, Some(&solver));
        let most = MOST_ENTRIES as usize;
        let asked: Vec<_> = (1..=9).map(|own| program(if own % 2 == 0 { most } else { most / 20 }, own)).collect();
        let answers = tier.solve(asked.clone(), &watch).expect("no deadline");
        let spent: u64 = solver.given().iter().map(cost).sum();
        assert!(BUDGET / 2 < spent && spent <= BUDGET, "{spent} of {BUDGET}");
        let many = solver.given().len();
        assert!(many < asked.len() && answers[..many].iter().all(Option::is_some));
        assert!(answers[many..].iter().all(Option::is_none), "from the first that does not fit on");
        assert!(tier.solve([program(1, 10)], &watch).expect("no deadline")[0].is_none());
        tier.renew_budget();
        assert!(tier.solve([program(1, 10)], &watch).expect("no deadline")[0].is_some());
    }
}
