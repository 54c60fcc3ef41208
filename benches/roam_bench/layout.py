"""How near packings of layout files are to their bounds: `roam bench layout`."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roam.errors import LayoutError
from roam.layout import Buffers, pack
from roam_bench.results import BenchError, Record, Row, Task
from roam_bench.run import Benchmark, Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = (
    Column("instance", lambda row: row["instance"], right=False),
    Column("buffers", lambda row: f"{row['buffers']:,}"),
    Column("bound", lambda row: f"{row['lower_bound_bytes']:,}"),
    Column("pool", lambda row: f"{row['pool_bytes']:,}"),
    Column("gap", lambda row: f"{100 * row['gap']:.3f} %"),
    Column("status", lambda row: row["status"], right=False),
    Column("method", lambda row: row["method"], right=False),
    Column("seconds", lambda row: f"{row['pack_s']:.2f}"),
)


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """A row per file. All of them are read before the first is packed."""
    instances: dict[str, Buffers] = {}
    for path in arguments.files:
        if path.name in instances:
            raise BenchError(f"{path}: another file has this name")
        instances[path.name] = Buffers.read_csv(path)
    if arguments.packed is not None:
        arguments.packed.mkdir(parents=True, exist_ok=True)
        for path in arguments.files:
            if (arguments.packed / path.name).resolve() == path.resolve():
                raise BenchError(f"{path}: its packing would overwrite it")
    settings = {
        "work": arguments.work,
        "time_limit_s": arguments.time_limit,
        "target_bytes": arguments.target,
        "instances": {name: buffers.digest for name, buffers in instances.items()},
        "packed": None if arguments.packed is None else str(arguments.packed),
    }
    limits = {
        "work": arguments.work,
        "time_limit_s": arguments.time_limit,
        "target_bytes": arguments.target,
    }
    tasks = [
        Task({"instance": name}, partial(_row, name, buffers, limits, arguments.packed))
        for name, buffers in instances.items()
    ]
    return Benchmark("layout", settings, tasks, _COLUMNS, plot=plot)


def rows_table(record: Record) -> Table:
    """Every file."""
    return Table("Layouts", _COLUMNS, record["rows"])


def plot(record: Record, figure: Figure) -> None:
    """Each pool against its bound."""
    rows = record["rows"]
    figure.set_size_inches(3.6, 0.8 + 0.22 * len(rows))
    axes = figure.subplots()
    axes.barh([row["instance"] for row in rows], [1 + row["gap"] for row in rows])
    axes.axvline(1, color="grey", linewidth=0.6)
    axes.set_xlabel("pool / bound")
    axes.invert_yaxis()


def _row(name: str, buffers: Buffers, limits: dict[str, Any], packed: Path | None) -> Row:
    start = time.perf_counter()
    try:
        packing = pack(buffers, **limits)
    except LayoutError as error:
        raise BenchError(f"{name}: {error}") from error
    pack_s = time.perf_counter() - start
    if packed is not None:
        buffers.write_csv(packed / name, packing)
    return {
        "buffers": len(buffers),
        "live_bytes": packing.live_bytes,
        "lower_bound_bytes": packing.lower_bound_bytes,
        "pool_bytes": packing.pool_bytes,
        "gap": packing.gap,
        "status": packing.status,
        "bound_route": packing.bound_route,
        "method": packing.method,
        "pack_s": pack_s,
        "digest": buffers.digest,
    }
