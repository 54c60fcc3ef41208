//! What weight updates cost in several orders, as a table:
//! `cargo run --release --example updates -- GRAPHS`, where each is a file of a captured step.
//!
//! Per order, without reuse: its peak, and pool and unpooled bytes apart, added up, in MiB. Persistent
//! tensors are left out.

#![expect(clippy::print_stdout, reason = "the table is what is asked for")]

use roam_core::graph::json::load_graph;
use roam_core::stages::Prepared;
use std::error::Error;
use std::path::PathBuf;

const ORDERS: [&str; 4] = ["program", "eager_updates", "memory_aware_updates", "hill_valley"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("| step | {} |", ORDERS.join(" | "));
    println!("|---|{}", "---|".repeat(ORDERS.len()));
    for path in std::env::args_os().skip(1).map(PathBuf::from) {
        let graph = load_graph(&path, u64::MAX)?;
        let prepared = Prepared::new(&graph, false);
        print!("| {} |", path.file_name().unwrap_or_default().to_string_lossy().trim_end_matches(".json.gz"));
        for name in ORDERS {
            let order = prepared.order(name).ok_or("no such order")?;
            let total = order.pool_peak_bytes() + order.unpooled_peak_bytes();
            print!(" {:.2}, {:.2} |", mib(order.peak_bytes()), mib(total));
        }
        println!();
    }
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
