"""Copies that a step makes of random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from roam.state.snapshot import is_same_state, source_of

Refuse = Callable[..., NoReturn]


class CopiedGenerators:
    """Copies that a step makes, by `copy`, of the random generators of Python's and NumPy's that it
    holds. A draw from a copy leaves the generator as it was, so nothing else would tell that chance
    decides what runs.
    """

    def __init__(self, sources: Iterable[Any]) -> None:
        self._held = {id(source) for source in sources}
        self._made: list[tuple[Callable[[], Any], Any]] = []

    def stand_in(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in for the function by which `copy` makes objects."""

        def made(value: Any, *args: Any, **kwargs: Any) -> Any:
            copied = original(value, *args, **kwargs)
            if id(value) in self._held:
                _, read, _ = source_of("a copy", copied)
                self._made.append((read, read()))
            return copied

        return made

    def check(self, refuse: Refuse) -> None:
        """Refuses a step that has drawn from a copy."""
        if not all(is_same_state(read(), state) for read, state in self._made):
            refuse(
                "the step draws from a copy of a random generator, whose state may be another one "
                "at the next call; draw outside of the step, and pass the numbers to it",
                code="generator_state",
            )


__all__ = ["CopiedGenerators"]
