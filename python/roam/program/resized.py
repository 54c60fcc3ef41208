"""A program at other values of the symbols from which its sizes follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roam.program.ir import Call, ComputedGuard, Program, TensorMeta, substitute
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


def distinct(program: Program, calls: Iterable[int]) -> list[int]:
    """Of these calls, the first of each kind: their operators, arguments and tensors are the same
    at all sizes, but for which tensors they are.
    """
    leaving, kinds = program.leaving(), dict[str, int]()
    for index in calls:
        call, slots, storages = program.calls[index], dict[int, int](), dict[int, int]()
        tensors: list[Any] = []
        for slot in (*call.refs(), *call.outputs):
            meta = None if slot is None else program.slots[slot]
            if slot is None or meta is None or slot in slots:
                continue
            slots[slot] = len(slots)
            place = program.storages[meta.storage]
            tensors += (
                slot in call.outputs,
                replaced((meta.shape, meta.stride, meta.offset, place.size_bytes), _text),
                (meta.dtype, meta.device, meta.is_conj, meta.is_neg),
                storages.setdefault(meta.storage, len(storages)),
                (place.creator < 0, place.creator == index, meta.storage in leaving),
            )
        arguments = substitute((call.args, call.kwargs), lambda ref: f"slot {slots.get(ref.slot)}")  # noqa: B023 - it is called here
        kinds.setdefault(repr((call.target, replaced(arguments, _text), tensors)), index)
    return list(kinds.values())


def _text(number: Any) -> str:
    return f"{type(number).__name__} {number.expression.text()}"


def calls_at(
    program: Program, calls: Sequence[int], names: Iterable[str]
) -> Callable[[Sequence[int]], Program]:
    """Gives a program in which these calls and their tensors are at values of the symbols of these
    names, and all others as they are.
    """
    slots = {
        slot
        for index in calls
        for slot in (*program.calls[index].refs(), *program.calls[index].outputs)
        if slot is not None and program.slots[slot] is not None
    }
    sized = {place for slot in slots if (place := program.storage_of(slot)) >= 0}
    only = [program.calls[index] for index in calls]
    evaluator = Evaluator(
        expressions_in(
            [
                [(call.args, call.kwargs) for call in only],
                [(one.shape, one.stride, one.offset) for slot in slots if (one := program.slots[slot])],
                [program.storages[place].size_bytes for place in sized],
            ]
        ),
        names,
    )  # fmt: skip

    def at_values(values: Sequence[int]) -> Program:
        known = evaluator.values(*values)

        def new(number: Any) -> Any:
            return known[evaluator.places[number.expression]]

        there = replace(
            program,
            calls=list(program.calls),
            slots=list(program.slots),
            storages=list(program.storages),
        )
        for index, call in zip(calls, only, strict=True):
            there.calls[index] = _call(call, new)
        for slot in slots:
            there.slots[slot] = _meta(program.slots[slot], new)
        for place in sized:
            size_bytes = replaced(program.storages[place].size_bytes, new)
            there.storages[place] = replace(program.storages[place], size_bytes=size_bytes)
        return there

    return at_values


def _meta(meta: TensorMeta | None, new: Callable[[Any], Any]) -> TensorMeta | None:
    if meta is None:
        return None
    layout = meta.shape, meta.stride, meta.offset
    if (found := replaced(layout, new)) is layout:
        return meta
    shape, stride, offset = found
    return replace(meta, shape=shape, stride=stride, offset=offset)


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
    slots = [_meta(meta, new) for meta in slots]
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
