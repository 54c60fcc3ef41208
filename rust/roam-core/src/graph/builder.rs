//! Builds a [`Graph`]: checks everything, then derives who uses what and what must run before what.
//!
//! All passes are linear in operators, tensors and accesses, save one sort of the ordering
//! constraints.

use super::entries::{Operator, Region, Residency, ReusePair, Tensor, round_up};
use super::error::{GraphError, ReuseFault};
use super::ids::{OperatorId, RegionId, TensorId};
use super::site::Site;
use super::step::{Adjacency, Graph};
use std::sync::OnceLock;

/// The largest alignment that a graph or a tensor may ask for.
pub const MAX_ALIGNMENT_BYTES: u64 = 1 << 30;

/// All sizes and workspaces, rounded, must together stay below this, so that no sum of them
/// overflows.
pub const MAX_TOTAL_BYTES: u64 = 1 << 63;

/// Collects operators and tensors in any order; [`GraphBuilder::build`] checks them together.
#[derive(Clone, Debug)]
pub struct GraphBuilder {
    /// For people.
    pub name: String,
    /// The device that the step runs on, for example `cpu` or `cuda`.
    pub device: String,
    /// Every size is rounded up to a multiple of this, a power of two.
    pub alignment_bytes: u64,
    /// What the step's figures may be wrong about; empty where they are exact.
    pub estimate: String,
    /// The rules by which its tensors are counted, if these are not the rules of a real step;
    /// otherwise empty.
    pub accounting: String,
    /// What the maker of the graph tells people about it: (topic, text) in order. It is no part of
    /// what makes graphs equal.
    pub notes: Vec<(String, String)>,
    operators: Vec<Operator>,
    tensors: Vec<Tensor>,
    control: Vec<(OperatorId, OperatorId)>,
    regions: Vec<Region>,
}

impl GraphBuilder {
    /// An empty graph. `alignment_bytes` is checked by [`GraphBuilder::build`].
    pub fn new(name: impl Into<String>, device: impl Into<String>, alignment_bytes: u64) -> Self {
        Self {
            name: name.into(),
            device: device.into(),
            alignment_bytes,
            estimate: String::new(),
            accounting: String::new(),
            notes: Vec::new(),
            operators: Vec::new(),
            tensors: Vec::new(),
            control: Vec::new(),
            regions: Vec::new(),
        }
    }

    /// A builder that already holds whole lists.
    pub(crate) fn with_parts(
        self,
        tensors: Vec<Tensor>,
        operators: Vec<Operator>,
        control: Vec<(OperatorId, OperatorId)>,
        regions: Vec<Region>,
    ) -> Self {
        Self { operators, tensors, control, regions, ..self }
    }

    /// How many operators there are; the next one's id, and its position unless it says otherwise.
    pub fn num_operators(&self) -> usize {
        self.operators.len()
    }

    /// How many tensors there are; the next one's id.
    pub fn num_tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Adds a tensor. Fails only where its number does not fit 32 bits.
    pub fn tensor(&mut self, tensor: Tensor) -> Result<TensorId, GraphError> {
        let id = TensorId::new(self.tensors.len()).ok_or(TOO_MANY_TENSORS)?;
        self.tensors.push(tensor);
        Ok(id)
    }

    /// Adds an operator. Fails only where its number does not fit 32 bits.
    pub fn operator(&mut self, operator: Operator) -> Result<OperatorId, GraphError> {
        let id = OperatorId::new(self.operators.len()).ok_or(TOO_MANY_OPERATORS)?;
        self.operators.push(operator);
        Ok(id)
    }

    /// Demands that `before` runs before `after`.
    pub fn control(&mut self, before: OperatorId, after: OperatorId) {
        self.control.push((before, after));
    }

    /// Adds a conditional region. Fails only where its number does not fit 32 bits.
    pub fn region(&mut self, region: Region) -> Result<RegionId, GraphError> {
        let id = RegionId::new(self.regions.len()).ok_or(TOO_MANY_REGIONS)?;
        self.regions.push(region);
        Ok(id)
    }

