"""Operators that run tile by tile: the operator `roam::tiles`, and what one call of it does.

A `Body` is a short program over the parts of tensors that belong to one tile. `roam::tiles` runs it
once for each tile, and every run writes its part of each result. Parts are consecutive intervals
of one dimension, or of neighbouring dimensions taken as one, so each element is written exactly
once, and all before the call ends.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from roam.program.ir import Ref
from roam.torch_compat.private import OpOverload

aten = torch.ops.aten

Cut = tuple[int, int]
"""First and last of the neighbouring dimensions that are cut as one."""

_ALIGNED = 16
"""Tiles have a multiple of so many elements along the axis, where the axis is long enough: kernels
treat the rest of a division by their vectors' width apart."""


@dataclass(frozen=True, slots=True)
class Length:
    """Stands for the number of elements of the axis that a tile has."""


@dataclass(frozen=True, slots=True)
class Start:
    """Stands for the first of these elements."""


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a kernel for one tile.

    Attributes:
        target: what is called.
        args, kwargs: its arguments; a `Ref` stands for the value of that number.
        makes: the numbers of its results; None for one that nobody uses.
        returns_sequence: whether it returns several.
        last: numbers of the values that nothing uses afterwards.
        over: the number of its first argument, if the result may take the place of it.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[int | None, ...]
    returns_sequence: bool = False
    last: tuple[int, ...] = ()
    over: int | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A result that exists whole.

    Attributes:
        number: of the value that is a tile's part of it.
        cut: which of its dimensions are cut.
    """

    number: int
    cut: Cut
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Body:
    """What `roam::tiles` runs for each tile.

    Attributes:
        size: elements of the axis.
        length: elements of each tile's part of it; the last tile may have fewer.
        inputs: for each tensor that is given, the dimensions of which a tile sees its part; None if
            it sees the whole. They have the first numbers.
        works: what is called.
        results: what is made.
        flops: floating-point operations of all tiles, by PyTorch's own formulas.
    """

    size: int
    length: int
    inputs: tuple[Cut | None, ...]
    works: tuple[Work, ...]
    results: tuple[Made, ...]
    flops: int

    def __post_init__(self) -> None:
        # Then the tiles' parts of each result are all of it, and no two of them have an element in
        # common.
        for made in self.results:
            assert math.prod(made.shape[made.cut[0] : made.cut[1] + 1]) == self.size
        assert 0 < self.length <= max(self.size, _ALIGNED)

    @property
    def tiles(self) -> int:
        """How many there are."""
        return -(-self.size // self.length)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(first element, number of elements) of each tile along the axis."""
        for start in range(0, self.size, self.length):
            yield start, min(self.length, self.size - start)

    def run(
        self,
        inputs: Sequence[Tensor],
        outs: Sequence[Tensor],
        seen: Callable[[int, Any, int, int], None] | None = None,
    ) -> None:
        """Writes all results. `seen` gets the number of each value that is made, the value, and
        where the tile begins and how long it is.
        """
        for start, length in self.intervals():
            values: list[Any] = [
                tensor if cut is None else part_of(tensor, cut, start, length)
                for tensor, cut in zip(inputs, self.inputs, strict=True)
            ]
            values += [None] * sum(len(work.makes) for work in self.works)
            for work in self.works:
                args = _filled(work.args, values, start, length)
                kwargs = _filled(work.kwargs, values, start, length)
                for used in work.last:
                    values[used] = None
                made = _called(work, args, kwargs)
                del args, kwargs
                for number, value in zip(
                    work.makes, made if work.returns_sequence else (made,), strict=True
                ):
                    if number is not None:
                        values[number] = value
                        if seen is not None:
                            seen(number, value, start, length)
                del made
            for result, out in zip(self.results, outs, strict=True):
                part_of(out, result.cut, start, length).copy_(values[result.number])


OVER: dict[Any, tuple[Any, str]] = {
    target: (getattr(target.overloadpacket, overload), name)
    for target, overload, name in (
        (aten._log_softmax.default, "out", "out"),
        (aten._softmax.default, "out", "out"),
        (aten._log_softmax_backward_data.default, "out", "out"),
        (aten._softmax_backward_data.default, "out", "grad_input"),
        (aten.add.Tensor, "out", "out"),
        (aten.addcmul.default, "out", "out"),
        (aten.div.Tensor, "out", "out"),
        (aten.gelu.default, "out", "out"),
        (aten.mul.Tensor, "out", "out"),
        (aten.neg.default, "out", "out"),
        (aten.sigmoid.default, "out", "out"),
        (aten.silu.default, "out", "out"),
        (aten.silu_backward.default, "grad_input", "grad_input"),
        (aten.sub.Tensor, "out", "out"),
        (aten.tanh.default, "out", "out"),
        (aten.tanh_backward.default, "grad_input", "grad_input"),
    )
}
"""What may write its result over its first argument, if that has the result's shape and dtype: the
overload that does, and what it calls the result."""


