//! The step as the search sees it: operators are named by their place in the order without
//! recomputation, tensors by who makes them. No id reaches the search, so that no plan depends on
//! one.

use crate::cost::{operator_ns, rerun_ns};
use crate::graph::{Graph, Operator, OperatorId, Phase, Residency, TensorId};
use std::collections::BTreeSet;

/// Stands for no operator, no tensor, no place.
pub(super) const NONE: u32 = u32::MAX;

/// Lists, one a row, in one allocation.
#[derive(Clone, Debug)]
pub(super) struct Lists<T> {
    starts: Vec<u32>,
    items: Vec<T>,
}

impl<T: Copy> Lists<T> {
    fn collect<I: IntoIterator<Item = T>>(rows: impl Iterator<Item = I>) -> Self {
        let mut lists = Lists { starts: vec![0], items: Vec::new() };
        for row in rows {
            lists.items.extend(row);
            lists.starts.push(lists.items.len() as u32);
        }
        lists
    }

    #[inline]
    pub(super) fn row(&self, index: u32) -> &[T] {
        &self.items[self.range(index)]
    }

    /// Where a row's items lie among those of all rows.
    #[inline]
    pub(super) fn range(&self, index: u32) -> std::ops::Range<usize> {
        self.starts[index as usize] as usize..self.starts[index as usize + 1] as usize
    }
}

/// What an operator does to a tensor that it does not make.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) tensor: u32,
    /// How many operators have changed the tensor before.
    pub(super) version: u32,
    pub(super) mutates: bool,
    /// Whether further runs leave it alone.
    pub(super) first_only: bool,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct Model {
    operators: Vec<OperatorId>,
    /// Nanoseconds of the first run, at most [`MOST_NS`].
    pub(super) ns: Vec<u64>,
    /// Nanoseconds of an extra run, at most [`MOST_NS`].
    pub(super) again_ns: Vec<u64>,
    pub(super) workspace: Vec<u64>,
    /// Whether an operator that makes or changes something can run again.
    pub(super) can_rerun: Vec<bool>,
    /// The operator may run again only before the operator of this place, which changes what it
    /// reads for good.
    pub(super) rerun_before: Vec<u32>,
    /// Whether the operator makes a view that runs when it is first needed, whatever its place.
    pub(super) is_late: Vec<bool>,
    /// Whether the operator belongs to the forward pass.
    pub(super) is_forward: Vec<bool>,
    /// Whether the first run, too, may be left to any place at which the operator may run again:
    /// it makes tensors, changes none, and nothing but what uses these waits for it.
    pub(super) can_wait: Vec<bool>,
    pub(super) uses: Lists<Use>,
    pub(super) creates: Lists<u32>,
    /// Per operator the pairs (input, output) of tensors that may share memory.
    pub(super) reuse: Lists<(u32, u32)>,
    /// Per operator the views that it needs of tensors that it uses.
    views: Lists<u32>,
    /// Per tensor its views, each with the tensor's version.
    views_of: Lists<(u32, u32)>,
    /// Counted bytes; 0 where the tensor is persistent.
    pub(super) size: Vec<u64>,
    /// [`NONE`] where the tensor exists before the step.
    pub(super) creator: Vec<u32>,
    pub(super) residency: Vec<Residency>,
    /// Whether the tensor can be dropped and made again.
    pub(super) can_remake: Vec<bool>,
    pub(super) mutators: Lists<u32>,
    /// Per tensor the places that use it, those of late views left out.
    pub(super) users: Lists<u32>,
    /// Per tensor that cannot be made again, but of which much larger ones can, such as the state
    /// of a random generator: the last place at which these, or what is made of them, are used;
    /// [`NONE`] for others.
    pub(super) serves_until: Vec<u32>,
}

/// The search tells no longer times apart, so that a sum over millions of runs does not overflow:
/// 18 minutes.
const MOST_NS: u64 = 1 << 40;

/// How many times as large tensors must be for a small one to be held for them.
pub(super) const MUCH_LARGER: u64 = 4;

