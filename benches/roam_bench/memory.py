"""What a memory budget costs: `roam bench memory`.

Plans large steps of twelve networks within shares of their memory. Trains small steps of the same
networks on a CPU, measures their peaks and times, and compares bits, also for eager PyTorch,
`torch.utils.checkpoint` and the budget of `torch.compile`.

Memory is *step-local* everywhere: what a step allocates, without what exists before and after it
(parameters, buffers, optimizer state, the batch). Shares are of the step-local bytes of roam's plan
without recomputation.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import roam
from roam.errors import PlanError
from roam.memory_limit import MemoryLimit
from roam.program.bits import differ
from roam.report.table import format_bytes
from roam.runtime.memory_profiler import measure_peak, observed
from roam.runtime.planned import choose_with_tiles
from roam.runtime.pool import Pool
from roam.torch_compat.private import pytree
from roam_bench import memory_checkmate as checkmate
from roam_bench import memory_prototypes as prototypes
from roam_bench.memory_nets import LARGE, NETS, Net, build, capture, captured
from roam_bench.memory_others import OTHERS, Way, timed_share
from roam_bench.memory_pytorch import BUDGETS, Point, by_pytorch, by_roam
from roam_bench.results import Record, Row, Task
from roam_bench.run import Benchmark, Column, Table, across, check_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (0.75, 0.5, 0.35, 0.25, 0.15)
OFFLOAD_SHARES = (0.5, 0.25, 0.15)
TILED, TILED_SHARE = ("gpt2", "llama", "lstm"), 0.15
"""Large nets whose plans of whole operators need more than this share."""
_PUBLISHED = Path(__file__).with_name("published_memory.csv")
_NEAR_PERCENT = 2
"""Shares that differ by no more than this are compared."""
_STEPS = 5
_SEED = 1
_OUTCOMES = {"memory_floor": "refuted", "memory_limit_not_found": "not found"}
_FIELDS = (
    "outcome", "operators", "persistent_bytes", "plain_bytes", "limit_bytes", "planned_bytes",
    "floor_bytes", "extra_runs", "extra_share", "least_share", "plan_s", "measured_bytes", "is_equal",
    "timed_share", "extra_flops_share", "timed_operators", "modelled_operators", "offloaded_bytes",
    "loaded_bytes", "transfers_share", "reason",
)  # fmt: skip


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """Every net, or those named, in one part."""
    offered = LARGE if arguments.part == "large" else NETS
    check_named(arguments.only, (net.name for net in offered))
    only = arguments.only or (TILED if arguments.part == "tiles" else None)
    nets = [net for net in offered if not only or net.name in only]
    if arguments.part in ("pytorch", "checkmate"):
        nets = []
    settings = {"only": arguments.only, "pairs": arguments.pairs}
    return Benchmark(
        f"memory-{arguments.part}",
        settings,
        [
            *(task for net in nets for task in _tasks(arguments.part, net, arguments.pairs)),
            *(_pytorch_tasks(arguments.pairs) if arguments.part == "pytorch" else ()),
            *(_checkmate_tasks() if arguments.part == "checkmate" else ()),
        ],
        _COLUMNS,
        summary=summary,
        plot=plot if arguments.part == "planned" else None,
    )


def _tasks(part: str, net: Net, pairs: int) -> Iterator[Task]:
    ways: dict[tuple[str, float], Callable[[], Row]] = {}
    if part in ("planned", "large"):
        ways = {("roam", share): partial(plan, net, share) for share in SHARES}
    elif part == "tiles":
        ways = {
            ("roam", TILED_SHARE): partial(plan, net, TILED_SHARE),
            (_TILING, TILED_SHARE): partial(plan_with_tiles, net, TILED_SHARE),
        }
    elif part == "prototypes":
        ways = {
            (entry.prototype, entry.percent / 100): partial(plan_beside, net, entry.local_bytes)
            for entry in prototypes.ENTRIES
            if entry.net == net.name
        }
    elif part == "trained":
        ways = {("roam", share): partial(train, net, share, pairs) for share in SHARES}
    elif part == "offload":
        ways = {
            (way, share): partial(train, net, share, pairs, offloads=way == _OFFLOADING)
            for share in OFFLOAD_SHARES
            for way in ("roam", _OFFLOADING)
        }
    else:
        ways = {
            (way.name, way.share): partial(train_other, net, way, pairs)
            for way in OTHERS
            if way.applies(net)
        }
    for (name, share), work in ways.items():
        key: dict[str, str | int] = {
            "part": part,
            "net": net.name,
            "way": name,
            "percent": round(100 * share),
        }
        yield Task(key, partial(_row, work))


_OFFLOADING = "roam, offloading"
"""The way of plans that may store tensors in a file."""
_TILING = "roam, tiles"
"""The way of plans in which operators may run tile by tile."""
_FEWEST_OPERATIONS = "roam, fewest operations"
"""The way of plans that repeat few floating-point operations, where others take little time."""


def _pytorch_tasks(pairs: int) -> Iterator[Task]:
    for share in BUDGETS:
        for way in ("torch.compile", "roam", _FEWEST_OPERATIONS):
            key: dict[str, str | int] = {
                "part": "pytorch",
                "net": "llama",
                "way": way,
                "percent": round(100 * share),
            }
            yield Task(key, partial(_row, partial(meet, share, way, pairs)))


def _checkmate_tasks() -> Iterator[Task]:
    for name in checkmate.NAMES:
        for share in checkmate.SHARES:
            for way in (*checkmate.METHODS, "roam"):
                key: dict[str, str | int] = {
                    "part": "checkmate",
                    "net": name,
                    "way": way,
                    "percent": round(100 * share),
                }
                yield Task(key, partial(_row, partial(beside_checkmate, name, share, way)))


@cache
def _small_without_limit(name: str) -> tuple[roam.Graph, roam.Plan]:
    graph = checkmate.capture(name)
    return graph, roam.optimize(graph, exact="off")


def beside_checkmate(name: str, share: float, way: str) -> Row:
    """Plan a small step within a share, by a method of Checkmate or by roam."""
    graph, plain = _small_without_limit(name)
    start = time.process_time()
    if way == "roam":
        row = _planned(graph, plain, share)
        return row | {"plan_s": time.process_time() - start}
    limit_bytes = _limit(plain.persistent_bytes, plain.total_bytes, share)
    answer = checkmate.solve(graph, way, limit_bytes - plain.persistent_bytes)
    once_ns = int(graph.times_ns.sum())
    row = {
        "operators": graph.num_operators,
        "persistent_bytes": plain.persistent_bytes,
        "plain_bytes": plain.total_bytes,
        "limit_bytes": limit_bytes,
        "plan_s": time.process_time() - start,
        "least_share": None if answer.least_ns is None else answer.least_ns / once_ns,
    }
    if answer.solution is None:
        return row | {"outcome": "not found"}
    return row | {
        "planned_bytes": plain.persistent_bytes + answer.solution.live_bytes,
        "extra_runs": len(answer.solution.sequence) - graph.num_operators,
        "extra_share": answer.solution.extra_ns / once_ns,
    }


@cache
def _roam_without_limit() -> Point:
    return by_roam(None, 0)


def meet(share: float, way: str, pairs: int) -> Row:
    """The step of a small Llama with a budget of `torch.compile`, or by a plan within the memory
    that this takes.
    """
    plain, theirs = _roam_without_limit(), by_pytorch(share, pairs)
    row: Row = {"persistent_bytes": 0, "plain_bytes": plain.local_bytes}
    if way == "torch.compile":
        point = theirs
    else:
        row["limit_bytes"] = theirs.local_bytes
        try:
            is_fewest = way == _FEWEST_OPERATIONS
            point = by_roam(theirs.local_bytes, pairs, fewest_operations=is_fewest)
        except PlanError as error:
            if error.code not in _OUTCOMES:
                raise
            return row | {"outcome": _OUTCOMES[error.code], "reason": str(error)}
    return row | {
        "measured_bytes": point.local_bytes,
        "timed_share": point.timed_share,
        "extra_flops_share": point.flops / plain.flops - 1,
    }


def _row(work: Callable[[], Row]) -> Row:
    """A row with every field."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, about models without weights
        return dict.fromkeys(_FIELDS) | {"outcome": "found", "reason": ""} | work()


