"""`roam bench memory`: what its rows say is of what was planned and run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import roam
from roam.cli import main
from roam.report.table import format_bytes
from roam.runtime import offloading
from roam_bench import memory, memory_checkmate, memory_nets, memory_others, memory_prototypes
from roam_bench.memory_nets import NETS, Net
from roam_bench.memory_prototypes import Entry

_TINY = {"vocabulary": 64, "width": 32, "layers": 3, "heads": 2, "experts": 2}
TINY = Net(
    "tiny",
    "experts",
    "moe",
    {"batch": 4, "seq": 64, **_TINY},
    {"batch": 4, "seq": 48},
    ("blocks",),
    False,
)


@pytest.fixture(autouse=True)
def one_tiny_net(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmark has one net, which takes no time."""
    monkeypatch.setattr(memory, "NETS", (TINY,))
    yield
    for found in (
        memory._eager,
        memory._plain,
        memory._planned_without_limit,
        memory._small_without_limit,
    ):
        found.cache_clear()


def record(part: str, folder: Path) -> dict[str, Any]:
    assert (
        main(["bench", "memory", "--part", part, "--pairs", "1", "--output", str(folder), "--json"])
        == 0
    )
    found: dict[str, Any] = json.loads((folder / f"memory-{part}.json").read_text())
    return found


def test_plans_are_within_their_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = record("planned", tmp_path)["rows"]
    assert [row["percent"] for row in rows] == [75, 50, 35, 25, 15]
    found = [row for row in rows if row["outcome"] == "found"]
    assert found
    for row in rows:
        local = row["plain_bytes"] - row["persistent_bytes"]
        share = (row["limit_bytes"] - row["persistent_bytes"]) / local
        assert share == pytest.approx(row["percent"] / 100, abs=1e-3)
    for row in found:
        assert row["planned_bytes"] <= row["limit_bytes"]
        assert 0 <= row["least_share"] <= row["extra_share"]
    assert {row["outcome"] for row in rows} <= {"found", "refuted", "not found"}
    assert rows[-1]["outcome"] != "found"
    assert (tmp_path / "memory-planned.svg").exists()
    table = memory.planned_table({"rows": rows}).markdown()  # type: ignore[arg-type]
    assert f"{found[0]['extra_share']:+.1%} ({found[0]['least_share']:.1%})" in table


