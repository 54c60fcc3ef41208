"""Finds a run's inputs where the user's objects hold them, and checks how they share memory.

Both happen before every run, while the device waits. So all inputs are handled in a few passes, in
which Python calls functions of C.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

from roam.program.ir import Program
from roam.state.containers import MappingSpace
from roam.state.equality import MISSING
from roam.state.references import ArgumentReference, OptimizerReference, PlaceReference
from roam.torch_compat.private import c_pointer, local_of


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
        in_state = [references[place] for place in places["state"]]
        holders = {
            (id(reference.optimizer), id(reference.parameter)): reference for reference in in_state
        }
        numbers = {key: number for number, key in enumerate(holders)}
        self._holders = [
            (reference.optimizer, _getter(reference.parameter)) for reference in holders.values()
        ]
        self._entries = [
            numbers[id(reference.optimizer), id(reference.parameter)] for reference in in_state
        ]
        self._keys = [reference.key for reference in in_state]
        self._others = [_getter(references[place]) for place in places["other"]]
        self._arguments = [references[place] for place in places["argument"]]
        order = [*places["state"], *places["other"], *places["argument"]]
        self._in_turn = [references[place] for place in (*places["state"], *places["other"])]
        self._places = sorted(range(len(order)), key=order.__getitem__)

        tensors = [place for place, meta in enumerate(metas) if meta is not None]
        self._numbers = [place for place, meta in enumerate(metas) if meta is None]
        self._sharing = _pattern([meta.storage for meta in metas if meta is not None])
        given = set(places["argument"])
        self._given = [place for place in tensors if place in given]
        self._kept = [place for place in tensors if place not in given]
        storages = [
            meta.storage for place, meta in enumerate(metas) if meta is not None and place in given
        ]
        self._given_sharing = _pattern(storages)
        self._are_apart = set(storages).isdisjoint(
            meta.storage
            for place, meta in enumerate(metas)
            if meta is not None and place not in given
        )
        self._seen: tuple[list[int], list[int], list[int]] | None = None
        """From the last time that the storages of all inputs were compared, of the tensors that
        are not arguments: their addresses, those of their storages in ascending order, and their
        addresses in ascending order."""

    def read(self, leaves: list[Any]) -> list[Any]:
        """The inputs of a call with these flattened arguments; of a distributed tensor, this
        process's part.
        """
        try:
            entries = [optimizer.state.get(parameter()) for optimizer, parameter in self._holders]
            state = map(operator.getitem, map(entries.__getitem__, self._entries), self._keys)
            found = [*state, *[get() for get in self._others]]
        except (LookupError, TypeError):  # something is not there
            found = [reference.get() for reference in self._in_turn]
        found += [reference.find(leaves) for reference in self._arguments]
        return [local_of(found[place]) for place in self._places]

    def share_as_captured(self, inputs: list[Any]) -> bool:
        """Whether those inputs that are tensors share storages as they did at capture."""
        try:
            if self._are_where_they_were(inputs):
                return True
        except (AttributeError, RuntimeError):
            pass  # one is no tensor, or has no storage
        storages = [value.untyped_storage() for value in inputs if isinstance(value, torch.Tensor)]
        if _pattern(list(map(c_pointer, storages))) != self._sharing:
            return False
        kept = [inputs[place] for place in self._kept]
        addresses = [tensor.data_ptr() for tensor in kept]
        bases = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self._seen = addresses, sorted(bases), sorted(addresses)
        return True

    def _are_where_they_were(self, inputs: list[Any]) -> bool:
        """Whether all tensors except arguments have the addresses that they had when the storages
        of all inputs were last compared, so that they share memory as they did then, and arguments
        share memory as at capture. A batch may lie elsewhere in every call.
        """
        if self._seen is None or not self._are_apart:
            return False
        if [inputs[place].data_ptr() for place in self._kept] != self._seen[0]:
            return False
        if any(isinstance(inputs[place], torch.Tensor) for place in self._numbers):
            return False
        given = [inputs[place].untyped_storage() for place in self._given]
        if any(map(self._may_be_shared, given)):
            return False
        return _pattern(list(map(c_pointer, given))) == self._given_sharing

    def _may_be_shared(self, storage: torch.UntypedStorage) -> bool:
        """Whether a tensor that is no argument may lie in an argument's storage."""
        assert self._seen is not None
        start, size = storage.data_ptr(), storage.nbytes()
        for addresses in self._seen[1:]:
            place = bisect_left(addresses, start)
            if place < len(addresses) and addresses[place] < start + size:
                return True
        return False


def _kind(reference: Any) -> str:
    if isinstance(reference, OptimizerReference):
        return "state"
    return "argument" if isinstance(reference, ArgumentReference) else "other"


def _getter(reference: Any) -> Callable[[], Any]:
    """What `reference.get` does, without a function of Python where it is one look into a
    dictionary.
    """
    if isinstance(reference, PlaceReference):
        space = reference.space
        if type(space).get is MappingSpace.get:
            return functools.partial(dict.get, space.holder, reference.key, MISSING)  # type: ignore[attr-defined]
    found: Callable[[], Any] = reference.get
    return found


def _pattern(storages: list[int]) -> list[int]:
    """For each storage, the place of the first that is the same."""
    first: dict[int, int] = {}
    return [first.setdefault(storage, place) for place, storage in enumerate(storages)]
