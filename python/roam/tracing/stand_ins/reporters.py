"""Refuses what tells people about a training run, printing and logging by the user's code and calls
of packages for it (progress bars, `csv`, wandb): a run of a plan would not do it again.
"""

from __future__ import annotations

import builtins
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final

from roam.program.ir import Source
from roam.state.library_code import is_installed, is_library_code, reports
from roam.torch_compat.patches import Replacement
from roam.torch_compat.private import dispatch_modes
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import calls_seen, is_standard, is_written_by_user, shown_path

_STAND_INS: Final = os.path.dirname(__file__) + os.sep
_REMEDY: Final = (
    "a plan's run would not do again; do this outside of the step, with what the step returns"
)


def report_stand_ins(
    levels: set[tuple[logging.Logger, int]], recorder: Recorder
) -> Iterator[Replacement]:
    """(holder, name, stand-in) of `print` and of what loggers do with the user's messages.

    Args:
        levels: gets (logger, level) of those of which the user's code asks whether they are on.
    """

    def enabled(plain: Callable[..., bool], logger: logging.Logger, level: int) -> bool:
        if _calls(_is_users):
            levels.add((logger, level))
        return plain(logger, level)

    yield builtins, "print", _of_others(recorder, "prints", print, is_written_by_user)
    for name in ("_log", "handle"):
        yield (
            logging.Logger,
            name,
            _of_others(recorder, "logs", getattr(logging.Logger, name), _is_users),
        )
    yield logging.Logger, "isEnabledFor", functools.partial(enabled, logging.Logger.isEnabledFor)


def stream_stand_ins(recorder: Recorder) -> Iterator[Replacement]:
    """(stream, name, stand-in) of the methods by which `print` writes, whatever the step calls
    it.
    """
    for stream in {id(stream): stream for stream in (sys.stdout, sys.stderr)}.values():
        if hasattr(stream, "__dict__") and hasattr(stream, "write"):
            what = "writes to sys.stdout or sys.stderr"
            yield stream, "write", _of_others(recorder, what, stream.write, _is_users)


def _of_others(
    recorder: Recorder, what: str, plain: Callable[..., Any], is_refused: Callable[[CodeType], bool]
) -> Callable[..., Any]:
    """A function that is refused where such code calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _calls(is_refused):
            recorder.refuse(f"the step {what}, which {_REMEDY}", code="moved")
        return plain(*args, **kwargs)

    return call


def _calls(is_such: Callable[[CodeType], bool]) -> bool:
    """Whether such code calls what runs now, maybe by way of the standard library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        (file := frame.f_code.co_filename).startswith(_STAND_INS)
        or (is_standard(file) and file != warnings.__file__)
    ):
        frame = frame.f_back
    return frame is not None and is_such(frame.f_code)


def _is_users(code: CodeType) -> bool:
    return is_written_by_user(code) and not is_installed(code.co_filename)


@contextmanager
def reports_refused(recorder: Recorder) -> Iterator[None]:
    """In the block, refuses a call that enters one of these packages, before it does anything.
    Methods that Python itself calls, such as `__bool__`, may run.
    """

    def see(frame: FrameType, event: str, arg: Any) -> None:
        name = _called(frame, event, arg)
        if name is not None and recorder in dispatch_modes():
            caller: FrameType | None = frame
            while caller is not None and is_library_code(caller.f_code, caller.f_globals):
                caller = caller.f_back
            recorder.refuse(
                f"the step calls {name}, which {_REMEDY}",
                code="moved",
                source=None
                if caller is None
                else Source("", shown_path(caller.f_code.co_filename), caller.f_lineno),
            )

    with calls_seen(see):
        yield


def _called(frame: FrameType, event: str, arg: Any) -> str | None:
    """The name of what is called, if a package is entered here."""
    if event == "call":
        package, name = _module(frame), frame.f_code.co_name
        is_entered = reports(package) and not reports(_module(frame.f_back))
    elif event == "c_call":
        package, name = str(type(getattr(arg, "__self__", None)).__module__), arg.__name__
        is_entered = reports(package)
    else:
        return None
    return f"{package}.{name}" if is_entered and not name.startswith("__") else None


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__"))
