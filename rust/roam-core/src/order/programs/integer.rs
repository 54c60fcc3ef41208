//! The order of a window as an integer program.
//!
//! After the create and preserve variables of MODeL (Steiner et al., "MODeL: memory optimizations
//! for deep learning", ICML 2023) and ROAM (Shu et al., arXiv 2310.19295, section 4), in cumulative
//! form: *done* says per operator and step whether the operator has run by then (the sum of its
//! create variables), between the first step at which it can run and the last. A tensor is held
//! while its creator is done and not all of its users were before.
//!
//! The window's steps are 0 ... n-1; a(v) and b(v) are the numbers of its operators that have to
//! run before and after v. The columns and rows are:
//!
//! - `done(v, t)`, 0 or 1: v has run by step t; 0 for t < a(v), 1 for t >= n-1-b(v).
//!   `done(v, t) <= done(v, t+1)`; `done(v, t) <= done(u, t-1)` where v needs u; the sum of
//!   `done(v, t)` over v is t+1.
//! - `held(i, t)`: whether i is live while step t runs. `held(i, t) >= done(creator of i, t) -
//!   done(u, t-1)` for every last user u of i, that is, a user that no other user of i must follow.
//!   Where i is needed after the window, `held(i, t)` is `done(creator of i, t)`. Where there is
//!   only one such user, `held` is the right-hand side and needs no column.
//! - `saved(p, t)`: whether v runs at t and its permitted reuse pair p is used. The sum of
//!   `saved(p, t)` over the pairs of v with one input, or with one output, is at most
//!   `done(v, t) - done(v, t-1)`; and `saved(p, t) <= done(u, t-1)` for every other user u of p's
//!   input.
//! - For every t: bytes that no sequence changes + sum of `size * held(t)` + sum of the bytes that
//!   live during v alone `* (done(v, t) - done(v, t-1))` <= peak + sum of `size * saved(t)`. The
//!   peak is the one column that costs.
//!
//! If `done` is integral, its values are exactly the down-sets of a sequence. The least `held` is
//! then 0 or 1, as the definition of live bytes has it, and no fractional matching `saved` saves
//! more than the best integral one. So the least peak of the program is the least over all
//! sequences, and only `done` and the peak need to be integer columns.
//!
//! Bytes are divided by their greatest common divisor (a *unit*). A program in which a row could
//! reach 2^52 units is not solved, as a double would not hold it.

use crate::mip::{Column, Program, Sense, common_divisor};
use crate::order::window::{Set, Window};
use crate::problem::{Index, Ten};
use std::collections::BTreeMap;

/// A number that is known, or a column of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Known(i64),
    Column(usize),
}

/// A sum of columns with whole factors, and a number.
#[derive(Clone, Debug, Default)]
struct Sum {
    terms: BTreeMap<usize, i64>,
    constant: i64,
}

impl Sum {
    fn add(&mut self, value: Value, by: i64) {
        match value {
            Value::Known(number) => self.constant += by * number,
            Value::Column(at) => *self.terms.entry(at).or_insert(0) += by,
        }
    }

    /// Whether it has no column.
    fn is_known(&self) -> bool {
        self.terms.values().all(|&by| by == 0)
    }

    /// Demands that the sum compares with 0 in this sense.
    fn demand(self, sense: Sense, program: &mut Program) {
        if !self.is_known() {
            program.row(self.terms.into_iter().filter(|&(_, by)| by != 0).collect(), sense, -self.constant);
        }
    }
}

/// A window's order as a program.
pub(super) struct OrderProgram {
    window: Window,
    /// Bytes per unit of the program's cost.
    pub(super) unit: u64,
    pub(super) program: Program,
    /// The window's present sequence as values of the columns.
    pub(super) start: Vec<i64>,
    /// Per operator its first and its last possible step, and the column that says whether it is
    /// done by the first one; the columns for the later steps, without the last one, follow.
    span: Vec<(usize, usize, usize)>,
}

