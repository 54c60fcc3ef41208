"""Has tensors in files read and written beside the other calls of a step, in their order.

A read becomes two calls: one that begins it as early as there is room, and one before the first
use, which waits. A write becomes one that begins it, right after the last change, and one that
waits before the memory is used again, as late as there is room. One thread makes all copies in the
order in which they begin (`copies`), so a file is read with what was written before. The tensor has
its memory from the first of its two calls to the second. To a plan, what waits for a read changes
the tensor, and what waits for a write reads it; nothing else has to be known of copies.

`overlapped` goes through the order once, by a model of two clocks: that of the other calls, and
that of the thread. `transit` checks what comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roam.program.barrier import is_barrier
from roam.program.ir import Call, Program, ref_to
from roam.program.pages import Arrived, Fetch, Keep, Left, Put


@dataclass(frozen=True, slots=True)
class Overlap:
    """When copies begin, and when they are waited for.

    Attributes:
        begins: for each copy, by the number of its call, the number of the call before which it
            begins.
        waits: likewise the call before which it is waited for; the number of calls for the end.
        stalls_ns: for each copy, how long that waits, by the model.
    """

    begins: dict[int, int]
    waits: dict[int, int]
    stalls_ns: dict[int, int]

    @property
    def stalled_ns(self) -> int:
        """How long all waiting takes, by the model."""
        return sum(self.stalls_ns.values())


@dataclass(frozen=True, slots=True)
class _Copy:
    """A call that reads or writes.

    Attributes:
        index: number of the call.
        size_bytes: what it copies.
        first, last: numbers of the first and the last call that use the tensor after this one; its
            own number if none does.
        after: the call after which it may begin; -1 for any.
        until: the call before which it has to be waited for.
    """

    index: int
    size_bytes: int
    first: int
    last: int
    after: int
    until: int


def _copies(program: Program) -> tuple[dict[int, _Copy], dict[int, _Copy]]:
    """Those that read, and those that write, each by the number of its call."""
    users = program.users()
    reads: dict[int, _Copy] = {}
    writes: dict[int, _Copy] = {}
    count = len(program.calls)
    fences = [index for index, call in enumerate(program.calls) if is_barrier(call.target)]
    written: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        if not isinstance(call.target, (Fetch, Put, Keep)):
            continue
        is_read = isinstance(call.target, Fetch)
        slot: Any = call.outputs[0] if is_read else call.args[0].slot
        number = program.storage_of(slot)
        later = [one for one in users[number] if one > index]
        before = max((one for one in fences if one < index), default=-1)
        until = min((one for one in fences if one > index), default=count)
        size_bytes = program.storages[number].size_bytes
        first, last = min(later, default=index), max(later, default=index)
        if is_read:
            file = program.storage_of(call.args[0].slot)
            after = max(written.get(file, program.storages[file].creator), before)
            reads[index] = _Copy(index, size_bytes, first, last, after, first)
        else:
            kept: Any = call.outputs[0] if isinstance(call.target, Keep) else call.args[1].slot
            written[program.storage_of(kept)] = index
            writes[index] = _Copy(index, size_bytes, first, last, index, until)
    return reads, writes


def overlapped(
    program: Program, call_ns: Sequence[int], copy_ns: Sequence[int], room: Sequence[int]
) -> Overlap:
    """When copies begin and are waited for.

    Args:
        program: the calls in their order; each copies before it returns.
        call_ns: nanoseconds of each call; what copies take counts nothing here.
        copy_ns: for each call that copies, nanoseconds of the copy; 0 for all others.
        room: for each call, how many bytes may be used while it runs beyond those that are.
    """
    reads, writes = _copies(program)
    begins, waits, stalls = dict[int, int](), dict[int, int](), dict[int, int]()
    free = np.array([*room, 0], dtype=np.int64)
    left = sorted(reads.values(), key=lambda copy: copy.first)
    arriving: dict[int, list[_Copy]] = {}
    for copy in left:
        arriving.setdefault(copy.first, []).append(copy)
    leaving: list[_Copy] = []
    ends: dict[int, int] = {}
    clock = thread = 0

    def begin(copy: _Copy, at: int) -> None:
        nonlocal thread
        begins[copy.index] = at
        thread = max(thread, clock) + copy_ns[copy.index]
        ends[copy.index] = thread

    def wait(copy: _Copy, at: int) -> None:
        nonlocal clock
        waits[copy.index] = at
        stalls[copy.index] = max(ends[copy.index] - clock, 0)
        clock += stalls[copy.index]

    for at in range(len(program.calls) + 1):
        held = 0
        for copy in list(leaving):
            is_due = copy.until <= at
            if copy.last >= at and not is_due:
                continue
            if is_due or ends[copy.index] <= clock or free[at] < copy.size_bytes:
                wait(copy, at)
                leaving.remove(copy)
            else:
                free[at] -= copy.size_bytes
                held += copy.size_bytes
        due = reads.get(at)
        for copy in list(left):
            if copy is not due:
                if copy.after >= at:
                    continue
                if free[at : copy.index].min() < copy.size_bytes + held:
                    break  # what comes first has the room first
                free[at : copy.index] -= copy.size_bytes
            begin(copy, at)
            left.remove(copy)
        if due is not None and at not in begins:
            begin(due, at)
            left.remove(due)
        for copy in arriving.get(at, ()):
            wait(copy, at)
        if at in writes:
            begin(writes[at], at)
            leaving.append(writes[at])
        elif at < len(program.calls) and at not in reads:
            clock += call_ns[at]
    for copy in leaving:
        wait(copy, len(program.calls))
    # What is over by the model may take longer: it is waited for when there is no room any more.
    for index, copy in sorted(writes.items()):
        at = waits[index]
        full = free[at : copy.until] < copy.size_bytes
        waits[index] = at + int(full.argmax()) if full.any() else max(at, copy.until)
        free[at : waits[index]] -= copy.size_bytes
    return Overlap(begins, waits, stalls)


@dataclass(frozen=True, slots=True)
class Overlapped:
    """A program with copies beside other calls.

    Attributes:
        program: slots and storages keep their numbers.
        calls: for each call, the number of the original call; -1 for one that waits.
        stalls_ns: for each call that waits, by its number, how long by the model; at least 1.
    """

    program: Program
    calls: tuple[int, ...]
    stalls_ns: dict[int, int]


def with_overlap(program: Program, found: Overlap) -> Overlapped:
    """The program with each copy begun and waited for where it is said.

    Args:
        program: the calls in their order; each copies before it returns.
        found: what `overlapped` says of it.
    """
    begun: dict[int, list[int]] = {}
    arrived: dict[int, list[int]] = {}
    left: dict[int, list[int]] = {}
    for index, at in found.begins.items():
        begun.setdefault(at, []).append(index)
    for index, at in found.waits.items():
        is_read = isinstance(program.calls[index].target, Fetch)
        (arrived if is_read else left).setdefault(at, []).append(index)
    calls: list[Call] = []
    numbers: list[int] = []
    stalls_ns: dict[int, int] = {}
    for at in range(len(program.calls) + 1):
        # What has left makes room for what is to come.
        for index in left.get(at, ()):
            stalls_ns[len(calls)] = max(found.stalls_ns[index], 1)
            calls.append(_waiting(program.calls[index]))
            numbers.append(-1)
        for index in begun.get(at, ()):
            call = program.calls[index]
            calls.append(replace(call, target=replace(call.target, is_beside=True)))
            numbers.append(index)
        for index in arrived.get(at, ()):
            stalls_ns[len(calls)] = max(found.stalls_ns[index], 1)
            calls.append(_waiting(program.calls[index]))
            numbers.append(-1)
        if at < len(program.calls) and at not in found.begins:
            calls.append(program.calls[at])
            numbers.append(at)
    places = {number: place for place, number in enumerate(numbers)}
    storages = [
        storage if storage.creator < 0 else replace(storage, creator=places[storage.creator])
        for storage in program.storages
    ]
    changed = replace(program, calls=calls, storages=storages)
    return Overlapped(changed, tuple(numbers), stalls_ns)


def _waiting(call: Call) -> Call:
    """What waits for a copy."""
    if isinstance(call.target, Fetch):
        (made,) = call.outputs
        assert made is not None, "a tensor"
        return replace(
            call, target=Arrived(), args=(ref_to(made),), outputs=(None,), mutates=(made,)
        )
    return replace(call, target=Left(), args=call.args[:1], outputs=(None,), mutates=())
