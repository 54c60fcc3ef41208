"""Checkmate on roam's graphs: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization" (MLSys 2020, arXiv 1910.02653), written from the paper.

Its integer program has n stages for n nodes: stage t runs node t for the first time, and earlier
nodes again as it likes. HiGHS solves it, or its linear relaxation, whose solution is rounded in two
phases. Here a node is an operator, together with the views of its results and the operators that
change these in place. Bytes and times are those of the graph. Results of nodes that may not run
again are kept. A solution is a sequence of runs, whose memory is computed as for every sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import torch

import roam
from roam.zoo import images

SHARES = (0.75, 0.5, 0.35)
METHODS = ("integer program", "linear rounding")
TIME_LIMIT_S = 120.0
"""For one program."""
_ROUNDED_SHARE = 0.9
"""Of the room that the relaxed program is given, since rounding takes more."""
_THRESHOLDS = tuple(tenths / 10 for tenths in range(1, 10))
"""From which share on a node is kept, in turns."""
_FEW_NODES = 150
_MIB = float(1 << 20)


def _convolutions() -> torch.nn.Module:
    widths = (3, 32, 32, 64, 64)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [
            torch.nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(outputs),
            torch.nn.ReLU(inplace=True),
        ]
    layers += [
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, images.CLASSES)
    ]  # fmt: skip
    return torch.nn.Sequential(*layers)


def _perceptron() -> torch.nn.Module:
    layers: list[torch.nn.Module] = [torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 256)]
    for _ in range(8):
        layers += [torch.nn.GELU(), torch.nn.Linear(256, 256)]
    return torch.nn.Sequential(*layers, torch.nn.GELU(), torch.nn.Linear(256, images.CLASSES))


_MODELS = {"convolutions": (_convolutions, 32), "perceptron": (_perceptron, 4096)}
NAMES = tuple(_MODELS)
"""The steps that are small enough."""


def step(model: torch.nn.Module, batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Forward and backward pass; leaves gradients, and returns the loss."""
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(batch), labels)
    loss.backward()
    return loss.detach()


def capture(name: str) -> roam.Graph:
    """The graph of one of the steps; nothing is allocated."""
    make, batch = _MODELS[name]
    with roam.fake():
        model = make()
        arguments = model, *images.random_batch(batch, 32)
    return roam.capture(step, *arguments)


@dataclass(slots=True)
class Node:
    """Operators that run together, in program order.

    Attributes:
        operators: their numbers.
        needs: places of the nodes whose tensors it reads.
        held_bytes: of what it makes for others.
        own_bytes: that live only while it runs.
        time_ns: of one run.
        is_repeatable: whether it may run again.
        left_bytes: of what it makes that outlives the step; it runs once then.
    """

    operators: list[int]
    needs: list[int] = field(default_factory=list)
    held_bytes: int = 0
    own_bytes: int = 0
    time_ns: int = 0
    is_repeatable: bool = True
    left_bytes: int = 0


def nodes_of(graph: roam.Graph) -> list[Node]:
    """The nodes of a graph, in an order that it permits.

    Raises:
        ValueError: what has to run together waits for something in between.
    """
    group = _grouped(graph)
    members: dict[int, list[int]] = {}
    for number in map(int, graph.program_order):
        members.setdefault(group[number], []).append(number)
    waits = {
        one: {group[before] for operator in operators for before in graph.predecessors(operator)}
        - {one}
        for one, operators in members.items()
    }
    sorter = TopologicalSorter(waits)
    try:
        sorter.prepare()
    except CycleError as error:
        message = f"{graph.name}: operators that change one tensor in place wait for others"
        raise ValueError(message) from error
    # As in program order, as far as what runs together permits.
    order: list[int] = []
    ready: list[tuple[int, int]] = []
    while sorter.is_active():
        for one in sorter.get_ready():
            heapq.heappush(ready, (graph.operator(members[one][-1]).position, one))
        _, one = heapq.heappop(ready)
        order.append(one)
        sorter.done(one)
    place = {one: at for at, one in enumerate(order)}
    nodes = [Node(members[one]) for one in order]
    for node in nodes:
        own = set(node.operators)
        needs = set()
        for number in node.operators:
            operator = graph.operator(number)
            changed = [
                tensor
                for tensor in operator.mutates
                if graph.creator(tensor) is None and tensor not in operator.first_only
            ]
            node.is_repeatable &= operator.repeatable and not changed
            node.time_ns += int(graph.times_ns[number])
            node.own_bytes += int(graph.workspaces_bytes[number])
            for tensor in (*operator.reads, *operator.mutates):
                creator = graph.creator(tensor)
                if creator is not None and creator not in own:
                    needs.add(place[group[creator]])
            for made in map(graph.tensor, operator.creates):
                if made.residency == "leaves":
                    node.left_bytes += made.counted_bytes
                elif not own.issuperset(graph.users(made.id)):
                    node.held_bytes += made.counted_bytes
                else:
                    node.own_bytes += made.counted_bytes
        node.is_repeatable &= not node.left_bytes
        node.needs = sorted(needs)
    return nodes