    /// Checks everything and derives the rest.
    ///
    /// # Errors
    /// The first fault found, see [`GraphError`].
    pub fn build(mut self) -> Result<Graph, GraphError> {
        TensorId::new(self.tensors.len()).ok_or(TOO_MANY_TENSORS)?;
        OperatorId::new(self.operators.len()).ok_or(TOO_MANY_OPERATORS)?;
        RegionId::new(self.regions.len()).ok_or(TOO_MANY_REGIONS)?;
        // The order in which a caller lists control edges means nothing: equal graphs are equal
        // files.
        self.control.sort_unstable();
        self.control.dedup();

        self.check_sizes()?;
        let program_order = self.program_order()?;
        self.check_regions()?;
        let creator = self.check_operators()?;
        self.check_created(&creator)?;
        let derived = self.derive(&program_order, &creator)?;
        Ok(Graph {
            name: self.name,
            device: self.device,
            alignment_bytes: self.alignment_bytes,
            estimate: self.estimate,
            accounting: self.accounting,
            notes: self.notes,
            operators: self.operators,
            tensors: self.tensors,
            control: self.control,
            regions: self.regions,
            program_order,
            creator,
            users: derived.users,
            predecessors: derived.predecessors,
            successors: derived.successors,
            digest: OnceLock::new(),
        })
    }

    fn site(&self, id: OperatorId) -> Box<Site> {
        Site::of(&self.operators[id.index()])
    }

    fn tensor_name(&self, id: TensorId) -> String {
        self.tensors[id.index()].name.clone()
    }

    fn counted_bytes(&self, id: TensorId) -> u64 {
        let tensor = &self.tensors[id.index()];
        round_up(tensor.size_bytes, self.alignment_bytes.max(tensor.alignment_bytes))
    }

    /// Alignments, single sizes, and their sum.
    fn check_sizes(&self) -> Result<(), GraphError> {
        let is_alignment = |bytes: u64| bytes.is_power_of_two() && bytes <= MAX_ALIGNMENT_BYTES;
        let alignment =
            |what: String, alignment_bytes| GraphError::Alignment { what, alignment_bytes, max: MAX_ALIGNMENT_BYTES };
        if !is_alignment(self.alignment_bytes) {
            return Err(alignment("the graph".into(), self.alignment_bytes));
        }
        // A size below 2^63 plus an alignment of at most 2^30 does not overflow, so neither does
        // rounding it.
        let add = |total: u64, bytes: u64| total.checked_add(bytes).filter(|&sum| sum < MAX_TOTAL_BYTES);
        let mut total = 0;
        for (index, tensor) in self.tensors.iter().enumerate() {
            if tensor.alignment_bytes != 0 && !is_alignment(tensor.alignment_bytes) {
                return Err(alignment(format!("tensor `{}`", tensor.name), tensor.alignment_bytes));
            }
            if tensor.size_bytes >= MAX_TOTAL_BYTES {
                let what = format!("size_bytes of tensor `{}`", tensor.name);
                return Err(out_of_range(what, None, tensor.size_bytes));
            }
            total = add(total, self.counted_bytes(TensorId(index as u32)))
                .ok_or_else(|| GraphError::TotalTooLarge { at: format!("tensor `{}`", tensor.name), site: None })?;
        }
        for operator in &self.operators {
            if operator.workspace_bytes >= MAX_TOTAL_BYTES {
                let site = Some(Site::of(operator));
                return Err(out_of_range("workspace_bytes".into(), site, operator.workspace_bytes));
            }
            for (what, value) in [("flops", operator.flops), ("time_ns", operator.time_ns)] {
                if value >= MAX_TOTAL_BYTES {
                    return Err(out_of_range(what.into(), Some(Site::of(operator)), value));
                }
            }
            total = add(total, round_up(operator.workspace_bytes, self.alignment_bytes)).ok_or_else(|| {
                let site = Site::of(operator);
                GraphError::TotalTooLarge { at: site.to_string(), site: Some(site) }
            })?;
        }
        Ok(())
    }

    /// Operators by position, which must be a permutation.
    fn program_order(&self) -> Result<Vec<OperatorId>, GraphError> {
        let mut order: Vec<Option<OperatorId>> = vec![None; self.operators.len()];
        for (index, operator) in self.operators.iter().enumerate() {
            let Some(place) = order.get_mut(operator.position as usize) else {
                return Err(GraphError::PositionOutOfRange {
                    site: Site::of(operator),
                    operators: self.operators.len(),
                });
            };
            if let Some(other) = place.replace(OperatorId(index as u32)) {
                let other = self.operators[other.index()].name.clone();
                return Err(GraphError::PositionTaken { site: Site::of(operator), other });
            }
        }
        // As many places as operators, none taken twice: every place is taken.
        Ok(order.into_iter().flatten().collect())
    }

