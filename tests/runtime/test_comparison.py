"""`roam.compare`: it says equal only where it is, names what differs first, and leaves the user's
objects as they were."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import roam
from roam.program.effects import Rebind
from roam.program.ir import Program
from roam.runtime import codegen, divergence, executor
from training import tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional
runtime = importlib.import_module("roam.runtime.compile")
comparison = importlib.import_module("roam.runtime.comparison")


def make() -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.GELU(),
        torch.nn.Dropout(0.25),
        torch.nn.Linear(8, 3),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return SimpleNamespace(
        net=net,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        generator=torch.Generator().manual_seed(3),
        seen=0,
    )


def train(my: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    my.optimizer.zero_grad()
    noise = torch.randn(x.shape, generator=my.generator)
    loss = functional.cross_entropy(my.net(x + noise), y) * 2.0
    loss.backward()
    my.optimizer.step()
    my.seen += 1
    return loss


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 6), torch.randint(0, 3, (5,))


def everything(my: Any) -> list[Any]:
    return tensors_and_numbers(
        my.net.state_dict(), my.optimizer.state_dict(), my.scheduler.state_dict(), my.generator.get_state(), my.seen,
        [parameter.grad for parameter in my.net.parameters()],
        torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(),  # type: ignore[index]
    )  # fmt: skip


@contextmanager
def untouched(my: Any) -> Iterator[None]:
    """The user's objects are the same ones, with the same values."""
    objects = [*my.net.parameters(), *my.net.buffers(), *my.optimizer.param_groups]
    gradients = [parameter.grad for parameter in my.net.parameters()]
    before = [item.clone() if isinstance(item, torch.Tensor) else item for item in everything(my)]
    yield
    after = everything(my)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new
    now = [*my.net.parameters(), *my.net.buffers(), *my.optimizer.param_groups]
    assert all(one is other for one, other in zip(objects, now, strict=True))
    assert all(old is new.grad for old, new in zip(gradients, my.net.parameters(), strict=True))


