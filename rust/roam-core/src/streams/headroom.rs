//! Live bytes over the steps of an order: adds to a range of steps, asks for the most in one, in
//! logarithmic time (a segment tree whose sums wait at the nodes).

/// See the module's documentation.
pub(super) struct Headroom {
    /// Per node the most bytes over its steps, without what is added at the nodes above.
    most: Vec<i64>,
    /// Per node what is added to all its steps.
    added: Vec<i64>,
    width: usize,
}

impl Headroom {
    pub(super) fn new(live: &[u64]) -> Self {
        let width = live.len().max(1).next_power_of_two();
        let mut most = vec![0; 2 * width];
        for (at, &bytes) in live.iter().enumerate() {
            most[width + at] = bytes as i64;
        }
        for node in (1..width).rev() {
            most[node] = most[2 * node].max(most[2 * node + 1]);
        }
        Headroom { most, added: vec![0; 2 * width], width }
    }

    /// Adds `bytes` at the steps [from, to).
    pub(super) fn add(&mut self, from: usize, to: usize, bytes: i64) {
        if from >= to || bytes == 0 {
            return;
        }
        let (mut begin, mut end) = (from + self.width, to + self.width);
        while begin < end {
            if begin % 2 == 1 {
                self.most[begin] += bytes;
                self.added[begin] += bytes;
                begin += 1;
            }
            if end % 2 == 1 {
                end -= 1;
                self.most[end] += bytes;
                self.added[end] += bytes;
            }
            begin /= 2;
            end /= 2;
        }
        for mut node in [from + self.width, to - 1 + self.width] {
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
        // What is found so far on the left and on the right, without what waits above the two edges.
        let (mut begin, mut end) = (from + self.width, to + self.width);
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
    use crate::synthetic::Random;

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
