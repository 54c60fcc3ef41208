"""Steps that copy modules, optimizers and objects by `copy.deepcopy`, as meta-learning does: eager
PyTorch's bits, also when what they have copied changes between steps."""

from __future__ import annotations

import copy
import copyreg
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import roam
from training import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
Step = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.dropout, self.also_last = nn.Dropout(0.3), self.last
        self.scale, self.powers = 1.0, [1, 2]
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.dropout(torch.tanh(self.norm(self.first(x))))
        return self.also_last(x) * self.scale * sum(self.powers)


def first_order_maml(net: Any) -> Step:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)

    def step(x):
        task = copy.deepcopy(net)
        inner = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9)
        task(x).square().mean().backward()
        inner.step()
        inner.zero_grad()
        loss = task(x).square().mean()
        loss.backward()
        for parameter, other in zip(net.parameters(), task.parameters(), strict=True):
            parameter.grad = other.grad
        optimizer.step()
        return loss.detach() + task.calls.sum()

    return step


def ahead(net: Any) -> Step:
    """Makes two updates of copies of the model and its optimizer, and one of the model."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)

    def step(x):
        other, its_optimizer = copy.deepcopy((net, optimizer))
        for _ in range(2):
            its_optimizer.zero_grad()
            other(x).square().mean().backward()
            its_optimizer.step()
        optimizer.zero_grad()
        loss = (
            net(x).square().mean() + (other.last.weight.detach() - net.last.weight).square().sum()
        )
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def of_an_object(net: Any) -> Step:
    held = SimpleNamespace(net=net, options={"weight": 2.0}, total=torch.zeros(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)

    def step(x):
        optimizer.zero_grad()
        mine = copy.deepcopy(held)
        loss = mine.net(x).square().mean() * mine.options["weight"] + mine.total.sum()
        loss.backward()
        for parameter, other in zip(net.parameters(), mine.net.parameters(), strict=True):
            parameter.grad = other.grad
        optimizer.step()
        held.total += loss.detach()
        return loss.detach()

    return step


def reptile(net: Any) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        before = copy.deepcopy(net.state_dict())
        for part in x.chunk(2):
            optimizer.zero_grad()
            loss = net(part).square().mean()
            loss.backward()
            optimizer.step()
        after = net.state_dict()
        net.load_state_dict(
            {
                name: before[name] + (after[name] - before[name]) * 0.25
                if after[name].is_floating_point()
                else after[name]
                for name in before
            }
        )
        return loss.detach()

    return step


@pytest.mark.parametrize("make_step", [first_order_maml, ahead, of_an_object, reptile])
def test_steps_that_copy_have_eagers_bits(make_step: Callable[[Any], Step]) -> None:
    def train(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net = Net()
        step, losses = wrap(make_step(net)), []
        for number in range(7):
            if number == 3:
                net.scale = 1.5
            if number == 5:
                net.powers.append(1)
            generator = torch.Generator().manual_seed(number)
            losses.append(step(torch.randn(6, 4, generator=generator)))
        if wrap is roam.compile:
            assert len(step.plans) >= 3  # one for each scale and list
        return [*losses, *net.state_dict().values(), torch.get_rng_state()]

    assert_same_bits(train(lambda step: step), train(roam.compile))


def test_a_step_that_trains_a_copy_keeps_a_budget() -> None:
    """What reads the copy's weights may run again until they are updated."""

    def train(wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

        @wrap
        def step(x):
            copied = copy.deepcopy(net)
            optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
            for part in x:
                optimizer.zero_grad()
                loss = copied(part).square().mean()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                for weight, moved in zip(net.parameters(), copied.parameters(), strict=True):
                    weight.lerp_(moved, 0.5)
            return loss.detach()

        losses = [step(torch.randn(3, 256, 8)) for _ in range(3)]
        return [*losses, *net.state_dict().values()], step

    expected, _ = train(lambda step: step)
    results, step = train(functools.partial(roam.compile, memory="85%"))
    memory = step.memory()
    assert_same_bits(expected, results)
    assert memory.extra_runs > 0
    assert memory.total_bytes <= memory.limit_bytes


def test_a_copied_generator_is_refused() -> None:
    net = Net()
    net.generator = torch.Generator()

    @roam.compile
    def step(x):
        return torch.randn(3, generator=copy.deepcopy(net).generator) + x

    with pytest.raises(roam.CaptureError):
        step(torch.ones(3))


def test_memo_that_keeps_parameters_by_their_id() -> None:
    """As in a `__deepcopy__` of the user's that shares some parameters with the copy."""

    def train(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net = Net()

        def step(x):
            weight, memo = net.first.weight, {}
            memo[id(weight)] = weight
            other = copy.deepcopy(net, memo)
            with torch.no_grad():
                other.first.weight.mul_(0.9)
                memo[id(net.first.bias)].add_(1)
            return other(x).detach(), other.first.weight is weight

        step = wrap(step)
        return [step(torch.ones(6, 4) * number) for number in range(3)] + [net.first.weight]

    eager, planned = train(lambda step: step), train(roam.compile)
    assert [result[1] for result in planned[:-1]] == [True] * 3
    assert_same_bits([result[0] for result in eager[:-1]], [result[0] for result in planned[:-1]])
    assert_same_bits(eager[-1:], planned[-1:])


def test_memo_that_keeps_a_buffer_by_its_id_is_refused() -> None:
    net = Net()
    memo = {id(net.calls): net.calls}

    @roam.compile
    def step(x):
        return copy.deepcopy(net, dict(memo)).calls + x

    with pytest.raises(roam.CaptureError, match="identity"):
        step(torch.ones(1))


@pytest.mark.parametrize("make", [random.Random, np.random.RandomState, np.random.default_rng])
@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_draws_from_a_copied_generator_are_refused(make: Any, copier: Any) -> None:
    """Also where two traces happen to draw what leads to the same operators."""
    held = SimpleNamespace(generator=make(4))

    def step(x):
        generator = copier(held.generator)
        return (
            x * 2
            if (generator.random() if hasattr(generator, "random") else generator.rand()) < 2
            else x
        )

    def copying(x):
        copier(held.generator)
        return x * 2

    with pytest.raises(roam.CaptureError, match="draws from a copy"):
        roam.compile(step)(torch.ones(3))
    assert torch.equal(roam.compile(copying)(torch.ones(3)), torch.full((3,), 2.0))


class Registered:
    """Copied by a function that is registered for its class."""

    def __init__(self, weight: float) -> None:
        self.weight = weight


FACTORS = [1.0]
copyreg.pickle(Registered, lambda value: (Registered, (value.weight * FACTORS[0],)))


def test_what_a_registered_function_reads_to_copy_an_object_is_guarded() -> None:
    held = Registered(2.0)
    step = roam.compile(lambda x: x * copy.deepcopy(held).weight)
    try:
        for FACTORS[0] in (1.0, 3.0, 4.0):
            assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0 * FACTORS[0]))
    finally:
        FACTORS[0] = 1.0
