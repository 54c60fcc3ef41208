"""Steps that keep parameters, state and gradients in files have eager's bits, keep within a limit
below what is persistent, and leave the user's objects true."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roam
from paged_training import (
    STEPS,
    WIDTH,
    batch,
    bits,
    clipped,
    limit,
    load,
    paged,
    perceptron,
    persistent_bytes,
    trained,
)  # fmt: skip
from roam.program import paging
from roam.program.chunks import Folder
from roam.program.pages import Pages, is_movable, is_paged
from roam.runtime import available, strategy
from training import assert_same_bits


@pytest.mark.sweep
@pytest.mark.parametrize("name", STEPS)
def test_a_step_keeps_within_a_third_of_its_parameters_and_state(name: str, tmp_path: Path) -> None:
    function, options = STEPS[name]
    made, step = perceptron(**options), paged(tmp_path, function)
    assert_same_bits(trained(function, perceptron(**options)), trained(step, made))
    step.measured(*made, *batch(torch.Generator()))
    memory = step.memory()
    assert memory.measured_bytes is not None
    assert memory.measured_bytes <= memory.total_bytes <= limit()
    assert memory.run_bytes <= limit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", STEPS)
def test_poison_in_a_pool_finds_nothing(name: str, tmp_path: Path) -> None:
    function, options = STEPS[name]
    step = paged(tmp_path, function, poison=True, pool=True)
    expected = trained(function, perceptron(**options))
    assert_same_bits(expected, trained(step, perceptron(**options)))


def test_a_first_step_that_makes_more_than_there_was(tmp_path: Path) -> None:
    """Parameters are less than half of the limit, and with their state more than it."""
    made = perceptron(foreach=False)
    held_bytes = sum(one.nbytes for one in made[0].parameters())
    step = paged(tmp_path, memory=(23 * held_bytes) // 10)
    assert_same_bits(trained(clipped, perceptron(foreach=False)), trained(step, made))
    assert step.memory().total_bytes < persistent_bytes(*made)


def averaged(model: Any, average: Any) -> None:
    with torch.no_grad():
        for one, other in zip(average.parameters(), model.parameters(), strict=True):
            one.lerp_(other, 0.1)


def test_what_the_machine_has_free_is_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the parameters is free beside them, and their state is twice as large; what lies in
    files is no memory that the step holds."""
    model = perceptron()[0]
    free = sum(one.nbytes for one in model.parameters()) // 2
    monkeypatch.setattr(available, "_free_in_groups", lambda: iter(()))
    monkeypatch.setattr(available, "_free_in_system", lambda: iter((free,)))
    made, step = perceptron(), paged(tmp_path, memory="auto")
    assert_same_bits(trained(clipped, perceptron()), trained(step, made))
    assert step.memory().run_bytes <= 3 * free + 4 * 4 * (WIDTH + 2)
    other = paged(tmp_path, memory="auto")
    with contextlib.suppress(roam.PlanError):  # there may be no plan that takes so little
        trained(other, made, 1)
        assert other.memory().limit_bytes <= free + step.memory().persistent_bytes


def test_copies_delay_a_step_that_uses_all_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extra_s(taken: float) -> float:
        monkeypatch.setattr(strategy, "taken_share", lambda device: taken)
        step = paged(tmp_path)
        trained(step, perceptron(), 2)
        return step.memory().extra_s

    beside, shared, waiting = extra_s(0.0), extra_s(0.5), extra_s(1.0)
    assert beside < shared < waiting


def test_a_fit_tells_what_moves_to_files(tmp_path: Path) -> None:
    def inputs(size: int) -> tuple[Any, ...]:
        return (*perceptron(foreach=False), *batch(torch.Generator(), 4 * size))

    without = roam.fit(clipped, inputs, memory=limit(), most=2, recompute=True)
    assert without.size == 0
    found = roam.fit(clipped, inputs, memory=limit(), most=2, offload=tmp_path)
    assert found.size >= 1
    traffic = found.trials[0].traffic
    assert traffic is not None
    assert traffic.read_bytes > traffic.written_bytes > 0
    assert traffic.extra_s > 0
    assert f"files in {tmp_path}" in str(found)


