"""Results of a planned step as autograd sees those of the eager one.

A plan holds the step's own backward pass, and keeps nothing for another. A result that requires a gradient eagerly requires one here
too, so that nobody takes it for a constant; whoever goes on backward through it is told so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from roam.errors import ExecutionError
from roam.program import History


class PlannedStep(torch.autograd.Function):
    """The node that stands for a whole step."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The value, with this node as its history."""
        return value.data  # no view: in-place operators may change it

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> NoReturn:
        """Refuses to go on: the step is over."""
        raise ExecutionError(
            "call backward in the compiled step, or detach its result; a plan keeps nothing for a backward pass that starts outside",
            code="step_is_over",
        )


def with_histories(leaves: list[Any], histories: Sequence[History]) -> list[Any]:
    """A result's leaves, each with the history that it has."""
    known: dict[int, torch.Tensor] = {}
    found = []
    with torch.enable_grad():
        for leaf, history in zip(leaves, histories, strict=True):
            if history == "leaf":
                leaf.requires_grad_()
            elif history == "step":
                if id(leaf) not in known:
                    known[id(leaf)] = PlannedStep.apply(torch.zeros((), requires_grad=True), leaf)
                leaf = known[id(leaf)]
            found.append(leaf)
    return found
