"""The report: every figure of the page, of the tables and of the charts is the plan's."""

from __future__ import annotations

import html
import io
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.document import Document
from hypothesis import given
from hypothesis import strategies as st

import roam
from roam import cli
from roam.memory_limit import MemoryLimit
from roam.report import format_bytes
from roam.report.anatomy import Anatomy, Planned, run_lengths
from roam.report.changes import within, without_recomputation
from roam.report.figures import live_bytes
from roam.report.folding import folded
from roam.report.lifetimes import Starts, lifetimes
from roam.report.page import ReportUnavailable, page
from roam.report.tables import Amount, Count, Table, as_html, as_text, print_tables
from strategies import graphs

LAYERS = 8


def layers(size_bytes: int = 4096) -> roam.Graph:
    """A network of equal layers, whose activations wait for the backward pass and may be made
    again."""
    builder = roam.GraphBuilder("layers")
    weights = [
        builder.tensor(f"weight {n}", 256, kind="parameter", residency="persistent")
        for n in range(LAYERS)
    ]
    batch = builder.tensor("batch", size_bytes, kind="input", residency="persistent")
    kept = [batch]
    for n in range(LAYERS):
        kept.append(builder.tensor(f"act {n}", size_bytes, kind="activation"))
        builder.operator(
            "linear <b>", reads=[kept[n], weights[n]], creates=[kept[n + 1]], module=f"net.h[{n}]",
            file="net.py", line=7, repeatable=True, flops=10**6,
        )  # fmt: skip
    grad = builder.tensor("grad", size_bytes, kind="gradient")
    builder.operator("loss", reads=[kept[-1]], creates=[grad], phase="loss", workspace_bytes=100)
    for n in reversed(range(LAYERS)):
        new = builder.tensor(f"grad {n}", size_bytes, kind="gradient")
        builder.operator(
            "backward", reads=[grad, kept[n], weights[n]], creates=[new], mutates=[weights[n]],
            phase="backward", module=f"net.h[{n}]", file="net.py", line=7,
        )  # fmt: skip
        grad = new
    return builder.build()


