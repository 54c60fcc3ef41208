"""Rewrites of a recorded program that change neither results nor what eager PyTorch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch

from roam.distributed.collectives import is_collective
from roam.program.barrier import is_barrier
from roam.program.effects import PutLast, Rebind, rebound
from roam.program.ir import (
    Call,
    Program,
    Ref,
    Storage,
    TensorMeta,
    assign_data,
    ref_to,
    substitute,
)
from roam.program.operators import UNINITIALIZED
from roam.state.equality import same
from roam.state.references import GradientReference, OptimizerReference
from roam.torch_compat.private import OpOverload

aten = torch.ops.aten


def accumulate_in_place(program: Program) -> None:
    """Adds a gradient into one that dies there, as autograd's engine does.

    The engine adds the second gradient of a tensor into the first if nothing else holds it. Under a
    fake mode it takes the other branch and makes a third tensor, which eager never has. The sum has
    the same bits either way.
    """
    last_use = _last_uses(program)
    kept = {program.storage_of(slot) for slot in program.outgoing()}
    views: dict[int, list[int]] = {}
    for slot, meta in enumerate(program.slots):
        if meta is not None:
            views.setdefault(meta.storage, []).append(slot)
    replaced: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        if replaced and not replaced.keys().isdisjoint(call.refs()):
            call = program.calls[index] = call.renamed(lambda slot: replaced.get(slot, slot))
        if (
            call.phase != "backward"
            or call.target is not aten.add.Tensor
            or call.kwargs
            or len(call.args) != 2
        ):
            continue
        left, right = call.args
        if not isinstance(left, Ref) or not isinstance(right, Ref):
            continue
        (out,) = call.outputs
        old, new, sum_ = program.slots[left.slot], program.slots[right.slot], program.slots[out]  # type: ignore[index]
        if old is None or new is None or sum_ is None:
            continue
        is_ours = program.storages[old.storage].creator >= 0 and old.storage not in kept
        is_same = (old.shape, old.stride, old.dtype) == (
            sum_.shape,
            sum_.stride,
            sum_.dtype,
        ) and new.shape == old.shape
        if (
            is_ours and is_same and new.storage != old.storage and last_use[old.storage] == index
            and program.covers(left.slot)
        ):  # fmt: skip
            program.calls[index] = _adding(call, left.slot)
            replaced[out] = left.slot  # type: ignore[index]
            # Whatever used the sum's storage uses the old gradient's from here on.
            last_use[old.storage] = last_use[sum_.storage]
            if sum_.storage in kept:
                kept.add(old.storage)
            for slot in views.pop(sum_.storage):
                program.slots[slot] = replace(program.slots[slot], storage=old.storage)  # type: ignore[type-var]
                views[old.storage].append(slot)
    _redirect_results(program, replaced)


def prune(program: Program) -> Program:
    """The program without calls whose results nobody uses and gradients that it only drops; slots
    numbered anew. Kernels that raise an error for some data stay: eager PyTorch raises it, whoever
    reads their results.

    A program of which nothing can be left out is returned as it is.
    """
    needed = program.outgoing()
    # Storages whose contents matter later: those that persist, and those of needed values.
    matters = {number for number, storage in enumerate(program.storages) if storage.creator < 0}
    matters.update(program.storage_of(slot) for slot in needed)
    raising = _raising(program)
    calls: list[Call] = []
    positions: list[int] = []
    for index in range(len(program.calls) - 1, -1, -1):
        call = program.calls[index]
        has_effect = (
            call.random
            or call.is_check
            or index in raising
            or is_collective(call.target)  # other processes wait for it
            or is_barrier(call.target)  # Python waits for it, whatever it brings
            or not call.outputs
            or any(program.storage_of(slot) in matters for slot in call.mutates)
        )
        if not has_effect and needed.isdisjoint(call.outputs):
            continue
        calls.append(call)
        positions.append(index)
        for slot in call.refs():
            needed.add(slot)
            matters.add(program.storage_of(slot))
    calls.reverse()
    moved = {old: new for new, old in enumerate(reversed(positions))}
    referenced = [
        (reference, slot)
        for reference, slot in program.referenced
        if slot in needed
        or not isinstance(reference, GradientReference)
        and program.slots[slot] is not None
    ]
    constants = [(tensor, slot) for tensor, slot in program.constants if slot in needed]
    if _is_all(program, calls, referenced, constants):
        return program
    return _renumber(program, calls, moved, referenced, constants)


def _raising(program: Program) -> set[int]:
    """Calls that raise an error for some data of the step. One on tensors that nobody has filled is
    none: DTensor runs operators on such tensors to learn the shapes of results.
    """
    raising = {index for index, call in enumerate(program.calls) if program.may_raise(call)}
    if not raising:
        return raising
    written = program.written()
    unfilled: set[int] = set()
    for index, call in enumerate(program.calls):
        makes_none = isinstance(call.target, OpOverload) and call.target.name() in UNINITIALIZED
        if (
            makes_none
            and written.isdisjoint(
                program.storage_of(slot) for slot in call.outputs if slot is not None
            )
            or not unfilled.isdisjoint(call.refs())
        ):
            unfilled.update(slot for slot in call.outputs if slot is not None)
            raising.discard(index)
    return raising


def assign_early(program: Program) -> Program:
    """The program with data assigned to tensors from before the step as soon as nothing uses their
    old data any more, and no check is left; the old data then dies there, as in eager PyTorch, if
    nothing else of the step holds it.

    Other calls name the data and not the tensor, so the moment at which the tensor gets the data
    matters for memory alone.
    """
    assigned = dict(program.assigned())
    if not assigned:
        return program
    makers: dict[int, int] = {}
    last_use: dict[int, int] = {}
    last_check = -1
    places: list[tuple[int, bool]] = []
    for index, call in enumerate(program.calls):
        if call.target is assign_data:
            tensor, data = call.refs()
            places.append(
                (max(last_use.get(program.storage_of(tensor), -1), makers[data], last_check), True)
            )
            continue
        places.append((index, False))
        last_check = index if call.is_check or program.may_raise(call) else last_check
        made = [slot for slot in call.outputs if slot is not None]
        makers.update((slot, index) for slot in made)
        last_use.update((program.storage_of(slot), index) for slot in (*call.refs(), *made))
    order = sorted(range(len(program.calls)), key=places.__getitem__)
    held = {program.storage_of(slot) for slot in program.outgoing()}
    held.update(program.storage_of(slot) for _, slot in program.referenced if slot not in assigned)
    program.entering = {program.storage_of(slot) for slot in assigned} - held
    calls = [program.calls[index] for index in order]
    moved = {old: new for new, old in enumerate(order)}
    return _renumber(program, calls, moved, program.referenced, program.constants)


def with_used_state(program: Program) -> Program:
    """The program with those references alone whose tensors it uses, numbered as `prune`
    does.
    """
    used = {slot for call in program.calls for slot in call.refs()} | program.outgoing()
    return _renumber(
        program,
        program.calls,
        {index: index for index in range(len(program.calls))},
        [(reference, slot) for reference, slot in program.referenced if slot in used],
        program.constants,
    )


def _is_all(
    program: Program, calls: list[Call], referenced: list[Any], constants: list[Any]
) -> bool:
    """Whether these are everything that a program has, so that no other slot or storage has a
    number, and the slots of what is there before the step have the first numbers.
    """
    first = [slot for _, slot in (*referenced, *constants)]
    if first != list(range(len(first))):  # a recording meets constants at any time
        return False
    if (len(calls), len(referenced), len(constants)) != (
        len(program.calls),
        len(program.referenced),
        len(program.constants),
    ):
        return False
    numbered = set(first)
    for call in calls:
        numbered.update(slot for slot in call.outputs if slot is not None)
    storages = {meta.storage for meta in program.slots if meta is not None}
    return len(numbered) == len(program.slots) and len(storages) == len(program.storages)


def reordered(program: Program, order: Sequence[int]) -> Program:
    """The same program with its calls in another order; `order` has their numbers."""
    moved = {old: new for new, old in enumerate(order)}
    return _renumber(
        program, [program.calls[old] for old in order], moved, program.referenced, program.constants
    )


def with_calls(program: Program, calls: list[Call], numbers: Sequence[int]) -> Program:
    """The program with only these of its calls, which may read other slots than before. `numbers`
    are the calls' numbers in the program, in order.
    """
    moved = {old: new for new, old in enumerate(numbers)}
    return _renumber(program, calls, moved, program.referenced, program.constants)


def with_state(first: Program, later: Program) -> Program | None:
    """A first step as it would be if the optimizers' state that it makes were there already; None
    if the later step finds other state.

    If the result equals the later step, then everything but the making of the state has been traced
    twice.

    Args:
        first: the first step.
        later: the later one.
    """
    made = {
        reference.path: slot
        for reference, slot in rebound(first)
        if isinstance(reference, OptimizerReference) and first.slots[slot] is not None
    }
    held = {reference.path: slot for reference, slot in first.referenced}
    there = made | held
    if there.keys() != {reference.path for reference, _ in later.referenced}:
        return None
    state = set(made.values())
    kept = [index for index, call in enumerate(first.calls) if not _only_makes(call, state)]
    calls = [first.calls[index] for index in kept]
    used = {slot for call in calls for slot in call.refs()} | first.outgoing()
    storages = list(first.storages)
    for path, slot in made.items():
        storages[first.storage_of(slot)] = replace(
            storages[first.storage_of(slot)], creator=-1, name=path
        )
    return _renumber(
        replace(
            first,
            storages=storages,
            effects=[
                effect
                for effect in first.effects
                if not (isinstance(effect, PutLast) and made)
                and not (isinstance(effect, Rebind) and effect.reference.path in made)
            ],
        ),
        calls,
        {old: new for new, old in enumerate(kept)},
        [(reference, there[reference.path]) for reference, _ in later.referenced],
        [(tensor, slot) for tensor, slot in first.constants if slot in used],
    )


def with_numbers(plain: Program, live: Program, values: Mapping[str, Any]) -> Program:
    """A trace with plain numbers as it is with live ones in their places, where the two do the
    same.

    If the result equals the other trace, then the step does the same with live numbers as with
    plain ones, and has been traced twice.

    Args:
        plain: a trace with plain numbers.
        live: a trace of the same step with live numbers, or of the first step, which makes the
            optimizers' state.
        values: by path, the plain numbers.
    """
    slots = list(plain.slots)
    numbers: dict[int, tuple[int, Any]] = {}
    """By its slot in `live`, the slot and the value of each number."""

    def add(slot: int, value: Any) -> None:
        numbers[slot] = len(slots), value
        slots.append(None)

    def put(value: Any, other: Any) -> Any:
        if type(value) is Ref and value.slot in numbers:
            slot, number = numbers[value.slot]
            return ref_to(slot) if same(number, other) else other
        if type(value) in (tuple, list) and type(other) is type(value):
            rest = other[len(value) :]
            return type(value)([*map(put, value, other), *rest])
        return other

    referenced, before = list(plain.referenced), len(plain.referenced)
    places = {reference.path: place for place, (reference, _) in enumerate(plain.referenced)}
    for reference, slot in reversed(live.referenced):
        if reference.path in values:
            add(slot, values[reference.path])
            referenced.insert(before, (reference, numbers[slot][0]))
        else:
            before = places.get(reference.path, before)
    calls: list[Call] = []
    moved: dict[int, int] = {}
    for call in live.calls:
        output = call.outputs[0] if len(call.outputs) == 1 else None
        if (
            output is not None
            and live.slots[output] is None
            and call.refs()
            and numbers.keys() >= set(call.refs())
            and not isinstance(call.target, OpOverload)
        ):
            args = substitute(call.args, lambda ref: numbers[ref.slot][1])
            try:
                add(output, call.target(*args, **call.kwargs))
            except (ArithmeticError, ValueError):  # the other trace has not calculated it
                add(output, None)
            calls.append(call.renamed(lambda slot: numbers[slot][0]))
        elif len(moved) < len(plain.calls):
            other = plain.calls[len(moved)]
            if other.target is not call.target:
                continue  # it makes state
            if not numbers.keys().isdisjoint(call.refs()):
                kwargs = {key: put(call.kwargs.get(key), own) for key, own in other.kwargs.items()}
                other = replace(other, args=put(call.args, other.args), kwargs=kwargs)
            moved[len(moved)] = len(calls)
            calls.append(other)
    for old in range(len(moved), len(plain.calls)):
        moved[old] = len(calls)
        calls.append(plain.calls[old])
    return _renumber(replace(plain, slots=slots), calls, moved, referenced, plain.constants)


def _only_makes(call: Call, state: set[int]) -> bool:
    """Whether a call makes such state and does nothing else."""
    return (
        bool(call.outputs)
        and state.issuperset(call.outputs)
        and not call.mutates
        and not call.random
    )


def _renumber(
    program: Program,
    calls: list[Call],
    moved: dict[int, int],
    referenced: list[Any],
    constants: list[Any],
) -> Program:
    slots: dict[int, int] = {}
    storages: dict[int, int] = {}
    # What names no slots stays as it is.
    result = copy(program)
    for part in fields(program):
        value = getattr(program, part.name)
        if isinstance(value, (list, dict, set)):
            setattr(result, part.name, copy(value))
    result.slots, result.storages = [], []

    def slot_of(old: int) -> int:
        new = slots.get(old)
        if new is None:
            new = slots[old] = len(result.slots)
            result.slots.append(_meta(program.slots[old]))
        return new

    def _meta(meta: TensorMeta | None) -> TensorMeta | None:
        if meta is None:
            return None
        if meta.storage not in storages:
            storages[meta.storage] = len(result.storages)
            storage = program.storages[meta.storage]
            creator = moved[storage.creator] if storage.creator >= 0 else -1
            result.storages.append(
                Storage(storage.size_bytes, creator, storage.name, storage.is_begun_anew)
            )
        if storages[meta.storage] == meta.storage:
            return meta
        # `replace` takes several times as long.
        return TensorMeta(
            meta.shape, meta.stride, meta.offset, meta.dtype, meta.device, storages[meta.storage],
            meta.is_conj, meta.is_neg,
        )  # fmt: skip

    def renamed(value: Any) -> Any:
        return substitute(value, lambda ref: ref_to(slot_of(ref.slot)))

    result.referenced = [(reference, slot_of(slot)) for reference, slot in referenced]
    result.constants = [(tensor, slot_of(slot)) for tensor, slot in constants]
    result.entering = {storages[number] for number in program.entering if number in storages}
    result.calls = [call.renamed(slot_of) for call in calls]
    result.result = replace(program.result, leaves=renamed(program.result.leaves))
    result.effects = [effect.giving(renamed(effect.given)) for effect in program.effects]
    return result


def _last_uses(program: Program) -> dict[int, int]:
    """The last call that touches each storage."""
    uses: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        for slot in (*call.refs(), *(slot for slot in call.outputs if slot is not None)):
            uses[program.storage_of(slot)] = index
    return uses


def _adding(call: Call, slot: int) -> Call:
    """The sum of two gradients, written into the first."""
    known = call._known_adding
    if known is None:
        known = call._known_adding = replace(
            call, target=aten.add_.Tensor, mutates=(slot,), outputs=(None,)
        )
    return known


def _redirect_results(program: Program, replaced: dict[int, int]) -> None:
    def new(ref: Ref) -> Ref:
        return Ref(replaced.get(ref.slot, ref.slot))

    program.result.leaves = substitute(program.result.leaves, new)
    program.effects = [effect.giving(substitute(effect.given, new)) for effect in program.effects]