    /// Predicates and parents exist; no region contains itself.
    fn check_regions(&self) -> Result<(), GraphError> {
        for region in &self.regions {
            if region.predicate.index() >= self.tensors.len() {
                return Err(GraphError::RegionPredicate {
                    region: region.name.clone(),
                    tensor: region.predicate.0.into(),
                });
            }
            if let Some(parent) = region.parent.filter(|parent| parent.index() >= self.regions.len()) {
                return Err(GraphError::RegionParent { region: region.name.clone(), parent: parent.0.into() });
            }
        }
        // Climb from every region; a climb that meets its own trail has found a cycle, one that
        // meets an older trail may stop, so each region is climbed through once.
        const UNSEEN: u32 = u32::MAX;
        let mut trail = vec![UNSEEN; self.regions.len()];
        for start in 0..self.regions.len() {
            let mut at = Some(RegionId(start as u32));
            while let Some(id) = at {
                match trail[id.index()] {
                    UNSEEN => trail[id.index()] = start as u32,
                    own if own == start as u32 => return Err(self.region_cycle(id)),
                    _ => break,
                }
                at = self.regions[id.index()].parent;
            }
        }
        Ok(())
    }

    fn region_cycle(&self, start: RegionId) -> GraphError {
        let mut regions = vec![self.regions[start.index()].name.clone()];
        let mut at = self.regions[start.index()].parent;
        while let Some(id) = at.filter(|&id| id != start) {
            regions.push(self.regions[id.index()].name.clone());
            at = self.regions[id.index()].parent;
        }
        GraphError::RegionCycle { regions }
    }

    /// Each operator on its own: known ids, no doubles, no contradictions; returns who creates each
    /// tensor.
    fn check_operators(&self) -> Result<Vec<Option<OperatorId>>, GraphError> {
        let mut creator: Vec<Option<OperatorId>> = vec![None; self.tensors.len()];
        // The last operator that read, created or mutated a tensor: finds doubles without a set per
        // operator.
        let mut read: Vec<Option<OperatorId>> = vec![None; self.tensors.len()];
        let mut created = read.clone();
        let mut mutated = read.clone();
        let mut first_only = read.clone();
        for (index, operator) in self.operators.iter().enumerate() {
            let id = OperatorId(index as u32);
            if let Some(region) = operator.region.filter(|region| region.index() >= self.regions.len()) {
                return Err(GraphError::UnknownRegion { site: self.site(id), region: region.0.into() });
            }
            self.mark(id, "reads", &operator.reads, &mut read)?;
            self.mark(id, "creates", &operator.creates, &mut created)?;
            self.mark(id, "mutates", &operator.mutates, &mut mutated)?;
            for &tensor in &operator.creates {
                let name = || self.tensor_name(tensor);
                if read[tensor.index()] == Some(id) {
                    return Err(GraphError::ReadsOwnOutput { site: self.site(id), tensor: name() });
                }
                if mutated[tensor.index()] == Some(id) {
                    return Err(GraphError::CreatesAndMutates { site: self.site(id), tensor: name() });
                }
                match self.tensors[tensor.index()].residency {
                    Residency::StepLocal | Residency::Unpooled | Residency::Leaves => {}
                    Residency::Enters | Residency::Persistent => {
                        return Err(GraphError::CreatedThoughPresent { site: self.site(id), tensor: name() });
                    }
                }
                if let Some(first) = creator[tensor.index()].replace(id) {
                    return Err(GraphError::CreatedTwice {
                        tensor: name(),
                        first: self.site(first),
                        site: self.site(id),
                    });
                }
            }
            self.check_reuse(id, &read, &created, &mutated)?;
            self.check_repeats(id, &read, &mutated, &mut first_only)?;
        }
        Ok(creator)
    }

    fn mark(
        &self,
        id: OperatorId,
        role: &'static str,
        tensors: &[TensorId],
        marks: &mut [Option<OperatorId>],
    ) -> Result<(), GraphError> {
        for &tensor in tensors {
            let Some(mark) = marks.get_mut(tensor.index()) else {
                return Err(GraphError::UnknownTensor { site: self.site(id), role, tensor: tensor.0.into() });
            };
            if mark.replace(id) == Some(id) {
                return Err(GraphError::Doubled { site: self.site(id), role, tensor: self.tensor_name(tensor) });
            }
        }
        Ok(())
    }

