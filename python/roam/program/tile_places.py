"""Where the values of tiles lie: a layout of the scratch memory of one call of `roam::tiles`.

What a body makes for one tile is small beside the whole, but may still be tens of MiB. Memory that
large comes anew from the system whenever the allocator is asked for it, so all tiles of a call
share one *scratch memory*. It is one more result of the call, which nobody reads and which lies
where the plan says.

The works run once on tensors without memory (PyTorch's device "meta"), which tells the shapes of
all values. Values whose kernels can write to memory that they are given are packed by their
lifetimes, as the tensors of a step are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from roam._core import Buffers, pack
from roam.program.ir import TensorMeta, has_no_gaps
from roam.program.tiles import Body, Place, Work, into, refs_of, run_work, writes_anywhere
from roam.torch_compat.private import c_pointer, disable_current_modes

_LEAST_BYTES = 1 << 12
"""Smaller values come from the allocator, which has so much at hand."""
_ALIGNMENT_BYTES = 64
"""As the allocator's: a product may be rounded otherwise elsewhere in a cache line."""
_PACKING_WORK = 100_000
"""Comparisons granted to the packer: a body has at most some tens of values."""
_Values = dict[int, Tensor]
"""Values by their numbers."""


def with_places(body: Body, metas: Sequence[TensorMeta]) -> Body:
    """The body with a place in scratch memory for each large value whose kernel can write there.

    Args:
        body: a body without places.
        metas: of the tensors that it is given; what it is given beyond them are numbers.
    """
    try:
        with disable_current_modes(), torch.no_grad():
            of_tiles, of_blocks = _made(body, metas)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return body  # a kernel does not run without memory; if it never runs, a trial will tell
    tiles, end = len(body.works), len(body.works) + len(body.closing)
    held = [one.number for one in body.held]
    # A result is needed until all works of a tile are done. What is held is needed until the block
    # is done: in memory of its own, or, if the block has but one tile, where that has made it.
    last = dict.fromkeys((made.number for made in body.results), tiles)
    if not body.holds:
        last.update(dict.fromkeys(held, end))
    of_tile = _buffers(body.works, 0, of_tiles.values(), last, held if body.holds else ())
    of_block = _buffers(body.closing, tiles, of_blocks.values(), {}, ())
    for number in held if body.holds else ():
        size_bytes = max(values[number].nbytes for values in of_blocks.values())
        of_block[number] = _Buffer(0, end, size_bytes)
    every = [
        one for one in (*of_tile.values(), *of_block.values()) if one.size_bytes >= _LEAST_BYTES
    ]
    if not every:
        return body
    buffers = Buffers(
        [one.first for one in every],
        [one.last + 1 for one in every],
        [one.size_bytes for one in every],
        alignment_bytes=[_ALIGNMENT_BYTES] * len(every),
    )
    packing = pack(buffers, work=_PACKING_WORK)
    for one, offset in zip(every, packing.offsets.tolist(), strict=True):
        one.offset_bytes = offset
    return replace(
        body,
        scratch_bytes=packing.pool_bytes,
        places=_places(of_tiles, of_tile),
        closing_places=_places(of_blocks, of_block),
    )


@dataclass(slots=True)
class _Buffer:
    """Memory of a value: the first and the last work for which it is needed, its size, and where it
    begins in scratch memory; None if it has no place there.
    """

    first: int
    last: int
    size_bytes: int
    offset_bytes: int | None = None


def _buffers(
    works: Sequence[Work],
    first: int,
    found: Collection[_Values],
    last: dict[int, int],
    others: Collection[int],
) -> dict[int, _Buffer]:
    """Memory for each value that works make and can write to memory that they are given: as much as
    the largest tile needs.

    Args:
        works: these.
        first: the number of the first of them.
        found: for each number of elements, the values that the works make. Those that get no memory
            here are taken out.
        last: by number, the last work that needs a value, for those that are needed when these
            works are done. The others are added.
        others: numbers of values that get memory elsewhere.
    """
    for place, work in enumerate(works, first):
        for number in (*work.makes, *refs_of([(work.args, work.kwargs)])):
            last[number] = max(last.get(number, 0), place)  # type: ignore[index,arg-type]
    makers = {number: place for place, work in enumerate(works) for number in work.makes}
    made: dict[int, _Buffer] = {}
    for values in found:
        roots: dict[int, int] = {}
        for number, value in list(values.items()):
            root = roots.setdefault(c_pointer(value.untyped_storage()), number)
            if number not in makers:
                continue
            work = works[makers[number]]
            if root == number and number not in others and _can_be_told(work, value):
                own = made.setdefault(number, _Buffer(first + makers[number], 0, 0))
                own.size_bytes = max(own.size_bytes, value.nbytes)
            else:
                del values[number]
            if root in made:
                made[root].last = max(made[root].last, last[number])
    return made


def _places(
    found: dict[int, _Values], buffers: dict[int, _Buffer]
) -> tuple[tuple[int, tuple[Place, ...]], ...]:
    def places(values: _Values) -> Iterator[Place]:
        for number, value in values.items():
            offset = buffers[number].offset_bytes
            if offset is not None:
                yield Place(number, offset, tuple(value.shape), value.stride(), value.dtype)

    return tuple((count, tuple(places(values))) for count, values in found.items())


def _made(body: Body, metas: Sequence[TensorMeta]) -> tuple[dict[int, _Values], dict[int, _Values]]:
    """The values that works make in memory other than the inputs', as tensors without memory: for
    each number of elements that tiles have, and for each number that blocks have.
    """
    given: list[Any] = [
        torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        for meta in metas
    ]
    storages = {c_pointer(one.untyped_storage()) for one in given}
    inputs = given + [1.0] * (len(body.inputs) - len(given))
    of_tiles: dict[int, _Values] = {length: {} for _, length in body.intervals()}
    of_blocks: dict[int, _Values] = {count: {} for _, count in body.blocks()}
    every: list[Tensor] = []  # all values stay alive, so that no two storages have one pointer
    for works, found, closes in (
        (body.works, of_tiles, False),
        (body.closing, of_blocks, True),
    ):
        for count, values in found.items():
            known = body.values(inputs, 0, count)
            for one in body.held if closes else ():
                known[one.number] = one.empty(given[0], count)
                if body.holds:
                    values[one.number] = known[one.number]
                else:  # a value of the tile
                    storages.add(c_pointer(known[one.number].untyped_storage()))
                    every.append(known[one.number])

            def note(number: int, value: Tensor, _: int, __: int, into: _Values = values) -> None:
                every.append(value)
                if c_pointer(value.untyped_storage()) not in storages:
                    into[number] = value

            for work in works:
                if work.adds_to is None:
                    run_work(_on_meta(work), known, 0, count, {}, note)
    return of_tiles, of_blocks


def _on_meta(work: Work) -> Work:
    """The work on tensors without memory: where it names a device, it names theirs."""

    def changed(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, (list, tuple)) and any(isinstance(one, torch.device) for one in value):
            return type(value)(map(changed, value))
        return value

    kwargs = {name: changed(value) for name, value in work.kwargs.items()}
    return replace(work, args=tuple(map(changed, work.args)), kwargs=kwargs, last=())


def _can_be_told(work: Work, value: Tensor) -> bool:
    """Whether a work makes one result, fills a memory with it, and can write it to another."""
    if work.returns_sequence or into(work.target) is None:
        return False
    if value.nbytes != value.untyped_storage().nbytes():
        return False
    return value.is_contiguous() or (
        writes_anywhere(work) and has_no_gaps(tuple(value.shape), value.stride())
    )
