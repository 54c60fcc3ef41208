"""Measured memory agrees, to the byte, with cases counted by hand."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import forked
from roam.runtime import memory_profiler
from roam.runtime.memory_profiler import (
    MeasurementError,
    MemoryTrace,
    measure_in_child,
    measure_peak,
    observed,
)


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def test_a_case_counted_by_hand() -> None:
    def work() -> torch.Tensor:
        a = _bytes(1000)  # 1000
        b = _bytes(3001)  # 4001, the peak: sizes are not rounded
        del a  # 3001
        c = _bytes(7)  # 3008
        del b  # 7
        return c

    trace = measure_peak(work)
    assert trace.peak_bytes == 4001
    assert trace.end_bytes == 7
    assert trace.events == 5
    assert trace.unseen_freed_bytes == 0
    assert [block.size_bytes for block in trace.blocks] == [1000, 3001, 7]
    assert [(block.made_at, block.freed_at) for block in trace.blocks] == [
        (0, 2),
        (1, 4),
        (3, None),
    ]
    assert [block.size_bytes for block in trace.at_peak] == [3001, 1000]
    assert [block.size_bytes for block in trace.unfreed] == [7]
    assert trace.workspaces == ()
    assert trace.value.numel() == 7


def test_the_documents_example_runs() -> None:
    text = (Path(__file__).parents[2] / "docs/explanation/measurement.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    assert "peak_bytes == 4001" in example
    exec(example, {})


def test_operators_hold_inputs_and_outputs_at_once() -> None:
    x, y = torch.ones(100), torch.ones(100)

    def work() -> None:
        a = torch.add(x, y)  # 400
        b = torch.mul(a, y)  # 800
        del a  # 400
        c = torch.add(b, y)  # 800
        d = torch.cat([c, c, c])  # 2000, the peak
        del b, c, d

    trace = measure_peak(work)
    assert trace.peak_bytes == trace.peak_without_workspace_bytes == 2000
    assert trace.peak_workspace_bytes == 0
    assert trace.end_bytes == 0
    assert [block.operator for block in trace.blocks] == [
        "aten::add",
        "aten::mul",
        "aten::add",
        "aten::cat",
    ]


def test_in_place_operators_and_views_allocate_nothing() -> None:
    x, y = torch.ones(100), torch.ones(10, 10)
    trace = measure_peak(lambda: x.add_(x).view(10, 10).t().mul_(y))
    assert (trace.peak_bytes, trace.events) == (0, 0)


def test_the_backward_pass_is_seen() -> None:
    w = torch.ones(50, 50, requires_grad=True)

    def work() -> None:
        (w * w).sum().backward()

    trace = measure_peak(work)
    assert trace.end_bytes == w.nbytes  # the gradient
    again = measure_peak(work)  # accumulates into it
    assert again.end_bytes == 0
    assert again.peak_bytes > 0


def test_released_blocks_of_before_count_negative() -> None:
    with observed():
        held = [_bytes(5000)]

    def work() -> None:
        held.clear()  # -5000
        _bytes(2000)  # -3000
        _bytes(6000)  # 1000

    trace = measure_peak(work)
    assert trace.peak_bytes == 1000
    assert trace.end_bytes == -5000
    assert trace.unseen_freed_bytes == 0
    assert trace.start_bytes >= 5000
    assert trace.peak_total_bytes == trace.start_bytes + 1000


def test_unobserved_blocks_that_die_are_reported() -> None:
    held = [_bytes(5000)]
    trace = measure_peak(held.clear)
    assert trace.end_bytes == 0
    assert trace.unseen_freed_bytes == 5000


def test_unobserved_gradients_that_die_are_reported() -> None:
    parameter = torch.nn.Parameter(torch.ones(10, 10))
    (parameter * 2).sum().backward()
    trace = measure_peak(torch.optim.SGD([parameter], foreach=False).zero_grad)
    assert trace.unseen_freed_bytes == parameter.nbytes


def test_warm_up_makes_the_state_of_a_step_known() -> None:
    model = torch.nn.Linear(32, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)
    x = torch.ones(4, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    trace = measure_peak(step, warmup=1)
    assert trace.unseen_freed_bytes == 0
    assert trace.end_bytes == 0
    weight = model.weight.nbytes
    # The old gradient (one weight) dies first; then the new one takes its place, beside
    # activations.
    assert trace.peak_bytes < weight
    assert trace.start_bytes >= 2 * weight


def test_tensors_that_tell_nothing_of_themselves_may_be_alive() -> None:
    lazy = torch.nn.LazyLinear(4)
    base = torch.ones(3, requires_grad=True).clone()
    with torch.no_grad():
        view = base[:2]
    base.mul_(2)
    with pytest.raises(RuntimeError, match="no_grad mode"):
        view.is_leaf  # noqa: B018
    with pytest.raises(ValueError, match="uninitialized"):
        lazy.weight.untyped_storage()
    trace = measure_peak(lambda: _bytes(1000))
    assert trace.peak_bytes == 1000


def test_memory_that_a_kernel_takes_for_itself_is_apart() -> None:
    values = torch.rand(1000)

    def work() -> None:
        values.double().to(torch.float32)
        torch.nn.functional.conv2d(torch.ones(2, 3, 16, 16), torch.ones(8, 3, 3, 3))

    trace = measure_peak(work)
    assert sum(block.size_bytes for block in trace.workspaces) > 0
    assert trace.peak_without_workspace_bytes is not None
    assert trace.peak_workspace_bytes is not None
    assert trace.peak_without_workspace_bytes < trace.peak_bytes
    assert trace.peak_bytes <= trace.peak_without_workspace_bytes + trace.peak_workspace_bytes
    # double() makes a tensor of 8000 bytes that lives beside its 4000 byte copy: no kernel's own.
    assert 8000 not in [block.size_bytes for block in trace.workspaces]


def test_composite_operators_are_not_kernels() -> None:
    """What dropout makes on the way to its result is memory of the step, though one call of a
    function makes and frees it."""
    x = torch.ones(1000)
    trace = measure_peak(lambda: torch.nn.functional.dropout(x, 0.5, training=True))
    assert 1000 * 4 not in [block.size_bytes for block in trace.workspaces]
    assert trace.peak_without_workspace_bytes == 8000


def test_repeated_runs_are_equal() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    x = torch.ones(2, 3, 16, 16)

    def work() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    first, *others = [measure_peak(work, warmup=1) for _ in range(4)]
    assert all(other == first for other in others)


def test_an_exception_of_the_work_passes_through() -> None:
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_peak(work)
    assert measure_peak(lambda: _bytes(10)).peak_bytes == 10  # and the profiler is off again


def test_other_devices_are_refused() -> None:
    with pytest.raises(MeasurementError, match="mps") as caught:
        measure_peak(lambda: None, device="mps")
    assert caught.value.code == "device"


def test_a_record_with_a_gap_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasurementError, match="another profiler") as caught:
        memory_profiler._Stream([])
    assert caught.value.code == "no_events"
    freed = memory_profiler._Event(size_bytes=-8, address=1, total_bytes=0, call=None, operator="")
    monkeypatch.setattr(memory_profiler, "_between_marks", lambda roots: ([freed], 16))
    with pytest.raises(MeasurementError, match="does not watch") as caught:
        memory_profiler._Stream([])
    assert caught.value.code == "other_thread"


def test_events_of_two_threads_may_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [(64, 1, 64), (32, 2, 96), (-64, 1, 32), (16, 3, 48), (-32, 2, 16)]
    events = [memory_profiler._Event(*event, call=None, operator="") for event in counted]
    for order in itertools.permutations(range(5)):
        timed = [events[place] for place in order]
        monkeypatch.setattr(
            memory_profiler, "_between_marks", lambda roots, timed=timed: (timed, 0)
        )
        trace = memory_profiler._Stream([]).trace(None, 0)
        assert (trace.peak_bytes, trace.end_bytes) == (96, 16)
        assert [block.freed_at for block in trace.blocks] == [2, 4, None]


def test_a_trace_survives_json() -> None:
    trace = measure_peak(lambda: torch.nn.functional.softmax(torch.ones(3, 4), 0).sum().item())
    again = MemoryTrace.from_json(trace.to_json())
    assert again == trace
    assert again.value == trace.value


# -- functions for child processes
# ---------------------------------------------------------------------------------------


def build_hand_case(count: int) -> Callable[[], Any]:
    state = [_bytes(100)]

    def work() -> dict[str, int]:
        state[0] = _bytes(count)
        sys.stdout.write("the child may print")
        return {"count": count}

    return work


def build_failing() -> Callable[[], Any]:
    raise ValueError("no such model")


def build_dying() -> Callable[[], Any]:
    sys.stderr.write("about to die")
    sys.stderr.flush()
    os._exit(7)


def build_sleeping() -> Callable[[], Any]:
    return lambda: time.sleep(60)


def build_unreturnable() -> Callable[[], Any]:
    return lambda: _bytes(1)


def test_a_child_measures_the_same() -> None:
    trace = measure_in_child(build_hand_case, {"count": 1234})
    assert trace.peak_bytes == 1234
    assert trace.end_bytes == 1134
    assert trace.start_bytes == 100
    assert trace.unseen_freed_bytes == 0
    assert trace.value == {"count": 1234}
    with mock.patch.object(subprocess, "run", forked.run):
        named = measure_in_child("test_memory_profiler:build_hand_case", {"count": 1234})
    assert named == trace


def test_a_child_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", forked.run)
    trace = measure_in_child(build_hand_case, {"count": 1234}, warmup=1)
    assert trace.end_bytes == 0
    assert trace.start_bytes == 1234


def test_a_childs_failures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasurementError, match=r"within 2 s") as caught:
        measure_in_child(build_sleeping, timeout_s=2)
    assert caught.value.code == "timeout"
    monkeypatch.setattr(subprocess, "run", forked.run)
    with pytest.raises(MeasurementError, match="no such model") as caught:
        measure_in_child(build_failing)
    assert caught.value.code == "child_failed"
    with pytest.raises(MeasurementError, match=r"status 7: .*about to die") as caught:
        measure_in_child(build_dying)
    assert caught.value.code == "child_died"
    with pytest.raises(MeasurementError, match="not JSON serializable"):
        measure_in_child(build_unreturnable)


def test_what_a_child_could_not_find_is_refused() -> None:
    with pytest.raises(MeasurementError, match="cannot be found"):
        measure_in_child(lambda: lambda: None)
    with pytest.raises(MeasurementError, match="form"):
        measure_in_child("test_memory_profiler")
