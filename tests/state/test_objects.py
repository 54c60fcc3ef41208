"""Batches that are objects of the user's classes: another one at every call, with other tensors in
it."""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import roam
from steps import both, inputs

pytestmark = pytest.mark.usefixtures("one_thread")
FACTOR = 1.0


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: Any
    scale: float = 2.0

    def total(self) -> Any:
        return self.x.sum() * self.scale * FACTOR


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    y: Any


class Pair:
    """A node of PyTorch's trees; the registration does not name its parts."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


torch.utils._pytree.register_pytree_node(
    Pair, lambda pair: ([pair.x, pair.y], None), lambda parts, _: Pair(*parts)
)


class Store:
    """Keeps what it is given in a dictionary of an inner object, and hands it out as attributes."""

    class Inner:
        def __init__(self, outer: Any, held: dict[str, Any]) -> None:
            self.held, self.outer = held, weakref.ref(outer)

    def __init__(self, **held: Any) -> None:
        self.__dict__["inner"] = Store.Inner(self, held)

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__["inner"].held:
            raise AttributeError(name)
        assert self.inner.outer() is self
        return self.__dict__["inner"].held[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.inner.held[name] = value


def trained(
    make: Callable[[int, torch.Tensor], Any],
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor],
    captures: int,
    count: int = 6,
) -> None:
    """Trains eagerly and by plan on batches that `make` makes; `captures` of them."""
    steps = []

    def script(wrap: Any) -> Any:
        net = torch.nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        @wrap
        def step(batch: Any) -> torch.Tensor:
            loss = loss_of(net, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        steps.append(step)
        return [step(make(index, x)) for index, x in enumerate(inputs(count))], net.state_dict()

    both(script)
    assert len(steps[1]._captures) == captures


def fit(net: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (net(batch.x) * batch.y).square().mean()


class TestObjects:
    """The first two calls are captured: from the second on it is known that the object is another
    one every time."""

    @pytest.mark.parametrize("kind", [Batch, Frozen, Store, types.SimpleNamespace])
    def test_of_any_class(self, kind: Any) -> None:
        trained(lambda index, x: kind(x=x, y=torch.ones(3) * index), fit, 2)

    def test_with_containers_and_objects_in_them(self) -> None:
        def make(index, x):
            return Batch(
                Frozen(x, [torch.ones(3) * index]),
                {"pair": (torch.ones(3), "text"), "array": np.ones(2)},
            )

        trained(make, lambda net, b: fit(net, Batch(b.x.x, b.x.y[0])) + b.y["pair"][0].sum(), 2)

    def test_values_in_them_are_guarded(self) -> None:
        def make(index, x):
            batch = types.SimpleNamespace(
                x=x, y=torch.ones(3), flag=index % 2 == 1, array=np.ones(2) * (index // 4)
            )
            if index == 5:
                batch.more = torch.ones(2)
            return batch

        def loss_of(net, batch):
            loss = fit(net, batch) * (2 if batch.flag else 1) + batch.array.sum()
            return loss + batch.more.sum() if hasattr(batch, "more") else loss

        trained(make, loss_of, 6, count=8)

    def test_code_of_their_classes_is_guarded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def script(wrap):
            monkeypatch.setitem(globals(), "FACTOR", 1.0)
            net = torch.nn.Linear(6, 3)
            step = wrap(lambda batch: fit(net, batch) + batch.total())
            returned = [step(Batch(x, torch.ones(3))) for x in inputs(3)]
            monkeypatch.setitem(globals(), "FACTOR", 3.0)
            return [*returned, step(Batch(x=inputs(1)[0], y=torch.ones(3)))]

        both(script)

    def test_of_a_class_made_as_the_program_runs(self) -> None:
        made = types.new_class("Made", (Store,))
        assert made.__module__ == "types"
        trained(lambda index, x: made(x=x, y=torch.ones(3) * index), fit, 2)

    def test_one_for_two_arguments(self) -> None:
        def script(wrap):
            net = torch.nn.Linear(6, 3)
            step = wrap(lambda one, two: net(one.x).sum() * two.x.sum() * (2 if one is two else 1))
            returned = []
            for index, x in enumerate(inputs(6)):
                one = types.SimpleNamespace(x=x)
                returned.append(step(one, one if index % 2 else types.SimpleNamespace(x=x * 2)))
            return returned

        both(script)

    def test_that_the_step_holds_too(self) -> None:
        def script(wrap):
            net, held = torch.nn.Linear(6, 3), types.SimpleNamespace(x=torch.ones(4, 6))
            step = wrap(lambda batch: net(batch.x).sum() * held.x.sum())
            return [
                step(held if index in (1, 3) else types.SimpleNamespace(x=x))
                for index, x in enumerate(inputs(6))
            ]

        both(script)

    def test_that_count_are_no_batches(self) -> None:
        class Trainer:
            def __init__(self):
                self.net, self.calls = torch.nn.Linear(6, 3), 0

        def script(wrap):
            trainers = [Trainer(), Trainer()]

            @wrap
            def step(trainer, settings, x):
                trainer.calls += 1
                settings.calls += 1
                return trainer.net(x).sum() * settings.calls

            settings = types.SimpleNamespace(calls=0)
            returned = [step(trainers[index % 2], settings, x) for index, x in enumerate(inputs(6))]
            return returned, settings.calls, [trainer.calls for trainer in trainers]

        both(script)

    def test_are_left_as_they_were(self) -> None:
        net = torch.nn.Linear(6, 3)
        step = roam.compile(lambda batch: fit(net, batch))
        x, y = torch.ones(4, 6), torch.ones(3)
        for _ in range(3):
            batch = Store(x=x, y=y)
            step(batch)
            assert batch.x is x
            assert batch.y is y
            assert list(batch.inner.held) == ["x", "y"]

    def test_that_the_step_changes_are_captured_one_by_one_or_refused(self) -> None:
        class Plain:
            def __init__(self, x):
                self.x = x

        def script(wrap):
            net = torch.nn.Linear(6, 3)

            @wrap
            def step(batch):
                batch.hidden = net(batch.x)
                return batch.hidden.sum()

            batches = [Plain(x) for x in inputs(4)]
            return [step(batch) for batch in batches], [batch.hidden.detach() for batch in batches]

        both(script)


@pytest.mark.parametrize("kind", ["attribute", "set", "slots", "inner"])
def test_a_batch_that_the_state_holds_is_told_from_others(kind: str) -> None:
    """A step may ask whether a batch is one that it knows."""
    make = Frozen if kind == "slots" else Batch

    def script(wrap: Any) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        net = torch.nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = [make(torch.randn(4, 6), [torch.ones(1)]) for _ in range(4)]
        held = types.SimpleNamespace(last=batches[3], inner=batches[3].y, hard=[batches[3]])

        def is_known(batch: Any) -> bool:
            if kind == "set":
                return any(one is batch for one in held.hard)
            return batch.y is held.inner if kind == "inner" else batch is held.last

        def step(batch: Any) -> float:
            optimizer.zero_grad()
            loss = net(batch.x).pow(2).mean() * (3.0 if is_known(batch) else 1.0) * batch.y[0]
            loss.sum().backward()
            optimizer.step()
            return loss.item()

        train = wrap(step)
        return [train(batches[index]) for index in (0, 1, 2, 3, 0, 1, 3)], train

    seen, _ = script(lambda step: step)
    found, train = script(roam.compile)
    assert found == seen
    assert len(train.plans) <= 3


def test_a_node_whose_parts_have_no_names() -> None:
    def script(wrap: Callable[[Any], Any]) -> list[Any]:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @wrap
        def step(batch: dict[str, list[Pair]]) -> Pair:
            (pair,) = batch["pairs"]
            optimizer.zero_grad()
            loss = (model(pair.x) - pair.y).square().mean()
            loss.backward()
            optimizer.step()
            return Pair(loss, pair.y + 1)

        returned = [step({"pairs": [Pair(x, x[:, :2])]}) for x in torch.randn(4, 3, 4)]
        return [[(pair.x, pair.y) for pair in returned], model.state_dict()]

    both(script)


def test_a_node_whose_parts_have_no_names_is_compared() -> None:
    def step(batch: dict[str, list[Pair]]) -> Pair:
        return Pair(batch["pairs"][0].x * 2, batch["pairs"][0].y)

    assert roam.compare(step, {"pairs": [Pair(torch.randn(3), torch.ones(3))]}).equal


def test_a_node_that_notes_the_classes_of_its_parts() -> None:
    """The classes are those of the tensors for which fakes stand. A note of another class would be
    a change that the step makes at every call, and no plan would be made.
    """
    noted: dict[type, bool] = {}

    class Noting(Pair):
        def parts(self) -> tuple[list[torch.Tensor], None]:
            for part in (self.x, self.y):
                kind = type(part)
                if kind not in noted:
                    noted[kind] = kind is torch.Tensor
            return [self.x, self.y], None

    torch.utils._pytree.register_pytree_node(Noting, Noting.parts, lambda parts, _: Noting(*parts))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @roam.compile
    def step(pair: Noting) -> Noting:
        optimizer.zero_grad()
        loss = (model(pair.x) - pair.y).square().mean()
        loss.backward()
        optimizer.step()
        return Noting(loss, pair.parts()[0][1] + 1)

    for x in torch.randn(3, 3, 4):
        step(Noting(x, x[:, :2]))
    assert step.plans
    assert noted == {torch.Tensor: True}
