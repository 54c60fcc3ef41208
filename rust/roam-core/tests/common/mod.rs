//! Random graphs with everything that orders operators or holds memory.

pub(crate) mod buffers;
pub(crate) mod corruptions;
pub(crate) mod simulator;
pub(crate) mod solver;
pub(crate) mod totals;

use roam_core::graph::{
    Graph, GraphBuilder, Kind, Operator, OperatorId, Phase, Residency, ReusePair, Sequence, Tensor, TensorId,
};
use roam_core::optimize::{Control, optimize};
use roam_core::plan::{ExactReport, ExactStatus, Plan, Settings, Status};
use roam_core::rng::Random;
use roam_core::stages::Prepared;
use roam_core::verify::verify;

pub(crate) const SETTINGS: Settings = Settings::SINGLE;

/// How many of so many random cases are tried: one in four, and all where `ROAM_SWEEP_EVERY` is 1, as
/// `make nightly` sets it.
#[expect(clippy::disallowed_methods, reason = "how long a sweep is depends on who runs it")]
pub(crate) fn swept(cases: u32) -> u32 {
    let every = std::env::var("ROAM_SWEEP_EVERY").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    cases.div_ceil(every)
}

/// A valid graph of up to `most` operators: several outputs, empty and oddly aligned tensors, all
/// residencies, mutations, workspaces, sequences, control edges, reuse permissions.
pub(crate) fn random_graph(random: &mut Random, most: u64) -> Graph {
    let count = random.below(most + 1);
    let mut builder = GraphBuilder::new("random", "cpu", [1, 8, 64][random.below(3) as usize]);
    // What can be used: id, size, residency.
    let mut present: Vec<(TensorId, u64, Residency)> = Vec::new();
    // Few sizes, so that reuse and ties happen.
    let unit = [1, 5, 64][random.below(3) as usize];
    let size = |random: &mut Random| if random.once_in(12) { 0 } else { unit * (1 + random.below(6)) };
    let tensor = |random: &mut Random, builder: &mut GraphBuilder, residency| {
        let size_bytes = size(random);
        let alignment_bytes = if random.once_in(10) { 128 } else { 0 };
        let name = format!("t{}", builder.num_tensors());
        let made = Tensor { name, size_bytes, kind: Kind::Temporary, residency, alignment_bytes };
        let id = builder.tensor(made).expect("few tensors");
        let alignment = builder.alignment_bytes.max(alignment_bytes);
        (id, size_bytes.next_multiple_of(alignment), residency)
    };
    for _ in 0..random.below(3) {
        let residency = if random.once_in(2) { Residency::Enters } else { Residency::Persistent };
        present.push(tensor(random, &mut builder, residency));
    }
    for position in 0..count {
        let (mut reads, mut mutates) = (Vec::new(), Vec::new());
        for _ in 0..random.below(4).min(present.len() as u64) {
            // Recent tensors more often, as in real steps.
            let back = 1 + random.below(present.len() as u64).min(random.below(present.len() as u64));
            let at = present[present.len() - back as usize];
            if !reads.contains(&at) && !mutates.contains(&at) {
                if random.once_in(5) { mutates.push(at) } else { reads.push(at) }
            }
        }
        let mut creates = Vec::new();
        for _ in 0..[1, 1, 1, 1, 0, 2, 2, 3][random.below(8) as usize] {
            let residency = match random.below(10) {
                0 => Residency::Leaves,
                1 | 2 => Residency::Unpooled,
                _ => Residency::StepLocal,
            };
            creates.push(tensor(random, &mut builder, residency));
        }
        let mut reuse = Vec::new();
        for &(input, input_size, residency) in &reads {
            let is_local = matches!(residency, Residency::StepLocal | Residency::Unpooled);
            for &(output, output_size, output_residency) in &creates {
                let alike = residency == output_residency && input_size == output_size;
                if is_local && alike && !random.once_in(4) {
                    reuse.push(ReusePair { input, output });
                }
            }
        }
        present.extend(&creates);
        let ids = |list: &[(TensorId, u64, Residency)]| list.iter().map(|&(id, _, _)| id).collect();
        let phase = if position * 3 > count * 2 && random.once_in(2) { Phase::Update } else { Phase::Forward };
        let operator = Operator {
            reads: ids(&reads),
            creates: ids(&creates),
            mutates: ids(&mutates),
            workspace_bytes: if random.once_in(5) { size(random) } else { 0 },
            flops: [0, 10_000_000, 90_000_000][position as usize % 3],
            reuse,
            sequence: match random.below(12) {
                0 => Some(Sequence::Random),
                1 => Some(Sequence::Collective),
                _ => None,
            },
            ..Operator::new(format!("op{position}"), position as u32, phase)
        };
        builder.operator(operator).expect("few operators");
        if position > 0 && random.once_in(8) {
            builder.control(OperatorId(random.below(position) as u32), OperatorId(position as u32));
        }
    }
    builder.build().expect("valid by construction")
}