@cache
def _planned_without_limit(net: Net) -> tuple[roam.Graph, roam.Plan]:
    graph = capture(net)
    return graph, roam.optimize(graph, exact="off")


def plan(net: Net, share: float) -> Row:
    """Plan the large step within a share, by the cost model; nothing is allocated."""
    return _planned(*_planned_without_limit(net), share)


def plan_with_tiles(net: Net, share: float) -> Row:
    """The same with tiles, and with what kernels take: they are tried on this machine."""
    _, plain = _planned_without_limit(net)
    limit_bytes = _limit(plain.persistent_bytes, plain.total_bytes, share)
    row: Row = {
        "persistent_bytes": plain.persistent_bytes,
        "plain_bytes": plain.total_bytes,
        "limit_bytes": limit_bytes,
    }
    start = time.process_time()
    try:
        choice = choose_with_tiles(captured(net), MemoryLimit(size_bytes=limit_bytes))
    except PlanError as error:
        if error.code not in _OUTCOMES:
            raise
        # A proof is one of whole operators alone.
        row |= {"outcome": "not found", "reason": str(error)}
        return row | {"floor_bytes": error.tiles_floor_bytes, "plan_s": time.process_time() - start}
    again, cuts = choice.recomputation, choice.cuts
    extra_s = sum(one.extra_s for one in (again, cuts) if one is not None)
    of = cuts or again  # a step with tiles takes longer than the one that all is compared with
    return row | {
        "plan_s": time.process_time() - start,
        "planned_bytes": choice.total_bytes,
        "floor_bytes": None if again is None else again.floor_bytes,
        "extra_runs": 0 if again is None else again.runs,
        "extra_share": 0.0 if of is None else extra_s / of.step_s,
        "reason": "" if cuts is None else str(cuts),
    }


