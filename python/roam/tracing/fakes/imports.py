"""Blocks in which tensors are fake and PyTorch is patched, and the modules and caches that outlive
such a block.

Modules outlive the block in which they are first imported, with the tensors that they make and the
functions of PyTorch that they copy. So they are executed as if the block were not there. Caches of
functions are cleared if they hold fakes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary
from zipimport import zipimporter

from roam.own_code import is_own_module
from roam.state.cached_results import all_caches, tensors_in
from roam.torch_compat.patches import replaced
from roam.torch_compat.private import FakeTensor, disable_current_modes

_LOADERS: Final[tuple[Any, ...]] = (
    SourceFileLoader,
    SourcelessFileLoader,
    ExtensionFileLoader,
    zipimporter,
)
_MANY_RESULTS: Final = 64
_searched: Final[WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()
"""What `cache_info` said of functions with a cache when they were found to keep no fakes."""


@contextmanager
def imports_leave(outside: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Executes the modules that this thread imports in the block without dispatch modes, and in
    `outside()`.
    """
    thread = threading.get_ident()

    def left(execute: Callable[[Any, ModuleType], None]) -> Callable[[Any, ModuleType], None]:
        @functools.wraps(execute)
        def exec_module(loader: Any, module: ModuleType) -> None:
            if threading.get_ident() != thread:
                execute(loader, module)
                return
            with disable_current_modes(), outside():
                execute(loader, module)

        return exec_module

    with disable_current_modes():
        pass  # it imports what it needs
    with replaced((loader, "exec_module", left(loader.exec_module)) for loader in _LOADERS):
        yield


def clear_fakes(others: Container[int] = ()) -> None:
    """Clears every `functools.lru_cache` that holds a fake tensor; caches whose identities are in
    `others` are left alone, and so are roam's own, which keep no tensors.
    """
    for cache in all_caches():
        info = cache.cache_info()
        if id(cache) in others or not info.currsize or is_own_module(str(cache.__module__)):
            continue
        known = _searched.get(cache)
        # Small caches are searched quickly. A large one has hardly been cleared and filled again up
        # to the very number of results.
        is_known = known is not None and known.misses == info.misses and known.hits <= info.hits
        if is_known and info.misses >= _MANY_RESULTS:
            continue
        if any(type(tensor) is FakeTensor for tensor in tensors_in(cache)):
            cache.cache_clear()
        else:
            _searched[cache] = info
