"""Solves both programs, one after the other, and reports the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import roam
from roam_bench.whole_program import layout
from roam_bench.whole_program.early import early_updates as early_update_pairs
from roam_bench.whole_program.layout import Block, LayoutProgram
from roam_bench.whole_program.linear import Answer, Program, Solver, solve
from roam_bench.whole_program.order import OrderProgram
from roam_bench.whole_program.problem import Problem, Streams
from roam_bench.whole_program.start import start as first_schedule

T = TypeVar("T")
Status = Literal["optimal", "feasible", "no_solution", "failed", "too_large"]

# : Larger programs are refused. With two thirds of these, a solver took one gibibyte within a
# minute and had not solved the first relaxation.
MAX_COLUMNS = 300_000
#: How far a bound may be above the next whole number for want of precision, in units.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Solution:
    """What came of one program.

    ``status`` is ``optimal`` (nothing takes less, by the solver or because the bound is met without
    one), ``feasible`` (the time was up with something better than the start), ``no_solution`` (the
    time was up before the solver had found anything better than the start, which stands),
    ``failed`` (the solver broke down, see `reason`; the start stands) or ``too_large`` (not
    attempted).
    """

    status: Status
    columns: int
    """Columns of the program; 0 if the start met the bound and there was none to solve. A lower
    bound of them where it was too large."""
    rows: int
    bound_bytes: int
    """Nothing takes less, by this program: other constraints, or another order, may."""
    start_bytes: int
    """What the solver started from."""
    seconds: float
    """All of it: the start, stating the program and solving it."""
    reason: str = ""


@dataclass(frozen=True)
class WholeProgram:
    """An order and a layout by integer programs alone. Bytes without persistent tensors; nothing is
    reused.

    Where the first program was too large there is no order, and where either was there is no
    layout.
    """

    ordering: Solution
    addresses: Solution | None
    order: list[int] | None
    """Operators as they run; with several streams those of one step by their program position."""
    steps: list[int] | None
    """The step of every operator, by its number."""
    offsets: dict[int, int] | None
    """Offset in the pool per step-local tensor of some size, by its number."""
    peak_bytes: int | None
    """Most live bytes over the steps. With several streams all that a step's operators touch
    coexists."""
    pool_bytes: int | None
    outside_bytes: int | None
    """Most live bytes over the steps of what is not in the pool, workspace included."""

    @property
    def status(self) -> Status:
        """The first program's: how good the order is."""
        return self.ordering.status

    @property
    def seconds(self) -> float:
        """Both programs."""
        return self.ordering.seconds + (self.addresses.seconds if self.addresses else 0.0)


def whole_program(
    graph: roam.Graph,
    solver: Solver = "highs",
    time_limit_s: float = 300.0,
    *,
    streams: Streams = 1,
    start: Sequence[int] | None = None,
    early_updates: bool = False,
    threads: int = 1,
    max_columns: int = MAX_COLUMNS,
) -> WholeProgram:
    """Orders and lays out a whole graph by MODeL's two integer programs.

    Ctrl-C ends the solver's process.

    Args:
        graph: the step.
        solver: ``cbc`` through python-mip, or ``highs`` through highspy.
        time_limit_s: for the solver, in each of the two programs.
        streams: 1, one operator at a step; or None, MODeL's own: as many operators at a step as one
            likes, and hardly more steps than the longest chain has.
        start: with one stream, an order to start from where it is better than program order and
            LESCEA's; that of several streams, for example.
        early_updates: whether weight updates have to run early, as MODeL has them: a smaller
            program that may not hold the best order.
        threads: of the solver.
        max_columns: larger programs are not attempted.

    Raises:
        PlanError: the graph does not permit the order to start from.
        SolverUnavailable: the solver cannot be used here.
    """
    began = time.perf_counter()
    problem = Problem(graph, streams, early_update_pairs(graph) if early_updates else ())
    if start is not None:
        graph.live_bytes(start)  # an order, or an error

    def ask(program: Program) -> Answer:
        return solve(program, solver, time_limit_s, threads)

    ordering, step_of = _order(problem, start, ask, max_columns, began)
    if step_of is None:
        return WholeProgram(ordering, None, None, None, None, None, None, None)
    began = time.perf_counter()
    pool, outside = problem.profile(step_of)
    positions = graph.positions.tolist()
    order = sorted(
        range(problem.count), key=lambda operator: (step_of[operator], positions[operator])
    )
    blocks = _blocks(problem, step_of)
    addresses, offsets = _lay_out(blocks, max(pool, default=0), ask, max_columns, began)
    return WholeProgram(
        ordering,
        addresses,
        order,
        step_of,
        offsets,
        problem.peak_bytes(step_of),
        None if offsets is None else layout.pool_bytes(blocks, offsets),
        max(outside, default=0),
    )


