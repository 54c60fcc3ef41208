//! What cannot keep to the memory limit, whatever else is chosen.

use super::presolve::{Demand, NEVER, Presolve};
use crate::control::{Stop, Watch};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

/// The least values of ranges, by tables of ranges whose lengths are powers of two.
struct Least {
    levels: Vec<Vec<i64>>,
}

impl Least {
    fn new(values: Vec<i64>) -> Self {
        let mut levels = vec![values];
        let mut length = 1;
        while let Some(last) = levels.last().filter(|last| last.len() > length) {
            let next = (0..last.len() - length).map(|at| last[at].min(last[at + length])).collect();
            levels.push(next);
            length *= 2;
        }
        Least { levels }
    }

    fn of(&self, range: &Range<usize>) -> i64 {
        let level = range.len().ilog2() as usize;
        let values = &self.levels[level];
        values[range.start].min(values[range.end - (1 << level)])
    }
}

/// The same demands, taken apart so that no two of them are at the same time.
fn apart(demands: &[Demand]) -> Vec<Demand> {
    let ends: BTreeSet<usize> =
        demands.iter().flat_map(|demand| [demand.lifetime.start, demand.lifetime.end]).collect();
    let ends: Vec<usize> = ends.into_iter().collect();
    let mut sorted: Vec<&Demand> = demands.iter().collect();
    sorted.sort_by_key(|demand| demand.lifetime.start);
    let mut apart: Vec<Demand> = Vec::new();
    let mut live: Vec<&Demand> = Vec::new();
    let mut next = 0;
    for pair in ends.windows(2) {
        live.retain(|demand| demand.lifetime.end > pair[0]);
        while sorted.get(next).is_some_and(|demand| demand.lifetime.start <= pair[0]) {
            live.push(sorted[next]);
            next += 1;
        }
        let Some((first, others)) = live.split_first() else { continue };
        let mut bytes = first.bytes.clone();
        for demand in others {
            bytes.iter_mut().zip(&demand.bytes).for_each(|(sum, more)| *sum += more);
        }
        match apart.last_mut() {
            Some(last) if last.lifetime.end == pair[0] && last.bytes == bytes => last.lifetime.end = pair[1],
            _ => apart.push(Demand { lifetime: pair[0]..pair[1], bytes }),
        }
    }
    apart
}

impl Presolve {
    /// Takes off the room what every strategy of a node takes. Leaves out times at which no choice
    /// takes more than the room that is left, or at which no choice is worse than at the time
    /// before or after. `None` where the room at some time would be negative.
    pub(super) fn narrow(&mut self) -> Option<()> {
        let times = self.room.len();
        let (mut least, mut most) = (vec![0i64; times + 1], vec![0i64; times + 1]);
        let (mut is_birth, mut is_death) = (vec![false; times + 1], vec![false; times + 1]);
        for node in &mut self.nodes {
            if node.demands.len() > 1 {
                node.demands = apart(&node.demands);
            }
            for Demand { lifetime, bytes } in &mut node.demands {
                let low = bytes.iter().copied().min().unwrap_or(0);
                bytes.iter_mut().for_each(|bytes| *bytes -= low);
                let high = bytes.iter().copied().max().unwrap_or(0);
                for (sum, bytes) in [(&mut least, low), (&mut most, high)] {
                    sum[lifetime.start] += bytes;
                    sum[lifetime.end] -= bytes;
                }
                is_birth[lifetime.start] |= high > 0;
                is_death[lifetime.end] |= high > 0;
            }
            node.demands.retain(|demand| demand.bytes.iter().any(|&bytes| bytes > 0));
        }
        let mut kept: Vec<usize> = Vec::new();
        let (mut taken, mut live) = (0, 0);
        let (mut is_fuller, mut is_emptier) = (false, false);
        for time in 0..times {
            taken += least[time];
            live += most[time];
            is_fuller |= is_birth[time];
            is_emptier |= is_death[time];
            self.room[time] -= taken;
            if self.room[time] < 0 {
                return None;
            }
            if live <= self.room[time] {
                continue;
            }
            if let Some(&before) = kept.last() {
                if !is_fuller && self.room[time] >= self.room[before] {
                    continue;
                }
                if !is_emptier && self.room[time] <= self.room[before] {
                    kept.pop();
                }
            }
            kept.push(time);
            (is_fuller, is_emptier) = (false, false);
        }
        let among = |time: usize| kept.partition_point(|&kept| kept < time);
        for node in 0..self.nodes.len() {
            let demands = &mut self.nodes[node].demands;
            let before = demands.len();
            demands
                .iter_mut()
                .for_each(|demand| demand.lifetime = among(demand.lifetime.start)..among(demand.lifetime.end));
            demands.retain(|demand| !demand.lifetime.is_empty());
            if demands.len() < before {
                self.look_at(node);
            }
        }
        self.room = kept.iter().map(|&time| self.room[time]).collect();
        self.times = kept.iter().map(|&time| self.times[time]).collect();
        Some(())
    }

