"""What roam does with Python's cyclic garbage collector: pauses it, and asks it for objects."""

from __future__ import annotations

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
