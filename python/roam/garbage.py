"""What roam does with garbage: it pauses Python's cyclic collector and asks it for objects, and
gives memory that C's allocator keeps back to the system.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def collections_wait() -> Iterator[None]:
    """While a capture makes a million objects that stay, it would look at them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def all_objects() -> list[Any]:
    """All objects that the collector tracks. It undoes a user's `gc.freeze`, which hides objects.

    If they were frozen again, objects that become garbage later, such as a plan, would stay in
    memory for ever.
    """
    gc.unfreeze()
    return gc.get_objects()


def referrers(*objects: Any) -> list[Any]:
    """All objects that refer to some of these. It undoes a user's `gc.freeze` too."""
    gc.unfreeze()
    return gc.get_referrers(*objects)


def give_back_freed() -> None:
    """Gives the system back what was allocated and freed, such as the results of a run without a
    pool, and what the planner worked with. It is glibc's `malloc_trim`; elsewhere nothing happens.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return
    trim(ctypes.c_size_t(0))
