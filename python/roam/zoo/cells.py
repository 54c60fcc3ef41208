"""A network of searched cells: DARTS V2 for ImageNet, after Liu, Simonyan and Yang, "DARTS:
Differentiable Architecture Search" (ICLR 2019), without its auxiliary head.

Each cell reads the two cells before it, and its four nodes each sum two operators on earlier nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from roam.zoo.images import CLASSES, random_batch, train_step

SIZE = 224
# Per node its two operators and what they read: 0 and 1 are the cells before, 2 to 4 the nodes so
# far.
Genotype = tuple[tuple[tuple[str, int], tuple[str, int]], ...]
NORMAL: Genotype = (
    (("separable", 0), ("separable", 1)),
    (("separable", 0), ("separable", 1)),
    (("separable", 1), ("skip", 0)),
    (("skip", 0), ("dilated", 2)),
)
REDUCTION: Genotype = (
    (("pool", 0), ("pool", 1)),
    (("skip", 2), ("pool", 1)),
    (("pool", 0), ("skip", 2)),
    (("skip", 2), ("pool", 1)),
)


def _convolved(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
    )


def _depthwise(width: int, stride: int, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(
            width, width, 3, stride, padding=dilation, dilation=dilation, groups=width, bias=False
        ),
        nn.Conv2d(width, width, 1, bias=False),
        nn.BatchNorm2d(width),
    )


class Halved(nn.Module):
    """Half the height and width: two convolutions, one a pixel off, concatenated."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """See the class."""
        features = features.relu()
        result: torch.Tensor = self.norm(
            torch.cat([self.even(features), self.odd(features[:, :, 1:, 1:])], dim=1)
        )
        return result


def _operator(name: str, width: int, stride: int) -> nn.Module:
    if name == "separable":
        return nn.Sequential(_depthwise(width, stride), _depthwise(width, 1))
    if name == "dilated":
        return _depthwise(width, stride, dilation=2)
    if name == "pool":
        return nn.MaxPool2d(3, stride, padding=1)
    return nn.Identity() if stride == 1 else Halved(width, width)


class Cell(nn.Module):
    """Two feature maps to one of four times ``width`` channels, of half the size if ``reduces``."""

    def __init__(
        self, before_last: int, last: int, width: int, reduces: bool, last_reduced: bool
    ) -> None:
        super().__init__()
        self.before_last = (
            Halved(before_last, width) if last_reduced else _convolved(before_last, width)
        )
        self.last = _convolved(last, width)
        self.genotype = REDUCTION if reduces else NORMAL
        self.operators = nn.ModuleList(
            _operator(name, width, 2 if reduces and source < 2 else 1)
            for node in self.genotype
            for name, source in node
        )

    def forward(self, before_last: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """See the class."""
        states = [self.before_last(before_last), self.last(last)]
        operators = iter(self.operators)
        for node in self.genotype:
            first, second = (next(operators)(states[source]) for _, source in node)
            states.append(first + second)
        return torch.cat(states[2:], dim=1)


class Cells(nn.Module):
    """Images [batch, 3, height, width] to class scores [batch, classes]."""

    def __init__(self, width: int, cells: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width // 2, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.second_stem = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.cells = nn.ModuleList()
        channels, reduced = (width, width), True
        for number in range(cells):
            reduces = number in (cells // 3, 2 * cells // 3)
            width *= 2 if reduces else 1
            self.cells.append(Cell(*channels, width, reduces, reduced))
            channels, reduced = (channels[1], 4 * width), reduces
        self.score = nn.Linear(channels[1], CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        before_last = self.stem(images)
        last = self.second_stem(before_last)
        for cell in self.cells:
            before_last, last = last, cell(before_last, last)
        scores: torch.Tensor = self.score(F.adaptive_avg_pool2d(last, 1).flatten(1))
        return scores


def build(
    *, batch: int, width: int = 48, cells: int = 14
) -> tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """Make the published network for ImageNet (48 channels, 14 cells) by default."""
    return Cells(width, cells), train_step, random_batch(batch, SIZE)