/// All orders that the graph permits, one after another.
pub(crate) fn each_order(graph: &Graph, visit: &mut impl FnMut(&[OperatorId])) {
    fn extend(graph: &Graph, order: &mut Vec<OperatorId>, visit: &mut impl FnMut(&[OperatorId])) {
        if order.len() == graph.operators().len() {
            visit(order);
        }
        for id in (0..graph.operators().len() as u32).map(OperatorId) {
            let is_ready = graph.predecessors(id).iter().all(|before| order.contains(before));
            if is_ready && !order.contains(&id) {
                order.push(id);
                extend(graph, order, visit);
                order.pop();
            }
        }
    }
    extend(graph, &mut Vec::new(), visit);
}

/// A plan's pool and unpooled bytes, and what bounds them.
pub(crate) fn total_and_bound(plan: &Plan) -> (u64, u64) {
    (plan.total_bytes - plan.persistent_bytes, plan.total_lower_bound_bytes - plan.persistent_bytes)
}

/// The plan with the total that follows from its other figures, and what goes with that.
pub(crate) fn with_total(plan: Plan) -> Plan {
    let total_bytes = plan.pool_bytes + plan.outside_bytes + plan.persistent_bytes;
    let is_optimal = total_bytes == plan.total_lower_bound_bytes;
    let status = if is_optimal { Status::Optimal } else { Status::Feasible };
    let told = if is_optimal { ExactStatus::NotNeeded } else { ExactStatus::NotTried };
    let exact = ExactReport { status: told, programs: 0, gains: 0, failed: 0, timed_out: 0, reason: None };
    Plan { total_bytes, status, exact, ..plan }
}

/// The fewest most live bytes of all orders.
pub(crate) fn best_by_brute_force(graph: &Graph, reuse: bool) -> u64 {
    let mut best = u64::MAX;
    each_order(graph, &mut |order| best = best.min(peaks_by_definition(graph, order, reuse).whole));
    best
}

/// What an order costs.
#[derive(Clone, Copy, Default)]
pub(crate) struct Peaks {
    /// Most live bytes.
    pub(crate) whole: u64,
    /// Most live bytes of step-local tensors.
    pub(crate) pool: u64,
    /// Most live bytes of everything else, and workspace.
    pub(crate) unpooled: u64,
}

/// The peaks of an order, worked out step by step from the definition; with reuse, at every
/// operator the best of all sets of disjoint permitted pairs.
pub(crate) fn peaks_by_definition(graph: &Graph, order: &[OperatorId], reuse: bool) -> Peaks {
    let step_of = |id: OperatorId| order.iter().position(|&other| other == id).expect("a permutation");
    let live_at = |tensor: TensorId, step: usize| {
        let uses = graph.users(tensor).iter().map(|&user| step_of(user));
        let created = graph.creator(tensor).map(step_of);
        match graph.tensor(tensor).residency {
            Residency::Persistent => false,
            Residency::Enters => step <= uses.max().unwrap_or(0),
            Residency::Leaves => created.is_some_and(|from| from <= step),
            Residency::StepLocal | Residency::Unpooled => {
                let from = created.expect("made in the step");
                from <= step && step <= uses.max().unwrap_or(from)
            }
        }
    };
    let all = (0..graph.tensors().len() as u32).map(TensorId);
    let mut peaks = Peaks::default();
    for (step, &id) in order.iter().enumerate() {
        let operator = graph.operator(id);
        let live = |in_pool: bool| -> u64 {
            let counts = |&t: &TensorId| (graph.tensor(t).residency == Residency::StepLocal) == in_pool;
            all.clone().filter(counts).filter(|&t| live_at(t, step)).map(|t| graph.counted_bytes(t)).sum()
        };
        let dies = |pair: &&ReusePair| !graph.users(pair.input).iter().any(|&user| step_of(user) > step);
        let pairs: Vec<ReusePair> = operator.reuse.iter().filter(dies).copied().collect();
        let saved = |in_pool: bool| {
            let counts = |pair: &&ReusePair| (graph.tensor(pair.input).residency == Residency::StepLocal) == in_pool;
            let pairs: Vec<ReusePair> = pairs.iter().filter(counts).copied().collect();
            if reuse { most_saved(graph, &pairs) } else { 0 }
        };
        let (pool, unpooled) = (live(true) - saved(true), live(false) - saved(false) + graph.workspace_bytes(id));
        peaks.whole = peaks.whole.max(pool + unpooled);
        peaks.pool = peaks.pool.max(pool);
        peaks.unpooled = peaks.unpooled.max(unpooled);
    }
    peaks
}

