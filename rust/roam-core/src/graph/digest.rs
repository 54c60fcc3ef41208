//! A graph's fingerprint, by which a plan names the graph it was made for.

use super::json::write_canonical;
use super::step::Graph;
use sha2::{Digest, Sha256};
use std::fmt::Write;

impl Graph {
    /// SHA-256 of the graph's canonical JSON (uncompressed), in lower-case hexadecimal. Computed
    /// once.
    pub fn digest(&self) -> &str {
        self.digest.get_or_init(|| {
            let mut hash = Sha256::new();
            // Hashing accepts every byte, and a graph holds nothing that JSON cannot say.
            write_canonical(&mut hash, self).expect("hashing a graph does not fail");
            hash.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
                let _ = write!(text, "{byte:02x}");
                text
            })
        })
    }
}
