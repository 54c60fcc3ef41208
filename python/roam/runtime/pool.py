"""The static memory pool: one storage per device that every plan of the process lays its tensors
out in.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch

from roam.errors import ExecutionError
from roam.garbage import give_back_freed
from roam.program.ir import TensorMeta
from roam.torch_compat.private import c_pointer

_pools: weakref.WeakValueDictionary[torch.device, Pool] = weakref.WeakValueDictionary()
_one_at_a_time = threading.Lock()


class Pool:
    """One storage from the device's ordinary allocator.

    Nothing in it outlives a step, so all steps of a process share it, one at a time. Tensors are
    views at fixed offsets; they stay valid when the storage is given back to the allocator and
    allocated again, at whatever address.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._holder: int | None = None
        """The thread whose step runs."""
        self._is_released = False
        self._stream: torch.cuda.Stream | None = None

    @staticmethod
    def of(device: torch.device) -> Pool:
        """The device's pool. It goes when nothing refers to it any more."""
        with _one_at_a_time:
            pool = _pools.get(device)
            if pool is None:
                pool = _pools[device] = Pool(device)
            return pool

    @cached_property
    def _storage(self) -> torch.UntypedStorage:
        # A plan may be made for a device that is not there; then nothing asks for its memory.
        return torch.UntypedStorage(0, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes now."""
        return self._storage.nbytes() if "_storage" in vars(self) else 0

    @property
    def address(self) -> int:
        """Where it begins now. To be asked while held."""
        return self._storage.data_ptr()

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether this is the pool's storage."""
        return c_pointer(storage) == c_pointer(self._storage)

    @contextmanager
    def held(self, size_bytes: int, most_bytes: int | None = None) -> Iterator[None]:
        """Keeps other steps out, with at least `size_bytes` allocated, and no more than
        `most_bytes`.

        Raises:
            ExecutionError: there is not enough memory, or this thread is in the middle of another
                step; nothing has been changed.
        """
        if self._holder == threading.get_ident():
            raise ExecutionError(
                "a compiled step is called while another one runs in the same thread (by a signal "
                "handler, or by an operator's kernel), and both need the pool; this call has "
                "changed nothing. Call it when the other has ended, or pass pool=False to roam.compile",
                code="pool_in_use",
            )
        with self._kept():
            if most_bytes is not None and self.nbytes > most_bytes:
                self._storage.resize_(0)
            self._reserve(size_bytes)
            self._follow_stream()
            yield

    def release(self) -> None:
        """Gives the memory back to the allocator, until the next step. If a step of this thread
        runs, as when a signal handler calls, this happens at its end.
        """
        if self._holder == threading.get_ident():
            self._is_released = True
            return
        with self._kept():
            self._is_released = True

    @contextmanager
    def _kept(self) -> Iterator[None]:
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                if self._is_released and self.nbytes:
                    self._storage.resize_(0)
                self._is_released, self._holder = False, None

    def tensor(self, meta: TensorMeta, offset_bytes: int) -> torch.Tensor:
        """A view with a tensor's dtype, shape and strides, of a storage that begins at an offset.
        To be made while held.
        """
        assert self.nbytes >= offset_bytes, "the pool is held"
        start_bytes = offset_bytes + meta.offset * meta.dtype.itemsize
        return self.view(meta.dtype, start_bytes, meta.shape, meta.stride)

    def view(
        self, dtype: torch.dtype, start_bytes: int, shape: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """A view whose first element lies here. To be made while held."""
        # Unlike a slice of one large tensor it counts its own versions.
        return torch.empty(0, dtype=dtype, device=self.device).set_(
            self._storage, start_bytes // dtype.itemsize, shape, stride
        )

    def range(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """The bytes of a range. To be made while held."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(
            self._storage, offset_bytes, (size_bytes,), (1,)
        )

    def _reserve(self, size_bytes: int) -> None:
        if self._storage.nbytes() >= size_bytes:
            return
        # Nothing in it is needed, so nothing is copied.
        self._storage.resize_(0)
        if self.device.type == "cpu":
            give_back_freed()  # what earlier steps took from there lies in the pool now
        try:
            try:
                self._storage.resize_(size_bytes)
            except RuntimeError:  # perhaps not without what planning has left, while it paused
                gc.collect()
                give_back_freed()
                self._storage.resize_(size_bytes)
        except RuntimeError as error:
            raise ExecutionError(
                f"there is no memory for a pool of {size_bytes:,} bytes on {self.device}; nothing has been changed. Free "
                f"memory, take a smaller batch, or pass a memory budget (memory=) to roam.compile: {error}",
                code="out_of_memory",
            ) from error

    def _follow_stream(self) -> None:
        """What an earlier step enqueued on another stream comes before what this one does to the
        same memory.
        """
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream
