"""Operators that run tile by tile: the operator `roam::tiles`, and what one call of it does.

A `Body` is a short program over the parts of tensors that belong to one tile. `roam::tiles` runs it
once for each tile, and every run writes its part of each result. Parts are consecutive intervals
of one dimension, or of neighbouring dimensions taken as one, so each element is written exactly
once, and all before the call ends.

A result that is summed over the axis is a *total*. A matrix product sums in blocks, and adds each
block's sum to what it has. So the tiles of as many elements as the library's own blocks have are
taken together: what a product reads of them is kept, and then added as one block. What is summed
one element after the other is added tile by tile. The first block or tile writes all of a total,
every other one adds to it, and nothing reads it before the call ends.

A call may also change tensors in place, as an optimizer does: each tile changes its part, and
nothing else reads or writes the tensor until the call ends.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from roam.program.ir import Ref, substitute
from roam.program.tile_works import (
    less_exponential,
    less_share_of_one,
    pieces,
    read_rows,
    safe_softmax,
)
from roam.torch_compat.overloads import out_overload
from roam.torch_compat.private import OpOverload

aten = torch.ops.aten

Cut = tuple[int, int]
"""First and last of the neighbouring dimensions that are cut as one."""

ALIGNED = 16
"""Tiles have a multiple of so many elements along the axis, where the axis is long enough: kernels
treat the rest of a division by their vectors' width apart."""
_LEAST_BLOCK, _MOST_BLOCK = 64, 1025


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
        adds_to: the place among the body's results of the total to which it adds. It then makes
            nothing, and gets the total, and whether it is to be written anew, before its arguments.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[int | None, ...]
    returns_sequence: bool = False
    last: tuple[int, ...] = ()
    over: int | None = None
    adds_to: int | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A result that exists whole.

    Attributes:
        number: of the value that is a tile's part of it; for a total, of the work that adds to it.
        cut: which of its dimensions are cut; None for a total.
    """

    number: int
    cut: Cut | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Held:
    """What is kept of all tiles of a block.

    Attributes:
        number: of the value that is a tile's part of it.
        dim: the dimension of it that is cut.
        shape: with a `Length` for this dimension.
    """

    number: int
    dim: int
    shape: tuple[Any, ...]
    dtype: torch.dtype

    def empty(self, like: Tensor, count: int) -> Tensor:
        """Memory for a block of `count` elements, where another tensor is."""
        return like.new_empty(_filled(self.shape, (), 0, count), dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies in the scratch memory of a call.

    Attributes:
        number: of the value.
        offset_bytes: where it begins.
    """

    number: int
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Body:
    """What `roam::tiles` runs for each tile.

    Attributes:
        size: elements of the axis.
        length: elements of each tile's part of it; the last tile may have fewer.
        inputs: for each tensor, and then for each number, that is given, the dimensions of which a
            tile sees its part; None if it sees the whole. They have the first numbers.
        works: what is called.
        results: what is made.
        flops: floating-point operations of all tiles, by PyTorch's own formulas.
        block: elements of the axis that are added to totals together; all without totals.
        held: what is kept until then.
        closing: what is called for each block once its tiles have run, on the blocks' parts of the
            inputs and on what is held.
        changed: for each tensor that is changed, its place among the inputs, and the number that
            the work that changes it makes.
        over: (place among the inputs, place among the results): what may take the memory of what is
            given.
        scratch_bytes: of the scratch memory, one more result, in which values of tiles lie; 0 if
            there is none.
        places: for each number of elements that tiles have, where what works make lies in it.
        closing_places: for each number of elements that blocks have, where what is held, and what
            is made when a block ends, lies in it.
    """

    size: int
    length: int
    inputs: tuple[Cut | None, ...]
    works: tuple[Work, ...]
    results: tuple[Made, ...]
    flops: int
    block: int
    held: tuple[Held, ...] = ()
    closing: tuple[Work, ...] = ()
    changed: tuple[tuple[int, int], ...] = ()
    over: tuple[tuple[int, int], ...] = ()
    scratch_bytes: int = 0
    places: tuple[tuple[int, tuple[Place, ...]], ...] = ()
    closing_places: tuple[tuple[int, tuple[Place, ...]], ...] = ()

    def __post_init__(self) -> None:
        # The tiles' parts of a result are all of it, and no two of them have an element in common.
        # To a total one call of each block adds, and nothing reads what that call makes.
        assert 0 < self.length <= max(self.size, ALIGNED)
        assert self.length <= self.block
        adding = [
            (work.makes[0], work.adds_to)
            for work in (*self.works, *self.closing)
            if work.adds_to is not None
        ]
        totals = [(made.number, at) for at, made in enumerate(self.results) if made.cut is None]
        assert sorted(adding, key=lambda one: one[1]) == totals
        numbers = {number for number, _ in totals}
        assert numbers.isdisjoint(
            refs_of([(one.args, one.kwargs) for one in (*self.works, *self.closing)])
        )
        for made in self.results:
            if made.cut is not None:
                assert math.prod(made.shape[made.cut[0] : made.cut[1] + 1]) == self.size
        # Of what is changed each tile sees its part, in the one work that changes it.
        every = [
            (work, refs_of([(work.args, work.kwargs)])) for work in (*self.works, *self.closing)
        ]
        for place, number in self.changed:
            assert self.inputs[place] is not None
            (changing,) = (work for work, used in every if place in used)
            assert changing in self.works
            assert changing.makes == (number,)
            assert changing.args[0] == Ref(place)
            assert sum(used.count(place) for _, used in every) == 1
        # What takes the place of an input is written when no work reads the tile's part any more.
        # A value that is written may lie in the input's own part, but not in another one's.
        assert not self.over or not self.closing
        for place, at in self.over:
            assert self.inputs[place] == self.results[at].cut is not None
            assert all(place != one for one, _ in self.changed)

    @property
    def holds(self) -> bool:
        """Whether blocks have several tiles, so that what is held has memory of its own."""
        return self.block > self.length

    @property
    def tiles(self) -> int:
        """How many there are."""
        return sum(1 for _ in self.intervals())

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(first element, number of elements) of each block along the axis."""
        return _intervals(0, self.size, self.block)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(first element, number of elements) of each tile along the axis."""
        for start, length in self.blocks():
            yield from _intervals(start, start + length, self.length)

    def outs(self, device: torch.device) -> list[Tensor]:
        """Memory for all results, and for what is scratch behind them."""
        made = [
            torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=device)
            for one in self.results
        ]
        if self.scratch_bytes:
            made.append(torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device))
        return made

    def run(
        self,
        inputs: Sequence[Any],
        outs: Sequence[Tensor],
        seen: Callable[[int, Any, int, int], None] | None = None,
    ) -> None:
        """Writes all results. `seen` gets the number of each value that is made, the value, and
        where the tile begins and how long it is.
        """
        room = self._room(outs)
        for first, count in self.blocks():
            self._block(inputs, outs, room, first, count, seen)

    def run_some(self, inputs: Sequence[Any], outs: Sequence[Tensor]) -> float:
        """Runs the first two blocks and the last one, or tiles where nothing is added up: others
        take as much memory and time as the first two.

        Returns:
            How much longer all take.
        """
        parts = list(self.blocks() if self.closing else self.intervals())
        some = dict.fromkeys((*parts[:2], parts[-1]))
        room = self._room(outs)
        for first, count in some:
            self._block(inputs, outs, room, first, count, None)
        return self.size / sum(count for _, count in some)

    def _room(self, outs: Sequence[Tensor]) -> _Room:
        """All places, as tensors in the last of the results."""

        def there(place: Place) -> Tensor:
            scratch = outs[-1]
            size_bytes = math.prod(place.shape) * place.dtype.itemsize
            own = scratch.narrow(0, place.offset_bytes, size_bytes).view(place.dtype)
            return own.as_strided(place.shape, place.stride)

        return [
            {length: {place.number: there(place) for place in those} for length, those in places}
            for places in (self.places, self.closing_places)
        ]

    def _block(
        self,
        inputs: Sequence[Any],
        outs: Sequence[Tensor],
        room: _Room,
        first: int,
        count: int,
        seen: Callable[[int, Any, int, int], None] | None,
    ) -> None:
        """Runs the tiles of a block. It is a function so that no name keeps memory afterwards."""
        of_tiles, of_blocks = room
        whole = of_blocks.get(count, {})
        held: dict[int, Tensor] = {}
        if self.holds:
            held = {
                one.number: whole[one.number]
                if one.number in whole
                else one.empty(inputs[0], count)
                for one in self.held
            }
        for start, length in _intervals(first, first + count, self.length):
            places = of_tiles.get(length, {})
            if held:
                places = places | {
                    one.number: held[one.number].narrow(one.dim, start - first, length)
                    for one in self.held
                }
            values = self.values(inputs, start, length)
            for work in self.works:
                if work.adds_to is None:
                    run_work(work, values, start, length, places, seen)
                else:
                    _add(work, outs, values, start, length)
            for result, out in zip(self.results, outs[: len(self.results)], strict=True):
                if result.cut is not None:
                    part_of(out, result.cut, start, length).copy_(values[result.number])
        if not self.closing:
            return
        if not self.holds:  # one tile is the block
            held = {one.number: values[one.number] for one in self.held}
        del places, values
        values = self.values(inputs, first, count)
        for one in self.held:
            values[one.number] = held[one.number]
        for work in self.closing:
            if work.adds_to is None:
                run_work(work, values, first, count, whole)
            else:
                _add(work, outs, values, first, count)

    def values(self, inputs: Sequence[Any], start: int, length: int) -> list[Any]:
        """Parts of what is given, and room for what is made."""
        values: list[Any] = [
            tensor if cut is None else part_of(tensor, cut, start, length)
            for tensor, cut in zip(inputs, self.inputs, strict=True)
        ]
        count = max(
            (number or 0 for work in (*self.works, *self.closing) for number in work.makes),
            default=0,
        )
        return values + [None] * (count + 1 - len(values))


