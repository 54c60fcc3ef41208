"""When tensors that may lie in files are in memory, so that a step in a given order moves few bytes
within a limit, with a proof of how many bytes have to be moved. The planner chooses
(`rust/roam-core/src/residency.rs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roam import _core


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


def choose(sizes: Sequence[int], ways: Sequence[Sequence[Way]], room: Sequence[int]) -> Found:
    """A choice of ways of few moved bytes, and a bound on all choices.

    Args:
        sizes: bytes of each tensor.
        ways: for each tensor, how it may be kept; the first is in memory wherever another one is.
        room: for each moment, the bytes that there are for them. There is a moment and a tensor.
    """
    told = [[(way.moved_bytes, way.intervals) for way in some] for some in ways]
    chosen, moved_bytes, least_bytes, most_over_bytes = _core.choose_residency(sizes, told, room)
    return Found(tuple(chosen), moved_bytes, least_bytes, most_over_bytes)
