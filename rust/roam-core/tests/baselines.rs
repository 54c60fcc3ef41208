//! Orders and layouts that the planner is compared with: valid on any graph, and what their rules
//! say on cases worked out by hand.

use crate::common::{random_graph, swept};
use roam_core::graph::{
    Graph, GraphBuilder, Kind, Operator, OperatorId, Phase, Residency, ReusePair, Tensor, TensorId,
};
use roam_core::liveness::live_bytes;
use roam_core::rng::Random;
use roam_core::stages::Prepared;

const ALLOCATORS: [&str; 2] = ["caching_allocator", "caching_allocator_expandable"];

#[test]
fn every_order_is_valid_and_no_layout_takes_less_than_is_live() {
    let mut random = Random::new(31);
    for round in 0..swept(50) {
        let graph = random_graph(&mut random, if round % 10 == 0 { 40 } else { 10 });
        for reuse in [false, true] {
            let prepared = Prepared::new(&graph, reuse);
            for name in Prepared::orders() {
                let ordered = prepared.order(name).expect("a known order");
                let ids: Vec<OperatorId> =
                    ordered.positions().iter().map(|&at| graph.program_order()[at as usize]).collect();
                assert!(live_bytes(&graph, &ids).is_ok(), "{name} breaks a constraint");
                for layout in Prepared::layouts() {
                    let needs = prepared.needs(&ordered, layout).expect("a known layout");
                    if ALLOCATORS.contains(&layout) {
                        assert!(needs.pool_bytes >= ordered.peak_bytes() && needs.unpooled_bytes == 0);
                    } else {
                        assert!(needs.pool_bytes >= ordered.pool_peak_bytes(), "{layout}");
                        assert_eq!(needs.unpooled_bytes, ordered.unpooled_peak_bytes());
                    }
                }
            }
        }
    }
}

/// Builds a graph operator by operator; sizes in any unit.
struct Sketch(GraphBuilder);

impl Sketch {
    fn new() -> Self {
        Sketch(GraphBuilder::new("sketch", "cpu", 1))
    }

    fn tensor(&mut self, size_bytes: u64, residency: Residency) -> TensorId {
        let name = format!("t{}", self.0.num_tensors());
        let tensor = Tensor { name, size_bytes, kind: Kind::Temporary, residency, alignment_bytes: 0 };
        self.0.tensor(tensor).expect("few tensors")
    }

    /// An operator that makes one tensor of so many bytes.
    fn makes(&mut self, size_bytes: u64, reads: &[TensorId]) -> TensorId {
        let made = self.tensor(size_bytes, Residency::StepLocal);
        self.operator(reads, &[made], 0, Vec::new());
        made
    }

    fn operator(&mut self, reads: &[TensorId], creates: &[TensorId], workspace_bytes: u64, reuse: Vec<ReusePair>) {
        let position = self.0.num_operators() as u32;
        let operator = Operator {
            reads: reads.to_vec(),
            creates: creates.to_vec(),
            workspace_bytes,
            reuse,
            ..Operator::new(format!("op{position}"), position, Phase::Forward)
        };
        self.0.operator(operator).expect("few operators");
    }

    fn build(self) -> Graph {
        self.0.build().expect("a valid graph")
    }
}

fn order(graph: &Graph, name: &str) -> Vec<u32> {
    Prepared::new(graph, true).order(name).expect("a known order").positions().to_vec()
}

#[test]
fn least_peak_first_keeps_to_the_most_so_far() {
    let mut sketch = Sketch::new();
    let a = sketch.makes(10, &[]);
    let b = sketch.makes(4, &[]);
    let c = sketch.makes(1, &[a]);
    let d = sketch.makes(8, &[b]);
    sketch.makes(0, &[c, d]);
    // Nothing is live: neither 10 nor 4 keep to that, so the smaller, op1. Now 4 at most and 4
    // live: op0 adds 10, op3 adds 8, so op3: 12 at most, 8 live. op0 alone is ready, then op2, then
    // op4.
    assert_eq!(order(&sketch.build(), "inductor_lpmf"), [1, 3, 0, 2, 4]);
}

