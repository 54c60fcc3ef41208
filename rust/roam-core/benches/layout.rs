//! Packing of the bare layout problems in `benches/layout`, and of thousands of random buffers.

use criterion::{Criterion, criterion_group, criterion_main};
use roam_core::layout::pack;
use roam_core::optimize::Control;
use roam_core::packing::{Buffer, Instance};
use roam_core::rng::Random;
use std::path::Path;

/// Comparisons: more than any of the files needs.
const WORK: u64 = 2_000_000_000;
/// Comparisons for the random buffers, which end only when these are used up.
const RANDOM_WORK: u64 = 50_000_000;

fn files() -> Vec<(String, Vec<Buffer>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/layout");
    let mut paths: Vec<_> = std::fs::read_dir(&folder)
        .expect("the instance folder exists")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "csv"))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "no instance files in {}", folder.display());
    let read = |path: &std::path::PathBuf| {
        let name = path.file_stem().expect("a file").to_string_lossy().into_owned();
        let instance = Instance::read(&std::fs::read_to_string(path).expect("readable")).expect("a valid instance");
        (name, instance.requests.iter().map(|request| request.buffer).collect())
    };
    paths.iter().map(read).collect()
}

/// Buffers that live for up to the given number of times, of 100 000 in all.
fn random(count: usize, longest: u64) -> Vec<Buffer> {
    let mut random = Random::new(7);
    let buffer = |_| {
        let lower = random.below(100_000);
        let upper = lower + 1 + random.below(longest);
        Buffer { lower, upper, size_bytes: 512 * (1 + random.below(2000)), alignment_bytes: 512 }
    };
    (0..count).map(buffer).collect()
}

fn layout(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pack");
    group.sample_size(10);
    for (name, buffers) in files() {
        group.bench_function(&name, |bench| bench.iter(|| pack(&buffers, WORK, &Control::default())));
    }
    for (name, longest) in [("long-lived", 100_000), ("short-lived", 2000)] {
        let buffers = random(5000, longest);
        group.bench_function(format!("random/{name}"), |bench| {
            bench.iter(|| pack(&buffers, RANDOM_WORK, &Control::default()));
        });
    }
    group.finish();
}

criterion_group!(benches, layout);
criterion_main!(benches);
