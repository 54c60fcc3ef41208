"""Puts operators into a program that store tensors in a second tier, and load them again.

Two calls come right after the last one that makes or changes such a tensor. The first stores it,
and makes a handle of one byte. The second hands the tensor on: its result takes the tensor's
memory, and all that uses the tensor uses that result. A further run of the second needs the handle
alone, and loads the bits. So to a plan within a memory limit a tensor that is loaded is one that is
made again, by a call with a time of its own; order, layout, bounds and verifier need to know
nothing of tiers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from roam.distributed.collectives import is_collective
from roam.program.chunks import aligned
from roam.program.ir import Call, Program, Storage, TensorMeta, ref_to
from roam.program.tier import HANDLE, Load, Store, Tier

UNSTORED, STORED = " unstored", " stored"
"""Added to the name of a tensor before it is stored, and for its handle."""
LEAST_BYTES = 2**14
"""Smaller tensors are not offloaded: the system calls take longer than the copy."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A tensor that may be offloaded.

    Attributes:
        slot: the tensor, which fills its storage.
        makers: numbers of the calls that make and change it; nothing else uses it before the last
            of them.
        size_bytes: bytes of its storage.
    """

    slot: int
    makers: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Offloading:
    """A program in which tensors may be offloaded.

    Attributes:
        program: slots and storages keep their numbers, and those of the tensors before they are
            stored follow.
        calls: for each call, the number of the original call; -1 for a call that stores or loads.
        size_bytes: what the tier has to hold.
    """

    program: Program
    calls: tuple[int, ...]
    size_bytes: int


def offers(
    program: Program,
    kinds: Sequence[str],
    device: torch.device,
    excluded: Collection[int] = frozenset(),
) -> list[Offer]:
    """What may be offloaded: activations of a device, in a storage of their own that nothing sees
    or changes by a view before they are done, in the order in which they are done.

    Args:
        program: the calls.
        kinds: the kind of each storage, as in the graph.
        device: the device.
        excluded: storages that may not lie elsewhere than where their call puts them.
    """
    leaving = program.leaving()
    users = program.users()
    found = []
    for number, storage in enumerate(program.storages):
        if (
            storage.size_bytes >= LEAST_BYTES
            and storage.creator >= 0
            and kinds[number] == "activation"
            and number not in leaving
            and number not in excluded
        ):
            offer = _offer(program, number, users[number], device)
            if offer is not None:
                found.append(offer)
    return sorted(found, key=lambda offer: offer.makers[-1])


def _offer(
    program: Program, number: int, users: Sequence[int], device: torch.device
) -> Offer | None:
    """A storage as an offer; None if it cannot be one."""
    storage = program.storages[number]
    made = [
        slot for slot in program.calls[storage.creator].made() if program.storage_of(slot) == number
    ]
    if len(made) != 1 or not program.covers(made[0]):
        return None
    meta = program.slots[made[0]]
    assert meta is not None, "a tensor"
    last = max(
        (
            index
            for index in users
            if any(program.storage_of(slot) == number for slot in program.calls[index].mutates)
        ),
        default=storage.creator,
    )
    makers = tuple(index for index in users if index <= last)
    calls = [program.calls[index] for index in makers]
    # Everything that looks at the storage while it is made must do so through this one slot.
    seen = {
        slot
        for call in calls
        for slot in (*call.refs(), *call.made())
        if program.storage_of(slot) == number
    }
    is_plain = all(
        call.skip_if is None
        and call.phase in ("forward", "loss")
        and not is_collective(call.target)
        for call in calls
    )
    if meta.device != device or seen != {made[0]} or not is_plain:
        return None
    if any(is_collective(program.calls[index].target) for index in users):
        return None
    return Offer(made[0], makers, storage.size_bytes)


def with_offers(program: Program, chosen: Iterable[Offer], tier: Tier) -> Offloading:
    """The program with two calls for each chosen tensor, which store it and hand it on or load it.

    Args:
        program: the calls.
        chosen: some of its `offers`.
        tier: where they are stored.
    """
    after: dict[int, list[Offer]] = {}
    for offer in chosen:
        after.setdefault(offer.makers[-1], []).append(offer)
    counts = [1 + 2 * len(after.get(index, ())) for index in range(len(program.calls))]
    places = list(accumulate(counts, initial=0))
    slots = list(program.slots)
    storages = [
        storage if storage.creator < 0 else replace(storage, creator=places[storage.creator])
        for storage in program.storages
    ]
    names: dict[int, dict[int, int]] = {}
    """For each call that makes or changes such a tensor: by the tensor's slot, the slot that it has
    before it is stored.
    """
    added: dict[int, list[Call]] = {}
    offset_bytes = 0
    for index, some in sorted(after.items()):
        maker = program.calls[index]
        call = partial(
            Call, kwargs={}, returns_sequence=False, phase=maker.phase, source=maker.source
        )
        for place, offer in zip(range(places[index] + 1, places[index + 1], 2), some, strict=True):
            meta, tensor = program.slots[offer.slot], len(slots)
            assert meta is not None, "a tensor"
            storage = storages[meta.storage]
            storages[meta.storage] = replace(storage, creator=place + 1)
            slots.append(replace(meta, storage=len(storages)))
            storages.append(replace(storage, name=storage.name + UNSTORED))
            handle = len(slots)
            slots.append(TensorMeta((1,), (1,), 0, HANDLE, meta.device, len(storages)))
            storages.append(Storage(1, place, storage.name + STORED))
            for one in offer.makers:
                names.setdefault(one, {})[offer.slot] = tensor
            store = Store(tier, offset_bytes)
            load = Load(tier, offset_bytes, meta.shape, meta.stride, meta.dtype)
            added.setdefault(index, []).extend(
                (
                    call(store, (ref_to(tensor),), outputs=(handle,)),
                    call(load, (ref_to(tensor), ref_to(handle)), outputs=(offer.slot,)),
                )
            )
            offset_bytes += aligned(offer.size_bytes)
    calls: list[Call] = []
    numbers: list[int] = []
    for index, known in enumerate(program.calls):
        calls.append(known.renamed(partial(_name, names[index])) if index in names else known)
        calls += added.get(index, ())
        numbers += [index, *(-1 for _ in added.get(index, ()))]
    changed = replace(program, calls=calls, slots=slots, storages=storages)
    return Offloading(changed, tuple(numbers), offset_bytes)


def _name(names: Mapping[int, int], slot: int) -> int:
    return names.get(slot, slot)
