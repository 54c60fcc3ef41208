"""Stand-ins for plain values: each says of what class its value is, and gives the value itself to
whatever asks for more, which is noted.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection
from typing import Any, Final

VALUES: Final[tuple[type, ...]] = (str, bytes, int)
"""The classes of plain values which a call may bring along although the step does not read them,
such as the names of files.
"""
_OWN: Final = frozenset(
    {
        "__class__",
        "__delattr__",
        "__dir__",
        "__doc__",
        "__getattribute__",
        "__init__",
        "__init_subclass__",
        "__new__",
        "__setattr__",
        "__subclasshook__",
    }
)
"""Special methods that a stand-in has for itself."""
_ASKED_BY_NUMPY: Final = "__array_struct__"
"""What NumPy looks for in an object that it makes an array of."""
_REFLECTED: Final[dict[str, Callable[[Any, Any], Any]]] = {
    f"__r{name}__": getattr(operator, f"__{name}__")
    for name in (
        "add",
        "and",
        "floordiv",
        "lshift",
        "matmul",
        "mod",
        "mul",
        "or",
        "pow",
        "rshift",
        "sub",
        "truediv",
        "xor",
    )
}


class StandIn:
    """What takes the place of a plain value in a trace. Its subclasses have the special methods of
    the value's class, and each of them notes that the value was read.
    """

    __slots__ = ("__weakref__", "_roam_note", "_roam_real")

    def __getattribute__(self, name: str) -> Any:
        real = object.__getattribute__(self, "_roam_real")
        if name == "__class__":
            return type(real)
        if hasattr(type(real), name) or name == _ASKED_BY_NUMPY:
            object.__getattribute__(self, "_roam_note")()
        return getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_value_of(self), name, value)  # which raises an error

    def __delattr__(self, name: str) -> None:
        delattr(_value_of(self), name)


def _value_of(stand_in: Any) -> Any:
    return object.__getattribute__(stand_in, "_roam_real")


def read(value: Any) -> Any:
    """What a stand-in stands for, which counts as read; any other value itself."""
    if not issubclass(type(value), StandIn):
        return value
    object.__getattribute__(value, "_roam_note")()
    return _value_of(value)


def _special(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(read(self), name)(*map(read, args))

    return method


def _reflected(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        return operation(other, read(self))

    return method


def class_for(
    kind: type, base: type[StandIn] = StandIn, own: Collection[str] = ()
) -> type[StandIn]:
    """A class of stand-ins for values of a class.

    Args:
        kind: the class of the values.
        base: what it is derived from.
        own: further special methods that `base` has for itself.
    """
    methods = {name: _reflected(operation) for name, operation in _REFLECTED.items()}
    methods |= {
        name: _special(name)
        for name in dir(kind)
        if name.startswith("__")
        and name not in _OWN
        and name not in own
        and callable(getattr(kind, name))
    }
    return type(
        f"StandIn_{kind.__name__}", (base,), {"__slots__": (), "_roam_kind": kind, **methods}
    )


_CLASSES: Final[dict[type, type]] = {kind: class_for(kind) for kind in VALUES}
"""The class of the stand-ins for values of each class."""
_OF_TOKENIZERS: Final = "Encoding"
"""What a fast tokenizer of transformers leaves in a `BatchEncoding` for each text. No two batches
have the same, and hardly any step looks at them.
"""


def kinds() -> tuple[type, ...]:
    """The classes of values for which there are stand-ins."""
    encoding = getattr(sys.modules.get("tokenizers"), _OF_TOKENIZERS, None)
    return VALUES if encoding is None else (*VALUES, encoding)


def class_stood_for(kind: type) -> type:
    """The class of the values for which stand-ins of a class stand; any other class itself."""
    return kind._roam_kind if issubclass(kind, StandIn) else kind  # type: ignore[attr-defined]


def is_or_stands_for_one(kind: type) -> bool:
    """Whether a class is one of `kinds`, or that of stand-ins for one."""
    return kind in kinds() or issubclass(kind, StandIn)


def stand_in_for(value: Any, note: Callable[[], None]) -> Any:
    """A new stand-in for a value of one of `kinds`; it calls `note` whenever it is read."""
    kind = type(value)
    if kind not in _CLASSES:
        _CLASSES[kind] = class_for(kind)
    made: Any = object.__new__(_CLASSES[kind])
    object.__setattr__(made, "_roam_real", value)
    object.__setattr__(made, "_roam_note", note)
    return made


__all__ = [
    "VALUES",
    "StandIn",
    "class_for",
    "class_stood_for",
    "is_or_stands_for_one",
    "kinds",
    "read",
    "stand_in_for",
]
