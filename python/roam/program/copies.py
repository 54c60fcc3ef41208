"""Copies between a step's memory and the second tier that are made beside the step: one after
another, in the order in which they were begun. Each begins when all is done that the step has done,
or enqueued, before it.

On the CPU a thread makes them, and who waits for one stops. On a device a stream of their own does,
and who waits has the current stream wait: the host goes on, and nothing that is enqueued later
begins before the copy is made. Memory that the device's allocator takes back is used again on that
stream alone, and so after the wait.

A copy is known by the address of the tensor in memory, which nothing else has until the copy has
been waited for. Each thread that runs steps knows its own copies alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

Work = Callable[[], None]

_STACK_BYTES = 2**20
"""Of the thread that copies, which calls little. The usual 8 MiB count as the process's own memory
where the system limits that.
"""


class _Enqueued:
    """A copy that a stream makes; `streams` has those of the device, as `torch.cuda` does."""

    __slots__ = ("device", "is_over", "streams")

    def __init__(self, work: Work, device: torch.device, streams: Any) -> None:
        self.device, self.streams = device, streams
        beside = _beside.get(device)
        if beside is None:
            beside = _beside[device] = streams.Stream(device)
        beside.wait_stream(streams.current_stream(device))
        with streams.stream(beside):
            work()
        self.is_over = beside.record_event()

    def settle(self) -> None:
        self.streams.current_stream(self.device).wait_event(self.is_over)

    wait = settle


class _Copy:
    """A copy that a thread makes."""

    __slots__ = ("error", "is_over", "work")

    def __init__(self, work: Work) -> None:
        self.work: Work | None = work
        self.error: BaseException | None = None
        self.is_over = threading.Lock()
        self.is_over.acquire()

    def settle(self) -> None:
        """Returns when it is made, whatever has become of it."""
        self.is_over.acquire()

    def wait(self) -> None:
        """The same, and raises what it has raised."""
        self.settle()
        if self.error is not None:
            raise self.error


class _Worker:
    """The thread that copies. A forked process has none of its parent's threads, and gets its
    own.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.queue: SimpleQueue[_Copy] = SimpleQueue()
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(
                target=_serve, args=(self.queue,), name="roam copies", daemon=True
            ).start()
        finally:
            threading.stack_size(before)


class _Begun(threading.local):
    """The copies of a thread's steps that nobody has waited for, by their tensors' addresses."""

    def __init__(self) -> None:
        self.copies: dict[int, _Copy | _Enqueued] = {}


_begun = _Begun()
_beside: dict[torch.device, Any] = {}
"""The stream that makes a device's copies."""
_workers: list[_Worker] = []
_one_at_a_time = threading.Lock()


def pause() -> None:
    """Is called before each copy; tests replace it by one that waits."""


def streams_of(device: torch.device) -> Any | None:
    """What has a device's streams; None for one whose copies a thread makes. Tests replace it."""
    return torch.cuda if device.type == "cuda" else None


def begin(tensor: torch.Tensor, work: Work) -> None:
    """Has a copy made beside what the caller does next.

    Args:
        tensor: what is copied to or from, as `wait` will be given it.
        work: makes the copy, or enqueues it. It must not hold Python's lock for long.
    """
    streams = streams_of(tensor.device)
    if streams is not None:
        _begun.copies[tensor.data_ptr()] = _Enqueued(work, tensor.device, streams)
        return
    copy = _Copy(work)
    _begun.copies[tensor.data_ptr()] = copy
    with _one_at_a_time:
        if not _workers or _workers[0].process != os.getpid():
            _workers[:] = [_Worker()]
        _workers[0].queue.put(copy)


def wait(tensor: torch.Tensor) -> None:
    """What the caller does next begins when the copy of a tensor is made; raises what that has
    raised. Returns at once if there is none.
    """
    copy = _begun.copies.pop(tensor.data_ptr(), None)
    if copy is not None:
        copy.wait()


def settle() -> None:
    """As `wait`, for all copies of the thread's steps, whatever has become of them: then their
    memory and their files are anybody's.
    """
    copies, _begun.copies = _begun.copies, {}
    for copy in copies.values():
        copy.settle()


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
