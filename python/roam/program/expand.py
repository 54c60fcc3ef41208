"""A program in which calls run more than once, as an ordinary program.

A *sequence* lists the number of every call at least once; each further entry is an extra run. What
a run uses comes from the latest run before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from roam.program.ir import Call, Program, Storage
from roam.program.repeatable import Repeat

AGAIN = " again"
"""Added to the names of tensors that are made again."""


@dataclass(frozen=True, slots=True)
class Expanded:
    """A program expanded by a sequence.

    Attributes:
        program: call `i` is the run that the sequence's entry `i` names. Slots and storages of
            first runs keep their numbers, so what persists and what outlives the step has the same
            numbers as before. Those of extra runs follow, in the order of the runs.
        sequence: for each call, the number of the original call.
        storage_of: for each storage, the number of the original storage.
        is_again: for each call, whether it is an extra run.
    """

    program: Program
    sequence: tuple[int, ...]
    storage_of: tuple[int, ...]
    is_again: tuple[bool, ...]

    def latest(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Takes pairs (call, later call) of the original program. For each run of the later call,
        gives its pair with the latest run of the other call before it.
        """
        before: dict[int, list[int]] = {}
        for first, second in pairs:
            before.setdefault(second, []).append(first)
        run: dict[int, int] = {}
        for place, index in enumerate(self.sequence):
            for other in before.get(index, ()):
                yield run[other], place
            run[index] = place


def expand(program: Program, repeats: Sequence[Repeat | None], sequence: Sequence[int]) -> Expanded:
    """Expands a program by a sequence. The sequence has to be valid for the program's graph:
    `roam.Graph.expanded` refuses any other.

    Args:
        program: the program.
        repeats: for each call, how it runs again.
        sequence: numbers of the calls in the order of their runs.
    """
    calls: list[Call] = []
    slots, storages = list(program.slots), list(program.storages)
    storage_of = list(range(len(storages)))
    makes: dict[int, list[int]] = {}
    for number, storage in enumerate(program.storages):
        makes.setdefault(storage.creator, []).append(number)
    latest: dict[int, int] = {}
    """For each slot that has been made again, the slot to use instead."""
    ran: set[int] = set()
    is_again: list[bool] = []
    for place, index in enumerate(sequence):
        call = program.calls[index]
        again = repeats[index] if index in ran else None
        is_again.append(index in ran)
        instances = {
            program.storage_of(slot): slots[latest.get(slot, slot)].storage  # type: ignore[union-attr]
            for slot in call.refs()
            if program.slots[slot] is not None
        }
        for number in makes.get(index, ()):
            storage = program.storages[number]
            if again is None:
                storages[number] = replace(storage, creator=place)
                instances[number] = number
            else:
                instances[number] = len(storages)
                storages.append(Storage(storage.size_bytes, place, storage.name + AGAIN))
                storage_of.append(number)
        for slot in call.outputs:
            meta = None if slot is None else program.slots[slot]
            if slot is None:
                continue
            if meta is None:  # a number, or a collective that is under way
                if again is not None:
                    latest[slot] = len(slots)
                    slots.append(None)
                continue
            # A view may be made of something that has been made again, even in the view's first
            # run. What a barrier brings was there.
            instance = instances.get(meta.storage, meta.storage)
            made = meta if instance == meta.storage else replace(meta, storage=instance)
            if again is None:
                slots[slot] = made
            else:
                latest[slot] = len(slots)
                slots.append(made)
        ran.add(index)
        run = call if again is None else again.call
        calls.append(run.renamed(lambda slot: latest.get(slot, slot)))
    return Expanded(
        replace(program, calls=calls, slots=slots, storages=storages),
        tuple(sequence),
        tuple(storage_of),
        tuple(is_again),
    )
