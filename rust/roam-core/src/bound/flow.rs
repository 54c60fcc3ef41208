//! Maximum flow and minimum cut by blocking flows (Dinic 1970), the widest paths first (capacity
//! scaling; Gabow 1985): so where the work runs out early, the flow is only a little too small.

use crate::control::{Stop, Watch};

/// A capacity that no cut pays: the graph's bytes sum to less.
pub(crate) const INFINITE: u64 = 1 << 63;

/// The power of 2 by which paths become narrower at a time.
const NARROWER: u32 = 5;

/// A flow network under construction. Node 0 is the source, node 1 the sink.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    nodes: u32,
    arcs: Vec<(u32, u32, u64, u64)>,
}

/// The flow that was found.
#[derive(Clone, Debug)]
pub(crate) struct Flow {
    /// Bytes sent; no cut is smaller.
    pub(crate) value: u64,
    /// Whether the search came to its end.
    pub(crate) is_complete: bool,
    residual: Residual,
    /// Least width of the last paths that were looked for.
    width: u64,
}

impl Flow {
    /// The smallest and the largest source side of a minimum cut, per node. Where the work limit
    /// ended the search, the cut may be larger than the value, but only by what narrow paths could
    /// still carry.
    pub(crate) fn sides(mut self) -> [Vec<bool>; 2] {
        // No path is wider than the widest arc.
        while !self.is_complete && self.residual.find_distances(self.width, &mut u64::MAX.clone()) {
            self.width <<= NARROWER;
        }
        self.residual.sides(self.width)
    }
}

pub(crate) const SOURCE: u32 = 0;
pub(crate) const SINK: u32 = 1;

impl Network {
    pub(crate) fn new() -> Self {
        Network { nodes: 2, arcs: Vec::new() }
    }

    pub(crate) fn add_node(&mut self) -> u32 {
        self.nodes += 1;
        self.nodes - 1
    }

    /// An arc with capacities there and back.
    pub(crate) fn add_arc(&mut self, from: u32, to: u32, forward: u64, backward: u64) {
        self.arcs.push((from, to, forward, backward));
    }

    /// Nodes, and arcs there and back.
    pub(crate) fn size(&self) -> u64 {
        u64::from(self.nodes) + 2 * self.arcs.len() as u64
    }

    /// Sends as much as possible while looking at no more than `work` arcs, which it takes off
    /// `work`.
    pub(crate) fn solve(self, work: &mut u64, watch: &Watch) -> Result<Flow, Stop> {
        let mut residual = Residual::new(self.nodes as usize, &self.arcs);
        let widest = self.arcs.iter().flat_map(|&(_, _, there, back)| [there, back]).filter(|&c| c < INFINITE).max();
        let mut value = 0;
        // Paths of at least this width; the powers of `NARROWER`, down to 1.
        let mut width = 1u64 << (widest.unwrap_or(0).max(1).ilog2() / NARROWER * NARROWER);
        while *work > 0 {
            if residual.find_distances(width, work) {
                watch.check()?;
                value += residual.block(width, work);
            } else if width > 1 {
                width >>= NARROWER;
            } else {
                return Ok(Flow { value, is_complete: true, residual, width });
            }
        }
        Ok(Flow { value, is_complete: false, residual, width })
    }
}

#[derive(Clone, Debug)]
struct Residual {
    starts: Vec<u32>,
    arcs: Vec<Arc>,
    /// Arcs to the sink along arcs that are wide enough; `u32::MAX` where there is no way, or none
    /// as short as the source's.
    distance: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Arc {
    capacity: u64,
    to: u32,
    /// The arc's other direction.
    twin: u32,
}

impl Residual {
    fn new(nodes: usize, arcs: &[(u32, u32, u64, u64)]) -> Self {
        let mut starts = vec![0u32; nodes + 1];
        for &(from, to, _, _) in arcs {
            starts[from as usize + 1] += 1;
            starts[to as usize + 1] += 1;
        }
        for node in 0..nodes {
            starts[node + 1] += starts[node];
        }
        let mut next = starts.clone();
        let mut place = |node: u32| {
            next[node as usize] += 1;
            next[node as usize] - 1
        };
        let mut placed = vec![Arc { capacity: 0, to: 0, twin: 0 }; 2 * arcs.len()];
        for &(from, to, forward, backward) in arcs {
            let (there, back) = (place(from), place(to));
            placed[there as usize] = Arc { capacity: forward, to, twin: back };
            placed[back as usize] = Arc { capacity: backward, to: from, twin: there };
        }
        Residual { starts, arcs: placed, distance: Vec::new() }
    }

    fn arcs_of(&self, node: u32) -> std::ops::Range<usize> {
        self.starts[node as usize] as usize..self.starts[node as usize + 1] as usize
    }

    /// Where an arc begins.
    fn begin(&self, arc: usize) -> u32 {
        self.arcs[self.arcs[arc].twin as usize].to
    }

    /// Breadth first from the sink; whether the source still reaches it.
    fn find_distances(&mut self, width: u64, work: &mut u64) -> bool {
        self.distance = vec![u32::MAX; self.starts.len() - 1];
        self.distance[SINK as usize] = 0;
        let mut queue = vec![SINK];
        let mut head = 0;
        while head < queue.len() {
            let node = queue[head];
            head += 1;
            for arc in self.arcs_of(node) {
                *work = work.saturating_sub(1);
                let Arc { to: from, twin, .. } = self.arcs[arc];
                if self.distance[from as usize] == u32::MAX && self.arcs[twin as usize].capacity >= width {
                    self.distance[from as usize] = self.distance[node as usize] + 1;
                    if from == SOURCE {
                        return true;
                    }
                    queue.push(from);
                }
            }
        }
        false
    }

