"""What was found out about kernels serves later processes of the same machine and settings, and
nobody else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_plan_cache import forget, train
from test_workspace import images

import roam
from roam.disk_cache import DiskCache, disk_cache
from roam.kernels import kept, times, workspace
from roam.kernels.kept import recall, retain
from training import plain_step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DiskCache:
    monkeypatch.delenv("ROAM_CACHE")
    monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path))
    new_process(monkeypatch)
    found = disk_cache()
    assert found is not None
    return found


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(times, "_learned", {})
    monkeypatch.setattr(workspace, "_learned", {})


def test_findings_come_back_by_kind_and_signature() -> None:
    retain("times", {("mm", 1): 5, ("mm", 2): 0}, CPU)
    retain("times", {("mm", 3): 7, ("mm", 1): 6}, CPU)
    asked = [("mm", number) for number in range(1, 5)]
    assert recall("times", asked, CPU) == {("mm", 1): 6, ("mm", 2): 0, ("mm", 3): 7}
    assert recall("workspaces", asked, CPU) == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(torch, "__version__", "3.0"),
        lambda patch: patch.setattr(torch.version, "git_version", "0" * 40),
        lambda patch: patch.setattr(kept, "processor_name", lambda: "another processor"),
        lambda patch: patch.setattr(kept, "build", lambda: "another build"),
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
        lambda patch: patch.setenv("LD_PRELOAD_", ""),
    ],
)
def test_another_environment_finds_out_for_itself(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    retain("times", {"mm": 5}, CPU)
    change(monkeypatch)
    kept._software.cache_clear()
    kept._hardware.cache_clear()
    try:
        assert recall("times", ["mm"], CPU) == {}
    finally:
        monkeypatch.undo()
        kept._software.cache_clear()
        kept._hardware.cache_clear()


def test_other_rules_find_out_for_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A line more in a file that decides about tiles is enough."""
    retain("cuts", {"mm": 0}, CPU)
    shutil.copytree(kept.program.__path__[0], tmp_path / "program")
    with (tmp_path / "program" / "tiling.py").open("a") as file:
        file.write("# changed\n")
    with monkeypatch.context() as patched:
        kept._code.cache_clear()
        patched.setattr(kept.program, "__path__", [str(tmp_path / "program")])
        assert recall("cuts", ["mm"], CPU) == {}
    kept._code.cache_clear()
    assert recall("cuts", ["mm"], CPU) == {"mm": 0}


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"a": -1}', b'{"a": 1.5}', b'{"a": true}', b"[" * 10**6]
)
def test_content_that_is_none_is_found_out_again(content: bytes, cache: DiskCache) -> None:
    cache.put("kernels", kept._key("times", CPU), content)
    assert recall("times", ["mm"], CPU) == {}
    retain("times", {"mm": 5}, CPU)
    assert recall("times", ["mm"], CPU) == {"mm": 5}


def test_the_oldest_go_where_there_are_many(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_MOST", 3)
    for number in range(5):
        retain("times", {number: number}, CPU)
    assert recall("times", range(5), CPU) == {2: 2, 3: 3, 4: 4}
    content = cache.get("kernels", kept._key("times", CPU))
    assert content is not None
    assert len(json.loads(content)) == 3


def test_a_later_process_knows_workspaces_and_runs_no_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planned() -> roam.Step:
        model, optimizer, x, y = images()
        step = roam.compile(plain_step)
        step.plan(model, optimizer, x, y)
        return step

    first = planned()
    new_process(monkeypatch)
    monkeypatch.setattr(workspace, "_taken", lambda *_: pytest.fail("a kernel is run again"))
    second = planned()
    assert first.timings is not None
    assert second.timings is not None
    tried, found = first.timings.kernels, second.timings.kernels
    assert (tried.from_disk, found.count, found.from_disk) == (0, 0, tried.count)
    assert tried.count > 0
    assert [plan for _, plan in first.plans] == [plan for _, plan in second.plans]


def test_a_budget_has_the_same_plan_in_a_later_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph has measured times, which would differ from run to run."""
    _, first = train(memory="92%")
    assert first.memory().extra_runs > 0
    new_process(monkeypatch)
    monkeypatch.setattr(times, "_measured", lambda *_: pytest.fail("a kernel is timed again"))
    _, second = train(memory="92%")
    assert second.timings is not None
    assert second.timings.kernels.count == 0
    assert [plan for _, plan in first.plans] == [plan for _, plan in second.plans]


def test_what_failed_on_zeros_is_tried_again(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(workspace, "_taken", fails)
    model, optimizer, x, y = images()
    roam.compile(plain_step).plan(model, optimizer, x, y)
    assert "kernels" not in cache.usage().entries
