"""Attributes that a step makes, changes, or asks for, on objects of all kinds: functions, partials,
modules, members of enumerations, libraries' classes. Equal to eager, or refused without a trace.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import http
import inspect
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import roam
from training import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


class Phase(enum.Enum):
    FIRST = 1


class Part(enum.Flag):
    ONE = 1


class Mine:
    def method(self) -> int:
        return 1


class Buffer(bytearray):
    pass


def plain() -> int:
    return 1


@contextlib.contextmanager
def block() -> Any:
    yield


OBJECTS: dict[str, Callable[[], Any]] = {
    "function": lambda: lambda: 1,
    "global function": lambda: plain,
    "method's function": lambda: Mine.method,
    "partial": lambda: functools.partial(max, 1),
    "cached": lambda: functools.lru_cache(lambda: 1),
    "no_grad around": lambda: torch.no_grad()(lambda: 1),
    "context manager": lambda: block,
    "module": lambda: types.ModuleType("settings"),
    "library's module": lambda: torch.nn.functional,
    "library's class": lambda: torch.nn.Linear,
    "library's function": lambda: torch.nn.functional.relu,
    "member": lambda: Phase.FIRST,
    "flag": lambda: Part.ONE,
    "library's member": lambda: http.HTTPStatus.OK,
    "class": lambda: Mine,
    "instance": Mine,
    "bytes": Buffer,
    "counter": collections.Counter,
    "ordered": collections.OrderedDict,
    "error": lambda: ValueError("x"),
    "logger": lambda: logging.getLogger("of.a.step"),
    "event": threading.Event,
    "compiled step": lambda: roam.compile(plain),
    "context": torch.no_grad,
    "scheduler": lambda: torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), 1
    ),
    "scaler": lambda: torch.amp.GradScaler("cpu", enabled=False),
}


def counts(holder: Any) -> float:
    holder.calls = getattr(holder, "calls", 0) + 1
    return 5.0 if holder.calls % 3 == 0 else 1.0


def asks(holder: Any) -> float:
    return 5.0 if getattr(holder, "debug", False) else 1.0


def is_there(holder: Any) -> float:
    return 5.0 if hasattr(holder, "debug") else 1.0


def tries(holder: Any) -> float:
    try:
        return 5.0 if holder.debug else 1.0
    except AttributeError:
        return 1.0


def keeps(holder: Any) -> Any:
    try:
        return holder.memo
    except AttributeError:
        holder.memo = torch.linspace(0, 1, 3)
        return holder.memo


def clean(holder: Any) -> None:
    for name in ("calls", "debug", "memo"):
        with contextlib.suppress(AttributeError):
            delattr(holder, name)


def train(holder: Any, factor: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> list[Any]:
    """Seven steps; before the third and the fifth the user sets and deletes an attribute."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @wrap
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(x) * factor(holder)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    found: list[Any] = []
    for number in range(7):
        if number == 2:
            holder.debug = True
        if number == 4:
            del holder.debug
        found.append(step(torch.ones(2, 3)))
    return [*found, net.weight.detach(), getattr(holder, "calls", None)]


CASES = [(name, factor) for factor in (counts, asks, keeps, is_there, tries) for name in OBJECTS]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "factor"), CASES, ids=[f"{factor.__name__} {name}" for name, factor in CASES]
)
def test_attributes_are_exact_or_refused(name: str, factor: Callable[[Any], Any]) -> None:
    holder = OBJECTS[name]()
    clean(holder)
    try:
        expected = train(holder, factor, lambda step: step)
        clean(holder)
        try:
            seen = train(holder, factor, roam.compile)
        except roam.CaptureError:
            assert name in ("scheduler", "scaler")
            assert not hasattr(holder, "memo")
            return
        assert_same_bits(expected[:-1], seen[:-1])
        assert expected[-1] == seen[-1]
    finally:
        clean(holder)


@pytest.mark.parametrize("name", ["global function", "member", "library's class", "module"])
def test_a_counter_that_decides(name: str) -> None:
    holder = OBJECTS[name]()
    try:
        expected = train(holder, counts, lambda step: step)
        clean(holder)
        assert_same_bits(expected[:-1], train(holder, counts, roam.compile)[:-1])
        assert holder.calls == 7
    finally:
        clean(holder)


def test_what_pytorch_notes_on_its_own_functions_is_not_the_steps() -> None:
    """The first call of `checkpoint` in a process leaves an attribute on it."""
    vars(inspect.unwrap(checkpoint)).pop("__dynamo_disable", None)
    net = torch.nn.Linear(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        run = functools.partial(checkpoint, net, use_reentrant=False)
        run(x).sum().backward()
        return net.weight.grad.clone()

    x = torch.ones(2, 3)
    compiled = roam.compile(step)
    compiled.plan(x)  # where a call would leave a refused one to the step itself
    assert_same_bits([compiled(x)], [step(x)])
