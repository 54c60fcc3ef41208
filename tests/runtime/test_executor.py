"""What the executor makes sure of before it trusts a kernel."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch

import roam
from roam.kernels.calls import Placed
from training import TRAININGS, assert_same_bits, run

runtime = importlib.import_module("roam.runtime.runner")


def wrong_kernel(outs: Any, *args: Any, **kwargs: Any) -> None:
    """Writes something else."""
    for out in outs:
        out.fill_(1)


def hastened(step: Any, names: set[str]) -> tuple[Any, list[Any]]:
    """A compiled step that gets wrong kernels for some operators when it first runs, and its
    runners."""
    runners: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        step.plan(*args, **kwargs)
        for runner in [runner for captured in step._captures for runner in captured.runners]:
            if runner in runners:
                continue
            runners.append(runner)
            for index, placed in enumerate(runner._executor.bindings.placed):
                if placed is not None and runner._program.calls[index].name in names:
                    broken = dataclasses.replace(
                        placed.placement, kernel=wrong_kernel, overload=None
                    )
                    runner._executor.bindings.placed[index] = Placed(broken, placed.in_place)
        return step(*args, **kwargs)

    return call, runners


def test_a_kernel_without_proof_draws_once_from_the_users_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "is_proven", lambda device: False)

    def step(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        mask = torch.bernoulli(weight.sigmoid(), generator=generator)
        weight.add_(mask.mul(0.1).mean())
        return mask.sum()

    outcomes = []
    for wrap in (lambda step: step, lambda step: roam.compile(step, pool=True)):
        weight, generator = torch.linspace(-1, 1, 512), torch.Generator().manual_seed(3)
        compiled = wrap(step)
        results = [compiled(weight, generator) for _ in range(3)]
        outcomes.append([*results, weight, generator.get_state()])
    assert_same_bits(*outcomes)
    kernels = [placed for placed in compiled._last._executor.bindings.placed if placed is not None]
    assert kernels


@pytest.mark.parametrize("pool", [True, False])
def test_a_kernel_without_proof_is_compared_and_replaced(
    pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "is_proven", lambda device: False)
    names = {
        "aten.addmm.default",
        "aten.native_dropout.default",
        "aten.div.Tensor",
        "aten.gelu.default",
    }
    runners: list[Any] = []

    def wrap(step: Any) -> Any:
        hasty, made = hastened(roam.compile(step, pool=pool, poison=True), names)
        runners.append(made)
        return hasty

    eager, _ = run(TRAININGS["gpt2"], 4)
    planned, _ = run(TRAININGS["gpt2"], 4, wrap)
    assert_same_bits(eager, planned)
    refused = {
        runner._program.calls[index].name
        for runner in runners[0]
        for index in runner._executor.bindings.refused
    }
    assert "aten.div.Tensor" in refused
    assert refused <= names


@pytest.mark.parametrize("pool", [True, False])
def test_right_kernels_are_all_kept_where_there_is_no_proof(
    pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "is_proven", lambda device: False)
    steps: list[Any] = []

    def wrap(step: Any) -> Any:
        steps.append(roam.compile(step, pool=pool))
        return steps[-1]

    eager, _ = run(TRAININGS["gpt2"], 3)
    planned, _ = run(TRAININGS["gpt2"], 3, wrap)
    assert_same_bits(eager, planned)
    runners = [runner for captured in steps[0]._captures for runner in captured.runners]
    assert not any(runner._executor.bindings.refused for runner in runners)
    assert any(
        "write"
        in {runner._executor.bindings.way(index) for index in runner._executor.bindings.order}
        for runner in runners
    )


def test_the_gradient_of_the_loss_is_made_in_the_memory_of_the_log_probabilities() -> None:
    """The pair of calls, and the tensor between them, are gone; what is reported as eager's is
    not."""
    training = TRAININGS["gpt2"]()
    batch = training.batch(torch.Generator().manual_seed(0))
    step = roam.compile(training.step)
    plan = step.plan(*training.objects, *batch)
    (captured,) = step._captures
    choice = captured.runners[0].choice
    names = [operator.name for operator in choice.graph.operators]
    assert "roam.nll_loss_log_softmax_backward.default" in names
    assert "aten.nll_loss_backward.default" not in names
    assert (
        choice.eager_bytes
        == plan.persistent_bytes + roam.baseline(captured.step.first.graph, reuse=False).peak_bytes
    )
    assert choice.total_bytes < choice.eager_bytes
    (index,) = [
        operator.id
        for operator in choice.graph.operators
        if "nll_loss_log_softmax" in operator.name
    ]
    (output,) = choice.graph.operators[index].creates
    donors = {old for old, new in plan.reuse if new == output}
    assert [choice.graph.tensors[old].name.rpartition("_")[0] for old in donors] == ["_log_softmax"]
