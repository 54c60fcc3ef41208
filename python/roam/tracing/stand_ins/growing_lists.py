"""Lists of a step's state to which it only adds, in traces.

A stand-in takes the place of such a list (`roam.state.growing_lists`). It has to be certain that
the step does not depend on what is in the list, or the list counts as any other. So nothing else
may be done to the stand-in in a trace, nothing may hold it afterwards that did not before, no
library may be given it, and the user's code may not be able to tell it from the list unnoticed.
"""

from __future__ import annotations

import gc
import inspect
import sys
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final

import torch

from roam.own_code import is_own_file
from roam.state.growing_lists import OWN_CODE, Growing, GrowingStandIn, Recorded
from roam.tracing.source_location import is_written_by_user
from roam.tracing.stand_ins.unnoticed_reads import may_find, may_miss

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
_count = sys.getrefcount  # the step's code gets another function for it
_PASSED: Final = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS
_MOST_PARTS: Final = 64
"""How many values of a container among a call's arguments are looked at."""


class GrowingLists:
    """The lists that grow, in the traces of one capture.

    Args:
        growing: the lists.
        code: of all functions that the step reaches, each with its globals.
    """

    def __init__(self, growing: Sequence[Growing], code: Mapping[CodeType, Any]) -> None:
        self._recorded = [Recorded(one) for one in growing]
        self._held: list[int] = []
        self._is_blind = bool(growing) and any(
            may_miss(one) or may_find(one, names) for one, names in code.items()
        )

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

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block in which a trace runs the step."""
        for one in self._recorded:
            one.begin()
        self._held = self._holders()
        if not self._recorded or self._is_blind or sys.gettrace() is not None:
            self._is_blind = bool(self._recorded)
            yield
            return
        sys.settrace(self._enters)
        try:
            yield
        finally:
            sys.settrace(None)

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
        found = {
            one.growing.path
            for one in self._recorded
            if one.has_moved() or one.is_read or self._is_blind
        }
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

    def _enters(self, frame: FrameType, *_: object) -> None:
        """Sees code that is not the user's which is given a stand-in."""
        code = frame.f_code
        if (
            not self._is_blind
            and self._holders() != self._held
            and not is_written_by_user(code)
            and _is_given_one(frame)
        ):
            self._is_blind = not (
                code in OWN_CODE or code in _KEEPS or is_own_file(code.co_filename)
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
