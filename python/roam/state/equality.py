"""How guards compare and show Python values without ever running the user's ``==``, ``hash`` or
``repr``.
"""

from __future__ import annotations

import enum
import operator
import struct
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final, Literal

import torch


class _Missing:
    """Stands for an entry that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Final = _Missing()


def attributes_of(value: object) -> Any:
    """The ``__dict__`` of an object; None if it has none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


# Immutable values whose own `==` is exact and runs no user code. Floats and complex numbers are
# apart: they are compared by bits, so that nan equals nan and 0.0 differs from -0.0.
_EXACT: Final = frozenset(
    {
        bool,
        int,
        str,
        bytes,
        type(None),
        type(Ellipsis),
        type(NotImplemented),
        range,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
_SEQUENCES: Final = frozenset({tuple, torch.Size})
_SHOWN_CHARACTERS: Final = 80


def _is_numpy(kind: type, name: str) -> bool:
    """Whether `kind` is a class of NumPy's, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, getattr(numpy, name))


def is_numpy_scalar(value: object) -> bool:
    """Whether `value` is a NumPy scalar."""
    return _is_numpy(type(value), "generic")


def is_numpy_float(value: object) -> bool:
    """Whether `value` is a `numpy.float64`, which is a float of Python's too."""
    return isinstance(value, float) and _is_numpy(type(value), "float64")


def is_numpy_array(value: object) -> bool:
    """Whether `value` is a NumPy array."""
    return _is_numpy(type(value), "ndarray")


def is_hashed_by_value(kind: type) -> bool:
    """Whether the values of a type are immutable, and are equal, with equal hashes, exactly if they
    are the same.
    """
    return type(kind) is type and kind in _EXACT  # a metaclass may hash in its own way


def is_plain(value: object) -> bool:
    """Whether `value` is immutable all through and is compared by value: numbers, strings, dtypes,
    tuples of them, ...
    """
    kind = type(value)
    is_own = type(kind) is not type  # a metaclass may hash in its own way
    if not is_own and (kind in _EXACT or kind is float or kind is complex):
        return True
    if not is_own and (kind in _SEQUENCES or kind is frozenset):
        return all(map(is_plain, value))  # type: ignore[call-overload]
    if kind is slice:
        return is_plain((value.start, value.stop, value.step))  # type: ignore[attr-defined]
    return issubclass(kind, enum.Enum) or is_numpy_scalar(value)


def members_in(value: object) -> Iterator[enum.Enum]:
    """The members of enumerations in a plain value, which may have attributes and methods."""
    kind = type(value)
    if type(kind) is type and (kind in _EXACT or kind is float):
        return
    if issubclass(kind, enum.Enum):
        yield value  # type: ignore[misc]
    elif type(kind) is type and (kind in _SEQUENCES or kind is frozenset):
        for element in value:  # type: ignore[attr-defined]
            yield from members_in(element)


def same(expected: Any, value: Any) -> bool:
    """Whether two values are the same to a program that may not change: plain ones by exact type
    and value (floats by bits), tuples element by element, bound methods by their object and
    function (Python makes a new one at each access), everything else by identity.
    """
    if expected is value:
        return True
    kind = type(expected)
    if kind is not type(value):
        return False
    if type(kind) is type and kind in _EXACT:
        return bool(expected == value)
    if kind is float:
        return struct.pack("d", expected) == struct.pack("d", value)
    if kind is complex:
        return struct.pack("dd", expected.real, expected.imag) == struct.pack(
            "dd", value.real, value.imag
        )
    if kind is types.MethodType:
        return expected.__self__ is value.__self__ and expected.__func__ is value.__func__
    if issubclass(kind, tuple):
        return (
            len(expected) == len(value)
            and (all(map(operator.is_, expected, value)) or all(map(same, expected, value)))
            and (kind is tuple or _same_attributes(expected, value))
        )
    if kind is slice:
        return same(
            (expected.start, expected.stop, expected.step), (value.start, value.stop, value.step)
        )
    if kind is frozenset:
        return same_elements(expected, value)
    if is_numpy_scalar(expected):
        return bool(expected.dtype == value.dtype) and expected.tobytes() == value.tobytes()
    return False


def _same_attributes(expected: object, value: object) -> bool:
    """Whether two objects have the same attributes in their ``__dict__``."""
    old, new = attributes_of(expected), attributes_of(value)
    if not old or not new:
        return not old and not new
    return list(old) == list(new) and all(map(same, old.values(), new.values()))


def same_elements(expected: Any, value: Any) -> bool:
    """Whether two sets hold the same elements in the same order: a step may go through them. Plain
    ones are compared by type and value, others by identity.
    """
    return are_all(same, expected, value)


def are_all(test: Callable[[Any, Any], bool], ones: Any, others: Any) -> bool:
    """Whether two sequences are of one length, and a test holds for what is in the same places."""
    return len(ones) == len(others) and all(map(test, ones, others))


def pattern(values: Iterable[Hashable]) -> list[int]:
    """Which values are equal: for each, the place of the first that is equal to it."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(value, place) for place, value in enumerate(values)]


Way = Literal["plan", "refuse", "own"]
"""What is to be done with a call that a plan does not fit: it needs another plan, it is refused, or
the user's own function runs it."""


class Misfit(str):
    """What a plan was not made for, in words: the one answer of all that is asked before a plan
    runs a call.

    Attributes:
        place: what differs, without the values: equal for misfits of one kind at one place.
        way: what is to be done.
        code: of the error, where the call is refused.
        may_recur: whether a place may well be another at every call: a number, or what a list or
            dictionary holds, or another one in its place.
    """

    place: str
    way: Way
    code: str
    may_recur = False

    def __new__(
        cls, text: str, place: str | None = None, *, way: Way = "plan", code: str = ""
    ) -> Misfit:
        self = super().__new__(cls, text)
        self.place = text if place is None else place
        self.way, self.code = way, code
        return self


def changed(place: str, before: str, now: str) -> Misfit:
    """Something at a place is another value now."""
    return Misfit(f"{place} changed from {before} to {now}", place)


def show(value: object) -> str:
    """A short text for a value in a message; the user's own ``repr`` is never called."""
    if value is MISSING:
        return "nothing"
    kind = type(value)
    if is_plain(value):
        text = f"{kind.__name__}.{value._name_}" if issubclass(kind, enum.Enum) else repr(value)  # type: ignore[attr-defined]
        return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
    if issubclass(kind, (torch.SymFloat, torch.SymInt)):
        return "a number"  # for which capture has a stand-in
    if issubclass(kind, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"  # type: ignore[attr-defined]
    if issubclass(kind, tuple):
        return "(" + ", ".join(map(show, value)) + ")"  # type: ignore[call-overload]
    if issubclass(kind, type) or kind is types.FunctionType or kind is types.BuiltinFunctionType:
        return value.__qualname__  # type: ignore[attr-defined,no-any-return]
    return f"a {kind.__qualname__} object"
