"""Looks up, for the calls of one program, what the table of kernels permits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from roam.kernels.fused import workspace_bytes
from roam.kernels.rows import WORTH_BYTES, piece_bytes
from roam.kernels.table import Placement, named, placement
from roam.program.ir import Call, Program, Ref, TensorMeta, substitute
from roam.program.tiles import TILES, body_of
from roam.torch_compat.private import OpOverload

_UNMOVABLE = frozenset(
    f"aten::{name}"
    for name in (
        # Views whose elements are not what their memory says.
        "_conj", "_neg_view",
        # What counts from where a storage begins, or gives a tensor other memory.
        "as_strided_", "as_strided_copy", "as_strided_scatter", "resize_", "resize_as_", "set_",
        # Their results keep the offset and the gaps of what they are given.
        "diagonal_scatter", "select_scatter", "slice_scatter",
    )
)  # fmt: skip
"""Operators whose tensors cannot lie in another storage than the one that they were captured in."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A call whose kernel can write all its results where a plan wants them."""

    placement: Placement
    in_place: tuple[tuple[int, int], ...]
    """(slot of an argument, slot of a result): if it dies in the call, the argument may give its
    memory to the result."""
    workspace_bytes: int = 0
    """What the kernel takes while it runs, if that is known and more than almost nothing."""
    by_rows: bool = False
    """Whether it computes its results piece by piece and copies the pieces. A plan chooses whether
    it does, as for any copy. The pieces take `workspace_bytes`.
    """

    def renamed(self, names: Mapping[int | None, int | None]) -> Placed:
        """The same for a run of the call on other slots. An argument that this run does not take
        gives no memory.
        """
        in_place = tuple((names[old], names[new]) for old, new in self.in_place if old in names)
        return self if in_place == self.in_place else replace(self, in_place=in_place)  # type: ignore[arg-type]


def placed_calls(
    program: Program, device: torch.device, *, worth_bytes: int | None = None
) -> list[Placed | None]:
    """For each call of a program, how its results can be written where a plan wants them on a
    device; None if they cannot.

    `worth_bytes`: results that take less are not computed piece by piece; None: `WORTH_BYTES`.
    """
    worth_bytes = WORTH_BYTES if worth_bytes is None else worth_bytes
    where = _Where(device, program.leaving(), unmovable_storages(program), worth_bytes)
    return [_placed(program, index, where) for index in range(len(program.calls))]


def placing(program: Program, device: torch.device) -> Callable[[Program, int], Placed | None]:
    """Tells how a call can be placed, of the program or of the same program at other sizes. Results
    may be computed piece by piece however few bytes they take.
    """
    where = _Where(device, program.leaving(), unmovable_storages(program), 0)
    return lambda there, index: _found(there, index, where)


def copyable_calls(
    program: Program, placed: Sequence[Placed | None], device: torch.device
) -> dict[int, int]:
    """Calls whose results may be copied to where a plan wants them, and cannot get there otherwise:
    with the bytes that this takes.
    """
    leaving, unmovable = program.leaving(), unmovable_storages(program)
    copyable = {}
    for index, call in enumerate(program.calls):
        at = placed[index]
        if at is not None and at.by_rows:
            copyable[index] = at.workspace_bytes
            continue
        made = [program.storage_of(slot) for slot in call.made() if program.storage_of(slot) >= 0]
        local = [
            storage
            for storage in made
            if program.storages[storage].creator == index
            and storage not in leaving
            and not program.storages[storage].is_paged
        ]
        if (
            at is None
            and local
            and unmovable.isdisjoint(local)
            and _is_apart(program, index, device)
        ):
            copyable[index] = sum(program.storages[storage].size_bytes for storage in local)
    return copyable


class _Where(NamedTuple):
    """What decides about the calls of a program, besides each call's own tensors."""

    device: torch.device
    leaving: set[int]
    """Storages that outlive the step."""
    unmovable: set[int]
    worth_bytes: int


def _placed(program: Program, index: int, where: _Where) -> Placed | None:
    call = program.calls[index]
    seen: list[Any] = [where.device, where.worth_bytes]
    for slot in (*call.refs(), *call.outputs):
        meta = None if slot is None else program.slots[slot]
        if meta is None:
            seen.append(None)
        else:
            number = meta.storage
            storage = program.storages[number]
            seen += (
                meta,
                storage,
                storage.creator == index,
                number in where.leaving,
                number in where.unmovable,
            )
    if call._known_placed is None or call._known_placed[0] != seen:
        call._known_placed = seen, _found(program, index, where)
    found: Placed | None = call._known_placed[1]
    return found


