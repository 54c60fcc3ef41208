"""The interface of a trace for the objects that stand in for numbers, generators and multi-tensor
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol


class TraceContext(Protocol):
    """A trace that records. Slots number its values.

    Attributes:
        is_over: whether it has ended.
    """

    is_over: bool

    def refuse(self, message: str, *, code: str, op: str = "") -> NoReturn:
        """Raises a `CaptureError` that names the user's line."""

    def refuse_collective(self, name: str) -> NoReturn:
        """Raises a `CaptureError` for a function that brings processes together."""

    def fixed_value(self, slot: int) -> Any:
        """The value of a number for which a plan may hold; None if it may not."""

    def decided(
        self, slot: int, function: Callable[..., bool], others: tuple[float, ...]
    ) -> bool | None:
        """The answer of a comparison with constants, which the plan's guards make again; None if
        they cannot.
        """

    def branch(self, function: Callable[..., bool], operands: tuple[Any, ...]) -> bool | None:
        """The answer of a comparison that the plan's own run checks; None if it cannot."""

    def refuse_asked(self, slot: int, origin: str) -> NoReturn:
        """Raises a `CaptureError` for code that needs the value of a number from `origin`."""

    def scalar_call(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """Records arithmetic on numbers that change from step to step."""

    def handed_on(self, number: Any) -> Any:
        """A plain number for code in C++ that asks for the number's value to hand it on to an
        operator of others, which is recorded with the number itself; None if it asks for another
        purpose.
        """

    def generator_call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], result: Any = None
    ) -> None:
        """Records a function that reads or changes the state of a random generator."""

    def effect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records an operator that changes its arguments and returns nothing."""

    def note_split(self, name: str, parts: int) -> None:
        """Counts a multi-tensor call that is recorded as several calls."""
