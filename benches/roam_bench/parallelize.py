"""Whether shardings are cheaper than those that experts wrote, on architectures of transformers
whose configurations carry a tensor-parallel plan: `roam bench parallelize`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import roam
from roam.errors import RoamError
from roam.sharding.planning import WORK, Planning
from roam.sharding.search import Allowed, Problem
from roam_bench import parallelize_baselines, parallelize_trained
from roam_bench.outcomes import outcomes_line
from roam_bench.parallelize_baselines import megatron_plan
from roam_bench.results import Record, Row, Task
from roam_bench.run import Benchmark, Column, Table, check_named
from roam_bench.shipped import allowed_by, left_out, shipped_plan, whole
from roam_bench.whole_program.linear import Solver

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BATCH, _TOKENS = 4, 512
_DEPTHS, _DEEP, _DEEP_MESH = (12, 24, 48, 96), "llama", (8,)
"""How many layers the model has with which planning is timed, and on which mesh."""
_PROGRAMS = (
    ("llama", 2), ("llama", 12), ("llama", 48), ("gemma2", 4), ("glm4", 4), ("mixtral", 4),
    ("qwen3_moe", 4), ("deepseek_v3", 4),
)  # fmt: skip
"""Architectures and layers of which the choice is an integer program too."""
_FIGURES = (
    "ns", "bound_ns", "gap", "is_sharded", "shipped_ns", "shipped", "left_out", "megatron_ns",
    "megatron", "whole_ns", "nodes", "folded_nodes", "retries", "trace_s", "rules_s", "search_s", "check_s",
)  # fmt: skip


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """Every architecture with a plan, or those named, on each mesh; or nets that are trained."""
    if arguments.trained:
        check_named(arguments.only, parallelize_trained.NETS)
        return Benchmark(
            "parallelize-trained",
            {"only": arguments.only},
            parallelize_trained.tasks(arguments.only),
            parallelize_trained.COLUMNS,
        )
    if arguments.programs:
        check_named(arguments.only, [kind for kind, _ in _PROGRAMS])
        return Benchmark(
            "parallelize-programs",
            {"only": arguments.only, "batch": _BATCH, "tokens": _TOKENS},
            [
                Task(
                    {"architecture": kind, "layers": layers, "solver": solver},
                    partial(_measure_program, kind, layers, solver),
                )
                for kind, layers in _PROGRAMS
                if kind in (arguments.only or [kind])
                for solver in parallelize_baselines.SOLVERS
            ],
            parallelize_baselines.COLUMNS,
        )
    if arguments.depths:
        return Benchmark(
            "parallelize-depths",
            {"batch": _BATCH, "tokens": _TOKENS},
            _tasks((_DEEP, _DEEP_MESH, depth) for depth in _DEPTHS),
            _COLUMNS,
            summary=lambda record: [depths_table(record)],
            plot=plot,
        )
    offered = list(kinds())
    check_named(arguments.only, offered)
    meshes = [*(arguments.mesh or ((2,), (4,), (8,), (2, 4)))]
    named = [kind for kind in offered if not arguments.only or kind in arguments.only]
    tasks = _tasks((kind, mesh, arguments.layers) for kind in named for mesh in meshes)
    settings = {
        "only": arguments.only, "mesh": [list(mesh) for mesh in arguments.mesh],
        "layers": arguments.layers, "batch": _BATCH, "tokens": _TOKENS,
    }  # fmt: skip
    return Benchmark("parallelize", settings, tasks, _COLUMNS, summary=summary)


def _tasks(cases: Iterable[tuple[str, tuple[int, ...], int]]) -> list[Task]:
    """Of architectures on meshes, with so many layers."""
    return [
        Task(
            {"architecture": kind, "mesh": _text(mesh), "layers": layers},
            partial(measure, kind, mesh, layers),
        )
        for kind, mesh, layers in cases
    ]


def _text(mesh: Sequence[int]) -> str:
    return "x".join(map(str, mesh))


def kinds() -> Iterator[str]:
    """Causal language models of transformers with a tensor-parallel plan, by name."""
    transformers: Any = importlib.import_module("transformers")
    known: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    transformers.logging.set_verbosity_error()
    for kind in sorted(known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = transformers.AutoConfig.for_model(kind)
            plan = getattr(config.get_text_config(), "base_model_tp_plan", None)
        except Exception:  # noqa: BLE001 - configurations without a default
            continue
        if plan:
            yield kind


def train_step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Train once on tokens [batch, length]; returns the mean cross-entropy."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss


@functools.lru_cache(maxsize=1)
def _made(kind: str, layers: int) -> tuple[Any, torch.optim.Optimizer, torch.Tensor]:
    """A model of its published width, with fewer layers."""
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.for_model(kind, num_hidden_layers=layers)
    except Exception:  # noqa: BLE001 - the number of layers is not free
        config = transformers.AutoConfig.for_model(kind)
    text = config.get_text_config()
    config.use_cache = text.use_cache = False
    with roam.fake():
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        tokens = torch.randint(3, text.vocab_size, (_BATCH, _TOKENS))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False), tokens


def measure(kind: str, mesh: tuple[int, ...], layers: int) -> Row:
    """Find a sharding of one architecture, and what its own plan and Megatron's cost by the same
    cost model.

    All ranks share the parts of one replica; on a mesh of two dimensions those along the second.
    Along the first there are replicas then, with the same choices for both plans.

    Returns:
        ``outcome``, with the ``reason``; where it is ``found`` ``ns`` and ``bound_ns`` of the step,
        ``gap``, ``is_sharded`` (over replicas), ``shipped_ns`` (of the best choice that the plan of
        transformers allows, None if it allows none), ``shipped`` (``shipped_ns`` / ``ns``),
        ``left_out`` (styles of that plan that have no like in PyTorch, whose modules are whole),
        ``megatron_ns`` and ``megatron`` (the same of Megatron's plan, of which no style is left
        out), ``whole_ns`` (where every rank of a replica does all), ``nodes``, ``folded_nodes``,
        ``retries`` (choices that did not run on a rank), and seconds: ``trace_s``, ``rules_s``,
        ``check_s``, and ``search_s``, the CPU time of one search with its bound for each
        division of the ranks.
    """
    row: Row = dict.fromkeys(_FIGURES)
    data = mesh[0] if len(mesh) > 1 else 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' own, about models without weights
            model, optimizer, tokens = _made(kind, layers)
            planning = Planning(train_step, model, optimizer, (tokens,), mesh=mesh, data=data)
            found = planning.find()
    except RoamError as error:
        return {"outcome": "refused", "reason": f"{error.code}: {error}"[:300], **row}
    except Exception as error:  # noqa: BLE001 - one model's failure is a row, and the others go on
        return {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"[:300], **row}
    if found is None:
        return {"outcome": "refused", "reason": "no choice", **row}
    seconds = dataclasses.replace(planning.seconds)
    candidates = planning.candidates()  # with what is known now of what runs
    ns, bound_ns = found.chosen.ns, min(one.bound_ns for one in candidates)

    def cost(allowed: Allowed) -> int | None:
        costs = [
            choice.ns + one.launched_ns
            for one in candidates
            if (choice := Problem(one.nodes, allowed=allowed).search(WORK))
        ]
        return min(costs, default=None)

    problems = [Problem(one.nodes) for one in candidates]
    start = time.process_time()
    for problem in problems:
        problem.search(WORK)
    search_s = time.process_time() - start
    plan = shipped_plan(model)
    shipped_ns = cost(allowed_by(model, plan))
    by_rule = megatron_plan(found.trace, model)
    megatron_ns = cost(allowed_by(model, by_rule)) if by_rule else None
    return {
        "outcome": "found",
        "reason": "",
        "ns": ns,
        "bound_ns": bound_ns,
        "gap": ns / bound_ns - 1,
        "is_sharded": found.division.is_sharded,
        "shipped_ns": shipped_ns,
        "shipped": None if shipped_ns is None else shipped_ns / ns,
        "left_out": " ".join(left_out(plan)),
        "megatron_ns": megatron_ns,
        "megatron": None if megatron_ns is None else megatron_ns / ns,
        "whole_ns": cost(whole),
        "nodes": found.chosen.nodes,
        "folded_nodes": found.chosen.folded_nodes,
        "retries": len(found.differences),
        "trace_s": seconds.trace,
        "rules_s": seconds.rules,
        "search_s": search_s,
        "check_s": seconds.check,
    }


def _measure_program(kind: str, layers: int, solver: Solver) -> Row:
    """A choice for one architecture by the search and by an integer program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, tokens = _made(kind, layers)
        planning = Planning(train_step, model, optimizer, (tokens,), mesh=_DEEP_MESH, data=1)
        (one,) = planning.candidates()
    return parallelize_baselines.measure(one.nodes, solver)


