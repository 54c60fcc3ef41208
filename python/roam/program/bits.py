"""Whether tensors have the same bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def differ(views: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Whether any element has other bytes."""
    return any(
        not torch.equal(as_bytes(view), as_bytes(result))
        for view, result in zip(views, results, strict=True)
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements' bytes, as one more dimension of the same memory."""
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return flat.set_(
        tensor.untyped_storage(), tensor.storage_offset() * size, (*tensor.shape, size), strides
    )
