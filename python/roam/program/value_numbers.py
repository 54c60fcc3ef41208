"""Numbers the values of a program: equal numbers mean equal bits.

Everything that a call makes gets a *value number* (Aho, Lam, Sethi and Ullman, Compilers, 8.5).
Where a call reads memory whose value other memory has too, it may read the latter. Calls that
nothing needs any more are left out.

Operators that may not run again, operators that this analysis cannot follow, and everything made
from their results have numbers of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import count
from operator import attrgetter

from roam.program.barrier import is_barrier
from roam.program.ir import Call, Program, Ref, TensorMeta, substitute
from roam.program.operators import is_foreign
from roam.program.passes import with_calls
from roam.program.random_states import EXACT, READ, SET
from roam.program.repeatable import Repeat, repeats
from roam.state.sizes import replaced
from roam.torch_compat.private import OpOverload, schema_of

_EXPRESSION = attrgetter("expression")
"""Of a number that follows from symbols: equal numbers may be others at other sizes."""
_UNTOLD = frozenset(("aten::_conj", "aten::_neg_view"))
"""Views whose elements are not what their memory says."""


def without_equal(
    program: Program,
    made: Callable[[Call], Hashable],
    wanted: Callable[[Call], Hashable],
) -> tuple[Program, tuple[int, ...]] | None:
    """The program reading equal values where they are first, without the calls that nothing needs
    then, and for each of its calls the number of the original call; None if nothing changes.

    Args:
        program: what is changed.
        made: under which name what a call makes is remembered; None: it is not.
        wanted: under which name equal values of what a call makes are looked for; None: they are
            not.
    """
    if program.launches():  # they must run as often as other processes expect
        return None
    operators = (call.target for call in program.calls if type(call.target) is OpOverload)
    if not _UNTOLD.isdisjoint(schema_of(operator).name for operator in operators):
        return None
    calls = _Values(program, made, wanted).redirected()
    if calls is None:
        return None
    kept = _needed(program, calls, range(len(calls)))
    if len(kept) == len(calls):
        return None
    kept = _needed(program, calls, _without_idle_sets(program, calls, kept))
    return with_calls(program, [calls[index] for index in kept], kept), tuple(kept)


class _Values:
    """The values of a program's storages, call by call."""

    def __init__(
        self,
        program: Program,
        made: Callable[[Call], Hashable],
        wanted: Callable[[Call], Hashable],
    ) -> None:
        self._program = program
        self._made, self._wanted = made, wanted
        # A kernel of others is trusted to make the same bits again only where a run compares them.
        self._repeats: list[Repeat | None] = [
            None if is_foreign(call.target) else repeat
            for call, repeat in zip(program.calls, repeats(program), strict=True)
        ]
        self._fresh = count().__next__
        self._numbers: dict[Hashable, int] = {}
        self._value = [self._fresh() for _ in program.storages]
        """The value number of each storage."""
        self._number_of: dict[int, Hashable] = {}
        """The value number of each slot of a live number."""
        self._generators: dict[Hashable, int] = {}
        """For each generator, the value number of its state."""
        self._views: dict[int, dict[Hashable, int]] = {}
        """For each storage, the slots that have been made, by shape, strides, offset, dtype, and
        device.
        """
        self._firsts: dict[tuple[Hashable, int], int] = {}
        """For each name and value, the first storage that has it."""
        self._leaving = program.leaving()

    def redirected(self) -> list[Call] | None:
        """The calls, changed to read what is there first; None if no call can."""
        program = self._program
        for _, slot in (*program.referenced, *program.constants):
            self._seen(slot)
        calls, found = [], False
        for index, call in enumerate(program.calls):
            read = call
            if is_barrier(call.target):
                # Python holds each of these by itself, and may write to it from now on.
                for slot in call.refs():
                    self._value[program.storage_of(slot)] = self._fresh()
            elif self._wanted(call) is not None and self._makes_no_view(index, call):
                changed = {program.storage_of(slot) for slot in call.mutates}
                firsts = {slot: self._first(slot, changed) for slot in call.refs()}
                read = call.renamed(lambda slot: firsts.get(slot, slot))  # noqa: B023
                found |= read is not call
            calls.append(read)
            self._run(index, call)
        return calls if found else None

    def _makes_no_view(self, index: int, call: Call) -> bool:
        """Whether everything that a call makes lies in new memory, or in memory that it changes."""
        program = self._program
        made = {program.storage_of(slot) for slot in call.outputs if slot is not None}
        made -= {program.storage_of(slot) for slot in call.mutates} | {-1}
        return all(program.storages[storage].creator == index for storage in made)

    def _first(self, slot: int, changed: set[int]) -> int:
        """The slot that has first the value that a slot has now; itself if there is none."""
        program = self._program
        meta = program.slots[slot]
        if meta is None or meta.storage in changed or meta.storage in self._leaving:
            return slot
        creator = program.storages[meta.storage].creator
        name = None if creator < 0 else self._wanted(program.calls[creator])
        first = None if name is None else self._firsts.get((name, self._value[meta.storage]))
        if first is None or first in changed or self._value[first] != self._value[meta.storage]:
            return slot
        if first == meta.storage:
            return slot
        if program.storages[first].size_bytes != program.storages[meta.storage].size_bytes:
            return slot
        return self._views.get(first, {}).get(_look(meta), slot)

    def _run(self, index: int, call: Call) -> None:
        """Numbers what a call makes and changes."""
        program = self._program
        key = self._key(index, call)
        changed = dict.fromkeys(program.storage_of(slot) for slot in call.mutates)
        for place, storage in enumerate(changed):
            if storage >= 0:
                self._value[storage] = self._numbered(key, "changed", place)
        for place, slot in enumerate(call.outputs):
            if slot is None:
                continue
            meta = program.slots[slot]
            if meta is None:
                self._number_of[slot] = self._numbered(key, "number", place)
            elif program.storages[meta.storage].creator == index and meta.storage not in changed:
                self._value[meta.storage] = self._numbered(key, "made", place)
            self._seen(slot)
        if self._made(call) is not None:
            for storage in (
                *changed, *(program.storage_of(slot) for slot in call.outputs if slot is not None)
            ):  # fmt: skip
                if storage >= 0 and storage not in self._leaving:
                    self._remember(storage)
        draws = call.state is not None or self._repeats[index] is None
        if call.target in (*READ, *SET) or (call.random and draws):
            self._draw(call, key)

    def _remember(self, storage: int) -> None:
        creator = self._program.storages[storage].creator
        if creator >= 0:
            value = self._value[storage]
            key = (self._made(self._program.calls[creator]), value)
            before = self._firsts.get(key)
            if before is None or self._value[before] != value:  # that has been changed since
                self._firsts[key] = storage

    def _seen(self, slot: int) -> None:
        meta = self._program.slots[slot]
        if meta is not None:
            self._views.setdefault(meta.storage, {})[_look(meta)] = slot

    def _key(self, index: int, call: Call) -> Hashable | None:
        """A key that is equal for calls that make the same; None if this is not known."""
        repeat = self._repeats[index]
        is_drawn = False
        if repeat is None:
            if not self._is_exact_draw(call):
                return None
            is_drawn = True
        elif repeat.first_only or repeat.call is not call:
            return None
        program = self._program

        def told(ref: Ref) -> Hashable:
            meta = program.slots[ref.slot]
            if meta is None:
                return ("number", self._number_of.get(ref.slot, ("slot", ref.slot)))
            size_bytes = replaced(program.storages[meta.storage].size_bytes, _EXPRESSION)
            return ("tensor", self._value[meta.storage], size_bytes, _look(meta))

        given = replaced((call.args, call.kwargs), _EXPRESSION)
        arguments = repr(substitute(given, told))
        # Arguments may share memory, which decides what a kernel does that changes one.
        storages = [program.storage_of(slot) for slot in call.refs()]
        sharing = tuple(storages.index(storage) for storage in storages)
        drawn = self._state(_device_of(self._program, call)) if is_drawn else None
        return (call.target, arguments, sharing, drawn)

    def _is_exact_draw(self, call: Call) -> bool:
        """Whether a call draws from the generator of its device, the same numbers from the same
        state.
        """
        if not call.random or call.skip_if is not None or call.is_check:
            return False
        if type(call.target) is not OpOverload or schema_of(call.target).name not in EXACT:
            return False
        is_local = all(
            self._program.storages[self._program.storage_of(slot)].creator >= 0
            for slot in call.mutates
        )
        return is_local and call.kwargs.get("generator") is None

    def _draw(self, call: Call, key: Hashable | None) -> None:
        """Follows the states of generators."""
        if call.target in READ:
            (slot,) = call.outputs
            assert slot is not None, "a state is a tensor"
            device = _device_of(self._program, call)
            self._value[self._program.storage_of(slot)] = self._state(device)
        elif call.target in SET:
            given = call.args[0]
            known = isinstance(given, Ref) and self._program.slots[given.slot] is not None
            self._generators[_device_of(self._program, call)] = (
                self._value[self._program.storage_of(given.slot)] if known else self._fresh()
            )
        elif key is not None and _draws_plainly(call):
            self._generators[_device_of(self._program, call)] = self._numbered(key, "state", 0)
        else:  # whatever it draws from
            self._generators.clear()

    def _state(self, device: Hashable) -> int:
        return self._generators.setdefault(device, self._fresh())

    def _numbered(self, key: Hashable | None, what: str, place: int) -> int:
        if key is None:
            return self._fresh()
        return self._numbers.setdefault((key, what, place), self._fresh())


