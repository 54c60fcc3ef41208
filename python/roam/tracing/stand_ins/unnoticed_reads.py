"""How code may read a value although nothing asks what stands for it: it compares objects by
identity, or catches what a function written in C says of any other class.
"""

from __future__ import annotations

import builtins
import dis
import itertools
from types import CodeType
from typing import Final

from roam.state.library_code import instructions_of, is_installed, nested_code
from roam.tracing.source_location import is_written_by_user

_BLIND: Final = frozenset({"is_", "is_not", "suppress"})
"""Names of functions that compare by identity, or catch exceptions."""
_CONSTANTS: Final = (int, str, bytes)


def may_miss(code: CodeType) -> bool:
    """Whether code of the user's own, or a function in it, may do something else with what stands
    for a value than with the value although nothing asks for it. Libraries do not.
    """
    return not is_installed(code.co_filename) and any(
        is_written_by_user(part)
        and (
            not _BLIND.isdisjoint(part.co_names)
            or _tests_identity(part)
            or _catches_wrong_classes(part)
        )
        for part in nested_code(code)
    )


def _tests_identity(code: CodeType) -> bool:
    """Whether code has a test with `is` whose right side may be a plain value."""
    return any(
        test.opname == "IS_OP"
        and (
            test.is_jump_target  # as in `a if b else c`
            or not _loads_no_value(before)
        )
        for before, test in itertools.pairwise(instructions_of(code))
    )


def _loads_no_value(load: dis.Instruction) -> bool:
    """Whether an instruction loads None or its like, or one of Python's own classes."""
    if load.opname == "LOAD_GLOBAL":
        return isinstance(getattr(builtins, load.argval, None), type)
    return load.opname == "LOAD_CONST" and type(load.argval) not in _CONSTANTS


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
