"""Chooses how a captured step runs: out of a pool or out of the ordinary allocator, and which
results are copied into the pool.

Everything is decided by planned totals: persistent tensors, the pool, the unpooled bytes and
what copies need meanwhile.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal, cast

import torch

from roam import _core
from roam._core import Graph, Plan
from roam.errors import GraphError, PlanError, continued
from roam.garbage import collections_wait
from roam.kernels.calls import Placed, copyable_calls, placed_calls, unmovable_storages
from roam.kernels.fusion import fused
from roam.kernels.kept import recalled
from roam.kernels.tiles import Cutter
from roam.kernels.times import completed, times
from roam.kernels.times import known as timed
from roam.kernels.transfers import Link, placed_load, taken_share
from roam.kernels.workspace import NoRoom, known, releases, workspaces
from roam.memory_limit import MemoryLimit
from roam.program import residency
from roam.program.chunks import HOST, Place, is_available, place_of
from roam.program.equal_calls import merged
from roam.program.ir import Program
from roam.program.lower import Lowering, kinds_of
from roam.program.pages import Pages, is_movable
from roam.program.pages import is_paged as is_in_file
from roam.program.paging import Page, pages_of
from roam.program.releases import Release
from roam.program.repeatable import gathers_again
from roam.program.tier import Tier
from roam.program.tiling import Part, Tiled, candidates, out_of_place, tiled, with_sources
from roam.program.transit import Places, check
from roam.report.table import format_bytes
from roam.runtime.available import available_bytes, known_limit
from roam.runtime.estimate import Estimator
from roam.runtime.first_run import copied_bytes, extra_bytes
from roam.runtime.offloading import Offloaded, never_loaded, offerings
from roam.runtime.plan_cache import WORTH_S, keep_plan, kept_plan
from roam.runtime.pool import Pool
from roam.runtime.timings import Timings
from roam.state.references import StateReference
from roam.state.sizes import follows
from roam.tracing.step import Variant

Effort = Literal["order", "runs", "all"]
"""What may be done to keep within a limit: nothing but order and layout, running calls again, or
also running them tile by tile."""
MAX_PLANS = 64
"""Kinds of calls of one step or graph for which plans are kept unless the caller says otherwise."""
WORTH = 0.02
"""What the pool may cost, as a share of the total: it has no fragmentation, and its addresses and
size are known before the step.
"""
_NEAR = 0.001
"""Totals that differ by no more than this share are alike: then the plan is taken that has the most
in the pool."""
_MOST_LANDINGS = 4
_LOOSER = 0.01
"""How much larger `Choice.share` may be for a plan in the order of an earlier plan than for that
plan. A difference that nobody notices is always allowed.
"""
_MUCH = 0.01
"""An operator whose results are less than this share of what a step makes is not worth a plan with
a pool that copies all results but its own.
"""
_MOST_POOLED = 4
"""Plans with a pool; the estimates by which they are chosen are seldom wrong by more than
`_MARGIN`."""
_MARGIN = 0.02
_UNNOTICED_BYTES = 2**20
"""A smaller saving is not worth any waiting."""
_MOST_KNOWN = 64
"""Plans that are kept for equal graphs."""

_WIDER = (1.0, 1.0, 1.1, 1.25)
"""By how much more than the last refusal says limits are tried for a step: a floor leads to the
least that a search finds, and that to a plan, unless tiles of it need a little more."""

_MOST_TRIES = 4
"""How often is chosen which tensors stay in memory; each time with the room that the last plan has
left."""
_SPARE = 64
"""The first part of a limit that is left free if copies beside the step have no room."""
_PARTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Into how many parts the largest tensors are cut."""
_MOST_LEVELS = 6
"""How many sizes of tensors are tried as the least that never exist whole."""
_SMALL = 64
"""Tensors that are so many times smaller than the largest one and than what a limit leaves exist
whole: without them chains of operators would be as long as the step."""
_MOST_MISSES = 2
"""After so many sizes of tensors whose tiles save nothing, or of tiles that save nothing, no
smaller ones are tried. After one they are: tiles that are smaller than the blocks of a sum are made
in another way, which takes more before it takes less."""
_LITTLE = 0.1
"""Where running operators again adds a smaller share to a step, no tiles are tried: that takes
seconds to minutes."""
_REACH = 1.25
"""Tiles of a total up to so many times a limit are tried with operators that run again: larger
tiles take less time."""
_NOT_TRIED = (
    "This holds for whole operators; tiles need trials of kernels, which plans of fake tensors do "
    "without (`roam plan --tiles` tries them for a model of the zoo)"
)
_WORTH_TILES = 0.98
"""Smaller tiles that leave more than this share of a total are not worth their time."""

_OF_ORDER = (
    "order", "offsets", "reuse", "peak_bytes", "pool_peak_bytes", "pool_bytes", "outside_bytes", "total_bytes", "candidates",
)  # fmt: skip
"""What a plan says that depends on nothing but its order and layout."""


