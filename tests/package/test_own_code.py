"""Roam's own frames are never taken for the user's line, wherever in the package they are."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import roam
from roam.errors import CaptureError
from roam.own_code import is_compiled_step, is_own_file, is_own_module
from roam.state.reach import Reach
from roam.tracing.recording.recorder import Recorder

PACKAGE = Path(roam.__file__).parent
ROOMS = sorted({"."} | {str(file.parent.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")})
OWN_ROOMS = [room for room in ROOMS if Path(room).parts[:1] != ("zoo",)]


def between(room: str) -> Callable[..., Any]:
    """A function that calls what it is given, in a file of a folder of roam's."""
    file = PACKAGE / room / "between.py"
    names: dict[str, Any] = {"__name__": ".".join(("roam", *Path(room).parts, "between"))}
    exec(
        compile("def call(function, *args):\n    return function(*args)\n", str(file), "exec"),
        names,
    )
    return names["call"]


def line_after(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the first line of a function that has a text."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(number for number, line in enumerate(lines) if text in line)}"


def test_all_rooms_are_found() -> None:
    assert {"tracing", "runtime", "kernels", "report", "exact"} <= set(OWN_ROOMS)
    assert "zoo" in set(ROOMS) - set(OWN_ROOMS)


@pytest.mark.parametrize("room", OWN_ROOMS)
def test_an_error_raised_in_a_room_names_the_users_line(room: str) -> None:
    call = between(room)

    def fail() -> None:
        raise ValueError("no")

    def step(x: torch.Tensor) -> torch.Tensor:
        call(torch.add, x, torch.ones(3))
        return x

    with pytest.raises(CaptureError) as refusal:
        roam.capture(step, torch.ones(2))
    assert refusal.value.code == "step_raised"
    assert refusal.value.source == line_after(step, "call(")


@pytest.mark.parametrize("room", OWN_ROOMS)
def test_an_operator_run_by_a_room_names_the_users_line(room: str) -> None:
    call = between(room)

    def step(x: torch.Tensor) -> torch.Tensor:
        return call(torch.sin, x)

    (operator,) = roam.capture(step, torch.ones(2)).operators
    assert f"{operator.file}:{operator.line}" == line_after(step, "call(")


@pytest.mark.parametrize("room", OWN_ROOMS)
def test_a_check_run_by_a_room_is_read_off_the_users_code(room: str) -> None:
    """Which answer passes is read off the source of whoever asks: roam's own frames are passed
    over."""
    call = between(room)

    def step(x: torch.Tensor) -> torch.Tensor:
        assert call(bool, (x > 0).all())
        return x * 2

    assert "checked" not in dict(
        roam.capture(step, torch.ones(2)).notes
    )  # an assertion is no branch


def test_a_training_step_of_the_zoo_is_the_users() -> None:
    call = between("zoo")

    def step(x: torch.Tensor) -> torch.Tensor:
        return call(torch.sin, x)

    (operator,) = roam.capture(step, torch.ones(2)).operators
    assert (operator.file, operator.line) == ("roam/zoo/between.py", 2)


def test_names_of_own_modules() -> None:
    assert is_own_module("roam")
    assert is_own_module("roam.tracing.step")
    assert is_own_module(Recorder.__module__)
    assert not is_own_module("roam.zoo.catalog")
    assert not is_own_module("roam_bench")
    assert not is_own_module("roaming")
    assert is_own_file(inspect.getfile(Reach))
    assert not is_own_file(__file__)


def test_a_compiled_step_is_known_by_its_class() -> None:
    assert is_compiled_step(type(roam.compile(torch.sin)))
    assert not is_compiled_step(type("Step", (), {"__module__": "roam.runtime.compile"}))