def plan_beside(net: Net, local_bytes: int) -> Row:
    """Plan the large step within the memory that a prototype took."""
    graph, plain = _planned_without_limit(net)
    return _planned_within(graph, plain, plain.persistent_bytes + local_bytes)


def _planned(graph: roam.Graph, plain: roam.Plan, share: float) -> Row:
    limit_bytes = _limit(plain.persistent_bytes, plain.total_bytes, share)
    return _planned_within(graph, plain, limit_bytes)


def _planned_within(graph: roam.Graph, plain: roam.Plan, limit_bytes: int) -> Row:
    row: Row = {
        "operators": graph.num_operators,
        "persistent_bytes": plain.persistent_bytes,
        "plain_bytes": plain.total_bytes,
        "limit_bytes": limit_bytes,
    }
    start = time.perf_counter()
    try:
        found = roam.optimize(graph, exact="off", memory_limit_bytes=limit_bytes)
    except PlanError as error:
        if error.code not in _OUTCOMES:
            raise
        row |= {"outcome": _OUTCOMES[error.code], "reason": str(error)}
        return row | {"plan_s": time.perf_counter() - start}
    row |= {"plan_s": time.perf_counter() - start, "planned_bytes": found.total_bytes}
    roam.verify(graph, found)
    return row | _recomputed(found.recomputation, graph.num_operators)


def _recomputed(again: dict[str, Any] | None, operators: int) -> Row:
    if again is None:
        return {"extra_runs": 0, "extra_share": 0.0, "least_share": 0.0}
    return {
        "floor_bytes": again["floor_bytes"],
        "extra_runs": len(again["sequence"]) - operators,
        "extra_share": again["extra_s"] / again["step_s"],
        "least_share": again["least_extra_s"] / again["step_s"],
    }


def _limit(persistent_bytes: int, total_bytes: int, share: float) -> int:
    return persistent_bytes + int((total_bytes - persistent_bytes) * share)


