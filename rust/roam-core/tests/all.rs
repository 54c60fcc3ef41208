//! All tests of the planner in one binary: what they share is compiled and linked once, and no core
//! waits while the last test of one file ends.

mod common;

mod architecture;
mod baselines;
mod control;
mod formats;
mod hard_inputs;
mod instances;
mod layouts;
mod nightly;
mod orders;
mod plans;
mod programs;
mod recompute;
mod requests;
mod streams;
mod verifier;

/// A file that is not listed above would never run.
#[test]
fn every_file_is_listed() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let listed = include_str!("all.rs");
    for entry in std::fs::read_dir(folder).expect("the folder of tests") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        assert!(name == "all" || listed.contains(&format!("\nmod {name};\n")), "mod {name}; is missing in all.rs");
    }
}
