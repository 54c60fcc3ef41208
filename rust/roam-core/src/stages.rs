//! The planner's stages one by one, for benchmarks, tests and experiments. Plans are made by
//! [`crate::optimize::optimize`].

use crate::baseline;
use crate::bound;
use crate::control::Watch;
use crate::exact::ExactTier;
use crate::graph::Graph;
use crate::layout;
use crate::liveness::Profile;
use crate::mip::Solver;
use crate::order::{self, Aim, Method};
use crate::plan::{Exact, ExactReport};
use crate::problem::Problem;
use crate::recompute::{self, Floor, LeastTime, Repeats};

/// A graph made ready for planning.
pub struct Prepared {
    problem: Problem,
    watch: Watch,
}

/// An order of program positions and what it costs.
pub struct Ordered {
    order: Vec<u32>,
    profile: Profile,
}

/// What one layout takes for one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// In the pool; where an allocator serves everything, all that it reserves.
    pub pool_bytes: u64,
    /// Unpooled.
    pub unpooled_bytes: u64,
}

/// Bytes that every schedule has live at once, whatever runs again.
pub fn floor(graph: &Graph) -> Floor {
    recompute::floor(&Repeats::new(graph), &Watch::default())
}

/// The least time of further runs within a limit of bytes, persistent tensors included.
pub fn least_extra_ns(graph: &Graph, limit_bytes: u64) -> LeastTime {
    recompute::least_extra_ns(&Repeats::new(graph), limit_bytes, &Watch::default())
}

impl Ordered {
    /// Program positions in execution order.
    pub fn positions(&self) -> &[u32] {
        &self.order
    }

    /// Most live bytes over the steps, persistent tensors left out.
    pub fn peak_bytes(&self) -> u64 {
        self.profile.peak
    }

    /// Most live bytes of the pool's tensors: no layout takes less.
    pub fn pool_peak_bytes(&self) -> u64 {
        self.profile.pool_peak
    }

    /// Most live bytes of everything else, workspace included.
    pub fn unpooled_peak_bytes(&self) -> u64 {
        self.profile.unpooled_peak
    }

    /// The program position of the first operator at the peak; `None` without operators.
    pub fn peak_position(&self) -> Option<u32> {
        let step = self.profile.live.iter().position(|&live| live == self.profile.peak)?;
        Some(self.order[step])
    }
}

impl Prepared {
    /// Without `reuse` no reuse permission counts.
    pub fn new(graph: &Graph, reuse: bool) -> Self {
        Prepared { problem: Problem::new(graph, reuse), watch: Watch::default() }
    }

