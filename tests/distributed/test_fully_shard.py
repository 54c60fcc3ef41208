"""Steps on modules that `fully_shard` shards (FSDP2): eager PyTorch's bits on every rank, or a
typed error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_tensor_parallel import (
    ONE,
    Net,
    adamw,
    batch,
    in_fake_group,
    is_equal,
    parts,
    planned,
    sequence_parallel,
    state_of,
    tensor_parallel,
    trained,
)
from torch import nn

import roam
from newer import needs_2_15
from ranks import Ranks, alive, revived

pytestmark = needs_2_15


@pytest.fixture(scope="module")
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """Two, or as many as a test asks for."""
    yield from alive(getattr(request, "param", 2), tmp_path_factory.mktemp("ranks"))


FOUR = pytest.mark.parametrize("processes", [4], indirect=True)


@pytest.fixture
def ranks(processes: Ranks) -> Ranks:
    return revived(processes)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A process that plans under "fake" groups."""
    yield from alive(1, tmp_path_factory.mktemp("one"))


# -- what the ranks run


def sharded(kind: str = "plain", blocks: int = 2, **options: Any) -> nn.Module:
    """The last layer's rows are not divisible by the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
    elif kind == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    elif kind == "kept":
        options["reshard_after_forward"] = False
    torch.manual_seed(0)
    net = Net(blocks=blocks)
    net.head = nn.Linear(16, 47, bias=False)
    for block in net.blocks if kind != "wrapped" else ():
        fully_shard(block, mesh=mesh, **options)
        if kind == "compiled":
            block.compile()
    if kind == "wrapped":
        net.blocks = nn.ModuleList(
            fully_shard(torch.compile(block), mesh=mesh) for block in net.blocks
        )
    return fully_shard(net, mesh=mesh, **options)


def sharded_twice(way: str = "sequence", **options: Any) -> nn.Module:
    """Pairs of ranks share the parts of a layer, and `fully_shard` shards these over both pairs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = 2, dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "layer"))
    spread = sequence_parallel if way == "sequence" else tensor_parallel
    net = spread(mesh["layer"], **options)
    for block in net.blocks:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(net, mesh=mesh["data"])


def one_block_sharded_twice() -> nn.Module:
    return sharded_twice(**ONE)


def loss_of(net: Any, tokens: torch.Tensor) -> torch.Tensor:
    words = (tokens + dist.get_rank()) % 47
    return F.cross_entropy(net(words).float().flatten(0, 1), words.flatten())