    fn check_reuse(
        &self,
        id: OperatorId,
        read: &[Option<OperatorId>],
        created: &[Option<OperatorId>],
        mutated: &[Option<OperatorId>],
    ) -> Result<(), GraphError> {
        let permissions = &self.operators[id.index()].reuse;
        for &ReusePair { input, output } in permissions {
            for tensor in [input, output] {
                if tensor.index() >= self.tensors.len() {
                    return Err(GraphError::UnknownTensor {
                        site: self.site(id),
                        role: "reuses",
                        tensor: tensor.0.into(),
                    });
                }
            }
            let residency = |tensor: TensorId| self.tensors[tensor.index()].residency;
            let is_local = match residency(input) {
                Residency::StepLocal => residency(output) == Residency::StepLocal,
                Residency::Unpooled => matches!(residency(output), Residency::Unpooled | Residency::Leaves),
                Residency::Enters | Residency::Leaves | Residency::Persistent => false,
            };
            let fault = if read[input.index()] != Some(id) {
                ReuseFault::InputNotRead
            } else if created[output.index()] != Some(id) {
                ReuseFault::OutputNotCreated
            } else if mutated[input.index()] == Some(id) {
                ReuseFault::InputMutated
            } else if !is_local {
                ReuseFault::NotStepLocal
            } else if self.counted_bytes(input) != self.counted_bytes(output) {
                ReuseFault::SizesDiffer
            } else {
                continue;
            };
            return Err(self.reuse_error(id, ReusePair { input, output }, fault));
        }
        if permissions.len() > 1 {
            let mut sorted = permissions.clone();
            sorted.sort_unstable();
            if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(self.reuse_error(id, pair[0], ReuseFault::Doubled));
            }
        }
        Ok(())
    }

    /// Checks what an operator says about its further runs.
    fn check_repeats(
        &self,
        id: OperatorId,
        read: &[Option<OperatorId>],
        mutated: &[Option<OperatorId>],
        first_only: &mut [Option<OperatorId>],
    ) -> Result<(), GraphError> {
        let operator = &self.operators[id.index()];
        self.mark(id, "first_only", &operator.first_only, first_only)?;
        let is_touched = |tensor: TensorId| [read, mutated].iter().any(|marks| marks[tensor.index()] == Some(id));
        match operator.first_only.iter().find(|&&tensor| !is_touched(tensor)) {
            Some(&tensor) => {
                Err(GraphError::FirstOnlyUntouched { site: self.site(id), tensor: self.tensor_name(tensor) })
            }
            None => Ok(()),
        }
    }

    fn reuse_error(&self, id: OperatorId, pair: ReusePair, fault: ReuseFault) -> GraphError {
        let (input, output) = (self.tensor_name(pair.input), self.tensor_name(pair.output));
        GraphError::Reuse { site: self.site(id), input, output, fault }
    }

    /// Whatever must be made in the step is made.
    fn check_created(&self, creator: &[Option<OperatorId>]) -> Result<(), GraphError> {
        let must_be_made = |tensor: &Tensor| !matches!(tensor.residency, Residency::Enters | Residency::Persistent);
        for (index, tensor) in self.tensors.iter().enumerate() {
            if must_be_made(tensor) && creator[index].is_none() {
                let id = TensorId(index as u32);
                let uses = |operator: &&Operator| operator.reads.contains(&id) || operator.mutates.contains(&id);
                let user = self.operators.iter().find(uses).map(Site::of);
                return Err(GraphError::NeverCreated { tensor: tensor.name.clone(), user });
            }
        }
        Ok(())
    }

    /// Users of every tensor and all ordering constraints.
    fn derive(&self, program_order: &[OperatorId], creator: &[Option<OperatorId>]) -> Result<Derived, GraphError> {
        let position = |id: OperatorId| self.operators[id.index()].position;
        let mut edges: Vec<(OperatorId, OperatorId)> = Vec::new();
        let mut backward: Option<GraphError> = None;

        // Accesses of one tensor in program order. The readers since the last write must all run
        // before the next one; having done so they are forgotten, so every access is the end of one
        // edge and the start of at most one.
        let mut writer = creator.to_vec();
        let mut readers: Vec<Vec<OperatorId>> = vec![Vec::new(); self.tensors.len()];
        let mut mutated: Vec<Option<OperatorId>> = vec![None; self.tensors.len()];
        let mut last_of_sequence = [None; 2];
        for &id in program_order {
            let operator = &self.operators[id.index()];
            for &tensor in &operator.mutates {
                let index = tensor.index();
                mutated[index] = Some(id);
                if let Some(maker) = writer[index].filter(|&maker| position(maker) > operator.position) {
                    let (site, creator) = (Site::of(operator), self.site(maker));
                    backward.get_or_insert_with(|| GraphError::MutatedBeforeWrite {
                        site,
                        tensor: self.tensor_name(tensor),
                        creator,
                    });
                    edges.push((maker, id));
                    continue;
                }
                if readers[index].is_empty() {
                    edges.extend(writer[index].map(|writer| (writer, id)));
                } else {
                    edges.extend(readers[index].drain(..).map(|reader| (reader, id)));
                }
                writer[index] = Some(id);
            }
            for &tensor in &operator.reads {
                let index = tensor.index();
                if mutated[index] == Some(id) {
                    continue; // Ordered as a mutator already.
                }
                if let Some(maker) = writer[index].filter(|&maker| position(maker) > operator.position) {
                    let (site, creator) = (Site::of(operator), self.site(maker));
                    backward.get_or_insert_with(|| GraphError::ReadBeforeWrite {
                        site,
                        tensor: self.tensor_name(tensor),
                        creator,
                    });
                    edges.push((maker, id));
                    continue;
                }
                edges.extend(writer[index].map(|writer| (writer, id)));
                readers[index].push(id);
            }
            if let Some(sequence) = operator.sequence {
                let last: &mut Option<OperatorId> = &mut last_of_sequence[sequence as usize];
                edges.extend(last.replace(id).map(|last| (last, id)));
            }
        }

        for &(before, after) in &self.control {
            let known = |id: OperatorId| self.operators.get(id.index()).map(Site::of);
            if known(before).is_none() || known(after).is_none() {
                return Err(GraphError::UnknownOperator {
                    before: before.0.into(),
                    after: after.0.into(),
                    operators: self.operators.len(),
                    known: known(before).or_else(|| known(after)),
                });
            }
            if before == after {
                return Err(GraphError::ControlSelf { site: self.site(before) });
            }
            if position(before) > position(after) {
                backward.get_or_insert_with(|| GraphError::ControlAgainstProgramOrder {
                    before: self.site(before),
                    site: self.site(after),
                });
            }
            edges.push((before, after));
        }

        if let Some(error) = backward {
            // Not merely out of order but impossible in any order? Then say that instead.
            return Err(match find_cycle(self.operators.len(), &edges) {
                Some(cycle) => {
                    let mut sites: Vec<Site> = cycle.into_iter().map(|id| *self.site(id)).collect();
                    // Begin where the program reaches the cycle.
                    let first = sites.iter().enumerate().min_by_key(|(_, site)| site.position);
                    let first = first.map_or(0, |(index, _)| index);
                    sites.rotate_left(first);
                    GraphError::Cycle { sites }
                }
                None => error,
            });
        }
        let predecessors = self.predecessors(edges, program_order)?;
        Ok(Derived {
            users: self.users(program_order)?,
            successors: turned_round(&predecessors, self.operators.len(), program_order),
            predecessors,
        })
    }

    /// Per tensor who reads or mutates it, by position.
    fn users(&self, program_order: &[OperatorId]) -> Result<Adjacency, GraphError> {
        // No list names a tensor twice, but two lists of an operator may name the same tensor.
        let accesses = |&id: &OperatorId| {
            let Operator { reads, mutates, .. } = &self.operators[id.index()];
            mutates.iter().map(move |&tensor| (tensor, id)).chain(reads.iter().map(move |&tensor| (tensor, id)))
        };
        let mut last: Vec<Option<OperatorId>> = vec![None; self.tensors.len()];
        let mut starts = vec![0u32; self.tensors.len() + 1];
        for (tensor, id) in program_order.iter().flat_map(accesses) {
            if last[tensor.index()].replace(id) != Some(id) {
                starts[tensor.index() + 1] += 1;
            }
        }
        let mut total = 0u32;
        for start in &mut starts {
            total = total.checked_add(*start).ok_or(TOO_MANY_CONSTRAINTS)?;
            *start = total;
        }
        let mut items = vec![OperatorId(0); total as usize];
        let mut next = starts.clone();
        last.fill(None);
        for (tensor, id) in program_order.iter().flat_map(accesses) {
            if last[tensor.index()].replace(id) != Some(id) {
                items[next[tensor.index()] as usize] = id;
                next[tensor.index()] += 1;
            }
        }
        Ok(Adjacency { starts, items })
    }

    /// Per operator the first ends of its edges, by position, without doubles.
    fn predecessors(
        &self,
        edges: Vec<(OperatorId, OperatorId)>,
        program_order: &[OperatorId],
    ) -> Result<Adjacency, GraphError> {
        let position = |id: OperatorId| self.operators[id.index()].position;
        // As many bytes as before: the list is kept once.
        let mut pairs: Vec<(u32, u32)> = edges.into_iter().map(|(before, after)| (after.0, position(before))).collect();
        pairs.sort_unstable();
        pairs.dedup();
        if u32::try_from(pairs.len()).is_err() {
            return Err(TOO_MANY_CONSTRAINTS);
        }
        let mut starts = vec![0; self.operators.len() + 1];
        let mut items = Vec::with_capacity(pairs.len());
        for &(row, position) in &pairs {
            starts[row as usize + 1] += 1;
            items.push(program_order[position as usize]);
        }
        for row in 1..starts.len() {
            starts[row] += starts[row - 1];
        }
        Ok(Adjacency { starts, items })
    }
}

