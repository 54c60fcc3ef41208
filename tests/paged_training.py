"""A small network that trains within a third of what its parameters and state take, for tests of
files: they share it with the processes that they start."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import roam

WIDTH = 64


def perceptron(optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 3))
    return model, optimizer(model.parameters(), **options)


def batch(generator: torch.Generator, samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, WIDTH, generator=generator), torch.randint(
        0, 3, (samples,), generator=generator
    )


def clipped(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def plain(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


STEPS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, bool]]] = {
    "clipped": (clipped, {"foreach": False}),
    "foreach": (clipped, {"foreach": True}),
    "fused": (clipped, {"fused": True}),
    "plain": (plain, {"foreach": False}),
    "amsgrad": (plain, {"foreach": False, "amsgrad": True}),
}
"""Steps, each with options of its optimizer."""


def bits(model: Any, optimizer: Any) -> list[torch.Tensor]:
    state = [value for one in optimizer.state.values() for value in one.values()]
    return [one.detach().clone() for one in (*model.state_dict().values(), *state)]


def persistent_bytes(model: Any, optimizer: Any) -> int:
    return sum(one.nbytes for one in bits(model, optimizer))


def trained(
    step: Any, made: tuple[Any, Any], steps: int = 4, between: Callable[..., Any] | None = None
) -> list[torch.Tensor]:
    """Losses, parameters and state; what `between` returns after each step is among them."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        found.append(step(*made, *batch(generator)).clone())
        if between is not None:
            found += between(*made)
    return [*found, *bits(*made)]


@functools.cache
def limit() -> int:
    """A third of what parameters and AdamW's state take."""
    made = perceptron()
    trained(clipped, made, 1)
    return persistent_bytes(*made) // 3


def paged(tmp_path: Path, step: Any = clipped, **options: Any) -> roam.Step:
    return roam.compile(step, **{"memory": limit(), "offload": tmp_path, **options})


def load(made: tuple[Any, Any], states: list[Any]) -> None:
    for one, state in zip(made, copy.deepcopy(states), strict=True):
        one.load_state_dict(state)
