"""How much memory a device has for a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

if sys.platform == "linux":
    import resource

from roam.memory_limit import MemoryLimit
from roam.runtime.pool import Pool

_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 2**62
"""Control groups without a limit say `max`, or a number about as large as there is."""
_STEPS = 32
"""The amount of free memory differs from one moment to the next. It is rounded down to a multiple
of 1/32 of the power of two below it, so by 3 percent at most. Then a plan that was made for the
rounded amount is found again.
"""


def known_limit(memory: MemoryLimit, device: torch.device, held_bytes: int) -> MemoryLimit:
    """The same limit; if it is what the device has, as a number of bytes.

    Args:
        memory: the limit.
        device, held_bytes: as for `available_bytes`.

    Raises:
        ValueError: it is not known what the device has.
    """
    if not memory.is_auto:
        return memory
    size_bytes = available_bytes(device, held_bytes)
    if size_bytes is None:
        raise ValueError(
            f'memory="auto": the free memory of {device} is not known; pass an amount, such as '
            'memory="12GiB"'
        )
    return MemoryLimit(size_bytes=_rounded_down(size_bytes))


def _rounded_down(size_bytes: int) -> int:
    step = max((1 << size_bytes.bit_length() - 1) // _STEPS, 1)
    return size_bytes // step * step


def available_bytes(device: torch.device, held_bytes: int) -> int | None:
    """Bytes that a step may take in all: what is free now, and what it holds already.

    Args:
        device: where the step runs.
        held_bytes: what exists before the step, the batch included.

    Returns:
        None if it is not known.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info(device)
        # What the allocator holds and nobody uses is free for the step, too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused + held_bytes + Pool.of(device).nbytes
    if device.type != "cpu":
        return None
    free_bytes = min([*_free_in_groups(), *_free_in_system(), *_free_in_limits()], default=None)
    return None if free_bytes is None else free_bytes + held_bytes + Pool.of(device).nbytes


def _free_in_system() -> Iterator[int]:
    """What processes may still take without swapping."""
    try:
        yield _told_bytes("/proc/meminfo", "MemAvailable")
    except (OSError, KeyError, ValueError):
        try:
            yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            return


def _free_in_limits() -> Iterator[int]:
    """What the limits of the process leave it (`RLIMIT_DATA`, `RLIMIT_AS`)."""
    if sys.platform != "linux":
        return
    for kind, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most, _ = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            yield max(most - _told_bytes("/proc/self/status", name), 0)


def _told_bytes(path: str, name: str) -> int:
    """An amount of memory in a file that the system writes in kibibytes."""
    found = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(found[name].split()[0]) * 1024


def _free_in_groups() -> Iterator[int]:
    """What the control groups of the process leave it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _GROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit, used = (int((folder / name).read_text()) for name in names)
            except (OSError, ValueError):  # there is none, or it is `max`
                continue
            if limit < _UNLIMITED:
                yield max(limit - used, 0)
