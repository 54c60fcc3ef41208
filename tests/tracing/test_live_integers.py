"""Integer arguments that change from call to call, such as the number of the iteration."""

from __future__ import annotations

import contextlib
import io
import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
from torch import nn

import roam

CALLS: Final = 14
Loss = Callable[[Any, torch.Tensor, int], Any]


class My:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(3, 3)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.kept: Any = None

    def squares(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x).pow(2).mean()
        return loss


def outcome(wrap: Callable[..., Any], loss_of: Loss) -> tuple[Any, int]:
    """What some calls leave and print, and how many plans they made."""
    my, out = My(), io.StringIO()

    def train_step(x: torch.Tensor, it: int) -> Any:
        my.optimizer.zero_grad()
        found = loss_of(my, x, it)
        loss = found[0] if isinstance(found, tuple) else found
        loss.backward()
        my.optimizer.step()
        return found

    step = wrap(train_step)
    draws = torch.Generator().manual_seed(1)
    returned = []
    with contextlib.redirect_stdout(out):
        for it in range(CALLS):
            found = step(torch.randn(2, 3, generator=draws), it)
            parts = found if isinstance(found, tuple) else (found,)
            returned.append([getattr(part, "item", lambda part=part: part)() for part in parts])
    left = [weight.tolist() for weight in my.net.parameters()]
    return (returned, left, my.kept, out.getvalue()), len(getattr(step, "plans", []))


def plans(loss_of: Loss) -> int:
    eager, _ = outcome(lambda step: step, loss_of)
    planned, count = outcome(roam.compile, loss_of)
    assert planned == eager
    return count


def warms_up(my: Any, x: torch.Tensor, it: int) -> Any:
    for group in my.optimizer.param_groups:
        group["lr"] = 0.01 * min(1.0, (it + 1) / 8)
    return my.squares(x)


def warms_up_by_a_condition(my: Any, x: torch.Tensor, it: int) -> Any:
    my.optimizer.param_groups[0]["lr"] = 0.01 * it / 4 if it < 4 else 0.01
    return my.squares(x)


def keeps(my: Any, x: torch.Tensor, it: int) -> Any:
    my.kept = it
    return my.squares(x)


def divides(my: Any, x: torch.Tensor, it: int) -> Any:
    epoch, batch = divmod(it, 4)
    return my.squares(x) * (epoch + 1) * (batch + 1)


def takes_attributes(my: Any, x: torch.Tensor, it: int) -> Any:
    names = ("real", "imag", "numerator", "denominator")
    my.kept = [getattr(it, name, None) for name in names], getattr(it, "to_bytes", None) is None
    return my.squares(x)


FEW: Final[dict[str, Loss]] = {
    "warm-up": warms_up,
    "warm-up by a condition": warms_up_by_a_condition,
    "kept": keeps,
    "divmod": divides,
    "arithmetic": lambda my, x, it: my.squares(x) * (1 - it / 100) + 0.5**it,
    "bits": lambda my, x, it: my.squares(x) * (it & 1) + (it >> 1),
    "cosine": lambda my, x, it: my.squares(x) * (1 + math.cos(math.pi * it / 20)),
    "maximum": lambda my, x, it: my.squares(x) * max(it, 3),
    "attributes": takes_attributes,
    "truth": lambda my, x, it: my.squares(x) * (1 if it else 2),
    "members": lambda my, x, it: my.squares(x) * (2 if it in (3, 6) else 1),
    "tensor": lambda my, x, it: my.squares(x) * torch.tensor(it) + torch.full((2,), it).sum(),
    "class": lambda my, x, it: my.squares(x) * (2 if type(it) is int and isinstance(it, int) else 3),
    "returned": lambda my, x, it: (my.squares(x), it, it + 1),
    "unread": lambda my, x, it: my.squares(x),
}  # fmt: skip


@pytest.mark.parametrize("loss_of", FEW.values(), ids=FEW)
def test_few_plans(loss_of: Loss) -> None:
    assert plans(loss_of) <= 6


def adds_or_not(my: Any, x: torch.Tensor, it: int) -> Any:
    try:
        weight = int.__add__(it, 1)
    except TypeError:
        weight = -1
    return my.squares(x) * weight


def adds_text(my: Any, x: torch.Tensor, it: Any) -> Any:
    try:
        it + "a"
    except Exception as error:  # noqa: BLE001 - as steps do
        my.kept = str(error)
    return my.squares(x)


def suppresses(my: Any, x: torch.Tensor, it: int) -> Any:
    weight = -1.0
    with contextlib.suppress(TypeError):
        weight = timedelta(seconds=it).total_seconds()
    return my.squares(x) * weight


def as_json(my: Any, x: torch.Tensor, it: int) -> Any:
    my.kept = json.dumps({"it": it}, default=lambda value: "unknown")
    return my.squares(x)


EACH: Final[dict[str, Loss]] = {
    "json": as_json,
    "size": lambda my, x, it: my.squares(x.repeat(1 + it, 1)),
    "range": lambda my, x, it: sum(my.squares(x) for _ in range(it + 1)),
    "index": lambda my, x, it: my.squares(x) * list(range(CALLS))[it],
    "key": lambda my, x, it: my.squares(x) * {0: 1.0, 1: 2.0}.get(it, 3.0),
    "seed": lambda my, x, it: torch.manual_seed(it) and my.squares(x + torch.randn_like(x)),
    "identity": lambda my, x, it: my.squares(x) * (2 if it is THREE else 1),
    "identity by a function": lambda my, x, it: (
        my.squares(x) * (2 if operator.is_(it, THREE) else 1)
    ),
    "id": lambda my, x, it: my.squares(x) * (2 if id(it) == id(THREE) else 1),
    "caught": adds_or_not,
    "caught for text": adds_text,
    "suppressed": suppresses,
    "power": lambda my, x, it: my.squares(x) * (-1) ** it,
}
THREE: Final = 3


@pytest.mark.sweep
@pytest.mark.parametrize("loss_of", EACH.values(), ids=EACH)
def test_a_plan_for_each(loss_of: Loss) -> None:
    assert plans(loss_of) == CALLS + 1


def test_with_a_float_argument() -> None:
    my = My()

    def step(x: torch.Tensor, it: int, weight: float) -> torch.Tensor:
        loss = my.squares(x) * weight * (2 if it > 2 else 1)
        loss.backward()
        return loss

    planned = roam.compile(step)
    for it in range(8):
        x = torch.randn(2, 3)
        eager = step(x, it, it / 7).item()
        assert planned(x, it, it / 7).item() == eager
    assert len(planned.plans) <= 5


@pytest.mark.parametrize("on_change", ["raise", "eager"])
def test_one_capture_is_enough_where_no_more_are_allowed(on_change: Any) -> None:
    my = My()
    step = roam.compile(lambda x, it: my.squares(x) * it, on_change=on_change)
    for it in range(5):
        x = torch.randn(2, 3)
        assert step(x, it).item() == (my.squares(x) * it).item()
    assert len(step.plans) == 1


def test_in_containers() -> None:
    my = My()

    @roam.compile
    def step(batch: dict[str, Any]) -> torch.Tensor:
        return my.squares(batch["x"]) * batch["it"]

    for it in range(6):
        x = torch.randn(2, 3)
        assert step({"x": x, "it": it}).item() == (my.squares(x) * it).item()
    assert len(step.plans) <= 3


@dataclass
class Batch:
    x: torch.Tensor
    it: int


def test_in_objects_each_value_has_a_plan() -> None:
    my = My()

    @roam.compile
    def step(batch: Batch) -> torch.Tensor:
        return my.squares(batch.x) * batch.it

    for it in range(6):
        x = torch.randn(2, 3)
        assert step(Batch(x, it)).item() == (my.squares(x) * it).item()


def test_another_class_of_number_is_seen() -> None:
    my = My()
    step = roam.compile(lambda x, it: my.squares(x) * (it / 2 if isinstance(it, int) else it))
    x = torch.randn(2, 3)
    for it in (1, 2, 3, 4.0, True, 5, 2**70):
        eager = my.squares(x) * (it / 2 if isinstance(it, int) else it)
        assert step(x, it).item() == eager.item()
