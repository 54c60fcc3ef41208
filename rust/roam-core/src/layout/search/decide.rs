//! Decides by complete search whether a small number of tensors has a layout below a given size.
//! Orders whose blocks are alike share the answer.

use crate::control::{Stop, Watch};
use crate::layout::blocks::{Block, Blocks, Layout};
use crate::layout::packers::greedy::Sequence;
use crate::layout::search::canonical::{Canonical, Outcome};
use crate::layout::search::normal;
use crate::liveness::Profile;
use crate::problem::Problem;
use std::collections::HashMap;

/// An answer.
pub(crate) enum Decision {
    /// One that is smaller.
    Layout(Layout),
    /// There is none.
    Refuted,
    /// The work was used up.
    Unknown,
}

/// What is known of blocks seen before.
#[derive(Default)]
pub(crate) struct Decider {
    /// Sorted blocks, with the largest capacity that is too small for them.
    refuted: HashMap<Vec<Block>, u64>,
}

impl Decider {
    /// Looks for a layout that takes less than `limit`, within `work` comparisons.
    pub(crate) fn below(
        &mut self,
        problem: &Problem,
        profile: &Profile,
        limit: u64,
        work: &mut u64,
        watch: &Watch,
    ) -> Result<Decision, Stop> {
        let blocks = Blocks::new(problem, profile);
        let Some(capacity) = limit.checked_sub(1).filter(|&capacity| blocks.floor() <= capacity) else {
            return Ok(Decision::Refuted);
        };
        let mut key = blocks.all.clone();
        key.sort_unstable();
        if self.refuted.get(&key).is_some_and(|&refuted| capacity <= refuted) {
            return Ok(Decision::Refuted);
        }
        let outcome = match blocks.unit() {
            Some(_) => {
                let mut rank = vec![0; blocks.all.len()];
                for (place, &at) in Sequence::Area.sorted(&blocks).iter().enumerate() {
                    rank[at as usize] = place as u32;
                }
                let mut blame = vec![1; blocks.times as usize];
                Canonical::new(&blocks).search(&rank, capacity, &mut blame, work, watch)?
            }
            None => normal::search(&blocks, capacity, work, watch)?,
        };
        Ok(match outcome {
            Outcome::Found(offsets) => Decision::Layout(blocks.layout("enumerated", &offsets)),
            Outcome::Refuted => {
                self.refuted.insert(key, capacity);
                Decision::Refuted
            }
            Outcome::Exhausted => Decision::Unknown,
        })
    }
}
