"""Compares the programs that two traces recorded."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from itertools import combinations_with_replacement, zip_longest
from operator import attrgetter
from typing import Any

import torch

from roam.program.bits import differ
from roam.program.effects import Assemble, Rebind, rebound
from roam.program.ir import Call, ComputedGuard, Joined, Program, Ref, substitute
from roam.state.equality import same
from roam.state.nests import alike
from roam.state.references import ArgumentReference
from roam.state.sizes import Size, SizedFloat, plain_number, replaced
from roam.state.wrappers import Form
from roam.torch_compat.private import OpOverload, schema_of

aten = torch.ops.aten

_besides_arguments = attrgetter(
    *(item.name for item in fields(Call) if item.compare and item.name not in ("args", "kwargs"))
)
_MOST_SIZES = 4
"""How many sizes may change at once. With more of them, almost any number would seem to follow from
the sizes.
"""


def difference(first: Program, second: Program) -> str | None:
    """None if two traces are the same program, else the first thing that differs, for the user
    to read.
    """
    for one, other in zip(first.calls, second.calls, strict=False):
        if one != other and not _are_resized([one], [other], set()):  # equality knows no NaN
            return f"{one.name} at {one.source} became {other.name} at {other.source}"
    if len(first.calls) != len(second.calls):
        longer = max(first.calls, second.calls, key=len)
        call = longer[min(len(first.calls), len(second.calls))]
        return f"{call.name} at {call.source} ran in one trace and not in the other"
    for what, one_value, other_value in (
        ("tensors", first.slots, second.slots),
        ("storages", _blocks(first), _blocks(second)),
        ("references", _paths(first.referenced), _paths(second.referenced)),
        ("layouts over devices", _layouts(first), _layouts(second)),
        ("histories", _histories(first), _histories(second)),
        ("results' structures", first.result.spec, second.result.spec),
        ("lists that grow", _grows(first), _grows(second)),
    ):
        if one_value != other_value:
            return f"the {what} differ"
    if (unlike := _other_effect(first, second, set())) is not None:
        return unlike
    if not _is_resized(_leaves(first), _leaves(second), set()):
        return "the results differ"
    if not _same_constants(first.constants, second.constants):
        return "a tensor written out in the step's code has other values"
    return None


def _grows(program: Program) -> list[str]:
    return [path for path, _ in program.result.growing]


def is_resized(known: Program, program: Program) -> bool:
    """Whether two programs are the same except for the sizes of arguments: the same calls on the
    same slots, with the same values.

    A whole number may differ only if it follows from the sizes of arguments that changed, or is a
    size of a tensor that an earlier call made. Two traces have shown for the first program that
    nothing unseen decides what the step does; so one trace is enough for the second program.
    """
    sizes = _changed_sizes(known, program)
    return (
        known.unsettled is program.unsettled is None
        and _calls_are_resized(known, program, sizes)
        and _kinds(known) == _kinds(program)
        and [storage.creator for storage in known.storages] == [storage.creator for storage in program.storages]
        and known.entering == program.entering
        and _paths(known.referenced) == _paths(program.referenced)
        and _grows(known) == _grows(program)
        and _layouts_are_resized(known, program)
        and _histories(known) == _histories(program)
        and known.result.spec == program.result.spec
        and _is_resized(_leaves(known), _leaves(program), sizes)
        and _same_values(known.plain_before, program.plain_before)
        and _same_decisions(known, program)
        and _same_guards(known, program, sizes)
        and _same_constants(known.constants, program.constants)
        and known.split == program.split
        and _other_effect(known, program, sizes) is None
    )  # fmt: skip


def has_same_structure(one: Program, other: Program) -> bool:
    """Whether programs differ only in sizes and in values that calls are given: the same operators
    on the same slots in the same storages, of the same dtypes, with the same references.
    """
    return (
        len(one.calls) == len(other.calls)
        and all(map(_is_alike, one.calls, other.calls))
        and _kinds(one) == _kinds(other)
        and [storage.creator for storage in one.storages]
        == [storage.creator for storage in other.storages]
        and one.entering == other.entering
        and one.outgoing() == other.outgoing()
        and _kinds_of_references(one.referenced) == _kinds_of_references(other.referenced)
        and _kinds_of_references(rebound(one)) == _kinds_of_references(rebound(other))
        and [slot for _, slot in one.constants] == [slot for _, slot in other.constants]
    )


def _is_alike(one: Call, other: Call) -> bool:
    return one is other or (
        one.refs() == other.refs() and _besides_arguments(one) == _besides_arguments(other)
    )


def _kinds_of_references(pairs: list[tuple[Any, int]]) -> list[tuple[str, int]]:
    return [(reference.kind, slot) for reference, slot in pairs]


def share(program: Program, earlier: Program) -> None:
    """Replaces calls, tensors and storages by equal ones of an earlier program, so that what is
    known of those can be used again. For example, a step's update is the same for every shape of
    its batch. What is shared is never written to.
    """
    pairs = zip(program.calls, earlier.calls, strict=False)
    for index, (call, known) in enumerate(pairs):
        if call is not known and (call._known_equal is known or _is_equal(call, known)):
            program.calls[index] = call._known_equal = known
    for values, others in ((program.slots, earlier.slots), (program.storages, earlier.storages)):
        shared: list[Any] = [
            known if value == known else value for value, known in zip(values, others, strict=False)
        ]
        values[: len(shared)] = shared


def _is_equal(one: Call, two: Call) -> bool:
    """Whether two calls are the same to the last bit of their numbers."""
    return (
        one.target is two.target
        and one.outputs == two.outputs
        and alike((one.args, one.kwargs), (two.args, two.kwargs), _is_same_leaf)
        and _besides_arguments(one) == _besides_arguments(two)
    )


def _is_same_leaf(one: Any, two: Any) -> bool:
    return one is two or bool(one == two if type(one) is Ref else same(one, two))


def _histories(program: Program) -> list[Any]:
    """How autograd sees the results."""
    return [
        history if isinstance(history, str) else [reference.path for reference in history]
        for history in program.result.histories
    ]


def _other_effect(known: Program, program: Program, sizes: set[tuple[int, int]]) -> str | None:
    """None if programs have the same effects, except that numbers they give may follow from sizes;
    else the first that differ.
    """
    for one, two in zip_longest(known.effects, program.effects):
        if one is None or two is None or type(one) is not type(two):
            return f"the {(one or two).what} differ"
        if not _is_resized(one.key(), two.key(), set()) or not _is_resized(
            one.given, two.given, sizes
        ):
            return one.unlike(two)
    return None


def _changed_sizes(known: Program, program: Program) -> set[tuple[int, int]]:
    """(old, new) for each size of an argument that has changed, and for products of up to three of
    them.
    """
    changed = set()
    for (_, one), (reference, two) in zip(known.referenced, program.referenced, strict=False):
        old, new = known.slots[one], program.slots[two]
        if isinstance(reference, ArgumentReference) and old is not None and new is not None:
            changed |= {
                pair for pair in zip(old.shape, new.shape, strict=False) if pair[0] != pair[1]
            }
    products = {
        (math.prod(old for old, _ in chosen), math.prod(new for _, new in chosen))
        for count in (1, 2, 3)
        for chosen in combinations_with_replacement(sorted(changed)[:_MOST_SIZES], count)
    }
    return {(old, new) for old, new in products if old and old != new}


def _calls_are_resized(known: Program, program: Program, sizes: set[tuple[int, int]]) -> bool:
    """Whether the calls are the same, each with numbers that follow from the sizes of arguments and
    of what the calls before it made.
    """
    if len(known.calls) != len(program.calls) or len(known.slots) != len(program.slots):
        return False
    seen: set[tuple[object, object]] = set()
    made: set[tuple[int, int]] = set()
    for one, two in zip(known.calls, program.calls, strict=True):
        if one is not two and not _are_resized([one], [two], sizes, made):
            return False
        for slot in one.outputs:
            old, new = (None, None) if slot is None else (known.slots[slot], program.slots[slot])
            if (
                old is not None
                and new is not None
                and old.shape != new.shape
                and (old.shape, new.shape) not in seen
            ):
                seen.add((old.shape, new.shape))
                made |= _resized(old.shape, new.shape)
    return True


def _resized(old: Sequence[int], new: Sequence[int]) -> set[tuple[int, int]]:
    """(old, new) for each size of a tensor that has changed, and for products of neighbouring
    sizes.
    """
    if len(old) != len(new):
        return set()
    ends = range(1, len(old) + 1)
    runs = [
        (math.prod(old[start:end]), math.prod(new[start:end]))
        for end in ends
        for start in range(end)
    ]
    return {(before, after) for before, after in runs if before != after}


def _are_resized(
    known: Sequence[Call],
    calls: Sequence[Call],
    sizes: set[tuple[int, int]],
    made: Collection[tuple[int, int]] = (),
) -> bool:
    return len(known) == len(calls) and all(
        one is two
        or _besides_arguments(one) == _besides_arguments(two)
        and _is_resized(one.args, two.args, sizes, made)
        and _is_resized(one.kwargs, two.kwargs, sizes, made)
        for one, two in zip(known, calls, strict=True)
    )


def _is_resized(
    known: Any, value: Any, sizes: set[tuple[int, int]], made: Collection[tuple[int, int]] = ()
) -> bool:
    """Whether two nests are equal except for sizes. A number may be a multiple of a pair in
    `sizes`, but has to be exactly a pair in `made`.
    """

    def are_alike(old: Any, new: Any) -> bool:
        kind = type(old)
        if kind is Ref or kind is not type(new):
            return kind is type(new) and bool(old == new)
        return same(old, new) or (kind is int and ((old, new) in made or _follows(old, new, sizes)))

    return alike(known, value, are_alike, (tuple, list, torch.Size, dict, OrderedDict))


def _follows(old: int, new: int, sizes: set[tuple[int, int]]) -> bool:
    """Whether a number is the same multiple of a changed size as before, or differs by one from
    such a multiple, as a last index does.
    """
    return any(
        (old - beside) % size == 0 and (old - beside) // size * resized == new - beside
        for beside in (0, -1, 1)
        for size, resized in sizes
    )


def _kinds(program: Program) -> list[Any]:
    """Everything about each slot except its sizes."""
    return [
        None if meta is None else (len(meta.shape), meta.dtype, meta.device, meta.storage)
        for meta in program.slots
    ]


def _same_values(known: list[tuple[Any, Any]], others: list[tuple[Any, Any]]) -> bool:
    return len(known) == len(others) and all(
        one.path == two.path and _is_resized(old, new, set())
        for (one, old), (two, new) in zip(known, others, strict=True)
    )


def _same_decisions(known: Program, program: Program) -> bool:
    return len(known.decisions) == len(program.decisions) and all(
        one.path == two.path and old == new
        for (one, *old), (two, *new) in zip(known.decisions, program.decisions, strict=True)
    )


def _same_guards(known: Program, program: Program, sizes: set[tuple[int, int]]) -> bool:
    return len(known.computed_guards) == len(program.computed_guards) and all(
        same(old, new) and _is_same_guard(_numbered(one), _numbered(two), sizes)
        for (one, old), (two, new) in zip(
            known.computed_guards, program.computed_guards, strict=True
        )
    )


def _is_same_guard(one: ComputedGuard, two: ComputedGuard, sizes: set[tuple[int, int]]) -> bool:
    return (
        (one.inputs, one.changed, one.slot) == (two.inputs, two.changed, two.slot)
        and _are_resized(one.calls, two.calls, sizes)
        and _same_constants(one.constants, two.constants)
        and [[reference.path for reference in references] for references in one.uses]
        == [[reference.path for reference in references] for references in two.uses]
    )


def _numbered(guard: ComputedGuard) -> ComputedGuard:
    """A guard with its slots numbered as they come. The recording also numbers what was there
    before the step, gradients included.
    """
    numbers: dict[int, int] = {}

    def number(slot: int) -> int:
        return numbers.setdefault(slot, len(numbers))

    def renamed(value: Any) -> Any:
        return substitute(value, lambda ref: Ref(number(ref.slot)))

    calls = [
        replace(
            call,
            args=renamed(call.args),
            kwargs=renamed(call.kwargs),
            outputs=tuple(None if slot is None else number(slot) for slot in call.outputs),
            mutates=tuple(map(number, call.mutates)),
        )
        for call in guard.calls
    ]
    return replace(
        guard,
        calls=calls,
        inputs=list(map(number, guard.inputs)),
        changed=frozenset(map(number, guard.changed)),
        constants=[(tensor, number(slot)) for tensor, slot in guard.constants],
        slot=number(guard.slot),
    )


def asks_the_same(first: Program, second: Program) -> bool:
    """Whether two programs hold for the same decisions on numbers, and the same guards."""
    return _same_decisions(first, second) and _same_guards(first, second, set())


def agrees(live: Program, plain: Program) -> bool:
    """Whether a trace with live numbers runs the kernels of one with plain numbers, on the same
    values except for those.

    Code that asks for the very type of a number (`type(x) is float`) may take another way with a
    live one.
    """
    kernels, others = (
        [call for call in program.calls if isinstance(call.target, OpOverload)]
        for program in (live, plain)
    )
    literals, place = set(), 0
    fits = functools.partial(_fits, live)
    for other in others:
        end = _tensor_of_numbers(live, kernels, place)
        if end is not None and (slot := _literal(plain, other)) is not None:
            literals.add(slot)
            place = end
            continue
        if place >= len(kernels):
            return False
        one = kernels[place]
        place += 1
        # PyTorch leaves out numbers that are the defaults.
        left_out = schema_of(other.target).arguments[len(other.args) : len(one.args)]
        plain_args = (*other.args, *(argument.default_value for argument in left_out))
        if one.target is not other.target or not alike(
            (one.args, one.kwargs), (plain_args, other.kwargs), fits
        ):
            return False
    constants = [constant for constant in plain.constants if constant[1] not in literals]
    return (
        place == len(kernels)
        and alike(list(live.result.leaves), list(plain.result.leaves), fits)
        and _same_constants(live.constants, constants)
    )


def _leaves(program: Program) -> list[Any]:
    """The leaves of a program's result, sizes as plain numbers."""
    found: list[Any] = replaced(program.result.leaves, plain_number)
    return found


