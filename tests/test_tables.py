"""Tables that a model makes at its first call and keeps: positions, masks, rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")


class Rotary(torch.nn.Module):
    """Keeps its tables in a way of its own; the frequencies are a buffer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.rand(4), persistent=False)
        self.table: Any = None
        self.tables: dict[int, torch.Tensor] = {}
        self.seen = 0
        self.register_buffer("buffered", None, persistent=False)

    def make(self, length: int) -> torch.Tensor:
        angles = torch.outer(torch.arange(length), self.frequencies)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.way == "attribute":
            if self.table is None or self.table.shape[0] != length:
                self.table = self.make(length)
        elif self.way == "new attribute":
            if not hasattr(self, "kept"):
                self.kept = self.make(length)
        elif self.way == "dictionary":
            if length not in self.tables:
                self.tables[length] = self.make(length)
            self.table = None
        elif self.way == "buffer":
            if self.buffered is None:
                self.buffered = self.make(length)
        elif self.seen != length:
            self.seen, self.table = length, self.make(length)
        tables = {"dictionary": self.tables.get(length), "buffer": self.buffered}
        table = self.kept if self.way == "new attribute" else tables.get(self.way, self.table)
        return self.linear(x * table)


WAYS = ["attribute", "new attribute", "dictionary", "buffer", "number"]


def train(wrap: Callable[..., Any], way: str, lengths: list[int]) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model = Rotary(way)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(step)
    losses = [step(model, optimizer, torch.randn(2, length, 8)) for length in lengths]
    held = [model.table, list(model.tables.items()), model.buffered, getattr(model, "kept", None), model.seen]
    return tensors_and_numbers([losses, model.state_dict(), held]), step


@pytest.mark.parametrize("way", WAYS)
def test_tables_are_made_once_and_left_where_eager_leaves_them(way: str) -> None:
    eager, _ = train(lambda step: step, way, [5] * 4)
    ours, step = train(lambda step: roam.compile(step, poison=True), way, [5] * 4)
    assert_same_bits(eager, ours)
    assert len(step.plans) == 2


@pytest.mark.parametrize("way", ["attribute", "dictionary"])
def test_tables_of_other_lengths(way: str) -> None:
    lengths = [5, 7, 5, 7, 7]
    assert_same_bits(train(lambda step: step, way, lengths)[0], train(roam.compile, way, lengths)[0])


@pytest.mark.parametrize("way", WAYS)
def test_capture_leaves_no_table_behind(way: str) -> None:
    model = Rotary(way)
    before = list(vars(model)), dict(model.tables)
    graph = roam.capture(lambda model, x: model(x).sum().backward(), model, torch.randn(2, 5, 8))
    assert graph.num_operators
    assert (list(vars(model)), dict(model.tables)) == before
    assert model.table is None
    assert model.buffered is None


def test_capture_leaves_no_attribute_of_a_plain_object_behind() -> None:
    class Notes:
        pass

    notes = Notes()

    def step(model, x):
        if not hasattr(notes, "table"):
            notes.table = torch.arange(8).sin()
        return model(x * notes.table).sum()

    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    assert roam.capture(step, model, x).num_operators
    assert not vars(notes)
    result = roam.compile(step)(model, x)
    assert torch.equal(notes.table, torch.arange(8).sin())
    assert torch.equal(result, step(model, x))


def test_a_table_is_made_of_what_the_buffers_hold_when_it_is_made() -> None:
    model = Rotary("attribute")
    step = roam.compile(lambda model, x: model(x).sum())
    x = torch.randn(2, 5, 8)
    step.plan(model, x)
    with torch.no_grad():
        model.frequencies.mul_(2)
    result = step(model, x)
    table = model.table.clone()
    model.table = None
    assert_same_bits([result], [model(x).sum().detach()])
    assert_same_bits([table], [model.table])
    model.frequencies.mul_(2)
    model.table = None
    assert_same_bits([step(model, x)], [Rotary.forward(model, x).sum().detach()])


def test_tables_on_fake_tensors() -> None:
    with roam.fake():
        model = Rotary("attribute")
        x = torch.randn(2, 5, 8)
    assert roam.capture(lambda model, x: model(x).sum().backward(), model, x).num_operators
    assert model.table is None


def test_what_hangs_on_the_batch_or_on_weights_is_no_table() -> None:
    class Keeps(torch.nn.Module):
        def __init__(self, of_weights: bool) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.of_weights = of_weights
            self.kept: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kept is None:
                self.kept = self.linear.weight.detach().exp() if self.of_weights else x.mean(dim=(0, 1))
            return self.linear(x) * self.kept.sum()

    for of_weights in (True, False):
        with pytest.raises(roam.CaptureError, match="kept changed from None") as caught:
            roam.compile(lambda model, x: model(x).sum())(Keeps(of_weights), torch.randn(2, 5, 8))
        assert caught.value.code == "moved"
