"""Puts calls into a program that read tensors from files and write them there, so that what exists
before the step and after it takes no memory between its uses.

Of a tensor from before the step the program then has a handle of one byte. Its uses are cut into
parts, where it need not be in memory in between. A call before each part reads the tensor, into
memory of its own, and may run again; if the part changes the tensor, a call after it writes it to
its file. What the step makes and leaves is written after its last use. A gradient that the step
makes is written after the first part of its uses, and read again for the next one, as clipping
does: between the two all other gradients are made.

`ways` lists where a tensor's uses may be cut, with what that moves, for `residency.choose`.

So to a plan a tensor that is read is one that is made, by a call with a time of its own; order,
layout, bounds and verifier need to know nothing of files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import Any

import torch

from roam.distributed.collectives import is_collective
from roam.program.effects import Effect, Rebind
from roam.program.ir import Call, Program, Ref, Storage, ref_to, refs, substitute
from roam.program.pages import Fetch, Keep, Pages, Put
from roam.program.residency import Way
from roam.state.references import ArgumentReference

READ, KEPT = " read", " kept"
"""Added to the names of tensors that are read, and of those that are written."""
_PASSES = {"forward": 0, "loss": 0, "backward": 1}
"""For each phase, the pass that it belongs to; 2 for all others."""
_MOST_CUTS = 5
"""Between so many uses of a tensor, those that are farthest apart, it may be in its file."""
LEAST_BYTES = 2**14
"""Smaller tensors stay in memory: the system calls take longer than the copy."""


@dataclass(frozen=True, slots=True)
class Paged:
    """A program with tensors in files.

    Attributes:
        program: slots and storages keep their numbers, and new ones follow.
        calls: for each call, the number of the original call; -1 for one that reads or writes.
    """

    program: Program
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A tensor that may lie in a file before or after a step.

    Attributes:
        slot: the tensor, which fills its storage and is the only one of it outside of the step.
        size_bytes: bytes of its storage.
        uses: numbers of the calls that use it. Of those that only make views of it, each stands
            with the use that is nearest.
        passes: the pass of each of these uses.
        changes: those of `uses`, by their places, that change it; the call that makes it is one.
        leaves: whether it outlives the step that makes it.
        reference: where it is before the step; None if the step makes it.
    """

    slot: int
    size_bytes: int
    uses: tuple[tuple[int, ...], ...]
    passes: tuple[int, ...]
    changes: frozenset[int]
    leaves: bool
    reference: Any

    def parts(self, cuts: Collection[int]) -> list[list[int]]:
        """Its uses, cut after those of these places."""
        parts: list[list[int]] = [[]] if self.uses else []
        for place, calls in enumerate(self.uses):
            parts[-1] += calls
            if place in cuts:
                parts.append([])
        return parts

    @property
    def usual_cuts(self) -> tuple[int, ...]:
        """After which uses it is in its file if it stays in memory throughout each pass."""
        if self.reference is None:
            ends = (place for place in range(len(self.uses) - 1) if place not in self.changes)
            return () if self.leaves else tuple(one for one in ends if one + 1 in self.changes)
        return tuple(
            place for place, (one, other) in enumerate(pairwise(self.passes)) if one != other
        )

    @property
    def is_cut(self) -> bool:
        """Whether it is in a file at some time if it is cut where it usually is."""
        return self.reference is not None or self.leaves or bool(self.usual_cuts)

    @property
    def most_cuts(self) -> tuple[int, ...]:
        """After which uses it may be in its file at most."""
        if self.reference is None and self.leaves:
            return ()
        gaps = [
            (other[0] - one[-1], place) for place, (one, other) in enumerate(pairwise(self.uses))
        ]
        far = sorted((gap for gap in gaps if gap[0] > 1), reverse=True)[:_MOST_CUTS]
        return tuple(sorted(place for _, place in far))

    def ways(self, moments: int) -> list[tuple[Way, tuple[int, ...] | None]]:
        """How it may be kept in a step of so many calls, each way with its cuts; None without a
        file.
        """
        is_given = self.reference is not None
        last = moments - 1
        stays = (
            ((0, last),)
            if is_given
            else ((self.uses[0][0], last if self.leaves else self.uses[-1][-1]),)
        )
        found: list[tuple[Way, tuple[int, ...] | None]] = [(Way(0, stays), None)]
        cuts = self.most_cuts
        for count in range(len(cuts) + 1):
            for some in combinations(cuts, count):
                if not is_given and not some and not self.leaves:
                    continue
                found.append((self._way(some), some))
        return found

    def _way(self, cuts: tuple[int, ...]) -> Way:
        moves, first = 0, 0
        intervals = []
        for end in (*cuts, len(self.uses) - 1):
            if end < first:
                continue
            is_made = self.reference is None and not first
            is_changed = any(first <= place <= end for place in self.changes)
            is_last = end == len(self.uses) - 1
            moves += not is_made
            moves += is_changed and not (is_last and self.reference is None and not self.leaves)
            intervals.append((self.uses[first][0], self.uses[end][-1]))
            first = end + 1
        return Way(moves * self.size_bytes, tuple(intervals))