class _Trained:
    """A small net after `_STEPS` steps from a fixed start by one way of running."""

    def __init__(self, net: Net, way: Callable[[Any, torch.nn.Module], Callable[..., Any]]) -> None:
        made = build(net, small=True)
        self._model, self._optimizer = made.model, made.optimizer
        run = way(made.train_step, made.model)
        self.step = partial(run, made.model, made.optimizer, *made.batch)
        self.compiled = run
        torch.manual_seed(_SEED)
        losses = [self.step().detach().clone() for _ in range(_STEPS)]
        generator = torch.get_rng_state()
        self.bits = [*losses, generator, *(one.detach().clone() for one in self._state())]

    def _state(self) -> list[torch.Tensor]:
        """Parameters, buffers and optimizer state; by their sequence, since other ways rename."""
        leaves = pytree.tree_leaves(
            (
                list(self._model.parameters()),
                list(self._model.buffers()),
                self._optimizer.state_dict(),
            )
        )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def local_bytes(self) -> int:
        """The most that a step allocates at once beside what exists before it."""
        with observed():  # what a step keeps for the next one
            self.step()
        self._optimizer.zero_grad()
        return measure_peak(self.step).peak_bytes


def _eagerly(train_step: Callable[..., Any], model: torch.nn.Module) -> Callable[..., Any]:
    return train_step


def _by_plan(
    memory: int | None,
    offload: Path | None,
    train_step: Callable[..., Any],
    model: torch.nn.Module,
) -> Callable[..., Any]:
    return roam.compile(train_step, memory=memory, offload=offload)


@cache
def _eager(net: Net) -> _Trained:
    return _Trained(net, _eagerly)


@cache
def _plain(net: Net) -> _Trained:
    return _Trained(net, partial(_by_plan, None, None))


def train(net: Net, share: float, pairs: int, *, offloads: bool = False) -> Row:
    """Train the small net within a share: measured peak, bits of eager PyTorch, and time. Tensors
    may be offloaded to a file in the folder for temporary files.
    """
    Pool.of(torch.device("cpu")).release()
    plain = _plain(net)
    before = plain.compiled.memory()  # type: ignore[attr-defined]
    limit_bytes = _limit(before.persistent_bytes, before.total_bytes, share)
    row: Row = {
        "persistent_bytes": before.persistent_bytes,
        "plain_bytes": before.total_bytes,
        "limit_bytes": limit_bytes,
    }
    try:
        folder = Path(tempfile.gettempdir()) if offloads else None
        trained = _Trained(net, partial(_by_plan, limit_bytes, folder))
    except PlanError as error:
        if error.code not in _OUTCOMES:
            raise
        return row | {"outcome": _OUTCOMES[error.code], "reason": str(error)}
    step: Any = trained.compiled
    row["timed_share"] = timed_share(plain.step, trained.step, pairs) if pairs else None
    step.measured(*trained.step.args)
    memory = step.memory()
    return row | {
        "planned_bytes": memory.total_bytes,
        "floor_bytes": memory.floor_bytes,
        "extra_runs": memory.extra_runs,
        "extra_share": memory.extra_s / memory.step_s if memory.step_s else 0.0,
        "least_share": None
        if memory.least_extra_s is None
        else memory.least_extra_s / memory.step_s
        if memory.step_s
        else 0.0,
        "offloaded_bytes": memory.offloaded_bytes,
        "loaded_bytes": memory.loaded_bytes,
        "transfers_share": memory.transfers_s / memory.step_s if memory.step_s else 0.0,
        "plan_s": step.timings.plan.wall_s,
        "measured_bytes": memory.measured_bytes,
        "is_equal": not differ(trained.bits, _eager(net).bits),
        "timed_operators": memory.timed_operators,
        "modelled_operators": memory.modelled_operators,
    }


def train_other(net: Net, way: Way, pairs: int) -> Row:
    """Train the small net in another way than roam's: measured peak, bits, and time."""
    plain = _plain(net)
    before = plain.compiled.memory()  # type: ignore[attr-defined]
    with way.context():
        trained = _Trained(net, partial(way.run, net))
        local_bytes = trained.local_bytes()
        row: Row = {
            "persistent_bytes": before.persistent_bytes,
            "plain_bytes": before.total_bytes,
            "measured_bytes": before.persistent_bytes + local_bytes,
            "is_equal": not differ(trained.bits, _eager(net).bits),
        }
        if pairs and way.name != "eager":
            row["timed_share"] = timed_share(_eager(net).step, trained.step, pairs)
    return row


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else f"{row[name]:+.1%}"


