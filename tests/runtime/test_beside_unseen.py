"""Steps beside their plans in which something happens that no operator shows: to memory, to random
generators, to switches of kernels, in other threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import roam
from roam.runtime.beside.looks import looking
from roam.runtime.beside.placeholders import is_possible
from training import assert_same_bits

pytestmark = [
    pytest.mark.skipif(not is_possible(), reason="it needs PyTorch 2.15"),
    pytest.mark.usefixtures("one_thread"),
]

CALLS = 8
Step = Callable[[torch.Tensor], Any]
STEPS: dict[str, Callable[[], Step]] = {}


def kind(make: Callable[[], Step]) -> Callable[[], Step]:
    STEPS[make.__name__] = make
    return make


@kind
def a_write_to_what_kernels_still_read() -> Step:
    scale = torch.ones(4, 6)

    def step(x: torch.Tensor) -> Any:
        result = x * scale
        scale.numpy()[0] += 1
        return result, scale.sum().item()

    return step


@kind
def a_buffer_that_is_filled_anew() -> Step:
    buffer, weight = np.zeros((4, 6), np.float32), torch.ones(3, 6, requires_grad=True)
    inside = torch.from_numpy(buffer)

    def step(x: torch.Tensor) -> Any:
        buffer[:] = x.numpy()
        loss = torch.nn.functional.linear(inside, weight).square().mean()
        buffer[:] = 0
        weight.grad = None
        loss.backward()
        return loss.detach(), weight.grad, inside * 2

    return step


@kind
def generators_of_its_own() -> Step:
    generator = torch.Generator()

    def step(x: torch.Tensor) -> Any:
        first = torch.rand(6, generator=generator)
        states = [generator.get_state()]
        generator.manual_seed(3)
        second = (x * 2).normal_(generator=generator)
        states.append(generator.get_state())
        return first, second, states

    return step


def switched(switch: Callable[[bool], Any], use: Callable[[torch.Tensor], Any]) -> Step:
    calls = [0]

    def step(x: torch.Tensor) -> Any:
        calls[0] += 1
        switch(calls[0] % 4 == 3)
        try:
            return use(x)
        finally:
            switch(False)

    return step


@kind
def denormal_numbers() -> Step:
    return switched(lambda is_on: torch.set_flush_denormal(is_on), lambda x: x * 1e-39 * 0.5)


@kind
def default_dtypes() -> Step:
    def switch(is_on: bool) -> None:
        torch.set_default_dtype(torch.float64 if is_on else torch.float32)

    return switched(switch, lambda x: (x > 0).long() / 3)


@kind
def deterministic_kernels() -> Step:
    index = torch.tensor([0, 0, 1, 2])
    return switched(
        torch.use_deterministic_algorithms, lambda x: torch.zeros(4, 6).index_add_(0, index, x)
    )


@kind
def whole_numbers_without_a_dtype() -> Step:
    calls = [0]

    def step(x: torch.Tensor) -> Any:
        calls[0] += 1
        return torch.arange(5) * calls[0], torch.randperm(4), torch.full((2,), 3) * x.sum()

    return step


@kind
def threads() -> Step:
    weight = torch.ones(6, requires_grad=True)

    def step(x: torch.Tensor) -> Any:
        loss, seen = (x * weight).square().mean(), []
        weight.grad = None
        for task in (loss.backward, lambda: seen.append(loss.item())):
            thread = threading.Thread(target=task)
            thread.start()
            thread.join()
        return weight.grad, seen

    return step


@kind
def workers() -> Step:
    executor = ThreadPoolExecutor(1)

    def step(x: torch.Tensor) -> Any:
        result = x * 2
        return executor.submit(lambda: result.sum().item()).result()

    return step


@kind
def more_than_two_ways() -> Step:
    calls, seen = [0], []

    def step(x: torch.Tensor) -> Any:
        calls[0] += 1
        try:
            return x * 2 @ torch.ones(2 + calls[0] % 3)
        except RuntimeError as error:
            seen.append(str(error))
        return list(seen)

    return step


@kind
def ways_with_and_without_chance() -> Step:
    calls = [0]

    def step(x: torch.Tensor) -> Any:
        calls[0] += 1
        return torch.nn.functional.dropout(x * 2, training=calls[0] % 8 > 4)

    return step


@kind
def lists_of_tensors() -> Step:
    total = torch.zeros(())

    def step(x: torch.Tensor) -> Any:
        total.add_(x.mean())
        return torch.tensor([total, 1.0]), x.new_tensor([[(x * 2).sum(), total]])

    return step


@torch.library.custom_op("roam_test::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape)


@noisy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@kind
def operators_that_draw() -> Step:
    return lambda x: (torch.rand_like(x), noisy(x * 2), torch.rand_like(x))


@kind
def views_of_small_tensors() -> Step:
    return lambda x: (
        x.mean().item(),
        torch.normal(x, torch.tensor(2.0).expand(4, 6)),
        x.sum().item(),
    )


@kind
def what_tells_no_value() -> Step:
    return lambda x: ((x * 2).is_pinned(), torch.from_dlpack((x * 3).detach()) * 2)


@kind
def labels_that_are_out_of_range() -> Step:
    weight, calls, seen = torch.ones(6, 4, requires_grad=True), [0], []

    def step(x: torch.Tensor) -> Any:
        calls[0] += 1
        labels = torch.tensor([0, 3, -100, 9 if calls[0] in (2, 6) else 1])
        weight.grad = None
        try:
            torch.nn.functional.cross_entropy(x @ weight, labels).backward()
        except IndexError as error:
            seen.append(str(error))
        return weight.grad, list(seen)

    return step


@kind
def matrices_that_are_not_definite() -> Step:
    calls = [0]

    def step(x: torch.Tensor) -> Any:
        calls[0] += 1
        matrix = torch.eye(4) * 2 * (-1 if calls[0] in (2, 6) else 1)
        try:
            return torch.linalg.cholesky(matrix) * x.mean()
        except torch.linalg.LinAlgError as error:
            return str(error), matrix

    return step


@kind
def whether_a_dispatch_mode_is_on() -> Step:
    return lambda x: (x * 2, torch.utils._python_dispatch.is_in_torch_dispatch_mode())


@kind
def places_to_split_at() -> Step:
    return lambda x: (x * 2).tensor_split((x[0, :1] * 0 + 2).long())


@kind
def memory_for_others() -> Step:
    return lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x * 2)) * 3


@kind
def variables_by_which_libraries_choose_kernels() -> Step:
    def switch(is_on: bool) -> None:
        os.environ["OMP_STACKSIZE"] = "4M" if is_on else "8M"

    return switched(switch, lambda x: x @ x.t())


def results(make: Callable[[], Step], compiled: bool, calls: int) -> list[Any]:
    torch.manual_seed(0)
    step = make()
    run = roam.compile(step, python="beside", time_limit_s=0.1) if compiled else step
    batches = torch.randn(calls, 4, 6)
    return [run(batch.clone()) for batch in batches]


@pytest.mark.parametrize("name", STEPS)
def test_unseen_events_come_when_they_come_in_eager_pytorch(name: str) -> None:
    calls = 3 * CALLS if "ways" in name else CALLS
    expected = results(STEPS[name], False, calls)
    assert_same_bits(results(STEPS[name], True, calls), expected)


def test_a_seed_that_nothing_shows_is_refused() -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> Any:
        first = torch.rand(2)
        calls.append(len(calls))
        if len(calls) == CALLS:  # no recording has seen it
            torch.default_generator.manual_seed(3)
        return first, torch.rand(2), torch.tensor(1).item()

    compiled = roam.compile(step, python="beside", time_limit_s=0.1)
    with pytest.raises(roam.ExecutionError) as caught:
        [compiled(torch.ones(2)) for _ in range(CALLS)]
    assert caught.value.code == "generator_state"


@pytest.mark.parametrize("method", ["get_state", "initial_seed", "seed"])
def test_a_method_of_the_default_generator_is_refused(method: str) -> None:
    def function(x: torch.Tensor) -> Any:
        drawn = torch.rand(3)
        return drawn, getattr(torch.default_generator, method)(), torch.rand(3)

    step, state = roam.compile(function, python="beside"), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(roam.CaptureError, match=method) as caught:
            step(torch.ones(2))
        assert caught.value.code == "generator_state"
        assert torch.equal(torch.get_rng_state(), state)


def test_what_reads_memory_by_itself_is_refused() -> None:
    compiled = roam.compile(lambda x: torch.FloatTensor([x.sum(), 1.0]), python="beside")
    with pytest.raises(roam.ExecutionError) as caught:
        [compiled(torch.ones(4, 6)) for _ in range(CALLS)]
    assert caught.value.code == "unread"


@pytest.mark.parametrize("memory", [None, "1GiB"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_what_reads_memory_by_itself_is_refused_where_its_error_is_caught(
    goes_on: bool, memory: str | None
) -> None:
    weight, read = torch.ones(64, 64), []

    def step(x: torch.Tensor) -> Any:
        total = (x @ weight).sum()
        try:
            read.append(torch.FloatTensor([total, 1.0]))
        except Exception:  # noqa: BLE001 - as careless code does
            read.append(torch.zeros(2))
        if goes_on:
            weight.mul_(0.5)
        return total

    compiled = roam.compile(step, python="beside", memory=memory)
    with pytest.raises(roam.ExecutionError) as caught:
        [compiled(torch.ones(32, 64)) for _ in range(CALLS)]
    assert caught.value.code == "unread"


class _Asked(Exception):
    """Of the user's, and notes when its text is made."""

    texts = 0

    def __str__(self) -> str:
        _Asked.texts += 1
        return "asked"


