"""Types of command-line arguments. argparse names them in its error messages: "invalid positive
integer value: '0'".
"""

from __future__ import annotations

import math


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


positive_integer.__name__ = "positive integer"
positive_number.__name__ = "positive number"
seconds.__name__ = "number of seconds"
