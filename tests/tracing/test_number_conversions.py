"""`float(x)` and `int(x)` in a step. This file uses the two names only to call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from newer import needs_2_15
from roam.errors import CaptureError, ExecutionError
from training import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

Step = Callable[[torch.Tensor], Any]

CLASS_TAKEN_OTHERWISE = """
def total(number):
    return float(number) if isinstance(number, float) or kind is float else float(number)
"""
CALLED_ALONE = """
from fractions import Fraction  # which asks isinstance(x, float), in a module of its own

def total(number):
    parts = [float(number) for _ in range(2)]
    return sum(parts) + (lambda: float(number))()
"""


class Run:
    """A small net's steps, with what they count."""

    def __init__(self, wrap: Callable[[Step], Step], lasts: str = "") -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(6, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.lengths = torch.tensor([2, 3])
        self.loss, self.right, self.scaled = 0.0, 0, 0
        self.space: dict[str, Any] = {"kind": None}
        exec(lasts, self.space)
        self.step = wrap(self.train)

    def train(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        scores = self.model(x)
        loss = scores.square().mean()
        loss.backward()
        self.optimizer.step()
        if "total" in self.space:
            return self.space["total"](loss.detach())
        self.loss += float(loss.detach()) * len(x)
        self.right += int((scores > 0).sum())
        self.scaled += int(loss.item() * 1000)
        parts = sum(float(row.mean().detach()) for row in scores)
        rate = float(self.optimizer.param_groups[0]["lr"])
        few = x[: int(self.lengths.max())]
        share = float((scores > 0).sum()) / scores.numel()
        return (
            float(loss.detach()),
            parts,
            rate,
            few,
            share,
            float("2.5"),
            int("7"),
            float(len(x)),
            0.0,
        )

    def steps(self) -> list[Any]:
        torch.manual_seed(1)
        returned = []
        for count in range(5):
            self.optimizer.param_groups[0]["lr"] = 1e-2 / (count + 1)
            returned.append(self.step(torch.randn(4, 6)))
        return returned


def test_numbers_of_the_call_are_given() -> None:
    eager, planned = Run(lambda step: step), Run(lambda step: roam.compile(step, poison=True))
    assert_same_bits(eager.steps(), planned.steps())
    assert_same_bits(list(eager.model.parameters()), list(planned.model.parameters()))
    assert (eager.loss, eager.right, eager.scaled) == (planned.loss, planned.right, planned.scaled)
    assert len(planned.step.plans) == 2  # the first step, and all others


def test_functions_of_another_module() -> None:
    eager, planned = Run(lambda step: step, CALLED_ALONE), Run(roam.compile, CALLED_ALONE)
    assert_same_bits(eager.steps(), planned.steps())
    assert "float" not in planned.space
    assert "int" not in planned.space


def test_where_the_class_is_taken_otherwise_the_name_stays() -> None:
    run = Run(roam.compile, CLASS_TAKEN_OTHERWISE)
    with pytest.raises(CaptureError, match=r"write x\.item\(\) for float\(x\)") as caught:
        run.steps()
    assert caught.value.code == "value_reached_python"


def test_a_number_that_has_no_integer() -> None:
    run = Run(roam.compile)
    run.steps()
    with pytest.raises((ValueError, ExecutionError), match="cannot convert float NaN to integer"):
        run.step(torch.full((4, 6), float("nan")))


def test_an_integer_of_the_batch_is_a_size() -> None:
    """A computed guard: another integer needs another plan."""

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[: int(lengths.max())].square().sum()

    planned = roam.compile(step)
    for lengths in ([2, 3], [1, 3], [2, 2]):
        given = torch.ones(4, 6), torch.tensor(lengths)
        assert torch.equal(planned(*given), step(*given))
    assert len(planned.plans) == 2


@pytest.mark.auto
@needs_2_15
def test_a_float_of_a_count_needs_no_plan_for_each_value() -> None:
    count = torch.tensor(0)

    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * (1 / float(count))

    planned = roam.compile(step)
    for number in range(1, 7):
        assert torch.equal(planned(torch.ones(2)), torch.ones(2) * (1 / number))
    assert len(planned.plans) == 1
