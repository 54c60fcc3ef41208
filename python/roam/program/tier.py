"""The second tier of memory: a file that tensors are stored in and loaded from while a step runs.

Tensors are copied by `pwrite` and `preadv`, not through a map of the file: a failing disk is then
an error that can be raised, and no signal that ends the process. What is written lies in the
system's page cache, which the system writes to the disk and takes back when it needs the memory.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from roam.errors import ExecutionError

_MOST_AT_ONCE = 2**30
"""Bytes of one call: the system takes no more than 2 GiB."""
_ALIGNMENT_BYTES = 4096
_tiers: weakref.WeakValueDictionary[Path, Tier] = weakref.WeakValueDictionary()
_one_at_a_time = threading.Lock()


def is_available() -> bool:
    """Whether the system has the calls that a tier needs."""
    return all(hasattr(os, name) for name in ("pwrite", "preadv", "posix_fallocate"))


def aligned(size_bytes: int) -> int:
    """Bytes that a tensor takes in a tier."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Tier:
    """One file in a folder, without a name: it is gone with the process, however that ends.

    Nothing in it outlives a step, so all steps of a process share it, one at a time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._process = 0
        self._size_bytes = 0

    @staticmethod
    def of(folder: Path) -> Tier:
        """The folder's tier. It goes when nothing refers to it any more."""
        with _one_at_a_time:
            tier = _tiers.get(folder)
            if tier is None:
                tier = _tiers[folder] = Tier(folder)
            return tier

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._size_bytes

    @contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """Keeps other steps out, with at least so many bytes allocated on the disk.

        Raises:
            ExecutionError: where there is not as much room; nothing has been changed.
        """
        with self._lock:
            self._reserve(size_bytes)
            yield

    def release(self) -> None:
        """Gives the room on the disk back, until the next step."""
        with self._lock:
            self._close()

    def store(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        """Writes the bytes of a tensor that fills its storage."""
        left = _bytes_of(tensor)
        while left:
            done = os.pwrite(self._descriptor, left[:_MOST_AT_ONCE], offset_bytes)
            left, offset_bytes = left[done:], offset_bytes + done

    def load(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        """Reads the bytes of a tensor that fills its storage.

        Raises:
            OSError: the file ends before.
        """
        left = _bytes_of(tensor)
        while left:
            done = os.preadv(self._descriptor, [left[:_MOST_AT_ONCE]], offset_bytes)
            if not done:
                raise OSError(f"the file of offloaded tensors in {self.folder} is too short")
            left, offset_bytes = left[done:], offset_bytes + done

    @property
    def _descriptor(self) -> int:
        assert self._file is not None, "the tier is held"
        return self._file.fileno()

    def _reserve(self, size_bytes: int) -> None:
        if self._process != os.getpid():  # a forked process would write into its parent's file
            self._close()
        if self._file is not None and self._size_bytes >= size_bytes:
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
                self._process = os.getpid()
            os.posix_fallocate(self._descriptor, 0, max(size_bytes, 1))
        except OSError as error:
            self._close()
            raise ExecutionError(
                f"there is no room for {size_bytes:,} bytes of offloaded tensors in {self.folder}: "
                f"{error}. Nothing has been changed. Free room there, or pass another folder "
                "(offload=)",
                code="offload_room",
            ) from error
        self._size_bytes = size_bytes

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._size_bytes = None, 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """What stores a tensor in a tier, and loads it from there again.

    As the target of a call it stores what it is given, and its result has the same bits; called
    without an argument, as in further runs, it loads them.

    Attributes:
        tier: where.
        offset_bytes: at which place of the file.
        shape, stride, dtype: of the tensor, which fills its storage.
    """

    tier: Tier
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """A new tensor with the bits of the one that is stored."""
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        self.into((out,), *(() if tensor is None else (tensor,)))
        return out

    def into(self, outs: tuple[torch.Tensor], tensor: torch.Tensor | None = None) -> None:
        """The same, into a tensor that is there: it may be the very memory that is stored."""
        (out,) = outs
        if tensor is None:
            self.tier.load(out, self.offset_bytes)
            return
        self.tier.store(tensor, self.offset_bytes)
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor of the CPU that fills the range it lies in."""
    flat = torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * tensor.itemsize,
        (tensor.numel() * tensor.itemsize,),
        (1,),
    )
    return flat.numpy().data
