"""What users do to a compiled step: each is as under eager PyTorch, captured anew, or refused, and
refusal leaves no mark.

Values that reach Python, `.data`, gradients and switches around the call are in test_capture.py and
test_scripts.py.
"""

from __future__ import annotations

import collections
import contextvars
import importlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import roam
from newer import needs_2_15
from roam.state.snapshot import Snapshot
from roam.tracing.recording.recorder import Recorder
from roam.tracing.stand_ins.fake_state import FakeState
from steps import batches, both
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional
runtime = importlib.import_module("roam.runtime.compile")


def make() -> Any:
    """A user's things: model, optimizer, and whatever else a script hangs on them."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.25), torch.nn.Linear(8, 3))
    return SimpleNamespace(
        net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    )


def train(my: Any, x: torch.Tensor, y: torch.Tensor, factor: Any = 1.0) -> torch.Tensor:
    my.optimizer.zero_grad()
    loss = functional.cross_entropy(my.net(x), y) * factor
    loss.backward()
    my.optimizer.step()
    return loss


def everything(my: Any) -> list[Any]:
    return tensors_and_numbers(
        my.net.state_dict(),
        my.optimizer.state_dict(),
        [parameter.requires_grad for parameter in my.net.parameters()],
        [module.training for module in my.net.modules()],
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
    )


Body = Callable[[Any, torch.Tensor, torch.Tensor], Any]
Change = Callable[[Any, int, torch.Tensor, torch.Tensor], Any]


def outcome(wrap: Callable[[Any], Any], body: Body, change: Change) -> tuple[list[Any], int]:
    """Six steps with a change before each; all that they return and leave, and how often they were
    captured."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    my = make()
    step = wrap(lambda x, y: body(my, x, y))
    seen: list[Any] = []
    for index, (x, y) in enumerate(batches(6)):
        given = change(my, index, x, y)
        x, y = (x, y) if given is None else given
        seen += [*tensors_and_numbers(step(x, y)), *everything(my), *tensors_and_numbers(x)]
    return seen, len(getattr(step, "_captures", []))


def nothing(my: Any, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
    pass


def check(body: Body, change: Change = nothing, captures: int = 1) -> None:
    """As eager, with so many captures."""
    eager, _ = outcome(lambda step: step, body, change)
    planned, made = outcome(lambda step: roam.compile(step, poison=True), body, change)
    assert_same_bits(eager, planned)
    assert made == captures


def swap_module(my, index, x, y):
    if index == 3:
        my.net[0] = torch.nn.Linear(6, 8)


def swap_module_and_optimizer(my, index, x, y):
    if index == 3:
        my.net[0] = torch.nn.Linear(6, 8)
        my.optimizer = torch.optim.SGD(my.net.parameters(), lr=0.1, momentum=0.9)


def swap_activation(my, index, x, y):
    my.net[1] = torch.nn.Tanh() if index < 3 else torch.nn.ReLU()


def replace_data(my, index, x, y):
    if index == 3:
        my.net[0].weight.data = torch.ones(8, 6)


def replace_data_by_other_strides(my, index, x, y):
    if index == 3:
        my.net[0].weight.data = torch.ones(6, 8).t()


def share_data(my, index, x, y):
    if index == 3:
        my.net[2].bias.data = my.net[0].bias.data[:3]


def toggle_gradients(my, index, x, y):
    my.net[0].weight.requires_grad_(index not in (2, 3))


def toggle_mode(my, index, x, y):
    my.net.train(index not in (2, 4))


def toggle_mode_of_one(my, index, x, y):
    my.net[1].train(index not in (2, 4))


def to_double(my, index, x, y):
    if index == 3:
        my.net.double()
        my.optimizer = torch.optim.SGD(my.net.parameters(), lr=0.1, momentum=0.9)
    return (x.double(), y) if index >= 3 else None


def to_double_with_old_state(my, index, x, y):
    if index == 3:
        my.net.double()
    return (x.double(), y) if index >= 3 else None


def alias_a_parameter(my, index, x, y):
    return (my.net[0].weight.detach()[:5], y) if index in (2, 3) else None


def draw(my, index, x, y):
    torch.rand(index + 1)


def seed(my, index, x, y):
    torch.manual_seed(index % 2)


def set_state(my, index, x, y):
    my.kept = torch.get_rng_state() if index == 0 else my.kept
    if index in (2, 4):
        torch.set_rng_state(my.kept)


@pytest.mark.parametrize(
    ("change", "captures"),
    [
        (swap_module, 2),
        (swap_module_and_optimizer, 2),
        (swap_activation, 4),  # a new module each time
        (replace_data, 1),
        (replace_data_by_other_strides, 2),
        (share_data, 2),
        (toggle_gradients, 2),
        (toggle_mode, 2),
        (toggle_mode_of_one, 2),
        (to_double, 2),
        (to_double_with_old_state, 2),
        (alias_a_parameter, 2),
        (draw, 1),
        (seed, 1),
        (set_state, 1),
    ],
)
def test_changes_between_steps(change: Change, captures: int) -> None:
    check(train, change, 6 if change is swap_activation else captures)


def test_a_group_added_between_steps() -> None:
    def change(my, index, x, y):
        if index == 0:
            my.scale = torch.nn.Parameter(torch.ones(3))
        if index == 3:
            my.optimizer.add_param_group({"params": [my.scale], "lr": 0.5})

    def body(my, x, y):
        whole = SimpleNamespace(net=lambda x: my.net(x) * my.scale, optimizer=my.optimizer)
        return train(whole, x, y)

    check(body, change, 2)


class TestArgumentsThatShareMemory:
    def check(
        self, pair: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], captures: int
    ) -> None:
        def body(my, both, y):
            one, other = both
            one.mul_(1.25)
            return train(my, one + other, y), other * 1

        def change(my, index, x, y):
            return pair(index, x), y

        check(body, change, captures)

    def test_the_same_tensor_twice(self) -> None:
        self.check(lambda index, x: (x, x if index % 2 else x.clone()), 2)

    def test_views_of_one_tensor(self) -> None:
        def pair(index, x):
            rows = torch.cat([x, x[:2]])
            return rows[:5], rows[index % 3 :][:5]

        self.check(pair, 3)


def halve_rate(my, x, y):
    my.optimizer.param_groups[0]["lr"] *= 0.5
    return train(my, x, y)


def halve_rate_afterwards(my, x, y):
    loss = train(my, x, y)
    my.optimizer.param_groups[0]["lr"] = my.optimizer.param_groups[0]["lr"] * 0.5
    return loss, my.optimizer.param_groups[0]["lr"]


def evaluate_and_go_on(my, x, y):
    my.net.eval()
    value = my.net(x).detach().sum()
    my.net.train()
    return train(my, x, y) + value


def freeze_for_a_while(my, x, y):
    my.net[0].weight.requires_grad_(False)
    loss = train(my, x, y)
    my.net[0].weight.requires_grad_(True)
    return loss


def another_dtype_for_a_while(my, x, y):
    torch.set_default_dtype(torch.float64)
    made = torch.ones(3), torch.full((2,), 0.5), torch.arange(0, 1, 0.25), torch.rand(2)
    torch.set_default_dtype(torch.float32)
    return train(my, x, y), made


def load_inside(my, x, y):
    my.net.load_state_dict({name: value * 0.5 for name, value in my.net.state_dict().items()})
    return train(my, x, y)


def write_to_data(my, x, y):
    my.net[0].weight.data.mul_(0.9)
    loss = train(my, x, y)
    my.net[2].bias.data.copy_(torch.full((3,), 0.25))
    return loss


def another_gradient(my, x, y):
    my.optimizer.zero_grad()
    functional.cross_entropy(my.net(x), y).backward()
    my.net[0].weight.grad.data.mul_(0.5)
    my.net[0].bias.grad = None
    my.net[2].bias.grad = torch.ones(3)
    my.optimizer.step()


def gradient_penalty(my, x, y):
    my.optimizer.zero_grad()
    loss = functional.cross_entropy(my.net(x), y)
    gradients = torch.autograd.grad(loss, list(my.net.parameters()), create_graph=True)
    total = loss + sum(gradient.square().sum() for gradient in gradients)
    total.backward()
    my.optimizer.step()
    return total


