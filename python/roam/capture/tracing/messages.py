"""What a step prints or logs, in a trace: recorded, with marks for the values that texts show.

`f"loss {loss.item():.3f}"` is a plain string, which cannot hold a number that only a run knows. A
trace puts a mark in its place if only a call of `print` or of a logger can read the text
(`roam.capture.tracing.text_uses`). These calls are recorded (`roam.state.messages`).
"""

from __future__ import annotations

import builtins
import datetime
import dis
import functools
import logging
import math
import numbers
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple, Protocol

import torch

from roam.capture.tracing.fake_identity import is_parameter
from roam.capture.tracing.source_location import is_user_code, shown_path
from roam.capture.tracing.text_uses import Use, offset_of_call, use_of_text
from roam.errors import CaptureError
from roam.own_code import is_own_file
from roam.program.ir import Source
from roam.state.library_code import is_installed, nested_code
from roam.state.live_scalars import is_live
from roam.state.messages import BLANK, Formatted, Logged, Message, Object, Printed, Shown, Text
from roam.torch_compat.private import FakeTensor, is_dtensor, name_of_node, pytree

_MARK: Final = re.compile(f"{BLANK}([0-9]+);")
_CONVERSION: Final = re.compile(r"(%(?:\([^)]*\))?[-+ #0]*[0-9]*(?:\.[0-9]*)?[hlL]?[a-zA-Z]|%%)")
_MOST_NUMBERS: Final = 200
_MOST_WAYS: Final = 1000
"""How many ways are tried in which numbers may stand at the places of a format."""
_LOGGERS: Final = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "warn": logging.WARNING,
    "error": logging.ERROR, "critical": logging.CRITICAL, "fatal": logging.CRITICAL, "log": None, "exception": None,
}  # fmt: skip
"""Methods of loggers that take a message, and its level."""
_USES: Final = frozenset({"print", *_LOGGERS})
_PLAIN: Final = (int, float, bool, type(None))
_LOGGING: Final = logging.addLevelName.__code__.co_filename
_CLOCK_NAMES: Final = frozenset(
    {
        "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns",
        "thread_time", "thread_time_ns", "ctime", "asctime", "localtime", "gmtime", "strftime",
    }
)  # fmt: skip
_CLOCKS: Final = frozenset(getattr(time, name) for name in _CLOCK_NAMES)
"""Functions of Python's own that tell the time."""
_DATES: Final = frozenset({"now", "utcnow", "today"})
_identity = id  # while a step is traced, its code gets another function for it


class Records(Protocol):
    """What records a trace."""

    def slot_of(self, value: Any) -> int | None: ...

    def refuse(self, message: str, *, code: str, source: Source | None = None) -> Any: ...


class _Mark(NamedTuple):
    """A value that a text shows, and the only call that may read the text."""

    shows: Formatted
    use: Use
    frame: int
    source: Source


class _Unknown(Exception):
    """A tensor that no message can show."""


