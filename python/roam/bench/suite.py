"""The zoo's steps as they really are: what planning saves, and what it cannot: `roam bench suite`."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import mean
from typing import TYPE_CHECKING

import roam
from roam import zoo
from roam.bench.results import Record, Row, Task
from roam.bench.run import Benchmark, Column, Table, check_named
from roam.report.table import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = (1, 32)
OPTIMIZERS = ("adamw", "sgd")
_SMALL_SAVING = 5e-4
"""Savings below this are printed as what they are: none."""


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """Every model of the zoo but those for tests, or those named."""
    check_named(arguments.only, zoo.names())
    models = [name for name in zoo.names() if name in arguments.only or not (arguments.only or name.endswith("-tiny"))]
    tasks = [
        Task(
            {"model": model, "batch": batch, "optimizer": optimizer, "reuse": reuse},
            partial(_measure, model, batch, optimizer, reuse, arguments.device),
        )
        for model, batch, optimizer, reuse in product(models, arguments.batch or BATCHES, OPTIMIZERS, ("no", "yes"))
    ]
    settings = {
        "only": arguments.only,
        "batch": arguments.batch,
        "device": arguments.device,
        "step": "steady",
        "seq": zoo.catalog.DEFAULT_SEQ,
    }
    return Benchmark("suite", settings, tasks, _COLUMNS, summary=summary, plot=plot)


@functools.lru_cache(maxsize=1)
def _captured(model: str, batch: int, optimizer: str, device: str) -> tuple[roam.Graph, float]:
    start = time.perf_counter()
    graph = zoo.capture(model, batch=batch, optimizer=optimizer, device=device)
    return graph, time.perf_counter() - start


def _measure(model: str, batch: int, optimizer: str, reuse: str, device: str) -> Row:
    """One plan next to what PyTorch needs. Bytes without persistent tensors, but for ``persistent_bytes``."""
    graph, capture_s = _captured(model, batch, optimizer, device)
    start = time.perf_counter()
    plan = roam.optimize(graph, reuse=reuse == "yes")
    plan_s = time.perf_counter() - start
    allocated = {
        layout: roam.baseline(graph, "program", layout, reuse=False).pool_bytes
        for layout in ("caching_allocator", "caching_allocator_expandable")
    }
    return {
        "operators": graph.num_operators,
        "graph": graph.digest,
        "persistent_bytes": plan.persistent_bytes,
        "step_local_bytes": plan.pool_bytes + plan.outside_bytes,
        "bound_bytes": plan.total_lower_bound_bytes - plan.persistent_bytes,
        "gap": plan.gap,
        "fragmentation": plan.fragmentation,
        "status": plan.status,
        "program_order_bytes": plan.program_order_peak_bytes,
        "caching_allocator_bytes": allocated["caching_allocator"],
        "caching_allocator_expandable_bytes": allocated["caching_allocator_expandable"],
        "capture_s": capture_s,
        "plan_s": plan_s,
    }


def saving(row: Row, against: str, *, persistent: bool = True) -> float:
    """By which share a plan needs less than ``against``, one of the row's numbers of bytes.

    Args:
        row: of the record.
        against: for example ``program_order_bytes``.
        persistent: whether parameters, buffers and optimizer state count on both sides.
    """
    always = row["persistent_bytes"] if persistent else 0
    other = always + row[against]
    return 1 - (always + row["step_local_bytes"]) / other if other else 0.0


def _saved(against: str, *, persistent: bool = True) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        share = saving(row, against, persistent=persistent)
        return "none" if abs(share) < _SMALL_SAVING else f"{share:.1%}"

    return text


_COLUMNS = (
    Column("model", lambda row: row["model"], right=False),
    Column("batch", lambda row: str(row["batch"])),
    Column("optimizer", lambda row: row["optimizer"], right=False),
    Column("reuse", lambda row: row["reuse"], right=False),
    Column("total", lambda row: format_bytes(row["persistent_bytes"] + row["step_local_bytes"])),
    Column("step-local", lambda row: format_bytes(row["step_local_bytes"])),
    Column("program order", lambda row: format_bytes(row["program_order_bytes"])),
    Column("saved of it", _saved("program_order_bytes", persistent=False)),
    Column("saved of all", _saved("program_order_bytes")),
    Column("caching allocator", lambda row: format_bytes(row["caching_allocator_bytes"])),
    Column("saved of it", _saved("caching_allocator_bytes", persistent=False)),
    Column("saved of all", _saved("caching_allocator_bytes")),
    Column("gap", lambda row: f"{row['gap']:.2%}"),
    Column("seconds", lambda row: f"{row['plan_s']:.2f}"),
)
_AGAINST = (
    ("program order", "program_order_bytes"),
    ("caching allocator", "caching_allocator_bytes"),
    ("expandable segments", "caching_allocator_expandable_bytes"),
)


def means_table(record: Record) -> Table:
    """Mean savings by batch, optimizer and reuse."""
    groups: dict[tuple[int, str, str], list[Row]] = {}
    for row in record["rows"]:
        groups.setdefault((row["batch"], row["optimizer"], row["reuse"]), []).append(row)
    rows: Sequence[Row] = [{"key": key, "rows": group} for key, group in sorted(groups.items())]

    def average(against: str, persistent: bool) -> Callable[[Row], str]:
        return lambda row: f"{mean(saving(one, against, persistent=persistent) for one in row['rows']):.1%}"

    columns = [
        Column("batch", lambda row: str(row["key"][0])),
        Column("optimizer", lambda row: row["key"][1], right=False),
        Column("reuse", lambda row: row["key"][2], right=False),
        Column("models", lambda row: str(len(row["rows"]))),
    ]
    for title, against in _AGAINST:
        columns.append(Column(f"{title}, step-local", average(against, persistent=False)))
        columns.append(Column(f"{title}, all", average(against, persistent=True)))
    columns.append(Column("gap 0", lambda row: str(sum(one["gap"] == 0 for one in row["rows"]))))
    columns.append(Column("largest gap", lambda row: f"{max(one['gap'] for one in row['rows']):.2%}"))
    return Table("Mean saving against", columns, rows)


def rows_table(record: Record) -> Table:
    """Every plan."""
    return Table("Every step", _COLUMNS, record["rows"])


def summary(record: Record) -> Iterator[Table | str]:
    """Means, and where ordering saves nothing."""
    yield means_table(record)
    yield nothing_saved(record)


def nothing_saved(record: Record) -> str:
    """The steps whose program order no order is better than, by name."""
    rows = [row for row in record["rows"] if row["reuse"] == "no"]
    none = [row for row in rows if saving(row, "program_order_bytes", persistent=False) < _SMALL_SAVING]
    optimal = sum(row["gap"] == 0 for row in none)
    names = ", ".join(f"{row['model']}/{row['batch']}/{row['optimizer']}" for row in none)
    return (
        f"Without reuse {len(none)} of {len(rows)} steps need as much as in program order; for {optimal} of them that is proved to be "
        f"the least: {names or 'none'}."
    )


def plot(record: Record, figure: Figure) -> None:
    """Step-local bytes of AdamW's steps against program order's, a panel per batch."""
    batches = sorted({row["batch"] for row in record["rows"]})
    models = list(dict.fromkeys(row["model"] for row in record["rows"]))
    figure.set_size_inches(7.2, 2.2 * len(batches) + 0.8)
    panels = figure.subplots(len(batches), 1, sharex=True, squeeze=False)[:, 0]
    for axes, batch in zip(panels, batches, strict=True):
        rows = {
            (row["model"], row["reuse"]): row
            for row in record["rows"]
            if (row["batch"], row["optimizer"]) == (batch, OPTIMIZERS[0])
        }
        series = (
            ("caching allocator", "caching_allocator_bytes", "no"),
            ("order", "step_local_bytes", "no"),
            ("order and reuse", "step_local_bytes", "yes"),
        )
        for number, (name, field, reuse) in enumerate(series):
            found = [(at, rows[model, reuse]) for at, model in enumerate(models) if (model, reuse) in rows]
            places = [at + (number - 1) * 0.27 for at, _ in found]
            axes.bar(places, [row[field] / row["program_order_bytes"] for _, row in found], 0.27, label=name)
        axes.axhline(1, color="grey", linewidth=0.6)
        axes.set_ylabel(f"batch {batch}:\nbytes / program order's")
    panels[0].legend(ncols=3, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    panels[-1].set_xticks(range(len(models)), models, rotation=40, ha="right")
