"""When each tensor is alive in an order of the operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from roam._core import Graph

Steps = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The half-open interval of steps in which each tensor is counted.

    An input whose memory an output takes over ends where the output starts, so that the memory is
    counted once. Persistent tensors are alive at every step.

    Attributes:
        starts: the first step, int64 [tensors].
        ends: the step after the last, int64 [tensors].
    """

    starts: Steps
    ends: Steps

    def alive_at(self, step: int) -> list[int]:
        """Numbers of the tensors that are alive at a step."""
        return np.flatnonzero((self.starts <= step) & (step < self.ends)).tolist()


def lifetimes(
    graph: Graph, order: Steps | None = None, reuse: Iterable[Sequence[int]] = ()
) -> Lifetimes:
    """The lifetimes of all tensors of a graph.

    Args:
        graph: the graph whose operators and tensors are numbered; see `Plan.expanded`.
        order: the operators as they run one after another; program order where None.
        reuse: pairs of an input and the output that takes its memory over.
    """
    order = graph.program_order if order is None else order
    steps = len(order)
    step_of = np.empty(steps, dtype=np.int64)
    step_of[order] = np.arange(steps)
    starts = np.zeros(graph.num_tensors, dtype=np.int64)
    ends = np.zeros(graph.num_tensors, dtype=np.int64)
    for tensor in graph.tensors:
        number = tensor.id
        if tensor.residency == "persistent":
            ends[number] = steps
            continue
        creator, users = graph.creator(number), graph.users(number)
        start = 0 if creator is None else int(step_of[creator])
        starts[number] = start
        last = max((int(step_of[user]) for user in users), default=start)
        ends[number] = steps if tensor.residency == "leaves" else min(max(last, start) + 1, steps)
    for old, new in reuse:
        ends[old] = starts[new]
    return Lifetimes(starts, ends)
