"""Files that hold tensors from before the step and after it, so that these take no memory of the
process between their uses in a step.

The memory of such a tensor is a map of a file. So the tensor itself is always true, for whoever
reads or writes it: `state_dict`, an evaluation, an average of weights. A step does not go through
the map: it reads what it uses into planned memory by `preadv`, and writes what it has changed back
by `pwrite`, so that a failing disk is an error that can be raised. The system keeps both in step,
and takes the memory of the map back when it needs it. In a forked process the maps are private: it
sees its parent's files, and what it writes there is its own.

Each of these calls copies before it returns, or begins a copy beside the step (`is_beside`). Then
`Arrived` waits for what was read before its first use, and `Left` for what was written before its
memory is used again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from roam.errors import ExecutionError
from roam.program import copies
from roam.program.tier import aligned, read, write
from roam.torch_compat.private import TENSOR_DATA, c_pointer, storage_uses

_MAP_FIXED = 0x10
"""`MAP_FIXED` of Linux and macOS, which Python does not name."""
_chunks: weakref.WeakValueDictionary[int, _Chunk] = weakref.WeakValueDictionary()
"""All maps of the process, by their addresses."""


class _Chunk(mmap.mmap):
    """A map of a file without a name, which is gone with the last tensor in it."""

    descriptor: int
    address: int
    process: int
    is_private: bool

    def store(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        """Writes the bytes of a tensor that fills its storage."""
        write(self.descriptor, tensor, offset_bytes)

    def load(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        """Reads the bytes of a tensor that fills its storage."""
        read(self.descriptor, tensor, offset_bytes)


class Pages:
    """Makes tensors whose memory is a file in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._free: tuple[_Chunk, int] | None = None
        """A map with room, and where the room begins."""

    def reserve(self, size_bytes: int) -> None:
        """Makes room on the disk for tensors that `keep` makes, until the next call of this.

        Raises:
            ExecutionError: there is not enough room.
        """
        self._free = (self._chunk(size_bytes), 0) if size_bytes else None

    def keep(self, tensor: torch.Tensor, *, is_beside: bool = False) -> torch.Tensor:
        """A new tensor in a file with the bits of a tensor that fills its storage; `is_beside`: it
        has them when that has been copied.
        """
        size_bytes = aligned(tensor.numel() * tensor.itemsize)
        if self._free is None or self._free[1] + size_bytes > len(self._free[0]):
            self.reserve(size_bytes)
        assert self._free is not None, "room was made"
        chunk, offset_bytes = self._free
        self._free = (chunk, end) if (end := offset_bytes + size_bytes) < len(chunk) else None
        kept = _tensor(chunk, offset_bytes, tensor)
        _do(is_beside, tensor, partial(chunk.store, tensor, offset_bytes))
        return kept

    def take_in(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Moves tensors, each with its name, that are not in a file of this process to one. All
        that holds a tensor finds it there.

        Raises:
            ExecutionError: there is no room on the disk, or it fails, or something else has the
                same memory. No value has changed.
        """
        left = [(name, tensor) for name, tensor in tensors if not is_paged(tensor)]
        for name, tensor in left:
            if not is_movable(tensor):
                raise ExecutionError(
                    f"{name} is to lie in {self.folder} between its uses, and another tensor has "
                    "the same memory. Nothing has been changed. Let go of the other tensor, such "
                    "as a detached one, or clone it",
                    code="offload_shared",
                )
        self.reserve(sum(aligned(one.numel() * one.itemsize) for _, one in left))
        for name, tensor in left:
            try:
                TENSOR_DATA.__set__(tensor, self.keep(TENSOR_DATA.__get__(tensor)))
            except OSError as error:
                raise ExecutionError(
                    f"{name} cannot be written to a file in {self.folder}: {error}. No value has "
                    "changed. Free room there, or pass another folder (offload=)",
                    code="offload_room",
                ) from error.with_traceback(None)  # its frames hold the tensor's memory

    def _chunk(self, size_bytes: int) -> _Chunk:
        try:
            descriptor, path = tempfile.mkstemp(dir=self.folder)
            try:
                os.unlink(path)
                os.posix_fallocate(descriptor, 0, size_bytes)
                chunk = _Chunk(descriptor, size_bytes)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise ExecutionError(
                f"there is no room for {size_bytes:,} bytes of parameters and state in "
                f"{self.folder}: {error}. Nothing has been changed. Free room there, or pass "
                "another folder (offload=)",
                code="offload_room",
            ) from error
        weakref.finalize(chunk, os.close, descriptor)
        chunk.descriptor, chunk.process, chunk.is_private = descriptor, os.getpid(), False
        chunk.address = torch.frombuffer(chunk, dtype=torch.uint8).data_ptr()
        _chunks[chunk.address] = chunk
        return chunk


def take_out(tensor: torch.Tensor, name: str) -> None:
    """Moves a tensor from its file to ordinary memory, if it lies in one. It stays there, and true,
    where another tensor has the same memory.

    Raises:
        ExecutionError: the file cannot be read. The tensor stays there.
    """
    place = _place_of(tensor)
    if place is None or not _is_alone(tensor):
        return
    chunk, offset_bytes = place
    inner = TENSOR_DATA.__get__(tensor)
    moved = torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype)
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
    place = _place_of(tensor)
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


def _place_of(tensor: torch.Tensor) -> tuple[_Chunk, int] | None:
    """The file that a tensor lies in, and where; None if it lies in memory."""
    address = tensor.data_ptr()
    starts = sorted(_chunks)
    at = bisect_right(starts, address) - 1
    chunk = _chunks.get(starts[at]) if at >= 0 else None
    if chunk is None or address >= chunk.address + len(chunk):
        return None
    return chunk, address - chunk.address


def _tensor(chunk: _Chunk, offset_bytes: int, like: torch.Tensor) -> torch.Tensor:
    whole = torch.frombuffer(chunk, dtype=like.dtype, count=like.numel(), offset=offset_bytes)
    # A view would hold the tensor that it is a view of, and so a second time the memory.
    made = torch.empty(0, dtype=like.dtype)
    return made.set_(whole.untyped_storage(), 0, like.shape, like.stride())


def _part() -> None:
    """In a forked process: makes its maps private. If the system gives it no such maps, it may only
    read them, and a write ends it.
    """
    for chunk in list(_chunks.values()):
        if chunk.is_private:  # that process's own parent was forked, and may have changed it
            continue
        chunk.is_private = True
        system = ctypes.CDLL(None)
        system.mmap.restype = ctypes.c_void_p
        range_ = ctypes.c_void_p(chunk.address), ctypes.c_size_t(len(chunk))
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found = system.mmap(*range_, access, flags, chunk.descriptor, ctypes.c_long(0))
        if found != chunk.address:
            system.mprotect(*range_, mmap.PROT_READ)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_part)


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
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        self.into((out,), paged)
        return out

    def into(self, outs: tuple[torch.Tensor], paged: torch.Tensor) -> None:
        """The same, into a tensor that is there."""
        place = _place_of(paged)
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
        place = _place_of(paged)
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