    fn aim(&self) -> Aim<'_> {
        Aim { problem: &self.problem, limit: None }
    }

    /// The names of all orders: the planner's portfolio, then what it is compared with.
    pub fn orders() -> impl Iterator<Item = &'static str> {
        Method::ALL.into_iter().map(Method::name).chain(baseline::Order::ALL.into_iter().map(baseline::Order::name))
    }

    /// An order by name; `None` if there is none of that name.
    pub fn order(&self, name: &str) -> Option<Ordered> {
        let own = Method::ALL.into_iter().find(|method| method.name() == name);
        let order = match own {
            Some(method) => method.order(&self.problem, &self.watch).ok()?,
            None => baseline::Order::ALL.into_iter().find(|order| order.name() == name)?.order(&self.problem),
        };
        Some(self.measure(order))
    }

    /// Lifetimes, reuse and live bytes of an order of program positions that the graph permits.
    pub fn measure(&self, order: Vec<u32>) -> Ordered {
        let profile = Profile::new(&self.problem, &order);
        Ordered { order, profile }
    }

    /// The order with the lowest peak that the heuristics find: every order as it is, split at its
    /// cuts, or staged.
    pub fn heuristic(&self) -> Option<Ordered> {
        let mut bounds = bound::Bounds::new(&self.problem);
        let mut found = Vec::new();
        for method in Method::ALL {
            let Ordered { order, profile } = self.measure(method.order(&self.problem, &self.watch).ok()?);
            let ordered = order::Ordered { order, profile };
            found.push(order::split(self.aim(), ordered, &mut bounds, &self.watch).ok()?);
        }
        found.extend(order::stage(self.aim(), &mut bounds, &self.watch).ok()?);
        let best = found.into_iter().min_by_key(|ordered| ordered.profile.peak)?;
        Some(Ordered { order: best.order, profile: best.profile })
    }

    /// An order with its peak lowered as far as exact search goes, and bytes that no order can go
    /// below.
    pub fn lower_peaks(&self, ordered: &Ordered) -> Option<(Ordered, u64)> {
        self.lower_peaks_counted(ordered).map(|(lowered, bound, _)| (lowered, bound))
    }

    /// The same, and how many windows there were to search, and how many of them were: repeated
    /// layers are solved once.
    pub fn lower_peaks_counted(&self, ordered: &Ordered) -> Option<(Ordered, u64, [usize; 2])> {
        let mut bounds = bound::Bounds::new(&self.problem);
        let mut answers = order::Answers::default();
        let start = order::Ordered { order: ordered.order.clone(), profile: ordered.profile.clone() };
        let (lowered, _) = order::lower_peaks(self.aim(), start, &mut bounds, &mut answers, &self.watch).ok()?;
        let order::Ordered { order, profile } = lowered;
        Some((Ordered { order, profile }, bounds.best().0, [answers.asked, answers.searched()]))
    }

    /// An order with its peak lowered as far as integer programs go, the least that any order can
    /// have by their solver's word, and what became of them.
    pub fn solve_peaks(&self, ordered: &Ordered, solver: &dyn Solver) -> Option<(Ordered, u64, ExactReport)> {
        let mut bounds = bound::Bounds::new(&self.problem);
        let mut exact = ExactTier::new(Exact::Auto, Some(solver));
        let start = order::Ordered { order: ordered.order.clone(), profile: ordered.profile.clone() };
        let open = order::Open::whole(&start.order);
        let solved =
            order::lower_by_programs(&self.problem, start, &open, &mut bounds, &mut exact, &self.watch).ok()?;
        Some((Ordered { order: solved.order, profile: solved.profile }, bounds.best().0, exact.report))
    }

    /// The names of the layouts that every plan tries.
    pub fn portfolio() -> impl Iterator<Item = &'static str> {
        layout::Method::ALL.into_iter().map(layout::Method::name)
    }

    /// The names of all layouts: the planner's own, then what they are compared with.
    pub fn layouts() -> impl Iterator<Item = &'static str> {
        let others = baseline::Layout::ALL.into_iter().map(baseline::Layout::name);
        let eager = baseline::Eager::ALL.into_iter().map(baseline::Eager::name);
        layout::Method::known().map(layout::Method::name).chain(others).chain(eager)
    }

    /// Whether there is a layout of that name; the tree's may end in the most blocks of a leaf:
    /// `tree:100`.
    pub fn has_layout(name: &str) -> bool {
        Prepared::layouts().any(|known| known == name) || layout::Method::by_name(name).is_some()
    }

    /// Bytes of the pool as laid out by name; `None` if there is no layout of that name.
    pub fn pool_bytes(&self, ordered: &Ordered, name: &str) -> Option<u64> {
        self.needs(ordered, name).map(|needs| needs.pool_bytes)
    }

    /// What an order takes as laid out by name; `None` if there is no layout of that name.
    pub fn needs(&self, ordered: &Ordered, name: &str) -> Option<Needs> {
        let Ordered { order, profile } = ordered;
        if let Some(eager) = baseline::Eager::ALL.into_iter().find(|eager| eager.name() == name) {
            let pool_bytes = eager.reserved_bytes(&self.problem, order, profile)?;
            return Some(Needs { pool_bytes, unpooled_bytes: 0 });
        }
        let other = baseline::Layout::ALL.into_iter().find(|layout| layout.name() == name);
        let pool_bytes = match other {
            Some(layout) => layout.pool_bytes(&self.problem, profile),
            None => {
                let method = layout::Method::by_name(name)?;
                layout::by_method(&self.problem, profile, method, &self.watch).ok()??.pool_bytes
            }
        };
        Some(Needs { pool_bytes, unpooled_bytes: profile.unpooled_peak })
    }

    /// The least that can be live while the operator at a program position runs.
    pub fn cut_bytes(&self, position: u32) -> Option<u64> {
        bound::cut(&self.problem, position, &self.watch).ok()
    }

    /// The least that any order can need, as far as probes at the operator at a program position
    /// prove it; an order guides them.
    pub fn probed_bytes(&self, ordered: &Ordered, position: u32) -> Option<u64> {
        let target = bound::Target::Falling(ordered.profile.peak);
        let probed = bound::probe(
            &self.problem,
            None,
            position,
            &ordered.order,
            target,
            &mut bound::Work::UNLIMITED.clone(),
            &self.watch,
        );
        probed.ok().map(|cut| cut.bytes)
    }
}
