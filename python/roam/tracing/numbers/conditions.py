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
from types import CodeType, FrameType
from typing import Any

from roam.own_code import is_own_file
from roam.state.library_code import is_library
from roam.state.source_places import extent_of, place_of, tree_of
from roam.tracing.source_location import is_torch_file, is_user_code, shown_path

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


def finite_answer() -> bool | None:
    """What the condition that asks now says of finite numbers; None if it does not ask about
    that alone.
    """
    condition = _condition()
    return None if condition is None else _where_finite(condition[0][0])


def idle_answer() -> bool:
    """The answer with which the condition that asks now is false, as far as the source shows. A
    loop ends with this answer.
    """
    condition = _condition()
    answer = (
        None if condition is None else _answer(condition[0], isinstance(condition[1], ast.Assert))
    )
    return bool(answer)


def loop_of(root: CodeType) -> str | None:
    """The lines of the innermost loop that runs now and that values may end, and of the user's
    code that calls it; None if there is none, or only PyTorch's own. Code of `root` calls the step.
    """
    frame: FrameType | None = sys._getframe(1)
    loop = ""
    while frame is not None and frame.f_code is not root:
        code, name = frame.f_code, frame.f_globals.get("__name__")
        if not loop and not is_own_file(code.co_filename) and not is_torch_file(code.co_filename):
            around = [
                first for first, last in _loops(code.co_filename) if first <= frame.f_lineno <= last
            ]
            if around and code.co_firstlineno <= max(around):
                loop = f"{shown_path(code.co_filename)}:{max(around)}"
        if loop and is_user_code(code) and not is_library(name):
            line = f"{shown_path(code.co_filename)}:{frame.f_lineno}"
            is_users = loop.startswith(f"{shown_path(code.co_filename)}:")
            return loop if is_users else f"{loop} (which {line} calls)"
        frame = frame.f_back
    return loop or None


@functools.lru_cache(maxsize=64)
def _loops(file: str) -> list[tuple[int, int]]:
    """The first and last line of each loop of a file that may end before its items do."""
    return [
        (statement.lineno, statement.end_lineno or statement.lineno)
        for statement in ast.walk(tree_of(file))
        if isinstance(statement, ast.While)
        or (isinstance(statement, ast.For) and any(map(_leaves, statement.body)))
    ]


def _leaves(statement: ast.AST, *, is_inner: bool = False) -> bool:
    """Whether a statement of a loop may end the loop."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    if isinstance(statement, ast.Return) or (isinstance(statement, ast.Break) and not is_inner):
        return True
    is_inner = is_inner or isinstance(statement, (ast.For, ast.While))
    return any(_leaves(part, is_inner=is_inner) for part in ast.iter_child_nodes(statement))


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


__all__ = ["finite_answer", "idle_answer", "loop_of", "passing_answer"]
