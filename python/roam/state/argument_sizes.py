"""Which sizes of a call's arguments follow from symbols, and for which values a capture holds.

An argument may be a part of a larger tensor. How it lies there follows from its own sizes and from
how much of the larger tensor it leaves out; where it begins may be a symbol, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from typing import Any, Final, NamedTuple

import torch

from roam.state.equality import Misfit
from roam.state.sizes import Evaluator, Expression, OneLength, Symbols, expressions_in, number
from roam.torch_compat.private import FakeTensor

OFFSET: Final = -1
"""Stands for a dimension where a symbol is an argument's storage offset."""
ELEMENTS: Final = "elements"
"""Stands for a dimension where a user says how many elements an argument has at most."""
SHIFT: Final = 64
"""How much larger such a symbol is than the offset: ranges begin at 2, or at 32, and offsets at
0."""


class Larger(Misfit):
    """Why a plan does not fit a call that it would fit if it were made for larger sizes."""

    values: tuple[int, ...]


class Layout(NamedTuple):
    """How a tensor lies in memory; numbers may be expressions."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    size_bytes: Any
    """Of its storage."""

    def numbers(self) -> Iterator[Any]:
        yield from self.shape
        yield from self.stride
        yield self.offset
        yield self.size_bytes

    def mapped(self, new: Callable[[Any], Any]) -> Layout:
        """With `new` of each number."""
        return Layout(
            tuple(map(new, self.shape)),
            tuple(map(new, self.stride)),
            new(self.offset),
            new(self.size_bytes),
        )

    def at(self, place: int) -> Layout:
        """At one of the symbols' points."""
        return self.mapped(lambda one: one.values[place] if isinstance(one, Expression) else one)

    def recorded(self) -> Layout:
        """As a program has it."""
        return self.mapped(lambda one: number(one) if isinstance(one, Expression) else one)

    def size(self, dim: int) -> int:
        """A size; for `OFFSET`, what its symbol is."""
        return int(self.offset + SHIFT if dim == OFFSET else self.shape[dim])


def lies(argument: torch.Tensor | int) -> Layout | None:
    """How a tensor lies in memory; None if it has none of its own. A whole number is as a tensor of
    that size which takes no memory.
    """
    if type(argument) is int:
        return Layout((argument,), (0,), 0, 0)
    tensor: Any = argument
    try:
        size_bytes = tensor.untyped_storage().nbytes()
        return Layout(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), size_bytes)
    except (NotImplementedError, RuntimeError):
        return None


@dataclass(frozen=True, slots=True)
class Change:
    """How an argument lies in a call, and in an earlier one.

    Attributes:
        before: None if there is no earlier one.
        itemsize: the bytes of an element.
    """

    before: Layout | None
    now: Layout
    itemsize: int

    def _both(self) -> list[Layout]:
        return [self.now] if self.before is None else [self.before, self.now]

    def moves(self) -> bool:
        """Whether it lies elsewhere in its storage, as its sizes do not say."""
        is_told = len({_places(layout) for layout in self._both()}) == 1
        return not is_told and len({layout.offset for layout in self._both()}) > 1

    def layout(self, symbols: Symbols, dims: Mapping[int, Expression]) -> Layout:
        """How it lies at all values of the symbols, as far as these calls tell.

        Args:
            dims: the expressions of its sizes, where they follow from symbols; see `ArgumentSizes`.

        Raises:
            OneLength: nobody knows.
        """
        constant, order = symbols.constant, _order(self.now)
        shape = [symbols.of(dims.get(dim, size)) for dim, size in enumerate(self.now.shape)]
        strides = list(map(constant, self.now.stride))
        if self.before is not None and _order(self.before) != order:
            raise OneLength("the dimensions of an argument lie in another order")
        # What holds one another, from inside out: an element, a row, ..., the storage.
        steps = [
            [*(layout.stride[dim] for dim in reversed(order)), layout.size_bytes / self.itemsize]
            for layout in self._both()
        ]
        found, follows = list[Expression](), False
        for level, values in enumerate(zip(*steps, strict=True)):
            is_fixed, left_out = len(set(values)) == 1, set[float]()
            if level > 0:
                dim = order[-level]
                follows = follows or dim in dims
                left_out = {
                    step[level] / step[level - 1] - layout.shape[dim]
                    for step, layout in zip(steps, self._both(), strict=True)
                }
            if follows and len(left_out) == 1 and (more := left_out.pop()).is_integer():
                found.append(found[-1].mul(shape[dim].add(constant(int(more)))))
            elif is_fixed and float(values[0]).is_integer():
                found.append(constant(int(values[0])))
            else:
                raise OneLength(
                    "how an argument lies in its storage does not follow from its sizes"
                )
        for dim, step in zip(reversed(order), found, strict=False):
            strides[dim] = step
        if OFFSET in dims:
            offset = dims[OFFSET].sub(constant(SHIFT))
        else:
            *counts, rest = _places(self.now)
            offset = constant(rest)
            for dim, count in zip(order, counts, strict=True):
                offset = offset.add(strides[dim].mul(constant(count)))
        layout = Layout(
            tuple(shape), tuple(strides), offset, found[-1].mul(constant(self.itemsize))
        )
        return layout.mapped(lambda one: one.args[0] if one.op == "constant" else one)


