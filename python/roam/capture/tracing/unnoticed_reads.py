"""How code may read a plain value although nothing asks a stand-in for it: it compares objects by
identity, catches what a function written in C says of any wrong value, calls a comparison of such a
class as a method, or leaves the work to another thread.
"""

from __future__ import annotations

import builtins
import dis
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple

from roam.capture.tracing.source_location import is_written_by_user
from roam.state.library_code import instructions_of, is_installed, nested_code
from roam.state.value_stand_ins import is_or_stands_for_one

_COMPARISONS: Final = frozenset(
    {"__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__", "is_", "is_not"}
)
"""Names of functions that answer without asking a stand-in."""
_BLIND_TO_NUMBERS: Final = frozenset({"is_", "is_not", "suppress"})
"""Names of functions that compare by identity, or catch exceptions."""
_LOADS: Final = ("LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME")
_RAISES: Final = frozenset(dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE"))
_TO_THREADS: Final = (
    ThreadPoolExecutor.submit.__code__,
    threading.Condition.notify.__code__,
    threading.Condition.wait.__code__,
    threading.Thread.start.__code__,
)
_OF_CONTROL: Final = (
    AttributeError,
    GeneratorExit,
    ImportError,
    IndexError,
    KeyError,
    StopAsyncIteration,
    StopIteration,
)
"""Exceptions that no function written in C raises both for a wrong value and for a wrong class."""


class Ways(NamedTuple):
    """In which ways code may read values unnoticed.

    Attributes:
        code: the code.
        is_users: whether it is the user's, also what he gives to `exec` or to `python -c`.
        when_run: whether it may read some as soon as it runs.
        identity_tests: the tests with `is` whose right side may be a plain value, by their places
            in the code. For each, how its right side is loaded: by a name (None for anything else),
            and by attributes that are taken from what has this name.
    """

    code: CodeType
    is_users: bool
    when_run: bool
    identity_tests: dict[int, tuple[str | None, tuple[str, ...]]]


_ways: Final[dict[int, Ways]] = {}
"""Those of code, by its identity: the hash of code is that of all that is in it."""
_identity = id  # while a step is traced, its code gets another function for it


def ways_of(code: CodeType) -> Ways:
    """In which ways code may read values unnoticed."""
    known = _ways.get(_identity(code))
    if known is None:
        is_users = is_written_by_user(code)
        known = _ways[_identity(code)] = Ways(
            code,
            is_users,
            not _COMPARISONS.isdisjoint(code.co_names)
            if is_users
            else any(code is other for other in _TO_THREADS),
            _identity_tests(code) if is_users else {},
        )
    return known


def may_read_by_identity(frame: FrameType) -> bool:
    """Whether the next instruction of a frame is a test with `is` whose right side is a plain
    value, or is not known.
    """
    load = ways_of(frame.f_code).identity_tests.get(frame.f_lasti)
    return load is not None and is_or_stands_for_one(type(_loaded(frame, *load)))


def may_miss_numbers(code: CodeType) -> bool:
    """Whether code of the user's own, or a function in it, may do something else with a live number
    than with the number although nothing asks for its value: it compares objects by identity, or
    catches what a function written in C says of any other class than Python's own numbers.
    Libraries do neither with what they are given.
    """
    return not is_installed(code.co_filename) and any(
        ways_of(part).is_users
        and (
            bool(ways_of(part).identity_tests)
            or not _BLIND_TO_NUMBERS.isdisjoint(part.co_names)
            or _catches_wrong_classes(part)
        )
        for part in nested_code(code)
    )


def _catches_wrong_classes(code: CodeType) -> bool:
    """Whether code has a handler for the exceptions that tell of an object of a wrong class."""
    instructions = instructions_of(code)
    handlers = {test.argval for test in instructions if test.opname == "SETUP_FINALLY"}
    for before, test in itertools.pairwise(instructions):
        if test.opname in {"CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"}:
            is_named = before.opname in {"LOAD_GLOBAL", "LOAD_NAME"}
            caught = getattr(builtins, before.argval, None) if is_named else None
            if not isinstance(caught, type) or any(
                issubclass(kind, caught) for kind in (AttributeError, TypeError)
            ):
                return True
        elif (
            test.opname == "CHECK_EG_MATCH"
            or test.opname == "POP_TOP"
            and (  # `except:`
                before.opname == "PUSH_EXC_INFO" or test.offset in handlers
            )
        ):
            return True
    return False


def may_read_by_raising(frame: FrameType, kind: type, traceback: Any) -> bool:
    """Whether a function written in C, called by code of the user's, may have raised an exception
    for a value as for a stand-in.
    """
    return (
        not issubclass(kind, _OF_CONTROL)
        and (traceback is None or traceback.tb_next is None)
        and ways_of(frame.f_code).is_users
        and frame.f_code.co_code[frame.f_lasti] not in _RAISES
    )


def _identity_tests(code: CodeType) -> dict[int, tuple[str | None, tuple[str, ...]]]:
    """The tests with `is` in code; see `Ways.identity_tests`."""
    found: dict[int, tuple[str | None, tuple[str, ...]]] = {}
    instructions = instructions_of(code)
    for place, test in enumerate(instructions):
        if test.opname != "IS_OP":
            continue
        attributes: list[str] = []
        place -= 1
        # Where code jumps to, other code may have loaded the value, as in `a if b else c`.
        is_certain = not test.is_jump_target
        while (load := instructions[place]).opname == "LOAD_ATTR":
            attributes.insert(0, load.argval)
            is_certain = is_certain and not load.is_jump_target
            place -= 1
        is_constant = is_certain and load.opname == "LOAD_CONST"
        if is_constant and not is_or_stands_for_one(type(load.argval)):
            continue
        is_certain = is_certain and load.opname in _LOADS
        found[test.offset] = load.argval if is_certain else None, tuple(attributes)
    return found


def _loaded(frame: FrameType, name: str | None, attributes: tuple[str, ...]) -> Any:
    """What an instruction has loaded, or text if that is not known."""
    if name is None:
        return ""
    value: Any = ""
    for names in (frame.f_locals, frame.f_globals, vars(builtins)):
        if name in names:
            value = names[name]
            break
    for attribute in attributes:
        is_holder = issubclass(type(value), (ModuleType, type)) or attribute == "__class__"
        value = getattr(value, attribute, "") if is_holder else ""
    return value


__all__ = [
    "Ways",
    "may_miss_numbers",
    "may_read_by_identity",
    "may_read_by_raising",
    "ways_of",
]
