//! How a caller watches and stops planning.

use crate::mip::Solver;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Receives the name of the stage that begins and the share of the work done so far, in [0, 1].
pub type Progress = Box<dyn Fn(&str, f64) + Send + Sync>;

/// The caller's hold on a running [`crate::optimize::optimize`].
#[derive(Default)]
pub struct Control {
    /// Set it to true and planning ends soon with [`crate::optimize::OptimizeError::Cancelled`].
    pub cancel: Arc<AtomicBool>,
    /// Set it to true and planning ends soon with the best plan so far, as at the deadline.
    pub enough: Arc<AtomicBool>,
    /// Planning ends soon after this with the best plan so far.
    pub deadline: Option<Instant>,
    /// Called at the beginning of every stage, on the thread that plans.
    pub progress: Option<Progress>,
    /// Solves integer programs, where the settings ask for that.
    pub solver: Option<Arc<dyn Solver>>,
}

/// How many steps pass between two looks at the watch.
pub(crate) const STRIDE: usize = 256;

/// Why a long loop must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Cancelled,
    TimedOut,
}

/// What long loops ask, at most every few microseconds of work.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    cancel: Arc<AtomicBool>,
    enough: Arc<AtomicBool>,
    deadline: Option<Instant>,
}

impl Watch {
    /// `deadline` is the control's or an earlier one.
    pub(crate) fn new(control: &Control, deadline: Option<Instant>) -> Self {
        Watch { cancel: control.cancel.clone(), enough: control.enough.clone(), deadline }
    }

    /// As this one, but only cancelling stops it: for the little that must always be done.
    pub(crate) fn patient(&self) -> Self {
        Watch { cancel: self.cancel.clone(), ..Watch::default() }
    }

    /// Seconds until the deadline, 0 once the caller has said that it is over; `None` without a
    /// deadline.
    pub(crate) fn seconds_left(&self) -> Option<f64> {
        if self.cancel.load(Ordering::Relaxed) || self.enough.load(Ordering::Relaxed) {
            return Some(0.0);
        }
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()).as_secs_f64())
    }

    pub(crate) fn check(&self) -> Result<(), Stop> {
        if self.cancel.load(Ordering::Relaxed) {
            Err(Stop::Cancelled)
        } else if self.enough.load(Ordering::Relaxed)
            || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
        {
            Err(Stop::TimedOut)
        } else {
            Ok(())
        }
    }
}
