"""Containers of a step's state in whose place its caller puts others before each call, as
`self.batch = batch` does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import nn

import roam
from newer import needs_2_15

Draw = Callable[..., torch.Tensor]


class Run:
    """Trains by what is in `my.held`, which is set anew before each call."""

    def __init__(
        self,
        wrap: Callable[..., Any],
        loss_of: Callable[[Any], Any],
        feed: Callable[[Any, Draw, int], object],
        *,
        calls: int = 7,
    ) -> None:
        torch.manual_seed(0)
        self.my = my = SimpleNamespace(net=nn.Linear(4, 4), held=None, other=None)
        my.optimizer = torch.optim.SGD(my.net.parameters(), lr=0.1)

        def train_step() -> torch.Tensor:
            my.optimizer.zero_grad()
            loss: torch.Tensor = loss_of(my)
            loss.backward()
            my.optimizer.step()
            return loss

        self.step = wrap(train_step)
        draws = torch.Generator().manual_seed(1)
        self.losses = []
        for number in range(calls):
            feed(my, lambda *shape: torch.randn(shape or (2, 4), generator=draws), number)
            self.losses.append(self.step().item())
        self.weights = [weight.tolist() for weight in my.net.parameters()]


def squares(my: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = my.net(x).square().mean()
    return loss


def plans(loss_of: Callable[[Any], Any], feed: Callable[[Any, Draw, int], object]) -> int:
    """How many plans a run makes that ends as eagerly."""
    eager, planned = Run(lambda step: step, loss_of, feed), Run(roam.compile, loss_of, feed)
    assert (planned.losses, planned.weights) == (eager.losses, eager.weights)
    assert str(planned.my.held) == str(eager.my.held)
    return len(planned.step.plans)


def two_entries(my: Any, draw: Draw, number: int) -> None:
    my.held = {"x": draw(), "y": draw()}


def nested(my: Any, draw: Draw, number: int) -> None:
    my.held = {"x": {"a": draw()}, "y": [draw(), {"k": draw()}]}


def by_turns(my: Any, draw: Draw, number: int) -> None:
    my.other = my.other or [[draw()], [draw()]]
    my.held = my.other[number % 2]


def several_sizes(my: Any, draw: Draw, number: int) -> None:
    my.held = [draw(2 + number % 2, 4)]


def several_keys(my: Any, draw: Draw, number: int) -> None:
    my.held = {key: draw() for key in "abc"[: 1 + number % 3]}


def several_numbers(my: Any, draw: Draw, number: int) -> None:
    my.held = {"x": draw(), "weight": float(number % 2)}


FEW: Final = {
    "dictionary": (lambda my: (my.net(my.held["x"]) - my.held["y"]).square().mean(), two_entries),
    "nested": (lambda my: squares(my, my.held["x"]["a"]) + my.held["y"][1]["k"].sum(), nested),
    "by turns": (lambda my: squares(my, my.held[0]), by_turns),
    "sizes": (lambda my: squares(my, my.held[0]), several_sizes),
    "keys": (lambda my: sum(squares(my, x) for x in my.held.values()), several_keys),
    "numbers": (lambda my: squares(my, my.held["x"]) * my.held["weight"], several_numbers),
}


@needs_2_15
@pytest.mark.auto
@pytest.mark.parametrize(("loss_of", "feed"), FEW.values(), ids=FEW)
def test_python_runs_beside_few_plans_where_others_come_at_each_call(
    loss_of: Callable[[Any], Any], feed: Callable[[Any, Draw, int], object]
) -> None:
    assert plans(loss_of, feed) <= 4


def renewed(my: Any, kind: Any) -> torch.Tensor:
    loss = squares(my, my.other[0])
    my.other = kind(one.detach() * 0.5 + loss.detach() for one in my.other)
    return loss


@needs_2_15
@pytest.mark.auto
@pytest.mark.parametrize(("kind", "is_beside"), [(tuple, False), (list, True)])
def test_a_step_that_puts_others_in_their_place(kind: Any, is_beside: bool) -> None:
    def feed(my: Any, draw: Draw, number: int) -> None:
        my.other = my.other or kind([draw(), draw()])

    runs = [
        Run(wrap, lambda my: renewed(my, kind), feed) for wrap in (lambda step: step, roam.compile)
    ]
    assert runs[0].losses == runs[1].losses
    assert str(runs[0].my.other) == str(runs[1].my.other)
    assert runs[1].step.runs_beside is is_beside


def test_a_step_that_changes_them_has_a_plan_for_each() -> None:
    def loss_of(my: Any) -> torch.Tensor:
        my.held["count"] = my.held["count"] + 1
        return squares(my, my.held["x"]) * my.held["count"]

    def feed(my: Any, draw: Draw, number: int) -> None:
        my.held = {"x": draw(), "count": number}

    assert plans(loss_of, feed) == 7


@needs_2_15
@pytest.mark.auto
def test_a_step_that_puts_others_there_too() -> None:
    def loss_of(my: Any) -> torch.Tensor:
        loss = squares(my, my.held["x"])
        my.held = {"x": my.held["x"] * 0.5}
        return loss

    plans(loss_of, lambda my, draw, number: setattr(my, "held", {"x": draw()}))


@needs_2_15
@pytest.mark.auto
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("are_first_shared", [True, False])
def test_two_places_that_hold_one_container_only_in_some_calls(
    kind: Any, are_first_shared: bool
) -> None:
    """A plan reads a container that is in two places at one of them."""

    def loss_of(my: Any) -> torch.Tensor:
        return squares(my, my.held[0] - my.other[0]) + my.other[1].sum()

    def feed(my: Any, draw: Draw, number: int) -> None:
        my.held, my.other = kind([draw(), draw()]), kind([draw(), draw()])
        if are_first_shared is (number < 3):
            my.other = my.held

    assert plans(loss_of, feed) <= 4


def test_one_in_a_container_that_only_one_of_two_places_gets() -> None:
    def loss_of(my: Any) -> torch.Tensor:
        return squares(my, my.held[0][0] - my.other[0][0])

    def feed(my: Any, draw: Draw, number: int) -> None:
        inner = (draw(),)
        my.held, my.other = (inner,), (inner if number < 3 else (draw(),), 1)

    assert plans(loss_of, feed) <= 4


def test_whether_two_places_hold_the_same_is_seen() -> None:
    def loss_of(my: Any) -> torch.Tensor:
        return squares(my, my.held["x"]) * (2 if my.held is my.other else 1)

    def feed(my: Any, draw: Draw, number: int) -> None:
        my.held = {"x": draw()}
        my.other = my.held if number in (0, 4) else {"x": my.held["x"]}

    plans(loss_of, feed)


def test_the_places_are_named() -> None:
    held = (torch.ones(2, 4),)
    my = SimpleNamespace(net=nn.Linear(4, 4), held=held, other=held)
    step = roam.compile(lambda: squares(my, my.held[0] + my.other[0]), on_change="raise")
    step()
    my.held = (torch.ones(2, 4),)
    with pytest.raises(roam.ExecutionError, match=r"my\.held and .*my\.other do not hold the same"):
        step()


def test_a_dictionary_that_is_in_itself() -> None:
    def feed(my: Any, draw: Draw, number: int) -> None:
        my.held = {"x": draw()}
        my.held["held"] = my.held

    run = Run(roam.compile, lambda my: squares(my, my.held["held"]["x"]), feed, calls=4)
    eager = Run(lambda step: step, lambda my: squares(my, my.held["held"]["x"]), feed, calls=4)
    assert run.losses == eager.losses
