"""How often the user's function is traced for one capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from roam.state.policies import Policies, Policy
from roam.tracing.step import Known, capture_step

x = torch.ones(5, 4)


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.count, self.total, self.losses = 0, 0.0, list[float]()
        self.memory: list[torch.Tensor] = []

    def trained(self, weight: float = 1.0) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = weight * self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def plain(trainer: Trainer) -> None:
    trainer.trained()


def counts(trainer: Trainer) -> None:
    trainer.trained()
    trainer.count += 1


def sums(trainer: Trainer) -> None:
    trainer.total += trainer.trained().item()


def appends(trainer: Trainer) -> None:
    trainer.losses.append(trainer.trained().item())


def renews(trainer: Trainer) -> None:
    loss = trainer.trained().detach()
    trainer.memory = [one + loss for one in trainer.memory]


def does_all(trainer: Trainer) -> None:
    loss = trainer.trained()
    trainer.count += 1
    trainer.total += loss.item()
    trainer.losses.append(loss.item())
    trainer.memory = [one + loss.detach() for one in trainer.memory]


@pytest.mark.parametrize(
    ("does", "most"),
    [(plain, 2), (counts, 5), (sums, 4), (appends, 3), (renews, 3), (does_all, 4)],
)
def test_a_trace_that_finds_changes_tells_of_all_of_them(
    does: Callable[[Trainer], None], most: int
) -> None:
    trainer, known = Trainer(), Known()
    if does in (
        renews,
        does_all,
    ):  # an attribute that holds tensors and is not looked at takes a trace
        trainer.memory = [torch.zeros(4), torch.zeros(4)]
    capture_step(does, (trainer,), {}, known=known)
    assert known.traces == most


def test_a_later_capture_knows_what_the_step_changes() -> None:
    trainer, known = Trainer(), Known()
    capture_step(does_all, (trainer,), {}, known=known)
    before = known.traces
    capture_step(does_all, (trainer,), {}, known=known)
    assert known.traces == before + 2  # one, and one with plain numbers in the place of live ones


class TestPolicies:
    def test_climb(self) -> None:
        policies = Policies()
        policies.climb(Policy.COUNTED, ["a", "b"])
        policies.climb(Policy.FIXED, ["b"])
        policies.climb(Policy.APPENDED, ["b", "c"])
        assert policies.places(Policy.COUNTED) == ["a"]
        assert policies.places(Policy.FIXED) == ["b"]
        assert policies.below(Policy.FIXED, ["a", "b", "d"]) == {"a", "d"}

    def test_of_a_copy_climb_by_themselves(self) -> None:
        policies = Policies()
        other: Any = policies.copy()
        other.climb(Policy.READ, ["a"])
        assert policies.of("a") is Policy.IGNORED
