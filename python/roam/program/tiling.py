"""Rewrites a program so that its largest tensors never exist whole, with the same bits.

A set of tensors is chosen that shall be *gone*. Whatever reads one of them, and makes something
that stays, is cut into tiles along a dimension of its own result over which it has no sum. For each
tile, the parts of its arguments are made again from what exists whole: a rule per operator says
which parts of its arguments a part of its result needs (`RULES`). Or it is a matrix product, and
tiles add to it what they sum (`SUMS`): in blocks as large as those in which the library itself
adds, so that no sum is ever cut where the library does not cut it. Whether a kernel gives the same
bits is not assumed, neither for parts nor for blocks: see `roam.kernels.tiles`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from roam.program.ir import Call, Program, Ref, Storage, TensorMeta, ref_to, substitute
from roam.program.lower import flops_of
from roam.program.operators import is_ours, is_region
from roam.program.passes import prune
from roam.program.tile_places import with_places
from roam.program.tile_works import (
    ELSEWHERE,
    MOST_ROWS,
    Step,
    add_product,
    add_rows,
    as_bytes,
    embedding_from,
    is_outside,
    labels_from,
    less_exponential,
    less_share,
    less_share_of_one,
    pick,
    places_at,
    read_rows,
    row_total,
    safe_softmax,
    scatter_from,
)
from roam.program.tiles import (
    ALIGNED,
    OVER,
    PICKED,
    SLICED,
    TILES,
    Body,
    Cut,
    Held,
    Length,
    Made,
    Start,
    Work,
    blocks_of,
    joined,
    lengths_of,
    name_of,
    refs_of,
)
from roam.torch_compat.private import OpOverload

aten = torch.ops.aten

_HALF = frozenset((torch.bfloat16, torch.float16))
_FLOP_COST = 1 / 16
"""How long a floating-point operation of a product takes, in elements that are read or written."""
_MOST_WIDER = 2
"""Tiles are made along the axis of which theirs is a slice if that is at most so many times as
long."""
_INDEX_COST = 64
"""How long adding a row at an index takes, likewise."""


class Uncut(Exception):
    """A part cannot be made.

    Attributes:
        storage: of what would have to exist whole for it; -1 if that would not help.
    """

    def __init__(self, storage: int = -1) -> None:
        super().__init__(storage)
        self.storage = storage


Part = tuple[int, Cut | None, int]
"""(slot, cut, length) of a result that is made in parts of a length, or to which blocks of a length
are added."""


@dataclass(frozen=True, slots=True)
class Member:
    """Something that is made tile by tile.

    Attributes:
        position: of the call that makes it.
        slot: what is made.
        cut: how; None if tiles add to it.
        size: elements of the axis.
        made: builds a tile's part of it.
        changes: whether it was there before, and is changed.
    """

    position: int
    slot: int
    cut: Cut | None
    size: int
    made: Callable[[Builder], int]
    changes: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    """A call of `roam::tiles` in a program.

    Attributes:
        call: the call.
        body: what it runs.
        members: what it makes, and then what it changes.
        parts: by the numbers of values, of what tensors of the original program they are parts.
    """

    call: Call
    body: Body
    members: tuple[Member, ...]
    parts: dict[int, tuple[int, Cut]]

    @property
    def made(self) -> list[Member]:
        """What it makes, in the order of the results."""
        return [member for member in self.members if not member.changes]

    @property
    def changed(self) -> list[Member]:
        """What it changes, in the order of `Body.changed`."""
        return [member for member in self.members if member.changes]


@dataclass(frozen=True, slots=True)
class Tiled:
    """A program some of whose tensors never exist whole.

    Attributes:
        program: the program.
        source: the original program.
        tiles: the calls that run tile by tile.
        gone: storages of `source` that are never whole.
        cost: how long all tiles take, in elements that are read or written.
    """

    program: Program
    source: Program
    tiles: tuple[Tile, ...]
    gone: frozenset[int]
    cost: float
    later: dict[int, list[Call]]
    """By the slot of what stands for something else, as what a loss picks, the calls that make that
    of it. Slots are those of `source`, and new ones."""
    slots: list[TensorMeta | None]
    extents: dict[int, tuple[int, int]]
    """For slots that hold indices or labels: [first, end) of what is in them."""

    def made_of(self, slot: int) -> list[int | None]:
        """A slot, and those of what later calls make of it."""
        return [slot, *(one for call in self.later.get(slot, ()) for one in call.outputs)]


def candidates(program: Program) -> dict[int, int]:
    """Storages that may never exist whole, with their bytes."""
    excluded = program.leaving() | program.written()
    excluded.update(program.storage_of(slot) for slot in program.outgoing())
    found = {}
    for number, storage in enumerate(program.storages):
        if storage.creator < 0 or number in excluded:
            continue
        call = program.calls[storage.creator]
        if _is_pure(program, call, may_raise=call.target in READERS):
            found[number] = storage.size_bytes
    for call in program.calls:
        if not is_ours(call.target) or is_region(call.target):
            for slot in call.refs():
                found.pop(program.storage_of(slot), None)
    return found


def with_sources(program: Program, gone: Collection[int], known: Collection[int]) -> set[int]:
    """What is to be gone, and smaller tensors of which nothing but that is made, element by
    element: what reads them makes them in no more time.

    Args:
        known: the `candidates`.
    """
    found = set(gone)
    readers: dict[int, list[Call]] = {}
    for call in program.calls:
        for slot in call.refs():
            readers.setdefault(program.storage_of(slot), []).append(call)
    for call in reversed(program.calls):
        made = [slot for slot in call.outputs if slot is not None]
        if len(made) != 1 or not _is_by_elements(call):
            continue
        storage = program.storage_of(made[0])
        own = readers.get(storage, ()) if storage in known else ()
        if own and all(_makes(program, reader, found, made[0]) for reader in own):
            found.add(storage)
    return found


def _makes(program: Program, call: Call, gone: Collection[int], slot: int) -> bool:
    """Whether a call makes something of `gone` alone, of each element of a tensor one."""
    meta = program.slots[slot]
    made = [program.slots[one] for one in call.outputs if one is not None]
    return (
        bool(made)
        and _is_by_elements(call)
        and all(
            meta is not None and out is not None and out.storage in gone and out.shape == meta.shape
            for out in made
        )
    )


def out_of_place(program: Program) -> Program:
    """The same with what is made in the step changed out of place, as far as nothing but what comes
    later sees the change: a tensor that is changed cannot be made again.
    """
    calls, slots, storages = list(program.calls), list(program.slots), list(program.storages)
    found = replace(program, calls=calls, slots=slots, storages=storages)
    kept = program.leaving() | {program.storage_of(slot) for slot in program.outgoing()}
    for index, call in enumerate(calls):
        if not _changes(found, call):
            continue
        changed = call.args[0].slot
        meta = slots[changed]
        assert meta is not None
        old = meta.storage
        if storages[old].creator < 0 or old in kept:
            continue
        target = _making(found, call)
        if target is None:
            continue
        later = calls[index + 1 :]
        new = {slot for one in later for slot in one.outputs if slot is not None}
        seen = {slot for one in later for slot in one.refs() if found.storage_of(slot) == old}
        if not found.covers(changed) or not seen <= new | {changed}:
            continue
        made = len(slots)
        slots.append(replace(meta, storage=len(storages)))
        storages.append(replace(storages[old], creator=index))
        for slot in new:
            if found.storage_of(slot) == old:
                slots[slot] = replace(slots[slot], storage=len(storages) - 1)  # type: ignore[type-var]
        calls[index] = replace(call, target=target, mutates=(), outputs=(made,))
        moved = {changed: made}
        for place in range(index + 1, len(calls)):
            if changed in calls[place].refs():
                calls[place] = calls[place].renamed(partial(_other, moved))
    return found


def _making(program: Program, call: Call) -> OpOverload | None:
    """What makes of a call's arguments what the call, which `_changes`, changes the first of them
    to, in the same layout and dtype; None if it is not known.
    """
    packet, _, overload = call.target.name().removeprefix("aten::").partition(".")
    made = getattr(getattr(aten, packet.removesuffix("_"), None), overload or "default", None)
    if made is None or torch.Tag.pointwise not in made.tags:
        return None
    meta = program.slots[call.args[0].slot]
    assert meta is not None
    slots = {slot: program.slots[slot] for slot in refs_of([call.args, call.kwargs])}
    if any(
        other is not None and other.storage == meta.storage and slot != call.args[0].slot
        for slot, other in slots.items()
    ):
        return None

    def empty(ref: Ref) -> Any:
        other = slots[ref.slot]
        if other is None:  # a number
            return 0.5
        return torch.empty_strided(other.shape, other.stride, dtype=other.dtype, device="meta")

    try:
        result = made(*substitute(call.args, empty), **substitute(call.kwargs, empty))
    except (RuntimeError, TypeError):
        return None
    is_alike = (tuple(result.shape), result.stride()) == (meta.shape, meta.stride)
    return made if is_alike and result.dtype == meta.dtype else None


def _changes(program: Program, call: Call) -> bool:
    """Whether a call changes its first argument element by element, and does nothing else."""
    return (
        isinstance(call.target, OpOverload)
        and is_ours(call.target)
        and torch.Tag.pointwise in call.target.tags
        and bool(call.args)
        and isinstance(call.args[0], Ref)
        and call.mutates == (call.args[0].slot,)
        and all(slot is None for slot in call.outputs)
        and not call.random
        and call.skip_if is None
        and call.state is None
        and not call.is_check
        and not program.may_raise(call)
        and program.slots[call.args[0].slot] is not None
    )


def _other(moved: dict[int, int], slot: int) -> int:
    return moved.get(slot, slot)


def makers_of(program: Program) -> dict[int, int]:
    """The call that makes each slot."""
    return {
        slot: index
        for index, call in enumerate(program.calls)
        for slot in call.outputs
        if slot is not None
    }


def summed(program: Program, call: Call) -> int:
    """Over how many elements a call sums in an order that blocks can have; 0 if it does not."""
    if call.target not in SUMS or call.kwargs:
        return 0
    left, out = (program.slots[slot] for slot in (call.args[0].slot, call.outputs[0]))  # type: ignore[index]
    # In half precision a kernel sums in single precision, and rounds once.
    if left is None or out is None or out.dtype not in (torch.float32, torch.float64):
        return 0
    return left.shape[SUMS[call.target][0]]


def in_order(program: Program, call: Call) -> list[int]:
    """Over how many elements a call sums by adding one after the other to what there is, along each
    axis of which tiles may have consecutive parts. Blocks of any length then give the same sum.
    """
    if call.target is not aten.embedding_dense_backward.default or call.args[4]:
        return []
    indices = program.slots[call.args[1].slot]
    if indices is None or math.prod(indices.shape) <= call.args[2]:
        return []  # most rows get nothing: parts of the rows are quicker
    sizes = (math.prod(indices.shape[:dims]) for dims in range(1, len(indices.shape) + 1))
    return sorted({size for size in sizes if size > 1})


def _is_pure(program: Program, call: Call, *, may_raise: bool = False) -> bool:
    return (
        is_ours(call.target)
        and not is_region(call.target)
        and not call.mutates
        and (not call.random or (call.target is _ATTENTION and not any(call.args[3:4])))
        and call.skip_if is None
        and call.state is None
        and not call.is_check
        and (may_raise or not program.may_raise(call) or _is_checked(program, call))
        and all(slot is None or program.slots[slot] is not None for slot in call.outputs)
        and (_is_by_elements(call) or all(program.slots[slot] is not None for slot in call.refs()))
    )


def _is_by_elements(call: Call) -> bool:
    """Whether a call computes each element of its one result from elements of its arguments."""
    return rule_of(call) is _pointwise


def _is_checked(program: Program, call: Call) -> bool:
    """Whether a gradient is added at indices at which elements have been read before."""
    reader = {
        aten.scatter_add.default: aten.gather.default,
        aten.index_put.default: aten.index.Tensor,
    }.get(call.target)
    if reader is None:
        return False
    made = program.slots[call.args[0].slot]
    written = program.written()
    used = refs_of(call.args[2] if reader is aten.gather.default else call.args[1])
    if made is None or any(program.storage_of(slot) in written for slot in used):
        return False
    for other in program.calls:
        if other is call:
            return False
        if other.target is not reader:
            continue
        read = program.slots[other.args[0].slot]
        if read is None or read.shape != made.shape:
            continue
        if reader is aten.index.Tensor:
            is_same = other.args[1] == call.args[1]
        else:
            is_same = other.args[2] == call.args[2]
            is_same = is_same and not (other.args[1] - call.args[1]) % len(made.shape)
        if is_same:
            return True
    return False


def tiled(
    program: Program,
    gone: Collection[int],
    part_bytes: int,
    refused: Collection[Part] = frozenset(),
) -> Tiled | None:
    """The program without some tensors, as far as that is possible; None if none can be left out.
    Of what can be cut along several axes at one cost, all are cut along the longest, or all along
    the shortest, since only what is cut along the same one can share what is made again.

    Args:
        program: the original program.
        gone: some of its `candidates`; those that cannot be cut stay.
        part_bytes: about as much of the largest of them exists at once.
        refused: what has other bits if it is made so.
    """
    program = _with_early_counts(program)
    best: Tiled | None = None
    for is_long in (True, False):
        left = set(gone)
        while left:
            try:
                found = _Tiling(program, left, part_bytes, refused, is_long=is_long).result()
            except Uncut as error:
                if error.storage not in left:
                    break
                left.discard(error.storage)
                continue
            if found is not None and (best is None or _rank(found) < _rank(best)):
                best = found
            break
    return best


def _rank(found: Tiled) -> tuple[int, float]:
    """More of what is to be gone first, then less time."""
    return -len(found.gone), found.cost


def _with_early_counts(program: Program) -> Program:
    """The same with what the gradient of a classification loss needs beside the scores made before
    their log-softmax: its tiles then make both the loss and the gradient, and the scores once.
    """
    for index in reversed(range(len(program.calls))):
        if program.calls[index].target is aten.nll_loss_forward.default:
            program = _with_early_count(program, index)
    return program


def _with_early_count(program: Program, index: int) -> Program:
    loss = program.calls[index]
    scores, target, weight, reduction, ignored = loss.args
    count, meta = loss.outputs[1], program.slots[scores.slot]
    makers = makers_of(program)
    first = makers.get(scores.slot, -1)
    if count is None or meta is None or len(meta.shape) != 2 or first < 0:
        return program
    calls = list(program.calls)
    slots, storages = list(program.slots), list(program.storages)

    def new(shape: tuple[int, ...]) -> int:
        stride = tuple(1 for _ in shape)
        slots.append(TensorMeta(shape, stride, 0, meta.dtype, meta.device, len(storages)))
        storages.append(Storage(math.prod(shape) * meta.dtype.itemsize, 0, "count"))
        return len(slots) - 1

    kinds = {"dtype": meta.dtype, "device": meta.device}
    rows, is_each = meta.shape[0], reduction == 0
    picked, early = new((rows, 1)), (new((rows,) if is_each else ()), new(()))
    made = [
        replace(loss, target=aten.zeros.default, args=([rows, 1],), kwargs=kinds, outputs=(picked,),
                returns_sequence=False),
        replace(loss, target=PICKED, args=(ref_to(picked), target, meta.shape[1], reduction, ignored, weight), kwargs={},
                outputs=early),
    ]  # fmt: skip
    used = [target.slot] if weight is None else [target.slot, weight.slot]
    needed = [makers[slot] for slot in used if makers.get(slot, -1) > first]
    for place in range(index + 1, len(calls)):
        call = calls[place]
        if call.target is aten.ones_like.default:
            like = program.slots[call.outputs[0]]  # type: ignore[index]
            if like is not None and not like.shape:
                kinds = {"dtype": like.dtype, "device": like.device}
                calls[place] = replace(call, target=aten.ones.default, args=([],), kwargs=kinds)
        if call.target is aten.nll_loss_backward.default and call.args[6].slot == count:
            calls[place] = replace(call, args=(*call.args[:6], ref_to(early[1])))
            needed.append(makers.get(call.args[0].slot, -1))
    moved: set[int] = set()
    written = program.written()
    while needed:
        place = needed.pop()
        if place <= first or place in moved:
            continue
        refs = calls[place].refs()
        if place == index or not _is_pure(program, calls[place]):
            return program
        if any(program.storage_of(slot) in written for slot in refs):
            return program
        moved.add(place)
        needed += [makers.get(slot, -1) for slot in refs]
    order = [*range(first), *sorted(moved)]
    order += [place for place in range(first, len(calls)) if place not in moved]
    ordered = [calls[place] for place in order]
    ordered[first + len(moved) : first + len(moved)] = made
    creators = {
        slots[slot].storage: at
        for at, call in reversed(list(enumerate(ordered)))
        for slot in call.outputs
        if slot is not None and slots[slot] is not None
    }
    storages = [
        storage
        if storage.creator < 0
        else replace(storage, creator=creators.get(number, storage.creator))
        for number, storage in enumerate(storages)
    ]
    return replace(program, calls=ordered, slots=slots, storages=storages)


class _Tiling:
    """One attempt."""

    def __init__(
        self,
        program: Program,
        gone: set[int],
        part_bytes: int,
        refused: Collection[Part],
        *,
        is_long: bool,
    ) -> None:
        self.program, self.gone, self.refused = program, gone, refused
        self.is_long = is_long
        self.part_bytes = part_bytes
        self.slots = list(program.slots)
        self.storages = list(program.storages)
        self.makers = makers_of(program)
        self.members: list[Member] = []
        self.statistics: dict[int, tuple[int, int]] = {}
        """For a log-softmax that is cut along its own dimension, the slots of its rows' maxima and
        of what is subtracted beside them."""
        self.added: dict[int, list[Call]] = {}
        """Calls that take the place of a call."""
        self.totals: dict[int, int] = {}
        """For the gradient of a log-softmax that is cut along its own dimension, the slot of the
        sums of rows."""
        self.later: dict[int, list[Call]] = {}
        self.small: dict[int, int] = {}
        """For indices that never exist whole, the slot of the same as bytes."""
        self.extents: dict[int, tuple[int, int]] = {}
        self._flops: dict[int, int] = {}
        self._agains: dict[int, set[tuple[int, Cut, tuple[Step, ...]]]] = {}
        self.written: dict[int, list[int]] = {}
        for index, call in enumerate(program.calls):
            for slot in call.mutates:
                self.written.setdefault(program.storage_of(slot), []).append(index)

    def flops(self, index: int) -> int:
        """Floating-point operations of a call."""
        if index not in self._flops:
            self._flops[index] = flops_of(self.program, self.program.calls[index])
        return self._flops[index]

    def is_product(self, slot: int) -> bool:
        """Whether a tensor is what `SUMS` make."""
        return slot in self.makers and self.program.calls[self.makers[slot]].target in SUMS

    def is_gone(self, slot: int) -> bool:
        """Whether a tensor never exists whole."""
        meta = self.slots[slot]
        return meta is not None and meta.storage in self.gone

    def result(self) -> Tiled | None:
        program = self.program
        removed: set[int] = set()
        for index, call in enumerate(program.calls):
            made = [slot for slot in call.outputs if slot is not None]
            if made and all(map(self.is_gone, made)):
                if call.target in READERS:
                    self._check_indices(index, call)
                removed.add(index)
                continue
            if not any(map(self.is_gone, call.refs())):
                if any(map(self.is_gone, made)):  # what it makes beside stays
                    raise Uncut(
                        next(program.storage_of(slot) for slot in made if self.is_gone(slot))
                    )
                continue
            self._consume(index, call)
            removed.add(index)
        if not self.members:
            return None
        return self._rewritten(removed)

    def _consume(self, index: int, call: Call) -> None:
        """Cuts a call that reads what never exists whole."""
        read = next(slot for slot in call.refs() if self.is_gone(slot))
        blame = Uncut(self.program.storage_of(read))
        if call.target is aten.nll_loss_forward.default:
            self._loss(index, call)
            return
        if call.mutates:
            if not _changes(self.program, call) or self.is_gone(call.args[0].slot):
                raise blame
            changed: int = call.args[0].slot
            found = self._cheapest(index, changed, partial(Builder.changing, call=call))
            self.members.append(replace(found, changes=True))
            return
        is_reader = call.target in READERS
        if not _is_pure(self.program, call, may_raise=is_reader):
            raise blame
        if is_reader:
            self._check_indices(index, call)
        made = [slot for slot in call.outputs if slot is not None]
        if not made:
            raise blame
        if call.target in FILLED:  # it reads a shape
            self._fill(index, call, blame)
            return
        for slot in made:
            self.members.append(self._widened(self._cheapest(index, slot)))

    def _fill(self, index: int, call: Call, blame: Uncut) -> None:
        """Lets a call make a tensor of one value without another one's shape."""
        meta = self.slots[call.outputs[0]]  # type: ignore[index]
        assert meta is not None
        if meta.stride != contiguous(meta.shape):
            raise blame
        args, kwargs = _filling(call, meta, list(meta.shape))
        new = replace(call, target=FILLED[call.target], args=args, kwargs=kwargs)
        self.added.setdefault(index, []).append(new)

    def _needs_whole(self, ref: Ref) -> None:
        if self.is_gone(ref.slot):
            raise Uncut(self.program.storage_of(ref.slot))

    def _check_indices(self, index: int, call: Call) -> None:
        """Lets the very kernel refuse indices, on zeros that take no memory. Tiles never do."""
        given = call.args[0]
        meta, found = self.slots[given.slot], self.slots[call.outputs[0]]  # type: ignore[index]
        assert meta is not None
        assert found is not None
        used = refs_of(call.args[1:])
        if call.target is aten.embedding.default and self.is_gone(used[0]):
            # Its error names no index, so that the extremes tell as much as all.
            for reduce in (aten.amin.default, aten.amax.default):
                extreme = self._extreme(index, used[0], reduce)
                args = ref_to(extreme), *call.args[2:]
                made = (*self.slots[extreme].shape, 1)  # type: ignore[union-attr]
                self._check(index, call, (meta.shape[0], 1), made, args)
            return
        for slot in used:
            self._needs_whole(ref_to(slot))
        # Of what is read at an index one element is enough.
        shape, made = meta.shape, found.shape
        if call.target is aten.index.Tensor:
            shape = meta.shape[: len(call.args[1])]
            made = made[: len(made) - len(meta.shape) + len(shape)]
        elif call.target is aten.embedding.default:
            shape, made = (meta.shape[0], 1), (*made[:-1], 1)
        self._check(index, call, shape, made, call.args[1:])

    def _extreme(self, index: int, slot: int, reduce: OpOverload) -> int:
        """The slot of the least or the largest of each row of a tensor."""
        meta = self.slots[slot]
        assert meta is not None

        def make(builder: Builder, cut: Cut) -> int:
            return builder.emit(reduce, (Ref(builder.part(slot, cut)), [-1], True))

        found = self.new(meta, (*meta.shape[:-1], 1), "extremes")
        self.members.append(self._cheapest(index, found, make))
        return found

    def _check(
        self,
        index: int,
        call: Call,
        shape: Sequence[int],
        made: Sequence[int],
        args: tuple[Any, ...],
    ) -> None:
        """Lets a call read zeros of a shape beside the tiles, which makes another one."""
        meta, found = self.slots[call.args[0].slot], self.slots[call.outputs[0]]  # type: ignore[index]
        assert meta is not None
        assert found is not None
        zero = self.new(meta, (), "zero")
        wide = self.new(meta, shape, "zeros")
        self.storages.pop()
        like = self.slots[zero]
        assert like is not None
        self.slots[wide] = replace(like, shape=tuple(shape), stride=tuple(0 for _ in shape))
        checked = self.new(found, made, "checked")
        kinds = {"dtype": meta.dtype, "device": meta.device}
        self.added.setdefault(index, []).extend((
            replace(call, target=aten.zeros.default, args=([],), kwargs=kinds, outputs=(zero,)),
            replace(call, target=aten.expand.default, args=(ref_to(zero), list(shape)), kwargs={},
                    outputs=(wide,)),
            replace(call, args=(ref_to(wide), *args), kwargs={}, outputs=(checked,)),
        ))  # fmt: skip

    def _cheapest(self, index: int, slot: int, make: Callable[..., int] | None = None) -> Member:
        """The cheapest way to make a result tile by tile: of those that can be cut as finely as
        wanted, or else of all; of those of one cost, the one with the longest axis, or the
        shortest.

        Args:
            index: the call that makes it.
            slot: the result.
            make: builds a tile's part of it; None: as the call does.
        """
        meta = self.slots[slot]
        assert meta is not None
        best: tuple[tuple[bool, float, bool, int], Member] | None = None
        blame: Uncut | None = None
        ways: list[tuple[Cut | None, int]] = [(cut, _size(meta, cut)) for cut in _cuts(meta)]
        if make is None:
            call = self.program.calls[index]
            sizes = {summed(self.program, call), *in_order(self.program, call)} - {0}
            ways += [(None, size) for size in sorted(sizes)]
        for cut, size in ways:
            if cut is None:
                how = partial(Builder.added, slot=slot)
            elif make is None:
                how = partial(Builder.made, slot=slot, cut=cut)
            else:
                how = partial(make, cut=cut)
            member = Member(index, slot, cut, size, how)
            kept = self._state()
            try:
                builder = Builder(self, member.size, index)
                member.made(builder)
                lengths = builder.lengths([(slot, cut)])
                if lengths is None:
                    raise Uncut
                axis = -builder.size if self.is_long else builder.size
                cost = builder.is_coarse(lengths[0]), builder.cost, cut is None, axis
            except Uncut as error:
                self._restore(kept)
                if blame is None and error.storage in self.gone:
                    blame = error
                continue
            if best is None or cost < best[0]:
                best = cost, member
            self._restore(kept)
        if best is None:
            if blame is None:
                call = self.program.calls[index]
                read = next((one for one in call.refs() if self.is_gone(one)), None)
                blame = Uncut() if read is None else Uncut(self.program.storage_of(read))
            raise blame
        # What it needs beside is noted now.
        best[1].made(Builder(self, best[1].size, index))
        return best[1]

    def _state(self) -> Any:
        return (
            len(self.slots), len(self.storages), len(self.members), dict(self.statistics), dict(self.totals),
            dict(self.extents), dict(self.later), dict(self.small),
        )  # fmt: skip

    def _restore(self, kept: Any) -> None:
        slots, storages, members, *tables = kept
        self.statistics, self.totals, self.extents, self.later, self.small = tables
        del self.slots[slots:], self.storages[storages:], self.members[members:]

    def new(
        self, like: TensorMeta, shape: Sequence[int], name: str, dtype: torch.dtype | None = None
    ) -> int:
        """A new tensor of the program."""
        dtype = dtype or like.dtype
        stride = contiguous(shape)
        meta = TensorMeta(tuple(shape), stride, 0, dtype, like.device, len(self.storages))
        self.storages.append(Storage(math.prod(shape) * dtype.itemsize, 0, name))
        self.slots.append(meta)
        return len(self.slots) - 1

    def _loss(self, index: int, call: Call) -> None:
        """A classification loss: it picks one number of each row, and sums these."""
        scores, target, weight, reduction, ignored = call.args
        meta = self.slots[scores.slot]
        assert meta is not None
        blame = Uncut(meta.storage)
        if len(meta.shape) != 2 or call.kwargs:
            raise blame
        self._needs_whole(target)
        if weight is not None:
            self._needs_whole(weight)
        rows, classes = meta.shape
        picked = self.new(meta, (rows, 1), "picked")

        def make(builder: Builder) -> int:
            part = builder.part(scores.slot, (0, 0))
            label = builder.part(target.slot, (0, 0))
            return builder.emit(pick, (Ref(part), Ref(label)))

        kept = self._state()
        builder = Builder(self, rows, index)
        try:
            make(builder)
        except Uncut:
            self._restore(kept)
            raise blame from None
        if builder.lengths([(picked, (0, 0))]) is None:
            raise blame
        self.extents[target.slot] = (0, classes)
        self.members.append(member := self._widened(Member(index, picked, (0, 0), rows, make)))
        loss = replace(
            call,
            target=PICKED,
            args=(ref_to(picked), target, classes, reduction, ignored, weight),
            kwargs={},
        )
        self.added.setdefault(index, []).append(loss)
        self.later.setdefault(member.slot, []).append(loss)

    def _widened(self, member: Member) -> Member:
        """The same along the axis of which the member's own is a slice, if tiles need what lies
        along that: other members can share it, and tiles are of one length.
        """
        builder = Builder(self, member.size, member.position)
        member.made(builder)
        meta = self.slots[member.slot]
        assert meta is not None
        if member.cut is None or len(builder.wider) != 1 or meta.stride != contiguous(meta.shape):
            return member
        ((step, size),) = builder.wider
        if size > _MOST_WIDER * member.size:
            return member

        def make(builder: Builder) -> int:
            with builder.through(replace(step, to_part=True), member.size):
                return member.made(builder)

        try:
            make(Builder(self, size, member.position))
        except Uncut:
            return member
        first, last = member.cut
        shape = (*meta.shape[:first], size, *meta.shape[last + 1 :])
        wide = self.new(meta, shape, "before a slice")
        sliced = [first, step.behind, step.whole, step.part, step.first, step.stride]
        call = replace(
            self.program.calls[member.position],
            target=SLICED,
            args=(ref_to(wide), list(meta.shape), sliced),
            kwargs={},
            outputs=(member.slot,),
            returns_sequence=False,
        )
        self.later[wide] = [call]
        return replace(member, slot=wide, cut=(first, first), size=size, made=make)

    def statistics_of(self, index: int) -> tuple[int, int]:
        """Slots of two numbers for each row of a softmax: its maximum; and what an element's
        exponential is multiplied by, or for a log-softmax the logarithm of the sum.
        """
        if index not in self.statistics:
            call = self.program.calls[index]
            scores, slot = call.args[0].slot, call.outputs[0]
            assert slot is not None
            is_log = call.target is aten._log_softmax.default
            meta = self._rows_of(slot, call.args[1], self.slots[scores], is_log)

            def maxima(builder: Builder, cut: Cut) -> int:
                return builder.emit(aten.amax.default, (Ref(builder.part(scores, cut)), [-1], True))

            def rests(builder: Builder, cut: Cut) -> int:
                # The exponential of the largest element is 1.
                part = builder.made(slot, cut)
                most = builder.emit(aten.amax.default, (Ref(part), [-1], True))
                return builder.emit(aten.neg.default, (Ref(most),)) if is_log else most

            shape = (*meta.shape[:-1], 1)
            made = self.new(meta, shape, "maxima"), self.new(meta, shape, "sums")
            for one, make in zip(made, (maxima, rests), strict=True):
                self.members.append(self._widened(self._cheapest(index, one, make)))
            self.statistics[index] = made
        return self.statistics[index]

    def total_of(self, index: int) -> int:
        """The slot of the sums of rows that the gradient of a softmax takes shares of."""
        if index not in self.totals:
            call = self.program.calls[index]
            grad, output = (ref.slot for ref in call.args[:2])
            is_log = call.target is aten._log_softmax_backward_data.default
            has_one = is_log and self.has_one(grad, call.args[2])
            meta = self._rows_of(grad, call.args[2], self.slots[output], has_one)

            def make(builder: Builder, cut: Cut) -> int:
                if has_one:
                    # One element of a row is not zero, so any order gives the sum.
                    part = Ref(builder.part(grad, cut))
                    return builder.emit(aten.sum.dim_IntList, (part, [-1], True))
                parts = [
                    Ref(builder.part(slot, cut)) for slot in ((grad,) if is_log else (grad, output))
                ]
                return builder.emit(row_total, tuple(parts))

            total = self.new(meta, (*meta.shape[:-1], 1), "totals")
            self.members.append(self._widened(self._cheapest(index, total, make)))
            self.totals[index] = total
        return self.totals[index]

    def small_of(self, slot: int, rows: int) -> int:
        """The slot of indices of so few rows as bytes: an eighth of the memory, and nothing that
        makes them is run again for each tile that reads them.
        """
        if slot not in self.small:
            meta = self.slots[slot]
            assert meta is not None
            reader = next(
                index
                for index, call in enumerate(self.program.calls)
                if call.target is aten.embedding.default and call.args[1].slot == slot
            )

            def make(builder: Builder, cut: Cut) -> int:
                return builder.emit(as_bytes, (Ref(builder.part(slot, cut)), rows))

            found = self.new(meta, meta.shape, "bytes", torch.uint8)
            self.members.append(self._cheapest(reader, found, make))
            self.small[slot] = found
        return self.small[slot]

    def has_one(self, slot: int, dim: int) -> bool:
        """Whether no more than one element of each row of a tensor is not zero."""
        maker = self.program.calls[self.makers[slot]] if slot in self.makers else None
        if maker is None:
            return False
        if maker.target is not aten.scatter_add.default:
            return maker.target is aten.nll_loss_backward.default
        indices, of = self.slots[maker.args[2].slot], self.slots[slot]
        if indices is None or of is None or (maker.args[1] - dim) % len(of.shape):
            return False
        return indices.shape[dim] == 1 and _is_zero(self, maker.args[0].slot)

    def _rows_of(
        self, slot: int, dim: int, other: TensorMeta | None, may_be_half: bool
    ) -> TensorMeta:
        """A tensor of which a softmax takes rows, with those that it makes of them."""
        meta = self.slots[slot]
        assert meta is not None
        assert other is not None
        dims = len(meta.shape)
        # In half precision a kernel rounds what it has computed in single precision, so that other
        # sums do not show.
        kinds = {torch.float32, torch.float64, *(_HALF if may_be_half else ())}
        is_plain = meta.dtype in kinds and other.dtype == meta.dtype
        if dims < 2 or dim % dims != dims - 1 or not is_plain:
            raise Uncut(meta.storage)
        return meta

    def _rewritten(self, removed: set[int]) -> Tiled:
        """The program with tiles."""
        program = self.program
        groups: list[tuple[int, Builder, list[Member]]] = []
        for member in sorted(self.members, key=lambda member: member.position):
            for position, builder, members in groups:
                if member.changes or builder.size != member.size:
                    continue
                if not self._joins(builder, position, members, member):
                    continue
                members.append(member)
                break
            else:
                builder = Builder(self, member.size, member.position)
                groups.append((member.position, builder, [member]))
        for last in reversed(groups[1:]):  # what joined a group may have brought what another needs
            if any(member.changes for member in last[2]):
                continue
            for position, builder, members in groups[: groups.index(last)]:
                if builder.size == last[1].size and all(
                    self._joins(builder, position, members, member) for member in last[2]
                ):
                    members += last[2]
                    members.sort(key=lambda member: member.position)
                    groups.remove(last)
                    break
        added: dict[int, list[Tile]] = {}
        for position, builder, members in groups:
            members.sort(key=lambda member: member.changes)
            numbers = [member.made(builder) for member in members]
            if not builder.given() or not self._holds(builder, position, members):
                raise Uncut(next(iter(sorted(builder.remade))) if builder.remade else -1)
            body, parts = builder.body(numbers, members)
            metas = [builder.meta(slot) for slot in builder.given()]
            body = with_places(body, metas)
            made = [member.slot for member in members if not member.changes]
            if body.scratch_bytes:
                made.append(self.new(metas[0], (body.scratch_bytes,), "scratch", torch.uint8))
            of = [program.calls[member.position] for member in reversed(members)]
            source = next((one.source for one in of if one.source.file), of[0].source)
            call = Call(
                TILES,
                (
                    [ref_to(slot) for slot in builder.given()],
                    name_of(body),
                    [ref_to(slot) for slot in builder.given_numbers()],
                ),
                {},
                tuple(made),
                True,
                program.calls[position].phase,
                source,
                tuple(member.slot for member in members if member.changes),
            )
            added.setdefault(position, []).append(Tile(call, body, tuple(members), parts))
        calls: list[Call] = []
        tiles: list[Tile] = []
        for index, call in enumerate(program.calls):
            for tile in added.get(index, ()):
                tiles.append(tile)
                calls.append(tile.call)
                later = (self.later.get(member.slot, ()) for member in tile.members)
                calls += [one for one in chain(*later) if one.target is SLICED]
            calls += self.added.get(index, ())
            if index not in removed:
                calls.append(call)
        creators: dict[int, int] = {}
        for number, call in enumerate(calls):
            for slot in call.outputs:
                meta = None if slot is None else self.slots[slot]
                if meta is not None:
                    creators.setdefault(meta.storage, number)
        storages = [
            storage
            if number < len(program.storages) and storage.creator < 0
            else replace(storage, creator=creators.get(number, 0))
            for number, storage in enumerate(self.storages)
        ]
        changed = replace(program, calls=calls, slots=self.slots, storages=storages)
        return Tiled(
            prune(changed),
            program,
            tuple(tiles),
            frozenset(self.gone),
            sum(builder.cost for _, builder, _ in groups),
            self.later,
            self.slots,
            self.extents,
        )

    def _joins(
        self, builder: Builder, position: int, members: Sequence[Member], member: Member
    ) -> bool:
        """Whether a member makes again what others do, all that it needs is there where they are
        made, and tiles of one length suit all.
        """
        again = self._again(member)
        if all(again.isdisjoint(self._again(one)) for one in members):
            return False
        trial = Builder(self, builder.size, position)
        try:
            for one in (*members, member):
                one.made(trial)
        except Uncut:
            return False
        if trial.lengths([(one.slot, one.cut) for one in (*members, member)]) is None:
            return False
        given = (*trial.given(), *trial.given_numbers())
        return all(self._made_at(slot) < position for slot in given)

    def _again(self, member: Member) -> set[tuple[int, Cut, tuple[Step, ...]]]:
        """Parts that a member makes of what never exists whole."""
        if id(member) not in self._agains:
            alone = Builder(self, member.size, member.position)
            with suppress(Uncut):
                member.made(alone)
            self._agains[id(member)] = alone.again
        return self._agains[id(member)]

    def _made_at(self, slot: int) -> int:
        """The call before which a tensor does not exist."""
        if slot >= len(self.program.slots):
            return next(
                one.position
                for one in self.members
                if one.slot == slot
                or any(slot in call.outputs for call in self.later.get(one.slot, ()))
            )
        return self.makers.get(slot, -1)

    def _holds(self, builder: Builder, position: int, members: Sequence[Member]) -> bool:
        """Whether nothing changes what tiles read between the moments at which the original program
        reads it and the moment at which they do.
        """
        last = max(position, *(member.position for member in members))
        changed = {self.slots[one.slot].storage for one in members if one.changes}  # type: ignore[union-attr]
        for storage in changed:  # no other input is the same memory
            if sum(self.slots[slot].storage == storage for slot in builder.given()) != 1:  # type: ignore[union-attr]
                return False
        return not any(
            first <= index <= last
            for storage, first in builder.read.items()
            for index in self.written.get(storage, ())
            if storage not in changed or index != position
        )


