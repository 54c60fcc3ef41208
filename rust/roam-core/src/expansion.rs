//! A step in which operators run more than once, as an ordinary graph.
//!
//! A *sequence* lists every operator at least once; each further entry is an extra run. What a run
//! reads, or waits for, comes from the latest run before it. [`expand`] makes a graph of a sequence
//! with one operator for each entry, so that order, layout, bounds and files need to know nothing
//! of recomputation.

use crate::graph::{Graph, GraphBuilder, GraphError, Operator, OperatorId, Residency, ReusePair, Site, TensorId};
use std::collections::BTreeSet;
use std::iter;
use thiserror::Error;

/// Why a list of operators is no sequence of a graph.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SequenceError {
    /// The graph has no such operator.
    #[error("the sequence names unknown operator {operator}")]
    Unknown {
        /// Its number.
        operator: u32,
    },
    /// An operator never runs.
    #[error("the sequence leaves out {site}")]
    Missing {
        /// The operator.
        site: Box<Site>,
    },
    /// An operator runs twice that may not.
    #[error("the sequence runs {site} again, which is not repeatable")]
    NotRepeatable {
        /// The operator.
        site: Box<Site>,
    },
    /// An operator runs twice though what it makes outlives the step.
    #[error("the sequence runs {site} again, which makes tensor `{tensor}`, and that leaves the step")]
    MakesWhatLeaves {
        /// The operator.
        site: Box<Site>,
        /// What it makes.
        tensor: String,
    },
    /// An operator runs before another one that it waits for, or whose random numbers or
    /// communication come first.
    #[error("the sequence runs {site} before {before}")]
    TooEarly {
        /// Runs too early.
        site: Box<Site>,
        /// Must come first.
        before: Box<Site>,
    },
    /// A run would find another value than program order has there.
    #[error("the sequence has {site} use tensor `{tensor}` when it has another value than in program order")]
    OtherValue {
        /// The operator.
        site: Box<Site>,
        /// The tensor.
        tensor: String,
    },
    /// A run uses a view of one instance of a tensor, and another instance itself.
    #[error("the sequence has {site} use tensor `{tensor}` as made anew, but the view by {view} as it was before")]
    OtherView {
        /// The operator.
        site: Box<Site>,
        /// The operator that made the view.
        view: Box<Site>,
        /// The tensor.
        tensor: String,
    },
    /// The graph with the extra runs is too large.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

impl SequenceError {
    /// The variant's name for programs, in snake case; stable between versions.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unknown { .. } => "sequence_unknown_operator",
            Self::Missing { .. } => "sequence_missing_operator",
            Self::NotRepeatable { .. } => "sequence_not_repeatable",
            Self::MakesWhatLeaves { .. } => "sequence_makes_what_leaves",
            Self::TooEarly { .. } => "sequence_too_early",
            Self::OtherValue { .. } => "sequence_other_value",
            Self::OtherView { .. } => "sequence_other_view",
            Self::Graph(error) => error.code(),
        }
    }

    /// The operator at fault, where there is one.
    pub fn site(&self) -> Option<&Site> {
        match self {
            Self::Unknown { .. } => None,
            Self::Missing { site }
            | Self::NotRepeatable { site }
            | Self::MakesWhatLeaves { site, .. }
            | Self::TooEarly { site, .. }
            | Self::OtherValue { site, .. }
            | Self::OtherView { site, .. } => Some(site),
            Self::Graph(error) => error.site(),
        }
    }
}

/// The graph of a sequence.
#[derive(Clone, Debug)]
pub struct Expanded {
    /// One operator for each entry of the sequence: its number and position are the entry's place.
    /// The original tensors keep their numbers, those of extra runs follow, by run and then by
    /// place in `creates`.
    pub graph: Graph,
    /// Per operator which of the original graph it is a run of.
    pub operator_of: Vec<OperatorId>,
    /// Per tensor which of the original graph it is an instance of.
    pub tensor_of: Vec<TensorId>,
}