def _tensor_of_numbers(program: Program, kernels: list[Call], place: int) -> int | None:
    """Where the calls end that stand for `torch.tensor(x)` of a live number, or of lists of numbers
    of which some are live; None if no such calls begin at a place.
    """
    end, made = place, list[int | None]()
    while end < len(kernels) and kernels[end].target is aten.full.default:
        made += kernels[end].outputs
        end += 1
        is_stacked = end < len(kernels) and kernels[end].target is aten.stack.default
        if is_stacked and [part.slot for part in kernels[end].args[0]] == made:
            # The last call is the view that gives it its shape.
            return end + 2 if _asks_for_live(program, kernels[place:end]) else None
    return place + 1 if made and _asks_for_live(program, kernels[place : place + 1]) else None


def _asks_for_live(program: Program, calls: list[Call]) -> bool:
    return any(program.slots[slot] is None for call in calls for slot in call.refs())


def _literal(program: Program, call: Call) -> int | None:
    """The slot of the constant, if a call is `torch.tensor(x)` of plain numbers; None otherwise."""
    slots = {slot for _, slot in program.constants}
    return next(iter(slots & set(call.refs())), None) if call.target is aten.clone.default else None


def _fits(program: Program, value: Any, plain: Any) -> bool:
    if isinstance(value, Ref):
        return isinstance(plain, Ref) or (
            program.slots[value.slot] is None
            and (type(plain) is int or isinstance(plain, float))  # one of NumPy's is a float too
        )
    if type(value) is Size or type(value) is SizedFloat:
        return type(plain) is type(value) and plain.expression is value.expression
    return same(value, plain)


