//! Which operators may run again, until when, what these runs touch, and what must have run before.
//!
//! The *version* of an instance of a tensor is how many of the tensor's mutators have run on it. A
//! run of an operator needs instances of the versions that program order has there, and any will
//! do. A tensor that nothing can bring back to a version (it exists before the step, or an operator
//! that runs only once made or changed it) is *single* from there on: its next mutator ends what may
//! read that version.

use crate::cost::rerun_ns;
use crate::graph::{Graph, Operator, OperatorId, Residency, TensorId};
use crate::problem::{Index, NONE, Op, Problem, Rows, Ten};

/// The graph with what further runs ask for. Tensors are those that count.
#[derive(Clone, Debug)]
pub(crate) struct Repeats {
    pub(super) problem: Problem,
    /// Bytes of tensors that exist before and after the step.
    pub(super) persistent_bytes: u64,
    /// Nanoseconds of a further run.
    pub(super) time_ns: Vec<u64>,
    /// Whether the operator runs once in every schedule.
    pub(super) once: Vec<bool>,
    /// What must have run, at least once, before any run of an operator.
    pub(super) before: Rows<Op, Op>,
    /// The same, turned round.
    pub(super) after: Rows<Op, Op>,
    /// Operators, which run once, after which an operator cannot run again.
    pub(super) ends: Rows<Op, Op>,
    /// What every run reads or mutates.
    pub(super) needs: Rows<Op, Ten>,
    /// Per tensor the operators that mutate it, ascending.
    pub(super) mutators: Rows<Ten, Op>,
}

impl Repeats {
    pub(crate) fn new(graph: &Graph) -> Self {
        let problem = Problem::new(graph, true);
        let mut rank = vec![Ten::NONE; graph.tensors().len()];
        for tensor in problem.tensor_ranks() {
            rank[problem.tensor_id(tensor).index()] = tensor;
        }
        let counted = |tensors: &[TensorId]| -> Vec<Ten> {
            tensors.iter().map(|tensor| rank[tensor.index()]).filter(|&tensor| tensor != Ten::NONE).collect()
        };
        let mut walk = Walk::new(graph);
        let mut needs = Vec::with_capacity(problem.len());
        for op in 0..problem.len() as Op {
            needs.push(counted(&walk.step(op)));
        }
        // So that no sum overflows.
        let most_ns = (1 << 61) / problem.len().max(1) as u64;
        let before = Rows::collect(walk.before.into_iter());
        Repeats {
            persistent_bytes: graph.persistent_bytes(),
            time_ns: graph.program_order().iter().map(|&id| rerun_ns(graph, id).min(most_ns)).collect(),
            once: walk.once,
            after: before.transposed(problem.len()),
            before,
            ends: Rows::collect(walk.ends.into_iter()),
            needs: Rows::collect(needs.into_iter()),
            mutators: Rows::collect(
                problem.tensor_ranks().map(|t| walk.tensors[problem.tensor_id(t).index()].mutators.iter().copied()),
            ),
            problem,
        }
    }

    /// Operators and accesses.
    pub(super) fn size(&self) -> usize {
        let ops = 0..self.once.len() as Op;
        ops.map(|op| 1 + self.before.row(op).len() + self.needs.row(op).len()).sum()
    }

    /// Per operator its own working set and, in program order, the live tensors that exist once:
    /// where this is the most, a floor may be high.
    pub(super) fn most_single_bytes(&self) -> Vec<u64> {
        let problem = &self.problem;
        let mut changes = vec![0u64; problem.len() + 1];
        for tensor in problem.tensor_ranks() {
            let mutators = self.mutators.row(tensor);
            let creator = self.creator(tensor);
            let single = match creator {
                Some(creator) if !self.once[creator as usize] => {
                    mutators.iter().copied().find(|&mutator| self.once[mutator as usize])
                }
                creator => Some(creator.unwrap_or(0)),
            };
            let end = match problem.tensors[tensor.index()].residency {
                Residency::Leaves => problem.len(),
                _ => problem.users.row(tensor).last().map_or(0, |&last| last as usize + 1),
            };
            if let Some(begin) = single.map(|op| op as usize).filter(|&begin| begin < end) {
                changes[begin] = changes[begin].wrapping_add(problem.size(tensor));
                changes[end] = changes[end].wrapping_sub(problem.size(tensor));
            }
        }
        let mut now = 0u64;
        (0..problem.len() as Op)
            .map(|op| {
                now = now.wrapping_add(changes[op as usize]);
                let own: u64 = self.needs.row(op).iter().map(|&tensor| problem.size(tensor)).sum();
                now + own + problem.transient(op)
            })
            .collect()
    }