def _order(layout: Layout) -> list[int]:
    """The dimensions from outside in, without those whose elements are one and the same."""
    dims = (dim for dim, step in enumerate(layout.stride) if step)
    return sorted(dims, key=lambda dim: -layout.stride[dim])


def _places(layout: Layout) -> tuple[int, ...]:
    """Where a tensor begins in its storage: how many steps of each dimension, from outside in, and
    how many elements are left.
    """
    found, rest = [], layout.offset
    for dim in _order(layout):
        count, rest = divmod(rest, layout.stride[dim])
        found.append(count)
    return (*found, rest)


def _size_of(argument: Any, dim: int) -> int:
    """As `Layout.size`, of an argument."""
    if type(argument) is int:
        return argument
    return argument.storage_offset() + SHIFT if dim == OFFSET else argument.shape[dim]  # type: ignore[no-any-return]


@dataclass(slots=True)
class ArgumentSizes:
    """What a capture that holds for a range of sizes expects of them.

    Attributes:
        symbols: those of the capture.
        dims: for each of the flattened arguments with such sizes, the symbol of each dimension, or
            the symbol and a number; for `OFFSET`, that of its storage offset. A whole number has
            one dimension, itself.
        layouts: how these arguments lie.
        least: the value of each symbol from which on the plan holds.
        corners: it holds up to each of these, one value for each symbol.
        enlarged: how often it has been planned for larger sizes, with room for others.
        excluded: values for which a run has found that it does not.
        refused: corners for which no plan within the step's limit was found.
    """

    symbols: Symbols
    dims: Mapping[int, Mapping[int, Expression]]
    layouts: Mapping[int, Layout]
    corners: tuple[tuple[int, ...], ...] = ()
    least: tuple[int, ...] = ()
    enlarged: int = 0
    excluded: set[tuple[int, ...]] = field(default_factory=set)
    refused: set[tuple[int, ...]] = field(default_factory=set)
    first_places: list[tuple[int, int, int]] = field(init=False)
    """For each symbol an argument, by its place, a dimension of it, and by how much the size is
    larger than the symbol."""
    _layouts_at: Callable[[tuple[int, ...]], list[Layout]] = field(init=False)

    def __post_init__(self) -> None:
        self.least = self.least or tuple(self.symbols.least.values())
        first: dict[Expression, tuple[int, int, int]] = {}
        for place, dims in self.dims.items():
            for dim, size in dims.items():
                symbol, more = parted(size)
                first.setdefault(symbol, (place, dim, more))
        self.first_places = [first[symbol] for symbol in self.symbols.symbols.values()]
        recorded = [tuple(layout.recorded()) for layout in self.layouts.values()]
        evaluator = Evaluator(expressions_in(recorded), self.symbols.names)
        nests = evaluator.nests(recorded)
        self._layouts_at = lambda values: nests(evaluator.values(*values))

    def captured(self) -> dict[str, int]:
        """The values of the symbols in the call that was captured."""
        return dict(self.symbols.points[0])

    def values(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """Of the symbols in a call with these flattened arguments, which fit `failure`."""
        return tuple(
            [_size_of(leaves[place], dim) - more for place, dim, more in self.first_places]
        )

    def anywhere(self, values: Sequence[int]) -> tuple[int, ...]:
        """Values with the largest storage offsets, which no memory depends on."""
        most = self.symbols.most.values()
        places = zip(values, most, self.first_places, strict=True)
        return tuple([end if dim == OFFSET else value for value, end, (_, dim, _) in places])

    def layouts_at(self, values: tuple[int, ...]) -> dict[int, Layout]:
        """How the arguments that follow from symbols lie at these values, by their places."""
        found = starmap(Layout, self._layouts_at(values))
        return dict(zip(self.layouts, found, strict=True))

    def raised(self, levels: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """Values of `least` to try: its own, then at each level one size alone, and all."""
        yield self.least
        places = [place for place, one in enumerate(self.first_places) if one[1] != OFFSET]
        for level in levels:
            for which in (*([place] for place in places), places):
                yield tuple(
                    max(value, level) if place in which else value
                    for place, value in enumerate(self.least)
                )

    def beside(self) -> list[set[int]]:
        """For each symbol the places of those, itself among them, that sizes of the same argument
        follow from.
        """
        places = {symbol: place for place, symbol in enumerate(self.symbols.symbols.values())}
        found = [{place} for place in places.values()]
        for dims in self.dims.values():
            of = {places[parted(size)[0]] for dim, size in dims.items() if dim != OFFSET}
            for place in of:
                found[place] |= of
        return found

    def largest(self) -> tuple[int, ...]:
        """Of each symbol, the largest value that a corner has."""
        return tuple(map(max, zip(*self.corners, strict=True)))

    def up_to(self, corner: tuple[int, ...], *, has_room: bool = False) -> ArgumentSizes:
        """These, for a plan that holds up to one more corner.

        Args:
            has_room: whether that is larger than the sizes that it is for.
        """
        known = (one for one in self.corners if not is_within(one, corner))
        return replace(self, corners=(*known, corner), enlarged=self.enlarged + has_room)

    def admits(self, values: tuple[int, ...]) -> bool:
        """Whether the recording holds for values of the symbols, if not the plan."""
        return (
            is_within(values, tuple(self.symbols.most.values()))
            and is_within(self.least, values)
            and self.symbols.hold(values)
        )

    def failure(self, leaves: Sequence[Any]) -> Misfit | None:
        """None if the capture holds for the sizes of a call, and has been planned for them."""
        try:
            values = self.values(leaves)
        except (AttributeError, IndexError):
            return Misfit("an argument is no tensor, or has another number of dimensions")
        if values in self.excluded:
            return Misfit(f"the plan for many sizes does not hold for {values}")
        for value, least, most in zip(values, self.least, self.symbols.most.values(), strict=True):
            if not least <= value <= most:
                return Misfit(
                    f"the size {value} is beyond those of the plan for many sizes, {least} to {most}"
                )
        if list(map(lies, map(leaves.__getitem__, self.layouts))) != self._layouts_at(values):
            return Misfit(
                "the plan for many sizes is for arguments of other shapes, or that lie otherwise"
            )
        if not self.symbols.hold(values):
            return Misfit(
                "a condition on the sizes of the arguments, on which the capture relies, does not hold"
            )
        if not any(map(partial(is_within, values), self.corners)):
            larger = Larger("the arguments are larger than the plan is made for")
            larger.values = values
            return larger
        return None


def is_within(values: Sequence[int], most: Sequence[int]) -> bool:
    """Whether no value is above the one in the same place."""
    return all(map(operator.le, values, most))


def parted(size: Expression) -> tuple[Expression, int]:
    """The symbol and the number whose sum an argument's size is."""
    (symbol,) = size.atoms()
    return symbol, size.terms.get((), 0)


def may_have_symbols(tensor: torch.Tensor) -> bool:
    """Whether sizes of an argument may be taken for symbols."""
    return (
        type(tensor) in (torch.Tensor, FakeTensor)
        and tensor.layout is torch.strided
        and tensor.grad_fn is None
        and tensor.grad is None
        and not tensor.requires_grad
    )