impl Model {
    /// `order` is an order that the graph permits.
    pub(super) fn new(graph: &Graph, order: &[OperatorId]) -> Self {
        let mut place = vec![NONE; order.len()];
        for (at, id) in order.iter().enumerate() {
            place[id.index()] = at as u32;
        }
        let place = |id: OperatorId| place[id.index()];
        let ids = tensors_by_place(graph, order, &place);
        let mut rank = vec![0; ids.len()];
        for (index, id) in ids.iter().enumerate() {
            rank[id.index()] = index as u32;
        }
        let rank = |id: TensorId| rank[id.index()];
        let operators = || order.iter().map(|&id| graph.operator(id));

        let mut version = vec![0u32; ids.len()];
        let uses = Lists::collect(operators().map(|operator| {
            let row = uses_of(operator, &version, &rank);
            operator.mutates.iter().for_each(|&tensor| version[rank(tensor) as usize] += 1);
            row
        }));
        let creates = Lists::collect(operators().map(|op| op.creates.iter().map(|&t| rank(t)).collect::<Vec<_>>()));
        let mutators = turned(order.len(), ids.len(), |op| {
            uses.row(op).iter().filter(|used| used.mutates).map(|used| (used.tensor, op)).collect()
        });
        let residency: Vec<Residency> = ids.iter().map(|&id| graph.tensor(id).residency).collect();
        let creator: Vec<u32> = ids.iter().map(|&id| graph.creator(id).map_or(NONE, place)).collect();

        let mut waits_for = vec![Vec::new(); order.len()];
        let mut awaited_by = vec![Vec::new(); order.len()];
        for &(before, after) in graph.control() {
            waits_for[place(after) as usize].push(place(before));
            awaited_by[place(before) as usize].push(place(after));
        }
        waits_for.iter_mut().for_each(|row| row.sort_unstable());
        let does_nothing: Vec<bool> = operators().map(|op| op.creates.is_empty() && op.mutates.is_empty()).collect();
        let shares = |a: u32, b: u32| {
            let [mut few, mut many] = [uses.row(a), uses.row(b)];
            if few.len() > many.len() {
                std::mem::swap(&mut few, &mut many);
            }
            few.iter().any(|used| many.binary_search_by_key(&used.tensor, |other| other.tensor).is_ok())
        };
        let repeatable: Vec<bool> = operators().map(|op| op.repeatable).collect();
        let is_view: Vec<bool> = (0..order.len() as u32)
            .map(|op| does_nothing[op as usize] && repeatable[op as usize] && uses.row(op).len() == 1)
            .collect();
        let is_late = (0..order.len() as u32).map(|op| {
            let after = &awaited_by[op as usize];
            is_view[op as usize] && !after.is_empty() && after.iter().all(|&after| shares(op, after))
        });
        let is_late: Vec<bool> = is_late.collect();
        let views = Lists::collect((0..order.len() as u32).map(|op| {
            let views = waits_for[op as usize].iter().filter(|&&view| is_view[view as usize] && shares(view, op));
            views.copied().collect::<Vec<_>>()
        }));
        let views_of = turned(order.len(), ids.len(), |op| {
            let row = if is_view[op as usize] && !awaited_by[op as usize].is_empty() { uses.row(op) } else { &[] };
            row.iter().map(|used| (used.tensor, (op, used.version))).collect()
        });

        let can_wait: Vec<bool> = operators()
            .zip(&awaited_by)
            .map(|(op, after)| {
                let makes_alone = !op.creates.is_empty() && op.mutates.is_empty() && op.first_only.is_empty();
                makes_alone && op.sequence.is_none() && after.is_empty()
            })
            .collect();

        // What cannot be made again: what outlives the step or was there before it, what a fixed
        // operator makes or changes, and what somebody sees by a view that cannot be made again.
        let mut can_rerun: Vec<bool> = (0..order.len() as u32)
            .map(|op| {
                let changed = uses.row(op).iter().filter(|used| used.mutates && !used.first_only).count();
                let made = creates.row(op);
                repeatable[op as usize]
                    && (if made.is_empty() { changed == 1 } else { changed == 0 })
                    && made.iter().all(|&t| matches!(residency[t as usize], Residency::StepLocal | Residency::Unpooled))
            })
            .collect();
        let mut is_fixed = vec![false; ids.len()];
        for op in (0..order.len() as u32).filter(|&op| does_nothing[op as usize] && !is_view[op as usize]) {
            if awaited_by[op as usize].iter().any(|&after| shares(op, after)) {
                uses.row(op).iter().for_each(|used| is_fixed[used.tensor as usize] = true);
            }
        }
        for op in 0..order.len() {
            let made = creates.row(op as u32);
            let replays =
                |&t: &u32| !is_fixed[t as usize] && mutators.row(t).iter().all(|&change| can_rerun[change as usize]);
            if !made.is_empty() && !made.iter().all(replays) {
                can_rerun[op] = false;
            }
        }
        let can_remake: Vec<bool> = creator.iter().map(|&op| op != NONE && can_rerun[op as usize]).collect();
        let rerun_before = (0..order.len() as u32).map(|op| {
            let fixed = uses.row(op).iter().filter(|used| !used.first_only && !can_remake[used.tensor as usize]);
            let change = |used: &Use| {
                // An operator changes its own version; that one is no obstacle to itself, but it
                // cannot change what stays a second time.
                mutators.row(used.tensor).get(used.version as usize).copied().unwrap_or(NONE)
            };
            fixed.map(change).min().unwrap_or(NONE)
        });
        let users = turned(order.len(), ids.len(), |op| {
            let row = if is_late[op as usize] { &[] } else { uses.row(op) };
            row.iter().map(|used| (used.tensor, op)).collect()
        });
        let mut model = Model {
            ns: order.iter().map(|&id| operator_ns(graph, id).min(MOST_NS)).collect(),
            again_ns: order.iter().map(|&id| rerun_ns(graph, id).min(MOST_NS)).collect(),
            workspace: order.iter().map(|&id| graph.workspace_bytes(id)).collect(),
            rerun_before: rerun_before.collect(),
            reuse: Lists::collect(
                operators()
                    .map(|op| op.reuse.iter().map(|pair| (rank(pair.input), rank(pair.output))).collect::<Vec<_>>()),
            ),
            size: ids
                .iter()
                .map(|&id| match graph.tensor(id).residency {
                    Residency::Persistent => 0,
                    _ => graph.counted_bytes(id),
                })
                .collect(),
            operators: order.to_vec(),
            is_forward: operators().map(|operator| operator.phase == Phase::Forward).collect(),
            can_rerun,
            is_late,
            can_wait,
            uses,
            creates,
            views,
            views_of,
            creator,
            residency,
            can_remake,
            mutators,
            users,
            serves_until: Vec::new(),
        };
        model.serves_until = model.serving();
        model
    }

