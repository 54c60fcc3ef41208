//! Search for a better layout: the block that does not fit goes earlier.
//!
//! Greedy placement in a given sequence either stays below the limit, which is an improvement, or
//! meets a block that does not fit below it. That block is moved to a random earlier place in the
//! sequence, and the placement begins anew (squeaky wheel optimization; Joslin and Clements, 1999).
//! The random numbers are the same in every run.

use super::blocks::Blocks;
use super::greedy::place_in;
use crate::control::{Stop, Watch};
use crate::synthetic::Random;

/// Placements from the start that one search may make.
const MOST_ROUNDS: usize = 1000;

/// Offsets below `limit`, as far below as the search gets before `work` placements of a block are
/// used up or the floor is met. `sequence` is where to start from.
pub(super) fn improve(
    blocks: &Blocks,
    mut sequence: Vec<u32>,
    floor: u64,
    mut limit: u64,
    work: &mut u64,
    watch: &Watch,
) -> Result<Option<Vec<u64>>, Stop> {
    let mut random = Random::new(0);
    let mut best = None;
    for _ in 0..MOST_ROUNDS {
        if limit <= floor || *work == 0 {
            break;
        }
        watch.check()?;
        let (placed, count) = place_in(blocks, &sequence, limit, watch)?;
        *work = work.saturating_sub(count as u64);
        match placed {
            Ok(offsets) => {
                limit = blocks.pool_bytes(&offsets);
                best = Some(offsets);
            }
            // The first block of all does not fit: the limit is below its size.
            Err(0) => break,
            Err(at) => {
                let earlier = random.below(at as u64) as usize;
                sequence[earlier..=at].rotate_right(1);
            }
        }
    }
    Ok(best)
}
