"""What a plan promises is what the allocator sees, and never more than eager needs."""

from __future__ import annotations

import functools
import subprocess
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import forked
import roam
from measured import WAYS, build, compiled
from newer import needs_2_15
from roam.runtime.memory_profiler import MemoryTrace, measure_in_child
from training import TRAININGS, assert_same_bits, tensors_and_numbers

CLOSE = 0.01
"""How far promise and measurement may be apart, as a share: small tensors are rounded up by plan,
and not by the allocator."""


@functools.cache
def in_a_process_of_its_own(name: str, how: str) -> MemoryTrace:
    with mock.patch.object(subprocess, "run", forked.run):
        trace = measure_in_child(build, {"name": name, "how": how}, warmup=2)
    assert trace.unseen_freed_bytes == 0
    return trace


@pytest.mark.sweep
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", TRAININGS)
def test_the_promise_is_kept_and_eager_needs_no_less(name: str, how: str) -> None:
    eager, planned = in_a_process_of_its_own(name, "eager"), in_a_process_of_its_own(name, how)
    assert planned.peak_total_bytes == pytest.approx(planned.value["total"], rel=CLOSE)
    assert planned.peak_total_bytes <= eager.peak_total_bytes
    # Program order in the plan is what eager does: it cannot be much more than what eager is seen
    # to take.
    assert planned.value["program_order"] <= eager.peak_total_bytes * (1 + CLOSE)


@pytest.mark.sweep
@pytest.mark.parametrize("how", WAYS)
def test_what_a_step_tells_is_what_a_process_of_its_own_sees(how: str) -> None:
    eager, planned = in_a_process_of_its_own("gpt2", "eager"), in_a_process_of_its_own("gpt2", how)
    step, arguments = compiled("gpt2", how)
    for call in (step, step, step.measured, step.measured_eagerly):
        call(*arguments)
    memory = step.memory()
    assert memory.uses_pool is WAYS[how]
    assert memory.total_bytes == planned.value["total"]
    assert memory.total_bytes in [
        size for name, size in memory.totals if (name == "allocator") is (how == "allocator")
    ]
    assert memory.measured_bytes == pytest.approx(planned.peak_total_bytes, rel=CLOSE)
    assert memory.eager_measured_bytes == pytest.approx(eager.peak_total_bytes, rel=CLOSE)
    # Two in a row: the gradients that the first leaves die in the second, where the profiler sees
    # them.
    step.measured_eagerly(*arguments)
    assert step.memory().eager_measured_bytes == memory.eager_measured_bytes
    # Gradients that eager steps left are not counted as the plan's.
    step.measured(*arguments)
    assert step.memory().measured_bytes == memory.measured_bytes


@pytest.mark.auto
@needs_2_15
def test_a_measurement_belongs_to_the_plan_that_ran() -> None:
    net = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        if loss > 10.0:
            loss = loss + torch.tanh(x.repeat(40, 1)).mean() * net.weight.sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = roam.compile(train_step)
    small, large = torch.randn(64, 256), torch.randn(64, 256) * 1000
    for x in (*[small] * 4, *[large] * 4):
        step(x)
    found = []
    for x in (small, large, small):
        for _ in range(10):  # some are recorded, since the first leaves the plan
            step(x)
        step.measured(x)
        found.append(step.memory())
    assert found[1].total_bytes > found[0].total_bytes
    assert found[2].total_bytes == found[0].total_bytes
    for one in (found[0], found[2]):
        assert one.measured_bytes <= found[0].total_bytes < found[1].measured_bytes


