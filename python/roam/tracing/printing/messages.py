"""What a step prints or logs, in a trace: recorded, with marks for the numbers that texts show.

`print(f"loss {loss.item():.3f}")` makes a plain string, which cannot hold a number that only a run
knows. A trace puts a mark in its place if the source shows that nothing but this call can read the
text (`roam.state.shown_texts`). These calls are recorded (`roam.state.messages`). Other
ways to print and to log are refused.
"""

from __future__ import annotations

import builtins
import functools
import logging
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FrameType
from typing import Any, Final, NamedTuple, Protocol

import torch

from roam.errors import CaptureError
from roam.own_code import is_own_file
from roam.program.ir import Source
from roam.state.library_code import is_installed
from roam.state.live_scalars import is_live
from roam.state.messages import BLANK, Formatted, Logged, Message, Printed, Text
from roam.state.shown_texts import call_shown
from roam.state.sizes import is_size
from roam.state.source_places import Extent, place_of
from roam.torch_compat.patches import Replacement
from roam.tracing.printing.clock import reads_clock
from roam.tracing.source_location import is_standard, is_written_by_user, shown_path

_MARK: Final = re.compile(f"{BLANK}([0-9]+);")
_LEVELS: Final = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "warn": logging.WARNING,
    "error": logging.ERROR, "critical": logging.CRITICAL, "fatal": logging.CRITICAL, "log": None, "exception": None,
}  # fmt: skip
"""Methods of loggers that take a message, and its level."""
_PLAIN: Final = (int, float, bool, type(None))
_FIXED: Final = (torch.Size, torch.dtype, torch.device, type)
_LOGGING: Final = logging.addLevelName.__code__.co_filename
_METHODS_OF_RECORDS: Final = ("_log", "findCaller", "handle", "makeRecord")
"""By which a class of loggers decides what becomes of a message."""
_REMEDY: Final = (
    'show numbers, as in print(f"loss {loss.item():.3f}") or logger.info("loss %.3f", loss.item()), or return the values, and '
    "show them outside of the step"
)
_identity = id  # while a step is traced, its code gets another function for it


class Records(Protocol):
    """What records a trace."""

    def refuse(self, message: str, *, code: str, source: Source | None = None) -> Any: ...


class _Mark(NamedTuple):
    """A number that a text shows, and the only call that may read the text: its extent in the
    source, and the frame.
    """

    shows: Formatted
    call: tuple[Extent | None, int]
    source: Source


