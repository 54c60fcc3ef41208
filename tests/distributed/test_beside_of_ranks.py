"""Steps of several processes whose Python runs beside plans: eager PyTorch's bits on every rank,
also where some ranks do in Python what others do not.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import roam
from newer import needs_2_15
from ranks import Ranks, alive, revived

pytestmark = needs_2_15

Step = Callable[[torch.Tensor, torch.Tensor], Any]
Habit = Callable[[int, nn.Module, torch.optim.Optimizer], Step]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from alive(3, tmp_path_factory.mktemp("several"))


@pytest.fixture
def ranks(several: Ranks) -> Ranks:
    return revived(several)


def updated(net: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def prints(rank: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = updated(net, optimizer, x, y)
        print("loss %.6f" % loss.item())  # noqa: UP031
        return loss

    return step


def one_rank_keeps_the_best(rank: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    best = [math.inf]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = updated(net, optimizer, x, y)
        if rank == 0:
            best[0] = min(best[0], loss.item())
            print("best", best[0])
        return loss

    return step


def skips(rank: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        return norm

    return step


def schedules(rank: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    rates: list[Any] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = updated(net, optimizer, x, y)
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
        return loss, list(rates)

    return step


def accumulates(rank: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        assert isinstance(net, DistributedDataParallel)
        with net.no_sync():
            first = functional.cross_entropy(net(x[:8]), y[:8])
            first.backward()
        second = functional.cross_entropy(net(x[8:]), y[8:])
        second.backward()
        optimizer.step()
        total = first.item() + second.item()
        return total if total > 4 else -total

    return step


def reduces_its_loss(rank: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        mean = updated(net, optimizer, x, y).clone()
        work = dist.all_reduce(mean, async_op=True)
        assert work is not None
        work.wait()
        mean /= dist.get_world_size()
        if mean > 2.1:
            print(f"{mean.item():.5f}")
        return mean

    return step


HABITS = (
    prints, one_rank_keeps_the_best, skips, schedules, accumulates, reduces_its_loss,
)  # fmt: skip


def trains(
    rank: int, world: int, habit: Habit, options: dict[str, Any], ddp: dict[str, Any]
) -> tuple[bool, bool]:
    """Whether eight calls do what eager ones do; whether Python ran beside a plan."""
    runs, shown = list[Any](), list[str]()
    step: Any = None
    for wrap in (lambda step: step, lambda step: roam.compile(step, **options)):
        torch.manual_seed(0)
        layers = [nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)]
        net = DistributedDataParallel(
            nn.Sequential(*layers, nn.Linear(64, 64), nn.Linear(64, 8)), **ddp
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        step = wrap(habit(rank, net, optimizer))
        torch.manual_seed(rank)
        found = []
        with contextlib.redirect_stdout(io.StringIO()) as out:
            for _ in range(8):
                given = step(torch.randn(16, 32), torch.randint(8, (16,)))
                found += [one.clone() if isinstance(one, torch.Tensor) else one
                          for one in pytree.tree_leaves(given)]  # fmt: skip
        runs.append([*found, *net.state_dict().values(), torch.get_rng_state()])
        shown.append(out.getvalue())
    same = all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(*runs, strict=True)
    )
    return same and shown[0] == shown[1], step.runs_beside


@pytest.mark.parametrize("habit", HABITS)
def test_habits_run_beside_plans(ranks: Ranks, habit: Habit) -> None:
    one = habit is one_rank_keeps_the_best
    found = ranks.run(trains, habit, {"python": "auto"}, {"bucket_cap_mb": 0.01})
    assert found[0] == (True, True)
    assert found[1:] == [(True, not one)] * 2


@pytest.mark.parametrize("options", [{}, {"memory": "2MiB"}])
@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}])
def test_ranks_whose_python_runs_at_every_call(
    ranks: Ranks, options: dict[str, Any], ddp: dict[str, Any]
) -> None:
    assert ranks.run(trains, skips, {**options, "python": "beside"}, ddp) == [(True, True)] * 3


def refused(rank: int, world: int) -> str:
    net = DistributedDataParallel(nn.Linear(4, 4), find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = roam.compile(prints(rank, net, optimizer), python="beside")
    before = net.module.weight.detach().clone()
    try:
        step(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    except roam.CaptureError as error:
        assert torch.equal(before, net.module.weight)
        return error.code
    return ""


def test_options_of_modules_that_plans_do_not_support(ranks: Ranks) -> None:
    assert ranks.run(refused) == ["ddp_option"] * 3


def sends(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    before = y * 2  # of what is there before it is received
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.send(y, other)
    else:
        dist.recv(y, 0)
    return before + y * 3


def asks_a_handle(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    work = dist.all_reduce(y, async_op=True)
    before = x.sin()
    assert work is not None
    (found,) = work.get_future().wait()
    y.mul_(2)
    return before + found * y


def repeats(
    rank: int, world: int, function: Callable[[torch.Tensor], torch.Tensor], options: dict[str, Any]
) -> tuple[bool, bool]:
    step = roam.compile(function, **options)
    same = True
    for call in range(4):
        x = torch.full((1000,), call / 4 + rank / 7)
        same &= torch.equal(function(x), step(x))
    return same, step.runs_beside


@pytest.mark.parametrize("function", [sends, asks_a_handle])
@pytest.mark.parametrize("options", [{}, {"memory": "2MiB"}])
def test_what_a_plan_cannot_launch_is_run_where_it_stands(
    ranks: Ranks, function: Any, options: dict[str, Any]
) -> None:
    found = ranks.run(repeats, function, {"python": "auto", **options})
    assert found == [(True, True)] * 3
