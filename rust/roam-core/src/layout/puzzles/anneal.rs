//! Local search on the sequence in which blocks are placed, for layouts of few blocks and few
//! offsets that all else leaves with a gap.
//!
//! Each block in turn goes to the lowest offset that is free all its life. What ends above the
//! capacity wanted, counted once for each of its bytes, is what a sequence costs. A change that
//! costs more is taken now and then, the less often the more it costs (simulated annealing;
//! Kirkpatrick, Gelatt and Vecchi, Science 220, 1983): at a low temperature throughout, since it
//! begins at a good layout.

use crate::control::{Stop, Watch};
use crate::layout::incumbent::Incumbent;
use crate::rng::Random;

/// Most words of one bit per unit, and most pairs of blocks that meet.
const MOST_WORDS: u64 = 64;
const MOST_PAIRS: u64 = 1 << 20;
/// At the highest temperature, a change that costs 1 / `HEAT` of the capacity more is taken with
/// probability 1/2.
const HEAT: u64 = 1024;
/// After `CHANGES` changes the temperature has fallen to 1 / `COLDEST` of the highest; then it is
/// the highest again.
const COLDEST: u64 = 8;
const CHANGES: u64 = 1 << 17;
/// How many steps down from a block that ends too high the moved block may lie.
const DEEPEST: u64 = 12;
/// How far forward most blocks are moved.
const NEAR: u64 = 20;
const SEED: u64 = 1;

/// A sequence and what it comes to, in units.
#[derive(Clone)]
struct Sequence {
    blocks: Vec<u32>,
    /// Per block its place in the sequence.
    place: Vec<u32>,
    offsets: Vec<u64>,
}

struct Anneal {
    sizes: Vec<u64>,
    /// Per block those that it meets.
    meets: Vec<Vec<u32>>,
    words: usize,
}

/// Lowers the incumbent, where there is one, until its floor is met or `work`, in comparisons, is
/// used up.
pub(crate) fn improve(incumbent: &mut Incumbent<'_>, work: &mut u64, watch: &Watch) -> Result<(), Stop> {
    let blocks = incumbent.blocks;
    let (Some(unit), Some((_, offsets))) = (blocks.unit(), incumbent.found.clone()) else { return Ok(()) };
    let words = incumbent.limit.div_ceil(unit) / 64 + 1;
    let pairs = blocks.pairs();
    if incumbent.is_done() || words > MOST_WORDS || pairs > MOST_PAIRS.min(*work) {
        return Ok(());
    }
    *work -= pairs;
    let all = &blocks.all;
    let meets = |at: usize| (0..all.len()).filter(move |&other| other != at && all[at].meets(&all[other]));
    let anneal = Anneal {
        sizes: all.iter().map(|block| block.size / unit).collect(),
        meets: (0..all.len()).map(|at| meets(at).map(|other| other as u32).collect()).collect(),
        words: words as usize,
    };
    let mut sequence: Vec<u32> = (0..all.len() as u32).collect();
    sequence.sort_by_key(|&at| (offsets[at as usize], at));
    let place = vec![0; all.len()];
    let mut now = Sequence { blocks: sequence, place, offsets: vec![0; all.len()] };
    *work = work.saturating_sub(anneal.place(&mut now, 0));
    let mut random = Random::new(SEED);
    let mut capacity = 0;
    let mut cost = 0;
    for change in 0u64.. {
        watch.check()?;
        while cost == 0 {
            let pool = (0..all.len()).map(|at| now.offsets[at] + anneal.sizes[at]).max().unwrap_or(0);
            incumbent.offer("annealed", now.offsets.iter().map(|offset| offset * unit).collect());
            capacity = pool.min(incumbent.limit.div_ceil(unit)) - 1;
            cost = anneal.cost(&now, capacity);
            if incumbent.is_done() {
                return Ok(());
            }
        }
        if *work == 0 {
            return Ok(());
        }
        let mut next = now.clone();
        let from = anneal.change(&mut next, capacity, &mut random);
        *work = work.saturating_sub(all.len() as u64 + anneal.place(&mut next, from));
        let next_cost = anneal.cost(&next, capacity);
        let cold = 1 + (COLDEST - 1) * (change % CHANGES) / CHANGES;
        let more = next_cost.saturating_sub(cost) * cold * HEAT / capacity.max(1);
        if more < 40 && random.below(1 << more) == 0 {
            (now, cost) = (next, next_cost);
        }
    }
    Ok(())
}

