"""The histories of what a planned step leaves, as autograd sees them.

A plan holds the step's own backward pass, and keeps nothing for another. What requires a gradient after the eager step, its results and
what it keeps in attributes, requires one after a planned step too, so that nobody takes it for a constant; whoever goes on backward
through it is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from roam.errors import ExecutionError
from roam.program import History


class PlannedStep(torch.autograd.Function):
    """The node that stands for a whole step."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, value: torch.Tensor, refuse: Callable[[], NoReturn]) -> torch.Tensor:
        """The value, with this node as its history; `refuse` is called where a backward pass comes to it."""
        ctx.refuse = refuse
        return value.data  # no view: in-place operators may change it

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Refuses to go on: the step is over."""
        return ctx.refuse()


def is_planned(tensor: torch.Tensor) -> bool:
    """Whether a planned step has left a tensor as it is, with such a history."""
    return isinstance(tensor.grad_fn, PlannedStep._backward_cls)


def with_history(value: torch.Tensor, refuse: Callable[[], NoReturn]) -> torch.Tensor:
    """The same memory as a tensor with the history of a planned step."""
    with torch.enable_grad():
        return PlannedStep.apply(torch.zeros((), requires_grad=True), value, refuse)  # type: ignore[no-any-return]


class Histories:
    """Gives what one run leaves its histories, each value once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: Any, history: History) -> Any:
        """A value as autograd sees it after the step."""
        if history == "leaf":
            value.requires_grad_()
        elif history == "step":
            if id(value) not in self._known:
                self._known[id(value)] = value, with_history(value, _step_is_over)
            return self._known[id(value)][1]
        return value

    def all(self, values: Iterable[Any], histories: Iterable[History]) -> list[Any]:
        """Several of them."""
        return [self.of(value, history) for value, history in zip(values, histories, strict=True)]


def _step_is_over() -> NoReturn:
    raise ExecutionError(
        "call backward in the compiled step, or detach what it leaves; a plan keeps nothing for a backward pass that starts outside",
        code="step_is_over",
    )