    /// See `serves_until`.
    fn serving(&self) -> Vec<u32> {
        let mut last: Vec<u32> =
            (0..self.size.len() as u32).map(|t| self.users.row(t).last().copied().unwrap_or(0)).collect();
        let mut much = vec![0u64; self.size.len()];
        for op in (0..self.len() as u32).rev().filter(|&op| self.can_rerun[op as usize]) {
            let changed = self.used(op, true).filter(|used| used.mutates).map(|used| used.tensor);
            let made: Vec<u32> = self.creates.row(op).iter().copied().chain(changed).collect();
            let until = made.iter().map(|&tensor| last[tensor as usize]).max().unwrap_or(0);
            let bytes: u64 = made.iter().map(|&tensor| self.size[tensor as usize]).sum();
            for used in self.used(op, true).filter(|used| !used.mutates) {
                let at = used.tensor as usize;
                last[at] = last[at].max(until);
                much[at] = bytes.max(much[at]);
            }
        }
        let serves = |at: &usize| {
            let is_made = self.creator[*at] != NONE && !self.can_remake[*at];
            is_made && self.size[*at] > 0 && self.size[*at].saturating_mul(MUCH_LARGER) <= much[*at]
        };
        (0..self.size.len()).map(|at| if serves(&at) { last[at] } else { NONE }).collect()
    }

    /// How many operators.
    pub(super) fn len(&self) -> usize {
        self.operators.len()
    }

    /// The operator of a place.
    pub(super) fn operator(&self, op: u32) -> OperatorId {
        self.operators[op as usize]
    }

    /// What a run uses.
    pub(super) fn used(&self, op: u32, is_again: bool) -> impl Iterator<Item = Use> + '_ {
        self.uses.row(op).iter().copied().filter(move |used| !(is_again && used.first_only))
    }

    /// A tensor's version when an operator of the order runs for the first time.
    pub(super) fn version_at(&self, tensor: u32, place: u32) -> u32 {
        self.mutators.row(tensor).partition_point(|&change| change < place) as u32
    }

    /// The sequence by ids, with the late views where they are first needed and all views of what
    /// is made again.
    pub(super) fn with_views(&self, runs: &[u32]) -> Vec<OperatorId> {
        let mut listing = Listing {
            model: self,
            sequence: Vec::with_capacity(self.len() + runs.len()),
            instance: vec![0; self.size.len()],
            version: vec![0; self.size.len()],
            seen: vec![NONE; self.len()],
            has_run: vec![false; self.len()],
        };
        runs.iter().for_each(|&op| listing.run(op));
        listing.sequence
    }
}

