"""How near choices of strategies come to their bounds, on the problems of the contest on
intra-operator parallelism (IOPDDL, ASPLOS and EuroSys 2025; files at google/iopddl): `roam bench
iopddl`.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from roam._core import ShardingProblem
from roam_bench.results import BenchError, Record, Row, Task
from roam_bench.run import Benchmark, Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST_OF_TEAMS = {
    "asplos-2025-iopddl-A": 6548641531,
    "asplos-2025-iopddl-B": 532843,
    "asplos-2025-iopddl-G": 217039,
    "asplos-2025-iopddl-K": 2274276676,
    "asplos-2025-iopddl-P": 662197407330,
    "asplos-2025-iopddl-V": 1632051,
}
"""The least cost of all teams, from the contest's final results (google/iopddl). They had 8 cores
and 1 to 5 minutes for each problem.
"""

_COLUMNS = (
    Column("problem", lambda row: row["problem"], right=False),
    Column("nodes", lambda row: f"{row['nodes']:,}"),
    Column("left", lambda row: f"{row['nodes_left']:,}"),
    Column("cost", lambda row: "none found" if row["cost"] is None else f"{row['cost']:,}"),
    Column("bound", lambda row: "impossible" if row["bound"] is None else f"{row['bound']:,}"),
    Column("gap", lambda row: "" if row["gap"] is None else f"{row['gap']:.2%}"),
    Column("best of all teams", lambda row: "" if row["best"] is None else f"{row['best']:,}"),
    Column("above it", lambda row: "" if row["above"] is None else f"{row['above']:+.2%}"),
    Column("seconds", lambda row: f"{row['seconds']:.1f}"),
)


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """A row per file."""
    digests: dict[str, str] = {}
    for path in arguments.files:
        if path.name in digests:
            raise BenchError(f"{path}: another file has this name")
        digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    settings = {
        "work": arguments.work,
        "time_limit_s": arguments.time_limit,
        "problems": digests,
    }
    tasks = [
        Task({"file": path.name}, partial(_row, path, arguments.work, arguments.time_limit))
        for path in arguments.files
    ]
    return Benchmark("iopddl", settings, tasks, _COLUMNS, plot=plot)


def rows_table(record: Record) -> Table:
    """Every file."""
    return Table("Strategies", _COLUMNS, record["rows"])


def plot(record: Record, figure: Figure) -> None:
    """Each cost against its bound."""
    rows = [row for row in record["rows"] if row["gap"] is not None]
    figure.set_size_inches(3.6, 0.8 + 0.22 * len(rows))
    axes = figure.subplots()
    axes.barh([row["problem"] for row in rows], [1 + row["gap"] for row in rows])
    axes.axvline(1, color="grey", linewidth=0.6)
    axes.set_xlabel("cost / bound")
    axes.invert_yaxis()


def _row(path: Path, work: int, time_limit_s: float | None) -> Row:
    start = time.perf_counter()
    problem = ShardingProblem.read(path)
    read_s = time.perf_counter() - start
    left_s = None if time_limit_s is None else max(0.0, time_limit_s - read_s)
    found = problem.solve(work=work, time_limit_s=left_s)
    seconds = time.perf_counter() - start
    peak_bytes = None
    if found.choice is not None:
        cost, peak_bytes = problem.evaluate(found.choice)
        limit = problem.limit_bytes
        if cost != found.cost or (limit is not None and peak_bytes > limit):
            raise BenchError(
                f"{path}: the choice found has another cost than the search says, or breaks the limit; please report it"
            )
    best = BEST_OF_TEAMS.get(problem.name)
    return {
        "problem": problem.name,
        "nodes": problem.nodes,
        "edges": problem.edges,
        "nodes_left": found.nodes,
        "edges_left": found.edges,
        "limit_bytes": problem.limit_bytes,
        "peak_bytes": peak_bytes,
        "cost": found.cost,
        "bound": found.bound,
        "gap": _above(found.cost, found.bound),
        "best": best,
        "above": _above(found.cost, best),
        "passes": found.passes,
        "read_s": read_s,
        "seconds": seconds,
    }


def _above(cost: int | None, other: int | None) -> float | None:
    """By how much a cost is above another, as a share of that."""
    if cost is None or other is None or (other <= 0 and cost != other):
        return None
    return cost / other - 1 if other else 0.0
