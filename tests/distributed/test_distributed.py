"""Steps of several processes: eager PyTorch's bits on every rank, or a typed error on all.

The processes are gloo ranks on the CPU. Four of them show what two hide: with more than two, the
bits of a sum depend on where in its buffer an element lies.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import itertools
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import transformers
from torch import nn
from torch.distributed import all_gather_object, broadcast_object_list
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import roam
from newer import needs_2_15
from ranks import Ranks, alive, revived
from roam.distributed import agreement, collectives
from roam.runtime.pool import Pool
from roam.torch_compat.private import kept_buckets, store_of

Step = Callable[..., Any]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from alive(4, tmp_path_factory.mktemp("four"))


@pytest.fixture
def ranks(four: Ranks) -> Ranks:
    return revived(four)


# -- what the ranks run


def small(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def batch(rank: int, number: int, rows: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(rows, 16, generator=generator)


def tensors_of(*values: Any) -> list[torch.Tensor]:
    found = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor.detach().clone() for tensor in found]


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return tensors_of(list(net.parameters()), list(net.buffers()), optimizer.state_dict())


def differences(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[int]:
    """Places of what has other bits."""
    assert len(one) == len(other)
    return [
        place
        for place, (left, right) in enumerate(zip(one, other, strict=True))
        if left.dtype != right.dtype or not torch.equal(left, right)
    ]


def both(rank: int, world: int, step: Step, make: Callable[[], Any], steps: int = 4) -> list[int]:
    """What differs after so many steps, eagerly and by plan."""

    def trained(wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        net, optimizer = make()
        run, results = wrap(step), []
        for number in range(steps):
            results += tensors_of(run(net, optimizer, batch(rank, number)))
        return [*results, *state_of(net, optimizer)]

    compiled: list[Any] = []

    def compile_it(step: Step) -> Step:
        compiled.append(roam.compile(step, poison=True))
        return compiled[0]

    found = differences(trained(lambda step: step), trained(compile_it))
    assert compiled[0].plans, "nothing ran by a plan"
    return found


def backward(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    return loss


def reduced(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = backward(net, optimizer, x)
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    dist.barrier()
    optimizer.step()
    return loss


def reduced_in_the_background(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = backward(net, optimizer, x)
    handles = [dist.all_reduce(p.grad, async_op=True) for p in net.parameters()]
    scale = loss.detach() * 0 + 1 / dist.get_world_size()
    for handle, parameter in zip(handles, net.parameters(), strict=True):
        handle.wait()
        parameter.grad.mul_(scale)
    optimizer.step()
    return loss


def reduced_functionally(net: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    loss = backward(net, optimizer, x)
    group = dist.group.WORLD
    for parameter in net.parameters():
        parameter.grad = functional.all_reduce(parameter.grad, "sum", group) / group.size()
    losses = functional.all_gather_tensor(loss.detach().reshape(1), 0, group)
    first = functional.broadcast(losses * (group.rank() + 1), 1, group)
    shares = functional.reduce_scatter_tensor(losses.repeat(2), "sum", 0, group)
    swapped = functional.all_to_all_single(losses, None, None, group)
    optimizer.step()
    return losses, first, shares, swapped


def gathered(net: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    loss = backward(net, optimizer, x)
    world = dist.get_world_size()
    for parameter in net.parameters():
        flat = parameter.grad.reshape(-1)
        every = flat.new_empty(world * flat.numel())
        dist.all_gather_into_tensor(every, flat)
        flat = flat * 0  # its memory is free only when it has been sent
        mine = torch.empty_like(flat)
        dist.reduce_scatter_tensor(mine, every)
        parameter.grad = (mine + flat).view_as(parameter)
    losses = [torch.empty_like(loss) for _ in range(world)]
    dist.all_gather(losses, loss.detach())
    chosen = loss.detach() * 2
    dist.broadcast(chosen, 1)
    most = loss.detach().clone()
    dist.reduce(most, 2, op=dist.ReduceOp.MAX)
    optimizer.step()
    return loss, losses, chosen


def within_halves(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = backward(net, optimizer, x)
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad, group=HALVES[0])
    optimizer.step()
    return loss


HALVES: list[Any] = []


def halve(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    HALVES[:] = [groups[rank // 2]]


STEPS = (reduced, reduced_in_the_background, reduced_functionally, gathered)


@needs_2_15
@pytest.mark.parametrize("step", STEPS)
def test_collectives_have_eager_bits(ranks: Ranks, step: Step) -> None:
    assert ranks.run(both, step, small) == [[]] * 4


@needs_2_15
def test_collectives_of_a_part_of_the_ranks_have_eager_bits(ranks: Ranks) -> None:
    ranks.run(halve)
    assert ranks.run(both, within_halves, small) == [[]] * 4


def checking(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = backward(net, optimizer, x)
    dist.all_reduce(loss.detach())
    if loss > 3:
        raise ValueError("the loss is too large")
    optimizer.step()
    return loss


@needs_2_15
def test_a_check_in_a_step_with_collectives_is_refused(tmp_path: Any) -> None:
    with (
        alone(tmp_path),
        pytest.raises(roam.CaptureError, match="one rank could decide differently") as e,
    ):
        roam.compile(checking).plan(*small(), batch(0, 0))
    assert e.value.code == "collective_branch"
    assert "test_distributed.py" in e.value.source


@contextmanager
def alone(folder: Any) -> Iterator[None]:
    """A group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@needs_2_15
def test_a_plan_is_for_a_group_of_the_same_ranks(tmp_path: Any) -> None:
    net, optimizer = small()
    step = roam.compile(reduced)
    for number in range(2):  # the second group is the first for all that a plan knows
        (tmp_path / str(number)).mkdir()
        with alone(tmp_path / str(number)):
            for place in range(3):
                step(net, optimizer, batch(0, place))
    assert len(step.plans) == 2
    with pytest.raises(ValueError, match="not been initialized"):
        step(net, optimizer, batch(0, 0))


