"""Makes fake tensors quickly, and tells whether any that a capture made is left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_attributes_of: Any = torch.Tensor.__dict__["__dict__"].__get__
"""Of a tensor; while a step is traced, its code gets no answer to `vars(tensor)`."""


class _Mark:
    """What all fakes of one capture hold; it is there for as long as one of them is."""


@contextmanager
def marked_fakes() -> Iterator[Callable[[], bool]]:
    """Gives what tells whether any fake tensor is left that was made in the block, whoever made it."""
    mark = _Mark()
    is_left, plain = weakref.ref(mark), FakeTensor.__new__

    def new(kind: type[FakeTensor], *args: Any, **kwargs: Any) -> FakeTensor:
        fake = plain(kind, *args, **kwargs)
        fake._roam_mark = is_left()  # type: ignore[attr-defined]
        return fake

    with mock.patch.object(FakeTensor, "__new__", staticmethod(new)):
        yield lambda: is_left() is not None


class Maker:
    """Makes fake tensors of one mode. But for its storage and its layout, each of a device is as the first that PyTorch made."""

    def __init__(self) -> None:
        self._first: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}

    def make(self, mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """What ``FakeTensor(mode, meta, device)`` makes of a meta tensor that requires no gradient."""
        first = self._first.get(device)
        if first is None or first[1]["fake_mode"] is not mode:
            fake = FakeTensor(mode, meta, device)
            self._first[device] = fake.fake_device, dict(_attributes_of(fake))
            return fake
        known_device, attributes = first
        fake = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=known_device
        )
        if mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        _attributes_of(fake).update(attributes)
        return fake

    def forget(self) -> None:
        """Lets go of the mode."""
        self._first.clear()
