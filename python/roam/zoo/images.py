"""The training step of models that classify images, or each pixel of an image."""

from __future__ import annotations

import torch
import torch.nn.functional as F

CLASSES = 1000


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Train once on images [batch, 3, height, width]; returns the mean cross-entropy, a scalar.

    Labels are [batch], or [batch, height, width] where every pixel has its class.
    """
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def random_batch(batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make images [batch, 3, size, size] and labels [batch]."""
    return torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))
