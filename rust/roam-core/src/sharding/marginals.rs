//! Bounds per strategy.

/// Lower bounds on what choices cost.
pub(super) struct Marginals {
    /// The least cost of all choices.
    pub(super) least: f64,
    /// Per strategy the least cost of all choices that have it.
    pub(super) by_strategy: Vec<f64>,
}

/// The place of the least value; the first of several.
pub(super) fn least(values: &[f64]) -> usize {
    let mut least = 0;
    for (place, value) in values.iter().enumerate() {
        if *value < values[least] {
            least = place;
        }
    }
    least
}
