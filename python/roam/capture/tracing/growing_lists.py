"""Lists of a step's state to which it only adds, in traces.

A stand-in takes the place of such a list (`roam.state.growing_lists`). It has to be certain that
the step does not depend on what is in the list, or the list counts as any other. So each trace is
looked at: nothing else may have been done to the stand-in, nothing may hold it afterwards that did
not before, and no library may have been given it. One more trace, with a copy in the list's place,
must lead to the same program and raise the same exceptions, also those that the step catches.
"""

from __future__ import annotations

import gc
import inspect
import sys
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import torch

from roam.capture.tracing.unnoticed_reads import ways_of
from roam.capture.tracing.watching import Watch
from roam.own_code import is_own_file
from roam.state.growing_lists import OWN_CODE, Growing, GrowingStandIn, Recorded
from roam.state.library_code import is_installed

_ASKED: Final[list[Any]] = [
    vars(base).get("__instancecheck__")
    for kind in (torch.nn.Parameter, torch.nn.Buffer)
    for base in type.mro(type(kind))
]
_KEEPS: Final = frozenset(
    method.__code__
    for method in (ABCMeta.__instancecheck__, torch.nn.Module.__setattr__, *_ASKED)
    if hasattr(method, "__code__")
)
"""Functions of libraries that only hand a list on, or ask for its class."""
_FINDS: Final = frozenset(
    {
        "__globals__", "_current_frames", "_getframe", "currentframe", "eval", "exec", "f_back", "get_objects",
        "get_referents", "get_referrers", "globals", "import_module",
    }
)  # fmt: skip
"""Names of what finds values where no walk over a step's state does."""
_count = sys.getrefcount  # the step's code gets another function for it
_PASSED: Final = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS
_MOST_PARTS: Final = 64
"""How many values of a container among a call's arguments are looked at."""


class GrowingLists:
    """The lists that grow, in the traces of one capture.

    Args:
        growing: the lists.
        are_plain: whether copies take their places, instead of stand-ins.
    """

    def __init__(self, growing: Sequence[Growing], *, are_plain: bool = False) -> None:
        self._recorded = [Recorded(one, is_plain=are_plain) for one in growing]
        self._held: list[int] = []

    def enter(self) -> None:
        """Puts something else in the place of each list."""
        for one in self._recorded:
            for space, key in one.growing.places:
                space.set(key, one.value)

    def leave(self) -> None:
        """Puts the lists back, unless the step has put something else there, which a `Snapshot`
        undoes.
        """
        for one in self._recorded:
            for space, key in one.growing.places:
                if space.get(key) is one.value:
                    space.set(key, one.growing.container)

    def begin(self) -> None:
        """To be called before a trace runs the step."""
        for one in self._recorded:
            one.begin()
        if _watches:  # which holds them, too
            values = [one.value for one in self._recorded]
            _watches[-1].stand_ins = values, _counts(values)
        self._held = self._holders()

    def added(self) -> list[list[Any]]:
        """What the step has added, to each list to which it has added anything."""
        return [added for one in self._recorded if (added := one.added())]

    def lists(self) -> list[tuple[str, Any]]:
        """These lists, each with its path."""
        return [(one.growing.path, one.growing.container) for one in self._recorded if one.added()]

    def read(self, *, is_over: bool) -> set[str]:
        """Paths of the lists on which the step may depend.

        Args:
            is_over: whether the trace has come to its end, so that nothing of it should hold any.
        """
        found = {one.growing.path for one in self._recorded if one.has_moved() or one.is_read}
        if is_over and self._recorded:
            if self._holders() != self._held:
                gc.collect()
            found |= {
                one.growing.path
                for one, now, before in zip(
                    self._recorded, self._holders(), self._held, strict=True
                )
                if now > before
            }
        return found

    def _holders(self) -> list[int]:
        return [_count(one.value) for one in self._recorded]


class ListWatch(Watch):
    """Sees code that is not the user's which is given a stand-in, and code of the user's that may
    find a list by a name that it computes. Only exceptions that pass the user's code count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stand_ins: tuple[list[Any], list[int]] = [], []
        """Those of the trace that runs, each with how often it is held when nothing of the step's
        holds it."""

    def enters(self, frame: FrameType) -> bool:
        code = frame.f_code
        if is_users := ways_of(code).is_users:
            self.is_blind = self.is_blind or _may_find(frame)
        elif (
            not self.is_blind
            and _counts(self.stand_ins[0]) != self.stand_ins[1]
            and _is_given_one(frame)
        ):
            self.is_blind = not (
                code in OWN_CODE or code in _KEEPS or is_own_file(code.co_filename)
            )
        return is_users

    @contextmanager
    def on(self) -> Iterator[Watch]:
        """Watches in the block."""
        _watches.append(self)
        try:
            with super().on():
                yield self
        finally:
            _watches.pop()
            self.stand_ins = [], []


_watches: Final[list[ListWatch]] = []


def _counts(values: list[Any]) -> list[int]:
    return [_count(value) for value in values]


def _may_find(frame: FrameType) -> bool:
    """Whether the user's own code may find a list by a name that it computes. Libraries do not look
    for one.
    """
    names = frame.f_code.co_names
    if is_installed(frame.f_code.co_filename):
        return False
    if not _FINDS.isdisjoint(names):
        return True
    held = (*map(frame.f_globals.get, names), *frame.f_locals.values())
    return "modules" in names and (
        "sys" in names or any(value is sys or value is sys.modules for value in held)
    )


def _is_given_one(frame: FrameType) -> bool:
    """Whether a stand-in is among the arguments of a call, or in a container among them."""
    code, held = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += sum(bool(code.co_flags & flag) for flag in _PASSED)
    for name in code.co_varnames[:count]:
        value = held.get(name)
        kind = type(value)
        if issubclass(kind, GrowingStandIn):
            return True
        if kind is tuple or kind is list:
            parts: Any = value
        elif kind is dict:
            parts = list(value.values())  # type: ignore[union-attr]
        else:
            continue
        if len(parts) <= _MOST_PARTS and any(
            issubclass(type(part), GrowingStandIn) for part in parts
        ):
            return True
    return False


__all__ = ["GrowingLists", "ListWatch"]
