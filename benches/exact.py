"""What the exact tier is good for: graphs on which each route goes below all heuristics.

    python benches/exact.py [INSTANCE.json.gz ...]
    python benches/exact.py --random N

Prints a table of peaks in bytes: the lowest of all heuristic orders, the lowest after the planner's
own search, the plan's where integer programs gained something; the lower bound, how it was proved;
the pool and the total of both plans; and the seconds of planning without and with integer programs.
With ``--random``, instead: of how many random irregular graphs the searches leave a gap, and what
programs gain there.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from random import Random

import roam
from roam._core import compare_routes

FOLDER = Path(__file__).parent / "exact"


def irregular(seed: int) -> roam.Graph:
    """A random graph of 60 to 200 operators: each reads one to four of all tensors that exist."""
    random = Random(seed)
    operators, inputs, most_reads = (
        random.randrange(60, 201),
        random.randrange(20, 61),
        random.randrange(2, 5),
    )
    builder = roam.GraphBuilder(name=f"irregular-{seed}", alignment_bytes=64)
    size_bytes = lambda: 64 * random.randrange(1, 17)  # noqa: E731
    tensors = [
        builder.tensor("", size_bytes(), kind="input", residency="enters") for _ in range(inputs)
    ]
    unread = set(tensors)
    for _ in range(operators):
        reads = random.sample(tensors, random.randrange(1, most_reads + 1))
        unread.difference_update(reads)
        tensors.append(builder.tensor("", size_bytes()))
        unread.add(tensors[-1])
        builder.operator("", reads=reads, creates=tensors[-1:])
    builder.operator("", reads=sorted(unread), creates=[builder.tensor("", 64, residency="leaves")])
    return builder.build()


def sweep(graphs: int) -> None:
    """Print what became of so many random graphs."""
    found: Counter[str] = Counter()
    for seed in range(graphs):
        graph = irregular(seed)
        without = roam.optimize(graph, exact="off")
        if without.gap == 0:
            found["proved by the searches alone"] += 1
            continue
        plan = roam.optimize(graph)
        roam.verify(graph, plan)
        found["left with a gap by the searches"] += 1
        found["  of these: programs stated"] += plan.exact["programs"] > 0
        found["  a smaller total by programs"] += plan.total_bytes < without.total_bytes
        found["  a higher bound by programs"] += (
            plan.total_lower_bound_bytes > without.total_lower_bound_bytes
        )
    for what, count in found.items():
        print(f"{count:6} {what}")


def main() -> None:
    """Print one row per instance, or what became of random graphs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "instances",
        nargs="*",
        type=Path,
        metavar="INSTANCE",
        help="graph files (default those of benches/exact)",
    )
    parser.add_argument(
        "--random", type=int, metavar="N", help="plan N random irregular graphs instead"
    )
    arguments = parser.parse_args()
    if arguments.random:
        sweep(arguments.random)
    else:
        compare(arguments.instances or sorted(FOLDER.glob("*.json.gz")))


def compare(paths: list[Path]) -> None:
    """Print one row per instance."""
    print(
        f"{'graph':20} {'heuristics':>10} {'search':>8} {'programs':>8} {'bound':>8} {'proved by':>10} "
        f"{'pool':>8} {'programs':>8} {'total':>8} {'programs':>8} {'s':>6} {'s':>6}"
    )
    for path in paths:
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