def anatomies() -> dict[str, Anatomy]:
    graph = layers()
    plain = roam.optimize(graph)
    limited = roam.optimize(graph, memory_limit_bytes=plain.total_bytes * 7 // 10)
    assert limited.recomputation is not None
    changes = [within(graph, plain, MemoryLimit.of(limit)) for limit in ("70%", 4096)]
    first = Planned.of(layers(8192), roam.optimize(layers(8192)))
    return {
        "plain": Anatomy("a <title>", Planned.of(graph, plain), None, first, changes),
        "limited": Anatomy(
            "limited", Planned.of(graph, limited), without_recomputation(graph, limited)
        ),
        "streams": Anatomy("streams", Planned.of(graph, roam.optimize(graph, streams=2))),
    }


@pytest.fixture(scope="module", params=["plain", "limited", "streams"])
def anatomy(request: pytest.FixtureRequest) -> Anatomy:
    return anatomies()[request.param]


def drawn(text: str) -> Document:
    """The charts of a page, read back by Bokeh, which validates them."""
    (found,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    (document,) = json.loads(html.unescape(found)).values()
    return Document.from_json(document)


# -- what is computed


@given(st.data())
def test_lifetimes_add_up_to_the_live_bytes_of_every_step(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = roam.optimize(graph, reuse=data.draw(st.booleans()), exact="off")
    counted = graph.tensor_counted_bytes
    for lives, order, expected in (
        (lifetimes(graph), graph.program_order, graph.live_bytes()),
        (lifetimes(graph, Starts.of(graph, plan), plan.reuse), plan.order, live_bytes(graph, plan)),
    ):
        persistent = [tensor.id for tensor in graph.tensors if tensor.residency == "persistent"]
        for step, operator in enumerate(order.tolist()):
            alive = set(lives.alive_at(step)) - set(persistent)
            own = int(graph.workspaces_bytes[operator])
            assert sum(counted[list(alive)].tolist()) + own == expected[step]


@given(graphs(min_operators=1))
def test_what_is_alive_at_the_peak_adds_up_to_the_peak(graph: roam.Graph) -> None:
    plan = roam.optimize(graph, exact="off")
    planned = Planned.of(graph, plan)
    assert sum(one.size_bytes for one in planned.holdings) == plan.peak_bytes
    assert sum(one.size_bytes for one in planned.program_holdings) == plan.program_order_peak_bytes


@given(
    graphs(max_operators=14), st.integers(2, 3), st.sampled_from(["happens_before", "time_step"])
)
def test_a_plan_for_several_streams_adds_up_at_every_start(
    graph: roam.Graph, streams: int, model: str
) -> None:
    plan = roam.optimize(graph, streams, stream_model=model, exact="off")
    planned = Planned.of(graph, plan)
    live, starts = planned.curve.live_bytes, planned.starts
    assert live.max(initial=0) == plan.peak_bytes
    assert sum(one.size_bytes for one in planned.holdings) == plan.peak_bytes
    assert sorted(starts.order.tolist()) == list(range(graph.num_operators))
    begin, end = plan.times_ns(graph)
    assert end.max(initial=0) == round((plan.makespan_s or 0) * 1e9)
    assert (np.diff(begin[starts.order]) >= 0).all()
    lives, sizes = planned.lives, graph.tensor_counted_bytes
    for at, operator in enumerate(starts.order.tolist()):
        for before in graph.predecessors(operator):
            assert starts.done[starts.order == before].item() <= at
        # Whatever is alive at once in the pool has bytes of its own.
        pooled = [one for one in lives.alive_at(at) if plan.offsets[one] >= 0 and sizes[one]]
        spans = sorted((int(plan.offsets[one]), int(sizes[one])) for one in pooled)
        for (offset, size), (following, _) in itertools.pairwise(spans):
            assert offset + size <= following


def test_a_plan_with_recomputation_adds_up_too(anatomy: Anatomy) -> None:
    planned = anatomy.planned
    assert sum(one.size_bytes for one in planned.holdings) == planned.plan.peak_bytes
    assert planned.curve.live_bytes.max() == planned.plan.peak_bytes
    assert planned.program_curve.live_bytes.max() == planned.values["program_order_peak_bytes"]


def test_identical_layers_are_one_line() -> None:
    graph = layers()
    held = Planned.of(graph, roam.optimize(graph)).holdings[0]
    assert (held.module, held.modules, held.tensors) == ("net.h[*]", LAYERS, LAYERS)
    assert (held.kind, held.operator, held.source) == ("activation", "linear <b>", "net.py:7")
    assert held.size_bytes == LAYERS * 4096


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.h[42].attn.c_attn", "model.h[*].attn.c_attn"),
        ("layers.3.mlp.0", "layers.*.mlp.*"),
        ("conv2d.layer1", "conv2d.layer1"),
        ("blocks['12'][3]", "blocks['12'][*]"),
        ("", ""),
    ],
)
def test_numbers_of_layers_are_folded_and_no_others(module: str, expected: str) -> None:
    assert folded(module) == expected


def test_a_limit_that_cannot_be_kept_says_so_and_one_that_can_is_planned() -> None:
    possible, impossible = anatomies()["plain"].changes
    plain_bytes = roam.optimize(layers()).total_bytes
    assert possible.planned is not None
    assert possible.planned["total_bytes"] <= plain_bytes * 0.7
    assert impossible.planned is None
    assert impossible.error == "no plan takes so little"


def test_run_lengths_cover_everything_once() -> None:
    assert list(run_lengths(["a", "a", "b", "a"])) == [("a", 0, 2), ("b", 2, 3), ("a", 3, 4)]
    assert list(run_lengths([])) == []


# -- what is shown


def test_every_figure_of_the_page_is_the_plans(anatomy: Anatomy) -> None:
    text, planned = page(anatomy), anatomy.planned
    streams, limit_bytes = planned.values["streams"], planned.values["memory_limit_bytes"]
    source = json.loads(roam.optimize(layers(), streams, memory_limit_bytes=limit_bytes).to_json())
    expected = {
        **planned.values,
        **(planned.values["recomputation"] or {}),
        **{key: value for key, value in source.items() if key.endswith("_bytes")},
    }
    if anatomy.first is not None:
        first = json.loads(roam.optimize(layers(8192)).to_json())
        expected |= {f"first.{name}": value for name, value in first.items()}
    found = re.findall(r'<data value="(\d+)" data-name="([^"]+)"[^>]*>([^<]*)</data>', text)
    assert {name for _, name, _ in found} >= {"peak_bytes", "total_bytes", "lower_bound_bytes", "pool_bytes"}  # fmt: skip
    for value, name, shown in found:
        assert int(value) == expected[name], name
        assert shown == format_bytes(expected[name])
    for value, title, shown in re.findall(r'<data value="(\d+)"[^>]* title="([\d,]+) bytes">([^<]*)</data>', text):  # fmt: skip
        assert shown == format_bytes(int(value))
        assert title == f"{int(value):,}"


def test_the_curves_are_the_plans_live_bytes(anatomy: Anatomy) -> None:
    document, planned = drawn(page(anatomy)), anatomy.planned
    unit = 1024
    for curve in anatomy.curves:
        glyph = document.select_one({"name": f"curve: {curve.name}"})
        at, live = (np.asarray(glyph.data_source.data[name]) for name in ("x", "y"))
        steps = np.searchsorted(at, np.arange(len(curve.live_bytes)), side="right") - 1
        assert (live[steps] * unit == curve.live_bytes).all()
        peak = document.select_one({"name": f"peak: {curve.name}"}).data_source.data
        assert peak["y"][0] * unit == curve.live_bytes.max() == int(peak["bytes"][0].replace(",", ""))  # fmt: skip
    bound = document.select_one({"name": "level: lower bound"})
    assert bound.location * unit == planned.plan.lower_bound_bytes
    limit = document.select_one({"name": "level: limit"})
    if planned.values["memory_limit_bytes"] is None:
        assert limit is None
    else:
        beside = planned.values["memory_limit_bytes"] - planned.plan.persistent_bytes
        assert limit.location * unit == beside


def test_the_map_of_the_pool_is_the_plans_layout(anatomy: Anatomy) -> None:
    data = drawn(page(anatomy)).select_one({"name": "tensors"}).data_source.data  # fmt: skip
    graph, plan = anatomy.planned.graph, anatomy.planned.plan
    numbers = np.asarray(data["tensor"]).tolist()
    pooled = [n for n in range(graph.num_tensors) if plan.offsets[n] >= 0 and graph.tensor_counted_bytes[n]]  # fmt: skip
    assert sorted(numbers) == pooled
    for row, number in enumerate(numbers):
        low, high = data["bottom"][row] * 1024, data["top"][row] * 1024
        assert low == plan.offsets[number]
        assert high - low == graph.tensor_counted_bytes[number]
        assert data["left"][row] == anatomy.planned.lives.starts[number]
        assert data["right"][row] == anatomy.planned.lives.ends[number]
        assert data["size"][row] == f"{graph.tensor_counted_bytes[number]:,}"
    assert max(data["top"]) * 1024 == plan.pool_bytes


def test_the_strips_are_the_phases_of_each_order(anatomy: Anatomy) -> None:
    data = drawn(page(anatomy)).select_one({"name": "runs"}).data_source.data
    for curve in anatomy.curves:
        phases = [""] * len(curve.phases)
        for order, phase, left, right in zip(data["y"], data["phase"], data["left"], data["right"], strict=True):  # fmt: skip
            if order == curve.name:
                phases[left:right] = [phase] * (right - left)
        assert tuple(phases) == curve.phases


def test_a_long_curve_keeps_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roam.report.page._MOST_POINTS", 4)
    monkeypatch.setattr("roam.report.page.MOST_RECTANGLES", 3)
    anatomy = anatomies()["plain"]
    text = page(anatomy)
    document = drawn(text)
    glyph = document.select_one({"name": "curve: plan"})
    assert max(glyph.data_source.data["y"]) * 1024 == anatomy.planned.plan.peak_bytes
    assert len(document.select_one({"name": "tensors"}).data_source.data["tensor"]) == 3
    assert re.search(r"the 3 largest are drawn, and \d+ are not", text)


def test_the_page_needs_no_network_and_shows_names_as_text() -> None:
    text = page(anatomies()["plain"])
    shown = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "<h1>a &lt;title&gt;</h1>" in shown
    assert "linear &lt;b&gt;" in shown
    assert "<b>" not in shown
    for attribute in ("src=", "href=", "@import", "url("):
        assert attribute not in shown
    assert not re.search(r"<script[^>]+src", text)
    assert "prefers-color-scheme: dark" in text


def test_the_page_of_a_graph_without_operators() -> None:
    graph = roam.GraphBuilder("nothing").build()
    document = drawn(page(Anatomy("nothing", Planned.of(graph, roam.optimize(graph)))))
    assert document.select_one({"name": "pool"}) is None


def test_a_plan_of_another_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(roam.PlanError) as raised:
        roam.optimize(layers()).report(layers(8192), tmp_path / "report.html")
    assert raised.value.code == "graph_digest"


# -- tables


TABLE = Table(
    "Title",
    ("what", "bytes", "tensors"),
    (("a <b>", Amount(1536, "name"), Count(1000)), ("sum", Amount(0), Count(2))),
    "A note.",
)


def test_a_table_says_the_same_in_all_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    text = as_text(TABLE)
    assert text.splitlines()[2:5] == [
        "what      bytes  tensors",
        "a <b>  1.50 KiB    1,000",
        "sum         0 B        2",
    ]
    rich, plain = io.StringIO(), io.StringIO()
    print_tables([TABLE], rich)
    assert {"Title", "A note.", "1.50 KiB", "1,000"} <= set(re.split(r"\s{2,}|\n", rich.getvalue()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    print_tables([TABLE], plain)
    assert plain.getvalue() == text + "\n"
    assert 'a &lt;b&gt;</td><td class=number><data value="1536" data-name="name"' in as_html(TABLE)


def test_a_notebook_shows_the_figures_of_a_plan() -> None:
    plan = roam.optimize(layers())
    found = re.findall(r'<data value="(\d+)" data-name="([^"]+)"', plan._repr_html_())
    assert {name for _, name in found} >= {"peak_bytes", "total_bytes"}
    for value, name in found:
        assert int(value) == getattr(plan, name)


def test_the_terminal_shows_what_is_alive_at_the_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, path = layers(), str(tmp_path / "graph.json")
    graph.save(path)
    assert cli.main(["plan", path, "-v"]) == 0
    shown = capsys.readouterr().out.partition("What is alive at the plan's peak")[2]
    for held in Planned.of(graph, roam.optimize(graph)).holdings:
        layers_of = f"({held.modules} layers)" if held.modules > 1 else ""
        parts = (format_bytes(held.size_bytes), held.kind, held.operator, layers_of)
        assert any(all(part in line for part in parts) for line in shown.splitlines()), held
    assert "What sets the bound" in shown
    assert cli.main(["plan", path, "-v", "--streams", "2"]) == 0
    assert "by the cost model" in capsys.readouterr().out


# -- the ways to get one


def test_reports_of_a_plan_and_of_files_are_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = layers()
    plan = roam.optimize(graph)
    files = [str(tmp_path / name) for name in ("graph.json.gz", "plan.json", "a.html", "b.html")]
    graph.save(files[0])
    plan.save(files[1])
    plan.report(graph, files[2], limits=["70%"])
    assert "memory limit" in Path(files[2]).read_text()
    assert cli.main(["report", *files[:2], "--output", files[3], "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["total_bytes"] == plan.total_bytes
    assert [change["planned"] is None for change in said["changes"]] == [False, False]
    assert drawn(Path(files[3]).read_text()).select_one({"name": "curve: plan"}) is not None
    assert cli.main(["report", files[0], "--memory", "70%", "--no-changes", "--output", files[3]]) == 0  # fmt: skip
    assert "plan with recomputation" in Path(files[3]).read_text()
    assert cli.main(["report", *files[:2], "--memory", "70%"]) == 2
    parallel = roam.optimize(graph, streams=2)
    parallel.save(files[1])
    assert cli.main(["report", *files[:2], "--output", files[3]]) == 0
    assert "The plan has 2 streams" in Path(files[3]).read_text()
    with pytest.raises(roam.PlanError) as raised:
        parallel.report(graph, files[2], limits=["70%"])
    assert raised.value.code == "invalid_memory_limit"
    assert cli.main(["report", "gpt2-tiny", files[1]]) == 2


@pytest.mark.long
def test_a_model_of_the_zoo_is_reported_with_what_could_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roam.commands.report._SHARES", ())
    output = str(tmp_path / "report.html")
    arguments = ["report", "gpt2-tiny", "--seq", "16", "--batch", "2", "--optimizer", "sgd"]
    assert cli.main([*arguments, "--output", output, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    planned = {change["name"]: change["planned"] for change in said["changes"]}
    clipped = planned["gradients clipped by their norm"]
    assert clipped["operators"] > said["operators"]
    assert clipped["total_bytes"] >= said["total_bytes"]
    changes = {name: plan["total_bytes"] for name, plan in planned.items()}
    assert changes["batch 1"] < said["total_bytes"] < changes["batch 4"]
    assert changes["seq 8"] < said["total_bytes"] < changes["seq 32"]
    assert changes["bfloat16"] < said["total_bytes"] < changes["adamw"]


def test_without_bokeh_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    graph = layers()
    with pytest.raises(ReportUnavailable, match=r"pip install 'roam-torch\[report\]'") as raised:
        roam.optimize(graph).report(graph, tmp_path / "report.html")
    assert raised.value.code == "report_unavailable"
    graph.save(tmp_path / "graph.json")
    assert cli.main(["report", str(tmp_path / "graph.json"), "--no-changes"]) == 2
    assert "roam-torch[report]" in capsys.readouterr().err


def test_a_compiled_step_reports_the_bound_that_a_whole_search_proves(tmp_path: Path) -> None:
    """Also where the plan that runs was good enough before anything was proved."""
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).tanh().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    step = roam.compile(train_step)
    assert step._repr_html_() is None
    for _ in range(2):
        step(torch.randn(512, 64))
    _, plan = step.plans[-1]
    assert plan.bound_route == "floor"
    step.report(tmp_path / "report.html", limits=["80%", 4096])
    page = (tmp_path / "report.html").read_text()
    assert "memory=4096: no plan takes so little" in page
    (limited,) = re.findall(r"memory=80%.*?value=\"(\d+)\"", page)
    assert int(limited) <= 0.8 * plan.total_bytes + 65536  # beside what the first run's checks take
    (bound_bytes,) = set(re.findall(r'value="(\d+)" data-name="lower_bound_bytes"', page))
    assert plan.lower_bound_bytes < int(bound_bytes) <= plan.peak_bytes
    assert int(bound_bytes) >= 0.99 * plan.peak_bytes
    total = f'value="{plan.total_bytes}" data-name="total_bytes"'
    assert total in page
    (shown,) = re.findall(r'<iframe srcdoc="([^"]*)"', step._repr_html_() or "")
    assert total in html.unescape(shown)
    assert drawn(html.unescape(shown)).roots


def test_a_compiled_step_reports_its_plan(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).relu().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = roam.compile(train_step, memory="80%")
    output = tmp_path / "report.html"
    with pytest.raises(roam.ExecutionError, match="plan") as raised:
        step.report(output)
    assert raised.value.code == "no_call"
    for _ in range(2):
        step(model, optimizer, torch.randn(512, 64))
    step.report(output)
    found = dict(re.findall(r'<data value="\d+" data-name="([^"]+)" title="([\d,]+) bytes"', output.read_text()))  # fmt: skip
    memory = step.memory()
    assert found["total_bytes"] == f"{memory.total_bytes:,}"
    assert found["memory_limit_bytes"] == f"{memory.limit_bytes:,}"
    assert memory.extra_runs > 0
    shown = memory._repr_html_()
    assert f'<data value="{memory.total_bytes}"' in shown
    assert f"{memory.extra_runs} operators run again" in shown
    assert "The first step and later ones" in output.read_text()
    assert "What fills it, by dtype" in output.read_text()


def test_a_compiled_step_reports_bytes_by_dtype() -> None:
    import torch

    weight = torch.ones(64, 64, dtype=torch.float64, requires_grad=True)
    codes = torch.randint(-8, 8, (64, 64), dtype=torch.int8)

    def train_step(x: Any) -> Any:
        wide = codes.to(torch.float64)
        loss = (x @ wide @ weight).square().sum()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=1e-3)
        weight.grad = None
        return loss.float()

    step = roam.compile(train_step)
    for _ in range(2):
        step(torch.randn(32, 64, dtype=torch.float64))
    anatomy = step._anatomy()
    by_kind, by_dtype = anatomy.tables()[2:4]
    rows = {str(name): [cell.size_bytes for cell in cells] for name, *cells in by_dtype.rows}  # type: ignore[union-attr]
    assert rows["int8"] == [64 * 64, 0]
    assert rows["float64"][0] == 8 * (64 * 64 + 32 * 64)
    assert rows["sum"] == [by_kind.rows[-1][1].size_bytes, by_kind.rows[-1][3].size_bytes]  # type: ignore[union-attr]
    assert rows["sum"][1] == anatomy.planned.plan.peak_bytes
    assert sum(one for one, _ in rows.values()) == 2 * rows["sum"][0]
