"""Trains with ranks that fall behind at random, and compares every loss and all parameters with
eager PyTorch's: a plan must neither hang nor read memory that a collective still uses.

torchrun --nproc-per-node 4 benches/delays.py --steps 1000

Every rank sleeps at random before steps, launches and waits, each by itself. Plans run with
`poison`, which overwrites memory as soon as its tensor is dead.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import roam
from roam.distributed.collectives import Launch, Pending
from roam_bench.compiled import image_loss
from roam_bench.ranks import clipped_step

_MOST_S = 0.02
"""The longest delay."""


class Delays:
    """Sleeps now and then, for longer the more seldom."""

    def __init__(self, rank: int, share: float) -> None:
        self._draw, self._share = random.Random(rank), share
        self.count, self.seconds = 0, 0.0

    def __call__(self) -> None:
        if self._draw.random() < self._share:
            seconds = _MOST_S * self._draw.random() ** 3
            self.count += 1
            self.seconds += seconds
            time.sleep(seconds)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is called late."""

        def late(*args: Any, **kwargs: Any) -> Any:
            self()
            return function(*args, **kwargs)

        return late


def made(way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of four layers, and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(64, 10))
    if way == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.02)
    else:
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A step of a classifier."""
    return clipped_step(model, optimizer, image_loss, x, y)


def trained(
    step: Callable[..., Any], way: str, steps: int, delay: Callable[[], None]
) -> list[torch.Tensor]:
    """All losses, and this rank's parts of the parameters."""
    model, optimizer = made(way)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(steps):
        delay()
        x = torch.randn(8, 64, generator=generator)
        y = torch.randint(10, (8,), generator=generator)
        found.append(step(model, optimizer, x, y))
    parts = [getattr(one, "to_local", lambda one=one: one)() for one in model.parameters()]
    return [*found, *(part.detach() for part in parts)]


def main() -> None:
    """Trains eagerly without delays and by plan with them, and says what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=("ddp", "fully-shard"), default="fully-shard")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.1, help="how often a rank sleeps")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    delays = Delays(rank, arguments.share)
    eager = trained(train_step, arguments.way, arguments.steps, lambda: None)
    Launch.__call__ = delays.before(Launch.__call__)  # type: ignore[method-assign]
    Pending.wait = delays.before(Pending.wait)  # type: ignore[method-assign]
    start = time.perf_counter()
    step = roam.compile(train_step, poison=True, pool=True)
    planned = trained(step, arguments.way, arguments.steps, delays)
    seconds = time.perf_counter() - start
    different = sum(not torch.equal(*pair) for pair in zip(eager, planned, strict=True))
    sys.stdout.write(
        f"rank {rank}: {arguments.steps} steps of {arguments.way} in {seconds:.0f} s with "
        f"{delays.count} delays of {delays.seconds:.1f} s in all; {different} of {len(eager)} losses "
        "and parameters differ\n"
    )
    dist.destroy_process_group()
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
