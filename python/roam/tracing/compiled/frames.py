"""Calls of Python functions that `torch.compile` may compile by themselves: calls by a function
that it compiles in parts, or not at all.

Where the graph of a function breaks, the code that Dynamo makes of it calls what broke the graph,
and then a function for the rest. Dynamo looks at each of these calls when it happens, as it does at
the calls of a function that it has given up. While a step is traced, other code runs in the place
of all functions that Dynamo might look at, and hands the call over with its arguments.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

from roam.torch_compat.private import look_at_frames

STAND_IN = "<roam>"
"""The file name of the code that runs in the place of functions."""


class Empty:
    """Stands for the contents of a cell that has none."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A call of a Python function.

    Attributes:
        code: that of the function.
        names: its globals.
        given: the values of its arguments, in the order in which the code names them.
        cells: those of the variables that it closes over, in the order of the code.
        caller: the code of the function that calls it.
    """

    code: CodeType
    names: dict[str, Any]
    given: tuple[Any, ...]
    cells: tuple[CellType, ...]
    caller: CodeType | None = None

    @property
    def contents(self) -> list[Any]:
        """What the cells hold."""
        return [contents_of(cell) for cell in self.cells]

    @property
    def view(self) -> Any:
        """The call with the attributes of a frame that has not begun."""
        held = dict(zip(_arguments(self.code), self.given, strict=True))
        free = zip(self.code.co_freevars, self.contents, strict=True)
        held |= {name: value for name, value in free if value is not Empty}
        return SimpleNamespace(
            f_code=self.code, f_locals=held, f_globals=self.names, closure=self.cells
        )


def function_of(code: CodeType, frame: Frame) -> FunctionType:
    """A function that runs code in the place of the one that a frame is a call of; it has no
    defaults.
    """
    return FunctionType(code, frame.names, frame.code.co_name, None, frame.cells)


def spread(code: CodeType, given: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, made from their values in the order in which the code names them."""
    positional, named = code.co_argcount, code.co_kwonlyargcount
    args, rest = list(given[:positional]), list(given[positional + named :])
    names = code.co_varnames[positional : positional + named]
    kwargs = dict(zip(names, given[positional:], strict=False))
    if code.co_flags & inspect.CO_VARARGS:
        args += rest.pop(0)
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= rest.pop(0)
    return args, kwargs


def stand_in_for(code: CodeType, run: Callable[[Frame], Any]) -> CodeType:
    """Code that returns what `run` returns for its call.

    Frames of it are made of frames of `code` as they begin. So it has as many arguments, local
    variables, cells and free variables.
    """
    names = _arguments(code)
    given = [f"given_{place:05}" for place in range(len(names))]
    free = [f"free_{place:05}" for place in range(len(code.co_freevars))]
    own = [f"own_{place:05}" for place in range(len(set(code.co_cellvars) - set(names)))]
    local = len(set(code.co_varnames) - set(names) - set(code.co_cellvars))
    locals_ = [f"local_{place:05}" for place in range(local)]
    held = [
        *(one for one, name in zip(given, names, strict=True) if name in code.co_cellvars),
        *own,
    ]
    assigned = "".join(f"{name} = " for name in own + locals_)
    text = f"""
def around({", ".join(free)}):
    def stand_in({_signature(code, given)}):
        {assigned}(lambda: ({_listed(held)}))
        return "run"("globals"(), ({_listed(given)}), (lambda: ({_listed(free)})).__closure__ or ())
"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # that text is not callable
        module = compile(text, STAND_IN, "exec", dont_inherit=True)
    (around,) = (one for one in module.co_consts if isinstance(one, CodeType))
    stand_in = next(
        one for one in around.co_consts
        if isinstance(one, CodeType) and one.co_name == "stand_in"
    )  # fmt: skip

    def called(namespace: dict[str, Any], values: tuple[Any, ...], cells: Any) -> Any:
        look_at_frames(None)  # roam's frames are not the step's; C++ sets it again at the end
        caller = sys._getframe(2).f_code  # past the code in the place of the function
        return run(Frame(code, namespace, values, cells, caller))

    # As constants, since names of builtins may mean something else in the globals that it runs in.
    constants = {"run": called, "globals": globals}
    replaced = [
        constants.get(one, one) if isinstance(one, str) else one for one in stand_in.co_consts
    ]
    return stand_in.replace(co_consts=tuple(replaced))


def _arguments(code: CodeType) -> tuple[str, ...]:
    """The names of all arguments in the order in which frames hold them."""
    flags = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    more = sum(bool(code.co_flags & flag) for flag in flags)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + more]


def _signature(code: CodeType, given: list[str]) -> str:
    positional, named = code.co_argcount, code.co_kwonlyargcount
    rest = given[positional + named :]
    parts = given[:positional]
    if code.co_flags & inspect.CO_VARARGS:
        parts.append(f"*{rest.pop(0)}")
    elif named:
        parts.append("*")
    parts += given[positional : positional + named]
    return ", ".join([*parts, *(f"**{one}" for one in rest)])


def _listed(names: list[str]) -> str:
    return "".join(f"{name}, " for name in names)


def contents_of(cell: CellType) -> Any:
    """What a cell holds; `Empty` if it holds nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return Empty


def cell_of(content: Any) -> CellType:
    """A cell that holds this, or nothing."""
    return CellType() if content is Empty else CellType(content)
