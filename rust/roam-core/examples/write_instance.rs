//! Writes the synthetic training step that the benchmarks read:
//! `cargo run --release --example write_instance -- benches/transformer-xl.json.gz`.

use roam_core::graph::json::save_graph;
use roam_core::synthetic::{Transformer, transformer_step};
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("which file shall it write?")?;
    Ok(save_graph(Path::new(&path), &transformer_step(Transformer::XL)?)?)
}
