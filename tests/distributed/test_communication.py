"""Plans of one rank of many, made in one process, and what the rank waits for others by the model
of time.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forked
import roam
from newer import needs_2_15
from roam import cli, zoo
from roam.distributed import collectives
from roam.distributed.collectives import Group, Launch, Pending
from roam.program.links import Links, Transfer
from roam.report.communication import Communication, least_ns, simulated
from roam.torch_compat.private import shard_parts
from roam.zoo.sharding import WAYS, Parts, Sharding, ShardingError

MODEL, SEQ = "llama-tiny", 16


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What `roam plan --json` prints."""
    code = cli.main(["plan", MODEL, "--seq", str(SEQ), "--json", *options])
    assert code == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


@pytest.fixture(scope="module")
def parameter_bytes() -> int:
    made = zoo.build(MODEL, seq=SEQ)
    return sum(parameter.nbytes for parameter in made.model.parameters())


# -- one rank of many


def by_kind(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in values["communication"]["collectives"]}


@pytest.mark.sweep
@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module"
)  # what tensor parallelism returns is a view
@pytest.mark.parametrize(
    "way", [way if way == "tp" else pytest.param(way, marks=needs_2_15) for way in WAYS]
)
def test_the_command_plans_a_rank(
    way: str, capsys: pytest.CaptureFixture[str], parameter_bytes: int
) -> None:
    pair = ("--tp", "2") if way == "fsdp+tp" else ()
    world = 2 if way == "tp" else 4
    values = planned(capsys, "--world", str(world), "--shard", way, *pair)
    assert not dist.is_initialized()
    assert values["verified"]
    found, communication = by_kind(values), values["communication"]
    compute_s, time_s = communication["compute_s"], communication["time_s"]
    assert 0 <= communication["least_exposed_s"] <= communication["exposed_s"] <= time_s
    assert time_s == pytest.approx(sum(one["time_s"] for one in found.values()))
    assert compute_s > 0
    # Parameters and AdamW's two moments.
    of_state = values["persistent_bytes"] / (3 * parameter_bytes)
    if way == "ddp":
        assert found["all-reduce"]["size_bytes"] == parameter_bytes
        assert of_state == pytest.approx(1, abs=0.02)
    elif way == "tp":
        # Two layers, attention and MLP, forward and backward.
        assert found["all-reduce"]["count"] >= 8
        assert 0.5 < of_state < 1
    elif way == "fsdp":
        # The blocks are gathered again for the backward pass, the rest is not.
        assert (found["all-gather"]["count"], found["reduce-scatter"]["count"]) == (5, 3)
        assert found["reduce-scatter"]["size_bytes"] == parameter_bytes
        assert of_state == pytest.approx(1 / 4, abs=0.02)
    else:
        assert found["reduce-scatter"]["count"] == 3
        assert found["all-reduce"]["count"] >= 8
        assert 1 / 4 < of_state < 1 / 2


@needs_2_15
def test_ranks_on_several_machines_wait_longer() -> None:
    variant = zoo.capture_rank(MODEL, Sharding("fsdp", 16, 15), seq=SEQ)
    program, graph = variant.program, variant.graph
    plan = roam.optimize(graph)
    near, far, slow = (
        Communication.of(program, graph, plan, links)
        for links in (Links(machine_ranks=16), Links(), Links(far_bytes_per_ns=1))
    )
    assert near.time_s < far.time_s < slow.time_s
    assert near.exposed_s < far.exposed_s < slow.exposed_s
    assert near.compute_s == far.compute_s == slow.compute_s
    assert "on several machines" in str(far)
    assert "on several machines" not in str(near)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--world", "4"], "needs both"),
        (["--shard", "fsdp"], "needs both"),
        (["--world", "4", "--shard", "ddp", "--rank", "4"], "no rank 4 of 4"),
        (["--world", "4", "--shard", "fsdp", "--tp", "2"], "fsdp+tp"),
        (["--world", "6", "--shard", "fsdp+tp", "--tp", "4"], "cannot be divided into groups of 4"),
        (["--world", "4", "--shard", "ddp", "--streams", "2"], "one stream"),
        (["--world", "3", "--shard", "tp"], "not divisible by 3"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    options: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", MODEL, *options]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "count"), [(10, 4), (5, 4), (3, 4), (8, 4), (0, 2), (7, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_those_that_pytorch_makes(rows: int, count: int, dim: int) -> None:
    whole = torch.randn((rows, 3) if dim == 0 else (3, rows))
    holder, name = shard_parts()
    expected, found = getattr(holder, name)(whole, count, dim=dim), Parts(whole, count, dim=dim)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
        assert (one.shape, one.stride()) == (other.shape, other.stride())


def test_an_architecture_without_a_plan_is_not_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "gpt2-tiny", "--world", "2", "--shard", "tp"]) == 2
    assert "this model has none" in capsys.readouterr().err
    assert not dist.is_initialized()