class Landing(torch.nn.Module):
    """Convolutions, whose results cannot be written where a plan wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
            torch.nn.Conv2d(16, 16, 3), torch.nn.Flatten(), torch.nn.Linear(16 * 8 * 8, 10),
        )  # fmt: skip


def image_step(
    model: Any, optimizer: Any, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model.body(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def image_call(count: int = 8) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Landing()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, torch.randn(count, 3, 12, 12), torch.randint(0, 10, (count,))


@pytest.mark.parametrize("pool", [True, False, None])
@pytest.mark.parametrize("keep_grads", [True, False])
def test_a_step_tells_its_memory(pool: bool | None, keep_grads: bool) -> None:
    call = image_call()
    step = roam.compile(image_step, pool=pool, keep_grads=keep_grads)
    with pytest.raises(roam.ExecutionError, match="no call") as caught:
        step.memory()
    assert caught.value.code == "no_call"
    step.plan(*call)  # runs nothing
    with pytest.raises(roam.ExecutionError, match="no call"):
        step.memory()
    step(*call)
    first = step.memory()
    step(*call)
    steady = step.memory()
    assert steady != first
    assert steady.measured_bytes is steady.workspace_bytes is steady.eager_measured_bytes is None
    assert "measured" not in str(steady)
    torch.manual_seed(3)
    result = step.measured(*call)
    assert isinstance(result, torch.Tensor)
    step.measured_eagerly(*call)
    memory = step.memory()
    assert replace(memory, **dict.fromkeys(MEASURED)) == steady
    assert memory.total_bytes == memory.persistent_bytes + memory.pool_bytes + memory.outside_bytes
    assert memory.total_bytes in [
        size for name, size in memory.totals if (name != "allocator") is memory.uses_pool
    ]
    assert memory.measured_bytes is not None
    assert memory.workspace_bytes is not None
    assert memory.eager_measured_bytes is not None
    assert memory.measured_bytes == pytest.approx(memory.total_bytes, rel=0.02)
    assert memory.measured_bytes <= memory.eager_measured_bytes
    text = str(memory)
    assert f"{memory.measured_bytes:,}" in text
    assert f"{memory.total_bytes:,}" in text
    # A call of another shape has its own plan, and its own figures.
    model, optimizer, images, labels = call
    step(model, optimizer, images[:6], labels[:6])
    assert step.memory().measured_bytes is None
    step(*call)
    assert step.memory() == memory


@pytest.mark.parametrize("pool", [None, False, True])
def test_a_loss_whose_logarithms_leave_the_step_takes_no_more_than_planned(
    pool: bool | None,
) -> None:
    def train_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        logarithms = torch.nn.functional.log_softmax(model(x), -1)
        loss = torch.nn.functional.nll_loss(logarithms, y)
        loss.backward()
        optimizer.step()
        return loss.detach(), logarithms.detach()

    outcomes = []
    for wrap in (lambda step: step, lambda step: roam.compile(step, pool=pool)):
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 4000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step, x, y = wrap(train_step), torch.randn(64, 16), torch.randint(4000, (64,))
        results = [step(model, optimizer, x, y) for _ in range(2)]
        outcomes.append(tensors_and_numbers([results, model.state_dict()]))
    assert_same_bits(*outcomes)
    del results, outcomes
    step.measured(model, optimizer, x, y)
    memory = step.memory()
    assert memory.measured_bytes is not None
    assert memory.measured_bytes <= memory.total_bytes * (1 + CLOSE)


def test_measured_steps_are_steps_as_ever() -> None:
    outcomes = []
    for calls in (("eager",) * 4, ("measured", "measured_eagerly", "measured_eagerly", "measured")):
        call = image_call()
        step = roam.compile(image_step, pool=True)
        ways = {
            "eager": image_step,
            "measured": step.measured,
            "measured_eagerly": step.measured_eagerly,
        }
        losses = [ways[name](*call) for name in calls]
        outcomes.append(tensors_and_numbers(losses, call[0].state_dict(), call[1].state_dict()))
    assert_same_bits(*outcomes)


def test_without_a_plan_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROAM_DISABLE", "1")
    step = roam.compile(image_step)
    assert step.measured(*image_call()).requires_grad
    assert step.measured_eagerly(*image_call()).requires_grad
    with pytest.raises(roam.ExecutionError, match="no call"):
        step.memory()


MEASURED = ("measured_bytes", "workspace_bytes", "eager_measured_bytes", "eager_workspace_bytes")


def test_a_run_needs_the_larger_of_its_first_and_its_later_steps() -> None:
    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(net.parameters())

    def train_step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    step = roam.compile(train_step)
    told = []
    for _ in range(2):
        step(net, optimizer, torch.randn(8, 64))
        told.append(step.memory())
    totals = [plan.total_bytes for _, plan in step.plans]
    assert len(set(totals)) == 2
    assert [memory.total_bytes for memory in told] == totals
    assert [memory.run_bytes for memory in told] == [max(totals)] * 2
