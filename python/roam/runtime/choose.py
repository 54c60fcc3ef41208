"""Chooses how a captured step runs: out of a pool or out of the ordinary allocator, and which results are copied into the pool.

Everything is decided by planned totals: persistent tensors, the pool, what lives outside it and what copies need meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

import roam
from roam._core import Graph, Plan
from roam.capture.lower import lower
from roam.capture.step import Variant
from roam.kernels.calls import Placed, landable_calls, placed_calls
from roam.kernels.workspace import workspaces
from roam.program import Program
from roam.runtime.fuse import fused

WORTH = 0.02
"""What the pool may cost, as a share of the total: it has no fragmentation, and its addresses and size are known before."""
_NEAR = 0.001
"""Totals that differ by no more than this share are alike: then the plan is taken that has the most in the pool."""
_MOST_LANDINGS = 4
_LOOSER = 0.01
"""By how much a plan in the order of another may take more of program order's bytes than that one does."""
_MUCH = 0.01
"""The share of what a step makes that is worth a plan."""


_OF_ORDER = (
    "order", "offsets", "reuse", "peak_bytes", "pool_peak_bytes", "pool_bytes", "outside_bytes", "total_bytes", "candidates",
)  # fmt: skip
"""What a plan says that hangs on nothing but its order and layout."""


@dataclass(frozen=True, slots=True)
class Options:
    """How plans are made and run; see `roam.compile`."""

    time_limit_s: float | None = None
    pool: bool | None = None
    poison: bool = False
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """How a step runs.

    Attributes:
        program: the step, with pairs of calls as one where that takes less memory.
        placed: per call of it, how its kernel can write where a plan wants.
        graph: the step, with the residencies that this way of running gives its tensors.
        plan: a plan of `graph`, verified.
        uses_pool: whether planned tensors lie in a pool; if not, all come from the ordinary allocator.
        eager_graph: the step as it was captured, with what its kernels take for themselves, as if every kernel could write where a plan wants.
        eager_bytes: the most memory that the step takes as eager PyTorch orders it.
        kernel_bytes: the most that one kernel of it takes for itself while it runs; None where nobody could tell, and no plan knows.
        landing: with a pool, the calls whose results are copied into it.
        is_searched: whether the plan's order was searched for; if not, it is that of another plan of the same calls.
        totals: what each way that was tried comes to, in bytes; the first is the ordinary allocator's, where that was tried.
    """

    program: Program
    placed: list[Placed | None]
    graph: Graph
    plan: Plan
    uses_pool: bool
    eager_graph: Graph
    eager_bytes: int
    kernel_bytes: int | None
    landing: frozenset[int] = frozenset()
    is_searched: bool = True
    totals: tuple[tuple[str, int], ...] = ()

    @property
    def total_bytes(self) -> int:
        """The most memory that the step takes by plan."""
        return self.plan.total_bytes

    @property
    def share(self) -> float:
        """What the step takes beside what persists, of what it takes in program order."""
        persistent_bytes = self.plan.persistent_bytes
        return (self.total_bytes - persistent_bytes) / max(self.eager_bytes - persistent_bytes, 1)

    @property
    def made_bytes(self) -> int:
        """All that the step makes, one result after another."""
        return sum(storage.size_bytes for storage in self.program.storages if storage.creator >= 0)

    @property
    def pooled_bytes(self) -> int:
        """How much of `made_bytes` lies in the pool."""
        places = zip(self.program.storages, self.plan.offsets, strict=True)
        return sum(storage.size_bytes for storage, offset in places if offset >= 0) if self.uses_pool else 0

    def __str__(self) -> str:
        """One honest line: planned, program order, lower bound."""
        persistent_bytes = self.plan.persistent_bytes
        planned, program_order, least, beside = (
            size_bytes / 2**20
            for size_bytes in (
                self.total_bytes - persistent_bytes, self.eager_bytes - persistent_bytes,
                self.plan.total_lower_bound_bytes - persistent_bytes, persistent_bytes,
            )
        )  # fmt: skip
        return (
            f"{planned:.1f} MiB planned in the step {'with' if self.uses_pool else 'without'} a pool, {program_order:.1f} MiB in "
            f"program order, {least:.1f} MiB at least, beside {beside:.1f} MiB that persist"
        )