class Messages:
    """The messages of one trace.

    Attributes:
        all: the messages so far.
    """

    def __init__(self, recorder: Records) -> None:
        self.all: list[Message] = []
        self._recorder: Any = recorder
        self._marks: list[_Mark] = []
        self._open: set[int] = set()
        self._streams = sys.stdout, sys.stderr
        self._is_over = False

    def close(self) -> None:
        """Ends the trace: there are no messages any more."""
        self._is_over = True
        self.all, self._marks = [], []
        self._recorder = None  # which holds this one

    def text(self, value: Any, asks: str, form: str = "") -> str | None:
        """A mark for the text of a value; None if more than a message may read the text.

        Args:
            value: a tensor of the trace, or a live number.
            asks: `format`, `str`, or `repr`, which has been called.
            form: the format.
        """
        frame = _calling_frame()
        if self._is_over or frame is None or not is_user_code(frame.f_code):
            return None
        use = use_of_text(frame, asks)
        if use is None or use.name not in _USES:
            return None
        conversion = {"str": "s", "repr": "r"}.get(asks, "")
        if not self._marked(value, conversion, form, use, frame):
            return None
        return f"{BLANK}{len(self._marks) - 1};"

    def _marked(self, value: Any, conversion: str, form: str, use: Use, frame: FrameType) -> bool:
        """Whether there is a mark for a value now."""
        try:
            shown = Formatted(self._shown(value), conversion, form)
        except _Unknown:
            return False
        source = Source("", shown_path(frame.f_code.co_filename), frame.f_lineno)
        self._open.add(len(self._marks))
        self._marks.append(_Mark(shown, use, _identity(frame), source))
        return True

    def number(self, value: Any, kind: type) -> Any:
        """A number by which a text made by the operator ``%`` is found again; None if more than a
        message may read the text.

        Args:
            value: a tensor of the trace, or a live number.
            kind: `float` or `int`, which has been asked for.
        """
        frame = _calling_frame()
        if self._is_over or frame is None or not is_user_code(frame.f_code):
            return None
        use = use_of_text(frame, "number")
        if use is None or use.name not in _USES or len(self._marks) >= _MOST_NUMBERS:
            return None
        return self._marked(value, "%", "", use, frame) and kind(_number(len(self._marks) - 1))

    def check(self, cause: BaseException | None = None) -> None:
        """Looks whether messages have got all texts with marks.

        Raises:
            CaptureError: one of them has gone elsewhere.
        """
        if self._open:
            source = self._marks[min(self._open)].source
            try:
                self._recorder.refuse(
                    "the step makes a text of a value that does not exist during capture, and "
                    "gives it to more than print() or a logger; return the value, and make the "
                    "text outside of the step",
                    code="value_reached_python",
                    source=source,
                )
            except CaptureError as error:
                raise error from cause

    def check_clock(self, code: Mapping[CodeType, dict[str, Any]]) -> None:
        """Looks, where there are messages, whether the step reads the clock.

        Args:
            code: of all functions that the step reaches, each with its globals.

        Raises:
            CaptureError: a function of the user's does. What it prints may have the time in it.
        """
        if not self.all:
            return
        for one, names in code.items():
            if is_user_code(one) and not is_installed(one.co_filename) and _reads_clock(one, names):
                self._recorder.refuse(
                    f"the step prints or logs, and {one.co_qualname if hasattr(one, 'co_qualname') else one.co_name} reads the "
                    "clock; a plan would show the time of the capture; measure and show the time outside of the step",
                    code="unstable",
                    source=Source("", shown_path(one.co_filename), one.co_firstlineno),
                )

    def stand_ins(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """(holder, name, stand-in) of the functions that give messages out."""
        yield builtins, "print", functools.partial(self._print, print)
        for name in _LOGGERS:
            plain = getattr(logging.Logger, name, None)
            if plain is not None:
                yield logging.Logger, name, functools.partial(self._log, name, plain)

    def _print(self, plain: Callable[..., Any], *values: Any, **options: Any) -> None:
        frame = _calling_frame()
        streams = sys.stdout, sys.stderr
        file = options.get("file") or streams[0]
        separator, end = options.get("sep", " "), options.get("end", "\n")
        if (
            frame is None
            or not is_user_code(frame.f_code)
            or options.keys() - {"sep", "end", "file", "flush"}
            or not any(
                file is now is before for now, before in zip(streams, self._streams, strict=True)
            )
            or any(one is not None and type(one) is not str for one in (separator, end))
        ):
            self._check_unmarked((*values, separator, end))
            plain(*values, **options)
            return
        words = self._words(values, frame)
        self._check_unmarked((separator, end))
        is_error = file is streams[1] and file is not streams[0]
        self.all.append(Printed(words, separator, end, is_error, bool(options.get("flush"))))

    def _log(
        self, name: str, plain: Callable[..., Any], logger: Any, *given: Any, **options: Any
    ) -> None:
        frame = _calling_frame((_LOGGING,))
        level = _LOGGERS[name]
        values: Any = given
        if level is None and given:
            level, *values = given
        above = options.get("stacklevel", 1)
        extra = options.get("extra")
        error = options.get("exc_info", name == "exception")
        if (
            frame is None
            or not is_user_code(frame.f_code)
            or is_installed(frame.f_code.co_filename)
            or type(level) is not int
            or type(above) is not int
            or type(extra) not in (dict, type(None))
            or type(error) not in (bool, type(None))
            or not values
            or options.keys() - {"stacklevel", "extra", "exc_info"}
            or logging.getLogger(logger.name) is not logger
        ):
            self._check_unmarked((*given, *options.values()))
            plain(logger, *given, **options)
            return
        is_wanted = logger.isEnabledFor(level)
        words = self._words(values, frame, is_wanted)
        if not is_wanted:
            return
        extra = extra and dict(zip(extra, self._words([*extra.values()], frame), strict=True))
        for _ in range(above - 1):
            frame = frame.f_back or frame
        code = frame.f_code
        place = code.co_filename, frame.f_lineno, code.co_name
        text = traceback.format_exc().removesuffix("\n") if error else None
        self.all.append(Logged(logger.name, level, words[0], words[1:], *place, extra, text))

    def _words(self, values: Sequence[Any], frame: FrameType, is_wanted: bool = True) -> list[Any]:
        """What a message shows, of a call's arguments.

        Args:
            values: the arguments.
            frame: of the user's code that makes the call.
            is_wanted: whether the message is given out.
        """
        place = offset_of_call(frame), _identity(frame)
        try:
            return [
                self._parted(value, place)
                if type(value) is str
                else self._shown(value)
                if is_wanted
                else None
                for value in values
            ]
        except _Unknown:
            self._recorder.refuse(
                "the step gives print() or a logger a tensor that is sparse, nested, quantized, of a subclass, or inside of a "
                "function transform; give it the values that you want to see as a plain tensor",
                code="value_reached_python",
            )
            raise

    def _parted(self, text: str, place: tuple[int, int]) -> str | Text:
        """A text with the values that its marks stand for, which are then in use."""
        here = [
            number
            for number in sorted(self._open)
            if (self._marks[number].use.offset, self._marks[number].frame) == place
        ]
        parts: list[Any] = _MARK.split(text)
        for at in range(1, len(parts), 2):
            number = int(parts[at])
            self._open -= {number} & set(here)
            parts[at] = self._marks[number].shows
        texts: dict[int, list[int]] = {}
        for number in here:
            if self._marks[number].shows.conversion == "%":
                texts.setdefault(self._marks[number].use.made_at, []).append(number)
        for marks in texts.values():
            parts = [part for text in parts for part in self._with_numbers(text, marks)]
        return text if parts == [text] else Text(parts)

    def _with_numbers(self, text: Any, marks: list[int]) -> list[Any]:
        """The parts of a text in which the operator ``%`` has put numbers that stand for values.

        Args:
            text: or another part of a message, which stays as it is.
            marks: those for the values, in their order.
        """
        if type(text) is not str:
            return [text]
        form = self._marks[marks[0]].use.form
        pieces = [re.sub(r"^%\(.*?\)", "%", piece) for piece in _CONVERSION.split(form)]
        places = [at for at in range(1, len(pieces), 2) if pieces[at] != "%%"]
        plain = [
            ".*?" if at in places else re.escape("%" if at % 2 else piece)
            for at, piece in enumerate(pieces)
        ]
        found = set()
        if math.comb(len(places), len(marks)) > _MOST_WAYS:
            return [text]
        for chosen in combinations(places, len(marks)):
            groups = list(plain)
            for at, mark in zip(chosen, marks, strict=True):
                groups[at] = f"({re.escape(_by(pieces[at], mark))})"
            match = re.fullmatch(f".*?{''.join(groups)}.*", text, re.DOTALL)
            if match is not None:
                spans = map(match.span, range(1, len(marks) + 1))
                found.add(tuple(zip(spans, [pieces[at] for at in chosen], strict=True)))
        if len(found) != 1:  # of several, any may be wrong
            return [text]
        parts, end = list[Any](), 0
        for ((start, stop), conversion), mark in zip(found.pop(), marks, strict=True):
            parts += [text[end:start], self._marks[mark].shows._replace(form=conversion)]
            end = stop
        self._open -= set(marks)
        return [*parts, text[end:]]

    def _shown(self, value: Any) -> Any:
        """What stands for a value in a message.

        Raises:
            _Unknown: it is, or holds, a tensor that no message can show.
        """
        if is_live(value) or type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        leaves, spec = pytree.tree_flatten(value)
        if any(is_live(leaf) or isinstance(leaf, torch.Tensor) for leaf in leaves):
            parts = [leaf if type(leaf) is str else self._shown(leaf) for leaf in leaves]
            return pytree.tree_unflatten(parts, spec)
        number: float | None = None
        if isinstance(value, numbers.Real):
            number = int(value) if isinstance(value, numbers.Integral) else float(value)
        return Object(str(value), repr(value), number)

    def _of_tensor(self, tensor: torch.Tensor) -> Shown:
        if (
            not isinstance(tensor, FakeTensor)
            or is_dtensor(tensor)
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_nested
            or self._recorder.slot_of(tensor) is None
        ):
            raise _Unknown
        suffix = "requires_grad=True" if tensor.requires_grad else ""
        if tensor.grad_fn is not None:
            suffix = f"grad_fn=<{name_of_node(tensor.grad_fn)}>"
        with torch.no_grad():
            return Shown(tensor.detach().clone(), is_parameter(tensor), suffix)

    def _check_unmarked(self, values: Iterable[Any]) -> None:
        """Refuses texts with marks for a call that is not recorded."""
        if any(type(value) is str and _MARK.search(value) for value in values):
            self.check()


def _number(mark: int) -> float:
    """The number for a mark. Whatever the format, its text is like that of no other."""
    return float(f"1e{100 + mark}")


def _by(conversion: str, mark: int) -> str:
    """What the operator ``%`` makes of the number for a mark; nothing that a text has if it takes
    no number.
    """
    number = _number(mark)
    try:
        return conversion % (number if conversion[-1] in "eEfFgG" else int(number),)
    except (TypeError, ValueError):
        return BLANK


def _reads_clock(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Whether code, or a function in it, names a function that tells the time."""
    for part in nested_code(code):
        found = [names.get(name) for name in part.co_names]
        if any(value in _CLOCKS for value in found if isinstance(value, BuiltinFunctionType)):
            return True
        if any(value is time for value in found) and any(
            one.argval in _CLOCK_NAMES
            for one in dis.get_instructions(part)
            if one.opname in ("LOAD_ATTR", "LOAD_METHOD")
        ):
            return True
        if not _DATES.isdisjoint(part.co_names) and any(
            value is datetime or value in (datetime.datetime, datetime.date)
            for value in found
            if isinstance(value, (type, ModuleType))
        ):
            return True
    return False


def _calling_frame(hidden: Collection[str] = ()) -> FrameType | None:
    """The innermost frame that is neither roam's nor of a hidden file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename in hidden
    ):
        frame = frame.f_back
    return frame


__all__ = ["Messages"]
