//! Lays out graphs by every method alone and prints how far each pool is above the most live bytes
//! of the pool's tensors: `cargo run --release --example layouts -- [order=NAME,...]
//! GRAPH.json.gz...`. Orders are `program` and `lescea` by default.

#![expect(clippy::print_stdout, reason = "the figures are for a person to read")]

use roam_core::graph::DEFAULT_MAX_BYTES;
use roam_core::graph::json::load_graph;
use roam_core::stages::Prepared;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let mut orders = vec!["program".to_owned(), "lescea".to_owned()];
    let mut paths = Vec::new();
    for argument in std::env::args().skip(1) {
        match argument.strip_prefix("order=") {
            Some(names) => orders = names.split(',').map(str::to_owned).collect(),
            None => paths.push(argument),
        }
    }
    let layouts: Vec<&str> = Prepared::layouts().collect();
    let (mut rows, mut sums) = (0u32, vec![Sums::default(); layouts.len()]);
    println!("| graph | order | most live bytes | {} |", layouts.join(" | "));
    println!("|---|---|---{}|", "|---".repeat(layouts.len()));
    for path in &paths {
        let prepared = Prepared::new(&load_graph(Path::new(path), DEFAULT_MAX_BYTES)?, true);
        for order in &orders {
            let ordered = prepared.order(order).ok_or_else(|| format!("no order {order:?}"))?;
            let live = ordered.pool_peak_bytes();
            let mut gaps = Vec::new();
            for (layout, sums) in layouts.iter().zip(&mut sums) {
                let begin = Instant::now();
                let pool = prepared.pool_bytes(&ordered, layout);
                sums.seconds += begin.elapsed().as_secs_f64();
                gaps.push(pool.map_or(f64::INFINITY, |pool| 100.0 * (pool as f64 / live.max(1) as f64 - 1.0)));
            }
            let best = gaps.iter().copied().fold(f64::INFINITY, f64::min);
            let wins = |gap: f64| gap <= best;
            let alone = gaps.iter().filter(|&&gap| wins(gap)).count() == 1;
            for (sums, &gap) in sums.iter_mut().zip(&gaps) {
                sums.gap += gap;
                sums.met += u32::from(gap == 0.0);
                sums.best += u32::from(wins(gap));
                sums.alone += u32::from(wins(gap) && alone);
            }
            rows += 1;
            let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
            let gaps: Vec<String> = gaps.iter().map(|gap| format!("{gap:.3}%")).collect();
            println!("| {} | {order} | {live} | {} |", name.trim_end_matches(".json.gz"), gaps.join(" | "));
        }
    }
    println!(
        "\n| layout of {rows} | mean gap | meets the bound | best | alone the best | seconds |\n|---|---|---|---|---|---|"
    );
    for (layout, Sums { gap, met, best, alone, seconds }) in layouts.iter().zip(sums) {
        println!("| {layout} | {:.3}% | {met} | {best} | {alone} | {seconds:.2} |", gap / f64::from(rows));
    }
    Ok(())
}

/// What a layout comes to over all graphs and orders.
#[derive(Clone, Copy, Default)]
struct Sums {
    gap: f64,
    met: u32,
    best: u32,
    alone: u32,
    seconds: f64,
}
