//! Beam search over layouts that are filled from below.
//!
//! The height of the floor is divided into stages. From each layout that has been filled up to a
//! stage several are filled on to the next, by different rules; those of the lowest potential
//! survive. So what a choice costs shows soon, and a lucky stage is kept while the next is tried
//! again.

use crate::control::{Stop, Watch};
use crate::layout::packers::weighted::{Filling, Lines, Rule};
use crate::rng::Random;
use rayon::prelude::*;

/// Blocks per stage, and most stages. With 16 blocks, three of 27 plans and packings are larger, by
/// at most 3.0 % (`benches/constants.py`).
const BLOCKS_PER_STAGE: usize = 64;
const MOST_STAGES: u64 = 300;

/// How wide to search, and what to look for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beam {
    /// Layouts that survive a stage.
    pub(crate) width: usize,
    /// How much heavier a time is that is one floor higher, as a logarithm.
    pub(crate) steepness: f64,
    /// What chance begins with.
    pub(crate) seed: u64,
}

impl Beam {
    /// The best layout that takes less than `limit`, if one is found; and how many comparisons that
    /// took. From each layout one goes on by each rule.
    pub(crate) fn search(
        self,
        lines: &Lines<'_>,
        rules: &[Rule],
        limit: u64,
        watch: &Watch,
    ) -> Result<(Option<Vec<u64>>, u64), Stop> {
        let stages = (lines.blocks.all.len() / BLOCKS_PER_STAGE).clamp(1, MOST_STAGES as usize) as u64;
        let copying = (lines.blocks.all.len() as u64 + u64::from(lines.blocks.times)) / 8;
        let mut beam = vec![lines.filling(self.steepness)];
        // Their memory is used again.
        let mut dropped: Vec<Filling> = Vec::new();
        let mut steps = 0;
        for stage in 1..=stages {
            let height = if stage < stages { lines.floor / stages * stage } else { u64::MAX };
            let going_on = beam.iter().flat_map(|from| rules.iter().map(move |rule| (from, *rule)));
            let going_on: Vec<_> = going_on.map(|(from, rule)| (from, rule, dropped.pop())).enumerate().collect();
            let filled = going_on.into_par_iter().map(|(at, (from, rule, dropped))| {
                let mut filling = from.copy_into(dropped);
                filling.steps = copying;
                let mut random = Random::new(self.seed << 32 | stage << 16 | at as u64);
                lines.fill(&mut filling, rule, height, &mut random, watch)?;
                Ok((filling.potential(), filling))
            });
            let mut filled = filled.collect::<Result<Vec<(f64, Filling)>, Stop>>()?;
            steps += filled.iter().map(|(_, filling)| filling.steps).sum::<u64>();
            filled.sort_by(|a, b| a.0.total_cmp(&b.0));
            let filled = filled.into_iter().map(|(_, filling)| filling);
            let (kept, hopeless) = filled.partition(|filling| !filling.exceeds(lines.floor, limit));
            dropped.append(&mut beam);
            dropped.extend::<Vec<Filling>>(hopeless);
            beam = kept;
            if stage < stages {
                dropped.extend(beam.drain(self.width.min(beam.len())..));
            }
        }
        let offsets = beam.into_iter().map(|filling| filling.offsets);
        Ok((offsets.min_by_key(|offsets| lines.blocks.pool_bytes(offsets)), steps))
    }
}
