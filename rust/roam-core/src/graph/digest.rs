//! A graph's fingerprints: by one, a plan names the graph that it was made for; by the other, the
//! plans of equal steps are found.

use super::json::{write_canonical, write_structure};
use super::step::Graph;
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::io;

impl Graph {
    /// SHA-256 of the graph's canonical JSON (uncompressed), in lower-case hexadecimal. Computed
    /// once.
    pub fn digest(&self) -> &str {
        self.digest.get_or_init(|| sha256(|hash| write_canonical(hash, self)))
    }

    /// SHA-256 of the canonical JSON without what no plan depends on: the names of graph and
    /// tensors, and where in the user's program operators come from. Graphs of one structure have
    /// the same plans, except for the digest by which each plan names its graph.
    pub fn structure_digest(&self) -> String {
        sha256(|hash| write_structure(hash, self))
    }
}

/// The hash of what is written, in lower-case hexadecimal.
fn sha256(write: impl FnOnce(&mut Sha256) -> io::Result<()>) -> String {
    let mut hash = Sha256::new();
    // Hashing accepts every byte, and a graph holds nothing that JSON cannot say.
    write(&mut hash).expect("hashing a graph does not fail");
    hash.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
