//! Every stage of the planner on every instance file in `benches/`.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use roam_core::graph::json::load_graph;
use roam_core::graph::{DEFAULT_MAX_BYTES, Graph};
use roam_core::optimize::{Control, optimize};
use roam_core::plan::Settings;
use roam_core::stages::Prepared;
use roam_core::verify::verify;
use std::path::Path;

const SETTINGS: Settings = Settings::SINGLE;

/// The graphs among the instance files, by file name.
fn instances() -> Vec<(String, Graph)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches");
    let mut paths: Vec<_> = std::fs::read_dir(&folder)
        .expect("the instance folder exists")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.to_string_lossy().ends_with(".json.gz"))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "no instance files in {}", folder.display());
    paths
        .iter()
        .map(|path| {
            let name = path.file_name().expect("a file").to_string_lossy().replace(".json.gz", "");
            (name, load_graph(path, DEFAULT_MAX_BYTES).expect("a valid instance"))
        })
        .collect()
}

fn planner(criterion: &mut Criterion) {
    for (name, graph) in instances() {
        let mut group = criterion.benchmark_group(&name);
        group.sample_size(10);
        group.bench_function("prepare", |bench| bench.iter(|| Prepared::new(&graph, true)));
        let prepared = Prepared::new(&graph, true);
        let program = prepared.order("program").expect("a known order");
        let positions = program.positions().to_vec();
        group.bench_function("liveness", |bench| {
            bench.iter_batched(|| positions.clone(), |order| prepared.measure(order), BatchSize::LargeInput);
        });
        for order in Prepared::orders() {
            group.bench_function(format!("order/{order}"), |bench| bench.iter(|| prepared.order(order)));
        }
        for layout in Prepared::portfolio().chain(["tree"]) {
            group.bench_function(format!("layout/{layout}"), |bench| {
                bench.iter(|| prepared.pool_bytes(&program, layout));
            });
        }
        if let Some(position) = program.peak_position() {
            group.bench_function("bound", |bench| bench.iter(|| prepared.cut_bytes(position)));
        }
        let plan = optimize(&graph, &SETTINGS, &Control::default()).expect("a plan");
        group.bench_function("optimize", |bench| bench.iter(|| optimize(&graph, &SETTINGS, &Control::default())));
        group.bench_function("verify", |bench| bench.iter(|| verify(&graph, &plan)));
        group.finish();
    }
}

criterion_group!(benches, planner);
criterion_main!(benches);
