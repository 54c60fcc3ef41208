"""Unusual ways to print and to log: refused, and then beside the plan as eagerly."""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import logging
import pprint
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from test_messages import LOGGER, Show, check_beside, check_refused, made, of_its_own, shown

import roam
from newer import needs_2_15
from roam import CaptureError

__all__ = ["of_its_own"]  # a fixture, for all tests

FLUSHING: Final = functools.partial(print, flush=True)
UNKNOWN: Final = logging.Logger("that nobody finds")


class Level(enum.IntEnum):
    """A number that is no plain one."""

    HIGH = 255


class Word(str):
    """A text of another class."""

    __slots__ = ()


class Pair(NamedTuple):
    """Shown as all of its kind."""

    loss: Any
    step: int


class ByItself(NamedTuple):
    """Its text comes from code of its own."""

    loss: Any

    def __repr__(self) -> str:
        return f"{self.loss:.3f}"


class Falsy(io.StringIO):
    """A file that counts as false."""

    def __bool__(self) -> bool:
        return False


class Shouting(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Reads what it is given."""

    def process(self, msg: Any, kwargs: Any) -> Any:
        return msg.upper().ljust(40), kwargs


class OfItsOwn(logging.Logger):
    """Makes records in its own way."""

    def makeRecord(self, *args: Any, **kwargs: Any) -> Any:
        return super().makeRecord(*args, **kwargs)


OWN: Final = OfItsOwn("of its own class")
OWN.manager.loggerDict[OWN.name] = OWN


def by_another_name(my: Any, loss: Any, x: Any, show: Any = print) -> None:
    show("a", 1, sep="-")
    FLUSHING("b")


def written(my: Any, loss: Any, x: Any) -> None:
    sys.stdout.write("a\n")
    sys.stderr.write("b\n")
    pprint.pprint({"c": my.steps == 0, "d": list(range(50))})


def with_a_traceback(my: Any, loss: Any, x: Any) -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        LOGGER.info("bad %s", error, exc_info=error)
        LOGGER.info("bad", exc_info=(type(error), error, error.__traceback__))
        traceback.print_exc()


def to_errors_by_redirection(my: Any, loss: Any, x: Any) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        print("x", loss.item())


def numbers_of_objects(my: Any, loss: Any, x: Any) -> None:
    LOGGER.info("%d %x %s", np.int64(2**53 + 1), Level.HIGH, Level.HIGH)
    LOGGER.info("%.2f %d", Decimal("1.25"), Fraction(2**60 + 1))
    LOGGER.info("%x", (loss * 0).long() + 255)


PLANNED: Final[dict[str, Show]] = {
    "redirected to errors": to_errors_by_redirection,
    "file that is false": lambda my, loss, x: print("x", file=Falsy()),
}


@pytest.mark.parametrize("show", PLANNED.values(), ids=PLANNED)
def test_as_eagerly(show: Show) -> None:
    assert shown(roam.compile(made(show), python="idle")) == shown(made(show))


def view_of_what_is_changed(my: Any, loss: Any, x: Any) -> None:
    row = my.net(x)[0]
    row.mul_(2)
    print(row)


@contextlib.contextmanager
def few_digits() -> Iterator[None]:
    torch.set_printoptions(precision=2)
    try:
        yield
    finally:
        torch.set_printoptions(profile="default")


def with_few_digits(my: Any, loss: Any, x: Any) -> None:
    with few_digits():
        print(loss)


def at_a_level_of_its_own(my: Any, loss: Any, x: Any) -> None:
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.debug("x")
    LOGGER.setLevel(logging.INFO)


def after_a_refusal(my: Any, loss: Any, x: Any) -> None:
    try:
        text = f"{loss.item():.3f}"
    finally:
        print(text)


def error_of_a_library(my: Any, loss: Any, x: Any) -> None:
    try:
        torch.ones(2).view(3)
    except RuntimeError:
        LOGGER.exception("bad")


BESIDE: Final[dict[str, Show]] = {
    "other names": by_another_name,
    "writing": written,
    "traceback": with_a_traceback,
    "numbers": numbers_of_objects,
    "named tuples": lambda my, loss, x: print(Pair(loss, 1), Pair(loss.item(), 2), x.max(1)),
    "separator of a class": lambda my, loss, x: print("a", loss, sep=Word("-")),
    "representations": lambda my, loss, x: LOGGER.info("%(a)r %(a)s", {"a": Word("w")}),
    "padding, key with a space": lambda my, loss, x: print("%(a b)9s|" % {"a b": loss.item()}),  # noqa: UP031
    "padding, long": lambda my, loss, x: print("%30ls|" % loss.item()),  # noqa: UP031
    "adapter": lambda my, loss, x: Shouting(LOGGER, {}).info(f"{loss.item():.3f}"),
    "named tuple": lambda my, loss, x: print(ByItself(loss)),
    "view": view_of_what_is_changed,
    "options": with_few_digits,
    "level": at_a_level_of_its_own,
    "after a refusal": after_a_refusal,
    "logger that nobody finds": lambda my, loss, x: UNKNOWN.error("x"),
    "logger of a class": lambda my, loss, x: OWN.error("x"),
    "mapping": lambda my, loss, x: LOGGER.info("%(a)s", ChainMap({"a": 1})),
}


@pytest.mark.parametrize("show", BESIDE.values(), ids=BESIDE)
def test_refused(show: Show) -> None:
    check_refused(show, "test_messages_of_all_kinds.py")


@needs_2_15
@pytest.mark.sweep
@pytest.mark.parametrize("show", BESIDE.values(), ids=BESIDE)
def test_beside_the_plan(show: Show, caplog: pytest.LogCaptureFixture) -> None:
    check_beside(show, caplog)


@pytest.mark.parametrize(
    "show", [error_of_a_library, lambda my, loss, x: LOGGER.info("x", stack_info=True)]
)
def test_a_traceback_is_refused(show: Show) -> None:
    check_refused(show, "test_messages_of_all_kinds.py")


def test_a_level_of_a_logger_found_by_its_name_is_seen() -> None:
    name = f"{LOGGER.name}.child"

    def run(wrap: Callable[..., Any]) -> str:
        step = wrap(made(lambda my, loss, x: logging.getLogger(name).info("%s", loss.item())))
        found = ""
        for level in (logging.ERROR, logging.INFO, logging.ERROR):
            logging.getLogger(name).setLevel(level)
            found += shown(step, times=2)[0] + "|"
        return found

    assert run(roam.compile) == run(lambda step: step)


def test_streams_are_as_before() -> None:
    out = io.StringIO()
    step = roam.compile(made(lambda my, loss, x: print(f"{loss}".strip())), python="idle")
    with contextlib.redirect_stdout(out), pytest.raises(CaptureError):
        step(torch.ones(2, 4))
    assert "write" not in vars(out)


def test_a_stream_that_the_step_holds_is_named() -> None:
    def show(my: Any, loss: Any, x: Any, file: Any = sys.__stdout__) -> None:
        print("x", file=file)

    with pytest.raises(CaptureError, match="is a stream"):
        shown(roam.compile(made(show), python="idle"))


def timed_by_a_variable() -> Show:
    from time import time as now

    return lambda my, loss, x: print(now())


def timed_by_an_import(my: Any, loss: Any, x: Any) -> None:
    from timeit import default_timer

    print(f"{default_timer():.0e}")


@pytest.mark.parametrize("show", [timed_by_a_variable(), timed_by_an_import])
def test_the_time_is_refused(show: Show) -> None:
    with pytest.raises(CaptureError, match="clock"):
        shown(roam.compile(made(show), python="idle"))
