"""The bench that trains in several ways, on a model small enough for a test."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "benches" / "training.py"
TINY = (
    "--device", "cpu", "--threads", "1", "--models", "gpt2-tiny", "--dtypes", "float32",
    "--batch", "2", "--seq", "16", "--timed-s", "0",
)  # fmt: skip


def bench(folder: Path, *options: str) -> dict[str, Any]:
    """The report of one run, with its exit code and what it printed."""
    output = folder / "report.json"
    environment = dict(
        os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=os.pathsep.join(filter(None, sys.path))
    )
    command = [sys.executable, str(BENCH), "--output", str(output), "--commit", "abc", *options]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    report: dict[str, Any] = json.loads(output.read_text())
    return report | {"exit": finished.returncode, "printed": finished.stdout}


@pytest.fixture
def training() -> Any:
    """The bench as a module; the tests have one of its name."""
    spec = importlib.util.spec_from_file_location("training_bench", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_part_for_a_gpu_asks_for_what_there_is(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = runpy.run_path(str(BENCH.with_name("gpu.py")))
    asked = []

    def run(command: list[str], log: Path, **_: str) -> str:
        asked.append((command[1:], log))
        return "exit code 0"

    for name, part in parts["PARTS"].items():
        if name != "estimates":
            monkeypatch.setitem(part.__globals__, "run", run)
            assert part(tmp_path, False) == "exit code 0"
    commands = [command[1:] for command, _ in asked if command[0] == str(BENCH)]
    assert len(commands) == len(parts["PARTS"]) - 2
    for options in commands:
        found = training.wanted(training.parse(options), {})
        assert {row["way"] for row in found} >= {"eager", "roam"}
        assert len({log for _, log in asked}) == len(asked)


def rows(training: Any, *options: str) -> list[dict[str, Any]]:
    """What the bench finds out, without a look at the machine."""
    arguments = training.parse([*TINY, *options])
    return list(training.run_all(training.wanted(arguments, {}), arguments))


@pytest.mark.long
def test_ours_and_eager_side_by_side(tmp_path: Path) -> None:
    report = bench(tmp_path, *TINY, "--ways", "eager", "roam")
    assert (report["exit"], report["status"], report["wrong"], report["commit"]) == (
        0,
        "done",
        [],
        "abc",
    )
    assert {
        "date",
        "torch",
        "cuda",
        "python",
        "roam",
        "device",
        "command",
        "threads",
    } <= report.keys()
    assert [(row["way"], row["status"]) for row in report["rows"]] == [
        ("eager", "ok"),
        ("roam", "ok"),
    ]
    eager, ours = report["rows"]
    assert len(eager["losses"]) == 5
    assert eager["losses"][-1] < eager["losses"][0]
    assert ours["losses"] == eager["losses"]
    assert (ours["bits"], ours["largest_difference"]) == ("equal", 0)
    for row in report["rows"]:
        assert row["memory"]["unseen_freed_bytes"] == 0
        assert row["memory"]["start_bytes"] < row["memory"]["allocated_bytes"]
        assert row["memory_first"]["allocated_bytes"] > 0
    assert (
        ours["measured_share_of_planned"]
        == ours["memory"]["allocated_bytes"] / ours["planned_bytes"]
    )
    assert ours["measured_share_of_planned"] == pytest.approx(1, rel=0.01)
    totals = ours["shares"]
    in_turn = [
        totals[name]
        for name in ("program_order", "planned_order", "planned_order_and_reuse", "joined_calls")
    ]
    assert in_turn == sorted(in_turn, reverse=True)
    assert totals["what_runs"] == ours["planned_bytes"]
    assert ours["speed"]["timed_steps"] == ours["speed"]["beside_eager"]["timed_steps"] >= 5
    assert ours["speed"]["speed_of_eager"] > 0
    assert "gpt2-tiny, float32, foreach=False, batch 2, seq 16" in report["printed"]


def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path) -> None:
    report = bench(tmp_path)
    assert (report["exit"], report["status"], report["rows"]) == (0, "skipped", [])
    assert "no CUDA device" in report["printed"]


@pytest.mark.long
def test_what_roam_refuses_is_a_row_that_says_so(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text(f"""
import functools, runpy, sys, torch
torch.optim.AdamW = functools.partial(torch.optim.AdamW, differentiable=True)
sys.path.insert(0, {str(BENCH.parent)!r})
runpy.run_path({str(training.CHILD)!r}, run_name="__main__")
""")
    monkeypatch.setattr(training, "CHILD", child)
    (row,) = rows(training, "--ways", "roam")
    assert row["status"].startswith("refused: ")
    assert "differentiable" in row["status"]
    assert training.judge([row]) == []


@pytest.mark.parametrize(
    ("source", "status", "is_wrong"),
    [
        ("import os; os.kill(os.getpid(), 9)", "died: signal 9, import", True),
        ("import sys; sys.exit('no memory')", "died: exit code 1, import: no memory", True),
        ("import time; time.sleep(60)", "timed out: after 2 s, import", False),
        (
            """import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('{"status": "ok", "phase": "done"}')""",
            "ok",
            False,
        ),
    ],
)
def test_a_process_that_ends_badly_is_not_the_end(
    source: str,
    status: str,
    is_wrong: bool,
    training: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = tmp_path / "child.py"
    child.write_text(source)
    monkeypatch.setattr(training, "CHILD", child)
    found = rows(training, "--ways", "roam", "roam-pool", "--limit", "2")
    assert [row["status"] for row in found] == [status] * 2
    assert len(training.judge(found)) == 2 * is_wrong
    assert status in training.table(found)


def test_what_does_not_fit_into_the_time_is_listed(training: Any) -> None:
    found = rows(training, "--minutes", "0")
    assert {row["way"] for row in found} == set(training.WAYS) - set(training.ON_CUDA)
    assert {row["status"] for row in found} == {"not run: 0 s were left"}
    assert training.judge(found) == []


def test_what_tells_most_comes_first(training: Any) -> None:
    arguments = training.parse([])
    found = training.wanted(arguments, {"device_bytes": 80 * 2**30})
    first = [(row["model"], row["dtype"], row["optimizer"], row["way"]) for row in found[:3]]
    assert first == [
        ("gpt2", "float32", "foreach=False", way) for way in ("eager", "eager-again", "roam")
    ]
    assert {(row["optimizer"], row["way"]) for row in found[:12]} >= {
        ("default", "roam"),
        ("fused", "roam"),
    }
    small = training.wanted(arguments, {"device_bytes": 16 * 2**30})
    assert {row["model"] for row in small if row["status"].startswith("skipped")} == {
        "gpt2-xl",
        "gpt2-large",
    }


@pytest.mark.parametrize(("again", "wrong"), [("equal", 1), ("differ", 0)])
def test_other_bits_are_wrong_where_eager_keeps_its_own(
    again: str, wrong: int, training: Any
) -> None:
    names = {
        "model": "gpt2",
        "dtype": "float32",
        "optimizer": "fused",
        "status": "ok",
        "largest_difference": 0.5,
    }
    found = [
        {**names, "way": "eager-again", "bits": again},
        {**names, "way": "roam", "bits": "differ"},
    ]
    assert len(training.judge(found)) == wrong
