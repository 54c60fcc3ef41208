//! Exact orders: what brute force finds, proved.

use crate::common::{SETTINGS, best_by_brute_force, random_graph, swept};
use roam_core::graph::{Graph, GraphBuilder, Kind, Operator, OperatorId, Phase, Residency, Tensor, TensorId};
use roam_core::optimize::{Control, optimize};
use roam_core::rng::Random;
use roam_core::stages::Prepared;

/// From whatever order it starts, exact search ends at the least peak of all orders, and proves it.
#[test]
fn exact_orders_are_the_best_there_are() {
    let mut random = Random::new(21);
    let mut improved = 0;
    for round in 0..4000 {
        let graph = random_graph(&mut random, if round % 10 == 0 { 9 } else { 7 });
        for reuse in [false, true] {
            let best = best_by_brute_force(&graph, reuse);
            let prepared = Prepared::new(&graph, reuse);
            let program = prepared.order("program").expect("a known order");
            let (exact, bound) = prepared.lower_peaks(&program).expect("nothing stops it");
            let found = (exact.peak_bytes(), bound);
            assert_eq!(found, if graph.operators().is_empty() { (0, 0) } else { (best, best) });
            improved += u32::from(exact.peak_bytes() < program.peak_bytes());
        }
    }
    assert!(improved > 1000, "only {improved} program orders were improved");
}

/// What exact search proves of larger graphs is not above any order that another way finds.
#[test]
fn what_is_proved_holds_for_every_order() {
    let mut random = Random::new(22);
    for _ in 0..swept(300) {
        let graph = random_graph(&mut random, 40);
        for reuse in [false, true] {
            let prepared = Prepared::new(&graph, reuse);
            let orders: Vec<_> = Prepared::orders().filter_map(|name| prepared.order(name)).collect();
            let lowest = orders.iter().map(|order| order.peak_bytes()).min().expect("several orders");
            for order in &orders {
                let (exact, bound) = prepared.lower_peaks(order).expect("nothing stops it");
                assert!(exact.peak_bytes() <= order.peak_bytes());
                assert!(bound <= lowest.min(exact.peak_bytes()), "{bound} {lowest} {reuse}");
            }
        }
    }
}

/// Builds a graph operator by operator; tensors are step-local unless said otherwise.
struct Sketch(GraphBuilder);

impl Sketch {
    fn new() -> Self {
        Sketch(GraphBuilder::new("sketch", "cpu", 1))
    }

    /// An operator that makes one tensor of `size_bytes`.
    fn call(&mut self, phase: Phase, reads: &[TensorId], size_bytes: u64) -> TensorId {
        self.make(phase, reads, size_bytes, Residency::StepLocal)
    }

    fn make(&mut self, phase: Phase, reads: &[TensorId], size_bytes: u64, residency: Residency) -> TensorId {
        let name = String::new();
        let made = Tensor { name, size_bytes, kind: Kind::Temporary, residency, alignment_bytes: 0 };
        let output = self.0.tensor(made).expect("few tensors");
        let mut reads = reads.to_vec();
        reads.sort();
        reads.dedup();
        let operator =
            Operator { reads, creates: vec![output], ..Operator::new("", self.0.num_operators() as u32, phase) };
        self.0.operator(operator).expect("few operators");
        output
    }

    fn build(self) -> Graph {
        self.0.build().expect("valid by construction")
    }
}

