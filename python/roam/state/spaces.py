"""A space: one mutable thing in which a program keeps values under keys.

It is a dictionary, a list, a set (`containers`), a closure cell, some names of a module, the
attributes of an object (`namespaces`), or an optimizer's parameter groups (`optimizer_spaces`). The
walk over a step's state (`discovery`) finds the spaces, the guards (`guards`) compare their
contents, and the snapshot (`snapshot`) puts contents back. Contents are read and written through
the base types' own methods, so that none of the user's code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from roam.errors import CaptureError
from roam.state.equality import MISSING, same

Items = list[tuple[Any, Any]]
Place = tuple["Space", Any]
"""A space and a key in it."""


class Space:
    """One mutable holder of values.

    Attributes:
        holder: what holds them.
        path: how a reader would write it, such as ``model.h[0].attn.dropout``.
    """

    __slots__ = ("_label", "holder", "path")

    def __init__(
        self, holder: Any, path: str, label: Callable[[str, Any], str] | None = None
    ) -> None:
        self.holder = holder
        self.path = path
        self._label = label

    def items(self) -> Items:
        """The keys and values of now, in order."""
        raise NotImplementedError

    def put(self, items: Items) -> None:
        """Make these the contents again, in this order, in the same holder."""
        for key, value in items:
            self.set(key, value)

    def get(self, key: Any) -> Any:
        """The value under `key`, or `MISSING`."""
        return next((value for other, value in self.items() if same(other, key)), MISSING)

    def set(self, key: Any, value: Any) -> None:
        """Put one value under a key that is there already.

        Raises:
            CaptureError: if the holder is immutable.
        """
        raise CaptureError(
            f"{self.label(key)} is held where capture cannot put a fake tensor in its place; keep it in a list or as an attribute",
            code="wrapped_place",
        )

    @property
    def is_immutable(self) -> bool:
        """Whether the contents can never change."""
        return False

    @property
    def takes_others(self) -> bool:
        """Whether other values can be put under its keys."""
        return not self.is_immutable and type(self).set is not Space.set

    def is_live(self, key: Any, old: Any, value: Any) -> bool:
        """Whether the value under `key` may change so from step to step without harm."""
        return False

    def label(self, key: Any) -> str:
        """How a reader would write the value under `key`."""
        if self._label is not None:
            return self._label(self.path, key)
        return f"{self.path}[{key!r}]" if type(key) in (str, int) else f"{self.path}[...]"


class NamedSpace(Space):
    """A space whose keys are names."""

    __slots__ = ()

    def label(self, key: Any) -> str:
        return f"{self.path}.{key}"


def are_identical(items: Items, others: Items) -> bool:
    """Whether contents are the very same keys and values, in the same order."""
    return len(items) == len(others) and all(
        key is other_key and value is other
        for (key, value), (other_key, other) in zip(items, others, strict=True)
    )


def child(path: str, key: Any) -> str:
    """What a module's children, parameters and buffers, and an object's attributes are called."""
    if type(key) is not str:
        return f"{path}[...]"
    return f"{path}[{key}]" if key.isdigit() else f"{path}.{key}"


def is_under(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a path is one of these, or leads on from it."""
    return any(
        path == prefix or (path.startswith(prefix) and path[len(prefix)] in ".[{")
        for prefix in prefixes
    )