def its_own_exceptions(my, x, y):
    try:
        if x.shape[0] == 5:
            raise ValueError
    except ValueError:
        x = x * 2
    return train(my, x, y)


def seed_inside(my, x, y):
    torch.manual_seed(3)
    return train(my, x, y)


def stay_in_evaluation(my, x, y):
    my.net.eval()
    return train(my, x, y)


def to_double_inside(my, x, y):
    my.net.double()
    return train(my, x.double(), y)


def stay_frozen(my, x, y):
    my.net[0].weight.requires_grad_(False)
    return train(my, x, y)


@pytest.mark.parametrize(
    "body",
    [
        halve_rate, halve_rate_afterwards, evaluate_and_go_on, freeze_for_a_while, another_dtype_for_a_while, load_inside,
        write_to_data, another_gradient, gradient_penalty, its_own_exceptions, seed_inside,
        stay_in_evaluation,
    ],
)  # fmt: skip
def test_steps_that_change_things_and_are_captured(body: Body) -> None:
    check(body)


@pytest.mark.parametrize("body", [stay_frozen, to_double_inside])
def test_a_step_that_leaves_parameters_of_another_kind_than_it_finds(body: Body) -> None:
    check(body, captures=2)


@pytest.mark.parametrize("last", [False, True], ids=["live to the end", "a constant at the end"])
def test_a_rate_set_inside_from_an_argument(last: bool) -> None:
    def script(wrap):
        torch.manual_seed(0)
        my = make()

        @wrap
        def step(x, y, rate):
            for group in my.optimizer.param_groups:
                group["lr"] = rate * 2
            loss = train(my, x, y)
            if last:
                my.optimizer.param_groups[0]["lr"] = 0.5
            return loss

        return [
            [step(x, y, 0.1 / (index + 1)), everything(my)]
            for index, (x, y) in enumerate(batches(5))
        ]

    assert_same_bits(
        *(tensors_and_numbers(script(wrap)) for wrap in (lambda step: step, roam.compile))
    )


def test_what_a_step_returns_is_what_eager_returns() -> None:
    def body(my, x, y):
        loss = train(my, x, y)
        my.returned = (loss, my.net[0].weight, my.net[2].bias.detach(), x, x[1:], loss)
        return my.returned

    my = make()
    step = roam.compile(lambda x, y: body(my, x, y)[:6])
    my.returned = None
    assert step(*batches(1)[0]) is my.returned
    with pytest.raises(roam.CaptureError, match=r"a tuple of its own"):
        step(*batches(1)[0])
    my.returned = None

    def pure(my, x, y):
        loss = train(my, x, y)
        return loss, my.net[0].weight, my.net[2].bias.detach(), x, x[1:], loss

    check(pure)
    x, y = batches(1)[0]
    loss, weight, bias, batch, rows, again = roam.compile(lambda x, y: pure(my, x, y))(x, y)
    assert loss is again
    assert batch is x
    assert rows.data_ptr() == x[1:].data_ptr()
    assert weight.data_ptr() == my.net[0].weight.data_ptr()
    assert bias.data_ptr() == my.net[2].bias.data_ptr()


COUNTS: dict[str, int] = collections.defaultdict(int)
RECENT: collections.deque[int] = collections.deque(maxlen=3)
NUMBERS: set[int] = set()
TICKS = itertools.count(1)
NOISE = np.random.default_rng(3)


def count_in_a_dictionary(my, x, y):
    COUNTS["steps"] += 1
    return train(my, x, y)


def append_to_the_left_of_a_deque(my, x, y):
    RECENT.appendleft(1)
    return train(my, x, y)


def add_to_a_set(my, x, y):
    NUMBERS.add(len(NUMBERS))
    return train(my, x, y)


def count_in_an_object(my, x, y):
    my.steps = getattr(my, "steps", 0) + 1
    return train(my, x, y, my.steps)


def keep_the_loss(my, x, y):
    loss = train(my, x, y)
    my.losses = [*getattr(my, "losses", []), loss.detach()]
    return loss


def count_with_an_iterator(my, x, y):
    return train(my, x, y, next(TICKS))


def count_in_the_environment(my, x, y):
    os.environ["ROAM_TEST_COUNT"] = str(int(os.environ.get("ROAM_TEST_COUNT", "0")) + 1)
    return train(my, x, y, float(os.environ["ROAM_TEST_COUNT"]))