/// A randomly wired network (Xie et al., arXiv 1904.01569): every node reads one to three of the
/// `near` nodes before it.
fn randomly_wired(random: &mut Random, nodes: usize, near: u64) -> Graph {
    let mut sketch = Sketch::new();
    let mut made: Vec<TensorId> = vec![sketch.call(Phase::Forward, &[], 1 + random.below(8))];
    let mut used = vec![false];
    for node in 1..nodes {
        let reads: Vec<usize> =
            (0..1 + random.below(3)).map(|_| node - 1 - random.below(near.min(node as u64)) as usize).collect();
        reads.iter().for_each(|&read| used[read] = true);
        let reads: Vec<TensorId> = reads.iter().map(|&read| made[read]).collect();
        made.push(sketch.call(Phase::Forward, &reads, 1 + random.below(8)));
        used.push(false);
    }
    let ends: Vec<TensorId> = (0..nodes).filter(|&node| !used[node]).map(|node| made[node]).collect();
    sketch.call(Phase::Forward, &ends, 1);
    sketch.build()
}

/// A chain of cells as architecture search makes them (Zoph et al., arXiv 1707.07012): five nodes,
/// each the sum of two separable convolutions of earlier nodes or of the last two cells; what
/// nothing reads is concatenated.
fn searched_cells(random: &mut Random, cells: usize) -> Graph {
    let mut sketch = Sketch::new();
    let mut last = [sketch.call(Phase::Forward, &[], 4), sketch.call(Phase::Forward, &[], 4)];
    for _ in 0..cells {
        let mut states = last.to_vec();
        let mut loose = Vec::new();
        for _ in 0..5 {
            let parts: Vec<TensorId> = (0..2)
                .map(|_| {
                    let from = states[random.below(states.len() as u64) as usize];
                    loose.retain(|&state| state != from);
                    let middle = sketch.call(Phase::Forward, &[from], 1 + random.below(6));
                    sketch.call(Phase::Forward, &[middle], 4)
                })
                .collect();
            let sum = sketch.call(Phase::Forward, &parts, 4);
            states.push(sum);
            loose.push(sum);
        }
        last = [last[1], sketch.call(Phase::Forward, &loose, 4)];
    }
    sketch.build()
}

/// How many of the graphs' best heuristic orders exact search improves. It must prove its own to be
/// the best.
fn improved_by_exact_search(graphs: impl Iterator<Item = Graph>) -> usize {
    let improves = |graph: &Graph| {
        let prepared = Prepared::new(graph, true);
        let heuristic = prepared.heuristic().expect("nothing stops it");
        let (exact, bound) = prepared.lower_peaks(&heuristic).expect("nothing stops it");
        assert_eq!(exact.peak_bytes(), bound);
        exact.peak_bytes() < heuristic.peak_bytes()
    };
    graphs.filter(improves).count()
}

#[test]
fn exact_search_beats_all_heuristics_on_randomly_wired_networks() {
    let mut random = Random::new(23);
    let improved = improved_by_exact_search((0..20).map(|_| randomly_wired(&mut random, 60, 20)));
    assert!(improved >= 10, "only {improved} of 20");
}

#[test]
fn exact_search_beats_all_heuristics_on_searched_cells() {
    let mut random = Random::new(24);
    let improved = improved_by_exact_search((0..20).map(|_| searched_cells(&mut random, 4)));
    assert!(improved >= 5, "only {improved} of 20");
}

/// Two layers, each with a weight gradient made while its activation is alive. An update makes
/// three tensors of the weight's size.
fn two_updates(activation: u64, weight: u64) -> Graph {
    let mut sketch = Sketch::new();
    let first = sketch.call(Phase::Forward, &[], activation);
    let second = sketch.call(Phase::Forward, &[first], activation);
    let mut gradient = sketch.call(Phase::Backward, &[second], activation);
    for saved in [second, first] {
        let of_weight = sketch.call(Phase::Backward, &[gradient, saved], weight);
        gradient = sketch.call(Phase::Backward, &[gradient, saved], activation);
        let average = sketch.call(Phase::Update, &[of_weight], weight);
        let square = sketch.call(Phase::Update, &[of_weight], weight);
        sketch.call(Phase::Update, &[average, square], weight);
    }
    sketch.build()
}

