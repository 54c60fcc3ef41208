"""`roam bench parallelize`: an architecture on a mesh, and what a rank measures of a small net."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

import roam
from newer import needs_2_15
from one_rank import alone
from roam.sharding import Costs, Link
from roam.sharding.planning import Planning
from roam.sharding.trace import traced
from roam.sharding.twin import twin_of
from roam_bench import parallelize, parallelize_baselines, parallelize_trained

pytestmark = pytest.mark.filterwarnings("ignore")  # gloo warns of the machine's name


def small_llama(kind: str, layers: int) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    with roam.fake():
        model = transformers.LlamaForCausalLM(config).train()
        tokens = torch.randint(3, 64, (4, 16))
        return model, torch.optim.AdamW(model.parameters(), foreach=False), tokens


def failing(kind: str, layers: int) -> Any:
    raise KeyError("width")


@needs_2_15
def test_a_shipped_plan_costs_no_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelize, "_made", small_llama)
    rows = []
    for mesh, layers in (((2,), 2), ((2, 2), 2), ((8,), 12)):
        row = parallelize.measure("llama", mesh, layers)
        rows.append(
            {"architecture": "llama", "mesh": "x".join(map(str, mesh)), "layers": layers, **row}
        )
        assert row["outcome"] == "found", row["reason"]
        assert row["bound_ns"] <= row["ns"] <= row["whole_ns"]
        assert mesh == (8,) or row["ns"] <= row["shipped_ns"]  # 8 ranks have no heads of 4
        assert row["megatron_ns"] == row["shipped_ns"]  # its plan is Megatron's
        assert row["left_out"] == ""
    monkeypatch.setattr(parallelize, "_made", failing)
    failed = parallelize.measure("llama", (4,), 2)
    assert failed["outcome"] == "failed"
    rows.append({"architecture": "llama", "mesh": "4", "layers": 2, **failed})
    record = {"rows": rows, "settings": {"layers": 2}}
    meshes, megatron, _ = parallelize.summary(record)
    assert [row["as shipped"] for row in megatron.rows] == [1, 1]
    assert [row["mesh"] for row in meshes.rows] == ["2", "2x2", "8"]
    assert [row["compared"] for row in meshes.rows] == [1, 1, 0]
    assert [row["no dearer"] for row in meshes.rows] == [1, 1, 0]
    deep = {"rows": rows[2:3]}
    assert "| 12 |" in parallelize.depths_table(deep).markdown()
    parallelize.plot(deep, Figure())


class Latent(torch.nn.Module):
    """Attention with keys and values through a narrow layer, and a router that feeds none."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "narrow", "wide", "out", "router"):
            setattr(self, name, torch.nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.query(x) * self.wide(self.narrow(x).relu())
        return x + self.out(mixed) * self.router(x).softmax(-1)


class Words(torch.nn.Module):
    def __init__(self, *blocks: torch.nn.Module) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)
        self.blocks = torch.nn.Sequential(*blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(tokens)))

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.words

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def square_step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def words(*blocks: torch.nn.Module) -> tuple[Any, Any, torch.Tensor]:
    net = Words(*blocks)
    return net, torch.optim.SGD(net.parameters()), torch.randint(64, (4, 8))


def test_megatrons_rule() -> None:
    net, optimizer, tokens = words(Latent(), Latent())
    trace = traced(square_step, twin_of(net, optimizer, (tokens,)))
    plan = parallelize_baselines.megatron_plan(trace, net)
    styles = {"query": "colwise", "wide": "colwise", "out": "rowwise"}
    assert plan == {"words": "embedding_rowwise", "head": "colwise_gather_output"} | {
        f"blocks.{block}.{name}": style for block in (0, 1) for name, style in styles.items()
    }
    net, optimizer, tokens = words(torch.nn.Linear(16, 16))
    trace = traced(square_step, twin_of(net, optimizer, (tokens,)))
    assert parallelize_baselines.megatron_plan(trace, net) is None


@pytest.mark.parametrize("ns", [1, 100, 10_000])
def test_an_integer_program_of_all_layers_apart_has_the_optimum(ns: int) -> None:
    net, optimizer, tokens = words(*(Latent() for _ in range(3)))
    costs = Costs(flops_per_ns=0.1, bytes_per_ns=1, link=Link(latency_ns=ns, bytes_per_ns=10))
    plans = Planning(square_step, net, optimizer, (tokens,), mesh=2, data=1, costs=costs)
    (one,) = plans.candidates()
    row = parallelize_baselines.measure(one.nodes, "cbc")
    assert row["is_finished"]
    assert row["program_ns"] == row["ns"] == row["bound_ns"] == one.chosen.ns
    rows = [{"architecture": "words", "layers": 3, "solver": "cbc", **row}]
    assert "| yes |" in parallelize_baselines.programs_table({"rows": rows}).markdown()


def small(name: str) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 9))

    def train_step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), torch.ones(1, 9).expand(len(x), 9))
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    return net, optimizer, (torch.randn(4, 8),), train_step


def test_one_rank_trains_in_the_memory_that_was_certified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    net, optimizer, batch, train_step = small("")
    sharding = Planning(train_step, net, optimizer, batch, mesh=(1, 1), data=1).within(None)
    sent = dataclasses.replace(sharding, plan=None, trace=None, nodes=())  # type: ignore[arg-type]
    path = tmp_path / "sharding"
    path.write_bytes(pickle.dumps(sent))
    monkeypatch.setattr(parallelize_trained, "made", small)
    alone(monkeypatch, "parallelize", "mlp", str(path))
    parallelize_trained.main()
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["is_equal"]
    assert row["loss_difference"] < 1e-6
    # A run looks at the state of PyTorch's generator, which takes five thousand bytes.
    assert abs(row["measured_bytes"] - sharding.total_bytes) <= 5100
    key = {"net": "mlp", "data": 1, "tensor": 1, "parameters": "whole", "styles": 0}
    rows = [{**key, "certified_bytes": sharding.total_bytes, **row}]
    assert "equal" in parallelize.trained_table({"rows": rows}).markdown()
    assert parallelize.trained_line({"rows": rows}).startswith(f"{len(rows)} of {len(rows)} rows")