@dataclass(frozen=True, slots=True)
class Options:
    """How plans are made and run; see `roam.compile`."""

    time_limit_s: float | None = None
    pool: bool | None = None
    poison: bool = False
    streams: int = 1
    memory: MemoryLimit | None = None
    keep_checkpoints: bool = False
    offload: Path | Literal["host"] | None = None
    kernels: Literal["eager", "inductor"] = "eager"
    cuda_graph: bool = False
    sizes: bool | Mapping[str, Mapping[Any, int]] = False
    tries_kernels: bool = False
    """Whether kernels are tried even if the step's tensors are fakes. The real tensors that these
    stand for have room.
    """


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What runs again so that a plan keeps within a limit.

    Attributes:
        runs: how many calls run again, views and loads not counted.
        calls: numbers of all calls that a step without a limit does not have: extra runs, stores,
            and loads.
        extra_s: seconds that these calls take, as measured or by the cost model.
        step_s: seconds of the step without these calls.
        least_extra_s: no plan within the limit with the same tiles has extra runs that take less;
            None if tensors are offloaded, since it is not known then.
        floor_bytes: no plan with the same tiles takes less in all, whatever it runs again; None as
            `least_extra_s`.
        timed_calls: how many of the step's calls have a time that was measured on the device.
        modelled_calls: how many have a time by the cost model, scaled to the measured times.
    """

    runs: int
    calls: frozenset[int]
    extra_s: float
    step_s: float
    least_extra_s: float | None
    floor_bytes: int | None
    timed_calls: int
    modelled_calls: int
    offloaded: Offloaded | None = None


@dataclass(frozen=True, slots=True)
class Cuts:
    """What a step runs tile by tile, so that its largest tensors never exist whole.

    Attributes:
        rows: for each call that runs so: the operators that it makes the results of, the user's
            line, and the number of tiles.
        gone_bytes: what the tensors that never exist whole take in a step without tiles.
        extra_s: seconds that the step takes beyond one without tiles, as measured or by the cost
            model.
        step_s: seconds of that step.
    """

    rows: tuple[tuple[str, str, int], ...]
    gone_bytes: int
    extra_s: float
    step_s: float

    def __str__(self) -> str:
        """What is cut, into how many tiles, and what it costs."""
        share = self.extra_s / max(self.step_s, 1e-9)
        made = "\n".join(
            f"  {tiles} tiles: {name} at {source}" for name, source, tiles in self.rows
        )
        return (
            f"tensors of {format_bytes(self.gone_bytes)} never exist whole: what is made of them is made "
            f"tile by tile, for {share:.1%} of the step's time by plan\n{made}"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """How a step runs.

    Attributes:
        program: the step, in which pairs of calls are one call if that takes less memory.
        placed: for each call of `program`, how its kernel can write where a plan wants.
        graph: the step, with the residencies that this way of running gives its tensors.
        plan: a plan of `graph`, verified.
        uses_pool: whether planned tensors lie in a pool; if not, all come from the ordinary
            allocator.
        eager_graph: the step as it was captured, with what its kernels take for themselves, as if
            every kernel could write where a plan wants.
        eager_bytes: the most memory that the step takes as eager PyTorch orders it.
        kernel_bytes: the most that one kernel of the step takes for itself while it runs; None if
            this is not known, so that no plan contains it.
        copied_in: with a pool, the calls whose results are copied into it.
        is_searched: whether the plan's order was searched for; if not, it is that of another plan
            of the same calls.
        totals: the total of each way that was tried, in bytes; the first is that with the ordinary
            allocator, if it was tried.
        bound_bytes: no plan without a pool takes less in all, as the search for one has proved;
            None if none was searched.
        lowered: the step as it was captured, and `program`, both lowered, for choices of other
            sizes. None if the plan's order was not searched for.
        memory_limit_bytes: the most that the step may take; None without a limit.
        checks_bytes: how much of that is kept for what the checked first run and computed guards
            allocate for themselves.
        recomputation: what runs again; None if nothing has to. If something does, each call of
            `program` is one run of a call of the captured step.
        pages: the files that tensors lie in before and after the step; None if none does.
        plain: the way of the least total where a limit asks for another; None elsewhere.
        least_moved_bytes: what a step in this order reads and writes of these at least; 0 if that
            is not known.
        cuts: what runs tile by tile; None if nothing does.
    """

    program: Program
    placed: list[Placed | None]
    graph: Graph
    plan: Plan
    uses_pool: bool
    eager_graph: Graph
    eager_bytes: int
    kernel_bytes: int | None
    copied_in: frozenset[int] = frozenset()
    is_searched: bool = True
    totals: tuple[tuple[str, int], ...] = ()
    bound_bytes: int | None = None
    lowered: tuple[Lowering | None, Lowering | None] = (None, None)
    memory_limit_bytes: int | None = None
    checks_bytes: int = 0
    recomputation: Recomputation | None = None
    pages: Pages | None = None
    least_moved_bytes: int = 0
    cuts: Cuts | None = None
    plain: Choice | None = None

    @property
    def total_bytes(self) -> int:
        """The most memory that the step takes by plan."""
        return self.plan.total_bytes

    @property
    def share(self) -> float:
        """What the step takes without persistent bytes, as a share of what it takes so in program
        order.
        """
        persistent_bytes = self.plan.persistent_bytes
        return (self.total_bytes - persistent_bytes) / max(self.eager_bytes - persistent_bytes, 1)

    @property
    def made_bytes(self) -> int:
        """All that the step makes, one result after another."""
        return sum(storage.size_bytes for storage in self.program.storages if storage.creator >= 0)

    @property
    def pooled_bytes(self) -> int:
        """How much of `made_bytes` lies in the pool."""
        # Parts of storages come after these in the plan; none lies in the pool.
        places = zip(self.program.storages, self.plan.offsets, strict=False)
        return (
            sum(storage.size_bytes for storage, offset in places if offset >= 0)
            if self.uses_pool
            else 0
        )

    def __str__(self) -> str:
        """One line of totals: planned, in program order, lower bound."""
        bound_bytes: int | None = self.plan.total_lower_bound_bytes
        of = ""
        if self.recomputation is not None:
            bound_bytes = self.recomputation.floor_bytes
        elif self.uses_pool and self.bound_bytes is not None:
            bound_bytes, of = self.bound_bytes, " without a pool"
        planned, program_order = map(format_bytes, (self.total_bytes, self.eager_bytes))
        of += " with the same tiles" if self.cuts is not None else ""
        least = f"; at least {format_bytes(bound_bytes)} in any plan{of}" if bound_bytes else ""
        return (
            f"{planned} in all by plan, {'with' if self.uses_pool else 'without'} a pool; "
            f"{program_order} in program order{least}"
            f"{'' if self.recomputation is None else self._recomputed()}"
        )

    def _recomputed(self) -> str:
        again = self.recomputation
        assert again is not None
        stored = (
            ""
            if again.offloaded is None
            else f"{format_bytes(again.offloaded.stored_bytes)} are offloaded and "
        )
        return (
            f"; {stored}{again.runs:,} operators run again to keep within "
            f"{self.memory_limit_bytes:,} bytes in all, for "
            f"{again.extra_s / max(again.step_s, 1e-9):.1%} of the step's time"
        )


def choose(
    variants: Sequence[Variant],
    *,
    pool: bool | None,
    time_limit_s: float | None,
    streams: int = 1,
    is_real: bool = True,
    earlier: Iterable[Choice] = (),
    enough_bytes: int = 0,
    memory: MemoryLimit | None = None,
    keep_checkpoints: bool = False,
    offload: Path | Literal["host"] | None = None,
    undoes: bool = False,
    effort: Effort = "all",
    timings: Timings | None = None,
    is_timed: bool | None = None,
    room_bytes: int | None = None,
) -> list[Choice]:
    """For each step of one process the way to run it with the least total. If this total is above a
    limit, a plan within the limit in which calls run again.

    Args:
        variants: captured steps; what exists before the last of them exists now. The process has
            to have room for all, so no search goes on below what one before in the list takes.
        pool: whether to use a pool; None: where that costs almost nothing, see `WORTH`.
        time_limit_s: limit for all planning together, in seconds. The first plan is always made.
        streams: how many operators may run at once; more than one need a pool, whose layout is safe
            under every timing.
        is_real: whether the step is of real tensors, so that kernels may be run to find out what
            they take for themselves.
        earlier: choices of the same step for other sizes. If one has the same calls, its way and
            its order are tried first, and nothing is searched if they do as well as there.
        enough_bytes: a total that the process needs anyway: no search goes on below it.
        memory: the most that each step may take, one number of bytes for all: a share is one of
            the largest total without recomputation. What the device has is asked for here. A pool
            that other steps have made is given back before kernels are tried.
        keep_checkpoints: with a limit, whether what the user's `torch.utils.checkpoint` runs again
            is run again as written. If not, the plan chooses what is.
        offload: with a limit, the folder that tensors may be offloaded to, or the host.
        undoes: whether a first run copies all arguments that it changes, to undo a failure.
        effort: what may be done to keep within a limit.
        timings: what this takes is added to it.
        is_timed: whether kernels may be timed on this device; None: if `is_real`.
        room_bytes: no kernel is tried that takes more; None: what the limit leaves beside what
            exists before the step.

    Raises:
        PlanError: there is no plan within the limit (code ``memory_floor``), or none was found
            (code ``memory_limit_not_found``); or tensors of this device cannot be offloaded there
            (code ``offload_device``).
        ValueError: the limit is what the device has, and it is not known how much that is.
    """
    timings = timings or Timings()
    place = None if offload is None else _place(offload, variants[-1])
    with collections_wait(), timings.running(timings.plan):
        if memory is not None:
            device, held_bytes = variants[-1].device, variants[-1].graph.persistent_bytes
            in_files_bytes = 0 if place is None else _in_files_bytes(variants[-1].program)
            memory = known_limit(memory, device, held_bytes - in_files_bytes)
            if is_real:
                Pool.of(device).release()
            if memory.size_bytes is not None:
                left_bytes = memory.size_bytes - held_bytes
                program = variants[-1].program
                if place is not None and _is_paged(program, held_bytes, memory.size_bytes):
                    left_bytes = memory.size_bytes
                    if is_real:
                        _take_in(program, place)
                room_bytes = left_bytes if room_bytes is None else room_bytes
        choosers: list[_Chooser] = []
        for variant in variants:
            chooser = _Chooser(
                variant,
                pool,
                time_limit_s,
                streams,
                is_real,
                keep_checkpoints,
                place,
                undoes,
                effort,
                timings,
                is_real if is_timed is None else is_timed,
            )
            chooser.choose(earlier, enough_bytes, room_bytes)
            enough_bytes = max(enough_bytes, chooser.plain.total_bytes)
            if memory is not None and memory.size_bytes is not None:
                enough_bytes = min(enough_bytes, memory.size_bytes)
            choosers.append(chooser)
        if memory is None:
            return [chooser.plain for chooser in choosers]
        needed_bytes = max(chooser.needed_bytes for chooser in choosers)
        limit_bytes = memory.in_bytes(needed_bytes)
        if effort == "order" and needed_bytes > limit_bytes:
            raise PlanError(
                f"in the best order that was found the step takes {needed_bytes} bytes, and {limit_bytes} are allowed",
                code="memory_limit_not_found",
            )
        refusal: PlanError | None = None
        choices = []
        for chooser in choosers:
            for wider in _WIDER:
                try:
                    within = chooser.within(limit_bytes)
                    if within.recomputation is not None or within.cuts is not None:
                        within = replace(within, plain=chooser.plain)
                    choices.append(within)
                    break
                except PlanError as error:
                    if (
                        effort != "all"
                        or not error.code.startswith("memory_")
                        or chooser.is_untried
                    ):
                        raise
                    refusal = refusal or error
                    least_bytes = error.least_bytes or chooser.needed_bytes
                    limit_bytes = min(int(least_bytes * wider), chooser.needed_bytes)
            else:
                limit_bytes = max(limit_bytes, chooser.needed_bytes)
        if refusal is None:
            return choices
        enough = continued(
            refusal,
            "The least that was found to be enough for every step that runs as this one does, the first one included, is "
            f"memory={limit_bytes}",
        )
        enough.least_bytes = limit_bytes
        raise enough from None


class _Chooser:
    """Makes the plans of one step, with the effort that they are worth.

    Attributes:
        plain: the way of the least total.
    """

    plain: Choice

    def __init__(
        self,
        variant: Variant,
        pool: bool | None,
        time_limit_s: float | None,
        streams: int,
        is_real: bool,
        keeps_checkpoints: bool,
        place: Place | None,
        undoes: bool,
        effort: Effort,
        timings: Timings,
        is_timed: bool,
    ) -> None:
        self._variant = variant
        self._pool = pool
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._streams = streams
        self._is_real = is_real
        self._is_timed = is_timed
        self._keeps_checkpoints = keeps_checkpoints
        self._tier = None if place is None else Tier.of(place)
        self._undoes = undoes
        self._effort = effort
        self._timings = timings
        self._enough_bytes = 0
        self._is_tight = False
        """Whether every byte counts, since a limit is kept if the plan without extra runs does."""
        self._room_bytes: int | None = None
        self._untried: NoRoom | None = None
        self._tiles_floors: list[int] = []
        """What plans with tiles that were tried take at least."""
        self._tiled_bytes: list[int] = []
        """What plans within a limit that is too small take with tiles that were tried, or what they
        take at least."""

    def choose(self, earlier: Iterable[Choice], enough_bytes: int, room_bytes: int | None) -> None:
        """Finds `plain`; kernels that take more than there is room for are not tried."""
        self._enough_bytes, self._room_bytes = enough_bytes, room_bytes
        variant = self._variant
        program = variant.program
        taken = self._workspaces(program, variant.placed) if self._is_real else None
        kernel_bytes = None if taken is None else max(taken.values(), default=0)
        plain = (one.plain or one for one in earlier)
        searched = [one for one in plain if one.is_searched]
        written_before, before = self._lowered_before(searched)
        written = self._written(taken, written_before)
        eager_graph = variant.graph if written is None else written.graph()
        if written is not None and written.frees:
            # Eager PyTorch writes no result over an argument, but compiled regions free theirs.
            in_order = _core.baseline(written.graph(in_place=False))
        else:
            in_order = _core.baseline(eager_graph, reuse=False)
        eager_bytes = eager_graph.persistent_bytes + in_order.peak_bytes
        made = partial(
            Choice, eager_graph=eager_graph, eager_bytes=eager_bytes, kernel_bytes=kernel_bytes
        )
        once = merged(program)
        if once is not program and any(_has_same_calls(one.program, program) for one in searched):
            once = program  # it has turned out to be better
        placed, lowering = self._joined(once, taken, before)
        best = self._way(placed, lowering, searched, made, written)
        if once is not program and best.is_searched:
            # What runs once lives longer, but rarely at the moment that counts.
            placed, other = self._joined(program, taken, before)
            quick = _core.optimize(other.graph(pool=False), exact="off", time_limit_s=0.0)
            if quick.total_lower_bound_bytes < best.total_bytes:
                way = self._way(placed, other, searched, made, written)
                if way.total_bytes < best.total_bytes:
                    best, lowering = way, other
        self.plain, self._lowered = best, lowering

    def _joined(
        self, program: Program, taken: dict[int, int] | None, like: Lowering | None
    ) -> tuple[list[Placed | None], Lowering]:
        """How the kernels write that a program's calls become, and the program lowered with them;
        `taken` is what those of the variant's own program take for themselves.
        """
        variant, placed = self._variant, self._variant.placed
        program = fused(program, variant.device)
        if program is not variant.program:
            placed = placed_calls(program, variant.device)
            taken = self._workspaces(program, placed) if taken else taken
        return placed, self._lowering(program, placed, taken, like)

    def _way(
        self,
        placed: list[Placed | None],
        lowering: Lowering,
        searched: list[Choice],
        of: Callable[..., Choice],
        written: Lowering | None,
    ) -> Choice:
        """The best way to run what was lowered."""
        program, device = lowering.program, self._variant.device
        made = partial(of, program, placed, lowered=(written, lowering))
        eager_bytes = made.keywords["eager_bytes"]
        alike = [one for one in searched if _has_same_calls(one.program, program)]
        size = math.log(max(eager_bytes, 1))
        like = min(
            alike,
            key=lambda one: abs(math.log(max(one.eager_bytes, 1)) - size),
            default=None,
        )
        best = None
        if like is not None and self._streams == 1:
            best = self._as_before(like, lowering, made)
        if best is None:
            best = self._best_way(lowering, made, self._pool, eager_bytes)
        asked_bytes = (guard.made_bytes for guard, _ in program.computed_guards)
        # The checked run holds arguments that later ones free.
        first_bytes = extra_bytes(program, placed, device) + lowering.most_saved_bytes
        if self._undoes:
            first_bytes += copied_bytes(program)
        checks_bytes = max(first_bytes, max(asked_bytes, default=0))
        return replace(best, checks_bytes=checks_bytes)

    @property
    def needed_bytes(self) -> int:
        """What `plain` takes, with what checks allocate for themselves."""
        return self.plain.total_bytes + self.plain.checks_bytes

    def within(self, limit_bytes: int) -> Choice:
        """`plain`, or if that is above the limit, a plan within it in which calls run again, or run
        tile by tile: the one of the least extra time that is found.
        """
        best: Choice | None = None
        failure: PlanError | None = None
        self._tiled_bytes.clear()
        self._tiles_floors.clear()
        try:
            best = self._whole_within(limit_bytes)
        except PlanError as error:
            if not error.code.startswith("memory_"):
                raise
            failure = error
        wants_less = best is None or _extra_share(best) > _LITTLE
        has_room = best is None or _may_search(self._variant.device, limit_bytes)
        if wants_less and has_room and self._may_cut and not self._has_many_sizes:
            untried, self._untried = self._untried, None
            most_s = math.inf if best is None else _extra_s(best)
            by_tiles = self._tiled_within(limit_bytes, most_s)
            if by_tiles is not None:
                return replace(by_tiles, memory_limit_bytes=limit_bytes)
            self._untried = untried
        if best is not None:
            return best
        assert failure is not None, "nothing was found"
        if not self._may_cut:
            raise continued(failure, _NOT_TRIED) if self._would_cut else failure
        if self._has_many_sizes:
            raise continued(
                failure,
                "In a plan for many sizes no operators are cut into tiles; with sizes=False each size has a plan of its own",
            )
        told = (
            "This holds for whole operators; with operators cut into tiles no plan was found either"
        )
        if not self._tiled_bytes:
            raise continued(failure, told)
        least_bytes = min(self._tiled_bytes)
        refusal = continued(
            failure, f"{told}: the smallest that were tried need {least_bytes} bytes"
        )
        refusal.least_bytes = min(least_bytes, refusal.least_bytes or least_bytes)
        refusal.tiles_floor_bytes = min(self._tiles_floors, default=None)
        raise refusal

    @property
    def _may_cut(self) -> bool:
        """Whether operators may be cut into tiles, if the plan is for one size."""
        return self._is_real and self._would_cut

    @property
    def _would_cut(self) -> bool:
        """Whether they may be if kernels can be tried."""
        is_alone = self._streams == 1 and self._tier is None
        return self._variant.device.type == "cpu" and self._effort == "all" and is_alone

    @property
    def _has_many_sizes(self) -> bool:
        """Whether the plan is to hold for other sizes, too. A tile has numbers of its own that do
        not follow from them, and its bits are tried at one size.
        """
        program = self._variant.program
        metas = (meta for meta in program.slots if meta is not None)
        return any(follows((meta.shape, meta.stride)) for meta in metas) or any(
            follows((call.args, call.kwargs)) for call in program.calls
        )

    def _tiled_within(self, limit_bytes: int, most_s: float) -> Choice | None:
        """A plan within a limit in which the largest tensors never exist whole; None if none is
        found that takes less extra time than `most_s` seconds.
        """
        device = self._variant.device
        program = out_of_place(merged(self._variant.program))
        sizes = candidates(program)
        most = max(sizes.values(), default=0)
        reached_bytes, misses = self.plain.total_bytes, 0
        left_bytes = max(limit_bytes - self.plain.plan.persistent_bytes, 0)
        large = (size for size in set(sizes.values()) if size * _SMALL > min(most, left_bytes))
        levels = sorted(large, reverse=True)
        left: list[tuple[Cutter, int]] = []
        for least_bytes in levels[:_MOST_LEVELS]:
            gone = {number for number, size in sizes.items() if size >= least_bytes}
            gone = with_sources(program, gone, sizes)
            with self._trying():
                cutter = Cutter(program, gone, device, available_bytes(device, 0))
            refused = cutter.refused
            estimates = self._parts(program, gone, most, limit_bytes, refused)
            if not estimates:
                continue
            total_bytes, parts = estimates[-1]
            if total_bytes <= limit_bytes:
                estimates = [one for one in estimates if one[0] < _REACH * limit_bytes]
            else:  # operators have to run again
                total_bytes, finer = self._least_by_parts(
                    program, gone, most, parts, limit_bytes, refused
                )
                self._tiles_floors.append(total_bytes)
                estimates[-1] = total_bytes, finer
                if total_bytes <= limit_bytes:
                    estimates = self._reaching(program, gone, most, estimates, limit_bytes, refused)
            if total_bytes > limit_bytes:
                self._tiled_bytes.append(total_bytes)
                if total_bytes <= _WORTH_TILES * reached_bytes:
                    reached_bytes, misses = total_bytes, 0
                    continue
                misses += 1
                if misses == _MOST_MISSES:
                    break
                continue
            best: Choice | None = None
            most_cost = math.inf
            for total_bytes, parts in estimates:
                if total_bytes > limit_bytes:  # a trial takes longer than to find this out
                    total_bytes = self._least_with(program, gone, most // parts, refused) or 0
                if total_bytes > limit_bytes:
                    continue
                made = self._with_tiles(cutter, most // parts, limit_bytes, most_s, most_cost)
                if made is None:
                    left.append((cutter, most // parts))
                else:
                    best, cost = made
                    most_s = _extra_s(best)
                    if _extra_share(best) < _LITTLE:
                        break
                    if _again_share(best) < _LITTLE:  # finer tiles can but save other work
                        most_cost = cost
            if best is not None:
                return best
        for cutter, part_bytes in left:
            made = self._with_tiles(cutter, part_bytes, limit_bytes, most_s, tries_all=True)
            if made is not None:
                return made[0]
        return None

    def _reaching(
        self,
        program: Program,
        gone: set[int],
        most_bytes: int,
        estimates: list[tuple[int, int]],
        limit_bytes: int,
        refused: Collection[Part],
    ) -> list[tuple[int, int]]:
        """The last of some estimates, (bytes, parts), keeps within a limit if operators run again.
        Returned are those from the fewest parts that do so, since larger tiles take less time.
        """
        first, last = 0, len(estimates) - 1
        while first < last:
            middle = (first + last) // 2
            parts = estimates[middle][1]
            least_bytes = self._least_with(program, gone, most_bytes // parts, refused)
            if least_bytes is not None and least_bytes <= limit_bytes:
                last = middle
                estimates[middle] = least_bytes, parts
            else:
                first = middle + 1
        return estimates[last:]

    def _least_by_parts(
        self,
        program: Program,
        gone: set[int],
        most_bytes: int,
        parts: int,
        limit_bytes: int,
        refused: Collection[Part],
    ) -> tuple[int, int]:
        """(bytes, parts): what plans take at least if the largest tensors are cut into so many
        parts, which can be done, or into more, until that is within a limit or more save almost
        nothing: where operators run again, what tiles take for themselves counts that did not
        before.
        """
        best: tuple[int, int] | None = None
        misses = 0
        for more in _PARTS[_PARTS.index(parts) :]:
            least_bytes = self._least_with(program, gone, most_bytes // more, refused)
            if least_bytes is None:
                break
            if best is not None and least_bytes > _WORTH_TILES * best[0]:
                misses += 1
                if misses == _MOST_MISSES:
                    break
                continue
            best, misses = (least_bytes, more), 0
            if least_bytes <= limit_bytes:
                break
        assert best is not None, "it has been cut so"
        return best

    def _least_with(
        self, program: Program, gone: set[int], part_bytes: int, refused: Collection[Part]
    ) -> int | None:
        """What plans take at least, whatever they run again, if all cuts are exact; and what the
        checks of a first run take. None if nothing can be cut.
        """
        found = tiled(program, gone, part_bytes, refused)
        if found is None:
            return None
        choice, lowering = self._way_by_tiles(found)
        graph = lowering.holding().with_states().graph(pool=False)
        try:
            least_bytes: int | None = self._planned(graph, 0, 1).total_bytes
        except PlanError as error:
            least_bytes = error.least_bytes
        return choice.checks_bytes + (choice.total_bytes if least_bytes is None else least_bytes)

    def _with_tiles(
        self,
        cutter: Cutter,
        part_bytes: int,
        limit_bytes: int,
        most_s: float,
        most_cost: float = math.inf,
        *,
        tries_all: bool = False,
    ) -> tuple[Choice, float] | None:
        """A plan within a limit with parts of a size of some tensors, and `Tiled.cost`; None if
        none is found that takes less extra time than `most_s` seconds.

        Args:
            cutter: of these tensors.
            part_bytes, limit_bytes, most_s: these.
            most_cost: tiles that do not cost less than this are not tried.
            tries_all: whether a way for which there is no plan is tried too: if it is not exact,
                there may be a plan for the next one. Mostly there is none, and trials take long.
        """
        for found in cutter.ways(part_bytes):
            if found.cost > _WORTH_TILES * most_cost:
                return None
            choice = self._within_by_tiles(found, limit_bytes)
            if choice is not None and _extra_s(choice) >= most_s:
                return None
            if choice is None and not tries_all:
                return None
            with self._trying():
                is_exact = cutter.is_exact(found)
            if is_exact:
                return None if choice is None else (choice, found.cost)
        return None

    def _within_by_tiles(self, found: Tiled, limit_bytes: int) -> Choice | None:
        """A plan within a limit of a program with tiles; None if none is found."""
        choice, lowering = self._way_by_tiles(found)
        left_bytes = max(limit_bytes - choice.checks_bytes, 1)
        if choice.total_bytes > left_bytes:
            prepared = self._prepared(lowering, left_bytes)
            try:
                choice = self._within(left_bytes, prepared, choice, self._pool)
            except PlanError as error:
                if not error.code.startswith("memory_"):
                    raise
                if error.least_bytes is not None:
                    self._tiled_bytes.append(error.least_bytes)
                return None
        return self._with_cuts(choice, found, lowering)

    def _parts(
        self,
        program: Program,
        gone: set[int],
        most_bytes: int,
        limit_bytes: int,
        refused: Collection[Part],
    ) -> list[tuple[int, int]]:
        """(total, parts): into how many parts the largest tensors have to be cut to keep within a
        limit, if all cuts are exact, or after which number smaller ones save almost nothing, and
        fewer parts before it. Empty if nothing can be cut.
        """
        best: list[tuple[int, int]] = []
        misses, lacked_bytes = 0, 0
        for parts in _PARTS:
            found = tiled(program, gone, most_bytes // parts, refused)
            if found is None:
                break
            choice, _ = self._way_by_tiles(found)
            if self._untried is not None:  # smaller ones may have room
                if self._untried.trial_bytes == lacked_bytes:  # but these did not
                    break
                lacked_bytes = self._untried.trial_bytes
                continue
            if best and choice.total_bytes > _WORTH_TILES * best[-1][0]:
                misses += 1
                if misses == _MOST_MISSES:
                    break
                continue
            misses = 0
            best.append((choice.total_bytes, parts))
            if choice.total_bytes + choice.checks_bytes <= limit_bytes:
                break
        return best

    def _way_by_tiles(self, found: Tiled) -> tuple[Choice, Lowering]:
        """The best way to run a program with tiles, and the program lowered."""
        plain, device, self._untried = self.plain, self._variant.device, None
        program = fused(found.program, device)
        placed = placed_calls(program, device)
        lowering = self._lowering(program, placed, self._workspaces(program, placed), None)
        made = partial(
            Choice,
            eager_graph=plain.eager_graph,
            eager_bytes=plain.eager_bytes,
            kernel_bytes=plain.kernel_bytes,
        )
        return self._way(placed, lowering, [], made, None), lowering

    def _with_cuts(self, choice: Choice, found: Tiled, lowering: Lowering) -> Choice:
        """The choice with what its tiles cost. Kernels have as much room here as the trial of cuts
        had.
        """
        room_bytes = available_bytes(self._variant.device, 0)
        if room_bytes is None:
            room_bytes = self.plain.eager_bytes
        lowered = [self._lowered, lowering]
        if self._is_timed:
            lowered = [self._timed(one, room_bytes) for one in lowered]
        seconds = [float(one.graph(pool=False).times_ns.sum()) / 1e9 for one in lowered]
        calls = found.source.calls
        rows = tuple(
            (
                ", ".join(dict.fromkeys(calls[one.position].name for one in tile.members)),
                str(tile.call.source),
                tile.body.tiles,
            )
            for tile in found.tiles
        )
        gone_bytes = sum(found.source.storages[number].size_bytes for number in found.gone)
        cuts = Cuts(rows, gone_bytes, seconds[1] - seconds[0], seconds[0])
        return replace(choice, cuts=cuts)

    def _whole_within(self, limit_bytes: int) -> Choice:
        """`plain`, or if that is above the limit, a plan within it in which calls run again."""
        best = self.plain
        left_bytes = max(limit_bytes - best.checks_bytes, 1)
        anew = None if self._keeps_checkpoints else self._anew(left_bytes)
        if anew is not None:
            best = anew
        elif self.needed_bytes > limit_bytes:
            best = self._within(
                left_bytes, self._prepared(self._lowered, left_bytes), best, self._pool
            )
        if self._untried is not None:
            call = self._untried.call
            raise PlanError(
                f"{self._variant.name}: {self._untried}",
                code="memory_limit_not_found",
                operator=call.name,
                source=str(call.source),
            )
        return replace(best, memory_limit_bytes=limit_bytes)

    @property
    def is_untried(self) -> bool:
        """Whether a kernel was not tried, so that it is not known what the step needs."""
        return self._untried is not None

    def _prepared(self, lowering: Lowering, left_bytes: int) -> Lowering:
        """The same with what it takes to run calls again."""
        lowering = lowering.holding().with_states()
        # Where collectives may run again, all ranks have to choose the same, and the cost model
        # tells all of them the same.
        if not self._is_timed or gathers_again(lowering.repeats):
            return lowering
        return self._timed(lowering, self._left(left_bytes))

    def _left(self, limit_bytes: int) -> int:
        """What there is beside what is there before the step."""
        held_bytes = self.plain.plan.persistent_bytes
        return limit_bytes if self._is_paged(held_bytes, limit_bytes) else limit_bytes - held_bytes

    def _is_paged(self, held_bytes: int, limit_bytes: int) -> bool:
        """Whether what is there before and after the step may have to lie in files."""
        return self._tier is not None and _is_paged(self._variant.program, held_bytes, limit_bytes)

    def _anew(self, left_bytes: int) -> Choice | None:
        """A plan within a limit that runs again what it chooses, and not what the user's
        `torch.utils.checkpoint` says; None if there is no such, or it runs again for longer than
        the user's own, which keeps within the limit.
        """
        device = self._variant.device
        lowering = self._lowered.undone(lambda program: placed_calls(program, device))
        if lowering is None:
            return None
        left_out = lowering.left_out(self._lowered.program)
        prepared = self._prepared(lowering, left_bytes)
        try:
            choice = self._within(left_bytes, prepared, self.plain, self._pool)
        except PlanError as error:
            if not error.code.startswith("memory_"):
                raise
            return None
        if choice.recomputation is None:
            name = "running nothing again that torch.utils.checkpoint runs again"
            return replace(choice, totals=(*choice.totals, (name, choice.total_bytes)))
        if self.plain.total_bytes > left_bytes:
            return choice
        as_written = self._lowered
        if self._is_timed:
            as_written = self._timed(as_written, self._left(left_bytes))
        own_s = as_written.graph(pool=False).times_ns[sorted(left_out)].sum() / 1e9
        return choice if choice.recomputation.extra_s <= own_s else None

    def _best_way(
        self,
        lowering: Lowering,
        made: Callable[..., Choice],
        pool: bool | None,
        eager_bytes: int,
        *,
        is_ordered: bool = False,
    ) -> Choice:
        """The best of the ways with and without a pool, in program order if `is_ordered`."""
        order = range(len(lowering.program.calls)) if is_ordered else None
        graph = lowering.graph(pool=False, order=order)
        plan = self._planned(graph, self._enough_bytes)
        ordinary = made(graph, plan, False)
        # A step of compiled regions has most of its tensors outside of a pool anyway.
        worth = 0 if lowering.frees else WORTH
        most = (
            eager_bytes if self._streams > 1 else min(plan.total_bytes * (1 + worth), eager_bytes)
        )
        names, pooled = ["allocator"], list[Choice]()
        for name, copied_in in (
            self._copy_choices(ordinary, lowering, most, pool) if pool is not False else ()
        ):
            if (
                self._deadline is not None
                and time.monotonic() > self._deadline
                and (pooled or pool is None)
            ):
                break
            graph = lowering.graph(copied_in=copied_in, order=order)
            enough_bytes = max(self._enough_bytes, _alike(ordinary.total_bytes))
            pooled.append(
                made(graph, self._planned(graph, enough_bytes), True, copied_in=copied_in)
            )
            names.append(name)
            if self._streams > 1 or pooled[-1].total_bytes <= enough_bytes:
                break
        best = _best(pooled, self._variant.runs_once) if pooled else ordinary
        if pool is None and best.total_bytes > most:
            best = ordinary
        totals = zip(names, [choice.total_bytes for choice in (ordinary, *pooled)], strict=True)
        bound_bytes = None if self._streams > 1 or is_ordered else plan.total_lower_bound_bytes
        return replace(best, totals=tuple(totals), bound_bytes=bound_bytes)

    def _timed(self, lowering: Lowering, room_bytes: int) -> Lowering:
        """The same with times of its calls, measured where they can be."""
        device = self._variant.device
        if not self._is_real:  # the limit may be that of another machine
            room_bytes = min(room_bytes, available_bytes(device, 0) or 0)
        model = lowering.graph(pool=False).times_ns.tolist()
        with self._trying():
            measured = times(
                lowering.program,
                cast(list[Placed | None], lowering.placed),
                [index for index, time_ns in enumerate(model) if time_ns > 0],
                device,
                workspaces=lowering.kernel_bytes,
                room_bytes=room_bytes,
                deadline=self._deadline,
            )
        return lowering.timed(completed(measured, model), measured) if measured else lowering

    def _within(
        self, limit_bytes: int, lowering: Lowering, best: Choice, pool: bool | None
    ) -> Choice:
        """A plan within a limit in which calls run again and, where there is a tier, tensors are
        offloaded: the one of the least extra time that is found.
        """
        if not self._is_paged(best.plan.persistent_bytes, limit_bytes):
            return self._offloading(limit_bytes, lowering, best, pool)
        found: list[Choice] = []
        if best.plan.persistent_bytes < limit_bytes:
            try:
                found.append(self._offloading(limit_bytes, lowering, best, pool))
            except PlanError as error:
                if not error.code.startswith("memory_"):
                    raise
        if found and self._is_late:
            return found[0]
        paged = self._paged(limit_bytes, lowering, best, pool)
        if paged is not None and paged[0].total_bytes <= limit_bytes:
            found.append(paged[0])
        if not found:
            lowering = lowering if paged is None else paged[1]
            found.append(self._offloading(limit_bytes, lowering, best, pool))
        return min(found, key=_extra_s)

    def _paged(
        self, limit_bytes: int, lowering: Lowering, best: Choice, pool: bool | None
    ) -> tuple[Choice, Lowering] | None:
        """A plan in which tensors lie in files between their uses: those of which a step then moves
        few bytes, or all that can; None if none can.
        """
        assert self._tier is not None, "there are files"

        pages = self._pages_of(lowering)
        if not pages:
            return None
        files = Pages(self._tier.place)
        self._enough_bytes, self._is_tight = max(self._enough_bytes, limit_bytes), True

        # The order is that of a plan in which everything is in its file as much as it can be: its
        # uses stand together there.
        spread = lowering.paging(
            [(page, page.usual_cuts) for page in pages if page.is_cut],
            files,
            placed_load,
            self._link(limit_bytes, lowering, (page for page in pages if page.is_cut)),
        )
        order = self._planned(spread.graph(pool=False), 0).order
        listed = [index for place in order if (index := spread.numbers[int(place)]) >= 0]
        # There a call may read what was in a file after that has changed; in memory it may not.
        listed = _permitted(lowering.graph(pool=False), listed)
        lowering = lowering.expanded(listed)
        pages = self._pages_of(lowering)
        found = self._resident(limit_bytes, lowering, pages, files, best, pool)
        if found is None:
            plans = self._paging(limit_bytes, replace(best, pages=files), pool, lowering)
            return plans.waiting(spread, 0, lowering, is_ordered=False), spread
        return found

    def _pages_of(self, lowering: Lowering) -> list[Page]:
        """The tensors that may lie in files."""
        assert self._tier is not None, "there are files"
        excluded = unmovable_storages(lowering.program)
        return [
            page
            for page in lowering.pages(self._tier.place.device, excluded)
            if not self._is_real or page.reference is None or is_movable(page.reference.get())
        ]

    def _link(self, limit_bytes: int, lowering: Lowering, kept: Iterable[Page]) -> Link:
        """The way to files of these tensors and back, beside a step that takes its limit."""
        assert self._tier is not None, "there are files"
        kept = list(kept)
        free_bytes = available_bytes(self._variant.device, 0) or 0
        return Link.of(
            self._tier,
            self._room_to_measure(lowering, limit_bytes),
            max(free_bytes - limit_bytes, 0),
            sum(page.size_bytes for page in kept),
            sum(page.size_bytes for page in kept if page.changes),
        )

    def _room_to_measure(self, lowering: Lowering, left_bytes: int) -> int | None:
        """How much memory there is to measure a disk in; None if it is not measured."""
        return left_bytes if self._is_timed and not gathers_again(lowering.repeats) else None

    def _resident(
        self,
        limit_bytes: int,
        lowering: Lowering,
        pages: Sequence[Page],
        files: Pages,
        best: Choice,
        pool: bool | None,
    ) -> tuple[Choice, Lowering] | None:
        """A plan within a limit, in program order, in which pages are in memory so that a step
        moves few bytes; None if none is found.
        """
        plans = self._paging(limit_bytes, replace(best, pages=files), pool, lowering)
        numbers = [lowering.program.storage_of(page.slot) for page in pages]
        sizes = [page.size_bytes for page in pages]
        live = lowering.live_bytes(numbers)
        ways = [page.ways(len(live)) for page in pages]

        def chosen(slack_bytes: int) -> tuple[residency.Found, Lowering]:
            """What a step keeps in memory with so many bytes more than were estimated."""
            room = [limit_bytes + slack_bytes - one for one in live]
            found = residency.choose(sizes, [[way for way, _ in some] for some in ways], room)
            cuts = [some[one][1] for some, one in zip(ways, found.ways, strict=True)]
            kept = [(page, cut) for page, cut in zip(pages, cuts, strict=True) if cut is not None]
            link = self._link(limit_bytes, lowering, (page for page, _ in kept))
            return found, lowering.paging(kept, files, placed_load, link)

        best_found: tuple[Choice, Lowering] | None = None
        slack_bytes = 0  # the room was estimated; a plan tells how much there is
        for _ in range(_MOST_TRIES if live else 0):
            if best_found is not None and self._is_late:
                break
            found, paged = chosen(slack_bytes)
            if found.most_over_bytes:
                if slack_bytes < 0:
                    break
                slack_bytes += found.most_over_bytes
                continue
            choice = plans.waiting(paged, found.least_bytes, lowering, is_ordered=True)
            is_better = best_found is None or _extra_s(choice) < _extra_s(best_found[0])
            if choice.total_bytes <= limit_bytes and is_better:
                best_found = choice, paged
            left_bytes = limit_bytes - choice.total_bytes
            slack_bytes += left_bytes if best_found is None or left_bytes > 0 else left_bytes // 2
        if best_found is None:
            return None
        return plans.overlapped(*best_found), best_found[1]

    def _resident_again(
        self,
        limit_bytes: int,
        spread: Lowering,
        sequence: Sequence[int],
        best: Choice,
        pool: bool | None,
    ) -> Choice | None:
        """The same where calls run again; None if none is found.

        Args:
            limit_bytes: the limit.
            spread: a step in which everything is in its file as much as it can be.
            sequence: which of its calls run, in which order.
            best: the step without a limit.
            pool: whether to use a pool.
        """
        base, files = spread.unpaged, spread.paged
        assert base is not None, "tensors are in files"
        assert files is not None, "tensors are in files"
        listed = [number for index in sequence if (number := spread.numbers[index]) >= 0]
        runs = Counter(listed)
        if any(count > 1 and base.repeats[number] is None for number, count in runs.items()):
            return None  # only what was read from a file could be changed again
        kept = {base.program.storage_of(page.slot) for page in self._pages_of(base)}
        if not base.sees_the_same(listed, kept):
            return None
        try:
            base.graph(pool=False).expanded(listed)
        except PlanError:
            return None
        lowering = base.expanded(listed)
        found = self._resident(limit_bytes, lowering, self._pages_of(lowering), files, best, pool)
        return None if found is None else found[0]

    @property
    def _is_late(self) -> bool:
        """Whether nothing more is to be searched for."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def _offloading(
        self, limit_bytes: int, lowering: Lowering, best: Choice, pool: bool | None
    ) -> Choice:
        """The same with persistent tensors where the program has them."""
        found: list[Choice] = []
        failure: PlanError | None = None
        try:
            found.append(self._recomputing(limit_bytes, lowering, best, pool))
        except PlanError as error:
            if self._tier is None or not error.code.startswith("memory_"):
                raise
            failure = error
        if self._tier is None or (found and (found[0].recomputation is None or self._is_late)):
            return found[0]
        room_bytes = self._room_to_measure(lowering, self._left(limit_bytes))
        for offering in offerings(lowering, self._tier, room_bytes):
            try:
                choice = self._recomputing(limit_bytes, offering, best, pool)
            except PlanError as error:
                if not error.code.startswith("memory_"):
                    raise
                failure = error
                continue
            if choice.recomputation is not None:
                found.append(choice)
                break
        if not found:
            assert failure is not None, "nothing was found"
            raise failure
        return min(found, key=_extra_s)

    def _recomputing(
        self, limit_bytes: int, lowering: Lowering, best: Choice, pool: bool | None
    ) -> Choice:
        """A plan within a limit in which calls run again: in the pool if `best`, which is above the
        limit, runs there, and if not, or if none is found, without. Without a pool the limit may be
        kept anyway.
        """
        ordinary_bytes = dict(best.totals).get("allocator", best.total_bytes)
        if best.uses_pool and (pool or ordinary_bytes > limit_bytes):
            try:
                copied_in = lowering.places(best.copied_in)
                return self._within_by(limit_bytes, lowering, best, copied_in)
            except PlanError as error:
                if pool or not error.code.startswith("memory_"):
                    raise
        return self._within_by(limit_bytes, lowering, best, None)

    def _within_by(
        self,
        limit_bytes: int,
        lowering: Lowering,
        best: Choice,
        copied_in: frozenset[int] | None,
    ) -> Choice:
        """The same with a pool into which the results of some calls are copied, or, where that is
        None, without one.
        """
        if not lowering.program.calls:
            raise PlanError(
                f"{self._variant.name}: the step runs no operators, and what exists before and after it "
                f"takes {best.total_bytes} bytes, more than {limit_bytes}. Pass memory= of at least that",
                code="memory_floor",
            )
        uses_pool = copied_in is not None
        graph = lowering.graph(copied_in=copied_in, pool=uses_pool)
        try:
            plan = self._planned(graph, 0, limit_bytes)
        except PlanError as error:
            if not error.code.startswith("memory_"):
                raise
            code, fault = error.code, f"{error}."
            if self._lowered.frees:
                # The bound is one on plans that run operators again, not on `best`.
                if limit_bytes >= best.plan.total_lower_bound_bytes:
                    code = "memory_limit_not_found"
                fault = (
                    "if operators run again, each compiled region holds its arguments until its "
                    f"end; then {error}."
                )
            refusal = PlanError(
                f"{self._variant.name}: of what memory= allows, the checks of a plan's first run take "
                f"{best.checks_bytes} bytes. For the rest, {fault} Without recomputation it takes {best.total_bytes} bytes, of which "
                f"{best.plan.persistent_bytes} exist before and after the step. Pass a larger "
                f"memory=, or take a smaller batch{self._or(lowering)}",
                code=code,
                operator=error.operator,
                position=error.position,
                source=error.source,
            )
            if error.least_bytes is not None:
                refusal.least_bytes = error.least_bytes + best.checks_bytes
                if code == "memory_floor":
                    refusal.floor_bytes = refusal.least_bytes
            raise refusal from None
        again = plan.recomputation
        call_ns, moves = graph.times_ns, lowering.moves
        moves_s = float(call_ns[moves].sum()) / 1e9
        if again is None:  # a pool, a search that ended early, or what is in files took more
            return replace(
                best,
                pages=lowering.paged,
                program=lowering.program,
                placed=cast(list[Placed | None], lowering.placed),
                graph=graph,
                plan=plan,
                uses_pool=uses_pool,
                copied_in=copied_in or frozenset(),
            )
        ran = self._ran(lowering, graph, plan, copied_in, limit_bytes)
        offers = [*lowering.stores, *lowering.loads, *moves]
        extra_s, offloaded = again["extra_s"] + moves_s, None
        if self._tier is not None and offers:
            offloaded = Offloaded.of(ran.lowering, self._tier, ran.graph.times_ns)
        if offloaded is not None:
            # A load has the time of a store too, which there is once.
            loads = ran.lowering.extra_calls.intersection(ran.lowering.loads)
            extra_s += offloaded.transfers_s - ran.graph.times_ns[list(loads)].sum() / 1e9
        name = "pool" if uses_pool else "allocator"
        how = "running operators again" if offloaded is None else "offloading tensors"
        choice = replace(
            best,
            program=ran.lowering.program,
            placed=cast(list[Placed | None], ran.lowering.placed),
            graph=ran.graph,
            plan=ran.plan,
            uses_pool=uses_pool,
            copied_in=ran.copied_in or frozenset(),
            pages=lowering.paged,
            totals=(*best.totals, (f"{name}, {how}", ran.plan.total_bytes)),
            recomputation=Recomputation(
                runs=ran.lowering.extra_runs,
                calls=ran.lowering.extra_calls.union(ran.lowering.stores, ran.lowering.moves),
                extra_s=float(extra_s),
                step_s=again["step_s"] - float(call_ns[offers].sum()) / 1e9,
                least_extra_s=None if offers else again["least_extra_s"],
                floor_bytes=None if offers else again["floor_bytes"],
                timed_calls=lowering.timed_calls,
                modelled_calls=int((call_ns > 0).sum()) - lowering.timed_calls - len(offers),
                offloaded=offloaded,
            ),
        )
        if not moves:
            return choice
        listed = [int(index) for index in ran.plan.order]
        ordered = ran.lowering.expanded(listed)
        plans = self._paging(limit_bytes, choice, self._pool, ordered)
        beside = plans.overlapped(_renumbered(choice, listed), ordered)
        found = [choice if beside.program is choice.program else beside]
        if offloaded is None and lowering.unpaged is not None and not self._is_late:
            sequence = [int(again["sequence"][index]) for index in listed]
            kept = self._resident_again(limit_bytes, lowering, sequence, best, self._pool)
            found += [kept] if kept is not None else []
        return min(found, key=_extra_s)

    def _paging(
        self, limit_bytes: int, best: Choice, pool: bool | None, lowering: Lowering
    ) -> _Paging:
        """What plans a step with tensors in files as `best` says."""
        of = partial(
            Choice,
            eager_graph=best.eager_graph,
            eager_bytes=best.eager_bytes,
            kernel_bytes=best.kernel_bytes,
            checks_bytes=best.checks_bytes,
            pages=best.pages,
            totals=best.totals,
        )
        way = partial(self._best_way, pool=pool, eager_bytes=best.eager_bytes)
        # Ranks that have to plan alike may have other processors.
        is_measured = self._room_to_measure(lowering, limit_bytes) is not None
        taken = taken_share(self._variant.device) if is_measured else 0.0
        return _Paging(limit_bytes, of, way, taken)

    def _or(self, lowering: Lowering) -> str:
        """What else can be done where no plan keeps within a limit."""
        if self._tier is not None:
            offers = len(lowering.loads)
            return f". This holds for plans that offload too: {offers:,} tensors may be offloaded"
        if not is_available():
            return ""
        where = "a disk" if self._variant.device.type == "cpu" else 'the host, offload="host"'
        return f"; or let tensors be offloaded to {where} (offload= of roam.compile)"

    def _ran(
        self,
        lowering: Lowering,
        graph: Graph,
        plan: Plan,
        copied_in: frozenset[int] | None,
        limit_bytes: int,
    ) -> _Ran:
        """A step by a plan in which calls run again, as a program of its own. What would be stored
        and never loaded is not stored, if the limit is kept without.
        """
        again = plan.recomputation
        assert again is not None, "calls run again"
        sequence = [int(index) for index in again["sequence"]]
        if unused := never_loaded(lowering, sequence):
            left, numbers = lowering.without_offers(unused)
            landed = copied_in
            if copied_in is not None:
                landed = frozenset(numbers[one] for one in copied_in if one in numbers)
            listed = [numbers[index] for index in sequence if index in numbers]
            changed = left.graph(copied_in=landed, pool=landed is not None).expanded(listed)
            found = self._planned(changed, limit_bytes)
            if found.total_bytes <= limit_bytes:
                return _Ran.by(left, listed, landed, changed, found)
        return _Ran.by(lowering, sequence, copied_in, *plan.expanded(graph))

    def _as_before(
        self, like: Choice, lowering: Lowering, made: Callable[..., Choice]
    ) -> Choice | None:
        """The same calls for other sizes, run in the same way and order; None if that takes more
        than it did there.
        """
        how: dict[str, Any] = {"copied_in": like.copied_in} if like.uses_pool else {"pool": False}
        order = [int(index) for index in like.plan.order]
        try:
            ordered = lowering.graph(**how, order=order)
        except (
            GraphError
        ):  # views and copies, say, lie otherwise, and the order is none of this step's
            return None
        graph = lowering.graph(**how)
        quick = _core.optimize(graph, exact="off", time_limit_s=0.0)  # its bound takes no time
        plan = ordered_as(self._planned(ordered, self._enough_bytes), quick, graph)
        if plan is None:
            return None
        choice = made(graph, plan, like.uses_pool)
        choice = replace(choice, copied_in=like.copied_in, is_searched=False, lowered=(None, None))
        is_copyable = (
            like.copied_in
            <= copyable_calls(choice.program, choice.placed, self._variant.device).keys()
        )
        if (
            not is_copyable
            or choice.total_bytes > choice.eager_bytes
            or not _is_alike(choice, like)
        ):
            return None
        name = (
            "pool, in the order of an earlier plan"
            if like.uses_pool
            else "allocator, in the order of an earlier plan"
        )
        return replace(choice, totals=((name, choice.total_bytes),))

    def _lowered_before(
        self, searched: Iterable[Choice]
    ) -> tuple[Lowering | None, Lowering | None]:
        """What an earlier choice has lowered that may be this step for other sizes."""
        count = len(self._variant.as_written.calls)
        return next(
            (
                (written, as_run)
                for written, as_run in (one.lowered for one in searched)
                if written is not None and len(written.program.calls) == count
            ),
            (None, None),
        )

    def _written(self, taken: dict[int, int] | None, like: Lowering | None) -> Lowering | None:
        """The step as it was written, with what its kernels take for themselves; None if that
        is not known, and the variant's own graph says all.
        """
        variant, program, placed = self._variant, self._variant.program, self._variant.placed
        if variant.as_written is not program:
            program, placed = variant.as_written, placed_calls(variant.as_written, variant.device)
            taken = self._workspaces(program, placed) if taken else taken
        elif not taken:
            return None
        return self._lowering(program, placed, taken, like)

    def _workspaces(self, program: Program, placed: list[Placed | None]) -> dict[int, int] | None:
        with self._trying():
            try:
                return workspaces(
                    program, placed, self._variant.device, self._deadline, self._room_bytes
                )
            except NoRoom as error:  # maybe there is no plan within the limit anyway
                self._untried = error
                return None

    def _released(
        self, program: Program, taken: dict[int, int] | None
    ) -> dict[int, tuple[Release, ...]]:
        """What compiled regions free while they run; with several streams nothing is freed then."""
        if taken is None or self._streams > 1:
            return {}
        with self._trying():
            return releases(program, self._variant.device, taken, self._deadline, self._room_bytes)

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """A context for all that finds out something about kernels: it adds to the timings."""
        stage, before, before_disk = self._timings.kernels, known() + timed(), recalled()
        with self._timings.running(stage):
            yield
        from_disk = recalled() - before_disk
        stage.from_disk += from_disk
        stage.count += known() + timed() - before - from_disk

    def _lowering(
        self,
        program: Program,
        placed: list[Placed | None],
        taken: dict[int, int] | None,
        like: Lowering | None,
    ) -> Lowering:
        variant = self._variant
        return Lowering(
            program,
            placed,
            name=variant.name,
            device=variant.device.type,
            workspaces=taken,
            releases=self._released(program, taken),
            estimate=variant.estimate,
            like=like,
        )

    def _planned(
        self, graph: Graph, enough_bytes: int, memory_limit_bytes: int | None = None
    ) -> Plan:
        """A plan of a graph, verified; of equal graphs the same."""
        worth_bytes = int(max(_UNNOTICED_BYTES, _NEAR * graph.persistent_bytes))
        if self._is_tight:
            worth_bytes = 0
        settings = self._streams, enough_bytes, worth_bytes, memory_limit_bytes
        key = graph.digest, *settings
        is_timeless = self._deadline is None  # what a time limit cuts short is not always the same
        plan = _known.get(key) if is_timeless else None
        if plan is not None:
            _core.verify(graph, plan)
            return plan
        plan = kept_plan(graph, settings) if is_timeless else None
        if plan is not None:
            self._timings.plan.from_disk += 1
        else:
            start = time.monotonic()
            plan = _core.optimize(
                graph,
                self._streams,
                exact="off",
                time_limit_s=None if self._deadline is None else max(self._deadline - start, 0.0),
                enough_bytes=enough_bytes,
                worth_bytes=worth_bytes,
                memory_limit_bytes=memory_limit_bytes,
            )
            taken_s = time.monotonic() - start
            self._timings.plan.count += 1
            _core.verify(graph, plan)
            if is_timeless and taken_s > WORTH_S:
                keep_plan(graph, settings, plan)
        if is_timeless:
            _remember(key, plan)
        return plan

    def _copy_choices(
        self, ordinary: Choice, lowering: Lowering, most: float, pool: bool | None
    ) -> list[tuple[str, frozenset[int]]]:
        """The ways with a pool that are worth a plan, the most promising first, by estimates in the
        order of the plan without a pool.
        """
        copy_choices = list(_copy_choices(ordinary, self._variant.device))
        if self._streams > 1:
            return copy_choices[-1:]
        estimator = Estimator(lowering, ordinary.plan)
        alike = max(self._enough_bytes, _alike(ordinary.total_bytes))
        ranked = []
        for name, copied_in in copy_choices:
            estimate = estimator.of(copied_in)
            # Of those that are alike, the one with the most in the pool; of a first step, the
            # smallest pool. See `_best`.
            rank = estimate.pool_bytes if self._variant.runs_once else -estimate.pooled_bytes
            ranked.append((max(estimate.total_bytes, alike), rank, name, copied_in))
        ranked.sort(key=lambda one: one[:2])
        least = ranked[0][0]
        limit = (least if pool else min(least, most)) * (1 + _MARGIN)
        near = [one for one in ranked[:_MOST_POOLED] if one[0] <= limit]
        return [(name, copied_in) for _, _, name, copied_in in sorted(near, key=lambda one: one[1])]


