"""Refuses files that a step opens: a run of a plan would neither read nor write them."""

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from roam.capture.tracing.recorder import Recorder
from roam.capture.tracing.source_location import shown_path
from roam.program.ir import Source
from roam.state.library_code import is_in, is_library_code
from roam.torch_compat.private import dispatch_modes

_FOR_OTHERS: Final = (
    "bz2", "codecs", "configparser", "fileinput", "gzip", "lzma", "pathlib", "shutil", "zipfile",
    "PIL", "numpy", "pandas", "scipy", "torch.serialization",
)  # fmt: skip
"""Modules that open the files of those who call them. Other libraries that roam knows open files of
their own, such as caches.
"""


def open_stand_ins(recorder: Recorder) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(holder, name, function) for each function that opens files."""
    plain = builtins.open

    def opening(file: Any, *args: Any, **kwargs: Any) -> Any:
        caller = _caller(sys._getframe(2))  # behind the wrapper of this stand-in
        # Modules that the step imports are executed without dispatch modes.
        if caller is not None and recorder in dispatch_modes():
            name = os.fspath(file) if isinstance(file, os.PathLike) else file
            recorder.refuse(
                f"the step opens {name!r}, which a plan's run would neither read nor write; read "
                "files before the step, and pass what is in them as arguments; write what the step "
                "returns, after the step",
                code="file",
                source=Source("", shown_path(caller.f_code.co_filename), caller.f_lineno),
            )
        return plain(file, *args, **kwargs)

    for module in (builtins, io):
        yield module, "open", opening


def _caller(frame: FrameType | None) -> FrameType | None:
    """The user's code that opens a file; None if a library opens one of its own."""
    while frame is not None and is_in(str(frame.f_globals.get("__name__")), _FOR_OTHERS):
        frame = frame.f_back
    if frame is None or is_library_code(frame.f_code, frame.f_globals):
        return None
    return frame
