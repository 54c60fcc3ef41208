"""Which tensors of a step may be offloaded to a second tier of memory, and what a plan makes of it.

A plan chooses by time: a tensor that has no room is loaded from the tier, or made again by the
operators that made it, whichever takes less. Only tensors of which it is known that loading them
takes less are offered; if no plan is found with those, all are offered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from roam.kernels.calls import unmovable_storages
from roam.kernels.transfers import block_ns, placed_load, time_ns
from roam.program.lower import Lowering
from roam.program.tier import Tier


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What a plan stores in a tier, and loads from there.

    Attributes:
        tier: the tier.
        calls: numbers of the calls that store and load.
        tensors: how many tensors are stored.
        loads: how many loads there are.
        stored_bytes: bytes of all tensors that are stored.
        loaded_bytes: bytes of all loads.
        tier_bytes: what the tier has to hold.
        transfers_s: seconds that stores and loads take by plan.
    """

    tier: Tier
    calls: frozenset[int]
    tensors: int
    loads: int
    stored_bytes: int
    loaded_bytes: int
    tier_bytes: int
    transfers_s: float

    @classmethod
    def of(cls, lowering: Lowering, tier: Tier, times_ns: np.ndarray) -> Offloaded | None:
        """What a program with extra runs stores and loads; None if it stores nothing.

        Args:
            lowering: of the program.
            tier: which tier its calls use.
            times_ns: nanoseconds of each call. The time of a load call is that of one store and one
                load together. Half of it is counted for each run; the first run stands for the
                store.
        """
        if not lowering.stores:
            return None
        loads = [index for index in lowering.loads if index in lowering.extra_calls]
        stored_bytes, loaded_bytes = (
            sum(map(lowering.made_bytes, calls))
            for calls in (set(lowering.loads).difference(loads), loads)
        )
        return cls(
            tier,
            frozenset((*lowering.stores, *loads)),
            tensors=len(lowering.stores),
            loads=len(loads),
            stored_bytes=stored_bytes,
            loaded_bytes=loaded_bytes,
            tier_bytes=lowering.offloaded_bytes,
            transfers_s=float(times_ns[lowering.loads].sum()) / 2e9,
        )


def never_loaded(lowering: Lowering, sequence: Iterable[int]) -> list[int]:
    """Of the loads of a step, those that run once, and so only hand on what they are given, if that
    is made only once. Without them everything is made from the same values.

    Args:
        lowering: of the step.
        sequence: numbers of its calls in the order of their runs.
    """
    runs = Counter(sequence)
    remade = {
        number
        for index, operator in enumerate(lowering.operators)
        if runs[index] > 1
        for number in (*operator.creates, *operator.mutates)
    }
    program = lowering.program
    return [
        index
        for index in lowering.loads
        if runs[index] == 1 and program.storage_of(program.calls[index].args[0].slot) not in remade
    ]


def offerings(lowering: Lowering, tier: Tier, room_bytes: int | None) -> Iterator[Lowering]:
    """A step with tensors that may be offloaded: first those of which it is known that they take
    longer to make again than to store and load, and then all.

    Args:
        lowering: of the step.
        tier: where tensors are stored.
        room_bytes: memory to measure transfers with; None if nothing is measured.
    """
    offers = lowering.offers(tier.place.device, unmovable_storages(lowering.program))
    if not offers:
        return
    transfer_ns = partial(time_ns, block_ns(tier, room_bytes))
    call_ns = lowering.graph(pool=False).times_ns
    dear = [
        offer
        for offer in offers
        if any(lowering.repeats[index] is None for index in offer.makers)
        or call_ns[list(offer.makers)].sum() > transfer_ns(offer.size_bytes)
    ]
    if dear:
        yield lowering.offering(dear, tier, placed_load, transfer_ns)
    if len(dear) < len(offers):
        yield lowering.offering(offers, tier, placed_load, transfer_ns)
