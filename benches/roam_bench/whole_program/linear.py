"""Mixed integer linear programs, and the processes that solve them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from roam.errors import SolverUnavailable
from roam.exact.bridge import Child

Solver = Literal["cbc", "highs"]
Sense = Literal["<", ">", "="]

#: Values that are known stand beside columns, which count from 0.
ZERO, ONE = -1, -2

_SCRIPT = Path(__file__).with_name("solve.py")
#: How often a running process is looked at, in seconds.
_LOOK_S = 0.02
#: Solvers look at the clock now and then; one that is late by more than this has no answer.
_GRACE = 1.25
_GRACE_S = 20.0


class Sum:
    """A constant and columns times whole numbers."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: int = 0) -> None:
        self.constant = constant
        self.terms: dict[int, int] = {}

    def add(self, value: int, factor: int) -> None:
        """Adds a column (or ZERO, or ONE) times a number."""
        if value == ONE:
            self.constant += factor
        elif value != ZERO:
            self.terms[value] = self.terms.get(value, 0) + factor


@dataclass
class Program:
    """The least of `cost` over all values that keep bounds and rows; each row a sum that compares
    with 0.

    Columns and rows are kept as flat lists: row r has the entries from `ends[r - 1]` to `ends[r]`.
    """

    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    cost: list[int] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    factors: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    senses: list[str] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)

    def column(self, lower: int, upper: int, start: int, *, integer: bool, cost: int = 0) -> int:
        """Adds an unknown and returns its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.start.append(start)
        self.integer.append(integer)
        self.cost.append(cost)
        return len(self.lower) - 1

    def row(self, terms: Sum, sense: Sense) -> None:
        """Demands that the sum is at most, at least or just 0; a sum without columns is known to
        be.
        """
        kept = [(column, factor) for column, factor in terms.terms.items() if factor]
        if not kept:
            return
        self.at.extend(column for column, _ in kept)
        self.factors.extend(factor for _, factor in kept)
        self.ends.append(len(self.at))
        self.senses.append(sense)
        self.limits.append(-terms.constant)

    def admits(self, values: Iterable[int]) -> bool:
        """Whether values, one per column, keep every bound and row."""
        values = list(values)
        if not all(
            low <= value <= high
            for low, value, high in zip(self.lower, values, self.upper, strict=True)
        ):
            return False
        begin = 0
        for end, sense, limit in zip(self.ends, self.senses, self.limits, strict=True):
            total = sum(self.factors[i] * values[self.at[i]] for i in range(begin, end))
            if total > limit and sense != ">" or total < limit and sense != "<":
                return False
            begin = end
        return True


@dataclass(frozen=True)
class Answer:
    """What a solver made of a program."""

    values: list[float] | None
    """One per column; None if the time was up before there were any."""
    bound: float | None
    """No values cost less, by the solver's floating point."""
    finished: bool
    """Whether the search came to its end: then `values` cost the least."""
    failure: str = ""
    """Why there is no answer, where the solver broke down."""


def solve(program: Program, solver: Solver, time_limit_s: float, threads: int) -> Answer:
    """Asks a solver in a process of its own, which ends with this call, however it ends.

    Raises:
        SolverUnavailable: it cannot be used here.
    """
    question = dict(vars(program), solver=solver, seconds=time_limit_s, threads=threads)
    child = Child(json.dumps(question).encode(), script=_SCRIPT)
    deadline = time.monotonic() + time_limit_s * _GRACE + _GRACE_S
    with contextlib.closing(child):
        while (said := child.poll()) is None:
            if time.monotonic() > deadline:
                return Answer(None, None, finished=False)
            time.sleep(_LOOK_S)
    answer: dict[str, Any] = json.loads(said)
    if "unavailable" in answer:
        raise SolverUnavailable(answer["unavailable"], code="solver_unavailable")
    if "failed" in answer:
        return Answer(None, None, finished=False, failure=answer["failed"])
    return Answer(**answer["solved"])
