"""Which call of the user's code is given a text, found in the code while the text is being made.

A trace does not know the values that a text shows. It may put marks in their places if nothing but
the call to which the text goes can read it. So the instructions from the beginning of the statement
to that call are followed with names in place of values. Between the two, the text may only become a
part of longer texts. Anything that is not known here, such as a jump, ends the search.
"""

from __future__ import annotations

import bisect
import dis
import re
from types import FrameType
from typing import Any, Final, NamedTuple

from roam.state.library_code import instructions_of

_PUSH: Final = (
    "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "PUSH_NULL",
)  # fmt: skip
"""Beginnings of the names of instructions that only push."""
_SKIPPED: Final = ("CACHE", "NOP", "EXTENDED_ARG", "PRECALL", "KW_NAMES")
_POPS: Final = {
    "LOAD_ATTR": 1, "LOAD_METHOD": 1, "FORMAT_SIMPLE": 1, "CONVERT_VALUE": 1, "UNARY_NEGATIVE": 1, "UNARY_NOT": 1,
    "UNARY_POSITIVE": 1, "TO_BOOL": 1, "COMPARE_OP": 2, "IS_OP": 2, "CONTAINS_OP": 2, "FORMAT_WITH_SPEC": 2,
    "BINARY_SLICE": 3, "LIST_EXTEND": 1, "POP_TOP": 1, "STORE_FAST": 1,
}  # fmt: skip
_CALLS: Final = {
    "CALL_FUNCTION": (1, 0), "CALL_FUNCTION_KW": (1, 1), "CALL_METHOD": (2, 0), "CALL": (2, 0), "CALL_KW": (2, 1),
}  # fmt: skip
"""How many values lie below the arguments of a call, and how many above them."""
_ADDS: Final = ("BINARY_ADD", "INPLACE_ADD")
_CONVERSION: Final = re.compile(r"%(?:\([^%]*?\))?([-+ #0]*[0-9*]*(?:\.[0-9*]*)?[hlL]?[a-zA-Z]|%)")
"""What the operator ``%`` puts a value in the place of; without the sign and the key."""
_AS_IT_IS: Final = re.compile("%[hlL]?[sr]")
"""A conversion that leaves a text as it is."""
_MAKERS: Final = {"format": ("format",), "str": ("str",), "repr": ("repr", "str"), "number": ()}
"""By what asks a value for its text, the functions and methods that return this text as it is."""
_JUMPS: Final = frozenset([*dis.hasjrel, *dis.hasjabs])
_FINDS: Final = frozenset(
    {"locals", "vars", "eval", "exec", "dir", "f_locals", "_getframe", "currentframe"}
)
"""Names of what finds variables by a text."""
_MOST_INSTRUCTIONS: Final = 200


class _Name(NamedTuple):
    """Stands for a global or an attribute."""

    name: str


class _Constant(NamedTuple):
    value: Any


class _Text:
    """Stands for the text."""


class Use(NamedTuple):
    """A call that is given the text among its arguments.

    Attributes:
        offset: of its instruction.
        name: of the function or method.
        made_at: the offset of the instruction that makes the text.
        form: what is left of the operator ``%``, if this makes the text.
    """

    offset: int
    name: str
    made_at: int
    form: str


def conversions_in(form: str) -> list[str]:
    """The parts of what is left of the operator ``%``: text and conversions by turns. Each
    conversion takes its value from a tuple, as ``%.3f`` does; a key is left out.
    """
    parts = _CONVERSION.split(form)
    return [f"%{part}" if place % 2 else part for place, part in enumerate(parts)]


def use_of_text(frame: FrameType, asks: str) -> Use | None:
    """The call that is given the text which a frame is making, if nothing else reads this text.

    Args:
        frame: its present instruction asks a value for its text.
        asks: by ``format``, ``str``, or ``repr``; ``number`` if the operator ``%`` makes the text
            and asks for the number.
    """
    instructions = instructions_of(frame.f_code)
    here = _place(frame)
    for start in range(here, max(here - _MOST_INSTRUCTIONS, -1), -1):
        found = _followed(instructions, start, here, asks)
        if found is not None:
            return found
        if instructions[start].is_jump_target or instructions[start].opcode in _JUMPS:
            return None
    return None


def offset_of_call(frame: FrameType) -> int:
    """The offset of the instruction with which a frame is calling a function."""
    return instructions_of(frame.f_code)[_place(frame)].offset


def _place(frame: FrameType) -> int:
    """The index of the instruction that a frame has come to."""
    instructions = instructions_of(frame.f_code)
    offsets = [one.offset for one in instructions]
    place = bisect.bisect_right(offsets, frame.f_lasti) - 1  # which may be that of a cache
    while instructions[place].opname in _SKIPPED:  # Python 3.11 calls some functions early
        place += 1
    return place


