"""`roam.parallelize`: choices are the cheapest of all, ranks do what was chosen, and what runs on
them is what was certified.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import roam
from newer import needs_2_15
from ranks import Ranks, alive, revived
from roam import cli
from roam.errors import CaptureError, PlanError
from roam.sharding import Costs, Link, Sharding
from roam.sharding.division import divisions_of, part_of
from roam.sharding.nodes import Node, Option
from roam.sharding.planning import Planning
from roam.sharding.ranks import meshed, of_all_ranks, one_of
from roam.sharding.twin import state_bytes_of

WORDS, WIDTH, HEADS, ROWS, TOKENS = 64, 32, 4, 4, 16
FREE = Costs(
    flops_per_ns=10, bytes_per_ns=1, launch_ns=0, link=Link(latency_ns=0, bytes_per_ns=100)
)
"""Collectives cost next to nothing, so that small models are spread."""


class Block(nn.Module):
    def __init__(self, dropout: float, heads: int, is_written_out: bool) -> None:
        super().__init__()
        self.heads, self.is_written_out = heads, is_written_out
        self.before, self.between = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout
        self.register_buffer("angles", torch.linspace(0, 1, TOKENS * WIDTH // HEADS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        turn = self.angles.view(TOKENS, WIDTH // HEADS).cos()
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = query * turn, key * turn
        if self.is_written_out:  # samples and heads are joined to one dimension
            y = (query @ key.transpose(2, 3)).softmax(-1) @ value
        else:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = F.dropout(F.gelu(self.up(self.between(x))), self.dropout)
        return x + self.down(y)


class Net(nn.Module):
    """Biases, a tied table, a table of positions."""

    def __init__(
        self,
        layers: int = 2,
        dropout: float = 0.0,
        heads: int = -1,
        is_written_out: bool = False,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, heads, is_written_out) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    net = Net(**options)
    tokens = torch.randint(WORDS, (ROWS, TOKENS))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False), tokens


def planning(size: int = 2, costs: Costs = FREE, **options: Any) -> Planning:
    net, optimizer, tokens = made(**options)
    return Planning(train_step, net, optimizer, (tokens,), mesh=size, data=1, costs=costs)


def within(plans: Planning, limits: tuple[float | None, ...]) -> Iterator[tuple[Sharding, bool]]:
    """A sharding for each limit, a share of what the first one takes, and whether there is one."""
    least = 0
    for limit in limits:
        sharding = plans.within(None if limit is None else int(limit * least))
        least = least or sharding.total_bytes
        yield sharding, limit is not None


def small() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return net, torch.optim.SGD(net.parameters()), torch.randn(4, 8)


def square_step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


# -- choices


def cheapest(nodes: list[Node]) -> int:
    """By trying all choices whose states agree."""
    least: list[int | None] = [None]

    def choose(place: int, chosen: list[Option], ns: int) -> None:
        if least[0] is not None and ns >= least[0]:
            return
        if place == len(nodes):
            least[0] = ns
            return
        for option in nodes[place].options:
            if all(
                source is None or chosen[source[0]].outputs[source[1]] == state
                for source, state in zip(nodes[place].sources, option.inputs, strict=True)
            ):
                choose(place + 1, [*chosen, option], ns + option.ns)

    choose(0, [], 0)
    assert least[0] is not None
    return least[0]


@pytest.mark.parametrize("costs", [FREE, Costs(), Costs(link=Link(latency_ns=100, bytes_per_ns=1))])
@pytest.mark.parametrize("size", [2, 4])
def test_a_choice_is_the_cheapest_of_all(costs: Costs, size: int) -> None:
    net, optimizer, x = small()
    found = Planning(square_step, net, optimizer, (x,), mesh=size, data=1, costs=costs).find()
    assert found is not None
    assert found.choice.ns == found.choice.bound_ns == cheapest(found.nodes)


def test_equal_layers_choose_alike_and_lose_nothing() -> None:
    counts = []
    for layers in (2, 4):
        found = planning(layers=layers).find()
        assert found is not None
        assert found.choice.ns == found.choice.bound_ns
        counts.append((found.choice.nodes, found.choice.folded_nodes))
    (few, folded_few), (many, folded_many) = counts
    # The first and the last layer have other neighbours, all between them the same.
    assert many > 1.8 * few
    assert folded_many <= folded_few + 2


@needs_2_15
@pytest.mark.parametrize("is_written_out", [False, True])
def test_a_transformer_is_split_as_experts_split_it(is_written_out: bool) -> None:
    costs = Costs(flops_per_ns=0.1, bytes_per_ns=1, launch_ns=0, link=Link(100_000, 1000))
    found = planning(costs=costs, is_written_out=is_written_out).find()
    assert found is not None
    styles = {path: style.name for path, style in found.styles.items()}
    for block in ("blocks.0", "blocks.1"):
        for name in ("query", "key", "value", "up"):
            assert styles[f"{block}.{name}"] == "ColwiseParallel"
        assert styles[f"{block}.out"] == styles[f"{block}.down"] == "RowwiseParallel"


@needs_2_15
def test_the_collectives_of_a_rank_are_those_of_the_model() -> None:
    plans = planning(size=4)
    found = plans.find()
    assert found is not None
    expected = Counter(
        (one.kind, one.size_bytes)
        for node, option in zip(found.nodes, found.choice.options, strict=True)
        for one in option.collectives
    )
    # Gradients of whole parameters that work on parts are reduced by the optimizer.
    net = made()[0]
    reduced = Counter(
        ("all_reduce", parameter.numel() * 4)
        for path, style in found.styles.items()
        if style.name == "SequenceParallel"
        for parameter in net.get_submodule(path).parameters()
    )
    assert reduced
    assert Counter(plans.rank_trace(found).collectives) == expected - reduced


def test_random_operators_are_not_split() -> None:
    found = planning(dropout=0.1).find()
    assert found is not None
    dropouts = [
        option
        for node, option in zip(found.nodes, found.choice.options, strict=True)
        if node.what == "operator"
        and node.subject.is_random
        and "attention" not in str(node.subject.target)
    ]
    assert len(dropouts) == 2
    assert not any(option.outputs[0] >= 0 for option in dropouts)


@needs_2_15
def test_code_that_does_not_run_on_parts_is_left_whole() -> None:
    """A number of heads that is written down is not that of a rank."""
    found = planning(heads=HEADS).find()
    assert found is not None
    assert any("blocks.0" in one.path for one in found.differences)
    names = {path: style for path, style in found.styles.items() if path.endswith("query")}
    assert all(style.after < 0 or style.after != 2 for style in names.values())


def test_tied_parameters_stay_tied() -> None:
    sharding = roam.parallelize(train_step, *made(layers=1), mesh=2, data=1, costs=FREE)
    assert {"words", "head"} & set(sharding.styles)
    net, optimizer, tokens = made(layers=1)
    with meshed((2,), ("tensor",), "cpu") as mesh:
        sharding.apply(net, optimizer, mesh=mesh)
        assert net.head.weight is net.words.weight
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        assert held == {id(one) for one in net.parameters()}
        with pytest.raises(CaptureError) as raised:
            roam.parallelize(train_step, net, optimizer, tokens, mesh=2)
    assert raised.value.code == "dtensor"


# -- replicas


def test_divisions_of_meshes() -> None:
    fast, slow = Link(10, 100.0), Link(20, 10.0, exchanges=False)
    costs = Costs(links=(slow, fast))
    found = {
        (one.data, one.tensor): (one.data_link, one.tensor_link)
        for one in divisions_of((2, 4), costs)
    }
    both = Link(20, 10.0, exchanges=False)
    assert set(found) == {(1, 8), (2, 4), (8, 1)}
    assert found[2, 4] == (slow, fast)
    assert found[1, 8][1] == found[8, 1][0] == both
    assert {one.shape for one in divisions_of((6,), costs)} == {(1, 6), (2, 3), (3, 2), (6, 1)}
    assert [one.is_sharded for one in divisions_of((4,), costs, 2)] == [False, True]
    with pytest.raises(ValueError, match="divided into 1, 2, 8 replicas, not into 4"):
        divisions_of((2, 4), costs, 4)


@pytest.mark.parametrize("costs", [FREE, Costs(), Costs(link=Link(latency_ns=100, bytes_per_ns=1))])
def test_the_cheapest_of_all_divisions(costs: Costs) -> None:
    net, optimizer, x = small()
    plans = Planning(square_step, net, optimizer, (x,), mesh=4, costs=costs)
    least = {}
    for one in plans.candidates():
        launched = {1: 0, 2: 1, 4: 1}[one.division.data] + (one.division.is_sharded)
        least[one.division] = cheapest(one.nodes) + launched * costs.link.latency_ns
        assert one.chosen.ns == one.bound_ns == least[one.division]
    assert len(least) == 5
    found = plans.find()
    assert found is not None
    assert found.chosen.ns == min(least.values())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mesh", "limits"), [((2, 4), (None, 0.8)), ((4, 1), (None,))])
def test_the_collectives_of_replicas_are_those_of_the_model(
    mesh: tuple[int, int], limits: tuple[float | None, ...]
) -> None:
    net, optimizer, tokens = made()
    plans = Planning(train_step, net, optimizer, (tokens,), mesh=mesh, data=mesh[0], costs=FREE)
    for sharding, is_limited in within(plans, limits):
        assert sharding.division.is_sharded == (mesh == (4, 1) or is_limited)
        expected: Counter[str] = Counter()
        for _, one in sharding.replica_collectives:
            expected[one.kind] += one.size_bytes
            expected[f"{one.kind}s"] += 1
        found: Counter[str] = Counter()
        net, optimizer, tokens = made()
        step = roam.compile(train_step)
        with meshed(mesh, ("data", "tensor"), "cpu") as groups:
            sharding.apply(net, optimizer, mesh=groups)
            step.plan(net, optimizer, *sharding.part(tokens))
            for row in step.communication().collectives:
                if row.ranks == mesh[0]:
                    kind = row.kind.replace("-", "_")
                    found[kind] += row.size_bytes
                    found[f"{kind}s"] += row.count
        assert found == expected


def normalized(net: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    """Samples depend on each other."""
    return square_step(lambda x: net(x - x.mean(0)), optimizer, x)  # type: ignore[arg-type]


def dropped(net: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    return square_step(lambda x: F.dropout(net(x), 0.5), optimizer, x)  # type: ignore[arg-type]


def summed(net: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = net(x).square().sum() / x.numel()
    loss.backward()
    optimizer.step()
    return loss.detach()


def masked(net: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    """A mask as long as the batch, made of nothing."""
    mask = torch.ones(1, 8).expand(len(x), 8)
    return square_step(lambda x: net(x) * mask, optimizer, x)  # type: ignore[arg-type]


def weighted(net: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    """Labels of one class count twice: replicas have not the same weights in all."""
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), x.argmax(1), weight=torch.linspace(1, 2, 8))
    loss.backward()
    optimizer.step()
    return loss.detach()


def classified(net: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = 0.5 * F.cross_entropy(net(x), x.argmax(1)) + 1.0
    loss.backward()
    optimizer.step()
    return loss.detach()


@needs_2_15
@pytest.mark.parametrize(
    ("step", "is_known"),
    [
        (square_step, True), (masked, True), (classified, True), (normalized, False),
        (dropped, False), (summed, False), (weighted, False),
    ],
)  # fmt: skip
def test_replicas_are_chosen_where_they_do_what_one_process_does(step: Any, is_known: bool) -> None:
    plans = Planning(step, *small()[:2], small()[2:], mesh=2, costs=FREE)
    assert {one.division.data for one in plans.candidates()} == ({1, 2} if is_known else {1})
    assert bool(plans.left_out) != is_known
    told = Planning(step, *small()[:2], small()[2:], mesh=2, data=2, costs=FREE)
    assert [one.division.is_sharded for one in told.candidates()] == [False, True]


def test_a_batch_in_parts() -> None:
    net, optimizer, x = small()
    with pytest.raises(ValueError, match="4 samples has no equal parts for 8 replicas"):
        roam.parallelize(square_step, net, optimizer, x, mesh=8, data=8)
    plans = Planning(square_step, net, optimizer, (x,), mesh=8)
    assert {one.division.data for one in plans.candidates()} == {1, 2, 4}
    assert "no equal parts" in plans.left_out["8 replicas"]
    whole = torch.arange(4.0)
    parts = part_of((x, {"table": torch.ones(3), "labels": whole}, 4), 2, 1)
    assert parts[0].equal(x[2:])
    assert parts[1]["table"].shape == (3,)
    assert parts[1]["labels"].tolist() == [2, 3]
    assert parts[2] == 4
    with pytest.raises(ValueError, match="no replica 3 of 2"):
        part_of((x,), 2, 3)


@needs_2_15
def test_a_part_is_for_the_place_in_the_mesh_that_was_applied() -> None:
    net, optimizer, x = small()
    sharding = roam.parallelize(square_step, net, optimizer, x, mesh=2, data=2)
    with one_of(8, rank=7):
        with pytest.raises(ValueError, match="no replica 7 of 2"):
            sharding.part(x)
        unnamed = DeviceMesh("cpu", torch.tensor([[6], [7]]))
        with pytest.raises(ValueError, match="no names"):
            sharding.apply(small()[0], mesh=unnamed)
        outer = init_device_mesh("cpu", (4, 2), mesh_dim_names=("outer", "data"))
        sharding.apply(small()[0], mesh=outer["data"])
        assert sharding.part(x)[0].equal(x[2:])


# -- optimizers


class Counting(torch.optim.SGD):
    """It has an attribute of its own, and one that holds its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.steps, self.own = 0, [*self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        torch._foreach_mul_([one.grad for one in self.own], 0.5)
        return super().step(closure)


class Wrapping(torch.optim.Optimizer):
    """It wraps another optimizer, as accelerate's does."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.wrapped = wrapped

    param_groups = property(
        lambda self: self.wrapped.param_groups,
        lambda self, groups: setattr(self.wrapped, "param_groups", groups),
    )
    state = property(
        lambda self: self.wrapped.state, lambda self, state: setattr(self.wrapped, "state", state)
    )

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.wrapped.zero_grad(set_to_none)


def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapping])
def test_hooks_of_the_optimizer_are_planned(wrap: Any) -> None:
    totals = []
    for hook in (None, clip):
        with roam.fake():
            net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
            optimizer, x = torch.optim.SGD(net.parameters(), foreach=False), torch.randn(4, 64)
        if hook is not None:
            optimizer.register_step_pre_hook(hook)
        optimizer = wrap(optimizer)
        planned = roam.optimize(roam.capture(square_step, net, optimizer, x)).total_bytes
        totals.append(roam.parallelize(square_step, net, optimizer, x, mesh=1).total_bytes)
        assert totals[-1] == planned
    assert totals[1] > totals[0]


def test_a_hook_that_reaches_the_model_itself_is_refused() -> None:
    net, optimizer, x = small()
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
    with pytest.raises(
        CaptureError, match=r"hook of the optimizer's step reaches 0\.weight"
    ) as told:
        roam.parallelize(square_step, net, optimizer, x, mesh=2)
    assert told.value.code == "optimizer"


def test_an_optimizer_of_ones_own() -> None:
    net, _, x = small()
    optimizer = Counting(net.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps the optimizer's step
    before = [one.detach().clone() for one in net.parameters()]
    roam.parallelize(square_step, net, optimizer, x, mesh=2)
    assert optimizer.steps == 0
    assert all(map(torch.equal, before, net.parameters()))
    with pytest.raises(CaptureError, match="closure") as told:
        roam.parallelize(square_step, net, torch.optim.LBFGS(net.parameters()), x, mesh=2)
    assert told.value.code == "optimizer"
    on_cuda = torch.optim.AdamW(net.parameters(), capturable=True)
    assert state_bytes_of(on_cuda) == 2


# -- memory


def test_memory_is_kept_to_or_refused() -> None:
    slow = Costs(link=Link(latency_ns=10_000_000))
    plans = planning(4, slow, layers=1)
    (free, _), (kept, _) = within(plans, (None, 0.8))
    assert free.styles == {}
    assert kept.total_bytes <= 0.8 * free.total_bytes
    assert kept.styles
    assert kept.choice.ns > free.choice.ns
    with pytest.raises(PlanError) as raised:
        plans.within(20 * 1024)
    assert raised.value.code == "sharding_memory"


def test_certified_memory_has_what_kernels_take_unless_nothing_is_real() -> None:
    """The loss takes as much again as its argument."""

    def step(net: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def given() -> tuple[Any, ...]:
        net = nn.Linear(8, 8, bias=False)
        return net, torch.optim.SGD(net.parameters()), torch.randn(4096, 8), torch.randn(4096, 8)

    real = roam.parallelize(step, *given(), mesh=1)
    assert real.total_bytes == roam.compile(step).plan(*given()).total_bytes
    with roam.fake():
        arguments = given()
    fake = roam.parallelize(step, *arguments, mesh=1)
    assert real.total_bytes - fake.total_bytes == pytest.approx(4096 * 8 * 4, rel=0.01)
    for sharding, knows in ((real, True), (fake, False)):
        assert sharding.figures()["knows_kernels"] == knows
        assert ("without what kernels allocate" in str(sharding)) != knows


# -- what is refused


def test_a_step_without_a_backward_pass() -> None:
    net, optimizer, x = small()
    with pytest.raises(CaptureError) as raised:
        roam.parallelize(lambda net, optimizer, x: net(x), net, optimizer, x, mesh=2)
    assert raised.value.code == "no_backward"


@pytest.mark.parametrize("closure", [{}, {"closure": None}])
def test_an_optimizer_that_is_no_argument(closure: dict[str, None]) -> None:
    net, optimizer, x = small()

    def step(net: nn.Module, _: Any, x: torch.Tensor) -> Any:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step(**closure)
        return loss

    with pytest.raises(CaptureError) as raised:
        roam.parallelize(step, net, optimizer, x, mesh=2)
    assert raised.value.code == "optimizer"


@pytest.mark.parametrize("is_late", [False, True])
def test_no_replicas_where_state_depends_on_the_whole_batch(is_late: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    net.register_buffer("center", torch.zeros(128))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def step(net: Any, optimizer: Any, x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        features = net(x)
        loss = (features - net.center).square().mean()
        if not is_late:
            with torch.no_grad():
                net.center.mul_(0.5).add_(features.mean(0), alpha=0.5)
        loss.backward()
        if is_late:
            torch.mean(features.detach(), 0, out=net.center)
        optimizer.step()
        return loss.detach()

    sharding = roam.parallelize(step, net, optimizer, torch.randn(1024, 128), mesh=2)
    assert "no option: 2 replicas" in str(sharding)


def test_what_the_step_changes_besides_its_arguments_is_put_back() -> None:
    net, optimizer, x = small()
    rate, steps = optimizer.param_groups[0]["lr"], {"count": 0}

    def step(net: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        steps["count"] += 1
        return loss.detach()

    roam.parallelize(step, net, optimizer, x, mesh=2)
    assert optimizer.param_groups[0]["lr"] == rate
    assert steps == {"count": 0}


def test_a_step_that_asks_for_a_value() -> None:
    net, optimizer, x = small()

    def step(net: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
        loss = net(x).mean()
        if loss > 0:
            loss.backward()
        return loss

    with pytest.raises(CaptureError) as raised:
        roam.parallelize(step, net, optimizer, x, mesh=2)
    assert raised.value.code == "value_reached_python"


@pytest.mark.parametrize("mesh", [(2, 0), 0, ()])
def test_what_is_no_mesh(mesh: Any) -> None:
    with pytest.raises(ValueError, match="along each dimension"):
        roam.parallelize(square_step, *small(), mesh=mesh)


def test_a_mesh_of_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with roam.fake():
        net = nn.Linear(2, 2, device="cuda")
        optimizer, x = torch.optim.SGD(net.parameters()), torch.randn(2, 2, device="cuda")
    with pytest.raises(ValueError, match="no mesh of CUDA devices"):
        roam.parallelize(square_step, net, optimizer, x, mesh=2)


def test_a_mesh_of_another_size_than_the_group() -> None:
    with meshed((2,), ("tensor",), "cpu"), pytest.raises(CaptureError) as raised:
        roam.parallelize(square_step, *small(), mesh=4)
    assert raised.value.code == "mesh_size"


class Single(nn.Linear):
    def __deepcopy__(self, _: Any) -> Any:
        raise TypeError("there is one of these")


def picky_step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    if any(type(one).__name__ == "DTensor" for one in net.parameters()):
        raise RuntimeError("plain parameters only")
    return square_step(net, optimizer, x)


def test_a_model_that_cannot_be_copied() -> None:
    net = nn.Sequential(Single(8, 16), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(CaptureError) as raised:
        roam.parallelize(square_step, net, optimizer, torch.randn(4, 8), mesh=2)
    assert raised.value.code == "model_copy"


def test_a_step_that_runs_on_no_rank() -> None:
    with pytest.raises(CaptureError, match="plain parameters only") as raised:
        roam.parallelize(picky_step, *small(), mesh=2, data=1, costs=FREE)
    assert raised.value.code == "sharding"


def test_the_users_objects_stay_as_they_are() -> None:
    net, optimizer, x = small()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in net.modules()]
    roam.parallelize(square_step, net, optimizer, x, mesh=(2, 2), costs=FREE)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [len(module._forward_hooks) for module in net.modules()] == hooks
    assert optimizer.param_groups[0]["params"][0] is net[0].weight
    assert not optimizer.state
    assert not torch.distributed.is_initialized()


# -- the command


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["parallelize", "llama-tiny", "--mesh", "2", "--seq", "16"]
    assert cli.main([*arguments, "--json"]) == cli.EXIT_OK
    printed = json.loads(capsys.readouterr().out)
    assert printed["model"] == "llama-tiny"
    assert printed["step_ns"] >= printed["bound_ns"]
    assert printed["total_bytes"] >= printed["bound_bytes"] > 0
    assert cli.main([*arguments, "--memory", "10KiB"]) == cli.EXIT_BAD_INPUT
    assert "no sharding over 2 ranks" in capsys.readouterr().err


def test_the_command_counts_what_clipping_takes(capsys: pytest.CaptureFixture[str]) -> None:
    totals = []
    for options in ([], ["--clip", "1"]):
        command = ["parallelize", "llama-tiny", "--mesh", "1", "--seq", "16", "--json", *options]
        assert cli.main(command) == cli.EXIT_OK
        totals.append(json.loads(capsys.readouterr().out)["total_bytes"])
    assert totals[0] < totals[1]


@needs_2_15
def test_the_command_divides_ranks_into_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["parallelize", "llama-tiny", "--seq", "16", "--batch", "4", "--mesh", "2x2"]
    assert cli.main([*arguments, "--json"]) == cli.EXIT_OK
    printed = json.loads(capsys.readouterr().out)
    assert printed["mesh"] == [2, 2]
    assert printed["left_out"] == {}  # attention with masks is of independent samples
    assert cli.main([*arguments, "--data", "3"]) == cli.EXIT_BAD_INPUT
    assert "divided into 1, 2, 4 replicas, not into 3" in capsys.readouterr().err


# -- on ranks


@pytest.fixture(scope="module", params=[2, 4])
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    yield from alive(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def ranks(processes: Ranks) -> Ranks:
    return revived(processes)


def trained(
    rank: int, world: int, sharding: Sharding, steps: int
) -> tuple[list[float], list[float], int, int]:
    """Losses eagerly and by plan, the mean over replicas; bytes that were planned here, and that
    the allocator has measured of a step, without those of the process group.
    """
    warnings.simplefilter("ignore")
    losses = []
    for compiles in (False, True):
        net, optimizer, x = made()
        sharding.apply(net, optimizer)
        batch = sharding.part(x)
        run: Any = roam.compile(train_step) if compiles else train_step
        found = torch.stack([run(net, optimizer, *batch).clone() for _ in range(steps)])
        torch.distributed.all_reduce(found)
        losses.append([float(loss) / world for loss in found])
    run.measured(net, optimizer, *batch)
    memory = run.memory()
    return *losses, memory.total_bytes, memory.measured_bytes - memory.group_bytes


def sent(sharding: Sharding) -> Sharding:
    """What ranks need of it."""
    return replace(sharding, plan=None, trace=None, nodes=())  # type: ignore[arg-type]


@needs_2_15
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sweep
@pytest.mark.parametrize(("data", "limits"), [(1, (None,)), (2, (None, 0.8))])
def test_ranks_train_as_one_process_does_in_what_was_certified(
    ranks: Ranks, data: int, limits: tuple[float | None, ...]
) -> None:
    net, optimizer, tokens = made()
    mesh = data, ranks.world // data
    plans = Planning(train_step, net, optimizer, (tokens,), mesh=mesh, data=data, costs=FREE)
    shardings = list(within(plans, limits))
    one = [float(train_step(net, optimizer, tokens)) for _ in range(4)]
    for sharding, is_limited in shardings:
        assert sharding.division.is_sharded == is_limited
        if ranks.world > data:
            names = {style.name for style in sharding.styles.values()}
            assert {"ColwiseParallel", "RowwiseParallel", "SequenceParallel"} <= names
        for eager, by_plan, planned, measured in ranks.run(trained, sent(sharding), 4):
            assert eager == pytest.approx(one, rel=1e-5)
            assert by_plan == eager
            assert planned == sharding.total_bytes
            assert measured == pytest.approx(planned, rel=0.01)


def planned_and_applied(rank: int, world: int) -> list[float]:
    """Losses of a rank that finds the sharding itself, in its own group."""
    warnings.simplefilter("ignore")
    net, optimizer, x = small()
    sharding = roam.parallelize(square_step, net, optimizer, x, mesh=world, costs=FREE)
    sharding.apply(net, optimizer)
    losses = torch.tensor([square_step(net, optimizer, *sharding.part(x)) for _ in range(3)])
    torch.distributed.all_reduce(losses)
    return (losses / world).tolist()


def uneven(rank: int, world: int) -> tuple[list[int], str, str]:
    """What each rank's step takes of a layer whose rows do not divide, the sharding within the mean
    of this, and why there is none within less.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net, x = nn.Linear(1 << 12, world + 1, bias=False), torch.randn(2 * world, 1 << 12)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    plans = Planning(square_step, net, optimizer, (x,), mesh=world, data=world, is_sharded=True)
    sharding = plans.within(None)
    totals = of_all_ranks(sharding.plan.total_bytes)
    assert sharding.total_bytes == max(totals)
    refusals = []
    for limit in (min(totals), (min(totals) + max(totals)) // 2):
        try:
            refusals.append(str(plans.within(limit).division))
        except PlanError as error:
            refusals.append(error.code)
    return totals, refusals[0], refusals[1]


@needs_2_15
def test_ranks_with_parts_of_different_sizes_decide_alike(ranks: Ranks) -> None:
    (totals, *refusals), *others = ranks.run(uneven)
    assert min(totals) < max(totals) == totals[0]
    assert refusals == ["sharding_memory"] * 2
    assert others == [(totals, *refusals)] * len(others)


def test_every_rank_may_find_the_sharding_itself(ranks: Ranks) -> None:
    net, optimizer, x = small()
    one = [float(square_step(net, optimizer, x)) for _ in range(3)]
    for losses in ranks.run(planned_and_applied):
        assert losses == pytest.approx(one, rel=1e-5)