class Messages:
    """The messages of one trace.

    Attributes:
        all: the messages so far.
        levels: (logger, level) of the messages to loggers, also of those that are not given out.
    """

    def __init__(self, recorder: Records) -> None:
        self.all: list[Message] = []
        self.levels: set[tuple[logging.Logger, int]] = set()
        self._recorder: Any = recorder
        self._marks: list[_Mark] = []
        self._open: set[int] = set()
        self._streams = sys.stdout, sys.stderr
        self._logged: list[tuple[logging.Logger, int, Source]] = []
        self._is_over = False

    def close(self) -> None:
        """Ends the trace: there are no messages any more."""
        self._is_over = True
        self.all, self._marks = [], []
        self._recorder = None  # which holds this one

    def text(self, value: Any, asks: str, form: str = "") -> str | None:
        """A mark for the text of a live number; None if more than a message may read the text.

        Args:
            value: the number.
            asks: `format`, `str`, or `repr`, which has been called.
            form: the format.
        """
        frame = _calling_frame()
        if self._is_over or frame is None or not is_written_by_user(frame.f_code):
            return None
        call = call_shown(frame)
        if call is None:
            return None
        shows = Formatted(value, {"str": "s", "repr": "r"}.get(asks, ""), form)
        source = Source("", shown_path(frame.f_code.co_filename), frame.f_lineno)
        self._open.add(len(self._marks))
        self._marks.append(_Mark(shows, (call, _identity(frame)), source))
        return f"{BLANK}{len(self._marks) - 1};"

    def check(self, cause: BaseException | None = None) -> None:
        """Checks what the step has done with texts and loggers.

        Raises:
            CaptureError: a text with a mark has gone elsewhere than into a message, or the step has
                set the level of a logger so that it no longer logs a message of the step's.
        """
        if self._open:
            source = self._marks[min(self._open)].source
            try:
                self._recorder.refuse(
                    "the step makes a text of a value that does not exist during capture, and "
                    f"gives it to more than print() or a logger; {_REMEDY}",
                    code="value_reached_python",
                    source=source,
                )
            except CaptureError as error:
                raise error from cause
        for logger, level, source in self._logged if cause is None else ():
            if not logger.isEnabledFor(level):
                self._recorder.refuse(
                    "the step sets a logger's level so that what it has logged is no longer "
                    "logged; set levels outside of the step",
                    code="value_reached_python",
                    source=source,
                )

    def check_clock(
        self,
        code: Mapping[CodeType, dict[str, Any]],
        cells: Mapping[CodeType, tuple[CellType, ...]],
    ) -> None:
        """Checks that a step with messages does not read the clock.

        Args:
            code: of all functions that the step reaches, each with its globals.
            cells: their variables of functions around them.

        Raises:
            CaptureError: a function of the user's reads it. The messages may tell the time.
        """
        for one, names in code.items() if self.all else ():
            if not is_written_by_user(one) or is_installed(one.co_filename):
                continue
            if reads_clock(one, names, cells.get(one, ())):
                self._recorder.refuse(
                    f"the step prints or logs, and {getattr(one, 'co_qualname', one.co_name)} reads the "
                    "clock; a plan would show the time of the capture; measure and show the time outside of the step",
                    code="unstable",
                    source=Source("", shown_path(one.co_filename), one.co_firstlineno),
                )

    def stand_ins_of_streams(self) -> Iterator[Replacement]:
        """(stream, name, stand-in) of the methods by which Python's own `print` writes, whatever
        the step calls it.
        """
        for stream in {_identity(stream): stream for stream in self._streams}.values():
            if hasattr(stream, "__dict__") and hasattr(stream, "write"):
                yield stream, "write", functools.partial(self._write, stream.write)

    def stand_ins(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """(holder, name, stand-in) of the functions that give messages out."""
        yield builtins, "print", functools.partial(self._print, print)
        for name in _LEVELS:
            plain = getattr(logging.Logger, name, None)
            if plain is not None:
                yield logging.Logger, name, functools.partial(self._log, name, plain)

    def _print(self, plain: Callable[..., Any], *values: Any, **options: Any) -> None:
        frame = _calling_frame()
        streams = sys.stdout, sys.stderr
        file = options.get("file")
        if file is None:
            file = streams[0]
        separator, end = options.get("sep", " "), options.get("end", "\n")
        if (
            frame is None
            or not is_written_by_user(frame.f_code)
            or options.keys() - {"sep", "end", "file", "flush"}
            or not any(
                file is now is before for now, before in zip(streams, self._streams, strict=True)
            )
            or any(one is not None and type(one) is not str for one in (separator, end))
        ):
            self._check_unmarked((*values, separator, end))
            plain(*values, **options)  # whose writing is refused if it is to one of the streams
            return
        words = self._words(values, frame)
        self._check_unmarked((separator, end))
        is_of_errors = file is self._streams[1] and file is not self._streams[0]
        self.all.append(Printed(words, separator, end, is_of_errors, bool(options.get("flush"))))

    def _write(self, plain: Callable[..., Any], *texts: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _writes_for_others(frame.f_code.co_filename):
            frame = frame.f_back
        self._check_unmarked(texts)
        if (
            frame is not None
            and is_written_by_user(frame.f_code)
            and not is_installed(frame.f_code.co_filename)
        ):
            self._refuse("writes to sys.stdout or sys.stderr by other means than print()")
        return plain(*texts)

    def _log(
        self, name: str, plain: Callable[..., Any], logger: Any, *given: Any, **options: Any
    ) -> None:
        frame = _calling_frame()
        if frame is not None and frame.f_code.co_filename == _LOGGING:
            if "self" in frame.f_locals:  # an adapter, which may have read the text
                frame = None if frame.f_back is None else _calling_frame((_LOGGING,))
                options = {"adapter": True, **options}
            else:
                frame = frame.f_back
        level: Any = _LEVELS[name]
        values: Any = given
        if level is None and given and name == "log":
            level, *values = given
        if (
            frame is None
            or not is_written_by_user(frame.f_code)
            or is_installed(frame.f_code.co_filename)
            or not values
        ):
            self._check_unmarked((*given, *options.values()))
            plain(logger, *given, **options)
            return
        if (
            options
            or type(level) is not int
            or any(
                getattr(type(logger), method, None) is not getattr(logging.Logger, method)
                for method in _METHODS_OF_RECORDS
            )
            or logging.getLogger(logger.name) is not logger
        ):
            self._refuse("logs by other means than a plain call of a logger of logging.getLogger()")
        self.levels.add((logger, level))
        is_wanted = logger.isEnabledFor(level)
        words = self._words(values if is_wanted else [v for v in values if type(v) is str], frame)
        if not is_wanted:
            return
        place = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        self._logged.append((logger, level, Source("", shown_path(place[0]), frame.f_lineno)))
        self.all.append(Logged(logger.name, level, words[0], words[1:], *place))

    def _refuse(self, what: str) -> Any:
        return self._recorder.refuse(
            f"the step {what}, which a plan cannot repeat; {_REMEDY}", code="value_reached_python"
        )

    def _words(self, values: Sequence[Any], frame: FrameType) -> list[Any]:
        """What a message shows, of a call's arguments; `frame` makes the call."""
        call = place_of(frame), _identity(frame)
        return [self._word(value, call) for value in values]

    def _word(self, value: Any, call: tuple[Extent | None, int]) -> Any:
        if type(value) is str:
            return self._parted(value, call)
        if is_size(value):
            return operator.index(value)
        if is_live(value) or type(value) in _PLAIN:
            return value
        return str(value) if type(value) in _FIXED else self._refuse(
            f"shows a {type(value).__name__}, and neither a number nor a text"
        )  # fmt: skip

    def _parted(self, text: str, call: tuple[Extent | None, int]) -> str | Text:
        """A text with the numbers that its marks stand for, which are then in use."""
        here = {number for number in self._open if self._marks[number].call == call}
        parts: list[Any] = _MARK.split(text)
        for at in range(1, len(parts), 2):
            number = int(parts[at])
            self._open -= {number} & here
            parts[at] = self._marks[number].shows
        return text if parts == [text] else Text(parts)

    def _check_unmarked(self, values: Iterable[Any]) -> None:
        """Refuses texts with marks for a call that is not recorded."""
        if any(type(value) is str and _MARK.search(value) for value in values):
            self.check()


def _writes_for_others(file: str) -> bool:
    """Whether a file's code writes what its caller shows, as that of `pprint` does."""
    return is_own_file(file) or (is_standard(file) and file not in (_LOGGING, warnings.__file__))


def _calling_frame(hidden: Sequence[str] = ()) -> FrameType | None:
    """The innermost frame that is neither roam's nor of a hidden file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename in hidden
    ):
        frame = frame.f_back
    return frame
