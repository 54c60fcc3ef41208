"""What was found out about kernels, kept on disk for later processes of the same machine.

There is one entry for each kind of finding and environment (roam's code, and the versions, settings
and device that decide which kernels run, which are in the entry's key). A kernel's call is
identified by its signature: its name, its arguments' shapes, strides and dtypes, and PyTorch's
settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import torch

from roam import kernels, program
from roam.disk_cache import build, disk_cache
from roam.processor import processor_name
from roam.state.code_guards import TOLD_BY

_MOST = 20_000
"""The most findings of an entry. If there are more, the oldest are dropped."""
_MOST_VALUE = 2**62

_recalled: Counter[str] = Counter()


def recall(kind: str, signatures: Iterable[object], device: torch.device) -> dict[object, int]:
    """What earlier processes have found out about calls, for those calls about which something is
    kept.
    """
    found = _entry(kind, device)
    told = ((signature, found.get(_name(signature))) for signature in signatures) if found else ()
    recalled = {signature: value for signature, value in told if value is not None}
    _recalled[kind] += len(recalled)
    return recalled


def recalled() -> int:
    """How many findings this process has taken from disk."""
    return _recalled.total()


def retain(kind: str, found: Mapping[object, int], device: torch.device) -> None:
    """Keeps what has been found out, with what is kept already."""
    cache = disk_cache()
    if cache is None or not found:
        return
    # What another process adds at the same moment may be lost, and is found out again.
    values = _entry(kind, device) | {_name(one): value for one, value in found.items()}
    newest = dict(list(values.items())[-_MOST:])
    cache.put("kernels", _key(kind, device), json.dumps(newest).encode())


def _entry(kind: str, device: torch.device) -> dict[str, int]:
    cache = disk_cache()
    content = None if cache is None else cache.get("kernels", _key(kind, device))
    try:
        values = {} if content is None else json.loads(content)
    except (ValueError, RecursionError):
        return {}
    is_ours = isinstance(values, dict) and all(
        type(value) is int and 0 <= value < _MOST_VALUE for value in values.values()
    )
    return values if is_ours else {}


def _name(signature: object) -> str:
    return hashlib.sha256(repr(signature).encode()).hexdigest()[:32]


def _key(kind: str, device: torch.device) -> str:
    told = sorted((name, value) for name, value in os.environ.items() if name.startswith(TOLD_BY))
    return json.dumps([kind, build(), _code(), *_software(), *_hardware(device), told])


@cache
def _code() -> str:
    """A hash of the code that decides what is found out, and how."""
    found = hashlib.sha256()
    for package in (kernels, program):
        for path in sorted(Path(package.__path__[0]).glob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


@cache
def _software() -> tuple[str, ...]:
    return (
        torch.__version__, str(torch.version.git_version), torch.__config__.show(), str(torch.version.cuda),
        str(torch.backends.cudnn.version()), platform.platform(),
    )  # fmt: skip


@cache
def _hardware(device: torch.device) -> tuple[str, ...]:
    processor = (platform.machine(), platform.processor(), processor_name(), str(os.cpu_count()))
    if device.type != "cuda":
        return (device.type, *processor, torch.backends.cpu.get_cpu_capability())
    return (device.type, *processor, str(torch.cuda.get_device_properties(device)))
