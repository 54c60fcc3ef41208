"""What happens beside a step's calls: copies and files of compiled steps, profilers, calls and
releases in the middle of a run, and comparisons.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import roam
from newer import needs_2_15
from roam.runtime.pool import Pool

pytestmark = pytest.mark.usefixtures("one_thread")


class Trainer:
    """A trainer that holds its compiled step, as many do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.step = roam.compile(self.train, keep_grads=True, max_plans=3)

    def train(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def saved_and_loaded(trainer: Trainer) -> Any:
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [
    copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer)), saved_and_loaded,
], ids=["deepcopy", "pickle", "torch.save"])  # fmt: skip
@pytest.mark.parametrize("calls", [0, 2])
def test_a_copy_of_a_trainer_trains_by_itself(copied: Any, calls: int) -> None:
    trainer = Trainer()
    batches = [torch.randn(3, 4) for _ in range(4)]
    for batch in batches[:calls]:
        trainer.step(batch)
    other = copied(trainer)
    assert other.step is not trainer.step
    assert other.step.function.__self__ is other
    assert other.step.kept().most == 3
    losses = [other.step(batch) for batch in batches]
    assert all(map(torch.equal, losses, map(trainer.step, batches)))
    assert other.net.weight.grad is not None


def test_a_profiler_with_shapes_may_see_a_capture() -> None:
    trainer, x = Trainer(), torch.ones(3, 4)
    with torch.profiler.profile(record_shapes=True) as seen:
        trainer.step(x)
        trainer.step(x)
    assert any(event.name == "aten::addmm" for event in seen.events())


