//! Graphs and layouts at the edges of what is permitted, through the whole planner. Debug builds
//! trap every overflow.

use crate::common::buffers::check;
use roam_core::cost::MAX_NS;
use roam_core::graph::{Graph, GraphBuilder, Kind, Operator, Phase, Residency, Tensor, TensorId};
use roam_core::layout::pack;
use roam_core::optimize::{Control, OptimizeError, optimize};
use roam_core::packing::Buffer;
use roam_core::plan::{Plan, Settings, Status};

struct Made(GraphBuilder);

impl Made {
    fn new(alignment_bytes: u64) -> Self {
        Made(GraphBuilder::new("hard", "cpu", alignment_bytes))
    }

    fn tensor(&mut self, size_bytes: u64, alignment_bytes: u64) -> TensorId {
        let name = self.0.num_tensors().to_string();
        let tensor =
            Tensor { name, size_bytes, alignment_bytes, kind: Kind::Temporary, residency: Residency::StepLocal };
        self.0.tensor(tensor).expect("few tensors")
    }

    fn operator(&mut self, reads: &[TensorId], creates: &[TensorId]) {
        let operator = Operator {
            reads: reads.to_vec(),
            creates: creates.to_vec(),
            ..Operator::new("", self.0.num_operators() as u32, Phase::Forward)
        };
        self.0.operator(operator).expect("few operators");
    }

    /// Each operator reads what the one before made.
    fn chain(sizes: impl IntoIterator<Item = u64>, alignment_bytes: u64) -> Graph {
        let mut made = Made::new(1);
        let mut last = Vec::new();
        for size in sizes {
            let tensor = made.tensor(size, alignment_bytes);
            made.operator(&last, &[tensor]);
            last = vec![tensor];
        }
        made.build()
    }

    fn build(self) -> Graph {
        self.0.build().expect("a valid graph")
    }
}

/// Planned and, by the planner itself, verified.
fn planned(graph: &Graph) -> Plan {
    optimize(graph, &Settings::SINGLE, &Control::default()).expect("a plan")
}

#[test]
fn one_chain_needs_its_two_largest_neighbours() {
    let plan = planned(&Made::chain((0..20_000).map(|at| 1 + at * 7919 % 1000), 1));
    let sizes: Vec<u64> = (0..20_000).map(|at| 1 + at * 7919 % 1000).collect();
    let most = sizes.windows(2).map(|pair| pair[0] + pair[1]).max().unwrap_or(0);
    assert_eq!((plan.pool_bytes, plan.lower_bound_bytes), (most, most));
    assert_eq!(plan.status, Status::Optimal);
}

#[test]
fn independent_operators_need_the_largest() {
    let mut made = Made::new(1);
    for at in 0..20_000 {
        let tensor = made.tensor(at % 1000, 1);
        made.operator(&[], &[tensor]);
    }
    let plan = planned(&made.build());
    assert_eq!((plan.pool_bytes, plan.status), (999, Status::Optimal));
}

#[test]
fn empty_tensors_need_nothing() {
    let plan = planned(&Made::chain([0; 100], 1 << 30));
    assert_eq!((plan.pool_bytes, plan.peak_bytes, plan.status), (0, 0, Status::Optimal));
}

#[test]
fn one_tensor_may_be_larger_than_all_others() {
    let mut made = Made::new(1);
    let large = made.tensor(1 << 60, 1);
    made.operator(&[], &[large]);
    let others: Vec<TensorId> = (0..500).map(|at| made.tensor(1 + at % 3, 1)).collect();
    for &other in &others {
        made.operator(&[large], &[other]);
    }
    for &other in &others {
        made.operator(&[other], &[]);
    }
    let plan = planned(&made.build());
    assert_eq!((plan.pool_bytes, plan.status), ((1 << 60) + 3, Status::Optimal));
}

#[test]
fn sizes_may_add_up_to_nearly_two_to_the_63() {
    let part = i64::MAX as u64 / 4 - 1;
    let plan = planned(&Made::chain([part, part, part - 7, part], 1));
    assert_eq!((plan.pool_bytes, plan.status), (2 * part, Status::Optimal));
    let alone = planned(&Made::chain([i64::MAX as u64 - 1], 1));
    assert_eq!(alone.pool_bytes, i64::MAX as u64 - 1);
}

