"""Compares and copies tensors, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roam.torch_compat.private import c_pointer, neg_view, pytree


def differ(views: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Whether any element has other bytes."""
    return any(
        not torch.equal(*_as_wide_numbers(view, result))
        for view, result in zip(views, results, strict=True)
    )


def _as_wide_numbers(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The elements' bytes as the widest numbers that both can be looked at as, which is quickest:
    those of several elements where both are contiguous.
    """
    numbers = [_as_numbers(tensor) for tensor in tensors]
    wide = torch.int64.itemsize
    for one in numbers:
        size = one.element_size()
        if (
            not one.is_contiguous()
            or (one.numel() * size) % wide
            or (one.storage_offset() * size) % wide
        ):
            return tuple(numbers)
    if numbers[0].shape != numbers[1].shape:
        return tuple(numbers)
    return tuple(one.view(-1).view(torch.int64) for one in numbers)


_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_numbers(tensor: Tensor) -> Tensor:
    """The elements' bytes as whole numbers, which are compared faster than bytes are."""
    number = _NUMBERS.get(tensor.element_size())
    if number is None or tensor.is_conj() or tensor.is_neg():
        return as_bytes(tensor)
    return tensor.view(number)


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements' bytes, as one more dimension of the same memory."""
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return flat.set_(
        tensor.untyped_storage(), tensor.storage_offset() * size, (*tensor.shape, size), strides
    )


def with_bits(tensor: Tensor, is_conj: bool, is_neg: bool) -> Tensor:
    """A tensor, or a view of it that stands for its conjugate, for its negative, or for both."""
    tensor = tensor.conj() if is_conj else tensor
    return neg_view(tensor) if is_neg else tensor


def copied(nest: Any, known: Mapping[int, Any] | None = None) -> Any:
    """A copy of all tensors of a nest; views of one storage are views of one copy.

    Args:
        nest: a nest of tuples, lists and dictionaries.
        known: by the identity of a tensor, what stands for it instead of a copy.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    tensors = dict(known or {})

    def copy(tensor: Tensor) -> Any:
        if id(tensor) not in tensors:
            storage = tensor.untyped_storage()
            if c_pointer(storage) not in storages:
                storages[c_pointer(storage)] = storage.clone()
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                storages[c_pointer(storage)], tensor.storage_offset(), tensor.shape, tensor.stride()
            )
            tensors[id(tensor)] = with_bits(made, tensor.is_conj(), tensor.is_neg())
        return tensors[id(tensor)]

    return pytree.tree_map_only(Tensor, copy, nest)
