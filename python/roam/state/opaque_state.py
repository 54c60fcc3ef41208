"""Reads the state of objects that hold it in C, or whose reads cannot be noted: events, loggers,
shared memory.
"""

from __future__ import annotations

import string
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from roam.state.equality import is_numpy_array
from roam.state.spaces import Items, Space
from roam.torch_compat.private import shard_settings


def _logger(logger: Any) -> Any:
    level = sys.modules["logging"].Logger.getEffectiveLevel(logger)
    return level, logger.disabled, logger.manager.disable


def _bytes(memory: Any) -> bytes:
    return memoryview(memory).tobytes()


def _shared(value: Any) -> bytes:
    return _bytes(value.get_obj())


def _objects(array: Any) -> Any:
    return array.shape, tuple(array.flat)


_READERS: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (BaseException, lambda error: error.args),
    (threading.Event, threading.Event.is_set),
    (threading.Semaphore, lambda semaphore: semaphore._value),
    (string.Template, lambda template: template.template),
)
_OF_MODULES: Final[tuple[tuple[str, str, Callable[[Any], Any]], ...]] = (
    ("logging", "Logger", _logger),
    ("queue", "SimpleQueue", lambda queue: queue.qsize()),
    ("mmap", "mmap", _bytes),
    ("ctypes", "_SimpleCData", _bytes),
    ("ctypes", "Array", _bytes),
    ("ctypes", "Structure", _bytes),
    ("multiprocessing.sharedctypes", "SynchronizedBase", _shared),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", shard_settings),
)
"""(module, class, reader) for classes whose modules may not have been imported; if so, there are no
objects of them.
"""


def reader_of(value: object) -> Callable[[Any], Any] | None:
    """How to ask for the state of such an object; None for any other."""
    if is_numpy_array(value):
        return _objects
    kind = type(value)
    for base, read in _READERS:
        if issubclass(kind, base):
            return read
    for module, name, read in _OF_MODULES:
        known = getattr(sys.modules.get(module), name, None)
        if known is not None and issubclass(kind, known):
            return read
    return None


def read_bytes_of(value: Any, read: Callable[[Any], Any]) -> int:
    """How many bytes are read of an object at once; 1 if that is almost nothing."""
    if read is _objects:
        return int(value.nbytes)
    if read not in (_bytes, _shared):
        return 1
    return memoryview(value.get_obj() if read is _shared else value).nbytes


class ReadSpace(Space):
    """What can be asked of an object whose state is in no container: an event, a logger."""

    __slots__ = ("_read", "holder")

    def __init__(self, holder: Any, path: str, read: Callable[[Any], Any]) -> None:
        """`read`: what is asked; it gives a plain value, or a tuple that is compared as one."""
        super().__init__(path)
        self.holder = holder
        self._read = read

    def items(self) -> Items:
        return [("", self._read(self.holder))]

    def put(self, items: Items) -> None:
        """Nothing: a step that changes such an object is refused."""

    def label(self, key: Any) -> str:
        return f"the state of {self.path}"
