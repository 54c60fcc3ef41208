//! Prints what recomputation costs: per graph file and share of the bytes that the plan without it
//! needs, the extra time as a share of the step's.
//!
//! cargo run --release --example recompute -- 0.75,0.5,0.25 GRAPH...

#![expect(clippy::print_stdout, reason = "the table is what is asked for")]

use roam_core::cost::serial_ns;
use roam_core::graph::OperatorId;
use roam_core::graph::json::load_graph;
use roam_core::optimize::{Control, optimize};
use roam_core::plan::Settings;
use roam_core::stages::{Prepared, recompute};
use std::error::Error;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let shares = arguments.next().ok_or("shares, comma-separated, and graph files are needed")?;
    let shares: Vec<f64> = shares.split(',').map(str::parse).collect::<Result<_, _>>()?;
    for path in arguments {
        let graph = load_graph(Path::new(&path), u64::MAX)?;
        let order: Vec<OperatorId> = optimize(&graph, &Settings::default(), &Control::default())?.order;
        let positions = order.iter().map(|&id| graph.operator(id).position).collect();
        let peak = Prepared::new(&graph, true).measure(positions).peak_bytes();
        println!("{path}: {} operators, peak {peak}", order.len());
        for share in &shares {
            let begin = Instant::now();
            let found = recompute(&graph, &order, (peak as f64 * share) as u64);
            let seconds = begin.elapsed().as_secs_f64();
            match found.first() {
                Some(best) => {
                    let percent = 100.0 * best.extra_ns as f64 / serial_ns(&graph) as f64;
                    let runs = best.sequence.len() - order.len();
                    println!("  {share:.3}  +{percent:.2} %  {runs} extra runs  {seconds:.2} s");
                }
                None => println!("  {share:.3}  not found  {seconds:.2} s"),
            }
        }
    }
    Ok(())
}