/// The published rule waits where activations fill memory, and does not where weights do.
#[test]
fn updates_wait_for_memory_only() {
    let peak = |graph: &Graph, order: &str| {
        let prepared = Prepared::new(graph, false);
        prepared.order(order).expect("a known order").peak_bytes()
    };
    // The first update finds three activations besides its gradient, and adds two weights. Once the
    // next activation's gradient has been made, four activations and the gradient having been live,
    // it finds two.
    let large_activations = two_updates(10, 6);
    assert_eq!(peak(&large_activations, "eager_updates"), 3 * 10 + 3 * 6);
    assert_eq!(peak(&large_activations, "memory_aware_updates"), 4 * 10 + 6);
    // Small activations: waiting would only add gradients.
    let large_weights = two_updates(1, 100);
    assert!(peak(&large_weights, "memory_aware_updates") <= peak(&large_weights, "eager_updates"));
}

/// A chain of operators, in any of which others may end that were begun before, and updates in
/// chains of up to three operators that hang off it. No tensor has users in two of the chains.
fn updates_off_a_trunk(random: &mut Random, length: u32, most_updates: usize) -> Graph {
    let mut sketch = Sketch::new();
    let some = |random: &mut Random| 1 + random.below(9);
    let mut loose: Vec<TensorId> = Vec::new();
    for at in 0..length {
        let (read, kept): (Vec<_>, Vec<_>) = loose.into_iter().partition(|_| random.once_in(3));
        loose = kept;
        loose.push(sketch.call(Phase::Backward, &read, some(random)));
        if at > 0 {
            sketch.0.control(OperatorId(at - 1), OperatorId(at));
        }
    }
    while loose.len() > most_updates {
        loose.swap_remove(random.below(loose.len() as u64) as usize);
    }
    for gradient in loose {
        let mut end = gradient;
        for _ in 0..1 + random.below(3) {
            let stays = random.once_in(3);
            end = sketch.make(
                Phase::Update,
                &[end],
                some(random),
                if stays { Residency::Leaves } else { Residency::StepLocal },
            );
        }
    }
    sketch.build()
}

/// Where each tensor has all its users in one chain, merging by hills and valleys gives the least
/// peak of all interleavings.
#[test]
fn hills_and_valleys_of_updates_are_merged_in_the_best_way() {
    let mut random = Random::new(26);
    let mut improved = 0;
    for _ in 0..400 {
        let graph = updates_off_a_trunk(&mut random, 4, 2);
        let prepared = Prepared::new(&graph, false);
        let peak = |order: &str| prepared.order(order).expect("a known order").peak_bytes();
        let best = best_by_brute_force(&graph, false);
        assert_eq!(peak("hill_valley"), best);
        improved += u32::from(best < peak("program").min(peak("eager_updates")).min(peak("memory_aware_updates")));
    }
    assert!(improved > 20, "only {improved} of 400 are better than every other way");
}

/// The merge of many updates is no worse than the other ways to place them.
#[test]
fn no_way_to_place_updates_beats_hills_and_valleys() {
    let mut random = Random::new(27);
    for _ in 0..100 {
        let graph = updates_off_a_trunk(&mut random, 60, 60);
        let prepared = Prepared::new(&graph, false);
        let peak = |order: &str| prepared.order(order).expect("a known order").peak_bytes();
        for other in ["program", "eager_updates", "memory_aware_updates"] {
            assert!(peak("hill_valley") <= peak(other), "{other}");
        }
    }
}

