"""Lets `torch.compile` make the code of calls that a trace has met, with the user's objects in
place. Nothing of the code runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from roam.errors import UNKNOWN_LINE, CaptureError
from roam.program.ir import Source
from roam.torch_compat.private import (
    compiled_entries,
    innermost_backend,
    is_graph_break,
    keep_as_written,
    may_compile,
)
from roam.tracing.compiled.code import Code, CompiledCall, Found, MadeCode, first_code, newest_first
from roam.tracing.compiled.guarded_values import Guarded, guarded_by

_LINE = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Wanted:
    """A call of a compiled function, to be compiled."""

    call: CompiledCall
    source: Source
    part: str
    """Which part of the function that the step calls it is, in words; empty for the whole."""


@dataclass(slots=True)
class Compiler:
    """Makes the code of one step's calls.

    Attributes:
        count: how many calls it has compiled.
        given_up: by identity the code that runs as it is written, while the functions that it calls
            are looked at: Dynamo has given it up, or it was called without tensors.
    """

    count: int = 0
    given_up: dict[int, CodeType] = field(default_factory=dict)
    _made: MadeCode = field(default_factory=MadeCode)

    def code_for(self, wanted: Wanted) -> tuple[Code, Guarded] | None:
        """The code of a call, that in Dynamo's cache if there is one, and what it depends on; None
        if the call runs as it is written.

        Raises:
            CaptureError: this gives no code that can be recorded.
        """
        if id(wanted.call.code) in self.given_up:
            return None
        found: list[Code | None] = []
        try:
            wanted.call.ask(lambda callback: self._asking(wanted.call, callback, found))
        except _LimitReached as limit:
            raise refused_call(
                wanted,
                f"torch.compile has compiled {limit} for {limit.count} kinds of calls, as many as it is allowed to, and runs all "
                "others without compiling; raise torch._dynamo.config.recompile_limit before the first call, or make equal "
                "in all blocks what differs between them",
                code="compiled_too_often",
            ) from None
        except CaptureError:
            raise
        except Exception as error:
            if is_graph_break(error):
                raise refused_call(
                    wanted,
                    f"its graph breaks at {_last_line(error)}: {_first_line(error)}; remove the break, or compile it without "
                    "fullgraph=True",
                    code="compiled_graph_break",
                ) from error
            raise refused_call(
                wanted,
                f"compiling it raised {type(error).__name__}: {_first_line(error)}; call the plain function",
                code="compiled_region",
            ) from error
        if not found:
            raise refused_call(
                wanted,
                "torch.compile does not look at it; call the plain function",
                code="compiled_region",
            )
        if found[0] is None:
            return None
        with wanted.call.again() as begun:
            return found[0], guarded_by(found[0].guard_manager, begun.view)

    def _asking(self, call: CompiledCall, callback: Any, found: list[Code | None]) -> Any:
        """A callback for frames that finds or compiles the code of the first frame that has any,
        and does not run it. Compiled again, a function may get other kernels: Dynamo remembers the
        sizes that it has met, and takes those that change for variables.
        """
        backend = innermost_backend(callback)
        original = call.code
        with call.again() as begun:
            view = begun.view
            entries = newest_first(original)
            if not may_compile(view, entries, callback):
                # C++ would not call the callback any more, and the code would run.
                entry = first_code(view, backend)
                if entry is None:
                    raise _LimitReached(original.co_name, len(entries))
                found.append(_kept(original, entry, call.names, backend))
                raise Found

        def compiled(frame: Any, *others: Any, **named: Any) -> Any:
            assert frame.f_code is original, "the function that is called"
            entry = first_code(frame, backend)
            if entry is not None:
                found.append(_kept(original, entry, call.names, backend))
                raise Found
            earlier = tuple([one.code for one in compiled_entries(original)])
            result = callback(frame, *others, **named)
            made = result.guarded_code
            if made is None:
                keep_as_written(original, result)
                if result.apply_to_code:
                    self.given_up[id(original)] = original
                found.append(None)
                raise Found
            self.count += 1
            code = Code(original, made.code, call.names, made.guard_manager, backend, earlier)
            found.append(code)
            self._made.codes.append(code)
            raise Found

        return compiled


def _kept(original: CodeType, entry: Any, names: dict[str, Any], backend: Any) -> Code:
    """An entry of Dynamo's cache, kept."""
    if type(entry) is Code:
        return entry
    return Code(original, entry.code, names, entry.guard_manager, backend)


class _LimitReached(Exception):
    """Dynamo compiles a function no more."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name)
        self.count = count


def refused_call(wanted: Wanted, what: str, *, code: str) -> CaptureError:
    """The error that refuses a step because of one of its calls."""
    return CaptureError(
        f"{wanted.source}: the step calls a function or module that torch.compile has compiled, and {what}",
        code=code, source=str(wanted.source),
    )  # fmt: skip


def _first_line(error: Exception) -> str:
    lines = list(filter(str.strip, str(error).splitlines())) or [type(error).__name__]
    return " ".join(map(str.strip, lines[: 2 if lines[0].rstrip().endswith(":") else 1]))


def _last_line(error: Exception) -> str:
    """The line of the user's that a compiler names last."""
    lines = _LINE.findall(str(error))
    return "{}:{}".format(*lines[-1]) if lines else UNKNOWN_LINE
