"""Twenty steps by plan are twenty steps of eager PyTorch, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import roam
from training import TRAININGS, assert_same_bits, run

STEPS = 20


@functools.cache
def eager_run(name: str) -> list[Any]:
    return run(TRAININGS[name], STEPS)[0]


@pytest.mark.sweep
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("name", TRAININGS)
def test_twenty_steps_have_the_bits_of_eager(name: str, pool: bool) -> None:
    steps: list[Any] = []

    def compiled(train_step: Any) -> Any:
        steps.append(roam.compile(train_step, pool=pool, poison=pool))
        return steps[0]

    planned, training = run(TRAININGS[name], STEPS, compiled)
    assert_same_bits(eager_run(name), planned)
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert steps[0].memory().uses_pool is pool
    share = share_in_the_pool(steps[0])
    print(f"{name}: {share:.1%} of the bytes that a step makes lie in the pool")
    assert share >= (0.0 if not pool else 0.9 if name in ("gpt2", "bert") else 0.5)


def share_in_the_pool(step: Any) -> float:
    """Of the bytes that the most recent plan's step makes and that do not outlive it."""
    runner = step._last
    program, pooled = runner._program, runner._executor.bindings.offsets
    leaving = program.leaving()
    sizes = {
        number: storage.size_bytes
        for number, storage in enumerate(program.storages)
        if storage.creator >= 0 and number not in leaving
    }
    return sum(size for number, size in sizes.items() if number in pooled) / sum(sizes.values())


def test_keep_grads_keeps_what_eager_keeps() -> None:
    _, eager = run(TRAININGS["bert"], 3)
    _, planned = run(TRAININGS["bert"], 3, lambda step: roam.compile(step, keep_grads=True))
    assert_same_bits(
        [parameter.grad for parameter in eager.model.parameters()],
        [parameter.grad for parameter in planned.model.parameters()],
    )


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.sweep
@pytest.mark.parametrize("name", TRAININGS)
def test_the_kernels_captured_are_the_kernels_of_eager(name: str) -> None:
    """Fake tensors must not make library code take another branch than real ones do."""
    torch.manual_seed(0)
    training = TRAININGS[name]()
    arguments = (
        *training.objects,
        *training.batch(torch.Generator(torch.get_default_device()).manual_seed(0)),
    )
    training.step(*arguments)  # makes the optimizer's state
    graph = roam.capture(training.step, *arguments)
    captured = [operator.name for operator in graph.operators if operator.name.startswith("aten.")]
    with _Names() as eager:
        training.step(*arguments)
    left_out = []
    wanted = iter(_compared(captured))
    next_wanted = next(wanted)
    for kernel in _compared(eager.names):
        if kernel == next_wanted:
            next_wanted = next(wanted, "")
        else:
            left_out.append(kernel)
    assert not next_wanted, f"{next_wanted} was captured and eager does not run it there"
    assert set(left_out) <= _LEFT_OUT


def _compared(names: list[str]) -> list[str]:
    """Clipping names its norms and products in one call for all gradients, and the engine adds
    gradients in place."""
    merged = {
        "aten._foreach_norm.Scalar", "aten._foreach_mul_.Tensor", "aten.linalg_vector_norm.default", "aten.mul_.Tensor",
        "aten.add.Tensor", "aten.add_.Tensor", "aten.detach.default", "aten.alias.default",
    }  # fmt: skip
    return [name for name in names if name not in merged]


# What capture leaves out: fresh buffers and views that nothing uses, and questions about constant
# masks.
_LEFT_OUT = {
    f"aten.{name}"
    for name in (
        "empty.memory_format", "slice.Tensor", "sub.Tensor", "cat.default", "ne.Scalar", "cumsum.default", "select.int",
        "eq.Scalar", "all.default", "_local_scalar_dense.default", "unsqueeze.default", "expand.default", "t.default",
    )
}  # fmt: skip