/// Puts views into a sequence.
struct Listing<'a> {
    model: &'a Model,
    sequence: Vec<OperatorId>,
    /// Per tensor how often it has been made.
    instance: Vec<u32>,
    version: Vec<u32>,
    /// Per view the instance that it is of.
    seen: Vec<u32>,
    has_run: Vec<bool>,
}

impl Listing<'_> {
    fn run(&mut self, op: u32) {
        let model = self.model;
        for used in model.used(op, self.has_run[op as usize]).filter(|used| used.mutates) {
            for &(view, version) in model.views_of.row(used.tensor) {
                if version == self.version[used.tensor as usize] && view != op && model.is_late[view as usize]
                    || (version == self.version[used.tensor as usize] && self.has_run[view as usize])
                {
                    self.refresh(view);
                }
            }
        }
        model.views.row(op).iter().for_each(|&view| self.refresh(view));
        if !model.uses.row(op).is_empty() && model.creates.row(op).is_empty() {
            // Only views ask for it, and they use one tensor.
            self.seen[op as usize] = self.instance[model.uses.row(op)[0].tensor as usize];
        }
        for used in model.used(op, self.has_run[op as usize]).filter(|used| used.mutates) {
            self.version[used.tensor as usize] += 1;
        }
        for &tensor in model.creates.row(op) {
            self.instance[tensor as usize] += 1;
            self.version[tensor as usize] = 0;
        }
        self.has_run[op as usize] = true;
        self.sequence.push(model.operators[op as usize]);
    }

    /// Runs a view unless it is one of the instance that there is.
    fn refresh(&mut self, view: u32) {
        let tensor = self.model.uses.row(view)[0].tensor as usize;
        if self.seen[view as usize] != self.instance[tensor] {
            self.model.views.row(view).iter().for_each(|&base| self.refresh(base));
            self.seen[view as usize] = self.instance[tensor];
            self.has_run[view as usize] = true;
            self.sequence.push(self.model.operators[view as usize]);
        }
    }
}

/// What the operator uses, ascending by tensor.
fn uses_of(operator: &Operator, version: &[u32], rank: &impl Fn(TensorId) -> u32) -> Vec<Use> {
    let ranks = |ids: &[TensorId]| ids.iter().map(|&id| rank(id)).collect::<BTreeSet<u32>>();
    let (mutated, first_only) = (ranks(&operator.mutates), ranks(&operator.first_only));
    let used = ranks(&operator.reads).union(&mutated).copied().collect::<Vec<u32>>();
    let use_of = |tensor: u32| Use {
        tensor,
        version: version[tensor as usize],
        mutates: mutated.contains(&tensor),
        first_only: first_only.contains(&tensor),
    };
    used.into_iter().map(use_of).collect()
}

/// Those that operators make come first, by place and then as they are listed; the others by who
/// first uses them.
fn tensors_by_place(graph: &Graph, order: &[OperatorId], place: &impl Fn(OperatorId) -> u32) -> Vec<TensorId> {
    let mut ids: Vec<TensorId> = order.iter().flat_map(|&id| graph.operator(id).creates.iter().copied()).collect();
    let there = (0..graph.tensors().len() as u32).map(TensorId).filter(|&id| graph.creator(id).is_none());
    let mut there: Vec<TensorId> = there.collect();
    there.sort_by_key(|&id| {
        let first = graph.users(id).iter().map(|&user| place(user)).min().unwrap_or(NONE);
        (first, graph.counted_bytes(id), graph.tensor(id).residency as u8)
    });
    ids.extend(there);
    ids
}

/// Lists by tensor of what each operator says of tensors, by place.
fn turned<T: Copy>(operators: usize, tensors: usize, of: impl Fn(u32) -> Vec<(u32, T)>) -> Lists<T> {
    let mut rows = vec![Vec::new(); tensors];
    for op in 0..operators as u32 {
        for (tensor, item) in of(op) {
            rows[tensor as usize].push(item);
        }
    }
    Lists::collect(rows.into_iter())
}