def _called(work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a work makes, over its first argument where it can."""
    if work.over is None:
        return work.target(*args, **kwargs)
    first = args[0]
    for other in (*args[1:], *kwargs.values()):
        if isinstance(other, Tensor) and other.dim():
            # A tensor of one number has the dtype of the others.
            shape = torch.broadcast_shapes(first.shape, other.shape)
            if other.dtype != first.dtype or shape != first.shape:
                return work.target(*args, **kwargs)
        elif isinstance(other, torch.dtype) and other != first.dtype:
            return work.target(*args, **kwargs)
    if not first.dtype.is_floating_point or not first.is_contiguous():
        return work.target(*args, **kwargs)
    target, name = OVER[work.target]
    return target(*args, **kwargs, **{name: first})


def lengths_of(size: int, tiles: int) -> list[int]:
    """Elements of a tile, if an axis of a size is cut into about so many tiles, half as many, and
    so on, down to two.
    """
    found = []
    while tiles > 1:
        length = -(-size // tiles)
        found.append(length if length < _ALIGNED else -(-length // _ALIGNED) * _ALIGNED)
        tiles //= 2
    return found or [size]


def part_of(tensor: Tensor, cut: Cut, start: int, length: int) -> Tensor:
    """A tile's part of a tensor, with the dimensions that are cut as one: a view."""
    first, last = cut
    if first != last:
        shape, stride = tensor.shape, tensor.stride()
        count, step = joined(shape[first : last + 1], stride[first : last + 1])
        tensor = tensor.as_strided(
            (*shape[:first], count, *shape[last + 1 :]),
            (*stride[:first], step, *stride[last + 1 :]),
        )
    return tensor.narrow(first, start, length)


def joined(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """(size, stride) of neighbouring dimensions as one.

    Raises:
        ValueError: elements do not lie so that they are one.
    """
    count, step = 1, 1
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if size == 1:
            continue
        if count == 1:
            step = own
        elif own != step * count:
            raise ValueError("not one dimension")
        count *= size
    return count, step


def _filled(value: Any, values: Sequence[Any], start: int, length: int) -> Any:
    kind = type(value)
    if kind is Ref:
        return values[value.slot]
    if kind is Length:
        return length
    if kind is Start:
        return start
    if kind is tuple or kind is list:
        return kind([_filled(item, values, start, length) for item in value])
    if kind is dict:
        return {key: _filled(item, values, start, length) for key, item in value.items()}
    return value


_bodies: dict[str, Body] = {}

_library = torch.library.Library("roam", "FRAGMENT")
_library.define("tiles(Tensor[] tensors, str body) -> Tensor[]")
_library.define(
    "nll_loss_of_picked(Tensor picked, Tensor target, int classes, int reduction, int ignore_index)"
    " -> (Tensor, Tensor)"
)


def _run(tensors: Sequence[Tensor], body: str) -> list[Tensor]:
    known = _bodies[body]
    outs = [
        torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=tensors[0].device)
        for made in known.results
    ]
    known.run(tensors, outs)
    return outs


def run_into(outs: Sequence[Tensor], tensors: Sequence[Tensor], body: str) -> None:
    """Runs a body and writes its results to given places."""
    _bodies[body].run(tensors, outs)


def _nll_loss_of_picked(
    picked: Tensor, target: Tensor, classes: int, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    # The very kernel sums one column, in the order of the rows as ever. It has to refuse what it
    # refuses for all classes, and to leave out what it leaves out there.
    is_valid = (target >= 0) & (target < classes)
    ignored = -100
    beyond = torch.where(target == ignored, target - 1, target)
    label = torch.where(is_valid, 0, beyond).masked_fill_(target == ignore_index, ignored)
    found: tuple[Tensor, Tensor] = aten.nll_loss_forward(picked, label, None, reduction, ignored)
    return found


_library.impl("tiles", _run, "CompositeExplicitAutograd")
_library.impl("nll_loss_of_picked", _nll_loss_of_picked, "CompositeExplicitAutograd")
TILES = torch.ops.roam.tiles.default
PICKED = torch.ops.roam.nll_loss_of_picked.default
"""`nll_loss_forward` of what it picks from each row, as one column."""


def name_of(body: Body) -> str:
    """What a body is called as an argument of `roam::tiles`. Equal bodies have the same name in
    every process.
    """
    name = hashlib.sha256(repr(_told(body)).encode()).hexdigest()[:24]
    _bodies[name] = body
    return name


def _told(body: Body) -> Body:
    """The same with names in place of what is called: a function's text has its address."""
    works = (replace(work, target=_name(work.target)) for work in body.works)
    return replace(body, works=tuple(works))


def _name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else str(target.__qualname__)


flop_registry[torch.ops.roam.tiles] = lambda tensors, body, **_: _bodies[body].flops


def body_of(name: str) -> Body:
    """The body that is called so."""
    return _bodies[name]
