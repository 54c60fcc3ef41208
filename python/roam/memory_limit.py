"""What a caller says of how much memory a step may take: bytes, text with a unit, or a share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_UNITS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+|%)\s*")
_ALLOWED = (
    'a number of bytes, text with a unit ("12GiB", "800 MB"), a share of what the plan without '
    'recomputation takes ("60%"), or "auto", for what the device has free'
)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The most that a step may take in all.

    Attributes:
        size_bytes: the limit in bytes; None if it is a share or what the device has.
        share: the limit as a share, above 0, of the total of the plan without recomputation; None
            if it is not a share.

    Both are None if the limit is what the device has.
    """

    size_bytes: int | None = None
    share: float | None = None

    @classmethod
    def of(cls, value: int | str) -> MemoryLimit:
        """What a caller's value means.

        Raises:
            ValueError: it means nothing, or nothing above zero.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            return cls._checked(value, cls(size_bytes=value), float(value))
        if not isinstance(value, str):
            raise ValueError(f"memory must be {_ALLOWED}; not {value!r}")
        if value.strip().lower() == "auto":
            return cls()
        match = _TEXT.fullmatch(value)
        number = float(match[1]) if match else math.nan
        if match and match[2] == "%":
            return cls._checked(value, cls(share=number / 100), number)
        unit = _UNITS.get(match[2].lower()) if match else None
        if unit is None:
            raise ValueError(f"memory must be {_ALLOWED}; not {value!r}")
        return cls._checked(value, cls(size_bytes=int(number * unit)), number)

    @property
    def is_auto(self) -> bool:
        """Whether it is what the device has."""
        return self.size_bytes is None and self.share is None

    def amount_bytes(self) -> int:
        """The bytes that the caller named.

        Raises:
            ValueError: it is a share, or what the device has.
        """
        if self.size_bytes is None:
            raise ValueError('memory must be bytes, or text with a unit such as "24GiB", here')
        return self.size_bytes

    @classmethod
    def _checked(cls, value: object, limit: MemoryLimit, number: float) -> MemoryLimit:
        if not 0 < number < 2**63 or (limit.size_bytes is not None and limit.size_bytes >= 2**63):
            raise ValueError(f"memory must be above 0 and below 2^63 bytes; not {value!r}")
        return limit

    def in_bytes(self, plain_total_bytes: int) -> int:
        """The limit, in bytes.

        Args:
            plain_total_bytes: total of the plan without recomputation.

        Raises:
            ValueError: the limit is what the device has, and this is not known yet.
        """
        if self.size_bytes is not None:
            return self.size_bytes
        if self.share is not None:
            return int(self.share * plain_total_bytes)
        raise ValueError('memory="auto" needs a device whose memory can be asked for')
