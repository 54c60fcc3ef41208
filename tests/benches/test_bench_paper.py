"""The paper's accounting and table, and the suite, on steps small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peak
import pytest
import torch

import roam
from roam import cli
from roam._core import baseline_order
from roam_bench import accounting, paper, paper_models, suite
from roam_bench.results import read_json
from training import plain_step

MIB = 2**20


@pytest.fixture(scope="module")
def alexnet() -> roam.Graph:
    return paper.paper_graph("alexnet", 1)


def small_graph(*layers: torch.nn.Module) -> roam.Graph:
    """The first step of some layers, with Adam and weight decay."""
    with roam.fake("cpu"):
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-4, foreach=False)
        batch = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    return roam.capture(plain_step, model, optimizer, *batch, step="first")


def normed_net(activation: torch.nn.Module) -> roam.Graph:
    convolution = torch.nn.Conv2d(3, 4, 3, padding=1)
    return small_graph(
        convolution,
        torch.nn.BatchNorm2d(4),
        activation,
        torch.nn.Flatten(),
        torch.nn.Linear(256, 5),
    )


def test_the_published_table_gives_the_abstract() -> None:
    rows = paper.published()
    assert len(rows) == 17
    compared = [row for row in rows if row["roam_ms_mib"] is not None]
    assert len(compared) == 14
    of_pytorch = [
        1 - r["roam_ss_mib"] / (r["pytorch_order_mib"] / (1 - r["pytorch_fragmentation"]))
        for r in compared
    ]
    of_lescea = [1 - r["roam_ss_mib"] / r["lescea_llfb_mib"] for r in compared]
    of_model = [1 - r["roam_ms_mib"] / r["model_ms_mib"] for r in compared]
    faster = [r["model_ms_s"] / r["roam_ms_s"] for r in compared]
    means = [sum(values) / 14 for values in (of_pytorch, of_lescea, of_model, faster)]
    assert [round(value, 3) for value in means[:3]] == [0.357, 0.133, 0.272]
    assert round(means[3], 1) == 53.7


def test_the_accounting_counts_as_the_paper_does() -> None:
    captured = normed_net(torch.nn.ReLU())
    graph = accounting.paper(captured)
    assert (captured.accounting, graph.accounting, graph.alignment_bytes) == ("", "paper", 1)
    sizes: dict[tuple[str, str], int] = {}
    for tensor in graph.tensors:
        key = (tensor.kind, tensor.residency)
        sizes[key] = sizes.get(key, 0) + tensor.counted_bytes
    parameters = 4 * ((27 * 4 + 4) + (4 + 4) + (256 * 5 + 5))
    assert graph.persistent_bytes == sizes["parameter", "persistent"] == parameters
    # Two moments a parameter, and a step count of 4 bytes each.
    assert sizes["optimizer_state", "step_local"] == 2 * parameters + 6 * 4
    assert sizes["input", "step_local"] == 2 * 3 * 8 * 8 * 4 + 2 * 8
    assert {residency for _, residency in sizes} == {"persistent", "step_local"}
    assert graph.operator(graph.creator(first_input(graph)) or 0).position == 0
    assert not any(operator.reuse or operator.workspace_bytes for operator in graph.operators)
    counted = [one for one in captured.operators if one.creates or one.mutates]
    assert [one.name for one in graph.operators] == ["input", *(one.name for one in counted)]
    assert len(counted) < captured.num_operators


@pytest.mark.parametrize("order", ["program", "reversed", "eager_updates", "inductor_dfs"])
def test_orders_are_orders_of_the_captured_step(order: str) -> None:
    captured = normed_net(torch.nn.ReLU())
    graph = accounting.paper(captured)
    planned = graph.program_order if order == "program" else baseline_order(graph, order)
    captured_as = [one.id for one in captured.operators if one.creates or one.mutates]
    counted = [captured_as[operator - 1] for operator in planned if operator]
    whole: dict[int, None] = {}

    def run(operator: int) -> None:
        for before in captured.predecessors(operator):
            if before not in whole:
                run(before)
        whole[operator] = None

    for operator in (*counted, *range(captured.num_operators)):
        if operator not in whole:
            run(operator)
    # What is left out can run when it is needed, and draws nothing along that counts.
    assert [operator for operator in whole if operator in captured_as] == counted
    captured.live_bytes(list(whole))  # Refuses what is no order of the step.
    again = accounting.in_order(graph, planned.tolist())
    assert again.program_order.tolist() == planned.tolist()
    assert again.live_bytes().tolist() == graph.live_bytes(planned).tolist()


def first_input(graph: roam.Graph) -> int:
    return next(tensor.id for tensor in graph.tensors if tensor.kind == "input")


def test_state_is_made_at_its_update_or_where_eager_makes_it() -> None:
    captured = normed_net(torch.nn.ReLU())
    late, early = accounting.paper(captured), accounting.paper(captured, state_at_updates=False)
    made = [t.id for t in late.tensors if t.kind == "optimizer_state" and t.size_bytes > 4]
    first_write = min(early.operator(early.users(t)[0]).position for t in made)
    assert all(early.operator(creator(early, t)).position < first_write for t in made)
    assert any(late.operator(creator(late, t)).position > first_write for t in made)
    assert late.live_bytes().max() < early.live_bytes().max()
    # Only program order differs.
    assert (
        roam.optimize(late, reuse=False).peak_bytes == roam.optimize(early, reuse=False).peak_bytes
    )


def creator(graph: roam.Graph, tensor: int) -> int:
    found = graph.creator(tensor)
    assert found is not None
    return found


@pytest.mark.parametrize(("activation", "moved"), [(torch.nn.ReLU6(inplace=True), True), (torch.nn.SiLU(inplace=True), False)])  # fmt: skip
def test_the_copy_before_an_in_place_relu6_may_wait(
    activation: torch.nn.Module, moved: bool
) -> None:
    captured = normed_net(activation)
    for copies_may_wait in (True, False):
        graph = accounting.paper(captured, copies_may_wait=copies_may_wait)
        (write,) = [
            o for o in graph.operators if o.name.startswith(("aten.hardtanh_.", "aten.silu_."))
        ]
        (copy,) = [
            o
            for o in graph.operators
            if o.name.startswith("aten.clone.") and o.reads == write.mutates
        ]
        waits = moved and copies_may_wait
        assert (copy.position == write.position + 1) == waits
        assert (copy.position == write.position - 1) != waits


def test_attention_of_old_has_the_values_of_today() -> None:
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(12, 3, batch_first=True).double()
    x = torch.randn(2, 5, 12, dtype=torch.double)
    expected, _ = attention(x, x, x, need_weights=False)
    found, _ = paper_models.CopyingAttention(attention)(x, x, x, need_weights=False)
    torch.testing.assert_close(found, expected)


def test_alexnet_comes_to_the_published_figures(alexnet: roam.Graph) -> None:
    (row,) = [row for row in paper.published() if (row["model"], row["batch"]) == ("alexnet", 1)]
    program = (alexnet.persistent_bytes + int(alexnet.live_bytes().max())) / MIB
    assert program == pytest.approx(row["pytorch_order_mib"], rel=1e-3)
    plan = roam.optimize(alexnet, reuse=False)
    assert plan.status == "optimal"
    assert plan.total_bytes / MIB == pytest.approx(row["roam_ss_mib"], abs=0.01)


def test_bench_paper_puts_all_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "bench",
        "paper",
        "--only",
        "alexnet",
        "--whole-program",
        "0",
        "--output",
        str(tmp_path),
    ]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "665.08" in out
    record = read_json(tmp_path / "paper.json")
    rows: list[dict[str, Any]] = record["rows"]
    names = [name for name, _ in paper.methods("alexnet")]
    assert [(row["batch"], row["method"]) for row in rows] == [
        (b, name) for b in (1, 32) for name in names
    ]
    bounds = {row["batch"]: row["bound_bytes"] for row in rows if row["method"] == paper.OURS}
    one_stream = [row for row in rows if row["method"] != paper.OURS_STREAMS]
    assert all(
        row["total_bytes"] >= row["peak_bytes"] >= bounds[row["batch"]] for row in one_stream
    )
    assert paper.published_table(record).markdown().count("\n") == 3
    abstract = paper.abstract_table(record).markdown()
    assert "35.7%" in abstract
    methods, extremes = (
        paper.methods_table(record).markdown(),
        paper.extremes_table(record).markdown(),
    )
    assert all(f"| {name} |" in methods for name in names)
    # What is beyond the plan is the order's or the layout's.
    (inductor,) = [
        line.split("|") for line in extremes.splitlines() if line.startswith("| inductor, ")
    ]
    found = {row["method"]: row for row in rows if row["batch"] == 32}
    beyond = (
        found["inductor_lpmf, caching_allocator"]["total_bytes"] - found[paper.OURS]["total_bytes"]
    )
    assert inductor[5].strip() == "alexnet/32"
    assert sum(float(cell) for cell in inductor[6:8]) == pytest.approx(beyond / MIB, abs=0.02)
    assert (tmp_path / "paper.svg").exists()
    assert (tmp_path / "paper.png").exists()


def test_what_is_live_at_a_peak_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 12 MiB, 14 beside them, 13 beside these; 15 find no free block that is large enough.
    builder = roam.GraphBuilder()
    sizes = ((12, 0, 1), (14, 1, 2), (13, 2, 2), (15, 3, 3))
    tensors = [builder.tensor(f"t{at}", size * MIB) for at, (size, _, _) in enumerate(sizes)]
    for now in range(4):
        made = [
            tensor for tensor, (_, first, _) in zip(tensors, sizes, strict=True) if first == now
        ]
        read = [
            tensor
            for tensor, (_, first, last) in zip(tensors, sizes, strict=True)
            if first < now <= last
        ]
        builder.operator(f"op{now}", reads=read, creates=made)
    path = tmp_path / "graph.json"
    builder.build().save(path)
    assert peak.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "peak at step 2 of 4, op2 : 27.00 MiB" in out
    assert "14.00  t1" in out
    assert "13.00  t2" in out
    assert "t0" not in out.split("reserved")[0]
    # The segments of 12 and 14 MiB, a third of 14, since 13 do not fit into the 12 and the 14 are
    # in use, and one of 16.
    assert "reserved 56.00 MiB\n" in out
    assert "16.00  for t3 (15.00), 40.00 being free" in out


def test_the_committed_rows_can_be_shown_in_parts() -> None:
    record = read_json(Path(__file__).parents[2] / "docs/benchmarks/paper.json")
    of_gpt2 = {**record, "rows": [row for row in record["rows"] if row["model"] == "gpt2-xl"]}
    assert [part if isinstance(part, str) else part.markdown() for part in paper.summary(of_gpt2)]


def test_a_fixed_order_leaves_the_layout_alone(alexnet: roam.Graph) -> None:
    order = alexnet.program_order.tolist()
    fixed = accounting.in_order(alexnet, order, fixed=True)
    plan = roam.optimize(fixed, reuse=False)
    assert plan.order.tolist() == order
    assert plan.peak_bytes == alexnet.live_bytes().max()


def test_bench_suite_says_what_is_saved_and_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "suite", "--only", "gpt2-tiny", "--batch", "2", "--output", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert "gpt2-tiny" in capsys.readouterr().out
    record = read_json(tmp_path / "suite.json")
    rows = record["rows"]
    assert [(row["optimizer"], row["reuse"]) for row in rows] == [
        (o, r) for o in ("adamw", "sgd") for r in ("no", "yes")
    ]
    for row in rows:
        assert row["bound_bytes"] <= row["step_local_bytes"]
        assert row["program_order_bytes"] <= row["caching_allocator_bytes"]
        assert suite.saving(row, "program_order_bytes") <= suite.saving(
            row, "program_order_bytes", persistent=False
        )
    assert "of 2 steps" in suite.nothing_saved(record)
    for line in suite.extremes_table(record).markdown().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        least, most = (
            0.0 if cells[at] == "none" else float(cells[at].removesuffix("%")) for at in (3, 5)
        )
        assert least <= most
        assert cells[2].startswith("gpt2-tiny/2/")
        assert cells[4].startswith("gpt2-tiny/2/")
    assert suite.means_table(record).markdown().count("\n") == 5
    # Another batch is another run, whose rows do not mix with these.
    (tmp_path / "suite.rows.jsonl").write_text(rows_of(record))
    arguments[arguments.index("2")] = "1"
    assert cli.main([*arguments, "--json"]) == 0
    assert {row["batch"] for row in json.loads(capsys.readouterr().out)["rows"]} == {1}


def test_bench_suite_plans_first_steps_and_keeps_their_graphs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "--only",
        "gpt2-tiny",
        "--batch",
        "1",
        "--step",
        "first",
        "--graphs",
        str(tmp_path / "graphs"),
    ]
    assert cli.main(["bench", "suite", *asked, "--output", str(tmp_path)]) == 0
    assert "2 of 2 plans are proved to be optimal" in capsys.readouterr().out
    record = read_json(tmp_path / "suite-first.json")
    graph = roam.Graph.load(tmp_path / "graphs/gpt2-tiny-1-first-adamw.json.gz")
    assert [(row["optimizer"], row["reuse"], row["graph"]) for row in record["rows"]] == [
        ("adamw", reuse, graph.digest) for reuse in ("no", "yes")
    ]
    states = [tensor for tensor in graph.tensors if tensor.kind == "optimizer_state"]
    assert any(graph.creator(tensor.id) is not None for tensor in states)
    record["rows"][1]["gap"] = 0.02
    assert (
        "1 of 2 plans are proved to be optimal, and 1 to be within 1% of the least"
        in suite.proved(record)
    )
    assert [row["reuse"] for row in suite.gaps_table(record).rows] == ["yes"]


def rows_of(record: dict[str, Any]) -> str:
    """As a run keeps them that was stopped before its end."""
    head = {name: value for name, value in record.items() if name != "rows"}
    return "".join(json.dumps(line) + "\n" for line in (head, *record["rows"][:1]))


def test_savings_are_shares_of_what_they_are_compared_with() -> None:
    row = {
        "persistent_bytes": 100,
        "step_local_bytes": 50,
        "program_order_bytes": 100,
        "caching_allocator_bytes": 50,
    }
    assert suite.saving(row, "program_order_bytes") == 0.25
    assert suite.saving(row, "program_order_bytes", persistent=False) == 0.5
    assert suite.saving(row, "caching_allocator_bytes") == 0