def pages_of(
    program: Program,
    kinds: Sequence[str],
    device: torch.device,
    excluded: Collection[int] = frozenset(),
) -> list[Page]:
    """The tensors that may lie in files, or in other chunks of the second tier.

    Args:
        program: the calls.
        kinds: the kind of each storage, as in the graph.
        device: whose tensors.
        excluded: storages that may not lie elsewhere than where they are.
    """
    users = program.users()
    given: dict[int, list[tuple[Any, int]]] = {}
    for reference, slot in program.referenced:
        given.setdefault(program.storage_of(slot), []).append((reference, slot))
    outgoing: dict[int, set[int]] = {}
    for slot in program.outgoing():
        outgoing.setdefault(program.storage_of(slot), set()).add(slot)
    barred = {program.storage_of(slot) for _, slot in program.constants}
    barred |= {program.storage_of(one) for pair in program.assigned() for one in pair}
    for call in program.calls:
        if call.is_check or is_collective(call.target):
            barred |= set(map(program.storage_of, call.refs()))
    rebound = {one.slot for one in program.of(Rebind) if one.joined is None}
    rebound -= {
        slot for one in program.effects if not isinstance(one, Rebind) for slot in refs(one.given)
    }
    rebound -= set(refs(program.result.leaves))
    wrapped = {*program.given_layouts, *(reference.path for reference, _ in program.wholes)}
    found = []
    for number, storage in enumerate(program.storages):
        if storage.size_bytes < LEAST_BYTES or number in barred or number in excluded:
            continue
        uses, leaves = users.get(number, []), outgoing.get(number, set())
        reference, slot = None, min(leaves, default=-1)
        if storage.creator < 0:
            if len(given.get(number, ())) != 1:
                continue
            ((reference, slot),) = given[number]
            if isinstance(reference, ArgumentReference) or reference.path in wrapped:
                continue
            if not leaves <= {slot}:
                continue
        elif leaves:
            if len(leaves) != 1 or slot not in rebound:
                continue
        elif kinds[number] == "gradient":
            made = [one for one in program.calls[storage.creator].made() if program.storage_of(one) == number]  # fmt: skip
            if len(made) != 1:
                continue
            (slot,) = made
        else:
            continue
        meta = program.slots[slot]
        if meta is None or meta.device != device or meta.is_conj or meta.is_neg:
            continue
        if not program.covers(slot) or not _is_seen(program, number, uses):
            continue
        together = _together(program, number, uses)
        changes = frozenset(
            place
            for place, calls in enumerate(together)
            if any(_changes(program, number, index) or storage.creator == index for index in calls)
        )
        passes = tuple(_PASSES.get(program.calls[calls[-1]].phase, 2) for calls in together)
        page = Page(slot, storage.size_bytes, together, passes, changes, bool(leaves), reference)
        if leaves or storage.creator < 0 or page.most_cuts:
            found.append(page)
    return found


