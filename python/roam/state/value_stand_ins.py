"""Stand-ins for what tokenizers leave in a batch: each says of what class it is, and refuses a step
that looks at it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
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


class StandIn:
    """What takes the place of a value in a trace. Its subclasses have the special methods of the
    value's class, each of which refuses the step.
    """

    __slots__ = ("_roam_refuse",)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return type(self)._roam_kind  # type: ignore[attr-defined]
        return read(self)


def read(value: Any) -> Any:
    """Refuses a step that looks at a stand-in; any other value is itself."""
    if issubclass(type(value), StandIn):
        object.__getattribute__(value, "_roam_refuse")()
    return value


@functools.cache
def _class_for(kind: type) -> type[StandIn]:
    """A class of stand-ins for values of a class."""
    methods = {
        name: lambda self, *_: read(self)
        for name in dir(kind)
        if name.startswith("__") and name not in _OWN and callable(getattr(kind, name))
    }
    return type(
        f"StandIn_{kind.__name__}", (StandIn,), {"__slots__": (), "_roam_kind": kind, **methods}
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


def stand_in_for(value: Any, refuse: Callable[[], None]) -> Any:
    """A new stand-in for a value; it calls `refuse` whenever it is looked at."""
    kind: Any = type(value)
    made: Any = object.__new__(_class_for(kind))
    object.__setattr__(made, "_roam_refuse", refuse)
    return made
