"""What may look at gradients between an update and the next zeroing of them: methods and objects
whose code is not known to leave them alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from inspect import getattr_static
from typing import Any

from torch.optim import Optimizer

_PYTORCH = ("torch.optim.lr_scheduler", "torch.optim.swa_utils", "builtins", "math", "weakref")
"""Modules of schedules, and of what schedules call, in which nothing reads `.grad`."""


def is_overridden(holder: Any, base: type[Any], name: str) -> bool:
    """Whether an object, or a class, has another method of this name than a library's class."""
    kind = holder if isinstance(holder, type) else type(holder)
    is_own = holder is not kind and name in vars(holder)
    return is_own or getattr_static(kind, name, None) is not getattr_static(base, name, None)


def overridden(holder: Any, base: type[Any]) -> Iterator[str]:
    """Names of a library's methods for which an object has others."""
    for name in dir(base):
        is_method = not name.startswith("__") and callable(getattr(base, name))
        if is_method and is_overridden(holder, base, name):
            yield name


def may_read(thing: Any, libraries: tuple[str, ...]) -> bool:
    """Whether an object may look at gradients: it, or a function that it holds, is of another
    module than these, or of a module in one of these.
    """
    pending, seen = [thing], set[int]()
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, Optimizer):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, (list, tuple)):
            pending += one
        elif isinstance(one, functools.partial):
            pending += [one.func, *one.args, *one.keywords.values()]
        elif one is thing or callable(one) or hasattr(type(one), "get_last_lr"):
            owner = one if hasattr(one, "__code__") else type(one)
            home = f"{owner.__module__}."
            if not any(home.startswith(f"{library}.") for library in (*_PYTORCH, *libraries)):
                return True
            pending += getattr(one, "__dict__", {}).values()
    return False