@dataclass(frozen=True, slots=True)
class _Paging:
    """Plans of a step with tensors in files.

    Attributes:
        limit_bytes: what it may take.
        of: makes the choice of a program, and of what `way` says of it.
        way: plans what was lowered.
        taken: the share of the time of copies beside the step that they take from it.
    """

    limit_bytes: int
    of: partial[Choice]
    way: Callable[..., Choice]
    taken: float

    def waiting(
        self, paged: Lowering, least_bytes: int, of: Lowering, *, is_ordered: bool
    ) -> Choice:
        """A plan in which each copy is made before its call returns, in program order if
        `is_ordered`; `of` is what the copies were put into.
        """
        choice = self._planned(paged, least_bytes, is_ordered=is_ordered)
        call_ns, moves, more = choice.graph.times_ns, paged.moves, of.extra_calls
        runs = [place for place, number in enumerate(paged.numbers) if number in more]
        extra_s = paged.moved_s + float(call_ns[runs].sum()) / 1e9
        again = Recomputation(
            runs=of.extra_runs,
            calls=frozenset((*moves, *runs)),
            extra_s=extra_s,
            step_s=float(call_ns.sum()) / 1e9 - extra_s,
            least_extra_s=None,
            floor_bytes=None,
            timed_calls=paged.timed_calls,
            modelled_calls=int((call_ns > 0).sum()) - paged.timed_calls - len(moves),
        )
        return self._told(choice, again, "keeping tensors outside of the limit")

    def overlapped(self, choice: Choice, paged: Lowering) -> Choice:
        """A plan in program order in which copies are made beside other calls; `choice`, the one
        in which they are not, where that is not better.
        """
        again, live = choice.recomputation, paged.live_bytes()
        assert again is not None, "tensors are in files"
        spare_bytes = max(live) - choice.total_bytes
        less_bytes = self.limit_bytes // _SPARE
        for _ in range(_MOST_TRIES):
            room = [self.limit_bytes + spare_bytes - one for one in live]
            beside = paged.overlapping(room, placed_load, self.taken)
            if beside.moved_s >= paged.moved_s:
                break
            found = self._planned(beside, choice.least_moved_bytes, is_ordered=True)
            if found.total_bytes <= self.limit_bytes:
                order = [int(index) for index in found.plan.order]
                check(paged.program, beside.program, beside.numbers, order, Places.of(found.plan))
                told = replace(
                    _recounted(again, beside.numbers, beside.waits),
                    extra_s=again.extra_s - paged.moved_s + beside.moved_s,
                )
                return self._told(found, told, "moving them beside other operators")
            spare_bytes -= max(found.total_bytes - self.limit_bytes, less_bytes)
            less_bytes *= 2  # a layout may have gaps
        return choice

    def _planned(self, lowering: Lowering, least_bytes: int, *, is_ordered: bool) -> Choice:
        made = partial(
            self.of,
            lowering.program,
            cast(list[Placed | None], lowering.placed),
            least_moved_bytes=least_bytes,
        )
        return self.way(lowering, made, is_ordered=is_ordered)

    def _told(self, choice: Choice, again: Recomputation, how: str) -> Choice:
        totals = (*self.of.keywords["totals"], (how, choice.total_bytes))
        return replace(choice, totals=totals, recomputation=again)


