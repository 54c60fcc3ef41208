"""Lists of a step's state to which the step only adds, as `losses.append(loss.item())` does.

Such a list stays in its place while a step is traced. What the trace adds is recorded beside the
step's result, and each run adds the like. Nobody compares what is in the list, so the step must not
look at it: each instruction that takes the list out of its place, or out of a dictionary there, has
to be followed by a call of its `append`. Code that finds values in other ways is told by the names
in it. Whatever else is done with a list makes it one like any other.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

from roam.state.library_code import instructions_of, is_installed, nested_code

_TAKES: Final = frozenset(
    {
        *("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"),
        *("LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS"),
    }
)
"""Instructions that take a value by the name of a variable that is not local."""
_NO_KEYS: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_NOTHING: Final = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL"})
_FINDS: Final = frozenset(
    {
        "__closure__", "__globals__", "_current_frames", "_getframe", "cell_contents", "currentframe", "eval", "exec", "f_back",
        "f_globals", "f_locals", "get_objects", "get_referents", "get_referrers", "getargvalues", "getclosurevars", "globals",
        "import_module", "locals", "vars",
    }
)  # fmt: skip
"""What code names that finds values where no walk over a step's state does."""


@dataclass(frozen=True, slots=True)
class Growing:
    """A list that the step adds to."""

    path: str
    container: list[Any]


def has_grown(container: Any, before: Sequence[Any]) -> bool:
    """Whether a list, which held other values before, has only got more at its end."""
    return (
        type(container) is list
        and len(container) > len(before)
        and all(map(operator.is_, container, before))
    )


def may_find(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Whether code of the user's may find a value by a name that it computes; `names` are its
    globals.
    """
    return not is_installed(code.co_filename) and any(
        not _FINDS.isdisjoint(part.co_names)
        or ("modules" in part.co_names and _names(part, names, sys))
        or _names(part, names, sys.modules)
        for part in nested_code(code)
    )


def _names(code: CodeType, names: Mapping[str, Any], wanted: object) -> bool:
    """Whether code names something, maybe by an import of its own."""
    is_imported = wanted is sys and "sys" in code.co_names
    return is_imported or any(names.get(name) is wanted for name in code.co_names)


def only_appends(code: CodeType, name: str, *, is_held: bool) -> bool:
    """Whether code takes a list by a name only to append to it.

    Args:
        name: of a global, or of a variable that the code closes over.
        is_held: whether the list is an entry of a dictionary, which has this name.
    """
    return all(
        _appends(found[place + 1 :], is_held)
        for part in nested_code(code)
        for found in [_instructions(part)]
        for place, one in enumerate(found)
        if one.opname in _TAKES and one.argval == name
    )


def appends_next(frame: FrameType, *, is_held: bool) -> bool:
    """The same of what a frame is taking now."""
    return _appends(
        [one for one in _instructions(frame.f_code) if one.offset > frame.f_lasti], is_held
    )


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [one for one in instructions_of(code) if one.opname not in _NOTHING]


def _appends(rest: Sequence[dis.Instruction], is_held: bool) -> bool:
    """Whether instructions begin with a call of `append`; if `is_held`, of an entry."""
    if is_held:
        if len(rest) < 3 or not rest[0].opname.startswith("LOAD_") or rest[0].opname in _NO_KEYS:
            return False
        is_subscript = rest[1].opname == "BINARY_SUBSCR" or rest[1].argrepr == "[]"
        rest = rest[2:] if is_subscript else ()
    if not rest or rest[0].argval != "append":
        return False
    is_call = rest[0].opname == "LOAD_ATTR" and rest[0].arg is not None and rest[0].arg & 1
    return rest[0].opname == "LOAD_METHOD" or bool(is_call)