def update(net: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = loss_of(net, tokens)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm, norm.full_tensor()


def decay(net: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    """Decays parameters by a rate that changes from step to step, in an update of lists."""
    group = optimizer.param_groups[0]
    rate = group["lr"]
    with torch.no_grad():
        torch._foreach_mul_(list(net.parameters()), 1 - rate * 0.1)
    group["lr"] = rate * 0.9
    return update(net, optimizer, tokens)


def update_twice(net: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    """A step of `sharded_twice`: ranks that share a layer see the same batch."""
    from torch.distributed.tensor.parallel import loss_parallel

    words = (tokens + dist.get_rank() // 2) % 48
    optimizer.zero_grad()
    with loss_parallel():
        loss = F.cross_entropy(net(words).flatten(0, 1), words.flatten())
        loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm, norm.full_tensor()


def update_of_layers(net: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    words = (tokens + dist.get_rank() // 2) % 48
    optimizer.zero_grad()
    loss = F.cross_entropy(net(words).flatten(0, 1), words.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def accumulate(net: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    optimizer.zero_grad()
    net.set_requires_gradient_sync(False)
    first = loss_of(net, tokens[:2])
    first.backward()
    net.set_requires_gradient_sync(True)
    second = loss_of(net, tokens[2:])
    second.backward()
    optimizer.step()
    return first.detach() + second.detach()


def leave_gradients(net: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Any:
    net.set_requires_gradient_sync(False)
    loss = loss_of(net, tokens)
    loss.backward()
    net.set_requires_gradient_sync(True)
    return loss.detach()


def reshard(net: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def code_of(step: Any, *args: Any) -> str:
    try:
        step(*args)
    except roam.CaptureError as error:
        return error.code
    return ""


def evaluated_between(rank: int, world: int) -> tuple[list[str], bool, int]:
    """Evaluates eagerly between steps: the codes of what is refused, whether the bits are eager's,
    and how many plans were made: of the first step and of later ones.
    """
    warnings.simplefilter("ignore")
    codes, found = [], []
    step = roam.compile(update)
    for run in (update, step):
        net = sharded("kept")
        optimizer = adamw(net)
        results = []
        for number in range(4):
            results.append(run(net, optimizer, batch(number)))
            with torch.no_grad():
                results.append(net(batch(9) % 47))
            if run is step:
                codes.append(code_of(run, net, optimizer, batch(0)))
            reshard(net)
        found.append(parts(results, state_of(net, optimizer)))
    return codes, is_equal(*found), len(step.plans)


def layers(kept: bool) -> nn.Module:
    """Layers whose weights are large beside what they make."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    for layer in net:
        fully_shard(layer, reshard_after_forward=not kept)
    return fully_shard(net, reshard_after_forward=not kept)


def update_layers(net: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def budgeted(rank: int, world: int) -> tuple[bool, bool, int, int, int]:
    """Trains within a limit between what a step takes that keeps all gathered parameters, and one
    that gathers them again: whether the bits are eager's, whether the plan keeps to the limit, how
    often it gathers, how many calls run again, and in how many of a thousand parts of the time that
    is the least.
    """
    warnings.simplefilter("ignore")
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))
    totals = []
    for kept in (True, False):
        net = layers(kept)
        graph = roam.capture(update_layers, net, adamw(net), x)
        totals.append(roam.optimize(graph).total_bytes)
    limit = sum(totals) // 2
    step = roam.compile(update_layers, memory=limit, poison=True)
    found = []
    for run in (update_layers, step):
        net = layers(kept=True)
        optimizer = adamw(net)
        results = [run(net, optimizer, x) for _ in range(6)]
        found.append(parts(results, state_of(net, optimizer)))
    memory = step.memory()
    gathers = [one.count for one in step.communication().collectives if one.kind == "all-gather"]
    share = round(1000 * memory.least_extra_s / memory.extra_s) if memory.extra_s else 0
    return is_equal(*found), memory.total_bytes <= limit, sum(gathers), memory.extra_runs, share


def refused(rank: int, world: int) -> tuple[str, bool]:
    """The code of a step that leaves gradients, and whether the eager step goes on as before."""
    warnings.simplefilter("ignore")
    found = []
    code = ""
    for tries in (False, True):
        net = sharded()
        optimizer = adamw(net)
        update(net, optimizer, batch(0))
        if tries:
            code = code_of(roam.compile(leave_gradients), net, optimizer, batch(1))
        update(net, optimizer, batch(1))
        found.append(parts(state_of(net, optimizer)))
    return code, is_equal(*found)


def measured(rank: int, world: int) -> tuple[int, int, int, int, int]:
    """Bytes of a step by plan as measured, of these the process group's own, the same of an eager
    step, and bytes that were planned.
    """
    warnings.simplefilter("ignore")
    net = sharded()
    optimizer, step = adamw(net), roam.compile(update)
    for number in range(2):
        step(net, optimizer, batch(number))
    step.measured(net, optimizer, batch(2))
    step.measured_eagerly(net, optimizer, batch(3))
    memory = step.memory()
    by_plan, eagerly = memory.measured_bytes or 0, memory.eager_measured_bytes or 0
    of_group, eagerly_of_group = memory.group_bytes or 0, memory.eager_group_bytes or 0
    return by_plan, of_group, eagerly, eagerly_of_group, memory.total_bytes


def saved_and_loaded(rank: int, world: int, folder: str, make: Any, update: Any) -> bool:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    warnings.simplefilter("ignore")
    net = make()
    optimizer, step = adamw(net), roam.compile(update)

    def train(numbers: range) -> list[torch.Tensor]:
        results = [step(net, optimizer, batch(number)) for number in numbers]
        return parts(results, state_of(net, optimizer))

    train(range(3))
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    went_on = train(range(3, 6))
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return is_equal(went_on, train(range(3, 6)))


# -- tests


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "step", "steps"),
    [
        ("plain", update, 20),
        ("kept", update, 4),
        ("mixed", update, 4),
        ("plain", accumulate, 4),
        ("compiled", update, 4),
        ("compiled", accumulate, 4),
        ("wrapped", update, 4),
    ],
)
def test_steps_have_the_bits_of_eager_pytorch(
    ranks: Ranks, kind: str, step: Any, steps: int
) -> None:
    found = ranks.run(trained, sharded, adamw, step, None, {"kind": kind}, steps)
    assert found == [""] * ranks.world


def compiled_by_roam(rank: int, world: int) -> bool:
    """Whether steps have the bits of a loop over compiled blocks if roam compiles them."""
    warnings.simplefilter("ignore")
    found = []
    for kind, run in (("compiled", update), ("plain", roam.compile(update, kernels="inductor"))):
        net = sharded(kind)
        optimizer = adamw(net)
        results = [run(net, optimizer, batch(number)) for number in range(3)]
        found.append(parts(results, state_of(net, optimizer)))
    return is_equal(*found)


@pytest.mark.long
def test_roam_compiles_blocks_that_are_sharded(ranks: Ranks) -> None:
    assert ranks.run(compiled_by_roam) == [True] * ranks.world


@pytest.mark.long
@FOUR
@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_sums_of_four_ranks_whose_order_shows(ranks: Ranks, kind: str) -> None:
    found = ranks.run(trained, sharded, adamw, update, None, {"kind": kind, **ONE}, 4)
    assert found == [""] * ranks.world


def test_after_an_evaluation_parameters_are_resharded(ranks: Ranks) -> None:
    found = ranks.run(evaluated_between)
    assert found == [(["fully_shard"] * 4, True, 2)] * ranks.world


def test_gradients_that_are_left_are_refused(ranks: Ranks) -> None:
    assert ranks.run(refused) == [("fully_shard", True)] * ranks.world


@pytest.mark.sweep
@FOUR
@pytest.mark.parametrize(
    ("way", "step", "steps"), [("sequence", update_twice, 6), ("layers", update_of_layers, 4)]
)
def test_spread_layers_that_are_sharded_too(ranks: Ranks, way: str, step: Any, steps: int) -> None:
    found = ranks.run(trained, sharded_twice, adamw, step, None, {"way": way, **ONE}, steps)
    assert found == [""] * ranks.world


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("processes", "make", "step"),
    [(2, sharded, update), (4, one_block_sharded_twice, update_twice)],
    indirect=["processes"],
)
def test_a_checkpoint_is_loaded_and_training_goes_on(
    ranks: Ranks, tmp_path: Path, make: Any, step: Any
) -> None:
    assert ranks.run(saved_and_loaded, str(tmp_path), make, step) == [True] * ranks.world


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("processes", "make", "step"),
    [(2, sharded, update), (4, one_block_sharded_twice, update_twice)],
    indirect=["processes"],
)
def test_a_fake_group_gives_the_plan_of_any_rank(
    ranks: Ranks, one: Ranks, make: Any, step: Any
) -> None:
    *figures, code = one.run(in_fake_group, 1, ranks.world, True, make, step)[0]
    assert code == "fake_group"
    assert figures == ranks.run(planned, make, step)[1]


@pytest.mark.long
def test_one_process_plans_for_one_rank_after_another(one: Ranks) -> None:
    for rank in (1, 0):
        assert one.run(in_fake_group, rank, 2, True, sharded, update)[0][-1] == "fake_group"


def test_a_rate_that_changes_in_an_update_of_lists(one: Ranks) -> None:
    # Without an eager step before it, C++ has not met the class of live numbers. The process may
    # have planned for other ranks before.
    assert one.run(in_fake_group, 0, 2, True, sharded, decay)[0][-1] == "fake_group"


def test_parameters_are_gathered_again_within_a_limit(ranks: Ranks) -> None:
    for has_bits, is_within, gathers, runs, share in (found := ranks.run(budgeted)):
        assert has_bits, found
        assert is_within, found
        assert gathers > 6, found
        assert runs > 0, found
        assert 0 < share <= 1000, found


def test_memory_is_measured(ranks: Ranks) -> None:
    found = ranks.run(measured)
    for by_plan, of_group, eagerly, eagerly_of_group, told in found:
        assert 0 <= of_group < by_plan, found  # at the plan's peak the group may copy nothing
        assert 0 <= eagerly_of_group < eagerly, found
        assert abs(by_plan - of_group - told) < 0.05 * told, found
        assert by_plan < eagerly, found