def local_share(row: Row, name: str) -> float | None:
    """Step-local bytes of a row's field, as a share of those of the plan without recomputation."""
    if row[name] is None:
        return None
    local: float = (row[name] - row["persistent_bytes"]) / (
        row["plain_bytes"] - row["persistent_bytes"]
    )
    return local


def _local(name: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        share = local_share(row, name)
        return "" if share is None else f"{share:.1%}"

    return text


def _seconds(row: Row) -> str:
    return "" if row["plan_s"] is None else f"{row['plan_s']:.1f}"


def _bits(row: Row) -> str:
    return "" if row["is_equal"] is None else "equal" if row["is_equal"] else "different"


def _kept(row: Row) -> str:
    if row["measured_bytes"] is None or row["limit_bytes"] is None:
        return ""
    return "yes" if row["measured_bytes"] <= row["limit_bytes"] else "no"


_COLUMNS = (
    Column("part", lambda row: row["part"], right=False),
    Column("net", lambda row: row["net"], right=False),
    Column("way", lambda row: row["way"], right=False),
    Column("budget", lambda row: f"{row['percent']} %"),
    Column("outcome", lambda row: row["outcome"], right=False),
    Column("planned", _local("planned_bytes")),
    Column("extra time", _share("extra_share")),
    Column("at least", _share("least_share")),
    Column("planning, s", _seconds),
    Column("floor", _local("floor_bytes")),
    Column("measured", _local("measured_bytes")),
    Column("kept", _kept),
    Column("bits", _bits),
    Column("extra time, measured", _share("timed_share")),
    Column("reason", lambda row: row["reason"][:60], right=False),
)


def _without(*titles: str) -> list[Column]:
    return [column for column in _COLUMNS if column.title not in ("part", "reason", *titles)]


def _of_nets(record: Record) -> list[Row]:
    """Each net, with its rows by the percents of their budgets."""
    nets: dict[str, dict[int, Row]] = {}
    for row in record["rows"]:
        nets.setdefault(row["net"], {})[row["percent"]] = row
    return [{"net": net, "found": found} for net, found in nets.items()]


def _budgets(text: Callable[[Row], str]) -> Iterator[Column]:
    """A column for each budget: `text` of the row where a plan was found, and elsewhere the
    outcome.
    """

    def cell(percent: int, row: Row) -> str:
        one = row["found"].get(percent)
        if one is None:
            return ""
        return text(one) if one["outcome"] == "found" else str(one["outcome"])

    for share in SHARES:
        percent = round(100 * share)
        yield Column(f"{percent} %", partial(cell, percent))


def planned_table(record: Record) -> Table:
    """Extra time by plan of each large net, and the least that any plan within the budget has."""

    def one_of(row: Row) -> Row:
        first: Row = next(iter(row["found"].values()))
        return first

    columns = (
        Column("net", lambda row: row["net"], right=False),
        Column("operators", lambda row: f"{one_of(row)['operators']:,}"),
        Column(
            "step-local",
            lambda row: format_bytes(one_of(row)["plain_bytes"] - one_of(row)["persistent_bytes"]),
        ),
        *_budgets(lambda one: f"{one['extra_share']:+.1%} ({one['least_share']:.1%})"),
        Column(
            "longest planning, s",
            lambda row: f"{max(one['plan_s'] or 0 for one in row['found'].values()):.1f}",
        ),
    )
    return Table("Plans of large steps: extra time (least extra time)", columns, _of_nets(record))


def trained_shares(record: Record) -> Table:
    """Small nets that train within budgets: extra time by plan, and as measured."""
    columns = (
        Column("net", lambda row: row["net"], right=False),
        *_budgets(lambda one: f"{one['extra_share']:+.1%}, {one['timed_share']:+.1%}"),
    )
    return Table("Small nets, trained: extra time by plan, measured", columns, _of_nets(record))


def published_table(record: Record) -> Table:
    """What others have published, beside the plan of the largest budget that is no larger a share.

    Their shares are of all memory on their GPUs, and their times are measured there.
    """
    with _PUBLISHED.open(encoding="utf-8", newline="") as file:
        published = list(csv.DictReader(file))
    rows: list[Row] = []
    for one in published:
        ours = [
            row
            for row in record["rows"]
            if row["net"] == one["net"] and row["percent"] <= int(one["percent"]) + _NEAR_PERCENT
        ]
        if ours:
            rows.append({**one, "ours": max(ours, key=lambda row: row["percent"])})

    def of_ours(row: Row) -> str:
        ours = row["ours"]
        return (
            str(ours["outcome"]) if ours["extra_share"] is None else f"{ours['extra_share']:+.1%}"
        )

    columns = (
        Column("system", lambda row: row["system"], right=False),
        Column("net", lambda row: row["their_net"], right=False),
        Column("memory", lambda row: f"{row['percent']} %"),
        Column("extra time", lambda row: f"{float(row['extra_time_percent']):+.1f}%"),
        Column("roam's net", lambda row: row["net"], right=False),
        Column("budget", lambda row: f"{row['ours']['percent']} %"),
        Column("extra time by plan", of_ours),
    )
    return Table("Published figures", columns, rows)


def trained_table(record: Record) -> Table:
    """Small nets that train within budgets."""
    return Table("Small nets, trained", _without("way"), record["rows"])


def others_table(record: Record) -> Table:
    """The same nets in other ways."""
    return Table(
        "Small nets, other ways",
        _without(
            "budget", "outcome", "planned", "extra time", "at least", "planning, s", "floor", "kept"
        ),
        [row for row in record["rows"] if row["outcome"] == "found"],
    )


def nets_and_ways(record: Record) -> Table:
    """The same, a line for each net: memory, extra time, and "≠" where bits differ."""

    def cell(row: Row) -> str:
        kept = (row["measured_bytes"] - row["persistent_bytes"]) / (
            row["plain_bytes"] - row["persistent_bytes"]
        )
        took = "" if row["timed_share"] is None else f", {row['timed_share']:+.1%}"
        return f"{kept:.1%}{took}{'' if row['is_equal'] else ' ≠'}"

    whole = others_table(record)
    return across(
        whole.title,
        whole.rows,
        {"net": lambda row: row["net"]},
        lambda row: str(row["way"]),
        cell,
    )


def prototypes_table(record: Record) -> Table:
    """What two prototypes took, beside roam's plan within the same bytes."""

    def local_bytes(row: Row) -> int:
        local: int = row["limit_bytes"] - row["persistent_bytes"]
        return local

    def percent(value: float | None) -> str:
        return "not found" if value is None else f"{value:+.1f}%"

    def theirs(row: Row) -> str:
        entry = next(
            entry
            for entry in prototypes.ENTRIES
            if (entry.prototype, entry.net, entry.percent)
            == (row["way"], row["net"], row["percent"])
        )
        return percent(entry.extra_percent)

    columns = (
        Column("net", lambda row: row["net"], right=False),
        Column("prototype", lambda row: row["way"], right=False),
        Column("share", lambda row: f"{row['percent']} %"),
        Column("step-local", lambda row: format_bytes(local_bytes(row))),
        Column("its extra time", theirs),
        Column(
            "the better prototype",
            lambda row: percent(prototypes.best_percent(row["net"], local_bytes(row))),
        ),
        Column(
            "roam",
            lambda row: (
                str(row["outcome"]) if row["outcome"] != "found" else _share("extra_share")(row)
            ),
        ),
        Column("at least", _share("least_share")),
    )
    return Table("Two prototypes", columns, record["rows"])


def pytorch_table(record: Record) -> Table:
    """Budgets of `torch.compile`, each with roam's plan within the same memory."""
    columns = (
        Column("budget of torch.compile", lambda row: f"{row['percent'] / 100:g}"),
        Column("way", lambda row: row["way"], right=False),
        Column("outcome", lambda row: row["outcome"], right=False),
        Column(
            "measured",
            lambda row: (
                "" if row["measured_bytes"] is None else format_bytes(row["measured_bytes"])
            ),
        ),
        Column("extra floating-point operations", _share("extra_flops_share")),
        Column("time beside eager PyTorch", _share("timed_share")),
    )
    return Table("A small Llama, forward and backward pass", columns, record["rows"])


def offload_table(record: Record) -> Table:
    """Budgets met by recomputation alone, and with tensors in a file."""
    columns = {column.title: column for column in _COLUMNS}
    titles = ("net", "way", "budget", "outcome", "planned", "extra time")
    last = ("measured", "kept", "bits", "extra time, measured", "planning, s")
    offloaded = Column(
        "offloaded",
        lambda row: format_bytes(row["offloaded_bytes"]) if row["offloaded_bytes"] else "",
    )
    return Table(
        "Small steps that train within a budget, with and without offloading",
        [
            *(columns[title] for title in titles),
            Column("of it, transfers", _share("transfers_share")),
            offloaded,
            *(columns[title] for title in last),
        ],
        record["rows"],
    )


def offload_ways(record: Record) -> Table:
    """The same, a line for each budget: planned and measured extra time, and what is offloaded."""

    def cell(row: Row) -> str:
        if row["outcome"] != "found":
            return str(row["outcome"])
        moved = f", {format_bytes(row['offloaded_bytes'])}" if row["offloaded_bytes"] else ""
        return f"{row['extra_share']:+.1%}, {row['timed_share']:+.1%}{moved}"

    return across(
        offload_table(record).title,
        record["rows"],
        {"net": lambda row: row["net"], "budget": lambda row: f"{row['percent']} %"},
        lambda row: str(row["way"]),
        cell,
    )


def tiles_ways(record: Record) -> Table:
    """Plans of whole operators, and plans with tiles, a line for each net."""

    def cell(row: Row) -> str:
        if row["outcome"] != "found":
            return str(row["outcome"])
        return f"{row['extra_share']:+.1%}"

    return across(
        "Plans of large steps, with and without tiles: extra time",
        record["rows"],
        {"net": lambda row: row["net"], "budget": lambda row: f"{row['percent']} %"},
        lambda row: {"roam": "whole operators", _TILING: "tiles too"}[row["way"]],
        cell,
    )


def checkmate_table(record: Record) -> Table:
    """Checkmate's methods and roam's plan within equal bytes."""
    columns = (
        "net",
        "way",
        "budget",
        "outcome",
        "planned",
        "extra time",
        "at least",
        "planning, s",
    )
    return Table(
        "Small steps, by Checkmate's methods and by roam",
        [column for column in _COLUMNS if column.title in columns],
        record["rows"],
    )


def totals_line(record: Record) -> str:
    """What came of all rows."""
    rows = record["rows"]
    counts = Counter(row["outcome"] for row in rows)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    trained = [
        row for row in rows if row["outcome"] == "found" and row["measured_bytes"] is not None
    ]
    if not trained:
        return f"{len(rows)} budgets: {told}"
    kept = sum(row["measured_bytes"] <= row["limit_bytes"] for row in trained)
    equal = sum(bool(row["is_equal"]) for row in trained)
    return (
        f"{len(rows)} budgets: {told}; the measured peak is within the budget in {kept} of "
        f"{len(trained)}, the bits are eager PyTorch's in {equal}"
    )


def summary(record: Record) -> Iterator[Table | str]:
    """The part that was run, and what came of it."""
    part = record["rows"][0]["part"]
    tables = {
        "planned": planned_table,
        "large": planned_table,
        "trained": trained_table,
        "tiles": tiles_ways,
        "offload": offload_table,
        "others": others_table,
        "pytorch": pytorch_table,
        "prototypes": prototypes_table,
        "checkmate": checkmate_table,
    }
    yield tables[part](record)
    if part == "planned":
        yield published_table(record)
    if part in ("planned", "large", "tiles", "trained", "offload"):
        yield totals_line(record)


def plot(record: Record, figure: Figure) -> None:
    """Extra time by plan over the budget, a line for each large net."""
    figure.set_size_inches(7.2, 3.2)
    axes = figure.subplots()
    rows = record["rows"]
    for net in dict.fromkeys(row["net"] for row in rows):
        found = [row for row in rows if row["net"] == net and row["extra_share"] is not None]
        points = [(100.0, 0.0), *((row["percent"], 100 * row["extra_share"]) for row in found)]
        axes.plot(*zip(*points, strict=True), marker=".", linewidth=0.8, label=net)
    axes.set_xlabel("budget, % of the step-local bytes without recomputation")
    axes.set_ylabel("extra time by plan, %")
    axes.invert_xaxis()
    axes.legend(ncols=3, frameon=False)
