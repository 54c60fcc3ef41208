"""Lists and deques of a step's state to which the step only adds, as `losses.append(loss.item())`
does.

While a trace runs, a stand-in takes the place of each. It is no list to code written in C, so that
no such code can see what is in it. What the step adds is recorded beside its result, and each run
adds the like to the real one. Whatever else is done to a stand-in is noted: the step may then
depend on what is in the list.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from roam.state.spaces import Place
from roam.state.value_stand_ins import StandIn, class_for

KINDS: Final = (list, deque)
"""The classes of what may grow; nothing that is derived from them."""
_ADDING: Final = ("append", "extend")
_NOT_METHODS: Final = ("__class_getitem__", "__iadd__")


@dataclass(frozen=True, slots=True)
class Growing:
    """A list or deque that the step adds to, with all places that hold it."""

    path: str
    container: Any
    places: list[Place]


class GrowingStandIn(StandIn):
    """What takes the place of a list or deque in a trace."""

    __slots__ = ("_roam_add",)

    def __getattribute__(self, name: str) -> Any:
        return (object if name in _ADDING else StandIn).__getattribute__(self, name)

    def append(self, value: Any, /) -> None:
        object.__getattribute__(self, "_roam_add")(value)

    def extend(self, values: Iterable[Any], /) -> None:
        GrowingStandIn.__iadd__(self, values)

    def __iadd__(self, values: Iterable[Any]) -> Any:
        add = object.__getattribute__(self, "_roam_add")
        is_one = issubclass(type(values), StandIn)  # maybe this one, which grows meanwhile
        for value in list(values) if is_one else values:
            add(value)
        return self


OWN_CODE: Final = frozenset(
    method.__code__
    for kind in (StandIn, GrowingStandIn)
    for method in vars(kind).values()
    if hasattr(method, "__code__")
)
"""That of the methods which a stand-in has for itself."""


def _class_for(kind: type) -> type[StandIn]:
    made = class_for(kind, GrowingStandIn, _NOT_METHODS)
    Sequence.register(made)  # so that `match` takes it for a list, and asks for its length
    return made


_CLASSES: Final = {kind: _class_for(kind) for kind in KINDS}


class Recorded:
    """What one trace after the other does to a list that grows.

    Args:
        growing: the list.

    Attributes:
        value: what takes the list's place.
        is_read: whether the step has done anything else than to add to it.
    """

    def __init__(self, growing: Growing) -> None:
        self.growing = growing
        self.is_read = False
        self._before = list(growing.container)
        self._added: list[Any] = []
        self._thread = threading.get_ident()
        self._others = {thread.ident for thread in threading.enumerate()}
        self._held: Any = growing.container.copy()
        self.value: Any = self._stand_in()

    def _stand_in(self) -> Any:
        made: Any = object.__new__(_CLASSES[type(self.growing.container)])
        object.__setattr__(made, "_roam_real", self._held)
        object.__setattr__(made, "_roam_note", self._note)
        object.__setattr__(made, "_roam_add", self._add)
        return made

    def _note(self) -> None:
        self.is_read = True

    def _add(self, value: Any) -> None:
        thread = threading.get_ident()
        if thread != self._thread:
            self.is_read = True
            if thread in self._others:  # it is none of the step's
                self._before.append(value)
                self.growing.container.append(value)
            return
        self._added.append(value)
        self._held.append(value)

    def begin(self) -> None:
        """To be called before a trace: nothing has been added yet."""
        self._added.clear()
        self._held.clear()
        self._held.extend(self._before)

    def added(self) -> list[Any]:
        """What the step has added since."""
        return list(self._added)

    def has_moved(self) -> bool:
        """Whether the step has changed the real list, which it has found in an unknown way. The
        list then gets back what it held.
        """
        if _are_same(list(self.growing.container), self._before):
            return False
        self.growing.container.clear()
        self.growing.container.extend(self._before)
        return True


def has_grown(container: Any, before: list[Any]) -> bool:
    """Whether a list or deque, which held other values before, has only got more at its end; a
    deque with a `maxlen` may have lost some at its beginning.
    """
    if type(container) not in KINDS:
        return False
    now = list(container)
    if type(container) is deque and len(now) == container.maxlen:
        return not _are_same(now, before) and any(
            _are_same(before[lost:], now[: len(before) - lost])
            for lost in range(len(before) + 1)
            if len(before) - lost <= len(now)
        )
    return len(now) > len(before) and _are_same(now[: len(before)], before)


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
