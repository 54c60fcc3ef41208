//! Finds, in a sequence of blocks from which some have been taken, the next ones with a small
//! enough key.

/// Children per node: few levels, and a node's keys are compared at once.
const FAN: usize = 16;

/// The sequence, which never changes.
pub(crate) struct Sequence {
    pub(crate) blocks: Vec<u32>,
    /// Per block its place.
    pub(crate) place: Vec<u32>,
    /// Per time the first place at which to look for what fits there.
    pub(crate) first: Vec<u32>,
}

impl Sequence {
    /// `before` says whether a block lies before all that fit at a time.
    pub(crate) fn new(blocks: Vec<u32>, times: u32, before: impl Fn(u32, u32) -> bool) -> Self {
        let mut place = vec![0; blocks.len()];
        for (at, &block) in blocks.iter().enumerate() {
            place[block as usize] = at as u32;
        }
        let first = (0..=times).map(|time| blocks.partition_point(|&block| before(block, time)) as u32).collect();
        Sequence { blocks, place, first }
    }
}

/// The least key of each range of places, in a tree; a block that is taken has the largest.
pub(crate) struct Shelf {
    /// Keys first, then the least of each node of the level before; each padded to full nodes, the
    /// last a single one.
    levels: Vec<Vec<u32>>,
}

impl Clone for Shelf {
    fn clone(&self) -> Self {
        Shelf { levels: self.levels.clone() }
    }

    fn clone_from(&mut self, source: &Self) {
        self.levels.clone_from(&source.levels);
    }
}

impl Shelf {
    /// Keys by place, all below the largest number.
    pub(crate) fn new(mut keys: Vec<u32>) -> Self {
        let mut levels = Vec::new();
        loop {
            keys.resize(keys.len().max(1).next_multiple_of(FAN), u32::MAX);
            let above: Vec<u32> = keys.chunks(FAN).map(least).collect();
            levels.push(keys);
            if above.len() == 1 {
                return Shelf { levels };
            }
            keys = above;
        }
    }

    /// Calls `found` with up to `count` places with a key of at most `most`, from this one on.
    pub(crate) fn nearest(&self, place: usize, most: u32, count: usize, mut found: impl FnMut(usize)) {
        let (mut node, mut fitting) = (place / FAN, self.fitting(0, place / FAN, most) & (!0 << (place % FAN)));
        for _ in 0..count {
            while fitting == 0 {
                let Some(next) = self.next(1, node + 1, most) else { return };
                (node, fitting) = (next, self.fitting(0, next, most));
            }
            found(node * FAN + fitting.trailing_zeros() as usize);
            fitting &= fitting - 1;
        }
    }

    /// The first entry of a level from this one on with a key of at most `most`.
    fn next(&self, level: usize, from: usize, most: u32) -> Option<usize> {
        if level >= self.levels.len() {
            return None;
        }
        let mut node = from / FAN;
        let mut fitting = self.fitting(level, node, most) & (!0 << (from % FAN));
        if fitting == 0 {
            node = self.next(level + 1, node + 1, most)?;
            fitting = self.fitting(level, node, most);
        }
        Some(node * FAN + fitting.trailing_zeros() as usize)
    }

    /// Which of a node's keys are at most `most`, as bits; none past the end.
    fn fitting(&self, level: usize, node: usize, most: u32) -> u32 {
        let keys = self.levels[level].get(node * FAN..(node + 1) * FAN).unwrap_or_default();
        keys.iter().enumerate().fold(0, |bits, (at, &key)| bits | u32::from(key <= most) << at)
    }

    pub(crate) fn take(&mut self, place: usize) {
        self.levels[0][place] = u32::MAX;
        let mut node = place / FAN;
        for level in 1..self.levels.len() {
            self.levels[level][node] = least(&self.levels[level - 1][node * FAN..(node + 1) * FAN]);
            node /= FAN;
        }
    }
}

fn least(keys: &[u32]) -> u32 {
    keys.iter().copied().min().unwrap_or(u32::MAX)
}
