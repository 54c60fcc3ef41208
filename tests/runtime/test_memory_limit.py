"""Steps in which operators run again have eager's bits, and keep within the limit that they were
planned for."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from limited import ran
from test_expand import MAKERS

import hard_limit
import roam
from newer import needs_2_15
from replays import all_again, at_random, planning
from roam import _core
from roam.memory_limit import MemoryLimit
from roam.program.lower import Lowering
from roam.runtime import available, strategy, timings
from roam.runtime.available import _STEPS, available_bytes, known_limit
from roam.runtime.pool import Pool
from steps import Recomputing, train
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


@pytest.mark.sweep
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
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True),
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


@pytest.mark.sweep
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


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")
def test_what_the_limits_of_the_process_leave_is_what_the_device_has() -> None:
    import resource

    device, limits = torch.device("cpu"), resource.getrlimit(resource.RLIMIT_DATA)
    room_bytes = 2**28
    resource.setrlimit(resource.RLIMIT_DATA, (hard_limit.held_bytes() + room_bytes, limits[1]))
    try:
        free_bytes = available_bytes(device, 0)
        may_search = strategy._may_search(device, 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert free_bytes is not None
    assert free_bytes <= room_bytes + Pool.of(device).nbytes
    assert not may_search
    assert strategy._may_search(device, 2**20)


def test_auto_is_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MemoryLimit.of("auto").is_auto
    held = available_bytes(torch.device("cpu"), 0)
    assert held is not None
    assert held > 2**20
    for size_bytes in (2**30 + 1, 2**30 + 2**20, 2**31 - 1):
        monkeypatch.setattr(available, "available_bytes", lambda *_, size=size_bytes: size)
        known = known_limit(MemoryLimit.of("auto"), torch.device("cpu"), 0).amount_bytes()
        assert size_bytes * (1 - 1 / _STEPS) <= known <= size_bytes
        assert known % (2**30 // _STEPS) == 0
    monkeypatch.undo()
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


@pytest.mark.sweep
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
    assert memory.extra_measured_s is not None
    assert memory.step_measured_s is not None
    assert 0 < memory.extra_measured_s < memory.step_measured_s
    assert "as measured" in str(memory)
    for runner in steps[0]._captures[0].runners:
        assert runner.memory.total_bytes <= limit_bytes
    assert "operators run again" in str(memory)


def accumulating() -> Training:
    """Gradients of two micro-batches, which are summed."""

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        for part, labels in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = functional.cross_entropy(model(part), labels) / 2
            loss.backward()
        optimizer.step()
        return loss

    made = deep()
    return Training(step, made.objects, made.batch)


def with_a_scaler() -> Training:
    """Autocast and a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(model, optimizer, scaler, x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    made = deep()
    return Training(step, (*made.objects, scaler), made.batch)


@pytest.mark.sweep
@pytest.mark.parametrize(("make", "share"), [(accumulating, "60%"), (with_a_scaler, "75%")])
def test_ordinary_loops_keep_within_a_share(make: Callable[[], Training], share: str) -> None:
    steps: list[roam.Step] = []

    def wrap(step: Any) -> Any:
        steps.append(roam.compile(step, memory=share))
        return steps[-1]

    planned, training = run(make, 5, wrap)
    assert_same_bits(run(make, 5)[0], planned)
    steps[0].measured(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    memory = steps[0].memory()
    assert memory.extra_runs > 0
    assert memory.measured_bytes is not None
    assert memory.limit_bytes is not None
    assert memory.measured_bytes <= memory.limit_bytes


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
            assert "exist before and after the step" in str(caught.value)
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


@pytest.mark.long
def test_a_gpt2_trains_in_a_third_of_its_memory() -> None:
    budget_bytes = hard_limit.eager_bytes(16) // 3
    steps: list[roam.Step] = []

    def compiled(step: Any) -> Any:
        steps.append(roam.compile(step, memory=budget_bytes))
        return steps[-1]

    # `benches/limited.py` trains for 100 steps, and on more samples.
    planned = hard_limit.losses(compiled(hard_limit.train_step), 16, 20)
    assert planned == hard_limit.losses(hard_limit.train_step, 16, 20)
    model, optimizer = hard_limit.built()
    for _ in range(2):  # the step that makes the optimizer's state, and a later one
        steps[0].measured(model, optimizer, hard_limit.batch(16, torch.Generator().manual_seed(1)))
        measured_bytes = steps[0].memory().measured_bytes
        assert measured_bytes is not None
        assert measured_bytes <= budget_bytes


@pytest.mark.skipif(
    sys.platform != "linux" or "ROAM_HARD_LIMIT" not in os.environ,
    reason="`make hard-limit` runs it: it takes minutes",
)
def test_the_system_may_give_no_more_than_the_budget() -> None:
    """Capture, trials of kernels, planning and the checked first run are inside of it."""
    budget_bytes = hard_limit.eager_bytes(512) // 3

    def told(*arguments: object) -> dict[str, Any]:
        run = ran(*arguments)
        assert run.returncode == 0, run.stderr[-2000:]
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return found

    eager, planned = told("eager", 512, 2), told("limited", 512, 2, budget_bytes)
    assert planned["losses"] == eager["losses"]
    assert planned["extra_runs"] > 0
    assert planned["planned_bytes"] <= budget_bytes


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "pool"), [*product(["small", "gpt2", "resnet18"], [True, None])])
def test_all_that_the_plan_without_recomputation_takes_is_enough(
    name: str, pool: bool | None
) -> None:
    torch.manual_seed(0)
    training = MAKERS[name]()
    step = roam.compile(training.step, memory="100%", pool=pool)
    step.plan(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    choices = [runner.choice for runner in step._captures[0].runners]
    assert all(choice.recomputation is None for choice in choices)
    assert {choice.memory_limit_bytes for choice in choices} == {
        max(choice.total_bytes + choice.checks_bytes for choice in choices)
    }


class Preparing(torch.optim.SGD):
    """Makes much of little at its first step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if "scale" not in self.state[p]:
                    table = torch.full((400, 400), 0.5)
                    self.state[p]["scale"] = (table @ table).mean()
                with torch.no_grad():
                    p.sub_(p.grad * self.state[p]["scale"], alpha=1e-4)


def test_a_budget_that_only_the_first_step_breaks_is_refused() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = Preparing(model.parameters())

    def train_step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    before = tensors_and_numbers(model.state_dict())
    step = roam.compile(train_step, memory="1MB")
    for _ in range(2):
        with pytest.raises(roam.PlanError) as caught:
            step(model, optimizer, torch.randn(2, 4))
        assert caught.value.code == "memory_floor"
        assert "mm" in (caught.value.operator or "")
    assert not optimizer.state
    assert_same_bits(before, tensors_and_numbers(model.state_dict()))
    # Its state is there by then, and the same budget is enough.
    train_step(model, optimizer, torch.randn(2, 4))
    step(model, optimizer, torch.randn(2, 4))
    assert step.memory().total_bytes < 10**6


def test_an_interrupted_search_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    optimize, interrupted = strategy._core.optimize, list[int]()

    class Interrupting:
        def __getattr__(self, name: str) -> Any:
            return getattr(_core, name)

        def optimize(self, graph: Any, *args: Any, **settings: Any) -> Any:
            if settings.get("memory_limit_bytes") is not None and not interrupted:
                interrupted.append(1)
                timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
                timer.start()
                try:
                    return optimize(graph, *args, **settings)
                finally:
                    timer.join()
                    time.sleep(0)  # the handler runs here, if the search was done before
            return optimize(graph, *args, **settings)

    monkeypatch.setattr(strategy, "_core", Interrupting())
    # Small, and of a size that no other test has a plan of: its search takes a second, not ten.
    monkeypatch.setattr(hard_limit, "LAYERS", 1)
    budget_bytes = int(hard_limit.eager_bytes(12) / 1.6)
    model, optimizer = hard_limit.built()
    batch = hard_limit.batch(12, torch.Generator().manual_seed(1))
    before = tensors_and_numbers([model.state_dict(), torch.get_rng_state()])
    step = roam.compile(hard_limit.train_step, memory=budget_bytes)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, batch)
    assert_same_bits(before, tensors_and_numbers([model.state_dict(), torch.get_rng_state()]))
    assert not optimizer.state
    losses = [step(model, optimizer, batch) for _ in range(2)]
    assert step.memory().extra_runs > 0
    model, optimizer = hard_limit.built()
    assert_same_bits(losses, [hard_limit.train_step(model, optimizer, batch) for _ in range(2)])


@pytest.mark.long
def test_steps_of_one_pool_have_budgets_of_their_own() -> None:
    torch.manual_seed(0)
    budgets = [local_share(0.9), local_share(0.7)]
    trainings = [deep() for _ in budgets]
    steps = [
        roam.compile(training.step, memory=budget, pool=True)
        for training, budget in zip(trainings, budgets, strict=True)
    ]
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for step, training, budget in zip(steps, trainings, budgets, strict=True):
            step.measured(*training.objects, *training.batch(generator))
            memory = step.memory()
            assert memory.uses_pool
            assert memory.measured_bytes is not None
            assert memory.measured_bytes <= budget


def test_what_happens_between_steps_changes_nothing() -> None:
    """Evaluation, checkpoints that are taken and loaded, and eager steps."""

    def outcome(compile: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        training = deep()
        model, optimizer = training.objects
        generator = torch.Generator().manual_seed(2)
        step, found = compile(training.step), list[Any]()
        saved: Any = None
        for index in range(9):
            x, y = training.batch(generator)
            if index == 4:
                with roam.disabled():
                    found.append(step(model, optimizer, x, y))
                continue
            found.append(step(model, optimizer, x, y))
            if index == 2:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if index == 6:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            if index in (1, 5):
                with torch.no_grad():
                    found.append(model.eval()(x))
                model.train()
        if hasattr(step, "measured"):
            step.measured(*training.objects, *training.batch(generator))
            memory = step.memory()
            assert memory.extra_runs > 0
            assert memory.measured_bytes is not None
            assert memory.limit_bytes is not None
            assert memory.measured_bytes <= memory.limit_bytes
        else:
            step(*training.objects, *training.batch(generator))
        return tensors_and_numbers([found, model.state_dict(), optimizer.state_dict()])

    limited = functools.partial(roam.compile, memory=local_share(0.75))
    assert_same_bits(outcome(lambda step: step), outcome(limited))


def test_a_switched_off_step_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    training = deep()
    batch = training.batch(torch.Generator().manual_seed(2))
    step = roam.compile(training.step, memory=1)
    with roam.disabled():
        step(*training.objects, *batch)
    monkeypatch.setenv("ROAM_DISABLE", "1")
    step(*training.objects, *batch)
    assert not step.plans


@pytest.mark.auto
@needs_2_15
def test_each_way_of_a_branch_on_values_keeps_to_the_budget() -> None:
    torch.manual_seed(0)
    training = deep()

    def train_step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        if loss > 1.0:
            loss = loss * 0.5
        optimizer.step()
        return loss

    step = roam.compile(train_step, memory=local_share(0.9))
    for scale in (*[100.0] * 4, *[0.0] * 4):
        x, y = training.batch(torch.Generator().manual_seed(2))
        step(*training.objects, x * scale, y)
    for scale in (100.0, 0.0):
        x, y = training.batch(torch.Generator().manual_seed(2))
        for _ in range(10):  # some are recorded, since the first leaves the plan
            step(*training.objects, x * scale, y)
        step.measured(*training.objects, x * scale, y)
        memory = step.memory()
        assert memory.measured_bytes is not None
        assert memory.measured_bytes <= local_share(0.9)
    assert step.runs_beside


def test_the_time_of_extra_runs_is_theirs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    planning(monkeypatch, SEQUENCES["few"])
    training = MAKERS["small"]()
    batch = training.batch(torch.Generator().manual_seed(2))
    step = roam.compile(training.step, pool=False, memory=1)
    step.measured(*training.objects, *batch)
    assert step.memory().extra_measured_s is None  # a first run, which checks every call
    step(*training.objects, *batch)
    *_, runner = (one for one in step._captures[0].runners if one._executor.generated is not None)
    again = runner.choice.recomputation
    assert again is not None
    calls, seconds = runner.choice.program.calls, 0.01
    # Each look at the clock finds it a hundredth of a second later.
    clock = iter(range(10**9))
    monkeypatch.setattr(timings.time, "perf_counter", lambda: next(clock) * seconds)
    step.measured(*training.objects, *batch)
    memory = step.memory()
    assert memory.extra_measured_s == pytest.approx(len(again.calls) * seconds)
    assert memory.step_measured_s == pytest.approx((len(calls) - len(again.calls) - 1) * seconds)


def test_a_step_without_operators_is_refused_like_any_other() -> None:
    """An update whose gradients another function makes: by its own code, the next one has none."""
    model = torch.nn.Linear(6, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    model(torch.ones(8, 6)).sum().backward()
    before = copy.deepcopy(tensors_and_numbers(model.state_dict()))
    with pytest.raises(roam.PlanError, match="runs no operators") as caught:
        roam.compile(update, memory="1%")()
    assert caught.value.code == "memory_floor"
    assert_same_bits(before, tensors_and_numbers(model.state_dict()))
    roam.compile(update, memory="1MiB")()
    assert not torch.equal(before[0], model.weight)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_refusal_names_a_budget_that_is_enough_for_every_step() -> None:
    """The first step needs more than the later ones here, and more than the floor."""

    def run(memory: Any) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            tangents = torch.randn(3, *x.shape)
            slopes = torch.func.vmap(lambda v: (torch.func.jvp(model, (x,), (v,))[1] * v).sum(-1))
            loss = (slopes(tangents).mean(0) + 0.5 * model(x).square().sum(1)).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        roam.compile(step, memory=memory)(torch.randn(128, 16))

    with pytest.raises(roam.PlanError) as refused:
        run("60%")
    assert refused.value.code == "memory_floor"
    enough = re.search(
        r"enough for every step that runs as this one does, .* is memory=(\d+)$", str(refused.value)
    )
    assert enough is not None, refused.value
    assert refused.value.least_bytes == int(enough[1])
    run(int(enough[1]))