/// Added to the name of a tensor that is made again.
const AGAIN: &str = " again";

/// Makes the graph of a sequence. Linear in the accesses of all runs, but for the builder's sort.
///
/// # Errors
/// See [`SequenceError`].
pub fn expand(graph: &Graph, sequence: &[OperatorId]) -> Result<Expanded, SequenceError> {
    let mut walk = Walk::new(graph);
    for &id in sequence {
        walk.run(id)?;
    }
    if let Some(missing) = walk.latest_run.iter().position(Option::is_none) {
        return Err(SequenceError::Missing { site: site(graph, OperatorId(missing as u32)) });
    }
    let mut builder = GraphBuilder::new(graph.name(), graph.device(), graph.alignment_bytes());
    builder.estimate = graph.estimate().to_owned();
    builder.accounting = graph.accounting().to_owned();
    builder.notes = graph.notes().to_vec();
    let tensors = walk.tensor_of.iter().enumerate().map(|(index, &of)| {
        let mut tensor = graph.tensor(of).clone();
        if index >= graph.tensors().len() {
            tensor.name.push_str(AGAIN);
        }
        tensor
    });
    let builder = builder.with_parts(tensors.collect(), walk.operators, walk.control, graph.regions().to_vec());
    Ok(Expanded { graph: builder.build()?, operator_of: sequence.to_vec(), tensor_of: walk.tensor_of })
}

fn site(graph: &Graph, id: OperatorId) -> Box<Site> {
    Site::of(graph.operator(id))
}

/// What has run so far.
struct Walk<'a> {
    graph: &'a Graph,
    /// Per operator, for each of its reads and then of its mutates: how many operators have changed
    /// the tensor before it in program order.
    versions: Vec<Vec<u32>>,
    /// Per operator those that it waits for by control edges.
    waits_for: Vec<Vec<OperatorId>>,
    operators: Vec<Operator>,
    control: Vec<(OperatorId, OperatorId)>,
    tensor_of: Vec<TensorId>,
    /// Per instance how many operators have changed it.
    version: Vec<u32>,
    /// Per tensor its latest instance; `None` where it has not been made.
    latest: Vec<Option<TensorId>>,
    /// Per operator its latest run.
    latest_run: Vec<Option<OperatorId>>,
    /// The last operator that drew random numbers, and the last that communicated, each in its first run;
    /// by the number of [`Sequence`](crate::graph::Sequence).
    last_of_sequence: [Option<OperatorId>; 2],
}

impl<'a> Walk<'a> {
    fn new(graph: &'a Graph) -> Self {
        let (operators, tensors) = (graph.operators().len(), graph.tensors().len());
        let mut changes = vec![0u32; tensors];
        let mut versions = vec![Vec::new(); operators];
        for &id in graph.program_order() {
            let operator = graph.operator(id);
            versions[id.index()] = touched(operator).map(|tensor| changes[tensor.index()]).collect();
            for tensor in &operator.mutates {
                changes[tensor.index()] += 1;
            }
        }
        let mut waits_for = vec![Vec::new(); operators];
        for &(before, after) in graph.control() {
            waits_for[after.index()].push(before);
        }
        let ids = (0..tensors as u32).map(TensorId);
        Walk {
            graph,
            versions,
            waits_for,
            operators: Vec::with_capacity(operators),
            control: Vec::with_capacity(graph.control().len()),
            tensor_of: ids.clone().collect(),
            version: vec![0; tensors],
            latest: ids.map(|id| graph.creator(id).is_none().then_some(id)).collect(),
            latest_run: vec![None; operators],
            last_of_sequence: [None; 2],
        }
    }

