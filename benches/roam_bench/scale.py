"""How time and memory of planning grow with steps and layouts: `roam bench scale`."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

from roam.interrupts import interrupts_allowed, interrupts_wait
from roam_bench.results import BenchError, Record, Row, Task
from roam_bench.run import Benchmark, Column, Table, check_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAMILIES = ("deep", "wide", "branching", "parallel", "linked", "window")
STYLES = ("wide", "narrow", "skewed", "training", "replaced", "dissected")
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)


def _size(row: Row) -> int:
    size: int = row["operators"] if row["what"] == "step" else row["buffers"]
    return size


def _mib(row: Row) -> str:
    peak = row["peak_rss_bytes"]
    return "" if peak is None else f"{peak / 2**20:,.0f}"


_COLUMNS = (
    Column("what", lambda row: row["what"], right=False),
    Column("family", lambda row: row["family"], right=False),
    Column("size", lambda row: f"{_size(row):,}"),
    Column("build, s", lambda row: f"{row['build_s']:.2f}"),
    Column("plan, s", lambda row: f"{row['plan_s']:.2f}"),
    Column("processor s", lambda row: f"{row['plan_cpu_s']:.2f}"),
    Column("verify, s", lambda row: f"{row['verify_s']:.2f}"),
    Column("save, s", lambda row: f"{row['save_s']:.2f}"),
    Column("load, s", lambda row: f"{row['load_s']:.2f}"),
    Column("most MiB", _mib),
    Column("gap", lambda row: f"{100 * row['gap']:.4f} %"),
)


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """Made-up steps, then made-up layouts, each family from small to large."""
    offered = [
        (what, name)
        for what, names in (("step", FAMILIES), ("layout", STYLES))
        for name in names
        if arguments.what in (None, f"{what}s")
    ]
    check_named(arguments.only, (name for _, name in offered))
    chosen = [
        (what, name) for what, name in offered if not arguments.only or name in arguments.only
    ]
    sizes = [size for size in SIZES if size <= arguments.largest]
    settings = {
        "largest": arguments.largest,
        "what": arguments.what,
        "only": arguments.only,
        "work": arguments.work,
    }
    tasks = [
        Task(
            {"what": what, "family": name, "asked": size},
            partial(_measure, what, name, size, arguments.work),
        )
        for what, name in chosen
        for size in sizes
    ]
    return Benchmark("scale", settings, tasks, _COLUMNS, plot=plot)


def largest_table(record: Record) -> Table:
    """The largest size of each family, and by which power of the size CPU time grew from a
    tenth of it.
    """
    rows = record["rows"]
    largest = {(row["what"], row["family"]): row for row in rows}
    growth = Column("power", lambda row: _growth(row, rows))
    return Table("Largest sizes", [*_COLUMNS, growth], list(largest.values()))


def _growth(large: Row, rows: list[Row]) -> str:
    """Between a row and the one of its family that is a tenth of its size."""
    family = (
        row for row in rows if (row["what"], row["family"]) == (large["what"], large["family"])
    )
    tenth = next((row for row in family if row["asked"] * 10 == large["asked"]), None)
    if tenth is None:
        return ""
    return f"{math.log(large['plan_cpu_s'] / tenth['plan_cpu_s']) / math.log(_size(large) / _size(tenth)):.2f}"


def conditions(record: Record) -> str:
    """What the seconds depend on."""
    machine, loads = (
        record["machine"],
        [row["load"] for row in record["rows"] if row["load"] is not None],
    )
    text = f"{machine['processor']}, {machine['cores']} cores"
    return (
        f"{text}; load {min(loads):.1f} to {max(loads):.1f}, this benchmark included."
        if loads
        else f"{text}."
    )


def _measure(what: str, name: str, size: int, work: int) -> dict[str, Any]:
    """Figures of one plan or packing, from a process of its own."""
    numbers = [size] if what == "step" else [size, work]
    # Made here, because a process that is killed leaves its files behind.
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "roam_bench.scale_child",
            folder,
            what,
            name,
            *map(str, numbers),
        ]
        code, output, complaint = _run(command)
    if code:
        last = (complaint.strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"{what} {name} of {size}: exit code {code}: {last}")
    figures: dict[str, Any] = json.loads(output)
    return figures


def _run(command: list[str]) -> tuple[int, str, str]:
    """A process's exit code, output and complaints. Nothing is left of it where Ctrl-C ends this
    call.
    """
    with (
        interrupts_wait(),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            with interrupts_allowed():
                output, complaint = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process.returncode, output, complaint


def plot(record: Record, figure: Figure) -> None:
    """Seconds and memory against size, all axes logarithmic, with a straight line to compare
    with.
    """
    shown = [
        (what, title, count)
        for what, title, count in (("step", "steps", "operators"), ("layout", "layouts", "buffers"))
        if any(row["what"] == what for row in record["rows"])
    ]
    figure.set_size_inches(7, 3 * len(shown))
    grid = figure.subplots(len(shown), 2, squeeze=False)
    for (what, title, count), (time, memory) in zip(shown, grid, strict=True):
        rows = [row for row in record["rows"] if row["what"] == what]
        _lines(time, rows, count, "plan_s", 1)
        _lines(memory, rows, count, "peak_rss_bytes", 2**20)
        slowest = max(rows, key=lambda row: row["plan_s"])
        ends = [min(row[count] for row in rows), max(row[count] for row in rows)]
        linear = [slowest["plan_s"] * end / slowest[count] for end in ends]
        time.plot(ends, linear, color="grey", linestyle=":", label="linear")
        for axes, label in (
            (time, f"{title}, seconds"),
            (memory, f"{title}, most MiB of the process"),
        ):
            axes.set(xscale="log", yscale="log", xlabel=count, ylabel=label)
            axes.grid(visible=True, alpha=0.3)
        time.legend(fontsize="small")


def _lines(axes: Axes, rows: list[Row], count: str, value: str, unit: float) -> None:
    for family in dict.fromkeys(row["family"] for row in rows):
        points = [
            (row[count], row[value] / unit)
            for row in rows
            if row["family"] == family and row[value] is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=family)
