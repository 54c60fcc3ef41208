//! Bounds of all schedules with further runs, against complete search of small graphs.

use crate::common::{random_graph, swept};
use roam_core::cost::rerun_ns;
use roam_core::graph::{
    Graph, GraphBuilder, Kind, Operator, OperatorId, Phase, Residency, ReusePair, Tensor, TensorId,
};
use roam_core::optimize::{Control, OptimizeError, optimize};
use roam_core::plan::Settings;
use roam_core::rng::Random;
use roam_core::stages::{floor, least_extra_ns};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// The same graph with operators that may run again, and inputs that further runs leave alone.
fn repeating(graph: &Graph, random: &mut Random) -> Graph {
    let mut builder = GraphBuilder::new("random", "cpu", graph.alignment_bytes());
    for tensor in graph.tensors() {
        builder.tensor(tensor.clone()).expect("few tensors");
    }
    for operator in graph.operators() {
        let touched: Vec<TensorId> = operator.reads.iter().chain(&operator.mutates).copied().collect();
        let operator = Operator {
            repeatable: operator.sequence.is_none() && !random.once_in(6),
            first_only: touched.into_iter().filter(|_| random.once_in(8)).collect(),
            time_ns: [0, 1, 3, 10, 40][random.below(5) as usize],
            ..operator.clone()
        };
        builder.operator(operator).expect("few operators");
    }
    for &(before, after) in graph.control() {
        builder.control(before, after);
    }
    builder.build().expect("valid")
}

/// A step of a few layers: each forward operator's output is needed by its backward operator.
fn layered(random: &mut Random) -> Graph {
    let mut builder = GraphBuilder::new("layered", "cpu", 1);
    let tensor = |builder: &mut GraphBuilder, size_bytes: u64, residency| {
        let made = Tensor { name: String::new(), size_bytes, kind: Kind::Temporary, residency, alignment_bytes: 0 };
        builder.tensor(made).expect("few tensors")
    };
    let size = |random: &mut Random| 1 + random.below(8);
    let layers = 2 + random.below(2);
    let enters = if random.once_in(2) { Residency::Enters } else { Residency::Persistent };
    let weight = tensor(&mut builder, 2, Residency::Persistent);
    let mut sizes = BTreeMap::new();
    let mut present = vec![tensor(&mut builder, size(random), enters)];
    let add = |builder: &mut GraphBuilder, random: &mut Random, operator: Operator| {
        let touched: Vec<TensorId> = operator.reads.iter().chain(&operator.mutates).copied().collect();
        let operator = Operator {
            repeatable: !random.once_in(8),
            first_only: touched.into_iter().filter(|_| random.once_in(20)).collect(),
            time_ns: 1 + random.below(20),
            workspace_bytes: if random.once_in(5) { size(random) } else { 0 },
            ..operator
        };
        builder.operator(operator).expect("few operators");
    };
    let new = |builder: &GraphBuilder| Operator::new("", builder.num_operators() as u32, Phase::Forward);
    for _ in 0..layers {
        let input = present[present.len() - 1];
        let outputs = 1 + u64::from(random.once_in(4));
        let mut creates = Vec::new();
        for _ in 0..outputs {
            let bytes = size(random);
            creates.push(tensor(&mut builder, bytes, Residency::StepLocal));
            sizes.insert(creates[creates.len() - 1], bytes);
        }
        let mut reads = vec![input];
        if random.once_in(2) {
            reads.push(weight);
        }
        let operator = Operator { reads, creates: creates.clone(), ..new(&builder) };
        add(&mut builder, random, operator);
        present.push(creates[0]);
        if builder.num_operators() < 3 && random.once_in(2) {
            let operator = Operator { mutates: vec![creates[creates.len() - 1]], ..new(&builder) };
            add(&mut builder, random, operator);
        }
        if creates.len() > 1 && random.once_in(2) {
            present.push(creates[1]);
        }
    }
    let mut gradient = present[present.len() - 1];
    let backward = (7 - builder.num_operators()).min(layers as usize + 1);
    for at in 0..backward {
        let residency = if at + 1 == backward && random.once_in(2) { Residency::Leaves } else { Residency::StepLocal };
        let like = sizes.values().copied().nth(random.below(sizes.len() as u64) as usize);
        let bytes = like.filter(|_| random.once_in(2)).unwrap_or_else(|| size(random));
        let output = tensor(&mut builder, bytes, residency);
        let mut reads = vec![gradient];
        for _ in 0..1 + random.below(2) {
            let saved = present[present.len() - 1 - (at + random.below(2) as usize).min(present.len() - 1)];
            if !reads.contains(&saved) {
                reads.push(saved);
            }
        }
        let mutates = if at > 0 && random.once_in(6) && !reads.contains(&weight) { vec![weight] } else { Vec::new() };
        let mut reuse = Vec::new();
        for &input in &reads {
            if residency == Residency::StepLocal && sizes.get(&input) == Some(&bytes) && random.once_in(2) {
                reuse.push(ReusePair { input, output });
            }
        }
        let operator = Operator { reads, creates: vec![output], mutates, reuse, ..new(&builder) };
        add(&mut builder, random, operator);
        gradient = output;
        if residency == Residency::StepLocal {
            sizes.insert(output, bytes);
        }
    }
    builder.build().expect("valid")
}

