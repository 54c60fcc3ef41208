//! Integer programs, and what solves them: the planner states them, a caller's [`Solver`] answers.
//!
//! All numbers of a program are whole and small enough for a solver that computes in floating point
//! to hold them exactly. An answer is never taken on trust: the planner reads from it only the
//! decisions (what runs when, what lies below what) and works out in whole numbers what they cost.

/// No number of a program is larger, nor any sum that a row can reach: a double holds every whole
/// number up to 2^53.
const LARGEST: i128 = 1 << 52;

/// One unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Least value.
    pub lower: i64,
    /// Greatest value.
    pub upper: i64,
    /// What one unit of it costs; the sum over all columns is to be least.
    pub cost: i64,
    /// Whether it must be whole.
    pub integer: bool,
}

/// How a row's sum compares with its right-hand side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sense {
    /// At most.
    Less,
    /// At least.
    Greater,
    /// Just as much.
    Equal,
}

/// A sum that must keep to a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Columns, each once, and what they are multiplied with, never 0.
    pub terms: Vec<(usize, i64)>,
    /// The sense of the comparison.
    pub sense: Sense,
    /// The limit.
    pub limit: i64,
}

/// A mixed integer linear program: minimize the cost over all values that keep every bound and row.
/// Columns and rows stand in a sequence that depends on what is asked alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// The unknowns.
    pub columns: Vec<Column>,
    /// What they must keep to.
    pub rows: Vec<Row>,
}

impl Program {
    pub(crate) fn column(&mut self, column: Column) -> usize {
        self.columns.push(column);
        self.columns.len() - 1
    }

    pub(crate) fn row(&mut self, terms: Vec<(usize, i64)>, sense: Sense, limit: i64) {
        self.rows.push(Row { terms, sense, limit });
    }

    /// How many coefficients differ from 0: what one look at the whole program costs.
    pub fn entries(&self) -> u64 {
        self.rows.iter().map(|row| row.terms.len() as u64).sum()
    }

    /// Whether doubles hold every number of the program and every sum of a row exactly.
    pub fn is_exact(&self) -> bool {
        let reach = |&(at, factor): &(usize, i64)| {
            let Column { lower, upper, .. } = self.columns[at];
            i128::from(factor).abs() * i128::from(lower).abs().max(i128::from(upper).abs())
        };
        self.rows.iter().all(|row| row.terms.iter().map(reach).sum::<i128>() + i128::from(row.limit).abs() <= LARGEST)
            && self.columns.iter().map(|column| i128::from(column.cost).abs()).sum::<i128>() <= LARGEST
    }

    /// Whether the values, one per column, keep every bound and row.
    pub fn admits(&self, values: &[i64]) -> bool {
        values.len() == self.columns.len()
            && self.columns.iter().zip(values).all(|(column, value)| (column.lower..=column.upper).contains(value))
            && self.rows.iter().all(|row| {
                let sum: i128 = row.terms.iter().map(|&(at, by)| i128::from(by) * i128::from(values[at])).sum();
                match row.sense {
                    Sense::Less => sum <= i128::from(row.limit),
                    Sense::Greater => sum >= i128::from(row.limit),
                    Sense::Equal => sum == i128::from(row.limit),
                }
            })
    }
}

/// A program to be solved.
#[derive(Clone, Debug)]
pub struct Task {
    /// What is asked.
    pub program: Program,
    /// Values, one per column, that the program admits: where the search begins.
    pub start: Vec<i64>,
    /// How many nodes the search may look at: its budget, the same on every machine.
    pub nodes: u32,
}

impl Task {
    /// What the start costs.
    pub fn cost(&self) -> i64 {
        self.program.columns.iter().zip(&self.start).map(|(column, value)| column.cost * value).sum()
    }
}

/// What became of a program.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The search ended, or its nodes were used up.
    Solved {
        /// The best values found, one per column.
        values: Vec<f64>,
        /// No values cost less than this, as far as the solver's floating point can be trusted.
        bound: f64,
    },
    /// The time was up: what it had found by then depends on the machine, so it does not count.
    TimedOut,
    /// The solver broke down or was killed, for the reason given; the program is without an answer.
    Failed(String),
    /// There is no solver, for the reason given.
    Unavailable(String),
}

/// Solves integer programs. The same task must always have the same outcome, but for failures and
/// time.
pub trait Solver: Send + Sync {
    /// Solves the tasks, side by side as far as there are cores; one outcome per task, in their
    /// sequence. `seconds_left` says how long it may still take (`None` for as long as need be); it
    /// is 0 as soon as the caller wants it to end, and is to be asked often.
    fn solve(&self, tasks: &[Task], seconds_left: &(dyn Fn() -> Option<f64> + Sync)) -> Vec<Outcome>;
}

/// The greatest common divisor of all numbers; 0 where there is none but 0.
pub(crate) fn common_divisor(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().fold(0, |mut a, mut b| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knapsack() -> Program {
        let mut program = Program::default();
        let columns: Vec<usize> =
            [-3, -4].map(|cost| program.column(Column { lower: 0, upper: 5, cost, integer: true })).into();
        program.row(vec![(columns[0], 2), (columns[1], 3)], Sense::Less, 7);
        program.row(vec![(columns[0], 1)], Sense::Greater, 1);
        program
    }

    #[test]
    fn values_are_checked_against_bounds_and_rows() {
        let program = knapsack();
        assert!(program.admits(&[2, 1]) && program.admits(&[1, 0]));
        for refused in [&[0, 0][..], &[3, 1], &[6, 0], &[1, -1], &[1], &[1, 1, 0]] {
            assert!(!program.admits(refused), "{refused:?}");
        }
    }

    #[test]
    fn numbers_that_doubles_do_not_hold_are_noticed() {
        let mut program = knapsack();
        assert!(program.is_exact());
        program.row(vec![(0, 1 << 50), (1, 1 << 50)], Sense::Equal, 0);
        assert!(!program.is_exact(), "5 * 2^50 + 5 * 2^50 is above 2^53");
    }

    #[test]
    fn the_common_divisor_of_nothing_is_nothing() {
        assert_eq!(common_divisor([]), 0);
        assert_eq!(common_divisor([0, 12, 18, 0]), 6);
    }
}