def look_at_the_clock(my, x, y):
    return train(my, x, y, time.perf_counter())


def draw_from_python(my, x, y):
    return train(my, x, y, random.random())


def draw_from_numpy(my, x, y):
    return train(my, x, y, float(np.random.rand()))


def draw_from_a_numpy_generator(my, x, y):
    return train(my, x, y, float(NOISE.random()))


def draw_from_a_generator_made_inside(my, x, y):
    return train(my, x * torch.rand(x.shape, generator=torch.Generator().manual_seed(5)), y)


def add_a_group(my, x, y):
    my.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    return train(my, x, y)


def register_a_buffer(my, x, y):
    my.net.register_buffer("seen", torch.ones(2))
    return train(my, x, y)


def another_parameter(my, x, y):
    my.net[0].bias = torch.nn.Parameter(torch.ones(8))
    return train(my, x, y)


def swap_inside(my, x, y):
    my.net[1] = torch.nn.ReLU()
    return train(my, x, y)


def without_gradients_from_here(my, x, y):
    loss = train(my, x, y)
    torch.set_grad_enabled(False)
    return loss


def with_another_dtype_from_here(my, x, y):
    loss = train(my, x, y)
    torch.set_default_dtype(torch.float64)
    return loss


def with_autocast_from_here(my, x, y):
    loss = train(my, x, y)
    torch.autocast("cpu").__enter__()
    return loss


def compare_addresses(my, x, y):
    return train(my, x, y, 2.0 if x.data_ptr() == my.net[0].weight.data_ptr() else 1.0)


def convert_to_numpy(my, x, y):
    loss = train(my, x, y)
    return loss.detach().numpy().sum()


def a_rate_and_a_scheduler(my, x, y):
    loss = train(my, x, y)
    my.optimizer.param_groups[0]["lr"] *= 0.9
    my.scheduler.step()
    return loss


def test_an_environment_variable_may_be_set_to_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROAM_TEST_COUNT", "3")

    def body(my, x, y):
        os.environ["ROAM_TEST_COUNT"] = "3"
        return train(my, x, y, float(os.environ["ROAM_TEST_COUNT"]))

    my = make()
    step = roam.compile(lambda x, y: body(my, x, y))
    data = batches(3)
    step(*data[0])
    step(*data[1])
    monkeypatch.setenv("ROAM_TEST_COUNT", "4")
    with pytest.raises(roam.CaptureError) as caught:
        step(*data[2])
    assert caught.value.code == "moved"


@needs_2_15
def test_operators_that_take_functions_are_refused() -> None:
    my = make()

    def body(x, y):
        return train(my, torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), y)

    with pytest.raises(roam.CaptureError, match=r"cond at .*torch\.where") as caught:
        roam.compile(body).plan(*batches(1)[0])
    assert caught.value.code == "refused_operator"