#[test]
fn what_leaves_counts_from_the_start_in_least_peak_first() {
    let mut sketch = Sketch::new();
    let enters = sketch.tensor(7, Residency::Enters);
    let leaves = sketch.tensor(12, Residency::Leaves);
    let small = sketch.makes(4, &[]);
    let large = sketch.makes(5, &[enters]);
    sketch.operator(&[small, large], &[leaves], 0, Vec::new());
    // 7 bytes enter and 12 leave: 5 can be added for nothing. Both op0 and op1 keep to that, and
    // op1 frees 7. Were only the 7 that enter counted, neither would, and op0 be the smaller.
    assert_eq!(order(&sketch.build(), "inductor_lpmf"), [1, 0, 2]);
}

#[test]
fn breadth_first_compares_when_predecessors_ran() {
    let mut sketch = Sketch::new();
    let a = sketch.makes(1, &[]);
    let b = sketch.makes(1, &[]);
    let c = sketch.makes(1, &[b]);
    let d = sketch.makes(1, &[a, b]);
    let e = sketch.makes(1, &[a]);
    sketch.makes(1, &[c, d, e]);
    // op0 and op1 have none. Then op4 after step 0, op3 after steps 0 and 1, op2 after step 1: [0]
    // < [0, 1] < [1]. But op4 is ready after step 0 already, and a predecessor at step 0 comes
    // behind none at all: op1 goes before it.
    assert_eq!(order(&sketch.build(), "inductor_bfs"), [0, 1, 4, 3, 2, 5]);
}

#[test]
fn depth_first_goes_by_bytes_touched() {
    let mut sketch = Sketch::new();
    let a = sketch.makes(9, &[]);
    let b = sketch.makes(5, &[]);
    let c = sketch.makes(1, &[b]);
    let d = sketch.makes(1, &[a]);
    sketch.makes(1, &[c, d]);
    // Bytes touched: 9, 5, 6, 10 and 3. op4 comes first and fetches op2 (6) before op3 (10), and
    // these op1 and op0.
    assert_eq!(order(&sketch.build(), "inductor_dfs"), [1, 2, 0, 3, 4]);
}

const MIB: u64 = 1 << 20;

/// What both allocators reserve for program order.
fn reserved(graph: &Graph, reuse: bool) -> [u64; 2] {
    let prepared = Prepared::new(graph, reuse);
    let program = prepared.order("program").expect("a known order");
    ALLOCATORS.map(|name| prepared.pool_bytes(&program, name).expect("a known layout"))
}

#[test]
fn everything_goes_through_the_allocator_in_its_sequence() {
    let mut sketch = Sketch::new();
    let enters = sketch.tensor(2 * MIB, Residency::Enters);
    let made = sketch.tensor(2 * MIB, Residency::StepLocal);
    let leaves = sketch.tensor(2 * MIB, Residency::Leaves);
    sketch.operator(&[enters], &[made], 17 * MIB, Vec::new());
    let pair = ReusePair { input: made, output: sketch.tensor(2 * MIB, Residency::StepLocal) };
    sketch.operator(&[made], &[pair.output], 36 * MIB, vec![pair]);
    sketch.operator(&[enters, pair.output], &[leaves], 0, Vec::new());
    let graph = sketch.build();
    // Fixed: 2 and 2 MiB in a segment of 20; of 17, one of 18; of 36, one of their own. Expandable:
    // 2, 2 and 17 MiB need a second page, which leaves 36 at the end. Without reuse an output of 2
    // comes first, so that 36 need a third page.
    assert_eq!(reserved(&graph, false), [74 * MIB, 60 * MIB]);
    assert_eq!(reserved(&graph, true), [74 * MIB, 40 * MIB]);
}

#[test]
fn a_cache_may_grow_in_the_second_step() {
    let mut sketch = Sketch::new();
    let made = [5, 16, 15].map(|mib| sketch.makes(mib * MIB, &[]));
    sketch.makes(0, &made);
    // First step: 5 of 20, 16, and 15 of the rest of the 20: 36 MiB. Second step: 5 go to the 16,
    // the smallest that fits, 16 to the 20, and 15 need a segment of 16. Third step: two of 16 and
    // one of 20 are enough.
    assert_eq!(reserved(&sketch.build(), false), [52 * MIB, 40 * MIB]);
}
