"""Tables that a model makes at its first call and keeps: positions, masks, rotations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from newer import needs_2_15
from steps import both
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
    held = [
        model.table,
        list(model.tables.items()),
        model.buffered,
        getattr(model, "kept", None),
        model.seen,
    ]
    return tensors_and_numbers([losses, model.state_dict(), held]), step


@pytest.mark.parametrize("way", WAYS)
def test_tables_are_made_once_and_left_where_eager_leaves_them(way: str) -> None:
    eager, _ = train(lambda step: step, way, [5] * 4)
    ours, step = train(lambda step: roam.compile(step, poison=True), way, [5] * 4)
    assert_same_bits(eager, ours)
    assert len(step.plans) == (3 if way == "number" else 1)


@pytest.mark.parametrize("way", ["attribute", "dictionary"])
def test_tables_of_other_lengths(way: str) -> None:
    lengths = [5, 7, 5, 7, 7]
    assert_same_bits(
        train(lambda step: step, way, lengths)[0], train(roam.compile, way, lengths)[0]
    )


@pytest.mark.parametrize("way", ["attribute", "new attribute", "dictionary", "buffer"])
def test_a_capture_that_is_refused_leaves_no_table_behind(way: str) -> None:
    model = Rotary(way)
    before = list(vars(model)), dict(model.tables)
    with pytest.raises(roam.CaptureError, match="call it once first") as caught:
        roam.capture(lambda model, x: model(x).sum().backward(), model, torch.randn(2, 5, 8))
    assert caught.value.code == "moved"
    assert (list(vars(model)), dict(model.tables)) == before
    assert model.table is None
    assert model.buffered is None


def test_attributes_of_a_plain_object() -> None:
    class Notes:
        pass

    notes = Notes()

    def step(model, x):
        if not hasattr(notes, "table"):
            notes.table = torch.arange(8).sin()
        return model(x * notes.table).sum()

    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    with pytest.raises(roam.CaptureError, match="call it once first"):
        roam.capture(step, model, x)
    assert not vars(notes)
    planned = roam.compile(step)
    planned(model, x)
    assert torch.equal(notes.table, torch.arange(8).sin())
    assert torch.equal(planned(model, x), step(model, x))
    assert len(planned.plans) == 1


def test_a_table_that_is_taken_away_is_made_anew_of_what_the_buffers_hold_then() -> None:
    model, other = Rotary("attribute"), Rotary("attribute")
    other.load_state_dict(model.state_dict())
    other.frequencies.copy_(model.frequencies)
    step = roam.compile(lambda model, x: model(x).sum())
    x = torch.randn(2, 5, 8)
    for _ in range(3):
        for _ in range(2):
            assert_same_bits([step(model, x)], [other(x).sum().detach()])
            assert_same_bits([model.table], [other.table])
        for one in (model, other):
            one.frequencies.mul_(2)
            one.table = None


def test_tables_on_fake_tensors() -> None:
    def step(model: Any, x: torch.Tensor) -> None:
        model(x).sum().backward()

    with roam.fake():
        model = Rotary("attribute")
        x = torch.randn(2, 5, 8)
        step(model, x)
    assert roam.capture(step, model, x).num_operators


@pytest.mark.parametrize("of_weights", [True, False])
def test_what_hangs_on_the_batch_or_on_weights_is_made_by_the_first_call(of_weights: bool) -> None:
    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.kept: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kept is None:
                self.kept = self.linear.weight.detach().exp() if of_weights else x.mean(dim=(0, 1))
            return self.linear(x) * self.kept.sum()

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            model.linear.weight -= 0.1 * model.linear.weight.grad
        return loss

    model = Keeps()
    with pytest.raises(roam.CaptureError, match="kept changed from None") as caught:
        roam.capture(step, model, torch.randn(2, 5, 8))
    assert caught.value.code == "moved"
    outcomes = []
    for wrap in (lambda step: step, roam.compile):
        torch.manual_seed(0)
        model, run = Keeps(), wrap(step)
        losses = [run(model, torch.randn(2, 5, 8)) for _ in range(3)]
        outcomes.append(tensors_and_numbers(losses, model.kept, model.state_dict()))
    assert_same_bits(*outcomes)
    assert len(run.plans) == 1


class TestFunctionsThatKeepTheirResults:
    """`functools.lru_cache`: the step comes by the very tensors that the function keeps, so it runs
    beside its plan."""

    def train(
        self,
        wrap: Callable[..., Any],
        loss_of: Any,
        between: Any = lambda index: None,
        lengths: Any = (5,),
    ) -> Any:
        linear = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

        @wrap
        def step(x):
            loss = loss_of(linear(x), linear)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        returned = []
        for index in range(7):
            returned.append(step(torch.randn(2, lengths[index % len(lengths)], 8)))
            between(index)
        return [returned, linear.state_dict()], step

    @pytest.mark.auto
    @needs_2_15
    @pytest.mark.parametrize("size", [None, 4])
    @pytest.mark.parametrize("is_warm", [False, True])
    def test_with_a_table_for_each_length(self, size: int | None, is_warm: bool) -> None:
        def script(wrap):
            @functools.lru_cache(size)
            def tables(length):
                angles = torch.arange(float(length))[:, None]
                return angles.cos(), {"sin": angles.sin()}

            if is_warm:
                tables(5)

            def loss_of(out, linear):
                cos, more = tables(out.shape[1])
                return (out * cos + more["sin"]).square().mean()

            return self.train(wrap, loss_of, lengths=(5, 6, 5))[0]

        both(script)

    @pytest.mark.auto
    @needs_2_15
    def test_what_is_made_anew_of_weights_counts(self) -> None:
        def script(wrap):
            @functools.cache
            def scale(factor):
                return linear.weight.detach().exp().sum() * factor

            def loss_of(out, of):
                nonlocal linear
                linear = of
                return out.square().mean() * scale(2)

            linear = torch.nn.Linear(8, 8)
            scale(2)
            return self.train(
                wrap, loss_of, lambda index: scale.cache_clear() if index == 3 else None
            )[0]

        both(script)

    @pytest.mark.auto
    @needs_2_15
    def test_options_that_change(self) -> None:
        def script(wrap):
            @functools.lru_cache
            def options():
                return {"scale": 2.0}

            def change(index):
                options()["scale"] = 1.0 + index
                if index == 4:
                    options.cache_clear()

            def loss_of(out, linear):
                return (out * options()["scale"]).square().mean()

            return self.train(wrap, loss_of, change)[0]

        both(script)

    @pytest.mark.auto
    @needs_2_15
    def test_written_to_in_place(self) -> None:
        def script(wrap):
            @functools.cache
            def table(length):
                return torch.ones(length)

            def loss_of(out, linear):
                return (out * table(8).mul_(1.1)).square().mean()

            return [self.train(wrap, loss_of)[0], table(8)]

        both(script)

    @pytest.mark.parametrize("is_warm", [False, True])
    @pytest.mark.parametrize("size", [None, 4])
    @pytest.mark.parametrize(
        "what", ["new", "parameter", "part of a buffer", "container", "options"]
    )
    def test_are_refused(self, what: str, size: int | None, is_warm: bool) -> None:
        linear = torch.nn.Linear(8, 3)
        linear.register_buffer("scale", torch.ones(4))

        @functools.lru_cache(size)
        def kept() -> Any:
            match what:
                case "new":
                    return torch.ones(3)
                case "parameter":
                    return linear.weight[0, :3] if not is_warm else linear.weight
                case "part of a buffer":
                    return linear.scale[:3]
                case "options":
                    return {"scale": 2.0}
            return {"scale": [torch.ones(3)]}

        def step(x: torch.Tensor) -> torch.Tensor:
            found = kept()
            if what == "container":
                found = found["scale"][0]
            return (linear(x) * (found["scale"] if what == "options" else found.sum())).sum()

        if is_warm:
            kept()
        before = kept() if is_warm else None
        for _ in range(2):
            with pytest.raises(roam.CaptureError, match="lru_cache") as caught:
                roam.compile(step).plan(torch.ones(2, 8))
            assert caught.value.code in {"moved", "unknown_tensor"}
        assert not is_warm or kept() is before
        unread = roam.compile(lambda x: linear(x).sum() if x.ndim == 2 else kept())
        assert_same_bits([linear(torch.ones(2, 8)).sum()], [unread(torch.ones(2, 8))])


class Growing(torch.nn.Module):
    """Makes a longer table when a longer batch comes, and keeps its length in Python."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.rand(4), persistent=False)
        self.original = self.frequencies
        self.table: Any = None
        self.longest, self.renewed = 0, torch.zeros(1)
        if way != "none yet":
            self.grow(4)

    def grow(self, length: int) -> None:
        self.longest = length
        if self.way == "frequencies":  # the table is made of a buffer that is replaced too
            table = torch.outer(torch.arange(length), self.frequencies)
            self.register_buffer("frequencies", self.frequencies + length, persistent=False)
        else:
            table = torch.outer(torch.arange(length), self.frequencies)
        self.table = {"table": table.cos()} if self.way == "dictionary" else table.cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        self.renewed = torch.arange(3)  # at each call
        if self.way == "shrinks" and length < 4 < self.longest:
            self.grow(4)
        if length > self.longest:
            self.grow(length)
        table = self.table["table"] if self.way == "dictionary" else self.table
        return self.linear(x * torch.cat([table, table], dim=-1)[:length]) + self.renewed.sum()