def _recounted(
    again: Recomputation, numbers: Sequence[int], more: Iterable[int] = ()
) -> Recomputation:
    """The same for a program of the same calls and `more`.

    Args:
        numbers: for each call of that program, its number in this one; -1 if this one does not have
            it.
    """

    def places(calls: frozenset[int]) -> frozenset[int]:
        return frozenset(place for place, number in enumerate(numbers) if number in calls)

    offloaded = again.offloaded
    if offloaded is not None:
        offloaded = replace(offloaded, calls=places(offloaded.calls))
    return replace(again, calls=places(again.calls).union(more), offloaded=offloaded)


def _renumbered(choice: Choice, numbers: Sequence[int]) -> Choice:
    """A choice with its recomputation told of a program of the same calls in another order."""
    again = choice.recomputation
    return choice if again is None else replace(choice, recomputation=_recounted(again, numbers))


@dataclass(frozen=True, slots=True)
class _Ran:
    """A step in which calls run again.

    Attributes:
        lowering: of the program in which each run is a call.
        copied_in: with a pool, the runs whose results are copied into it; None without a pool.
        graph: of that program.
        plan: a plan of the graph.
    """

    lowering: Lowering
    copied_in: frozenset[int] | None
    graph: Graph
    plan: Plan

    @classmethod
    def by(
        cls,
        lowering: Lowering,
        sequence: Sequence[int],
        copied_in: frozenset[int] | None,
        graph: Graph,
        plan: Plan,
    ) -> _Ran:
        """The program of a sequence, compared with the graph that the planner made of it.

        Args:
            lowering: of the program in which each call runs once.
            sequence: numbers of its calls.
            copied_in: those of these calls whose results are copied into the pool; None without a
                pool.
            graph, plan: what the planner made.

        Raises:
            PlanError: the graph is not the program's, or the plan is not valid for it.
        """
        expanded = lowering.expanded(sequence)
        copied_in = None if copied_in is None else expanded.places(copied_in)
        own = expanded.graph(copied_in=copied_in, pool=copied_in is not None)
        if own.digest != graph.digest:
            raise PlanError(
                "the program with extra runs differs from the plan's; please report it",
                code="self_check",
            )
        _core.verify(graph, plan)
        return cls(expanded, copied_in, graph, plan)


