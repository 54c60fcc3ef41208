"""Steps beside their plans in which something happens that no operator shows: to memory, to random
generators, to switches of kernels, in other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import roam
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
