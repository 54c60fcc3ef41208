//! Plans gone wrong, which the verifier must refuse.

use roam_core::graph::Graph;
use roam_core::plan::Plan;
use roam_core::rng::Random;
use roam_core::verify::verify;

/// A corrupted copy of the plan and the codes by which it may be refused; `None` where the plan
/// offers no way to go wrong like this.
pub(crate) type Corruption = fn(&Graph, &Plan, &mut Random) -> Option<(Plan, &'static [&'static str])>;

/// One of the list, if there is any.
pub(crate) fn pick<T: Copy>(list: &[T], random: &mut Random) -> Option<T> {
    if list.is_empty() { None } else { Some(list[random.below(list.len() as u64) as usize]) }
}

/// Corrupts each of the plans in every way there is. All must be refused, and each way be tried at
/// least so many times.
pub(crate) fn catch_each(
    corruptions: &[(&str, Corruption)],
    least: usize,
    random: &mut Random,
    rounds: usize,
    mut planned: impl FnMut(usize, &mut Random) -> (Graph, Plan),
) {
    let mut caught = vec![0; corruptions.len()];
    for round in 0..rounds {
        let (graph, plan) = planned(round, random);
        for ((name, corrupt), caught) in corruptions.iter().zip(&mut caught) {
            if let Some((corrupted, codes)) = corrupt(&graph, &plan, random) {
                let violation = verify(&graph, &corrupted).expect_err(name);
                assert!(codes.contains(&violation.code()), "{name}: {violation}");
                assert!(!violation.to_string().is_empty());
                *caught += 1;
            }
        }
    }
    for ((name, _), count) in corruptions.iter().zip(caught) {
        assert!(count >= least, "{name}: tried {count} times only");
    }
}