    /// Adds one more run of an operator.
    fn run(&mut self, id: OperatorId) -> Result<(), SequenceError> {
        let graph = self.graph;
        let Some(original) = graph.operators().get(id.index()) else {
            return Err(SequenceError::Unknown { operator: id.0 });
        };
        let is_again = self.latest_run[id.index()].is_some();
        if is_again {
            self.check_repeatable(id)?;
        }
        if !is_again {
            self.check_sequence(id)?;
        }
        let is_left_out = |tensor: &TensorId| is_again && original.first_only.contains(tensor);
        for (tensor, &version) in touched(original).zip(&self.versions[id.index()]) {
            let instance = self.latest[tensor.index()];
            if !is_left_out(&tensor) && instance.is_none_or(|instance| self.version[instance.index()] != version) {
                let tensor = graph.tensor(tensor).name.clone();
                return Err(SequenceError::OtherValue { site: site(graph, id), tensor });
            }
        }
        let place = OperatorId(self.operators.len() as u32);
        self.wait(id, place, is_left_out)?;
        // Every one of these tensors has been found to have an instance.
        let instances = |tensors: &[TensorId]| -> Vec<TensorId> {
            tensors.iter().filter(|tensor| !is_left_out(tensor)).filter_map(|t| self.latest[t.index()]).collect()
        };
        let (reads, mutates) = (instances(&original.reads), instances(&original.mutates));
        let first_only = if is_again { Vec::new() } else { instances(&original.first_only) };
        let inputs: Vec<Option<TensorId>> = original.reuse.iter().map(|pair| self.latest[pair.input.index()]).collect();
        let mut creates = Vec::with_capacity(original.creates.len());
        for &tensor in &original.creates {
            let instance = if is_again { self.add_instance(tensor) } else { tensor };
            self.latest[tensor.index()] = Some(instance);
            creates.push(instance);
        }
        for tensor in &mutates {
            self.version[tensor.index()] += 1;
        }
        let outputs = original.reuse.iter().map(|pair| self.latest[pair.output.index()]);
        let reuse = iter::zip(inputs, outputs).zip(&original.reuse).filter_map(|((input, output), pair)| {
            (!is_left_out(&pair.input)).then_some(ReusePair { input: input?, output: output? })
        });
        let reuse = reuse.collect();
        self.operators.push(Operator {
            position: place.0,
            reads,
            creates,
            mutates,
            reuse,
            first_only,
            // Further runs draw from a state that was kept.
            sequence: original.sequence.filter(|_| !is_again),
            ..original.clone()
        });
        self.latest_run[id.index()] = Some(place);
        Ok(())
    }

    fn add_instance(&mut self, tensor: TensorId) -> TensorId {
        let instance = TensorId(self.tensor_of.len() as u32);
        self.tensor_of.push(tensor);
        self.version.push(0);
        instance
    }