def test_everyone_sees_current_values_between_steps(tmp_path: Path) -> None:
    """State dictionaries, files, evaluation, averages, detached tensors and writes of one's own."""

    def run(step: Any) -> list[torch.Tensor]:
        made = perceptron()
        average = copy.deepcopy(made[0])

        def between(model: Any, optimizer: Any) -> list[torch.Tensor]:
            averaged(model, average)
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
            loaded = torch.load(file)
            with torch.no_grad():
                evaluated = model(torch.ones(2, WIDTH))
                model[0].weight.mul_(0.9)
            detached = model[0].weight.detach()
            held.append(detached)
            found = [
                *loaded[0].values(), loaded[1]["state"][0]["exp_avg"], evaluated, detached.clone(),
                *(one.detach().clone() for one in average.parameters()),
            ]  # fmt: skip
            assert all(torch.equal(one, detached) for one in held)
            return found

        held: list[torch.Tensor] = []
        return trained(step, made, between=between)

    assert_same_bits(run(clipped), run(paged(tmp_path)))


def test_parameters_and_state_lie_in_files_between_steps(tmp_path: Path) -> None:
    made = perceptron()
    identities = list(map(id, made[0].parameters()))
    trained(paged(tmp_path), made, 2)
    assert list(map(id, made[0].parameters())) == identities
    assert sum(are_paged(made)) > 0.6 * len(are_paged(made))


def test_what_a_plan_has_in_memory_lies_in_no_file(tmp_path: Path) -> None:
    """The system would write it to the disk beside the step, and it would take no memory there."""
    made = perceptron()
    step = paged(tmp_path, memory=2 * persistent_bytes(*made))
    trained(step, made, 3)
    state = [one for some in made[1].state.values() for one in some.values()]
    there = [one for one in (*made[0].parameters(), *state) if not is_paged(one)]
    assert any(are_paged(made))
    assert sum(one.nbytes for one in there) >= step.memory().persistent_bytes - 2**12


def test_a_report_shows_what_is_moved_by_phase_and_kind(tmp_path: Path) -> None:
    step = paged(tmp_path)
    trained(step, perceptron(), 2)
    step.report(tmp_path / "report.html")
    assert "What is moved to files and back" in (tmp_path / "report.html").read_text()
    traffic, memory = step._anatomy().traffic, step.memory()
    for place, moved in ((2, memory.read_bytes), (3, memory.written_bytes)):
        by_kind: dict[str, int] = {}
        for one in traffic:
            by_kind[one[1]] = by_kind.get(one[1], 0) + one[place]
        assert {kind: size for kind, size in by_kind.items() if size} == moved
    assert {one[0] for one in traffic} >= {"forward", "update"}


def are_paged(made: tuple[Any, Any]) -> list[bool]:
    """Of each tensor that is large enough, whether it lies in a file."""
    large = [one for one in made[0].parameters() if one.nbytes >= paging.LEAST_BYTES]
    state = [made[1].state[one][name] for one in large for name in ("exp_avg", "exp_avg_sq")]
    return [is_paged(one) for one in (*large, *state, *(one.grad for one in large if one.grad is not None))]  # fmt: skip


@pytest.mark.parametrize("leave", ["release", "disabled"])
def test_leaving_brings_tensors_back_to_memory(leave: str, tmp_path: Path) -> None:
    made, eager, step = perceptron(), perceptron(), paged(tmp_path)
    trained(clipped, eager, 2)
    trained(step, made, 2)
    assert any(are_paged(made))
    before = bits(*made)
    if leave == "release":
        step.release()
        assert_same_bits(before, bits(*made))
    else:
        with roam.disabled():
            assert_same_bits(trained(clipped, eager, 1), trained(step, made, 1))
    assert not any(are_paged(made))
    assert_same_bits(trained(clipped, eager, 2), trained(step, made, 2))
    assert any(are_paged(made))


def test_a_tensor_that_another_looks_at_stays_in_its_file(tmp_path: Path) -> None:
    made, step = perceptron(), paged(tmp_path)
    trained(step, made, 2)
    held = [one.detach() for one in made[0].parameters()]
    step.release()
    trained(step, made, 1)
    assert_same_bits([one.detach() for one in made[0].parameters()], held)