_SEARCH_BYTES = 2**28
"""What a search for tiles may leave of the process's memory in pieces: some 100 MiB were seen."""
_known: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()


def _may_search(device: torch.device, limit_bytes: int) -> bool:
    """Whether there is room for a search that is not needed, beside what the step may take."""
    free_bytes = available_bytes(device, 0)
    return free_bytes is None or free_bytes - limit_bytes > _SEARCH_BYTES


def _is_paged(program: Program, held_bytes: int, limit_bytes: int) -> bool:
    """Whether what is there before a step and what it leaves, as a first step leaves the
    optimizer's state, may have to lie in files between its uses.

    Args:
        held_bytes: what is there before.
    """
    left_bytes = sum(program.storages[number].size_bytes for number in program.leaving())
    return 2 * (held_bytes + left_bytes) > limit_bytes


def _in_files_bytes(program: Program) -> int:
    """What is there before a step and lies in files already."""
    found = 0
    for reference, slot in program.referenced:
        if program.slots[slot] is not None and isinstance(reference, StateReference):
            tensor = reference.get()
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_in_file(tensor):
                found += program.storages[program.storage_of(slot)].size_bytes
    return found


def _place(offload: Path | Literal["host"], variant: Variant) -> Place:
    """Where a step's tensors may be offloaded to.

    Raises:
        PlanError: not there, from the step's device.
    """
    device, is_host = variant.device, offload == HOST
    if device.type == ("cuda" if is_host else "cpu"):
        return place_of(offload, device)
    other = {
        "cpu": "whose memory is the host's; pass a folder on a disk (offload=)",
        "cuda": 'and only tensors of the CPU lie in files; pass offload="host"',
    }.get(device.type, "from where nothing can be offloaded; leave offload= out")
    raise PlanError(f"{variant.name} runs on {device}, {other}", code="offload_device")


