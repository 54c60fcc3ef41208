"""Where tensors lie that are out of a step's memory for a time, the second tier: files in a folder,
or memory of the host for a step of a device.

A tensor in a chunk of it is always true, for whoever reads or writes it: `state_dict`, an
evaluation, an average of weights. Its memory is a map of the file, which the system takes back when
it needs the memory, or memory of the host that the device reads and writes over its link, pinned
there, at the same address. A step does not go through either. It copies: by `preadv` and `pwrite`,
so that a failing disk is an error that can be raised and no signal that ends the process, or by the
device's copy engine. A copy to or from the host is enqueued on the stream that is current, and is
made in its order, as kernels are; nobody waits for it.

In a forked process maps of files are private: it sees its parent's files, and what it writes there
is its own. Memory of the host is shared with it, so that what a device copies stays where it is
pinned; the device itself cannot be used there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from roam.errors import ExecutionError

HOST: Final = "host"
"""Stands for memory of the host where otherwise a folder is named."""
_MOST_AT_ONCE = 2**30
"""Bytes of one call: the system takes no more than 2 GiB."""
_ALIGNMENT_BYTES = 4096
_MAP_FIXED = 0x10
"""`MAP_FIXED` of Linux and macOS, which Python does not name."""
_SAME_ADDRESS = 91
"""`CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`: whether a device sees memory of
the host that is pinned later at the host's address."""
_chunks: tuple[tuple[int, weakref.ref[Chunk]], ...] = ()
"""The chunks of the process by their addresses, and some that are gone."""
_one_at_a_time = threading.Lock()


def is_available() -> bool:
    """Whether the system has the calls that are needed."""
    return all(hasattr(os, name) for name in ("pwrite", "preadv", "posix_fallocate"))