impl Anneal {
    /// Units above the capacity.
    fn cost(&self, sequence: &Sequence, capacity: u64) -> u64 {
        let above = |(offset, size): (&u64, &u64)| (offset + size).saturating_sub(capacity).min(*size);
        sequence.offsets.iter().zip(&self.sizes).map(above).sum()
    }

    /// Moves one block, or exchanges two; says from where on the sequence is another.
    fn change(&self, sequence: &mut Sequence, capacity: u64, random: &mut Random) -> usize {
        let Sequence { blocks, place, offsets } = sequence;
        let mut pick = |list: &[u32]| list[random.below(list.len() as u64) as usize];
        let end = |at: u32| offsets[at as usize] + self.sizes[at as usize];
        let too_high: Vec<u32> = (0..blocks.len() as u32).filter(|&at| end(at) > capacity).collect();
        let mut moved = pick(&too_high);
        if random.once_in(4) {
            moved = random.below(blocks.len() as u64) as u32;
        } else {
            for _ in 0..random.below(DEEPEST) {
                let rests_on = |&other: &u32| end(other) == offsets[moved as usize];
                let below: Vec<u32> = self.meets[moved as usize].iter().copied().filter(rests_on).collect();
                if below.is_empty() {
                    break;
                }
                moved = below[random.below(below.len() as u64) as usize];
            }
        }
        let at = place[moved as usize] as usize;
        let others = &self.meets[moved as usize];
        if random.once_in(3) && !others.is_empty() {
            let other = place[others[random.below(others.len() as u64) as usize] as usize] as usize;
            blocks.swap(at, other);
            return at.min(other);
        }
        let to = if random.once_in(2) {
            at.saturating_sub(1 + random.below(NEAR) as usize)
        } else if random.once_in(8) {
            random.below(blocks.len() as u64) as usize
        } else {
            random.below(at as u64 + 1) as usize
        };
        blocks.remove(at);
        blocks.insert(to, moved);
        at.min(to)
    }

    /// Places the blocks from one on, each at the lowest free offset; says how much work that was.
    fn place(&self, sequence: &mut Sequence, from: usize) -> u64 {
        let Sequence { blocks, place, offsets } = sequence;
        for (at, &block) in blocks.iter().enumerate().skip(from) {
            place[block as usize] = at as u32;
        }
        let mut taken = vec![0u64; self.words];
        let mut work = 0;
        for (at, &block) in blocks.iter().enumerate().skip(from) {
            taken.fill(0);
            let meets = &self.meets[block as usize];
            for &other in meets.iter().filter(|&&other| (place[other as usize] as usize) < at) {
                let begin = offsets[other as usize];
                mark(&mut taken, begin, begin + self.sizes[other as usize]);
            }
            offsets[block as usize] = lowest(&taken, self.sizes[block as usize]);
            work += (meets.len() + self.words) as u64;
        }
        work
    }
}

/// Sets the bits of a range, as far as there are words.
fn mark(taken: &mut [u64], begin: u64, end: u64) {
    let last = (end - 1) / 64;
    for word in begin / 64..=last {
        let Some(bits) = taken.get_mut(word as usize) else { return };
        let low = if word == begin / 64 { u64::MAX << (begin % 64) } else { u64::MAX };
        let high = if word == last { u64::MAX >> (63 - (end - 1) % 64) } else { u64::MAX };
        *bits |= low & high;
    }
}

/// The first place at which `size` bits in a row are not set; after the last word none is set.
fn lowest(taken: &[u64], size: u64) -> u64 {
    let mut at = 0;
    loop {
        at = first(taken, at, 0);
        let end = first(taken, at, u64::MAX);
        if end - at >= size || end >= 64 * taken.len() as u64 {
            return at;
        }
        at = end;
    }
}

/// The first bit from one on that is not set, or, where all are flipped, that is; the end of all
/// words where there is none.
fn first(taken: &[u64], from: u64, flip: u64) -> u64 {
    let mut mask = u64::MAX << (from % 64);
    for word in from / 64..taken.len() as u64 {
        let bits = !(taken[word as usize] ^ flip) & mask;
        if bits != 0 {
            return 64 * word + u64::from(bits.trailing_zeros());
        }
        mask = u64::MAX;
    }
    64 * taken.len() as u64
}