def _found(program: Program, index: int, where: _Where) -> Placed | None:
    device, leaving, unmovable, worth_bytes = where
    call = program.calls[index]
    slots = call.made()
    inputs = [meta for slot in call.refs() if (meta := program.slots[slot]) is not None]
    outputs = [meta for slot in slots if (meta := program.slots[slot]) is not None]
    if (
        not outputs
        or len(outputs) < len(call.outputs)
        or (call.mutates and call.target is not TILES)
        or not _is_apart(program, index, device)
    ):
        return None
    touched = {meta.storage for meta in (*inputs, *outputs)}
    if not touched.isdisjoint(unmovable) or any(
        meta.storage in leaving or 0 in meta.shape for meta in outputs
    ):
        return None
    if any(meta.device != device for meta in inputs):
        return None
    found = placement(call.target, device.type)
    if not found.applies(call.target, call.args, call.kwargs) or not found.clears(inputs, outputs):
        return None
    in_place = tuple(_in_place(program, call, found, inputs, slots, leaving))
    if found.rows is None:
        return Placed(found, in_place, workspace_bytes(program, call))
    args, kwargs = substitute((call.args, call.kwargs), lambda ref: program.slots[ref.slot])
    nbytes = sum(program.storages[meta.storage].size_bytes for meta in outputs)
    if nbytes < worth_bytes or not found.splits(args, kwargs):
        return None
    return Placed(found, in_place, piece_bytes(found.rows(*args, **kwargs), nbytes), by_rows=True)


def _in_place(
    program: Program,
    call: Call,
    found: Placement,
    inputs: list[TensorMeta],
    slots: list[int],
    leaving: set[int],
) -> Iterator[tuple[int, int]]:
    """(slot of an argument, slot of a result): which results the kernel may write over an argument
    that dies in the call, as the table of kernels and the layouts of both allow.
    """
    outputs = [meta for slot in slots if (meta := program.slots[slot]) is not None]
    for value, number in _proposed(call, found, inputs, outputs):
        if not isinstance(value, Ref):
            continue
        taken = program.slots[value.slot]
        if taken is None or program.storages[taken.storage].creator < 0 or taken.storage in leaving:
            continue
        if _geometry(taken) != _geometry(outputs[number]) or not program.covers(value.slot):
            continue
        # Another argument of the kernel may be the same view of this memory, if the kernel writes
        # no element before it has read all that it makes the element of.
        here = [_geometry(meta) for meta in inputs if meta.storage == taken.storage]
        in_turn = found.rows is not None or torch.Tag.pointwise in call.target.tags
        if len(here) == 1 or (in_turn and len(set(here)) == 1):
            yield value.slot, slots[number]


def _proposed(
    call: Call, found: Placement, inputs: list[TensorMeta], outputs: list[TensorMeta]
) -> list[tuple[Any, int]]:
    """(argument, number of a result): which results a kernel may write over an argument."""
    if call.target is TILES:
        return [(call.args[0][place], number) for place, number in body_of(call.args[1]).over]
    values = named(call.target, call.args, call.kwargs)
    pairs = found.cleared_in_place(inputs, outputs)
    return [(values.get(argument), number) for argument, number in pairs]


def unmovable_storages(program: Program) -> set[int]:
    """Storages of tensors that cannot lie elsewhere."""
    return {
        program.storage_of(slot)
        for call in program.calls
        if isinstance(call.target, OpOverload)
        and call.target.name().partition(".")[0] in _UNMOVABLE
        for slot in (*call.refs(), *call.made())
    }


def _is_apart(program: Program, index: int, device: torch.device) -> bool:
    """Whether each result of a call fills a storage of its own that the call makes on the
    device.
    """
    slots = [slot for slot in program.calls[index].made() if program.slots[slot] is not None]
    storages = {program.storage_of(slot) for slot in slots}
    return (
        len(storages) == len(slots)
        and all(program.storages[storage].creator == index for storage in storages)
        and all(program.covers(slot) and program.slots[slot].device == device for slot in slots)  # type: ignore[union-attr]
    )


def _geometry(meta: TensorMeta) -> tuple[object, ...]:
    return meta.shape, meta.stride, meta.offset, meta.dtype
