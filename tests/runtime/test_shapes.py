"""Many shapes and kinds of calls of one compiled step: each is captured once, found by its
arguments, and never run by another's plan."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import logging
import math
import random
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import roam
from roam.program.diff import _changed_sizes, _follows, has_same_structure, is_resized, share
from roam.program.effects import Rebind
from roam.program.ir import Call, Program, Ref, Result, Source
from roam.program.lower import Lowering
from roam.runtime.strategy import ordered_as
from roam.state.guards import Guards
from roam.tracing.step import Variant, capture_step
from training import assert_same_bits, tensors_and_numbers

each_size = functools.partial(roam.compile, sizes=False)
aten = torch.ops.aten
functional = torch.nn.functional
LENGTHS = range(3, 16)


class Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(11, 8)
        self.places = torch.nn.Embedding(40, 8)
        self.mix = torch.nn.Linear(8, 8)
        self.drop = torch.nn.Dropout(0.2)
        self.score = torch.nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        weights = (x @ x.transpose(1, 2)).softmax(-1)
        return self.score(self.drop(torch.relu(self.mix(weights @ x))))


def setting() -> tuple[Reader, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Reader()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def make_step(
    net: Reader, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(
            net(ids).flatten(0, 1), ids.flatten(), reduction="none"
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batch(length: int, size: int = 2) -> torch.Tensor:
    return torch.randint(0, 11, (size, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The length of each batch that was traced."""
    from importlib import import_module

    module = import_module("roam.tracing.step")
    seen: list[int] = []
    plain = module.trace

    def spied(fake_state: Any, step: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        seen.append(
            next(leaf.shape[-1] for leaf in fake_state.leaves if isinstance(leaf, torch.Tensor))
        )
        return plain(fake_state, step, args, kwargs, **options)

    monkeypatch.setattr(module, "trace", spied)
    return seen


def test_each_length_is_captured_once_and_the_later_ones_from_one_trace(traces: list[int]) -> None:
    outcomes = []
    for wrap in (lambda step: step, each_size):
        net, optimizer = setting()
        step = wrap(make_step(net, optimizer))
        losses = [step(batch(length)) for _ in range(2) for length in LENGTHS]
        outcomes.append(
            tensors_and_numbers(
                losses, net.state_dict(), optimizer.state_dict(), torch.get_rng_state()
            )
        )
    assert_same_bits(*outcomes)
    assert len(step._captures) == len(LENGTHS)
    assert [traces.count(length) for length in LENGTHS] == [2] + [1] * (len(LENGTHS) - 1)
    # The first step made the state; what guards compare is the same at every length.
    assert len({captured.step.guards for captured in step._captures}) == 1
    sought = [
        runner.choice.is_searched for captured in step._captures for runner in captured.runners
    ]
    assert sought.count(False) > sought.count(True)


def test_the_last_batch_of_an_epoch_is_another_size_of_the_same_step(traces: list[int]) -> None:
    net, optimizer = setting()
    step = each_size(make_step(net, optimizer))
    for size in (4, 4, 3, 4, 3):
        step(batch(5, size))
    assert traces == [5] * 3
    assert len(step._captures) == 2


def test_a_plan_in_an_earlier_order_is_a_plan_of_its_own_graph() -> None:
    net, optimizer = setting()
    step = each_size(make_step(net, optimizer))
    for length in (6, 7, 8):
        step(batch(length))
    later = [captured.runners[-1] for captured in step._captures][:2]
    assert not all(runner.choice.is_searched for runner in later)
    for runner in later:
        roam.verify(runner.choice.graph, runner.plan)
        assert runner.plan.graph_digest == runner.choice.graph.digest
        assert runner.choice.total_bytes <= runner.choice.eager_bytes
        assert runner.plan.total_lower_bound_bytes <= runner.plan.total_bytes


def test_shapes_share_the_calls_that_are_equal_and_the_code_of_their_plans() -> None:
    step = each_size(make_step(*setting()))
    for length in (5, 5, 9, 7):  # the first call makes the state
        step(batch(length))
    first, *later = [captured.runners[-1] for captured in reversed(step._captures)]
    program = first.choice.program
    updates = [index for index, call in enumerate(program.calls) if call.phase == "update"]
    assert len(updates) > len(program.calls) / 2
    for runner in later:
        calls = runner.choice.program.calls
        assert all(calls[index] is program.calls[index] for index in updates)
        assert any(call != known for call, known in zip(calls, program.calls, strict=True))
    in_its_order = next(runner for runner in later if not runner.choice.is_searched)
    assert in_its_order._executor.generated.source == first._executor.generated.source
    assert in_its_order._executor.generated.code is first._executor.generated.code


def test_only_calls_of_the_very_same_values_are_shared() -> None:
    def program(*numbers: Any) -> Program:
        call = Call(aten.mul.Tensor, (Ref(0), list(numbers)), {}, (1,), False, "forward", Source())
        return Program(calls=[call])

    for known, other in (
        ((1,), (1.0,)),
        ((1,), (True,)),
        ((0.0,), (-0.0,)),
        ((1,), (1, 2)),
        ((math.nan,), (1.0,)),
    ):
        one, two = program(*known), program(*other)
        share(two, one)
        assert two.calls[0] is not one.calls[0]
        again = program(*other)
        share(again, two)
        assert again.calls[0] is two.calls[0]


def test_a_later_capture_leaves_little_for_the_collector() -> None:
    step = each_size(make_step(*setting()))
    for length in (5, 9, 7):
        step(batch(length))
    gc.collect()
    gc.disable()
    try:
        step(batch(6))
        kinds = collected_kinds()
    finally:
        gc.enable()
    assert not kinds & {"Call", "TensorMeta", "Recorder", "FakeState", "Reach", "FakeTensor"}


def collected_kinds() -> set[str]:
    """Of what the collector finds."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return {type(value).__name__ for value in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_call_asks_no_guards_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = setting()
    step = each_size(make_step(net, optimizer))
    for length in LENGTHS:
        step(batch(length))
    asked = []
    plain = Guards.failure
    monkeypatch.setattr(Guards, "failure", lambda self: asked.append(self) or plain(self))
    for length in LENGTHS:
        step(batch(length))
    assert len(asked) == len(LENGTHS)


def test_what_is_kept_is_told_and_does_not_grow(caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer = setting()
    step = each_size(make_step(net, optimizer))
    assert "0 of at most 64 kept" in str(step.kept())
    with caplog.at_level(logging.DEBUG, logger="roam"):
        for length in (4, 5, 6, 4, 5, 6):  # the first run of a plan is another than the later ones
            step(batch(length))
    assert [plan.arguments for plan in step.kept().plans] == [
        f"args[0] (2, {length})" for length in (6, 5, 4)
    ]
    assert (
        "shape of args[0] changed from torch.Size([2, 5]) to torch.Size([2, 6])"
        in step.kept().plans[0].reason
    )
    assert sum("captured and planned in" in record.getMessage() for record in caplog.records) == 3
    before = step.kept().host_bytes
    assert before > 100_000
    for _ in range(3):
        for length in (4, 5, 6):
            step(batch(length))
    assert step.kept().host_bytes == before
    assert "3 of at most 64 kept" in str(step.kept())
    assert all(plan.host_bytes > 10_000 and plan.seconds > 0 for plan in step.kept().plans)


class TestLimit:
    def test_the_least_recently_used_goes_and_says_so_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        net, optimizer = setting()
        step = each_size(make_step(net, optimizer), max_plans=3)
        with caplog.at_level(logging.WARNING, logger="roam"):
            for length in (4, 5, 6, 4, 7):
                step(batch(length))
            lengths = [
                captured.step.arguments._leaves[0][1].metadata[2][1] for captured in step._captures
            ]
            assert lengths == [7, 4, 6]
            step(batch(8))
        (warning,) = [record.getMessage() for record in caplog.records]
        assert "args[0]" in warning
        assert "pad it to a few lengths" in warning
        assert "max_plans" in warning

    def test_what_went_is_freed(self) -> None:
        net, optimizer = setting()
        step = each_size(make_step(net, optimizer), max_plans=1)
        step(batch(4))
        executor = weakref.ref(step._captures[0].runners[-1])
        step(batch(5))
        gc.collect()
        assert executor() is None

    def test_the_advice_fits_values(self, caplog: pytest.LogCaptureFixture) -> None:
        net, optimizer = setting()
        plain = make_step(net, optimizer)
        step = each_size(lambda ids, count: plain(ids) * hash(count), max_plans=2)
        with caplog.at_level(logging.WARNING, logger="roam"):
            for count in (1, 2, 3):
                step(batch(4), count)
        assert "args[1] has come with" in caplog.text
        assert "make a tensor of them" in caplog.text

    def test_the_advice_fits_state(self, caplog: pytest.LogCaptureFixture) -> None:
        net, optimizer = setting()
        step = each_size(make_step(net, optimizer), max_plans=5)
        with caplog.at_level(logging.WARNING, logger="roam"):
            for place in range(6):
                net.drop.p = 0.1 + place / 10
                step(batch(4))
        assert "drop.p" in caplog.text
        assert "belongs in tensors, or in numbers among the arguments" in caplog.text

    @pytest.mark.parametrize("is_state", [False, True])
    def test_the_advice_fits_where_one_plan_is_kept(
        self, is_state: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        net, optimizer = setting()
        step = each_size(make_step(net, optimizer), max_plans=1)
        with caplog.at_level(logging.WARNING, logger="roam"):
            step(batch(4))
            if is_state:
                net.drop.p = 0.5
            step(batch(4 if is_state else 5))
        told = "belongs in tensors" if is_state else "args[0] has come in 2 kinds lately"
        assert told in caplog.text

    @pytest.mark.sweep
    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda net, place: setattr(net.drop, "p", place / 20), ("drop.p", "belongs in tensors")),
            (lambda net, place: net.seen.update({place: place}), ("net.seen[", "belongs in tensors")),
            (lambda net, place: net.lengths.append(place), ("net.lengths changed", "belongs in tensors")),
            (lambda net, place: setattr(net, "made", SimpleNamespace(scale=2)), ("net.made", "best made once")),
            (lambda net, place: place, ("args[1]", "make a tensor of them")),
            (lambda net, place: {"path": [f"{place}.png"]}, ("args[1]['path'][0]", "leave them out of the arguments")),
            (lambda net, place: torch.nn.Linear(2, 2), ("args[1]", "call roam.compile anew for each")),
            (lambda net, place: torch.ones(place), ("args[1]", "pad it to a few lengths")),
        ],
    )  # fmt: skip
    def test_a_plan_for_every_call_is_told_once(
        self,
        change: Callable[[torch.nn.Module, int], Any],
        told: tuple[str, str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        net, _ = setting()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)  # it is captured eleven times
        net.seen, net.lengths, net.made = {}, [], SimpleNamespace(scale=2)
        plain = make_step(net, optimizer)

        def train_step(ids: torch.Tensor, other: Any) -> torch.Tensor:
            if isinstance(other, (int, dict)):
                str(other)
            return plain(ids) * net.made.scale * len(net.seen) * len(net.lengths)

        step = each_size(train_step)
        with caplog.at_level(logging.WARNING, logger="roam"):
            for place in range(11):
                other = change(net, place)
                step(batch(4), other)
                if other is not None:
                    step(batch(4), None)  # a plan that is used again hides nothing
        (warning,) = [record.getMessage() for record in caplog.records]
        assert warning.startswith("train_step: 8 plans were made for one reason")
        for text in told:
            assert text in warning

    def test_plans_that_are_used_again_bring_no_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        net, optimizer = setting()
        step = each_size(make_step(net, optimizer))
        with caplog.at_level(logging.WARNING, logger="roam"):
            for length in range(2, 14):
                step(batch(length))
                step(batch(length))
        assert len(step._captures) == 12
        assert not caplog.records

    def test_few_plans_bring_no_warning_for_each_that_is_dropped(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        net, optimizer = setting()
        step = each_size(make_step(net, optimizer), max_plans=1)
        with caplog.at_level(logging.WARNING, logger="roam"):
            for length in (4, 5, 4, 5, 4, 5):
                step(batch(length))
        assert len(caplog.records) == 1

    def test_none_at_all_is_refused(self) -> None:
        with pytest.raises(ValueError, match="max_plans"):
            each_size(lambda: None, max_plans=0)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("max_plans", [64, 3])
def test_no_mixture_of_shapes_and_changes_runs_a_plan_of_another(seed: int, max_plans: int) -> None:
    """Shapes, training and evaluation, dropout, weight decay, frozen weights and loaded state, by
    turns at random."""
    outcomes = []
    for wrap in (lambda step: step, lambda step: each_size(step, max_plans=max_plans)):
        net, optimizer = setting()
        step = wrap(make_step(net, optimizer))
        choices = random.Random(seed)
        saved = None
        losses = []
        for _ in range(14):
            match choices.randrange(7):
                case 0:
                    net.train(not net.training)
                case 1:
                    net.drop.p = choices.choice([0.2, 0.5])
                case 2:
                    optimizer.param_groups[0]["weight_decay"] = choices.choice([0.01, 0.3])
                case 3:
                    net.mix.requires_grad_(not net.mix.weight.requires_grad)
                case 4 if saved is not None:
                    net.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                case 4 | 5:
                    saved = torch.utils._pytree.tree_map(
                        lambda value: value.clone() if isinstance(value, torch.Tensor) else value,
                        (net.state_dict(), optimizer.state_dict()),
                    )
                case _:
                    optimizer.state.clear()
            losses.append(step(batch(choices.choice([4, 5, 9]))))
        outcomes.append(
            tensors_and_numbers(
                losses, net.state_dict(), optimizer.state_dict(), torch.get_rng_state()
            )
        )
    assert_same_bits(*outcomes)


_hidden = itertools.cycle((2, 3))


@pytest.mark.parametrize("how", ["float", "integer", "size", "operator"])
def test_what_only_a_later_shape_shows_to_be_unsteady_is_refused(how: str) -> None:
    """The first shape is traced twice; a later one that does something that it did not gets its two
    traces as well."""
    net, optimizer = setting()

    def step(ids: torch.Tensor) -> torch.Tensor:
        number = 1 if ids.shape[1] < 6 else globals()["_{}".format("hidden")].__next__()
        out = net(ids)
        if how == "float":
            out = out * float(number)
        elif how == "integer":
            out = out * number
        elif how == "size":
            out = out[:, :number]
        elif number > 1:
            out = out * number
        loss = out.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = each_size(step)
    compiled(batch(4))
    compiled(batch(5))
    with pytest.raises(roam.CaptureError, match="did different things in two traces"):
        compiled(batch(7))


def test_an_integer_follows_from_sizes_or_does_not() -> None:
    sizes = {(12, 14), (144, 196)}
    assert _follows(12, 14, sizes)
    assert _follows(48, 56, sizes)
    assert _follows(11, 13, sizes)
    assert _follows(13, 15, sizes)
    assert _follows(288, 392, sizes)
    assert not _follows(12, 15, sizes)
    assert not _follows(1, 2, sizes)
    assert not _follows(5, 6, set())


def test_a_program_is_resized_where_nothing_but_its_sizes_differs() -> None:
    def program(step: Callable[..., Any], length: int) -> Any:
        from roam.tracing.step import capture_step

        return capture_step(step, (batch(length),), {}).steady.program

    net, _ = setting()
    net.drop.p = 0.0

    def mean(ids: torch.Tensor) -> torch.Tensor:
        return net(ids).mean()

    def total(ids: torch.Tensor) -> torch.Tensor:
        return net(ids).sum()

    def halved(ids: torch.Tensor) -> torch.Tensor:
        return net(ids).mean() if ids.shape[1] < 6 else net(ids).mean() * 0.5

    assert is_resized(program(mean, 4), program(mean, 9))
    assert _changed_sizes(program(mean, 4), program(mean, 9)) >= {(4, 9)}
    assert not is_resized(program(mean, 4), program(total, 9))
    assert not is_resized(program(halved, 4), program(halved, 9))


def small_images(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(images: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(images).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_images_that_layers_make_smaller_are_traced_once(traces: list[int]) -> None:
    """The sizes in the middle are no multiples of the images', and the backward pass names them."""
    outcomes = []
    for wrap in (lambda step: step, each_size):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.MaxPool2d(2), torch.nn.Conv2d(4, 4, 3, stride=2),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 2),
        )  # fmt: skip
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        run = wrap(small_images(net, optimizer))
        losses = [
            run(torch.linspace(-1, 1, 6 * size * size).view(2, 3, size, size))
            for size in (32, 48, 64, 32)
        ]
        outcomes.append(tensors_and_numbers(losses, net.state_dict(), optimizer.state_dict()))
    assert_same_bits(*outcomes)
    assert [traces.count(size) for size in (48, 64)] == [1, 1]


