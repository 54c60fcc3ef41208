"""PyTorch's own switches around a capture: a step may change them while it runs, and has to change
them back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roam.state.equality import same, show
from roam.state.global_state import AMBIENT
from roam.torch_compat.private import set_fill_uninitialized, set_grad_enabled


def _set_autocast(device: str) -> Callable[[Any], None]:
    def write(value: Any) -> None:
        torch.set_autocast_enabled(device, value is not False)
        if value is not False:
            torch.set_autocast_dtype(device, value)

    return write


def _set_deterministic(found: tuple[bool, ...]) -> None:
    is_on, only_warns, fills = found
    torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
    set_fill_uninitialized(fills)


_WRITE: dict[str, Callable[[Any], Any]] = {
    "gradient mode": set_grad_enabled,
    "autocast on cpu": _set_autocast("cpu"),
    "autocast on cuda": _set_autocast("cuda"),
    "autocast cache": torch.set_autocast_cache_enabled,
    "default dtype": torch.set_default_dtype,
    "default device": torch.set_default_device,
    "deterministic mode": _set_deterministic,
    "float32 matmul precision": torch.set_float32_matmul_precision,
    "number of threads": torch.set_num_threads,
}
"""How to set each switch that functions set. The others are set by blocks, and get their old values
back when such a block ends.
"""


class Switches:
    """All switches as they are now."""

    def __init__(self) -> None:
        self._found = [(name, read, read()) for name, read in AMBIENT]
        self._nesting = _autocast_nesting()

    def moved(self) -> str | None:
        """None while all switches are as they were, else the first that is not."""
        for name, read, found in self._found:
            if not same(found, read()):
                return f"PyTorch's {name} changed from {show(found)} to {show(read())}"
        return None

    def restore(self) -> None:
        """Puts back the switches that functions set."""
        for name, read, found in self._found:
            if name in _WRITE and not same(found, read()):
                _WRITE[name](found)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if self._nesting == 0:
            torch.clear_autocast_cache()  # it may hold casts of fake weights


def _autocast_nesting() -> int:
    """How many blocks of autocast are open; the outermost one clears its cache of casts at its
    end.
    """
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
