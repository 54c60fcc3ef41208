"""Checks: reads off the source with which answer a condition does not end in an error.

If one answer ends in an error (`assert not torch.isnan(loss)`, the validation of a distribution's
arguments), the plan is for the other answer. Which answer that is, is read from the source. The
branch that ends in an error is never run at capture, since it may write files. A condition that is
no such check is refused.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from roam.own_code import is_own_file
from roam.state.source_places import extent_of, place_of, tree_of

_ASK_SEVERAL = {"all", "any", "max", "min", "next", "sorted"}
_EXITS = {"sys.exit", "os._exit", "exit", "quit"}


def passing_answer() -> bool | None:
    """The answer with which the check that asks now passes; None if the code goes on with either
    answer, or is not a check.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    path = [] if frame is None else _path(frame)
    if not path or _called(path[0]) in _ASK_SEVERAL:
        return None
    paths = [path]
    while isinstance(path[-1], ast.Return):  # whoever has called decides
        assert frame is not None
        name, frame = frame.f_code.co_name, frame.f_back
        path = [] if frame is None else _path(frame)
        if not path or _called(path[0]).removeprefix(".") != name:
            return None
        paths.append(path)
    answer = _passes(path[-1])
    for *tests, _ in reversed(paths):
        for part, test in reversed(list(itertools.pairwise([None, *tests]))):
            answer = None if answer is None else _needed(part, test, wanted=answer)
    return answer


def _called(expression: ast.AST) -> str:
    """The name of the function that an expression calls, or ".name" of a method; "" for any
    other.
    """
    function = getattr(expression, "func", None)
    if isinstance(function, ast.Attribute):
        return f".{function.attr}"
    return str(getattr(function, "id", ""))


def _needed(part: ast.AST | None, test: Any, *, wanted: bool) -> bool | None:
    """What a part of a test has to be for the test to be as wanted; None if that depends on other
    parts as well.

    Args:
        part: None for what the test itself asks.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return not wanted
    if isinstance(test, ast.BoolOp):
        # Either all have to be the same, or those before the last have left it to decide.
        decides = isinstance(test.op, ast.And) is wanted or part is test.values[-1]
    else:
        decides = part is None or _called(test) == "bool"
    return wanted if decides else None


def _path(frame: FrameType) -> list[ast.AST]:
    """The innermost expression that a frame is at, and all around it up to a statement."""
    place = place_of(frame)
    paths = _expressions(frame.f_code.co_filename).get(frame.f_lineno, [])
    if place is None:  # the whole test, where nothing in it tells its parts apart
        path = min(paths, key=len, default=[])
        return path if path and not isinstance(path[0], ast.BoolOp) else []
    there = [path for path in paths if place == extent_of(path[0])]
    return max(there, key=len, default=[])


@functools.lru_cache(maxsize=64)
def _expressions(file: str) -> dict[int, list[list[ast.AST]]]:
    """Per line of a file the expressions that span it inside of assertions, conditions and returns,
    each with what is around it.
    """
    found: dict[int, list[list[ast.AST]]] = {}
    for statement in ast.walk(tree_of(file)):
        is_return = isinstance(statement, ast.Return)
        test = getattr(statement, "value" if is_return else "test", None)
        if not isinstance(statement, (ast.Assert, ast.If, ast.Return)) or test is None:
            continue
        for path in _paths(test, [statement]):
            node: Any = path[0]
            for line in range(node.lineno, node.end_lineno + 1):
                found.setdefault(line, []).append(path)
    return found


def _paths(node: ast.expr, around: list[ast.AST]) -> Iterator[list[ast.AST]]:
    path: list[ast.AST] = [node, *around]
    yield path
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _paths(child, path)


def _passes(statement: ast.AST) -> bool | None:
    """The outcome of a statement's test with which its code goes on; None if it goes on either
    way.
    """
    if isinstance(statement, ast.Assert):
        return True
    assert isinstance(statement, ast.If)
    ends, others_end = _ends(statement.body), _ends(statement.orelse)
    return None if ends is others_end else others_end


def _ends(statements: list[ast.stmt]) -> bool:
    """Whether statements end in an error, or end the program."""
    last = statements[-1] if statements else None
    if isinstance(last, ast.If):
        return _ends(last.body) and _ends(last.orelse)
    if isinstance(last, ast.With):
        return _ends(last.body)
    is_exit = (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.Call)
        and ast.unparse(last.value.func) in _EXITS
    )
    return is_exit or isinstance(last, ast.Raise)
