"""Delays Ctrl-C and other signals to a moment at which they do no harm, and never loses any."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Wait:
    """What stands in for the handler of Ctrl-C during a block that must not be torn."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._pressed: tuple[Any, ...] | None = None
        self.is_open = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._pressed = number, frame
        if self.is_open and not _is_dispatching(frame):
            self.deliver()

    def deliver(self) -> None:
        """Lets the handler know of what has been pressed, once."""
        event, self._pressed = self._pressed, None
        if event is not None:
            self.is_open = False  # what the interruption leaves behind is tidied up in peace
            self._handler(*event)


def _is_dispatching(frame: FrameType | None) -> bool:
    """Whether PyTorch calls from C++, where an exception may end the process instead of going
    through.
    """
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


_waits: list[_Wait] = []


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block, or where `interrupts_allowed` lets it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    wait = _Wait(handler)
    _waits.append(wait)
    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        _waits.pop()
        signal.signal(signal.SIGINT, handler)
        wait.deliver()


@contextmanager
def interrupts_allowed() -> Iterator[None]:
    """Ctrl-C takes effect at once, although the block is part of one in which it waits; during an
    operator that a dispatch mode handles, at the next `deliver_interrupts`.
    """
    if not _waits or threading.current_thread() is not threading.main_thread():
        yield
        return
    wait = _waits[-1]
    wait.is_open = True
    try:
        wait.deliver()
        yield
    finally:
        wait.is_open = False


def deliver_interrupts() -> None:
    """Lets a Ctrl-C take effect that came during an operator, where it is allowed to."""
    if _waits and _waits[-1].is_open and threading.current_thread() is threading.main_thread():
        _waits[-1].deliver()


@contextmanager
def signals_wait() -> Iterator[None]:
    """Python's handlers of signals other than Ctrl-C are called at the end of the block, once for
    each time that their signal came: in the middle of a trace they would be taken for a part of
    the step.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: dict[int, Any] = {}
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    try:
        for number in signal.valid_signals() - {signal.SIGINT}:
            if callable(handler := signal.getsignal(number)):
                waiting[number] = handler
                signal.signal(number, note)
        yield
    finally:
        for late, handler in waiting.items():
            if signal.getsignal(late) is note:  # else the block has set another one
                signal.signal(late, handler)
        _call(waiting, came)


def _call(handlers: dict[int, Callable[[int, FrameType | None], Any]], came: list[int]) -> None:
    """Calls the handlers of the signals that came, all of them even if one raises an exception."""
    try:
        while came:
            number = came.pop(0)
            handlers[number](number, sys._getframe())
    finally:
        if came:
            _call(handlers, came)


@contextmanager
def interrupts_count() -> Iterator[None]:
    """Ctrl-C ends the block even where library code, busy importing, swallows the exception that it
    raises: then at the block's end, or where what is half imported makes it fail.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else's handler, or Ctrl-C is ignored on purpose
        return
    pressed = False

    def press(*event: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield
    except Exception:
        if not pressed:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
