"""Calls into C++ that wait for other ranks without a time limit, in threads of their own.

The thread that needs the result can then look for ranks that have left, and be interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Waiting(Generic[T]):
    """One such call. It begins when this object is made.

    If the call never ends, it does not keep the process alive.
    """

    __slots__ = ("_call", "_error", "_has_ended", "_result")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._result: list[T] = []
        self._error: Exception | None = None
        self._has_ended = threading.Event()
        _helper().calls.put(self)

    def run(self) -> None:
        """Makes the call, and lets go of it."""
        call, self._call = self._call, None
        assert call is not None, "it runs once"
        try:
            self._result.append(call())
        except Exception as error:  # noqa: BLE001 - the thread that waits raises it
            self._error = error.with_traceback(None)  # whose frames hold the call
        del call

    def end(self) -> None:
        """Tells the thread that waits of the end of the call."""
        self._has_ended.set()

    def is_done(self, timeout_s: float) -> bool:
        """Whether the call has ended, after so many seconds at most."""
        return self._has_ended.wait(timeout_s)

    def result(self) -> T:
        """What the call returned, when it has ended.

        Raises:
            Exception: what the call raised.
        """
        if self._error is not None:
            raise self._error
        return self._result[0]


class _Helper(threading.Thread):
    """Makes one call after another: each new thread would start more threads of PyTorch's."""

    def __init__(self) -> None:
        super().__init__(name="roam waits for ranks", daemon=True)
        self.calls: SimpleQueue[Waiting[Any]] = SimpleQueue()

    def run(self) -> None:
        with torch.no_grad():
            while True:
                waiting = self.calls.get()
                waiting.run()
                _idle.append(self)
                waiting.end()
                del waiting


_idle: list[_Helper] = []


def _helper() -> _Helper:
    """A thread that has nothing to do."""
    while _idle:
        helper = _idle.pop()
        if helper.is_alive():  # in a process that was forked meanwhile none is
            return helper
    helper = _Helper()
    helper.start()
    return helper


__all__ = ["Waiting"]
