"""What a step prints, and what it gives to a logger.

A trace prints nothing. It records each message beside the step's result, as if the step added it to
a list, and each run gives the messages out when its kernels have run, with the numbers of its call.
The named tuples are nodes of PyTorch's pytree, as results are.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final, NamedTuple

from roam.state.live_scalars import is_live

BLANK: Final = "\ufdd0"
"""A character that no text has."""


class Formatted(NamedTuple):
    """A number in a text, as in ``f"{value:.3f}"`` and ``f"{value!r}"``.

    Attributes:
        value: the number.
        conversion: ``"s"`` or ``"r"``; nothing if there is only a format.
        form: the format.
    """

    value: Any
    conversion: str
    form: str

    def __str__(self) -> str:
        if self.conversion:
            return str(self.value) if self.conversion == "s" else repr(self.value)
        return format(self.value, self.form)


class Text(NamedTuple):
    """A text with numbers in it: strings and `Formatted` by turns."""

    parts: list[Any]

    def __str__(self) -> str:
        return "".join(map(str, self.parts))


class Printed(NamedTuple):
    """A call of `print`.

    Attributes:
        values: its positional arguments.
        separator, end: its arguments `sep` and `end`.
        to_errors: whether it prints to `sys.stderr`.
        flushes: whether it flushes.
    """

    values: list[Any]
    separator: str | None
    end: str | None
    to_errors: bool
    flushes: bool

    def give_out(self) -> None:
        file = sys.stderr if self.to_errors else None
        print(*self.values, sep=self.separator, end=self.end, file=file, flush=self.flushes)


class Logged(NamedTuple):
    """A call of a logger's method.

    Attributes:
        logger: its name.
        level: of the message.
        message, arguments: as they were given to the logger.
        file, line, function: the user's place.
    """

    logger: str
    level: int
    message: Any
    arguments: list[Any]
    file: str
    line: int
    function: str

    def give_out(self) -> None:
        logger = logging.getLogger(self.logger)
        if not logger.isEnabledFor(self.level):
            return
        message, *arguments = (
            str(one) if type(one) is Text else one for one in (self.message, *self.arguments)
        )
        place = self.file, self.line
        logger.handle(
            logger.makeRecord(
                logger.name, self.level, *place, message, tuple(arguments), None, self.function
            )
        )


Message = Printed | Logged


def outline(message: Message) -> str:
    """A message with `BLANK` in the place of each number that only a run knows."""
    fields = (field if type(field) is list else [field] for field in message)
    return "\0".join(map(_outline, chain.from_iterable(fields)))


def _outline(value: Any) -> str:
    if type(value) is Text:
        return "".join(part if type(part) is str else BLANK for part in value.parts)
    return BLANK if is_live(value) else str(value)


class _Outlet:
    """Gives messages out, in the place of a list that grows."""

    def extend(self, messages: Iterable[Message]) -> None:
        for message in messages:
            message.give_out()


OUTLET: Final = _Outlet()
PATH: Final = "what the step prints"
"""Names the outlet among the lists that grow."""
