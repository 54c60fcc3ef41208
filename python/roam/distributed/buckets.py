"""Gives back the memory of the buckets that a `DistributedDataParallel` keeps, while plans reduce
gradients in buckets of their own.

The module's reducer fills its buckets anew in each backward pass, and reads nothing that the last
one left there. It has to be told to prepare for a backward pass, which the module's forward pass
does. At that moment the buckets get their memory again.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from roam.torch_compat.private import (
    disable_current_modes,
    expects_backward,
    kept_buckets,
    prepares_after,
)

_given_back: WeakKeyDictionary[Any, list[tuple[torch.UntypedStorage, int]]] = WeakKeyDictionary()
"""For each reducer: the storages of its buckets that have no memory now, and how many bytes they
had.
"""


def give_back(ddp: Any) -> None:
    """Frees the memory of a module's buckets until its reducer needs it.

    The buckets stay allocated if gradients of parameters may be views of them, or if a backward
    pass of the module's own may be under way or still to come.
    """
    reducer = ddp.reducer
    if reducer in _given_back or ddp.gradient_as_bucket_view:
        return
    with disable_current_modes():
        if expects_backward(reducer) is not False:
            return
        prepares_after(_take_back)
        storages = [bucket.untyped_storage() for bucket in kept_buckets(reducer)]
        _given_back[reducer] = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)


def _take_back(reducer: Any) -> None:
    """Gives a reducer's buckets their memory back, if they have none."""
    if reducer not in _given_back:
        return
    with disable_current_modes():
        for storage, size_bytes in _given_back[reducer]:
            storage.resize_(size_bytes)
    del _given_back[reducer]


__all__ = ["give_back"]
