"""Objects whose every method runs the user's code, wherever a step reaches them: they are only
looked at.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from training import assert_same_bits

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]

RAN: list[str] = []
_METHODS = (
    *("__getattr__", "__eq__", "__ne__", "__len__", "__bool__", "__iter__", "__contains__"),
    *("__getitem__", "__repr__", "__str__", "__call__", "__int__", "__float__", "__index__"),
    *("__format__", "__lt__", "__reduce_ex__", "__copy__", "__deepcopy__", "__dir__", "__next__"),
    *("__array__", "__torch_function__", "keys", "items", "values"),
)
_PROPERTIES = (
    *("__class__", "data", "fget", "__func__", "grad", "shape", "dtype", "__wrapped__", "registry"),
    *("_modules", "param_groups", "node", "__self__", "__name__", "__code__"),
)


def _raising(name: str) -> Callable[..., Any]:
    def method(*_: Any, **__: Any) -> Any:
        RAN.append(name)
        raise ImportError(name)

    return method


def hostile(base: type) -> type:
    """A class of objects that note and refuse whatever is asked of them."""
    methods: dict[str, Any] = {name: _raising(name) for name in _METHODS}
    properties = {name: property(_raising(name)) for name in _PROPERTIES}

    def __hash__(self: Any) -> int:
        RAN.append("__hash__")
        return 7

    return type(
        f"Hostile_{base.__name__}", (base,), {**methods, **properties, "__hash__": __hash__}
    )


class OfMeta(type):
    """A metaclass whose classes are as hostile."""

    def __getattribute__(cls, name: str) -> Any:
        RAN.append(name)
        return type.__getattribute__(cls, name)

    def __len__(cls) -> int:
        RAN.append("__len__")
        return 0


class Made(metaclass=OfMeta):
    pass


class Every:
    def __getattribute__(self, name: str) -> Any:
        RAN.append(name)
        raise ImportError(name)


class Asking(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        RAN.append(name)
        raise AttributeError(name)


_alive = Every()
KINDS: dict[str, Callable[[], Any]] = {
    "object": hostile(object),
    "every attribute": Every,
    "of a metaclass": Made,
    "module": lambda: Asking("asking"),
    "list": lambda: hostile(list)([1]),
    "tuple": lambda: hostile(tuple)((1,)),
    "text": lambda: hostile(str)("a"),
    "number": lambda: hostile(float)(1.0),
    "deque": lambda: hostile(collections.deque)([1]),
    "weak reference": lambda: hostile(weakref.ref)(_alive),
    "partial": lambda: hostile(functools.partial)(print),
    "property": lambda: hostile(property)(),
    "operator without schema": lambda: torch.ops.prim.device.default,
    "operators for TorchScript": lambda: torch.ops.aten.tanh,
}
PLACES = (
    *("global", "closure", "attribute", "unread attribute", "list", "dictionary", "tuple"),
    *("default", "class attribute", "module attribute", "of a module", "of a function"),
    *("partial", "of an optimizer", "group", "method", "weak reference", "cache"),
)


def reaching(place: str, value: Any, base: Callable[[Any], Any], net: Any, optimizer: Any) -> Any:
    """A step that reaches a value at a place."""
    holder = types.SimpleNamespace(value=value, other=1)
    if place == "global":
        scope: dict[str, Any] = {"value": value, "base": base, "__name__": "of_user"}
        exec("def step(x):\n    value\n    return base(x)", scope)
        return scope["step"]
    if place == "closure":
        return lambda x: (value, base(x))[1]
    if place == "attribute":
        return lambda x: (holder.value, base(x))[1]
    if place == "unread attribute":
        return lambda x: (holder.other, base(x))[1]
    if place == "default":
        return lambda x, value=value: base(x)
    if place == "of a module":
        net.__dict__["value"] = value
        return lambda x: (net.value, base(x))[1]
    if place == "of an optimizer":
        optimizer.value = value
    if place == "group":
        optimizer.param_groups[0]["value"] = value
    if place in ("of an optimizer", "group"):
        return base
    user_module = types.ModuleType("of_user")
    user_module.value = value  # type: ignore[attr-defined]

    def function() -> int:
        return 1

    function.value = value  # type: ignore[attr-defined]
    cached = functools.lru_cache(lambda: value)
    cached()
    held: Any = {
        "list": lambda: [value, 1],
        "dictionary": lambda: {"a": value},
        "tuple": lambda: (value, 1),
        "class attribute": lambda: type("Of", (), {"value": value})(),
        "module attribute": lambda: user_module,
        "of a function": lambda: function,
        "partial": lambda: functools.partial(max, value),
        "method": lambda: types.MethodType(function, value),
        "weak reference": lambda: weakref.ref(value),
        "cache": lambda: cached,
    }[place]()
    if place == "module attribute":
        return lambda x: (held.value, base(x))[1]
    return lambda x: (held, base(x))[1]


def train(place: str, value: Any, wrap: Callable[[Any], Any]) -> list[Any]:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def base(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean() * float(2)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(reaching(place, value, base, net, optimizer))
    return [step(torch.ones(2, 3)) for _ in range(2)]


@pytest.mark.sweep
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_objects_are_only_looked_at(kind: str, place: str) -> None:
    if place == "weak reference" and kind in ("tuple", "text", "number", "weak reference"):
        pytest.skip("there are no weak references to these")
    value = KINDS[kind]()
    expected = train(place, value, lambda step: step)
    RAN.clear()
    seen = train(place, value, roam.compile)
    assert RAN == []
    assert_same_bits(expected, seen)


def test_sparse_gradients_and_parameters_are_refused() -> None:
    weight = torch.nn.Parameter(torch.randn(5, 1).to_sparse())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(roam.CaptureError, match="layout") as caught:
        roam.compile(lambda: optimizer.step())()
    assert caught.value.code == "layout"
    table = {torch.ones(4, 2, requires_grad=True): 1}
    (key,) = table
    key.grad = torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 2), (4, 2), is_coalesced=True)
    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(lambda: [one * 2 for one in table])()
    assert caught.value.code == "layout"
