"""A randomly wired network, after Xie, Kirillov, Girshick and He, "Exploring Randomly Wired Neural
Networks for Image Recognition" (ICCV 2019): the small regime, whose three stages are random graphs
of Watts and Strogatz.

Its activations are needed by nodes far apart, in no regular pattern.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from roam.zoo.images import CLASSES, random_batch, train_step

SIZE = 224
NEIGHBOURS = 4
REWIRED = 0.75
LAST = 1280


def small_world(nodes: int, source: random.Random) -> list[list[int]]:
    """The inputs of each node: a ring in which each node knows its next ``NEIGHBOURS / 2``, and
    each link is rewired with probability ``REWIRED``. Links lead from smaller to larger numbers.
    """
    ring = [
        (node, (node + ahead) % nodes)
        for ahead in range(1, NEIGHBOURS // 2 + 1)
        for node in range(nodes)
    ]
    links = {frozenset(link) for link in ring}
    for node, other in ring:
        if source.random() < REWIRED:
            free = [
                end for end in range(nodes) if end != node and frozenset((node, end)) not in links
            ]
            links.remove(frozenset((node, other)))
            links.add(frozenset((node, source.choice(free))))
    return [sorted(min(link) for link in links if max(link) == node) for node in range(nodes)]


class Triplet(nn.Sequential):
    """ReLU, a separable convolution, batch normalization: what a node does after it has summed its
    inputs.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(inputs, inputs, 3, stride=stride, padding=1, groups=inputs, bias=False),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )


class Node(nn.Module):
    """The weighted sum of the inputs, the weights being positive, then a :class:`Triplet`."""

    def __init__(self, degree: int, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(degree)) if degree > 1 else None
        self.triplet = Triplet(inputs, outputs, stride)

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """See the class."""
        total = inputs[0]
        if self.weights is not None:
            shares = self.weights.sigmoid().unbind()
            total = inputs[0] * shares[0]
            for features, share in zip(inputs[1:], shares[1:], strict=True):
                total = total + features * share
        result: torch.Tensor = self.triplet(total)
        return result


class Stage(nn.Module):
    """A random graph. Nodes without inputs read the stage's input. The stage's output is the mean
    of the nodes that no other node reads.
    """

    def __init__(self, links: list[list[int]], inputs: int, outputs: int) -> None:
        super().__init__()
        self.links = links
        self.ends = sorted(
            set(range(len(links))) - {number for before in links for number in before}
        )
        self.nodes = nn.ModuleList(
            Node(len(before), outputs, outputs, 1) if before else Node(1, inputs, outputs, 2)
            for before in links
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Halve height and width."""
        made: list[torch.Tensor] = []
        for node, before in zip(self.nodes, self.links, strict=True):
            made.append(node([made[number] for number in before] or [features]))
        total = made[self.ends[0]]
        for number in self.ends[1:]:
            total = total + made[number]
        return total / len(self.ends)


class RandomlyWired(nn.Module):
    """Images [batch, 3, height, width] to class scores [batch, classes]."""

    def __init__(self, width: int, nodes: int, seed: int) -> None:
        super().__init__()
        source = random.Random(seed)
        self.features = nn.Sequential(
            nn.Conv2d(3, width // 2, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width // 2),
            Triplet(width // 2, width, 2),
            Stage(small_world(nodes, source), width, width),
            Stage(small_world(nodes, source), width, 2 * width),
            Stage(small_world(nodes, source), 2 * width, 4 * width),
            nn.ReLU(),
            nn.Conv2d(4 * width, LAST, 1, bias=False),
            nn.BatchNorm2d(LAST),
            nn.ReLU(),
        )
        self.score = nn.Linear(LAST, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        scores: torch.Tensor = self.score(
            F.adaptive_avg_pool2d(self.features(images), 1).flatten(1)
        )
        return scores


def build(
    *, batch: int, width: int = 78, nodes: int = 32, seed: int = 1
) -> tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """Make the small regime (78 channels, 32 nodes a stage) by default; ``seed`` chooses the
    wiring.
    """
    return RandomlyWired(width, nodes, seed), train_step, random_batch(batch, SIZE)
