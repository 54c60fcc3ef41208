"""Stand-ins for values: each says of what class its value is, and gives the value itself to what
asks for more, which is noted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any, Final

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


def class_for(
    kind: type, base: type[StandIn] = StandIn, own: Collection[str] = ()
) -> type[StandIn]:
    """A class of stand-ins for values of a class.

    Args:
        kind: the class of the values.
        base: what it is derived from.
        own: further special methods that `base` has for itself.
    """
    methods = {
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


_VALUES: Final[tuple[type, ...]] = (str, bytes, int, float)
_OF_TOKENIZERS: Final = "Encoding"
"""What a fast tokenizer of transformers leaves in a `BatchEncoding` for each text. No two batches
have the same, and hardly any step looks at them.
"""


def kinds() -> tuple[type, ...]:
    """The classes of plain values that calls may bring along, although others came before."""
    encoding = _encoding()
    return _VALUES if encoding is None else (*_VALUES, encoding)


def is_left_by_tokenizer(value: Any) -> bool:
    """Whether a value is none that a step is expected to look at."""
    return type(value) is _encoding()


def _encoding() -> type | None:
    return getattr(sys.modules.get("tokenizers"), _OF_TOKENIZERS, None)


def class_stood_for(kind: type) -> type:
    """The class of the values for which stand-ins of a class stand; any other class itself."""
    return kind._roam_kind if issubclass(kind, StandIn) else kind  # type: ignore[attr-defined]


def stand_in_for(value: Any, note: Callable[[], None]) -> Any:
    """A new stand-in for a value; it calls `note` whenever it is read."""
    kind: Any = type(value)
    made: Any = object.__new__(_class_for(kind))
    object.__setattr__(made, "_roam_real", value)
    object.__setattr__(made, "_roam_note", note)
    return made


_class_for = functools.cache(class_for)
