"""Copies between memory and files that run in a thread beside the step: one after another, in the
order in which they were begun.

A copy is known by the address of the tensor in memory, which nothing else has until the copy has
been waited for. Each thread that runs steps knows its own copies alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

Work = Callable[[], None]


class _Copy:
    """A copy that has begun."""

    __slots__ = ("error", "is_over", "work")

    def __init__(self, work: Work) -> None:
        self.work: Work | None = work
        self.error: BaseException | None = None
        self.is_over = threading.Lock()
        self.is_over.acquire()


class _Worker:
    """The thread that copies. A forked process has none of its parent's threads, and gets its
    own.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.queue: SimpleQueue[_Copy] = SimpleQueue()
        threading.Thread(target=_serve, args=(self.queue,), name="roam copies", daemon=True).start()


class _Begun(threading.local):
    """The copies of a thread's steps that nobody has waited for, by their tensors' addresses."""

    def __init__(self) -> None:
        self.copies: dict[int, _Copy] = {}


_begun = _Begun()
_workers: list[_Worker] = []
_one_at_a_time = threading.Lock()


def pause() -> None:
    """Is called before each copy; tests replace it by one that waits."""


def begin(tensor: torch.Tensor, work: Work) -> None:
    """Has a copy made beside what the caller does next.

    Args:
        tensor: what is copied to or from, as `wait` will be given it.
        work: makes the copy. It must not hold Python's lock for long.
    """
    copy = _Copy(work)
    _begun.copies[tensor.data_ptr()] = copy
    with _one_at_a_time:
        if not _workers or _workers[0].process != os.getpid():
            _workers[:] = [_Worker()]
        _workers[0].queue.put(copy)


def wait(tensor: torch.Tensor) -> None:
    """Returns when the copy of a tensor is made, and raises what it has raised. Returns at once if
    there is none.
    """
    copy = _begun.copies.pop(tensor.data_ptr(), None)
    if copy is not None:
        copy.is_over.acquire()
        if copy.error is not None:
            raise copy.error


def settle() -> None:
    """Returns when all copies of the thread's steps are made, whatever has become of them: then
    their memory and their files are anybody's.
    """
    copies, _begun.copies = _begun.copies, {}
    for copy in copies.values():
        copy.is_over.acquire()


def _serve(queue: SimpleQueue[_Copy]) -> None:
    while True:
        copy = queue.get()
        try:
            pause()
            assert copy.work is not None, "it has not run"
            copy.work()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            copy.error = error
        copy.work = None  # the tensor's memory may go
        copy.is_over.release()
        del copy