def aligned(size_bytes: int) -> int:
    """Bytes that a tensor takes in a chunk."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Chunk(mmap.mmap):
    """A range of memory that tensors may lie in. It is gone with the last of them.

    Attributes:
        address: where it begins.
        process: which process has made it.
        is_private: whether its memory may hold something else than what is loaded from it.
    """

    address: int
    process: int
    is_private: bool

    def store(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        """Writes the bytes of a tensor that fills its storage.

        Raises:
            OSError: they cannot be written.
        """
        raise NotImplementedError

    def load(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        """Reads the bytes of a tensor that fills its storage.

        Raises:
            OSError: they cannot be read, or the chunk is too short.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Has the next load take as long as any: from the disk, as far as the system is asked."""

    def tensor(self, offset_bytes: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor like another one, whose memory is this."""
        size_bytes = like.numel() * like.itemsize
        # A view would hold the tensor that it is a view of, and so a second time the memory.
        storage = self._bytes(offset_bytes, size_bytes).untyped_storage()
        made = torch.empty(0, dtype=like.dtype, device=storage.device)
        return made.set_(storage, 0, like.shape, like.stride())

    def _bytes(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        return torch.frombuffer(self, dtype=torch.uint8, count=size_bytes, offset=offset_bytes)

    def _begin(self) -> None:
        """Makes it known, once it is mapped."""
        self.process, self.is_private = os.getpid(), False
        self.address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        global _chunks  # who looks at them has all of before or after, without a lock
        with _one_at_a_time:
            _chunks = tuple(sorted((*_entries(), (self.address, weakref.ref(self)))))


class _File(Chunk):
    """A map of a file without a name."""

    descriptor: int

    def store(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        left = _memory_of(tensor)
        while left:
            done = os.pwrite(self.descriptor, left[:_MOST_AT_ONCE], offset_bytes)
            if not done:
                raise OSError("the disk of offloaded tensors takes no more bytes")
            left, offset_bytes = left[done:], offset_bytes + done

    def load(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        left = _memory_of(tensor)
        while left:
            done = os.preadv(self.descriptor, [left[:_MOST_AT_ONCE]], offset_bytes)
            if not done:
                raise OSError("the file of offloaded tensors is too short")
            left, offset_bytes = left[done:], offset_bytes + done

    def forget(self) -> None:
        os.fdatasync(self.descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class _Memory(Chunk):
    """Memory of the host, pinned for a device, whose tensors these are."""

    device: torch.device

    def store(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        self._like(tensor, offset_bytes).copy_(_line(tensor), non_blocking=True)

    def load(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        _line(tensor).copy_(self._like(tensor, offset_bytes), non_blocking=True)

    def _like(self, tensor: torch.Tensor, offset_bytes: int) -> torch.Tensor:
        """The host's own view of what a tensor is copied to or from."""
        count = tensor.numel()
        return torch.frombuffer(self, dtype=tensor.dtype, count=count, offset=offset_bytes)

    def _bytes(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return super()._bytes(offset_bytes, size_bytes)
        address = self.address + offset_bytes
        found = torch.as_tensor(_Array(self, address, size_bytes), device=self.device)
        assert found.data_ptr() == address, "it is no copy"
        return found


class _Array:
    """Bytes of a chunk as an array of the device's; it holds the chunk."""

    def __init__(self, chunk: Chunk, address: int, size_bytes: int) -> None:
        self.chunk = chunk
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Folder:
    """Chunks that are files of a folder; of tensors of the CPU.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def device(self) -> torch.device:
        """Whose tensors may lie there."""
        return torch.device("cpu")

    @property
    def disk(self) -> object:
        """What all have in common whose copies take equally long.

        Raises:
            OSError: the folder is gone, or cannot be looked at.
        """
        return os.stat(self.path).st_dev

    def __str__(self) -> str:
        return f"files in {self.path}"

    def chunk(self, size_bytes: int) -> Chunk:
        """A new chunk of at least a byte.

        Raises:
            ExecutionError: there is not enough room.
        """
        try:
            descriptor, path = tempfile.mkstemp(dir=self.path)
            try:
                os.unlink(path)
                os.posix_fallocate(descriptor, 0, size_bytes)
                chunk = _File(descriptor, size_bytes)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise self.full(f"{size_bytes:,} bytes of offloaded tensors", error) from error
        weakref.finalize(chunk, os.close, descriptor)
        chunk.descriptor = descriptor
        chunk._begin()
        return chunk

    def full(self, what: str, error: BaseException) -> ExecutionError:
        """What to raise where something has no room."""
        return ExecutionError(
            f"{self.path} cannot take {what}: {error}. No value has been changed. Free room there, or "
            "pass another folder (offload=)",
            code="offload_room",
        )


@dataclass(frozen=True, slots=True)
class Host:
    """Chunks in memory of the host, of tensors of a device. On the CPU that is the same memory,
    which gains nothing, but shows that all is copied.

    Attributes:
        device: the device.
    """

    device: torch.device

    @property
    def disk(self) -> object:
        """As for a folder."""
        return HOST

    def __str__(self) -> str:
        return "the host's memory"

    def chunk(self, size_bytes: int) -> Chunk:
        """As for a folder."""
        try:
            chunk = _Memory(-1, size_bytes)
            chunk.device = self.device
            chunk._begin()
            if self.device.type == "cuda":
                _pin(chunk, self.device)
        except (OSError, RuntimeError) as error:
            raise self.full(f"{size_bytes:,} bytes of offloaded tensors", error) from error
        return chunk

    def full(self, what: str, error: BaseException) -> ExecutionError:
        """As for a folder."""
        return ExecutionError(
            f"the host has no memory for {what} that {self.device} can copy: {error}. No value has "
            "been changed. Free memory of the host, raise what may be pinned (ulimit -l), or pass a "
            "larger memory=",
            code="offload_room",
        )


Place = Folder | Host


def place_of(offload: Path | Literal["host"], device: torch.device) -> Place:
    """The place that `offload=` names, for a step of a device."""
    return Folder(offload) if isinstance(offload, Path) else Host(device)


def place_in(tensor: torch.Tensor) -> tuple[Chunk, int] | None:
    """The chunk that a tensor lies in, and at which byte; None if it lies elsewhere."""
    address, chunks = tensor.data_ptr(), _chunks
    at = bisect_left(chunks, (address + 1,)) - 1
    chunk = chunks[at][1]() if at >= 0 else None
    if chunk is None or address >= chunk.address + len(chunk):
        return None
    return chunk, address - chunk.address


def _entries() -> list[tuple[int, weakref.ref[Chunk]]]:
    """Those of `_chunks` that are there."""
    return [one for one in _chunks if one[1]() is not None]


def _pin(chunk: Chunk, device: torch.device) -> None:
    """Lets a device copy a chunk, and see it at its address, until the chunk is gone.

    Raises:
        OSError, RuntimeError: it cannot.
    """
    found = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(
        ctypes.byref(found), _SAME_ADDRESS, device.index or 0
    )
    if not found.value:
        raise OSError(f"{device} does not see pinned memory at the host's address")
    system = torch.cuda.cudart()
    with torch.cuda.device(device):
        torch.cuda.check_error(system.cudaHostRegister(chunk.address, len(chunk), 0))
    weakref.finalize(chunk, _unpin, chunk.address, device, os.getpid()).atexit = False


def _unpin(address: int, device: torch.device, process: int) -> None:
    if process == os.getpid():  # a forked one has no device
        torch.cuda.synchronize(device)  # what is enqueued may still use it
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def _line(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that fills its storage as they follow one another there."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor of the CPU that fills the range it lies in.

    NumPy is not used for this: a storage that it has seen cannot be resized any more.
    """
    size_bytes = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")


def _part() -> None:
    """In a forked process: makes its maps private. If the system gives it no such maps, it may only
    read them, and a write ends it.
    """
    for chunk in [reference() for _, reference in _chunks]:
        # That process's own parent may have been forked, and may have changed it.
        if not isinstance(chunk, _File) or chunk.is_private:
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
