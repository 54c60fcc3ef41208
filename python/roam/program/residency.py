"""Chooses when tensors that may lie in files are in memory, so that a step in a given order moves
few bytes within a limit, and proves how many bytes have to be moved.

Each tensor has some *ways*: to stay in memory, or to be in it for some intervals of the order, for
a number of bytes that are then moved. With a price for a byte of memory at each moment, each tensor
takes its cheapest way; what these ways cost, less the price of the room that there is, bounds from
below what any choice moves (Lagrangian duality). Prices rise where ways need more than the room and
fall where they need less. A choice within the room is made of the ways by these prices: where it is
above the room tensors leave that cost least for the bytes that they free, and then others come back
as far as there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOMENTS = 24
"""So many moments at most have a price."""
_STEPS = 60
"""Changes of the prices after each new moment."""
_LAST_STEPS = 400
_STALE = 12
"""After so many changes without a better bound they become smaller."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Way:
    """How a tensor is kept in a step.

    Attributes:
        moved_bytes: what is read and written for it.
        intervals: (first moment, last moment) for each time that it is in memory.
    """

    moved_bytes: int
    intervals: tuple[tuple[int, int], ...]

    def is_at(self, moment: int) -> bool:
        """Whether the tensor is in memory then."""
        return any(first <= moment <= last for first, last in self.intervals)

    def is_within(self, other: Way) -> bool:
        """Whether the tensor is in memory only when it is so by another way."""
        return all(
            any(start <= first and last <= end for start, end in other.intervals)
            for first, last in self.intervals
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A choice.

    Attributes:
        ways: for each tensor, the place of the chosen way in its list.
        moved_bytes: what they move.
        least_bytes: no choice moves less.
        most_over_bytes: by how much the choice exceeds the room at its worst moment; 0 if it fits.
    """

    ways: tuple[int, ...]
    moved_bytes: int
    least_bytes: int
    most_over_bytes: int


class _Prices:
    """Prices of a byte of memory at some moments, and the bound that they prove."""

    def __init__(self, sizes: Floats, ways: Sequence[Sequence[Way]], room: Floats) -> None:
        most = max(map(len, ways))
        self._sizes, self._ways, self._room = sizes, ways, room
        self.costs = np.full((len(ways), most), np.inf)
        for row, some in enumerate(ways):
            self.costs[row, : len(some)] = [way.moved_bytes for way in some]
        self.moments: list[int] = []
        self.uses = np.zeros((len(ways), most, 0))
        self.prices = np.zeros(0)
        self.best, self.best_prices = 0.0, self.prices

    def add(self, moment: int) -> None:
        """Gives a moment a price."""
        used = np.zeros((*self.costs.shape, 1))
        for row, some in enumerate(self._ways):
            used[row, : len(some), 0] = [way.is_at(moment) for way in some]
        self.uses = np.concatenate([self.uses, used * self._sizes[:, None, None]], axis=2)
        self.moments.append(moment)
        self.prices = np.append(self.best_prices, 0.0)
        self.best_prices = self.prices.copy()

    def reduced(self) -> Floats:
        """What each way costs by the best prices, memory included."""
        return self.costs + self.uses @ self.best_prices

    def rise(self, steps: int, target: float) -> None:
        """Changes prices for a better bound; no choice of a cost above `target` is sought."""
        room = self._room[self.moments]
        pace, stale = 1.0, 0
        for _ in range(steps):
            costs = self.costs + self.uses @ self.prices
            chosen = costs.argmin(axis=1)
            rows = np.arange(len(chosen))
            bound = float(costs[rows, chosen].sum() - room @ self.prices)
            if bound > self.best:
                self.best, self.best_prices, stale = bound, self.prices.copy(), 0
            elif (stale := stale + 1) >= _STALE:
                pace, stale, self.prices = pace / 2, 0, self.best_prices.copy()
                continue
            over = self.uses[rows, chosen].sum(axis=0) - room
            over = np.where((over < 0) & (self.prices <= 0), 0.0, over)
            norm = float(over @ over)
            if norm == 0 or pace < 1e-4:
                break
            ahead = max(target - bound, 1e-3 * abs(target), 1.0)
            self.prices = np.maximum(self.prices + pace * ahead / norm * over, 0.0)


def choose(sizes: Sequence[int], ways: Sequence[Sequence[Way]], room: Sequence[int]) -> Found:
    """A choice of ways of few moved bytes, and a bound on all choices.

    Args:
        sizes: bytes of each tensor.
        ways: for each tensor, how it may be kept; the first is in memory wherever another one is.
        room: for each moment, the bytes that there are for them. There is a moment and a tensor.
    """
    left, floats = np.asarray(room, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    prices = _Prices(floats, ways, left)
    best: tuple[float, float, tuple[int, ...]] | None = None
    chosen = [0] * len(ways)

    def tried(
        best: tuple[float, float, tuple[int, ...]] | None,
    ) -> tuple[float, float, tuple[int, ...]]:
        """The choice by the best prices, or one that was better."""
        found = _repaired(floats, ways, list(chosen), prices.reduced(), left)
        cost = sum(some[one].moved_bytes for some, one in zip(ways, found, strict=True))
        over = float(max((_use(floats, ways, found, len(room)) - left).max(), 0.0))
        made = over, float(cost), tuple(found)
        return made if best is None else min(made, best)

    for _ in range(_MOMENTS):
        over = _use(floats, ways, chosen, len(room)) - left
        over[prices.moments] = -np.inf
        worst = int(over.argmax())
        if best is not None and over[worst] <= 0:
            break
        prices.add(worst)
        prices.rise(_STEPS, floats.sum() + 2 * prices.best if best is None else best[1])
        chosen = list(map(int, prices.reduced().argmin(axis=1)))
        best = tried(best)
    assert best is not None, "one was tried"
    prices.rise(_LAST_STEPS, best[1])
    chosen = list(map(int, prices.reduced().argmin(axis=1)))
    most_over, cost, found = tried(best)
    least_bytes = max(int(np.ceil(prices.best - 1e-6)), 0)
    return Found(found, int(cost), least_bytes, int(most_over))


def _use(
    sizes: Floats, ways: Sequence[Sequence[Way]], chosen: Sequence[int], moments: int
) -> Floats:
    """Bytes in memory at each moment."""
    changes = np.zeros(moments + 1)
    for size, some, one in zip(sizes, ways, chosen, strict=True):
        for first, last in some[one].intervals:
            changes[first] += size
            changes[last + 1] -= size
    return np.cumsum(changes[:-1])


def _repaired(
    sizes: Floats, ways: Sequence[Sequence[Way]], chosen: list[int], reduced: Floats, room: Floats
) -> list[int]:
    """A choice within the room that differs little from one by prices."""
    left = room - _use(sizes, ways, chosen, len(room))

    def put(row: int, way: int) -> None:
        for one, sign in ((ways[row][chosen[row]], 1), (ways[row][way], -1)):
            for first, last in one.intervals:
                left[first : last + 1] += sign * sizes[row]
        chosen[row] = way

    while left.min() < 0:
        worst = int(left.argmin())
        best: tuple[float, float, int, int] | None = None
        for row, some in enumerate(ways):
            known = some[chosen[row]]
            if not known.is_at(worst):
                continue
            for number, way in enumerate(some):
                if not way.is_at(worst) and way.is_within(known):
                    worse = (reduced[row, number] - reduced[row, chosen[row]]) / sizes[row]
                    # Of those that cost the same, the smallest that is enough, or else the largest.
                    enough = sizes[row] if sizes[row] + left[worst] >= 0 else 1e18 - sizes[row]
                    one = round(float(worse), 6), float(enough), row, number
                    best = one if best is None else min(best, one)
        if best is None:
            break
        put(best[2], best[3])
    is_better = True
    while is_better:
        is_better = False
        saved = [
            (some[chosen[row]].moved_bytes - way.moved_bytes, -reduced[row, number], row, number)
            for row, some in enumerate(ways)
            for number, way in enumerate(some)
            if way.moved_bytes < some[chosen[row]].moved_bytes
        ]
        for _, _, row, number in sorted(saved, reverse=True):
            known = ways[row][chosen[row]]
            if ways[row][number].moved_bytes >= known.moved_bytes:
                continue
            before = chosen[row]
            put(row, number)
            if any(left[first : last + 1].min() < 0 for first, last in ways[row][number].intervals):
                put(row, before)
            else:
                is_better = True
    return chosen
