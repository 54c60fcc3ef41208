"""MODeL's second program: where every tensor lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roam_bench.whole_program.linear import Program, Sum


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor of the pool, alive from step `begin` until before step `end`."""

    tensor: int
    size_bytes: int
    alignment_bytes: int
    begin: int
    end: int

    def meets(self, other: Block) -> bool:
        """Whether both are alive at some step."""
        return self.begin < other.end and other.begin < self.end


def pool_bytes(blocks: Sequence[Block], offsets: Mapping[int, int]) -> int:
    """How far up the blocks reach."""
    return max((offsets[block.tensor] + block.size_bytes for block in blocks), default=0)


def pyramid(blocks: Sequence[Block]) -> dict[int, int]:
    """Offsets of nested lifetimes: the longest at the bottom, on it the longest of those within its
    life, and so on.
    """
    offsets: dict[int, int] = {}
    inside, top = list(blocks), 0
    while inside:
        longest = max(inside, key=lambda block: block.end - block.begin)
        offsets[longest.tensor] = _aligned(top, longest.alignment_bytes)
        top = offsets[longest.tensor] + longest.size_bytes
        inside = [
            b
            for b in inside
            if b is not longest and longest.begin <= b.begin and b.end <= longest.end
        ]
    return offsets


def greedy(blocks: Sequence[Block], placed: Mapping[int, int]) -> dict[int, int]:
    """The best of three: the largest, the longest-lived, or the largest by size times life first,
    each at the lowest offset that is free during its life.

    `placed` ones are where they are.
    """
    ranks: tuple[Callable[[Block], int], ...] = (
        lambda block: block.size_bytes,
        lambda block: block.end - block.begin,
        lambda block: block.size_bytes * (block.end - block.begin),
    )
    layouts = (_lowest_first(blocks, placed, rank) for rank in ranks)
    return min(layouts, key=lambda offsets: pool_bytes(blocks, offsets))


def _lowest_first(
    blocks: Sequence[Block], placed: Mapping[int, int], rank: Callable[[Block], int]
) -> dict[int, int]:
    offsets = dict(placed)
    there = [block for block in blocks if block.tensor in placed]
    for block in sorted(blocks, key=lambda block: (-rank(block), block.begin, block.tensor)):
        if block.tensor in offsets:
            continue
        lowest = 0
        for other in sorted(
            (o for o in there if o.meets(block)), key=lambda other: offsets[other.tensor]
        ):
            if lowest + block.size_bytes <= offsets[other.tensor]:
                break
            lowest = max(
                lowest, _aligned(offsets[other.tensor] + other.size_bytes, block.alignment_bytes)
            )
        offsets[block.tensor] = lowest
        there.append(block)
    return offsets


class LayoutProgram:
    """An address per block, and for every two blocks that meet, and are not both placed already,
    which lies below.

    Args:
        start: offsets to start from, which have the `placed` ones where they are to stay.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        start: Mapping[int, int],
        placed: Mapping[int, int],
        floor_bytes: int,
    ) -> None:
        self.blocks = blocks
        self._placed = placed
        self._start = start
        self.program = Program()
        self.unit = (
            math.gcd(
                *(
                    number
                    for block in blocks
                    for number in (block.size_bytes, block.alignment_bytes)
                )
            )
            or 1
        )
        self._highest = pool_bytes(blocks, start) // self.unit
        self._pool = self.program.column(
            floor_bytes // self.unit, self._highest, self._highest, integer=False, cost=1
        )
        self._addresses = [self._address(block) for block in blocks]
        self._below = {
            (one, other): self._either(one, other) for one, other in meeting(blocks, placed)
        }
        for number in range(len(blocks)):
            top = self._top(number)
            top.add(self._pool, -1)
            self.program.row(top, "<")

    def _step(self, block: Block) -> int:
        """Units between two offsets that the block may have."""
        return math.lcm(block.alignment_bytes, self.unit) // self.unit

    def _address(self, block: Block) -> int:
        step = self._step(block)
        start = self._start[block.tensor] // self.unit // step
        highest = (self._highest - block.size_bytes // self.unit) // step
        lower, upper = (start, start) if block.tensor in self._placed else (0, highest)
        return self.program.column(lower, upper, start, integer=step > 1)

    def _top(self, number: int) -> Sum:
        block = self.blocks[number]
        top = Sum(block.size_bytes // self.unit)
        top.add(self._addresses[number], self._step(block))
        return top

    def _either(self, one: int, other: int) -> int:
        is_below = self._start[self.blocks[one].tensor] < self._start[self.blocks[other].tensor]
        below = self.program.column(0, 1, int(is_below), integer=True)
        # The top of the lower block is at most the other's address, whatever the upper one does.
        for lower, upper, at_one in ((one, other, True), (other, one, False)):
            terms = self._top(lower)
            terms.add(self._addresses[upper], -self._step(self.blocks[upper]))
            terms.add(below, self._highest if at_one else -self._highest)
            terms.constant -= self._highest if at_one else 0
            self.program.row(terms, "<")
        return below

    def offsets(self, values: Sequence[float]) -> dict[int, int]:
        """Offsets by a solution's values: of these only what lies below what is taken, and every
        block sinks as far as that lets it.
        """
        lower: list[list[int]] = [[] for _ in self.blocks]
        for (one, other), below in self._below.items():
            first, second = (one, other) if values[below] > 0.5 else (other, one)
            lower[second].append(first)
        for one, other in _pairs(self.blocks):
            ones = self.blocks[one].tensor, self.blocks[other].tensor
            if all(tensor in self._placed for tensor in ones):
                first, second = (
                    (one, other) if self._placed[ones[0]] < self._placed[ones[1]] else (other, one)
                )
                lower[second].append(first)
        found: dict[int, int] = {}
        addresses = [
            values[column] * self._step(block)
            for column, block in zip(self._addresses, self.blocks, strict=True)
        ]
        for number in sorted(range(len(self.blocks)), key=lambda number: addresses[number]):
            block = self.blocks[number]
            under = (self.blocks[one] for one in lower[number])
            ground = max(
                (found[one.tensor] + one.size_bytes for one in under if one.tensor in found),
                default=0,
            )
            found[block.tensor] = _aligned(ground, block.alignment_bytes)
        return found


def meeting(blocks: Sequence[Block], placed: Mapping[int, int]) -> list[tuple[int, int]]:
    """Pairs of blocks, by their numbers, that are alive at one time and not both placed."""
    return [
        (one, other)
        for one, other in _pairs(blocks)
        if blocks[one].tensor not in placed or blocks[other].tensor not in placed
    ]


def is_layout(blocks: Sequence[Block], offsets: Mapping[int, int]) -> bool:
    """Whether no two blocks share bytes at one time, and all are aligned."""
    for block in blocks:
        if offsets[block.tensor] < 0 or offsets[block.tensor] % block.alignment_bytes:
            return False
    for one, other in _pairs(blocks):
        low, high = sorted((blocks[one], blocks[other]), key=lambda block: offsets[block.tensor])
        if offsets[low.tensor] + low.size_bytes > offsets[high.tensor]:
            return False
    return True


def _pairs(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """Pairs of blocks that are alive at one time, by their numbers."""
    by_begin = sorted(range(len(blocks)), key=lambda number: blocks[number].begin)
    pairs: list[tuple[int, int]] = []
    alive: list[int] = []
    for number in by_begin:
        alive = [other for other in alive if blocks[other].end > blocks[number].begin]
        pairs.extend((other, number) for other in alive)
        alive.append(number)
    return pairs


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
