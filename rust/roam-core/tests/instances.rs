//! The instance files in `benches/`: readable, planned well, and what they claim to be.

use crate::common::SETTINGS;
use roam_core::graph::DEFAULT_MAX_BYTES;
use roam_core::graph::json::load_graph;
use roam_core::optimize::{Control, optimize};
use roam_core::plan::Settings;
use roam_core::synthetic::{Transformer, transformer_step};
use roam_core::verify::verify;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches")
}

#[test]
fn every_instance_is_planned_to_within_one_percent() {
    let mut count = 0;
    for entry in std::fs::read_dir(folder()).expect("the instance folder exists") {
        let path = entry.expect("a readable folder").path();
        if !path.to_string_lossy().ends_with(".json.gz") {
            continue;
        }
        let graph = load_graph(&path, DEFAULT_MAX_BYTES).expect("a valid instance");
        for reuse in [false, true] {
            let plan = optimize(&graph, &Settings { reuse, ..SETTINGS }, &Control::default()).expect("a plan");
            verify(&graph, &plan).expect("valid");
            assert!(plan.gap() <= 0.01, "{}: gap {} with reuse {reuse}", path.display(), plan.gap());
        }
        count += 1;
    }
    assert!(count > 0);
}

#[test]
fn the_synthetic_instance_is_what_the_generator_makes() {
    let path = folder().join("transformer-xl.json.gz");
    let graph = load_graph(&path, DEFAULT_MAX_BYTES).expect("a valid instance");
    assert_eq!(graph.digest(), transformer_step(Transformer::XL).expect("a valid step").digest());
}
