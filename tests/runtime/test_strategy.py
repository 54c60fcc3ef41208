"""How much effort the plans of a compiled step take, and that it is enough."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from roam.program.lower import Lowering
from roam.report import format_bytes
from roam.runtime import strategy as subject
from roam.runtime.estimate import Estimator
from roam.runtime.strategy import choose
from roam.tracing.step import CapturedStep, capture_step


def train_step(model: Any, optimizer: Any, inputs: Any) -> Any:
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def perceptron(width: int = 24) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 1)
    )  # fmt: skip
    return model, torch.optim.Adam(model.parameters()), torch.randn(16, 8)


def convolutions() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
    ]
    layers += [
        torch.nn.Conv2d(16, 16, 3),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(16 * 13 * 13, 10))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(8, 3, 32, 32)


def captured(step: tuple[Any, Any, Any]) -> CapturedStep:
    return capture_step(train_step, step, {})


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[roam.Graph]:
    """The graphs of which a plan was made, with none known from before."""
    graphs: list[roam.Graph] = []
    optimize: Callable[..., roam.Plan] = subject._core.optimize

    def counted(graph: roam.Graph, *args: Any, **kwargs: Any) -> roam.Plan:
        graphs.append(graph)
        return optimize(graph, *args, **kwargs)

    monkeypatch.setattr(subject._core, "optimize", counted)
    monkeypatch.setattr(subject, "_known", type(subject._known)())
    return graphs


@pytest.mark.parametrize("make", [perceptron, convolutions])
def test_a_small_step_takes_few_plans_and_no_integer_programs(
    make: Any, planned: list[roam.Graph]
) -> None:
    step = roam.compile(train_step)
    call = make()
    step(*call)
    assert 0 < len(planned) <= 2 + subject._MOST_POOLED
    assert step.timings is not None
    assert step.timings.plan.count == len(planned)
    for _, plan in step.plans:
        assert plan.exact["status"] == "off"
    for _ in range(2):
        step(*call)
    other = make()
    for _ in range(3):
        train_step(*other)
    for one, expected in zip(call[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(one, expected)


def test_equal_steps_are_planned_once(planned: list[roam.Graph]) -> None:
    first, again, other = (roam.compile(train_step) for _ in range(3))
    first(*convolutions())
    count = len(planned)
    assert len({graph.digest for graph in planned}) == count > 0
    again(*convolutions())
    assert len(planned) == count
    assert again.timings is not None
    assert again.timings.plan.count == 0
    assert again.memory() == first.memory()
    other(*perceptron())
    assert len(planned) > count


def test_steps_without_any_memory_are_planned_for_several_arguments() -> None:
    same = roam.compile(lambda x: x)
    assert [same(1), same(2), same("a")] == [1, 2, "a"]
    filled, empty = torch.ones(2), torch.ones(0)
    for given in (filled, empty, torch.ones(0, 1), filled):
        assert same(given) is given
    assert [same(x).shape for x in (empty, filled)] == [(0,), (2,)]


def test_plans_under_a_time_limit_are_not_kept(planned: list[roam.Graph]) -> None:
    roam.compile(train_step, time_limit_s=0)(*perceptron())
    count = len(planned)
    roam.compile(train_step)(*perceptron())
    assert len(planned) > count
    assert all(graph is not planned[0] for graph in planned[count:])


@pytest.mark.parametrize("make", [perceptron, convolutions, lambda: perceptron(512)])
def test_no_choice_takes_more_than_eager_or_much_more_than_a_full_search(make: Any) -> None:
    step = captured(make())
    for variant in filter(None, (step.first, step.steady)):
        (choice,) = choose([variant], pool=None, time_limit_s=None)
        roam.verify(choice.graph, choice.plan)
        assert choice.total_bytes <= choice.eager_bytes
        full = roam.optimize(choice.graph)
        assert choice.total_bytes <= full.total_bytes + 2**20


def test_a_first_step_is_not_searched_below_what_later_steps_take(
    planned: list[roam.Graph],
) -> None:
    step = captured(perceptron(512))
    assert step.first is not None
    (steady,) = choose([step.steady], pool=None, time_limit_s=None)
    (first,) = choose([step.first], pool=None, time_limit_s=None, enough_bytes=steady.total_bytes)
    assert first.plan.settings["enough_bytes"] == steady.total_bytes
    assert first.total_bytes <= max(steady.total_bytes, first.eager_bytes)


def test_an_estimate_is_what_the_same_order_takes() -> None:
    variant = captured(convolutions()).steady
    lowering = Lowering(variant.program, variant.placed, name=variant.name, device="cpu")
    plan = roam.optimize(lowering.graph(pool=False), reuse=False)
    estimator = Estimator(lowering, plan)
    (choice,) = choose([variant], pool=False, time_limit_s=None, is_real=False)
    copy_choices = list(subject._copy_choices(choice, variant.device))
    assert len(copy_choices) > 2
    for _, copied_in in copy_choices:
        estimate = estimator.of(copied_in)
        graph = lowering.graph(copied_in=copied_in)
        pool, outside = profile(graph, plan.order.tolist())
        assert (estimate.pool_bytes, estimate.total_bytes) == (
            pool,
            graph.persistent_bytes + pool + outside,
        )


def profile(graph: roam.Graph, order: list[int]) -> tuple[int, int]:
    """The peaks of pool and outside by the definition, without rounding and without reuse."""
    last = {
        tensor: place
        for place, index in enumerate(order)
        for tensor in _touched(graph.operator(index))
    }
    first = {
        tensor: place
        for place, index in enumerate(order)
        for tensor in graph.operator(index).creates
    }
    pool = outside = 0
    for place, index in enumerate(order):
        live = {"step_local": 0, "outside": graph.operator(index).workspace_bytes}
        for tensor in graph.tensors:
            end = len(order) if tensor.residency == "leaves" else last.get(tensor.id, 0)
            if tensor.residency != "persistent" and first.get(tensor.id, 0) <= place <= end:
                live["step_local" if tensor.residency == "step_local" else "outside"] += (
                    tensor.size_bytes
                )
        pool, outside = max(pool, live["step_local"]), max(outside, live["outside"])
    return pool, outside


def _touched(operator: roam.Operator) -> tuple[int, ...]:
    return (*operator.reads, *operator.creates, *operator.mutates)


def test_the_first_call_tells_where_its_time_went(caplog: pytest.LogCaptureFixture) -> None:
    step = roam.compile(train_step)
    assert step.timings is None
    call = perceptron()
    with caplog.at_level(logging.INFO, logger="roam"):
        step(*call)
    timings = step.timings
    assert timings is not None
    assert (timings.capture.count, timings.first_run.count) == (2, 1)
    for stage in (timings.capture, timings.plan, timings.first_run):
        assert stage.wall_s > 0
    (record,) = caplog.records
    run = max((runner for _, runner in step.plans), key=lambda plan: plan.total_bytes)
    line = record.getMessage()
    assert line.startswith(f"train_step: {format_bytes(run.total_bytes)} in all by plan, ")
    assert "in program order; at least " in line
    assert line.endswith(f"ready after {timings}")
    taken = str(timings)
    step(*call)
    assert str(step.timings) == taken  # a later call is none of its stages
    assert gc.isenabled()
