"""Captures that hold for a range of sizes: which sizes are taken for symbols, and for which sizes
they are planned.

A size is taken for a symbol once two calls differ in it. The capture that follows from symbols has
to be, at the sizes of the earlier capture, the very program of that one.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from roam.errors import CaptureError
from roam.kernels.calls import Placed, placing
from roam.program.diff import difference
from roam.program.effects import Rebind
from roam.program.ir import Program
from roam.program.passes import with_state, with_used_state
from roam.program.resized import at, calls_at, distinct, over
from roam.runtime.log import logger, replans
from roam.runtime.strategy import Choice, Effort, Options
from roam.state.argument_sizes import (
    ELEMENTS,
    OFFSET,
    SHIFT,
    ArgumentSizes,
    Change,
    is_within,
    may_have_symbols,
    parted,
)
from roam.state.references import ArgumentReference
from roam.state.sizes import (
    Evaluator,
    Expression,
    OneLength,
    Symbols,
    expressions_in,
    prime_from,
)
from roam.state.step_call import StepCall
from roam.tracing.fake_kernels.sized import SizedKernels
from roam.tracing.step import CapturedStep, Variant

_RANGE = 8
"""A capture is to hold for sizes up to this multiple of the largest that has been seen."""
_LEAST = (Symbols.LEAST, 4, 8, 32)
"""Sizes from which on plans hold for all larger ones. Parts of small sizes may be the whole, and
attention is computed piece by piece from 32 queries on."""
_TRIES = 3
"""How often a capture for many sizes is tried. Where a condition on a size decides, it may be that
none of the earlier captures is on its side."""


def given_sizes(sizes: Any) -> dict[str, dict[Any, int]]:
    """The largest size of each dimension of each argument that is named, and the most elements.

    Raises:
        ValueError: it is no mapping of names to mappings of dimensions to sizes.
    """
    known = {}
    for name, dims in sizes.items() if isinstance(sizes, Mapping) else (("", None),):
        if (
            not isinstance(dims, Mapping)
            or not all(
                (dim == ELEMENTS or (type(dim) is int and dim >= 0))
                and type(most) is int
                and most >= 2
                for dim, most in dims.items()
            )
            or (ELEMENTS in dims and len(dims) not in (2, 3))
        ):
            raise ValueError(
                'sizes must be True, False or a mapping such as {"input_ids": {1: 512}}, which names an argument, '
                'its dimensions, and the largest size of each (2 or more), and beside one or two of them perhaps "elements", not '
                f"{sizes!r}"
            )
        known[str(name)] = dict(dims)
    return known


class Ranges:
    """What one compiled step knows of captures for ranges of sizes.

    Args:
        options: of the step.
        train_step: the user's function.
    """

    def __init__(self, options: Options, train_step: Callable[..., Any]) -> None:
        self._is_possible = (
            options.streams == 1
            and not options.cuda_graph
            and options.offload is None
            and options.kernels == "eager"
            and options.sizes is not False
        )
        self._given = {} if isinstance(options.sizes, bool) else options.sizes
        self._parameters = _parameters(train_step) if self._given else {}
        self.promises = bool(self._given) and self._is_possible
        """Whether a plan is to hold for the sizes that the user has said, or none is made."""
        self._has_limit = options.memory is not None
        self._has_bytes = options.memory is not None and options.memory.share is None
        self._of_value = set[str]()
        """Paths of whole numbers among the arguments that cannot follow from symbols."""
        self._tries: Counter[tuple[Any, ...]] = Counter()
        """How often no such capture has been found, by the dimensions that follow from symbols."""

    def capture(
        self,
        capture: Callable[..., CapturedStep],
        known: Sequence[CapturedStep],
        call: StepCall,
        is_fixed: Callable[[str], bool],
        *,
        varies: bool = False,
    ) -> CapturedStep | None:
        """A capture of a call that holds for other sizes too, if an earlier one differs from it in
        sizes alone. If none is found, a capture of the call alone, or None.

        Args:
            capture: captures the call; takes `sized`.
            known: the captures that are kept, the most recent first.
            is_fixed: whether the step has been found to need the value of the whole number at a
                path of the arguments, which has not been the same in all calls.
            varies: whether each call so far had another size. Then larger ones are likely to come.
        """
        if not self._is_possible:
            return None
        if self._given and not known:
            step, reason = self.as_given(capture, call)
            if reason:
                logger.warning("one plan does not hold for the sizes that sizes= says: %s", reason)
            return step

        def needs_value(path: str) -> bool:
            return is_fixed(path) and self.may_follow(path)

        for before in known:
            if before.state_failure(call) is not None:
                continue
            arguments = before.arguments
            numbers = arguments.numbers(call, needs_value)
            found = self._tried(capture, before, known, call, numbers, varies=varies)
            if found is None:
                continue
            more = arguments.numbers(call, needs_value)
            if more != numbers:  # as has just been found
                found = self._tried(capture, before, known, call, more, varies=varies) or found
            return found
        return None

    def _tried(
        self,
        capture: Callable[..., CapturedStep],
        before: CapturedStep,
        known: Sequence[CapturedStep],
        call: StepCall,
        numbers: Sequence[int],
        *,
        varies: bool,
    ) -> CapturedStep | None:
        """A capture of a call that holds for other sizes than those of an earlier one. If none is
        found, a capture of the call alone, or None.

        Args:
            numbers: the places of whole numbers among the arguments that are to follow from
                symbols.
        """
        changes = before.arguments.changes(call, numbers)
        dims = _dims(before, changes)
        key, found = _key(dims), None
        if not dims or self._tries[key] >= _TRIES:
            return None
        try:
            found = self._captured(capture, before, known, changes, dims, call, varies=varies)
            if found.arguments.sizes is not None:
                return found
            reason = "it goes another way if sizes may change"
        except CaptureError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - whatever meets symbols; a plain capture follows
            reason = str(error) if isinstance(error, OneLength) else repr(error)
            self._tries[key] = _TRIES
        self._tries[key] += 1
        self._of_value.update(map(before.arguments.path_of, numbers))
        replans.info("one plan does not hold for several sizes of this step: %s", reason)
        return found

    def may_follow(self, path: str) -> bool:
        """Whether a whole number among the arguments may follow from a symbol."""
        return self._is_possible and path not in self._of_value

    def has_failed(self, step: CapturedStep) -> None:
        """Notes that no plan for many sizes was found for a capture that holds for them."""
        assert step.arguments.sizes is not None, "it holds for a range"
        self._tries[_key(step.arguments.sizes.dims)] += 1

    def as_given(
        self, capture: Callable[..., CapturedStep], call: StepCall
    ) -> tuple[CapturedStep, str]:
        """A capture for the sizes that the user has said, and an empty text. If none holds for all
        of them, one for those of the call alone, and why.

        Raises:
            CaptureError: an argument is not there, or the call has other sizes (``argument``); or
                the step cannot be captured.
        """
        before = capture()
        leaves = call.taken(before.arguments.taker).leaves
        changes = dict[int, Change]()
        dims: dict[int, dict[int, _Seen]] = {}
        bounds: dict[int, int] = {}
        for name, given in self._given.items():
            sizes = {dim: most for dim, most in given.items() if dim != ELEMENTS}
            places = before.arguments.places_named(name) or before.arguments.places_named(
                f"args[{self._parameters.get(name)}]"
            )
            if not places:
                raise CaptureError(
                    f"sizes= names {name!r}, and the step is called with no tensor of that name; it is called with {before.arguments}",
                    code="argument",
                )
            for place in places:
                shape = leaves[place].shape
                changes |= before.arguments.sharing(place, leaves)
                dims.setdefault(place, {})
                if ELEMENTS in given:
                    bounds[place] = given[ELEMENTS]
                    if leaves[place].numel() > bounds[place]:
                        raise CaptureError(
                            f"sizes= says that {name!r} has up to {bounds[place]} elements, and its shape is {tuple(shape)}",
                            code="argument",
                        )
                for dim, most in sizes.items():
                    if dim >= len(shape) or not Symbols.LEAST <= shape[dim] <= most:
                        raise CaptureError(
                            f"sizes= says that dimension {dim} of {name!r} has 2 to {most} elements, and its shape is {tuple(shape)}",
                            code="argument",
                        )
                    dims[place][dim] = _Seen(None, most, shape[dim])
        known = {
            (dim, size.now): size for sizes_of in dims.values() for dim, size in sizes_of.items()
        }
        for place, leaf in enumerate(leaves):
            # A mask and labels are as long as the text.
            if place in dims or not isinstance(leaf, torch.Tensor) or not may_have_symbols(leaf):
                continue
            alike = {dim: known[dim, size] for dim, size in enumerate(leaf.shape) if (dim, size) in known}  # fmt: skip
            if alike:
                changes |= before.arguments.sharing(place, leaves)
                dims[place] = alike
        try:
            found = self._captured(capture, before, [before], changes, dims, call, bounds)
            if found.arguments.sizes is not None:
                return found, ""
            reason = "it goes another way if sizes may change"
        except (OneLength, CaptureError) as error:
            reason = str(error)
        return before, reason

    def _captured(
        self,
        capture: Callable[..., CapturedStep],
        before: CapturedStep,
        known: Sequence[CapturedStep],
        changes: Mapping[int, Change],
        dims: Mapping[int, Mapping[int, _Seen]],
        call: StepCall,
        bounds: Mapping[int, int] | None = None,
        *,
        varies: bool = False,
    ) -> CapturedStep:
        """A capture for many sizes that is, at those of an ordinary capture, the same step; or the
        ordinary capture of this call.

        Args:
            bounds: the most elements of some arguments; None if the user has said no sizes.
        """
        is_given = bounds is not None
        leaves = call.taken(before.arguments.taker).leaves
        of = _named(dims)
        values: dict[str, int] = {}
        seen, earlier, most, floors = dict(values), dict(values), dict(values), dict(values)
        for place, names in of.items():
            for dim, (name, more) in names.items():
                if name in values:
                    continue
                size = dims[place][dim]
                values[name] = size.now - more
                earlier[name] = before.arguments.size(place, dim) - more
                seen[name] = size.before - more if is_given else max(earlier[name], values[name])
                most[name] = seen[name] if is_given else _RANGE * seen[name]
                if (table := _table(before, size.before)) is not None and not is_given:
                    most[name] = max(seen[name], min(most[name], table - more))
                if dim == OFFSET:
                    floors[name] = SHIFT
                    most[name] = changes[place].now.size_bytes // changes[place].itemsize + size.now
        symbols = Symbols(values, most, floors)
        of_place = {
            place: {
                dim: symbols.symbols[name].add(symbols.constant(more))
                for dim, (name, more) in of.get(place, {}).items()
            }
            for place in changes
        }
        layouts = {
            place: change.layout(symbols, of_place[place]) for place, change in changes.items()
        }
        sized = SizedKernels(
            symbols,
            {
                id(leaves[place]): (leaves[place], layout)
                for place, layout in layouts.items()
                if type(leaves[place]) is not int
            },
            {place: sizes[0] for place, sizes in of_place.items() if type(leaves[place]) is int},
        )
        try:
            step = capture(sized=sized)
        except CaptureError:
            if symbols.refused is None:
                raise
        if symbols.refused is not None:
            raise symbols.refused
        if is_given and any(symbols.most[name] < size for name, size in seen.items()):
            raise OneLength("a kernel goes another way for the largest of these sizes")
        sizes = ArgumentSizes(symbols, of_place, layouts)
        if not any(_is_same_step(step, one, sizes) for one in known):
            # The earlier ones may be on another side of a condition.
            here = capture()
            if not _is_same_step(step, here, sizes):
                return here
        step.arguments.sizes = sizes
        if any(_writes_to_parts(one, sizes) for one in (step.first, step.steady)):
            raise OneLength("it writes to an argument that is a part of another tensor")
        if bounds is not None:
            sizes.corners = _corners(sizes, tuple(seen.values()), bounds)
            return self.enlarged(step, sizes.corners[0])
        before_now = tuple(earlier.values())
        if sizes.admits(before_now):
            sizes.corners = (sizes.anywhere(before_now),)
        varies = varies and all(len(places) == 1 for places in sizes.beside())
        return self.enlarged(step, tuple(values.values()), has_more=varies)

    def enlarged(
        self, step: CapturedStep, values: Sequence[int], *, has_more: bool = False
    ) -> CapturedStep:
        """The capture at sizes for which it is to be planned: those that are known, and these with
        room for larger ones.

        Args:
            has_more: whether larger ones are likely to come even if these are not the largest so
                far. On the CPU there is room for them then.
        """
        sizes = step.arguments.sizes
        assert sizes is not None, "it holds for a range"
        variant = step.steady or step.first
        assert variant is not None, "one of them is there"
        known, values = sizes.corners, sizes.anywhere(values)
        is_exact = self._has_limit or bool(self._given)
        is_cpu = variant.device.type == "cpu"
        if not any(is_within(values, corner) for corner in known) or (
            has_more and is_cpu and not is_exact
        ):
            new = values if is_exact else with_room(sizes, values, is_cpu=is_cpu)
            return _planned_for(step, new, has_room=not is_exact)
        return _planned_for(step)

    def larger(
        self, step: CapturedStep, values: tuple[int, ...]
    ) -> Iterator[tuple[CapturedStep, Effort]]:
        """A capture at larger sizes for which to plan it, these among them, and what is to be done
        for a plan: first with room for others, so that not every new largest size takes another
        plan. Within a limit there may be no plan with room; the last are these sizes alone.
        """
        if not self._has_limit:
            yield self.enlarged(step, values), "all"
            return
        sizes, variant = step.arguments.sizes, step.steady or step.first
        assert sizes is not None, "it holds for a range"
        assert variant is not None, "one of them is there"
        values = sizes.anywhere(values)
        if self._has_bytes and variant.device.type == "cpu":
            room = with_room(sizes, values, is_cpu=True)
            yield _planned_for(step, room, has_room=True), "order"
        room = with_room(sizes, values, is_cpu=False)
        if room != values and not any(is_within(one, room) for one in sizes.refused):
            yield _planned_for(step, room, has_room=True), "runs"
            sizes.refused.add(room)  # since another is asked for
        yield _planned_for(step, values), "all"


def with_room(sizes: ArgumentSizes, values: tuple[int, ...], *, is_cpu: bool) -> tuple[int, ...]:
    """Larger sizes, where these are the largest so far, and of no other size by chance, so that
    what is equal there is equal everywhere.

    On the CPU, memory that nobody touches costs nothing. So there a size gets room for twice as
    much, and, where that is not enough, for four times as much, which is most of a range. Sizes
    of one argument get room for twice its elements together.
    """
    before = sizes.largest() or (0,) * len(values)
    are_sizes = [place[1] != OFFSET for place in sizes.first_places]
    grown = list(map(operator.gt, values, before))
    grown = list(map(operator.and_, are_sizes, grown if any(grown) else are_sizes))
    room, beside = 2.0 if is_cpu else 1.25, sizes.beside()
    wanted, most = list[int](), zip(values, before, beside, strict=True)
    # The next call may have the largest of each size that shares no argument with another.
    apart = [max(value, size) if len(names) == 1 else value for value, size, names in most]
    for value, names in zip(apart, beside, strict=True):
        shares = max(sum(grown[place] for place in names), 1)
        is_alone = len(names) == 1 and is_cpu
        by = room ** (1 + sizes.enlarged) if is_alone else room ** (1 / shares)
        wanted.append(int(by * value))
    for larger in (map(prime_from, wanted), wanted):
        found = tuple(
            min(size, limit) if grows else value
            for value, size, grows, limit in zip(
                apart, larger, grown, sizes.symbols.most.values(), strict=True
            )
        )
        if sizes.symbols.hold(found):
            return found
    return values


def limit_to_kernels(sizes: ArgumentSizes, device: torch.device, choices: Sequence[Choice]) -> None:
    """Finds from which sizes on the placed kernels of plans are those that eager PyTorch's results
    may be had by.

    Raises:
        OneLength: there are others within the range.
    """
    largest = sizes.largest()
    points = [
        tuple(map(min, point.values(), largest))
        for point in sizes.symbols.points
        if sizes.symbols.hold(tuple(map(min, point.values(), largest)))
    ]
    alike = [_placed_alike(choice, sizes.symbols.names, device) for choice in choices]
    now = tuple(sizes.captured().values())
    for least in dict.fromkeys(sizes.raised(_LEAST)):
        if not is_within(least, now):
            continue
        corner = tuple(map(min, least, largest))
        tried = [point for point in points if is_within(corner, point)]
        if all(
            hold(point)
            for hold in alike
            for point in dict.fromkeys([corner, *tried, *sizes.corners])
        ):
            sizes.least = least
            return
    raise OneLength("some kernels are chosen by size")


def _planned_for(
    step: CapturedStep, new: tuple[int, ...] | None = None, *, has_room: bool = False
) -> CapturedStep:
    """The capture at the sizes for which it is to be planned: those that are known, and new
    ones.
    """
    arguments = copy(step.arguments)
    assert arguments.sizes is not None, "it holds for a range"
    if new is not None:
        arguments.sizes = arguments.sizes.up_to(new, has_room=has_room)
    first, steady = (
        None if variant is None else at_largest(variant, arguments.sizes)
        for variant in (step.first, step.steady)
    )
    return replace(step, first=first, steady=steady, arguments=arguments)


def at_largest(variant: Variant, sizes: ArgumentSizes) -> Variant:
    """A program at the sizes for which it is to be planned."""
    corners = [dict(zip(sizes.symbols.names, corner, strict=True)) for corner in sizes.corners]
    program = over(variant.program, corners)
    is_one = variant.as_written is variant.program
    as_written = program if is_one else over(variant.as_written, corners)
    return replace(variant, program=program, as_written=as_written)


def _is_same_step(step: CapturedStep, before: CapturedStep, sizes: ArgumentSizes) -> bool:
    """Whether a capture for many sizes has the very programs of an earlier capture, at that one's
    sizes.
    """
    try:
        of_before = {
            name: before.arguments.size(place, dim) - more
            for name, (place, dim, more) in zip(
                sizes.symbols.names, sizes.first_places, strict=True
            )
        }
    except (AttributeError, IndexError):  # other arguments
        return False
    if not sizes.admits(tuple(of_before.values())):
        return False
    pairs = [(step.first, before.first), (step.steady, before.steady)]
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    earlier = before.arguments.sizes
    for one, other in both:
        for mine, its in ((one.as_written, other.as_written), (one.program, other.program)):
            expected = its if earlier is None else at(its, earlier.captured())
            if any(_elsewhere(mine)) or not _is_again(expected, at(mine, of_before)):
                return False
    return bool(both)


def _writes_to_parts(variant: Variant | None, sizes: ArgumentSizes) -> bool:
    """Whether a step writes to an argument that is a part of a tensor. Autograd would follow that
    to other parts, and symbols are not followed there.
    """
    if variant is None:
        return False
    program = variant.as_written
    slots = [
        slot
        for reference, slot in program.referenced
        if isinstance(reference, ArgumentReference) and reference.index in sizes.layouts
    ]
    written, storages = program.written(), list(map(program.storage_of, slots))
    return any(
        storage in written and (storages.count(storage) > 1 or not program.covers(slot))
        for slot, storage in zip(slots, storages, strict=True)
    )


def _table(step: CapturedStep, size: int) -> int | None:
    """How many elements the shortest table has, such as of positions, of which the step takes the
    first so many. Sizes are hardly larger, and a trace for larger ones would be for nothing.
    """
    program = (step.steady or step.first).as_written  # type: ignore[union-attr]
    given = {slot for one, slot in program.referenced if isinstance(one, ArgumentReference)}
    found = []
    for call in program.calls:
        if call.target is torch.ops.aten.slice.Tensor and len(call.args) == 4:
            ref, dim, start, end = call.args
            meta = program.slots[ref.slot]
            is_kept = meta is not None and program.storages[meta.storage].creator < 0
            if is_kept and (start, end) == (0, size) and ref.slot not in given:
                found.append(int(meta.shape[dim]))
    return min(found, default=None)


def _placed_alike(
    choice: Choice, names: Sequence[str], device: torch.device
) -> Callable[[tuple[int, ...]], bool]:
    """Tells whether the kernels that a plan places may be placed in the same way at values of the
    symbols.
    """
    placed = choice.placed
    calls = [index for index, one in enumerate(placed) if one is not None]
    calls = distinct(choice.program, calls)
    there, found = calls_at(choice.program, calls, names), placing(choice.program, device)

    def is_alike(one: Placed | None, other: Placed | None) -> bool:
        return one is not None and other is not None and (
            (one.placement, one.in_place, one.by_rows)
            == (other.placement, other.in_place, other.by_rows)
        )  # fmt: skip

    @functools.cache
    def hold(values: tuple[int, ...]) -> bool:
        program = there(values)
        return all(is_alike(placed[index], found(program, index)) for index in calls)

    return hold


def _corners(
    sizes: ArgumentSizes, most: tuple[int, ...], bounds: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """The largest sizes at which no argument has more elements than its bound."""
    symbols, names = list(sizes.symbols.symbols.values()), sizes.symbols.names
    corners = [sizes.anywhere(most)]
    for place, bound in bounds.items():
        elements = sizes.symbols.strides(sizes.layouts[place].shape)[1]
        count = Evaluator([elements], names).values
        *others, last = sorted({symbols.index(parted(size)[0]) for size in sizes.dims[place].values()})  # fmt: skip
        found: dict[tuple[int, ...], tuple[int, ...]] = {}
        for corner in corners:
            values = list(corner)
            # As the one size grows, the other falls.
            firsts = (
                range(sizes.least[others[0]], corner[others[0]] + 1) if others else (corner[last],)
            )
            for value in firsts:
                values[others[0] if others else last] = value
                while values[last] >= sizes.least[last] and count(*values)[0] > bound:
                    values[last] -= 1
                if values[last] >= sizes.least[last]:
                    rest = [size for at, size in enumerate(values) if at not in others]
                    found[tuple(rest)] = tuple(values)
        corners = list(found.values())
    return tuple(corners)


def _parameters(train_step: Callable[..., Any]) -> dict[str, int]:
    """The names of a function's parameters, each with its place."""
    try:
        names = inspect.signature(train_step).parameters
    except (TypeError, ValueError):  # it has no signature
        return {}
    return {name: place for place, name in enumerate(names)}


