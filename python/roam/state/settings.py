"""Settings: plain values that a step sets, such as the mode that `Module.train` sets, and that a
call finds otherwise, as after an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from roam.state.containers import MappingSpace
from roam.state.equality import MISSING, same
from roam.state.spaces import Space


@dataclass(frozen=True, slots=True)
class Setting:
    """An entry of a dictionary, or an attribute, that a step gives another plain value."""

    space: Space
    key: Any
    old: Any
    """What was there before, or `MISSING`."""
    value: Any

    def is_pending(self) -> bool:
        """Whether it has the old value."""
        return same(self.old, self.space.get(self.key))

    def undo(self, old: Any) -> None:
        """Gives it the old value."""
        if old is MISSING and type(self.space) is MappingSpace:
            self.space.put(
                [(key, value) for key, value in self.space.items() if not same(key, self.key)]
            )
        else:
            self.space.set(self.key, old)


def put(settings: Sequence[Setting]) -> None:
    """Gives each the new value."""
    for setting in settings:
        setting.space.set(setting.key, setting.value)


@contextmanager
def in_place(settings: Sequence[Setting]) -> Iterator[None]:
    """A context in which the new values are in place. When it ends, the old ones come back."""
    before = [setting.space.get(setting.key) for setting in settings]
    try:
        put(settings)
        yield
    finally:
        for setting, old in zip(settings, before, strict=True):
            setting.undo(old)


@dataclass(frozen=True, slots=True)
class Settings:
    """All that one variant of a step sets where it finds the old values, and does the same
    otherwise.
    """

    all: Sequence[Setting]
    is_first: bool
    """Whether the variant is the step that makes the optimizers' state."""

    def is_pending(self) -> bool:
        """Whether all have the old values: what the step does where some have is not known."""
        return all(setting.is_pending() for setting in self.all)