fn most_saved(graph: &Graph, pairs: &[ReusePair]) -> u64 {
    let Some((first, others)) = pairs.split_first() else { return 0 };
    let apart: Vec<ReusePair> =
        others.iter().filter(|pair| pair.input != first.input && pair.output != first.output).copied().collect();
    most_saved(graph, others).max(graph.counted_bytes(first.input) + most_saved(graph, &apart))
}

/// How many times as fast as one stream a plan is by the cost model.
pub(crate) fn speed(plan: &Plan) -> f64 {
    let schedule = plan.schedule.as_ref().expect("a plan of several streams");
    if schedule.makespan_ns == 0 { 1.0 } else { schedule.serial_ns as f64 / schedule.makespan_ns as f64 }
}

/// Plans a graph for several streams: valid, never worse than program order, never below its
/// bounds, and without a fault in twenty executions.
pub(crate) fn check_streams(graph: &Graph, settings: &Settings, random: &mut Random) -> Plan {
    let plan = optimize(graph, settings, &Control::default()).expect("a plan");
    verify(graph, &plan).expect("valid");
    for _ in 0..20 {
        simulator::execute(graph, &plan, random).expect("no fault");
    }
    assert!(plan.lower_bound_bytes <= plan.peak_bytes);
    assert!(plan.pool_peak_bytes <= plan.pool_bytes);
    assert!(plan.total_lower_bound_bytes <= plan.total_bytes);
    let schedule = plan.schedule.as_ref().expect("several streams");
    assert!(schedule.critical_path_ns <= schedule.makespan_ns);
    let prepared = Prepared::new(graph, false);
    let program = prepared.order("program").expect("a known order");
    let pool = Prepared::portfolio().filter_map(|layout| prepared.pool_bytes(&program, layout)).min();
    assert!(plan.pool_bytes + plan.outside_bytes <= pool.expect("several layouts") + program.unpooled_peak_bytes());
    plan
}

/// A step that sums gradients over micro-batches: every one of them makes its gradient of each
/// weight in one or two pieces, which are added in place, and adds the result to the first one's,
/// in place or not; then every weight is updated. All tensors are step-local.
pub(crate) fn accumulating_graph(random: &mut Random) -> Graph {
    fn tensor(builder: &mut GraphBuilder, size_bytes: u64) -> TensorId {
        let (name, kind, residency) = (String::new(), Kind::Temporary, Residency::StepLocal);
        builder.tensor(Tensor { name, size_bytes, kind, residency, alignment_bytes: 0 }).expect("few tensors")
    }
    fn call(builder: &mut GraphBuilder, phase: Phase, reads: &[TensorId], creates: &[TensorId], mutates: &[TensorId]) {
        let [reads, creates, mutates] = [reads, creates, mutates].map(<[TensorId]>::to_vec);
        let position = builder.num_operators() as u32;
        let operator = Operator { reads, creates, mutates, ..Operator::new("", position, phase) };
        builder.operator(operator).expect("few operators");
    }
    let mut builder = GraphBuilder::new("accumulating", "cpu", 1);
    let (micro_batches, weights) = [(2, 1), (3, 1), (4, 1), (2, 2)][random.below(4) as usize];
    let sizes: Vec<u64> = (0..weights).map(|_| 5 + random.below(20)).collect();
    let (is_in_place, is_in_order) = (random.once_in(2), random.once_in(2));
    let mut sums: Vec<Option<TensorId>> = vec![None; weights];
    // Without bytes: what keeps micro-batches in order.
    let mut token: Vec<TensorId> = Vec::new();
    for _ in 0..micro_batches {
        let activation = tensor(&mut builder, 1 + random.below(8));
        let next = tensor(&mut builder, 0);
        call(&mut builder, Phase::Forward, &token, &[activation, next], &[]);
        if is_in_order {
            token = vec![next];
        }
        for (sum, &size) in sums.iter_mut().zip(&sizes) {
            let gradient = tensor(&mut builder, size);
            call(&mut builder, Phase::Backward, &[activation], &[gradient], &[]);
            if !random.once_in(3) {
                let piece = tensor(&mut builder, size);
                call(&mut builder, Phase::Backward, &[activation], &[piece], &[]);
                call(&mut builder, Phase::Backward, &[piece], &[], &[gradient]);
            }
            *sum = Some(match *sum {
                None => gradient,
                Some(sum) if is_in_place => {
                    call(&mut builder, Phase::Backward, &[gradient], &[], &[sum]);
                    sum
                }
                Some(sum) => {
                    let next = tensor(&mut builder, size);
                    call(&mut builder, Phase::Backward, &[sum, gradient], &[next], &[]);
                    next
                }
            });
        }
    }
    for (sum, &size) in sums.into_iter().zip(&sizes) {
        let state = tensor(&mut builder, size * random.below(2));
        call(&mut builder, Phase::Update, &[sum.expect("some micro-batch")], &[state], &[]);
    }
    builder.build().expect("valid by construction")
}

