"""Which arguments a compiled region frees while it runs.

A region takes its arguments in a list and drops each after its last use. If nothing else holds the
argument, it is freed inside of the region, before all results of the region exist. Eager PyTorch
frees the tensors saved for a compiled backward graph in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from roam.program.ir import Program
from roam.program.operators import on_list


@dataclass(frozen=True, slots=True)
class Release:
    """What a region frees while it runs.

    Attributes:
        storages: numbers of storages that it is the last to use in every order in which no call
            runs again; ascending.
        saved_bytes: how much less it takes while it runs than if it held them to its end, if none
            of them lies in the pool.
    """

    storages: tuple[int, ...]
    saved_bytes: int = 0


def released(program: Program) -> dict[int, tuple[int, ...]]:
    """For each compiled region that has any, the storages of its `Release`.

    A storage is among them if all other calls that use it come before the region in every order.
    """
    regions = {index for index, call in enumerate(program.calls) if on_list(call.target)}
    if not regions:
        return {}
    users: dict[int, list[int]] = {}
    makers: dict[int, int] = {}
    before: list[int] = []
    """For each call, the calls that come before it in every order, as bits of one number."""
    for index, call in enumerate(program.calls):
        came = 0
        touched: dict[int, None] = {}
        for slot in call.refs():
            storage = program.storage_of(slot)
            creator = -1
            if storage >= 0:
                touched[storage] = None
                creator = program.storages[storage].creator
            for other in (creator, makers.get(slot, -1)):
                if other >= 0:
                    came |= before[other] | 1 << other
        touched |= {program.storage_of(slot): None for slot in call.outputs if slot is not None}
        for storage in touched:
            users.setdefault(storage, []).append(index)
        makers.update((slot, index) for slot in call.outputs if slot is not None)
        before.append(came)
    leaving = program.leaving()
    found: dict[int, list[int]] = {}
    for storage, calls in sorted(users.items()):
        if storage < 0:  # a live number
            continue
        *others, last = calls
        is_made = program.storages[storage].creator not in (-1, last)
        is_last = all(before[last] >> other & 1 for other in others)
        if last in regions and is_made and is_last and storage not in leaving:
            found.setdefault(last, []).append(storage)
    return {index: tuple(storages) for index, storages in found.items()}
