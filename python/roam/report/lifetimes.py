"""When each tensor is alive, by the order of the operators or by their times on several streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from roam._core import Graph, Plan

Steps = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Starts:
    """The starts of the operators, by which time is counted. On one stream they are the steps of
    the plan; on several, other operators may still run when one starts.

    Attributes:
        order: operators by start, int64 [operators]; of those that start at once, the one that is
            launched first comes first.
        done: for each of them the first later start at which it has completed, int64 [operators];
            the number of operators if there is none.
    """

    order: Steps
    done: Steps

    @classmethod
    def one_by_one(cls, order: Steps) -> Starts:
        """The starts of operators that run one after another."""
        return cls(order, np.arange(1, len(order) + 1, dtype=np.int64))

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> Starts:
        """The starts of a valid plan: on several streams by the cost model, or by time steps if
        the plan has them. These are the starts that `plan.peak_bytes` is about.
        """
        if plan.settings["streams"] == 1:
            return cls.one_by_one(plan.order)
        if plan.time_steps is None:
            begin, end = plan.times_ns(graph)
        else:
            begin = np.array(plan.time_steps, dtype=np.int64)
            end = begin + 1
        order = plan.order[np.argsort(begin[plan.order], kind="stable")]
        done = np.searchsorted(begin[order], end[order])
        return cls(order, np.maximum(done, np.arange(1, len(order) + 1)))


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The half-open interval of starts in which each tensor is counted.

    An input whose memory an output takes over ends where the output starts, so that the memory is
    counted once. Persistent tensors are alive at every start.

    Attributes:
        starts: the first start, int64 [tensors].
        ends: the start after the last, int64 [tensors].
    """

    starts: Steps
    ends: Steps

    def alive_at(self, start: int) -> list[int]:
        """Numbers of the tensors that are alive at a start."""
        return np.flatnonzero((self.starts <= start) & (start < self.ends)).tolist()


def lifetimes(
    graph: Graph, starts: Starts | None = None, reuse: Iterable[Sequence[int]] = ()
) -> Lifetimes:
    """The lifetimes of all tensors of a graph.

    Args:
        graph: the graph whose operators and tensors are numbered; see `Plan.expanded`.
        starts: when the operators run; one after another in program order if None.
        reuse: pairs of an input and the output that takes its memory over.
    """
    starts = Starts.one_by_one(graph.program_order) if starts is None else starts
    count = len(starts.order)
    start_of, done_of = np.empty((2, count), dtype=np.int64)
    start_of[starts.order] = np.arange(count)
    done_of[starts.order] = starts.done
    first = np.zeros(graph.num_tensors, dtype=np.int64)
    after = np.zeros(graph.num_tensors, dtype=np.int64)
    for tensor in graph.tensors:
        number = tensor.id
        creator, users = graph.creator(number), graph.users(number)
        if tensor.residency in ("persistent", "leaves"):
            after[number] = count
        else:
            # What enters and is never used is gone once an operator has completed.
            using = [*users, *([] if creator is None else [creator])] or starts.order[:1].tolist()
            after[number] = max((int(done_of[user]) for user in using), default=0)
        if creator is not None and tensor.residency != "persistent":
            first[number] = start_of[creator]
    for old, new in reuse:
        after[old] = first[new]
    return Lifetimes(first, after)


def live_bytes_of(graph: Graph, starts: Starts, lives: Lifetimes) -> Steps:
    """Live bytes at each start, int64 [operators]: tensors that are not persistent, and what the
    operators that run take for themselves.
    """
    changes = np.zeros(len(starts.order) + 1, dtype=np.int64)
    local = np.array([tensor.residency != "persistent" for tensor in graph.tensors], dtype=bool)
    sizes = graph.tensor_counted_bytes[local]
    np.add.at(changes, lives.starts[local], sizes)
    np.subtract.at(changes, lives.ends[local], sizes)
    workspaces = graph.workspaces_bytes[starts.order]
    changes[:-1] += workspaces
    np.subtract.at(changes, starts.done, workspaces)
    return np.cumsum(changes)[:-1]