_later = itertools.cycle((4, 6))


def test_a_number_does_not_explain_itself_by_what_is_made_of_it() -> None:
    """It is the size of nothing before the call that it is an argument of, whatever that call and
    later ones make."""
    net, optimizer = setting()
    plain = make_step(net, optimizer)

    def step(ids: torch.Tensor) -> torch.Tensor:
        number = 2 if ids.shape[1] < 6 else globals()["_{}".format("later")].__next__()
        return plain(ids) + torch.ones(number).sum()

    compiled = each_size(step)
    compiled(batch(5))
    with pytest.raises(roam.CaptureError, match="did different things in two traces"):
        compiled(batch(7))


@pytest.mark.parametrize("literal", [0.5, [0.5] * 4])
def test_a_literal_leaves_later_sizes_one_trace_and_one_plan(
    literal: Any, traces: list[int]
) -> None:
    """A trace numbers it where it comes by it; a program from which calls are left out has it
    before all that is made."""
    outcomes = []
    for wrap in (lambda step: step, each_size):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

        def step(x: torch.Tensor, net: Any = net, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(
                net(x.T) * torch.tensor(literal), torch.zeros_like(x[0], dtype=torch.int64)
            )
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        losses = [run(torch.linspace(-1, 1, 8 * size).view(8, size)) for size in (5, 6, 7, 5)]
        outcomes.append(tensors_and_numbers(losses, net.state_dict(), optimizer.state_dict()))
    assert_same_bits(*outcomes)
    assert [traces.count(size) for size in (6, 7)] == [1, 1]
    assert sorted(len(captured.runners) for captured in run._captures) == [1, 1, 2]


def _two_branches(order: list[int] | None) -> roam.Graph:
    """Two large tensors, each made and used up; in the given order alone if there is one."""
    builder = roam.GraphBuilder("two branches")
    start = builder.tensor("x", 64, kind="input", residency="persistent")
    place = {operator: at for at, operator in enumerate(order or range(4))}
    for number in range(2):
        large = builder.tensor(f"large {number}", 1 << 20)
        small = builder.tensor(f"small {number}", 64, residency="leaves")
        builder.operator("make", reads=[start], creates=[large], position=place[2 * number])
        builder.operator("use", reads=[large], creates=[small], position=place[2 * number + 1])
    for before, after in itertools.pairwise(order or ()):
        builder.control(before, after)
    return builder.build()


def test_an_order_from_elsewhere_that_is_worse_than_program_order_is_given_up() -> None:
    graph = _two_branches(None)
    quick = roam.optimize(graph, exact="off", time_limit_s=0.0)
    worse = roam.optimize(_two_branches([0, 2, 1, 3]), exact="off")
    assert ordered_as(worse, quick, graph) is None
    better = roam.optimize(_two_branches([2, 3, 0, 1]), exact="off")
    plan = ordered_as(better, quick, graph)
    assert plan is not None
    assert plan.order.tolist() == [2, 3, 0, 1]
    roam.verify(graph, plan)


class Convolved(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = torch.nn.Conv2d(1, 3, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(3)
        self.drop = torch.nn.Dropout(0.2)
        self.score = torch.nn.Linear(3, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolve(ids[:, None, :, None].float()))
        return self.score(self.drop(x.relu()).squeeze(-1).transpose(1, 2))


@functools.cache
def _programs(kind: type[torch.nn.Module]) -> list[Variant]:
    """Two lengths of one step, and the step that makes the optimizer's state."""
    net = kind()
    step = make_step(net, torch.optim.AdamW(net.parameters()))  # type: ignore[arg-type]
    first = capture_step(step, (batch(6),), {})
    found = [first.steady, capture_step(step, (batch(9),), {}).steady, first.first]
    return [variant for variant in found if variant is not None]


def _lowered(variant: Variant, like: Lowering | None = None) -> Lowering:
    return Lowering(variant.program, variant.placed, name="step", device="cpu", like=like)


@pytest.mark.parametrize("kind", [Reader, Convolved])
def test_what_is_taken_from_another_length_is_as_if_found_anew(
    kind: type[torch.nn.Module],
) -> None:
    for one, other in itertools.permutations(_programs(kind), 2):
        anew, taken = _lowered(other), _lowered(other, _lowered(one))
        assert taken.repeats == anew.repeats
        ways: tuple[dict[str, Any], ...] = ({}, {"pool": False}, {"copied_in": range(0, 400, 3)})
        for way in ways:
            assert taken.graph(**way).to_json() == anew.graph(**way).to_json()


def test_a_later_length_takes_what_depends_on_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = setting()
    step = each_size(make_step(net, optimizer))
    step(batch(6))
    found = []
    plain = Lowering._find
    monkeypatch.setattr(Lowering, "_find", lambda self: found.append(self) or plain(self))
    step(batch(9))
    assert len(step._captures) == 2
    assert not found


def _with(program: Program, **changes: Any) -> Program:
    return dataclasses.replace(program, **changes)


def test_programs_of_another_structure_are_told_apart() -> None:
    program, resized, first = (variant.program for variant in _programs(Reader))
    assert has_same_structure(program, resized)
    assert not has_same_structure(program, first)
    place = next(place for place, meta in enumerate(program.slots) if meta is not None)
    meta: Any = program.slots[place]
    slots: dict[str, Any] = {
        "dtype": dataclasses.replace(meta, dtype=torch.float16),
        "device": dataclasses.replace(meta, device=torch.device("meta")),
        "storage": dataclasses.replace(meta, storage=meta.storage + 1),
        "dimensions": dataclasses.replace(meta, shape=(*meta.shape, 1)),
    }
    made = next(place for place, one in enumerate(program.storages) if one.creator >= 0)
    moved = dataclasses.replace(program.storages[made], creator=1)
    reference, slot = next(pair for pair in program.referenced if pair[0].kind == "parameter")
    other = dataclasses.replace(reference, kind="buffer")
    calls: dict[str, Any] = {
        "target": {"target": aten.neg.default},
        "phase": {"phase": "nowhere"},
        "outputs": {"outputs": ()},
        "mutates": {"mutates": (slot,)},
        "arguments": {"args": (Ref(slot), Ref(slot), Ref(slot))},
    }
    changed = [
        *(
            _with(program, slots=[*program.slots[:place], item, *program.slots[place + 1 :]])
            for item in slots.values()
        ),
        *(
            _with(program, calls=[dataclasses.replace(program.calls[0], **change), *program.calls[1:]])
            for change in calls.values()
        ),
        _with(program, storages=[*program.storages[:made], moved, *program.storages[made + 1 :]]),
        _with(
            program,
            referenced=[(other, slot) if pair[0] is reference else pair for pair in program.referenced],
        ),
        _with(program, calls=program.calls[:-1]),
        _with(program, entering={slot}),
        _with(program, result=Result([], program.result.spec)),
        _with(program, effects=[*program.effects, Rebind(reference, slot)]),
        _with(program, constants=[*program.constants, (torch.zeros(1), slot)]),
    ]  # fmt: skip
    assert [has_same_structure(program, one) for one in changed] == [False] * len(changed)


def test_numbers_that_a_step_changes_do_not_tell_guards_apart() -> None:
    net, optimizer = setting()
    plain = make_step(net, optimizer)
    count = [0]

    def counting(ids: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return plain(ids)

    step = each_size(counting)
    for length in (4, 5, 6):
        step(batch(length))
    assert count == [3]
    assert len({captured.step.guards for captured in step._captures}) == 1


def test_a_question_about_the_batch_leaves_later_lengths_one_trace(traces: list[int]) -> None:
    """Its values are numbered as in the recording, where the gradients of a step before come
    first."""
    outcomes = []
    for wrap in (lambda step: step, each_size):
        net, optimizer = setting()

        def step(
            ids: torch.Tensor, mask: torch.Tensor, net: Reader = net, optimizer: Any = optimizer
        ) -> torch.Tensor:
            losses = functional.cross_entropy(
                net(ids).flatten(0, 1), ids.flatten(), reduction="none"
            )
            loss = losses.mean() if mask.all() else (losses * mask.flatten()).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        losses = [run(batch(length), torch.ones(2, length)) for length in (5, 6, 7, 5)]
        masked = torch.ones(2, 7)
        masked[0, 0] = 0
        losses += [run(batch(7), masked), run(batch(7), torch.ones(2, 7))]
        outcomes.append(tensors_and_numbers(losses, net.state_dict(), optimizer.state_dict()))
    assert_same_bits(*outcomes)
    assert traces[:4] == [5, 5, 6, 7]
    assert traces.count(6) == 1