struct Derived {
    users: Adjacency,
    predecessors: Adjacency,
    successors: Adjacency,
}

const TOO_MANY_TENSORS: GraphError = GraphError::TooMany { what: "tensors", max: u32::MAX as u64 };
const TOO_MANY_OPERATORS: GraphError = GraphError::TooMany { what: "operators", max: u32::MAX as u64 };
const TOO_MANY_CONSTRAINTS: GraphError = GraphError::TooMany { what: "ordering constraints", max: u32::MAX as u64 };
const TOO_MANY_REGIONS: GraphError = GraphError::TooMany { what: "regions", max: u32::MAX as u64 };

fn out_of_range(what: String, site: Option<Box<Site>>, value: u64) -> GraphError {
    GraphError::OutOfRange { what, site, value: value.to_string(), max: MAX_TOTAL_BYTES - 1 }
}

/// Per operator the rows that list it, by position.
fn turned_round(rows: &Adjacency, operators: usize, program_order: &[OperatorId]) -> Adjacency {
    let mut starts = vec![0; operators + 1];
    for item in &rows.items {
        starts[item.index() + 1] += 1;
    }
    for row in 1..starts.len() {
        starts[row] += starts[row - 1];
    }
    let mut items = vec![OperatorId(0); rows.items.len()];
    let mut next = starts.clone();
    for &id in program_order {
        for item in rows.row(id.index()) {
            items[next[item.index()] as usize] = id;
            next[item.index()] += 1;
        }
    }
    Adjacency { starts, items }
}

