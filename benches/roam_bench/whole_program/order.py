"""MODeL's first program: when every operator runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roam_bench.whole_program.linear import ONE, ZERO, Program, Sum
from roam_bench.whole_program.problem import Held, Problem


class OrderProgram:
    """The program for a problem, with a schedule to start from.

    Its create variables are kept as their running sums: done(v, t) = 1 if v has run by step t. See
    the package's first lines.
    """

    def __init__(
        self, problem: Problem, step_of: Sequence[int], floor_bytes: int, peak_bytes: int
    ) -> None:
        self.problem = problem
        self._start = step_of
        self.program = Program()
        #: Bytes that a unit of the cost stands for.
        self.unit = math.gcd(*(held.size_bytes for held in problem.held), *problem.workspaces) or 1
        floor, peak = floor_bytes // self.unit, peak_bytes // self.unit
        self._peak = self.program.column(floor, peak, peak, integer=False, cost=1)
        self._spans = [self._span(operator) for operator in range(problem.count)]
        self._keep_constraints()
        live = [Sum() for _ in range(problem.steps)]
        for held in problem.held:
            self._hold(held, live)
        for operator, workspace in enumerate(problem.workspaces):
            if workspace:
                for step in range(problem.first[operator], problem.last[operator] + 1):
                    live[step].add(self.done(operator, step), workspace // self.unit)
                    live[step].add(self.done(operator, step - 1), -workspace // self.unit)
        for total in live:
            most = total.constant + sum(factor for factor in total.terms.values() if factor > 0)
            if most > floor:
                total.add(self._peak, -1)
                self.program.row(total, "<")

    def _span(self, operator: int) -> tuple[int, int, int]:
        first, last = self.problem.first[operator], self.problem.last[operator]
        column = len(self.program.lower)
        for step in range(first, last):
            self.program.column(0, 1, int(self._start[operator] <= step), integer=True)
        return first, last, column

    def done(self, operator: int, step: int) -> int:
        """Whether the operator has run by the end of the step."""
        first, last, column = self._spans[operator]
        if step < first:
            return ZERO
        return ONE if step >= last else column + step - first

    def _keep_constraints(self) -> None:
        problem = self.problem
        for operator in range(problem.count):
            first, last = problem.first[operator], problem.last[operator]
            for step in range(first, last - 1):
                self._at_most(self.done(operator, step), self.done(operator, step + 1))
            for earlier in problem.before[operator]:
                for step in range(first, last + 1):
                    self._at_most(self.done(operator, step), self.done(earlier, step - 1))
        if problem.streams == 1:
            self._run_one_a_step()
        elif problem.count:
            self._begin_at_once()

    def _run_one_a_step(self) -> None:
        totals = [Sum(-(step + 1)) for step in range(self.problem.steps)]
        for operator in range(self.problem.count):
            for step in range(self.problem.first[operator], self.problem.steps):
                totals[step].add(self.done(operator, step), 1)
        for total in totals:
            self.program.row(total, "=")

    def _begin_at_once(self) -> None:
        beginners = [self.done(operator, 0) for operator in range(self.problem.count)]
        if ONE not in beginners:
            missing = Sum(1)
            for beginner in beginners:
                missing.add(beginner, -1)
            self.program.row(missing, "<")

    def _at_most(self, less: int, more: int) -> None:
        if less != ZERO and more != ONE:
            terms = Sum()
            terms.add(less, 1)
            terms.add(more, -1)
            self.program.row(terms, "<")

    def _hold(self, held: Held, live: Sequence[Sum]) -> None:
        """Adds to every step what the tensor takes there."""
        size = held.size_bytes // self.unit
        begin = 0 if held.creator is None else self.problem.first[held.creator]
        end = (
            self.problem.steps
            if held.stays
            else max((self.problem.last[user] for user in held.users), default=begin)
        )
        if not held.users and not held.stays:
            end = begin if held.creator is None else self.problem.last[held.creator]
        for step in range(begin, min(end, self.problem.steps - 1) + 1):
            made = ONE if held.creator is None else self.done(held.creator, step)
            # Made at this step, or preserved: some user has not run before it.
            used = [self.done(user, step - 1) for user in held.users]
            open_ones = [value for value in used if value != ONE]
            if held.stays or ZERO in used:
                live[step].add(made, size)
            elif not used:
                live[step].add(made, size)
                live[step].add(
                    ZERO if held.creator is None else self.done(held.creator, step - 1), -size
                )
            elif len(open_ones) == 1:
                live[step].add(made, size)
                live[step].add(open_ones[0], -size)
            else:
                live[step].add(self._preserve(held, step, made, open_ones), size)

    def _preserve(self, held: Held, step: int, made: int, used: Sequence[int]) -> int:
        """A column that is 1 if the tensor is live, which it is as long as a user is left."""
        is_made = held.creator is None or self._start[held.creator] <= step
        is_live = is_made and any(self._start[user] >= step for user in held.users)
        preserved = self.program.column(0, 1, int(is_live), integer=False)
        for user in used:
            terms = Sum()
            terms.add(made, 1)
            terms.add(user, -1)
            terms.add(preserved, -1)
            self.program.row(terms, "<")
        return preserved

    def schedule(self, values: Sequence[float]) -> list[int]:
        """The step of every operator, by the values of a solution."""
        return [self._step(operator, values) for operator in range(self.problem.count)]

    def _step(self, operator: int, values: Sequence[float]) -> int:
        first, last, column = self._spans[operator]
        return next(
            (step for step in range(first, last) if values[column + step - first] > 0.5), last
        )
