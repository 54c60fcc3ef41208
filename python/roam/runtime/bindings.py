"""Decides where each value of a program lies by a plan, and makes the pool's tensors; how each call
writes its results there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from roam._core import Plan
from roam.kernels.calls import Placed
from roam.kernels.table import Placement
from roam.program.barrier import brought
from roam.program.ir import Program, substitute
from roam.runtime.pool import Pool

Outgoing = tuple[list[Any], list[Any]]
"""The leaves of a run's result, and what each of its effects gives."""

POISON = 0xFF  # not a number in floating point, and no valid bool

Way = Literal["view", "write", "copy_in", "call"]
"""How a call is run. `view`: not at all, since its results are views of the pool that are there.
`write`: by a kernel that writes where it is told. `copy_in`: in the ordinary way, and its results
are copied into the pool. `call`: in the ordinary way."""


class Bindings:
    """A program, and where its values lie by a plan.

    Args:
        program: the program.
        placed: per call, what `placed_calls` says of it.
        plan: a plan of the program's graph.
        pool: where the plan's offsets are, if anywhere.
        poison: whether ranges of the pool are to be filled as soon as their tensors die.

    Attributes:
        order: the numbers of the calls, in the plan's order, except that `_early_numbers` come
            first.
        offsets: for each storage in the pool, its first byte.
        taken: for each storage that takes the memory of another one, that other one.
        dying: for each step, the storages that are used there for the last time, each with the
            slots of all its views.
        refused: calls whose placed kernel is not to be used.
        views: for each slot in the pool, the tensor there; empty before `bind`.
    """

    def __init__(
        self,
        program: Program,
        placed: Sequence[Placed | None],
        plan: Plan,
        *,
        pool: Pool | None,
        poison: bool,
    ) -> None:
        self.program = program
        self.placed = list(placed)
        self.order = [int(index) for index in plan.order]
        if not any(plan.streams):
            early = _early_numbers(program)
            self.order = [
                *filter(early.__contains__, self.order),
                *(index for index in self.order if index not in early),
            ]
        self.pool = pool
        self.pool_bytes = 0 if pool is None else plan.pool_bytes
        self.offsets: dict[int, int] = {}
        if pool is not None:
            self.offsets = {
                storage: int(offset) for storage, offset in enumerate(plan.offsets) if offset >= 0
            }
        self.taken = {new: old for old, new in plan.reuse}
        self.dying = _dying(program, self.order)
        self._made = [self._storages_made(index) for index in range(len(program.calls))]
        self.poison = poison and pool is not None
        self.refused: set[int] = set()
        self.views: dict[int, torch.Tensor] = {}

    def bind(self) -> None:
        """Makes a view for every tensor in the pool."""
        if self.pool is None or self.views:
            return
        with torch.inference_mode(
            False
        ):  # what is made in that mode cannot be written to outside of it
            for slot, meta in enumerate(self.program.slots):
                if meta is not None and meta.storage in self.offsets:
                    self.views[slot] = self.pool.tensor(meta, self.offsets[meta.storage])

    def way(self, index: int) -> Way:
        """How a call is run."""
        call = self.program.calls[index]
        pooled = [
            slot
            for slot in call.outputs
            if slot is not None and self.program.storage_of(slot) in self.offsets
        ]
        makes = self.made(index)
        if pooled and not makes and not call.mutates and len(pooled) == len(call.outputs):
            return "view"
        makes_pooled = any(storage in self.offsets for storage in makes)
        placed = self.placed[index]
        # Plans reckon with what the placed kernel takes, even where nothing is in the pool.
        is_written = (
            makes_pooled
            or any(storage in self.taken for storage in makes)
            or (placed is not None and placed.workspace_bytes > 0 and not placed.by_rows)
        )
        if is_written and placed is not None and index not in self.refused:
            return "write"
        return "copy_in" if makes_pooled else "call"

    def made(self, index: int) -> list[int]:
        """Storages that a call makes."""
        return self._made[index]

    def _storages_made(self, index: int) -> list[int]:
        made = [
            self.program.storage_of(slot)
            for slot in self.program.calls[index].outputs
            if slot is not None
        ]
        return [
            storage
            for storage in made
            if storage >= 0 and self.program.storages[storage].creator == index
        ]

    def placement(self, index: int) -> Placement:
        """How the kernel of a call that runs in the way `write` is called."""
        placed = self.placed[index]
        assert placed is not None, "a call that is written"
        return placed.placement

    def donor(self, index: int, slot: int) -> int | None:
        """The argument's slot whose memory a result takes."""
        old, placed = self.taken.get(self.program.storage_of(slot)), self.placed[index]
        pairs = () if placed is None else placed.in_place
        return next(
            (item for item, new in pairs if new == slot and self.program.storage_of(item) == old),
            None,
        )

    def empty(self, slot: int) -> torch.Tensor:
        """New memory from the allocator for a result."""
        meta = self.program.slots[slot]
        assert meta is not None, "a tensor"
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)

    def range(self, storage: int | None) -> torch.Tensor:
        """The bytes of a tensor in the pool; of all that the plan uses of the pool, if `storage` is
        None.
        """
        assert self.pool is not None, "a plan with a pool"
        if storage is None:
            return self.pool.range(0, self.pool_bytes)
        return self.pool.range(self.offsets[storage], self.program.storages[storage].size_bytes)

    def is_poisoned(self, storage: int, index: int) -> bool:
        """Whether to poison a tensor that dies at a call: not if a result has its memory."""
        return self.poison and all(self.taken.get(made) != storage for made in self.made(index))

    def input_slots(self) -> list[int]:
        """Slots of a run's inputs, in their order; those that barriers bring are not among them."""
        later = brought(self.program)
        return [
            slot
            for _, slot in (*self.program.referenced, *self.program.constants)
            if slot not in later
        ]

    def outgoing(self, value: Any) -> Outgoing:
        """The result's leaves, and what each effect gives, with every `Ref` replaced."""
        return (
            substitute(self.program.result.leaves, value),
            [substitute(effect.given, value) for effect in self.program.effects],
        )

    def perhaps_missing(self) -> list[int]:
        """Slots that outlive the step and are not made if their call is left out."""
        outgoing = self.program.outgoing()
        return [
            slot for call in self.program.calls if call.skip_if is not None for slot in call.outputs if slot in outgoing
        ]  # fmt: skip


