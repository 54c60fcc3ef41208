"""How tensors get to a second tier of memory and back: the calls' placement, and their time.

The time is measured once for each disk or link, on a block of zeros, and rounded and kept on disk
like the times of kernels: the same step has the same plan in the next process.
"""

from __future__ import annotations

import threading
import time

import torch

from roam.errors import ExecutionError
from roam.kernels.calls import Placed
from roam.kernels.kept import recall, retain
from roam.kernels.table import Placement
from roam.kernels.times import rounded
from roam.program.ir import Call
from roam.program.pages import Fetch
from roam.program.tier import Load, Tier

_BLOCK_BYTES = 2**22
_BLOCKS = 32
"""So many blocks are larger than the caches of processors."""
_MOST_RUNS = 3
_KIND = "transfers"
_MODEL_NS = {"cpu": 2**22, "cuda": 2 * _BLOCK_BYTES // 12}
"""The time of a block if nothing can be measured, by the device of the tensors: a nanosecond for
each byte, to store and to load it in a file; over a link 12 bytes in a nanosecond each way.
"""
_learned: dict[object, int] = {}
_one_at_a_time = threading.Lock()


def placed_load(call: Call) -> Placed:
    """How a call that loads writes its result where a plan wants it. The tensor that its first run
    is given dies there, and may give its memory to the result.
    """
    assert isinstance(call.target, (Fetch, Load)), "a load"
    (result,) = call.outputs
    assert result is not None, "a tensor"
    placement = Placement("substitute", call.target.into, call.name)
    in_place = () if isinstance(call.target, Fetch) else ((call.args[0].slot, result),)
    return Placed(placement, in_place)


def time_ns(block_ns: int, size_bytes: int) -> int:
    """Nanoseconds to store and load so many bytes, from the nanoseconds for a block."""
    return max(-(-size_bytes * block_ns // _BLOCK_BYTES), 1)


def block_ns(tier: Tier, room_bytes: int | None) -> int:
    """Nanoseconds to store and load a block of 4 MiB in a tier, rounded by `rounded`.

    Args:
        tier: the tier.
        room_bytes: memory that there is for the block; None if nothing is to be measured. If there
            is too little memory, or too little room in the tier, the time is `_MODEL_NS`.
    """
    device = tier.place.device
    model_ns = _MODEL_NS[device.type]
    if device.type == "cuda" and room_bytes is None:  # the device may not be there
        return model_ns
    try:
        signature = "block", tier.place.link
    except OSError as error:
        raise tier.place.full("offloaded tensors", error) from error
    with _one_at_a_time:
        if signature not in _learned:
            _learned.update(recall(_KIND, [signature], device))
        if signature not in _learned:
            if room_bytes is None or room_bytes < _BLOCK_BYTES:
                return model_ns
            try:
                _learned[signature] = rounded(_measured_ns(tier))
            except (ExecutionError, OSError):  # a step may need less room
                return model_ns
            finally:
                tier.release()
            retain(_KIND, {signature: _learned[signature]}, device)
        return _learned[signature]


def _measured_ns(tier: Tier) -> int:
    """The least of some runs after a first one, in both directions. Blocks are stored one after
    another before the first is loaded, as in a step.
    """
    device = tier.place.device
    block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device=device)
    places = [number * _BLOCK_BYTES for number in range(_BLOCKS)]
    there, back = [], []

    def now() -> int:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter_ns()

    with tier.held(_BLOCKS * _BLOCK_BYTES):
        for _ in range(_MOST_RUNS + 1):
            start = now()
            for place in places:
                tier.store(block, place)
            stored = now()
            for place in places:
                tier.load(block, place)
            there.append(stored - start)
            back.append(now() - stored)
    return (min(there[1:]) + min(back[1:])) // _BLOCKS