class _Seen(NamedTuple):
    """A size of an argument that is to follow from a symbol."""

    earlier: Expression | None
    """What it is in an earlier capture that holds for many sizes; None if it is a number there."""
    before: int
    now: int


def _dims(before: CapturedStep, changes: Mapping[int, Change]) -> dict[int, dict[int, _Seen]]:
    """The dimensions of a call's arguments that are to follow from symbols."""
    sizes, found = before.arguments.sizes, dict[int, dict[int, _Seen]]()
    for place, change in changes.items():
        known: Mapping[int, Expression] = {} if sizes is None else sizes.dims.get(place, {})
        dims = [OFFSET] if OFFSET in known or change.moves() else []
        for dim in (*range(len(change.now.shape)), *dims):
            size = _Seen(known.get(dim), before.arguments.size(place, dim), change.now.size(dim))
            if dim == OFFSET or size.earlier is not None or size.before != size.now:
                found.setdefault(place, {})[dim] = size
    return found


def _named(
    dims: Mapping[int, Mapping[int, _Seen]],
) -> dict[int, dict[int, tuple[str, int]]]:
    """The symbol of each size, and by how much the size is larger. Sizes of one dimension that
    differ by as much as in the earlier capture follow from one symbol.
    """
    names: dict[Any, str] = {}
    first: dict[str, int] = {}
    found: dict[int, dict[int, tuple[str, int]]] = {place: {} for place in dims}
    for size, place, dim in sorted(
        ((size, place, dim) for place, sizes in dims.items() for dim, size in sizes.items()),
        key=lambda one: one[0].now,
    ):
        same: tuple[Any, int] = size.before, size.now
        alike: tuple[Any, int] = dim, size.now - size.before
        if size.earlier is not None:
            symbol, more = parted(size.earlier)
            same = alike = symbol, size.now - more
        name = names.get(same) or names.get(alike) or f"s{len(first)}"
        for key in (same, alike):
            names.setdefault(key, name)
        base = first.setdefault(name, size.now)
        found[place][dim] = name, size.now - base
    return found


