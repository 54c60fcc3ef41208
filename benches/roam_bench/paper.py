"""The published table of Shu et al. (arXiv 2310.19295), every figure next to ours: `roam bench
paper`.
"""

from __future__ import annotations

import argparse
import csv
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, mean
from typing import TYPE_CHECKING, Any

import roam
from roam_bench import accounting, paper_models
from roam_bench.results import Record, Row, Task
from roam_bench.run import Benchmark, Column, Table, check_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
_PUBLISHED = Path(__file__).with_name("published.csv")
_STATE_FIRST = ("gpt2-xl",)
"""Where the published program order makes all optimizer state before the first update, as eager
PyTorch does."""

OURS = "roam"
OURS_STREAMS = "roam, two streams"
SIMULATED = "program, caching_allocator"
_ORDERS = (
    "program",
    "lescea",
    "inductor_lpmf",
    "inductor_bfs",
    "inductor_dfs",
    "eager_updates",
    "memory_aware_updates",
)
_LAYOUTS = (
    "caching_allocator_expandable", "skyline", "executorch", "tvm_size", "tvm_conflicts", "tvm_hill_climb", "xla", "tree", "size",
)  # fmt: skip
_INDUCTOR = ("program", "inductor_lpmf", "inductor_bfs", "inductor_dfs")
"""Inductor estimates the peaks of these and takes the lowest."""
_WHOLE_PROGRAMS = ("alexnet", "vgg11")
"""Models of which the whole-graph integer programs can be stated at all; others have too many
columns."""

Figures = dict[str, Any]
Method = tuple[str, Callable[[roam.Graph], Figures]]


def published() -> list[Row]:
    """The published rows: bytes in MiB, with parameters; seconds on their machine. ``None`` where
    there is no figure.
    """
    with _PUBLISHED.open(newline="", encoding="utf-8") as file:
        rows = [dict(row) for row in csv.DictReader(file)]
    return [
        {
            name: value
            if name == "model"
            else int(value)
            if name == "batch"
            else float(value)
            if value
            else None
            for name, value in row.items()
        }
        for row in rows
    ]


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """All rows, or those of the models named, by all methods."""
    check_named(arguments.only, (row["model"] for row in published()))
    chosen = [row for row in published() if not arguments.only or row["model"] in arguments.only]
    seconds = arguments.whole_program
    tasks = [
        Task(
            {"model": row["model"], "batch": row["batch"], "method": name},
            partial(_measure, row, run),
        )
        for row in chosen
        for name, run in methods(row["model"], seconds)
    ]
    settings = {"accounting": accounting.PAPER, "only": arguments.only, "whole_program_s": seconds}
    return Benchmark("paper", settings, tasks, _COLUMNS, summary=summary, plot=plot)


def methods(model: str, whole_program_s: float = 0.0) -> Iterator[Method]:
    """What a row is planned by, by name."""
    yield OURS, _plan
    yield "our order, caching_allocator", _order_alone
    # The least memory that is not slower than one stream: the published figures are the least,
    # whatever the speed.
    yield OURS_STREAMS, partial(_plan, streams=2, stream_model="time_step", speed=1.0)
    for order in _ORDERS:
        yield _named(order, "caching_allocator")
    for layout in _LAYOUTS:
        yield _named("program", layout)
    yield _named("lescea", "skyline")
    yield "program, our layout", _layout_alone
    for node_limit in (25, 100, 400):
        yield _named("program", f"tree:{node_limit}")
    for order, layout in (
        ("eager_updates", "tree"),
        ("memory_aware_updates", "tree"),
        ("memory_aware_updates", "size"),
    ):
        yield _named(order, layout)
    yield "roam, no integer programs", partial(_plan, exact="off")
    if whole_program_s > 0 and model in _WHOLE_PROGRAMS:
        for solver in ("cbc", "highs"):
            yield (
                f"whole program, {solver}",
                partial(_whole_program, solver=solver, streams=1, seconds=whole_program_s),
            )
        streams = partial(_whole_program, solver="highs", streams=None, seconds=whole_program_s)
        yield "whole program, highs, streams", streams
        yield "whole program, highs, streams, early updates", partial(streams, early_updates=True)