_Room = list[dict[int, dict[int, Tensor]]]
"""For tiles, and then for blocks: for each number of elements, the memory of values by their
numbers."""


def _intervals(first: int, end: int, length: int) -> Iterator[tuple[int, int]]:
    for start in range(first, end, length):
        yield start, min(length, end - start)


def _add(work: Work, outs: Sequence[Tensor], values: list[Any], start: int, length: int) -> None:
    """Adds what belongs to some elements of the axis to a total."""
    args = _filled(work.args, values, start, length)
    for used in work.last:
        values[used] = None
    assert work.adds_to is not None
    work.target(outs[work.adds_to], start == 0, *args)


def run_work(
    work: Work,
    values: list[Any],
    start: int,
    length: int,
    places: Mapping[int, Tensor],
    seen: Callable[[int, Any, int, int], None] | None = None,
) -> None:
    """Calls what makes one value or more, into `places` where these have one."""
    args = _filled(work.args, values, start, length)
    kwargs = _filled(work.kwargs, values, start, length)
    for used in work.last:
        values[used] = None
    place = None if work.returns_sequence else places.get(work.makes[0])  # type: ignore[arg-type]
    made = _called(work, args, kwargs, place)
    del args, kwargs
    for number, value in zip(work.makes, made if work.returns_sequence else (made,), strict=True):
        if number is None:
            continue
        if number in places and value is not places[number]:
            value = places[number].copy_(value)
        values[number] = value
        if seen is not None:
            seen(number, value, start, length)