def accumulating(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two batches a step."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = nn.functional.cross_entropy(model(part), target) / 2
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return total


def test_no_weight_changes_before_its_last_use(tmp_path: Path) -> None:
    """Where weights are read from files for each pass, a plan may update one before the backward
    pass has used what was read; where it then stays in memory, it may not."""

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        pairs = ((nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        model = nn.Sequential(*(layer for layers in pairs for layer in layers))
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    def train_step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def run(step: Any) -> list[torch.Tensor]:
        training, generator = made(), torch.Generator().manual_seed(1)
        losses = [step(*training, torch.randn(32, 64, generator=generator)) for _ in range(3)]
        return [*losses, *bits(*training)]

    limit_bytes = 3 * sum(one.nbytes for one in made()[0].parameters()) // 2
    assert_same_bits(run(train_step), run(paged(tmp_path, train_step, memory=limit_bytes)))


def many_samples(step: Any) -> list[torch.Tensor]:
    """So many that activations take several times what parameters do."""
    made, generator = perceptron(), torch.Generator().manual_seed(1)
    losses = [step(*made, *batch(generator, 64)).clone() for _ in range(4)]
    return [*losses, *bits(*made)]


@pytest.mark.parametrize("share", [1.3, 2.2])
def test_activations_move_where_files_of_parameters_are_not_enough(
    share: float, tmp_path: Path
) -> None:
    step = paged(tmp_path, memory=int(share * limit()))
    assert_same_bits(many_samples(clipped), many_samples(step))
    memory = step.memory()
    assert memory.extra_runs + memory.offloaded_tensors > 0
    assert memory.read_bytes


def test_what_has_room_stays_in_memory_where_operators_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less is moved then than where all that can lies in files."""
    monkeypatch.setattr(strategy, "offerings", lambda *_: iter(()))
    monkeypatch.setattr(strategy._Paging, "overlapped", lambda self, choice, _: choice)
    expected = many_samples(clipped)

    def moved_bytes() -> int:
        step = paged(tmp_path, memory=int(2.2 * limit()))
        assert_same_bits(expected, many_samples(step))
        memory = step.memory()
        assert memory.extra_runs > 0
        assert memory.run_bytes <= 2.2 * limit()
        return sum((*memory.read_bytes.values(), *memory.written_bytes.values()))

    fewer = moved_bytes()
    monkeypatch.setattr(strategy._Chooser, "_resident_again", lambda *_: None)
    assert fewer < moved_bytes()


def test_batches_are_accumulated_in_a_step(tmp_path: Path) -> None:
    step = paged(tmp_path, accumulating, memory=int(1.2 * limit()))
    assert_same_bits(trained(accumulating, perceptron()), trained(step, perceptron()))


def test_batches_are_accumulated_over_steps(tmp_path: Path) -> None:
    """Gradients lie in files too, between the calls that add to them."""

    def run(wrap: Callable[..., Any]) -> tuple[list[torch.Tensor], list[Any]]:
        model, optimizer = perceptron()

        def backward(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        def update(model: Any, optimizer: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

        steps = wrap(backward), wrap(update)
        generator, found = torch.Generator().manual_seed(1), []
        for number in range(6):
            found.append(steps[0](model, *batch(generator)).clone())
            found += [one.grad.clone() for one in model.parameters()]
            if number % 2:
                steps[1](model, optimizer)
        return [*found, *bits(model, optimizer)], list(steps)

    planned, steps = run(lambda step: paged(tmp_path, step))
    assert_same_bits(run(lambda step: step)[0], planned)
    assert all(step.memory().total_bytes <= limit() for step in steps)


def test_a_schedule_and_a_resumed_run(tmp_path: Path) -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        made = perceptron()
        found: list[torch.Tensor] = []
        for _ in range(2):
            schedule = torch.optim.lr_scheduler.StepLR(made[1], 1, 0.5)
            step = paged(tmp_path) if compiled else clipped

            def stepped(*args: Any, step: Any = step, schedule: Any = schedule) -> Any:
                loss = step(*args)
                schedule.step()
                return loss

            found += trained(stepped, made, 3)
            file = io.BytesIO()
            torch.save([one.state_dict() for one in made], file)
            file.seek(0)
            made = perceptron()
            load(made, torch.load(file))
        return found

    assert_same_bits(run(False), run(True))


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.base(x) + self.up(self.down(x)))


def adapted() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(8)), nn.Linear(WIDTH, 3))
    return model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])


def test_frozen_weights_are_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = persistent_bytes(*adapted()) // 2
    made, step = adapted(), paged(tmp_path, memory=budget)
    assert_same_bits(trained(clipped, adapted()), trained(step, made))
    written: list[int] = []
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: written.append(1) or pwrite(*args))
    step(*made, *batch(torch.Generator()))
    memory = step.memory()
    assert not written
    assert memory.read_bytes["parameter"] > 0
    assert not memory.written_bytes


def test_memory_that_others_have_is_not_moved(tmp_path: Path) -> None:
    made, eager = perceptron(), perceptron()
    held = [one.detach() for one in made[0].parameters()]
    with pytest.raises(roam.PlanError) as refused:
        trained(paged(tmp_path), made, 1)
    assert refused.value.code.startswith("memory_")
    del held
    step = paged(tmp_path)
    assert_same_bits(trained(clipped, eager), trained(step, made))
    held = [one.detach() for one in made[0].parameters()]
    trained(step, made, 1)
    assert_same_bits([one.detach() for one in made[0].parameters()], held)


def test_a_tensor_that_gets_other_memory_is_moved_again(tmp_path: Path) -> None:
    made, step = perceptron(), paged(tmp_path)
    trained(step, made, 2)
    weight = made[0][0].weight
    weight.data = weight.data.clone()
    held = weight.detach()
    before = bits(*made)
    with pytest.raises(roam.ExecutionError, match=r"0\]\.weight is to lie") as refused:
        trained(step, made, 1)
    assert refused.value.code == "offload_shared"
    assert_same_bits(before, bits(*made))
    del held
    trained(step, made, 1)
    assert is_paged(weight)


def test_a_graph_from_before_a_step_knows_that_parameters_have_changed(tmp_path: Path) -> None:
    made, step = perceptron(), paged(tmp_path)
    trained(step, made, 2)
    loss = made[0](torch.ones(2, WIDTH)).sum()
    trained(step, made, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_files_are_gone_with_their_tensors(tmp_path: Path) -> None:
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    made, step = perceptron(), paged(tmp_path)
    trained(step, made, 3)
    assert len(os.listdir("/proc/self/fd")) > descriptors
    del made, step
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_forked_process_changes_nothing_of_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, step = perceptron(), paged(tmp_path)
    trained(step, made, 2)
    parents = [one.detach() for one in made[0].parameters()]
    before = [one.clone() for one in parents]
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    del parents
    kept = Pages(Folder(tmp_path))
    weight = made[0][0].weight
    assert is_movable(weight)
    assert not is_paged(weight)
    kept.take_in([("weight", weight)])
    assert is_paged(weight)
    assert_same_bits(before[:1], [weight.detach()])


@pytest.mark.skipif(
    sys.platform != "linux" or "ROAM_HARD_LIMIT" not in os.environ,
    reason="`make hard-limit` runs it: it takes minutes",
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_system_may_give_a_third_of_parameters_and_state(name: str, tmp_path: Path) -> None:
    """One process trains ten steps and saves, and another one resumes."""

    def ran(how: str, first: int, last: int, *more: str) -> subprocess.CompletedProcess[str]:
        script = Path(__file__).parents[1] / "hard_paging.py"
        settings = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}
        return subprocess.run(
            [sys.executable, script, how, name, tmp_path, str(first), str(last), *more],
            env=os.environ | settings, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def told(*arguments: Any) -> dict[str, Any]:
        run = ran(*arguments)
        assert run.returncode == 0, run.stderr[-2000:]
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return found

    eager = told("eager", 0, 20)
    begun, resumed = told("paged", 0, 10, "limited"), told("paged", 10, 20, "limited")
    assert begun["losses"] + resumed["losses"] == eager["losses"]
    assert resumed["digest"] == eager["digest"]
    for one in (begun, resumed):
        assert one["measured_bytes"] <= one["planned_bytes"] <= one["budget_bytes"]
        assert 3 * one["budget_bytes"] <= one["persistent_bytes"]
    assert "can't allocate memory" in ran("eager", 0, 1, "limited").stderr