/// A first step: every update makes two tensors of state that stay.
fn first_step(random: &mut Random, layers: usize) -> Graph {
    let mut sketch = Sketch::new();
    let mut saved = vec![sketch.call(Phase::Forward, &[], 20)];
    for layer in 0..layers {
        saved.push(sketch.call(Phase::Forward, &[saved[layer]], 10 + random.below(30)));
    }
    let mut gradient = sketch.call(Phase::Backward, &saved[layers..], 10);
    for layer in (0..layers).rev() {
        // Weights grow towards the loss, as in image classifiers.
        let weight = 1 + random.below(1 + 3 * layer as u64);
        let of_weight = sketch.call(Phase::Backward, &[gradient, saved[layer]], weight);
        gradient = sketch.call(Phase::Backward, &[gradient, saved[layer]], 10 + random.below(30));
        let average = sketch.make(Phase::Update, &[of_weight], weight, Residency::Leaves);
        let square = sketch.make(Phase::Update, &[of_weight], weight, Residency::Leaves);
        sketch.call(Phase::Update, &[average, square], weight);
    }
    sketch.build()
}

/// In a first step unpooled state piles up while the pool empties, so that updates should
/// free gradients early, also where that makes the common peak higher than program order's.
#[test]
fn updates_of_a_first_step_run_where_they_take_least_of_the_pool() {
    let mut random = Random::new(25);
    let mut lowered = 0;
    for _ in 0..40 {
        let graph = first_step(&mut random, 12);
        let plan = optimize(&graph, &SETTINGS, &Control::default()).expect("a plan");
        assert!(plan.gap() <= 0.05, "{}", plan.gap());
        // No cheap order takes as little while it keeps to program order's peak.
        let prepared = Prepared::new(&graph, true);
        let orders = Prepared::orders().filter_map(|name| prepared.order(name));
        let kept = orders.filter(|order| order.peak_bytes() <= plan.program_order_peak_bytes);
        let least = kept.map(|order| order.pool_peak_bytes() + order.unpooled_peak_bytes()).min();
        lowered += u32::from(Some(plan.pool_bytes + plan.outside_bytes) < least);
    }
    assert!(lowered >= 15, "only {lowered} of 40");
}

/// The same randomly wired block over and over, as in an inference-like or checkpointed network:
/// nothing but its end is passed on.
fn repeated_blocks(seed: u64, blocks: usize) -> Graph {
    let mut sketch = Sketch::new();
    let mut last = sketch.call(Phase::Forward, &[], 3);
    for _ in 0..blocks {
        let mut random = Random::new(seed);
        let mut made = vec![last];
        let mut used = vec![true];
        for node in 0..24 {
            let reads: Vec<usize> =
                (0..1 + random.below(3)).map(|_| node - random.below(12.min(node as u64 + 1)) as usize).collect();
            reads.iter().for_each(|&read| used[read] = true);
            let reads: Vec<TensorId> = reads.iter().map(|&read| made[read]).collect();
            made.push(sketch.call(Phase::Forward, &reads, 1 + random.below(8)));
            used.push(false);
        }
        let ends: Vec<TensorId> = made.iter().zip(&used).filter(|&(_, used)| !used).map(|(&end, _)| end).collect();
        last = sketch.call(Phase::Forward, &ends, 3);
    }
    sketch.build()
}

/// Exact search is made once for all equal blocks, and finds what it finds for one.
#[test]
fn repeated_blocks_are_solved_once() {
    let mut improved = 0;
    for seed in 0..8 {
        let lower = |blocks: usize| {
            let graph = repeated_blocks(seed, blocks);
            let prepared = Prepared::new(&graph, true);
            let program = prepared.order("program").expect("a known order");
            let (lowered, bound, counts) = prepared.lower_peaks_counted(&program).expect("nothing stops it");
            assert_eq!(lowered.peak_bytes(), bound);
            (program.peak_bytes(), bound, counts)
        };
        let (one, many) = (lower(1), lower(30));
        assert_eq!((one.0, one.1), (many.0, many.1));
        if one.1 < one.0 {
            improved += 1;
            let [asked, searched] = many.2;
            // The first block, those between and the last differ in how high the rest is, at every
            // peak on the way down.
            assert!(asked >= 30 && asked >= 8 * searched, "{asked} asked, {searched} searched");
        }
    }
    assert!(improved >= 4, "only {improved} of 8");
}
