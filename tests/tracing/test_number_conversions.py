"""`float(x)` and `int(x)` of values that a run computes: refused, and beside a plan as eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from newer import needs_2_15
from roam.errors import CaptureError
from training import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

Step = Callable[[torch.Tensor], Any]


class Run:
    """A small net's steps, with what they count."""

    def __init__(self, wrap: Callable[[Step], Step]) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(6, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.lengths = torch.tensor([2, 3])
        self.loss, self.right, self.scaled = 0.0, 0, 0
        self.step = wrap(self.train)

    def train(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        scores = self.model(x)
        loss = scores.square().mean()
        loss.backward()
        self.optimizer.step()
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


@pytest.mark.auto
@needs_2_15
def test_numbers_of_the_call_are_given() -> None:
    eager, planned = Run(lambda step: step), Run(roam.compile)
    assert_same_bits(eager.steps(), planned.steps())
    assert_same_bits(list(eager.model.parameters()), list(planned.model.parameters()))
    assert (eager.loss, eager.right, eager.scaled) == (planned.loss, planned.right, planned.scaled)
    assert planned.step.runs_beside
    assert planned.step.plans


def of_a_loss(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Any:
    return float(loss.detach())


def of_a_count(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Any:
    return int((loss > 0).sum())


def of_a_rate(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Any:
    return float(optimizer.param_groups[0]["lr"])


def of_an_item(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Any:
    return int(loss.item() * 1000)


def in_a_list(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Any:
    return list(map(float, [loss.detach()]))


@pytest.mark.parametrize("leaves", [of_a_loss, of_a_count, of_a_rate, of_an_item, in_a_list])
def test_a_plan_alone_is_refused(leaves: Callable[..., Any]) -> None:
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @roam.compile
    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return leaves(loss, optimizer)

    with pytest.raises(CaptureError, match=r"write x\.item\(\) for float\(x\)") as caught:
        step(torch.ones(4, 6))
    assert caught.value.code == "value_reached_python"


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
