"""What a graph says of itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import roam
from roam.report.remade import remade
from roam.report.summary import find_barrier
from training import plain_step

functional = torch.nn.functional


def clipped(model: Any, optimizer: Any, images: Any, labels: Any) -> Any:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def captured(step: Any) -> tuple[roam.Graph, int]:
    """The step's graph and the bytes of all its gradients, counted as the graph counts."""
    with roam.fake():
        net = torch.nn.Sequential(
            torch.nn.Linear(64, 128),
            torch.nn.Dropout(0.1),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 8),
        )
        optimizer = torch.optim.AdamW(net.parameters())
        batch = torch.randn(32, 64), torch.randint(0, 8, (32,))
    graph = roam.capture(step, net, optimizer, *batch)
    gradients = [tensor for tensor in graph.tensors if tensor.kind == "gradient"]
    assert len(gradients) == 4
    return graph, sum(tensor.counted_bytes for tensor in gradients)


def test_a_clip_by_the_global_norm_is_a_barrier_with_its_price() -> None:
    graph, gradient_bytes = captured(clipped)
    barrier = find_barrier(graph)
    assert barrier is not None
    assert (barrier.gradients, barrier.held_bytes) == (4, gradient_bytes)
    # The price is real: at that operator no order has less alive.
    plan = roam.optimize(graph)
    step = plan.order.tolist().index(barrier.operator)
    assert graph.live_bytes(plan.order)[step] >= gradient_bytes
    assert f"holds 4 gradients, {gradient_bytes / 1024:.2f} KiB" in graph.summary()


def test_updates_that_need_their_own_gradient_alone_have_no_barrier() -> None:
    graph, _ = captured(plain_step)
    assert find_barrier(graph) is None
    assert ["barrier", "none:"] in [line.split()[:2] for line in graph.summary().splitlines()]


def test_counts_are_the_graph_s() -> None:
    graph, _ = captured(plain_step)
    lines = [line.split() for line in graph.summary().splitlines()]
    operators = [line for line in lines if line[-1:] == ["operators"]]
    assert sum(int(count.replace(",", "")) for _, count, _ in operators) == graph.num_operators
    assert ["parameter", "4", "tensors"] in [line[:3] for line in lines]
    assert any(line[:2] == ["random", "numbers"] for line in lines)


def test_what_is_asked_and_split_is_told(tmp_path: Path) -> None:
    net = torch.nn.Linear(6, 3)
    optimizer = torch.optim.RAdam(net.parameters(), foreach=True)
    graph = roam.capture(plain_step, net, optimizer, torch.randn(4, 6), torch.randint(0, 3, (4,)))
    notes = dict(graph.notes)
    assert set(notes) == {"guarded", "compared", "computed guards", "split"}
    assert "metadata of 2 tensors" in notes["guarded"]
    assert notes["computed guards"].startswith("1 at every call: ")
    calls, parts = map(int, re.findall(r"\d+", notes["split"])[:2])
    assert parts == 2 * calls > 0
    assert all(text in graph.summary() for text in notes.values())
    graph.save(tmp_path / "graph.json")
    read = roam.Graph.load(tmp_path / "graph.json")
    assert (read, read.notes, read.digest) == (graph, graph.notes, graph.digest)


def test_notes_are_no_part_of_what_a_graph_is() -> None:
    one, other = roam.GraphBuilder("g"), roam.GraphBuilder("g")
    one.note("topic", "text")
    graph, plain_graph = one.build(), other.build()
    assert graph == plain_graph
    assert graph.digest == plain_graph.digest
    assert graph.notes == (("topic", "text"),)
    assert ["topic", "text"] in [line.split() for line in graph.summary().splitlines()]


@pytest.mark.parametrize("name", ["", "operators without tensors"])
def test_a_graph_made_by_hand_has_a_summary(name: str) -> None:
    builder = roam.GraphBuilder(name, "cpu")
    builder.operator("nothing")
    assert "1  operators" in builder.build().summary()
    assert "0 operators" in roam.GraphBuilder(name, "cpu").build().summary()


def test_what_is_kept_and_made_again_is_told_per_module() -> None:
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1))
        for _ in range(6)
    ]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(16, 4))

    def train_step(model, x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    graph = roam.capture(train_step, model, torch.randn(256, 16), random_states=True)
    plain = roam.optimize(graph)
    limit = plain.persistent_bytes + int(0.7 * (plain.total_bytes - plain.persistent_bytes))
    plan = roam.optimize(graph, memory_limit_bytes=limit)
    again = plan.recomputation
    assert again is not None
    found = remade(graph, again["sequence"])
    made = [tensor for tensor in graph.tensors if tensor.kind == "activation"]
    told = sum(one.kept_bytes + one.remade_bytes for one in found)
    assert told == sum(tensor.counted_bytes for tensor in made)
    assert sum(one.runs for one in found) > 0
    assert sum(one.remade_bytes for one in found) > 0
    extra_ns = sum(one.extra_ns for one in found)
    assert extra_ns / 1e9 == pytest.approx(again["extra_s"], rel=0.01)
    assert any(one.modules > 6 for one in found)
    text = plan.summary(graph)
    assert "made again" in text
    assert " x model" in text
    assert "made again" not in plain.summary(graph)
