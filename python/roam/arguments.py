"""Types of command-line arguments, and the error of arguments that cannot be used. argparse names
the types in its error messages: "invalid positive integer value: '0'".
"""

from __future__ import annotations

import math

from roam.errors import RoamError
from roam.memory_limit import MemoryLimit


class UsageError(RoamError):
    """Arguments that parse, but cannot be used together or here."""


def positive_integer(text: str) -> int:
    """Of no more than 63 bits."""
    value = int(text)
    if not 0 < value < 2**63:
        raise ValueError
    return value


def positive_number(text: str) -> float:
    """Neither infinite nor zero."""
    value = seconds(text)
    if value == 0:
        raise ValueError
    return value


def seconds(text: str) -> float:
    """Zero or more."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError
    return value


def memory_limit(text: str) -> MemoryLimit:
    """Bytes, with or without a unit, or a share; see `MemoryLimit.of`. No command asks a device how
    much it has free.
    """
    limit = MemoryLimit.of(int(text) if text.isdecimal() else text)
    if limit.is_auto:
        raise ValueError
    return limit


def shares(text: str) -> tuple[int, ...]:
    """Percentages, separated by commas."""
    return tuple(positive_integer(item) for item in text.split(","))


def mesh_shape(text: str) -> tuple[int, ...]:
    """Ranks along each dimension of a mesh, with an x between them."""
    return tuple(positive_integer(item) for item in text.split("x"))


mesh_shape.__name__ = "shape of a mesh"
memory_limit.__name__ = "amount of memory"
shares.__name__ = "list of percentages"
positive_integer.__name__ = "positive integer"
positive_number.__name__ = "positive number"
seconds.__name__ = "number of seconds"
