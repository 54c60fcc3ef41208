"""Whether real architectures train by a plan with the bits of eager PyTorch: `roam bench zoo`."""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from roam import Plan
from roam.errors import RoamError
from roam.program.bits import differ
from roam.runtime import compile as compile_step
from roam.torch_compat.private import pytree
from roam_bench.architectures import Architecture, architectures, loss_of
from roam_bench.outcomes import exit_code, outcomes_line, outcomes_table
from roam_bench.results import Record, Row, Task
from roam_bench.run import Benchmark, Column, Table, check_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS = 3
_SEED = 0
_OUTCOMES = ("equal", "refused", "failed", "different")

_COLUMNS = (
    Column("library", lambda row: row["library"], right=False),
    Column("architecture", lambda row: row["name"], right=False),
    Column("outcome", lambda row: row["outcome"], right=False),
    Column("operators", lambda row: "" if row["operators"] is None else f"{row['operators']:,}"),
    Column("seconds", lambda row: f"{row['wall_s']:.1f}"),
    Column("reason", lambda row: row["reason"], right=False),
)


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """Every architecture of the libraries that are installed, or those named."""
    offered = [
        one for one in architectures() if not arguments.library or one.library in arguments.library
    ]
    check_named(arguments.only, (one.name for one in offered))
    chosen = [one for one in offered if not arguments.only or one.name in arguments.only]
    tasks = [
        Task({"library": one.library, "name": one.name}, partial(try_architecture, one))
        for one in chosen
    ]
    settings = {"libraries": arguments.library, "only": arguments.only}
    return Benchmark(
        "zoo",
        settings,
        tasks,
        _COLUMNS,
        summary=lambda record: [
            libraries_table(record),
            outcomes_line(record, "architectures"),
        ],
        plot=plot,
        exit_code=exit_code,
    )


def libraries_table(record: Record) -> Table:
    """How many architectures of each library came to what."""
    return outcomes_table(record, "Architectures", "library", "architectures", _OUTCOMES)


def plot(record: Record, figure: Figure) -> None:
    """Each plan's peak against program order's, by library, the smallest first."""
    rows = [row for row in record["rows"] if row["peak_bytes"] is not None]
    figure.set_size_inches(7.2, 2.4)
    axes = figure.subplots()
    before = 0
    for library in dict.fromkeys(row["library"] for row in rows):
        shares = sorted(
            row["peak_bytes"] / row["program_order_peak_bytes"]
            for row in rows
            if row["library"] == library
        )
        axes.bar(range(before, before + len(shares)), shares, label=library)
        before += len(shares)
    axes.axhline(1, color="grey", linewidth=0.6)
    axes.set_xlabel("architectures")
    axes.set_ylabel("peak / program order's")
    axes.legend(ncols=4, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]
) -> torch.Tensor:
    """One step as a user writes it."""
    optimizer.zero_grad()
    loss = loss_of(model(**inputs))
    loss.backward()
    optimizer.step()
    return loss.detach()


def try_architecture(architecture: Architecture) -> Row:
    """Train an architecture from the same start eagerly and by its plan, and compare all that a
    user can look at.

    Returns:
        ``outcome``: ``equal``, ``different``, ``refused``, or ``failed``, where it does not train
            eagerly either or roam broke, with the ``reason``; ``operators``;
            ``program_order_peak_bytes`` and ``peak_bytes`` of the plan.
    """
    row: Row = dict.fromkeys(("operators", "program_order_peak_bytes", "peak_bytes"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the libraries' own, about configurations as small as these
            outcome, reason, plan = _try(architecture)
        row = {
            "operators": len(plan.order),
            "program_order_peak_bytes": plan.program_order_peak_bytes,
            "peak_bytes": plan.peak_bytes,
        }
    except RoamError as error:
        outcome, reason = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - one architecture's failure is a row, and the others go on
        outcome, reason = "failed", f"{type(error).__name__}: {error}"
    return {"outcome": outcome, "reason": reason, **row}


def _try(architecture: Architecture) -> tuple[str, str, Plan]:
    torch.manual_seed(_SEED)
    model, inputs = architecture.make()
    model.train()
    batches = [inputs] * _STEPS
    expected = outcome_of(train_step, copy.deepcopy(model), batches)
    step = compile_step(train_step)
    found = outcome_of(step, model, batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return *compared(expected, found), step.plan(model, optimizer, inputs)


def outcome_of(
    step: Callable[..., Any], model: torch.nn.Module, batches: Sequence[dict[str, Any]]
) -> list[tuple[str, Any]]:
    """Losses, and parameters, buffers, optimizer state and random state after the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(_SEED)
    losses = [step(model, optimizer, inputs) for inputs in batches]
    left = {
        "loss": losses, "model": dict(model.named_parameters()) | dict(model.named_buffers()),
        "optimizer": optimizer.state_dict()["state"], "random state": torch.get_rng_state(),
    }  # fmt: skip
    leaves, _ = pytree.tree_flatten_with_path(left)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


def compared(expected: list[tuple[str, Any]], found: list[tuple[str, Any]]) -> tuple[str, str]:
    """Whether two such outcomes are equal, and where they differ."""
    if [path for path, _ in expected] != [path for path, _ in found]:
        return "different", "other tensors exist after the steps"
    for (path, one), (_, other) in zip(expected, found, strict=True):
        if not _same_bits(one, other):
            return "different", path
    return "equal", ""


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and one == other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return not differ([one], [other])
