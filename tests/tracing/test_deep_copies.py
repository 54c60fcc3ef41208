"""Steps that copy modules, optimizers and objects by `copy.deepcopy`, as meta-learning does:
refused by a plan alone, and eager PyTorch's bits beside one, also when what they copy changes."""

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
from newer import needs_2_15
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


@needs_2_15
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
        return [*losses, *net.state_dict().values(), torch.get_rng_state()]

    eager = train(lambda step: step)
    assert_same_bits(eager, train(functools.partial(roam.compile, python="auto")))
    with pytest.raises(roam.CaptureError) as caught:
        train(roam.compile)
    assert caught.value.code == "pickled"


def test_a_copied_generator_is_refused() -> None:
    net = Net()
    net.generator = torch.Generator()

    @roam.compile
    def step(x):
        return torch.randn(3, generator=copy.deepcopy(net).generator) + x

    with pytest.raises(roam.CaptureError):
        step(torch.ones(3))


@pytest.mark.parametrize("make", [random.Random, np.random.RandomState, np.random.default_rng])
@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_copies_of_a_generator_are_refused(make: Any, copier: Any) -> None:
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

    for one in (step, copying):
        with pytest.raises(roam.CaptureError, match="copies a random generator"):
            roam.compile(one)(torch.ones(3))


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
