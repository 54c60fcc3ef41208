"""Watches traces in which something else stands for values of the step's: which exceptions pass
code, also those that it catches, and whether it may read such a value unnoticed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_ADDRESS: Final = re.compile("0x[0-9a-f]+")
_args: Final[Any] = BaseException.__dict__["args"]


class Watch:
    """What this thread does in blocks.

    Attributes:
        raised: how often an exception passed a line of some code: its class, and what it says.
        is_blind: whether the code may have read values in a way that nothing notices.
    """

    def __init__(self) -> None:
        self.raised: Counter[tuple[object, int, type, tuple[Any, ...]]] = Counter()
        self.is_blind = False

    def enters(self, frame: FrameType) -> bool:
        """Looks at a function that begins; whether its exceptions count."""
        raise NotImplementedError

    def sees(self, frame: FrameType, event: str, arg: Any) -> None:
        """Looks at an exception, or at the next instruction of a frame that is traced so."""

    @contextmanager
    def on(self) -> Iterator[Watch]:
        """Watches in the block. Exceptions are counted where they are raised and in each function
        that they pass. `GeneratorExit` does not count: it only says that nobody asks a generator
        for more, as in `next(x for x in xs if x.is_wanted)`. Putting stand-ins in places abandons
        some.
        """

        def passes(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "exception" and arg[0] is not GeneratorExit:
                self.raised[frame.f_code, frame.f_lineno, arg[0], _said_by(arg[1])] += 1
                self.sees(frame, event, arg)
            elif event == "opcode":
                self.sees(frame, event, arg)
            return passes

        def begins(frame: FrameType, event: str, arg: Any) -> Any:
            if not self.enters(frame):
                return None
            frame.f_trace_lines = False
            return passes

        before = sys.gettrace()
        sys.settrace(begins)
        try:
            yield self
        finally:
            sys.settrace(before)


def _said_by(error: Any) -> tuple[Any, ...]:
    """The arguments of an exception, text without addresses and objects without values. A function
    written in C may raise the same exception for a wrong value as for a wrong class, but says
    something else.
    """
    said = _args.__get__(error) if isinstance(error, BaseException) else (error,)
    return tuple(_ADDRESS.sub("", part) if type(part) is str else type(part) for part in said)


__all__ = ["Watch"]
