"""The choice of an option for each node: equal layers choose alike at first, and the bound is that
of all layers apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roam._core import ShardingProblem
from roam.sharding.nodes import Node, Option
from roam.sharding.rules import WHOLE

FORBIDDEN = ShardingProblem.FORBIDDEN
Allowed = Callable[[Node, Option], bool]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a search found.

    Attributes:
        options: per node, the one that was chosen.
        ns: what they take together, by the model of time.
        bound_ns: no choice takes less.
        is_folded: whether equal layers were made to choose alike, and nothing was lost by it.
        nodes: of the problem in which all layers choose apart.
        folded_nodes: of that in which equal ones choose alike.
        peak_bytes: the most that options say their results take at any time.
    """

    options: tuple[Option, ...]
    ns: int
    bound_ns: int
    is_folded: bool
    nodes: int
    folded_nodes: int
    peak_bytes: int

    @property
    def gap(self) -> float:
        """By how much the choice may be above the best one, as a share of the bound."""
        return self.ns / self.bound_ns - 1 if self.bound_ns > 0 else 0.0


def search(
    nodes: Sequence[Node],
    *,
    limit_bytes: int | None,
    work: int,
    allowed: Allowed = lambda node, option: True,
) -> Choice | None:
    """The cheapest choice, or None where it is proved that there is none, or none was found.

    Args:
        nodes: of a step.
        limit_bytes: the most that results may take at any time.
        work: entries of cost matrices that each of the two searches may look at.
        allowed: which options may be chosen.
    """
    apart = _Problem(nodes, list(range(len(nodes))), allowed)
    _, count = _groups(nodes)
    found = search_folded(nodes, work=work, allowed=allowed) if limit_bytes is None else None
    problem = apart.made(limit_bytes)
    best = None if found is None else problem.evaluate(found)[0]
    outcome = problem.solve(work=work)
    is_folded = best is not None and (outcome.cost is None or best <= outcome.cost)
    chosen = found if is_folded else outcome.choice
    if chosen is None:
        return None
    ns, peak = problem.evaluate(chosen)
    assert ns is not None
    options = tuple(node.options[option] for node, option in zip(nodes, chosen, strict=True))
    bound = ns if outcome.bound is None else min(ns, outcome.bound)
    return Choice(options, ns, bound, is_folded, len(nodes), count, peak)


def search_folded(
    nodes: Sequence[Node], *, work: int, allowed: Allowed = lambda node, option: True
) -> list[int] | None:
    """Per node the number of an option, the same for nodes in the same place of equal layers, such
    that all together cost least; None where there are no equal layers, or nothing is found.
    """
    groups, count = _groups(nodes)
    if count == len(nodes):
        return None
    alike = _Problem(nodes, groups, allowed)
    outcome = alike.made(None).solve(work=work)
    return None if outcome.choice is None else alike.spread(outcome.choice)


def _groups(nodes: Sequence[Node]) -> tuple[list[int], int]:
    """Per node the number of its group; nodes of a group are in the same place of equal layers."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(node.key, len(numbers)) for node in nodes], len(numbers)


class _Problem:
    """Nodes that choose alike are one."""

    def __init__(self, nodes: Sequence[Node], groups: Sequence[int], allowed: Allowed) -> None:
        self._nodes, self._groups = nodes, groups
        count = max(groups, default=-1) + 1
        self._firsts: list[Node | None] = [None] * count
        self._costs: list[list[int]] = [[] for _ in range(count)]
        self._edges: dict[tuple[int, int, int, int], int] = {}
        for node, group in zip(nodes, groups, strict=True):
            costs = [option.ns if allowed(node, option) else FORBIDDEN for option in node.options]
            if self._firsts[group] is None:
                self._firsts[group] = node
                self._costs[group] = costs
            else:
                self._costs[group] = [
                    min(FORBIDDEN, one + other)
                    for one, other in zip(self._costs[group], costs, strict=True)
                ]
        for node, group in zip(nodes, groups, strict=True):
            for place, source in enumerate(node.sources):
                if source is not None:
                    self._edges[groups[source[0]], source[1], group, place] = 1

    def made(self, limit_bytes: int | None) -> ShardingProblem:
        """The problem as the solver takes it."""
        known: dict[object, int] = {}
        matrices: list[list[int]] = []
        edges = []
        costs = [list(row) for row in self._costs]
        for first, output, second, place in self._edges:
            before, after = self._firsts[first], self._firsts[second]
            assert before is not None
            assert after is not None
            given = tuple(option.outputs[output] for option in before.options)
            wanted = tuple(option.inputs[place] for option in after.options)
            if first == second:
                for number, (one, other) in enumerate(zip(given, wanted, strict=True)):
                    if one != other:
                        costs[first][number] = FORBIDDEN
                continue
            if (given, wanted) not in known:
                known[given, wanted] = len(matrices)
                matrices.append(
                    [0 if one == other else FORBIDDEN for one in given for other in wanted]
                )
            edges.append((first, second, known[given, wanted]))
        firsts = [node for node in self._firsts if node is not None]
        return ShardingProblem(
            "sharding",
            costs,
            [[option.size_bytes for option in node.options] for node in firsts],
            [node.lifetime for node in firsts],
            edges,
            matrices,
            limit_bytes,
        )

    def spread(self, choice: Sequence[int]) -> list[int]:
        """A choice for all nodes."""
        return [choice[group] for group in self._groups]


def is_whole(option: Option) -> bool:
    """Whether every rank does all of it on plain tensors."""
    return option.kind == "plain" and all(state == WHOLE for state in option.outputs)
