"""A U-Net, after Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image
Segmentation" (MICCAI 2015), figure 1, with padded convolutions and batch normalization.

Its skip connections keep the largest activations alive from the first layers to the last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from roam.zoo.images import train_step

CLASSES = 21
SIZE = 224


def _double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Images [batch, 3, height, width] to class scores [batch, classes, height, width].

    Height and width must be multiples of 2 to the power of ``depth``.
    """

    def __init__(self, classes: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _double_convolution(inputs, outputs)
            for inputs, outputs in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * outputs, outputs, 2, stride=2)
            for outputs in reversed(widths[:-1])
        )
        self.merge = nn.ModuleList(
            _double_convolution(2 * outputs, outputs) for outputs in reversed(widths[:-1])
        )
        self.score = nn.Conv2d(width, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        features = self.down[0](images)
        skips = []
        for block in self.down[1:]:
            skips.append(features)
            features = block(F.max_pool2d(features, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            features = merge(torch.cat([skips.pop(), up(features)], dim=1))
        scores: torch.Tensor = self.score(features)
        return scores


def build(
    *, batch: int, width: int = 64, depth: int = 4
) -> tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """Make the published widths (64 to 1024 channels) by default."""
    images = torch.randn(batch, 3, SIZE, SIZE)
    labels = torch.randint(CLASSES, (batch, SIZE, SIZE))
    return UNet(CLASSES, width, depth), train_step, (images, labels)
