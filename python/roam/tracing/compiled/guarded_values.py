"""What the code that Dynamo has made of a function depends on, apart from tensors: the values that
it compares before it runs that code, wherever they are.

Dynamo names each place by an expression of Python. It is evaluated here without any code of the
user's, and unnoticed by what watches reads of attributes.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch

from roam.state.equality import MISSING, same
from roam.state.library_code import is_library
from roam.state.live_scalars import is_live
from roam.torch_compat.private import guarded_places

Guarded = list[tuple[ast.expr, tuple[type, object], list[Callable[[Any], bool]]]]
"""For each place, the expression that names it, what is compared of the value there, and Dynamo's
own checks of that value.
"""


def guarded_by(guards: Any, view: Any) -> Guarded:
    """What Dynamo's code depends on, as it is now.

    Args:
        guards: the `guard_manager` of the code.
        view: the call, with `f_locals` and `f_globals`.
    """
    guarded: Guarded = []
    for source, checks in guarded_places(guards).items():
        expression = ast.parse(source, mode="eval").body
        seen = _compared(_held(expression, view))
        if seen is not None:
            guarded.append((expression, seen, checks))
    return guarded


def changes_since(guarded: Guarded, view: Any) -> Iterator[str]:
    """The places whose value is another one now and is not accepted by Dynamo's checks, in a trace
    of a step; numbers that are recorded are left out.
    """
    for source, before, checks in guarded:
        value = _held(source, view)
        now = _compared(value)
        if same(before, now) or (now is None and is_live(value)):
            continue
        if value is MISSING or not all(check(value) for check in checks):
            yield _shown(source)


class _NotFoundError(Exception):
    """Nothing is there, or it cannot be told what."""


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def _held(source: ast.expr, view: Any) -> Any:
    """The value at a place; `MISSING` if nothing is there, or if it cannot be told."""
    try:
        return _value(source, view)
    except _NotFoundError:
        return MISSING


def _compared(value: Any) -> tuple[type, object] | None:
    """What is compared of a value; None for a value that cannot be compared."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is FunctionType or isinstance(value, type):
        return None if is_library(value.__module__) else (kind, id(value))
    if kind is CodeType:
        return kind, id(value)
    if kind in (list, tuple, set) or isinstance(value, dict):
        return kind, len(value)
    return None


def _value(source: ast.expr, view: Any) -> Any:
    match source:
        case ast.Constant(value):
            return value
        case ast.Name("L"):
            return view.f_locals
        case ast.Name("G"):
            return view.f_globals
        case ast.Subscript(of, place):
            return _item(_value(of, view), _value(place, view))
        case ast.Attribute(of, name):
            return _attribute(_value(of, view), name)
        case ast.Call(ast.Name("type"), [of]):
            return type(_value(of, view))
        case ast.Call(ast.Attribute(ast.Name("dict"), "__getitem__"), [of, place]):
            return _item(_value(of, view), _value(place, view))
    raise _NotFoundError


def _item(value: Any, place: Any) -> Any:
    try:
        if isinstance(value, dict):
            return dict.__getitem__(value, place)
        if type(value) in (list, tuple):
            return value[place]
    except (LookupError, TypeError):
        pass
    raise _NotFoundError


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor):
        raise _NotFoundError
    # A capture replaces the code of some functions itself.
    if name == "__code__" and is_library(getattr(value, "__module__", None)):
        raise _NotFoundError
    try:
        if name == "__dict__" or type(value) in (FunctionType, MethodType, CellType):
            return object.__getattribute__(value, name)
        found = inspect.getattr_static(value, name)
    except (AttributeError, ValueError):  # an empty cell
        raise _NotFoundError from None
    if type(found) in (staticmethod, classmethod):
        return found.__func__
    if type(found) in (MemberDescriptorType, GetSetDescriptorType) and not isinstance(value, type):
        try:
            return found.__get__(value)
        except AttributeError:
            raise _NotFoundError from None
    if isinstance(found, property) and not isinstance(value, (type, ModuleType)):
        raise _NotFoundError
    return found


def _shown(source: ast.expr) -> str:
    """A place as the user would write it."""
    text = ast.unparse(source)
    for names in ("L", "G"):
        prefix = f"{names}['"
        if text.startswith(prefix):
            name, _, rest = text.removeprefix(prefix).partition("']")
            text = name + rest
    return text
