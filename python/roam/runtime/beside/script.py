"""What a call is compared with, operator by operator, and the program that runs its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

import torch

from roam.kernels.recurrent import as_run
from roam.program.barrier import barrier, parting
from roam.program.ir import Call, Program, Ref, Result, Storage, TensorMeta, ref_to, refs
from roam.program.operators import is_foreign
from roam.program.repeatable import is_exact
from roam.runtime.beside.recording import Entry, Given, Made, Recording
from roam.torch_compat.private import schema_of, unboxed
from roam.tracing.recording.kernel_facts import facts_of

aten = torch.ops.aten
SMALL_BYTES: Final = 16
"""Of tensors on the CPU with no more than this, such as counts of steps, Python may ask at once."""
_SHAPED = frozenset({"arange", "range", "linspace", "logspace"})
BOUNDS: Final[dict[Any, tuple[int, Callable[[Any], int]]]] = {
    aten.embedding.default: (1, lambda args: args[0].shape[0]),
    aten.gather.default: (2, lambda args: args[0].shape[args[1]]),
    aten.index_select.default: (2, lambda args: args[0].shape[args[1]]),
    aten.nll_loss_forward.default: (1, lambda args: args[0].shape[-1]),
    aten.nll_loss2d_forward.default: (1, lambda args: args[0].shape[1]),
}
"""Where operators have indices, and what these have to be below, on the CPU."""
_IGNORING = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
"""Losses that leave out the labels that their fifth argument names."""
Place = tuple[int, int]
"""(entry, leaf of its arguments)."""


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """A value that a call brings: a tensor that it has not made, or a number."""

    slot: int
    path: str
    kind: str


@dataclass(slots=True, eq=False)
class Moment:
    """A barrier of the program, or its end.

    Attributes:
        held: for each argument of the barrier, its slot. The first of each storage stands for it.
        alive: storages that Python may hold there.
        brings: slots that the calls after it take from outside.
    """

    held: list[int]
    alive: frozenset[int]
    brings: list[int]


Pattern = tuple[int, Any]
"""What an argument has to be: `TENSOR` and a slot; `SAME` and a value; `NUMBER`, a slot and a
class; or `NEST`, a class and the patterns of its items."""
TENSOR, SAME, NUMBER, NEST = range(4)
RUN, NOW, MAKE, GIVE, ANSWER = range(5)
"""What is done with an operator that is as expected: it is run; it is run, perhaps after the plan;
a placeholder is handed out; an argument is handed out; or several of these."""


@dataclass(slots=True, eq=False)
class Expected:
    """An operator that is to come, in the form in which it is compared."""

    func: Any
    args: tuple[Pattern, ...]
    names: tuple[str, ...]
    values: tuple[Pattern, ...]
    """Of arguments by name."""
    does: int
    slot: int
    """The slot of the one tensor that it makes, if that is all."""
    guarded: tuple[int, ...]
    """Storages from outside that its kernel uses, if that waits for the plan."""
    entry: Entry
    bound: tuple[int, Callable[[Any], int]] | None = None
    """Of an operator that fails for an index out of range, and whose indices are there before the
    plan runs: their place among its arguments, and what they stay below."""


@dataclass(slots=True, eq=False)
class Script:
    """One way that calls of the step go.

    Attributes:
        entries: the recorded operators.
        runs: for each entry, whether it is run where it stands; the others by the plan.
        moments: for each entry at which Python waits for the plan, the number of the barrier.
        barriers: these, and the end as the last.
        brings: slots that the first calls take from outside.
        program: what the plan runs.
        live: the slots of the numbers that change from call to call, by their places.
        made: storages that the program makes.
    """

    entries: list[Entry]
    slots: list[TensorMeta | None]
    runs: list[bool]
    moments: dict[int, int]
    barriers: list[Moment]
    brings: list[int]
    program: Program
    live: dict[Place, int]
    made: frozenset[int]
    size_bytes: list[int]
    inputs: frozenset[int]
    written: frozenset[int]
    """Storages that the program writes to."""
    draws: list[bool]
    """For each barrier, and for the end, whether kernels before it draw random numbers."""
    creators: list[int]
    """For each storage, the entry that makes it; -1 if it was there."""
    steps: list[Expected]
    """For each entry, and for the end, what it is compared with."""
    recording: Recording
    calls: list[int]
    """For each entry, its call of the program; -1 if it has none."""
    shared: dict[int, int] = field(default_factory=dict)
    """By the identity of another script of the same kind of calls, see `common`."""

    def storage_of(self, slot: int) -> int:
        """The number of the storage that a tensor is in."""
        meta = self.slots[slot]
        assert meta is not None, "a tensor"
        return meta.storage


def changed_numbers(one: Recording, other: Recording) -> set[Place] | None:
    """The places of the numbers in which two recordings differ; None if they differ in more."""
    if len(one.entries) != len(other.entries) or one.slots != other.slots or one.met != other.met:
        return None
    if [s.size_bytes for s in one.storages] != [s.size_bytes for s in other.storages]:
        return None
    places: set[Place] = set()
    for index, (a, b) in enumerate(zip(one.entries, other.entries, strict=True)):
        changed = _changed(a, b)
        if changed is None:
            return None
        places.update((index, leaf) for leaf in changed)
    return places


def _changed(a: Entry, b: Entry) -> list[int] | None:
    """The leaves of two operators' arguments that differ, where they are numbers that may change;
    None if the operators differ in more.
    """
    if (a.kind, a.func, a.results, a.writes, a.dtype) != (
        b.kind,
        b.func,
        b.results,
        b.writes,
        b.dtype,
    ):
        return None
    ours, theirs = list(leaves(a)), list(leaves(b))
    if len(ours) != len(theirs):
        return None
    found = []
    for leaf, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        if is_same(x, y):
            continue
        if type(x) is not type(y) or type(x) not in (float, int) or not may_change(a, x):
            return None
        found.append(leaf)
    return found


def may_change(entry: Entry, number: Any) -> bool:
    """Whether an operator makes tensors of the same form whatever this number is."""
    if entry.func is None or entry.kind != "kernel":
        return False
    if str(entry.func).split(".")[1].rstrip("_") in _SHAPED:
        return False
    if type(number) is float:
        return True
    kinds = {str(argument.type) for argument in schema_of(entry.func).arguments}
    return "int" not in " ".join(kinds) and not entry.func.name().startswith("aten::pow")


def numbers_of(recording: Recording) -> set[Place]:
    """The places of an optimizer's numbers, such as learning rates and corrections of bias, which
    nobody has seen to stay the same.
    """
    return {
        (index, leaf)
        for index, entry in enumerate(recording.entries)
        if entry.phase == "update" and entry.kind == "kernel"
        for leaf, value in enumerate(leaves(entry))
        if type(value) is float and may_change(entry, value)
    }


def is_in_range(func: Any, bound: tuple[int, Callable[[Any], int]], args: Any) -> bool:
    """Whether an operator of `BOUNDS` fails for none of its indices. One that does is to fail where
    it stands, as in eager PyTorch.
    """
    indices = args[bound[0]]
    if func in _IGNORING:
        indices = indices[indices != args[4]]
    if indices.numel() == 0:
        return True
    least, most = (one.item() for one in torch.aminmax(indices))
    return bool(least >= 0 and most < bound[1](args))


def leaves(entry: Entry) -> Iterator[Any]:
    """All that an operator is given, in order."""
    yield from _leaves(entry.args)
    for key, value in entry.kwargs.items():
        yield key
        yield from _leaves((value,))


def _leaves(value: Any) -> Iterator[Any]:
    for item in value:
        if type(item) in (tuple, list):
            yield len(item)
            yield from _leaves(item)
        else:
            yield item


def is_same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.ScriptObject):
        return is_same(unboxed(one), unboxed(other))
    return repr(one) == repr(other) if type(one) is float else bool(one == other)


def script_of(
    recording: Recording,
    alive: Sequence[frozenset[int]],
    changing: set[Place],
    *,
    holds_all: bool,
    runs_small: bool = True,
) -> Script:
    """The script of a recording.

    Args:
        alive: for each entry, and for the end, the storages that Python may hold there.
        changing: the numbers that change from call to call.
        holds_all: whether a plan holds all that Python holds where that asks for a value. If not,
            it need not hold what can be made again if the call goes another way, and what it holds
            lies outside of the pool.
        runs_small: whether small operators on the CPU run where they stand.
    """
    entries = recording.entries
    runs = _run_at_once(recording, runs_small)
    storages = recording.storages
    is_made = [seen.creator >= 0 and not runs[seen.creator] for seen in storages]  # by the program
    storage_of = [meta.storage for meta in recording.slots]
    slots: list[TensorMeta | None] = list(recording.slots)
    live: dict[Place, int] = {}
    for place in sorted(changing):
        live[place] = len(slots)
        slots.append(None)

    calls: list[Call] = []
    call_of = [-1] * len(entries)
    creators: dict[int, int] = {}
    moments: dict[int, int] = {}
    barriers: list[Moment] = []
    at_barrier: list[int] = []
    dirty: set[int] = set()
    used: set[int] = set()
    """Storages that kernels since the last barrier read or write to."""
    draws = False
    drawing: list[bool] = []
    given: set[int] = set()
    """Storages that Python has got, which have to stay as they are while it holds them."""
    made: dict[int, int] = {}
    """For each slot that the program makes, the call."""
    needs: dict[int, int] = {}
    """For each slot that comes from outside, the number of barriers before its first use."""

    def use(slot: int, entry: Entry) -> None:
        if slot in made or slot in needs:
            return
        meta = slots[slot]
        if meta is not None and is_made[meta.storage]:
            kind = meta.dtype, meta.is_conj, meta.is_neg  # which stay those of the base
            base = next(
                (
                    other
                    for other in (first_of[meta.storage], *made)
                    if (at := slots[other]) is not None
                    and at.storage == meta.storage
                    and (at.dtype, at.is_conj, at.is_neg) == kind
                ),
                first_of[meta.storage],
            )
            made[slot] = len(calls)
            layout = list(meta.shape), list(meta.stride), meta.offset
            calls.append(
                Call(
                    aten.as_strided.default,
                    (ref_to(base), *layout),
                    {},
                    (slot,),
                    False,
                    entry.phase,
                    entry.source,
                )
            )
        else:
            needs[slot] = len(barriers)

    first_of: dict[int, int] = {}
    """For each storage that the program makes, the slot that was made with it."""
    for index, entry in enumerate(entries):
        if entry.kind in ("now", "settle"):
            if entry.kind == "now":
                waits = any(storage_of[slot] in dirty for slot in _refs(entry)) or any(
                    storage_of[slot] in used for slot in entry.writes
                )
                waits = waits or (draws and is_foreign(entry.func))  # which may draw too
            else:  # Python may write where it looks, as to what x.numpy() gives
                waits = not used.isdisjoint(entry.args) if entry.args else draws
            if waits:
                moments[index] = len(barriers)
                here = {one for one in alive[index] if one in first_of}
                asked = {storage_of[slot] for slot in _refs(entry)} | set(
                    entry.args if entry.kind == "settle" else ()
                )
                again = (
                    set()
                    if holds_all
                    else _made_again(recording, index, here - asked, is_made) - given
                )
                given |= here - again
                barriers.append(Moment(sorted(here - again), alive[index], []))
                drawing.append(draws)
                at_barrier.append(len(calls))
                stop = barrier if holds_all else parting
                calls.append(Call(stop, (), {}, (), True, entry.phase, entry.source))
                dirty, draws = set(again), False
                used = set(again)
            continue
        if runs[index]:
            continue
        facts = facts_of(entry.func)
        for slot in _refs(entry):
            use(slot, entry)
        args, kwargs = _with_numbers(index, entry, live)
        for place, number in live.items():
            if place[0] == index:
                needs[number] = len(barriers)
        if entry.dtype is not None:
            kwargs = {**kwargs, "dtype": entry.dtype}
        outputs = tuple(one.slot if type(one) is Made else None for one in entry.results)
        call = Call(
            as_run(entry.func), args, kwargs, outputs, entry.sequence is not None, entry.phase, entry.source,
            mutates=entry.writes, random=facts.is_random, is_check=facts.is_check,
        )  # fmt: skip
        for one in outputs:
            if one is not None:
                made[one] = len(calls)
                storage = storage_of[one]
                if storages[storage].creator == index and storage not in creators:
                    creators[storage] = len(calls)
                    first_of[storage] = one
                if entry.kind == "kernel":
                    dirty.add(storage)
        dirty.update(storage_of[slot] for slot in entry.writes)
        used.update(storage_of[slot] for slot in slots_of(entry))
        draws = draws or facts.is_random
        call_of[index] = len(calls)
        calls.append(call)

    given_written = {
        storage_of[slot]
        for entry, is_run in zip(entries, runs, strict=True)
        for slot in (() if is_run else entry.writes)
    }
    ends = [*at_barrier, len(calls)]
    for number, moment in enumerate(barriers):
        later = {slot for call in calls[ends[number] + 1 :] for slot in call.refs()}
        held: list[int] = []
        for storage in moment.held:
            held.append(first_of[storage])
            held += [
                slot
                for slot, call in made.items()
                if storage_of[slot] == storage
                and call < ends[number]
                and (slot in later or not holds_all)  # where operators may run again
                and slot != first_of[storage]
            ]
        moment.held = held
        moment.brings = [slot for slot, before in needs.items() if before == number + 1]
        call = calls[ends[number]]
        call.args = tuple(map(ref_to, held))
        call.outputs = tuple(moment.brings)
    leaving = [first_of[one] for one in sorted(alive[-1]) if one in first_of]
    barriers.append(Moment(leaving, alive[-1], []))
    program = Program(
        calls=calls,
        slots=slots,
        storages=[
            Storage(seen.size_bytes, creators.get(number, -1), seen.name)
            for number, seen in enumerate(storages)
        ],
        referenced=[(_outside(slot, recording, slots), slot) for slot in needs],
        result=Result(leaves=[ref_to(slot) for slot in leaving]),
    )
    written = frozenset(program.written())
    return Script(
        entries, slots, runs, moments, barriers, [slot for slot, before in needs.items() if before == 0],
        program, live, frozenset(creators), [seen.size_bytes for seen in storages], frozenset(needs),
        written, [*drawing, draws], [seen.creator for seen in storages],
        [
            *(
                _expected(
                    entry, place, is_run, live, _bound_of(
                        entry,
                        lambda slot: storages[storage_of[slot]].creator < 0
                        and storage_of[slot] not in given_written
                        and recording.slots[slot].device.type == "cpu",
                    ),
                    () if is_run or entry.kind != "kernel" else tuple({
                        number for number in map(storage_of.__getitem__, _refs(entry))
                        if not is_made[number]
                        and (storages[number].size_bytes > SMALL_BYTES or number in written)
                    }),
                )
                for place, (entry, is_run) in enumerate(zip(entries, runs, strict=True))
            ),
            Expected(None, (), (), (), RUN, -1, (), Entry("settle", None, ("end",), {})),
        ],
        recording, call_of,
    )  # fmt: skip


def leaf_at(entries: Sequence[Entry], place: Place) -> Any:
    """What an operator was given at a place when it was recorded."""
    return next(islice(leaves(entries[place[0]]), place[1], None))


def begun(script: Script, count: int, bound: Mapping[int, Any]) -> Recording:
    """The recording of a call that has done what a script begins with, with its own numbers."""
    recording = script.recording
    numbers: dict[int, dict[int, Any]] = {}
    for (index, leaf), slot in script.live.items():
        if index < count:
            numbers.setdefault(index, {})[leaf] = bound[slot]
    entries = [
        replace(
            entry, **dict(zip(("args", "kwargs"), _exchanged(entry, numbers[index]), strict=True))
        )
        if index in numbers
        else entry
        for index, entry in enumerate(recording.entries[:count])
    ]
    slots = max((slot for entry in entries for slot in slots_of(entry)), default=-1) + 1
    storages = max((meta.storage for meta in recording.slots[:slots]), default=-1) + 1
    return Recording(
        entries,
        recording.slots[:slots],
        recording.storages[:storages],
        {slot: at for slot, at in recording.met.items() if slot < slots},
        parameters=frozenset(slot for slot in recording.parameters if slot < slots),
    )


def common(one: Script, other: Script) -> int:
    """How many operators two scripts begin with that are the same, run in the same way, before
    Python waits for a plan.
    """
    known = one.shared.get(id(other))
    if known is None:
        known = one.shared[id(other)] = _common_length(one, other)
    return known


def _common_length(one: Script, other: Script) -> int:
    count = 0
    for index, (a, b) in enumerate(zip(one.entries, other.entries, strict=False)):
        if (
            index in one.moments
            or index in other.moments
            or one.runs[index] is not other.runs[index]
            or _changed(a, b) is None
            or any(one.slots[slot] != other.slots[slot] for slot in slots_of(a))
            or any(
                (one.creators[number], one.size_bytes[number])
                != (other.creators[number], other.size_bytes[number])
                for number in {one.slots[slot].storage for slot in slots_of(a)}  # type: ignore[union-attr]
            )
        ):
            break
        count = index + 1
    return count


def slots_of(entry: Entry) -> list[int]:
    """The slots that an operator is given, and those that it makes."""
    return [*_refs(entry), *(one.slot for one in entry.results if type(one) is Made)]


def _made_again(
    recording: Recording, index: int, numbers: set[int], is_made: list[bool]
) -> set[int]:
    """Of the storages that Python holds at an entry, those that one kernel has made, from what is
    held or can be made again itself, and that has not been changed since.
    """
    entries = recording.entries
    storage_of = [meta.storage for meta in recording.slots]
    written = {storage_of[slot] for entry in entries[:index] for slot in entry.writes}

    def is_again(number: int) -> bool:
        entry = entries[recording.storages[number].creator]
        call = Call(entry.func, entry.args, entry.kwargs, (), False, "", entry.source)
        call.random = facts_of(entry.func).is_random
        tensors = [recording.slots[slot] for slot in slots_of(entry)]
        if number in written or entry.writes or not is_exact(call, tensors):
            return False
        return all(
            used not in written and (not is_made[used] or used in numbers)
            for used in map(storage_of.__getitem__, _refs(entry))
        )

    return {number for number in sorted(numbers) if is_again(number)}


def _refs(entry: Entry) -> list[int]:
    return refs(entry.args) + refs(entry.kwargs)


def _run_at_once(recording: Recording, runs_small: bool) -> list[bool]:
    """For each entry, whether it runs where it stands: small operators on the CPU of nothing but
    such and of small tensors from outside, and views of these.
    """
    entries, storages = recording.entries, recording.storages
    storage_of = [meta.storage for meta in recording.slots]
    on_cpu = {meta.storage for meta in recording.slots if meta.device.type == "cpu"}
    barred: set[int] = {
        number
        for number, seen in enumerate(storages)
        if not runs_small or seen.size_bytes > SMALL_BYTES or number not in on_cpu
    }
    while True:
        free = {number for number, seen in enumerate(storages) if seen.creator < 0} - barred
        runs = []
        for entry in entries:
            made = {storage_of[one.slot] for one in entry.results if type(one) is Made}
            used = {storage_of[slot] for slot in _refs(entry)}
            if entry.kind in ("now", "settle"):
                runs.append(True)
            elif facts_of(entry.func).reshapes_in_place:
                runs.append(True)  # the tensor that Python has; the plan makes its own view
            elif not made and not entry.writes and not facts_of(entry.func).is_check:
                runs.append(True)  # it hands on what it is given
            elif (
                free.issuperset(used)
                and barred.isdisjoint(made)
                and not facts_of(entry.func).is_random
            ):
                runs.append(True)
                free |= made
            else:
                runs.append(False)
        written = {storage_of[slot] for entry in entries for slot in entry.writes}
        pending = {
            storage
            for entry, is_run in zip(entries, runs, strict=True)
            if not is_run
            for storage in (*map(storage_of.__getitem__, _refs(entry)),)
        }
        more = (written & pending & free) - barred
        if not more:
            return runs
        barred |= more


def _with_numbers(index: int, entry: Entry, live: dict[Place, int]) -> tuple[Any, dict[str, Any]]:
    """The arguments, with slots for numbers that change."""
    numbers = {leaf: ref_to(slot) for (one, leaf), slot in live.items() if one == index}
    return _exchanged(entry, numbers) if numbers else (entry.args, entry.kwargs)


def _exchanged(entry: Entry, leaves: Mapping[int, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments, with other leaves."""
    count = -1

    def replaced(value: Any) -> Any:
        nonlocal count
        count += 1
        if type(value) in (tuple, list):
            return type(value)(map(replaced, value))
        return leaves.get(count, value)

    args = tuple(map(replaced, entry.args))
    kwargs = {}
    for key, value in entry.kwargs.items():
        count += 1
        kwargs[key] = replaced(value)
    return args, kwargs


