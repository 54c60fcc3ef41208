"""What a step prints or logs, in a trace: recorded, with marks for the values that texts show.

`f"loss {loss.item():.3f}"` is a plain string, which cannot hold a number that only a run knows. A
trace puts a mark in its place if only a call of `print` or of a logger can read the text
(`roam.capture.tracing.text_uses`). These calls are recorded (`roam.state.messages`).
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import logging
import math
import operator
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from types import CellType, CodeType, FrameType, TracebackType
from typing import Any, Final, NamedTuple, Protocol

import torch

from roam.capture.tracing.clock import reads_clock
from roam.capture.tracing.fake_identity import is_parameter
from roam.capture.tracing.source_location import is_standard, is_written_by_user, shown_path
from roam.capture.tracing.text_uses import Use, conversions_in, offset_of_call, use_of_text
from roam.errors import CaptureError
from roam.own_code import is_own_file
from roam.program.ir import Source
from roam.state.library_code import is_installed
from roam.state.live_scalars import is_live
from roam.state.messages import BLANK, Formatted, Logged, Message, Object, Printed, Shown, Text
from roam.torch_compat.patches import Replacement
from roam.torch_compat.private import (
    FakeTensor,
    is_dtensor,
    is_view,
    name_of_node,
    print_options,
    pytree,
    version_of,
)

_MARK: Final = re.compile(f"{BLANK}([0-9]+);")
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
_COLLECTIONS: Final = frozenset(
    {tuple, list, dict, collections.OrderedDict, collections.defaultdict, collections.deque}
)
_NAMED_TUPLE: Final = collections.namedtuple.__code__.co_filename
_METHODS_OF_RECORDS: Final = ("_log", "findCaller", "handle", "makeRecord")
"""By which a class of loggers decides what becomes of a message."""
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
        self._options = print_options()
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
        if self._is_over or frame is None or not is_written_by_user(frame.f_code):
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
        if self._is_over or frame is None or not is_written_by_user(frame.f_code):
            return None
        use = use_of_text(frame, "number")
        if use is None or use.name not in _USES or len(self._marks) >= _MOST_NUMBERS:
            return None
        return self._marked(value, "%", "", use, frame) and kind(_number(len(self._marks) - 1))

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
                    "gives it to more than print() or a logger; return the value, and make the "
                    "text outside of the step",
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
        if not self.all:
            return
        for one, names in code.items():
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
                yield stream, "write", functools.partial(self._write, stream.write, stream)

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
        file = options.get("file")
        if file is None:
            file = streams[0]
        separator, end = (
            str.__str__(one) if isinstance(one, str) else one
            for one in (options.get("sep", " "), options.get("end", "\n"))
        )
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
            plain(*values, **options)
            return
        words = self._words(values, frame, "s")
        self._check_unmarked((separator, end))
        flushes = bool(options.get("flush"))
        self.all.append(Printed(words, separator, end, self._is_of_errors(file), flushes))

    def _write(self, plain: Callable[..., Any], stream: Any, *texts: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        files = set()
        while frame is not None and _writes_for_others(frame.f_code.co_filename):
            files.add(frame.f_code.co_filename)
            frame = frame.f_back
        self._check_unmarked(texts)
        if (
            frame is None
            or not is_written_by_user(frame.f_code)
            or is_installed(frame.f_code.co_filename)
            or len(texts) != 1
            or type(texts[0]) is not str
        ):
            return plain(*texts)
        if traceback.__file__ in files:
            self._text_of(True)
        self.all.append(Printed([*texts], "", "", self._is_of_errors(stream), True))
        return len(texts[0])

    def _is_of_errors(self, file: Any) -> bool:
        return file is self._streams[1] and file is not self._streams[0]

    def _log(
        self, name: str, plain: Callable[..., Any], logger: Any, *given: Any, **options: Any
    ) -> None:
        frame = _calling_frame((_LOGGING,))
        level: Any = _LOGGERS[name]
        values: Any = given
        if level is None and given:
            level, *values = given
        above = options.get("stacklevel", 1)
        extra = options.get("extra")
        error = options.get("exc_info", name == "exception")
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
            type(level) is not int
            or type(above) is not int
            or type(extra) not in (dict, type(None))
        ):
            self._refuse_call("a level, a stacklevel or an extra that is of another class")
        self.levels.add((logger, level))
        is_wanted = logger.isEnabledFor(level)
        asks = "" if not is_wanted else "srn" if _asks_for_representation(values[0]) else "sn"
        words = self._words(values, None if _is_processed() else frame, asks)
        if not is_wanted:
            return
        if options.keys() - {"stacklevel", "extra", "exc_info"}:
            self._refuse_call(f"{', '.join(options.keys() - {'stacklevel', 'extra', 'exc_info'})}")
        if any(
            getattr(type(logger), method, None) is not getattr(logging.Logger, method)
            for method in _METHODS_OF_RECORDS
        ):
            self._refuse_call("a logger of a class that makes or handles records in its own way")
        if _registered(logger.name) is not logger:
            self._refuse_call("a logger that logging.getLogger() does not know")
        if len(values) == 2 and isinstance(values[1], Mapping) and _is_whole(values[1]):
            self._refuse_call("a mapping that is not a dict")
        extra = extra and dict(
            zip(extra, self._words([*extra.values()], frame, "srn"), strict=True)
        )
        for _ in range(above - 1):
            frame = frame.f_back or frame
        code = frame.f_code
        place = code.co_filename, frame.f_lineno, code.co_name
        self._logged.append((logger, level, Source("", shown_path(place[0]), frame.f_lineno)))
        text = self._text_of(error) if error else None
        self.all.append(Logged(logger.name, level, words[0], words[1:], *place, extra, text))

    def _refuse_call(self, what: str) -> None:
        self._recorder.refuse(
            f"the step logs with {what}, which a plan cannot repeat; log outside of the step, or "
            "without it",
            code="value_reached_python",
        )

    def _text_of(self, error: Any) -> str:
        """What a logger shows of an exception: the present one, or the one that it is given."""
        if isinstance(error, BaseException):
            error = type(error), error, error.__traceback__
        elif type(error) is not tuple:
            error = sys.exc_info()
        if any(not is_written_by_user(code) for code in _codes_of(error[1])):
            self._refuse_call("the traceback of an exception that comes from a library")
        return "".join(traceback.format_exception(*error)).removesuffix("\n")

    def _words(self, values: Sequence[Any], frame: FrameType | None, asks: str) -> list[Any]:
        """What a message shows, of a call's arguments.

        Args:
            values: the arguments.
            frame: of the user's code that makes the call; None if other code has seen the texts.
            asks: what it may show of an object, see `_of_object`; nothing if it is not given out.
        """
        place = (-1, -1) if frame is None else (offset_of_call(frame), _identity(frame))
        try:
            return [
                self._parted(value, place)
                if type(value) is str
                else self._shown(value, asks)
                if asks
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
        pieces = conversions_in(form)
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

    def _shown(self, value: Any, asks: str = "r") -> Any:
        """What stands for a value in a message.

        Args:
            value: any.
            asks: what the message may show of an object, see `_of_object`.

        Raises:
            _Unknown: it is, or holds, a tensor that no message can show.
        """
        if is_live(value) or type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        leaves, spec = pytree.tree_flatten(value, is_leaf=_is_whole)
        if any(is_live(leaf) or isinstance(leaf, torch.Tensor) for leaf in leaves):
            parts = [leaf if type(leaf) is str else self._shown(leaf) for leaf in leaves]
            return pytree.tree_unflatten(parts, spec)
        if type(value) is dict:  # whose values a logger's message may name
            return {key: self._shown(part, asks) for key, part in value.items()}
        return _of_object(value, asks)

    def _of_tensor(self, tensor: torch.Tensor) -> Shown:
        if print_options() != self._options:
            self._recorder.refuse(
                "the step prints a tensor after it has changed how tensors are printed; set "
                "printing options, the default dtype and the default device outside of the step",
                code="value_reached_python",
            )
        if (
            not isinstance(tensor, FakeTensor)
            or is_dtensor(tensor)
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_nested
            or self._recorder.slot_of(tensor) is None
        ):
            raise _Unknown
        if tensor.grad_fn is not None and is_view(tensor) and version_of(tensor):
            self._recorder.refuse(
                "the step prints a view of a tensor that it has changed in place, whose text names "
                "another function of autograd for real tensors; print it with detach()",
                code="value_reached_python",
            )
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


def _of_object(value: Any, asks: str) -> Any:
    """What stands for an object in a message.

    Args:
        value: neither tensor nor plain value, and without any in it.
        asks: what the message may show, of which nothing else is asked: `s` for `str`, `r` for
            `repr`, and `n` for its number.
    """
    numbers: list[Any] = [None, None, None]
    functions: tuple[Callable[[Any], Any], ...] = (operator.index, int, float)
    for place, function in enumerate(functions if "n" in asks else ()):
        if hasattr(type(value), f"__{function.__name__}__"):
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                numbers[place] = function(value)
    texts = str(value) if "s" in asks else "", repr(value) if "r" in asks else ""
    return Object(*texts, *numbers)


def _is_whole(value: Any) -> bool:
    """Whether a message shows an object by code of its own class, and not part by part."""
    kind = type(value)
    if kind in _COLLECTIONS or kind.__module__ == "torch.return_types":
        return False
    code = getattr(kind.__repr__, "__code__", None)
    return not (
        issubclass(kind, tuple)
        and code is not None
        and code.co_filename == _NAMED_TUPLE
        and kind.__str__ is object.__str__
    )


def _asks_for_representation(message: Any) -> bool:
    return type(message) is not str or any(
        conversion[-1] in "ra" for conversion in conversions_in(message)[1::2]
    )


def _registered(name: str) -> logging.Logger | None:
    """The logger that Python finds by a name."""
    root = logging.getLogger()
    if name == root.name:
        return root
    found = logging.Logger.manager.loggerDict.get(name)
    return found if isinstance(found, logging.Logger) else None


def _is_processed() -> bool:
    """Whether the message of a logger has gone through a method of the user's adapter."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename == _LOGGING
    ):
        adapter = frame.f_locals.get("self") if frame.f_code.co_filename == _LOGGING else None
        if isinstance(adapter, logging.LoggerAdapter):
            return type(adapter).process is not logging.LoggerAdapter.process
        frame = frame.f_back
    return False


def _codes_of(error: BaseException | None) -> Iterator[CodeType]:
    """The code through which an exception, and those before it, have come."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or _identity(one) in seen:
            continue
        seen.add(_identity(one))
        waiting += [one.__cause__, one.__context__]
        trace: TracebackType | None = one.__traceback__
        while trace is not None:
            yield trace.tb_frame.f_code
            trace = trace.tb_next


def _writes_for_others(file: str) -> bool:
    """Whether a file's code writes what its caller shows, as that of `pprint` does."""
    return is_own_file(file) or (is_standard(file) and file not in (_LOGGING, warnings.__file__))


def _calling_frame(hidden: Collection[str] = ()) -> FrameType | None:
    """The innermost frame that is neither roam's nor of a hidden file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_own_file(frame.f_code.co_filename) or frame.f_code.co_filename in hidden
    ):
        frame = frame.f_back
    return frame


__all__ = ["Messages"]
