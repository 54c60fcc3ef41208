"""Plain values that the step itself sets, and that a call finds otherwise: the mode that it puts
its model in, after an evaluation; what it finds out at its first call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import roam
from roam.runtime.compile import Step
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 32), torch.nn.Dropout(), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        )
        self.notes: dict[str, Any] = {"kind": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(net: Net) -> float:
    net.train()
    return 1.0


def train_if_not(net: Net) -> float:
    if not net.layers.training:
        net.train()
    return 1.0


def train_a_part(net: Net) -> float:
    net.layers[1].train()
    return 1.0 if net.layers.training else 2.0


def find_out(net: Net) -> float:
    if net.notes["kind"] is None:
        net.notes["kind"] = "regression"
    return 1.0 if net.notes["kind"] == "regression" else 3.0


def find_out_anew(net: Net) -> float:
    if not hasattr(net, "kind"):
        net.kind = "regression"
    return 1.0 if net.kind == "regression" else 3.0


def was_evaluated(net: Net) -> float:
    found = 1.0 if net.layers.training else 2.0
    net.train()
    return found


def evaluate(net: Net) -> None:
    net.eval()


def evaluate_a_part(net: Net) -> None:
    net.layers[1].eval()


def forget(net: Net) -> None:
    net.notes["kind"] = None
    vars(net).pop("kind", None)


def assert_same(one: Any, other: Any) -> None:
    assert_same_bits(tensors_and_numbers(one), tensors_and_numbers(other))


def steps(
    wrap: Callable[[Any], Any],
    sets: Callable[[Net], float],
    between: Callable[[int, Net], None],
    sizes: tuple[int, ...],
) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    @wrap
    def step(x: torch.Tensor) -> Any:
        factor = sets(net)
        optimizer.zero_grad()
        loss = net(x).square().mean() * factor
        loss.backward()
        optimizer.step()
        return loss

    left = []
    for place, size in enumerate(sizes):
        between(place, net)
        left.append(step(torch.randn(size, 6)))
        left.append([module.training for module in net.modules()])
        left.append([net.notes["kind"], vars(net).get("kind")])
    return [left, net.state_dict(), optimizer.state_dict(), torch.get_rng_state()], step


def every(period: int, does: Callable[[Net], None]) -> Callable[[int, Net], None]:
    return lambda place, net: does(net) if place % period == 0 else None


def both(
    sets: Callable[[Net], float],
    between: Callable[[int, Net], None],
    sizes: tuple[int, ...] = (8,) * 9,
) -> Any:
    """Trains eagerly and by plan, and compares all that steps leave; the compiled step."""
    plain, _ = steps(lambda step: step, sets, between, sizes)
    ours, step = steps(lambda step: roam.compile(step, poison=True), sets, between, sizes)
    assert_same(plain, ours)
    return step


@pytest.fixture
def planned_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the user's function runs in a plan's place."""

    def fails(self: Any, call: Any) -> None:
        raise AssertionError("the user's own function runs")

    monkeypatch.setattr(Step, "_eagerly", fails)


@pytest.mark.usefixtures("planned_only")
@pytest.mark.parametrize(
    ("sets", "does"),
    [
        (train, evaluate),
        (train_if_not, evaluate),
        (train_a_part, evaluate_a_part),
        (find_out, forget),
        (find_out_anew, forget),
    ],
)
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_plan_is_for_calls_that_find_otherwise_what_the_step_sets(
    sets: Callable[[Net], float], does: Callable[[Net], None], first: int
) -> None:
    def between(place: int, net: Net) -> None:
        if place == first or (place > first and place % 2 == 0):
            does(net)

    step = both(sets, between)
    # In the mode of training it does not set the model's own flag, for which no plan looks then.
    looks_at_less = sets is train_if_not and first > 0
    assert len(step._captures) == (2 if looks_at_less else 1)
    assert step._known.settling == 0