/// A step whose activations are freed one after the other; beside them pieces of gradients wait, of
/// which each gradient is made and used up by two operators that nothing else waits for.
pub(crate) fn pending_graph(random: &mut Random) -> Graph {
    let mut builder = GraphBuilder::new("pending", "cpu", 1);
    let tensor = |builder: &mut GraphBuilder, size_bytes: u64| {
        let (name, kind, residency) = (String::new(), Kind::Temporary, Residency::StepLocal);
        builder.tensor(Tensor { name, size_bytes, kind, residency, alignment_bytes: 0 }).expect("few tensors")
    };
    let call = |builder: &mut GraphBuilder, reads: &[TensorId], creates: &[TensorId]| {
        let position = builder.num_operators() as u32;
        let (reads, creates) = (reads.to_vec(), creates.to_vec());
        builder.operator(Operator { reads, creates, ..Operator::new("", position, Phase::Backward) }).expect("few");
    };
    let activations: Vec<TensorId> = (0..3).map(|_| tensor(&mut builder, 1 + random.below(20))).collect();
    let pieces: Vec<TensorId> = (0..3).map(|_| tensor(&mut builder, 1 + random.below(8))).collect();
    call(&mut builder, &[], &[&activations[..], &pieces[..]].concat());
    let mut back: Vec<TensorId> = Vec::new();
    for activation in activations {
        let next = tensor(&mut builder, random.below(10));
        call(&mut builder, &[&back[..], &[activation]].concat(), &[next]);
        back = vec![next];
    }
    for piece in pieces {
        let gradient = tensor(&mut builder, 1 + random.below(20));
        call(&mut builder, &[piece], &[gradient]);
        call(&mut builder, &[gradient], &[]);
    }
    builder.build().expect("valid by construction")
}

/// The lowest peak of all orders of a graph without reuse whose tensors are all step-local: over
/// all sets of operators that can have run, the least of the most live bytes on the way.
pub(crate) fn least_peak_over_sets(graph: &Graph) -> u64 {
    let count = graph.operators().len();
    let bit = |id: OperatorId| 1usize << id.index();
    let all = (0..graph.tensors().len() as u32).map(TensorId);
    let tensors: Vec<(u64, usize, usize)> = all
        .map(|t| {
            let users = graph.users(t).iter().map(|&user| bit(user)).sum();
            (graph.counted_bytes(t), bit(graph.creator(t).expect("made in the step")), users)
        })
        .collect();
    let before: Vec<usize> = (0..count as u32)
        .map(|op| graph.predecessors(OperatorId(op)).iter().map(|&before| bit(before)).sum())
        .collect();
    let mut least = vec![u64::MAX; 1 << count];
    least[0] = 0;
    for done in 0..least.len() {
        let so_far = least[done];
        let can_run = |&op: &usize| so_far < u64::MAX && done >> op & 1 == 0 && before[op] & !done == 0;
        for op in (0..count).filter(can_run) {
            let is_live = |&&(_, creator, users): &&(u64, usize, usize)| {
                creator == 1 << op || (creator & done != 0 && users & !done != 0)
            };
            let live = tensors.iter().filter(is_live).map(|&(size, _, _)| size).sum::<u64>();
            let then = done | 1 << op;
            least[then] = least[then].min(so_far.max(live));
        }
    }
    least[least.len() - 1]
}
