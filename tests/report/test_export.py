"""Exports, read by the tools that they are for, or held against the format's documentation."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pydot
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_report import layers
from test_streams import branches
from torch.cuda import _memory_viz as viewer

import roam
from roam import cli
from roam.report import format_bytes
from roam.report.anatomy import Planned
from roam.report.chrome_trace import chrome_trace
from roam.report.dot import dot
from roam.report.export import write_export
from roam.report.folding import folded
from roam.report.snapshot import snapshot
from strategies import graphs

# pydot's parser calls pyparsing by old names.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated - use:DeprecationWarning")


def planned(kind: str) -> Planned:
    graph = layers(2**20)
    plan = roam.optimize(graph)
    if kind == "limited":
        plan = roam.optimize(graph, memory_limit_bytes=plan.total_bytes * 7 // 10)
        assert plan.recomputation is not None
    if kind == "streams":
        graph = branches()
        plan = roam.optimize(graph, streams=2)
    return Planned.of(graph, plan)


@pytest.fixture(scope="module", params=["plain", "limited"])
def step(request: pytest.FixtureRequest) -> Planned:
    return planned(request.param)


def replayed(taken: dict[str, Any]) -> tuple[int, set[int]]:
    """The most bytes that a snapshot's events allocate at once, and the addresses left at the end.
    No two allocations may overlap, and every free has its allocation."""
    live: dict[int, int] = {}
    most = 0
    (events,) = taken["device_traces"]
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(
                address + size <= at or at + bytes_ <= address for at, bytes_ in live.items()
            )
            live[address] = size
        elif event["action"] == "free_completed":
            assert live.pop(address) == size
        most = max(most, sum(live.values()))
    return most, set(live)


# -- PyTorch's memory viewer


@given(graphs(), st.booleans(), st.integers(1, 3))
def test_the_events_of_a_snapshot_reach_the_plans_peak(
    graph: roam.Graph, reuse: bool, streams: int
) -> None:
    plan = roam.optimize(graph, streams, reuse, exact="off")
    taken = snapshot(Planned.of(graph, plan))
    most, left = replayed(taken)
    assert most == plan.peak_bytes
    blocks = [block for segment in taken["segments"] for block in segment["blocks"]]
    active = {block["address"] for block in blocks if block["state"] == "active_allocated"}
    persistent = [t for t in graph.tensors if t.residency == "persistent" and t.counted_bytes]
    assert left <= active
    assert len(active - left) == len(persistent)
    assert sum(block["size"] for block in blocks if block["address"] in active - left) == plan.persistent_bytes  # fmt: skip


def test_pytorchs_viewer_reads_a_snapshot(step: Planned, tmp_path: Path) -> None:
    path = tmp_path / "step.pickle"
    plan = step.plan
    write_export(step, path)
    taken = pickle.loads(path.read_bytes())
    assert replayed(taken)[0] == plan.peak_bytes
    # It raises where a segment's blocks do not add up to it.
    summary = viewer.segsum(taken)
    segments = [segment["total_size"] for segment in taken["segments"]]
    assert f"total_reserved: {viewer.Bytes(sum(segments))}\n" in summary
    assert f"total_allocated: {viewer.Bytes(plan.persistent_bytes)}\n" in summary
    assert plan.pool_bytes in segments
    (events,) = taken["device_traces"]
    listing = viewer.trace(taken)
    assert f"{len(events)} entries" in listing
    allocations = sum(event["action"] == "alloc" for event in events)
    assert len(re.findall(r"^\w+ = ", listing, re.MULTILINE)) == allocations
    assert listing.count("del ") == len([e for e in events if e["action"] == "free_requested"])
    assert "linear <b>" in json.dumps(events)
    for page in (viewer.trace_plot(taken), viewer.segment_plot(taken)):
        assert "<script" in page


def test_a_snapshot_names_the_users_line(step: Planned) -> None:
    (events,) = snapshot(step)["device_traces"]
    frames = [event["frames"] for event in events if event["category" if event["action"] == "alloc" else "action"] == "activation"]  # fmt: skip
    assert frames
    for called, place in frames:
        assert called["name"] == "linear <b>"
        assert re.fullmatch(r"net\.h\[\d\]", place["name"])
        assert (place["filename"], place["line"]) == ("net.py", 7)


# -- Chrome's trace format


def test_a_trace_follows_the_documented_format(step: Planned) -> None:
    trace = json.loads(json.dumps(chrome_trace(step), allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    ends: dict[int, float] = {}
    spans: Counter[int] = Counter()
    counters: dict[int, int] = {}
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index")
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            # Complete events of one thread follow each other.
            assert event["ts"] >= ends.get(event["pid"], 0.0) - 1e-6
            ends[event["pid"]] = event["ts"] + event["dur"]
            spans[event["pid"]] += 1
        else:
            assert event["ph"] == "C"
            assert all(isinstance(value, int) for value in event["args"].values())
            counters[event["pid"]] = max(counters.get(event["pid"], 0), event["args"]["bytes"])
    assert spans == {1: step.graph.num_operators, 2: step.as_written.num_operators}
    assert counters == {1: step.plan.peak_bytes, 2: step.values["program_order_peak_bytes"]}
    assert ends[1] == pytest.approx(sum(step.graph.times_ns.tolist()) / 1000)


def test_a_trace_has_the_operators_in_the_plans_order(step: Planned) -> None:
    spans = [e for e in chrome_trace(step)["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    names = [step.graph.operator(number).name for number in step.plan.order]
    assert [span["name"] for span in spans] == names
    assert [span["args"]["live_bytes"] for span in spans] == step.curve.live_bytes.tolist()


def test_a_trace_of_several_streams_has_a_thread_for_each() -> None:
    step = planned("streams")
    graph, plan = step.graph, step.plan
    events = [e for e in chrome_trace(step)["traceEvents"] if e["pid"] == 1]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {0: "stream 0", 1: "stream 1"}
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert len(spans) == graph.num_operators
    for number, operator in enumerate(graph.operators):
        assert spans[operator.name]["tid"] == plan.streams[number]

    def end_us(number: int) -> float:
        span = spans[graph.operator(number).name]
        return float(span["ts"] + span["dur"])

    assert plan.syncs
    for before, after in plan.syncs:
        assert end_us(before) <= spans[graph.operator(after).name]["ts"]
    assert max(map(end_us, range(graph.num_operators))) == pytest.approx(
        (plan.makespan_s or 0) * 1e6
    )
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == plan.peak_bytes


# -- Graphviz


def test_graphviz_reads_the_folded_graph(step: Planned) -> None:
    (parsed,) = pydot.graph_from_dot_data(dot(step))
    graph = step.as_written
    clusters = {cluster.get("label").strip('"'): cluster for cluster in parsed.get_subgraphs()}
    assert set(clusters) == {operator.phase for operator in graph.operators}
    groups = Counter((operator.phase, folded(operator.module)) for operator in graph.operators)
    nodes = [
        (phase, node)
        for phase, cluster in clusters.items()
        for node in cluster.get_nodes()
        if node.get("label")
    ]
    assert len(nodes) == len(groups)
    for phase, node in nodes:
        title, _, counts = node.get("label").strip('"').partition("\\n")
        module = "" if title == "no module" else title.split(" ")[0]
        assert counts.startswith(f"{groups[phase, module]:,} operators")
    title = next(node.get("label") for phase, node in nodes if phase == "forward")
    assert "net.h[*] (8 layers)" in title
    assert f"{format_bytes(8 * 2**20)} made" in title
    edges = {(edge.get_source(), edge.get_destination()) for edge in parsed.get_edges()}
    assert len(edges) == 3  # forward to loss and backward, loss to backward


def test_names_are_text_in_graphviz() -> None:
    builder = roam.GraphBuilder('a "quoted" \\ name')
    made = builder.tensor("made", 64)
    builder.operator("make", creates=[made], module='m["a\\nb"]')
    graph = builder.build()
    (parsed,) = pydot.graph_from_dot_data(dot(Planned.of(graph, roam.optimize(graph))))
    assert "quoted" in parsed.get_name()


# -- the ways to get one


def test_a_plan_and_the_command_write_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = layers()
    plan = roam.optimize(graph)
    graph.save(tmp_path / "graph.json")
    plan.save(tmp_path / "plan.json")
    suffixes = (".pickle", ".json", ".json.gz", ".dot")
    asked = [f"--output={tmp_path / f'command{suffix}'}" for suffix in suffixes]
    files = [str(tmp_path / name) for name in ("graph.json", "plan.json")]
    assert cli.main(["export", *files, *asked]) == 0
    for suffix in suffixes:
        plan.export(graph, tmp_path / f"method{suffix}")
        written = (tmp_path / f"method{suffix}").read_bytes()
        assert written == (tmp_path / f"command{suffix}").read_bytes()
    packed = gzip.decompress((tmp_path / "method.json.gz").read_bytes())
    assert packed == (tmp_path / "method.json").read_bytes()
    with pytest.raises(ValueError, match="Graphviz"):
        plan.export(graph, tmp_path / "plan.txt")
    assert cli.main(["export", *files, "--output", "plan.txt"]) == 2
    assert "Graphviz" in capsys.readouterr().err


def test_a_compiled_step_is_exported(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters())

    def train_step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step = roam.compile(train_step)
    step(model, optimizer, torch.randn(64, 8))
    step.export(tmp_path / "step.pickle")
    most, _ = replayed(pickle.loads((tmp_path / "step.pickle").read_bytes()))
    assert most == step.plan(model, optimizer, torch.randn(64, 8)).peak_bytes
