"""Streams of a CUDA device that one run uses side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Streams(Protocol):
    """What a plan for several streams needs of a device. Stream 0 is the stream that the caller is
    on.
    """

    def entered(self) -> AbstractContextManager[None]:
        """Around a run: no stream starts before what the caller has enqueued, and what the caller
        enqueues afterwards waits for all.
        """

    def switch(self, stream: int) -> None:
        """What is enqueued from here on runs on a stream."""

    def record(self, event: int) -> None:
        """An event happens when everything that has been enqueued on the present stream is done."""

    def wait(self, event: int) -> None:
        """What is enqueued on the present stream from here on waits for an event."""

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        """Keeps the allocator from using a tensor's memory again before a stream has done all that
        it has been given so far.
        """


class CudaStreams:
    """Streams of a CUDA device: the current stream, new streams beside it, and one CUDA event per
    number. They are made by the first run, so that a plan can be made without the device.
    """

    def __init__(self, device: torch.device, streams: int, events: int) -> None:
        self._device = device
        self._counts = streams - 1, events
        self._others: list[torch.cuda.Stream] = []
        self._events: list[torch.cuda.Event] = []
        self._streams: list[torch.cuda.Stream] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        if not self._streams:
            others, events = self._counts
            self._others = [torch.cuda.Stream(self._device) for _ in range(others)]
            self._events = [torch.cuda.Event() for _ in range(events)]
        main = torch.cuda.current_stream(self._device)
        self._streams = [main, *self._others]
        for other in self._others:
            other.wait_stream(main)
        try:
            yield
        finally:
            torch.cuda.set_stream(main)
            for other in self._others:
                main.wait_stream(other)

    def switch(self, stream: int) -> None:
        torch.cuda.set_stream(self._streams[stream])

    def record(self, event: int) -> None:
        self._events[event].record(torch.cuda.current_stream(self._device))

    def wait(self, event: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._events[event])

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        if tensor.is_cuda:  # some kernels leave a seed on the CPU
            tensor.record_stream(self._streams[stream])
