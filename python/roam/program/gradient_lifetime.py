"""Decides which gradients outlive a step."""

from __future__ import annotations

import functools
import operator

from roam.program.effects import Drop, Effect, Rebind, rebound
from roam.program.ir import Program
from roam.state.references import (
    ArgumentReference,
    AttributeReference,
    EntryReference,
    GradientReference,
    PlaceReference,
)


def settle_gradients(program: Program, carried: set[str], keep_grads: bool) -> None:
    """Lets gradients outlive the step if the next step reads them, or if no optimizer has used them
    up; or all gradients, if the caller asks for that.
    """
    referenced = {reference.path for reference, _ in program.referenced}
    found = {reference.path for reference, _ in program.plain_before}
    used_up = set() if keep_grads else _used_up(program)
    effects: list[Effect] = []
    for effect in program.effects:
        if not isinstance(effect, Rebind):
            effects.append(effect)
            continue
        reference, slot = effect.reference, effect.slot
        is_gradient = isinstance(reference, GradientReference)
        frees = is_gradient and reference.path in used_up and reference.path not in carried
        if not frees:
            effects.append(effect)
        if frees:
            effects.append(Drop(reference, frees=True))
        elif is_gradient and reference.path not in referenced and reference.path not in carried:
            effects.append(Drop(reference))
        elif isinstance(reference, (ArgumentReference, AttributeReference, EntryReference)):
            continue  # guarded with the arguments, or it may hold anything before
        elif reference.path in found:
            continue  # None, mostly, which is guarded as a plain value
        elif reference.path not in referenced and program.slots[slot] is not None:
            program.absent.append(reference)
    program.effects = effects


def used_gradients(program: Program) -> list[GradientReference]:
    """The gradients from before the step that it uses for more than to add to gradients."""
    gradients = [
        (reference, program.storage_of(slot))
        for reference, slot in program.referenced
        if isinstance(reference, GradientReference)
    ]
    if not gradients:
        return []
    place_of = functools.partial(_place, program)
    reached = {storage: 1 << number for number, (_, storage) in enumerate(gradients)}
    """Per storage, the gradients that its value comes from."""
    left = {
        place_of(slot)
        for reference, slot in rebound(program)
        if isinstance(reference, GradientReference)
    }
    sums = left | set(reached)
    used = 0
    for call in program.calls:
        sources = (reached.get(place_of(slot), 0) for slot in call.refs())
        mask = functools.reduce(operator.or_, sources, 0)
        if not mask:
            continue
        changed = {place_of(slot) for slot in (*call.mutates, *call.outputs) if slot is not None}
        if not changed or not changed <= sums:
            used |= mask
        for place in changed:
            reached[place] = reached.get(place, 0) | mask
    for slot in program.outgoing():
        if place_of(slot) not in left:
            used |= reached.get(place_of(slot), 0)
    return [reference for number, (reference, _) in enumerate(gradients) if used >> number & 1]


def _used_up(program: Program) -> set[str]:
    """Paths of the gradients left after the step from which the step has updated their
    parameters.
    """
    assigned = dict(program.assigned())
    parameters = {
        reference.path: {program.storage_of(slot), program.storage_of(assigned.get(slot, slot))}
        for reference, slot in program.referenced
        if isinstance(reference, PlaceReference)
    }
    gradients = [
        (reference, program.storage_of(slot))
        for reference, slot in rebound(program)
        if isinstance(reference, GradientReference)
    ]
    bits = {storage: 1 << number for number, (_, storage) in enumerate(gradients)}
    updated: dict[int, int] = {}
    for reference, storage in gradients:
        for parameter in parameters[reference.parameter.path]:
            updated[parameter] = updated.get(parameter, 0) | bits[storage]
    place_of = functools.partial(_place, program)
    reached: dict[
        int, int
    ] = {}  # per storage, or number as -1 - slot, the gradients that its value comes from
    used = 0
    for index, call in enumerate(program.calls):
        sources = {place: reached.get(place, 0) for place in map(place_of, call.refs())}
        everything = functools.reduce(operator.or_, sources.values(), 0)
        made = [
            slot for slot in call.outputs if slot is not None and _is_made(program, slot, index)
        ]
        changed = [place_of(slot) for slot in (*call.mutates, *made)]
        for place in changed:
            reached[place] = reached.get(place, 0) | everything | bits.get(place, 0)
            used &= ~bits.get(place, 0)  # a gradient that is written to again is another one
        for place in changed:  # fused updates name the gradients that they use up as written to
            if place in updated:
                others = (mask for other, mask in sources.items() if other != place)
                used |= updated[place] & functools.reduce(operator.or_, others, 0)
    return {reference.path for reference, storage in gradients if used & bits[storage]}


def _place(program: Program, slot: int) -> int:
    storage = program.storage_of(slot)
    return storage if storage >= 0 else -1 - slot


def _is_made(program: Program, slot: int, index: int) -> bool:
    """Whether a call makes a value, and no view of one."""
    storage = program.storage_of(slot)
    return storage < 0 or program.storages[storage].creator == index
