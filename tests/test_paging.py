"""Steps that keep parameters, state and gradients in files have eager's bits, keep within a limit
below what is persistent, and leave the user's objects true."""

from __future__ import annotations

import copy
import errno
import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roam
from roam.program import paging
from roam.program.pages import Pages, is_movable, is_paged
from roam.runtime import strategy
from training import assert_same_bits

WIDTH = 64


def perceptron(optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 3))
    return model, optimizer(model.parameters(), **options)


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, WIDTH, generator=generator), torch.randint(0, 3, (4,), generator=generator)


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


STEPS = {
    "clipped": (clipped, {"foreach": False}),
    "foreach": (clipped, {"foreach": True}),
    "fused": (clipped, {"fused": True}),
    "plain": (plain, {"foreach": False}),
    "amsgrad": (plain, {"foreach": False, "amsgrad": True}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", STEPS)
def test_a_step_keeps_within_a_third_of_its_parameters_and_state(name: str, tmp_path: Path) -> None:
    function, options = STEPS[name]
    made, step = perceptron(**options), paged(tmp_path, function)
    assert_same_bits(trained(function, perceptron(**options)), trained(step, made))
    step.measured(*made, *batch(torch.Generator()))
    memory = step.memory()
    assert memory.measured_bytes is not None
    assert memory.measured_bytes <= memory.total_bytes <= limit()
    assert memory.run_bytes <= limit()
    assert list(tmp_path.iterdir()) == []


def test_poison_finds_nothing(tmp_path: Path) -> None:
    step = paged(tmp_path, poison=True, pool=True)
    assert_same_bits(trained(clipped, perceptron()), trained(step, perceptron()))