@pytest.mark.usefixtures("planned_only")
def test_a_memory_limit_holds_at_calls_after_an_evaluation() -> None:
    runners, traces = [], []

    def between(place: int, net: Net) -> None:
        if place % 3 == 0:
            net.eval()
        if made and place > 3:
            runners.append(made[0]._captures[0].runners)
            traces.append(made[0]._known.traces)

    made: list[Any] = []
    plain, _ = steps(lambda step: step, train, between, (64,) * 12)

    def wrap(step: Any) -> Any:
        made.append(roam.compile(step, memory="90%"))
        return made[0]

    ours, step = steps(wrap, train, between, (64,) * 12)
    assert_same(plain, ours)
    assert len(step._captures) == 1
    assert all(one is runners[0] for one in runners)
    assert len(set(traces)) == 1, "each evaluation takes traces"


@pytest.mark.usefixtures("planned_only")
def test_each_size_has_its_plan() -> None:
    sizes = (8, 9, 8, 9, 9, 8, 8, 9, 8)
    plain, _ = steps(lambda step: step, train, every(3, evaluate), sizes)
    ours, step = steps(
        lambda step: roam.compile(step, sizes=False), train, every(3, evaluate), sizes
    )
    assert_same(plain, ours)
    assert len(step._captures) == 2


def test_what_only_some_sizes_set_is_no_setting_of_others() -> None:
    sizes = (8, 9, 8, 9, 9, 8, 8, 9, 8, 9, 12, 8, 9)

    def make(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net = Net()

        def step(x: torch.Tensor) -> Any:
            if x.shape[0] > 8:
                net.train()
            net.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss, net.layers[0].weight.grad.sum()

        planned, left = wrap(step), []
        for place, size in enumerate(sizes):
            if place % 3 == 0:
                net.eval()
            left.append([planned(torch.randn(size, 6)), net.training, net.layers.training])
        return left

    assert_same(make(lambda step: step), make(roam.compile))
    assert_same(make(lambda step: step), make(lambda step: roam.compile(step, sizes=False)))


def test_what_only_the_first_step_sets_is_no_setting_of_later_ones() -> None:
    def make(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> Any:
            if not optimizer.state:
                net.train()
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        planned, left = wrap(step), []
        for place in range(8):
            if place in (0, 3, 5):
                net.eval()
            left.append([planned(torch.randn(8, 6)), net.training, net.layers.training])
        return [left, net.state_dict()]

    assert_same(make(lambda step: step), make(roam.compile))


def test_a_step_that_looks_before_it_sets_does_as_eagerly() -> None:
    both(was_evaluated, every(3, evaluate))


def test_states_that_are_set_in_part_do_as_eagerly() -> None:
    def between(place: int, net: Net) -> None:
        if place in (2, 5, 8):
            net.eval()
        elif place in (3, 7, 9):
            net.layers[1].eval()
        elif place in (4, 10):
            net.layers.training = False

    step = both(train, between, (8,) * 12)
    assert len(step._captures) == 1


def test_capture_leaves_the_mode_as_it_was() -> None:
    net = Net().eval()

    def step(x: torch.Tensor) -> None:
        net.train()
        net(x).sum().backward()

    graph = roam.capture(step, torch.randn(8, 6))
    assert not any(module.training for module in net.modules())
    planned: Any = roam.compile(step)
    planned.plan(torch.randn(8, 6))
    assert not any(module.training for module in net.modules())
    net.train()
    assert roam.capture(step, torch.randn(8, 6)).num_operators == graph.num_operators


def test_entries_that_are_set_keep_their_order() -> None:
    def make(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net, notes = torch.nn.Linear(4, 4), SimpleNamespace(of={"a": 1})

        def step(x: torch.Tensor) -> Any:
            if "b" not in notes.of:
                notes.of["b"] = "new"
                notes.of["c"] = True
            return net(x).sum() * len(notes.of)

        planned, left = wrap(step), []
        for place in range(6):
            if place % 2 == 0:
                notes.of = {"a": 1} if place == 4 else notes.of
                notes.of.pop("b", None), notes.of.pop("c", None)
            left.append([planned(torch.ones(2, 4)), list(notes.of.items())])
        return left

    assert_same(make(lambda step: step), make(roam.compile))