def _key(dims: Mapping[int, Iterable[int]]) -> tuple[Any, ...]:
    """Which dimensions of which arguments follow from symbols."""
    return tuple((place, *sorted(found)) for place, found in sorted(dims.items()))


def _elsewhere(program: Program) -> Iterator[Expression]:
    """Expressions where a run at other sizes would not find them, and those of tensors that the
    step leaves behind, of which the next call expects the shape.
    """
    for effect in program.effects:
        yield from expressions_in(effect.given)
    for left in program.of(Rebind):
        if (meta := program.slots[left.slot]) is not None:
            yield from expressions_in(meta.shape)


def _is_again(before: Program, later: Program) -> bool:
    """Whether a program is an earlier one, perhaps with state that the earlier one made, or that
    neither uses.
    """
    if is_same_program(later, before):
        return True
    later = with_used_state(later)
    expected = with_state(with_used_state(before), later)
    return expected is not None and is_same_program(later, expected)


def is_same_program(one: Program, other: Program) -> bool:
    """Whether two programs are equal in all numbers, too."""
    return (
        len(one.calls) == len(other.calls)
        and one.slots == other.slots
        and [place.size_bytes for place in one.storages]
        == [place.size_bytes for place in other.storages]
        and difference(one, other) is None
        and all(
            mine.args == its.args and mine.kwargs == its.kwargs
            for mine, its in zip(one.calls, other.calls, strict=True)
        )
    )
