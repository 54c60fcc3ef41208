"""Image classifiers of torchvision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch._subclasses.fake_tensor import FakeTensor

CLASSES = 1000


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Train once on images [batch, 3, height, width] with labels [batch]; returns the mean cross-entropy, a scalar."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


@contextmanager
def _no_redrawing_of_fakes() -> Iterator[None]:
    """``trunc_normal_`` draws until every value is within its bounds, a question that fake tensors cannot answer."""
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
        model = getattr(torchvision.models, function)(weights=None, **options)
    images = torch.randn(batch, 3, size, size)
    labels = torch.randint(CLASSES, (batch,))
    return model, train_step, (images, labels)