def test_a_step_may_leave_its_plan_while_it_handles_an_error_of_its_own() -> None:
    calls = []

    def step(x: torch.Tensor) -> Any:
        total = x.sum()
        try:
            raise _Asked
        except _Asked:
            calls.append(len(calls))
            return total * 2 if len(calls) < CALLS else total.sin()

    compiled = roam.compile(step, python="beside")
    for number in range(CALLS):
        expected = 24.0 * 2 if number < CALLS - 1 else torch.tensor(24.0).sin().item()
        assert compiled(torch.ones(4, 6)).item() == expected
    assert len(compiled.plans) == 1
    assert _Asked.texts == 0


double = torch.compile(lambda x: x * 2, backend="eager")


@pytest.mark.parametrize(("function", "code"), [
    (lambda x: x.add_(1).data_ptr(), "address"), (lambda x: double(x.add_(1)), "compiled_call"),
    (lambda x: torch.func.vmap(lambda row: str(row * 2) and row)(x), "refused_operator"),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused(function: Any, code: str) -> None:
    step = roam.compile(function, python="beside")
    with pytest.raises(roam.CaptureError) as caught:
        step(torch.ones(4, 6))
    assert caught.value.code == code
    assert "test_beside_unseen.py" in str(caught.value)


@pytest.mark.parametrize(("function", "code"), [
    (lambda x: x.data_ptr(), "address"), (double, "compiled_call"),
])  # fmt: skip
def test_what_no_recorded_call_has_done_is_refused(function: Any, code: str) -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> Any:
        calls.append(1)
        return function(x * 2) if len(calls) == 5 else x * 2

    compiled = roam.compile(step, python="beside")
    for _ in range(4):
        compiled(torch.ones(4, 6))
    with pytest.raises(roam.ExecutionError) as caught:
        compiled(torch.ones(4, 6))
    assert caught.value.code == code


def test_arrays_between_calls_keep_no_step_from_its_plan() -> None:
    weight = torch.ones(40, requires_grad=True)

    def step(x: torch.Tensor) -> str:
        weight.grad = None
        (x * weight).square().sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad * 0.1)
        return str(weight.sum().item())

    compiled, kept = roam.compile(step, python="beside", time_limit_s=0.1), []
    for call in range(CALLS):
        before = weight.detach().clone()
        array = weight.detach().numpy() if call else None
        if call == CALLS - 2:
            kept.append(array)
        del array
        found = compiled(torch.full((40,), 0.5))
        after = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(before)
        assert step(torch.full((40,), 0.5)) == found
        assert torch.equal(weight, after)
        if call == CALLS - 3:
            assert compiled.memory().total_bytes > 0  # it has run by its plan
    assert all((array == weight.detach().numpy()).all() for array in kept)


def test_a_compiled_step_in_another_one_is_a_part_of_that() -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        weight = torch.ones(6, requires_grad=True)
        inner = wrap(lambda x: (x * weight).sum().item())

        def step(x: torch.Tensor) -> Any:
            loss = (x * weight).square().mean()
            loss.backward()
            with torch.no_grad():
                weight.sub_(weight.grad)
            return loss.item(), inner(x)

        outer = wrap(step)
        return [outer(torch.randn(4, 6)) for _ in range(CALLS)]

    assert run(lambda step: roam.compile(step, python="beside")) == run(lambda step: step)


def test_what_stands_in_the_place_of_a_look_is_what_is_there_at_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[torch.Tensor | None] = []
    one = SimpleNamespace(is_busy=False, settle=told.append)
    tensor = torch.ones(2)
    with looking(one):
        assert tensor.tolist() == [1, 1]
        kept = torch.Tensor.tolist
    with looking(one):
        assert torch.Tensor.tolist is kept, "made once"
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: "mine")
    with looking(one):
        assert tensor.tolist() == "mine"  # type: ignore[comparison-overlap]
        with looking(one):
            assert tensor.tolist() == "mine"  # type: ignore[comparison-overlap]
    assert tensor.tolist() == "mine"  # type: ignore[comparison-overlap]
    monkeypatch.undo()
    with looking(one):
        assert tensor.tolist() == [1, 1]
    tensor.tolist()
    kept(tensor)
    assert len(told) == 5, "each look in a block, of each block around it"
    assert all(seen is tensor for seen in told)
