"""Image classifiers of torchvision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torchvision

from roam.torch_compat.private import FakeTensor
from roam.zoo.images import random_batch, train_step


@contextmanager
def _no_redrawing_of_fakes() -> Iterator[None]:
    """``trunc_normal_`` draws until every value is within its bounds, a question that fake tensors
    cannot answer.
    """
    original = torch.nn.init.trunc_normal_

    def trunc_normal_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)

    torch.nn.init.trunc_normal_ = trunc_normal_
    try:
        yield
    finally:
        torch.nn.init.trunc_normal_ = original


def build(
    *, function: str, size: int, options: dict[str, Any], batch: int
) -> tuple[torch.nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """Call torchvision's constructor ``function``; images are ``size`` pixels square."""
    with _no_redrawing_of_fakes():
        model = getattr(torchvision.models, function)(**options)
    return model, train_step, random_batch(batch, size)
