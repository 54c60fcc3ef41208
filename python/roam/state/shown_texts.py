"""Whether a text is but the message of a check, read off the source while the text is made."""

from __future__ import annotations

import ast
import functools
import sys
from types import FrameType
from typing import Any

import torch

from roam.own_code import is_own_file
from roam.state.library_code import instructions_of
from roam.state.source_places import Extent, extent_of, place_of, tree_of
from roam.torch_compat.private import assert_that


def is_unread() -> bool:
    """Whether the text of a size, which is asked for now, is but in the message of a check that
    passes, `torch._assert(x.dim() == 3, f"got {x.shape}")`. Python makes it before the check.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename == torch.__file__
    ):
        frame = frame.f_back
    place = None if frame is None else place_of(frame)
    if frame is None or place is None:
        return False
    name = next(
        one.opname for one in reversed(instructions_of(frame.f_code)) if one.offset <= frame.f_lasti
    )
    if not name.startswith(("FORMAT_", "CONVERT_")):
        return False
    # The instructions for an f-string have its own place before Python 3.12, and those of its parts
    # later.
    return any(
        _is_inside(place, text) and _named(frame, call.func) is assert_that
        for text, call in _texts(frame.f_code.co_filename)
    )


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
        if isinstance(text, ast.JoinedStr)
    ]


def _is_inside(place: Extent, node: ast.JoinedStr) -> bool:
    line, end_line, column, end_column = place
    first, last, start, end = extent_of(node)
    return (first, start) <= (line, column) and (end_line, end_column) <= (last, end)
