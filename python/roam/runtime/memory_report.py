"""What a compiled step takes of memory: by plan, and as measured."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roam.program.ir import Call, Program, Ref, Source, Storage, TensorMeta
from roam.program.lower import moved_bytes
from roam.program.pages import Fetch, Keep, Put
from roam.report.table import columns, format_bytes
from roam.report.tables import Amount, Table, as_html
from roam.runtime.strategy import Choice, Cuts


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """A plan that is kept, with the calls that it is for and its cost.

    Attributes:
        arguments: the arguments that it was captured from.
        reason: why it was captured.
        seconds: what capture and planning took.
        total_bytes: what a step by this plan takes, as in `StepMemory`.
        pool_bytes: the pool that this plan needs; 0 without one. All plans share one pool, as
            large as the largest plan needs.
        host_bytes: bytes of the Python objects that are kept for this plan alone.
    """

    arguments: str
    reason: str
    seconds: float
    total_bytes: int
    pool_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class KeptPlans:
    """The plans that a compiled step keeps, most recently used first, and how many it may keep."""

    plans: tuple[KeptPlan, ...]
    most: int

    @property
    def host_bytes(self) -> int:
        """Python objects that are kept for all of them."""
        return sum(plan.host_bytes for plan in self.plans)

    def __str__(self) -> str:
        """A table, a plan a line."""
        rows = [
            (
                plan.arguments, f"{plan.seconds:.2f} s", f"{format_bytes(plan.total_bytes)} a step",
                f"{format_bytes(plan.host_bytes)} kept", plan.reason,
            )
            for plan in self.plans
        ]  # fmt: skip
        end = f"{len(rows)} of at most {self.most} kept, with {format_bytes(self.host_bytes)} of Python objects"
        return f"{columns(rows, right=(1, 2, 3))}\n{end}\n" if rows else f"{end}\n"


_ENTERED = (list, tuple, dict, set, frozenset, Call, Program, Ref, Source, Storage, TensorMeta)
_COUNTED = (*_ENTERED, str, bytes, int, float)


def host_bytes(values: Iterable[Any], seen: set[int]) -> int:
    """Bytes of the Python objects that programs and plans are made of, as far as they are in none
    that was `seen` before.
    """
    left, total = list(values), 0
    while left:
        value = left.pop()
        if id(value) in seen or type(value) not in _COUNTED:
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        if type(value) in _ENTERED:
            left += gc.get_referents(value)
    return total


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of one step by one plan, in bytes.

    Attributes:
        uses_pool: whether planned tensors lie in the static pool.
        persistent_bytes: parameters, buffers, optimizer state, the batch: what exists before and
            after.
        pool_bytes: the pool; 0 without one.
        outside_bytes: the most that is alive at once inside the step and not in the pool, including
            what copies into the pool need.
        kernel_bytes: the most that one kernel allocates for itself while it runs; the totals
            contain it. None if it could not be measured.
        run_bytes: what a training run needs: the larger total of the first step, which makes the
            optimizer's state, and of later steps.
        program_order_bytes: the planned total of the same operators in eager PyTorch's order.
        totals: the planned total of each way of running that was considered; the first is that with
            PyTorch's allocator.
        measured_bytes: the most that was allocated at once in one step; None until
            `Step.measured`.
        workspace_bytes: the part of `measured_bytes` that kernels allocated for themselves; None on
            CUDA.
        group_bytes: how much less `measured_bytes` would be if process groups allocated nothing
            for themselves (gloo copies what it reduces). No plan counts this memory.
        eager_measured_bytes: as `measured_bytes`, when the user's own function runs; None until
            `Step.measured_eagerly`.
        eager_workspace_bytes: the part of it that kernels allocated for themselves; None on CUDA.
        eager_group_bytes: how much less `eager_measured_bytes` would be if process groups allocated
            nothing for themselves.
        limit_bytes: the most that the step may take (``memory=`` of `roam.compile`); None without a
            limit.
        floor_bytes: no plan with the same tiles takes less, however often operators run; None if
            nothing runs again, or if tensors are offloaded.
        extra_runs: how many operators run again to keep within the limit, views not counted.
        extra_s: seconds of these extra runs, and of stores and loads of offloaded tensors, by plan.
        least_extra_s: no plan within the limit with the same tiles has extra runs that take less,
            by plan; None if tensors are offloaded.
        step_s: seconds of the step without extra runs, by plan; 0 if nothing runs again.
        timed_operators: how many operators have a time that was measured on the device, each
            kernel once for each set of shapes; 0 if nothing runs again.
        modelled_operators: how many operators have a time by the cost model, scaled to the
            measured times if there are any.
        extra_measured_s: seconds that the extra runs took in the step that was measured; None until
            `Step.measured`, on CUDA, and if nothing runs again.
        step_measured_s: seconds of all other operators in that step; None as `extra_measured_s`.
        offloaded_tensors: how many tensors are offloaded.
        offloaded_bytes: bytes of these tensors.
        loaded_bytes: bytes of all loads of them.
        transfers_s: seconds that their stores and loads take, by plan.
        transfers_measured_s: seconds that these took in the step that was measured; None as
            `extra_measured_s`.
        read_bytes, written_bytes: by kind (``parameter``, ``optimizer_state``, ``gradient``), what
            a step reads of tensors that lie in files, or with the host, between their uses, and
            what it writes there.
        least_moved_bytes: what a step in the plan's order has to read and write of them at least,
            whichever lie there at which times. It rests on an estimate, made before planning, of
            what else is in memory. 0 if it is not known, as where operators run again.
        cuts: what runs tile by tile to keep within the limit; None if nothing does.
    """

    uses_pool: bool
    persistent_bytes: int
    pool_bytes: int
    outside_bytes: int
    kernel_bytes: int | None
    run_bytes: int
    program_order_bytes: int
    totals: tuple[tuple[str, int], ...]
    measured_bytes: int | None = None
    workspace_bytes: int | None = None
    group_bytes: int = 0
    eager_measured_bytes: int | None = None
    eager_workspace_bytes: int | None = None
    eager_group_bytes: int = 0
    limit_bytes: int | None = None
    floor_bytes: int | None = None
    extra_runs: int = 0
    extra_s: float = 0.0
    least_extra_s: float | None = 0.0
    step_s: float = 0.0
    timed_operators: int = 0
    modelled_operators: int = 0
    extra_measured_s: float | None = None
    step_measured_s: float | None = None
    offloaded_tensors: int = 0
    offloaded_bytes: int = 0
    loaded_bytes: int = 0
    transfers_s: float = 0.0
    transfers_measured_s: float | None = None
    read_bytes: Mapping[str, int] = field(default_factory=dict)
    written_bytes: Mapping[str, int] = field(default_factory=dict)
    least_moved_bytes: int = 0
    cuts: Cuts | None = None

    @classmethod
    def planned(cls, choice: Choice) -> StepMemory:
        """What a choice promises; nothing is measured yet."""
        plan, again = choice.plan, choice.recomputation
        offloaded = None if again is None else again.offloaded
        pool_bytes = plan.pool_bytes if choice.uses_pool else 0
        return cls(
            uses_pool=choice.uses_pool,
            persistent_bytes=plan.persistent_bytes,
            pool_bytes=pool_bytes,
            outside_bytes=choice.total_bytes - plan.persistent_bytes - pool_bytes,
            kernel_bytes=choice.kernel_bytes,
            run_bytes=choice.total_bytes,
            program_order_bytes=choice.eager_bytes,
            totals=choice.totals,
            limit_bytes=choice.memory_limit_bytes,
            floor_bytes=None if again is None else again.floor_bytes,
            extra_runs=0 if again is None else again.runs,
            extra_s=0.0 if again is None else again.extra_s,
            least_extra_s=0.0 if again is None else again.least_extra_s,
            step_s=0.0 if again is None else again.step_s,
            timed_operators=0 if again is None else again.timed_calls,
            modelled_operators=0 if again is None else again.modelled_calls,
            offloaded_tensors=0 if offloaded is None else offloaded.tensors,
            offloaded_bytes=0 if offloaded is None else offloaded.stored_bytes,
            loaded_bytes=0 if offloaded is None else offloaded.loaded_bytes,
            transfers_s=0.0 if offloaded is None else offloaded.transfers_s,
            read_bytes=moved_bytes(choice.program, Fetch),
            written_bytes=moved_bytes(choice.program, Put, Keep),
            least_moved_bytes=choice.least_moved_bytes,
            cuts=choice.cuts,
        )

    @property
    def total_bytes(self) -> int:
        """What the step takes by plan: persistent + pool + unpooled."""
        return self.persistent_bytes + self.pool_bytes + self.outside_bytes

    def __str__(self) -> str:
        """A table, a figure a line."""
        known = [
            (label, f"{size:,}", format_bytes(size), note) for label, size, note in self._rows()
        ]
        tried = [(f"by {name}", f"{size:,}", format_bytes(size)) for name, size in self.totals]
        blocks = [columns(block, right=(1, 2)) for block in (known, tried)]
        return "\n\n".join([*blocks, *self._extra_time(), *self._traffic()]) + "\n"

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        known = tuple((label, Amount(size), note) for label, size, note in self._rows())
        tried = tuple((f"by {name}", Amount(size)) for name, size in self.totals)
        note = " ".join([*self._extra_time(), *self._traffic()])
        tables = [
            Table("Memory of the step", ("", "bytes", ""), known, note),
            Table("Totals of the ways that were tried", ("", "bytes"), tried),
        ]
        return "".join(map(as_html, tables))

    def _extra_time(self) -> list[str]:
        """What tiles, recomputation and offloading cost, if there are any."""
        cuts = [] if self.cuts is None else [str(self.cuts)]
        return [*cuts, *self._again()]

    def _again(self) -> list[str]:
        """What recomputation and offloading cost, if there is any."""
        if not self.extra_runs and not self.offloaded_tensors:
            return []
        measured = ""
        if self.extra_measured_s is not None and self.step_measured_s:
            measured = f", {self.extra_measured_s / self.step_measured_s:.1%} as measured"
        extra = f"{self._of_step(self.extra_s)} of the step's time by plan{measured}"
        runs = f"{self.extra_runs:,} operators run again"
        if self.offloaded_tensors:
            runs += (
                f" and {self.offloaded_tensors:,} tensors ({format_bytes(self.offloaded_bytes)}) "
                "are offloaded"
            )
            extra += f", of which stores and loads take {self._of_step(self.transfers_s)}"
            if self.transfers_measured_s is not None and self.step_measured_s:
                share = self.transfers_measured_s / self.step_measured_s
                extra += f" by plan, {share:.1%} as measured"
        least = ""
        if self.least_extra_s is not None:
            least = (
                f"; no plan within the limit {'with these tiles' if self.cuts else 'of whole operators'} takes "
                f"less extra time than {self._of_step(self.least_extra_s)}"
            )
        return [
            f"{runs}, for {extra}{least}. Times of {self.timed_operators:,} operators are "
            f"measured, of {self.modelled_operators:,} modelled"
        ]

    def _traffic(self) -> list[str]:
        """What a step reads of tensors in files, or with the host, and writes there, if it does."""
        if not self.read_bytes and not self.written_bytes:
            return []
        read, written = (
            ", ".join(f"{format_bytes(size)} ({kind.replace('_', ' ')})" for kind, size in moved.items())
            or "nothing"
            for moved in (self.read_bytes, self.written_bytes)
        )  # fmt: skip
        least = (
            f"; in the plan's order at least {format_bytes(self.least_moved_bytes)} have to be moved, "
            "as estimated before planning"
            if self.least_moved_bytes
            else ""
        )
        return [
            f"Of tensors that lie outside of the limit a step reads {read} and writes {written}{least}"
        ]

    def _of_step(self, seconds: float) -> str:
        """A time as a share of the step's without a limit."""
        return f"{seconds / max(self.step_s, 1e-9):.1%}"

    def _rows(self) -> list[tuple[str, int, str]]:
        """Label, bytes and meaning of each figure that is known."""
        rows = [
            (
                "persistent",
                self.persistent_bytes,
                "parameters, buffers, optimizer state, the batch",
            ),
            (
                "pool",
                self.pool_bytes,
                "one static block" if self.uses_pool else "none: PyTorch's allocator",
            ),
            (
                "unpooled",
                self.outside_bytes,
                "the most alive at once inside the step and not in the pool",
            ),
            ("total", self.total_bytes, "persistent + pool + unpooled"),
            ("limit", self.limit_bytes, "the most that a step may take"),
            (
                "floor",
                self.floor_bytes,
                f"no plan {'with the same tiles' if self.cuts else 'of whole operators'} takes less, "
                "whatever it runs again",
            ),
            (
                "run",
                self.run_bytes,
                "a whole run: the larger total of the first step and of later ones",
            ),
            (
                "one kernel",
                self.kernel_bytes,
                "the most that one kernel allocates for itself while it runs",
            ),
            (
                "total in program order",
                self.program_order_bytes,
                "the total if the operators run in eager PyTorch's order, by plan",
            ),
            ("measured", self.measured_bytes, "the most allocated at once in a step by the plan"),
            (
                "in kernels",
                self.workspace_bytes,
                "the part of it that kernels allocated for themselves",
            ),
            (
                "in process groups",
                self.group_bytes or None,
                "the part of it that process groups allocated for themselves; no plan counts it",
            ),
            (
                "eager",
                self.eager_measured_bytes,
                "the most allocated at once in a step of eager PyTorch",
            ),
            (
                "in kernels",
                self.eager_workspace_bytes,
                "the part of it that kernels allocated for themselves",
            ),
            (
                "in process groups",
                self.eager_group_bytes or None,
                "the part of it that process groups allocated for themselves",
            ),
        ]
        return [(label, size, note) for label, size, note in rows if size is not None]
