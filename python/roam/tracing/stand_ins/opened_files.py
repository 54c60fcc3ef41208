"""Refuses files that a step opens, asks for, or changes: a run of a plan would do none of this."""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from roam.program.ir import Source
from roam.state.library_code import is_in, is_library_code
from roam.torch_compat.patches import FILES_ASKED, FILES_CHANGED
from roam.torch_compat.private import dispatch_modes
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import shown_path

_FOR_OTHERS: Final = (
    "bz2", "codecs", "configparser", "fileinput", "genericpath", "glob", "gzip", "lzma", "ntpath", "os", "pathlib",
    "posixpath", "shutil", "tempfile", "zipfile", "PIL", "numpy", "pandas", "scipy", "torch.serialization",
)  # fmt: skip
"""Modules that open the files of those who call them. Other libraries that roam knows open files of
their own, such as caches.
"""

_READ_BEFORE: Final = (
    "which a plan's run would neither read nor write; read files before the step, and pass what is "
    "in them as arguments; write what the step returns, after the step"
)
_ASK_BEFORE: Final = (
    "and a plan's run would not do it again; do this outside of the step, and pass what the step "
    "has to know as an argument"
)


def open_stand_ins(recorder: Recorder) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(holder, name, function) for each function that opens, looks for, or changes files."""

    def check_user(path: Any, does: str, instead: str) -> None:
        """Refuses what a step does with a file, if its own code asked for that."""
        caller = _caller(sys._getframe(3))  # behind the stand-in and its wrapper
        # Modules that the step imports are executed without dispatch modes.
        if caller is not None and recorder in dispatch_modes():
            name = os.fspath(path) if isinstance(path, os.PathLike) else path
            recorder.refuse(
                f"the step {does} {name!r}, {instead}",
                code="file",
                source=Source("", shown_path(caller.f_code.co_filename), caller.f_lineno),
            )

    plain_open = builtins.open

    def opening(file: Any, *args: Any, **kwargs: Any) -> Any:
        check_user(file, "opens", _READ_BEFORE)
        return plain_open(file, *args, **kwargs)

    for module in (builtins, io):
        yield module, "open", opening

    def using(plain: Callable[..., Any], does: str) -> Callable[..., Any]:
        def used(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int):  # a file that is open
                check_user(path, does, _ASK_BEFORE)
            return plain(path, *args, **kwargs)

        return used

    for holder in (os, pathlib.Path):
        for names, does in (
            (FILES_ASKED, "asks the file system for"),
            (FILES_CHANGED, "changes the file"),
        ):
            for name in names:
                if name in vars(holder):
                    yield holder, name, using(vars(holder)[name], does)


def _caller(frame: FrameType | None) -> FrameType | None:
    """The user's code that uses a file; None if a library uses one of its own."""
    while frame is not None and is_in(str(frame.f_globals.get("__name__")), _FOR_OTHERS):
        frame = frame.f_back
    if frame is None or is_library_code(frame.f_code, frame.f_globals):
        return None
    return frame