def _look(meta: TensorMeta) -> Hashable:
    layout = replaced((meta.shape, meta.stride, meta.offset), _EXPRESSION)
    return (*layout, meta.dtype, meta.device)


def _device_of(program: Program, call: Call) -> Hashable:
    """The device from whose generator a call draws, or whose it reads or sets."""
    if call.target in (*READ, *SET):
        return ("cpu",) if call.target in (READ[0], SET[0]) else ("cuda", call.args[-1])
    slots = [slot for slot in (*call.outputs, *call.mutates) if slot is not None]
    meta = next((meta for slot in slots if (meta := program.slots[slot]) is not None), None)
    is_cuda = meta is not None and meta.device.type == "cuda"
    return ("cuda", meta.device.index) if is_cuda else ("cpu",)  # type: ignore[union-attr]


def _draws_plainly(call: Call) -> bool:
    """Whether a call draws from the generator of its device, and from no other."""
    return type(call.target) is OpOverload and call.kwargs.get("generator") is None


def _needed(program: Program, calls: list[Call], among: Iterable[int]) -> list[int]:
    """The numbers of the calls that something needs, in order."""
    needed = program.outgoing()
    matters = {number for number, storage in enumerate(program.storages) if storage.creator < 0}
    matters.update(program.storage_of(slot) for slot in needed)
    set_later: set[Hashable] = set()
    """Generators whose state is set before anything reads it or draws from it."""
    unread = set(_unread(program))
    kept: list[int] = []
    for index in sorted(among, reverse=True):
        call = calls[index]
        is_used = not needed.isdisjoint(call.outputs) or any(
            program.storage_of(slot) in matters for slot in call.mutates
        )
        device = _device_of(program, call)
        if call.target in READ:
            if not is_used:
                continue
            set_later.discard(device)
        elif call.target in SET:
            if device in set_later:
                continue
            set_later.add(device)
        elif call.random and _draws_plainly(call):
            if not is_used and device in set_later:
                continue
            set_later.discard(device)
        elif call.random:
            set_later.clear()
        elif (
            not is_used
            and call.outputs
            and not (call.is_check or index in unread or is_barrier(call.target))
        ):
            continue
        kept.append(index)
        for slot in call.refs():
            needed.add(slot)
            matters.add(program.storage_of(slot))
    return kept[::-1]