def _named(order: str, layout: str) -> Method:
    return f"{order}, {layout}", partial(_baseline, order=order, layout=layout)


@functools.lru_cache(maxsize=1)
def paper_graph(model: str, batch: int) -> roam.Graph:
    """A published row's step under the paper's accounting."""
    captured = paper_models.capture(model, batch)
    return accounting.paper(captured, state_at_updates=model not in _STATE_FIRST)


def _measure(row: Row, run: Callable[[roam.Graph], Figures]) -> Figures:
    graph = paper_graph(row["model"], row["batch"])
    start = time.perf_counter()
    figures = run(graph)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "operators": graph.num_operators, "graph": graph.digest, **figures}


def _plan(graph: roam.Graph, **settings: Any) -> Figures:
    """By the planner. Bytes with parameters; ``seconds`` is planning with its verification."""
    plan, seconds = _planned(graph, **settings)
    return {
        "peak_bytes": graph.persistent_bytes + plan.peak_bytes,
        "total_bytes": plan.total_bytes,
        "bound_bytes": plan.total_lower_bound_bytes,
        "gap": plan.gap,
        "fragmentation": plan.fragmentation,
        "status": plan.status,
        "seconds": seconds,
    }


@functools.lru_cache(maxsize=1)
def _planned(graph: roam.Graph, **settings: Any) -> tuple[roam.Plan, float]:
    """A plan, and the seconds it took."""
    start = time.perf_counter()
    plan = roam.optimize(graph, reuse=False, **settings)
    return plan, time.perf_counter() - start


def _baseline(graph: roam.Graph, order: str, layout: str) -> Figures:
    found = roam.baseline(graph, order, layout, reuse=False)
    return _figures(graph, found.peak_bytes, found.pool_bytes, found.outside_bytes)


def _figures(graph: roam.Graph, peak_bytes: int, pool_bytes: int, outside_bytes: int) -> Figures:
    local = pool_bytes + outside_bytes
    return {
        "peak_bytes": graph.persistent_bytes + peak_bytes,
        "total_bytes": graph.persistent_bytes + local,
        "fragmentation": (local - peak_bytes) / local if local else 0.0,
    }


def _order_alone(graph: roam.Graph) -> Figures:
    """Our order with PyTorch's allocator: what early frees alone would give."""
    plan, plan_s = _planned(graph)
    start = time.perf_counter()
    figures = _baseline(
        accounting.in_order(graph, plan.order.tolist()), "program", "caching_allocator"
    )
    return {**figures, "seconds": plan_s + time.perf_counter() - start}


def _layout_alone(graph: roam.Graph) -> Figures:
    """Program order with our layout."""
    plan = roam.optimize(
        accounting.in_order(graph, graph.program_order.tolist(), fixed=True), reuse=False
    )
    return _figures(graph, plan.peak_bytes, plan.pool_bytes, plan.outside_bytes)


def _whole_program(
    graph: roam.Graph, solver: Any, streams: Any, seconds: float, *, early_updates: bool = False
) -> Figures:
    from roam_bench.whole_program import whole_program

    found = whole_program(graph, solver, seconds, streams=streams, early_updates=early_updates)
    spent: Figures = {
        "seconds": found.seconds,
        "status": found.status,
        "columns": found.ordering.columns,
    }
    if found.peak_bytes is None or found.pool_bytes is None or found.outside_bytes is None:
        return {"peak_bytes": None, "total_bytes": None, **spent}
    bound = graph.persistent_bytes + found.ordering.bound_bytes
    return {
        **_figures(graph, found.peak_bytes, found.pool_bytes, found.outside_bytes),
        "bound_bytes": bound,
        **spent,
    }


# Tables
# -------------------------------------------------------------------------------------------------


def _mib(size_bytes: float | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / MIB:,.2f}"


