"""Steps in which operators run again have eager's bits, and keep within the limit that they were
planned for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import roam
from replays import all_again, at_random, planning
from roam.memory_limit import MemoryLimit
from roam.program.lower import Lowering
from roam.runtime.available import available_bytes
from steps import Recomputing, train
from test_expand import MAKERS
from training import Training, assert_same_bits, run, tensors_and_numbers

functional = torch.nn.functional


@functools.cache
def eager(name: str) -> list[Any]:
    return run(MAKERS[name], 5)[0]


SEQUENCES = {
    "all": all_again,
    "few": functools.partial(at_random, seed=1, share=0.02),
    "many": functools.partial(at_random, seed=2, share=0.2),
}
CASES = [
    *(("small", *case) for case in product([True, False, None], SEQUENCES)),
    ("gpt2", True, "many"), ("gpt2", False, "all"), ("bert", False, "many"), ("bert", True, "all"),
    ("resnet18", True, "all"), ("resnet18", None, "many"), ("mobilenet_v2", False, "few"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "pool", "how"), CASES)
def test_steps_that_run_operators_again_have_eagers_bits(
    name: str, pool: bool | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = planning(monkeypatch, SEQUENCES[how])
    steps: list[roam.Step] = []

    def wrap(step: Any) -> Any:
        steps.append(roam.compile(step, pool=pool, poison=pool is True, memory=1))
        return steps[-1]

    planned, training = run(MAKERS[name], 5, wrap)
    assert len(used) == 2  # of the first step, and of later ones
    assert_same_bits(eager(name), planned)
    memory = steps[0].memory()
    assert memory.extra_runs > 0
    assert pool is None or memory.uses_pool is pool
    steps[0].measured(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    assert steps[0].memory().measured_bytes == pytest.approx(memory.total_bytes, rel=0.01)


def scaled(wrap: Callable[[Any], Any]) -> Any:
    """Autocast, a scaler that leaves out two steps, and a branch on the norm of the gradients."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8, momentum=None), torch.nn.ReLU(inplace=True),
        torch.nn.Dropout(0.25), torch.nn.Linear(8, 3),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    generator = torch.Generator().manual_seed(3)

    @wrap
    def step(model, optimizer, scaler, x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    losses = []
    for index in range(8):
        x = torch.randn(5, 6, generator=generator) * (torch.inf if index in (2, 5) else 1)
        y = torch.randint(0, 3, (5,), generator=generator)
        losses.append(step(model, optimizer, scaler, x, y))
    return [losses, model.state_dict(), optimizer.state_dict(), scaler.state_dict()]


def branching(wrap: Callable[[Any], Any]) -> Any:
    """Branches that go both ways, with running statistics that are changed before them."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Tanh(),
        torch.nn.Linear(8, 2),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(3)

    @wrap
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) > 1.0:
            for p in model.parameters():
                p.grad.mul_(0.5)
        optimizer.step()
        return loss

    batches = [torch.randn(5, 6, generator=generator) * (place % 3) for place in range(9)]
    return [
        [step(model, optimizer, x) for x in batches],
        model.state_dict(),
        optimizer.state_dict(),
    ]


def checkpointed(wrap: Callable[[Any], Any]) -> Any:
    """Recomputation of the user's own, which replays the random generator."""
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randn(4, 6, generator=generator) for _ in range(4)]
    return train(Recomputing(), wrap, batches)


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("script", [scaled, branching, checkpointed])
def test_scalers_branches_and_checkpoints_have_eagers_bits(
    script: Callable[[Any], Any], pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = planning(monkeypatch, SEQUENCES["many"])
    outcomes = []
    compiled = functools.partial(roam.compile, pool=pool, poison=pool, memory=1)
    for wrap in (lambda step: step, compiled):
        torch.manual_seed(0)
        outcomes.append(tensors_and_numbers(script(wrap), torch.get_rng_state()))
    assert used
    assert_same_bits(*outcomes)


def test_a_comparison_watches_further_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    used = planning(monkeypatch, SEQUENCES["many"])
    training = MAKERS["small"]()
    batch = training.batch(torch.Generator().manual_seed(2))
    step = roam.compile(training.step, memory=1)
    result = roam.compare(step, *training.objects, *batch, steps=2)
    assert used
    assert result.equal


def test_nothing_changes_where_the_plan_is_within_the_limit() -> None:
    training = MAKERS["small"]()
    batch = training.batch(torch.Generator().manual_seed(2))
    plain, limited = (
        roam.compile(training.step, memory=memory).plan(*training.objects, *batch)
        for memory in (None, "100%")
    )
    assert plain.to_json() == limited.to_json()


@pytest.mark.parametrize("memory", [0, -1, 1.5, True, 2**63, "", "12", "12 GiBs", "-3GiB", "0%", "nan GiB", "automatic", b"1GiB"])  # fmt: skip
def test_nonsense_is_refused_with_what_is_allowed(memory: Any) -> None:
    with pytest.raises(ValueError, match="memory must be"):
        roam.compile(lambda: None, memory=memory)


def test_several_streams_have_no_limit() -> None:
    with pytest.raises(ValueError, match="one stream"):
        roam.compile(lambda: None, memory="1GiB", streams=2)


def test_auto_is_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MemoryLimit.of("auto").is_auto
    held = available_bytes(torch.device("cpu"), 0)
    assert held is not None
    assert held > 2**20
    training = MAKERS["small"]()
    step = roam.compile(training.step, memory="auto", pool=False)
    step(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    memory = step.memory()
    assert memory.limit_bytes is not None
    assert 2**20 < memory.limit_bytes < 2**50
    assert memory.extra_runs == 0
    assert "limit" in str(memory)


def deep() -> Training:
    """Mostly activations: dropout, batch norm in place, clipping."""
    blocks = [
        layer
        for _ in range(5)
        for layer in (
            torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(inplace=True),
            torch.nn.Dropout(0.2),
        )
    ]  # fmt: skip
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(16, 3)).train()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    def batch(g: torch.Generator) -> tuple[Any, ...]:
        return torch.randn(512, 16, generator=g), torch.randint(0, 3, (512,), generator=g)

    return Training(step, (model, torch.optim.AdamW(model.parameters())), batch)


@functools.cache
def local_share(share: float) -> int:
    """That share of what a step takes beside what persists, and what persists."""
    _, training = run(deep, 2)
    batch = training.batch(torch.Generator().manual_seed(2))
    plan = roam.compile(training.step, pool=False).plan(*training.objects, *batch)
    return plan.persistent_bytes + int(share * (plan.total_bytes - plan.persistent_bytes))


@pytest.mark.parametrize(("share", "pool"), [(0.8, None), (0.6, False)])
def test_a_budget_is_kept_as_measured_whatever_other_steps_did_to_the_pool(
    share: float, pool: bool | None
) -> None:
    limit_bytes = local_share(share)
    plain, training = run(deep, 5, functools.partial(roam.compile, pool=True))
    steps: list[roam.Step] = []

    def wrap(step: Any) -> Any:
        steps.append(roam.compile(step, memory=limit_bytes, pool=pool))
        return steps[-1]

    planned, training = run(deep, 5, wrap)
    assert_same_bits(plain, planned)
    assert_same_bits(run(deep, 5)[0], planned)
    # A step without a budget makes the pool larger in between.
    run(deep, 1, functools.partial(roam.compile, pool=True))
    steps[0].measured(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    memory = steps[0].memory()
    assert memory.limit_bytes == limit_bytes
    assert memory.extra_runs > 0
    assert memory.floor_bytes is not None
    assert 0 < memory.floor_bytes <= memory.total_bytes <= limit_bytes
    assert memory.measured_bytes is not None
    assert memory.measured_bytes <= limit_bytes
    assert memory.least_extra_s <= memory.extra_s < memory.step_s
    for runner in steps[0]._captures[0].runners:
        assert runner.memory.total_bytes <= limit_bytes
    assert "operators run again" in str(memory)


def test_a_budget_that_cannot_be_kept_is_refused_before_anything_runs() -> None:
    torch.manual_seed(0)
    training = deep()
    batch = training.batch(torch.Generator().manual_seed(2))
    before = tensors_and_numbers([part.state_dict() for part in training.objects])
    persistent = roam.compile(training.step).plan(*training.objects, *batch).persistent_bytes
    for memory in (1, persistent // 2, persistent):
        step = roam.compile(training.step, memory=memory)
        for _ in range(2):
            with pytest.raises(roam.PlanError, match="Without recomputation it takes") as caught:
                step(*training.objects, *batch)
            assert caught.value.code == "memory_floor"
    assert_same_bits(before, tensors_and_numbers([part.state_dict() for part in training.objects]))


def test_a_batch_that_grows_has_the_same_budget() -> None:
    torch.manual_seed(0)
    training = deep()
    limit_bytes = local_share(0.9)
    step = roam.compile(training.step, memory=limit_bytes)
    runs = []
    for size in (64, 512, 600):
        batch = torch.randn(size, 16), torch.randint(0, 3, (size,))
        for _ in range(2):
            step(*training.objects, *batch)
        step.measured(*training.objects, *batch)
        memory = step.memory()
        assert memory.measured_bytes is not None
        assert memory.measured_bytes <= limit_bytes
        runs.append(memory.extra_runs)
    assert runs[0] == 0
    assert runs[1] > 0
    assert runs[2] > 0


def test_a_share_is_one_budget_for_the_first_step_and_later_ones() -> None:
    torch.manual_seed(0)
    training = deep()
    step = roam.compile(training.step, memory="75%")
    step(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    first, later = (runner.choice for runner in step._captures[0].runners)
    assert first.memory_limit_bytes == later.memory_limit_bytes
    assert max(first.total_bytes, later.total_bytes) <= first.memory_limit_bytes


def test_a_program_that_is_not_the_plans_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    planning(monkeypatch, SEQUENCES["all"])
    expanded = Lowering.expanded
    in_order = SEQUENCES["few"]
    monkeypatch.setattr(Lowering, "expanded", lambda self, _: expanded(self, in_order(self)))
    training = MAKERS["small"]()
    step = roam.compile(training.step, memory=1)
    with pytest.raises(roam.PlanError) as caught:
        step(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    assert caught.value.code == "self_check"