@pytest.mark.parametrize(
    "body",
    [
        count_in_a_dictionary, append_to_the_left_of_a_deque, add_to_a_set, count_in_an_object, keep_the_loss,
        count_with_an_iterator, count_in_the_environment, look_at_the_clock, draw_from_python, draw_from_numpy,
        draw_from_a_numpy_generator, draw_from_a_generator_made_inside,
        add_a_group, register_a_buffer, another_parameter, swap_inside, without_gradients_from_here,
        with_another_dtype_from_here, with_autocast_from_here, compare_addresses, convert_to_numpy, a_rate_and_a_scheduler,
    ],
)  # fmt: skip
def test_steps_that_are_refused_and_leave_no_mark(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROAM_TEST_COUNT", raising=False)
    my = make()
    my.scheduler = torch.optim.lr_scheduler.StepLR(my.optimizer, 2)
    data = batches(3)
    before, held = everything(my), dict(vars(my))
    marks = (dict(COUNTS), list(RECENT), set(NUMBERS), list(my.net.state_dict()), list(my.net))
    for x, y in data[:2]:
        with pytest.raises(roam.CaptureError):
            roam.compile(lambda x, y: body(my, x, y)).plan(x, y)
    assert_same_bits(before, everything(my))
    assert vars(my) == held
    assert marks == (
        dict(COUNTS),
        list(RECENT),
        set(NUMBERS),
        list(my.net.state_dict()),
        list(my.net),
    )
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    train(my, *data[2])
    # Nor is anything of the refused step left in autocast's cache.
    with torch.autocast("cpu"):
        pass
    for x, y in data[:2]:

        @roam.compile
        def autocast_step(x, y):
            with torch.autocast("cpu"):
                return train(my, x, y)

        autocast_step(x, y)


@pytest.mark.parametrize("body", [count_in_a_dictionary, count_in_an_object, register_a_buffer])
def test_steps_that_are_captured_once_they_have_run(body: Body) -> None:
    check(body)


class TestGenerators:
    def check(self, use: Callable[[Any, torch.Tensor, torch.Generator], torch.Tensor]) -> None:
        def script(wrap):
            torch.manual_seed(0)
            my, generators = make(), [torch.Generator().manual_seed(index) for index in (5, 6)]

            @wrap
            def step(x, y, generator):
                return train(my, use(my, x, generator), y)

            seen = []
            for index, (x, y) in enumerate(batches(8)):
                if index == 5:
                    generators[0].manual_seed(9)
                seen += [step(x, y, generators[index % 4 == 3]), everything(my)]
                seen += [generator.get_state() for generator in generators]
            return tensors_and_numbers(seen)

        assert_same_bits(
            script(lambda step: step), script(lambda step: roam.compile(step, poison=True))
        )

    def test_a_mask(self) -> None:
        self.check(lambda my, x, generator: x * (torch.rand(x.shape, generator=generator) > 0.3))

    def test_in_place_draws(self) -> None:
        self.check(lambda my, x, generator: x + torch.empty_like(x).normal_(generator=generator))

    def test_bernoulli(self) -> None:
        self.check(
            lambda my, x, generator: (
                x * torch.bernoulli(torch.full_like(x, 0.7), generator=generator)
            )
        )

    def test_a_permutation(self) -> None:
        self.check(lambda my, x, generator: x[:, torch.randperm(6, generator=generator)])

    def test_are_put_back_after_a_failure_that_changed_nothing(self) -> None:
        generator, table = torch.Generator().manual_seed(1), torch.nn.Embedding(4, 6)
        my = make()

        @roam.compile
        def step(index, y):
            return train(my, torch.rand(5, 6, generator=generator) + table(index), y)

        index, y = torch.tensor([0, 1, 2, 3, 0]), batches(1)[0][1]
        for _ in range(2):
            step(index, y)
            once, default = generator.clone_state(), torch.get_rng_state()
            with pytest.raises(IndexError):  # from the step's own function, which has drawn anew
                step(index + 1, y)
            torch.rand(5, 6, generator=once)
            assert torch.equal(once.get_state(), generator.get_state())
            assert torch.equal(default, torch.get_rng_state())


def press(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def pressing_at(times: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is interrupted just before it is called for the n-th time."""
    calls = contextvars.ContextVar("calls", default=0)  # no state that a step reaches

    def pressed(*args: Any, **kwargs: Any) -> Any:
        calls.set(calls.get() + 1)
        if calls.get() == times:
            press()
        return function(*args, **kwargs)

    return pressed


class TestInterrupts:
    """Ctrl-C at each stage of a first call: it takes effect, nothing is marked or torn, and the
    next call goes on."""

    @pytest.mark.parametrize("times", [1, 2, 7, 20, 35])
    def test_while_operators_are_recorded(
        self, times: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.check(monkeypatch, Recorder, "_record", pressing_at(times, Recorder._record))

    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_in_the_users_own_code(self, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(
            monkeypatch, torch.nn.Linear, "forward", pressing_at(times, torch.nn.Linear.forward)
        )

    @pytest.mark.parametrize(
        ("holder", "name"),
        [
            (FakeState, "enter"), (FakeState, "forget_values"), (FakeState, "references"), (Snapshot, "moved"), (Snapshot, "restore"),
            (Recorder, "close"), (Recorder, "finish"), (runtime, "choose"), (runtime, "capture_step"),
        ],
    )  # fmt: skip
    def test_at_a_stage_of_capture(
        self, holder: Any, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.check(monkeypatch, holder, name, pressing_at(1, getattr(holder, name)))

    def check(
        self, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, pressed: Callable[..., Any]
    ) -> None:
        torch.manual_seed(0)
        my, other = make(), make()
        other.net.load_state_dict(my.net.state_dict())
        held, before = [id(parameter) for parameter in my.net.parameters()], everything(my)
        handler = signal.getsignal(signal.SIGINT)
        step = roam.compile(lambda x, y: train(my, x, y))
        data = batches(3)
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, pressed)
            with pytest.raises(KeyboardInterrupt):
                step(*data[0])
        assert signal.getsignal(signal.SIGINT) is handler
        assert held == [id(parameter) for parameter in my.net.parameters()]
        assert_same_bits(before, everything(my))
        generator = torch.get_rng_state()
        planned = [step(x, y).clone() for x, y in data]
        torch.set_rng_state(generator)
        assert_same_bits(planned, tensors_and_numbers([train(other, x, y) for x, y in data]))
        assert_same_bits(everything(my), everything(other))

    def test_where_it_is_ignored_it_stays_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            my = make()
            monkeypatch.setattr(FakeState, "enter", pressing_at(1, FakeState.enter))
            roam.compile(lambda x, y: train(my, x, y))(*batches(1)[0])
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, handler)


class TestExceptions:
    """An exception at each stage reaches the user and leaves everything usable."""

    @pytest.mark.parametrize("stage", ["before", "forward", "backward", "optimizer", "after"])
    @pytest.mark.parametrize("trace", [1, 2])
    def test_of_the_users_own(self, stage: str, trace: int) -> None:
        def script(wrap):
            my, raising = make(), [False]

            def fail(where: str) -> None:
                if where == stage and raising[0]:
                    raise OSError("no such file")

            class Failing(torch.autograd.Function):
                @staticmethod
                def forward(context, x):
                    fail("forward")
                    return x * 1

                @staticmethod
                def backward(context, gradient):
                    fail("backward")
                    return gradient * 1

            my.optimizer.register_step_pre_hook(lambda *_: fail("optimizer"))

            def body(x, y):
                fail("before")
                my.optimizer.zero_grad()
                loss = functional.cross_entropy(Failing.apply(my.net(x)), y)
                loss.backward()
                my.optimizer.step()
                fail("after")
                return loss

            step, (x, y) = wrap(body), batches(1)[0]
            if trace == 2:
                step(x, y)
                my.net.eval()  # captured anew
            raising[0] = True
            with pytest.raises(OSError, match="no such file"):
                step(x, y)
            left = everything(my)
            raising[0] = False
            return left, step(x, y), everything(my)

        both(script)

    def test_while_planning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        my = make()
        before, data = everything(my), batches(2)
        step = roam.compile(lambda x, y: train(my, x, y))

        def fail(*_: object, **__: object) -> None:
            raise MemoryError("deliberate")

        with monkeypatch.context() as patch:
            patch.setattr(runtime, "choose", fail)
            with pytest.raises(MemoryError, match="deliberate"):
                step(*data[0])
        assert_same_bits(before, everything(my))
        step(*data[1])

    def test_of_calls_that_do_not_fit_the_function(self) -> None:
        my = make()
        step, (x, y) = roam.compile(lambda x, y: train(my, x, y)), batches(1)[0]
        step(x, y)
        for arguments in ((x,), (x, y, y)):
            with pytest.raises((TypeError, roam.CaptureError), match="argument"):
                step(*arguments)
        step(x, y)


class TestWhatTracingCannotSee:
    """Examples of docs/explanation/guards.md and of the pages that belong to it."""

    def test_files_are_written_at_capture_and_never_again(self, tmp_path: Path) -> None:
        my = make()
        file = os.open(tmp_path / "written", os.O_CREAT | os.O_WRONLY)

        @roam.compile
        def step(x, y):
            os.write(file, b"a step\n")
            return train(my, x, y)

        data = batches(4)
        step(*data[0])
        at_capture = (tmp_path / "written").read_text()
        for x, y in data[1:]:
            step(x, y)
        os.close(file)
        assert set(at_capture.splitlines()) == {"a step"}
        assert (tmp_path / "written").read_text() == at_capture
