"""Whether compiled steps run by plan here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_disabled: ContextVar[bool] = ContextVar("_is_disabled", default=False)


@contextmanager
def disabled() -> Iterator[None]:
    """In the block, compiled steps run the user's own function, and graphs of `torch.compile` run
    without plans. Nothing is captured or planned.

    It holds for the thread, or the asynchronous task, that enters the block. Blocks may be nested.
    `ROAM_DISABLE=1` does the same for a whole process.
    """
    token = _is_disabled.set(True)
    try:
        yield
    finally:
        _is_disabled.reset(token)


def is_disabled() -> bool:
    """Whether the caller is in a `disabled` block, or the environment says ``ROAM_DISABLE=1``."""
    return _is_disabled.get() or os.environ.get("ROAM_DISABLE", "0") not in ("", "0")