@pytest.mark.parametrize("way", ["tensor", "none yet", "frequencies", "shrinks", "dictionary"])
@pytest.mark.sweep
def test_tables_that_grow_with_a_number_need_one_plan_for_each_length(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = [6, 6, 4, 3, 4, 3, *range(7, 19), 18, 5]

    def script(wrap: Any) -> Any:
        torch.manual_seed(0)
        model = Growing(way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = wrap(step)
        losses = [compiled(torch.randn(2, length, 8)) for length in lengths]
        return losses, model.state_dict(), model.frequencies, model.longest, model.table

    with caplog.at_level("INFO", "roam"):
        both(script)
    own = [r for r in caplog.records if "Your own function runs" in r.getMessage()]
    if way == "dictionary":
        assert len(own) > 10  # as often as need be, as long as lengths are new
    else:
        assert len(own) == (
            way == "frequencies"
        )  # where the first call parts two names of a buffer


def test_what_a_step_replaces_together_is_not_taken_for_set_where_a_part_of_it_is() -> None:
    def script(wrap: Any) -> Any:
        torch.manual_seed(0)
        model = Growing("tensor")
        step = wrap(lambda x: model(x).sum().detach())
        losses = [step(torch.ones(2, length, 8)) for length in (4, 6, 6)]
        model.longest, model.table = 4, torch.ones(6, 4)  # as if a user had made it
        losses.append(step(torch.ones(2, 6, 8)))
        return losses, model.table

    both(script)
