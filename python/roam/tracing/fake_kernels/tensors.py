"""Makes fake tensors quickly, and tells whether any of them are still alive after a capture."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roam.torch_compat.patches import replaced
from roam.torch_compat.private import (
    DisableTorchDispatch,
    FakeTensor,
    FakeTensorMode,
    c_pointer,
    is_view,
    mark_parameter,
    protect_pointer,
    storage_uses,
    subclass_of,
)

_attributes_of: Any = torch.Tensor.__dict__["__dict__"].__get__
"""The attributes of a tensor. (While a step is traced, `vars(tensor)` is refused.)"""


class _Mark:
    """What all fakes of one capture hold. It is alive as long as one of them is."""


@contextmanager
def marked_fakes() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether any fake tensor that was made in the block is alive."""
    mark = _Mark()
    is_left, plain = weakref.ref(mark), FakeTensor.__new__

    def new(kind: type[FakeTensor], *args: Any, **kwargs: Any) -> FakeTensor:
        fake = plain(kind, *args, **kwargs)
        fake._roam_mark = is_left()  # type: ignore[attr-defined]
        return fake

    with replaced([(FakeTensor, "__new__", staticmethod(new))]):
        yield lambda: is_left() is not None


_MINE = 2
"""How many hold the storage of a tensor that shares it with no other: the tensor, and Python's
object for the storage.
"""


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    return (
        tensor.is_leaf
        and not isinstance(tensor, torch.nn.Buffer)
        and not torch.is_inference_mode_enabled()
        and not (
            tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_inference()
            or is_view(tensor)
        )
        and tensor.is_contiguous()
        and storage.nbytes() == tensor.numel() * tensor.itemsize  # hence from its first byte on
        and storage_uses(c_pointer(storage)) == _MINE
        and (
            tensor.dim() > 0 or tensor.dtype is torch.float32
        )  # otherwise the mode remembers the value
        and (not tensor.requires_grad or tensor.grad_dtype == tensor.dtype)
    )


class Maker:
    """Makes fake tensors of one mode. Except for storage and layout, each fake of a device equals
    the first one, which PyTorch made.
    """

    def __init__(self) -> None:
        self._first: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}

    def make(self, mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """What ``FakeTensor(mode, meta, device)`` makes of a meta tensor that requires no
        gradient.
        """
        first = self._first.get(device)
        if first is None or first[1]["fake_mode"] is not mode:
            made = FakeTensor(mode, meta, device)
            self._first[device] = made.fake_device, dict(_attributes_of(made))
            return made
        known_device, attributes = first
        fake: FakeTensor = subclass_of(FakeTensor, meta, known_device)
        protect_pointer(mode, fake)
        _attributes_of(fake).update(attributes)
        return fake

    def plain(self, mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor | None:
        """What ``mode.from_tensor`` makes of a plain tensor that has its memory for itself; None
        for any other.
        """
        if not _is_plain(tensor):
            return None
        with DisableTorchDispatch():
            meta = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        fake = self.make(mode, meta, tensor.device)
        if type(tensor) is torch.nn.Parameter:
            mark_parameter(fake)
        if tensor.requires_grad:
            fake.requires_grad = True
        return fake

    def forget(self) -> None:
        """Lets go of the mode."""
        self._first.clear()