_COLUMNS = (
    Column("architecture", lambda row: row["architecture"], right=False),
    Column("mesh", lambda row: row["mesh"]),
    Column("layers", lambda row: str(row["layers"])),
    Column("outcome", lambda row: row["outcome"], right=False),
    Column("ms", lambda row: "" if row["ns"] is None else f"{row['ns'] / 1e6:,.1f}"),
    Column("gap", lambda row: "" if row["gap"] is None else f"{row['gap']:.2%}"),
    Column("shipped", lambda row: _ratio(row["shipped"])),
    Column("Megatron", lambda row: _ratio(row["megatron"])),
    Column("whole", lambda row: "" if row["ns"] is None else f"{row['whole_ns'] / row['ns']:.2f}"),
    Column("nodes", lambda row: "" if row["nodes"] is None else f"{row['nodes']:,}"),
    Column("search s", lambda row: "" if row["search_s"] is None else f"{row['search_s']:.3f}"),
    Column("left out", lambda row: row["left_out"] or "", right=False),
    Column("reason", lambda row: row["reason"], right=False),
)


def summary(record: Record) -> list[Table | str]:
    """A row per mesh."""
    return [
        meshes_table(record),
        megatron_table(record),
        outcomes_line(record, "architectures and meshes"),
    ]


def meshes_table(record: Record) -> Table:
    """How many shardings are proved, and how they compare with the plans of transformers."""
    rows: list[Row] = []
    for mesh in dict.fromkeys(row["mesh"] for row in record["rows"]):
        of_mesh = [row for row in record["rows"] if row["mesh"] == mesh]
        found = [row for row in of_mesh if row["outcome"] == "found"]
        compared = [row for row in found if row["shipped"] is not None]
        if found:
            times = sorted(row["search_s"] for row in found)
            rows.append(
                {
                    "mesh": mesh,
                    "tried": len(of_mesh),
                    "found": len(found),
                    "optimal": sum(row["gap"] == 0 for row in found),
                    "in full": sum(not row["left_out"] for row in compared),
                    **_compared([row["shipped"] for row in compared]),
                    "search": times[len(times) // 2],
                    "longest": times[-1],
                }
            )
    columns = (
        Column("mesh", lambda row: row["mesh"]),
        Column("tried", lambda row: str(row["tried"])),
        Column("found", lambda row: str(row["found"])),
        Column("proved cheapest", lambda row: str(row["optimal"])),
        Column("compared", lambda row: str(row["compared"])),
        Column("of these with all styles", lambda row: str(row["in full"])),
        *_compared_columns("shipped"),
        Column("search, median, s", lambda row: f"{row['search']:.3f}"),
        Column("longest", lambda row: f"{row['longest']:.2f}"),
    )
    return Table("Shardings", columns, rows)


def megatron_table(record: Record) -> Table:
    """How they compare with Megatron's plan."""
    rows: list[Row] = []
    for mesh in dict.fromkeys(row["mesh"] for row in record["rows"]):
        compared = [
            row for row in record["rows"] if row["mesh"] == mesh and row["megatron"] is not None
        ]
        if compared:
            both = [row for row in compared if row["shipped"] is not None]
            rows.append(
                {
                    "mesh": mesh,
                    **_compared([row["megatron"] for row in compared]),
                    "both": len(both),
                    "as shipped": sum(row["megatron_ns"] == row["shipped_ns"] for row in both),
                }
            )
    columns = (
        Column("mesh", lambda row: row["mesh"]),
        Column("compared", lambda row: str(row["compared"])),
        *_compared_columns("Megatron's"),
        Column("with a shipped plan too", lambda row: str(row["both"])),
        Column("of these as dear as shipped", lambda row: str(row["as shipped"])),
    )
    return Table("Beside Megatron's plan", columns, rows)


def _compared(ratios: list[float]) -> Row:
    """Of costs of another plan, each as a multiple of that of the sharding that was found."""
    ratios = sorted(ratios)
    return {
        "compared": len(ratios),
        "no dearer": sum(ratio >= 1 for ratio in ratios),
        "median": ratios[len(ratios) // 2] if ratios else None,
        "most": ratios[-1] if ratios else None,
    }


def _compared_columns(plan: str) -> tuple[Column, ...]:
    return (
        Column(f"no dearer than {plan}", lambda row: str(row["no dearer"])),
        Column(f"{plan} / found, median", lambda row: _ratio(row["median"])),
        Column("most", lambda row: _ratio(row["most"])),
    )


def depths_table(record: Record) -> Table:
    """How long one architecture takes with more layers."""
    columns = (
        Column("layers", lambda row: str(row["layers"])),
        Column("nodes", lambda row: f"{row['nodes']:,}"),
        Column("with equal layers as one", lambda row: f"{row['folded_nodes']:,}"),
        Column("search and bound, s", lambda row: f"{row['search_s']:.4f}"),
        Column("rules", lambda row: f"{row['rules_s']:.2f}"),
        Column("trace", lambda row: f"{row['trace_s']:.1f}"),
        Column("check of a rank", lambda row: f"{row['check_s']:.1f}"),
    )
    return Table(f"{_DEEP} on {_text(_DEEP_MESH)} ranks", columns, record["rows"])


def trained_table(record: Record) -> Table:
    """Networks that ranks have trained."""
    return parallelize_trained.rows_table(record)


def trained_line(record: Record) -> str:
    """The same in a line."""
    return parallelize_trained.line(record)


def plot(record: Record, figure: Figure) -> None:
    """Seconds against depth: of the search, and of what reads the step once."""
    axes = figure.subplots()
    figure.set_size_inches(4.5, 3)
    rows = record["rows"]
    depths = [row["layers"] for row in rows]
    read = [row["trace_s"] + row["rules_s"] for row in rows]
    axes.loglog(depths, read, marker="o", label="trace and rules")
    axes.loglog(depths, [row["search_s"] for row in rows], marker="o", label="search and bound")
    if rows:
        first = rows[0]["search_s"]
        axes.loglog(
            depths, [first * depth / depths[0] for depth in depths],
            linestyle=":", color="gray", label="in proportion to the layers",
        )  # fmt: skip
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.minorticks_off()
    axes.set(xlabel="layers", ylabel="CPU time, s")
    axes.legend(frameon=False)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