def _order(
    problem: Problem,
    known: Sequence[int] | None,
    ask: Callable[[Program], Answer],
    max_columns: int,
    began: float,
) -> tuple[Solution, list[int] | None]:
    """The first program: the step of every operator."""
    columns = 1 + sum(last - first for first, last in zip(problem.first, problem.last, strict=True))
    if columns > max_columns:
        return _too_large(columns, began), None
    floor = problem.floor_bytes()
    step_of = first_schedule(problem, known)
    peak = problem.peak_bytes(step_of)
    if peak == floor:
        return Solution("optimal", 0, 0, floor, peak, time.perf_counter() - began), step_of
    stated = OrderProgram(problem, step_of, floor, peak)
    size = len(stated.program.lower)
    if size > max_columns:
        return _too_large(size, began, floor, peak), None
    answer = ask(stated.program)
    found = _better(step_of, answer, stated.schedule, problem.keeps, problem.peak_bytes)
    taken = problem.peak_bytes(found)
    return _solution(answer, stated.program, stated.unit, floor, peak, taken, began), found


def _lay_out(
    blocks: Sequence[Block],
    floor: int,
    ask: Callable[[Program], Answer],
    max_columns: int,
    began: float,
) -> tuple[Solution, dict[int, int] | None]:
    """The second program: an offset for every block. Nested long lives are placed beforehand where
    the program would be too large without.
    """
    plain, placed = layout.greedy(blocks, {}), layout.pyramid(blocks)
    stacked = layout.greedy(blocks, placed)
    best = min(plain, stacked, key=lambda offsets: layout.pool_bytes(blocks, offsets))
    size = layout.pool_bytes(blocks, best)
    if size == floor:
        return Solution("optimal", 0, 0, floor, size, time.perf_counter() - began), best
    first, placed_first = best, {}
    if _columns(blocks, {}) > max_columns:
        first, placed_first = stacked, placed
    columns = _columns(blocks, placed_first)
    if columns > max_columns:
        return _too_large(columns, began, floor, size), None
    stated = LayoutProgram(blocks, first, placed_first, floor)
    answer = ask(stated.program)
    found = _better(
        best,
        answer,
        stated.offsets,
        partial(layout.is_layout, blocks),
        partial(layout.pool_bytes, blocks),
    )
    if placed_first:
        # What is proved with some tensors in place says nothing of other layouts.
        answer = replace(answer, bound=None, finished=False)
    taken = layout.pool_bytes(blocks, found)
    return _solution(answer, stated.program, stated.unit, floor, size, taken, began), found


def _columns(blocks: Sequence[Block], placed: Mapping[int, int]) -> int:
    return 1 + len(blocks) + len(layout.meeting(blocks, placed))


def _blocks(problem: Problem, step_of: Sequence[int]) -> list[Block]:
    """The tensors of the pool with their lifetimes in a schedule."""
    graph = problem.graph
    blocks = []
    for held in problem.held:
        if held.in_pool:
            alignment = max(graph.alignment_bytes, graph.tensor(held.tensor).alignment_bytes)
            blocks.append(
                Block(
                    held.tensor, held.size_bytes, alignment, *held.lifetime(step_of, problem.steps)
                )
            )
    return blocks


def _better(
    first: T,
    answer: Answer,
    read: Callable[[Sequence[float]], T],
    is_valid: Callable[[T], bool],
    cost: Callable[[T], int],
) -> T:
    """What a solver found, if it is what it should be and takes less than what it started from."""
    if answer.values is None:
        return first
    found = read(answer.values)
    return found if is_valid(found) and cost(found) < cost(first) else first


def _solution(
    answer: Answer, program: Program, unit: int, floor: int, first: int, taken: int, began: float
) -> Solution:
    """What came of a program, in bytes: what it started from, and what its answer takes."""
    bound = floor
    if answer.finished:
        bound = taken
    elif answer.bound is not None:
        # The least is a whole number of units.
        bound = min(taken, max(floor, math.ceil(answer.bound - _TOLERANCE) * unit))
    status: Status = "optimal" if bound == taken else "feasible" if taken < first else "no_solution"
    if answer.failure and status != "optimal":
        status = "failed"
    seconds = time.perf_counter() - began
    return Solution(
        status, len(program.lower), len(program.ends), bound, first, seconds, answer.failure
    )


def _too_large(columns: int, began: float, floor: int = 0, first: int = 0) -> Solution:
    return Solution("too_large", columns, 0, floor, first, time.perf_counter() - began)
