//! Random numbers that are the same on every machine and in every version.

/// A small random-number generator (SplitMix64; Steele, Lea and Flood, 2014), so that what is made
/// up never changes with a library.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// A number in [0, limit), or 0 where the limit is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(z ^ (z >> 31)) * u128::from(limit)) >> 64) as u64
    }

    /// True once in `times` on average.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}
