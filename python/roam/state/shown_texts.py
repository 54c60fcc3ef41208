"""Which call of `print` or of a logger is given a text, read off the source while the text is made.

A trace does not know the numbers that a text shows. It may put marks in their places if nothing but
the call can read the text: an f-string that is one of its arguments.
"""

from __future__ import annotations

import ast
import functools
import sys
from types import FrameType
from typing import Any, Final

import torch

from roam.own_code import is_own_file
from roam.state.library_code import instructions_of
from roam.state.source_places import Extent, extent_of, place_of, tree_of
from roam.torch_compat.private import assert_that

_USES: Final = frozenset(
    {"print", "critical", "debug", "error", "fatal", "info", "log", "warn", "warning"}
)
"""Names of the functions and methods that show texts."""


def call_shown(frame: FrameType) -> Extent | None:
    """The extent, in the source, of the call that is given the text which a frame is making; None
    if something else may read the text.

    Args:
        frame: its present instruction asks a number for its text.
    """
    call = _call_given(frame)
    if call is None:
        return None
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return extent_of(call) if name in _USES else None


def is_unread() -> bool:
    """Whether the text of a size, which is asked for now, is but in the message of a check that
    passes, `torch._assert(x.dim() == 3, f"got {x.shape}")`. Python makes it before the check.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename == torch.__file__
    ):
        frame = frame.f_back
    call = None if frame is None else _call_given(frame)
    return call is not None and _named(frame, call.func) is assert_that


def _call_given(frame: FrameType) -> ast.Call | None:
    """The call that alone is given the f-string which a frame is making now."""
    place = place_of(frame)
    if place is None:
        return None
    name = next(
        one.opname for one in reversed(instructions_of(frame.f_code)) if one.offset <= frame.f_lasti
    )
    if not name.startswith(("FORMAT_", "CONVERT_")):
        return None
    # The instructions for an f-string have its own place before Python 3.12, and those of its parts
    # later.
    found = _texts(frame.f_code.co_filename)
    return next((call for text, call in found if _is_inside(place, text)), None)


def _named(frame: Any, function: ast.expr) -> Any:
    """What a name, or an attribute of a module, stands for in a frame."""
    if isinstance(function, ast.Name) and function.id not in frame.f_locals:
        return frame.f_globals.get(function.id)
    if isinstance(function, ast.Attribute):
        return getattr(_named(frame, function.value), function.attr, None)
    return None


@functools.lru_cache(maxsize=64)
def _texts(file: str) -> list[tuple[ast.JoinedStr, ast.Call]]:
    """The f-strings of a file that are made for nothing but a call."""
    return [
        (text, call)
        for call in ast.walk(tree_of(file))
        if isinstance(call, ast.Call)
        for text in call.args
        if isinstance(text, ast.JoinedStr) and all(map(_is_plain, text.values))
    ]


def _is_plain(part: ast.AST) -> bool:
    """Whether a part of an f-string takes the text of a value as it is, and no other f-string is in
    it.
    """
    if not isinstance(part, ast.FormattedValue):
        return True
    form: Any = part.format_spec
    return (
        part.conversion in (-1, ord("s"), ord("r"))
        and (form is None or part.conversion == -1)
        and not any(isinstance(inner, ast.JoinedStr) for inner in ast.walk(part.value))
        and all(isinstance(inner, ast.Constant) for inner in getattr(form, "values", ()))
    )


def _is_inside(place: Extent, node: ast.JoinedStr) -> bool:
    line, end_line, column, end_column = place
    first, last, start, end = extent_of(node)
    return (first, start) <= (line, column) and (end_line, end_column) <= (last, end)