def refs_of(value: Any) -> list[int]:
    """The numbers of all values that arguments refer to."""
    found: list[int] = []
    substitute(value, lambda ref: found.append(ref.slot))
    return found


_COPIES = frozenset((aten._to_copy.default, aten.clone.default))


def _masked(value: Tensor, mask: Tensor, other: Any, *, out: Tensor) -> Tensor:
    if out is not value:
        out.copy_(value)
    return out.masked_fill_(mask, other)


OVER: dict[Any, tuple[Any, str]] = (
    {
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
    | {aten.masked_fill.Scalar: (_masked, "out")}
    | {work: (work, "out") for work in (less_exponential, less_share_of_one, safe_softmax)}
)
"""What may write its result over its first argument, if that has the result's shape and dtype: the
kernel that does, and the argument for the result."""


def _copied(value: Tensor, *, out: Tensor, **kwargs: Any) -> Tensor:
    return out.copy_(value)


def _reshaped(value: Tensor, shape: Any, *, out: Tensor) -> Tensor:
    return out.view(value.shape).copy_(value)


@functools.cache
def into(target: Any) -> tuple[Any, str, frozenset[str]] | None:
    """(kernel, name, dropped): the kernel that writes a target's one result to memory that it is
    given, the argument for that memory, and the target's arguments that the kernel does not take;
    None if there is none.
    """
    if target in OVER:
        return *OVER[target], frozenset()
    if target in _COPIES:
        return _copied, "out", frozenset()
    if target is read_rows:
        return read_rows, "out", frozenset()
    if target is aten.reshape.default:  # one that copies
        return _reshaped, "out", frozenset()
    found = out_overload(target, "cpu")[0] if isinstance(target, OpOverload) else None
    if found is None:
        return None
    overload, names, dropped = found
    return (overload, names[0], dropped) if len(names) == 1 else None


def _called(work: Work, args: tuple[Any, ...], kwargs: dict[str, Any], place: Tensor | None) -> Any:
    """What a work makes, in a place or over its first argument where it can."""
    if place is None and work.over is not None and _fits(args, kwargs):
        place = args[0]
    found = None if place is None else into(work.target)
    if found is None or place is None or not (place.is_contiguous() or writes_anywhere(work)):
        return work.target(*args, **kwargs)
    target, name, dropped = found
    kept = {key: value for key, value in kwargs.items() if key not in dropped}
    if _is_pointwise(target):
        wide = {at: arg for at, arg in enumerate(args) if isinstance(arg, Tensor) and arg.dim()}
        is_mixed = any(arg.dtype != place.dtype for arg in wide.values())
        if is_mixed and all(
            arg.shape == place.shape and arg.is_contiguous() for arg in (*wide.values(), place)
        ):  # the kernel copies what has another dtype
            flat = place.view(-1)
            for piece in pieces(flat):
                parts = list(args)
                for at, arg in wide.items():
                    parts[at] = arg.view(-1)[piece]
                target(*parts, **kept, **{name: flat[piece]})
            return place
    target(*args, **kept, **{name: place})
    return place


def writes_anywhere(work: Work) -> bool:
    """Whether a work computes element by element, so that its result may have any strides."""
    return work.target in _COPIES or _is_pointwise(work.target)


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def _fits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result of a work has the shape and dtype of its first argument."""
    first = args[0]
    for other in (*args[1:], *kwargs.values()):
        if isinstance(other, Tensor) and other.dim():
            # A tensor of one number has the dtype of the others.
            shape = torch.broadcast_shapes(first.shape, other.shape)
            if torch.promote_types(other.dtype, first.dtype) != first.dtype or shape != first.shape:
                return False
        elif isinstance(other, torch.dtype) and other != first.dtype:
            return False
    return bool(first.dtype.is_floating_point)


def lengths_of(size: int, tiles: int) -> list[int]:
    """Elements of a tile, if an axis of a size is cut into about so many tiles, half as many, and
    so on, down to two.
    """
    found = []
    while tiles > 1:
        length = -(-size // tiles)
        found.append(length if length < ALIGNED else -(-length // ALIGNED) * ALIGNED)
        tiles //= 2
    return found or [size]


def blocks_of(size: int) -> range:
    """Elements of the blocks that are tried as those in which a library may sum so many."""
    return range(_LEAST_BLOCK, min(size, _MOST_BLOCK), ALIGNED)


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
_library.define("tiles(Tensor[] tensors, str body, Scalar[] numbers) -> Tensor[]")
_library.define(
    "nll_loss_of_picked(Tensor picked, Tensor target, int classes, int reduction, int ignore_index,"
    " Tensor? weight=None) -> (Tensor, Tensor)"
)
_library.define("part_of_axis(Tensor whole, int[] shape, int[] slice) -> Tensor")


def _run(tensors: Sequence[Tensor], body: str, numbers: Sequence[float]) -> list[Tensor]:
    known = _bodies[body]
    outs = known.outs(tensors[0].device)
    known.run([*tensors, *numbers], outs)
    return outs


def run_into(
    outs: Sequence[Tensor], tensors: Sequence[Tensor], body: str, numbers: Sequence[float]
) -> None:
    """Runs a body and writes its results to given places."""
    _bodies[body].run([*tensors, *numbers], outs)


def run_some_into(
    outs: Sequence[Tensor], tensors: Sequence[Tensor], body: str, numbers: Sequence[float]
) -> float:
    """As `run_into`, by `Body.run_some`."""
    return _bodies[body].run_some([*tensors, *numbers], outs)


def _nll_loss_of_picked(
    picked: Tensor,
    target: Tensor,
    classes: int,
    reduction: int,
    ignore_index: int,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    # The very kernel sums one column, in the order of the rows as ever. It has to refuse what it
    # refuses for all classes, and to leave out what it leaves out there.
    is_valid = (target >= 0) & (target < classes)
    ignored = -100
    beyond = torch.where(target == ignored, target - 1, target)
    label = torch.where(is_valid, 0, beyond).masked_fill_(target == ignore_index, ignored)
    kernel = aten.nll_loss_forward
    if weight is None:
        found: tuple[Tensor, Tensor] = kernel(picked, label, None, reduction, ignored)
        return found
    # It rounds each product, and sums these and the weights in one order.
    mean, total = 1, 2
    weights = weight[target.clamp(0, classes - 1)].unsqueeze(1)
    loss, count = kernel(
        picked * weights, label, None, total if reduction == mean else reduction, ignored
    )
    if reduction in (mean, total):
        count, _ = kernel(-weights, label, None, total, ignored)
    return loss / count if reduction == mean else loss, count


def _part_of_axis(whole: Tensor, shape: Sequence[int], slice_: Sequence[int]) -> Tensor:
    """What is left of an axis of which a dimension is sliced, in a shape: `dim` of the axis, and
    the attributes of a `Step`.
    """
    dim, behind, size, count, first, stride = slice_
    parts = whole.unflatten(dim, (-1, size, behind))
    parts = parts[(slice(None),) * (dim + 1) + (slice(first, None, stride),)].narrow(
        dim + 1, 0, count
    )
    made = whole.new_empty(shape)
    made.view(parts.shape).copy_(parts)
    return made


_library.impl("part_of_axis", _part_of_axis, "CompositeExplicitAutograd")
_library.impl("tiles", _run, "CompositeExplicitAutograd")
_library.impl("nll_loss_of_picked", _nll_loss_of_picked, "CompositeExplicitAutograd")
TILES = torch.ops.roam.tiles.default
SLICED = torch.ops.roam.part_of_axis.default
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
    works, closing = (
        tuple(replace(work, target=_name(work.target)) for work in those)
        for those in (body.works, body.closing)
    )
    return replace(body, works=works, closing=closing)


def _name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else str(target.__qualname__)


flop_registry[torch.ops.roam.tiles] = lambda tensors, body, *_, **__: _bodies[body].flops


def body_of(name: str) -> Body:
    """The body that is called so."""
    return _bodies[name]
