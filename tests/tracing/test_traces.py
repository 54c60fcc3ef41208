"""How often the user's function is traced for one capture."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from roam.program.ir import Ref
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


def does_all(trainer: Trainer) -> None:
    loss = trainer.trained()
    trainer.count += 1
    trainer.total += loss.item()
    trainer.losses.append(loss.item())


@pytest.mark.parametrize(
    ("does", "most"),
    [(plain, 2), (counts, 4), (sums, 4), (appends, 3), (does_all, 4)],
)
def test_a_trace_that_finds_changes_tells_of_all_of_them(
    does: Callable[[Trainer], None], most: int
) -> None:
    trainer, known = Trainer(), Known()
    capture_step(does, (trainer,), {}, known=known)
    assert known.traces == most


@pytest.mark.parametrize(
    ("optimizer", "most"),
    [
        (torch.optim.AdamW, 2),
        (torch.optim.SGD, 2),
        # What it makes first is no copy of what it does later.
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 4),
    ],
)
def test_the_trace_that_agrees_has_a_plain_number_in_the_place_of_a_live_one(
    optimizer: Callable[[Any], Any], most: int
) -> None:
    trainer, known = Trainer(), Known()
    trainer.optimizer = optimizer(trainer.net.parameters())
    captured = capture_step(lambda weight: trainer.trained(1 - weight), (0.5,), {}, known=known)
    assert known.traces == most
    for variant in (captured.first, captured.steady):
        if variant is not None:
            program = variant.program
            slots = {reference.path: slot for reference, slot in program.referenced}
            assert any(
                call.name == "float.sub" and call.args == (1, Ref(slots["args[0]"]))
                for call in program.calls
            )


def test_what_is_done_with_a_live_number_has_to_be_the_same_each_time() -> None:
    trainer = Trainer()

    def step(weight: float) -> None:
        trainer.trained(weight * time.perf_counter())

    with pytest.raises(roam.CaptureError, match="different things in two traces"):
        capture_step(step, (0.5,), {})


def test_a_later_capture_knows_what_the_step_changes() -> None:
    trainer, known = Trainer(), Known()
    capture_step(does_all, (trainer,), {}, known=known)
    before = known.traces
    capture_step(does_all, (trainer,), {}, known=known)
    assert known.traces == before + 3  # two that agree, one with plain numbers


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
