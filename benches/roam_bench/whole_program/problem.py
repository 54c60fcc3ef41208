"""A graph's constraints in terms of time steps, as both programs use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import roam

Streams = Literal[1] | None

#: With several streams, steps for each operator of the longest chain, as the authors' code has it.
_SLACK = 1.01


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that takes memory during the step."""

    tensor: int
    size_bytes: int
    creator: int | None
    """The operator that makes it, None if it enters the step."""
    users: tuple[int, ...]
    """Those of its users that no other user must follow: the last to run is among them."""
    stays: bool
    """Whether it leaves the step."""
    in_pool: bool

    def lifetime(self, step_of: Sequence[int], steps: int) -> tuple[int, int]:
        """First step, and last step + 1, given the step of every operator."""
        begin = 0 if self.creator is None else step_of[self.creator]
        if self.stays:
            return begin, steps
        return begin, max((step_of[user] for user in self.users), default=begin) + 1


class Problem:
    """Ordering constraints, bytes, and the steps at which every operator may run.

    With one stream there is a step for each operator, and one operator runs at each. With
    `streams=None` any number of operators may run at a step (all that they touch coexists), and
    there are hardly more steps than operators in the longest chain. At least one runs at the first
    step, where all that enters is live, used or not.

    Args:
        extra: further constraints, as pairs (before, after).
    """

    def __init__(
        self, graph: roam.Graph, streams: Streams, extra: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.graph = graph
        self.streams = streams
        self.count = graph.num_operators
        before = [set(graph.predecessors(operator)) for operator in range(self.count)]
        for first, second in extra:
            before[second].add(first)
        #: All operators, each after those that it must follow.
        self.sorted = _sorted(before, graph.positions.tolist())
        self.ancestors = [0] * self.count
        for operator in self.sorted:
            for earlier in before[operator]:
                self.ancestors[operator] |= self.ancestors[earlier] | 1 << earlier
        self.descendants = [0] * self.count
        for operator in range(self.count):
            for earlier in _members(self.ancestors[operator]):
                self.descendants[earlier] |= 1 << operator
        #: Direct constraints that do not follow from others.
        self.before = [self._direct(operators) for operators in before]
        self.steps, self.first, self.last = self._spans()
        self.workspaces: list[int] = graph.workspaces_bytes.tolist()
        self.held = self._held()

    def _direct(self, operators: set[int]) -> list[int]:
        return sorted(
            one
            for one in operators
            if not any(self.ancestors[other] >> one & 1 for other in operators)
        )

    def _spans(self) -> tuple[int, list[int], list[int]]:
        """How many steps there are, and the earliest and the latest step of every operator."""
        up, down = [0] * self.count, [0] * self.count
        if self.streams == 1:
            up = [ancestors.bit_count() for ancestors in self.ancestors]
            down = [descendants.bit_count() for descendants in self.descendants]
            steps = self.count
        else:
            for operator in self.sorted:
                up[operator] = max(
                    (up[earlier] + 1 for earlier in self.before[operator]), default=0
                )
            for operator in reversed(self.sorted):
                for earlier in self.before[operator]:
                    down[earlier] = max(down[earlier], down[operator] + 1)
            steps = min(self.count, math.ceil((max(up, default=-1) + 1) * _SLACK))
        return steps, up, [steps - 1 - later for later in down]

    def _held(self) -> list[Held]:
        held = []
        for tensor, size in zip(
            self.graph.tensors, self.graph.tensor_counted_bytes.tolist(), strict=True
        ):
            if size == 0 or tensor.residency == "persistent" or self.steps == 0:
                continue
            users = self.graph.users(tensor.id)
            last = tuple(
                one for one in users if not any(self.ancestors[other] >> one & 1 for other in users)
            )
            creator = self.graph.creator(tensor.id)
            stays, in_pool = tensor.residency == "leaves", tensor.residency == "step_local"
            held.append(Held(tensor.id, size, creator, last, stays, in_pool))
        return held

    def floor_bytes(self) -> int:
        """No schedule has a lower peak: what an operator touches, and what must have been made
        before it and is needed after it, all coexists; so does all that enters, and all that
        leaves.
        """
        everything = (1 << self.count) - 1
        needs: list[int] = list(self.workspaces)
        entering = leaving = 0
        for held in self.held:
            after = everything if held.creator is None else self.descendants[held.creator]
            before = everything if held.stays else 0
            at = 0 if held.creator is None else 1 << held.creator
            for user in held.users:
                before |= self.ancestors[user]
            for user in self.graph.users(held.tensor):
                at |= 1 << user
            entering += held.size_bytes * (held.creator is None)
            leaving += held.size_bytes * held.stays
            for operator in _members(at | after & before):
                needs[operator] += held.size_bytes
        return max(*needs, entering, leaving)

    def keeps(self, step_of: Sequence[int]) -> bool:
        """Whether a schedule is one: every operator within the steps and after those that it must
        follow, the first at the first step.
        """
        in_range = all(0 <= step < self.steps for step in step_of)
        distinct = self.streams is None or len(set(step_of)) == self.count
        after = all(
            step_of[one] < step_of[other]
            for other in range(self.count)
            for one in self.before[other]
        )
        return in_range and distinct and after and min(step_of, default=0) == 0

    def profile(self, step_of: Sequence[int]) -> tuple[list[int], list[int]]:
        """Live bytes at every step, of what may lie in the pool and of everything else."""
        changes = [0] * (self.steps + 1), [0] * (self.steps + 1)
        for held in self.held:
            begin, end = held.lifetime(step_of, self.steps)
            part = changes[0] if held.in_pool else changes[1]
            part[begin] += held.size_bytes
            part[end] -= held.size_bytes
        for operator, size in enumerate(self.workspaces):
            changes[1][step_of[operator]] += size
            changes[1][step_of[operator] + 1] -= size
        return _running_sums(changes[0]), _running_sums(changes[1])

    def peak_bytes(self, step_of: Sequence[int]) -> int:
        """Most live bytes over the steps."""
        return max(map(sum, zip(*self.profile(step_of), strict=True)), default=0)


def _sorted(before: Sequence[set[int]], positions: Sequence[int]) -> list[int]:
    """A topological order, by program position where no extra constraint goes backwards in it."""
    after: list[list[int]] = [[] for _ in before]
    for operator, operators in enumerate(before):
        for earlier in operators:
            after[earlier].append(operator)
    open_ones = [len(operators) for operators in before]
    ready = sorted(
        (one for one, count in enumerate(open_ones) if count == 0), key=lambda one: -positions[one]
    )
    found = []
    while ready:
        found.append(ready.pop())
        for later in after[found[-1]]:
            open_ones[later] -= 1
            if open_ones[later] == 0:
                ready.append(later)
    return found


def _members(bits: int) -> list[int]:
    """The numbers of the bits that are set."""
    found = []
    while bits:
        found.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return found


def _running_sums(changes: Sequence[int]) -> list[int]:
    """Sums of all changes up to each place, the last place left out."""
    total, sums = 0, []
    for change in changes[:-1]:
        total += change
        sums.append(total)
    return sums
