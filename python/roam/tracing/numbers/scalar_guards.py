"""Computed guards: conditions on numbers that change from step to step.

If a step's code tests such a number (a step count, a rate, a flag of the batch), a plan holds for
one outcome. The operators that compute it are cut out of the recording as a `ComputedGuard`. Every
call runs them again before anything else; another outcome (`answer`) needs another plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from roam.distributed.collectives import is_collective
from roam.program.ir import Call, ComputedGuard, Program, Source, substitute
from roam.state.optimizer_spaces import RATE_KEYS
from roam.state.references import (
    ArgumentReference,
    OptimizerReference,
    PlaceReference,
    RateReference,
)

CHANCE = "turn off the option by which chance decides what runs (such as layerdrop=0.0), or draw before the step and pass in what was drawn"
"""What to do about random numbers that reach Python."""


MayAsk = Callable[[Any, Program, int], bool]
"""Whether a computed guard may look at what a reference holds in a slot."""


def may_be_asked(reference: Any, program: Program, slot: int) -> bool:
    """Whether a guard may look at what a reference holds when a step begins: a tensor of the batch,
    a single number, or a tensor that may decide shapes.
    """
    meta = program.slots[slot]
    if isinstance(reference, ArgumentReference):
        return reference.kind == "integer" or (meta is not None and reference.kind == "input")
    is_number = meta is None or math.prod(meta.shape) == 1
    is_referenced = (
        isinstance(reference, (RateReference, OptimizerReference, PlaceReference))
        and reference.kind != "parameter"
    )
    return (is_number and is_referenced) or may_decide(reference, program, slot)


def may_decide(reference: Any, program: Program, slot: int) -> bool:
    """Whether what a reference holds when a step begins may decide shapes and numbers in Python:
    integers and booleans of the batch, or in a buffer. Floating-point data differs at every call,
    and would need a plan for every call.
    """
    meta = program.slots[slot]
    is_discrete = meta is not None and not (meta.dtype.is_floating_point or meta.dtype.is_complex)
    return (
        is_discrete
        and isinstance(reference, (ArgumentReference, PlaceReference))
        and reference.kind != "parameter"
    )


def may_be_fixed(reference: Any, program: Program, slot: int) -> bool:
    """Whether a plan may hold for one value of what a reference holds: of what may decide shapes,
    or of a number that seldom changes, unlike a learning rate.
    """
    return (isinstance(reference, RateReference) and reference.key not in RATE_KEYS) or may_decide(
        reference, program, slot
    )


class Slices:
    """Finds the calls of a growing recording that a value comes from."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.held: list[tuple[torch.Tensor, int]] = []
        """(value, slot): tensors for whose values the program holds."""
        self._forms: dict[str, ComputedGuard] = {}
        """The program's guards by what they compute and the answer."""
        self._seen = 0
        self._makers: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}

    def guard(
        self,
        slot: int,
        references: dict[int, Any],
        may_ask: MayAsk,
        source: Source,
        asked: Call | None = None,
    ) -> ComputedGuard | None:
        """What a slot's value comes from; None if it depends on what may not be asked.

        Args:
            slot: the value, as it is now.
            references: per slot the reference of what is there before the step.
            may_ask: whether what a reference holds in a slot may be looked at.
            source: the line of the condition.
            asked: a call that is not in the recording and gives the value, from values as they are
                now.
        """
        program = self._program
        constants = {number: tensor for tensor, number in (*program.constants, *self.held)}
        self._look()
        calls: set[int] = set()
        until: dict[int, int] = {}
        open_slots = [
            (number, len(program.calls)) for number in ([slot] if asked is None else asked.refs())
        ]
        while open_slots:
            number, end = open_slots.pop()
            if until.get(number, -1) >= end:
                continue
            until[number] = end
            writers = self._writers.get(program.storage_of(number), ())
            behind = [index for index in writers if index < end]
            if number in self._makers and number not in constants:
                behind.append(self._makers[number])
            elif number not in constants and not may_ask(references.get(number), program, number):
                return None
            for index in set(behind) - calls:
                call = program.calls[index]
                if call.random or call.skip_if is not None or is_collective(call.target):
                    return None
                calls.add(index)
                open_slots += [(argument, index) for argument in call.refs()]
        chosen = [replace(program.calls[index]) for index in self._ordered(calls)]
        if asked is not None:
            chosen.append(asked)
        inputs = sorted(number for number in until if number in references)
        changed = self._changed(chosen, inputs)
        if changed is None:
            return None
        used = [(tensor, number) for number, tensor in constants.items() if number in until]
        return ComputedGuard(
            chosen,
            inputs,
            changed,
            used,
            slot,
            source,
            [tuple(references[number] for number in inputs)],
            self._made_bytes(chosen, changed, used),
        )

    def add(self, guard: ComputedGuard, answer: Any) -> None:
        """Adds a guard to the program; one that it has already for other numbers is computed for
        these too.
        """
        form = f"{_form(guard)} {type(answer)} {answer!r}"
        known = self._forms.get(form)
        if known is None:
            self._forms[form] = guard
            self._program.computed_guards.append((guard, answer))
        else:
            known.uses.extend(use for use in guard.uses if use not in known.uses)

    def _made_bytes(
        self, calls: list[Call], changed: frozenset[int], used: list[tuple[torch.Tensor, int]]
    ) -> int:
        """Bytes of all that calls make, and of the copies that are made for them."""
        program = self._program
        inputs = {program.storage_of(number) for number in changed}
        slots = {slot for call in calls for slot in call.outputs if slot is not None}
        made = {
            storage
            for storage in map(program.storage_of, slots)
            if storage >= 0 and program.storages[storage].creator >= 0
        }
        copies_bytes = sum(tensor.nbytes for tensor, _ in used)
        return copies_bytes + sum(
            program.storages[storage].size_bytes for storage in (made | inputs) if storage >= 0
        )

    def _ordered(self, calls: set[int]) -> list[int]:
        """Calls in program order, but first those that many guards share: arithmetic on numbers
        alone.
        """
        shared: set[int] = set()
        for index in sorted(calls):
            behind = self._program.calls[index].refs()
            if all(
                self._program.slots[slot] is None and self._makers.get(slot) in {None, *shared}
                for slot in behind
            ):
                shared.add(index)
        return sorted(calls, key=lambda index: (index not in shared, index))

    def _look(self) -> None:
        """Takes in the calls that have come since."""
        for index in range(self._seen, len(self._program.calls)):
            call = self._program.calls[index]
            self._makers.update((slot, index) for slot in call.outputs if slot is not None)
            for storage in {self._program.storage_of(slot) for slot in call.mutates}:
                self._writers.setdefault(storage, []).append(index)
        self._seen = len(self._program.calls)

    def _changed(self, calls: list[Call], inputs: list[int]) -> frozenset[int] | None:
        """Inputs that the calls write to, on copies when asked; None if they share memory or are
        no mere numbers.
        """
        written = self._program.written(calls)
        changed = [slot for slot in inputs if self._program.storage_of(slot) in written]
        is_copied = len({self._program.storage_of(slot) for slot in changed}) == len(
            changed
        ) and all(
            math.prod(meta.shape) == 1
            for slot in changed
            if (meta := self._program.slots[slot]) is not None
        )
        return frozenset(changed) if is_copied else None


def _form(guard: ComputedGuard) -> tuple[Any, ...]:
    """Has the same text for guards that run the same calls, whatever the numbers of their slots."""
    numbers: dict[int, int] = {}

    def number(slot: int) -> int:
        return numbers.setdefault(slot, len(numbers))

    calls = [
        (
            call.target,
            repr(substitute((call.args, call.kwargs), lambda ref: f"slot {number(ref.slot)}")),
            [s if s is None else number(s) for s in call.outputs],
        )
        for call in guard.calls
    ]
    return (
        calls, [number(slot) for slot in guard.inputs], sorted(number(slot) for slot in guard.changed),
        {number(slot): id(tensor) for tensor, slot in guard.constants}, number(guard.slot),
    )  # fmt: skip
