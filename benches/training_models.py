"""GPT-2 and ResNet in plain PyTorch, at their published sizes: what `training.py` trains needs no
other library.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Training:
    """A model in training mode, one batch of random data, and the step that trains on it."""

    train_step: Callable[..., torch.Tensor]
    model: nn.Module
    batch: tuple[torch.Tensor, ...]


class Missing(Exception):
    """A library that the model comes from is not installed."""


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """One step of training; the model returns the mean cross-entropy itself."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(inputs, targets)
    loss.backward()
    optimizer.step()
    return loss


def build(name: str, *, batch: int, seq: int, image: int, dtype: str, device: str) -> Training:
    """Makes a model on its device, every tensor in `dtype`.

    Args:
        name: one of `SIZES`, or ``zoo/`` and the name of a model of roam's zoo.
        batch: samples.
        seq: tokens in a sequence, where the model reads text.
        image: pixels on a side, where it sees images.
        dtype: ``float32`` or ``bfloat16``.
        device: ``cpu`` or ``cuda``.

    Raises:
        Missing: a model of the zoo whose library is not installed.
    """
    if name.startswith("zoo/"):
        return _from_zoo(name.removeprefix("zoo/"), batch, seq, dtype, device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            size = SIZES[name]
            if isinstance(size, Gpt2Size):
                tokens = torch.randint(size.vocabulary, (batch, seq + 1))
                inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
                return Training(train_step, Gpt2(size).train(), (inputs, targets))
            images, classes = torch.randn(batch, 3, image, image), torch.randint(1000, (batch,))
            return Training(train_step, ResNet(size).train(), (images, classes))
    finally:
        torch.set_default_dtype(before)


def _from_zoo(name: str, batch: int, seq: int, dtype: str, device: str) -> Training:
    from roam import zoo

    entry = zoo.entry(name)
    if entry.requires is not None and importlib.util.find_spec(entry.requires) is None:
        raise Missing(f"{entry.requires} is not installed")
    length = None if entry.max_seq is None else min(seq, entry.max_seq)
    made = zoo.build(name, batch=batch, seq=length, dtype=dtype, device=device)
    return Training(made.train_step, made.model, made.batch)


@dataclass(frozen=True)
class Gpt2Size:
    """What tells one GPT-2 from another."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    positions: int = 1024
    dropout: float = 0.1


class Gpt2(nn.Module):
    """GPT-2 (Radford et al. 2019) with its loss; embedding and head share their weight."""

    def __init__(self, size: Gpt2Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.positions, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                # What is added to the residual stream is scaled down by the number of additions.
                depth = (
                    2 * size.layers
                    if name.endswith(("attention.out.weight", "shrink.weight"))
                    else 1
                )
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of int64 tokens [batch, seq] against the tokens that come next."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.token.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm."""

    def __init__(self, size: Gpt2Size) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.grow = nn.Linear(size.width, 4 * size.width)
        self.shrink = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = functional.gelu(self.grow(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.shrink(hidden))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Gpt2Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.rate = size.dropout
        self.into = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.into(x).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.rate, is_causal=True
        )
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


@dataclass(frozen=True)
class ResNetSize:
    """Blocks in each of the four stages, and whether a block narrows its input for its 3x3
    convolution.
    """

    blocks: tuple[int, int, int, int]
    is_bottleneck: bool


class ResNet(nn.Module):
    """ResNet (He et al. 2016) with its loss; a block that halves the image does so in its 3x3
    convolution.
    """

    def __init__(self, size: ResNetSize) -> None:
        super().__init__()
        self.stem = _convolution(3, 64, 7, stride=2)
        stages: list[nn.Module] = []
        channels = 64
        for stage, blocks in enumerate(size.blocks):
            width = 64 * 2**stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(ResidualBlock(channels, width, stride, size.is_bottleneck))
                channels = width * (4 if size.is_bottleneck else 1)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, 1000)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of images [batch, 3, height, width]."""
        x = functional.max_pool2d(functional.relu(self.stem(images)), 3, stride=2, padding=1)
        return functional.cross_entropy(self.head(self.stages(x).mean((2, 3))).float(), classes)


class ResidualBlock(nn.Module):
    """Convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int, is_bottleneck: bool) -> None:
        super().__init__()
        out = width * (4 if is_bottleneck else 1)
        if is_bottleneck:
            parts = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        else:
            parts = [(channels, width, 3, stride), (width, out, 3, 1)]
        self.convolutions = nn.ModuleList(_convolution(*part) for part in parts)
        is_same = stride == 1 and channels == out
        self.shortcut: nn.Module = (
            nn.Identity() if is_same else _convolution(channels, out, 1, stride)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for convolution in self.convolutions[:-1]:
            y = functional.relu(convolution(y))
        return functional.relu(self.convolutions[-1](y) + self.shortcut(x))


def _convolution(channels: int, out: int, kernel: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out))


SIZES: dict[str, Any] = {
    "gpt2": Gpt2Size(12, 768, 12),
    "gpt2-medium": Gpt2Size(24, 1024, 16),
    "gpt2-large": Gpt2Size(36, 1280, 20),
    "gpt2-xl": Gpt2Size(48, 1600, 25),
    "gpt2-4-layers": Gpt2Size(4, 768, 12),
    "gpt2-tiny": Gpt2Size(2, 64, 2, vocabulary=512, positions=128),
    "resnet18": ResNetSize((2, 2, 2, 2), False),
    "resnet50": ResNetSize((3, 4, 6, 3), True),
}