@pytest.mark.parametrize("way", WAYS)
def test_ranks_of_devices_that_are_not_there(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ShardingError, match="planned for the CPU, and not for cuda"):
        zoo.capture_rank("llama-tiny", Sharding(way, 2), device="cuda", seq=16)
    assert not dist.is_initialized()


def test_a_sharding_says_what_it_is() -> None:
    assert str(Sharding("fsdp+tp", 64)) == "fsdp+tp on 64 ranks, 8 for each layer, rank 0"
    with pytest.raises(ShardingError, match="not 'zero'"):
        Sharding("zero", 4)


OWN = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import roam

dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
with roam.fake():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 1024)


def train_step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


step = roam.compile(train_step)
print(step.plan(x).total_bytes)
found = step.communication()
print(found)
print(sum(one.count for one in found.collectives))
"""


@needs_2_15
def test_a_step_of_the_users_own(tmp_path: Path) -> None:
    done = forked.python("-c", OWN, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    total, *table, count = done.stdout.split("\n")[:-1]
    layer_bytes = 4 * (1024 * 1024 + 1024)
    # Two layers are gathered at once, with a gradient; what persists is a 64th, three times.
    assert 2 * layer_bytes < int(total) < 6 * layer_bytes
    assert any("all-gather" in line for line in table)
    assert int(count) == 4 + 4 + 4  # gathered twice, and reduced


# -- the cost model


def test_a_collective_goes_round_the_ring() -> None:
    links = Links(machine_ranks=4, near_bytes_per_ns=2, far_bytes_per_ns=1, near_hop_ns=10, far_hop_ns=100)  # fmt: skip
    near, far, alone = (Group("g", ranks, 0) for ranks in ((0, 1, 2, 3), (0, 4), (5,)))
    assert links.time_ns("_allgather_base_", near, 800) == 800 * 3 // 4 // 2 + 3 * 10
    assert links.time_ns("allreduce_", near, 800) == 2 * (800 * 3 // 4 // 2 + 3 * 10)
    assert links.time_ns("_reduce_scatter_base_", far, 800) == 400 + 100
    assert links.time_ns("allreduce_", alone, 800) == 0


def random_step(seed: int) -> tuple[roam.Graph, list[Transfer], list[int], dict[int, int]]:
    """A small step whose collectives, of two groups, read and write what operators make."""
    draw = random.Random(seed)
    builder = roam.GraphBuilder(f"step {seed}")
    made = [builder.tensor("x", 64, residency="enters")]
    times: list[int] = []
    found: list[Transfer] = []
    taken: dict[int, int] = {}
    while len(times) < 7:
        number, source = len(times), draw.choice(made)
        target = builder.tensor(f"t{number}", 64)
        if draw.random() < 0.4 and number < 6:
            launch = builder.operator("launch", reads=[source], creates=[target])
            wait = builder.operator("wait", mutates=[target])
            builder.control(launch, wait)
            group = Group(draw.choice("ab"), (0, 1), 0)
            found.append(Transfer(number, number + 1, "broadcast_", group, 64))
            taken[number] = draw.randrange(1, 30)
            times += [0, 0]
        else:
            reads = [source, draw.choice(made)]
            builder.operator("compute", reads=list(dict.fromkeys(reads)), creates=[target])
            times.append(draw.randrange(1, 20))
        made.append(target)
    return builder.build(), found, times, taken


@pytest.mark.parametrize("seed", range(40))
def test_no_order_waits_less_than_the_bound(seed: int) -> None:
    graph, found, times, taken = random_step(seed)
    least = max(least_ns(graph, found, taken, times) - sum(times), 0)
    waits = []
    for order in itertools.permutations(range(len(times))):
        place = {number: at for at, number in enumerate(order)}
        if all(
            place[before] < place[number]
            for number in order
            for before in graph.predecessors(number)
        ):
            exposed, compute_ns, total_ns = simulated(found, taken, times, order)
            assert compute_ns == sum(times)
            assert total_ns == sum(taken.values())
            waits.append(sum(exposed.ns.values()))
    assert least <= min(waits)


def test_the_bound_is_reached() -> None:
    found = 0
    for seed in range(40):
        graph, transfers, times, taken = random_step(seed)
        order = graph.program_order.tolist()
        exposed, _, _ = simulated(transfers, taken, times, order)
        least = max(least_ns(graph, transfers, taken, times) - sum(times), 0)
        found += least > 0 and least == sum(exposed.ns.values())
    assert found


# -- gathers that run again


def sharded_step(layers: int) -> roam.Graph:
    """Every layer's weight is gathered before its forward pass, and kept for the backward pass."""
    builder = roam.GraphBuilder("sharded")
    made = [builder.tensor("x", SMALL_BYTES, residency="persistent")]
    weights = []
    for number in range(layers):
        shard = builder.tensor(f"shard {number}", WHOLE_BYTES // 4, residency="persistent")
        weight = builder.tensor(f"weight {number}", WHOLE_BYTES)
        again: dict[str, Any] = {"repeatable": True, "phase": "collective"}
        launch = builder.operator(
            "launch", reads=[shard], creates=[weight], sequence="collective", time_ns=1000, **again
        )
        wait = builder.operator("wait", reads=[shard], mutates=[weight], time_ns=1, **again)
        builder.control(launch, wait)
        made.append(builder.tensor(f"activation {number}", SMALL_BYTES))
        builder.operator("forward", reads=[weight, made[-2]], creates=[made[-1]], time_ns=5000)
        weights.append(weight)
    gradient = made[-1]
    for number in reversed(range(layers)):
        reads = [weights[number], *dict.fromkeys([gradient, made[number]])]
        gradient = builder.tensor(f"gradient {number}", SMALL_BYTES)
        builder.operator("backward", reads=reads, creates=[gradient], time_ns=5000)
    return builder.build()


WHOLE_BYTES, SMALL_BYTES = 4096, 64


@pytest.mark.parametrize("layers", [3, 5, 7])
def test_the_fewest_gathers_run_again_and_that_is_proved(layers: int) -> None:
    """Every limit between that of a plan which keeps all weights and that of one which keeps none:
    each weight that there is no room for is gathered once more, and no plan gathers fewer.
    """
    graph = sharded_step(layers)
    plain = roam.optimize(graph)
    for missing in range(1, layers):
        limit = plain.total_bytes - missing * WHOLE_BYTES
        plan = roam.optimize(graph, memory_limit_bytes=limit)
        assert plan.total_bytes <= limit
        found = plan.recomputation
        assert found is not None
        names = [graph.operators[int(one)].name for one in found["sequence"]]
        assert names.count("launch") == layers + missing
        assert found["extra_s"] == found["least_extra_s"] > 0


# -- how a wait ends


def done(timeout: object) -> bool:
    """What a process group's work answers when the collective is done."""
    return True


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(Group, "can_be_polled", lambda self: True)
    monkeypatch.setattr(collectives, "_held_elsewhere", set())
    return Launch("allreduce_", Group("", (0, 1), 0), "SUM")


def held_in_cpp(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What holds the tensor itself, in C++."""
    return [torch.ones(2, requires_grad=True) * tensor]


def held_by_a_view(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What holds the tensor's memory alone."""
    return [tensor.detach()]


def held_in_python(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What holds the tensor as an object of Python."""
    return [tensor]


HELD = pytest.mark.parametrize("held_by", [held_in_cpp, held_by_a_view, held_in_python])
Held = Callable[[torch.Tensor], list[torch.Tensor]]


@HELD
def test_a_wait_ends_after_the_release_of_what_was_launched(
    launched: Launch, held_by: Held
) -> None:
    tensors = [torch.ones(2)]
    before = collectives._holders(tensors)
    holders = held_by(tensors[0])
    assert collectives._holders(tensors) != before
    threading.Timer(0.3, holders.clear).start()
    Pending(launched, SimpleNamespace(wait=done), tensors, before).wait()
    assert not holders
    assert collectives._holders(tensors) == before


@HELD
def test_a_wait_ends_once_where_the_tensors_are_never_released(
    launched: Launch, held_by: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_RELEASES_S", 0.01)
    tensors = [torch.ones(2)]
    before = collectives._holders(tensors)
    holders = held_by(tensors[0])
    Pending(launched, SimpleNamespace(wait=done), tensors, before).wait()
    assert collectives._held_elsewhere == {launched}
    monkeypatch.setattr(collectives, "_RELEASES_S", 1e9)  # the next one would hang if it waited
    Pending(launched, SimpleNamespace(wait=done), tensors, before).wait()
    assert holders
