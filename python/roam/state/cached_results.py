"""What functions with a `functools.lru_cache` keep: tables of positions, rotations, masks."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from types import FunctionType, ModuleType
from typing import Any, Final

import torch

from roam.garbage import referrers
from roam.state.equality import is_plain

_CACHE: Any = functools._lru_cache_wrapper


class _Caches:
    """All functions of the process that have a `functools.lru_cache`."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []
        self._other_references = -1

    def now(self) -> list[Any]:
        """Those that are alive.

        Each refers to its type. So as long as there are as many other references to the type as
        before, no new one was made, and the collector need not look through all objects of the
        process.
        """
        alive = [cache for known in self._known if (cache := known()) is not None]
        if sys.getrefcount(_CACHE) - len(alive) != self._other_references:
            alive = [cache for cache in referrers(_CACHE) if type(cache) is _CACHE]
            self._other_references = sys.getrefcount(_CACHE) - len(alive)
        self._known = list(map(weakref.ref, alive))
        return alive


all_caches = _Caches().now


_PLAIN = frozenset((type(None), type, bool, int, float, str, bytes, FunctionType))
"""Types of most of the values that hold no results."""
_MOST_PARTS: Final = 1_000
"""A result of more parts is taken to hold tensors."""


def tensors_in(cache: Any) -> list[torch.Tensor]:
    """The tensors in the results that a function keeps, and in containers among them."""
    found: dict[int, torch.Tensor] = {}
    seen = {id(cache.__dict__)}
    waiting = [cache]
    while waiting:
        held = gc.get_referents(waiting.pop())
        # Most of thousands of parts are of the same few classes, which hold no tensors.
        kinds = {kind for kind in set(map(type, held)) if _may_lead_to_tensors(kind)}
        if not kinds:
            continue
        for value in held:
            if type(value) not in kinds:
                continue
            if issubclass(type(value), torch.Tensor):
                found[id(value)] = value
            elif id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)
    return list(found.values())


_name_of: Final[Any] = type.__dict__["__name__"].__get__  # a metaclass may have its own


def _may_lead_to_tensors(kind: type) -> bool:
    """Whether values of a class are tensors, or containers that are looked into."""
    return kind not in _PLAIN and (
        _name_of(kind) == "_lru_list_elem" or issubclass(kind, (torch.Tensor, dict, list, tuple))
    )


def keys_of(cache: Any) -> list[Any]:
    """The keys under which a function keeps results."""
    return list(_table(cache) or ())


def forget_others(cache: Any, keys: list[Any]) -> None:
    """Makes a function forget all its results except those under these keys and those that cannot
    hold tensors, or all of them if they cannot be told apart.
    """
    table, known = _table(cache), set(map(id, keys))
    if table is None:
        cache.cache_clear()
        return
    known |= {id(key) for key, result in _entries(cache) if _is_free_of_tensors((key, result))}
    for key in [key for key in table if id(key) not in known]:
        del table[key]  # which leaves the rest of such a cache as it is


def _is_free_of_tensors(value: Any) -> bool:
    """Whether a value holds no tensor, however deep; False if it holds very much."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if issubclass(type(part), torch.Tensor) or len(seen) > _MOST_PARTS:
            return False
        if type(part) in _PLAIN or issubclass(type(part), (type, ModuleType)) or id(part) in seen:
            continue
        seen.add(id(part))
        waiting += gc.get_referents(part)
    return True


def _table(cache: Any) -> dict[Any, Any] | None:
    """The dictionary in which a function keeps its results; None if it cannot be found."""
    size = cache.cache_info().currsize
    found = [
        held
        for held in gc.get_referents(cache)
        if type(held) is dict and held is not cache.__dict__ and len(held) == size
    ]
    if cache.cache_info().maxsize is not None:  # its results may be dictionaries too
        found = [
            held
            for held in found
            if all(type(value).__name__ == "_lru_list_elem" for value in held.values())
        ]
    return found[0] if len(found) == 1 else None


def keeps_objects(cache: Any) -> bool:
    """Whether a function keeps results that are no plain values. Changes inside of them would not
    be seen.
    """
    entries = _entries(cache)
    is_known = len(entries) == cache.cache_info().currsize
    return not is_known or not all(is_plain(result) for _, result in entries)


def _entries(cache: Any) -> list[tuple[Any, Any]]:
    """The keys and results that a function keeps."""
    table = _table(cache)
    if not table:
        return []
    if cache.cache_info().maxsize is None:
        return list(table.items())
    # The table leads to elements of a linked list, which show nothing. The collector finds in the
    # function each key, followed by its result.
    keys = set(map(id, table))
    held = iter(gc.get_referents(cache))
    return [(key, next(held, None)) for key in held if id(key) in keys]
