"""Texts that nobody reads: the message of a check that passes, `torch._assert(x.dim() == 3, f"got
{x.shape}")`. Python makes it before the check, so it may hold what differs from call to call.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from types import CodeType, FrameType
from typing import Any

import torch

from roam.own_code import is_own_file
from roam.torch_compat.private import assert_that

_TORCH = torch.__file__
_PARTS = (
    ast.JoinedStr, ast.FormattedValue, ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.BinOp,
    ast.operator, ast.expr_context, ast.Slice, ast.UnaryOp, ast.unaryop,
)  # fmt: skip
"""What a message may consist of: nothing in it is handed a text."""


def is_unread() -> bool:
    """Whether the text of a number, which is asked for now, is in nothing but such a message."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename == _TORCH
    ):
        frame = frame.f_back
    if frame is None or sys.version_info < (3, 11):
        return False
    at = _positions(frame.f_code)[frame.f_lasti // 2]
    for message, function in _messages(frame.f_code.co_filename):
        if _is_inside(at, message) and _named(frame, function) is assert_that:
            return True
    return False


@functools.lru_cache(maxsize=64)
def _positions(code: CodeType) -> list[Any]:
    return list(code.co_positions())  # type: ignore[attr-defined, unused-ignore]


@functools.lru_cache(maxsize=64)
def _messages(file: str) -> list[tuple[ast.JoinedStr, ast.expr]]:
    """Formatted texts that are the second argument of a call whose result nobody takes, each with
    the function.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [
        (call.args[1], call.func)
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call)
        if len(call.args) == 2 and not call.keywords
        if isinstance(call.args[1], ast.JoinedStr) and _is_plain(call.args[1])
    ]


def _is_plain(message: ast.JoinedStr) -> bool:
    parts = list(ast.walk(message))
    return all(isinstance(part, _PARTS) for part in parts) and all(
        part is message or all(isinstance(value, ast.Constant) for value in part.values)
        for part in parts
        if isinstance(part, ast.JoinedStr)
    )


def _is_inside(at: tuple[int | None, ...], node: Any) -> bool:
    line, end_line, column, end_column = at
    if line is None or end_line is None or column is None or end_column is None:
        return False
    starts = (node.lineno, node.col_offset) <= (line, column)
    return starts and (end_line, end_column) <= (node.end_lineno, node.end_col_offset)


def _named(frame: FrameType, function: ast.expr) -> Any:
    """What a name, or an attribute of a module, stands for in a frame."""
    if isinstance(function, ast.Name) and function.id not in frame.f_locals:
        return frame.f_globals.get(function.id)
    if isinstance(function, ast.Attribute):
        return getattr(_named(frame, function.value), function.attr, None)
    return None
