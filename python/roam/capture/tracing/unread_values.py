"""Unread values: plain values among the arguments, such as names of files in a batch, that the step
hands around without looking at them. No plan need be made for each of them.

A step that has been traced is traced once more with stand-ins in place of such values. A stand-in
says of what class the value is, and gives the value itself to whatever asks for more, which is
noted. A function written in C may refuse a stand-in without asking it anything, and the step may go
on after that. So exceptions are counted too, also those that the step catches: with stand-ins no
other exception may be raised than without. Nothing is sure either where code may read values in a
way that stand-ins do not notice (`roam.capture.tracing.unnoticed_reads`).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any, Final

from roam.capture.tracing.unnoticed_reads import (
    may_read_by_identity,
    may_read_by_raising,
    ways_of,
)
from roam.capture.tracing.watching import Watch
from roam.errors import CaptureError
from roam.state.value_stand_ins import StandIn, stand_in_for

_OWN: Final = StandIn.__getattribute__.__code__


class _Reads(Watch):
    """Sees reads that stand-ins do not notice."""

    def enters(self, frame: FrameType) -> bool:
        if frame.f_code is _OWN:
            return False
        ways = ways_of(frame.f_code)
        self.is_blind |= ways.when_run
        frame.f_trace_opcodes = bool(ways.identity_tests)
        return True

    def sees(self, frame: FrameType, event: str, arg: Any) -> None:
        is_test = event == "opcode"
        self.is_blind |= (
            may_read_by_identity(frame) if is_test else may_read_by_raising(frame, arg[0], arg[2])
        )


class StandIns:
    """Stand-ins for some of a call's flattened arguments.

    Args:
        values: the value at each place that gets a stand-in.

    Attributes:
        read: the places of the values that have been read.
    """

    def __init__(self, values: Mapping[int, Any]) -> None:
        self.read: set[int] = set()
        self._values = dict(values)
        self._made: list[tuple[int, weakref.ref[Any]]] = []

    def put(self, leaves: list[Any]) -> list[Any]:
        """The flattened arguments with new stand-ins."""
        return [
            self._stand_in(place) if place in self._values else leaf
            for place, leaf in enumerate(leaves)
        ]

    def are_kept(self) -> bool:
        """Whether anything still holds one that was put somewhere."""
        if any(made() is not None for _, made in self._made):
            gc.collect()
        return any(made() is not None for _, made in self._made)

    def stood_for(self, value: Any) -> tuple[int, Any] | None:
        """The place that a value is a stand-in for, and what belongs there; None for any other
        value. That does not count as read.
        """
        places = (place for place, made in self._made if made() is value)
        place = None if value is None else next(places, None)
        return None if place is None else (place, self._values[place])

    def _stand_in(self, place: int) -> Any:
        value = self._values[place]
        made = stand_in_for(value, lambda: self.read.add(place))
        self._made.append((place, weakref.ref(made)))
        return made


def unread(
    values: Mapping[int, Any],
    trace: Callable[[StandIns], Any],
    agree: Callable[[Any, Any], bool],
) -> Collection[int]:
    """The places of the values that a step does not read; none if that is not sure.

    Args:
        values: those that have changed from call to call, each with its place among the flattened
            arguments.
        trace: traces the step with stand-ins, and returns its programs.
        agree: whether two traces have led to the same programs.
    """
    if sys.gettrace() is not None:
        return ()  # a debugger's
    try:
        with _Reads().on() as expected:
            plain = trace(StandIns({}))
    except CaptureError:  # which no trace of the capture has met
        return ()
    left = dict(values)
    while left and not expected.is_blind:
        stand_ins = StandIns(left)
        try:
            with _Reads().on() as seen:
                programs = trace(stand_ins)
        except Exception:  # noqa: BLE001 - for a function written in C, a stand-in is no value
            programs = None
        is_sure = (
            programs is not None
            and not seen.is_blind
            and not seen.raised - expected.raised
            and agree(plain, programs)
            and not stand_ins.are_kept()
        )
        if is_sure:
            return left.keys() - stand_ins.read
        if not stand_ins.read:
            return ()
        left = {place: value for place, value in left.items() if place not in stand_ins.read}
    return ()


__all__ = ["StandIns", "unread"]