def _same_constants(
    first: list[tuple[torch.Tensor, int]], second: list[tuple[torch.Tensor, int]]
) -> bool:
    return len(first) == len(second) and all(
        one.dtype == other.dtype and not differ([one], [other])
        for (one, _), (other, _) in zip(first, second, strict=True)
    )


def _paths(bindings: list[tuple[Any, int]]) -> list[tuple[str, int]]:
    return [(reference.path, slot) for reference, slot in bindings]


def _layouts(program: Program) -> tuple[Any, Any]:
    """Layouts over devices, and forms of wrappers, of what is there before and of what is left."""
    left: list[tuple[str | int, Joined]] = [
        *program.result.joined.items(),
        *((one.reference.path, one.joined) for one in program.of(Rebind) if one.joined is not None),
        *(
            (one.reference.path, one.joined)
            for one in program.of(Assemble)
            if one.joined is not None
        ),
    ]
    return program.given_layouts, {
        place: (one.layout, None if one.reference is None else one.reference.path)
        for place, one in left
    }


def _layouts_are_resized(known: Program, program: Program) -> bool:
    """Whether layouts over devices differ only in the sizes of the whole tensors."""
    return all(
        one.keys() == two.keys()
        and all(_over_mesh(one[place]) == _over_mesh(two[place]) for place in one)
        for one, two in zip(_layouts(known), _layouts(program), strict=True)
    )


def _over_mesh(layout: Any) -> Any:
    if isinstance(layout, tuple):
        return _over_mesh(layout[0]), layout[1]
    return layout if isinstance(layout, Form) else (layout.mesh, layout.placements)


def _blocks(program: Program) -> list[tuple[int, int]]:
    """Storages without their names, which count the calls that were recorded before."""
    return [(storage.size_bytes, storage.creator) for storage in program.storages]
