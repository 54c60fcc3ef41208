//! A solver of integer programs for tests: tries all values, keeping to rows and bounds.

use roam_core::mip::{Outcome, Program, Row, Sense, Solver, Task};

/// Solves small programs whose columns are whole at some best values, and says so.
pub(crate) struct Enumerate;

impl Solver for Enumerate {
    fn solve(&self, tasks: &[Task], _: &(dyn Fn() -> Option<f64> + Sync)) -> Vec<Outcome> {
        tasks.iter().map(least).collect()
    }
}

/// Always gives the same outcome.
pub(crate) struct Always(pub(crate) Outcome);

impl Solver for Always {
    fn solve(&self, tasks: &[Task], _: &(dyn Fn() -> Option<f64> + Sync)) -> Vec<Outcome> {
        tasks.iter().map(|_| self.0.clone()).collect()
    }
}

fn least(task: &Task) -> Outcome {
    assert!(task.program.admits(&task.start), "the start breaks a row");
    assert!(task.program.is_exact());
    let cost = |values: &[i64]| -> i64 {
        task.program.columns.iter().zip(values).map(|(column, value)| column.cost * value).sum()
    };
    let mut best = (cost(&task.start), task.start.clone());
    let bounds = task.program.columns.iter().map(|column| (column.lower, column.upper)).collect();
    extend(&task.program, bounds, &mut best, &cost);
    Outcome::Solved { values: best.1.iter().map(|&value| value as f64).collect(), bound: best.0 as f64 }
}

fn extend(program: &Program, mut bounds: Vec<(i64, i64)>, best: &mut (i64, Vec<i64>), cost: &impl Fn(&[i64]) -> i64) {
    let lowest = |bounds: &[(i64, i64)]| bounds.iter().map(|&(lower, _)| lower).collect::<Vec<_>>();
    if !tighten(program, &mut bounds) || cost(&lowest(&bounds)) >= best.0 {
        return;
    }
    // Costs are not negative: with all choices made the lowest values left are the best.
    let is_choice = |&at: &usize| bounds[at] == (0, 1) && program.columns[at].cost == 0;
    match (0..bounds.len()).find(is_choice) {
        Some(at) => {
            for value in [0, 1] {
                let mut narrower = bounds.clone();
                narrower[at] = (value, value);
                extend(program, narrower, best, cost);
            }
        }
        None => {
            let values = lowest(&bounds);
            if program.admits(&values) {
                *best = (cost(&values), values);
            }
        }
    }
}

/// Narrows the bounds to what the rows permit; false if they permit nothing.
fn tighten(program: &Program, bounds: &mut [(i64, i64)]) -> bool {
    loop {
        let before = bounds.to_vec();
        for Row { terms, sense, limit } in &program.rows {
            let directions: &[i64] = match sense {
                Sense::Less => &[1],
                Sense::Greater => &[-1],
                Sense::Equal => &[1, -1],
            };
            // As a sum that is at most the limit.
            for &sign in directions {
                let least_of = |&(at, by): &(usize, i64), bounds: &[(i64, i64)]| {
                    let by = sign * by;
                    by * if by > 0 { bounds[at].0 } else { bounds[at].1 }
                };
                let spare = sign * limit - terms.iter().map(|term| least_of(term, bounds)).sum::<i64>();
                if spare < 0 {
                    return false;
                }
                for &(at, by) in terms {
                    let (by, (lower, upper)) = (sign * by, bounds[at]);
                    bounds[at] = if by > 0 {
                        (lower, upper.min(lower + spare / by))
                    } else {
                        (lower.max(upper + spare / by), upper)
                    };
                }
            }
        }
        if bounds == before {
            return true;
        }
    }
}
