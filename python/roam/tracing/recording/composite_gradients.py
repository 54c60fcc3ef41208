"""Gradients for which autograd looks at values, recorded as the one operator that looks.

The gradient of `cumprod` is computed in one way if no element is zero and in another if one is, and
for fake tensors always in the second. PyTorch has an operator for it, `cumprod_backward`, which
autograd takes apart before it is dispatched. While a step is traced, it stays whole: a run calls
it on real tensors, where it decides as it does eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roam.torch_compat.private import BelowAutograd, implemented

_KEYS = ("AutogradCPU", "AutogradCUDA")


@contextmanager
def kept_whole() -> Iterator[None]:
    """Autograd calls `cumprod_backward` as one operator, except in a backward pass that is recorded
    for another one.
    """
    with implemented("aten", "cumprod_backward", _below_autograd, _KEYS):
        yield


def _below_autograd(gradient: Any, values: Any, dim: int, products: Any) -> Any:
    operator = torch.ops.aten.cumprod_backward.default
    if torch.is_grad_enabled():
        return operator.decompose(gradient, values, dim, products)
    with BelowAutograd():
        return operator(gradient, values, dim, products)
