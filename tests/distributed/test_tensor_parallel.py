"""Steps whose parameters are distributed tensors (`DTensor`): eager PyTorch's bits on every rank,
or a typed error.

The processes are gloo ranks on the CPU; with four of them the bits of a sum depend on where in its
buffer an element lies.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import roam
from ranks import Ranks, alive, revived
from roam.sharding.ranks import one_of

Made = tuple[nn.Module, torch.optim.Optimizer]
STEPS = 20
WORDS, WIDTH = 48, 16
ONE = {"blocks": 1}
"""For what does not depend on how many there are."""


@pytest.fixture(scope="module")
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """Two, or as many as a test asks for; such tests come last, since other processes are started
    for them.
    """
    yield from alive(getattr(request, "param", 2), tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def ranks(processes: Ranks) -> Ranks:
    return revived(processes)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A process that plans under "fake" groups."""
    yield from alive(1, tmp_path_factory.mktemp("one"))


# -- what the ranks run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, words = x.shape[:2]
        y = self.before(x)
        heads = [
            layer(y).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(self.dropout(F.silu(self.gate(y)) * self.up(y)))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        for block in self.blocks:
            block.dropout.p = dropout
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def tensor_parallel(devices: Any = None, **options: Any) -> nn.Module:
    """Columns and rows of the linear layers are spread, and everything between them is whole."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import parallel as tp

    torch.manual_seed(0)
    net, devices = Net(**options), devices or mesh()
    spread = dict.fromkeys(("query", "key", "value", "gate", "up"), tp.ColwiseParallel())
    for block in net.blocks:
        tp.parallelize_module(
            block, devices, spread | {"out": tp.RowwiseParallel(), "down": tp.RowwiseParallel()}
        )
    whole = tp.ColwiseParallel(output_layouts=Replicate())
    table = tp.RowwiseParallel(input_layouts=Replicate())
    return tp.parallelize_module(net, devices, {"embed": table, "head": whole})


def one_block() -> nn.Module:
    return tensor_parallel(**ONE)


def sequence_parallel(devices: Any = None, **options: Any) -> nn.Module:
    """The words are spread between the layers too, so that all parameters are distributed; the
    logits stay so for `loss_parallel`.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    torch.manual_seed(0)
    net, devices = Net(**options), devices or mesh()
    spread = {
        "before": tp.SequenceParallel(use_local_output=False),
        "between": tp.SequenceParallel(use_local_output=False),
        **dict.fromkeys(("query", "key", "value", "gate", "up"), tp.ColwiseParallel()),
        **dict.fromkeys(("out", "down"), tp.RowwiseParallel(output_layouts=Shard(1))),
    }
    for name in ("query", "key", "value", "gate", "up"):
        spread[name] = tp.ColwiseParallel(input_layouts=Shard(1))
    for block in net.blocks:
        tp.parallelize_module(block, devices, spread)
    table = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = tp.ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    )
    return tp.parallelize_module(
        net, devices, {"embed": table, "norm": tp.SequenceParallel(), "head": head}
    )


