"""Placeholders: tensors with everything but memory, which they get when their kernels have run.

A storage of a placeholder has a size and no memory; whatever reads it raises an error. Views of it
are made, and autograd works on it, as on any other. Its memory is put in its place where it lies,
so that everything that holds the storage has it: variables of the user's, views, autograd's graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from roam.program.ir import TensorMeta
from roam.torch_compat.private import (
    STORAGES_SWAP,
    allow_access,
    forbid_access,
    free_weak_storage,
    is_expired,
    storage_at,
    storage_by,
    storage_of,
    storage_pointer,
    storage_uses,
    swap_memory,
    weak_storage,
    with_conj,
    with_neg,
)

UNREAD = (
    "a step that runs beside its plan reads a tensor in a way that roam does not see; please report it, and "
    "read it by x.item(), x.tolist() or x.numpy()"
)


GONE: weakref.ref[Any] = weakref.ref(set())
"""Stands for a tensor that is not there any more."""


def is_possible() -> bool:
    """Whether this PyTorch can put memory into storages."""
    return STORAGES_SWAP


def is_unread(error: BaseException | None) -> bool:
    """Whether an error says that memory was asked for before a kernel has written to it. No method
    of the error's class runs, which may be the user's.
    """
    said: tuple[Any, ...] = () if error is None else BaseException.args.__get__(error)  # type: ignore[attr-defined]
    return any(type(one) is str and UNREAD in one for one in said)


class WeakStorage:
    """A storage that is not kept alive."""

    __slots__ = ("_pointer",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._pointer = weak_storage(storage)

    def expired(self) -> bool:
        """Whether nothing holds the storage any more."""
        return bool(is_expired(self._pointer))

    def get(self) -> torch.UntypedStorage:
        """The storage, which has not expired."""
        storage: torch.UntypedStorage = storage_by(self._pointer)
        return storage

    def __del__(self) -> None:
        free_weak_storage(self._pointer)


def placeholder(meta: TensorMeta, size_bytes: int) -> tuple[torch.Tensor, torch.UntypedStorage]:
    """A tensor in a storage without memory, and the storage."""
    storage: torch.UntypedStorage = storage_at(0, meta.device, size_bytes)
    tensor = tensor_in(storage, meta)
    forbid_access(storage_pointer(storage), UNREAD)
    return tensor, storage


def is_exposed(storage: torch.UntypedStorage, *, holds: int = 0) -> bool:
    """Whether others than PyTorch may have the memory: NumPy, or what it was made from. So many
    tensors hold it besides that the caller knows of.

    PyTorch marks such storages, and never takes the mark away. One of which it is known how it got
    the mark is in nobody's hands if nothing holds it but one tensor, or those that are known to.
    """
    if storage.resizable() or storage.is_shared():
        return False
    known = _known.get(storage_pointer(storage))
    if known is None or known.expired():
        return True
    sharing = sum(
        tensor is not None and storage_pointer(storage_of(tensor)) == storage_pointer(storage)
        for tensor in (one() for one in _sharing(storage).values())
    )
    return storage_uses(storage_pointer(storage)) > 1 + holds + max(sharing, 1)


_known: dict[int, WeakStorage] = {}
"""Storages that are marked though nobody else owns their memory, by their pointers."""
_FEW = 1024


def note_known(storage: torch.UntypedStorage) -> None:
    """A storage is or becomes marked, and PyTorch alone owns its memory."""
    if len(_known) >= _FEW and len(_known) & (len(_known) - 1) == 0:  # at each doubling
        for pointer in [pointer for pointer, one in _known.items() if one.expired()]:
            del _known[pointer]
    _known[storage_pointer(storage)] = WeakStorage(storage)


_shared: dict[int, tuple[WeakStorage, dict[int, weakref.ref[torch.Tensor]]]] = {}
"""By the pointers of storages, tensors that are known to lie in them, by their identities."""


def note_sharing(*tensors: torch.Tensor) -> None:
    """Tensors lie in the storage of the last one, or are about to, each with its own hold on it."""
    storage = storage_of(tensors[-1])
    sharing = _sharing(storage)
    if not sharing:
        if len(_shared) >= _FEW and len(_shared) & (len(_shared) - 1) == 0:
            for pointer in [pointer for pointer, one in _shared.items() if one[0].expired()]:
                del _shared[pointer]
        _shared[storage_pointer(storage)] = WeakStorage(storage), sharing
    elif len(sharing) & (len(sharing) - 1) == 0:
        for key in [key for key, one in sharing.items() if one() is None]:
            del sharing[key]
    sharing.update((id(tensor), weakref.ref(tensor)) for tensor in tensors)


def _sharing(storage: torch.UntypedStorage) -> dict[int, weakref.ref[torch.Tensor]]:
    weak, sharing = _shared.get(storage_pointer(storage), (None, {}))
    return {} if weak is None or weak.expired() else sharing


def fill(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Gives a storage the memory of another one, which is then not to be used any more."""
    allow_access(storage_pointer(storage))
    swap_memory(storage, other)


def fill_at(storage: torch.UntypedStorage, address: int) -> None:
    """Gives a storage memory that something else owns."""
    fill(storage, storage_at(address, storage.device, storage.nbytes()))


def empty(storage: torch.UntypedStorage) -> None:
    """Frees the memory of a storage, which is a placeholder's from then on."""
    swap_memory(storage, storage_at(0, storage.device, storage.nbytes()))
    forbid_access(storage_pointer(storage), UNREAD)


def own(storage: torch.UntypedStorage) -> None:
    """Copies what a storage has to memory of its own."""
    fill(storage, storage.clone())


def tensor_in(storage: torch.UntypedStorage, meta: TensorMeta) -> torch.Tensor:
    """A tensor in a storage."""
    tensor = torch.empty(0, dtype=meta.dtype, device=meta.device).set_(
        storage, meta.offset, meta.shape, meta.stride
    )
    result: Any = tensor
    if meta.is_conj:
        result = with_conj(result)
    if meta.is_neg:
        result = with_neg(result)
    return result  # type: ignore[no-any-return]
