"""Live numbers: Python numbers that change from step to step and must never be frozen at capture.

A learning rate, an optimizer's step count, a loss scale: during capture each is a `LiveFloat` or `LiveInt`, whose
arithmetic is recorded as calls of Python's own operators, in the order in which the user's code makes them, so that a
run gives the very bits of eager. Any use that would bring the value itself into Python (`float(x)`, `if x > 1`,
`print(x)`) raises `CaptureError`: what the value decides at capture would be decided for ever.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from roam.capture.record import Recorder


class LiveNode:
    """What C++ carries through a kernel's arguments in place of the number; see `torch.SymFloat.node`."""

    __slots__ = ("is_integer_value", "origin", "recorder", "slot")

    def __init__(self, recorder: Recorder, slot: int, is_integer_value: bool, origin: str) -> None:
        self.recorder = recorder
        self.slot = slot
        self.is_integer_value = is_integer_value
        self.origin = origin

    def is_int(self) -> bool:
        return self.is_integer_value

    def is_float(self) -> bool:
        return not self.is_integer_value

    def is_bool(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def _value(self, *_: object) -> Any:
        """The number itself, where it depends on nothing but constants written in the step; otherwise refused."""
        known = self.recorder.known_value(self.slot)
        return self._reached_python() if known is None else known

    def decide(self, function: Callable[..., bool], others: tuple[Any, ...]) -> bool:
        """A comparison: answered where a plan can hold on to the answer, otherwise refused."""
        if all(type(other) in (int, float) for other in others):
            answer = self.recorder.decided(self.slot, function, others)
            if answer is not None:
                return answer
        return function(self._value(), *others)

    def _reached_python(self, *_: object) -> NoReturn:
        self.recorder.refuse(
            f"the value of {self.origin} reached Python: a plan would freeze what it decided at capture. "
            "Return it from the step and look at it there, or keep it a tensor",
            code="value_reached_python",
        )

    guard_int = guard_float = int_ = _value
    guard_bool = bool_ = expect_true = guard_size_oblivious = guard_or_false = guard_or_true = statically_known_true = (
        _reached_python
    )
    wrap_int = wrap_float = wrap_bool = _reached_python
    str = _graph_repr = _reached_python


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float, torch.SymInt, torch.SymFloat)):
            return NotImplemented
        return self.node.recorder.scalar_call(function, (self, other))

    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float, torch.SymInt, torch.SymFloat)):
            return NotImplemented
        return self.node.recorder.scalar_call(function, (other, self))

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return self.node.recorder.scalar_call(function, (self,))

    return method


def _of_value(function: Any) -> Callable[..., Any]:
    """What can only be answered with the number itself."""

    def method(self: Any, *others: Any) -> Any:
        return function(self.node._value(), *others)

    return method


def _comparison(function: Any) -> Callable[..., bool]:
    def method(self: Any, *others: Any) -> bool:
        return bool(self.node.decide(function, others))

    return method


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{
        f"__{name}__": _binary(getattr(operator, name))
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    },
    **{
        f"__r{name}__": _reflected(getattr(operator, name))
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    },
    "__neg__": _unary(operator.neg),
    "__pos__": _unary(operator.pos),
    "__abs__": _unary(operator.abs),
    "__sym_float__": _unary(float),
    "__sym_sqrt__": _unary(math.sqrt),
    **{
        f"__{name}__": _of_value(function)
        for name, function in {
            "float": float, "int": int, "index": operator.index, "trunc": math.trunc, "round": round,
            "floor": math.floor, "ceil": math.ceil, "hash": hash, "repr": repr, "str": str, "format": format,
        }.items()
    },
    **{
        f"__{name}__": _comparison(function)
        for name, function in {
            "bool": bool, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
            "gt": operator.gt, "ge": operator.ge,
        }.items()
    },
}  # fmt: skip

# `isinstance(lr, float)` must say what it says of the number itself.
LiveFloat: Any = type("LiveFloat", (torch.SymFloat,), _ARITHMETIC | {"__class__": property(lambda self: float)})
LiveInt: Any = type("LiveInt", (torch.SymInt,), _ARITHMETIC | {"__class__": property(lambda self: int)})


def as_live(number: Any) -> Any:
    """A live number that came back from C++ as torch's plain class gets its arithmetic back."""
    node: Any = getattr(number, "node", None)
    if isinstance(node, LiveNode) and isinstance(number, (torch.SymFloat, torch.SymInt)):
        return (LiveInt if node.is_integer_value else LiveFloat)(node)
    return number
