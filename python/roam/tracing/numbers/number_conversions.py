"""`float(x)`, `int(x)` and `len(x)` in the user's code, where `x` is a tensor or a number that
changes from call to call.

They make plain numbers only, and a plan would keep those of the capture. So while a step is traced,
the names mean functions, which give the number of `x.item()`, or the size. The step may go on to
calculate with it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from roam.state.classes import dictionary_of, member_of
from roam.state.library_code import instructions_of, nested_code
from roam.state.live_scalars import is_live
from roam.state.sizes import calculated, is_size
from roam.state.trace_context import TraceContext

_MARKS_CALLS: Final = sys.version_info >= (3, 11)
"""Whether an instruction that loads a name says that the name is then called."""


def conversions(trace: TraceContext) -> dict[str, Callable[..., Any]]:
    """What the names mean while a step is traced."""

    def as_float(*args: Any) -> Any:
        number = _number(*args)
        if is_size(number):
            return calculated(float, args)
        if not is_live(number):
            return float(*args)
        return trace.scalar_call(float, (number,))  # which may be a float of NumPy's

    def as_int(*args: Any) -> Any:
        number = _number(*args)
        if is_size(number):
            return calculated(int, args)
        if not is_live(number):
            return int(*args)
        known = trace.fixed_value(number.node.slot)
        if known is not None:
            return int(known)
        return number if isinstance(number, int) else trace.scalar_call(int, (number,))

    def as_len(*args: Any) -> Any:
        value: Any = args[0] if len(args) == 1 else None
        if issubclass(type(value), torch.Tensor) and value.dim() and is_size(value.shape[0]):
            return value.shape[0]
        return len(*args)

    return {"float": as_float, "int": as_int, "len": as_len}


def only_calling(
    tables: Iterable[dict[str, Any]], code: Mapping[types.CodeType, dict[str, Any]], name: str
) -> list[dict[str, Any]]:
    """The globals whose functions do nothing with a builtin but call it. In others, such as those
    of a function that asks `isinstance(x, float)`, no function may stand for the class.

    Args:
        tables: globals of the user's functions.
        code: of all functions that the step reaches, each with its globals.
    """
    by_identity = {id(table): table for table in tables} if _MARKS_CALLS else {}
    for one, table in code.items():
        if id(table) in by_identity and _is_value(one, name):
            del by_identity[id(table)]
    return [
        table
        for table in by_identity.values()
        if not any(_is_value(one, name) for one in _code(table))
    ]


def _number(*args: Any) -> Any:
    value: Any = args[0] if len(args) == 1 else None
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    return value.item() if is_one else value


def _code(table: dict[str, Any]) -> Iterator[types.CodeType]:
    """The code of the functions with these globals, and of those that their classes define."""
    for value in list(table.values()):
        is_class = issubclass(type(value), type)
        for part in dictionary_of(value).values() if is_class else (value,):
            function: Any = part
            if issubclass(type(part), (staticmethod, classmethod)):
                function = member_of(part, "__func__")
            elif issubclass(type(part), property):
                function = member_of(part, "fget")
            if type(function) is types.FunctionType and function.__globals__ is table:
                yield function.__code__


def _is_value(code: types.CodeType, name: str) -> bool:
    """Whether code, or a function in it, loads a global for anything but a call."""
    return any(
        one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        and one.argval == name
        and not (one.opname == "LOAD_GLOBAL" and one.arg is not None and one.arg & 1)
        for part in nested_code(code)
        if name in part.co_names
        for one in instructions_of(part)
    )


__all__ = ["conversions", "only_calling"]