def _early_numbers(program: Program) -> set[int]:
    """Calls that calculate Python numbers of nothing but numbers from before the step.

    If such arithmetic raises an error, which the step's code may handle, a run can still be left to
    the step itself as long as nothing has been changed. Numbers take no memory, so the plan does
    not mind.
    """
    numbers = {slot for _, slot in program.referenced if program.slots[slot] is None}
    early: set[int] = set()
    for index, call in enumerate(program.calls):
        slots = call.refs()
        if (
            slots
            and numbers.issuperset(slots)
            and call.skip_if is None
            and not (call.is_check or call.random or call.returns_sequence)
            and len(call.outputs) == 1
            and (made := call.outputs[0]) is not None
            and program.slots[made] is None
        ):
            numbers.add(made)
            early.add(index)
    return early


def _dying(program: Program, order: list[int]) -> list[dict[int, list[int]]]:
    """For each step, the storages that are used there for the last time, each with the slots of all
    its views.
    """
    kept = program.leaving()
    kept.update(filter(program.persists, range(len(program.storages))))
    last: dict[int, int] = {}
    views: dict[int, dict[int, None]] = {}
    for step, index in enumerate(order):
        call = program.calls[index]
        for slot in (*call.refs(), *(slot for slot in call.outputs if slot is not None)):
            storage = program.storage_of(slot)
            if storage >= 0 and storage not in kept:
                last[storage] = step
                views.setdefault(storage, {})[slot] = None
    dying: list[dict[int, list[int]]] = [{} for _ in order]
    for storage, step in last.items():
        dying[step][storage] = list(views[storage])
    return dying