@needs_2_15
def test_a_launch_and_its_wait_keep_the_tensors_busy(tmp_path: Any) -> None:
    with alone(tmp_path):
        graph = roam.capture(gathered, *small(), batch(0, 0))
    operators = list(graph.operators)
    launched = [one for one in operators if one.sequence == "collective"]
    waits = [one for one in operators if one.name == "c10d.wait"]
    assert len(launched) == len(waits) == 11
    for launch, wait in zip(launched, waits, strict=True):
        busy = {*launch.reads, *launch.mutates}
        assert busy <= {*wait.reads, *wait.mutates}
        is_gather = launch.name in ("c10d._allgather_base_", "c10d.allgather_")
        assert launch.repeatable == wait.repeatable <= is_gather
    assert any(launch.repeatable for launch in launched)


def code_of(graph: roam.Graph, plan: roam.Plan, change: Callable[[dict[str, Any]], Any]) -> str:
    """The code with which a changed plan is refused; nothing where it is not."""
    values = json.loads(plan.to_json())
    change(values)
    try:
        roam.verify(graph, roam.Plan.from_json(json.dumps(values).encode()))
    except roam.PlanError as error:
        return error.code
    return ""


@needs_2_15
def test_no_plan_is_wrong_about_launches_and_waits(tmp_path: Any) -> None:
    with alone(tmp_path):
        graph = roam.capture(gathered, *small(), batch(0, 0))
    plan = roam.optimize(graph)
    order, operators = plan.order.tolist(), list(graph.operators)
    launches = [one for one in order if operators[one].sequence == "collective"]
    waits = [one for one in order if operators[one].name == "c10d.wait"]
    places = {number: place for place, number in enumerate(order)}

    def moved(number: int, place: int) -> Callable[[dict[str, Any]], Any]:
        left = [one for one in order if one != number]
        return lambda values: values.update(order=[*left[:place], number, *left[place:]])

    codes = set()
    for number in waits:
        assert code_of(graph, plan, lambda v, n=number: v["order"].remove(n)) == "operator_missing"
        codes.add(code_of(graph, plan, moved(number, 0)))
        used = [one for one in graph.successors(number) if one not in waits]
        for reader in used:  # early reuse of what is under way
            codes.add(code_of(graph, plan, moved(number, places[reader])))
    for one, other in pairwise(launches):  # another order than on other ranks
        codes.add(code_of(graph, plan, moved(other, places[one])))
    assert "" not in codes
    assert {"sequence_broken", "control_broken"} & codes
    for number in launches:  # what is made while it is under way lies in its memory
        busy = {*operators[number].reads, *operators[number].mutates}
        busy = {one for one in busy if plan.offsets[one] >= 0}
        wait = next(one for one in waits if places[one] > places[number])
        for between in order[places[number] : places[wait]]:
            for tensor in operators[between].creates:
                for taken in busy if plan.offsets[tensor] >= 0 else ():
                    offset = int(plan.offsets[taken])
                    change = lambda v, t=tensor, o=offset: v["offsets"].__setitem__(t, o)  # noqa: E731
                    assert code_of(graph, plan, change)


# -- DistributedDataParallel


def wrapped(net: nn.Module, **options: Any) -> nn.Module:
    """In several buckets, however small the model is."""
    return nn.parallel.DistributedDataParallel(net, **{"bucket_cap_mb": 0.01, **options})


def gpt2() -> tuple[nn.Module, torch.optim.Optimizer]:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=32, n_head=4, vocab_size=97, n_positions=16, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    net = wrapped(transformers.GPT2LMHeadModel(config).train())
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def train_gpt2(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    tokens = (x * 1e4).long().abs() % 97
    optimizer.zero_grad()
    loss = net(input_ids=tokens, labels=tokens).loss
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    return loss


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.convolutions(x))