/// Where a schedule stands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    /// First runs, a bit per operator.
    done: u32,
    /// Per tensor the instances that are kept, each by how many mutators have run on it, ascending.
    kept: Vec<Vec<u8>>,
}

/// All schedules of a graph, by what the contract of a sequence says and nothing else.
struct Schedules<'a> {
    graph: &'a Graph,
    /// Per operator what it touches, and at which version: at the first run, and at later ones.
    touches: Vec<[Vec<(TensorId, u8)>; 2]>,
}

impl<'a> Schedules<'a> {
    fn new(graph: &'a Graph) -> Self {
        let mut version = vec![0; graph.tensors().len()];
        let mut touches = vec![[Vec::new(), Vec::new()]; graph.operators().len()];
        for &id in graph.program_order() {
            let operator = graph.operator(id);
            for &tensor in operator.reads.iter().chain(&operator.mutates) {
                let at = (tensor, version[tensor.index()]);
                if touches[id.index()][0].contains(&at) {
                    continue;
                }
                touches[id.index()][0].push(at);
                if !operator.first_only.contains(&tensor) {
                    touches[id.index()][1].push(at);
                }
            }
            for tensor in &operator.mutates {
                version[tensor.index()] += 1;
            }
        }
        Schedules { graph, touches }
    }

    fn start(&self) -> State {
        let tensors = (0..self.graph.tensors().len() as u32).map(TensorId);
        State {
            done: 0,
            kept: tensors.map(|tensor| Vec::from_iter(self.graph.creator(tensor).is_none().then_some(0))).collect(),
        }
    }

    /// What an operator waits for besides what it touches.
    fn waits_for(&self, id: OperatorId) -> impl Iterator<Item = OperatorId> {
        let graph = self.graph;
        let operator = graph.operator(id);
        let controls = graph.control().iter().filter(move |&&(_, after)| after == id).map(|&(before, _)| before);
        let sequenced = graph.program_order()[..operator.position as usize]
            .iter()
            .copied()
            .filter(move |&before| operator.sequence.is_some() && graph.operator(before).sequence == operator.sequence);
        controls.chain(sequenced)
    }

    fn is_end(&self, state: &State) -> bool {
        state.done.count_ones() as usize == self.graph.operators().len()
    }

