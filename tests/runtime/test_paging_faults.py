"""What becomes of a step with tensors in files where copies take any time, fail, or are cut short,
and where its process is killed: eager's bits, or a typed error, and a run that goes on from the
last saved state with eager's bits."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import killed_paging
import roam
from paged_training import STEPS, batch, bits, clipped, load, paged, perceptron, trained
from roam.program import copies
from training import assert_same_bits

Copy = Callable[..., int]


@pytest.mark.sweep
@pytest.mark.parametrize("name", STEPS)
def test_copies_may_take_any_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, options = STEPS[name]
    step, made = paged(tmp_path, function, poison=True, pool=True), perceptron(**options)
    pauses = random.Random(name)
    paused: list[float] = []

    def pause() -> None:
        paused.append(pauses.choice((0.0, 0.0, 0.0, 1e-3, 5e-3)))
        time.sleep(paused[-1])

    monkeypatch.setattr(copies, "pause", pause)
    expected = trained(function, perceptron(**options))
    assert_same_bits(expected, trained(step, made))
    assert any(paused)
    assert "moving them beside other operators" in dict(step.memory().totals)


@pytest.mark.long
def test_a_thousand_steps_with_poison_and_copies_of_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "pause", lambda: time.sleep(random.choice((0.0, 0.0, 1e-4))))
    step = paged(tmp_path, poison=True, pool=True)
    assert_same_bits(trained(clipped, perceptron(), 1000), trained(step, perceptron(), 1000))


def failing(known: Copy, at: int, code: int) -> Copy:
    """Fails from its call of this number on."""
    numbers = itertools.count(1)

    def copied(*args: Any) -> int:
        if next(numbers) >= at:
            raise OSError(code, os.strerror(code))
        return known(*args)

    return copied


def error_of(step: Any, made: tuple[Any, Any]) -> roam.ExecutionError | None:
    try:
        step(*made, *batch(torch.Generator()))
    except roam.ExecutionError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("name", "code"), [("pwrite", errno.ENOSPC), ("pwrite", errno.EIO), ("preadv", errno.EIO)]
)
def test_any_copy_of_a_step_may_fail(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, step, eager = perceptron(), paged(tmp_path), perceptron()
    trained(step, made, 2)
    trained(clipped, eager, 2)
    codes = []
    for at in itertools.count(1):
        before = bits(*made)
        saved = copy.deepcopy([one.state_dict() for one in made])
        with monkeypatch.context() as patched:
            patched.setattr(os, name, failing(getattr(os, name), at, code))
            error = error_of(step, made)
        if error is None:
            break
        assert os.strerror(code) in str(error)
        codes.append(error.code)
        if codes[-1] == "torn":
            load(made, saved)
        else:
            assert_same_bits(before, bits(*made))
        if at % 8 == 1:
            assert_same_bits(trained(clipped, eager, 1), trained(step, made, 1))
    assert len(codes) > 10
    assert {"torn"} <= set(codes) <= {"offload_room", "failed", "torn"}
    clipped(*eager, *batch(torch.Generator()))
    assert_same_bits(trained(clipped, eager, 2), trained(step, made, 2))


@pytest.mark.parametrize("name", ["pwrite", "preadv", "posix_fallocate"])
def test_the_first_call_may_fail_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are moved then, and there is no state yet."""
    codes = []
    for at in (1, 8, 55):
        made, step = perceptron(), paged(tmp_path)
        before, saved = bits(*made), copy.deepcopy([one.state_dict() for one in made])
        with monkeypatch.context() as patched:
            patched.setattr(os, name, failing(getattr(os, name), at, errno.ENOSPC))
            error = error_of(step, made)
        if error is None:
            continue
        codes.append(error.code)
        if codes[-1] == "torn":
            load(made, saved)
        else:
            assert_same_bits(before, bits(*made))
        assert_same_bits(trained(clipped, perceptron(), 2), trained(step, made, 2))
    assert codes
    assert set(codes) <= {"offload_room", "failed", "torn"}


@pytest.mark.parametrize("share", [0.5, 0.01])
def test_a_copy_may_be_cut_short(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may copy less than it was asked for."""
    pwrite, preadv = os.pwrite, os.preadv

    def part(given: Any) -> Any:
        return given[: max(int(len(given) * share), 1)]

    monkeypatch.setattr(os, "pwrite", lambda file, given, at: pwrite(file, part(given), at))
    monkeypatch.setattr(os, "preadv", lambda file, given, at: preadv(file, [part(given[0])], at))
    step = paged(tmp_path)
    assert_same_bits(trained(clipped, perceptron()), trained(step, perceptron()))


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_a_copy_of_nothing_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, step = perceptron(), paged(tmp_path)
    trained(step, made, 2)
    monkeypatch.setattr(os, name, lambda *_: 0)
    with pytest.raises(roam.ExecutionError) as refused:
        step(*made, *batch(torch.Generator()))
    assert refused.value.code in ("failed", "torn")


def test_a_disk_that_fails_to_read_keeps_tensors_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, step = perceptron(), paged(tmp_path)
    trained(step, made, 2)
    before = bits(*made)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing(os.preadv, 1, errno.EIO))
        with pytest.raises(roam.ExecutionError, match="cannot be read") as refused:
            step.release()
    assert refused.value.code == "failed"
    assert_same_bits(before, bits(*made))
    step.release()
    assert_same_bits(before, bits(*made))


def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parents[1] / "killed_paging.py"
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def eager(steps: int) -> list[torch.Tensor]:
    made = perceptron()
    for number in range(steps):
        killed_paging.trained_one(clipped, made, number)
    return bits(*made)


def left_in(path: Path) -> list[torch.Tensor]:
    made = perceptron()
    load(made, torch.load(path)[1])
    return bits(*made)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="it forks beside threads")
def test_a_process_may_be_killed_amid_each_copy(tmp_path: Path) -> None:
    """Its forked copies are, and leave nothing behind and what it has as it is."""
    (tmp_path / "tier").mkdir()
    run = ran("forked", tmp_path, 5)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 20
    assert_same_bits(eager(5), left_in(tmp_path / "end.pt"))


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    for at in (90, 10, 150, 230):
        assert ran("train", tmp_path, 8, at).returncode == -signal.SIGKILL
        assert not list((tmp_path / "tier").iterdir())
    run = ran("train", tmp_path, 8, 0)
    assert run.returncode == 0, run.stderr
    assert_same_bits(eager(8), left_in(tmp_path / "checkpoint.pt"))
