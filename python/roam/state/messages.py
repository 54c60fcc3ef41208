"""What a step prints, and what it gives to a logger.

A trace prints nothing. It records each message beside the step's result, as if the step added it to
a list, and each run gives the messages out when its kernels have run, with the values of its call.
The named tuples are nodes of PyTorch's pytree, as results are: their tensors and numbers are those
of the call.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

import torch

from roam.state.live_scalars import is_live
from roam.torch_compat.private import pytree, tensor_text

N = TypeVar("N", int, float)

BLANK: Final = "\ufdd0"
"""A character that no text has."""


class Shown(NamedTuple):
    """A tensor as it was when the step gave it out; its text is that of the tensor itself.

    Attributes:
        values: a copy, which has no gradient.
        is_parameter: whether it was a parameter.
        suffix: what its text says of its gradient, such as ``grad_fn=<MeanBackward0>``.
    """

    values: torch.Tensor
    is_parameter: bool
    suffix: str

    def __repr__(self) -> str:
        text = tensor_text(self.values, self.suffix)
        return f"Parameter containing:\n{text}" if self.is_parameter else text

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, form: str) -> str:
        if self.values.dim() or self.is_parameter:
            return object.__format__(self, form)
        return format(self.values.item(), form)

    def __float__(self) -> float:
        return float(self.values)

    def __int__(self) -> int:
        return int(self.values)

    def __index__(self) -> int:
        return operator.index(self.values)


class Object(NamedTuple):
    """An object that is neither tensor nor plain value, as it was when the step gave it out.

    Attributes:
        text, representation: what `str` and `repr` made of it; empty if the message shows only the
            other.
        as_index, as_int, as_float: what `operator.index`, `int` and `float` made of it, or None.
    """

    text: str
    representation: str
    as_index: int | None
    as_int: int | None
    as_float: float | None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.representation

    def __float__(self) -> float:
        return _number(self.as_float)

    def __int__(self) -> int:
        return _number(self.as_int)

    def __index__(self) -> int:
        return _number(self.as_index)


def _number(value: N | None) -> N:
    if value is None:
        raise TypeError("must be a real number")
    return value


class Formatted(NamedTuple):
    """A value in a text, as in ``f"{value:.3f}"``, ``f"{value!r}"``, and ``"%.3f" % value``.

    Attributes:
        value: a tensor, as `Shown`, or a number.
        conversion: ``"s"``, ``"r"``, or ``"%"``; nothing if there is only a format.
        form: the format.
    """

    value: Any
    conversion: str
    form: str

    def __str__(self) -> str:
        if self.conversion == "%":
            return self.form % (self.value,)
        if self.conversion:
            return str(self.value) if self.conversion == "s" else repr(self.value)
        return format(self.value, self.form)


class Text(NamedTuple):
    """A text with values in it: strings and `Formatted` by turns."""

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
        extra: further attributes of the record.
        exception: the text of an exception; None without one.
    """

    logger: str
    level: int
    message: Any
    arguments: list[Any]
    file: str
    line: int
    function: str
    extra: dict[str, Any] | None
    exception: str | None

    def give_out(self) -> None:
        logger = logging.getLogger(self.logger)
        if not logger.isEnabledFor(self.level):
            return
        message = str(self.message) if type(self.message) is Text else self.message
        arguments = tuple(str(one) if type(one) is Text else one for one in self.arguments)
        place = self.file, self.line
        record = logger.makeRecord(
            logger.name, self.level, *place, message, arguments, None, self.function, self.extra
        )
        record.exc_text = self.exception
        logger.handle(record)


Message = Printed | Logged


def outline(message: Message) -> str:
    """A message with `BLANK` in the place of each number that only a run knows, and each tensor."""
    fields = (field if type(field) is list else [field] for field in message)
    return "\0".join(map(_outline, chain.from_iterable(fields)))


def _outline(value: Any) -> str:
    if type(value) is str:
        return value
    if type(value) is Text:
        return "".join(part if type(part) is str else BLANK for part in value.parts)
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: type(part) is Shown)
    blank = [_Blank() if type(leaf) is Shown or is_live(leaf) else leaf for leaf in leaves]
    return str(pytree.tree_unflatten(blank, spec))


class _Blank:
    def __repr__(self) -> str:
        return BLANK


class _Outlet:
    """Gives messages out, in the place of a list that grows."""

    def extend(self, messages: Iterable[Message]) -> None:
        for message in messages:
            message.give_out()


OUTLET: Final = _Outlet()
PATH: Final = "what the step prints"
"""Names the outlet among the lists that grow."""


__all__ = [
    "BLANK",
    "OUTLET",
    "PATH",
    "Formatted",
    "Logged",
    "Message",
    "Object",
    "Printed",
    "Shown",
    "Text",
    "outline",
]
