//! Segment trees: a binary tree over a row of places, kept in a plain list. Node 1 is the root,
//! nodes `2n` and `2n + 1` are the children of node `n`, and the leaves, one per place, come last.

use std::iter;
use std::ops::Range;

/// Which nodes there are; what is kept per node is up to the user.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentTree {
    /// Leaves begin here.
    width: usize,
}

impl SegmentTree {
    pub(crate) fn new(places: usize) -> Self {
        SegmentTree { width: places.max(1).next_power_of_two() }
    }

    /// A number that no node reaches.
    pub(crate) fn node_count(self) -> usize {
        2 * self.width
    }

    pub(crate) fn leaf(self, place: usize) -> usize {
        self.width + place
    }

    /// The fewest nodes that make up a range of places: none of them overlap.
    pub(crate) fn cover(self, places: Range<usize>) -> impl Iterator<Item = usize> {
        let (mut begin, mut end) = (self.leaf(places.start), self.leaf(places.end));
        iter::from_fn(move || {
            while begin < end {
                if begin % 2 == 1 {
                    begin += 1;
                    return Some(begin - 1);
                }
                if end % 2 == 1 {
                    end -= 1;
                    return Some(end);
                }
                begin /= 2;
                end /= 2;
            }
            None
        })
    }

    /// The leaves at the two ends of a range that is not empty and everything above them, from the
    /// bottom up. All of them touch the range, and everything above one of its nodes is among them.
    pub(crate) fn ends(self, places: Range<usize>) -> impl Iterator<Item = usize> {
        let leaves = (self.leaf(places.start), self.leaf(places.end - 1));
        let up = iter::successors(Some(leaves), |&(first, last)| (first > 1).then_some((first / 2, last / 2)));
        up.flat_map(|(first, last)| iter::once(first).chain((last != first).then_some(last)))
    }
}

/// A value per place, or none, and the least of any range of places.
#[derive(Clone, Debug)]
pub(crate) struct Tournament<T> {
    tree: SegmentTree,
    /// Per node the least value of its places; without one, `absent`, which is above all others.
    least: Vec<T>,
    absent: T,
}

impl<T: Copy + Ord> Tournament<T> {
    /// No place has a value yet; none ever has `absent`, or a larger one.
    pub(crate) fn new(places: usize, absent: T) -> Self {
        let tree = SegmentTree::new(places);
        Tournament { tree, least: vec![absent; tree.node_count()], absent }
    }

    pub(crate) fn has(&self, place: usize) -> bool {
        self.least[self.tree.leaf(place)] != self.absent
    }

    pub(crate) fn put(&mut self, place: usize, value: T) {
        let mut node = self.tree.leaf(place);
        self.least[node] = value;
        while node > 1 {
            node /= 2;
            let least = self.least[2 * node].min(self.least[2 * node + 1]);
            if self.least[node] == least {
                break;
            }
            self.least[node] = least;
        }
    }

    pub(crate) fn remove(&mut self, place: usize) {
        self.put(place, self.absent);
    }

    pub(crate) fn least_in(&self, places: Range<usize>) -> Option<T> {
        let least = self.tree.cover(places).map(|node| self.least[node]).min()?;
        (least != self.absent).then_some(least)
    }

    /// The first place that has a value.
    pub(crate) fn first(&self) -> Option<usize> {
        if self.least[1] == self.absent {
            return None;
        }
        let mut node = 1;
        while node < self.tree.leaf(0) {
            node *= 2;
            if self.least[node] == self.absent {
                node += 1;
            }
        }
        Some(node - self.tree.leaf(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Random;
    use std::collections::BTreeSet;

    /// The places below a node.
    fn places(tree: SegmentTree, node: usize) -> Vec<usize> {
        (0..tree.width)
            .filter(|&place| {
                iter::successors(Some(tree.leaf(place)), |at| Some(at / 2))
                    .take_while(|&at| at > 0)
                    .any(|at| at == node)
            })
            .collect()
    }

    fn ranges(most: usize) -> impl Iterator<Item = (SegmentTree, Range<usize>)> {
        (0..=most).flat_map(|count| {
            let tree = SegmentTree::new(count);
            (0..=count).flat_map(move |start| (start..=count).map(move |end| (tree, start..end)))
        })
    }

    #[test]
    fn nodes_make_up_the_range_and_none_can_be_saved() {
        for (tree, range) in ranges(17) {
            let nodes: BTreeSet<usize> = tree.cover(range.clone()).collect();
            let mut below: Vec<usize> = nodes.iter().flat_map(|&node| places(tree, node)).collect();
            below.sort_unstable();
            assert_eq!(below, range.clone().collect::<Vec<_>>());
            // Two siblings would be their parent.
            assert!(nodes.iter().all(|node| *node == 1 || !nodes.contains(&(node ^ 1))), "{range:?}: {nodes:?}");
        }
    }

    #[test]
    fn ends_touch_the_range_and_hold_all_above_its_nodes() {
        for (tree, range) in ranges(17).filter(|(_, range)| !range.is_empty()) {
            let listed: Vec<usize> = tree.ends(range.clone()).collect();
            let ends: BTreeSet<usize> = listed.iter().copied().collect();
            assert_eq!(listed.len(), ends.len(), "none is listed twice");
            assert!(ends.iter().all(|&node| places(tree, node).iter().any(|place| range.contains(place))));
            for node in tree.cover(range.clone()) {
                let mut above = iter::successors(Some(node / 2), |at| Some(at / 2)).take_while(|&at| at > 0);
                assert!(above.all(|node| ends.contains(&node)), "{range:?}: {node} in {ends:?}");
            }
        }
    }

    #[test]
    fn tournaments_are_as_plain_lists() {
        let mut random = Random::new(5);
        for count in 0..20 {
            let mut plain: Vec<Option<u64>> = vec![None; count];
            let mut tournament = Tournament::new(count, u64::MAX);
            for _ in 0..60 {
                assert_eq!(tournament.first(), plain.iter().position(Option::is_some));
                if count == 0 {
                    break;
                }
                let place = random.below(count as u64) as usize;
                plain[place] = (random.below(3) > 0).then(|| random.below(9));
                match plain[place] {
                    Some(value) => tournament.put(place, value),
                    None => tournament.remove(place),
                }
                assert_eq!(tournament.has(place), plain[place].is_some());
                let start = random.below(count as u64) as usize;
                let end = start + random.below((count - start) as u64 + 1) as usize;
                assert_eq!(tournament.least_in(start..end), plain[start..end].iter().flatten().min().copied());
            }
        }
    }
}
