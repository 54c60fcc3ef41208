"""Times of operators are measured where a budget asks for extra runs, once per kernel and shape,
and are written into the graph that is planned."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import roam
from roam.kernels import times as kernel_times
from roam.kernels.calls import placed_calls
from roam.kernels.times import completed, rounded, times
from roam.memory_limit import MemoryLimit
from roam.runtime.strategy import Choice, choose
from roam.tracing.step import Variant, capture_step
from training import plain_step


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have learned."""
    monkeypatch.setattr(kernel_times, "_learned", {})


def dropping() -> tuple[Any, ...]:
    """A step with random numbers and Adam's live numbers."""
    torch.manual_seed(0)
    layers = [
        one
        for _ in range(6)
        for one in (torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Dropout(0.2))
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return model, optimizer, torch.randn(512, 32), torch.randint(0, 4, (512,))


def steady(call: tuple[Any, ...]) -> Variant:
    return capture_step(plain_step, call, {}).steady


def measured(variant: Variant, room_bytes: int = 2**40) -> dict[int, int]:
    program, device = variant.program, variant.device
    calls = range(len(program.calls))
    placed = placed_calls(program, device)
    return times(program, placed, calls, device, workspaces={}, room_bytes=room_bytes)


def within(variant: Variant, share: float, *, is_real: bool = True) -> Choice:
    (plain,) = choose([variant], pool=None, time_limit_s=None, is_real=is_real)
    local_bytes = plain.total_bytes - plain.plan.persistent_bytes
    limit = MemoryLimit(size_bytes=plain.plan.persistent_bytes + int(local_bytes * share))
    return choose([variant], pool=None, time_limit_s=None, is_real=is_real, memory=limit)[0]


def test_every_kernel_of_a_step_is_timed_and_changes_nothing() -> None:
    call = dropping()
    variant = steady(call)
    before = [parameter.clone() for parameter in call[0].parameters()]
    generator = torch.get_rng_state()
    found = measured(variant)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(map(torch.equal, before, call[0].parameters()))
    made = {
        index
        for index, call in enumerate(variant.program.calls)
        if variant.graph.operator(index).creates or variant.graph.operator(index).mutates
    }
    assert made - found.keys() == set()
    assert all(time_ns == rounded(time_ns) for time_ns in found.values())


def test_equal_calls_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = steady(dropping())
    found = measured(variant)
    kinds = kernel_times.known()
    assert kinds < len(found) / 2  # six equal layers
    monkeypatch.setattr(kernel_times, "_measured", lambda *_: pytest.fail("timed again"))
    assert measured(steady(dropping())) == found
    assert kernel_times.known() == kinds


def test_no_kernel_is_run_that_has_no_room() -> None:
    variant = steady(dropping())
    room_bytes = 40_000
    few = measured(variant, room_bytes)
    program = variant.program
    for index in few:
        slots = [
            slot
            for slot in (*program.calls[index].refs(), *program.calls[index].outputs)
            if slot is not None
        ]
        storages = {program.storage_of(slot) for slot in slots} - {-1}
        assert sum(program.storages[number].size_bytes for number in storages) <= room_bytes
    assert 0 < len(few) < len(measured(variant))


@pytest.mark.parametrize("time_ns", [0.2, 1, 3, 999, 12_345.6, 10**9])
def test_rounding_is_coarse_and_keeps_what_it_made(time_ns: float) -> None:
    near = rounded(time_ns)
    assert rounded(near) == near >= 1
    if time_ns >= 100:
        assert abs(math.log2(near / time_ns)) <= 0.26
        assert near == rounded(near * 1.05) == rounded(near / 1.05)


def test_what_is_not_measured_is_the_model_scaled() -> None:
    model = [0, 1_000, 3_000, 2_000]
    found = completed({1: 4_096, 2: 8_192}, model)
    assert found == {1: 4_096, 2: 8_192, 3: rounded(2_000 * 12_288 / 4_000)}


def test_a_plan_within_a_budget_depends_on_its_graph_alone() -> None:
    choice = within(steady(dropping()), 0.7)
    again = choice.recomputation
    assert again is not None
    assert again.timed_calls > 0
    assert again.modelled_calls == 0
    assert all(operator.time_ns > 0 for operator in choice.graph.operators if operator.creates)
    assert any(topic == "times" for topic, _ in choice.graph.notes)
    assert (
        roam.Graph.from_json(choice.graph.to_json()).times_ns.tolist()
        == choice.graph.times_ns.tolist()
    )


def test_without_a_budget_and_of_fakes_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "_measured", lambda *_: pytest.fail("measured"))
    variant = steady(dropping())
    (plain,) = choose([variant], pool=None, time_limit_s=None)
    assert all(operator.time_ns == 0 for operator in plain.graph.operators)
    again = within(variant, 0.7, is_real=False).recomputation
    assert again is not None
    assert (again.timed_calls, again.modelled_calls > 0) == (0, True)


def test_a_kernel_that_cannot_be_run_has_the_models_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory")

    variant = steady(dropping())
    monkeypatch.setattr(kernel_times, "_least_ns", fails)
    assert measured(variant) == {}
    again = within(variant, 0.7).recomputation
    assert again is not None
    assert again.timed_calls == 0


def test_memory_tells_which_times_are_measured() -> None:
    call = dropping()
    step = roam.compile(plain_step, memory="80%")
    for _ in range(2):
        step(*call)
    memory = step.memory()
    assert memory.extra_runs > 0
    assert memory.timed_operators > 0
    assert memory.modelled_operators == 0
    assert f"Times of {memory.timed_operators:,} operators are measured, of 0 modelled" in str(
        memory
    )