#[test]
fn alignments_may_be_huge() {
    let plan = planned(&Made::chain([5, 3, 9, 1], 1 << 30));
    assert_eq!(plan.pool_bytes % (1 << 30), 0);
    assert_eq!((plan.pool_bytes, plan.status), (2 << 30, Status::Optimal));
}

#[test]
fn wide_updates_are_run_one_by_one() {
    let mut made = Made::new(1);
    let gradients: Vec<TensorId> = (0..20_000).map(|_| made.tensor(8, 1)).collect();
    for &gradient in &gradients {
        made.operator(&[], &[gradient]);
    }
    for &gradient in &gradients {
        let temporary = made.tensor(4, 1);
        made.operator(&[gradient], &[temporary]);
    }
    let plan = planned(&made.build());
    assert_eq!((plan.pool_bytes, plan.status), (12, Status::Optimal));
    assert_eq!(plan.program_order_peak_bytes, 8 * 20_000 + 4);
}

#[test]
fn bare_buffers_at_the_edges_are_packed() {
    let buffer = |lower, upper, size_bytes, alignment_bytes| Buffer { lower, upper, size_bytes, alignment_bytes };
    let huge = 1 << 61;
    let cases = [
        vec![buffer(0, u64::MAX, i64::MAX as u64 - 1, 1)],
        vec![buffer(0, 2, huge, 1), buffer(1, 3, huge - 5, 1), buffer(2, 4, huge, 1), buffer(3, 9, 7, 1)],
        vec![buffer(0, 2, 1, huge), buffer(1, 3, 1, huge)],
        vec![buffer(u64::MAX - 1, u64::MAX, 3, 1 << 20), buffer(0, u64::MAX, 1, 1), buffer(0, 1, 0, 1 << 62)],
        (0..3000).map(|at| buffer(at, at + 1, 1 + at % 5, 1)).collect(),
        (0..3000).map(|at| buffer(0, 1 + at % 7, 0, 1 << (at % 40))).collect(),
        (0..3000).map(|at| buffer(0, 1 + at, 1, 1)).collect(),
    ];
    for buffers in cases {
        let packing = pack(&buffers, 2_000_000, &Control::default()).expect("a packing");
        check(&buffers, &packing);
    }
}

/// Two operators make a tensor of `unit` bytes that is used before and after one of five units: two
/// extra runs save it meanwhile.
fn recomputable(unit: u64, time_ns: u64) -> Graph {
    let mut made = Made::new(1);
    let tensors = [unit, unit, 1, 5 * unit, 1, 1].map(|size| made.tensor(size, 1));
    let reads: [&[usize]; 6] = [&[], &[0], &[1], &[2], &[3], &[1, 4]];
    for (at, reads) in reads.into_iter().enumerate() {
        let operator = Operator {
            reads: reads.iter().map(|&read| tensors[read]).collect(),
            creates: vec![tensors[at]],
            repeatable: true,
            time_ns,
            ..Operator::new("", at as u32, Phase::Forward)
        };
        made.0.operator(operator).expect("few operators");
    }
    made.build()
}

fn within(graph: &Graph, limit_bytes: u64) -> Result<Plan, OptimizeError> {
    let settings = Settings { memory_limit_bytes: Some(limit_bytes), ..Settings::SINGLE };
    optimize(graph, &settings, &Control::default())
}

#[test]
fn the_longest_times_are_summed_up_to_the_most_that_there_is() {
    let plan = within(&recomputable(100, MAX_NS), 510).expect("a plan");
    assert_eq!(plan.recomputation.expect("two extra runs").extra_ns, MAX_NS);
}

#[test]
fn a_schedule_of_more_bytes_in_all_than_a_graph_may_count_is_not_found() {
    assert!(within(&recomputable(1 << 59, 1), 5 << 59 | 8).is_ok());
    let refused = within(&recomputable(1 << 60, 1), 5 << 60 | 8);
    assert!(matches!(refused, Err(OptimizeError::LimitNotFound { .. })), "{refused:?}");
}