def _grouped(graph: roam.Graph) -> list[int]:
    """Per operator the number of its group."""
    parent = list(range(graph.num_operators))

    def find(one: int) -> int:
        while parent[one] != one:
            parent[one] = parent[parent[one]]
            one = parent[one]
        return one

    def join(some: Iterable[int]) -> None:
        first, *others = map(find, some)
        for other in others:
            parent[find(other)] = find(first)

    for number in map(int, graph.program_order):
        operator = graph.operator(number)
        for tensor in operator.mutates:
            creator = graph.creator(tensor)
            if creator is not None:
                at = operator.position
                earlier = (
                    user for user in graph.users(tensor) if graph.operator(user).position < at
                )
                join((creator, number, *earlier))
        if not operator.creates and not operator.mutates:
            creators = [graph.creator(tensor) for tensor in operator.reads]
            made = [creator for creator in creators if creator is not None]
            join((number, *(made or graph.successors(number))[:1]))
    return [find(number) for number in range(graph.num_operators)]


@dataclass(frozen=True, slots=True)
class Solution:
    """A sequence of runs.

    Attributes:
        sequence: numbers of operators.
        extra_ns: of all further runs.
        live_bytes: the most at once in this order, without reuse, persistent tensors left out.
    """

    sequence: list[int]
    extra_ns: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method says of a budget.

    Attributes:
        solution: the cheapest within the budget; None if none was found.
        least_ns: no solution of the integer program has less extra time; None if nothing is
            proved.
    """

    solution: Solution | None
    least_ns: int | None


def solve(graph: roam.Graph, method: str, room_bytes: int) -> Answer:
    """Runs within so many live bytes, persistent tensors left out.

    Raises:
        ValueError: the graph has too many nodes for the program.
    """
    nodes = nodes_of(graph)
    if len(nodes) > _FEW_NODES:
        raise ValueError(f"{graph.name} has {len(nodes)} nodes; at most {_FEW_NODES} are solved")
    once_ns = sum(node.time_ns for node in nodes)
    if method == "integer program":
        program = _Program(nodes, room_bytes, is_whole=True)
        kept, least_ns = program.solve()
        thresholds: tuple[float, ...] = (0.5,)
    else:
        program = _Program(nodes, int(_ROUNDED_SHARE * room_bytes), is_whole=False)
        kept, _ = program.solve()
        least_ns, thresholds = None, _THRESHOLDS
    found: list[Solution] = []
    for threshold in thresholds:
        if kept is None:
            break
        runs = _runs(nodes, kept, threshold)
        sequence = [operator for at in runs for operator in nodes[at].operators]
        extra_ns = sum(nodes[at].time_ns for at in runs) - once_ns
        live_bytes = int(graph.expanded(sequence).live_bytes().max())
        if live_bytes <= room_bytes:
            found.append(Solution(sequence, extra_ns, live_bytes))
    best = min(found, key=lambda one: one.extra_ns, default=None)
    return Answer(best, None if least_ns is None else max(least_ns - once_ns, 0))


def _runs(nodes: list[Node], kept: list[list[float]], threshold: float) -> list[int]:
    """The fewest runs that serve what is kept: phase two of the rounding (section 5)."""
    count = len(nodes)
    # Until when it may be needed: a user that can run again may do so while it is needed itself.
    until = list(range(count))
    for at in range(count - 1, -1, -1):
        for need in nodes[at].needs:
            until[need] = max(until[need], until[at] if nodes[at].is_repeatable else at)
    keeps = [
        [
            stage <= until[at] and (share > threshold or not nodes[at].is_repeatable)
            for at, share in enumerate(shares)
        ]
        for stage, shares in enumerate(kept)
    ] + [[False] * count]
    runs = []
    for stage in range(count):
        is_run = [False] * count
        is_run[stage] = True
        for at in range(stage):
            must = keeps[stage + 1][at] and not keeps[stage][at]
            is_run[at] = must and nodes[at].is_repeatable
        for at in range(stage, -1, -1):
            if is_run[at]:
                for need in nodes[at].needs:
                    is_run[need] |= not keeps[stage][need]
        runs += [at for at in range(stage + 1) if is_run[at]]
    return runs


class _Program:
    """The program of section 4: `run[t][i]` whether node i runs in stage t, `keep[t][i]` whether
    what it has made is there when stage t begins, `free[t][i, k]` whether it goes once k has run.
    """

    def __init__(self, nodes: list[Node], room_bytes: int, *, is_whole: bool) -> None:
        import highspy

        self._highspy = highspy
        self._nodes = nodes
        self._is_whole = is_whole
        self._solver = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", 1), ("time_limit", TIME_LIMIT_S)):
            self._solver.setOptionValue(name, value)
        self._columns = 0
        count = len(nodes)
        self._run = [
            [self._choice(*self._bounds(t, i, True)) for i in range(t + 1)] for t in range(count)
        ]
        self._keep = [
            [self._choice(*self._bounds(t, i, False)) for i in range(t)] for t in range(count)
        ]
        self._users: list[list[int]] = [[] for _ in nodes]
        for at, node in enumerate(nodes):
            for need in node.needs:
                self._users[need].append(at)
        for stage in range(count):
            self._dependencies(stage)
            self._memory(stage, room_bytes / _MIB)

    def _bounds(self, stage: int, at: int, is_run: bool) -> tuple[float, float, float]:
        """Least, most and cost of a choice."""
        node = self._nodes[at]
        if not is_run:
            return 0.0, 1.0, 0.0
        if at == stage:
            return 1.0, 1.0, float(node.time_ns)
        return 0.0, float(node.is_repeatable), float(node.time_ns)

    def _choice(self, least: float, most: float, cost: float = 0.0) -> int:
        self._solver.addCol(cost, least, most, 0, [], [])
        if self._is_whole:
            self._solver.changeColIntegrality(self._columns, self._highspy.HighsVarType.kInteger)
        self._columns += 1
        return self._columns - 1

    def _row(self, terms: dict[int, float], least: float, most: float) -> None:
        self._solver.addRow(least, most, len(terms), list(terms), list(terms.values()))

    def _dependencies(self, stage: int) -> None:
        infinity = self._highspy.kHighsInf
        run, keep = self._run, self._keep
        for at in range(stage + 1):
            for need in self._nodes[at].needs:
                terms = {run[stage][at]: 1.0, run[stage][need]: -1.0, keep[stage][need]: -1.0}
                self._row(terms, -infinity, 0.0)
        if stage:
            for at in range(stage):
                terms = {keep[stage][at]: 1.0, run[stage - 1][at]: -1.0}
                if at < stage - 1:
                    terms[keep[stage - 1][at]] = -1.0
                self._row(terms, -infinity, 0.0)

    def _memory(self, stage: int, room: float) -> None:
        """Bytes while each node of the stage may run, as running sums."""
        infinity = self._highspy.kHighsInf
        run, keep, nodes = self._run, self._keep, self._nodes
        terms = {keep[stage][at]: nodes[at].held_bytes / _MIB for at in range(stage)}
        before: int | None = None
        left = sum(node.left_bytes for node in nodes[:stage]) / _MIB
        for at in range(stage + 1):
            # In `used` is what is live after the outputs of `at` have been added.
            used = self._number(room)
            row = {used: 1.0}
            if before is None:
                row.update({column: -size for column, size in terms.items() if size})
            else:
                row[before] = -1.0
                for freed, column in self._freed(stage, at - 1).items():
                    row[column] = nodes[freed].held_bytes / _MIB
            row[run[stage][at]] = row.get(run[stage][at], 0.0) - nodes[at].held_bytes / _MIB
            if at == stage:
                left = nodes[at].left_bytes / _MIB
            self._row(row, left, left)
            left = 0.0
            if nodes[at].own_bytes:
                own = {used: 1.0, run[stage][at]: nodes[at].own_bytes / _MIB}
                self._row(own, -infinity, room)
            before = used

    def _number(self, most: float) -> int:
        self._solver.addCol(0.0, 0.0, most, 0, [], [])
        self._columns += 1
        return self._columns - 1

    def _freed(self, stage: int, at: int) -> dict[int, int]:
        """What can go once node `at` has run: equations 6 to 8, hazards in place of the product."""
        infinity = self._highspy.kHighsInf
        freed = {}
        for one in (*self._nodes[at].needs, at):
            if not self._nodes[one].held_bytes:
                continue
            column = self._choice(0.0, 1.0)
            later = [user for user in self._users[one] if at < user <= stage]
            # Hazards: `at` does not run; it is kept for the next stage; a later user runs.
            hazards = {self._run[stage][at]: -1.0}
            if stage + 1 < len(self._nodes):
                hazards[self._keep[stage + 1][one]] = 1.0
            for user in later:
                hazards[self._run[stage][user]] = 1.0
            # 1 - free <= hazards, and hazards <= most * (1 - free).
            self._row({**hazards, column: 1.0}, 0.0, infinity)
            most = 2.0 + len(later)
            self._row({**hazards, column: most}, -infinity, most - 1.0)
            freed[one] = column
        return freed

    def solve(self) -> tuple[list[list[float]] | None, int | None]:
        """What is kept at each stage, None if no solution was found; and a bound on the time of
        all runs, in nanoseconds.
        """
        self._solver.run()
        info = self._solver.getInfo()
        bound = info.mip_dual_bound if self._is_whole else info.objective_function_value
        feasible = self._highspy.SolutionStatus.kSolutionStatusFeasible
        if info.primal_solution_status != feasible:
            return None, None
        values = self._solver.getSolution().col_value
        return [[values[column] for column in stage] for stage in self._keep], int(bound)
