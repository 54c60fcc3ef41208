"""Checks that a step in which copies are made beside other calls is right for every timing of these
copies. It shares no code with what decides when they begin.

Two things are shown, from the calls, their order and their places in memory alone:

- Each call sees of each tensor, and of each file, what the same call sees in the program in which
  every copy is made before its call returns. What is read changes its tensor at any time from where
  the copy begins to where it is waited for; what is written is looked at at any such time. Files
  are looked at and changed in the order in which copies begin, since one thread, or one stream of a
  device, makes them all.
- From where a copy begins to where it is waited for, no other call touches bytes that are read, and
  no other call changes, or makes something in, bytes that are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roam._core import Plan
from roam.errors import PlanError
from roam.program.barrier import is_barrier
from roam.program.ir import Call, Program
from roam.program.pages import Arrived, Fetch, Keep, Left, Put

_WAITS = Arrived, Left
_START = -1
"""Who has written what is there before the step."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where tensors lie.

    Attributes:
        offsets: for each storage in the pool, its first byte.
        taken: for each storage that takes the memory of another one, that other one.
    """

    offsets: Mapping[int, int]
    taken: Mapping[int, int]

    @classmethod
    def of(cls, plan: Plan) -> Places:
        """Where tensors lie by a plan."""
        offsets = {number: int(one) for number, one in enumerate(plan.offsets) if one >= 0}
        return cls(offsets, {new: old for old, new in plan.reuse})


def check(
    before: Program, after: Program, numbers: Sequence[int], order: Sequence[int], places: Places
) -> None:
    """Checks a program with copies beside other calls.

    Args:
        before: the program in which each copy is made before its call returns, in its order.
        after: the program with copies beside.
        numbers: for each call of `after`, its number in `before`; -1 for one that waits.
        order: the numbers of the calls of `after`, in the order in which they run.
        places: where the tensors of `after` lie.

    Raises:
        PlanError: for some timing a call may see something else (code ``self_check``).
    """
    if sorted(one for one in numbers if one >= 0) != list(range(len(before.calls))):
        raise _fault("a call is missing or there twice", None)
    expected = _seen(before, range(len(before.calls)), range(len(before.calls)))
    found = _seen(after, order, numbers)
    for (index, storage), writers in found.items():
        if writers != expected.get((index, storage)):
            name = after.storages[storage].name
            raise _fault(f"sees another {name} for some timing", before.calls[index])
    _check_memory(after, order, places)


def _seen(
    program: Program, order: Sequence[int], numbers: Sequence[int]
) -> dict[tuple[int, int], set[int]]:
    """For each call, by its number in the program without copies beside, and each storage that it
    looks at, which calls may have changed that last.
    """
    writer: dict[int, int] = {}
    seen: dict[tuple[int, int], set[int]] = {}
    moving: dict[int, int] = {}
    """For each storage that is being copied, the call that has begun it."""
    for index in order:
        call = program.calls[index]
        if isinstance(call.target, _WAITS):
            storage = program.storage_of(call.args[0].slot)
            if (by := moving.pop(storage, None)) is None:
                raise _fault("waits for no copy", call)
            if isinstance(call.target, Arrived):
                writer[storage] = by
            else:
                seen[by, storage].add(writer.get(storage, _START))
            continue
        number = numbers[index]
        for storage in set(map(program.storage_of, call.refs())) - {-1}:
            seen.setdefault((number, storage), set()).add(writer.get(storage, _START))
        made = {program.storage_of(slot) for slot in call.made()}
        changed = {one for one in made if program.storages[one].creator == index}
        for storage in changed.union(map(program.storage_of, call.mutates)):
            writer[storage] = number
        if (moved := _moved(program, call)) is not None:
            if moved in moving:
                raise _fault("copies what is being copied", call)
            moving[moved] = number
    if moving:
        raise _fault("a copy is not waited for", None)
    return seen


def _moved(program: Program, call: Call) -> int | None:
    """The storage in memory that a call begins to copy to or from; None if it begins no copy."""
    if not isinstance(call.target, (Fetch, Put, Keep)) or not call.target.is_beside:
        return None
    slot = call.outputs[0] if isinstance(call.target, Fetch) else call.args[0].slot
    return program.storage_of(slot)  # type: ignore[arg-type]


def _check_memory(program: Program, order: Sequence[int], places: Places) -> None:
    """Checks that nothing else touches bytes that are read, nor changes bytes that are written."""
    arriving: dict[int, _Bytes] = {}
    leaving: dict[int, _Bytes] = {}
    for index in order:
        call = program.calls[index]
        moved = _moved(program, call)
        if moved is None and isinstance(call.target, (Fetch, Put, Keep)):
            raise _fault("copies beside those that others make", call)
        waited = program.storage_of(call.args[0].slot) if isinstance(call.target, _WAITS) else -1
        own = {moved, waited}
        made = {program.storage_of(slot) for slot in call.made()}
        changed = {one for one in made if program.storages[one].creator == index}
        changed |= set(map(program.storage_of, call.mutates))
        touched = changed | made | set(map(program.storage_of, call.refs()))
        for storage in touched - own - {-1}:
            lies = _Bytes.of(program, places, storage)
            if any(map(lies.meets, arriving.values())):
                raise _fault("touches what has not arrived", call)
            if storage in changed and any(map(lies.meets, leaving.values())):
                raise _fault("changes what has not left", call)
        arriving.pop(waited, None)
        leaving.pop(waited, None)
        if moved is not None:
            lies = _Bytes.of(program, places, moved)
            if any(map(lies.meets, (*arriving.values(), *leaving.values()))):
                raise _fault("copies where something is being copied", call)
            (arriving if isinstance(call.target, Fetch) else leaving)[moved] = lies
        if is_barrier(call.target) and (arriving or leaving):
            raise _fault("a copy is not waited for before the step's own Python runs", call)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Where a storage lies: in a block, the pool being one, from a byte to another."""

    block: int
    begin: int
    end: int

    @classmethod
    def of(cls, program: Program, places: Places, storage: int) -> _Bytes:
        """The bytes of a storage."""
        offset, size_bytes = places.offsets.get(storage), program.storages[storage].size_bytes
        if offset is not None:
            return cls(-1, offset, offset + size_bytes)
        while (taken := places.taken.get(storage)) is not None:
            storage = taken
        return cls(storage, 0, size_bytes)

    def meets(self, other: _Bytes) -> bool:
        """Whether there are bytes that are in both."""
        return self.block == other.block and self.begin < other.end and other.begin < self.end


def _fault(what: str, call: Call | None) -> PlanError:
    where = "" if call is None else f"{call.name} at {call.source} "
    return PlanError(
        f"copies beside the step are not safe: {where}{what}; please report it", code="self_check"
    )