def _percent(share: float | None, digits: int = 2) -> str:
    return "" if share is None else f"{share:.{digits}%}"


_COLUMNS = (
    Column("model", lambda row: row["model"], right=False),
    Column("batch", lambda row: str(row["batch"])),
    Column("method", lambda row: row["method"], right=False),
    Column("peak MiB", lambda row: _mib(row["peak_bytes"])),
    Column("total MiB", lambda row: _mib(row["total_bytes"])),
    Column("fragmentation", lambda row: _percent(row.get("fragmentation"))),
    Column("gap", lambda row: _percent(row.get("gap"))),
    Column("seconds", lambda row: f"{row['seconds']:.2f}"),
)


def by_row(record: Record) -> list[Row]:
    """One row per published row: its figures, and under ``methods`` ours by name."""
    joined = []
    for theirs in published():
        ours = {
            row["method"]: row
            for row in record["rows"]
            if (row["model"], row["batch"]) == (theirs["model"], theirs["batch"])
        }
        if ours:
            joined.append({**theirs, "methods": {**ours, **_inductor(ours)}})
    return joined


def _inductor(methods: Mapping[str, Row]) -> dict[str, Row]:
    """What Inductor comes to as a whole, with the seconds of all its orders."""
    found = [
        methods[name] for order in _INDUCTOR if (name := f"{order}, caching_allocator") in methods
    ]
    if len(found) < len(_INDUCTOR):
        return {}
    best = min(found, key=lambda row: row["peak_bytes"])
    return {
        "inductor, caching_allocator": {**best, "seconds": sum(row["seconds"] for row in found)}
    }


def _of(method: str, name: str) -> Callable[[Row], Any]:
    return lambda row: row["methods"].get(method, {}).get(name)