impl OrderProgram {
    /// The program whose cost is the window's peak, or `floor` where that is higher; `None` where
    /// it would have more than `most` entries, or numbers that a solver cannot hold.
    pub(super) fn new(window: Window, floor: u64, most: u64) -> Option<Self> {
        let count = window.len();
        let (ancestors, descendants) = (window.closure(true), window.closure(false));
        let sizes = window.tensors.iter().map(|local| local.size);
        let others = (0..count).map(|op| window.passing_bytes(op)).chain([window.first_bytes, window.unused_bytes]);
        let unit = common_divisor(sizes.chain(others)).max(1);
        let peak = i64::try_from(window.peak(&(0..count).collect::<Vec<_>>()).div_ceil(unit)).ok()?;
        let floor = i64::try_from(floor.div_ceil(unit)).ok()?.min(peak);
        let spans = (0..count).map(|op| count - 1 - ancestors[op].iter().count() - descendants[op].iter().count());
        if spans.sum::<usize>() as u64 > most {
            return None;
        }
        let mut program = Program::default();
        let highest = program.column(Column { lower: floor, upper: peak, cost: 1, integer: true });
        let mut this = OrderProgram { window, unit, program, start: vec![peak], span: Vec::new() };
        for op in 0..count {
            let (first, last) = (ancestors[op].iter().count(), count - 1 - descendants[op].iter().count());
            let column = this.program.columns.len();
            (first..last).for_each(|step| {
                this.unknown(true, op <= step);
            });
            this.span.push((first, last, column));
        }
        for step in 0..count {
            this.one_more(step);
            let mut live = Sum { constant: this.units(this.window.first_bytes)?, ..Sum::default() };
            if step == 0 {
                live.constant += this.units(this.window.unused_bytes)?;
            }
            for op in 0..count {
                this.keep_sequence(op, step, &ancestors);
                let bytes = this.units(this.window.passing_bytes(op))?;
                live.add(this.done(op, step), bytes);
                live.add(this.done_before(op, step), -bytes);
                this.save(op, step, &ancestors, &descendants, &mut live)?;
            }
            for tensor in 0..this.window.tensors.len() {
                this.hold(tensor, step, &ancestors, &mut live)?;
            }
            live.add(Value::Column(highest), -1);
            live.demand(Sense::Less, &mut this.program);
            if this.program.entries() > most {
                return None;
            }
        }
        debug_assert!(this.program.admits(&this.start), "the start breaks a row");
        (this.program.is_exact() && this.program.admits(&this.start)).then_some(this)
    }

    /// The sequence that the values of a solution stand for, if the window permits it.
    pub(super) fn sequence(&self, values: &[f64]) -> Option<Vec<usize>> {
        if values.len() != self.program.columns.len() {
            return None;
        }
        let step = |op: usize| {
            let (first, last, column) = self.span[op];
            (first..last).find(|step| values[column + step - first] > 0.5).unwrap_or(last)
        };
        let mut sequence: Vec<usize> = (0..self.window.len()).collect();
        sequence.sort_by_key(|&op| (step(op), op));
        let mut done = self.window.start();
        sequence
            .iter()
            .all(|&op| {
                let can_run = self.window.can_run(op, &done);
                done.toggle(op);
                can_run
            })
            .then_some(sequence)
    }

    /// The least cost that the program allows, whatever the window needs.
    pub(super) fn floor(&self) -> i64 {
        self.program.columns[0].lower
    }

    fn units(&self, bytes: u64) -> Option<i64> {
        i64::try_from(bytes / self.unit).ok()
    }

    /// A new column between 0 and 1, which is 1 at the start or not.
    fn unknown(&mut self, integer: bool, at_start: bool) -> Value {
        self.start.push(i64::from(at_start));
        Value::Column(self.program.column(Column { lower: 0, upper: 1, cost: 0, integer }))
    }

    /// Whether the operator runs at the step or before it.
    fn done(&self, op: usize, step: usize) -> Value {
        let (first, last, column) = self.span[op];
        match step {
            _ if step < first => Value::Known(0),
            _ if step >= last => Value::Known(1),
            _ => Value::Column(column + step - first),
        }
    }

    fn done_before(&self, op: usize, step: usize) -> Value {
        step.checked_sub(1).map_or(Value::Known(0), |before| self.done(op, before))
    }

    /// One operator runs at every step.
    fn one_more(&mut self, step: usize) {
        let mut sum = Sum { constant: -(step as i64 + 1), ..Sum::default() };
        (0..self.window.len()).for_each(|op| sum.add(self.done(op, step), 1));
        sum.demand(Sense::Equal, &mut self.program);
    }

