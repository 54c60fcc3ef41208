"""Lowers a recorded program to the planner's graph: call `i` becomes operator `i`."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch.utils.flop_counter import flop_registry

from roam._core import Graph, GraphBuilder
from roam.capture.absent import estimate_of
from roam.capture.foreign import is_ours
from roam.kernels.calls import Placed
from roam.program import Call, Program, Ref, substitute

_Residency = Literal["persistent", "enters", "leaves", "unpooled", "step_local"]


def lower(
    program: Program,
    placed: Sequence[Placed | None],
    *,
    name: str,
    device: str,
    landing: Container[int] | None = None,
    pool: bool = True,
    workspaces: Mapping[int, int] | None = None,
    notes: Sequence[tuple[str, str]] = (),
    order: Sequence[int] | None = None,
) -> Graph:
    """The graph of a program.

    A storage becomes a tensor, whatever number of views it has. A view or a live number has no memory of its own: its
    operator creates nothing, and a control edge leads from it to each operator that uses it.

    Args:
        program: the program.
        placed: per call, what `placed_calls` says of it.
        name: the graph's name.
        device: the graph's device.
        landing: calls that compute into memory of their own and whose results are then copied into the pool; what other
            calls make whose kernels cannot write there stays outside of it. None: as if every kernel could.
        pool: whether there is a pool. If not, all that is made and dies in the step lies outside of it.
        workspaces: per call, the bytes that its kernel takes beyond its results while it runs, where that is known.
        notes: what to say of the graph to people.
        order: numbers of the calls, in an order that they may run in; then they may run in no other.
    """
    builder = GraphBuilder(name, device=device)
    if reason := estimate_of(torch.device(device)):
        builder.estimate(reason)
    for topic, text in notes:
        builder.note(topic, text)
    kinds = kinds_of(program)
    created: list[list[int]] = [[] for _ in program.calls]
    for number, storage in enumerate(program.storages):
        if storage.creator >= 0:
            created[storage.creator].append(number)
    residencies = _residencies(program, placed, landing, pool)
    for number, storage in enumerate(program.storages):
        builder.tensor(storage.name, storage.size_bytes, kind=kinds[number], residency=residencies[number])

    rank = None if order is None else {number: place for place, number in enumerate(order)}
    makers: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        mutated = dict.fromkeys(program.storage_of(slot) for slot in call.mutates)
        touched = dict.fromkeys(program.storage_of(slot) for slot in call.refs() if program.slots[slot] is not None)
        reads = [number for number in touched if number not in mutated]
        copied = []
        if landing is not None and index in landing:
            copied = [number for number in created[index] if residencies[number] == "step_local"]
        at = placed[index]
        if at is not None and at.by_rows and not copied:
            at = None  # it runs as ever
        workspace_bytes = (
            sum(program.storages[number].size_bytes for number in copied) if at is None else at.workspace_bytes
        )
        workspace_bytes += 0 if workspaces is None else workspaces.get(index, 0)
        pairs = _reuse(program, at, reads, copied)
        builder.operator(
            call.name,
            reads=reads,
            creates=created[index],
            mutates=list(mutated),
            workspace_bytes=workspace_bytes,
            reuse=[pair for pair in pairs if residencies[pair[0]] == residencies[pair[1]]],
            phase=call.phase,
            sequence="random" if call.random else None,
            module=call.source.module,
            file=call.source.file,
            line=call.source.line,
            flops=_flops(program, call),
            position=None if rank is None else rank[index],
        )
        for maker in dict.fromkeys(makers[slot] for slot in call.refs() if slot in makers):
            builder.control(maker, index)
        for slot in call.outputs:
            if slot is not None and program.storage_of(slot) not in created[index]:
                makers[slot] = index
    _updates_wait(program, builder)
    _checks_come_first(program, builder)
    for before, after in pairwise(order or ()):
        builder.control(before, after)
    return builder.build()


def _flops(program: Program, call: Call) -> int:
    """Floating-point operations by PyTorch's own formulas; 0 where there is none, as for pointwise operators."""
    formula = flop_registry.get(getattr(call.target, "overloadpacket", None))
    if formula is None:
        return 0

    def shape(slot: int | None) -> tuple[int, ...] | None:
        meta = None if slot is None else program.slots[slot]
        return None if meta is None else meta.shape

    def shape_of(ref: Ref) -> tuple[int, ...] | None:
        return shape(ref.slot)

    shapes = tuple(shape(slot) for slot in call.outputs)
    made = shapes if call.returns_sequence else shapes[0]
    try:
        return int(formula(*substitute(call.args, shape_of), **substitute(call.kwargs, shape_of), out_val=made))
    except AssertionError:  # a form of the kernel that the formula does not know
        return 0


