"""Undoes the user's own recomputation (`torch.utils.checkpoint`), so that a plan may decide what
runs again.

Such a region runs again in the backward pass: the same operators on the same values, random ones
from the same state of their generator. If the backward pass reads memory that it has filled itself,
and memory from the forward pass still has the same value, it reads the latter instead. Calls that
are not needed any more are left out. A plan runs operators again if the budget asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from roam.program.ir import Call, Program
from roam.program.value_numbers import without_equal

_FORWARD = ("forward", "loss")


@dataclass(frozen=True, slots=True)
class Undone:
    """A program without the user's own recomputation.

    Attributes:
        program: the program.
        calls: for each call, the number of the original call.
    """

    program: Program
    calls: tuple[int, ...]


def undone(program: Program) -> Undone | None:
    """The program with what the forward pass made instead of what the backward pass makes
    again; None if nothing is made again.
    """

    def made(call: Call) -> str | None:
        return "forward" if call.phase in _FORWARD else None

    def wanted(call: Call) -> str | None:
        return None if call.phase in _FORWARD else "forward"

    found = without_equal(program, made, wanted)
    return None if found is None else Undone(*found)
