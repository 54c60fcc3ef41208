"""Whether code reads the clock, found in the names that it uses."""

from __future__ import annotations

import datetime
import sys
import time
import timeit
from collections.abc import Mapping
from types import BuiltinFunctionType, CellType, CodeType, ModuleType
from typing import Any, Final

from roam.state.library_code import instructions_of, nested_code
from roam.tracing.compiled.frames import contents_of

_CLOCK_NAMES: Final = frozenset(
    {
        "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns",
        "thread_time", "thread_time_ns", "ctime", "asctime", "localtime", "gmtime", "strftime", "default_timer",
    }
)  # fmt: skip
_CLOCKS: Final = frozenset(getattr(time, name) for name in _CLOCK_NAMES if hasattr(time, name))
"""Functions of Python's own that tell the time."""
_DATES: Final = frozenset({"now", "utcnow", "today"})
_MODULES: Final = frozenset({"time", "timeit", "datetime"})
"""Those that a function may import by itself."""


def reads_clock(code: CodeType, names: Mapping[str, Any], cells: tuple[CellType, ...] = ()) -> bool:
    """Whether a function's code, or a function in it, names a function that tells the time.

    Args:
        code: of the function.
        names: its globals.
        cells: its variables of functions around it.
    """
    names = {**names, **dict(zip(code.co_freevars, map(contents_of, cells), strict=False))}
    for part in nested_code(code):
        found = [names.get(name) for name in (*part.co_names, *part.co_freevars)]
        found += [sys.modules.get(name) for name in _MODULES.intersection(part.co_names)]
        if any(value in _CLOCKS for value in found if isinstance(value, BuiltinFunctionType)):
            return True
        if any(value is time or value is timeit for value in found) and any(
            one.argval in _CLOCK_NAMES
            for one in instructions_of(part)
            if one.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
        ):
            return True
        if not _DATES.isdisjoint(part.co_names) and any(
            value is datetime or value in (datetime.datetime, datetime.date)
            for value in found
            if isinstance(value, (type, ModuleType))
        ):
            return True
    return False
