"""Finds a run's inputs where the user's objects hold them, and checks how they share memory.

Both happen before every run, while the device waits. So all inputs are handled in a few passes, in
which Python calls functions of C.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from roam.program.effects import held as held_by
from roam.program.ir import Program
from roam.state.equality import pattern
from roam.state.references import ArgumentReference, OptimizerReference
from roam.state.state_lookup import StateLookup, getter, picker
from roam.torch_compat.private import FakeTensor, c_pointer


class Inputs:
    """The inputs of a program's runs.

    Args:
        program: the program; its `referenced` are the inputs, in their order.
    """

    def __init__(self, program: Program) -> None:
        references = [reference for reference, _ in program.referenced]
        metas = [program.slots[slot] for _, slot in program.referenced]
        places: dict[str, list[int]] = {"state": [], "argument": [], "other": []}
        for place, reference in enumerate(references):
            places[_kind(reference)].append(place)
        # All entries of one parameter's state are taken at once.
        first: dict[int, int] = {}
        places["state"].sort(
            key=lambda place: first.setdefault(id(references[place].parameter), place)
        )
        filled = [
            (keys.optimizer, parameter)
            for keys in program.state_keys
            for parameter, _ in keys.filled
        ]
        self._lookup = StateLookup([references[place] for place in places["state"]], filled)
        others = [references[place] for place in places["other"]]
        self._others = list(map(getter, others))
        self._parameters = Places(self._lookup.places, others)
        self._arguments = [references[place] for place in places["argument"]]
        order = [*places["state"], *places["other"], *places["argument"]]
        self._in_turn = [references[place] for place in (*places["state"], *places["other"])]
        self._in_order = picker(sorted(range(len(order)), key=order.__getitem__))

        tensors = [place for place, meta in enumerate(metas) if meta is not None]
        self._numbers = [place for place, meta in enumerate(metas) if meta is None]
        self._tensors = tensors
        self._sharing = pattern([meta.storage for meta in metas if meta is not None])
        given = set(places["argument"])
        self._given = [place for place in tensors if place in given]
        self._kept = picker([place for place in tensors if place not in given])
        storages = [
            meta.storage for place, meta in enumerate(metas) if meta is not None and place in given
        ]
        self._given_sharing = pattern(storages)
        self._are_apart = set(storages).isdisjoint(
            meta.storage
            for place, meta in enumerate(metas)
            if meta is not None and place not in given
        )
        changed = program.written()
        self._changed = [meta.storage in changed for meta in metas if meta is not None]
        """For each tensor, whether runs write to its storage."""
        self._given_changed = [storage in changed for storage in storages]
        self._seen: _Seen | None = None

    def read(self, leaves: list[Any]) -> tuple[list[Any], list[Any] | None]:
        """The inputs of a call with these flattened arguments, and what optimizers keep of each
        parameter that has state; None for that if an input is not there.
        """
        entries = None
        try:
            others = [get() for get in self._others]
            entries = self._lookup.of_parameters(self._parameters.found(others, leaves))
            found = [*self._lookup.entries(entries), *others]
        except (LookupError, TypeError):  # something is not there
            found, entries = [reference.get() for reference in self._in_turn], None
        found += [reference.find(leaves) for reference in self._arguments]
        return list(self._in_order(found)), entries

    def share_as_captured(self, inputs: list[Any]) -> bool:
        """Whether those inputs that are tensors share storages as they did at capture, and no
        storage that a run writes to lies over another one.
        """
        try:
            if self._are_where_they_were(inputs):
                return True
        except (AttributeError, RuntimeError, TypeError):
            pass  # one is no tensor, or has no storage
        storages = [value.untyped_storage() for value in inputs if isinstance(value, torch.Tensor)]
        if pattern(list(map(c_pointer, storages))) != self._sharing:
            return False
        if any(isinstance(value, FakeTensor) for value in inputs):  # they lie nowhere
            return True
        if _overlap(storages, self._changed) is not None:
            return False
        self._seen = _Seen(list(self._kept(inputs)))
        return True

    def overlap(self, inputs: list[Any]) -> tuple[int, int] | None:
        """Places of two tensors whose storages lie over each other, although a run writes to one;
        None if there are none.
        """
        if not all(isinstance(inputs[place], torch.Tensor) for place in self._tensors):
            return None
        storages = [inputs[place].untyped_storage() for place in self._tensors]
        found = _overlap(storages, self._changed)
        return None if found is None else (self._tensors[found[0]], self._tensors[found[1]])

    def _are_where_they_were(self, inputs: list[Any]) -> bool:
        """Whether all tensors except arguments have the addresses that they had when the storages
        of all inputs were last compared, so that they share memory as they did then, and arguments
        share memory as at capture. A batch may lie elsewhere in every call.
        """
        if self._seen is None or not self._are_apart:
            return False
        if list(map(torch.Tensor.data_ptr, self._kept(inputs))) != self._seen.addresses:
            return False
        if any(isinstance(inputs[place], torch.Tensor) for place in self._numbers):
            return False
        given = [inputs[place].untyped_storage() for place in self._given]
        if any(map(self._seen.may_share, given)):
            return False
        if pattern(list(map(c_pointer, given))) != self._given_sharing:
            return False
        return not any(self._given_changed) or _overlap(given, self._given_changed) is None


class Places:
    """What some references hold at a call. Most of them are inputs, which have been looked up.

    Args:
        references: of what is asked for.
        inputs: the references of the inputs, in their order.
    """

    def __init__(self, references: Sequence[Any], inputs: Sequence[Any]) -> None:
        known = {id(reference): place for place, reference in enumerate(inputs)}
        others = [reference for reference in references if id(reference) not in known]
        known |= {id(other): len(inputs) + place for place, other in enumerate(others)}
        self._pick = picker([known[id(reference)] for reference in references])
        self._others = others

    def found(self, held: Sequence[Any], leaves: list[Any]) -> list[Any]:
        """What they hold.

        Args:
            held: what the inputs hold.
            leaves: the call's flattened arguments.
        """
        if self._others:
            held = [*held, *(held_by(other, leaves) for other in self._others)]
        return list(self._pick(held))


class _Seen:
    """Where tensors lay when the storages of all inputs were last compared.

    Args:
        tensors: those that are not arguments.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        ranges = sorted((one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages)
        self._starts = [start for start, _ in ranges]
        self._ends = list(accumulate((end for _, end in ranges), max))

    def may_share(self, storage: torch.UntypedStorage) -> bool:
        """Whether a tensor's storage may be an argument's, or lie over it."""
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        before = bisect_left(self._starts, end)
        return before > 0 and self._ends[before - 1] > start


def _kind(reference: Any) -> str:
    if isinstance(reference, OptimizerReference):
        return "state"
    return "argument" if isinstance(reference, ArgumentReference) else "other"


def _overlap(storages: list[torch.UntypedStorage], changed: list[bool]) -> tuple[int, int] | None:
    """Places of two different storages that lie over each other, and of which a run writes to at
    least one; None if there are none.
    """
    ranges: dict[int, tuple[int, int, int]] = {}
    for place, storage in enumerate(storages):
        start = storage.data_ptr()
        ranges[c_pointer(storage)] = start, start + storage.nbytes(), place
    last = last_changed = 0, -1  # the end, and the place, of what reaches farthest
    for start, end, place in sorted(ranges.values()):
        before = last if changed[place] else last_changed
        if start < min(before[0], end):
            return before[1], place
        last = max(last, (end, place))
        if changed[place]:
            last_changed = max(last_changed, (end, place))
    return None
