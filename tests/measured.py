"""Work that the memory tests measure, in a process of its own or in theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import roam
from training import TRAININGS

WAYS: dict[str, bool | None] = {"pool": True, "allocator": False}
"""Planned ways of running, with what they are to `roam.compile`."""


def build(name: str, how: str) -> Callable[[], Any]:
    """One training step, over and over, on one batch: ``eager``, or one of `WAYS` with what the
    plan promises as result."""
    step, arguments = compiled(name, how)

    def work() -> Any:
        step(*arguments)
        if how == "eager":
            return None
        memory = step.memory()
        return {"total": memory.total_bytes, "program_order": memory.program_order_bytes}

    return work


def compiled(name: str, how: str) -> tuple[Any, tuple[Any, ...]]:
    """A training's step, compiled but for ``eager``, and the arguments to call it with."""
    torch.manual_seed(0)
    training = TRAININGS[name]()
    batch = training.batch(torch.Generator().manual_seed(0))
    step = training.step if how == "eager" else roam.compile(training.step, pool=WAYS[how])
    return step, (*training.objects, *batch)