def resnet() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), Residual(8), Residual(8),
        nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return (net := wrapped(net)), torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def train_resnet(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    return clipped(net, optimizer, x.view(-1, 1, 4, 4))


def clipped(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = backward(net, optimizer, x)
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    return loss


def accumulating(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    with net.no_sync():
        for part in x.chunk(3)[:2]:
            net(part).square().mean().backward()
    loss = net(x.chunk(3)[2]).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def small_ddp(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64),
        nn.Linear(64, 8),
    )  # fmt: skip
    net = wrapped(net, **options)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def with_views() -> Any:
    return small_ddp(gradient_as_bucket_view=True)


def anew() -> Any:
    """With buckets that live for one backward pass."""
    return small_ddp(lazy_bucket_allocation=True)


def anew_with_views() -> Any:
    return small_ddp(lazy_bucket_allocation=True, gradient_as_bucket_view=True)


def without_buffers() -> Any:
    return small_ddp(broadcast_buffers=False)


def autocast(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


SCALER: list[Any] = []


def scaled(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    SCALER[0].scale(loss).backward()
    SCALER[0].step(optimizer)
    SCALER[0].update()
    return loss


def with_scaler() -> Any:
    SCALER[:] = [torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)]
    return small_ddp()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("step", "make", "steps"),
    [
        (train_gpt2, gpt2, 20),
        (train_resnet, resnet, 20),
        (accumulating, small_ddp, 20),
        (clipped, with_views, 5),
        (accumulating, with_views, 5),
        (clipped, anew, 5),
        (accumulating, anew_with_views, 5),
        (clipped, without_buffers, 5),
        (autocast, small_ddp, 5),
        (scaled, with_scaler, 8),
    ],
)
def test_ddp_has_eager_bits(ranks: Ranks, step: Step, make: Any, steps: int) -> None:
    assert ranks.run(both, step, make, steps) == [[]] * 4


def stopped_and_resumed(rank: int, world: int) -> list[int]:
    def trained(wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        net, optimizer = small_ddp()
        run = wrap(clipped)
        for number in range(5):
            run(net, optimizer, batch(rank, number))
        file = io.BytesIO()
        torch.save((net.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        net, optimizer = small_ddp()
        for one, state in zip((net, optimizer), torch.load(file), strict=True):
            one.load_state_dict(state)
        run = wrap(clipped)
        for number in range(5, 10):
            run(net, optimizer, batch(rank, number))
        return state_of(net, optimizer)

    return differences(trained(lambda step: step), trained(roam.compile))


def test_training_that_was_stopped_goes_on(ranks: Ranks) -> None:
    assert ranks.run(stopped_and_resumed) == [[]] * 4


def in_turns(rank: int, world: int) -> list[int]:
    """Steps by plan and eager ones, evaluation in between, and batches of other shapes on one
    rank."""

    def trained(step: Step) -> list[torch.Tensor]:
        net, optimizer = small_ddp()
        found = []
        for number in range(10):
            run = clipped if number in (3, 4, 8) else step
            rows = 5 if rank == 2 and number % 2 else 6
            found += tensors_of(run(net, optimizer, batch(rank, number, rows)))
            if number == 5:
                net.eval()
                with torch.no_grad():
                    found += tensors_of(net(batch(rank, number)))
                net.train()
        return [*found, *state_of(net, optimizer)]

    return differences(trained(clipped), trained(roam.compile(clipped)))


def test_steps_by_plan_and_eager_ones_take_turns(ranks: Ranks) -> None:
    assert ranks.run(in_turns) == [[]] * 4


def of_many_sizes(rank: int, world: int) -> tuple[list[int], int]:
    """What differs where each rank has batches of sizes of its own, and how many plans there
    are.
    """

    def trained(step: Step) -> list[torch.Tensor]:
        net, optimizer = small_ddp()
        found = []
        for number in range(10):
            rows = 4 + (3 * rank + 5 * number) % 11
            found += tensors_of(step(net, optimizer, batch(rank, number, rows)))
        return [*found, *state_of(net, optimizer)]

    compiled = roam.compile(clipped)
    return differences(trained(clipped), trained(compiled)), len(compiled.kept().plans)


def test_each_rank_has_one_plan_for_its_sizes(ranks: Ranks) -> None:
    assert ranks.run(of_many_sizes) == [([], 2)] * 4


def contrasted(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    """Every rank has the features of all; there are as many as samples."""
    optimizer.zero_grad()
    features = net(x).mean(1)
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.detach())
    parts[dist.get_rank()] = features
    first = dist.get_rank() * len(features)
    labels = torch.arange(first, first + len(features))
    loss = nn.functional.cross_entropy(features @ torch.cat(parts).T, labels)
    loss.backward()
    optimizer.step()
    return loss


def of_many_lengths(rank: int, world: int) -> tuple[list[int], int]:
    """As `of_many_sizes`, where collectives exchange as many features as there are samples, which
    all ranks have the same number of, and texts have other lengths on each rank.
    """

    def trained(step: Step) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.parallel.DistributedDataParallel(nn.Embedding(50, 8))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        for number, rows in enumerate([4, 4, 6, 3, 5, 4, 9]):
            torch.manual_seed(100 * rank + number)
            x = torch.randint(50, (rows, 5 + (3 * rank + 5 * number) % 11))
            found += tensors_of(step(net, optimizer, x))
        return [*found, *state_of(net, optimizer)]

    compiled = roam.compile(contrasted)
    return differences(trained(contrasted), trained(compiled)), len(compiled.kept().plans)


def test_ranks_of_other_lengths_exchange_parts_of_changing_sizes(ranks: Ranks) -> None:
    found = ranks.run(of_many_lengths)
    assert [differs for differs, _ in found] == [[]] * 4
    assert max(plans for _, plans in found) <= 3


def kept_bytes(net: Any) -> int:
    """Memory of the buckets that a module keeps."""
    return sum(bucket.untyped_storage().nbytes() for bucket in kept_buckets(net.reducer))


def without_buckets(rank: int, world: int) -> tuple[list[int], dict[str, bool]]:
    """What differs, and when the module had its buckets, if plans take turns with all that uses
    them.
    """
    kept: dict[str, bool] = {}

    def trained(step: Step) -> list[torch.Tensor]:
        net, optimizer = small_ddp()
        other = wrapped(net.module)
        numbers, found = itertools.count(), []

        def run(what: Step, net: Any = net) -> None:
            found.extend(tensors_of(what(net, optimizer, batch(rank, next(numbers)))))

        def alone() -> None:
            optimizer.zero_grad()
            net.module(batch(rank, next(numbers))).square().mean().backward()
            found.extend(tensors_of([one.grad for one in net.parameters()]))

        def note(when: str) -> None:
            kept[when] = kept_bytes(net) > 0

        for _ in range(3):
            run(step)
        note("by plan")
        alone()
        with torch.no_grad():
            found.extend(tensors_of(net(batch(rank, 51))))
        note("backward pass of the bare module, evaluation")
        run(clipped)
        note("eager step")
        run(step)
        run(accumulating)
        run(step)
        note("by plan again")
        with net.no_sync():
            net(batch(rank, 52)).square().mean().backward()
        run(clipped)
        run(step)
        for _ in range(3):
            run(step, other)
        run(clipped, other)
        run(step)
        note("another wrapper of the same module")
        net(batch(rank, 53))
        note("forward pass alone")
        run(step)
        alone()
        run(step)
        twin = copy.deepcopy(net)
        note("a copy")
        run(clipped, twin)
        run(clipped)
        found.extend(tensors_of(list(twin.parameters())))
        return [*found, *state_of(net, optimizer)]

    eagerly = trained(clipped)
    assert all(kept.values())
    return differences(eagerly, trained(roam.compile(clipped))), kept


@needs_2_15
def test_a_module_is_without_its_buckets_while_plans_run(ranks: Ranks) -> None:
    for found, kept in ranks.run(without_buckets):
        assert found == []
        assert kept == {
            "by plan": False,
            "backward pass of the bare module, evaluation": False,
            "eager step": True,
            "by plan again": False,
            "another wrapper of the same module": False,
            "forward pass alone": True,
            "a copy": False,
        }


def looked_up(net: nn.Module, optimizer: Any, x: torch.Tensor, places: torch.Tensor) -> Any:
    return clipped(net, optimizer, x[places])


@needs_2_15
def test_a_module_has_its_buckets_after_a_run_that_failed(tmp_path: Any) -> None:
    found = []
    for step in (looked_up, roam.compile(looked_up)):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        with alone(folder):
            net, optimizer = small_ddp()
            for number, most in enumerate((6, 6, 6, 7)):
                places = torch.arange(6) + most - 6
                with contextlib.ExitStack() as stack:
                    if most > 6:
                        stack.enter_context(pytest.raises((IndexError, roam.ExecutionError)))
                    step(net, optimizer, batch(0, number), places)
            assert (kept_bytes(net) > 0) == (step is looked_up)
            looked_up(net, optimizer, batch(0, 9), torch.arange(6))
            assert kept_bytes(net) > 0
            found.append(state_of(net, optimizer))
    assert differences(*found) == []


def evaluated(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net(x)


def two_steps(rank: int, world: int) -> list[int]:
    """Two compiled steps of one module, one of which only evaluates it."""

    def trained(wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        net, optimizer = small_ddp()
        train, evaluate = wrap(clipped), wrap(evaluated)
        found = []
        for number in range(5):
            found += tensors_of(train(net, optimizer, batch(rank, number)))
            net.eval()
            found += tensors_of(evaluate(net, optimizer, batch(rank, number)))
            net.train()
        return [*found, *state_of(net, optimizer)]

    return differences(trained(lambda step: step), trained(roam.compile))


def test_a_module_is_trained_and_evaluated_by_plan(ranks: Ranks) -> None:
    assert ranks.run(two_steps) == [[]] * 4


def compared(rank: int, world: int) -> str:
    net, optimizer = small_ddp()
    return str(roam.compare(clipped, net, optimizer, batch(rank, 0)))


def test_compare_finds_ddp_equal(ranks: Ranks) -> None:
    for text in ranks.run(compared):
        assert "3 steps: equal" in text


def frozen() -> Any:
    """To be frozen when its reducer has been made."""
    return small_ddp()


def finalized_by_hand() -> Any:
    """To be set to it when its reducer has been made."""
    return small_ddp()


def hooked() -> Any:
    net, optimizer = small_ddp()
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    return net, optimizer


def hooked_in_c() -> Any:
    net, optimizer = small_ddp()
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return net, optimizer


def static() -> Any:
    return small_ddp(static_graph=True)


def first_half(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    net.module[0].weight.square().sum().backward()
    optimizer.step()
    return loss


def updating_in_hooks() -> Any:
    net, optimizer = small_ddp()
    for parameter in net.parameters():
        own = torch.optim.SGD([parameter])

        def update(_: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    return net, optimizer


OPTION, UNUSED = "ddp_option", "ddp_unused"  # error codes


@pytest.mark.parametrize(
    ("step", "make", "code"),
    [
        (clipped, frozen, OPTION),
        (clipped, hooked, OPTION),
        (clipped, hooked_in_c, OPTION),
        (clipped, static, OPTION),
        pytest.param(clipped, finalized_by_hand, OPTION, marks=needs_2_15),
        (first_half, small_ddp, UNUSED),
        (backward, updating_in_hooks, UNUSED),
    ],
)
def test_what_no_plan_can_reduce_is_refused(
    tmp_path: Any, step: Step, make: Any, code: str
) -> None:
    with alone(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net, optimizer = make() if make is not frozen else small_ddp()
        if step is not first_half:
            backward(net, optimizer, batch(0, 0))
        if make is frozen:
            net.module[0].weight.requires_grad_(False)
        elif make is finalized_by_hand:
            net.require_manual_backward_finalization = True
        elif step is first_half:
            clipped(net, optimizer, batch(0, 0))
        with pytest.raises(roam.CaptureError) as error:
            roam.compile(step).plan(net, optimizer, batch(0, 0))
    assert error.value.code == code


def hook_in_python(net: Any) -> None:
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)


def hook_in_c(net: Any) -> None:
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def hook_on_buffers(net: Any) -> None:
    net._register_buffer_comm_hook(None, lambda state, buffers: None)


def by_hand(net: Any) -> None:
    net.require_manual_backward_finalization = True


@pytest.mark.parametrize(
    "change",
    [hook_in_python, hook_in_c, hook_on_buffers, pytest.param(by_hand, marks=needs_2_15)],
)
def test_what_changes_a_reducer_after_the_plan_was_made_is_refused(
    tmp_path: Any, change: Callable[[Any], None]
) -> None:
    with alone(tmp_path):
        net, optimizer = small_ddp()
        step = roam.compile(clipped)
        for number in range(3):
            step(net, optimizer, batch(0, number))
        change(net)
        before = state_of(net, optimizer)
        with pytest.raises(roam.CaptureError) as error:
            step(net, optimizer, batch(0, 3))
        assert error.value.code == OPTION
        assert differences(before, state_of(net, optimizer)) == []


def test_the_first_step_of_ddp_runs_eagerly(tmp_path: Any) -> None:
    with alone(tmp_path):
        net, optimizer = small_ddp()
        step = roam.compile(clipped)
        with pytest.raises(roam.CaptureError, match="run the step once") as error:
            step.plan(net, optimizer, batch(0, 0))
        assert error.value.code == "ddp_first_step"
        step(net, optimizer, batch(0, 0))
        assert not step.plans
        step(net, optimizer, batch(0, 0))
        assert step.plans


def averaged(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x := x.sin())
    return x


@needs_2_15
def test_compiled_functions_that_communicate_are_refused(tmp_path: Any) -> None:
    compiled = torch.compile(averaged)
    with alone(tmp_path), pytest.raises(roam.CaptureError, match="collectives") as error:
        roam.compile(lambda x: compiled(x) + 1)(torch.ones(3))
    assert error.value.code == "compiled_region"


# -- ranks that do not do the same


def other_on_one(rank: int, world: int) -> None:
    def step(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = backward(net, optimizer, x)
        dist.all_reduce(loss.detach())
        if rank == 1:
            dist.broadcast(loss.detach().clone(), 0)
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss

    net, optimizer = small()
    for number in range(3):
        roam.compile(step)(net, optimizer, batch(rank, number))


def other_at_the_third(rank: int, world: int) -> None:
    """All know both plans by then, and one rank goes on by another than the rest."""
    net, optimizer = small()
    step = roam.compile(reduced)
    for number in range(2):
        step(net, optimizer, batch(rank, number))
    if rank == 1:
        step = roam.compile(gathered)
    step(net, optimizer, batch(rank, 2))


def raising_in_the_run(rank: int, world: int) -> None:
    def step(net: nn.Module, optimizer: Any, x: torch.Tensor, places: torch.Tensor) -> Any:
        loss = backward(net, optimizer, x[places])
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss

    net, optimizer = small()
    compiled = roam.compile(step)
    for number in range(4):
        places = torch.arange(6) + (7 if rank == 1 and number == 3 else 0)
        compiled(net, optimizer, batch(rank, number), places)


def raising_before_a_scatter(rank: int, world: int) -> None:
    """Rank 0 waits for parts of sums, for which gloo waits without a time limit."""

    def step(net: nn.Module, optimizer: Any, x: torch.Tensor, places: torch.Tensor) -> Any:
        loss = backward(net, optimizer, x[places])
        part = torch.empty(8 // world)
        dist.reduce_scatter_tensor(part, net[2].bias.grad)
        optimizer.step()
        return loss, part

    net, optimizer = small()
    compiled = roam.compile(step)
    for number in range(4):
        places = torch.arange(6) + (7 if rank == 1 and number == 3 else 0)
        compiled(net, optimizer, batch(rank, number), places)


def killed(rank: int, world: int) -> None:
    net, optimizer = small_ddp()
    step = roam.compile(clipped)
    for number in range(6):
        if rank == 1 and number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        step(net, optimizer, batch(rank, number))


def killed_before_a_plan(rank: int, world: int) -> None:
    net, optimizer = small()
    roam.compile(reduced)(net, optimizer, batch(rank, 0))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    roam.compile(gathered)(net, optimizer, batch(rank, 1))


def other_version_on_one(rank: int, world: int) -> None:
    if rank == 1:
        agreement.__version__ = "0.0.1"
    net, optimizer = small()
    roam.compile(reduced)(net, optimizer, batch(rank, 0))


def without_memory_for_the_pool(rank: int, world: int) -> None:
    net, optimizer = small()
    step = roam.compile(reduced, pool=True)
    for number in range(3):
        step(net, optimizer, batch(rank, number))
    if rank == 1:
        step.release()
        error = roam.ExecutionError("none is left")
        with (
            mock.patch.object(Pool, "_reserve", side_effect=error),
            pytest.raises(roam.ExecutionError, match="none is left"),
        ):
            step(net, optimizer, batch(rank, 3))
    step(net, optimizer, batch(rank, 3))


def refused_before_its_run(rank: int, world: int) -> None:
    """A run that cannot begin, since two arguments of rank 1 share memory unknown to PyTorch."""

    def step(net: nn.Module, optimizer: Any, x: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        loss = reduced(net, optimizer, x)
        sums += x.sum(0)
        return loss

    net, optimizer = small()
    compiled = roam.compile(step)
    for number in range(3):
        compiled(net, optimizer, batch(rank, number), torch.zeros(16))
    x = batch(rank, 3)
    if rank == 1:
        array = x.numpy()
        with pytest.raises(roam.ExecutionError) as error:
            compiled(net, optimizer, torch.from_numpy(array), torch.from_numpy(array[0]))
        assert error.value.code == "sharing"
    compiled(net, optimizer, x, torch.zeros(16))


DIFFER, LEFT = "collectives_differ", "rank_left"  # error codes
LEFT_S = 30
"""When one rank has left, all others have an error within so many seconds."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("function", "codes", "text"),
    [
        pytest.param(other_on_one, {DIFFER}, "broadcast_", marks=needs_2_15),
        (
            other_at_the_third,
            {DIFFER, LEFT, "torn", "failed"},
            "_allgather_base_",
        ),
        (raising_in_the_run, {LEFT, "torn", "failed"}, "rank 1 has left|out of bounds"),
        (raising_before_a_scatter, {LEFT, "torn", "failed"}, "rank 1 has left|out of bounds"),
        (without_memory_for_the_pool, {LEFT}, "none is left"),
        (refused_before_its_run, {LEFT}, "with the same memory"),
        (other_version_on_one, {DIFFER}, "ranks run different versions: roam .* and roam "),
    ],
)
def test_all_ranks_get_an_error_soon(
    tmp_path: Any, function: Callable[..., Any], codes: set[str], text: str
) -> None:
    two = Ranks(2, tmp_path, group_s=300)
    try:
        two.start(function)
        answers = two.answers_after_the_first(LEFT_S)
    finally:
        two.kill()
    for how, told in answers:
        assert how == "raised", answers
        kind, code, trace = told
        assert (kind, code in codes) == ("ExecutionError", True), told
        assert re.search(text, trace), told
        assert code == DIFFER or agreement.AGAIN in trace, told


def test_groups_are_compared_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose groups form a circle would else wait for each other."""
    stores = {"left": dist.HashStore(), "right": dist.HashStore()}
    groups = [collectives.Group("left", (0, 1), 0), collectives.Group("right", (0, 2), 0)]
    looks: list[bool] = []

    def others_come(_: float) -> None:
        looks.append(all(store.check(["pending/0"]) for store in stores.values()))
        for store in stores.values():
            store.set(f"known/1/{json.loads(store.get('pending/0'))['names'][0]}", "1")

    monkeypatch.setattr(agreement, "resolve_group", lambda name: name)
    monkeypatch.setattr(agreement, "store_of", stores.get)
    monkeypatch.setattr(agreement, "_end_of", lambda _: "")
    monkeypatch.setattr(agreement, "_is_beside", lambda _: False)
    monkeypatch.setattr(time, "sleep", others_come)
    agreement.begin({group: [["allreduce_", "a.py:1"]] for group in groups}, is_new=True)
    assert looks == [True]
    assert [store.get("pending/0") for store in stores.values()] == [b"", b""]


def interrupted_while_it_waits(rank: int, world: int) -> None:
    """Rank 1 is late, and rank 0's user has no patience."""
    net, optimizer = small()
    step = roam.compile(reduced)
    for number in range(3):
        step(net, optimizer, batch(rank, number))
    if rank == 1:
        time.sleep(6)
    else:
        threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    step(net, optimizer, batch(rank, 3))


@needs_2_15
def test_an_interrupt_ends_a_rank_that_waits(tmp_path: Any) -> None:
    two = Ranks(2, tmp_path, group_s=300)
    try:
        two.start(interrupted_while_it_waits)
        (how, told), (other_how, other) = two.answers_after_the_first(LEFT_S)
    finally:
        two.kill()
    assert (how, told[0]) == ("raised", "KeyboardInterrupt"), told
    assert (other_how, other[0]) == ("raised", "ExecutionError"), other
    assert "it was interrupted" in other[2]


def made_anew(rank: int, world: int) -> list[int]:
    """After a failure, in a new group of the same name and store."""
    net, optimizer = small()
    failing = roam.compile(other_number_of_sums)
    store = dist.FileStore(os.environ["ROAM_TEST_STORE"], world)
    for attempt in range(2):
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(attempt), store), rank=rank, world_size=world
        )
        if attempt == 0:
            with pytest.raises(roam.ExecutionError):
                failing(net, optimizer, batch(rank, 0), rank)
            with pytest.raises(roam.ExecutionError, match="start all processes again"):
                roam.compile(reduced)(net, optimizer, batch(rank, 0))
    return both(rank, world, reduced, small)


def other_number_of_sums(net: nn.Module, optimizer: Any, x: torch.Tensor, number: int) -> Any:
    loss = backward(net, optimizer, x).detach()
    for _ in range(number + 1):
        dist.all_reduce(loss)
    return loss


@needs_2_15
def test_a_new_group_begins_anew(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROAM_TEST_STORE", str(tmp_path / "again"))
    two = Ranks(2, tmp_path, group_s=300)
    try:
        assert two.run(made_anew) == [[], []]
    finally:
        two.kill()


@pytest.mark.parametrize("function", [killed, pytest.param(killed_before_a_plan, marks=needs_2_15)])
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Any, function: Callable[..., Any]) -> None:
    two = Ranks(2, tmp_path, group_s=300)
    try:
        two.start(function)
        (how, told), (gone, _) = two.answers_after_the_first(LEFT_S)
    finally:
        two.kill()
    assert (how, gone) == ("raised", "gone"), told
    assert told[0] in ("ExecutionError", "RuntimeError"), told


def ended_on_another_machine(rank: int, world: int) -> None:
    """Rank 1 ends by an exception in a step without collectives."""
    agreement._machine = lambda: f"machine {rank}"
    net, optimizer = small()
    step = roam.compile(reduced)
    for number in range(3):
        step(net, optimizer, batch(rank, number))
    if rank == 1:
        looking_up = roam.compile(lambda x, places: x[places].sin())
        looking_up(batch(rank, 3), torch.tensor([1]))
        try:
            looking_up(batch(rank, 3), torch.tensor([100]))
        except IndexError as error:  # of the step's own function, as eagerly
            sys.last_value = error  # as the interpreter sets it
        atexit._run_exitfuncs()
        time.sleep(LEFT_S)  # until the process is gone, the group knows nothing
    step(net, optimizer, batch(rank, 3))


@needs_2_15
def test_ranks_hear_of_an_end_on_another_machine(tmp_path: Any) -> None:
    two = Ranks(2, tmp_path, group_s=300)
    try:
        two.start(ended_on_another_machine)
        assert two._pipes[0].poll(LEFT_S)
        how, (kind, code, trace) = two._pipes[0].recv()
    finally:
        two.kill()
    assert (how, kind, code) == ("raised", "ExecutionError", LEFT), trace
    assert "rank 1 has left: its process" in trace
    assert "out of bounds" in trace


def gone_before_buckets(rank: int, world: int, how: str) -> None:
    """Rank 1 leaves after the first step, before the buckets of all later steps are agreed on."""
    net, optimizer = small_ddp()
    step = roam.compile(clipped)
    step(net, optimizer, batch(rank, 0))
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        agreement.leave({collectives.Group.of(dist.group.WORLD): []}, "it has had enough")
        time.sleep(LEFT_S)
    before = state_of(net, optimizer)
    with pytest.raises(roam.ExecutionError) as error:
        step(net, optimizer, batch(rank, 1))
    assert error.value.code == LEFT
    assert agreement.AGAIN in str(error.value)
    assert differences(before, state_of(net, optimizer)) == []
    with pytest.raises(roam.ExecutionError, match="on this rank"):
        roam.compile(reduced)(*small(), batch(rank, 0))


@needs_2_15
@pytest.mark.parametrize("how", ["killed", "left"])
def test_ranks_hear_of_one_that_is_gone_before_buckets_are_rebuilt(tmp_path: Any, how: str) -> None:
    two = Ranks(2, tmp_path, group_s=300)
    try:
        two.start(gone_before_buckets, how)
        assert two._pipes[0].poll(LEFT_S)
        assert two._pipes[0].recv() == ("returned", None)
    finally:
        two.kill()


def updated_beside(rank: int, world: int, as_views: bool) -> tuple[list[int], list[int], str]:
    """Backward passes of a module that no compiled function reaches: what differs after updates and
    evaluations by plan, how many plans these needed, and why a backward pass is refused.
    """
    plans: list[int] = []

    def update(optimizer: Any, parameters: list[Any]) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def evaluate(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x).sum(0)

    def trained(wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        net, optimizer = small_ddp(gradient_as_bucket_view=as_views)
        inner, found = net.module, []
        run, look = wrap(update), wrap(evaluate)
        for number in range(4):
            net(batch(rank, number)).square().mean().backward()
            found += tensors_of(run(optimizer, list(inner.parameters())))
            found += tensors_of(look(inner, batch(rank, number)))
        plans.extend(len(getattr(one, "plans", ())) for one in (run, look))
        return [*found, *state_of(net, optimizer)]

    found = differences(trained(lambda step: step), trained(roam.compile))
    net, optimizer = small_ddp()
    try:
        roam.compile(backward)(net.module, optimizer, batch(rank, 0))
    except roam.CaptureError as error:
        return found, plans[2:], error.code
    return found, plans[2:], "none"


@pytest.mark.sweep
@pytest.mark.parametrize("as_views", [False, True])
def test_updates_and_evaluations_beside_a_module_have_eager_bits(
    ranks: Ranks, as_views: bool
) -> None:
    assert ranks.run(updated_beside, as_views) == [([], [4, 1], "autograd_node")] * 4


class Trainer:
    """Holds what its step trains: two wrappers of one model, called in turns."""

    def __init__(self) -> None:
        net = small_ddp()[0].module
        self.models = wrapped(net), wrapped(net, bucket_cap_mb=0.02)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return clipped(self.models[number], self.optimizer, x)


def a_method_and_two_wrappers(rank: int, world: int) -> list[int]:
    def trained(wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        trainer = Trainer()
        run, found = wrap(trainer.step), []
        for number in range(8):
            found += tensors_of(run(batch(rank, number), number % 2))
        return [*found, *state_of(trainer.models[0], trainer.optimizer)]

    return differences(trained(lambda step: step), trained(roam.compile))


def test_only_processes_of_this_machine_are_looked_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may share a host's name, and not the numbers of processes."""
    if not os.path.exists("/proc/self/ns/pid"):
        pytest.skip("processes have no namespaces here")
    with alone(tmp_path):
        store, two = store_of(dist.group.WORLD), collectives.Group("two", (0, 1), 0)
        beyond_all = 2**22 + 1  # the largest number of a process is 2**22 at most
        store.set("process/1", f"{agreement._machine()} {beyond_all}")
        with pytest.raises(roam.ExecutionError, match="is gone"):
            agreement._raise_if_left(store, two, 1)
        monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
        agreement._raise_if_left(store, two, 1)


@pytest.mark.long
def test_one_model_in_two_wrappers_has_eager_bits(ranks: Ranks) -> None:
    assert ranks.run(a_method_and_two_wrappers) == [[]] * 4


def across_calls(net: Any, optimizer: Any, x: torch.Tensor, is_last: bool) -> torch.Tensor:
    with contextlib.nullcontext() if is_last else net.no_sync():
        loss = net(x).square().mean()
        loss.backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return loss


def accumulated(rank: int, world: int) -> list[int]:
    def trained(wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        net, optimizer = small_ddp()
        run, found = wrap(across_calls), []
        for number in range(9):
            found += tensors_of(run(net, optimizer, batch(rank, number), number % 3 == 2))
        return [*found, *state_of(net, optimizer)]

    return differences(trained(lambda step: step), trained(roam.compile))


def test_gradients_add_up_over_calls_without_communication(ranks: Ranks) -> None:
    assert ranks.run(accumulated) == [[]] * 4


def ddp_with_buffers(rank: int) -> tuple[Any, Any]:
    torch.manual_seed(rank)
    net = wrapped(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)))
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


def two_forward_passes(net: Any, optimizer: Any, x: torch.Tensor, is_last: bool) -> torch.Tensor:
    loss = nn.functional.mse_loss(net(x), net(x + 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def with_buffers(rank: int, world: int, function: Any, is_evaluated: bool) -> tuple[list[int], int]:
    """Which values differ from eager's, and how many captures the calls took."""
    captured = 0

    def trained(wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        nonlocal captured
        net, optimizer = ddp_with_buffers(rank)
        run, found = wrap(function), []
        for number in range(20):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * number + rank))
            found += tensors_of(run(net, optimizer, x, number % 2 == 1))
            if is_evaluated:
                net.eval()
                with torch.no_grad():
                    found.append(net(x))
                net.train()
        captured = len(getattr(run, "plans", ()))
        return [*found, *state_of(net, optimizer)]

    return differences(trained(lambda step: step), trained(roam.compile)), captured


@pytest.mark.sweep
@pytest.mark.parametrize("is_evaluated", [False, True])
@pytest.mark.parametrize("function", [across_calls, two_forward_passes])
def test_modules_with_buffers_need_few_plans(
    ranks: Ranks, function: Any, is_evaluated: bool
) -> None:
    for different, captured in ranks.run(with_buffers, function, is_evaluated):
        assert different == []
        assert 1 <= captured <= 6


def asks_a_future(rank: int, world: int, how: str) -> str:
    def step(x: torch.Tensor) -> Any:
        work = dist.all_reduce(x * 2, async_op=True)
        return work.get_future().wait() if how == "future" else (work.wait(), work.result())

    try:
        roam.compile(step, python="idle")(torch.ones(2))
    except roam.CaptureError as error:
        return error.code
    return "none"


@pytest.mark.parametrize("how", ["future", "result"])
def test_results_of_handles_are_refused(ranks: Ranks, how: str) -> None:
    assert ranks.run(asks_a_future, how) == ["collective"] * 4


class Reducing:
    """A step that gives the group options of its own, which change from call to call."""

    def __init__(self) -> None:
        self.sums, self.sends = dist.AllreduceOptions(), dist.BroadcastOptions()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.group.WORLD.allreduce([y], self.sums).wait()
        z = x * 3
        dist.group.WORLD.broadcast([z], self.sends).wait()
        return y + z


def with_changing_options(rank: int, world: int) -> tuple[list[int], int]:
    plans = 0

    def trained(wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        nonlocal plans
        reducing, found = Reducing(), []
        run = wrap(reducing.step)
        for number in range(6):
            reducing.sums.reduceOp = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[number % 2]
            reducing.sends.rootRank = number // 4
            found += tensors_of(run(batch(rank, number)))
        plans = len(getattr(run, "plans", ()))
        return found

    return differences(trained(lambda step: step), trained(roam.compile)), plans


@needs_2_15
def test_options_of_a_collective_that_change_get_plans_of_their_own(ranks: Ranks) -> None:
    assert ranks.run(with_changing_options) == [([], 4)] * 4


def gathers_objects(x: torch.Tensor) -> torch.Tensor:
    all_gather_object([None], {"a": 1})
    return x * 2


def sends_objects(x: torch.Tensor) -> torch.Tensor:
    broadcast_object_list([{"a": 1}], 0)
    return x * 2


def makes_a_group(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, group=dist.new_group([0]))
    return y


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (gathers_objects, "all_gather_object"),
        (sends_objects, "broadcast_object_list"),
        (makes_a_group, "new_group"),
    ],
)
def test_what_begins_with_no_operator_is_refused_by_name(
    tmp_path: Any, step: Step, name: str
) -> None:
    with alone(tmp_path), pytest.raises(roam.CaptureError, match=name) as error:
        roam.compile(step)(torch.ones(3))
    assert error.value.code == "collective"


def branches_on_one_rank(rank: int, world: int) -> str:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        if rank == 0 and y.sum().item() > 1000:
            y = y / 2
        return y

    compiled = roam.compile(step, python="idle")
    try:
        if rank == 0:
            compiled(torch.ones(2))
    except roam.CaptureError as error:
        return error.code
    return "none"


@needs_2_15
def test_a_branch_of_one_rank_is_refused_at_once(ranks: Ranks) -> None:
    assert ranks.run(branches_on_one_rank) == ["value_reached_python", *["none"] * 3]


def polls(rank: int, world: int) -> list[bool]:
    groups = [dist.group.WORLD, dist.new_group(backend="cpu:gloo")]
    return [collectives.Group.of(group).can_be_polled() for group in groups]


def test_a_group_that_runs_gloo_under_another_name_can_be_polled(ranks: Ranks) -> None:
    assert ranks.run(polls) == [[True, True]] * 4


def still_held(rank: int, world: int, kind: str) -> int:
    """After how many of 300 collectives something else than this function holds their memory."""
    group = collectives.Group.of(dist.group.WORLD)
    start = collectives.launch(kind, group, "" if kind == "_allgather_base_" else "SUM")
    parts = {"_allgather_base_": 1 / world, "_reduce_scatter_base_": world}.get(kind, 1)
    found = 0
    for _ in range(300):
        made = torch.ones(1000)
        read = made if kind == "allreduce_" else torch.ones(int(1000 * parts))
        before = collectives._holders([made, read])
        pending = start([made], [read])
        collectives.wait(pending, [made], [read])
        found += collectives._holders([made, read]) != before
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["allreduce_", "_allgather_base_", "_reduce_scatter_base_"])
def test_after_a_wait_no_thread_of_the_group_holds_tensors(ranks: Ranks, kind: str) -> None:
    assert ranks.run(still_held, kind) == [0] * 4


def waits_for_another(rank: int, world: int, kind: str) -> bool:
    """Whether rank 0 has a wait with a time limit return while the others have yet to launch."""
    group = collectives.Group.of(dist.group.WORLD)
    outputs, inputs = {
        "allgather_": ([torch.zeros(1) for _ in range(world)], [torch.ones(1)]),
        "_allgather_base_": ([torch.zeros(world)], [torch.ones(1)]),
        "reduce_scatter_": ([torch.zeros(1)], [torch.ones(1) for _ in range(world)]),
        "_reduce_scatter_base_": ([torch.zeros(1)], [torch.ones(world)]),
        "alltoall_base_": ([torch.zeros(world)], [torch.ones(world)]),
        "barrier": ([], []),
    }.get(kind, ([torch.ones(1)], []))
    reduces = "reduce" in kind
    root = 1 if kind == "broadcast_" else -1
    start = collectives.launch(kind, group, "SUM" if reduces else "", root)
    dist.barrier()
    if rank > 0:
        time.sleep(1)
    pending = start(outputs, inputs)
    began = time.monotonic()
    is_late = pending._is_done(0.1) or time.monotonic() - began > 0.7
    pending.wait()
    return is_late


@pytest.mark.sweep
@pytest.mark.parametrize("kind", sorted(collectives.KINDS - {"reduce_"}))
def test_every_collective_of_gloo_can_be_polled(ranks: Ranks, kind: str) -> None:
    assert not ranks.run(waits_for_another, kind)[0]


# -- graphs of other tools


def loss_of_shards(shards: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Each layer's weight is gathered right before it is used; its gradient is scattered."""
    for shard in shards:
        x = torch.tanh(x @ functional.all_gather_tensor_autograd(shard, 0, dist.group.WORLD))
    return x.square().mean()


def forward_and_backward(shards: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    loss = loss_of_shards(shards, x)
    return [loss, *torch.autograd.grad(loss, shards)]


def shards_of(rank: int, world: int, rows: int = 4) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(rank)
    return [torch.randn(64 // world, 64) for _ in range(4)], torch.randn(rows, 64)


def gathers_of(module: torch.fx.GraphModule) -> int:
    return sum("all_gather" in str(node.target) for node in module.graph.nodes)


def updated(shards: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaves = [shard.detach().requires_grad_() for shard in shards]
    loss, *gradients = forward_and_backward(leaves, x)
    for shard, gradient in zip(shards, gradients, strict=True):
        shard.sub_(gradient)
    return loss


def as_a_pass(rank: int, world: int) -> tuple[bool, bool, bool, int, int]:
    """A graph of a whole step in its plan's order, and within a limit: whether the bits are those
    of the function, whether a launch has moved away from its wait, whether the plan keeps to the
    limit, and how often it gathers without and with it.
    """
    warnings.simplefilter("ignore")

    def ran(function: Callable[..., Any]) -> list[torch.Tensor]:
        shards, x = shards_of(rank, world)
        return tensors_of(function(shards, x), shards)

    def traced() -> torch.fx.GraphModule:
        return make_fx(updated, tracing_mode="fake")(*shards_of(rank, world))

    expected, module = ran(updated), traced()
    before, plan = gathers_of(module), roam.optimize(module)
    module = plan.apply(module)
    targets = [str(node.target) for node in module.graph.nodes]
    is_early = any(
        "_c10d_functional" in target and "wait" not in target + following
        for target, following in pairwise(targets)
    )
    found = differences(expected, ran(module))
    module = traced()
    limit = plan.total_bytes - 64 * 64 * 4
    within = roam.optimize(module, memory_limit_bytes=limit)
    found += differences(expected, ran(within.apply(module)))
    return not found, is_early, within.total_bytes <= limit, before, gathers_of(module)


def test_a_pass_on_graphs_with_collectives(ranks: Ranks) -> None:
    for has_bits, is_early, is_within, before, after in (found := ranks.run(as_a_pass)):
        assert (has_bits, is_early, is_within) == (True, True, True), found
        assert 4 == before < after, found


def unwaited(x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    return torch.ops._c10d_functional.all_reduce.default(x, "sum", group.group_name) * 2


def test_a_collective_that_is_used_before_its_wait_is_refused(tmp_path: Any) -> None:
    with alone(tmp_path):
        module = make_fx(unwaited, tracing_mode="fake")(torch.ones(3))
        with pytest.raises(roam.CaptureError, match="uses before it is waited for") as error:
            roam.optimize(module)
    assert error.value.code == "collective"


def by_torch_compile(rank: int, world: int) -> tuple[list[int], list[str]]:
    """What differs from the function with the backend, and what it logs. One rank has batches of
    another shape now and then, and plans anew alone.
    """
    warnings.simplefilter("ignore")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("roam")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    run = torch.compile(loss_of_shards, backend="roam", dynamic=False)
    found = []
    for number in range(4):
        shards, x = shards_of(rank, world, 5 if rank == 2 and number == 2 else 4)
        shards = [shard.requires_grad_() for shard in shards]
        loss = run(shards, x)
        got = tensors_of(loss, torch.autograd.grad(loss, shards))
        found += differences(tensors_of(forward_and_backward(shards, x)), got)
    log.removeHandler(handler)
    return found, lines


def test_torch_compile_with_collectives(ranks: Ranks) -> None:
    for found, lines in ranks.run(by_torch_compile):
        assert found == []
        assert sum("by plan" in line for line in lines) >= 2, lines
        assert not any("unplanned" in line for line in lines), lines
