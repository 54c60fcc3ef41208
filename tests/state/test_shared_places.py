"""Steps that put a tensor in a place so that the next step finds it in several places."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roam


class Agent:
    def __init__(self, keep: Callable[..., None]) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)], nn.Tanh())
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.keep = keep
        self.last, self.before, self.first = (torch.zeros(64, 4) for _ in range(3))
        self.history = [torch.zeros(64, 4) for _ in range(4)]

    def step(self, observed: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        held = [observed, self.last, self.before, *self.history]
        loss = sum((self.net(one) * (place + 1)).square().mean() for place, one in enumerate(held))
        loss.backward()
        self.optimizer.step()
        self.keep(self, observed)
        return loss.detach()

    def kept(self) -> list[torch.Tensor]:
        return [self.last, self.before, self.first, *self.history]


def keeps_it(agent: Agent, observed: torch.Tensor) -> None:
    agent.last = observed.detach()


def keeps_two(agent: Agent, observed: torch.Tensor) -> None:
    agent.before, agent.last = agent.last, observed.detach()


def keeps_the_tensor_itself(agent: Agent, observed: torch.Tensor) -> None:
    agent.before, agent.last = agent.last, observed


def keeps_four(agent: Agent, observed: torch.Tensor) -> None:
    agent.history = [*agent.history[1:], observed.detach()]


def changes_the_older_in_place(agent: Agent, observed: torch.Tensor) -> None:
    agent.before.mul_(0.5)
    agent.before, agent.last = agent.last, observed.detach()


def same(number: int, given: torch.Tensor, agent: Agent) -> torch.Tensor:
    return given


def every_other(number: int, given: torch.Tensor, agent: Agent) -> torch.Tensor:
    return given if number % 2 else given + number


def from_the_third_on(number: int, given: torch.Tensor, agent: Agent) -> torch.Tensor:
    return given if number > 2 else given + number


def its_own(number: int, given: torch.Tensor, agent: Agent) -> torch.Tensor:
    return agent.last


def trained(keep: Any, give: Any, compiles: bool, memory: str | None) -> Any:
    agent = Agent(keep)
    step = roam.compile(agent.step, memory=memory) if compiles else agent.step
    given = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for number in range(8):
        observed = give(number, given, agent)
        loss = step(observed)
        tensors = [observed, *agent.kept()]
        storages = [one.untyped_storage().data_ptr() for one in tensors]
        found += [
            loss.item(),
            [one.tolist() for one in tensors],
            [(a is b, c == d) for a, c in zip(tensors, storages, strict=True) for b, d in zip(tensors, storages, strict=True)],
        ]  # fmt: skip
    return found, [parameter.tolist() for parameter in agent.net.parameters()]


KEEPS = [keeps_two, keeps_it, keeps_the_tensor_itself, keeps_four, changes_the_older_in_place]
GIVES = [every_other, same, from_the_third_on, its_own]


@pytest.mark.sweep
@pytest.mark.parametrize("give", GIVES)
@pytest.mark.parametrize("keep", KEEPS)
def test_places_are_eagers(keep: Any, give: Any) -> None:
    assert trained(keep, give, True, None) == trained(keep, give, False, None)


@pytest.mark.sweep
@pytest.mark.parametrize("give", GIVES)
def test_places_are_eagers_within_a_budget(give: Any) -> None:
    assert trained(keeps_two, give, True, "90%") == trained(keeps_two, give, False, None)


def test_a_step_that_depends_on_something_unseen_is_still_refused() -> None:
    def draws(agent: Agent, observed: torch.Tensor) -> None:
        keeps_two(agent, observed)
        state = random.getstate()
        agent.first = agent.first + random.random()
        random.setstate(state)

    agent = Agent(draws)
    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(agent.step)(agent.last)
    assert caught.value.code == "unstable"


def test_capture_says_that_the_step_has_to_run_first() -> None:
    agent = Agent(keeps_two)
    with pytest.raises(roam.CaptureError, match="other places share tensors") as caught:
        roam.capture(agent.step, agent.last)
    assert caught.value.code == "unsettled"
    roam.capture(agent.step, agent.last, step="first")


def test_a_bank_that_grows_is_refused_by_name() -> None:
    net, state = torch.nn.Linear(8, 8), {"bank": torch.zeros(1, 8)}

    def step(x: torch.Tensor) -> torch.Tensor:
        rows = net(x)
        state["bank"] = torch.cat([state["bank"], rows.detach()])[-6:]
        return (rows @ state["bank"].t()).square().mean()

    with pytest.raises(roam.CaptureError, match=r"state\['bank'\].*full size") as caught:
        roam.compile(step)(torch.ones(2, 8))
    assert caught.value.code == "unstable"