def _updates_wait(program: Program, builder: GraphBuilder) -> None:
    """No update starts before the backward pass does, so that a failure in the forward pass leaves them all undone.

    This costs no memory: what an update needs and frees, its gradient, comes later still.
    """
    begins = next((index for index, call in enumerate(program.calls) if call.phase == "backward"), None)
    if begins is None:
        return
    persistent = {number for number, storage in enumerate(program.storages) if storage.creator < 0}
    for index in range(begins + 1, len(program.calls)):
        call = program.calls[index]
        if call.phase == "update" and any(program.storage_of(slot) in persistent for slot in call.mutates):
            builder.control(begins, index)


def _checks_come_first(program: Program, builder: GraphBuilder) -> None:
    """Nothing that exists before the step is changed before a check that comes first in the program; checks keep their order."""
    check = -1
    for index, call in enumerate(program.calls):
        changed = map(program.storage_of, call.mutates)
        if check >= 0 and (call.is_check or any(program.storages[number].creator < 0 for number in changed)):
            builder.control(check, index)
        if call.is_check:
            check = index


def _residencies(
    program: Program, placed: Sequence[Placed | None], landing: Container[int] | None, pool: bool
) -> list[_Residency]:
    leaving = program.leaving()
    # Who gets a tensor that is not PyTorch's operator may do with its memory what it likes: hand it to NumPy, after which it cannot
    # be resized, or read from the start of the storage instead of the tensor's, as `torch.set_rng_state` does.
    given_away = {
        program.storage_of(slot) for call in program.calls if not is_ours(call.target) for slot in call.refs()
    }
    residencies: list[_Residency] = []
    for number, storage in enumerate(program.storages):
        if storage.creator < 0:
            residencies.append("persistent" if program.persists(number) else "enters")
        elif number in leaving:
            residencies.append("leaves")
        elif (
            pool
            and number not in given_away
            and (landing is None or _is_written(placed[storage.creator]) or storage.creator in landing)
        ):
            residencies.append("step_local")
        else:
            residencies.append("unpooled")
    return residencies


def _is_written(placed: Placed | None) -> bool:
    """Whether a kernel writes where a plan wants it, without a copy."""
    return placed is not None and not placed.by_rows


def _reuse(program: Program, placed: Placed | None, reads: list[int], copied: list[int]) -> list[tuple[int, int]]:
    """(storage read, storage made): which results may take an argument's memory if that dies in the call."""
    if placed is not None:
        # A tensor that is passed twice is one argument's memory.
        return list(dict.fromkeys((program.storage_of(old), program.storage_of(new)) for old, new in placed.in_place))
    # When a result is copied to its place, the arguments have been used.
    size = {number: program.storages[number].size_bytes for number in (*reads, *copied)}
    return [(old, new) for old in reads for new in copied if size[old] == size[new] > 0]


def kinds_of(program: Program) -> list[str]:
    """The kind of each storage."""
    kinds = ["temporary"] * len(program.storages)
    backward = [call for call in program.calls if call.phase == "backward"]
    used_in_backward = {program.storage_of(slot) for call in backward for slot in call.refs()}
    for number, storage in enumerate(program.storages):
        is_used = storage.creator >= 0 and number in used_in_backward
        if is_used and program.calls[storage.creator].phase in ("forward", "loss"):
            kinds[number] = "activation"
    for call in program.calls:
        if call.phase == "update":
            for slot in call.refs():
                number = program.storage_of(slot)
                creator = program.storages[number].creator if number >= 0 else -1
                if creator >= 0 and program.calls[creator].phase == "backward":
                    kinds[number] = "gradient"
    for number in program.leaving():
        kinds[number] = "output"
    for owner, slot in program.rebinds:
        if program.slots[slot] is not None:
            kinds[program.storage_of(slot)] = owner.kind
    for owner, slot in program.owned:
        if program.slots[slot] is not None:
            kinds[program.storage_of(slot)] = owner.kind
    for _, slot in program.constants:
        kinds[program.storage_of(slot)] = "buffer"
    return kinds


def device_of(program: Program) -> torch.device:
    """The device that most of the step's bytes are on."""
    sizes: dict[torch.device, int] = {}
    seen: set[int] = set()
    for meta in program.slots:
        if meta is not None and meta.storage not in seen:
            seen.add(meta.storage)
            sizes[meta.device] = sizes.get(meta.device, 0) + program.storages[meta.storage].size_bytes
    return max(sizes, key=lambda device: sizes[device]) if sizes else torch.device("cpu")
