"""Plans of several streams: safe under every timing, as fast as asked for, and every corruption
caught."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import roam
from strategies import graphs

counts = st.integers(2, 3)


def speed(plan: roam.Plan) -> float:
    assert plan.makespan_s is not None
    assert plan.serial_s is not None
    return plan.serial_s / plan.makespan_s if plan.makespan_s else 1.0


def execution(
    graph: roam.Graph, plan: roam.Plan, data: st.DataObject
) -> tuple[list[int], list[int]]:
    """Start and end of every operator on queues that wait for what the plan says, with times that
    nobody chose."""
    times = data.draw(
        st.lists(st.integers(1, 9), min_size=graph.num_operators, max_size=graph.num_operators)
    )
    delays = data.draw(
        st.lists(st.integers(0, 9), min_size=graph.num_operators, max_size=graph.num_operators)
    )
    waits: dict[int, list[int]] = {}
    for before, after in plan.syncs:
        waits.setdefault(after, []).append(before)
    start, end, free = (
        [0] * graph.num_operators,
        [0] * graph.num_operators,
        [0] * plan.settings["streams"],
    )
    for operator in plan.order.tolist():
        stream = int(plan.streams[operator])
        ready = max([free[stream], *(end[before] for before in waits.get(operator, []))])
        start[operator] = ready + delays[operator]
        end[operator] = free[stream] = start[operator] + times[operator]
    return start, end


@given(graphs(max_operators=14), counts, st.booleans(), st.data())
@settings(max_examples=100)
def test_plans_are_safe_under_every_timing(
    graph: roam.Graph, streams: int, reuse: bool, data: st.DataObject
) -> None:
    plan = roam.optimize(graph, streams, reuse)
    roam.verify(graph, plan)
    assert set(plan.streams.tolist()) <= set(range(streams))
    assert plan.lower_bound_bytes <= plan.peak_bytes
    assert plan.total_lower_bound_bytes <= plan.total_bytes
    start, end = execution(graph, plan, data)
    for operator in range(graph.num_operators):
        assert all(end[before] <= start[operator] for before in graph.predecessors(operator))

    sizes, offsets = graph.tensor_counted_bytes.tolist(), plan.offsets.tolist()
    heirs = dict(plan.reuse)
    lives = {}
    for tensor in graph.tensors:
        creator = graph.creator(tensor.id)
        if tensor.residency == "step_local" and sizes[tensor.id] and creator is not None:
            until = max((end[user] for user in graph.users(tensor.id)), default=end[creator])
            if tensor.id in heirs:
                heir = graph.creator(heirs[tensor.id])
                assert heir is not None
                assert all(
                    end[user] <= start[heir] for user in graph.users(tensor.id) if user != heir
                )
                until = start[heir]
            lives[tensor.id] = (start[creator], until)
    for one, (begin, until) in lives.items():
        assert offsets[one] + sizes[one] <= plan.pool_bytes
        for other, (other_begin, other_until) in lives.items():
            if one < other and begin < other_until and other_begin < until:
                assert (
                    offsets[one] + sizes[one] <= offsets[other]
                    or offsets[other] + sizes[other] <= offsets[one]
                )


@given(graphs(max_operators=14), st.floats(1.0, 2.0))
@settings(max_examples=40)
def test_a_speed_is_met_or_refused(graph: roam.Graph, asked: float) -> None:
    fastest = speed(roam.optimize(graph, streams=2))
    if asked <= fastest:
        plan = roam.optimize(graph, streams=2, speed=asked)
        assert speed(plan) >= asked - 1e-9
        assert plan.settings["speed"] == asked
    if asked > 1.1 * fastest:
        with pytest.raises(roam.PlanError, match="times as fast") as caught:
            roam.optimize(graph, streams=2, speed=asked)
        assert caught.value.code == "speed_target"


def test_a_speed_that_the_leanest_plans_pass_by_is_found() -> None:
    builder = roam.GraphBuilder(alignment_bytes=1)
    for size in (0, 0):
        builder.tensor("", size, residency="enters")
    held = builder.tensor("held", 100, residency="enters")
    made = [builder.tensor("", 0) for _ in range(2)]
    first = builder.operator("op0", creates=made[:1], position=0)
    second = builder.operator("op1", mutates=[held], position=1)
    third = builder.operator("op2", position=2)
    builder.operator("op4", workspace_bytes=50, position=4)
    builder.operator("op3", creates=made[1:], position=3)
    builder.control(first, second)
    builder.control(first, third)
    graph = builder.build()
    assert speed(roam.optimize(graph, streams=2)) > 1.1
    assert speed(roam.optimize(graph, streams=2, speed=1.1)) >= 1.1


def corrupted(plan: roam.Plan, change: Callable[[dict[str, Any]], object]) -> roam.Plan:
    value = json.loads(plan.to_json())
    change(value)
    return roam.Plan.from_json(json.dumps(value).encode())


@given(graphs(min_operators=3, max_operators=14), st.data())
@settings(max_examples=50)
def test_a_missing_wait_is_caught(graph: roam.Graph, data: st.DataObject) -> None:
    plan = roam.optimize(graph, streams=2)
    assume(plan.syncs)
    at = data.draw(st.integers(0, len(plan.syncs) - 1))
    with pytest.raises(roam.PlanError) as caught:
        roam.verify(graph, corrupted(plan, lambda v: v["schedule"]["syncs"].pop(at)))
    broken = {
        "read_too_early",
        "mutated_too_early",
        "sequence_broken",
        "control_broken",
        "overlap",
        "reuse_of_live",
    }
    assert caught.value.code in broken
    with pytest.raises(roam.PlanError) as caught:
        roam.verify(graph, corrupted(plan, lambda v: v["schedule"]["syncs"][at].reverse()))
    assert caught.value.code == "sync_invalid"


@given(graphs(max_operators=14), counts, st.sampled_from(["happens_before", "time_step"]))
@settings(max_examples=30)
def test_plans_round_trip(graph: roam.Graph, streams: int, model: str) -> None:
    plan = roam.optimize(graph, streams, stream_model=model)
    again = roam.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert (again.streams.tolist(), again.syncs) == (plan.streams.tolist(), plan.syncs)
    assert again.time_steps == plan.time_steps
    roam.verify(graph, again)
    assert (plan.time_steps is None) == (model == "happens_before")


def branches() -> roam.Graph:
    """Two branches of equal work that join, after something that needs as much memory as both."""
    builder = roam.GraphBuilder("branches")
    large = builder.tensor("large", 65536)
    starts = [builder.tensor(f"{branch} start", 4096) for branch in ("left", "right")]
    builder.operator("make", creates=[large], flops=10**9)
    builder.operator("split", reads=[large], creates=starts, flops=10**9)
    ends = []
    for branch, tensor in zip(("left", "right"), starts, strict=True):
        for number in range(10):
            made = builder.tensor(f"{branch} {number}", 4096)
            builder.operator(f"{branch} {number}", reads=[tensor], creates=[made], flops=10**9)
            tensor = made
        ends.append(tensor)
    builder.operator("join", reads=ends, creates=[builder.tensor("sum", 64, residency="leaves")])
    return builder.build()


def test_branches_run_side_by_side() -> None:
    graph = branches()
    plan = roam.optimize(graph, streams=2)
    assert speed(plan) > 1.7
    assert len({int(plan.streams[operator]) for operator in range(2, 12)}) == 1
    # A fork and a join.
    assert len(plan.syncs) == 2
    assert plan.makespan_s is not None
    assert plan.critical_path_s is not None
    # A thousand nanoseconds for each of the two waits.
    assert plan.makespan_s == pytest.approx(plan.critical_path_s + 2e-6)
    # Each operator computes 10^9 operations at 19 500 a nanosecond, and is launched in 2000 ns.
    assert plan.serial_s == pytest.approx(1e-9 * (22 * (2000 + 51283) + 2000 + 6), rel=1e-6)
    with pytest.raises(roam.PlanError, match="times as fast") as caught:
        roam.optimize(graph, streams=2, speed=2.5)
    assert caught.value.code == "speed_target"


@pytest.mark.parametrize("streams", [0, -1, 65, 2**40])
def test_senseless_numbers_of_streams_are_refused(streams: int) -> None:
    with pytest.raises(roam.PlanError) as caught:
        roam.optimize(branches(), streams)
    assert caught.value.code == "invalid_streams"


def test_senseless_settings_are_refused() -> None:
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(roam.PlanError) as caught:
            roam.optimize(branches(), 2, speed=wrong)
        assert caught.value.code == "invalid_speed"
    with pytest.raises(roam.PlanError) as caught:
        roam.optimize(branches(), speed=1.5)
    assert caught.value.code == "invalid_speed"
    with pytest.raises(roam.PlanError, match="stream_model must be"):
        roam.optimize(branches(), 2, stream_model="vectors")


def test_times_are_of_valid_plans_only() -> None:
    graph = branches()
    plan = roam.optimize(graph, streams=2)
    with pytest.raises(roam.PlanError) as caught:
        corrupted(plan, lambda v: v["order"].pop()).times_ns(graph)
    assert caught.value.code == "operator_missing"


def test_a_null_schedule_is_no_plan() -> None:
    plan = roam.optimize(branches())
    with pytest.raises(roam.FormatError):
        corrupted(plan, lambda v: v.update(schedule=None))