class Builder:
    """Builds the works of one body."""

    def __init__(self, tiling: _Tiling, size: int, position: int) -> None:
        self.tiling, self.size, self.position = tiling, size, position
        self.cost = 0.0
        self.flops = 0
        self.read: dict[int, int] = {}
        """For each storage that is read, the first call of the original program that stands for a
        reader of it."""
        self.remade: set[int] = set()
        self.again: set[tuple[int, Cut, tuple[Step, ...]]] = set()
        """Parts of what never exists whole."""
        self.made_parts: dict[tuple[int, Cut], int] = {}
        self._inputs: dict[tuple[int, Cut | None], int] = {}
        self._numbers: dict[int, int] = {}
        self._changed: dict[int, int] = {}
        """For each value that is a changed part of an input, the input's number."""
        self._known: dict[tuple[int, Cut, tuple[Step, ...]], int] = {}
        self._steps: tuple[Step, ...] = ()
        """The way from the tile's axis to that whose parts are made now."""
        self._axis = size
        """The size of that."""
        self.wider: set[tuple[Step, int]] = set()
        """The steps from the tile's axis to that of which it is a slice, and the size of that."""
        self._works: list[Work] = []
        self._several: dict[tuple[int, Cut, tuple[Step, ...]], tuple[int, ...]] = {}
        self._metas: list[tuple[tuple[int, ...], int]] = []
        self._makers: dict[int, Work] = {}
        self._roots: dict[int, int] = {}
        self._fresh: set[int] = set()
        """Values in memory of their own."""
        self._count = 0
        self._reader = position
        self.widest_bytes = 0.0

    def meta(self, slot: int) -> TensorMeta:
        """A tensor of the program."""
        meta = self.tiling.slots[slot]
        if meta is None:
            raise Uncut
        return meta

    def part(self, slot: int, cut: Cut) -> int:
        """The number of a tile's part of a tensor."""
        meta = self.meta(slot)
        if _size(meta, cut) != self._axis:
            raise Uncut(meta.storage)
        key = slot, cut, self._steps
        if key in self._known:
            return self._known[key]
        if self._is_late(slot) or self.tiling.is_gone(slot):
            number = self.made(slot, cut)
        else:
            is_one = _is_joined(meta, cut)
            if not is_one and math.prod(meta.shape) * meta.dtype.itemsize > self.tiling.part_bytes:
                raise Uncut
            is_apart = bool(self._steps) or not is_one
            number = self._places(slot, cut) if is_apart else self._input(slot, cut)
        self._known[key] = number
        return number

    def _places(self, slot: int, cut: Cut) -> int:
        """The number of what a tile reads of a tensor that exists whole: along another axis, or
        where the dimensions that are cut do not lie as one.
        """
        meta = self.meta(slot)
        shape = [*meta.shape[: cut[0]], self._axis, *meta.shape[cut[1] + 1 :]]
        whole = self.emit(aten.reshape.default, (Ref(self.whole(slot)), shape))
        places = self._emit_along(places_at, self._steps, meta.device)
        self.cost += math.prod(meta.shape)
        return self.emit(aten.index_select.default, (Ref(whole), cut[0], places))

    def _emit_along(
        self, target: Callable[..., torch.Tensor], steps: tuple[Step, ...], device: torch.device
    ) -> Ref:
        """What tells something of a tile's elements along the axis to which steps lead."""
        before, self._steps = self._steps, ()
        try:
            return Ref(self.emit(target, (Start(), Length(), steps, device)))
        finally:
            self._steps = before

    @contextmanager
    def through(self, step: Step, size: int) -> Iterator[None]:
        """Parts are those along an axis of a size to which a step leads."""
        before = self._steps, self._axis
        if not self._steps and not step.to_part:
            self.wider.add((step, size))
        is_back = bool(self._steps) and self._steps[-1] == replace(step, to_part=not step.to_part)
        self._steps = self._steps[:-1] if is_back else (*self._steps, step)
        self._axis = size
        try:
            yield
        finally:
            self._steps, self._axis = before

    def inside(self, number: int, step: Step, out: TensorMeta, cut: Cut) -> int:
        """A part, with zeros where a step to a slice leads to no element."""
        outside = self._emit_along(is_outside, (*self._steps, step), out.device)
        wide = [Length(), *(1 for _ in out.shape[cut[1] + 1 :])]
        mask = self.emit(aten.reshape.default, (outside, wide))
        return self.emit(aten.masked_fill.Scalar, (Ref(number), Ref(mask), 0))

    def made(self, slot: int, cut: Cut) -> int:
        """As `part`, by the call that makes the tensor, whether it exists whole or not."""
        if not self._steps and (slot, cut) in self.made_parts:
            return self.made_parts[slot, cut]
        index = self.tiling.makers.get(slot)
        meta = self.meta(slot)
        if index is None:
            raise Uncut(meta.storage)
        call = self.tiling.program.calls[index]
        rule = rule_of(call)
        if rule is None:
            raise Uncut(meta.storage)
        before, self._reader = self._reader, index
        try:
            number = rule(self, call, call.outputs.index(slot), cut)
        except Uncut as error:
            is_told = error.storage in self.tiling.gone
            raise Uncut(error.storage if is_told else meta.storage) from None
        finally:
            self._reader = before
        if self.tiling.is_gone(slot):
            self.remade.add(meta.storage)
            self.again.add((slot, cut, self._steps))
            self.widest_bytes = max(
                self.widest_bytes, math.prod(meta.shape) * meta.dtype.itemsize / self.size
            )
        if not self._steps:
            self.made_parts[slot, cut] = number
        count, flops = math.prod(meta.shape), self.tiling.flops(index)
        self.flops += flops
        self.cost += count + flops * _FLOP_COST
        return number

    def added(self, slot: int) -> int:
        """The number of a work that adds a block's part of a product to the product, or of the
        gradient of an embedding to that.
        """
        index = self.tiling.makers[slot]
        call = self.tiling.program.calls[index]
        before, self._reader = self._reader, index
        try:
            if call.target in SUMS:
                cuts = [(dim, dim) for dim in SUMS[call.target]]
            else:
                shape = self.meta(call.args[1].slot).shape
                last = next(
                    dim for dim in range(len(shape)) if math.prod(shape[: dim + 1]) == self.size
                )
                cuts = [(0, last)] * 2
                self.tiling.extents[call.args[1].slot] = (0, call.args[2])
            slots = [ref.slot for ref in call.args[:2]]
            if call.target not in SUMS:
                slots[1] = _small(self, slots[1], call.args[2])
            parts = [Ref(self.part(slot, cut)) for slot, cut in zip(slots, cuts, strict=True)]
        finally:
            self._reader = before
        is_product = call.target in SUMS
        number = self.emit(
            add_product if is_product else add_rows,
            (*parts, *(() if is_product else call.args[3:4])),
        )
        self._works[-1] = replace(self._works[-1], adds_to=slot)
        if is_product:
            self._closing([number])
        flops = self.tiling.flops(index)
        self.flops += flops
        self.cost += math.prod(self.meta(slot).shape) + flops * _FLOP_COST
        if not is_product:
            self.cost += math.prod(self.meta(call.args[1].slot).shape) * _INDEX_COST
        return number

    def changing(self, call: Call, cut: Cut) -> int:
        """The number of a work that changes a tile's part of a call's first argument."""
        number = _pointwise_of(self, call, call.args[0].slot, cut)
        first = self._works[-1].args[0].slot
        if first not in self._inputs.values():
            raise Uncut
        used = [ref for work in self._works for ref in refs_of([(work.args, work.kwargs)])]
        if used.count(first) != 1:
            raise Uncut
        self._changed[number] = first
        return number

    def _closing(self, adding: Sequence[int]) -> tuple[set[int], dict[int, Held]]:
        """(numbers that are made when a block ends, what is held until then by number), for works
        that add.
        """
        made_of = {number: part for part, number in self.made_parts.items()}
        closing: set[int] = set()
        held: dict[int, Held] = {}
        waiting = list(adding)
        while waiting:
            number = waiting.pop()
            work = self._makers.get(number)
            if work is None or number in closing or number in held:
                continue  # an input, or known
            if number in adding or number in self._roots:
                closing.update(work.makes)  # type: ignore[arg-type]
                waiting += refs_of((work.args, work.kwargs))
            elif number in made_of:
                slot, cut = made_of[number]
                meta = self.meta(slot)
                shape = tuple(_shape(meta, cut))
                held[number] = Held(number, cut[0], shape, meta.dtype)
            else:
                raise Uncut
        return closing, held

    def whole(self, slot: int) -> int:
        """The number of a tensor that a tile sees whole."""
        if self.tiling.is_gone(slot):
            raise Uncut(self.meta(slot).storage)
        if self._is_late(slot):
            call = self.tiling.program.calls[self.tiling.makers[slot]]
            if len(call.outputs) == 1:
                args = substitute(call.args, lambda ref: Ref(self.whole(ref.slot)))
                return self.emit(call.target, args, call.kwargs)
        return self._input(slot, None)

    def number(self, slot: int) -> int:
        """The number of a live number."""
        if slot not in self._numbers:
            self._numbers[slot] = self._count
            self._count += 1
        return self._numbers[slot]

    def _is_late(self, slot: int) -> bool:
        """Whether a tensor is a view, or one number, that the original program makes later than the
        tiles run, so that they make it themselves.
        """
        index = self.tiling.makers.get(slot, -1)
        if index < self.position:
            return False
        call = self.tiling.program.calls[index]
        return call.target in VIEWS or (call.target is _NUMBER and not call.refs())

    def _input(self, slot: int, cut: Cut | None) -> int:
        storage = self.meta(slot).storage
        self.read[storage] = min(self.read.get(storage, self._reader), self._reader)
        key = slot, cut
        if key not in self._inputs:
            self._inputs[key] = self._count
            self._count += 1
        return self._inputs[key]

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> int:
        """Adds a work with one result."""
        return self.emit_several(target, args, kwargs, 1)[0]

    def emit_several(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, count: int
    ) -> tuple[int, ...]:
        """Adds a work with several results."""
        if self._steps and any(isinstance(one, Start) for one in args):
            raise Uncut  # the tile's elements are not one interval there
        made = tuple(range(self._count, self._count + count))
        self._count += count
        self._works.append(Work(target, args, kwargs or {}, made, count > 1))
        self._makers.update(dict.fromkeys(made, self._works[-1]))
        if target in VIEWS or target is aten.reshape.default:
            self._roots.update(dict.fromkeys(made, self._root(args[0].slot)))
        elif target in FRESH or target in OVER:
            self._fresh.update(made)
        return made

    def emit_all(self, call: Call, cut: Cut, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The numbers of parts of all results of a call, which it makes once."""
        first = next(slot for slot in call.outputs if slot is not None)
        key = self.tiling.makers[first], cut, self._steps
        if key not in self._several:
            count = len(call.outputs)
            self._several[key] = self.emit_several(call.target, args, call.kwargs, count)
        return self._several[key]

    def _root(self, number: int) -> int:
        """The value whose memory a value may lie in."""
        return self._roots.get(number, number)

    def given(self) -> list[int]:
        """Slots of the tensors among the inputs, in order."""
        return [slot for slot, _ in self._inputs]

    def given_numbers(self) -> list[int]:
        """Slots of the numbers, which come after these."""
        return list(self._numbers)

    def is_coarse(self, length: int) -> bool:
        """Whether tiles are far larger than wanted: the axis is too short, or smaller ones are
        refused.
        """
        return self.widest_bytes * length > 1.5 * self.tiling.part_bytes

    def lengths(self, made: Collection[tuple[int, Cut | None]]) -> tuple[int, int] | None:
        """(elements of a tile, elements of a block): of those at which nothing is known to get
        other bits, the least, or those whose block is most like a tile as long as wanted; None if
        there are none.

        Args:
            made: slots that are made, and how they are cut.
        """
        most = math.ceil(self.widest_bytes * self.size / self.tiling.part_bytes)
        refused = self.tiling.refused
        lengths = lengths_of(self.size, max(1, min(self.size, most)))
        parts = [(slot, cut) for slot, cut in made if cut is not None] + list(self.made_parts)
        totals = [slot for slot, cut in made if cut is None]
        if not totals:
            pairs = [(length, self.size) for length in lengths]
        elif not any(map(self.tiling.is_product, totals)):  # each tile is a block
            pairs = [(length, length) for length in lengths]
        else:
            wanted = lengths[0]
            blocks = sorted(blocks_of(self.size), key=lambda block: abs(math.log(block / wanted)))
            pairs = [(length, block) for block in blocks for length in _options(block, wanted)]
        for length, block in pairs:
            if not any((*part, length) in refused for part in parts) and not any(
                (slot, None, block) in refused for slot in totals
            ):
                return length, block
        return None

    def body(
        self, numbers: Sequence[int], members: Sequence[Member]
    ) -> tuple[Body, dict[int, tuple[int, Cut]]]:
        """The finished body, and `Tile.parts`."""
        lengths = self.lengths([(member.slot, member.cut) for member in members])
        if lengths is None:  # none that suits all
            raise Uncut(min(self.remade))
        inputs = (*self._inputs.values(), *self._numbers.values())
        order = {number: place for place, number in enumerate(inputs)}
        for work in self._works:
            for number in work.makes:
                assert number is not None
                order[number] = len(order)
        closed, held = self._closing(
            [
                number
                for number, member in zip(numbers, members, strict=True)
                if member.cut is None and self.tiling.is_product(member.slot)
            ]
        )
        places = {member.slot: place for place, member in enumerate(members)}

        def numbered(work: Work) -> Work:
            return replace(
                work,
                args=substitute(work.args, lambda ref: Ref(order[ref.slot])),
                kwargs=substitute(work.kwargs, lambda ref: Ref(order[ref.slot])),
                makes=tuple(order[number] for number in work.makes if number is not None),
                adds_to=None if work.adds_to is None else places[work.adds_to],
            )

        closing = [numbered(work) for work in self._works if not closed.isdisjoint(work.makes)]
        # Works that nobody uses are left out.
        used = {number for number in numbers if number not in closed} | held.keys()
        kept = set(map(self._root, used))  # whose memory is read later
        works: list[Work] = []
        for work in reversed(self._works):
            if used.isdisjoint(work.makes):
                continue
            refs = refs_of((work.args, work.kwargs))
            first = work.args[0] if work.args else None
            over = None
            if isinstance(first, Ref) and work.target in OVER:
                root = self._root(first.slot)
                others = {self._root(ref) for ref in refs if ref != first.slot}
                if root in self._fresh and root not in kept | others:
                    over = order[first.slot]
            kept.update(map(self._root, refs))
            last = tuple(order[number] for number in dict.fromkeys(refs) if number not in used)
            used.update(refs)
            works.append(replace(numbered(work), last=last, over=over))
        made: list[Made] = []
        results: dict[int, tuple[int, Member]] = {}
        for number, member in zip(numbers, members, strict=True):
            if not member.changes:
                meta = self.meta(member.slot)
                results[len(made)] = number, member
                made.append(Made(order[number], member.cut, meta.shape, meta.stride, meta.dtype))
        body = Body(
            self.size,
            lengths[0],
            (*(cut for _, cut in self._inputs), *(None for _ in self._numbers)),
            tuple(reversed(works)),
            tuple(made),
            round(self.flops),
            lengths[1],
            tuple(replace(one, number=order[number]) for number, one in held.items()),
            tuple(closing),
            tuple((order[first], order[number]) for number, first in self._changed.items()),
            () if closing else tuple(self._over(results, order)),
        )
        parts = {
            order[number]: (slot, cut)
            for (slot, cut), number in self.made_parts.items()
            if number in order
        }
        return body, parts

    def _over(
        self, results: dict[int, tuple[int, Member]], order: dict[int, int]
    ) -> Iterator[tuple[int, int]]:
        """`Body.over`: inputs of which tiles see their parts alone, with results of that cut and
        layout.
        """
        storages = [self.meta(slot).storage for slot in self.given()]
        roots = {self._root(number) for number, _ in results.values()}
        for (slot, cut), number in self._inputs.items():
            meta = self.meta(slot)
            is_alone = storages.count(meta.storage) == 1 and number not in roots
            if cut is None or not is_alone or number in self._changed.values():
                continue
            for place, (_, member) in results.items():
                made = self.meta(member.slot)
                if member.cut == cut and (made.shape, made.stride, made.dtype) == (
                    meta.shape, meta.stride, meta.dtype,
                ):  # fmt: skip
                    yield order[number], place


def _options(block: int, wanted: int) -> list[int]:
    """Lengths of tiles of a block, if two tiles of a wanted length have room at once: one is held
    for the whole block, and two are worked with. Where the blocks of a library need more room,
    products are cut along a dimension of their results, which takes more time.
    """
    found = []
    finer = wanted - block // 2
    if block > wanted and finer >= ALIGNED:
        each = -(-block // -(-block // finer))
        found.append(-(-each // ALIGNED) * ALIGNED)
    if block <= 1.5 * wanted:
        found.append(block)
    return found


def _size(meta: TensorMeta, cut: Cut) -> int:
    return math.prod(meta.shape[cut[0] : cut[1] + 1])


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose rows lie one behind the other."""
    stride = [1] * len(shape)
    for place in range(len(shape) - 2, -1, -1):
        stride[place] = stride[place + 1] * shape[place + 1]
    return tuple(stride)


def _cuts(meta: TensorMeta) -> list[Cut]:
    """The ways to cut a tensor: along each dimension, or along its first ones taken as one."""
    dims = len(meta.shape)
    found = [(dim, dim) for dim in range(dims)] + [(0, dim) for dim in range(1, dims)]
    kept = []
    for cut in found:
        if _size(meta, cut) >= 2 and _is_joined(meta, cut):
            kept.append(cut)
    return kept


def _is_joined(meta: TensorMeta, cut: Cut) -> bool:
    """Whether dimensions lie so that they are one."""
    try:
        joined(meta.shape[cut[0] : cut[1] + 1], meta.stride[cut[0] : cut[1] + 1])
    except ValueError:
        return False
    return True


VIEWS = frozenset(
    (
        aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default,
        aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int,
        aten.detach.default, aten.alias.default, aten.split.Tensor,
    )
)  # fmt: skip

FRESH = frozenset(
    (
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.nll_loss_backward.default,
        aten._to_copy.default, aten.clone.default, read_rows,
    )
)  # fmt: skip
"""What makes a result in memory of its own whatever it gets, beside what is in `OVER`."""

_NUMBER = aten.scalar_tensor.default

READERS = frozenset((aten.gather.default, aten.index.Tensor, aten.embedding.default))
"""What reads elements at indices, and refuses some."""

SUMS = {aten.mm.default: (1, 0), aten.bmm.default: (2, 1)}
"""The dimensions of the two factors over which a product sums."""

Rule = Callable[[Builder, Call, int, Cut], int]
RULES: dict[Any, Rule] = {}


def rule_of(call: Call) -> Rule | None:
    """How a part of a call's result is made; None if it is not known."""
    if not isinstance(call.target, OpOverload):
        return None
    found = RULES.get(call.target)
    if found is None and torch.Tag.pointwise in call.target.tags and len(call.outputs) == 1:
        return _pointwise
    return found


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, rule))
        return rule

    return enter