def _take_in(program: Program, place: Place) -> None:
    """Moves what plans may keep in files there: then there is room to plan, and to try kernels."""
    found = [
        (page.reference.path, page.reference.get())
        for page in pages_of(program, kinds_of(program, program.leaving()), place.device)
        if page.reference is not None
    ]
    movable = [one for one in found if isinstance(one[1], torch.Tensor) and is_movable(one[1])]
    Pages(place).take_in(movable)


def _extra_s(choice: Choice) -> float:
    """Seconds that a step within a limit takes beyond one without."""
    again_s = 0.0 if choice.recomputation is None else choice.recomputation.extra_s
    return again_s + (0.0 if choice.cuts is None else choice.cuts.extra_s)


def _extra_share(choice: Choice) -> float:
    """The same, as a share of the step without a limit."""
    of = choice.recomputation or choice.cuts
    return 0.0 if of is None else _extra_s(choice) / max(of.step_s, 1e-9)


def _again_share(choice: Choice) -> float:
    """What running operators again adds to a step, as a share of it."""
    again = choice.recomputation
    return 0.0 if again is None else again.extra_s / max(again.step_s, 1e-9)


def _permitted(graph: Graph, listed: Sequence[int]) -> list[int]:
    """An order that a graph permits, as near as possible to one that lists its operators."""
    place = {index: at for at, index in enumerate(listed)}
    left = {index: len(graph.predecessors(index)) for index in listed}
    ready = [place[index] for index in listed if not left[index]]
    order: list[int] = []
    while ready:
        index = listed[heappop(ready)]
        order.append(index)
        for later in graph.successors(index):
            left[later] -= 1
            if not left[later]:
                heappush(ready, place[later])
    graph.live_bytes(order)  # the planner's own check
    return order


