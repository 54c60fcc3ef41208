"""Small models, batches and ways to compare a step by plan with the eager one, which many tests
share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import roam
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional
Script = Callable[[Callable[[Any], Any]], list[Any]]


def same_by_plan(script: Script) -> None:
    """Runs a user's script with eager steps, and out of a pool in which what is dead is
    overwritten."""
    outcomes = []
    for wrap in (lambda step: step, functools.partial(roam.compile, pool=True, poison=True)):
        torch.manual_seed(0)
        outcomes.append(tensors_and_numbers(script(wrap), torch.get_rng_state()))
    assert_same_bits(*outcomes)


def images(count: int = 3, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    return [torch.randn(shape or (4, 6), generator=generator) for _ in range(count)]


def train(
    model: torch.nn.Module,
    wrap: Callable[[Any], Any],
    batches: list[Any],
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor] = lambda model, x: (
        model(x).square().mean()
    ),
) -> list[Any]:
    """A few steps of the commonest kind."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @wrap
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss

    returned = [step(model, optimizer, x) for x in batches]
    return [returned, model.state_dict(), optimizer.state_dict()]


def step_of(model: torch.nn.Module) -> Callable[..., Any]:
    """A step that trains a classifier by AdamW; called with inputs and labels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def squares_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """A step that trains a model to give zeros; called with inputs."""

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def refused(step: Callable[..., Any], *args: Any) -> roam.CaptureError:
    with pytest.raises(roam.CaptureError) as caught:
        roam.capture(step, *args)
    return caught.value


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.drop = torch.nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.drop(torch.relu(self.first(self.drop(x)))))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.25)
        self.second = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


def both(script: Script) -> None:
    """Runs a user's script with eager steps and with compiled ones; everything it returns must have
    the same bits."""
    outcomes = []
    for wrap in (lambda step: step, roam.compile):
        torch.manual_seed(0)
        outcomes.append(tensors_and_numbers(script(wrap), torch.get_rng_state()))
    assert_same_bits(*outcomes)


def batches(count: int, size: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    return [
        (
            torch.randn(size, 6, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def kernel_of(step: Any, operator: Any) -> tuple[dict[str, Any], str]:
    """Where a compiled step looks up the one kernel of an operator that it calls."""
    globals_ = step._captures[0].runners[-1]._executor.generated.run.__globals__
    kernels = [getattr(operator, overload)._op for overload in operator.overloads()]
    (name,) = [
        name for name, value in globals_.items() if any(value is kernel for kernel in kernels)
    ]
    return globals_, name


class Breaking:
    """A kernel that fails at a chosen call of a chosen operator, as one that runs out of memory
    would."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, step: Any, operator: Any, error: BaseException
    ) -> None:
        globals_, name = kernel_of(step, operator)

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise error

        monkeypatch.setitem(globals_, name, fail)


def inputs(count: int, sizes: tuple[int, ...] = (4,)) -> list[torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    return [
        torch.randn(sizes[index % len(sizes)], 6, generator=generator) for index in range(count)
    ]


class Recomputing(torch.nn.Module):
    def __init__(
        self, *, preserve: bool = True, reentrant: bool = False, is_nested: bool = False
    ) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.enter, self.drop = torch.nn.Linear(6, 6), torch.nn.Dropout(0.3)
        self.is_nested = is_nested
        self.checkpoint = functools.partial(
            checkpoint, use_reentrant=reentrant, preserve_rng_state=preserve
        )

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.checkpoint(self.blocks[1], self.blocks[0](x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.enter(x))
        if self.is_nested:
            return self.drop(self.checkpoint(self.pair, x))
        for block in self.blocks:
            x = self.checkpoint(block, x)
        return self.drop(x)


def recomputing_step() -> tuple[Any, ...]:
    def step(model, optimizer, x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    model = Recomputing()
    return step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6)
