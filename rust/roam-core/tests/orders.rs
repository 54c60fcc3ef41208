//! Exact orders: what brute force finds, proved.

mod common;

use common::{each_order, peaks_by_definition, random_graph};
use roam_core::stages::Prepared;
use roam_core::synthetic::Random;

/// From whatever order it starts, exact search ends at the least peak of all orders, and proves it.
#[test]
fn exact_orders_are_the_best_there_are() {
    let mut random = Random::new(21);
    let mut improved = 0;
    for round in 0..4000 {
        let graph = random_graph(&mut random, if round % 10 == 0 { 9 } else { 7 });
        for reuse in [false, true] {
            let mut best = u64::MAX;
            each_order(&graph, &mut |order| best = best.min(peaks_by_definition(&graph, order, reuse).whole));
            let prepared = Prepared::new(&graph, reuse);
            let program = prepared.order("program").expect("a known order");
            let (exact, bound) = prepared.lower_peaks(&program).expect("nothing stops it");
            let found = (exact.peak_bytes(), bound);
            assert_eq!(found, if graph.operators().is_empty() { (0, 0) } else { (best, best) });
            improved += u32::from(exact.peak_bytes() < program.peak_bytes());
        }
    }
    assert!(improved > 1000, "only {improved} program orders were improved");
}

/// What exact search proves of larger graphs is not above any order that another way finds.
#[test]
fn what_is_proved_holds_for_every_order() {
    let mut random = Random::new(22);
    for _ in 0..300 {
        let graph = random_graph(&mut random, 40);
        for reuse in [false, true] {
            let prepared = Prepared::new(&graph, reuse);
            let orders: Vec<_> = Prepared::orders().filter_map(|name| prepared.order(name)).collect();
            let lowest = orders.iter().map(|order| order.peak_bytes()).min().expect("several orders");
            for order in &orders {
                let (exact, bound) = prepared.lower_peaks(order).expect("nothing stops it");
                assert!(exact.peak_bytes() <= order.peak_bytes());
                assert!(bound <= lowest.min(exact.peak_bytes()), "{bound} {lowest} {reuse}");
            }
        }
    }
}
