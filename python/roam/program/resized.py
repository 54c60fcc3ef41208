"""A program at other values of the symbols from which its sizes follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roam.program.ir import Call, ComputedGuard, Program
from roam.state.sizes import Evaluator, Expression, Size, SizedFloat, expressions_in, replaced


def expressions_of(program: Program) -> Iterator[Expression]:
    """All expressions that a program's sizes follow from."""
    for call in program.calls:
        yield from expressions_in(call.args)
        yield from expressions_in(call.kwargs)
    for meta in program.slots:
        if meta is not None:
            yield from expressions_in((meta.shape, meta.stride, meta.offset))
    for storage in program.storages:
        yield from expressions_in(storage.size_bytes)
    yield from _in_guards(program.computed_guards)
    yield from expressions_in(program.result.leaves)


def _in_guards(guards: Sequence[tuple[ComputedGuard, Any]]) -> Iterator[Expression]:
    for guard, _ in guards:
        for call in guard.calls:
            yield from expressions_in(call.args)
            yield from expressions_in(call.kwargs)


def numbers_at(
    guards: Sequence[tuple[ComputedGuard, Any]], names: Sequence[str], values: Sequence[int]
) -> Callable[[Any], Any]:
    """Gives the numbers in computed guards at values of the symbols."""
    evaluator = Evaluator(_in_guards(guards), names)
    known = evaluator.values(*values)
    return lambda number: known[evaluator.places[number.expression]]


def seen_at(
    program: Program, indices: Sequence[int], names: Sequence[str]
) -> Callable[[Sequence[int]], Program]:
    """Gives a program at values of the symbols, as far as some of its calls see it; all else stays
    what it is.
    """
    calls = {index: program.calls[index] for index in indices}
    slots = {slot for call in calls.values() for slot in (*call.refs(), *call.made())}
    metas = {slot: meta for slot in slots if (meta := program.slots[slot]) is not None}
    storages = {meta.storage: program.storages[meta.storage] for meta in metas.values()}
    layouts = [(meta.shape, meta.stride, meta.offset) for meta in metas.values()]
    sizes = [place.size_bytes for place in storages.values()]
    nests = [*((call.args, call.kwargs) for call in calls.values()), *layouts, *sizes]
    evaluator = Evaluator(expressions_in(nests), names)
    made = evaluator.nests(nests)

    def seen(values: Sequence[int]) -> Program:
        found = iter(made(evaluator.values(*values)))
        now = replace(
            program,
            calls=list(program.calls),
            slots=list(program.slots),
            storages=list(program.storages),
        )
        for index, call in calls.items():
            args, kwargs = next(found)
            now.calls[index] = replace(call, args=args, kwargs=kwargs)
        for slot, meta in metas.items():
            shape, stride, offset = next(found)
            now.slots[slot] = replace(meta, shape=shape, stride=stride, offset=offset)
        for place, storage in storages.items():
            now.storages[place] = replace(storage, size_bytes=next(found))
        return now

    return seen


def at(program: Program, values: Mapping[str, int], *, keeps: bool = False) -> Program:
    """The program at values of the symbols.

    Args:
        keeps: whether its numbers still have their expressions.
    """
    evaluator = Evaluator(expressions_of(program), values)
    known = evaluator.values(*values.values())

    def new(number: Any) -> Any:
        value = known[evaluator.places[number.expression]]
        if not keeps:
            return value
        kind: Any = SizedFloat if type(number) is SizedFloat else Size
        return kind(value, number.expression)

    return replaced_in(program, new)


def over(program: Program, corners: Sequence[Mapping[str, int]]) -> Program:
    """The program at the corner where it has the most memory, with storages that are as large as at
    any corner. Its numbers still have their expressions.
    """
    storages = [place for place in program.storages if type(place.size_bytes) is Size]
    evaluator = Evaluator(
        (expression for place in storages for expression in expressions_in(place.size_bytes)),
        corners[0],
    )
    known = [evaluator.values(*corner.values()) for corner in corners]
    largest = max(range(len(corners)), key=lambda number: sum(known[number]))
    made = at(program, corners[largest], keeps=True)
    if len(corners) == 1:
        return made
    most = list(map(max, zip(*known, strict=True)))
    return replace(
        made,
        storages=[
            replace(
                place,
                size_bytes=Size(
                    most[evaluator.places[place.size_bytes.expression]],
                    place.size_bytes.expression,
                ),
            )
            if type(place.size_bytes) is Size
            else place
            for place in made.storages
        ],
    )


def replaced_in(program: Program, new: Callable[[Any], Any]) -> Program:
    """A program with `new` of each number that follows from symbols."""
    calls, slots, storages = list(program.calls), list(program.slots), list(program.storages)
    calls = [_call(call, new) for call in calls]
    for place, meta in enumerate(slots):
        if meta is None:
            continue
        layout = meta.shape, meta.stride, meta.offset
        if (found := replaced(layout, new)) is not layout:
            shape, stride, offset = found
            slots[place] = replace(meta, shape=shape, stride=stride, offset=offset)
    for place, storage in enumerate(storages):
        if type(storage.size_bytes) is Size:
            storages[place] = replace(storage, size_bytes=new(storage.size_bytes))
    return replace(
        program,
        calls=calls,
        slots=slots,
        storages=storages,
        computed_guards=guards_with(program.computed_guards, new),
        result=replace(program.result, leaves=replaced(program.result.leaves, new)),
    )


def guards_with(
    guards: Sequence[tuple[ComputedGuard, Any]], new: Callable[[Any], Any]
) -> list[tuple[ComputedGuard, Any]]:
    """Computed guards with `new` of each number that follows from symbols."""
    return [
        (replace(guard, calls=[_call(call, new) for call in guard.calls]), answer)
        for guard, answer in guards
    ]


def _call(call: Call, new: Callable[[Any], Any]) -> Call:
    args, kwargs = replaced(call.args, new), replaced(call.kwargs, new)
    if args is call.args and kwargs is call.kwargs:
        return call
    return replace(call, args=args, kwargs=kwargs)