    /// Fills the shortest paths; stops early when the work is used up.
    fn block(&mut self, width: u64, work: &mut u64) -> u64 {
        let mut sent = 0;
        let mut current: Vec<u32> = self.starts.clone();
        let mut path: Vec<usize> = Vec::new();
        let mut node = SOURCE;
        while *work > 0 {
            if node == SINK {
                let amount = path.iter().map(|&arc| self.arcs[arc].capacity).min().unwrap_or(0);
                let mut first_full = path.len();
                for (place, &arc) in path.iter().enumerate().rev() {
                    self.arcs[arc].capacity -= amount;
                    let twin = self.arcs[arc].twin;
                    self.arcs[twin as usize].capacity += amount;
                    if self.arcs[arc].capacity < width {
                        first_full = place;
                    }
                }
                *work = work.saturating_sub(path.len() as u64);
                sent += amount;
                node = self.begin(path[first_full]);
                path.truncate(first_full);
                continue;
            }
            let end = self.starts[node as usize + 1];
            let from = current[node as usize];
            let open = (from..end).find(|&arc| {
                let Arc { capacity, to, .. } = self.arcs[arc as usize];
                capacity >= width && self.distance[to as usize] < self.distance[node as usize]
            });
            *work = work.saturating_sub(u64::from(open.unwrap_or(end) - from) + 1);
            current[node as usize] = open.unwrap_or(end);
            match open {
                Some(arc) => {
                    path.push(arc as usize);
                    node = self.arcs[arc as usize].to;
                }
                None => {
                    // A dead end: forget it and step back.
                    self.distance[node as usize] = u32::MAX;
                    match path.pop() {
                        Some(arc) => node = self.begin(arc),
                        None => break,
                    }
                }
            }
        }
        sent
    }

    /// What the source reaches along arcs that are wide enough, and what does not reach the sink.
    fn sides(&mut self, width: u64) -> [Vec<bool>; 2] {
        let mut reached = vec![false; self.starts.len() - 1];
        reached[SOURCE as usize] = true;
        let mut stack = vec![SOURCE];
        while let Some(node) = stack.pop() {
            for arc in self.arcs_of(node) {
                let Arc { capacity, to, .. } = self.arcs[arc];
                if capacity >= width && !reached[to as usize] {
                    reached[to as usize] = true;
                    stack.push(to);
                }
            }
        }
        // The last search from the sink found what still reaches it.
        let largest = self.distance.iter().map(|&distance| distance == u32::MAX).collect();
        [reached, largest]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Least capacity over all cuts, by trying every source side.
    fn smallest_cut(nodes: u32, arcs: &[(u32, u32, u64, u64)]) -> u64 {
        (0u32..1 << nodes)
            .filter(|side| side & 1 != 0 && side & 2 == 0)
            .map(|side| {
                let inside = |node: u32| side >> node & 1 != 0;
                arcs.iter()
                    .map(|&(from, to, forward, backward)| match (inside(from), inside(to)) {
                        (true, false) => forward,
                        (false, true) => backward,
                        _ => 0,
                    })
                    .fold(0, u64::saturating_add)
            })
            .min()
            .unwrap_or(0)
    }

    #[test]
    fn flow_equals_the_smallest_cut() {
        let mut random = crate::rng::Random::new(7);
        for _ in 0..2000 {
            let nodes = 2 + random.below(6) as u32;
            let mut network = Network::new();
            for _ in 2..nodes {
                network.add_node();
            }
            let arcs: Vec<_> = (0..random.below(16))
                .map(|_| {
                    let (from, to) = (random.below(nodes as u64) as u32, random.below(nodes as u64) as u32);
                    let forward =
                        if random.once_in(8) && from != SOURCE && to != SINK { INFINITE } else { random.below(100) };
                    (from, to, forward, random.below(4))
                })
                .filter(|(from, to, _, _)| from != to)
                .collect();
            for &(from, to, forward, backward) in &arcs {
                network.add_arc(from, to, forward, backward);
            }
            let expected = smallest_cut(nodes, &arcs);
            let flow = network.clone().solve(&mut u64::MAX.clone(), &Watch::default()).expect("nothing stops it");
            assert_eq!(flow.value, expected);
            assert!(flow.is_complete);
            for side in flow.sides() {
                let paid: u64 = arcs
                    .iter()
                    .map(|&(from, to, forward, backward)| match (side[from as usize], side[to as usize]) {
                        (true, false) => forward,
                        (false, true) => backward,
                        _ => 0,
                    })
                    .sum();
                assert!(side[0] && !side[1]);
                assert_eq!(paid, expected);
            }
            // Cut short, the flow is still below every cut.
            let short = network.solve(&mut random.below(20), &Watch::default()).expect("nothing stops it");
            assert!(short.value <= expected);
            // Its sides are those of a cut all the same.
            for side in short.sides() {
                assert!(side[0] && !side[1]);
                let crosses = |from: u32, to: u32| side[from as usize] && !side[to as usize];
                for &(from, to, forward, backward) in &arcs {
                    assert!(forward != INFINITE || !crosses(from, to));
                    assert!(backward != INFINITE || !crosses(to, from));
                }
            }
        }
    }
}
