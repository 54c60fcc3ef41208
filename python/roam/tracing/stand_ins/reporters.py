"""Refuses calls of packages that tell people about a training run (progress bars, `csv`, wandb): a
run of a plan would not make them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from roam.program.ir import Source
from roam.state.library_code import is_library_code, reports
from roam.torch_compat.private import dispatch_modes
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import calls_seen, shown_path


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
                f"the step calls {name}, which a plan's run would not do again; do this outside of "
                "the step, with what the step returns",
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