def _unread(program: Program) -> Iterator[int]:
    """Kernels that the program keeps for the errors alone that they raise."""
    raising = [index for index, call in enumerate(program.calls) if program.may_raise(call)]
    if not raising:
        return
    used = program.outgoing()
    last_use: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        used.update(call.refs())
        last_use.update((program.storage_of(slot), index) for slot in call.refs())
    for index in raising:
        call = program.calls[index]
        written = map(program.storage_of, call.mutates)
        if used.isdisjoint(call.outputs) and all(last_use[one] == index for one in written):
            yield index


def _without_idle_sets(program: Program, calls: list[Call], kept: Iterable[int]) -> Iterator[int]:
    """The calls except for those that set a generator's state to what it is."""
    now: dict[Hashable, object] = {}
    read: dict[int, object] = {}
    changed = program.written(calls)
    for index in kept:
        call = calls[index]
        device = _device_of(program, call)
        if call.target in READ:
            (slot,) = call.outputs
            if slot is not None and program.storage_of(slot) not in changed:
                read[slot] = now.setdefault(device, object())
        elif call.target in SET:
            given = call.args[0]
            state = read.get(given.slot) if isinstance(given, Ref) else None
            if state is not None and state is now.get(device):
                continue
            now[device] = object() if state is None else state
        elif call.random and _draws_plainly(call):
            now[device] = object()
        elif call.random:
            now.clear()
        yield index