def _changes(program: Program, number: int, index: int) -> bool:
    """Whether a call changes a storage."""
    return number in map(program.storage_of, program.calls[index].mutates)


def _is_view(program: Program, number: int, index: int) -> bool:
    """Whether a call only makes a view of a storage."""
    call = program.calls[index]
    made = call.made()
    return (
        len(made) == len(call.outputs) == 1
        and not call.mutates
        and {program.storage_of(slot) for slot in (*made, *call.refs())} == {number}
        and program.storages[number].creator != index
    )


def _together(program: Program, number: int, uses: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The uses of a storage; calls that only make views stand with the nearest use."""
    found: list[list[int]] = []
    views: list[int] = []
    for index in uses:
        if _is_view(program, number, index):
            views.append(index)
            continue
        before = found[-1][-1] if found else -1
        near = [view for view in views if found and view - before <= index - view]
        if near:
            found[-1] += near
        found.append([*views[len(near) :], index])
        views = []
    if found:
        found[-1] += views
    elif views:
        found.append(views)
    return tuple(map(tuple, found))


def _is_seen(program: Program, number: int, uses: Iterable[int]) -> bool:
    """Whether views of a storage can be made anew."""
    return all(
        _is_view(program, number, index)
        or all(
            program.storage_of(slot) != number or program.storages[number].creator == index
            for slot in program.calls[index].made()
        )
        for index in uses
    )


class _Writing:
    """A program that is being written."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.slots, self.storages = list(program.slots), list(program.storages)
        self.names: dict[int, dict[int, int]] = {}
        """For each call, by slot, the slot to use instead."""
        self.before: dict[int, list[Call]] = {}
        self.after: dict[int, list[Call]] = {}
        self.makers: list[tuple[int, Call]] = []
        """Storages that new calls make."""

    def tensor(self, slot: int, name: str, *, is_paged: bool = False) -> int:
        """A new tensor like another one, in a storage of its own."""
        meta = self.program.slots[slot]
        assert meta is not None, "a tensor"
        storage = self.program.storages[meta.storage]
        new = len(self.slots)
        self.slots.append(replace(meta, storage=len(self.storages)))
        self.storages.append(Storage(storage.size_bytes, 0, storage.name + name, is_paged=is_paged))
        return new

    def call(self, target: Any, args: tuple[Any, ...], outputs: tuple[int | None, ...], like: int, **more: Any) -> Call:  # fmt: skip
        """A new call beside another one."""
        known = self.program.calls[like]
        call = Call(target, args, {}, outputs, False, known.phase, known.source, **more)
        self.makers += [
            (meta.storage, call)
            for slot in outputs
            if slot is not None and (meta := self.slots[slot]) is not None
        ]
        return call


def with_pages(
    program: Program, chosen: Iterable[tuple[Page, Collection[int]]], pages: Pages
) -> Paged:
    """The program with tensors in files.

    Args:
        program: the calls.
        chosen: some of its `pages_of`, each with the uses after which it is not in memory.
        pages: where what the step leaves is written.
    """
    writing = _Writing(program)
    left: dict[int, int] = {}
    for page, cuts in chosen:
        parts = page.parts(cuts)
        if page.reference is not None:
            _enter(writing, page, parts, program.storage_of(page.slot))
        else:
            kept = _keep(writing, page, parts, pages)
            if page.leaves:
                left[page.slot] = kept
    counts = [
        len(writing.before.get(index, ())) + 1 + len(writing.after.get(index, ()))
        for index in range(len(program.calls))
    ]
    starts = list(accumulate(counts, initial=0))
    calls: list[Call] = []
    numbers: list[int] = []
    for index, known in enumerate(program.calls):
        before, after = writing.before.get(index, []), writing.after.get(index, [])
        names = writing.names.get(index)
        calls += before
        calls.append(known if names is None else known.renamed(partial(_name, names)))
        calls += after
        numbers += [*(-1 for _ in before), index, *(-1 for _ in after)]
    places = {id(call): place for place, call in enumerate(calls)}
    moved = [len(writing.before.get(index, ())) + starts[index] for index in range(len(counts))]
    storages = [
        storage if storage.creator < 0 else replace(storage, creator=moved[storage.creator])
        for storage in writing.storages[: len(program.storages)]
    ] + writing.storages[len(program.storages) :]
    for number, call in writing.makers:
        storages[number] = replace(storages[number], creator=places[id(call)])

    def leaving(ref: Ref) -> Ref:
        return ref_to(left.get(ref.slot, ref.slot))

    effects: list[Effect] = []
    for effect in program.effects:
        one = effect
        if isinstance(effect, Rebind) and effect.slot in left:
            one = effect.giving(substitute(effect.given, leaving))
        effects.append(one)
    changed = replace(program, calls=calls, slots=writing.slots, storages=storages, effects=effects)
    return Paged(changed, tuple(numbers))


def _read(writing: _Writing, page: Page, part: list[int], paged: int) -> int:
    """Reads a tensor before a part of its uses; its slot there. Views from parts before are made
    anew.
    """
    program = writing.program
    meta = program.slots[page.slot]
    assert meta is not None, "a tensor"
    made = writing.tensor(page.slot, READ)
    storage = len(writing.storages) - 1
    before = writing.before.setdefault(part[0], [])
    fetch = Fetch(meta.shape, meta.stride, meta.dtype)
    before.append(writing.call(fetch, (ref_to(paged),), (made,), part[0]))
    names = {page.slot: made}
    makers = {slot: program.calls[index] for one in page.uses for index in one for slot in program.calls[index].made()}  # fmt: skip

    def view(slot: int) -> int:
        if program.storage_of(slot) != meta.storage:
            return slot
        if slot not in names:
            new = len(writing.slots)
            writing.slots.append(replace(program.slots[slot], storage=storage))  # type: ignore[type-var]
            call = makers[slot]
            names.update({one: view(one) for one in call.refs()})
            names[slot] = new
            before.append(replace(call.renamed(partial(_name, names)), source=before[0].source, phase=before[0].phase))  # fmt: skip
        return names[slot]

    for index in part:
        call = program.calls[index]
        for slot in call.refs():
            view(slot)
        for slot in call.made():
            if program.storage_of(slot) == meta.storage:
                writing.slots[slot] = replace(writing.slots[slot], storage=storage)  # type: ignore[type-var]
                names[slot] = slot
        writing.names.setdefault(index, {}).update(
            {slot: names[slot] for slot in call.refs() if slot in names}
        )
    return made


def _enter(writing: _Writing, page: Page, parts: list[list[int]], number: int) -> None:
    """A tensor that is in a file before the step."""
    writing.storages[number] = replace(writing.program.storages[number], is_paged=True)
    for part in parts:
        _put(writing, number, part, _read(writing, page, part, page.slot), page.slot)


def _keep(writing: _Writing, page: Page, parts: list[list[int]], pages: Pages) -> int:
    """A tensor that the step makes and that lies in a file then; its slot there."""
    kept = writing.tensor(page.slot, KEPT, is_paged=True)
    number, last = writing.program.storage_of(page.slot), parts[0][-1]
    call = writing.call(Keep(pages), (ref_to(page.slot),), (kept,), last)
    writing.after.setdefault(last, []).append(call)
    for place, part in enumerate(parts[1:], 2):
        made = _read(writing, page, part, kept)
        if place < len(parts):
            _put(writing, number, part, made, kept)
    return kept


def _put(writing: _Writing, number: int, part: list[int], made: int, paged: int) -> None:
    """Writes a tensor after a part of its uses that changes it."""
    changes = [index for index in part if _changes(writing.program, number, index)]
    if changes:
        put = writing.call(
            Put(), (ref_to(made), ref_to(paged)), (None,), changes[-1], mutates=(paged,)
        )
        writing.after.setdefault(changes[-1], []).append(put)


def _name(names: dict[int, int], slot: int) -> int:
    return names.get(slot, slot)
