"""Tensors from before a step and after it that lie in chunks of the second tier, so that these take
no memory of the step between their uses.

The memory of such a tensor is that of a chunk (`chunks`), so the tensor itself is always true. Each
of the calls of a step that read and write chunks copies before it returns, or begins a copy beside
the step (`is_beside`). Then `Arrived` waits for what was read before its first use, and `Left` for
what was written before its memory is used again. On a device all this is enqueued.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from roam.errors import ExecutionError
from roam.program import copies
from roam.program.chunks import Chunk, Place, aligned, place_in
from roam.torch_compat.private import TENSOR_DATA, c_pointer, storage_uses


class Pages:
    """Makes tensors whose memory is a chunk of a place."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._free: tuple[Chunk, int] | None = None
        """A chunk with room, and where the room begins."""
        self._kept: Chunk | None = None
        self._unused = 0
        """What `_uses` is where no tensor lies in the chunk that is kept."""

    @contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """Around a run: there is room for tensors that `keep` makes. If all of them are gone at the
        end, as gradients are, the next run has the same.

        Raises:
            ExecutionError: there is not enough room.
        """
        if self._kept is None or (len(self._kept), self._kept.process) != (size_bytes, os.getpid()):
            self._kept = None
            self._kept = self.place.chunk(size_bytes) if size_bytes else None
            self._unused = self._uses()
        self._free = None if self._kept is None else (self._kept, 0)
        try:
            yield
        finally:
            self._free = None
            if self._uses() != self._unused:
                self._kept = None

    def release(self) -> None:
        """Gives back what is kept for the next run."""
        self._kept = None

    def keep(self, tensor: torch.Tensor, *, is_beside: bool = False) -> torch.Tensor:
        """A new tensor in a chunk with the bits of a tensor that fills its storage; `is_beside`: it
        has them when that has been copied.
        """
        size_bytes = aligned(tensor.numel() * tensor.itemsize)
        if self._free is None or self._free[1] + size_bytes > len(self._free[0]):
            self._free = self.place.chunk(size_bytes), 0
        chunk, offset_bytes = self._free
        self._free = (chunk, end) if (end := offset_bytes + size_bytes) < len(chunk) else None
        kept = chunk.tensor(offset_bytes, tensor)
        _do(is_beside, tensor, partial(chunk.store, tensor, offset_bytes))
        return kept

    def take_in(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Moves tensors, each with its name, that are not in a chunk of this process to one. All
        that holds a tensor finds it there.

        Raises:
            ExecutionError: there is no room, or a disk fails, or something else has the same
                memory. No value has changed.
        """
        left = [(name, tensor) for name, tensor in tensors if not is_paged(tensor)]
        for name, tensor in left:
            if not is_movable(tensor):
                raise ExecutionError(
                    f"{name} is to lie in {self.place} between its uses, and another tensor has "
                    "the same memory. Nothing has been changed. Let go of the other tensor, such "
                    "as a detached one, or clone it",
                    code="offload_shared",
                )
        if left:
            size_bytes = sum(aligned(one.numel() * one.itemsize) for _, one in left)
            self._free = self.place.chunk(size_bytes), 0
        for name, tensor in left:
            try:
                TENSOR_DATA.__set__(tensor, self.keep(TENSOR_DATA.__get__(tensor)))
            except OSError as error:  # its frames hold the tensor's memory
                raise self.place.full(name, error) from error.with_traceback(None)

    def _uses(self) -> int:
        return sys.getrefcount(self._kept)


def take_out(tensor: torch.Tensor, name: str) -> None:
    """Moves a tensor from its file to ordinary memory, if it lies in one. It stays there, and true,
    where another tensor has the same memory.

    Raises:
        ExecutionError: the file cannot be read. The tensor stays there.
    """
    place = place_in(tensor)
    if place is None or not _is_alone(tensor):
        return
    chunk, offset_bytes = place
    inner = TENSOR_DATA.__get__(tensor)
    moved = torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device)
    try:
        if chunk.is_private:
            moved.copy_(inner)
        else:
            chunk.load(moved, offset_bytes)
    except OSError as error:
        raise ExecutionError(
            f"{name} cannot be read from its file: {error}. It stays there; save what can be read",
            code="failed",
        ) from error
    TENSOR_DATA.__set__(tensor, moved)


def is_paged(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a file of this process, and not in one of its parent."""
    place = place_in(tensor)
    return place is not None and place[0].process == os.getpid()


def is_movable(tensor: object) -> bool:
    """Whether a tensor lies in a file, or nothing else has its memory, so that it can get other
    memory; True for what is no tensor, since it is not there yet.
    """
    if not isinstance(tensor, torch.Tensor) or is_paged(tensor):
        return True
    return _is_alone(tensor) and not tensor.is_inference()


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else has a tensor's memory."""
    return _holders(tensor) == _holders(torch.empty(1))


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many holders a tensor's storage has, and how many the Python object of that."""
    storage = tensor.untyped_storage()
    return storage_uses(c_pointer(storage)), sys.getrefcount(storage)


def _do(is_beside: bool, tensor: torch.Tensor, work: copies.Work) -> None:
    """Copies, or begins to."""
    if is_beside:
        copies.begin(tensor, work)
    else:
        work()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Reads a tensor into memory; the target of a call.

    Attributes:
        shape, stride, dtype: of the tensor, which fills its storage.
        is_beside: whether the call only begins to read.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_beside: bool = False

    def __call__(self, paged: torch.Tensor) -> torch.Tensor:
        """A new tensor with the same bits."""
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=paged.device)
        self.into((out,), paged)
        return out

    def into(self, outs: tuple[torch.Tensor], paged: torch.Tensor) -> None:
        """The same, into a tensor that is there."""
        place = place_in(paged)
        if place is None:
            outs[0].copy_(paged)
        else:
            chunk, offset_bytes = place
            _do(self.is_beside, outs[0], partial(chunk.load, outs[0], offset_bytes))


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a tensor that the step has changed to where it was before the step; the target of a
    call.

    Attributes:
        is_beside: whether the call only begins to write.
    """

    is_beside: bool = False

    def __call__(self, tensor: torch.Tensor, paged: torch.Tensor) -> None:
        """Autograd learns that the tensor has changed."""
        place = place_in(paged)
        if place is None:
            paged.copy_(tensor)
        else:
            chunk, offset_bytes = place
            _do(self.is_beside, tensor, partial(chunk.store, tensor, offset_bytes))
            torch.autograd.graph.increment_version(paged)


@dataclass(frozen=True, slots=True)
class Keep:
    """Writes a tensor that outlives the step to a file; the target of a call.

    Attributes:
        pages: where.
        is_beside: whether the call only begins to write.
    """

    pages: Pages
    is_beside: bool = False

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the file, with the same bits."""
        return self.pages.keep(tensor, is_beside=self.is_beside)


@dataclass(frozen=True, slots=True)
class Arrived:
    """Waits until a tensor is read; the target of a call."""

    def __call__(self, tensor: torch.Tensor) -> None:
        """Raises what reading has raised."""
        copies.wait(tensor)


@dataclass(frozen=True, slots=True)
class Left:
    """Waits until a tensor is written; the target of a call."""

    def __call__(self, tensor: torch.Tensor) -> None:
        """Raises what writing has raised."""
        copies.wait(tensor)
