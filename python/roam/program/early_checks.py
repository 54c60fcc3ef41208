"""Puts checks before what a step changes, so that a run in which one fails leaves no mark.

An operator may check one parameter's gradient when others have been updated already. The outcome
does not depend on these updates, so it may be computed earlier: the operators that the check needs
are moved before all changes, of state from before the step, that they do not depend on.
Changes that they do depend on (running statistics in the forward pass, an average from which the
outcome is computed) stay before them, and a copy of the old values is kept until the last check.

No copies are kept of what the step begins anew, such as gradients that `zero_grad` sets to zero. If
a check fails, the step runs from its beginning in another way, and overwrites these values again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from roam.program.checks import check, check_data
from roam.program.ir import Call, Program, Ref, Storage, TensorMeta, extents, has_no_gaps
from roam.program.passes import reordered

aten = torch.ops.aten

_OVERWRITES: Final = frozenset((
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default,
))  # fmt: skip
"""Operators that replace all elements of their first argument."""


def checks_first(program: Program) -> Program:
    """The program with every check that PyTorch's operators make of data before all changes, of
    state from before the step, that it does not depend on. Checks keep their order, and other calls
    are moved only as far as needed. A program that needs no change is returned as it is.
    """
    if not any(call.is_check for call in program.calls):
        return program
    # Where processes wait for each other, a run in which a check of data fails is not repeated.
    is_alone = not program.launches()
    early = [index for index, call in enumerate(program.calls) if is_alone and call.is_data_check]
    return _with_copies(program, _order(program, early), frozenset(early))


def _order(program: Program, checks: list[int]) -> list[int]:
    """Numbers of the calls in their new order, with these first."""
    calls = program.calls
    if not checks:
        return list(range(len(calls)))
    needs = needed_by(program)
    needed = set(checks)
    for index in range(checks[-1], -1, -1):
        if index in needed:
            needed |= needs[index]
    late: set[int] = set()
    for index in range(checks[-1]):
        if index not in needed and (
            _changes(program, calls[index]) or not late.isdisjoint(needs[index])
        ):
            late.add(index)
    if not late:
        return list(range(len(calls)))
    # Calls after the first check that no check needs come after the last one. If they came before
    # it, their results would be kept until it has run.
    first = [
        index
        for index in range(checks[-1] + 1)
        if index in needed or index < checks[0] and index not in late
    ]
    is_early = set(first)
    return first + [index for index in range(len(calls)) if index not in is_early]


def _changes(program: Program, call: Call) -> set[int]:
    """Storages from before the step that a call writes to."""
    written = map(program.storage_of, call.mutates)
    return {storage for storage in written if program.storages[storage].creator < 0}


def needed_by(program: Program) -> list[set[int]]:
    """Per call, the earlier ones that it has to come after, whatever the order."""
    makers: dict[int, int] = {}
    writers: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    drawn: int | None = None
    found = []
    for index, call in enumerate(program.calls):
        slots = call.refs()
        needs = {makers[slot] for slot in slots if slot in makers}
        used = {storage for storage in map(program.storage_of, slots) if storage >= 0}
        needs.update(writers[storage] for storage in used if storage in writers)
        written = set(map(program.storage_of, call.mutates))
        for storage in written:
            needs |= readers.pop(storage, set())
            writers[storage] = index
        for storage in used - written:
            readers.setdefault(storage, set()).add(index)
        if call.random:
            needs |= {drawn} if drawn is not None else set()
            drawn = index
        makers.update((slot, index) for slot in call.outputs if slot is not None)
        found.append(needs - {index})
    return found


def _with_copies(program: Program, order: list[int], checks: frozenset[int]) -> Program:
    """The program in an order, with copies of what is written to before a check, for the check to
    put back; `checks` are those that came first.
    """
    written: dict[int, int] = {}  # per storage from before the step, the first place at which it is
    for place, index in enumerate(order):
        for storage in _changes(program, program.calls[index]):
            written.setdefault(storage, place)
    last_early = max((place for place, index in enumerate(order) if index in checks), default=-1)
    last_check = max(place for place, index in enumerate(order) if program.calls[index].is_check)
    anew = _begun_anew(program)
    referenced: dict[int, list[int]] = {}
    trained = set()
    for reference, slot in program.referenced:
        referenced.setdefault(program.storage_of(slot), []).append(slot)
        if reference.kind in ("parameter", "optimizer_state"):
            trained.add(program.storage_of(slot))
    result = replace(
        program,
        calls=list(program.calls),
        slots=list(program.slots),
        storages=[
            replace(storage, is_begun_anew=number in anew)
            for number, storage in enumerate(program.storages)
        ],
    )
    copies: dict[int, list[tuple[Ref, Ref]]] = {}  # per place of the first write
    inserted: dict[int, list[int]] = {}
    for storage, place in written.items():
        if storage in anew:
            continue
        # For an error after all updates no copies of trained state are kept: the error says that
        # the state has been updated.
        if place < (last_early if storage in trained else last_check):
            pairs = [
                _add_copy(result, slot, order[place])
                for slot in _writable(program, referenced.get(storage, ()))
            ]
            copies.setdefault(place, []).extend((Ref(slot), Ref(copy)) for slot, copy, _ in pairs)
            inserted.setdefault(place, []).extend(index for _, _, index in pairs)
    if not copies and not anew and order == list(range(len(program.calls))):
        return program
    full: list[int] = []
    held: list[tuple[Ref, Ref]] = []
    for place, index in enumerate(order):
        call = program.calls[index]
        full += inserted.get(place, ())
        held += copies.get(place, ())
        if call.is_check and held:
            result.calls[index] = _holding(call, list(held))
        full.append(index)
    return reordered(result, full)


def _begun_anew(program: Program) -> set[int]:
    """Storages from before the step that its code overwrites as a whole, before it reads them and
    before its first check.
    """
    touched: set[int] = set()
    found: set[int] = set()
    for call in program.calls:
        if call.is_check:
            break
        slots = call.refs()
        used = list(map(program.storage_of, slots))
        if (
            call.target in _OVERWRITES
            and call.skip_if is None
            and program.covers(slots[0])
            and program.storages[used[0]].creator < 0
            and used[0] not in touched.union(used[1:])
        ):
            found.add(used[0])
        touched.update(used)
    return found


def _holding(call: Call, copies: list[tuple[Ref, Ref]]) -> Call:
    """The check, changed so that it puts back what was written to if it fails."""
    if call.target is check:
        return replace(call, args=(*call.args[:2], copies))
    # An assertion that a CUDA device makes ends the process's use of it, whatever is put back.
    arguments = call.target, call.args, call.kwargs, copies
    return replace(call, target=check_data, args=arguments, kwargs={})


def _writable(program: Program, slots: Sequence[int]) -> Iterator[int]:
    """Among the tensors in one storage, those to copy: one that fills the storage, or else all."""
    whole = next((slot for slot in slots if program.covers(slot)), None)
    for slot in slots if whole is None else (whole,):
        meta = program.slots[slot]
        if meta is not None and all(stride for stride, _ in extents(meta.shape, meta.stride)):
            yield slot


def _add_copy(program: Program, slot: int, writer: int) -> tuple[int, int, int]:
    """Adds a copy of a tensor to a program: the tensor's slot, the copy's, and the number of the
    call that makes it.
    """
    meta = program.slots[slot]
    assert meta is not None
    index, copy, storage = len(program.calls), len(program.slots), len(program.storages)
    contiguous = tuple(torch.empty(meta.shape, device="meta").stride())
    is_kept = has_no_gaps(meta.shape, meta.stride)
    kwargs = {"memory_format": torch.preserve_format if is_kept else torch.contiguous_format}
    program.slots.append(
        TensorMeta(
            meta.shape, meta.stride if is_kept else contiguous, 0, meta.dtype, meta.device, storage
        )
    )
    size_bytes = meta.dtype.itemsize * torch.Size(meta.shape).numel()
    program.storages.append(
        Storage(size_bytes, index, f"copy of {program.storages[meta.storage].name}")
    )
    source = program.calls[writer]
    program.calls.append(
        Call(
            torch.ops.aten.clone.default,
            (Ref(slot),),
            kwargs,
            (copy,),
            False,
            source.phase,
            source.source,
        )
    )
    return slot, copy, index


__all__ = ["checks_first", "needed_by"]
