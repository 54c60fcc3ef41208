"""Whether shardings are cheaper than those that experts wrote, on architectures of transformers
whose configurations carry a tensor-parallel plan: `roam bench parallelize`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import roam
from roam.bench.outcomes import outcomes_line
from roam.bench.results import Record, Row, Task
from roam.bench.run import Benchmark, Column, Table, check_named
from roam.bench.shipped import allowed_by, left_out, shipped_plan, whole
from roam.errors import RoamError
from roam.sharding.planning import WORK, Planning
from roam.sharding.search import Allowed, search

_BATCH, _TOKENS = 4, 512
_FIGURES = (
    "ns", "bound_ns", "gap", "shipped_ns", "shipped", "left_out", "whole_ns", "nodes",
    "folded_nodes", "retries", "trace_s", "rules_s", "search_s", "check_s",
)  # fmt: skip


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """Every architecture with a plan, or those named, on each mesh."""
    offered = list(kinds())
    check_named(arguments.only, offered)
    tasks = [
        Task(
            {"architecture": kind, "ranks": ranks}, partial(measure, kind, ranks, arguments.layers)
        )
        for kind in offered
        if not arguments.only or kind in arguments.only
        for ranks in arguments.ranks or (2, 4, 8)
    ]
    settings = {"only": arguments.only, "ranks": arguments.ranks, "layers": arguments.layers}
    return Benchmark("parallelize", settings, tasks, _COLUMNS, summary=summary)


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


def measure(kind: str, ranks: int, layers: int) -> Row:
    """Find a sharding of one architecture, and what its own plan costs by the same model of time.

    Returns:
        ``outcome``, with the ``reason``; where it is ``found`` ``ns`` and ``bound_ns`` of the step,
        ``gap``, ``shipped_ns`` (of the best choice that the plan of transformers allows, None where
        it allows none), ``shipped`` (``shipped_ns`` / ``ns``), ``left_out`` (styles of that plan
        that have no like in PyTorch, whose modules are whole), ``whole_ns`` (where every rank does
        all), ``nodes``, ``folded_nodes``, ``retries`` (choices that did not run on a rank), and
        seconds: ``trace_s``, ``rules_s``, ``check_s``, and ``search_s``, the processor time of one
        search and its bound.
    """
    row: Row = dict.fromkeys(_FIGURES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' own, about models without weights
            model, optimizer, tokens = _made(kind, layers)
            planning = Planning(train_step, model, optimizer, (tokens,), mesh=ranks)
            found = planning.find()
    except RoamError as error:
        return {"outcome": "refused", "reason": f"{error.code}: {error}"[:300], **row}
    except Exception as error:  # noqa: BLE001 - one model's failure is a row, and the others go on
        return {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"[:300], **row}
    if found is None:
        return {"outcome": "refused", "reason": "no choice", **row}

    def cost(allowed: Allowed) -> int | None:
        choice = search(found.nodes, limit_bytes=None, work=WORK, allowed=allowed)
        return None if choice is None else choice.ns

    start = time.process_time()
    search(found.nodes, limit_bytes=None, work=WORK)
    search_s = time.process_time() - start
    plan = shipped_plan(model)
    shipped_ns = cost(allowed_by(model, plan))
    choice, seconds = found.choice, planning.seconds
    return {
        "outcome": "found",
        "reason": "",
        "ns": choice.ns,
        "bound_ns": choice.bound_ns,
        "gap": choice.gap,
        "shipped_ns": shipped_ns,
        "shipped": None if shipped_ns is None else shipped_ns / choice.ns,
        "left_out": " ".join(left_out(plan)),
        "whole_ns": cost(whole),
        "nodes": choice.nodes,
        "folded_nodes": choice.folded_nodes,
        "retries": len(found.differences),
        "trace_s": seconds.trace,
        "rules_s": seconds.rules,
        "search_s": search_s,
        "check_s": seconds.check,
    }


_COLUMNS = (
    Column("architecture", lambda row: row["architecture"], right=False),
    Column("ranks", lambda row: str(row["ranks"])),
    Column("outcome", lambda row: row["outcome"], right=False),
    Column("ms", lambda row: "" if row["ns"] is None else f"{row['ns'] / 1e6:,.1f}"),
    Column("gap", lambda row: "" if row["gap"] is None else f"{row['gap']:.2%}"),
    Column("shipped", lambda row: "" if row["shipped"] is None else f"{row['shipped']:.3f}"),
    Column("whole", lambda row: "" if row["ns"] is None else f"{row['whole_ns'] / row['ns']:.2f}"),
    Column("nodes", lambda row: "" if row["nodes"] is None else f"{row['nodes']:,}"),
    Column("search s", lambda row: "" if row["search_s"] is None else f"{row['search_s']:.3f}"),
    Column("left out", lambda row: row["left_out"] or "", right=False),
    Column("reason", lambda row: row["reason"], right=False),
)


def summary(record: Record) -> list[Table | str]:
    """A row per mesh."""
    return [meshes_table(record), outcomes_line(record, "architectures and meshes")]


def meshes_table(record: Record) -> Table:
    """How many shardings are proved, and how they compare with the plans of transformers."""
    rows: list[Row] = []
    for ranks in sorted({row["ranks"] for row in record["rows"]}):
        of_mesh = [row for row in record["rows"] if row["ranks"] == ranks]
        found = [row for row in of_mesh if row["outcome"] == "found"]
        whole_plans = [row for row in found if row["shipped"] is not None and not row["left_out"]]
        if found:
            ratios = sorted(row["shipped"] for row in whole_plans)
            rows.append(
                {
                    "ranks": ranks,
                    "tried": len(of_mesh),
                    "found": len(found),
                    "optimal": sum(row["gap"] == 0 for row in found),
                    "compared": len(ratios),
                    "no dearer": sum(ratio >= 1 for ratio in ratios),
                    "median": ratios[len(ratios) // 2] if ratios else None,
                    "most": max(ratios, default=None),
                    "search": max(row["search_s"] for row in found),
                }
            )
    columns = (
        Column("ranks", lambda row: str(row["ranks"])),
        Column("tried", lambda row: str(row["tried"])),
        Column("found", lambda row: str(row["found"])),
        Column("optimal", lambda row: str(row["optimal"])),
        Column("compared", lambda row: str(row["compared"])),
        Column("no dearer", lambda row: str(row["no dearer"])),
        Column("shipped / found, median", lambda row: _ratio(row["median"])),
        Column("most", lambda row: _ratio(row["most"])),
        Column("longest search, s", lambda row: f"{row['search']:.2f}"),
    )
    return Table("Shardings", columns, rows)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
