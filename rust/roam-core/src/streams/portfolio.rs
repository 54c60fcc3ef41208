//! The search for the best plan: which schedules are tried, and which of them is taken.

use super::outcome::{Input, Outcome, Single, Tried};
use super::search::Search;
use crate::control::{Stop, Watch};

/// Searches for the plan of the least total that is as fast as asked for. Where no speed is asked
/// for, a plan is fast enough if its time is at most one part in [`search::NEARLY`] above that of
/// the fastest plan that is found. No plan takes more than program order. `singles` are the plans
/// for one stream, the best first; the one in program order is among them.
///
/// # Errors
/// [`Stop::Cancelled`].
pub(crate) fn search(input: &Input<'_>, singles: &[Single<'_>], watch: &Watch) -> Result<Outcome, Stop> {
    let search = Search::new(input, watch);
    // No unpooled memory is reused on several streams, so plans that need such reuse do not count.
    let mut found = singles.iter().map(|single| (single, search.alone(single)));
    let Some((single, alone)) = found.find(|(_, alone)| alone.total() <= input.program_total) else {
        unreachable!("program order is no worse than itself")
    };
    let mut tried = vec![Tried::new(single.name.into(), &alone, None)];
    let mut timed_out = false;
    let mut extend = |tried: &mut Vec<Tried>, more: Result<Vec<Tried>, Stop>| match more {
        Ok(more) => {
            tried.extend(more);
            Ok(())
        }
        Err(Stop::TimedOut) => {
            timed_out = true;
            Ok(())
        }
        Err(Stop::Cancelled) => Err(Stop::Cancelled),
    };
    let best = if let Some(speed) = input.settings.speed {
        extend(&mut tried, search.try_at_speed(speed))?;
        let at_speed = tried.len();
        if search.best_at_speed(&tried, speed).is_none() {
            extend(&mut tried, search.try_all())?;
        }
        // A longer search for the layout of the plan that is best without a speed may make it fast
        // enough.
        search.best_at_speed(&tried, speed).or_else(|| search.best(&tried[at_speed..]))
    } else {
        extend(&mut tried, search.try_all())?;
        search.best(&tried)
    };
    let best = match best.map(|best| best.recipe) {
        Some(Some(recipe)) => {
            let (found, was_cut_short) = search.make_again(recipe)?;
            timed_out |= was_cut_short;
            found
        }
        _ => alone,
    };
    let best = if search.is_fast_enough(best.schedule.makespan_ns) {
        Ok(best)
    } else {
        Err(search.fastest_speed(&tried, &best))
    };
    Ok(Outcome { tried, best, timed_out })
}