/// Some cycle among the edges, if there is one. Called on faulty graphs only.
fn find_cycle(operators: usize, edges: &[(OperatorId, OperatorId)]) -> Option<Vec<OperatorId>> {
    let mut waits_for = vec![0u32; operators];
    let mut after: Vec<Vec<OperatorId>> = vec![Vec::new(); operators];
    for &(first, second) in edges {
        waits_for[second.index()] += 1;
        after[first.index()].push(second);
    }
    // Run whatever can run; what is left over lies on a cycle or behind one.
    let mut ready: Vec<usize> = (0..operators).filter(|&id| waits_for[id] == 0).collect();
    while let Some(id) = ready.pop() {
        for next in &after[id] {
            waits_for[next.index()] -= 1;
            if waits_for[next.index()] == 0 {
                ready.push(next.index());
            }
        }
    }
    // Every operator left over waits for another one left over: walk backwards until the walk meets
    // itself.
    let mut stuck_before: Vec<Option<OperatorId>> = vec![None; operators];
    for &(first, second) in edges {
        if waits_for[first.index()] > 0 && waits_for[second.index()] > 0 {
            stuck_before[second.index()] = Some(first);
        }
    }
    let mut at = OperatorId((0..operators).find(|&id| waits_for[id] > 0)? as u32);
    let mut walk = Vec::new();
    let mut seen = vec![false; operators];
    while !seen[at.index()] {
        seen[at.index()] = true;
        walk.push(at);
        at = stuck_before[at.index()]?;
    }
    let start = walk.iter().position(|&id| id == at)?;
    let mut cycle = walk.split_off(start);
    cycle.reverse();
    Some(cycle)
}
