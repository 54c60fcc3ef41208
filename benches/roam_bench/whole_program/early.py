"""Weight updates that have to run early: constraints that shrink MODeL's program, and may cost it
the best order.
"""

from __future__ import annotations

import roam
from roam_bench.whole_program.problem import Problem


def early_updates(graph: roam.Graph) -> list[tuple[int, int]]:
    """Pairs (update, anchor): the update is to run before the anchor.

    An update is an operator that nobody waits for and that uses a persistent tensor. Its level is
    the length of the longest chain before it. Its anchor is, among what follows from its own
    inputs' makers, their makers and so on (the nearest that have any), the operator beyond the
    update's level with the longest chain behind it. Constraints so go from lower to higher levels
    only: they contradict none, and lengthen no longest chain.
    """
    problem = Problem(graph, None)
    above, below = problem.first, [problem.steps - 1 - last for last in problem.last]
    followers = [graph.successors(operator) for operator in range(problem.count)]
    persistent = {tensor.id for tensor in graph.tensors if tensor.residency == "persistent"}
    pairs = []
    for operator in graph.operators:
        if not followers[operator.id] and persistent & {*operator.reads, *operator.mutates}:
            anchor = _anchor(graph, operator.id, above, below, followers)
            if anchor is not None:
                pairs.append((operator.id, anchor))
    return pairs


def _anchor(
    graph: roam.Graph,
    update: int,
    above: list[int],
    below: list[int],
    followers: list[tuple[int, ...]],
) -> int | None:
    sources = {update}
    while sources:
        sources = {earlier for source in sources for earlier in graph.predecessors(source)}
        beyond = _beyond(sources, above[update], above, followers)
        if beyond:
            # The first of equals by number; the longest chain behind it decides.
            return max(sorted(beyond), key=lambda operator: below[operator])
    return None


def _beyond(
    sources: set[int], level: int, above: list[int], followers: list[tuple[int, ...]]
) -> set[int]:
    """The first operators beyond the level on every way from the sources."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting = list(sources)
    while waiting:
        for later in followers[waiting.pop()]:
            if above[later] > level:
                found.add(later)
            elif later not in seen:
                seen.add(later)
                waiting.append(later)
    return found
