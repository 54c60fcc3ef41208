//! Bare layouts: buffers to pack, and what a packing of them says.

mod csv;
mod requests;
mod types;

pub use csv::{CsvError, Instance};
pub use requests::{Gap, Request};
pub use types::{Buffer, Packing};

#[cfg(test)]
pub(crate) use requests::tests::request;
