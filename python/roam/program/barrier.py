"""A place in a program up to which all calls before it have run, and after which none has: there
Python asks for a value, and then goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from roam.program.ir import Program


def barrier(*_: Any) -> NoReturn:
    """Stands for the place in a program. Its arguments are what Python holds there. Its results are
    inputs of the calls after it, which Python brings.
    """
    raise AssertionError("an executor hands its values on, and goes on with what it gets")


def parting(*_: Any) -> NoReturn:
    """A barrier after which Python may go on without the plan: what it holds lies outside of the
    pool, so that it need not be copied then.
    """
    raise AssertionError("an executor hands its values on, and goes on with what it gets")


def is_barrier(target: object) -> bool:
    """Whether a call's target is a barrier."""
    return target is barrier or target is parting


def barriers(program: Program) -> Iterator[tuple[int, int]]:
    """(call, later call): nothing moves over a barrier."""
    numbers = [index for index, call in enumerate(program.calls) if is_barrier(call.target)]
    start = 0
    for number in numbers:
        yield from ((index, number) for index in range(start, number))
        end = next((later for later in numbers if later > number), len(program.calls) - 1)
        yield from ((number, index) for index in range(number + 1, end + 1))
        start = number + 1


def brought(program: Program) -> set[int]:
    """Slots of the inputs that Python brings at barriers, not at the beginning."""
    return {
        slot
        for call in program.calls
        if is_barrier(call.target)
        for slot in call.outputs
        if slot is not None
    }