def _remember(key: tuple[Any, ...], plan: Plan) -> None:
    _known[key] = plan
    if len(_known) > _MOST_KNOWN:
        _known.popitem(last=False)


def _is_alike(choice: Choice, like: Choice) -> bool:
    """Whether a plan takes no more of program order's bytes than the one whose order it has, or so
    little more that nobody notices.
    """
    in_step_bytes = choice.eager_bytes - choice.plan.persistent_bytes
    unnoticed_bytes = min(_UNNOTICED_BYTES, WORTH * choice.total_bytes)
    return (choice.share - like.share) * in_step_bytes <= max(
        _LOOSER * in_step_bytes, unnoticed_bytes
    )


def _alike(total_bytes: int) -> int:
    """The largest total that counts as equal to a total."""
    return int(total_bytes * (1 + _NEAR))


def _has_same_calls(one: Program, other: Program) -> bool:
    return len(one.calls) == len(other.calls) and all(
        call.target is same.target for call, same in zip(one.calls, other.calls, strict=True)
    )


def ordered_as(ordered: Plan, bounded: Plan, graph: Graph) -> Plan | None:
    """The order and layout of one plan (without integer programs) with the bound of another, which
    is of the graph.

    None if program order is better, or where the verifier refuses it: tensors that share memory
    in another way than before ask for another order.
    """
    plan, found = json.loads(bounded.to_json()), json.loads(ordered.to_json())
    plan |= {key: found[key] for key in _OF_ORDER}
    plan["settings"] = found["settings"]
    plan["exact"] = found["exact"]
    plan["status"] = (
        "optimal" if plan["total_bytes"] == plan["total_lower_bound_bytes"] else "feasible"
    )
    made = Plan.from_json(json.dumps(plan).encode())
    try:
        _core.verify(graph, made)
    except PlanError:
        return None
    return made


