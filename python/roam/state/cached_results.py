"""Tensors that functions with a `functools.lru_cache` keep: tables of positions, rotations,
masks.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import weakref
from types import FunctionType, ModuleType
from typing import Any, Final

import torch

from roam.garbage import referrers
from roam.state.equality import MISSING, is_plain, same, same_elements
from roam.state.nests import alike
from roam.state.spaces import Items, Space

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
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)
_MOST_PARTS: Final = 1_000
"""A result of more parts is taken to hold tensors."""
_MOST_RESULTS: Final = 256
"""More results than this are not compared at every call."""


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


def results_of(cache: Any) -> list[tuple[Any, Any]]:
    """The keys and results that a function keeps, of those results that may change or be exchanged:
    they are no plain values, and no tensors or containers of tensors, of which a step that asks for
    them is refused. Nothing of a function that keeps so many results that to look at them would
    take long.
    """
    if cache.cache_info().currsize > _MOST_RESULTS:
        return []
    return [
        (key, result)
        for key, result in _entries(cache)
        if is_plain(key)
        and not is_plain(result)
        and not issubclass(type(result), torch.Tensor)
        and (not issubclass(type(result), _CONTAINERS) or _is_free_of_tensors(result))
    ]


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
    found: dict[int, tuple[Any, Any]] = {}
    held = gc.get_referents(cache)
    for key, result in itertools.pairwise(held):
        if id(key) in keys:
            found.setdefault(id(key), (key, result))
    return list(found.values())


class ResultsSpace(Space):
    """Results that a function with a cache keeps, by the keys of its table.

    A result that has been forgotten may be made again. It is another object then, and fits if it
    has the same contents. One that holds tensors does not fit once it has been forgotten: the plan
    would read the old tensors.
    """

    __slots__ = ("_keys",)

    def __init__(self, holder: Any, path: str) -> None:
        super().__init__(holder, path, label=lambda path, _: f"a result of {path}")
        self._keys = [key for key, _ in results_of(holder)]

    def items(self) -> Items:
        kept = dict(_entries(self.holder)) if self.holder.cache_info().currsize else {}
        return [(place, kept.get(key, MISSING)) for place, key in enumerate(self._keys)]

    def is_live(self, key: Any, old: Any, value: Any) -> bool:
        if value is MISSING:
            return _is_free_of_tensors(old)
        return alike(old, value, _have_same_contents)

    def put(self, items: Items) -> None:
        pass  # a snapshot makes the function forget what is new


def _have_same_contents(one: Any, other: Any) -> bool:
    """Whether two values are the same, or sets of the same."""
    is_set = type(one) is type(other) is set
    return same_elements(one, other) if is_set else same(one, other)