def spread_layers() -> nn.Module:
    """Two layers, whose parameters and gradients are spread alike."""
    from torch.distributed.tensor import parallel as tp

    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WORDS))
    spread = {"1": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
    return tp.parallelize_module(net, mesh(), spread)


def update_of_layers(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def update(net: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    spread = [parameter for parameter in net.parameters() if hasattr(parameter, "device_mesh")]
    norm = nn.utils.clip_grad_norm_(spread, 0.1)
    optimizer.step()
    return loss.detach(), norm, norm.full_tensor()


def update_of_spread_loss(
    net: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> Any:
    from torch.distributed.tensor.parallel import loss_parallel

    optimizer.zero_grad()
    with loss_parallel():
        loss = F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm


def accumulate(net: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    total = 0.0
    for part in tokens.chunk(2):
        loss = F.cross_entropy(net(part).flatten(0, 1), part.flatten()) / 2
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return total


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, WORDS, (4, 8), generator=generator)


def adamw(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, **options)


def fused(net: nn.Module) -> torch.optim.Optimizer:
    """One optimizer of the distributed parameters alone: PyTorch mixes no others in."""
    spread = [parameter for parameter in net.parameters() if hasattr(parameter, "device_mesh")]
    return torch.optim.AdamW(spread, lr=1e-2, fused=True)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def kinds(*values: Any) -> list[tuple[Any, ...]]:
    leaves = pytree.tree_leaves(values)
    return [(type(leaf), getattr(leaf, "placements", None)) for leaf in leaves]


def parts(*values: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [local(leaf.detach()).clone() for leaf in leaves]


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    parameters = list(net.parameters())
    return [parameters, [dict(optimizer.state[parameter]) for parameter in parameters]]


def is_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        left.dtype == right.dtype and torch.equal(left, right)
        for left, right in zip(one, other, strict=True)
    )


def trained(
    rank: int,
    world: int,
    make: Callable[..., nn.Module],
    optimizer_of: Callable[..., torch.optim.Optimizer],
    step: Callable[..., Any],
    options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    steps: int = STEPS,
) -> str:
    """What differs after so many steps, eagerly and by plan; empty where nothing does."""
    warnings.simplefilter("ignore")
    found = []
    for wrap in (lambda function: function, lambda function: roam.compile(function, poison=True)):
        net = make(**(model_options or {}))
        optimizer = optimizer_of(net, **(options or {}))
        torch.manual_seed(7)
        run = wrap(step)
        results = [run(net, optimizer, batch(number)) for number in range(steps)]
        if run is not step and not run.plans:
            return "nothing ran by a plan"
        values = [results, *state_of(net, optimizer)]
        found.append((kinds(values), parts(values), torch.get_rng_state()))
    (kinds_then, eager, drawn_then), (kinds_now, planned, drawn_now) = found
    if kinds_then != kinds_now:
        return "other kinds"
    if not torch.equal(drawn_then, drawn_now):
        return "other random states"
    return "" if is_equal(eager, planned) else "other bits"


def saved_and_loaded(rank: int, world: int, folder: str) -> str:
    """Trains by plan, saves, loads into another model, and goes on with both."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    warnings.simplefilter("ignore")
    found = []
    for run, place in ((update, f"{folder}/eager"), (roam.compile(update), f"{folder}/planned")):
        net = one_block()
        optimizer = adamw(net)
        for number in range(3):
            run(net, optimizer, batch(number))
        model_state, optimizer_state = get_state_dict(net, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=place)
        for number in range(3, 6):
            run(net, optimizer, batch(number))
        went_on = parts(*state_of(net, optimizer))
        model_state, optimizer_state = get_state_dict(net, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=place)
        set_state_dict(
            net,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for number in range(3, 6):
            run(net, optimizer, batch(number))
        found += [went_on, parts(*state_of(net, optimizer))]
    return "" if all(is_equal(found[0], other) for other in found[1:]) else "other bits"


def compared(rank: int, world: int) -> str:
    warnings.simplefilter("ignore")
    net = one_block()
    comparison = roam.compare(update, net, adamw(net), batch(0), steps=2)
    return comparison.outcome


def refused(rank: int, world: int, case: str) -> tuple[str, bool]:
    """The refusal's code, and whether the eager step gives the same bits afterwards as before."""
    warnings.simplefilter("ignore")
    cases: dict[str, Callable[..., Any]] = {
        "mask": leave_mask,
        "part": put_part,
        "fused": update_of_spread_loss,
        "random": draw,
    }
    net = sequence_parallel(**ONE) if case == "fused" else one_block()
    optimizer = adamw(net, fused=case == "fused")
    code = ""
    moves_states = mock.patch.object(dtensor_dispatch(), "is_rng_supported_mesh", lambda _: True)
    try:
        with moves_states if case == "random" else nullcontext():
            roam.compile(cases[case])(net, optimizer, batch(0))
    except roam.CaptureError as error:
        code = error.code
    step = update_of_spread_loss if case == "fused" else update
    step(net, optimizer, batch(0))
    other = sequence_parallel(**ONE) if case == "fused" else one_block()
    step(other, adamw(other, fused=case == "fused"), batch(0))
    return code, is_equal(parts(list(net.parameters())), parts(list(other.parameters())))


def leave_mask(net: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    """Is refused between the lookup in the spread table and its reduction."""
    from torch.distributed.tensor import DTensor, Replicate

    ids = DTensor.from_local(tokens, net.embed.weight.device_mesh, [Replicate()])
    return F.embedding(ids, net.embed.weight)


def draw(net: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    return torch.rand_like(net.head.weight).sum()


def dtensor_dispatch() -> Any:
    return importlib.import_module("torch.distributed.tensor._dispatch")


def put_part(net: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    weight = net.head.weight
    weight._local_tensor = weight._local_tensor * 2
    return net(tokens).sum().detach()


def in_fake_group(
    _: int,
    alone: int,
    rank: int,
    world: int,
    is_fake: bool,
    make: Any = tensor_parallel,
    step: Any = update,
) -> list[str]:
    """What a single process plans under a "fake" group, which it leaves: figures of the plan, and
    the code by which a call is refused.
    """
    assert alone == 1
    warnings.simplefilter("ignore")
    if dist.is_initialized():
        dist.destroy_process_group()
    with one_of(world, rank):
        if is_fake:
            with roam.fake():
                net = make()
                tokens = torch.zeros(4, 8, dtype=torch.long)
        else:
            net, tokens = make(), batch(0)
        optimizer, compiled = adamw(net), roam.compile(step)
        plan = compiled.plan(net, optimizer, tokens)
        code = ""
        try:
            compiled(net, optimizer, tokens)
        except roam.ExecutionError as error:
            code = error.code
        return [str(plan.total_bytes), str(plan.persistent_bytes), code]


def planned(rank: int, world: int, make: Any = tensor_parallel, step: Any = update) -> list[str]:
    warnings.simplefilter("ignore")
    net = make()
    plan = roam.compile(step).plan(net, adamw(net), batch(0))
    return [str(plan.total_bytes), str(plan.persistent_bytes)]


def other_layout(rank: int, world: int) -> tuple[bool, int]:
    """A tensor of the user's that is spread in another way at the second call."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    devices = mesh()

    @roam.compile
    def step(x: Any) -> Any:
        return (x * 2).sum().full_tensor()

    values = torch.arange(float(4 * world)).reshape(4, world)
    sums = []
    for placement in (Replicate(), Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(values, devices, [placement])
        sums.append(bool(step(x) == values.sum() * 2))
    return all(sums), len(step.plans)


# -- tests


WAYS = pytest.mark.parametrize(
    ("make", "step"), [(tensor_parallel, update), (sequence_parallel, update_of_spread_loss)]
)


@pytest.mark.sweep
@WAYS
def test_twenty_steps_have_the_bits_of_eager_pytorch(
    ranks: Ranks, make: Callable[..., Any], step: Callable[..., Any]
) -> None:
    assert ranks.run(trained, make, adamw, step, None, ONE) == [""] * ranks.world


@pytest.mark.long
def test_an_optimizer_that_updates_lists_of_parameters(ranks: Ranks) -> None:
    options = {"foreach": True}
    found = ranks.run(trained, sequence_parallel, adamw, update_of_spread_loss, options, ONE, 4)
    assert found == [""] * ranks.world


def test_a_fused_optimizer(ranks: Ranks) -> None:
    found = ranks.run(trained, spread_layers, fused, update_of_layers, None, None, 4)
    assert found == [""] * ranks.world


def test_gradients_that_are_accumulated_and_kept(ranks: Ranks) -> None:
    found = ranks.run(trained, tensor_parallel, sgd, accumulate, None, ONE, 4)
    assert found == [""] * ranks.world


def test_dropout_on_spread_activations(ranks: Ranks) -> None:
    found = ranks.run(trained, tensor_parallel, adamw, update, None, {"dropout": 0.3, **ONE}, 4)
    assert found == [""] * ranks.world


@pytest.mark.long
def test_a_checkpoint_is_loaded_and_training_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(saved_and_loaded, str(tmp_path)) == [""] * ranks.world


def test_compare_compares_parts(ranks: Ranks) -> None:
    assert ranks.run(compared) == ["equal"] * ranks.world


@pytest.mark.sweep
@pytest.mark.parametrize("case", ["mask", "part", "fused", "random"])
def test_what_is_refused_leaves_all_as_it_was(ranks: Ranks, case: str) -> None:
    code = "dtensor_random" if case == "random" else "dtensor"
    assert ranks.run(refused, case) == [(code, True)] * ranks.world


def test_another_layout_is_another_plan(ranks: Ranks) -> None:
    found = ranks.run(other_layout)
    assert found == [(True, 3)] * ranks.world


def test_a_fake_group_gives_the_plan_of_any_rank(ranks: Ranks, one: Ranks) -> None:
    last = ranks.world - 1
    *figures, code = one.run(in_fake_group, last, ranks.world, False, one_block)[0]
    assert code == "fake_group"
    assert figures == ranks.run(planned, one_block)[last]
    of_fakes = one.run(in_fake_group, last, ranks.world, True, one_block)[0]
    assert figures == list(of_fakes)[:2]


@pytest.mark.long
@WAYS
@pytest.mark.parametrize("processes", [4], indirect=True)
def test_sums_of_four_ranks_whose_order_shows(
    ranks: Ranks, make: Callable[..., Any], step: Callable[..., Any]
) -> None:
    assert ranks.run(trained, make, adamw, step, None, ONE, 6) == [""] * ranks.world
