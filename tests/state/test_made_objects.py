"""Objects that a step makes and returns: put together anew at every call, or refused."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import roam


class Cache:
    """Keys, and what is known of them."""

    kept: Any = None

    def __init__(self, keys: Any, size: int) -> None:
        self.layers = [Layer(keys, kind) for kind in (int, float)]
        self.notes = {"size": size, 3: (keys.dtype, keys.device)}


class Layer:
    def __init__(self, keys: Any, kind: type) -> None:
        self.keys = torch.cat([torch.tensor([]), keys], dim=-1)
        self.kind = kind


@dataclass
class Output:
    loss: Any
    cache: Any = None


def trained(wrap: Callable[[Any], Any], make: Callable[[Any], Any], steps: int = 3) -> list[Any]:
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

    @wrap
    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        hidden = linear(x)
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        return make(hidden), loss

    return [step(torch.randn(2, 4)) for _ in range(steps)]


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
    elif isinstance(one, (list, tuple)):
        for mine, its in zip(one, other, strict=True):
            assert_same(mine, its)
    elif isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()))
    elif hasattr(one, "__dict__") and not isinstance(one, type):
        assert_same(vars(one), vars(other))
    else:
        assert one == other


@pytest.mark.parametrize(
    "make",
    [
        lambda hidden: Cache(hidden, 2),
        lambda hidden: Cache(hidden.detach(), 2),
        lambda hidden: {"output": Output(hidden.sum(), Cache(hidden, 4)), "other": Output(None)},
    ],
)
def test_an_object_that_the_step_makes_is_returned(make: Callable[[Any], Any]) -> None:
    expected = trained(lambda step: step, make)
    found = trained(roam.compile, make)
    assert_same(expected, found)
    assert len(set(map(id, found))) == len(found)


def _twice(hidden: Any) -> Any:
    one = Layer(hidden, int)
    return [one, one]


_layer = Layer(torch.zeros(2, 4), int)
_list = [1, 2]
_seen: list[Any] = []


def _from_before(hidden: Any) -> Any:
    _layer.kind = int
    return _layer


def _with_a_list_from_before(hidden: Any) -> Any:
    output = Output(hidden)
    output.cache = _list
    return output


def _watched(hidden: Any) -> Any:
    output = Output(hidden)
    _seen.append(weakref.ref(output))
    _seen.clear()
    hidden.output = weakref.ref(output)
    return output


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Finalized(Layer):
    def __del__(self) -> None:
        pass


@pytest.mark.parametrize(
    "make",
    [
        _twice,
        _from_before,
        _with_a_list_from_before,
        _watched,
        Slotted,
        lambda hidden: Finalized(hidden, int),
        lambda hidden: Output(hidden, torch.nn.ReLU()),
        lambda hidden: Output({hidden: 1}),
        lambda hidden: (lambda one: [one, Output(one)])([hidden]),
        lambda hidden: (lambda one: [Output(one), one])({"hidden": hidden}),
        lambda hidden: [[hidden]] * 2,
        lambda hidden: _list,
        lambda hidden: [deque([hidden])] * 2,
    ],
)
def test_an_object_that_another_one_cannot_stand_for_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(roam.CaptureError) as caught:
        trained(roam.compile, make)
    assert caught.value.code in ("result", "moved")