def breaking(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The checked run with a kernel that gives other values."""

    def run(self: Any, index: int, call: Any, values: Any, check: Any) -> None:
        method(self, index, call, values, check)
        if call.name == name:
            values[call.outputs[0]].add_(0.125)

    return run


def with_other_constant(program: Program) -> Program:
    """The program with another factor, as if capture had frozen a number that changes."""
    calls = [
        dataclasses.replace(call, args=(call.args[0], 3.0))
        if call.name == "aten.mul.Tensor" and call.args[1:] == (2.0,)
        else call
        for call in program.calls
    ]
    return dataclasses.replace(program, calls=calls)


class TestEqual:
    @pytest.mark.parametrize("is_trained", [False, True])
    def test_a_whole_step(self, is_trained: bool) -> None:
        my, (x, y) = make(), batch()
        if is_trained:
            train(my, x, y)
        with untouched(my):
            found = roam.compare(train, my, x, y)
        assert found.equal, found
        assert found.compared["tensors"] > 20
        assert found.compared["Python values"] > 20
        assert found.difference is None
        assert torch.__version__ in str(found)

    def test_a_compiled_step_is_compared_with_its_own_options(self) -> None:
        my, (x, y) = make(), batch()
        step = roam.compile(train, keep_grads=True, pool=True)
        step(my, x, y)
        plans = len(step.plans)
        with untouched(my):
            found = roam.compare(step, my, x, y, steps=2)
        assert found.equal, found
        assert found.compared["gradients"] == 6
        assert len(step.plans) == plans

    def test_a_compiled_method(self) -> None:
        class Trainer:
            def __init__(self) -> None:
                self.net = torch.nn.Linear(6, 3)
                self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

            @roam.compile
            def step(self, x: Any, y: Any) -> Any:
                self.optimizer.zero_grad()
                loss = functional.cross_entropy(self.net(x), y)
                loss.backward()
                self.optimizer.step()
                return loss

        assert roam.compare(Trainer().step, *batch()).equal

    def test_data_that_the_step_replaces_comes_back(self) -> None:
        my, (x, y) = make(), batch()

        def step(my: Any, x: Any, y: Any) -> Any:
            loss = train(my, x, y)
            with torch.no_grad():
                my.net[0].weight.data = my.net[0].weight.data * 0.5
            return loss

        with untouched(my):
            found = roam.compare(step, my, x, y)
        assert found.outcome in ("equal", "refused"), found

    @pytest.mark.parametrize("by_hand", [False, True])
    def test_a_gradient_that_the_step_has_used_may_be_missing(self, by_hand: bool) -> None:
        net = torch.nn.Linear(6, 3)
        optimizer = torch.optim.SGD([net.bias] if by_hand else net.parameters(), lr=0.1)

        def step(x: Any, y: Any) -> Any:
            net.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            if by_hand:
                net.weight.data.sub_(net.weight.grad, alpha=0.1)
            return loss

        found = roam.compare(step, *batch())
        assert found.equal, found
        assert found.freed_gradients == 2
        assert "keep_grads=True" in str(found)
        found = roam.compare(roam.compile(step, keep_grads=True), *batch())
        assert found.equal, found
        assert found.freed_gradients == 0

    def test_a_gradient_that_the_step_has_not_used_may_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        net = torch.nn.Linear(6, 3)

        def step(x: Any, y: Any) -> Any:
            net.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        assert roam.compare(step, *batch()).equal
        module = importlib.import_module("roam.tracing.step")
        settle = module.settle_gradients

        def frees_all(program: Any, carried: Any, keep_grads: bool) -> None:
            settle(program, carried, keep_grads)
            program.effects = [one for one in program.effects if not isinstance(one, Rebind)]

        monkeypatch.setattr(module, "settle_gradients", frees_all)
        for compiled in (step, roam.compile(step, keep_grads=True)):
            found = roam.compare(compiled, *batch())
            assert found.outcome == "different", found
            assert ".grad" in found.difference.path


class TestDifferent:
    @pytest.mark.parametrize("name", ["aten.gelu.default", "aten.gelu_backward.default"])
    def test_a_kernel_that_gives_other_values_is_named(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        my, (x, y) = make(), batch()
        monkeypatch.setattr(
            executor.Executor, "_run_one", breaking(executor.Executor._run_one, name)
        )
        watched: list[Any] = []

        def first_different(*runs: Any) -> Any:
            watched.extend(runs)
            return divergence.first_different(*runs)

        monkeypatch.setattr(comparison, "first_different", first_different)
        with untouched(my):
            found = roam.compare(train, my, x, y)
        assert found.outcome == "different", found
        assert not found.equal
        assert found.difference is not None
        assert found.difference.step == 1
        assert found.operator is not None
        _, program, planned, eager = watched
        noted = {program.calls[index].name: digests for index, digests in planned.digests.items()}
        assert name in eager.names
        assert noted[name]
        assert eager.digests.isdisjoint(noted[name])
        assert found.operator.name == name
        assert __file__ in found.operator.source
        assert found.operator.name in str(found)

    def test_the_first_value_and_its_distance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        net = torch.nn.Linear(2, 1)

        def step(x: Any) -> Any:
            return (net(x).sum() * 0 + x).exp()

        run = breaking(executor.Executor._run_one, "aten.exp.default")
        monkeypatch.setattr(executor.Executor, "_run_one", run)
        found = roam.compare(step, torch.zeros(1, 2), steps=1)
        assert found.difference is not None
        assert found.difference.path == "result"
        assert found.difference.max_abs_difference == 0.125
        assert found.difference.elements == 2

    def test_what_only_later_steps_do_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second steady step is the first that runs the plan's text."""
        my, (x, y) = make(), batch()
        line = codegen.GeneratedSource._line

        def wrong(self: Any, function: Any, args: Any, kwargs: Any) -> str:
            shown = line(self, function, args, kwargs)
            return f"{shown}.add_(1)" if "gelu" in str(function) else shown

        monkeypatch.setattr(codegen.GeneratedSource, "_line", wrong)
        with untouched(my):
            found = roam.compare(train, my, x, y)
        assert found.difference is not None, found
        assert found.difference.step == 3
        assert found.operator is not None
        assert "gelu" in found.operator.name

    def test_a_program_with_another_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        my, (x, y) = make(), batch()
        capture_step = runtime.capture_step

        def captured(*args: Any, **kwargs: Any) -> Any:
            step = capture_step(*args, **kwargs)
            variants = {
                name: dataclasses.replace(variant, program=with_other_constant(variant.program))
                for name in ("first", "steady")
                if (variant := getattr(step, name)) is not None
            }
            return dataclasses.replace(step, **variants)

        monkeypatch.setattr(runtime, "capture_step", captured)
        with untouched(my):
            found = roam.compare(train, my, x, y)
        assert found.outcome == "different", found
        assert found.operator is not None
        assert found.operator.name == "aten.mul.Tensor"

    def test_state_that_is_not_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        my, (x, y) = make(), batch()
        run = runtime.Runner.run

        def forgetful(self: Any, *values: Any) -> Any:
            result = run(self, *values)
            my.net[1].num_batches_tracked += 1
            return result

        monkeypatch.setattr(runtime.Runner, "run", forgetful)
        found = roam.compare(train, my, x, y)
        assert found.difference is not None
        assert "num_batches_tracked" in found.difference.path
        assert found.operator is None or isinstance(found.operator.position, int)


class TestOther:
    def test_refused(self) -> None:
        my, (x, y) = make(), batch()

        def step(my: Any, x: Any, y: Any) -> Any:
            loss = train(my, x, y)
            return loss * hash(loss.item())

        with untouched(my):
            found = roam.compare(step, my, x, y)
        assert found.outcome == "refused"
        assert isinstance(found.error, roam.CaptureError)
        assert found.error.code in str(found)

    def test_lazy_modules_that_have_not_run(self) -> None:
        net = torch.nn.Sequential(torch.nn.LazyLinear(3))

        def step(x: torch.Tensor) -> torch.Tensor:
            return net(x).sum()  # type: ignore[no-any-return]

        found = roam.compare(step, torch.randn(2, 6))
        assert found.outcome == "refused"
        assert isinstance(found.error, roam.CaptureError)
        assert found.error.code == "uninitialized_parameter"

    def test_a_run_by_plan_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        my, (x, y) = make(), batch()

        def failing(self: Any, *args: Any) -> None:
            raise RuntimeError("no such kernel")

        monkeypatch.setattr(executor.Executor, "_run_one", failing)
        with untouched(my):
            found = roam.compare(train, my, x, y)
        assert found.outcome == "failed"
        assert "no such kernel" in str(found)

    @pytest.mark.parametrize("steps", [1, 3])
    def test_what_eager_pytorch_raises_too(self, steps: int) -> None:
        my, (x, y) = make(), batch()

        def step(my: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            train(my, x, y)
            return x @ y[:, None, None]

        with untouched(my):
            found = roam.compare(step, my, x, y, steps=steps)
        assert found.outcome == "undecided"
        assert isinstance(found.error, RuntimeError)
        assert roam.compare(3).outcome == "undecided"  # type: ignore[arg-type]

    def test_eager_that_gives_other_bits_each_time(self) -> None:
        counter = itertools.count()

        @torch.library.custom_op("roam_tests::unsteady", mutates_args=())
        def unsteady(x: torch.Tensor) -> torch.Tensor:
            return x + next(counter)

        @unsteady.register_fake
        def _(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x)

        my, (x, y) = make(), batch()
        with untouched(my):
            found = roam.compare(
                lambda my, x, y: train(my, torch.ops.roam_tests.unsteady(x), y), my, x, y
            )
        assert found.outcome == "undecided"
        assert found.operator is None

    def test_interrupted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        my, (x, y) = make(), batch()

        def interrupted(self: Any, *args: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(executor.Executor, "_run_one", interrupted)
        with untouched(my), pytest.raises(KeyboardInterrupt):
            roam.compare(train, my, x, y)

    def test_nothing_to_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with roam.fake("cpu"):
            my, (x, y) = make(), batch()
        with pytest.raises(roam.ExecutionError, match="fake") as caught:
            roam.compare(train, my, x, y)
        assert caught.value.code == "fake"
        my, (x, y) = make(), batch()
        for steps in (0, 1.5):
            with pytest.raises(ValueError, match="at least 1"):
                roam.compare(train, my, x, y, steps=steps)  # type: ignore[arg-type]
        monkeypatch.setenv("ROAM_DISABLE", "1")
        with pytest.raises(roam.ExecutionError, match="ROAM_DISABLE") as caught:
            roam.compare(train, my, x, y)
        assert caught.value.code == "disabled"
