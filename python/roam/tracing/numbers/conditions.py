"""Checks: reads off the source with which answer a condition does not end in an error.

If one answer ends in an error (`assert not torch.isnan(loss)`, the validation of a distribution's
arguments), the plan is for the other answer. Which answer that is, is read from the source. The
branch that ends in an error is never run at capture, since it may write files. If the code goes on
with either answer, the condition is a branch (`tracing/numbers/branch_answers.py`).
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

_EXITS = {"sys.exit", "os._exit", "exit", "quit"}
_KEEPS_TRUTH = {"bool", "any", "all"}
_FINITE = {"isfinite": True, "isnan": False, "isinf": False}
"""What these functions say of finite numbers."""


def passing_answer() -> bool | None:
    """The answer with which the check that asks now passes; None if the code goes on with either
    answer, or is not a check.
    """
    condition = _condition()
    passes = None if condition is None else _passes(condition[1])
    if condition is None or passes is None:
        return None
    answer = _answer(condition[0], passes)
    return _where_finite(condition[0][0]) if answer is None else answer


def _condition() -> tuple[list[ast.AST], ast.AST] | None:
    """The expression that asks now with all around it, and the statement whose condition they are;
    None if there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    around: list[ast.AST] = []
    while frame is not None:
        path = _path(frame)
        if not path or not all(
            _keeps_truth(parent, node) for node, parent in itertools.pairwise(path[:-1])
        ):
            return None
        around += path[:-1]
        if not isinstance(path[-1], ast.Return):
            return around, path[-1]
        frame = frame.f_back  # whoever has called decides
    return None


def _where_finite(node: ast.AST) -> bool | None:
    """What an expression that asks whether values are finite says where they are, as in most steps;
    None for any other.
    """
    parts = list(ast.walk(node))
    if any(isinstance(part, (ast.Compare, ast.UnaryOp)) for part in parts):
        return None
    functions = [part.func for part in parts if isinstance(part, ast.Call)]
    names = {getattr(function, "attr", getattr(function, "id", "")) for function in functions}
    answers = {_FINITE[name] for name in names & _FINITE.keys()}
    return answers.pop() if len(answers) == 1 else None


def _answer(around: list[ast.AST], wanted: bool | None) -> bool | None:
    """What the innermost part of a test has to be for the test to be as wanted; None if that
    depends on other parts as well.
    """
    for node in reversed(around):
        if wanted is None:
            return None
        if isinstance(node, ast.UnaryOp):
            wanted = not wanted
        elif (needs := _all_parts(node)) is not None and needs is not wanted:
            return None
    return wanted


def _all_parts(node: ast.AST) -> bool | None:
    """The value of an expression from which the values of all its parts follow, since they are the
    same: True for `and`, False for `or`; None for an expression without parts.
    """
    if isinstance(node, ast.BoolOp):
        return isinstance(node.op, ast.And)
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    return {"all": True, "any": False}.get(name)


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
    """Per line of a file the expressions that span it inside of assertions, conditions, loops and
    returns, each with what is around it.
    """
    found: dict[int, list[list[ast.AST]]] = {}
    for statement in ast.walk(tree_of(file)):
        test = (
            statement.value
            if isinstance(statement, ast.Return)
            else getattr(statement, "test", None)
        )
        if not isinstance(statement, (ast.Assert, ast.If, ast.While, ast.Return)) or test is None:
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
    if isinstance(statement, ast.While):
        return None
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


def _keeps_truth(parent: ast.AST, node: ast.AST) -> bool:
    """Whether what an expression says depends on a part of it as `_answer` knows."""
    if isinstance(parent, (ast.GeneratorExp, ast.ListComp)):
        return parent.elt is node
    if isinstance(parent, ast.Call):
        return (
            isinstance(parent.func, ast.Name)
            and parent.func.id in _KEEPS_TRUTH
            and node in parent.args
        )
    return (
        isinstance(parent, ast.BoolOp)
        or isinstance(parent, ast.UnaryOp)
        and isinstance(parent.op, ast.Not)
    )