def is_disabled() -> bool:
    """Whether the environment says ``ROAM_DISABLE=1``: nothing is planned then."""
    return os.environ.get("ROAM_DISABLE", "0") not in ("", "0")


def choose(
    variant: Variant,
    *,
    pool: bool | None,
    time_limit_s: float | None,
    streams: int = 1,
    is_real: bool = True,
    earlier: Iterable[Choice] = (),
) -> Choice:
    """The way of the least total.

    Args:
        variant: a captured step.
        pool: whether to use a pool; None: where that costs next to nothing, see `WORTH`.
        time_limit_s: limit for all planning together, in seconds. The first plan is always made.
        streams: how many operators may run at once; more than one need a pool, whose layout is safe under every timing.
        earlier: choices of the same step for other sizes. Where one has the same calls, its way and its order are tried first, and
            nothing is searched if they do as well as they did.
        is_real: whether the step is of real tensors, so that kernels may be run to find out what they take for themselves.
    """
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    taken = workspaces(variant.program, variant.placed, variant.device, deadline) if is_real else None
    eager_graph = _eager_graph(variant, taken)
    eager_bytes = eager_graph.persistent_bytes + roam.baseline(eager_graph, reuse=False).peak_bytes
    kernel_bytes = None if taken is None else max(taken.values(), default=0)
    program, placed = fused(variant.program, variant.device), variant.placed
    if program is not variant.program:
        placed = placed_calls(program, variant.device)
        taken = workspaces(program, placed, variant.device, deadline) if taken else taken
    stated = partial(lower, program, placed, name=variant.name, device=variant.device.type, workspaces=taken)
    made = partial(Choice, program, placed, eager_graph=eager_graph, eager_bytes=eager_bytes, kernel_bytes=kernel_bytes)
    alike = [one for one in earlier if one.is_searched and _has_same_calls(one.program, program)]
    like = min(alike, key=lambda one: abs(math.log(one.eager_bytes / eager_bytes)), default=None)
    if like is not None and streams == 1 and (again := _as_before(like, stated, made, variant.device)) is not None:
        return again
    graph = stated(pool=False)
    plan = _planned(graph, deadline, exact="auto")
    total = plan.total_bytes
    leaving_bytes = sum(program.storages[storage].size_bytes for storage in program.leaving())
    ordinary = made(graph, plan, False)
    most = eager_bytes if streams > 1 else min(total * (1 + WORTH), eager_bytes)
    names = ["allocator"]
    pooled: list[Choice] = []
    for name, landing in _landings(ordinary, variant.device) if pool is not False else ():
        if deadline is not None and time.monotonic() > deadline and (pooled or pool is None):
            break
        graph = stated(landing=landing)
        plan = _planned(graph, deadline, exact="off", streams=streams)
        names.append(name)
        pooled.append(made(graph, plan, True, landing=landing))
        # What leaves is outside of every pool at the end, and more copies make no smaller pool.
        is_hopeless = pool is None and plan.persistent_bytes + pooled[0].plan.pool_bytes + leaving_bytes > most
        is_best = bool(landing) and plan.total_bytes <= total * (1 + _NEAR)
        if streams > 1 or is_hopeless or is_best:
            break
    best = _best(pooled, variant.runs_once) if pooled else ordinary
    if pool is None and best.total_bytes > most:
        best = ordinary
    totals = zip(names, [choice.total_bytes for choice in (ordinary, *pooled)], strict=True)
    return replace(best, totals=tuple(totals))


def _has_same_calls(one: Program, other: Program) -> bool:
    return len(one.calls) == len(other.calls) and all(
        call.target is same.target for call, same in zip(one.calls, other.calls, strict=True)
    )


