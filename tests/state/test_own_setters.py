"""Objects whose class has a `__setattr__` or `__delattr__` of its own, as skorch's networks: all of
them is as under eager PyTorch, or refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from training import assert_same_bits, tensors_and_numbers


class Plain:
    def __init__(self) -> None:
        self.changes = 0
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scale, self.log, self.mode = 2.0, list[float](), "first"
        self.last: Any = None

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean() * (self.scale if self.mode == "first" else 1.0)
        loss.backward()
        self.optimizer.step()
        self.last = loss.detach()
        return self.last


class Super(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class Derived(Super):
    pass


class Objects(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)


class Checks(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "scale" and not isinstance(value, float):
            raise TypeError(name)
        super().__setattr__(name, value)


class Dictionary(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


class Counts(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        if name != "changes":
            self.changes = self.changes + 1
        super().__setattr__(name, value)


class CountsBehind(Plain):
    changes = 0

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "changes", self.changes + 1)
        object.__setattr__(self, name, value)


class Marks(Plain):
    """Says, past the methods that note it, what was set last."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "mark", name)
        object.__setattr__(self, name, value)


class Elsewhere(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "_last" if name == "last" else name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "last":
            return self._last
        raise AttributeError(name)


class Averages(Plain):
    """Looks at the old value of what is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        old = getattr(self, name, None)
        if name == "last" and old is not None:
            value = (old + value) / 2
        super().__setattr__(name, value)


class ReadsBehind(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "last" and object.__getattribute__(self, "mode") != "first":
            value = -value
        super().__setattr__(name, value)


class Slots(Plain):
    __slots__ = ("mark",)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("mark", name)
        super().__setattr__(name, value)


def trained(make: type[Plain], wrap: Callable[[Any], Any], change: Callable[..., None]) -> Any:
    torch.manual_seed(0)
    trainer = make()
    step, left = wrap(trainer.step), []
    for place in range(6):
        change(trainer, place)
        left.append(tensors_and_numbers(step(torch.full((4, 3), 1.0 + place))))
        state = {name: value for name, value in vars(trainer).items() if name != "optimizer"}
        left.append(tensors_and_numbers(state))
        left.append(str(state.get("mark", getattr(trainer, "mark", None))))
    return step, left


def assert_alike(plain: list[Any], planned: list[Any]) -> None:
    for one, other in zip(plain, planned, strict=True):
        if isinstance(one, str):
            assert one == other
        else:
            assert_same_bits(one, other)


def logs(trainer: Any, place: int) -> None:
    trainer.log.append(place)


def sets(trainer: Any, place: int) -> None:
    trainer.mode = "first" if place % 3 else "second"
    trainer.note = place


MADE = [
    Super, Derived, Objects, Checks, Dictionary, Counts, CountsBehind, Marks, Elsewhere, Averages, ReadsBehind, Slots,
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("change", [logs, sets])
@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("python", ["idle", "auto"])
def test_a_class_with_setters_of_its_own(
    python: Any, make: type[Plain], change: Callable[..., None]
) -> None:
    _, plain = trained(make, lambda step: step, change)
    try:
        step, planned = trained(make, functools.partial(roam.compile, python=python), change)
    except roam.CaptureError:
        assert python == "idle"
        return
    assert_alike(plain, planned)
    assert "__getattribute__" not in vars(make)


def test_what_changes_at_every_call_needs_a_plan_beside_the_step() -> None:
    step, planned = trained(Checks, functools.partial(roam.compile, python="auto"), logs)
    _, plain = trained(Checks, lambda step: step, logs)
    assert_alike(plain, planned)
    assert step.runs_beside


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float
    log: list[int] = dataclasses.field(default_factory=list)


def test_a_frozen_dataclass_is_guarded_as_a_whole() -> None:
    settings, weight = Settings(2.0), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @roam.compile
    def step() -> None:
        optimizer.zero_grad()
        (weight * settings.scale).square().sum().backward()
        optimizer.step()

    for place in range(4):
        if place == 2:
            settings.log.append(place)
        step()
    assert len(step._captures) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.scale = 3.0  # type: ignore[misc]