    /// What can happen next: the state after it, bytes live meanwhile in the pool and outside of it,
    /// time beyond the first runs.
    fn moves(&self, state: &State, mut see: impl FnMut(State, [u64; 2], u64)) {
        let graph = self.graph;
        // A tensor is given up.
        if state.done != 0 {
            for tensor in (0..graph.tensors().len() as u32).map(TensorId) {
                let stays = matches!(graph.tensor(tensor).residency, Residency::Leaves | Residency::Persistent);
                if stays {
                    continue;
                }
                for at in 0..state.kept[tensor.index()].len() {
                    let mut next = state.clone();
                    next.kept[tensor.index()].remove(at);
                    see(next, [0, 0], 0);
                }
            }
        }
        for id in (0..graph.operators().len() as u32).map(OperatorId) {
            let operator = graph.operator(id);
            let is_first = state.done >> id.0 & 1 == 0;
            let leaves = |tensor: &TensorId| graph.tensor(*tensor).residency == Residency::Leaves;
            let may_run = if is_first {
                self.waits_for(id).all(|before| state.done >> before.0 & 1 == 1)
            } else {
                operator.repeatable && !operator.creates.iter().any(leaves)
            };
            let touches = &self.touches[id.index()][usize::from(!is_first)];
            let sees_all = touches.iter().all(|(tensor, version)| state.kept[tensor.index()].contains(version));
            // More instances than a tensor has versions are left out.
            let is_new =
                operator.creates.iter().all(|tensor| state.kept[tensor.index()].len() <= self.changes(*tensor));
            if !may_run || !sees_all || !is_new {
                continue;
            }
            let mut next = state.clone();
            next.done |= 1 << id.0;
            for &tensor in &operator.mutates {
                if let Some(&(_, version)) = touches.iter().find(|(other, _)| *other == tensor) {
                    replace(&mut next.kept[tensor.index()], version, Some(version + 1));
                }
            }
            for &tensor in &operator.creates {
                next.kept[tensor.index()].insert(0, 0);
            }
            let mut live = [0, graph.workspace_bytes(id)];
            for tensor in (0..graph.tensors().len() as u32).map(TensorId) {
                live[self.part(tensor)] += graph.counted_bytes(tensor) * next.kept[tensor.index()].len() as u64;
            }
            let ns = if is_first { 0 } else { rerun_ns(graph, id) };
            // Every set of disjoint pairs whose inputs die here.
            let mut choices = vec![(next, live, Vec::<ReusePair>::new())];
            for &pair in &operator.reuse {
                let Some(&(_, version)) = touches.iter().find(|(tensor, _)| *tensor == pair.input) else { continue };
                for at in 0..choices.len() {
                    let (next, live, used) = &choices[at];
                    if used.iter().all(|other| other.input != pair.input && other.output != pair.output) {
                        let mut next = next.clone();
                        // The graph permits no pair whose input the operator changes.
                        replace(&mut next.kept[pair.input.index()], version, None);
                        let mut live = *live;
                        live[self.part(pair.input)] -= graph.counted_bytes(pair.input);
                        let used = used.iter().copied().chain([pair]).collect();
                        choices.push((next, live, used));
                    }
                }
            }
            for (next, live, _) in choices {
                see(next, live, ns);
            }
        }
    }

    /// How many operators change the tensor.
    fn changes(&self, tensor: TensorId) -> usize {
        self.graph.users(tensor).iter().filter(|&&user| self.graph.operator(user).mutates.contains(&tensor)).count()
    }

    /// Whether the tensor lies in the pool (0) or outside of it.
    fn part(&self, tensor: TensorId) -> usize {
        usize::from(self.graph.tensor(tensor).residency != Residency::StepLocal)
    }

    /// The least over all schedules of their most live bytes.
    fn least_peak(&self) -> u64 {
        self.search(|peak, [pool, outside], _| Some(peak.max(pool + outside))).expect("program order is a schedule")
    }

