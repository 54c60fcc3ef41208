"""Where code is in its source: what a frame calculates now, as an expression of its file."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from types import FrameType
from typing import Any

from roam.state.library_code import instructions_of

Extent = tuple[Any, ...]
"""First and last line, first and last column."""
_ONLY_ASKS = frozenset({"TO_BOOL", "UNARY_NOT", "COPY", "EXTENDED_ARG", "NOP", "CACHE"})


def extent_of(node: Any) -> Extent:
    """Where an expression is in its file."""
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def place_of(frame: FrameType) -> Extent | None:
    """Where the expression is whose value a frame asks for; None before Python 3.11."""
    if sys.version_info < (3, 11):
        return None
    found: Any = None
    for instruction in instructions_of(frame.f_code):
        if instruction.offset > frame.f_lasti:
            break
        # A jump asks for what was put on the stack before it, and stands for more in the source
        # than that.
        if "JUMP" not in instruction.opname and instruction.opname not in _ONLY_ASKS:
            found = instruction.positions
    if found is None or found.col_offset is None:
        return None
    return found.lineno, found.end_lineno, found.col_offset, found.end_col_offset


@functools.lru_cache(maxsize=64)
def tree_of(file: str) -> ast.AST:
    """A file's source; an empty module if there is none."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])