    fn check_repeatable(&self, id: OperatorId) -> Result<(), SequenceError> {
        let operator = self.graph.operator(id);
        if !operator.repeatable {
            return Err(SequenceError::NotRepeatable { site: site(self.graph, id) });
        }
        let leaves = |tensor: &&TensorId| self.graph.tensor(**tensor).residency == Residency::Leaves;
        match operator.creates.iter().find(leaves) {
            Some(&tensor) => Err(SequenceError::MakesWhatLeaves {
                site: site(self.graph, id),
                tensor: self.graph.tensor(tensor).name.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Random numbers are drawn, and ranks communicate, in program order.
    fn check_sequence(&mut self, id: OperatorId) -> Result<(), SequenceError> {
        let graph = self.graph;
        let Some(sequence) = graph.operator(id).sequence else { return Ok(()) };
        let last: &mut Option<OperatorId> = &mut self.last_of_sequence[sequence as usize];
        match last.replace(id) {
            Some(last) if graph.operator(last).position > graph.operator(id).position => {
                Err(SequenceError::TooEarly { site: site(graph, id), before: site(graph, last) })
            }
            _ => Ok(()),
        }
    }

    /// Adds the control edges of a run that does not touch what is left out.
    fn wait(
        &mut self,
        id: OperatorId,
        place: OperatorId,
        is_left_out: impl Fn(&TensorId) -> bool,
    ) -> Result<(), SequenceError> {
        if self.waits_for[id.index()].is_empty() {
            return Ok(());
        }
        let graph = self.graph;
        let used: BTreeSet<TensorId> = touched(graph.operator(id)).filter(|tensor| !is_left_out(tensor)).collect();
        for &before in &self.waits_for[id.index()] {
            let Some(run) = self.latest_run[before.index()] else {
                return Err(SequenceError::TooEarly { site: site(graph, id), before: site(graph, before) });
            };
            let view = graph.operator(before);
            if view.creates.is_empty() && view.mutates.is_empty() {
                for &instance in &self.operators[run.index()].reads {
                    let tensor = self.tensor_of[instance.index()];
                    if used.contains(&tensor) && self.latest[tensor.index()] != Some(instance) {
                        return Err(SequenceError::OtherView {
                            site: site(graph, id),
                            view: site(graph, before),
                            tensor: graph.tensor(tensor).name.clone(),
                        });
                    }
                }
            }
            self.control.push((run, place));
        }
        Ok(())
    }
}

/// What an operator reads, and then what it mutates.
fn touched(operator: &Operator) -> impl Iterator<Item = TensorId> + '_ {
    operator.reads.iter().chain(&operator.mutates).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Kind, Phase, Tensor};

    /// `a` makes x from weight w; `b` changes x in place; `v` makes a view of x; `c` and `d` use x
    /// by the view; `u` changes w.
    fn step() -> Graph {
        let mut builder = GraphBuilder::new("step", "cpu", 64);
        let tensor = |builder: &mut GraphBuilder, name: &str, residency| {
            let tensor =
                Tensor { name: name.into(), size_bytes: 64, kind: Kind::Temporary, residency, alignment_bytes: 0 };
            builder.tensor(tensor).unwrap()
        };
        let w = tensor(&mut builder, "w", Residency::Persistent);
        let x = tensor(&mut builder, "x", Residency::StepLocal);
        let y = tensor(&mut builder, "y", Residency::StepLocal);
        let z = tensor(&mut builder, "z", Residency::Leaves);
        let mut add = |reads: &[TensorId], creates: &[TensorId], mutates: &[TensorId], repeatable| {
            let at = builder.num_operators() as u32;
            let name = ["a", "b", "v", "c", "d", "u"][at as usize];
            let operator = Operator {
                reads: reads.to_vec(),
                creates: creates.to_vec(),
                mutates: mutates.to_vec(),
                repeatable,
                ..Operator::new(name, at, Phase::Forward)
            };
            builder.operator(operator).unwrap()
        };
        add(&[w], &[x], &[], true);
        add(&[], &[], &[x], true);
        let v = add(&[x], &[], &[], true);
        let c = add(&[x], &[y], &[], false);
        let d = add(&[x, y], &[z], &[], true);
        add(&[z], &[], &[w], true);
        builder.control(v, c);
        builder.control(v, d);
        builder.build().unwrap()
    }

    fn ids(numbers: &[u32]) -> Vec<OperatorId> {
        numbers.iter().copied().map(OperatorId).collect()
    }

    fn code(sequence: &[u32]) -> &'static str {
        expand(&step(), &ids(sequence)).unwrap_err().code()
    }

    #[test]
    fn program_order_is_the_graph_itself() {
        let graph = step();
        assert_eq!(expand(&graph, &ids(&[0, 1, 2, 3, 4, 5])).unwrap().graph, graph);
    }

    #[test]
    fn a_chain_that_changes_in_place_is_made_again_with_its_view() {
        let expanded = expand(&step(), &ids(&[0, 1, 2, 3, 0, 1, 2, 4, 5])).unwrap();
        let anew = TensorId(4);
        assert_eq!(expanded.tensor_of[4], TensorId(1));
        assert_eq!(expanded.graph.tensor(anew).name, "x again");
        assert_eq!(expanded.graph.users(anew), ids(&[5, 6, 7]));
        assert_eq!(expanded.graph.users(TensorId(1)), ids(&[1, 2, 3]));
        assert_eq!(expanded.graph.control(), [(OperatorId(2), OperatorId(3)), (OperatorId(6), OperatorId(7))]);
    }

    #[test]
    fn only_the_first_run_touches_first_only_tensors() {
        let mut builder = GraphBuilder::new("norm", "cpu", 64);
        for (name, residency) in [("statistics", Residency::Persistent), ("x", Residency::StepLocal)] {
            let tensor =
                Tensor { name: name.into(), size_bytes: 64, kind: Kind::Buffer, residency, alignment_bytes: 0 };
            builder.tensor(tensor).unwrap();
        }
        let norm = Operator {
            creates: vec![TensorId(1)],
            mutates: vec![TensorId(0)],
            repeatable: true,
            first_only: vec![TensorId(0)],
            ..Operator::new("norm", 0, Phase::Forward)
        };
        builder.operator(norm).unwrap();
        let user = Operator { reads: vec![TensorId(1)], ..Operator::new("user", 1, Phase::Backward) };
        builder.operator(user).unwrap();
        let expanded = expand(&builder.build().unwrap(), &ids(&[0, 0, 1])).unwrap();
        assert_eq!(expanded.graph.users(TensorId(0)), ids(&[0]));
    }

    /// `norm` reads the state of its generator, which `v` views, in its first run alone.
    #[test]
    fn a_view_of_a_first_only_tensor_may_be_of_another_instance() {
        let mut builder = GraphBuilder::new("norm", "cpu", 64);
        for name in ["state", "x"] {
            let (residency, kind) = (Residency::StepLocal, Kind::Temporary);
            builder.tensor(Tensor { name: name.into(), size_bytes: 64, kind, residency, alignment_bytes: 0 }).unwrap();
        }
        let lists: [[&[TensorId]; 3]; 4] = [
            [&[], &[TensorId(0)], &[]],
            [&[TensorId(0)], &[], &[]],
            [&[TensorId(0)], &[TensorId(1)], &[TensorId(0)]],
            [&[TensorId(1)], &[], &[]],
        ];
        for (at, [reads, creates, first_only]) in
            lists.map(|lists| lists.map(<[TensorId]>::to_vec)).into_iter().enumerate()
        {
            let new = Operator::new("", at as u32, Phase::Forward);
            builder.operator(Operator { reads, creates, first_only, repeatable: true, ..new }).unwrap();
        }
        builder.control(OperatorId(1), OperatorId(2));
        let graph = builder.build().unwrap();
        let expanded = expand(&graph, &ids(&[0, 1, 2, 0, 2, 3])).unwrap();
        assert_eq!(expanded.graph.users(TensorId(0)), ids(&[1, 2]));
    }

    #[test]
    fn what_would_differ_is_refused() {
        assert_eq!(code(&[0, 1, 2, 3, 4]), "sequence_missing_operator");
        assert_eq!(code(&[0, 1, 2, 3, 4, 9]), "sequence_unknown_operator");
        assert_eq!(code(&[0, 1, 2, 3, 3, 4, 5]), "sequence_not_repeatable");
        assert_eq!(code(&[0, 1, 2, 3, 4, 4, 5]), "sequence_makes_what_leaves");
        // Changed twice; not changed when it is used; made from weights that have been updated.
        assert_eq!(code(&[0, 1, 1, 2, 3, 4, 5]), "sequence_other_value");
        assert_eq!(code(&[0, 1, 2, 3, 0, 2, 4, 5]), "sequence_other_value");
        assert_eq!(code(&[0, 1, 2, 3, 4, 5, 0]), "sequence_other_value");
        // The view is of the old instance; there is no view yet.
        assert_eq!(code(&[0, 1, 2, 3, 0, 1, 4, 5]), "sequence_other_view");
        assert_eq!(code(&[0, 1, 3, 2, 4, 5]), "sequence_too_early");
    }
}