    /// What may be live outside of the pool at once.
    fn outsides(&self) -> BTreeSet<u64> {
        let mut sums = BTreeSet::from([0]);
        for tensor in (0..self.graph.tensors().len() as u32).map(TensorId).filter(|&tensor| self.part(tensor) == 1) {
            sums.extend(sums.clone().into_iter().map(|sum| sum + self.graph.counted_bytes(tensor)));
        }
        let workspaces = (0..self.graph.operators().len() as u32).map(|id| self.graph.workspace_bytes(OperatorId(id)));
        let with = |workspace: u64| sums.iter().map(move |sum| sum + workspace);
        workspaces.chain([0]).flat_map(with).collect()
    }

    /// The least over all schedules of their peaks in the pool and outside of it together.
    fn least_total(&self) -> u64 {
        let of = |most: u64| {
            let pool = self.search(|peak, [pool, outside], _| (outside <= most).then_some(peak.max(pool)));
            pool.map(|pool| pool + most)
        };
        self.outsides().into_iter().filter_map(of).min().expect("program order is a schedule")
    }

    /// The least time of further runs of all schedules whose total keeps to the limit.
    fn least_ns_in_all(&self, limit: u64) -> Option<u64> {
        let of = |most: u64| {
            let most_pool = limit.checked_sub(most)?;
            self.search(|sum, [pool, outside], ns| (outside <= most && pool <= most_pool).then_some(sum + ns))
        };
        self.outsides().into_iter().filter_map(of).min()
    }

    /// The least time of further runs of all schedules that keep to the limit.
    fn least_ns(&self, limit: u64) -> Option<u64> {
        self.search(|sum, [pool, outside], ns| (pool + outside <= limit).then_some(sum + ns))
    }

    fn search(&self, cost: impl Fn(u64, [u64; 2], u64) -> Option<u64>) -> Option<u64> {
        let mut known = BTreeMap::from([(self.start(), 0)]);
        let mut open = BinaryHeap::from([Reverse((0, self.start()))]);
        while let Some(Reverse((sum, state))) = open.pop() {
            if self.is_end(&state) {
                return Some(sum);
            }
            if known[&state] < sum {
                continue;
            }
            self.moves(&state, |next, live, ns| {
                let Some(sum) = cost(sum, live, ns) else { return };
                if known.get(&next).is_none_or(|&before| sum < before) {
                    known.insert(next.clone(), sum);
                    open.push(Reverse((sum, next)));
                }
            });
        }
        None
    }
}

/// Takes one instance out, and puts another in its place.
fn replace(kept: &mut Vec<u8>, version: u8, by: Option<u8>) {
    let at = kept.iter().position(|&one| one == version).expect("an instance that is used is kept");
    kept.remove(at);
    kept.extend(by);
    kept.sort_unstable();
}

/// How the bounds of some graphs compare with the best schedules.
#[derive(Debug, Default)]
struct Compared {
    floors: u64,
    floors_met: u64,
    limits: u64,
    times_met: u64,
    /// Sums over all limits.
    proved_ns: u64,
    least_ns: u64,
}

fn compare(graphs: impl Iterator<Item = Graph>) -> Compared {
    let mut compared = Compared::default();
    for graph in graphs.filter(|graph| !graph.operators().is_empty()) {
        let schedules = Schedules::new(&graph);
        let least = schedules.least_peak();
        let proved = floor(&graph).bytes;
        assert!(proved <= least, "{proved} > {least}: {graph:?}");
        compared.floors += 1;
        compared.floors_met += u64::from(proved == least);
        assert_eq!(least_extra_ns(&graph, graph.persistent_bytes()).ns.is_none(), proved > graph.persistent_bytes());
        let mut limit = least;
        loop {
            let found = schedules.least_ns(limit).expect("at least the least peak");
            let bound = least_extra_ns(&graph, limit).ns.expect("a schedule was found");
            assert!(bound <= found, "{bound} > {found} within {limit}: {graph:?}");
            if found == 0 {
                break;
            }
            compared.limits += 1;
            compared.times_met += u64::from(bound == found);
            compared.proved_ns += bound;
            compared.least_ns += found;
            limit += 1 + (limit - least) / 4;
        }
    }
    compared
}