def test_a_plan_stands_beside_the_better_of_the_prototypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, plain = memory._planned_without_limit(TINY)
    whole = plain.total_bytes - plain.persistent_bytes
    entries = (
        Entry("greedy", "tiny", 90, whole * 9 // 10, 7.5),
        Entry("eviction", "tiny", 95, whole * 95 // 100, 30.0),
        Entry("eviction", "tiny", 80, whole * 8 // 10, None),
        Entry("greedy", "another", 50, 1, 1.0),
    )
    monkeypatch.setattr(memory_prototypes, "ENTRIES", entries)
    rows = record("prototypes", tmp_path)["rows"]
    budgets = [row["limit_bytes"] - row["persistent_bytes"] for row in rows]
    assert budgets == [entry.local_bytes for entry in entries[:3]]
    assert all(row["planned_bytes"] <= row["limit_bytes"] for row in rows)
    table = memory.prototypes_table({"rows": rows})  # type: ignore[arg-type,typeddict-item]
    _, _, *lines = table.markdown().splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [line[5:7] for line in cells] == [
        ["+7.5%", "+7.5%"], ["+30.0%", "+7.5%"], ["not found", "not found"]
    ]  # fmt: skip


@pytest.mark.long
def test_training_keeps_the_budget_and_the_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARES", (0.75,))
    made = record("trained", tmp_path)
    found = [row for row in made["rows"] if row["outcome"] == "found"]
    assert found
    for row in found:
        assert row["measured_bytes"] <= row["limit_bytes"] < row["plain_bytes"]
        assert row["is_equal"] is True
        assert row["timed_operators"] > 0
        assert row["timed_share"] is not None
    assert f"within the budget in {len(found)} of {len(found)}" in memory.totals_line(made)


@pytest.mark.long
def test_offloading_stands_beside_recomputation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "OFFLOAD_SHARES", (0.6,))
    monkeypatch.setattr(offloading, "block_ns", lambda tier, room_bytes: 1)
    made = record("offload", tmp_path)
    ways = {row["way"]: row for row in made["rows"]}
    alone, offloads = ways["roam"], ways["roam, offloading"]
    assert alone["offloaded_bytes"] == 0
    assert offloads["offloaded_bytes"] > 0
    assert offloads["loaded_bytes"] >= offloads["offloaded_bytes"]
    assert 0 < offloads["transfers_share"] <= offloads["extra_share"] < alone["extra_share"]
    for row in (alone, offloads):
        assert row["measured_bytes"] <= row["limit_bytes"]
        assert row["is_equal"] is True
    table = memory.offload_table({"rows": made["rows"]})  # type: ignore[arg-type,typeddict-item]
    assert format_bytes(offloads["offloaded_bytes"]) in table.markdown()


def test_bits_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = memory._eager(TINY)
    eager.bits[0] = eager.bits[0] + 1
    row = memory.train(TINY, 0.9, 0)
    assert row["is_equal"] is False
    assert memory._bits(row) == "different"


def test_checkpoints_take_less_and_leave_eagers_bits() -> None:
    ways = {way.name: way for way in memory_others.OTHERS}
    eager = memory.train_other(TINY, ways["eager"], 0)
    blocks = memory.train_other(TINY, ways["checkpoint each block"], 0)
    assert eager["is_equal"]
    assert blocks["is_equal"]
    assert blocks["measured_bytes"] < eager["measured_bytes"]
    assert not ways["checkpoint segments"].applies(TINY)


def test_segments_are_as_long_as_the_root_of_the_number_of_blocks() -> None:
    net = next(net for net in NETS if net.name == "vit_b_16")
    made = memory_nets.build(net, small=True)
    way = next(way for way in memory_others.OTHERS if way.name == "checkpoint segments")
    way.run(net, made.train_step, made.model)
    segments = made.model.get_submodule(net.blocks[0])
    assert [len(segment.blocks) for segment in segments] == [2, 2]  # type: ignore[union-attr,arg-type]


def test_measured_memory_of_a_step_is_what_it_allocates() -> None:
    def way(train_step: Any, model: torch.nn.Module) -> Any:
        def step(model: torch.nn.Module, optimizer: Any, *batch: Any) -> torch.Tensor:
            made = torch.ones(250_000)  # a million bytes
            return made[:1].sum()

        return step

    assert 1_000_000 <= memory._Trained(TINY, way).local_bytes() <= 1_001_000


@pytest.mark.sweep
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.name)
def test_activations_are_most_of_a_small_nets_peak(net: Net) -> None:
    graph = memory_nets.capture(net, small=True)
    live = graph.live_bytes()
    peak = int(live.argmax())
    activations = 0
    for tensor in graph.tensors:
        if tensor.kind == "activation":
            users = [int(graph.positions[user]) for user in graph.users(tensor.id)]
            creator = graph.creator(tensor.id)
            assert creator is not None
            begin = int(graph.positions[creator])
            if begin <= peak <= max(users, default=begin):
                activations += tensor.counted_bytes
    assert activations >= 0.8 * live[peak]


def test_every_net_has_a_name_of_its_own_and_a_small_size() -> None:
    assert len({net.name for net in NETS}) == len(NETS) == 12
    assert {net.kind for net in NETS} == {
        "convolutional", "transformer", "recurrent", "state space", "experts", "searched"
    }  # fmt: skip


def chain(layers: int) -> roam.Graph:
    """Forward and backward pass of a chain: each layer is needed by its backward operator."""
    builder = roam.GraphBuilder("chain")
    weight = builder.tensor("weight", 64, kind="parameter", residency="persistent")
    made = [builder.tensor(f"forward {at}", 4096, kind="activation") for at in range(layers)]
    for before, after in zip([weight, *made[:-1]], made, strict=True):
        builder.operator("forward", reads=[before], creates=[after], time_ns=1000, repeatable=True)
    gradients: list[int] = []
    for activation in reversed(made):
        gradients.append(builder.tensor("gradient", 4096))
        reads = [activation, *gradients[-2:-1]]
        builder.operator(
            "backward", reads=reads, creates=gradients[-1:], time_ns=2000, repeatable=True
        )
    return builder.build()


def test_checkmates_programs_keep_to_their_room_and_none_is_below_the_bound() -> None:
    pytest.importorskip("highspy")
    graph = chain(6)
    room = int(graph.live_bytes().max())
    assert memory_checkmate.solve(graph, "integer program", room).least_ns == 0
    tight = room - 2 * 4096
    exact, rounded = (memory_checkmate.solve(graph, way, tight) for way in memory_checkmate.METHODS)
    assert exact.solution is not None
    assert exact.solution.live_bytes <= tight
    assert exact.least_ns == exact.solution.extra_ns > 0
    if rounded.solution is not None:
        assert rounded.solution.live_bytes <= tight
        assert rounded.solution.extra_ns >= exact.solution.extra_ns
    plan = roam.optimize(graph, memory_limit_bytes=tight + graph.persistent_bytes)
    assert plan.recomputation is not None
    assert plan.recomputation["least_extra_s"] <= exact.least_ns / 1e9
    assert memory_checkmate.solve(graph, "integer program", 2 * 4096).solution is None


def test_what_changes_a_tensor_in_place_runs_with_what_made_it() -> None:
    graph = memory_checkmate.capture("convolutions")
    for node in memory_checkmate.nodes_of(graph):
        names = [graph.operator(operator).name for operator in node.operators]
        if "aten.relu_.default" in names:
            assert "aten.native_batch_norm.default" in names
            assert node.is_repeatable


def test_graphs_that_are_too_large_for_checkmates_program_are_refused() -> None:
    with pytest.raises(ValueError, match="302 nodes; at most 150"):
        memory_checkmate.solve(chain(151), "integer program", 1 << 30)


@pytest.mark.long
def test_tiles_stand_beside_whole_operators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "TILED", ("tiny",))
    monkeypatch.setattr(memory, "TILED_SHARE", 0.3)
    rows = record("tiles", tmp_path)["rows"]
    assert [row["way"] for row in rows] == ["roam", "roam, tiles"]
    assert len({row["limit_bytes"] for row in rows}) == 1
    tiled = rows[1]
    assert tiled["outcome"] == "found"
    assert tiled["planned_bytes"] <= tiled["limit_bytes"]
    table = memory.tiles_ways({"rows": rows}).markdown()  # type: ignore[arg-type,typeddict-item]
    assert f"{tiled['extra_share']:+.1%}" in table
