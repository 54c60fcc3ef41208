"""One call of a step, whose arguments are taken apart once, whatever asks for them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch

from roam.state.arguments import Taken, Taker
from roam.state.equality import Misfit, is_hashed_by_value, is_numpy_array, is_plain
from roam.state.metadata import metadata_of
from roam.state.value_stand_ins import is_left_by_tokenizer, kinds


class StepCall:
    """A call of a compiled step.

    Attributes:
        held: what the references of the plan that fits it hold.
        inputs: what that plan takes in: of distributed tensors this process's part.
        misfit: why that plan cannot run it; None if it can.
        asked: what checks that several plans share have said.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.forget()

    def forget(self) -> None:
        """To be called when arguments and state are no longer as they were, or are not to be kept
        alive.
        """
        self.held: list[Any] = []
        self.inputs: list[Any] = []
        self.misfit: Misfit | None = None
        self.asked: dict[Any, Misfit | None] = {}
        self._taken: list[tuple[Taker, Taken]] = []

    def taken(self, taker: Taker) -> Taken:
        """The arguments, taken apart.

        Raises:
            CaptureError: a container has attributes that would be lost.
        """
        for other, taken in self._taken:
            if other.opened == taker.opened and other.closed is taker.closed:
                return taken
        taken = taker.take(self.args, self.kwargs)
        self._taken.append((taker, taken))
        return taken

    def key(self, taker: Taker) -> tuple[Hashable, ...]:
        """Equal for any two calls that one `ArgGuard` lets pass, and different if it is cheap to
        tell that no `ArgGuard` lets both pass.
        """
        return _key(self.taken(taker).leaves, taker.live)

    def kind(self, taker: Taker) -> tuple[Hashable, ...]:
        """A key without plain values, once some of these have changed from call to call."""
        return _key(self.taken(taker).leaves, kinds() if taker.varied else ())

    def form(self, taker: Taker) -> tuple[Hashable, ...]:
        """A key for calls in which the step's own Python runs. It is without the numbers, texts,
        and objects among the arguments: what they decide shows in what Python does.
        """
        return tuple(
            _leaf_key(leaf, ()) if isinstance(leaf, (torch.Tensor, bool)) else (type(leaf),)
            for leaf in taker.take(self.args, self.kwargs, rebuilds=False).leaves
        )


def _key(leaves: Sequence[Any], varied: Collection[type]) -> tuple[Hashable, ...]:
    return tuple(_leaf_key(leaf, varied) for leaf in leaves)


def _leaf_key(value: Any, varied: Collection[type]) -> Hashable:
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return metadata_of(value)
    if kind in varied or is_left_by_tokenizer(value):
        return (kind,)
    if is_hashed_by_value(kind):
        return kind, value
    if is_plain(value) or issubclass(kind, tuple) or is_numpy_array(value):
        return (kind,)  # a float may be live, and the others take long to compare
    return kind, id(value)
