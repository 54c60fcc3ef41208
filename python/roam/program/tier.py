"""The second tier of memory as a step uses it for what it makes: a chunk that tensors are stored in
and loaded from while the step runs.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from roam.program.chunks import Chunk, Place

HANDLE = torch.uint8
"""The dtype of what `Store` returns."""
_tiers: weakref.WeakValueDictionary[Place, Tier] = weakref.WeakValueDictionary()
_one_at_a_time = threading.Lock()


class Tier:
    """One chunk of a place. Nothing in it outlives a step, so all steps of a process share it, one
    at a time.

    Attributes:
        place: where it lies.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._chunk: Chunk | None = None

    @staticmethod
    def of(place: Place) -> Tier:
        """The place's tier. It goes when nothing refers to it any more."""
        with _one_at_a_time:
            tier = _tiers.get(place)
            if tier is None:
                tier = _tiers[place] = Tier(place)
            return tier

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk."""
        return 0 if self._chunk is None else len(self._chunk)

    @contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """Keeps other steps out, with at least so many bytes allocated.

        Raises:
            ExecutionError: there is not enough room; nothing has been changed.
        """
        with self._lock:
            chunk = self._chunk
            # A forked process would write into its parent's.
            if chunk is None or chunk.process != os.getpid() or len(chunk) < size_bytes:
                self._chunk = chunk = None
                self._chunk = self.place.chunk(max(size_bytes, 1))
            yield

    def release(self) -> None:
        """Gives the room back, until the next step."""
        with self._lock:
            self._chunk = None

    def store(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        """As `Chunk.store`, while held."""
        assert self._chunk is not None, "it is held"
        self._chunk.store(tensor, offset_bytes)

    def load(self, tensor: torch.Tensor, offset_bytes: int) -> None:
        """As `Chunk.load`, while held."""
        assert self._chunk is not None, "it is held"
        self._chunk.load(tensor, offset_bytes)

    def forget(self) -> None:
        """As `Chunk.forget`, while held."""
        assert self._chunk is not None, "it is held"
        self._chunk.forget()


@dataclass(frozen=True, slots=True)
class Store:
    """Stores a tensor in a tier; the target of a call.

    Attributes:
        tier: where.
        offset_bytes: at which byte.
    """

    tier: Tier
    offset_bytes: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a byte as a handle, which says that the tensor is stored. A load needs it."""
        self.tier.store(tensor, self.offset_bytes)
        return torch.empty(1, dtype=HANDLE, device=tensor.device)


@dataclass(frozen=True, slots=True)
class Load:
    """Loads a tensor from a tier; the target of a call, whose first run is given the tensor itself.

    Attributes:
        tier: where it is stored.
        offset_bytes: at which byte.
        shape, stride, dtype: of the tensor, which fills its storage.
    """

    tier: Tier
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, tensor: torch.Tensor | None, stored: torch.Tensor) -> torch.Tensor:
        """A new tensor with the same bits."""
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=stored.device)
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