    /// Leaves out strategies that take more than what is left beside the least that all other nodes
    /// take, and forbids pairs of strategies that do so together. `None` where no choice keeps to
    /// the limit.
    pub(super) fn leave_out_large(&mut self, watch: &Watch) -> Result<Option<()>, Stop> {
        if self.narrow().is_none() {
            return Ok(None);
        }
        if self.room.is_empty() {
            return Ok(Some(()));
        }
        let room = Least::new(self.room.clone());
        for node in 0..self.nodes.len() {
            let demands = &self.nodes[node].demands;
            let fits =
                |&strategy: &usize| demands.iter().all(|demand| demand.bytes[strategy] <= room.of(&demand.lifetime));
            let kept: Vec<usize> = (0..self.nodes[node].costs.len()).filter(fits).collect();
            self.keep(node, &kept);
        }
        for [node, other] in self.rivals() {
            if !self.links[node].contains_key(&other) {
                let [rows, columns] = [node, other].map(|node| self.nodes[node].costs.len());
                self.link(node, other, vec![0; rows * columns]);
            }
        }
        for node in 0..self.nodes.len() {
            watch.check()?;
            for other in self.neighbours(node).into_iter().filter(|&other| other > node) {
                let columns = self.nodes[other].costs.len();
                let mut large = BTreeSet::new();
                let mut later = 0;
                let others = &self.nodes[other].demands;
                for Demand { lifetime, bytes } in &self.nodes[node].demands {
                    while others.get(later).is_some_and(|other| other.lifetime.end <= lifetime.start) {
                        later += 1;
                    }
                    for more in others[later..].iter().take_while(|other| other.lifetime.start < lifetime.end) {
                        let both = lifetime.start.max(more.lifetime.start)..lifetime.end.min(more.lifetime.end);
                        let left = room.of(&both);
                        let most = [bytes, &more.bytes].map(|bytes| bytes.iter().copied().max().unwrap_or(0));
                        if most[0] + most[1] <= left {
                            continue;
                        }
                        for (row, mine) in bytes.iter().enumerate() {
                            for (column, more) in more.bytes.iter().enumerate() {
                                if mine + more > left {
                                    large.insert(row * columns + column);
                                }
                            }
                        }
                    }
                }
                self.forbid(node, other, &large);
            }
        }
        Ok(Some(()))
    }

    /// Pairs of nodes that together may take more than the room; none if there are many such pairs.
    fn rivals(&self) -> BTreeSet<[usize; 2]> {
        let mut events = vec![Vec::new(); self.room.len() + 1];
        for (node, demand) in
            self.nodes.iter().enumerate().flat_map(|(node, of)| of.demands.iter().map(move |d| (node, d)))
        {
            let entry = (Reverse(demand.bytes.iter().copied().max().unwrap_or(0)), node);
            events[demand.lifetime.start].push((true, entry));
            events[demand.lifetime.end].push((false, entry));
        }
        let mut rivals = BTreeSet::new();
        let mut live = BTreeSet::new();
        for (events, &room) in events.iter_mut().zip(&self.room) {
            events.sort_unstable();
            for (is_birth, entry) in events {
                if *is_birth {
                    live.insert(*entry)
                } else {
                    live.remove(entry)
                };
            }
            for (number, &(Reverse(first), node)) in live.iter().enumerate() {
                let others = live.iter().skip(number + 1);
                let mut others = others.take_while(|(Reverse(second), _)| first + second > room).peekable();
                if others.peek().is_none() {
                    break;
                }
                rivals.extend(others.map(|&(_, other)| [node.min(other), node.max(other)]));
                if rivals.len() > self.nodes.len() {
                    return BTreeSet::new();
                }
            }
        }
        rivals
    }

    /// Forbids pairs of strategies.
    fn forbid(&mut self, node: usize, other: usize, pairs: &BTreeSet<usize>) {
        let [rows, columns] = [node, other].map(|node| self.nodes[node].costs.len());
        for &pair in pairs {
            for (from, to, at) in [(node, other, pair), (other, node, pair % columns * rows + pair / columns)] {
                if let Some(cost) = self.links[from].get_mut(&to).map(|matrix| &mut matrix[at])
                    && *cost < NEVER
                {
                    *cost = NEVER;
                    self.look_at(from);
                }
            }
        }
    }
}
