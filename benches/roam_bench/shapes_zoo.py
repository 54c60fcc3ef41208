"""Whether real architectures keep to one plan when sizes change, with eager's bits: `roam bench
shapes --architectures`.
"""

from __future__ import annotations

import argparse
import copy
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from roam.errors import RoamError
from roam.runtime import compile as compile_step
from roam_bench.architectures import Architecture, architectures
from roam_bench.outcomes import exit_code, outcomes_line, outcomes_table
from roam_bench.results import Record, Row, Task
from roam_bench.run import Benchmark, Column, Table, check_named
from roam_bench.zoo import compared, outcome_of, train_step

_LENGTHS = (16, 12, 9, 20, 12, 31, 16)
_BATCHES = (3, 4, 2, 5, 4, 7, 3)
_IMAGES = (64, 96, 80, 128)
"""Of one side."""
_TOLD = ("one plan", "condition on the sizes", "plan for many sizes")
"""What the log says of a size that no plan for many sizes holds for."""
_OUTCOMES = ("one plan", "captured anew", "one size", "refused", "failed", "different")

_COLUMNS = (
    Column("library", lambda row: row["library"], right=False),
    Column("architecture", lambda row: row["name"], right=False),
    Column("what changes", lambda row: row["changes"], right=False),
    Column("outcome", lambda row: row["outcome"], right=False),
    Column("captures", lambda row: "" if row["captures"] is None else str(row["captures"])),
    Column("reason", lambda row: row["reason"], right=False),
)


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """A row for each architecture and what changes from batch to batch."""
    offered = list(architectures())
    check_named(arguments.only, (one.name for one in offered))
    tasks = [
        Task(
            {"library": one.library, "name": one.name, "changes": changes},
            partial(_try, one, changes),
        )
        for one in offered
        if not arguments.only or one.name in arguments.only
        for changes in _changes(one)
    ]
    return Benchmark(
        "shapes-architectures",
        {"only": arguments.only},
        tasks,
        _COLUMNS,
        summary=lambda record: [libraries_table(record), outcomes_line(record, "architectures")],
        exit_code=exit_code,
    )


def libraries_table(record: Record) -> Table:
    """How many architectures of each library came to what."""
    return outcomes_table(record, "Many shapes", "library", "architectures", _OUTCOMES)


def rows_table(record: Record) -> Table:
    """Architectures that were captured anew, or worse."""
    rows = [row for row in record["rows"] if row["outcome"] != "one plan"]
    return Table("Captured anew", _COLUMNS, rows)


def _changes(architecture: Architecture) -> Iterator[str]:
    is_text = architecture.library == "transformers"
    yield "length" if is_text else "batch"
    if architecture.library == "torchvision":
        yield "image"


def _try(architecture: Architecture, changes: str) -> Row:
    told = _Told()
    loggers = [logging.getLogger("roam.replans")]
    captures: int | None = None
    for logger in loggers:
        logger.addHandler(told)
        logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' own
            torch.manual_seed(0)
            model, inputs = architecture.make()
            model.train()
            batches = list(_batches(inputs, changes))
            try:
                expected = outcome_of(train_step, copy.deepcopy(model), batches)
            except Exception as error:  # noqa: BLE001 - it takes one size alone
                return {
                    "outcome": "one size",
                    "captures": None,
                    "reason": f"eagerly: {error}"[:160],
                }
            step: Any = compile_step(train_step, python="idle")
            outcome, reason = compared(expected, outcome_of(step, model, batches))
        captures = len(step.kept().plans)
        if outcome == "equal":
            outcome = "one plan" if captures <= 2 else "captured anew"
            reason = "" if captures <= 2 else "; ".join(dict.fromkeys(told.reasons))[:400]
    except RoamError as error:
        outcome, reason = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - one architecture's failure is a row, and the others go on
        outcome, reason = "failed", f"{type(error).__name__}: {error}"
    finally:
        for logger in loggers:
            logger.removeHandler(told)
    return {"outcome": outcome, "captures": captures, "reason": reason}


class _Told(logging.Handler):
    """Keeps what roam says of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(words in text for words in _TOLD):
            self.reasons.append(text.partition(": ")[2])


def _batches(inputs: dict[str, Any], changes: str) -> Iterator[dict[str, Any]]:
    """Batches like the inputs, which differ in one size."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    samples = tensors[0].shape[0]
    texts = {key for key, value in inputs.items() if isinstance(value, torch.Tensor) and value.shape == (samples, 16)}  # fmt: skip
    if changes == "length" and texts:
        for length in _LENGTHS:
            yield {key: _tiled(value, 1, length) if key in texts else value for key, value in inputs.items()}  # fmt: skip
    elif changes == "image":
        for size in (*_IMAGES, *_IMAGES[:2]):
            yield {key: torch.randn(*value.shape[:-2], size, size) for key, value in inputs.items()}  # fmt: skip
    else:
        for count in _BATCHES:
            yield {
                key: _tiled(value, 0, count) if isinstance(value, torch.Tensor) else value
                for key, value in inputs.items()
            }


def _tiled(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return torch.cat([tensor] * -(-size // tensor.shape[dim]), dim).narrow(dim, 0, size).clone()
