"""Lowers a recorded program to the planner's graph: call `i` becomes operator `i`."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import flop_registry

from roam._core import Graph, GraphBuilder
from roam.capture.program import Call, Program, Ref, refs, substitute


def lower(program: Program, *, name: str, device: str) -> Graph:
    """The graph of a program.

    A storage becomes a tensor, whatever number of views it has. A view or a live number has no memory of its own: its
    operator creates nothing, and a control edge leads from it to each operator that uses it.
    """
    builder = GraphBuilder(name, device=device)
    outgoing = set(refs(program.result[0]))
    outgoing.update(slot for host_call in program.after for slot in refs(host_call.arguments))
    kinds, leaving = _kinds(program, outgoing)
    for number, storage in enumerate(program.storages):
        if storage.creator < 0:
            residency = "persistent"
        elif number in leaving:
            residency = "leaves"
        else:
            residency = "step_local"
        builder.tensor(storage.name, storage.size_bytes, kind=kinds[number], residency=residency)

    created: list[list[int]] = [[] for _ in program.calls]
    for number, storage in enumerate(program.storages):
        if storage.creator >= 0:
            created[storage.creator].append(number)
    makers: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        mutated = dict.fromkeys(_storage(program, slot) for slot in call.mutates)
        touched = dict.fromkeys(_storage(program, slot) for slot in call.refs() if program.slots[slot] is not None)
        builder.operator(
            call.name,
            reads=[number for number in touched if number not in mutated],
            creates=created[index],
            mutates=list(mutated),
            phase=call.phase,
            sequence="random" if call.random else None,
            module=call.source.module,
            file=call.source.file,
            line=call.source.line,
            flops=_flops(program, call),
        )
        for maker in dict.fromkeys(makers[slot] for slot in call.refs() if slot in makers):
            builder.control(maker, index)
        for slot in call.outputs:
            if slot is not None and _storage(program, slot) not in created[index]:
                makers[slot] = index
    _updates_wait(program, builder)
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
        if call.phase == "update" and any(_storage(program, slot) in persistent for slot in call.mutates):
            builder.control(begins, index)


def _kinds(program: Program, outgoing: set[int]) -> tuple[list[str], set[int]]:
    """The kind of each storage, and which storages leave the step."""
    kinds = ["temporary"] * len(program.storages)
    backward = [call for call in program.calls if call.phase == "backward"]
    used_in_backward = {_storage(program, slot) for call in backward for slot in call.refs()}
    for number, storage in enumerate(program.storages):
        is_used = storage.creator >= 0 and number in used_in_backward
        if is_used and program.calls[storage.creator].phase in ("forward", "loss"):
            kinds[number] = "activation"
    for call in program.calls:
        if call.phase == "update":
            for slot in call.refs():
                number = _storage(program, slot)
                creator = program.storages[number].creator if number >= 0 else -1
                if creator >= 0 and program.calls[creator].phase == "backward":
                    kinds[number] = "gradient"
    leaving = set()
    for slot in outgoing:
        number = _storage(program, slot)
        if number >= 0 and program.storages[number].creator >= 0:
            kinds[number] = "output"
            leaving.add(number)
    for owner, slot in program.rebinds:
        number = _storage(program, slot)
        kinds[number] = owner.kind
        leaving.add(number)
    for owner, slot in program.owned:
        if program.slots[slot] is not None:
            kinds[_storage(program, slot)] = owner.kind
    for _, slot in program.constants:
        kinds[_storage(program, slot)] = "buffer"
    return kinds, {number for number in leaving if program.storages[number].creator >= 0}


def _storage(program: Program, slot: int) -> int:
    meta = program.slots[slot]
    return -1 if meta is None else meta.storage


def device_of(program: Program) -> str:
    """The device that most of the step's bytes are on."""
    sizes: dict[torch.device, int] = {}
    seen: set[int] = set()
    for meta in program.slots:
        if meta is not None and meta.storage not in seen:
            seen.add(meta.storage)
            sizes[meta.device] = sizes.get(meta.device, 0) + program.storages[meta.storage].size_bytes
    return max(sizes, key=lambda device: sizes[device]).type if sizes else "cpu"
