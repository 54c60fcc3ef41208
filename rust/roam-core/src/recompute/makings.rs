//! What every schedule needs before an operator runs: the tensors that it uses were made one after
//! another, and while the last of them was made, the others were there; and so on, backwards
//! (docs/explanation/theory.md).

use super::repeats::Repeats;
use crate::control::{Stop, Watch};
use crate::liveness::largest_matching;
use crate::problem::{Index, NONE, Op, Ten};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// How many tensors of a moment are remembered, the largest ones.
const MOST_HELD: usize = 8;
/// Tensors smaller than 1 / `SMALL` of what is proved already are forgotten.
const SMALL: u64 = 2000;
/// Moments looked at between two looks at the watch.
const MOST_UNWATCHED: usize = 64;

/// A tensor at a version.
type Item = (Ten, u32);

/// What is live at the moment at which an operator runs for the first time.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) op: Op,
    /// Live there, persistent tensors left out.
    pub(super) bytes: u64,
    items: Vec<Item>,
}

impl Held {
    /// What the operator uses, and `kept` besides.
    pub(super) fn new(repeats: &Repeats, op: Op, bytes: u64, kept: &[(Ten, usize)]) -> Self {
        let mut items: Vec<Item> = kept.iter().map(|&(tensor, version)| (tensor, version as u32)).collect();
        items.extend(needs(repeats, op));
        Held { op, bytes, items }
    }

    /// Bytes that every schedule has live at once at this moment or before it, beyond what is
    /// proved already: no more than `proved` if that is all. At most `most` moments are looked at.
    pub(super) fn before(
        &self,
        repeats: &Repeats,
        proved: u64,
        most: usize,
        work: &mut u64,
        watch: &Watch,
    ) -> Result<u64, Stop> {
        let largest = |mut items: Vec<Item>| -> Vec<Item> {
            let size = |item: &Item| repeats.problem.size(item.0);
            items.retain(|item| size(item) > proved / SMALL);
            items.sort_unstable_by_key(|item| (Reverse(size(item)), *item));
            items.dedup();
            items.truncate(MOST_HELD);
            items.sort_unstable();
            items
        };
        let start = largest(self.items.clone());
        let mut seen = BTreeSet::new();
        // Moments to look before, by the most bytes from then on: those with the fewest come first,
        // and among these those that hold the least.
        let mut open = BinaryHeap::from([Reverse((self.bytes, 0, start))]);
        let mut looked_at = 0;
        while let Some(Reverse((bytes, _, items))) = open.pop() {
            let makers: BTreeSet<Op> = items.iter().filter_map(|&item| maker(repeats, item)).collect();
            // Nothing that is held was made in the step, or the work is used up.
            if makers.is_empty() || looked_at == most || *work == 0 {
                return Ok(bytes);
            }
            if !seen.insert(items.clone()) {
                continue;
            }
            if looked_at % MOST_UNWATCHED == 0 {
                watch.check()?;
            }
            looked_at += 1;
            for op in makers {
                let others: Vec<Item> =
                    items.iter().copied().filter(|&item| maker(repeats, item) != Some(op)).collect();
                let live = bytes.max(live_while_made(repeats, op, &others));
                let used = needs(repeats, op);
                *work = work.saturating_sub((items.len() + repeats.needs.row(op).len() + 8) as u64);
                let before = largest(others.into_iter().chain(used).collect());
                let held: u64 = before.iter().map(|item| repeats.problem.size(item.0)).sum();
                if !seen.contains(&before) {
                    open.push(Reverse((live, held, before)));
                }
            }
        }
        Ok(proved)
    }
}

/// What every run of an operator uses.
fn needs(repeats: &Repeats, op: Op) -> impl Iterator<Item = Item> {
    repeats.needs.row(op).iter().map(move |&tensor| (tensor, repeats.version(tensor, op) as u32))
}

/// Who makes a version of a tensor; `None` where it enters.
fn maker(repeats: &Repeats, (tensor, version): Item) -> Option<Op> {
    match version.checked_sub(1) {
        None => Some(repeats.problem.tensors[tensor.index()].creator).filter(|&creator| creator != NONE),
        Some(change) => Some(repeats.mutators.row(tensor)[change as usize]),
    }
}

/// The fewest bytes that are live during a run of an operator that `others` outlast, none of which
/// it makes.
fn live_while_made(repeats: &Repeats, op: Op, others: &[Item]) -> u64 {
    let problem = &repeats.problem;
    let outlasts = |item: &Item| others.contains(item);
    let size = |tensor: Ten| problem.size(tensor);
    // An instance that the operator changes is none of the others.
    let changes = |tensor: Ten| repeats.mutators.row(tensor).binary_search(&op).is_ok();
    let is_own = |item: &Item| changes(item.0) || !outlasts(item);
    let own: u64 = needs(repeats, op).filter(is_own).map(|item| size(item.0)).sum();
    let pairs: Vec<(Ten, Ten)> = problem
        .permissions(op)
        .iter()
        .map(|&(_, input, output)| (input, output))
        .filter(|&(input, _)| needs(repeats, op).any(|item| item.0 == input && is_own(&item)))
        .collect();
    let saved: u64 = largest_matching(&pairs).iter().map(|&(input, _)| size(input)).sum();
    others.iter().map(|item| size(item.0)).sum::<u64>() + own + problem.transient(op) - saved
}
