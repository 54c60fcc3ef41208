//! Searches for layouts smaller than those of the packers: beam search, valley descents, branch and
//! bound.

pub(crate) mod beam;
pub(crate) mod canonical;
pub(crate) mod decide;
pub(crate) mod escalate;
pub(crate) mod joined;
pub(crate) mod normal;
pub(crate) mod valley_descent;
