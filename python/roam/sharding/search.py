"""The choice of an option for each node: equal layers get equal choices if nothing is lost by it.
The bound holds also for choices in which equal layers differ.
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
        options: the option that was chosen for each node.
        ns: nanoseconds that these options take together, by the cost model.
        bound_ns: a lower bound of the time of all choices.
        is_folded: whether equal layers were made to choose alike, and nothing was lost by it.
        nodes: how many nodes there are if each layer chooses for itself.
        folded_nodes: how many there are if equal layers choose alike.
        peak_bytes: the most bytes that results take at any time, by what the options say.
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


class Problem:
    """The nodes of a step, in the form that the solver takes.

    Args:
        nodes: of a step; equal layers share their tuples of options.
        limit_bytes: the most that results may take at any time.
        allowed: which options may be chosen; all if None.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        *,
        limit_bytes: int | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        self._nodes, self._limit_bytes = nodes, limit_bytes
        numbers: dict[object, int] = {}
        self._groups = [numbers.setdefault(node.key, len(numbers)) for node in nodes]
        self._count = len(numbers)
        costs_of: dict[int, list[int]] = {}
        bytes_of: dict[int, list[int]] = {}
        costs, taken = [], []
        for node in nodes:
            place = id(node.options)
            if place not in costs_of:
                costs_of[place] = [option.ns for option in node.options]
                bytes_of[place] = [option.size_bytes for option in node.options]
            own = costs_of[place]
            if allowed is not None:
                own = [
                    ns if allowed(node, option) else FORBIDDEN
                    for ns, option in zip(own, node.options, strict=True)
                ]
            costs.append(own)
            taken.append(bytes_of[place])
        edges, matrices = _edges(nodes)
        lifetimes = [node.lifetime for node in nodes]
        self._problem = ShardingProblem(
            "sharding", costs, taken, lifetimes, edges, matrices, limit_bytes
        )

    def search(self, work: int) -> Choice | None:
        """The cheapest choice, or None if it is proved that there is none, or none was found.

        Args:
            work: how many entries of cost matrices each search may look at. There may be two: one
                in which equal layers choose alike, and, if it is needed, one in which each layer
                chooses for itself.
        """
        problem = self._problem
        if self._limit_bytes is None:
            found = problem.solve_alike(self._groups, work=work)
        else:
            found = problem.solve(work=work)
        chosen = found.choice
        if chosen is None:
            return None
        ns, peak = problem.evaluate(chosen)
        assert ns is not None
        options = tuple(
            node.options[option] for node, option in zip(self._nodes, chosen, strict=True)
        )
        bound = ns if found.bound is None else min(ns, found.bound)
        is_folded = found.is_alike and self._count < len(options)
        return Choice(options, ns, bound, is_folded, len(options), self._count, peak)


def _edges(nodes: Sequence[Node]) -> tuple[list[tuple[int, int, int]], list[list[int]]]:
    """The edges and the matrices. An edge leads from the node that makes a value to a node that
    takes it, and has the number of a matrix. A matrix has a cost of 0 where both nodes have the
    value in the same state, and `FORBIDDEN` elsewhere.
    """
    edges: list[tuple[int, int, int]] = []
    matrices: list[list[int]] = []
    by_states: dict[object, int] = {}
    by_options: dict[object, int] = {}
    for number, node in enumerate(nodes):
        for place, source in enumerate(node.sources):
            if source is None:
                continue
            first, output = source
            before = nodes[first].options
            key = id(before), output, id(node.options), place
            matrix = by_options.get(key)
            if matrix is None:
                given = tuple(option.outputs[output] for option in before)
                wanted = tuple(option.inputs[place] for option in node.options)
                matrix = by_states.setdefault((given, wanted), len(matrices))
                by_options[key] = matrix
                if matrix == len(matrices):
                    matrices.append(
                        [0 if one == other else FORBIDDEN for one in given for other in wanted]
                    )
            edges.append((first, number, matrix))
    return edges, matrices


def is_whole(option: Option) -> bool:
    """Whether, with this option, every rank does all of the work on plain tensors."""
    return option.kind == "plain" and all(state == WHOLE for state in option.outputs)