@torch.library.custom_op("roam_test::beside", mutates_args=())
def beside(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        called[0](x.detach().clone())
    return x.clone()


@beside.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


called: list[Any] = []


def outer(trainer: Trainer, x: torch.Tensor) -> torch.Tensor:
    trainer.optimizer.zero_grad()
    loss = trainer.net(x).square().mean()
    loss.backward()
    trainer.optimizer.step()
    return beside(loss.detach())


def test_a_step_in_the_middle_of_another_one_is_refused() -> None:
    inner = Trainer()
    inner.step = roam.compile(inner.train, pool=True)
    inner.step(torch.ones(3, 4))
    inner.step(torch.ones(3, 4))
    called[:] = [lambda _: None]
    trainer, step = Trainer(), roam.compile(outer, pool=True)
    for _ in range(3):
        step(trainer, torch.ones(3, 4))
    called[:] = [lambda _: inner.step(torch.ones(3, 4))]
    with pytest.raises(roam.ExecutionError) as caught:
        step(trainer, torch.ones(3, 4))
    assert getattr(caught.value.__cause__, "code", "") == "pool_in_use"


def test_a_release_in_the_middle_of_a_step_waits_for_its_end() -> None:
    trainer = Trainer()
    step = roam.compile(outer, pool=True)
    called[:] = [lambda _: step.release()]
    step(trainer, torch.ones(3, 4))
    losses = [step(trainer, torch.ones(3, 4)) for _ in range(3)]
    assert Pool.of(torch.device("cpu")).nbytes == 0
    assert losses == sorted(losses, reverse=True)


def test_a_comparison_leaves_tensors_that_may_be_resized() -> None:
    trainer, x = Trainer(), torch.ones(3, 4)
    assert roam.compare(trainer.train, x).equal
    assert x.untyped_storage().resizable()
    assert trainer.net.weight.untyped_storage().resizable()


@pytest.mark.parametrize("options", [
    {"max_plans": 1.5}, {"max_plans": "3"}, {"streams": "2"}, {"streams": 0}, {"pool": "yes"},
    {"time_limit_s": -1}, {"time_limit_s": "x"},
])  # fmt: skip
def test_options_of_another_kind_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        roam.compile(lambda: None, **options)


def test_options_may_be_numbers_of_numpys() -> None:
    step = roam.compile(Trainer().train, max_plans=np.int64(2), time_limit_s=np.float32(60))
    step(torch.ones(3, 4))
    assert step.kept().most == 2


@pytest.mark.parametrize("scatter", [
    lambda h: torch.diagonal_scatter(h, h.sum(1)),
    lambda h: torch.diagonal_scatter(h.t(), h.sum(1)),
    lambda h: torch.select_scatter(h[:, 1:], h.sum(0)[1:], 0, 1),
    lambda h: torch.slice_scatter(h[:, :3], h[:2, :3], 0, 1, 3),
])  # fmt: skip
def test_scatters_run_with_a_pool(scatter: Any) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = scatter(net(x) * 2).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compared = roam.compare(roam.compile(step, pool=True), torch.randn(4, 4))
    assert compared.equal, compared


def losses(step: Any, between: Any, calls: int = 6) -> list[float]:
    found = []
    for call in range(calls):
        between(call)
        found.append(float(step(torch.full((3, 4), 1.0 + call))))
    return found


def replaced_parameters(wrap: Any) -> list[float]:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(first.parameters(), 0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = second(first(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def between(call: int) -> None:
        if call == 3:
            optimizer.param_groups[0]["params"] = list(second.parameters())

    return losses(wrap(step), between)


def recurrent_state_that_is_reset(wrap: Any) -> list[float]:
    torch.manual_seed(0)
    cell = nn.GRUCell(4, 4)
    optimizer = torch.optim.Adam(cell.parameters())
    state: dict[str, Any] = {}

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = cell(x, torch.zeros(3, 4) if state["h"] is None else state["h"])
        loss = hidden.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["h"] = hidden.detach()
        return loss.detach()

    def between(call: int) -> None:
        if call % 3 == 0:
            state["h"] = None

    return losses(wrap(step), between, 36)


@pytest.mark.parametrize("script", [replaced_parameters, recurrent_state_that_is_reset])
def test_losses_are_eagers(script: Any) -> None:
    assert script(roam.compile) == script(lambda step: step)


def test_a_list_of_values_needs_no_plan_of_its_own_at_each_call() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor) -> float:
        result = net(x)
        optimizer.zero_grad()
        result.square().mean().backward()
        optimizer.step()
        return sum(result.sum(1).tolist())

    compiled = roam.compile(step)
    for _ in range(4):
        compiled(torch.randn(3, 4))
    assert len(compiled.plans) == 1


def test_what_a_seed_returns_is_the_generator() -> None:
    assert roam.compare(
        lambda: (torch.manual_seed(3) is torch.default_generator, torch.rand(2))
    ).equal


@pytest.mark.parametrize("use", [
    lambda number: json.dumps({"loss": number}), lambda number: number.as_integer_ratio(),
])  # fmt: skip
def test_uses_of_a_number_that_are_refused_name_what_to_do(use: Any) -> None:
    net = nn.Linear(4, 2)

    def step(x: torch.Tensor) -> Any:
        return use(net(x).sum().item())

    def twice() -> None:  # the encoder asks first whether the number is finite
        compiled = roam.compile(step)
        compiled(torch.ones(3, 4))
        compiled(torch.ones(3, 4))

    with pytest.raises(roam.CaptureError) as caught:
        twice()
    assert caught.value.code == "value_reached_python"
    assert "test_beside_steps.py" in str(caught.value)


def test_the_parts_of_a_number_are_numbers() -> None:
    net = nn.Linear(4, 2)

    def step(x: torch.Tensor) -> Any:
        number = net(x).sum().item()
        return number.real * 2, number.imag, number.conjugate()

    compiled = roam.compile(step)
    for _ in range(3):
        x = torch.randn(3, 4)
        assert compiled(x) == step(x)


def test_quantized_tensors_are_refused() -> None:
    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize())(
            torch.ones(2)
        )
    assert caught.value.code == "refused_operator"


@pytest.mark.parametrize("use", [
    lambda number: np.isnan(number.item()), lambda number: np.isfinite(number.detach()),
])  # fmt: skip
@pytest.mark.auto
@needs_2_15
@pytest.mark.filterwarnings("ignore:__array_wrap__")
def test_numpys_answers_are_of_its_kind(use: Any) -> None:
    net = nn.Linear(4, 2)

    def step(x: torch.Tensor) -> Any:
        return type(use(net(x).sum())).__name__

    compiled, x = roam.compile(step), torch.ones(3, 4)
    assert {compiled(x) for _ in range(3)} == {step(x)}


def test_a_limit_of_gradients_may_change_in_the_step() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    settings = {"limit": 1.0}

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), settings["limit"])
        settings["limit"] *= 0.9
        optimizer.step()
        return norm

    compiled = roam.compile(step)
    assert roam.compare(compiled, torch.ones(3, 4)).equal
    for _ in range(3):
        compiled(torch.ones(3, 4))
    assert len(compiled.plans) == 1