def _best(pooled: list[Choice], runs_once: bool) -> Choice:
    """Of the plans whose totals are close to the least, the one with the most in the pool; for a
    first step, with the smallest pool, which later steps keep.
    """
    least = min(choice.total_bytes for choice in pooled)
    near = [choice for choice in pooled if choice.total_bytes <= least * (1 + _NEAR)]
    if runs_once:
        return min(near, key=lambda choice: choice.plan.pool_bytes)
    return max(near, key=lambda choice: (choice.pooled_bytes, -choice.total_bytes))


def _copy_choices(choice: Choice, device: torch.device) -> Iterator[tuple[str, frozenset[int]]]:
    """Which calls' results are copied into the pool: all, all but those of one operator, those
    whose copies need little, or none.

    Some results may stay outside of the pool at no cost, since there has to be room outside of it
    for the most that copies and kernels need.
    """
    program = choice.program
    if sizes := copyable_calls(program, choice.placed, device):
        yield "pool, copying in all results that are not made there", frozenset(sizes)
        for name in _telling(choice, sizes):
            calls = frozenset(index for index in sizes if program.calls[index].name != name)
            yield f"pool, copying in all but those of {name}", calls
        steps = sorted(set(sizes.values()))
        parts = reversed(range(_MOST_LANDINGS - 1))
        for most in dict.fromkeys(
            steps[(len(steps) - 1) * part // (_MOST_LANDINGS - 1)] for part in parts
        ):
            calls = frozenset(index for index, size in sizes.items() if size <= most)
            yield f"pool, copying in results of up to {most:,} bytes at a time", calls
    yield "pool", frozenset()


def _telling(choice: Choice, calls: Container[int]) -> list[str]:
    """Operators whose results are much of what is made, those of less before those of more."""
    made: Counter[str] = Counter()
    for storage in choice.program.storages:
        if storage.creator in calls:
            made[choice.program.calls[storage.creator].name] += storage.size_bytes
    return [
        name
        for name, size in reversed(made.most_common(_MOST_LANDINGS))
        if size >= _MUCH * choice.made_bytes
    ]