#[test]
fn no_bound_of_a_random_graph_is_above_the_best_schedule() {
    let mut random = Random::new(11);
    let graphs = (0..swept(2000)).map(|_| {
        let graph = random_graph(&mut random, 6);
        repeating(&graph, &mut random)
    });
    let compared = compare(graphs);
    assert!(compared.floors_met * 100 >= compared.floors * 85, "{compared:?}");
    assert!(compared.times_met * 100 >= compared.limits * 30, "{compared:?}");
}

#[test]
fn no_bound_of_a_small_step_is_above_the_best_schedule() {
    let mut random = Random::new(12);
    let compared = compare((0..swept(1500)).map(|_| layered(&mut random)));
    assert!(compared.floors_met * 100 >= compared.floors * 85, "{compared:?}");
    assert!(compared.times_met * 100 >= compared.limits * 75, "{compared:?}");
}

#[test]
fn of_two_tensors_that_are_used_together_one_is_made_beside_the_other() {
    let mut builder = GraphBuilder::new("two sides", "cpu", 1);
    let mut run = |reads: &[TensorId], size_bytes: u64, residency| {
        let kind = Kind::Temporary;
        let made = builder.tensor(Tensor { name: String::new(), size_bytes, kind, residency, alignment_bytes: 0 });
        let creates = vec![made.expect("few tensors")];
        let new = Operator::new("", builder.num_operators() as u32, Phase::Forward);
        let operator = Operator { reads: reads.to_vec(), creates: creates.clone(), repeatable: true, ..new };
        builder.operator(operator).expect("few operators");
        creates[0]
    };
    let sides = [(); 2].map(|()| {
        let wide = run(&[], 20, Residency::StepLocal);
        run(&[wide], 10, Residency::StepLocal)
    });
    run(&sides, 1, Residency::Leaves);
    let graph = builder.build().expect("valid");
    // One side, and what the other is made of: while single operators run, 30 bytes are enough.
    assert_eq!((floor(&graph).bytes, Schedules::new(&graph).least_peak()), (40, 40));
}

/// A small tensor is needed at two versions, each with large ones of its own.
#[test]
fn a_tensor_that_is_changed_may_be_needed_at_two_versions_at_once() {
    let mut builder = GraphBuilder::new("versions", "cpu", 1);
    let mut tensor = |size_bytes, residency| {
        let kind = Kind::Temporary;
        let made = Tensor { name: String::new(), size_bytes, kind, residency, alignment_bytes: 0 };
        builder.tensor(made).expect("few tensors")
    };
    let [once, by_first, by_second] = [100; 3].map(|size| tensor(size, Residency::StepLocal));
    let [small, end] = [1; 2].map(|size| tensor(size, Residency::StepLocal));
    let result = tensor(1, Residency::Leaves);
    let mut add = |reads: &[TensorId], creates: &[TensorId], mutates: &[TensorId]| {
        let at = builder.num_operators() as u32;
        let [reads, creates, mutates] = [reads, creates, mutates].map(<[TensorId]>::to_vec);
        let operator =
            Operator { reads, creates, mutates, repeatable: at > 0, ..Operator::new("", at, Phase::Forward) };
        builder.operator(operator).expect("few operators");
    };
    add(&[], &[once], &[]);
    add(&[once], &[small], &[]);
    add(&[small], &[by_first], &[]);
    add(&[], &[], &[small]);
    add(&[small], &[by_second], &[]);
    add(&[by_second], &[end], &[]);
    add(&[by_first, end], &[result], &[]);
    let graph = builder.build().expect("valid");
    let schedules = Schedules::new(&graph);
    // `small` is made twice from `once`; then one of the large tensors lives at a time.
    let least_total = schedules.least_total();
    assert_eq!(least_total, 103);
    assert!(floor(&graph).bytes <= least_total);
    for limit in least_total..=201 {
        planned(&graph, limit, least_total);
    }
}

