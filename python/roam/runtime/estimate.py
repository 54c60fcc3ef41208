"""Estimates, within milliseconds and without planning, the memory of a step if other results were
in the pool than in an existing plan.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roam._core import Plan
from roam.program.lower import Lowering


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of the pool, of the total, and of all results that the step makes in the pool, summed
    over the step.
    """

    pool_bytes: int
    total_bytes: int
    pooled_bytes: int


class Estimator:
    """Estimates the totals of ways of running a program, all in the order of one plan. With orders
    of their own most of them take less.

    Args:
        lowering: of the program.
        plan: of one of its graphs.
    """

    def __init__(self, lowering: Lowering, plan: Plan) -> None:
        program = lowering.program
        self._lowering = lowering
        self._persistent_bytes = plan.persistent_bytes
        self._order = np.asarray(plan.order, dtype=np.int64)
        places = np.empty(len(self._order), dtype=np.int64)
        places[self._order] = np.arange(len(self._order))
        storages = program.storages
        self._sizes = np.array([storage.size_bytes for storage in storages], dtype=np.int64)
        creators = np.array([storage.creator for storage in storages], dtype=np.int64)
        self._is_made = creators >= 0
        self._starts = (
            np.where(self._is_made, places[creators], 0) if len(places) else np.zeros_like(creators)
        )
        self._ends = self._starts.copy()
        for index, operator in enumerate(lowering.operators):
            for storage in (*operator.reads, *operator.mutates):
                self._ends[storage] = max(self._ends[storage], places[index])
        # Pairs of parts of storages are left out.
        pairs = [(old, new) for old, new in plan.reuse if old < len(storages)]
        self._pairs = [(old, new) for old, new in pairs if self._is_made[old]]

    def of(self, copied_in: Container[int]) -> Estimate:
        """A way with a pool, into which the results of these calls are copied."""
        lowering = self._lowering
        residencies = lowering.residencies(copied_in, True)
        kinds = np.array(residencies)
        ends = self._ends.copy()
        ends[kinds == "leaves"] = len(self._order) - 1
        for old, new in self._pairs:
            if residencies[old] == residencies[new]:
                ends[old] = self._starts[new] - 1  # the memory is the same
        workspaces = np.asarray(lowering.workspaces(copied_in, residencies), dtype=np.int64)[
            self._order
        ]
        is_pooled = kinds == "step_local"
        is_outside = (kinds == "unpooled") | (kinds == "leaves") | (kinds == "enters")
        pool_bytes = int(self._live(is_pooled, ends).max(initial=0))
        outside_bytes = int((self._live(is_outside, ends) + workspaces).max(initial=0))
        total_bytes = self._persistent_bytes + pool_bytes + outside_bytes
        return Estimate(pool_bytes, total_bytes, int(self._sizes[is_pooled].sum()))

    def _live(self, which: NDArray[np.bool_], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes that are live at each place of the order."""
        changes = np.zeros(len(self._order) + 1, dtype=np.int64)
        np.add.at(changes, self._starts[which], self._sizes[which])
        np.subtract.at(changes, ends[which] + 1, self._sizes[which])
        return np.cumsum(changes[:-1])
