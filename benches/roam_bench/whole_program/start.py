"""Schedules from which the solver starts, made without it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from roam_bench.whole_program.problem import Problem


def start(problem: Problem, known: Sequence[int] | None = None) -> list[int]:
    """The step of every operator in the best schedule that costs almost nothing to find.

    One stream: program order, LESCEA's, or the one that the caller knows. Several: every operator
    as early, or as late, as it can run.
    """
    if problem.streams == 1:
        orders = [_program_order(problem), lescea(problem)] + (
            [] if known is None else [list(known)]
        )
        schedules = [steps for steps in map(_steps, orders) if problem.keeps(steps)]
    else:
        idle = min(problem.last, default=0)
        schedules = [list(problem.first), [step - idle for step in problem.last]]
    return min(schedules, key=problem.peak_bytes)


def lescea(problem: Problem) -> list[int]:
    """The list scheduler that the ROAM paper compares with: of the ready operators that keep to the
    peak so far the one that leaves least live, else the one that has least live while it runs.
    """
    uses = [len(held.users) for held in problem.held]
    touched: list[list[int]] = [[] for _ in range(problem.count)]
    made: list[list[int]] = [[] for _ in range(problem.count)]
    live = peak = 0
    for number, held in enumerate(problem.held):
        if held.creator is not None:
            made[held.creator].append(number)
        elif held.users or held.stays:
            live += held.size_bytes
        for user in held.users:
            touched[user].append(number)
    after: list[list[int]] = [[] for _ in range(problem.count)]
    for operator, operators in enumerate(problem.before):
        for earlier in operators:
            after[earlier].append(operator)
    open_ones = [len(operators) for operators in problem.before]
    ready = {operator for operator, count in enumerate(open_ones) if count == 0}
    positions = problem.graph.positions.tolist()

    def change(operator: int) -> tuple[int, int]:
        """Live bytes while it runs, and after it."""
        during = live + sum(problem.held[number].size_bytes for number in made[operator])
        dying = [n for n in touched[operator] if uses[n] == 1] + [
            n for n in made[operator] if uses[n] == 0
        ]
        freed = sum(
            problem.held[number].size_bytes for number in dying if not problem.held[number].stays
        )
        return during + problem.workspaces[operator], during - freed

    def cost(operator: int) -> tuple[bool, int, int]:
        during, left = change(operator)
        return during > peak, left if during <= peak else during, positions[operator]

    order = []
    while ready:
        operator = min(ready, key=cost)
        during, live = change(operator)
        peak = max(peak, during)
        for number in touched[operator]:
            uses[number] -= 1
        ready.remove(operator)
        order.append(operator)
        for later in after[operator]:
            open_ones[later] -= 1
            if open_ones[later] == 0:
                ready.add(later)
    return order


def _program_order(problem: Problem) -> list[int]:
    """Program order, except for operators that extra constraints hold up."""
    positions = problem.graph.positions.tolist()
    after: list[list[int]] = [[] for _ in range(problem.count)]
    for operator, operators in enumerate(problem.before):
        for earlier in operators:
            after[earlier].append(operator)
    open_ones = [len(operators) for operators in problem.before]
    ready = [
        (positions[operator], operator) for operator, count in enumerate(open_ones) if count == 0
    ]
    heapq.heapify(ready)
    order = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for later in after[order[-1]]:
            open_ones[later] -= 1
            if open_ones[later] == 0:
                heapq.heappush(ready, (positions[later], later))
    return order


def _steps(order: Sequence[int]) -> list[int]:
    """The step of every operator of an order."""
    steps = [0] * len(order)
    for step, operator in enumerate(order):
        steps[operator] = step
    return steps
