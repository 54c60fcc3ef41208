"""What planning saves of the steps of the zoo: `roam bench suite`."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

import roam
from roam import zoo
from roam.report.table import format_bytes
from roam_bench.results import Record, Row, Task
from roam_bench.run import Benchmark, Column, Table, check_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = (1, 32)
OPTIMIZERS = ("adamw", "sgd")
_SMALL_SAVING = 5e-4
"""Savings below this are printed as what they are: none."""
_SMALL_GAP = 0.01
_UNSEEN_GAP = 5e-5


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """Every model of the zoo but those for tests, or those named."""
    check_named(arguments.only, zoo.names())
    # SGD without momentum has no state to make: its first step is as any other.
    optimizers = OPTIMIZERS if arguments.step == "steady" else OPTIMIZERS[:1]
    models = [
        name
        for name in zoo.names()
        if name in arguments.only or not (arguments.only or name.endswith("-tiny"))
    ]
    tasks = [
        Task(
            {"model": model, "batch": batch, "optimizer": optimizer, "reuse": reuse},
            partial(
                _measure,
                reuse,
                model,
                batch,
                optimizer,
                arguments.step,
                arguments.device,
                arguments.graphs,
            ),
        )
        for model, batch, optimizer, reuse in product(
            models, arguments.batch or BATCHES, optimizers, ("no", "yes")
        )
    ]
    settings = {
        "only": arguments.only,
        "batch": arguments.batch,
        "device": arguments.device,
        "step": arguments.step,
        "seq": zoo.catalog.DEFAULT_SEQ,
        "graphs": arguments.graphs is not None,
    }
    name = "suite" if arguments.step == "steady" else f"suite-{arguments.step}"
    return Benchmark(name, settings, tasks, _COLUMNS, summary=summary, plot=plot)


@functools.lru_cache(maxsize=1)
def _captured(
    model: str,
    batch: int,
    optimizer: str,
    step: Literal["first", "steady"],
    device: str,
    graphs: Path | None,
) -> tuple[roam.Graph, float]:
    start = time.perf_counter()
    graph = zoo.capture(model, batch=batch, optimizer=optimizer, step=step, device=device)
    capture_s = time.perf_counter() - start
    if graphs is not None:
        graphs.mkdir(parents=True, exist_ok=True)
        graph.save(graphs / f"{model}-{batch}-{step}-{optimizer}.json.gz")
    return graph, capture_s


def _measure(reuse: str, *captured: Any) -> Row:
    """One plan next to what PyTorch needs. Bytes without persistent tensors, except for
    ``persistent_bytes``.
    """
    graph, capture_s = _captured(*captured)
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
        return _share(saving(row, against, persistent=persistent))

    return text


def _share(saved: float) -> str:
    return "none" if abs(saved) < _SMALL_SAVING else f"{saved:.1%}"


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
        return lambda row: (
            f"{mean(saving(one, against, persistent=persistent) for one in row['rows']):.1%}"
        )

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
    columns.append(
        Column("largest gap", lambda row: f"{max(one['gap'] for one in row['rows']):.2%}")
    )
    return Table("Mean saving against", columns, rows)


def extremes_table(record: Record) -> Table:
    """Against each, the steps of which a plan saves the least and the most."""
    rows = []
    for title, against in _AGAINST:
        for reuse in ("no", "yes"):
            found = [
                (saving(row, against, persistent=False), row)
                for row in record["rows"]
                if row["reuse"] == reuse
            ]
            if found:
                least, most = (choose(found, key=lambda pair: pair[0]) for choose in (min, max))
                rows.append({"against": title, "reuse": reuse, "least": least, "most": most})

    def step(which: str) -> Callable[[Row], str]:
        return lambda row: "{model}/{batch}/{optimizer}".format(**row[which][1])

    def share(which: str) -> Callable[[Row], str]:
        return lambda row: _share(row[which][0])

    columns = (
        Column("step-local, against", lambda row: row["against"], right=False),
        Column("reuse", lambda row: row["reuse"], right=False),
        Column("saved least", step("least"), right=False),
        Column("share", share("least")),
        Column("saved most", step("most"), right=False),
        Column("share", share("most")),
    )
    return Table("Least and most", columns, rows)


def summary(record: Record) -> Iterator[Table | str]:
    """Means, where ordering saves nothing, and how near to the least the plans are."""
    yield means_table(record)
    yield extremes_table(record)
    yield nothing_saved(record)
    yield proved(record)
    yield gaps_table(record)


def proved(record: Record) -> str:
    """How near to the least the plans are."""
    rows = record["rows"]
    optimal = sum(row["gap"] == 0 for row in rows)
    within = sum(row["gap"] <= _SMALL_GAP for row in rows)
    return (
        f"{optimal} of {len(rows)} plans are proved to be optimal, and {within} to be within {_SMALL_GAP:.0%} of the least; the largest gap is "
        f"{max(row['gap'] for row in rows):.2%}. Fragmentation is at most {max(row['fragmentation'] for row in rows):.2%}."
    )


def gaps_table(record: Record) -> Table:
    """The plans with a gap that can be seen, the largest first."""
    seen = [row for row in record["rows"] if row["gap"] >= _UNSEEN_GAP]
    return Table("Gaps", [*_COLUMNS[:6], *_COLUMNS[-2:]], sorted(seen, key=lambda row: -row["gap"]))


def nothing_saved(record: Record) -> str:
    """The steps whose program order no order is better than, by model and batch."""
    rows = [row for row in record["rows"] if row["reuse"] == "no"]
    none = [
        row for row in rows if saving(row, "program_order_bytes", persistent=False) < _SMALL_SAVING
    ]
    optimal = sum(row["gap"] == 0 for row in none)
    batches: dict[str, dict[str, None]] = {}
    for row in none:
        batches.setdefault(row["model"], {})[str(row["batch"])] = None
    names = ", ".join(f"{model} ({' and '.join(found)})" for model, found in batches.items())
    return (
        f"Without reuse {len(none)} of {len(rows)} steps need as much as in program order, by model (batch): {names or 'none'}. For {optimal} of them "
        "that is proved to be the least."
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
            found = [
                (at, rows[model, reuse])
                for at, model in enumerate(models)
                if (model, reuse) in rows
            ]
            places = [at + (number - 1) * 0.27 for at, _ in found]
            axes.bar(
                places,
                [row[field] / row["program_order_bytes"] for _, row in found],
                0.27,
                label=name,
            )
        axes.axhline(1, color="grey", linewidth=0.6)
        axes.set_ylabel(f"batch {batch}:\nbytes / program order's")
    panels[0].legend(ncols=3, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    panels[-1].set_xticks(range(len(models)), models, rotation=40, ha="right")
