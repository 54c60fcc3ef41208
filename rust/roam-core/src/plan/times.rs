//! When the operators of a plan run, by the cost model.

use super::{Plan, Schedule};
use crate::cost::{self, SYNC_NS, after};
use crate::graph::{Graph, OperatorId};

impl Plan {
    /// Start and end of every operator by number, in nanoseconds from the start of the step.
    ///
    /// The plan must be a valid one of this graph, see [`crate::verify::verify`].
    ///
    /// # Panics
    /// If it is not.
    pub fn times_ns(&self, graph: &Graph) -> Vec<(u64, u64)> {
        match &self.schedule {
            Some(schedule) if !schedule.time_steps.is_empty() => self.by_time_steps(graph, schedule),
            Some(schedule) => self.by_waits(graph, &schedule.streams, &schedule.syncs),
            None => self.by_waits(graph, &vec![0; self.order.len()], &[]),
        }
    }

    /// An operator starts when the one before it on its stream has completed, and everything that
    /// it waits for; each wait takes time.
    fn by_waits(&self, graph: &Graph, streams: &[u32], syncs: &[(OperatorId, OperatorId)]) -> Vec<(u64, u64)> {
        let mut waits = vec![Vec::new(); self.order.len()];
        for &(before, after) in syncs {
            waits[after.index()].push(before);
        }
        let mut times = vec![(0, 0); self.order.len()];
        let mut free = vec![0u64; self.settings.streams as usize];
        for &id in &self.order {
            let free = &mut free[streams[id.index()] as usize];
            let own = &waits[id.index()];
            let ready = own.iter().map(|before| times[before.index()].1).max().unwrap_or(0).max(*free);
            let start = after(ready, SYNC_NS * own.len() as u64);
            *free = after(start, cost::operator_ns(graph, id));
            times[id.index()] = (start, *free);
        }
        times
    }

    /// A time step takes as long as its slowest operator, and all its operators start with it.
    fn by_time_steps(&self, graph: &Graph, schedule: &Schedule) -> Vec<(u64, u64)> {
        let mut longest = vec![0; schedule.time_steps.iter().max().map_or(0, |&last| last as usize + 1)];
        for &id in &self.order {
            let slowest: &mut u64 = &mut longest[schedule.time_steps[id.index()] as usize];
            *slowest = cost::operator_ns(graph, id).max(*slowest);
        }
        let begins = |now: &mut u64, &ns: &u64| Some(std::mem::replace(now, after(*now, ns)));
        let begin: Vec<u64> = longest.iter().scan(0, begins).collect();
        let ids = (0..schedule.time_steps.len() as u32).map(OperatorId);
        ids.zip(&schedule.time_steps)
            .map(|(id, &step)| (begin[step as usize], after(begin[step as usize], cost::operator_ns(graph, id))))
            .collect()
    }
}
