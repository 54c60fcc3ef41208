"""Reads the state of objects that hold it in C, or whose reads cannot be noted: events, loggers,
shared memory, pandas' tables, options of collectives.
"""

from __future__ import annotations

import operator
import pickle
import string
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from roam.state.equality import same
from roam.state.spaces import Items, Space
from roam.torch_compat.private import shard_settings


def _levels(logger: Any) -> Any:
    levels = [logger.level]
    while (parent := logger.parent) is not None:
        logger = parent
        levels.append(logger.level)
    return tuple(levels)


def _logger(logger: Any) -> Any:
    return _levels(logger), logger.disabled, logger.manager.disable


def _set_logger(logger: Any, state: Any) -> None:
    levels, logger.disabled, logger.manager.disable = state
    for level in levels:
        logger.setLevel(level)
        logger = logger.parent


def _bytes(memory: Any) -> bytes:
    return memoryview(memory).tobytes()


def _set_bytes(memory: Any, state: bytes) -> None:
    memoryview(memory).cast("B")[:] = state


def _shared(value: Any) -> bytes:
    return _bytes(value.get_obj())


def _set_shared(value: Any, state: bytes) -> None:
    _set_bytes(value.get_obj(), state)


def _frame(frame: Any) -> Any:
    """The labels of a pandas object, and a number for each row of its values."""
    try:
        rows = sys.modules["pandas"].util.hash_pandas_object(frame).to_numpy().tobytes()
    except TypeError:  # lists among the values
        rows = pickle.dumps(frame)
    return rows, tuple(getattr(frame, "columns", ())), str(frame.shape)


def _set_event(event: Any, is_set: bool) -> None:
    (event.set if is_set else event.clear)()


_COLLECTIVES: Final = tuple(
    f"{kind}Options"
    for kind in (
        *("Allreduce", "AllreduceCoalesced", "Broadcast", "Reduce", "Allgather", "ReduceScatter"),
        *("AllToAll", "Barrier", "Gather", "Scatter"),
    )
)
_FIELDS: Final = (
    "asyncOp", "reduceOp", "rootRank", "rootTensor", "timeout", "device_ids", "device"
)  # fmt: skip


def _options(options: Any) -> tuple[str, ...]:
    """The fields of what a method of a process group is given, in C++."""
    fields = [getattr(options, name, None) for name in _FIELDS]
    return tuple(str(getattr(value, "op", value)) for value in fields)


Reader = Callable[[Any], Any]
Writer = Callable[[Any, Any], object]


def _attribute(name: str) -> tuple[Reader, Writer]:
    return operator.attrgetter(name), lambda holder, value: setattr(holder, name, value)


_READERS: Final[tuple[tuple[type, Reader, Writer], ...]] = (
    (BaseException, *_attribute("args")),
    (threading.Event, threading.Event.is_set, _set_event),
    (threading.Semaphore, *_attribute("_value")),
    (string.Template, *_attribute("template")),
)
_OF_MODULES: Final[tuple[tuple[str, str, Reader, Writer | None], ...]] = (
    ("logging", "Logger", _logger, _set_logger),
    ("pandas", "DataFrame", _frame, None),
    ("pandas", "Series", _frame, None),
    ("pandas", "Index", _frame, None),
    ("queue", "SimpleQueue", lambda queue: queue.qsize(), None),
    ("mmap", "mmap", _bytes, _set_bytes),
    ("ctypes", "_SimpleCData", _bytes, _set_bytes),
    ("ctypes", "Array", _bytes, _set_bytes),
    ("ctypes", "Structure", _bytes, _set_bytes),
    ("multiprocessing.sharedctypes", "SynchronizedBase", _shared, _set_shared),
    *(("torch.distributed.distributed_c10d", name, _options, None) for name in _COLLECTIVES),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", shard_settings, None),
)
"""(module, class, reader, writer) for classes whose modules may not have been imported; if so,
there are no objects of them. The writer is None if what is read is not enough to put it back.
"""


def reader_of(value: object) -> tuple[Reader, Writer | None] | None:
    """How to ask for the state of such an object, and how to put it back; None for any other."""
    kind = type(value)
    for base, read, write in _READERS:
        if issubclass(kind, base):
            return read, write
    for module, name, reader, writer in _OF_MODULES:
        known = getattr(sys.modules.get(module), name, None)
        if known is not None and issubclass(kind, known):
            return reader, writer
    return None


def read_bytes_of(value: Any, read: Reader) -> int:
    """How many bytes are read of an object at once; 1 if that is almost nothing."""
    if read is _frame:
        return int(value.size) * 8
    if read not in (_bytes, _shared):
        return 1
    return memoryview(value.get_obj() if read is _shared else value).nbytes


class ReadSpace(Space):
    """What can be asked of an object whose state is in no container: an event, a logger."""

    __slots__ = ("_read", "_write")

    def __init__(self, holder: Any, path: str, read: Reader, write: Writer | None) -> None:
        """Reads an object.

        Args:
            read: what is asked; it gives a plain value, or a tuple that is compared as one.
            write: puts back what was read; None if that cannot be done.
        """
        super().__init__(holder, path)
        self._read = read
        self._write = write

    def items(self) -> Items:
        return [("", self._read(self.holder))]

    def put(self, items: Items) -> None:
        """Puts the state back if it has changed. A step that changes it is refused."""
        ((_, state),) = items
        if self._write is not None and not same(state, self._read(self.holder)):
            self._write(self.holder, state)

    def label(self, key: Any) -> str:
        return f"the state of {self.path}"