def _followed(instructions: list[dis.Instruction], start: int, here: int, asks: str) -> Use | None:
    """What is given the text, if the instructions from a place on need no value from before it."""
    stack: list[Any] = []
    variable, form = None, ""
    for place in range(start, min(here + _MOST_INSTRUCTIONS, len(instructions))):
        one = instructions[place]
        if place > start and one.is_jump_target:
            return None
        if one.opname in _SKIPPED:
            continue
        argument = one.arg or 0
        if one.opname in _CALLS:
            below, above = _CALLS[one.opname]
            count = argument + below + above
            if count > len(stack):
                return None
            taken = stack[len(stack) - count :]
            name = next((part.name for part in taken[:below] if type(part) is _Name), None)
            if place > here and any(type(part) is _Text for part in taken[below:]):
                return (
                    None if name is None else Use(one.offset, name, instructions[here].offset, form)
                )
            del stack[len(stack) - count :]
            stack.append(None)
            if place == here:
                if name not in _MAKERS[asks]:
                    return None
                stack[-1] = _Text()
            continue
        pops = _pops(one)
        if pops is None or pops > len(stack):
            return None
        taken = stack[len(stack) - pops :]
        pushes = dis.stack_effect(one.opcode, one.arg, jump=False) + pops
        del stack[len(stack) - pops :]
        if place == here:
            if not _makes_text(one, taken, asks):
                return None
            if type(taken[0]) is _Constant:
                form = taken[0].value
            stack.append(_Text())
        elif one.opname == "STORE_FAST" and type(taken[0]) is _Text:
            if variable is not None or not _is_read_once(instructions, one.argval):
                return None
            variable = one.argval
        elif variable is not None and _loads(one, variable):
            if pushes != 1:
                return None
            stack.append(_Text())
            variable = None
        elif any(type(part) is _Text for part in taken):
            if not _passes_on(one, taken):
                return None
            stack.append(_Text())
        else:
            stack += _pushed(one, pushes)
    return None


def _loads(one: dis.Instruction, variable: str) -> bool:
    names = one.argval if type(one.argval) is tuple else (one.argval,)
    return one.opname.startswith(("LOAD_FAST", "LOAD_CLOSURE")) and variable in names


def _is_read_once(instructions: list[dis.Instruction], variable: str) -> bool:
    """Whether one instruction of a function reads a variable, and nothing else can find it."""
    others = ("LOAD_DEREF", "STORE_FAST_LOAD_FAST", "LOAD_FAST_AND_CLEAR")
    return (
        sum(_loads(one, variable) for one in instructions) == 1
        and not any(one.opname in others and variable in str(one.argval) for one in instructions)
        and _FINDS.isdisjoint(
            one.argval
            for one in instructions
            if one.opname.startswith(("LOAD_GLOBAL", "LOAD_ATTR"))
        )
    )


def _pops(one: dis.Instruction) -> int | None:
    name, argument = one.opname, one.arg or 0
    if name.startswith(_PUSH):
        return 0
    if name in ("BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_STRING", "BUILD_SLICE"):
        return argument
    if name == "BUILD_MAP":
        return 2 * argument
    if name == "BUILD_CONST_KEY_MAP":
        return argument + 1
    if name == "FORMAT_VALUE":
        return 2 if argument & 4 else 1
    return 2 if name.startswith(("BINARY_", "INPLACE_")) and name not in _POPS else _POPS.get(name)


def _pushed(one: dis.Instruction, count: int) -> list[Any]:
    if one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD"):
        name = one.argval if type(one.argval) is str else ""
        return [_Name(name), *[None] * (count - 1)]
    if one.opname == "LOAD_CONST":
        return [_Constant(one.argval)]
    return [None] * count


def _is(one: dis.Instruction, sign: str, names: tuple[str, ...]) -> bool:
    return one.opname in names or (one.opname == "BINARY_OP" and one.argrepr in (sign, f"{sign}="))


def _makes_text(one: dis.Instruction, taken: list[Any], asks: str) -> bool:
    """Whether an instruction gives the text of a value as the value itself gives it."""
    argument = one.arg or 0
    if _is(one, "%", ("BINARY_MODULO", "INPLACE_MODULO")):
        left = taken[0]
        return (
            type(left) is _Constant
            and type(left.value) is str
            and (
                asks == "number"
                or all(
                    one[-1] not in "sra" or _AS_IT_IS.fullmatch(one)
                    for one in conversions_in(left.value)[1::2]
                )
            )
        )
    if asks == "number":
        return False
    if one.opname == "FORMAT_VALUE":
        return argument & 3 != 3 and not (argument & 3 and argument & 4)
    if one.opname == "CONVERT_VALUE":
        return argument != 3
    return one.opname in ("FORMAT_SIMPLE", "FORMAT_WITH_SPEC")


def _passes_on(one: dis.Instruction, taken: list[Any]) -> bool:
    """Whether an instruction only makes the text, which it is given, a part of another one."""
    if one.opname == "FORMAT_VALUE":
        return (one.arg or 0) & 3 in (0, 1) and not (one.arg or 0) & 4
    return one.opname in ("BUILD_STRING", "FORMAT_SIMPLE") or _is(one, "+", _ADDS)


__all__ = ["Use", "conversions_in", "offset_of_call", "use_of_text"]
