"""Which call of `print` or of a logger is given a text, read off the source while the text is made.

A trace does not know the numbers that a text shows. It may put marks in their places if nothing but
the call can read the text, which is one of its arguments, made by an f-string, by `str.format`, by
the operator ``%`` with a literal on its left, by `str`, or by adding such texts.
"""

from __future__ import annotations

import ast
import functools
import re
import string
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
CONVERSION: Final = re.compile(r"%(?:\([^()%]*\))?(-?[0-9]*(?:\.[0-9]+)?[diueEfFgG]|[srd%])")
"""What the operator ``%`` puts a value in the place of: a number, or a text as it is."""


def call_shown(frame: FrameType, *, is_number: bool) -> tuple[Extent, str] | None:
    """The extent, in the source, of the call that is given the text which a frame is making, and
    the left side of the operator ``%`` that makes it; None if something else may read the text.

    Args:
        frame: its present instruction asks a number for its text.
        is_number: whether the operator ``%`` asks for the number instead.
    """
    found = _text_made(frame)
    if found is None or (is_number and not found[1]):
        return None
    _, form, call = found
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return (extent_of(call), form) if name in _USES else None


def is_unread() -> bool:
    """Whether the text of a size, which is asked for now, is but in the message of a check that
    passes, `torch._assert(x.dim() == 3, f"got {x.shape}")`. Python makes it before the check.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename == torch.__file__
    ):
        frame = frame.f_back
    found = None if frame is None else _text_made(frame)
    return found is not None and _named(frame, found[2].func) is assert_that


def _text_made(frame: FrameType) -> tuple[ast.expr, str, ast.Call] | None:
    """The expression that makes a text now, as in `_texts`."""
    place = place_of(frame)
    if place is None:
        return None
    name = next(
        one.opname for one in reversed(instructions_of(frame.f_code)) if one.offset <= frame.f_lasti
    )
    for text in _texts(frame.f_code.co_filename):
        node = text[0]
        # The instructions for an f-string have its own place before Python 3.12, and those of its
        # parts later.
        is_here = (
            name.startswith(("FORMAT_", "CONVERT_")) and _is_inside(place, node)
            if isinstance(node, ast.JoinedStr)
            else name.startswith("BINARY_" if isinstance(node, ast.BinOp) else "CALL")
            and place == extent_of(node)
        )
        if is_here:
            return text
    return None


def _named(frame: Any, function: ast.expr) -> Any:
    """What a name, or an attribute of a module, stands for in a frame."""
    if isinstance(function, ast.Name) and function.id not in frame.f_locals:
        return frame.f_globals.get(function.id)
    if isinstance(function, ast.Attribute):
        return getattr(_named(frame, function.value), function.attr, None)
    return None


@functools.lru_cache(maxsize=64)
def _texts(file: str) -> list[tuple[ast.expr, str, ast.Call]]:
    """The expressions of a file that make texts for nothing but a call; each with the left side of
    the operator ``%``, if it is one.
    """
    return [
        (node, form, call)
        for call in ast.walk(tree_of(file))
        if isinstance(call, ast.Call)
        for argument in call.args
        for node, form in _made(argument) or ()
    ]


def _made(node: ast.expr) -> list[tuple[ast.expr, str]] | None:
    """The expressions that make a text of others, and nothing else with it; None if something else
    may read it.
    """
    if isinstance(node, ast.Constant):
        return [] if type(node.value) is str else None
    if isinstance(node, ast.JoinedStr):
        return [(node, "")] if all(map(_is_plain, node.values)) else None
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Add):
            sides = _made(node.left), _made(node.right)
            return None if None in sides else [one for side in sides for one in side or ()]
        form = _literal(node.left)
        is_plain = isinstance(node.op, ast.Mod) and form and "%" not in CONVERSION.sub("", form)
        return [(node, form)] if is_plain else None
    if not isinstance(node, ast.Call) or any(
        isinstance(one, ast.Starred) or getattr(one, "arg", "") is None
        for one in (*node.args, *node.keywords)
    ):
        return None
    if isinstance(node.func, ast.Attribute):
        form = _literal(node.func.value)
        is_plain = node.func.attr == "format" and form and _is_format_plain(form)
    else:
        is_plain = getattr(node.func, "id", "") == "str" and len(node.args) == 1
    return [(node, "")] if is_plain else None


def _literal(node: ast.expr) -> str:
    is_text = isinstance(node, ast.Constant) and type(node.value) is str
    return node.value if is_text else ""  # type: ignore[attr-defined]


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


def _is_format_plain(form: str) -> bool:
    try:
        parts = list(string.Formatter().parse(form))
    except ValueError:
        return False
    return all(
        conversion in (None, "s", "r") and not (conversion and spec) and "{" not in (spec or "")
        for _, _, spec, conversion in parts
    )


def _is_inside(place: Extent, node: ast.JoinedStr) -> bool:
    line, end_line, column, end_column = place
    first, last, start, end = extent_of(node)
    return (first, start) <= (line, column) and (end_line, end_column) <= (last, end)


__all__ = ["CONVERSION", "call_shown", "is_unread"]
