"""The second tier of memory: a file that tensors are stored in and loaded from while a step runs.

Tensors are copied by `pwrite` and `preadv`, not through a map of the file: a failing disk is then
an error that can be raised, and no signal that ends the process. What is written lies in the
system's page cache, which the system writes to the disk and takes back when it needs the memory.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from roam.errors import ExecutionError

HANDLE = torch.uint8
"""The dtype of what `Store` returns."""
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


def write(descriptor: int, tensor: torch.Tensor, offset_bytes: int) -> None:
    """Writes the bytes of a tensor that fills its storage to a file.

    Raises:
        OSError: they cannot be written.
    """
    left = _bytes_of(tensor)
    while left:
        done = os.pwrite(descriptor, left[:_MOST_AT_ONCE], offset_bytes)
        if not done:
            raise OSError("the disk of offloaded tensors takes no more bytes")
        left, offset_bytes = left[done:], offset_bytes + done


def read(descriptor: int, tensor: torch.Tensor, offset_bytes: int) -> None:
    """Reads the bytes of a tensor that fills its storage from a file.

    Raises:
        OSError: they cannot be read, or the file is too short.
    """
    left = _bytes_of(tensor)
    while left:
        done = os.preadv(descriptor, [left[:_MOST_AT_ONCE]], offset_bytes)
        if not done:
            raise OSError("the file of offloaded tensors is too short")
        left, offset_bytes = left[done:], offset_bytes + done


class Tier:
    """One file in a folder, without a name: it is gone with the process, however that ends.

    Nothing in it outlives a step, so all steps of a process share it, one at a time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._descriptor = -1
        self._closing: weakref.finalize[..., Tier] | None = None
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
            ExecutionError: there is not enough room; nothing has been changed.
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
        write(self._descriptor, tensor, offset_bytes)

    def load(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        """Reads the bytes of a tensor that fills its storage.

        Raises:
            OSError: the file is too short.
        """
        read(self._descriptor, tensor, offset_bytes)

    def forget(self) -> None:
        """Has all that is stored written to the disk, and asks the system to read it from there."""
        os.fdatasync(self._descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def lost(self, error: OSError) -> ExecutionError:
        """What to raise where the folder is gone, or cannot be looked at."""
        return ExecutionError(
            f"{self.folder} cannot be used for offloaded tensors: {error}. Nothing has been changed. "
            "Make the folder again, or pass another one (offload=)",
            code="offload_room",
        )

    def _reserve(self, size_bytes: int) -> None:
        if self._process != os.getpid():  # a forked process would write into its parent's file
            self._close()
        if self._closing is not None and self._size_bytes >= size_bytes:
            return
        try:
            if self._closing is None:
                self._open()
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

    def _open(self) -> None:
        self._descriptor, path = tempfile.mkstemp(dir=self.folder)
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        self._process = os.getpid()
        os.unlink(path)

    def _close(self) -> None:
        if self._closing is not None:
            self._closing()
        self._descriptor, self._closing, self._size_bytes = -1, None, 0


@dataclass(frozen=True, slots=True)
class Store:
    """Stores a tensor in a tier; the target of a call.

    Attributes:
        tier: where.
        offset_bytes: at which place of the file.
    """

    tier: Tier
    offset_bytes: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a byte as a handle, which says that the tensor is stored. A load needs it."""
        self.tier.store(tensor, self.offset_bytes)
        return torch.zeros(1, dtype=HANDLE)


@dataclass(frozen=True, slots=True)
class Load:
    """Loads a tensor from a tier; the target of a call, whose first run is given the tensor itself.

    Attributes:
        tier: where it is stored.
        offset_bytes: at which place of the file.
        shape, stride, dtype: of the tensor, which fills its storage.
    """

    tier: Tier
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, tensor: torch.Tensor | None, stored: torch.Tensor) -> torch.Tensor:
        """A new tensor with the same bits."""
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        self.into((out,), tensor, stored)
        return out

    def into(
        self, outs: tuple[torch.Tensor], tensor: torch.Tensor | None, stored: torch.Tensor
    ) -> None:
        """The same, into a tensor that is there.

        Args:
            outs: the tensor to write to; it may have the memory of `tensor`.
            tensor: the tensor that was stored; None if it is to be loaded.
            stored: what `Store` has returned.
        """
        (out,) = outs
        if tensor is None:
            self.tier.load(out, self.offset_bytes)
        elif out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor of the CPU that fills the range it lies in.

    NumPy is not used for this: a storage that it has seen cannot be resized any more.
    """
    size_bytes = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")