def _as_before(
    like: Choice, stated: Callable[..., Graph], made: Callable[..., Choice], device: torch.device
) -> Choice | None:
    """The same calls for other sizes, run in the same way and order; None where that takes more than it did there."""
    how: dict[str, Any] = {"landing": like.landing} if like.uses_pool else {"pool": False}
    order = [int(index) for index in like.plan.order]
    try:
        ordered = stated(**how, order=order)
    except roam.GraphError:  # views and copies, say, lie otherwise, and the order is none of this step's
        return None
    graph = stated(**how)
    plan = _transferred(_planned(ordered, None, exact="off"), graph)
    if plan is None:
        return None
    choice = made(graph, plan, like.uses_pool)
    choice = replace(choice, landing=like.landing, is_searched=False)
    is_landable = like.landing <= landable_calls(choice.program, choice.placed, device).keys()
    if not is_landable or choice.total_bytes > choice.eager_bytes or choice.share > like.share + _LOOSER:
        return None
    name = "earlier order with a pool" if like.uses_pool else "earlier order with the allocator"
    return replace(choice, totals=((name, choice.total_bytes),))


def _transferred(ordered: Plan, graph: Graph) -> Plan | None:
    """A plan of a graph that permits one order only, as a plan of the graph that permits others; None where program order is
    better. The bound is one that takes no time to prove.
    """
    quick = roam.optimize(graph, exact="off", time_limit_s=0.0)
    if ordered.peak_bytes > quick.program_order_peak_bytes:
        return None
    plan = json.loads(quick.to_json())
    found = json.loads(ordered.to_json())
    plan |= {key: found[key] for key in _OF_ORDER}
    plan["settings"] = found["settings"]
    plan["exact"] = found["exact"]
    plan["status"] = "optimal" if plan["total_bytes"] == plan["total_lower_bound_bytes"] else "feasible"
    transferred = Plan.from_json(json.dumps(plan).encode())
    roam.verify(graph, transferred)
    return transferred


def _eager_graph(variant: Variant, taken: dict[int, int] | None) -> Graph:
    """The step as it was captured, with what its kernels take for themselves."""
    if not taken:
        return variant.graph
    return lower(variant.program, variant.placed, name=variant.name, device=variant.device.type, workspaces=taken)


def _planned(graph: Graph, deadline: float | None, *, exact: Literal["auto", "off"], streams: int = 1) -> Plan:
    left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
    plan = roam.optimize(graph, streams, exact=exact, time_limit_s=left)
    roam.verify(graph, plan)
    return plan


def _best(pooled: list[Choice], runs_once: bool) -> Choice:
    """Of the plans whose totals are next to the least, the one with the most in the pool; for a first step, with the smallest pool,
    which later steps keep.
    """
    least = min(choice.total_bytes for choice in pooled)
    near = [choice for choice in pooled if choice.total_bytes <= least * (1 + _NEAR)]
    if runs_once:
        return min(near, key=lambda choice: choice.plan.pool_bytes)
    return max(near, key=lambda choice: (choice.pooled_bytes, -choice.total_bytes))


def _landings(choice: Choice, device: torch.device) -> list[tuple[str, frozenset[int]]]:
    """Which calls' results are copied into the pool: none, all, all but those of one operator, or those whose copies need little.

    Outside of the pool there is room for some, beside the worst of what copies and kernels need.
    """
    program = choice.program
    sizes = landable_calls(program, choice.placed, device)
    landings = [("pool", frozenset[int]())]
    if not sizes:
        return landings
    steps = sorted(set(sizes.values()))
    small = dict.fromkeys(steps[(len(steps) - 1) * part // (_MOST_LANDINGS - 1)] for part in range(_MOST_LANDINGS - 1))
    landings.append(("pool, all results copied into it that are not made there", frozenset(sizes)))
    for name in _telling(choice, sizes):
        calls = frozenset(index for index in sizes if program.calls[index].name != name)
        landings.append((f"pool, all results copied into it but those of {name}", calls))
    for most in small:
        calls = frozenset(index for index, size in sizes.items() if size <= most)
        landings.append((f"pool, results copied into it by up to {most:,} bytes at a time", calls))
    return landings


def _telling(choice: Choice, calls: Container[int]) -> list[str]:
    """Operators whose results are much of what is made, those of less before those of more."""
    made: Counter[str] = Counter()
    for storage in choice.program.storages:
        if storage.creator in calls:
            made[choice.program.calls[storage.creator].name] += storage.size_bytes
    return [name for name, size in reversed(made.most_common(_MOST_LANDINGS)) if size >= _MUCH * choice.made_bytes]
