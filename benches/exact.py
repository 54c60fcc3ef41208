"""What the exact tier is good for: graphs on which each route goes below all heuristics.

    python benches/exact.py [INSTANCE.json.gz ...]

Prints a table of peaks in bytes: the lowest of all heuristic orders, the lowest after the planner's own search, the plan's where integer
programs gained something; the lower bound, how it was proved; the pool and the total of both plans; and the seconds of planning without and
with integer programs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import roam
from roam._core import compare_routes

FOLDER = Path(__file__).parent / "exact"


def main() -> None:
    """Print one row per instance."""
    print(
        f"{'graph':20} {'heuristics':>10} {'search':>8} {'programs':>8} {'bound':>8} {'proved by':>10} "
        f"{'pool':>8} {'programs':>8} {'total':>8} {'programs':>8} {'s':>6} {'s':>6}"
    )
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.json.gz")):
        graph = roam.Graph.load(path)
        routes = compare_routes(graph, programs=False)
        start = time.perf_counter()
        without = roam.optimize(graph, exact="off")
        middle = time.perf_counter()
        plan = roam.optimize(graph)
        end = time.perf_counter()
        roam.verify(graph, plan)
        heuristics, search = (routes["heuristics"], routes["search"]) if routes else (0, 0)
        programs = f"{plan.peak_bytes:,}" if plan.exact["gains"] else "-"
        print(
            f"{path.name.removesuffix('.json.gz'):20} {heuristics:10,} {min(search, without.peak_bytes):8,} {programs:>8} "
            f"{plan.lower_bound_bytes:8,} {plan.bound_route:>10} "
            f"{without.pool_bytes:8,} {plan.pool_bytes:8,} {without.total_bytes:8,} {plan.total_bytes:8,} {middle - start:6.1f} {end - middle:6.1f}"
        )


if __name__ == "__main__":
    main()