def _theirs(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else f"{row[name]:,.2f}"


def _ours(method: str, name: str = "total_bytes") -> Callable[[Row], str]:
    return lambda row: _mib(_of(method, name)(row))


_ROW = (
    Column("model", lambda row: row["model"], right=False),
    Column("batch", lambda row: str(row["batch"])),
)


def published_table(record: Record) -> Table:
    """Plans: published and ours."""
    columns = (
        *_ROW,
        Column("program order, published", _theirs("pytorch_order_mib")),
        Column("ours", _ours(SIMULATED, "peak_bytes")),
        Column("one stream, published", _theirs("roam_ss_mib")),
        Column("ours", _ours(OURS)),
        Column("no plan below", _ours(OURS, "bound_bytes")),
        Column("gap", lambda row: _percent(_of(OURS, "gap")(row))),
        Column("fragmentation", lambda row: _percent(_of(OURS, "fragmentation")(row))),
        Column("seconds, published", _theirs("roam_ss_s")),
        Column("ours", lambda row: f"{_of(OURS, 'seconds')(row):.2f}"),
        Column("two streams, published", _theirs("roam_ms_mib")),
        Column("ours", _ours(OURS_STREAMS)),
    )
    return Table("MiB with parameters, the paper's accounting", columns, by_row(record))


def lescea_table(record: Record) -> Table:
    """The paper's heuristic baseline: published and ours."""
    columns = (
        *_ROW,
        Column("LESCEA peak, published", _theirs("lescea_order_mib")),
        Column("ours", _ours("lescea, skyline", "peak_bytes")),
        Column("LESCEA + LLFB, published", _theirs("lescea_llfb_mib")),
        Column("ours", _ours("lescea, skyline")),
        Column(
            "PyTorch's fragmentation, published", lambda row: _percent(row["pytorch_fragmentation"])
        ),
        Column("simulated", lambda row: _percent(_of(SIMULATED, "fragmentation")(row))),
    )
    return Table("Baselines of the paper, MiB with parameters", columns, by_row(record))


def methods_table(record: Record) -> Table:
    """Every method: how far above the plan it is, over all rows that it has."""

    def extreme(name: str) -> Callable[[Row], str]:
        return lambda row: f"{_name(row[name][0])} {row[name][1] - 1:+.1%}"

    columns = (
        Column("method", lambda row: row["method"], right=False),
        Column("rows", lambda row: str(len(row["ratios"]))),
        Column("above the plan, mean", lambda row: _percent(mean(row["ratios"]) - 1, 1)),
        Column("best", extreme("best"), right=False),
        Column("worst", extreme("worst"), right=False),
        Column("seconds in all", lambda row: f"{row['seconds']:.1f}"),
    )
    return Table(
        "Total bytes, parameters included, against the plan's", columns, _by_method(record)
    )


def extremes_table(record: Record) -> Table:
    """Every method's best and worst row: how much of what it takes beyond the plan is its order's,
    and how much its layout's.
    """

    def beyond(
        name: str, method: Callable[[Row], str], of: Callable[[Row, str], int]
    ) -> Callable[[Row], str]:
        return lambda row: _mib(of(row[name][0], method(row)) - of(row[name][0], OURS))

    def peak(row: Row, method: str) -> int:
        return int(row["methods"][method]["peak_bytes"])

    def unused(row: Row, method: str) -> int:
        return int(row["methods"][method]["total_bytes"]) - peak(row, method)

    def method(row: Row) -> str:
        return str(row["method"])

    columns = [Column("method", method, right=False)]
    for name in ("best", "worst"):
        columns += [
            Column(name, lambda row, name=name: _name(row[name][0]), right=False),  # type: ignore[misc]
            Column("by order", beyond(name, method, peak)),
            Column("by layout", beyond(name, method, unused)),
        ]
    rows = [
        row
        for row in _by_method(record)
        if row["worst"][1] > 1 and not row["method"].startswith("roam")
    ]
    return Table("MiB beyond the plan", tuple(columns), rows)


def _by_method(record: Record) -> list[Row]:
    """Per method its totals as quotients of the plan's, its best and its worst row with theirs, and
    its seconds.
    """
    joined = by_row(record)
    found = []
    for name in dict.fromkeys(name for row in joined for name in row["methods"]):
        total, ours = _of(name, "total_bytes"), _of(OURS, "total_bytes")
        pairs = [(row, total(row) / ours(row)) for row in joined if total(row) is not None]
        if pairs:
            best, worst = min(pairs, key=lambda pair: pair[1]), max(pairs, key=lambda pair: pair[1])
            seconds = sum(_of(name, "seconds")(row) for row, _ in pairs)
            ratios = [ratio for _, ratio in pairs]
            found.append(
                {"method": name, "ratios": ratios, "best": best, "worst": worst, "seconds": seconds}
            )
    return found


def _name(row: Row) -> str:
    return f"{row['model']}/{row['batch']}"


def abstract_table(record: Record) -> Table:
    """The abstract's four figures: as published, recomputed from the published rows, and from
    ours.
    """
    rows = [row for row in by_row(record) if row["roam_ms_mib"] is not None]
    if not rows:
        return Table("None of these rows counts in the abstract", (), [])
    solved = [
        row for row in rows if _of("whole program, highs, streams", "total_bytes")(row) is not None
    ]

    def saving(
        ours: Callable[[Row], float], others: Callable[[Row], float], over: Sequence[Row] = rows
    ) -> str:
        return f"{mean(1 - ours(row) / others(row) for row in over):.1%}" if over else ""

    def theirs(name: str) -> Callable[[Row], float]:
        return lambda row: row[name] * MIB

    ours, streams = _of(OURS, "total_bytes"), _of(OURS_STREAMS, "total_bytes")
    eager = lambda row: theirs("pytorch_order_mib")(row) / (1 - row["pytorch_fragmentation"])  # noqa: E731
    whole = "whole program, highs, streams"
    times = [row["model_ms_s"] / row["roam_ms_s"] for row in rows]
    our_times = [row["model_ms_s"] / _of(OURS_STREAMS, "seconds")(row) for row in rows]
    own_times = [_of(whole, "seconds")(row) / _of(OURS_STREAMS, "seconds")(row) for row in solved]
    figures = [
        ("saved of PyTorch's memory", "35.7%", saving(theirs("roam_ss_mib"), eager), saving(ours, eager), saving(ours, _of(SIMULATED, "total_bytes"))),
        ("saved of LESCEA + LLFB", "13.3%", saving(theirs("roam_ss_mib"), theirs("lescea_llfb_mib")), saving(ours, theirs("lescea_llfb_mib")), saving(ours, _of("lescea, skyline", "total_bytes"))),
        ("saved of MODeL, several streams", "27.2%", saving(theirs("roam_ms_mib"), theirs("model_ms_mib")), saving(streams, theirs("model_ms_mib")), saving(streams, _of(whole, "total_bytes"), solved)),
        ("planned faster than MODeL", "53.7x", f"{mean(times):.1f}x", f"{mean(our_times):,.0f}x", f"{mean(own_times):,.0f}x" if own_times else ""),
    ]  # fmt: skip
    keys = ("what", "abstract", "recomputed", "against_published", "against_ours")
    columns = (
        Column("figure", lambda row: row["what"], right=False),
        Column("abstract", lambda row: row["abstract"]),
        Column("their rows", lambda row: row["recomputed"]),
        Column("our plans, their baselines", lambda row: row["against_published"]),
        Column("our plans, our baselines", lambda row: row["against_ours"]),
    )
    titled = f"The abstract's figures, means over {len(rows)} rows (MODeL of ours: {len(solved)})"
    return Table(titled, columns, [dict(zip(keys, figure, strict=True)) for figure in figures])


def times_line(record: Record) -> str:
    """All planning time on one line."""
    rows = by_row(record)
    theirs = sum(row["roam_ss_s"] for row in rows)
    ours = [_of(OURS, "seconds")(row) for row in rows]
    speedup = geometric_mean(
        row["roam_ss_s"] / seconds for row, seconds in zip(rows, ours, strict=True)
    )
    met = sum(_of(OURS, "gap")(row) == 0 for row in rows)
    return (
        f"{len(rows)} rows planned in {sum(ours):.1f} s in all (published: {theirs:,.0f} s; geometric mean of the quotients {speedup:,.0f}); "
        f"the gap is 0 on {met} rows and at most {max(_of(OURS, 'gap')(row) for row in rows):.2%}"
    )


def summary(record: Record) -> Iterator[Table | str]:
    """What the paper's readers look for first."""
    yield published_table(record)
    yield times_line(record)
    yield lescea_table(record)
    yield methods_table(record)
    yield extremes_table(record)
    yield abstract_table(record)


def plot(record: Record, figure: Figure) -> None:
    """Bytes of each row against PyTorch's program order."""
    rows = by_row(record)
    series = {
        "published, one stream": [row["roam_ss_mib"] * MIB for row in rows],
        "roam": [_of(OURS, "total_bytes")(row) for row in rows],
        "LESCEA + LLFB": [_of("lescea, skyline", "total_bytes")(row) for row in rows],
        "program order, caching allocator": [_of(SIMULATED, "total_bytes")(row) for row in rows],
    }
    whole = [_of(SIMULATED, "peak_bytes")(row) for row in rows]
    figure.set_size_inches(7.2, 2.8)
    axes = figure.subplots()
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [at + (number - (len(series) - 1) / 2) * width for at in range(len(rows))]
        axes.bar(
            places,
            [value / one for value, one in zip(values, whole, strict=True)],
            width,
            label=name,
        )
    bounds = [_of(OURS, "bound_bytes")(row) / one for row, one in zip(rows, whole, strict=True)]
    axes.plot(range(len(rows)), bounds, "k_", markersize=12, label="no plan below")
    axes.axhline(1, color="grey", linewidth=0.6)
    axes.set_xticks(
        range(len(rows)),
        [f"{row['model']}/{row['batch']}" for row in rows],
        rotation=40,
        ha="right",
    )
    axes.set_ylabel("bytes / program order's")
    axes.legend(ncols=3, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