    /// The version of a tensor that an operator uses.
    pub(super) fn version(&self, tensor: Ten, op: Op) -> usize {
        self.mutators.row(tensor).partition_point(|&mutator| mutator < op)
    }

    /// Who makes the tensor; `None` where it enters.
    pub(super) fn creator(&self, tensor: Ten) -> Option<Op> {
        Some(self.problem.tensors[tensor.index()].creator).filter(|&creator| creator != NONE)
    }
}

/// A tensor, while operators are looked at in program order.
#[derive(Clone, Debug, Default)]
struct Progress {
    creator: Option<Op>,
    mutators: Vec<Op>,
    /// How many of them have run.
    version: usize,
    is_single: bool,
    /// Who has read this version.
    readers: Vec<Op>,
}

struct Walk<'a> {
    graph: &'a Graph,
    waits_for: Vec<Vec<OperatorId>>,
    tensors: Vec<Progress>,
    last_of_sequence: [Option<Op>; 2],
    once: Vec<bool>,
    before: Vec<Vec<Op>>,
    ends: Vec<Vec<Op>>,
}

impl<'a> Walk<'a> {
    fn new(graph: &'a Graph) -> Self {
        let mut tensors = vec![Progress::default(); graph.tensors().len()];
        for (index, tensor) in tensors.iter_mut().enumerate() {
            tensor.is_single = graph.creator(TensorId(index as u32)).is_none();
        }
        for (op, &id) in graph.program_order().iter().enumerate() {
            for tensor in &graph.operator(id).creates {
                tensors[tensor.index()].creator = Some(op as Op);
            }
            for tensor in &graph.operator(id).mutates {
                tensors[tensor.index()].mutators.push(op as Op);
            }
        }
        let mut waits_for = vec![Vec::new(); graph.operators().len()];
        for &(before, after) in graph.control() {
            waits_for[after.index()].push(before);
        }
        Walk {
            graph,
            waits_for,
            tensors,
            last_of_sequence: [None; 2],
            once: Vec::new(),
            before: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// Takes the next operator; returns what each of its runs touches.
    fn step(&mut self, op: Op) -> Vec<TensorId> {
        let graph = self.graph;
        let id = graph.program_order()[op as usize];
        let operator = graph.operator(id);
        let runs_once = self.runs_once(operator);
        let is_needed = |tensor: &TensorId| runs_once || !operator.first_only.contains(tensor);
        let mut needed: Vec<TensorId> =
            operator.reads.iter().chain(&operator.mutates).copied().filter(is_needed).collect();
        needed.sort_unstable();
        needed.dedup();

        let mut before: Vec<Op> = self.waits_for[id.index()].iter().map(|&id| graph.operator(id).position).collect();
        if let Some(sequence) = operator.sequence {
            before.extend(self.last_of_sequence[sequence as usize].replace(op));
        }
        let mut ends = Vec::new();
        for &id in &needed {
            let tensor = &mut self.tensors[id.index()];
            // Each mutator needs the one before it.
            before.extend(match tensor.version {
                0 => tensor.creator,
                version => Some(tensor.mutators[version - 1]),
            });
            if !tensor.is_single {
                continue;
            }
            if operator.mutates.contains(&id) {
                // It runs once, and nothing can read this version after it.
                before.append(&mut tensor.readers);
            } else if let Some(&next) = tensor.mutators.get(tensor.version) {
                tensor.readers.push(op);
                let next_id = graph.program_order()[next as usize];
                if !graph.operator(next_id).first_only.contains(&id) {
                    ends.push(next);
                }
            }
        }
        for id in &operator.mutates {
            let tensor = &mut self.tensors[id.index()];
            tensor.version += 1;
            tensor.is_single |= runs_once || operator.first_only.contains(id);
            tensor.readers.clear();
        }
        for id in &operator.creates {
            self.tensors[id.index()].is_single = runs_once;
        }
        for list in [&mut before, &mut ends] {
            list.sort_unstable();
            list.dedup();
        }
        self.once.push(runs_once);
        self.before.push(before);
        self.ends.push(ends);
        needed
    }

    fn runs_once(&self, operator: &Operator) -> bool {
        let leaves = |tensor: &TensorId| self.graph.tensor(*tensor).residency == Residency::Leaves;
        let changes_single =
            |tensor: &TensorId| self.tensors[tensor.index()].is_single && !operator.first_only.contains(tensor);
        !operator.repeatable || operator.creates.iter().any(leaves) || operator.mutates.iter().any(changes_single)
    }
}
