"""Gradients that plans have freed, where eager PyTorch would still have them.

A plan frees a gradient from which it has updated the parameter, if its own next run does not read
it. Another step may: one that resets gradients only now and then, or that updates parameters for
which it has no new gradient. Such a step is traced as if the gradients were there, and refused if
it uses them. Where the user's own function runs in a plan's place, stand-ins take their places.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple

import torch

from roam.errors import ExecutionError
from roam.torch_compat.private import without_data

REMEDY: Final = (
    "pass keep_grads=True to roam.compile, for every step that updates the parameter, or let each "
    "step reset its gradient before it is used"
)


class _Freed(NamedTuple):
    parameter: weakref.ref[torch.Tensor]
    gradient: weakref.ref[torch.Tensor] | None
    """What has been left there since, without what was freed; None if nothing has."""


_GRADIENT: Final = operator.attrgetter("grad")
_freed: Final[dict[int, _Freed]] = {}
"""By the parameters' identities."""
_changes = 0
"""How many times `_freed` has changed."""


def _has_changed() -> None:
    global _changes
    _changes += 1


def _forget(key: int, parameter: weakref.ref[torch.Tensor]) -> None:
    if key in _freed and _freed[key].parameter is parameter:
        del _freed[key]
        _has_changed()


def note_freed(parameter: torch.Tensor) -> None:
    """Notes that a plan has freed a parameter's gradient, or left one without what was freed."""
    gradient = parameter.grad
    known = _freed.get(id(parameter))
    if known is None or gradient is not None or known.gradient is not None:
        _freed[id(parameter)] = _Freed(
            weakref.ref(parameter, partial(_forget, id(parameter))),
            None if gradient is None else weakref.ref(gradient),
        )
        _has_changed()


def note_reset(parameter: torch.Tensor) -> None:
    """Notes that eager PyTorch has no more of a parameter's gradient than there is."""
    if _freed.pop(id(parameter), None) is not None:
        _has_changed()


def gradients_left(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Those of some parameters that have a gradient, each with it."""
    gradients = list(map(_GRADIENT, parameters))
    if all(map(operator.is_, gradients, repeat(None))):
        return []
    return [pair for pair in zip(parameters, gradients, strict=True) if pair[1] is not None]


class Notes:
    """What each run of a plan notes of the same places of parameters.

    Usually all of it is noted already, since nothing has been noted since the last run. A parameter
    that was noted and is gone would have been forgotten, which counts as a change, so that no other
    one is taken for it.

    Args:
        frees: for each parameter, whether the plan frees its gradient.
    """

    def __init__(self, frees: Sequence[bool]) -> None:
        self._frees = frees
        self._last: tuple[int, list[int]] = -1, []

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """Notes what the plan has done to the gradients of these, which are gone."""
        identities = list(map(id, parameters))
        if self._last == (_changes, identities):
            return
        for parameter, frees in zip(parameters, self._frees, strict=True):
            (note_freed if frees else note_reset)(parameter)
        self._last = _changes, identities


def noted() -> Callable[[], None]:
    """Returns a function that restores what is noted now, as a snapshot restores state."""
    known = dict(_freed)

    def restore() -> None:
        _freed.clear()
        _freed.update({key: one for key, one in known.items() if one.parameter() is not None})
        _has_changed()

    return restore


def lacks(parameter: torch.Tensor) -> bool:
    """Whether a parameter's gradient is not what eager PyTorch has, since a plan has freed it."""
    known = _freed.get(id(parameter))
    if known is None:
        return False
    gradient = parameter.grad
    if known.gradient is None:
        return gradient is None
    return gradient is not None and known.gradient() is gradient


class _StandIn(torch.Tensor):
    """Stands for a freed gradient. It may be reset, replaced and added to; every other use is
    refused.
    """

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> Any:
        return without_data(cls, parameter, parameter.grad_dtype or parameter.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor or (
            func is torch.ops.aten.add_.Tensor and isinstance(args[0], cls)
        ):
            return args[0] if isinstance(args[0], cls) else args[1]
        raise ExecutionError(
            f"{func} uses a gradient that a plan has freed, and eager PyTorch still has; {REMEDY}. "
            "What this call has changed so far stays changed",
            code="freed_gradient",
            operator=str(func),
        )


@contextmanager
def freed_stood_for() -> Iterator[None]:
    """In the block, where the user's own function runs, stand-ins are in place of freed
    gradients.
    """
    placed: list[torch.Tensor] = []
    for known in list(_freed.values()):
        parameter = known.parameter()
        if parameter is not None and known.gradient is None and lacks(parameter):
            parameter.grad = _StandIn(parameter)
            placed.append(parameter)
    try:
        yield
    finally:
        for parameter in placed:
            if isinstance(parameter.grad, _StandIn):
                parameter.grad = None
            else:
                note_reset(parameter)
