"""How tensors get to a second tier of memory and back: the calls' placement, and their time.

The time is measured once for each disk or link, on a block of zeros, and rounded and kept on disk
like the times of kernels: the same step has the same plan in the next process. That of a disk is
measured in the system's page cache, and by the disk itself. Files that the cache does not hold
beside the step are read as fast as the disk is; and if a step changes more of them than the system
lets wait, they are written so.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

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
_TIMES = "block", "read", "write", "read disk", "write disk"
"""What is measured: both directions in the page cache, each of them, and each by the disk."""
_WAITING = "dirty_background_ratio", "dirty_ratio"
"""Linux's settings for how many percent of memory may wait to be written: half way between these, a
process that writes begins to wait for the disk."""
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


@dataclass(frozen=True, slots=True)
class Link:
    """The way to a folder's files and back.

    Attributes:
        read_ns, write_ns: nanoseconds for a block of 4 MiB.
    """

    read_ns: int
    write_ns: int

    def time_ns(self, size_bytes: int, *, is_read: bool) -> int:
        """Nanoseconds to read or write so many bytes."""
        return time_ns(self.read_ns if is_read else self.write_ns, size_bytes)

    @classmethod
    def of(
        cls,
        tier: Tier,
        room_bytes: int | None,
        cache_bytes: int,
        files_bytes: int,
        changed_bytes: int,
    ) -> Link:
        """The way to files beside a step.

        Args:
            tier: in whose folder they are.
            room_bytes: as for `block_ns`.
            cache_bytes: memory that there is for the page cache.
            files_bytes: what the files hold.
            changed_bytes: what of it a step changes.
        """
        if room_bytes is None:  # ranks that have to plan alike may have other free memory
            model_ns = _MODEL_NS[tier.place.device.type] // 2
            return cls(model_ns, model_ns)
        found = _times(tier, room_bytes)
        read = "read" if files_bytes <= cache_bytes else "read disk"
        write = "write" if changed_bytes <= cache_bytes * _waiting_share() else "write disk"
        return cls(found[read], found[write])


def _waiting_share() -> float:
    """The share of memory that may wait to be written."""
    try:
        return sum(int(Path("/proc/sys/vm", one).read_text()) for one in _WAITING) / 200
    except (OSError, ValueError):
        return 0.15


def taken_share(device: torch.device) -> float:
    """The share of its time by which a copy and the step beside it delay each other, by a model:
    one processor's share where the step's threads use all processors, and nothing where one is
    left for the thread that copies.
    """
    if device.type != "cpu":
        return 0.0
    has_affinity = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return 1 / processors if torch.get_num_threads() >= processors else 0.0


def block_ns(tier: Tier, room_bytes: int | None) -> int:
    """Nanoseconds to store and load a block of 4 MiB in a tier, rounded by `rounded`.

    Args:
        tier: the tier.
        room_bytes: memory that there is for the block; None if nothing is to be measured. If there
            is too little memory, or too little room in the tier, the time is `_MODEL_NS`.
    """
    return _times(tier, room_bytes)["block"]


def _times(tier: Tier, room_bytes: int | None) -> dict[str, int]:
    """The same for all of `_TIMES`."""
    device = tier.place.device
    model_ns = _MODEL_NS[device.type]
    modelled = dict.fromkeys(_TIMES, model_ns // 2) | {"block": model_ns}
    if device.type == "cuda" and room_bytes is None:  # the device may not be there
        return modelled
    try:
        disk = tier.place.disk
    except OSError as error:
        raise tier.place.full("offloaded tensors", error) from error
    signatures = {(name, disk): name for name in _TIMES}
    with _one_at_a_time:
        if not signatures.keys() <= _learned.keys():
            _learned.update(recall(_KIND, signatures, device))
        if not signatures.keys() <= _learned.keys():
            if room_bytes is None or room_bytes < _BLOCK_BYTES:
                return modelled
            try:
                found: dict[object, int] = {
                    (name, disk): rounded(one) for name, one in _measured_ns(tier).items()
                }
            except (ExecutionError, OSError):  # a step may need less room
                return modelled
            finally:
                tier.release()
            _learned.update(found)
            retain(_KIND, found, device)
        return {name: _learned[signature] for signature, name in signatures.items()}


def _measured_ns(tier: Tier) -> dict[str, int]:
    """The least of some runs after a first one, in both directions; and of some runs to the disk
    and from there. Blocks are stored one after another before the first is loaded, as in a step.
    """
    device = tier.place.device
    block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device=device)
    places = [number * _BLOCK_BYTES for number in range(_BLOCKS)]
    taken: dict[str, list[int]] = {name: [] for name in _TIMES[1:]}

    def now() -> int:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter_ns()

    with tier.held(_BLOCKS * _BLOCK_BYTES):
        for run in range(2 * _MOST_RUNS + 1):
            where = " disk" if run > _MOST_RUNS else ""
            start = now()
            for place in places:
                tier.store(block, place)
            if where:
                tier.forget()
            stored = now()
            for place in places:
                tier.load(block, place)
            if run:
                taken["write" + where].append(stored - start)
                taken["read" + where].append(now() - stored)
    least = {name: min(some) // _BLOCKS for name, some in taken.items()}
    return {"block": least["read"] + least["write"], **least}