/// How the plans of small steps compare with the best schedules.
#[derive(Debug, Default)]
struct Planned {
    limits: u64,
    found: u64,
    best: u64,
    proved: u64,
}

/// Nanoseconds of the extra runs of the plan within a limit, and whether no schedule has less;
/// `None` where no plan was found.
fn planned(graph: &Graph, limit_bytes: u64, least_total: u64) -> Option<(u64, bool)> {
    let settings = Settings { memory_limit_bytes: Some(limit_bytes), ..Settings::default() };
    match optimize(graph, &settings, &Control::default()) {
        Ok(plan) => {
            assert!(plan.total_bytes <= limit_bytes);
            Some(plan.recomputation.map_or((0, true), |again| (again.extra_ns, again.extra_ns == again.least_extra_ns)))
        }
        Err(OptimizeError::BelowFloor { floor_bytes, .. }) => {
            assert!(limit_bytes < floor_bytes && floor_bytes <= least_total);
            None
        }
        Err(OptimizeError::LimitNotFound { least_bytes, .. }) => {
            assert!(limit_bytes < least_bytes);
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Whether a tensor that is changed may be made again.
fn has_versions(graph: &Graph) -> bool {
    graph
        .operators()
        .iter()
        .filter(|operator| operator.repeatable)
        .flat_map(|operator| &operator.creates)
        .any(|made| graph.users(*made).iter().any(|&user| graph.operator(user).mutates.contains(made)))
}

#[test]
fn plans_of_small_steps_are_no_better_than_the_best_schedules_and_more_bytes_cost_no_more() {
    let mut random = Random::new(13);
    let [mut compared, mut of_versions] = [(); 2].map(|()| Planned::default());
    for _ in 0..60 {
        let graph = layered(&mut random);
        let compared = if has_versions(&graph) { &mut of_versions } else { &mut compared };
        let schedules = Schedules::new(&graph);
        let least_total = schedules.least_total();
        let plain = optimize(&graph, &Settings::default(), &Control::default()).expect("no limit");
        let local_bytes = plain.total_bytes - graph.persistent_bytes();
        let rungs: Vec<u64> = (1..20).map(|rung| graph.persistent_bytes() + local_bytes * rung / 20).collect();
        let limits = least_total.saturating_sub(2).max(1)..plain.total_bytes;
        let mut least_of_rungs = None;
        for limit in limits {
            let found = planned(&graph, limit, least_total);
            if let Some(least) = schedules.least_ns_in_all(limit) {
                compared.limits += 1;
                if let Some((extra_ns, is_proved)) = found {
                    assert!(extra_ns >= least && (!is_proved || extra_ns == least), "{limit}: {graph:?}");
                    compared.found += 1;
                    compared.best += u64::from(extra_ns == least);
                    compared.proved += u64::from(is_proved);
                }
            } else {
                assert_eq!(found, None);
            }
            let extra_ns = found.map(|(extra_ns, _)| extra_ns);
            if let Some(of_rungs) = least_of_rungs {
                assert!(extra_ns.is_some_and(|extra_ns| extra_ns <= of_rungs), "{limit}: {graph:?}");
            }
            if rungs.contains(&limit) {
                least_of_rungs = extra_ns;
            }
        }
    }
    // All schedules of such small steps are searched, so nothing is left open.
    assert_eq!((compared.found, compared.best, compared.proved), (compared.limits, compared.limits, compared.limits));
    // Where a tensor may be needed at two versions at once, those schedules are left out.
    assert!(of_versions.best * 100 >= of_versions.limits * 95, "{of_versions:?}");
    assert!(of_versions.proved * 100 >= of_versions.limits * 20, "{of_versions:?}");
}