    /// What is done stays done, and nothing is done before what it needs.
    fn keep_sequence(&mut self, op: usize, step: usize, ancestors: &[Set]) {
        let now = self.done(op, step);
        let mut earlier = vec![(now, self.done_before(op, step))];
        for before in self.window.before[op].iter() {
            // What another operator in between demands anyway need not be said.
            if !self.window.before[op].iter().any(|between| ancestors[between].contains(before)) {
                earlier.push((self.done_before(before, step), now));
            }
        }
        for (more, less) in earlier {
            let mut sum = Sum::default();
            sum.add(less, 1);
            sum.add(more, -1);
            sum.demand(Sense::Less, &mut self.program);
        }
    }

    /// Adds what a tensor holds while the step's operator runs.
    fn hold(&mut self, tensor: usize, step: usize, ancestors: &[Set], live: &mut Sum) -> Option<()> {
        let local = &self.window.tensors[tensor];
        let size = self.units(local.size)?;
        let made = local.creator.map_or(Value::Known(1), |op| self.done(op, step));
        if local.creator.is_none() {
            // The tensor is among those that cross the window's beginning.
            live.constant -= size;
        }
        // Only users that no other must follow can be the last.
        let last: Vec<usize> = local
            .users
            .iter()
            .filter(|&user| !local.users.iter().any(|other| ancestors[other].contains(user)))
            .collect();
        let used: Vec<Value> = last.iter().map(|&user| self.done_before(user, step)).collect();
        if local.stays || used.contains(&Value::Known(0)) {
            live.add(made, size);
            return Some(());
        }
        let open: Vec<Value> = used.iter().copied().filter(|&value| value != Value::Known(1)).collect();
        match open[..] {
            [] => {}
            [only] if made == Value::Known(1) || used.len() == 1 => {
                live.add(made, size);
                live.add(only, -size);
            }
            _ => {
                let created = local.creator.is_none_or(|op| op <= step);
                let held = self.unknown(false, created && last.iter().any(|&user| user >= step));
                for user in open {
                    let mut sum = Sum::default();
                    sum.add(held, 1);
                    sum.add(user, 1);
                    sum.add(made, -1);
                    sum.demand(Sense::Greater, &mut self.program);
                }
                live.add(held, size);
            }
        }
        Some(())
    }

    /// Takes off what the operator saves by reuse if it is the one that runs at the step.
    fn save(&mut self, op: usize, step: usize, ancestors: &[Set], descendants: &[Set], live: &mut Sum) -> Option<()> {
        let (first, last, _) = self.span[op];
        if !(first..=last).contains(&step) {
            return Some(());
        }
        let mut by_tensor: BTreeMap<(bool, Ten), Sum> = BTreeMap::new();
        // In the present sequence every operator runs at its own number.
        let matched = if step == op { self.window.matching(op, &self.window.prefix(op)) } else { Vec::new() };
        for (input, output) in self.window.permissions(op).to_vec() {
            let users = self.window.tensors[input.index()].users.clone();
            // The input can never die here if another user must come later.
            if users.iter().any(|user| descendants[op].contains(user)) {
                continue;
            }
            let saved = self.unknown(false, matched.contains(&(input, output)));
            live.add(saved, -self.units(self.window.tensors[input.index()].size)?);
            for user in users.iter().filter(|&user| user != op && !ancestors[op].contains(user)) {
                let mut sum = Sum::default();
                sum.add(saved, 1);
                sum.add(self.done_before(user, step), -1);
                if sum.terms.len() == 1 && sum.constant == -1 {
                    continue;
                }
                sum.demand(Sense::Less, &mut self.program);
            }
            for tensor in [(false, input), (true, output)] {
                by_tensor.entry(tensor).or_default().add(saved, 1);
            }
        }
        // Each input and each output is in one pair at most, and in none while another operator
        // runs.
        for mut sum in by_tensor.into_values() {
            sum.add(self.done(op, step), -1);
            sum.add(self.done_before(op, step), 1);
            sum.demand(Sense::Less, &mut self.program);
        }
        Some(())
    }
}