def _operand(builder: Builder, slot: int, dims: int, cut: Cut, shape: Sequence[int]) -> int:
    """A part of an argument that is broadcast to a shape of so many dimensions, for a part of that
    shape.
    """
    meta = builder.meta(slot)
    lack = dims - len(meta.shape)
    own = [dim - lack for dim in range(cut[0], cut[1] + 1) if dim >= lack]
    if not own:
        return builder.whole(slot)
    sizes = [meta.shape[dim] for dim in own]
    wanted = list(shape[cut[0] : cut[1] + 1])
    if len(own) == len(wanted) and sizes == wanted:
        return builder.part(slot, (own[0], own[-1]))
    if all(size == 1 for size in sizes):
        number = builder.whole(slot)
        if len(own) == 1:
            return number
        left = [*meta.shape[: own[0]], 1, *meta.shape[own[-1] + 1 :]]
        return builder.emit(aten.reshape.default, (Ref(number), left))
    raise Uncut(meta.storage if builder.tiling.is_gone(slot) else -1)


def _pointwise(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    return _pointwise_of(builder, call, call.outputs[place], cut)  # type: ignore[arg-type]


def _pointwise_of(builder: Builder, call: Call, slot: int, cut: Cut) -> int:
    """A part of what has the shape of a slot."""
    out = builder.meta(slot)
    dims = len(out.shape)

    def part(ref: Ref) -> Ref:
        if builder.tiling.slots[ref.slot] is None:
            return Ref(builder.number(ref.slot))
        return Ref(_operand(builder, ref.slot, dims, cut, out.shape))

    kwargs = dict(call.kwargs)
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        raise Uncut
    return builder.emit(call.target, substitute(call.args, part), substitute(kwargs, part))


for _target in (
    aten._to_copy.default, aten.clone.default, aten.leaky_relu_backward.default, aten.elu_backward.default,
    aten.softplus_backward.default, aten.hardtanh_backward.default,
):  # fmt: skip
    RULES[_target] = _pointwise


@_rule(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _same(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    return builder.part(call.args[0].slot, cut)


@_rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    out, given = builder.meta(call.outputs[place]), builder.meta(call.args[0].slot)  # type: ignore[arg-type]
    before = math.prod(out.shape[: cut[0]])
    size = _size(out, cut)
    for first in reversed(range(len(given.shape))):  # dimensions of one element are no part of it
        if math.prod(given.shape[:first]) != before:
            continue
        for last in range(first, len(given.shape)):
            if _size(given, (first, last)) == size:
                number = builder.part(call.args[0].slot, (first, last))
                return builder.emit(aten.reshape.default, (Ref(number), _shape(out, cut)))
    raise Uncut


def _shape(meta: TensorMeta, cut: Cut) -> list[Any]:
    """The shape of a part."""
    return [*meta.shape[: cut[0]], Length(), *meta.shape[cut[1] + 1 :]]


def _dim(dim: int, cut: Cut) -> int:
    """The number of a dimension in a part, if it is not one of those that are cut."""
    return dim if dim < cut[0] else dim - (cut[1] - cut[0])


@_rule(aten.t.default, aten.transpose.int, aten.permute.default)
def _permuted(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given = builder.meta(call.args[0].slot)
    dims = len(given.shape)
    order = list(range(dims))
    if call.target is aten.permute.default:
        order = [dim % dims for dim in call.args[1]]
    elif dims >= 2:
        one, other = (0, 1) if call.target is aten.t.default else call.args[1:3]
        order[one], order[other] = order[other], order[one]
    own = order[cut[0] : cut[1] + 1]
    wide = [dim for dim in own if given.shape[dim] != 1]
    if wide != list(range(wide[0], wide[0] + len(wide))):
        raise Uncut
    inner = wide[0], wide[-1]
    number = builder.part(call.args[0].slot, inner)
    new = [_dim(dim, inner) for dim in order if not inner[0] < dim <= inner[1]]
    number = builder.emit(aten.permute.default, (Ref(number), new))
    if wide == own:
        return number
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    return builder.emit(aten.reshape.default, (Ref(number), _shape(out, cut)))


@_rule(aten.unsqueeze.default)
def _unsqueezed(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    dim = call.args[1] % len(out.shape)
    if cut[0] <= dim <= cut[1]:
        if cut[0] == cut[1]:
            raise Uncut
        return builder.part(call.args[0].slot, (cut[0], cut[1] - 1))
    inner = cut if dim > cut[1] else (cut[0] - 1, cut[1] - 1)
    number = builder.part(call.args[0].slot, inner)
    return builder.emit(aten.unsqueeze.default, (Ref(number), _dim(dim, cut)))


@_rule(aten.squeeze.dim)
def _squeezed(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given = builder.meta(call.args[0].slot)
    dim = call.args[1] % len(given.shape)
    if given.shape[dim] != 1:
        return builder.part(call.args[0].slot, cut)
    if cut[0] < dim <= cut[1]:
        return builder.part(call.args[0].slot, (cut[0], cut[1] + 1))
    inner = cut if dim > cut[1] else (cut[0] + 1, cut[1] + 1)
    number = builder.part(call.args[0].slot, inner)
    return builder.emit(aten.squeeze.dim, (Ref(number), _dim(dim, inner)))


@_rule(aten.expand.default)
def _expanded(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    number = _operand(builder, call.args[0].slot, len(out.shape), cut, out.shape)
    return builder.emit(aten.expand.default, (Ref(number), _shape(out, cut)))


def _off(dim: int, cut: Cut) -> None:
    """Refuses a cut of a dimension over which the operator sums or moves elements."""
    if cut[0] <= dim <= cut[1]:
        raise Uncut


@_rule(aten.slice.Tensor)
def _sliced(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    dim = (call.args[1] if len(call.args) > 1 else 0) % len(out.shape)
    given = builder.meta(call.args[0].slot)
    if given.shape == out.shape:
        return builder.part(call.args[0].slot, cut)
    if cut[0] <= dim <= cut[1]:
        step = _step(given, out, dim, cut, *call.args[2:])
        with builder.through(step, _size(given, cut)):
            return builder.part(call.args[0].slot, cut)
    number = builder.part(call.args[0].slot, cut)
    return builder.emit(call.target, (Ref(number), _dim(dim, cut), *call.args[2:]), call.kwargs)


def _step(
    whole: TensorMeta,
    part: TensorMeta,
    dim: int,
    cut: Cut,
    start: int | None = None,
    end: int | None = None,
    stride: int = 1,
) -> Step:
    """The way to a tensor from a slice of it, along an axis that has the dimension."""
    first = slice(start, end, stride).indices(whole.shape[dim])[0]
    behind = math.prod(part.shape[dim + 1 : cut[1] + 1])
    return Step(behind, whole.shape[dim], part.shape[dim], first, stride, to_part=False)


@_rule(aten.select.int)
def _selected(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given = builder.meta(call.args[0].slot)
    dim = call.args[1] % len(given.shape)
    if cut[0] < dim <= cut[1]:
        raise Uncut
    inner = cut if dim > cut[1] else (cut[0] + 1, cut[1] + 1)
    number = builder.part(call.args[0].slot, inner)
    return builder.emit(aten.select.int, (Ref(number), _dim(dim, inner), call.args[2]))


@_rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given = builder.meta(call.args[0].slot)
    dim = (call.args[2] if len(call.args) > 2 else 0) % len(given.shape)
    _off(dim, cut)
    number = builder.part(call.args[0].slot, cut)
    return builder.emit_all(call, cut, (Ref(number), call.args[1], _dim(dim, cut)))[place]


@_rule(aten.cat.default)
def _joined(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    dim = (call.args[1] if len(call.args) > 1 else 0) % len(out.shape)
    _off(dim, cut)
    parts = [Ref(builder.part(ref.slot, cut)) for ref in call.args[0]]
    return builder.emit(aten.cat.default, (parts, _dim(dim, cut)))


@_rule(aten.slice_backward.default)
def _slice_backward(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    dim = call.args[2] % len(out.shape)
    given = builder.meta(call.args[0].slot)
    if given.shape == out.shape:
        return builder.part(call.args[0].slot, cut)
    if cut[0] <= dim <= cut[1]:
        step = replace(_step(out, given, dim, cut, *call.args[3:]), to_part=True)
        with builder.through(step, _size(given, cut)):
            number = builder.part(call.args[0].slot, cut)
        return builder.inside(number, step, out, cut)
    number = builder.part(call.args[0].slot, cut)
    return builder.emit(
        call.target, (Ref(number), _shape(out, cut), _dim(dim, cut), *call.args[3:])
    )


@_rule(aten.mm.default)
def _mm(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    return builder.emit(
        call.target, _factors(builder, call.args[0].slot, call.args[1].slot, cut, 0)
    )


def _factors(builder: Builder, left: int, right: int, cut: Cut, first: int) -> tuple[Any, ...]:
    """The parts of two factors; rows are dimension `first`."""
    if cut[0] != cut[1]:
        raise Uncut
    dim = cut[0]
    if dim < first:
        return Ref(builder.part(left, cut)), Ref(builder.part(right, cut))
    if dim == first:
        return Ref(builder.part(left, cut)), Ref(builder.whole(right))
    return Ref(builder.whole(left)), Ref(builder.part(right, cut))


@_rule(aten.bmm.default)
def _bmm(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    return builder.emit(
        call.target, _factors(builder, call.args[0].slot, call.args[1].slot, cut, 1)
    )


@_rule(aten.addmm.default, aten.baddbmm.default)
def _addmm(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    first = len(out.shape) - 2
    bias = _operand(builder, call.args[0].slot, len(out.shape), cut, out.shape)
    factors = _factors(builder, call.args[1].slot, call.args[2].slot, cut, first)
    return builder.emit(call.target, (Ref(bias), *factors), call.kwargs)


@_rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def _softmax(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given = builder.meta(call.args[0].slot)
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    dim = call.args[1] % len(out.shape)
    number = builder.part(call.args[0].slot, cut)
    is_safe = call.target is aten._safe_softmax.default
    if not cut[0] <= dim <= cut[1]:
        if is_safe and given.dtype == out.dtype:
            return builder.emit(safe_softmax, (Ref(number), _dim(dim, cut)))
        return builder.emit(call.target, (Ref(number), _dim(dim, cut), *call.args[2:]), call.kwargs)
    _off_others(dim, cut)
    builder.cost += 2 * math.prod(out.shape)  # the statistics
    index = builder.tiling.makers[call.outputs[place]]  # type: ignore[index]
    most, rest = (Ref(builder.whole(slot)) for slot in builder.tiling.statistics_of(index))
    is_log = call.target is aten._log_softmax.default
    value, most, rest = (_single(builder, one, out) for one in (Ref(number), most, rest))
    less = Ref(builder.emit(aten.sub.Tensor, (value, most)))
    if is_log:
        # In half precision the kernel rounds the two numbers of a row, and then the difference.
        return _rounded(builder, builder.emit(aten.sub.Tensor, (less, rest)), out)
    negative = Ref(builder.emit(aten.neg.default, (rest,)))
    exponential = Ref(builder.emit(less_exponential, (less,)))
    number = builder.emit(aten.mul.Tensor, (exponential, negative))
    if is_safe:
        is_masked = Ref(builder.emit(aten.eq.Scalar, (most, float("-inf"))))
        number = builder.emit(aten.masked_fill.Scalar, (Ref(number), is_masked, 0))
    return number


def _single(builder: Builder, value: Ref, like: TensorMeta) -> Ref:
    """A value in the precision in which kernels compute."""
    if like.dtype not in _HALF:
        return value
    wide_bytes = math.prod(like.shape) * torch.float32.itemsize / builder.size
    builder.widest_bytes = max(builder.widest_bytes, wide_bytes)
    return Ref(builder.emit(aten._to_copy.default, (value,), {"dtype": torch.float32}))


def _rounded(builder: Builder, number: int, like: TensorMeta) -> int:
    """What has been computed so, as kernels give it back."""
    if like.dtype not in _HALF:
        return number
    return builder.emit(aten._to_copy.default, (Ref(number),), {"dtype": like.dtype})


def _off_others(dim: int, cut: Cut) -> None:
    """Refuses a cut of other dimensions with this one."""
    if cut != (dim, dim):
        raise Uncut


@_rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    grad, output, dim, dtype = call.args
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    dim %= len(out.shape)
    last = Ref(builder.part(output.slot, cut))
    if not cut[0] <= dim <= cut[1]:
        first = Ref(builder.part(grad.slot, cut))
        return builder.emit(call.target, (first, last, _dim(dim, cut), dtype))
    _off_others(dim, cut)
    is_log = call.target is aten._log_softmax_backward_data.default
    if is_log and builder.tiling.has_one(grad.slot, dim):
        builder.cost += 2 * math.prod(out.shape)  # the totals
        first = Ref(builder.part(grad.slot, cut))
        index = builder.tiling.makers[call.outputs[place]]  # type: ignore[index]
        total = Ref(builder.whole(builder.tiling.total_of(index)))
        return builder.emit(less_share_of_one, (first, last, total))
    last = _single(builder, last, out)
    if is_log:  # before there is the gradient, so that both take the least
        last = Ref(builder.emit(less_exponential, (last,)))
    first = _single(builder, Ref(builder.part(grad.slot, cut)), out)
    builder.cost += 2 * math.prod(out.shape)  # the totals
    index = builder.tiling.makers[call.outputs[place]]  # type: ignore[index]
    total = _single(builder, Ref(builder.whole(builder.tiling.total_of(index))), out)
    if is_log:  # the kernel rounds once
        number = builder.emit(aten.addcmul.default, (first, last, total))
        return _rounded(builder, number, out)
    return builder.emit(less_share, (first, last, total))


@_rule(aten.nll_loss_backward.default)
def _nll_loss_backward(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    grad, scores, target, weight, reduction, ignored, total = call.args
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    if cut[0] != cut[1] or len(out.shape) != 2:
        raise Uncut
    builder.tiling.extents[target.slot] = (0, out.shape[1])
    # Of the scores the kernel looks at the shape alone.
    number = builder.emit(aten.zeros.default, ([1, 1],), {"dtype": out.dtype, "device": out.device})
    given = Ref(builder.emit(aten.expand.default, (Ref(number), _shape(out, cut))))
    last = Ref(builder.whole(total.slot))
    of_rows = cut == (0, 0)
    label = Ref(builder.part(target.slot, cut) if of_rows else builder.whole(target.slot))
    is_each = bool(builder.meta(grad.slot).shape) and of_rows
    own = Ref(builder.part(grad.slot, cut) if is_each else builder.whole(grad.slot))
    weights = None
    if weight is not None:
        weights = Ref(builder.whole(weight.slot) if of_rows else builder.part(weight.slot, (0, 0)))
    if not of_rows:
        label = Ref(builder.emit(labels_from, (label, Start(), Length(), ignored)))
        ignored = ELSEWHERE
    return builder.emit(call.target, (own, given, label, weights, reduction, ignored, last))


@_rule(
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.argmax.default,
    aten.argmin.default, aten.logsumexp.default, aten.max.dim, aten.min.dim,
)  # fmt: skip
def _reduced(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given = builder.meta(call.args[0].slot)
    dims = len(given.shape)
    over = call.args[1] if len(call.args) > 1 else None
    over = [over] if isinstance(over, int) else over
    keeps = bool(call.args[2]) if len(call.args) > 2 else False
    if not over:
        raise Uncut
    gone = {dim % dims for dim in over}
    left = [dim for dim in range(dims) if keeps or dim not in gone]
    own = left[cut[0] : cut[1] + 1]
    if not gone.isdisjoint(own) or own != list(range(own[0], own[0] + len(own))):
        raise Uncut
    inner = own[0], own[-1]
    number = builder.part(call.args[0].slot, inner)
    new = [_dim(dim % dims, inner) for dim in over]
    args = Ref(number), new[0] if isinstance(call.args[1], int) else new, *call.args[2:]
    if len(call.outputs) == 1:
        return builder.emit(call.target, args, call.kwargs)
    return builder.emit_all(call, inner, args)[place]


@_rule(aten.topk.default)
def _largest(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given = builder.meta(call.args[0].slot)
    dim = (call.args[2] if len(call.args) > 2 else -1) % len(given.shape)
    _off(dim, cut)
    number = builder.part(call.args[0].slot, cut)
    args = Ref(number), call.args[1], _dim(dim, cut), *call.args[3:]
    return builder.emit_all(call, cut, args)[place]


FILLED = {
    aten.zeros.default: aten.zeros.default,
    aten.ones.default: aten.ones.default,
    aten.full.default: aten.full.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.zeros_like.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
}
"""What fills a tensor with one value, and what does so without another tensor."""


def _filling(call: Call, out: TensorMeta, shape: list[Any]) -> tuple[tuple[Any, ...], Any]:
    """The arguments that fill a tensor of a shape as a call does."""
    value = call.args[-1:] if FILLED[call.target] is aten.full.default else ()
    return (shape, *value), {"dtype": out.dtype, "device": out.device}


@_rule(*FILLED)
def _filled(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    args, kwargs = _filling(call, out, _shape(out, cut))
    return builder.emit(FILLED[call.target], args, kwargs)


@_rule(aten.scatter_add.default)
def _scatter_added(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given, dim, indices, values = call.args
    out, of = builder.meta(given.slot), builder.meta(indices.slot)
    dim %= len(out.shape)
    number = Ref(builder.part(given.slot, cut))
    if cut[0] <= dim <= cut[1]:
        _off_others(dim, cut)
        if not _is_zero(builder.tiling, given.slot):
            raise Uncut
        parts = Ref(builder.whole(indices.slot)), Ref(builder.whole(values.slot))
        return builder.emit(scatter_from, (number, dim, *parts, Start(), Length()))
    if _lacks(out.shape, of.shape, dim) or builder.meta(values.slot).shape != of.shape:
        raise Uncut
    within = _within(builder, builder.part(indices.slot, cut), out.shape[dim])
    part = Ref(builder.part(values.slot, cut))
    return builder.emit(call.target, (number, _dim(dim, cut), within, part))


def _within(builder: Builder, number: int, size: int, *, is_signed: bool = False) -> Ref:
    """Indices in a range. Others are refused beside the tiles: see `_Tiling._check_indices`."""
    least = -size if is_signed else 0
    return Ref(builder.emit(aten.clamp.default, (Ref(number), least, size - 1)))


def _is_zero(tiling: _Tiling, slot: int) -> bool:
    """Whether a tensor is made of zeros whose sign is positive."""
    index = tiling.makers.get(slot)
    if index is None:
        return False
    return FILLED.get(tiling.program.calls[index].target) is aten.zeros.default


def _lacks(shape: Sequence[int], indices: Sequence[int], dim: int) -> bool:
    """Whether indices along a dimension are fewer than the others of a shape."""
    return any(
        one != other
        for place, (one, other) in enumerate(zip(shape, indices, strict=True))
        if place != dim
    )


@_rule(aten.gather.default)
def _gathered(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given, index = builder.meta(call.args[0].slot), builder.meta(call.args[2].slot)
    dim = call.args[1] % len(given.shape)
    _off(dim, cut)
    if _lacks(given.shape, index.shape, dim):
        raise Uncut
    builder.tiling.extents[call.args[2].slot] = (0, given.shape[dim])
    number = Ref(builder.part(call.args[0].slot, cut))
    within = _within(builder, builder.part(call.args[2].slot, cut), given.shape[dim])
    return builder.emit(call.target, (number, _dim(dim, cut), within))


def _indices_of(builder: Builder, call: Call) -> tuple[list[int], int]:
    """Slots of the indices of an operator that reads or changes the first dimensions of a tensor
    there, and how many dimensions these indices have together.
    """
    found: list[int] = []
    for ref in call.args[1]:
        if not isinstance(ref, Ref):
            raise Uncut
        found.append(ref.slot)
    metas = [builder.meta(slot) for slot in found]
    if any(meta.dtype not in (torch.int32, torch.int64) for meta in metas):
        raise Uncut
    sizes = builder.meta(call.args[0].slot).shape
    for slot, size in zip(found, sizes, strict=False):
        builder.tiling.extents[slot] = (0, size)
    return found, max(len(meta.shape) for meta in metas)


def _moved(cut: Cut, by: int) -> Cut:
    return cut[0] + by, cut[1] + by


@_rule(aten.index.Tensor)
def _read_at(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given = call.args[0].slot
    found, dims = _indices_of(builder, call)
    sizes = builder.meta(given).shape
    if cut[0] >= dims:
        number = builder.part(given, _moved(cut, len(found) - dims))
        numbers = [builder.whole(slot) for slot in found]
    elif cut[1] < dims:
        if any(len(builder.meta(slot).shape) != dims for slot in found):
            raise Uncut
        number = builder.whole(given)
        numbers = [builder.part(slot, cut) for slot in found]
    else:
        raise Uncut
    within = [
        _within(builder, one, size, is_signed=True)
        for one, size in zip(numbers, sizes, strict=False)
    ]
    return builder.emit(call.target, (Ref(number), within))


@_rule(aten.index_put.default)
def _put_at(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given, _, values = call.args[:3]
    found, dims = _indices_of(builder, call)
    out = builder.meta(given.slot)
    if cut[0] < len(found) or len(builder.meta(values.slot).shape) != len(out.shape) + dims - len(
        found
    ):
        raise Uncut
    number = builder.part(given.slot, cut)
    part = builder.part(values.slot, _moved(cut, dims - len(found)))
    within = [
        _within(builder, builder.whole(slot), size, is_signed=True)
        for slot, size in zip(found, out.shape, strict=False)
    ]
    return builder.emit(call.target, (Ref(number), within, Ref(part), *call.args[3:]))


def _small(builder: Builder, indices: int, rows: int) -> int:
    """Indices, as bytes if they never exist whole otherwise."""
    if rows > MOST_ROWS or not builder.tiling.is_gone(indices):
        return indices
    return builder.tiling.small_of(indices, rows)


@_rule(aten.embedding.default)
def _embedded(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    given, indices = (ref.slot for ref in call.args[:2])
    rows = builder.meta(given).shape[0]
    dims = len(builder.meta(indices).shape)
    builder.tiling.extents[indices] = (0, rows)
    indices = _small(builder, indices, rows)
    if cut == (dims, dims):
        number, own = builder.part(given, (1, 1)), builder.whole(indices)
    elif cut[1] < dims:
        number, own = builder.whole(given), builder.part(indices, cut)
    else:
        raise Uncut
    return builder.emit(read_rows, (Ref(number), Ref(own)))


@_rule(aten.embedding_dense_backward.default)
def _embedding_gradient(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    grad, indices, rows, padding, is_scaled = call.args
    builder.tiling.extents[indices.slot] = (0, rows)
    own = Ref(builder.whole(indices.slot))
    if cut == (1, 1):
        last = len(builder.meta(grad.slot).shape) - 1
        number = builder.part(grad.slot, (last, last))
        # Each tile looks at all indices.
        builder.cost += math.prod(builder.meta(grad.slot).shape) * _INDEX_COST
        return builder.emit(call.target, (Ref(number), own, rows, padding, is_scaled))
    if cut != (0, 0) or is_scaled:
        raise Uncut
    builder.cost += 2 * math.prod(builder.meta(indices.slot).shape) * _INDEX_COST
    args = Ref(builder.whole(grad.slot)), own, Start(), Length(), padding
    return builder.emit(embedding_from, args)


@_rule(aten.stack.default)
def _stacked(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    out = builder.meta(call.outputs[place])  # type: ignore[arg-type]
    dim = (call.args[1] if len(call.args) > 1 else 0) % len(out.shape)
    _off(dim, cut)
    inner = cut if dim > cut[1] else _moved(cut, -1)
    parts = [Ref(builder.part(ref.slot, inner)) for ref in call.args[0]]
    return builder.emit(aten.stack.default, (parts, _dim(dim, cut)))


_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@_rule(_ATTENTION, _ATTENTION_BACKWARD)
def _attention(builder: Builder, call: Call, place: int, cut: Cut) -> int:
    """Samples, or heads."""
    if cut not in ((0, 0), (1, 1)):
        raise Uncut
    mask = call.kwargs.get("attn_mask")
    parts = [Ref(builder.part(arg.slot, cut)) if isinstance(arg, Ref) else arg for arg in call.args]
    if mask is not None:
        shape = builder.meta(call.args[0].slot).shape
        mask = Ref(_operand(builder, mask.slot, len(shape), cut, shape))
    kwargs = {**call.kwargs, "attn_mask": mask}
    return builder.emit_all(replace(call, kwargs=kwargs), cut, tuple(parts))[place]