def _bound_of(
    entry: Entry, is_there: Callable[[int], bool]
) -> tuple[int, Callable[[Any], int]] | None:
    """What `Expected.bound` says."""
    bound = BOUNDS.get(entry.func)
    if bound is None or len(entry.args) <= bound[0]:
        return None
    indices = entry.args[bound[0]]
    return bound if type(indices) is Ref and is_there(indices.slot) else None


def _expected(
    entry: Entry,
    place: int,
    is_run: bool,
    live: dict[Place, int],
    bound: Any,
    guarded: tuple[int, ...],
) -> Expected:
    leaf = -1

    def pattern(value: Any) -> Pattern:
        nonlocal leaf
        leaf += 1
        kind = type(value)
        if kind is Ref:
            return TENSOR, value.slot
        if kind is tuple or kind is list:
            return NEST, (kind, tuple(map(pattern, value)))
        slot = live.get((place, leaf))
        return (SAME, value) if slot is None else (NUMBER, (slot, kind))

    args = tuple(map(pattern, entry.args))
    values = []
    for value in entry.kwargs.values():
        leaf += 1
        values.append(pattern(value))
    does, slot = ANSWER, -1
    if entry.kind == "now":
        does = NOW
    elif is_run or entry.kind == "view":
        does = RUN
    elif len(entry.results) == 1 and entry.sequence is None:
        one = entry.results[0]
        if type(one) is Made:
            does, slot = MAKE, one.slot
        elif one == Given((0,)):
            does = GIVE
    if (
        does == RUN
        and entry.sequence is None
        and len(entry.results) == 1
        and type(entry.results[0]) is Made
    ):
        slot = entry.results[0].slot
    return Expected(
        entry.func, args, tuple(entry.kwargs), tuple(values), does, slot, guarded, entry,
        None if is_run else bound,
    )  # fmt: skip


def _outside(slot: int, recording: Recording, slots: list[TensorMeta | None]) -> Outside:
    if slots[slot] is None:
        return Outside(slot, f"number {slot}", "live")
    kind = "parameter" if slot in recording.parameters else "buffer"
    return Outside(slot, f"tensor {slot}", kind)
