"""Hand-made sequences in which operators of a captured step run again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import roam
from roam.kernels.workspace import workspaces
from roam.program.lower import Lowering
from roam.runtime import strategy


class _Walk:
    """A sequence as it grows. Whoever is made again is changed and viewed again too, as far as the
    step has come."""

    def __init__(self, lowering: Lowering) -> None:
        self._operators, self._repeats = lowering.operators, lowering.repeats
        self._versions: list[dict[int, int]] = []
        """Per operator, how many have changed each tensor that it uses before it."""
        changes: dict[int, int] = {}
        for operator in self._operators:
            used = (*operator.reads, *operator.mutates)
            self._versions.append({tensor: changes.get(tensor, 0) for tensor in used})
            for tensor in operator.mutates:
                changes[tensor] = changes.get(tensor, 0) + 1
        program = lowering.program
        self._local = {
            number
            for number, storage in enumerate(program.storages)
            if storage.creator >= 0 and number not in program.leaving()
        }
        self._done: list[int] = []
        self._changed: dict[int, int] = {}
        self.sequence: list[int] = []

    def run(self, index: int) -> None:
        """The first run of an operator."""
        self.sequence.append(index)
        self._done.append(index)
        for tensor in self._operators[index].mutates:
            self._changed[tensor] = self._changed.get(tensor, 0) + 1

    def live(self) -> list[int]:
        """Tensors that the step has made so far."""
        return [
            tensor
            for index in self._done
            for tensor in self._operators[index].creates
            if tensor in self._local
        ]

    def again(self, tensors: Iterable[int]) -> bool:
        """Makes tensors again, with what they need; False where something they need is gone."""
        made = set(tensors)
        while True:
            runs = [index for index in self._done if not made.isdisjoint(self._touched(index))]
            missing = set()
            for index in runs:
                repeat = self._repeats[index]
                if repeat is None:
                    return False
                needed = {
                    tensor
                    for tensor, version in self._versions[index].items()
                    if tensor not in made
                    and tensor not in repeat.first_only
                    and self._changed.get(tensor, 0) != version
                }
                changed = {
                    tensor
                    for tensor in self._operators[index].mutates
                    if tensor not in repeat.first_only
                }
                missing |= (needed | changed) - made
                # All that it makes is new.
                missing |= set(self._operators[index].creates) - made
            if not missing:
                self.sequence += runs
                return True
            if not missing <= self._local:
                return False
            made |= missing

    def _touched(self, index: int) -> set[int]:
        """What an operator makes, changes, or makes a view of."""
        operator = self._operators[index]
        is_view = not operator.creates and not operator.mutates
        return {*operator.creates, *operator.mutates, *(operator.reads if is_view else ())}


def all_again(lowering: Lowering) -> list[int]:
    """Everything that can be is made again right before the backward pass."""
    calls = lowering.program.calls
    begins = next(index for index, call in enumerate(calls) if call.phase == "backward")
    walk = _Walk(lowering)
    for index in range(len(calls)):
        if index == begins:
            for tensor in walk.live():
                walk.again([tensor])
        walk.run(index)
    return walk.sequence


def at_random(lowering: Lowering, seed: int, share: float = 0.1) -> list[int]:
    """Some tensors are made again at some places, alone or several together, some of them
    often."""
    rng = random.Random(seed)
    walk = _Walk(lowering)
    for index in range(len(lowering.program.calls)):
        if rng.random() < share and (live := walk.live()):
            walk.again(rng.choices(live[-60:], k=rng.randint(1, 4)))
        walk.run(index)
    return walk.sequence


def extra_runs(lowering: Lowering, sequence: list[int]) -> list[Any]:
    """The calls that run again."""
    seen: set[int] = set()
    return [
        lowering.program.calls[index]
        for index in sequence
        if index in seen or seen.add(index)  # type: ignore[func-returns-value]
    ]


class HandMade:
    """Stands for a plan of a graph in which operators run again by a sequence of the test's."""

    def __init__(self, graph: roam.Graph, sequence: list[int]) -> None:
        self.recomputation = {
            "sequence": sequence, "extra_s": 0.25, "step_s": 1.0, "least_extra_s": 0.2, "floor_bytes": 1,
        }  # fmt: skip
        self._expanded = graph.expanded(sequence)

    def expanded(self, graph: roam.Graph) -> tuple[roam.Graph, roam.Plan]:
        return self._expanded, roam.optimize(self._expanded, exact="off")


def planning(
    monkeypatch: pytest.MonkeyPatch, sequence_of: Callable[[Lowering], list[int]]
) -> list[list[int]]:
    """Has every limit met by hand-made sequences; they are in the list as they are used."""
    used: list[list[int]] = []
    within, planned = strategy._Chooser._within_by, strategy._Chooser._planned

    def lowered(self: Any, limit_bytes: int, lowering: Lowering, *how: Any) -> Any:
        used.append(sequence_of(lowering))
        return within(self, limit_bytes, lowering, *how)

    def made(self: Any, graph: roam.Graph, enough_bytes: int, limit: int | None = None) -> Any:
        return planned(self, graph, enough_bytes) if limit is None else HandMade(graph, used[-1])

    # Limits of these tests are lower than any that is kept.
    monkeypatch.setattr(strategy, "workspaces", lambda *args: workspaces(*args[:4]))
    monkeypatch.setattr(strategy._Chooser, "_within_by", lowered)
    monkeypatch.setattr(strategy._Chooser, "_planned", made)
    return used
