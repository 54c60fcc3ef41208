//! The JSON forms: round trips, and what damaged files meet.

use crate::common::{SETTINGS, random_graph};
use roam_core::graph::json::{load_graph, read_graph, save_graph, write_graph};
use roam_core::graph::{DEFAULT_MAX_BYTES, FormatError, Graph};
use roam_core::optimize::{Control, optimize};
use roam_core::plan::json::{read_plan, write_plan};
use roam_core::rng::Random;
use roam_core::synthetic::{Transformer, transformer_step};
use std::io::{self, Read};

fn text(graph: &Graph) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_graph(&mut bytes, graph).expect("memory takes every byte");
    bytes
}

#[test]
fn graphs_round_trip() {
    let mut random = Random::new(3);
    for _ in 0..500 {
        let graph = random_graph(&mut random, 12);
        let bytes = text(&graph);
        let again = read_graph(&bytes[..], DEFAULT_MAX_BYTES).expect("what was written can be read");
        assert_eq!(again, graph);
        assert_eq!(text(&again), bytes);
        assert_eq!(again.digest(), graph.digest());
    }
}

#[test]
fn plans_round_trip() {
    let mut random = Random::new(4);
    for _ in 0..100 {
        let plan = optimize(&random_graph(&mut random, 12), &SETTINGS, &Control::default()).expect("a plan");
        let mut bytes = Vec::new();
        write_plan(&mut bytes, &plan).expect("memory takes every byte");
        assert_eq!(read_plan(&bytes[..], DEFAULT_MAX_BYTES).expect("what was written can be read"), plan);
    }
}

#[test]
fn files_are_compressed_by_their_name_and_equal_for_equal_graphs() {
    let graph = transformer_step(Transformer { layers: 2, ..Transformer::XL }).expect("a valid step");
    let folder = std::env::temp_dir().join(format!("roam-formats-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for temporary files");
    let paths = ["a.json", "a.json.gz", "b.json.gz"].map(|name| folder.join(name));
    for path in &paths {
        save_graph(path, &graph).expect("the file can be written");
        assert_eq!(load_graph(path, DEFAULT_MAX_BYTES).expect("the file can be read"), graph);
    }
    let [plain, compressed, again] = paths.map(|path| std::fs::read(path).expect("the file can be read"));
    std::fs::remove_dir_all(&folder).expect("the folder can be removed");
    assert_eq!(compressed, again);
    assert!(compressed.len() * 5 < plain.len());
}

#[test]
fn damaged_files_are_errors_and_nothing_worse() {
    let mut random = Random::new(5);
    let bytes = text(&random_graph(&mut random, 8));
    for length in 0..bytes.len() - 1 {
        let error = read_graph(&bytes[..length], DEFAULT_MAX_BYTES).expect_err("cut short");
        assert!(matches!(error, FormatError::Syntax { .. }), "{error}");
    }
    for _ in 0..50_000 {
        let mut damaged = bytes.clone();
        for _ in 0..=random.below(3) {
            let place = random.below(damaged.len() as u64) as usize;
            damaged[place] = random.below(256) as u8;
        }
        // Either an error or some other valid graph, which can be written again.
        if let Ok(graph) = read_graph(&damaged[..], DEFAULT_MAX_BYTES) {
            assert_eq!(read_graph(&text(&graph)[..], DEFAULT_MAX_BYTES).expect("valid"), graph);
        }
    }
}

#[test]
fn a_disk_that_fails_is_told_from_a_damaged_file() {
    struct Failing;
    impl Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::from(io::ErrorKind::TimedOut))
        }
    }
    for start in [&b"{\"format\":"[..], &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255]] {
        let error = read_graph(start.chain(Failing), DEFAULT_MAX_BYTES).expect_err("the disk fails");
        assert!(matches!(&error, FormatError::Io(inner) if inner.kind() == io::ErrorKind::TimedOut), "{error}");
    }
}
