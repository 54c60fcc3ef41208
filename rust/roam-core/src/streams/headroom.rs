//! Live bytes over the steps of an order, in a segment tree with lazy sums: adding bytes to a range
//! of steps, and asking for the most bytes in a range, take logarithmic time.

use crate::segment_tree::SegmentTree;

/// See the module's documentation.
pub(super) struct Headroom {
    /// Per node the most bytes over its steps, without what is added at the nodes above.
    most: Vec<i64>,
    /// Per node what is added to all its steps.
    added: Vec<i64>,
    tree: SegmentTree,
}

impl Headroom {
    pub(super) fn new(live: &[u64]) -> Self {
        let tree = SegmentTree::new(live.len());
        let mut most = vec![0; tree.node_count()];
        for (at, &bytes) in live.iter().enumerate() {
            most[tree.leaf(at)] = bytes as i64;
        }
        for node in (1..tree.leaf(0)).rev() {
            most[node] = most[2 * node].max(most[2 * node + 1]);
        }
        Headroom { added: vec![0; most.len()], most, tree }
    }

    /// Adds `bytes` at the steps [from, to).
    pub(super) fn add(&mut self, from: usize, to: usize, bytes: i64) {
        if from >= to || bytes == 0 {
            return;
        }
        for node in self.tree.cover(from..to) {
            self.most[node] += bytes;
            self.added[node] += bytes;
        }
        for mut node in [from, to - 1].map(|step| self.tree.leaf(step)) {
            while node > 1 {
                node /= 2;
                self.most[node] = self.most[2 * node].max(self.most[2 * node + 1]) + self.added[node];
            }
        }
    }

    /// The most bytes at the steps [from, to), 0 where there are none.
    pub(super) fn most(&self, from: usize, to: usize) -> i64 {
        if from >= to {
            return 0;
        }
        // The most bytes found so far on the left and on the right, without what is added at nodes
        // above the two edges.
        let (mut begin, mut end) = (self.tree.leaf(from), self.tree.leaf(to));
        let (mut left, mut right) = (None::<i64>, None::<i64>);
        let (mut above_left, mut above_right) = (begin, end - 1);
        while begin < end {
            if begin % 2 == 1 {
                left = left.max(Some(self.most[begin]));
                begin += 1;
            }
            if end % 2 == 1 {
                end -= 1;
                right = right.max(Some(self.most[end]));
            }
            begin /= 2;
            end /= 2;
            above_left /= 2;
            above_right /= 2;
            left = left.map(|bytes| bytes + self.added[above_left]);
            right = right.map(|bytes| bytes + self.added[above_right]);
        }
        while above_left > 1 {
            above_left /= 2;
            above_right /= 2;
            left = left.map(|bytes| bytes + self.added[above_left]);
            right = right.map(|bytes| bytes + self.added[above_right]);
        }
        left.max(right).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Random;

    #[test]
    fn ranges_are_as_in_a_plain_list() {
        let mut random = Random::new(11);
        for _ in 0..500 {
            let mut plain: Vec<i64> = (0..1 + random.below(20)).map(|_| random.below(50) as i64).collect();
            let mut headroom = Headroom::new(&plain.iter().map(|&bytes| bytes as u64).collect::<Vec<_>>());
            for _ in 0..40 {
                let from = random.below(plain.len() as u64) as usize;
                let to = from + random.below((plain.len() - from) as u64 + 1) as usize;
                let expected = plain[from..to].iter().copied().max().unwrap_or(0);
                assert_eq!(headroom.most(from, to), expected, "{plain:?} {from}..{to}");
                let bytes = random.below(21) as i64 - 10;
                headroom.add(from, to, bytes);
                plain[from..to].iter_mut().for_each(|live| *live += bytes);
            }
        }
    }
}
