"""Work that the memory tests measure in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import roam
from training import TRAININGS


def build(name: str, how: str) -> Callable[[], Any]:
    """One training step, over and over, on one batch: ``eager``, or ``planned`` with the plan's figures as result."""
    torch.manual_seed(0)
    training = TRAININGS[name]()
    batch = training.batch(torch.Generator().manual_seed(0))
    step = roam.compile(training.step) if how == "planned" else training.step

    def work() -> Any:
        step(*training.objects, *batch)
        if how == "eager":
            return None
        plan = dict(step.plans)["step"]
        return {
            "peak": plan.peak_bytes,
            "persistent": plan.persistent_bytes,
            "program_order_peak": plan.program_order_peak_bytes,
        }

    return work
