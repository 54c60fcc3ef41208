"""Whether optimizers' state, gradients and loss scales are of the kinds that a plan is for.

They are read anew at every call, so a plan depends only on their shapes, dtypes, devices and
strides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final

import torch

from roam.state.containers import FrozenSpace
from roam.state.equality import MISSING, Misfit, changed, show
from roam.state.metadata import LayoutCheck
from roam.state.references import (
    GradientReference,
    OptimizerReference,
    PartReference,
    PlaceReference,
    ScalerReference,
    StateKeys,
    filled_entries,
    is_filled,
)
from roam.state.wrappers import Form, is_wrapper
from roam.torch_compat.private import layout_of, local_of

Kind = tuple[tuple[int, ...], torch.dtype, torch.device, tuple[int, ...], Any]
"""(shape, dtype, device, strides, layout over devices). For a distributed tensor the first four are
those of this process's part; for any other tensor the layout is None.
"""
_Reference = OptimizerReference | ScalerReference | GradientReference | PartReference
_seen: Final = operator.attrgetter("shape", "dtype", "device")


class StateGuard:
    """Compares the tensors that optimizers' state, gradients and gradient scalers hold with what a
    plan is for, and the keys of optimizers' state, for which a step may test.

    Args:
        expected: each reference of such a tensor, with the tensor's kind.
        state_keys: the keys of each optimizer's state.
        wholes: each reference of a wrapper in this state, with its form.
    """

    def __init__(
        self,
        expected: Iterable[tuple[_Reference, Kind]],
        state_keys: Iterable[StateKeys] = (),
        wholes: Iterable[tuple[Any, Form]] = (),
    ) -> None:
        self._expected = list(expected)
        self._wholes = list(wholes)
        self._state_keys = list(state_keys)
        self._names = [names for keys in self._state_keys for _, names in keys.filled]
        self._counts = list(map(len, self._names))
        found = {
            (id(reference.parameter), reference.key)
            for reference, _ in self._expected
            if isinstance(reference, OptimizerReference)
        }
        self._are_all_held = all(
            (id(place), name) in found
            for keys in self._state_keys
            for place, names in keys.filled
            for name in names
        )
        """Whether all entries of parameters that have state are among these tensors. If they are
        there, others would show in how many there are."""
        self._check = LayoutCheck()
        self._kinds = [kind[:3] for _, kind in self._expected]
        self._strides = [kind[3] for _, kind in self._expected]
        self._layouts = [kind[4] for _, kind in self._expected]

    def failure(self, held: list[Any], entries: list[Any] | None) -> Misfit | None:
        """None while all are of these kinds, else the first that is not.

        Args:
            held: what the references hold now.
            entries: what optimizers keep of each parameter that has state, in the order of
                `state_keys`; None if it is not known.
        """
        for whole, form in self._wholes:
            if (found := whole.get()) is MISSING:
                return Misfit(f"{whole.path} does not exist yet")
            if not (is_wrapper(found) and Form.of(found) == form):
                return changed(whole.path, show(form), show(found))
        try:
            # In the usual case a few passes over all at once decide.
            if (
                entries is not None
                and (
                    all(map(operator.eq, map(len, entries), self._counts))
                    if self._are_all_held
                    else all(map(operator.eq, map(dict.keys, entries), self._names))
                )
                and not any(map(_count_failure, self._state_keys))
            ):
                if self._check.passes(held):
                    return None
                tensors = list(map(local_of, held))
                if (
                    list(map(layout_of, held)) == self._layouts
                    and list(map(_seen, tensors)) == self._kinds
                    and list(map(torch.Tensor.stride, tensors)) == self._strides
                ):
                    self._check.learn(held)
                    return None
        except (AttributeError, TypeError, RuntimeError):
            pass  # one is not there, or is no tensor with strides
        for (reference, (shape, dtype, device, strides, layout)), found in zip(
            self._expected, held, strict=True
        ):
            if layout_of(found) != layout:
                return Misfit(f"{reference.path} has another layout over devices than before")
            tensor = local_of(found)
            if tensor is MISSING:
                return Misfit(f"{reference.path} does not exist yet")
            if not isinstance(tensor, torch.Tensor):
                return changed(reference.path, "a tensor", show(tensor))
            if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device) or (
                tensor.layout is not torch.strided or tensor.stride() != strides
            ):
                return Misfit(
                    f"{reference.path} has another shape, dtype, device or strides than before"
                )
        return next(filter(None, map(_keys_failure, self._state_keys)), None)

    def stands_for(self, other: StateGuard) -> bool:
        """Whether another one compares the same places with the same kinds."""
        return (
            self._kinds == other._kinds
            and self._strides == other._strides
            and self._layouts == other._layouts
            and [form for _, form in self._wholes] == [form for _, form in other._wholes]
            and [_place(reference) for reference, _ in self._expected]
            == [_place(reference) for reference, _ in other._expected]
            and list(map(_identity, self._state_keys)) == list(map(_identity, other._state_keys))
        )


def _keys_failure(keys: StateKeys) -> Misfit | None:
    """None while an optimizer's state has these entries, else the first difference."""
    for place, names in keys.filled:
        entry = keys.optimizer.state.get(place.get())
        now: Any = entry.keys() if isinstance(entry, dict) else ()
        for name in now:
            if name not in names:
                return Misfit(f"{keys.path}.state[{place.path}][{name!r}] exists already")
        for name in names:
            if name not in now:
                return Misfit(f"{keys.path}.state[{place.path}][{name!r}] does not exist yet")
    return _count_failure(keys)


def _count_failure(keys: StateKeys) -> Misfit | None:
    """None while an optimizer's state has no more entries, if those with keys are known to be
    there, else what has been added or is gone.
    """
    if len(keys.optimizer.state) == len(keys.filled) and not keys.others:
        return None
    for place in keys.empty:
        if is_filled(keys.optimizer.state.get(place.get())):
            return Misfit(f"{keys.path}.state[{place.path}] exists already")
    if filled_entries(keys.optimizer) != len(keys.filled) + keys.others:
        return Misfit(f"{keys.path}.state has another number of entries than before")
    return None


def _identity(keys: StateKeys) -> tuple[Any, ...]:
    """Equal where keys of the same places are compared."""
    filled = [(_parameter(place), names) for place, names in keys.filled]
    return id(keys.optimizer), filled, list(map(_parameter, keys.empty)), keys.others


def _parameter(place: PlaceReference) -> tuple[Any, ...]:
    """A key that is equal for references to one parameter's place, as long as it is there."""
    # Another tuple may come in a tuple's place.
    space = place.space
    holder = space if isinstance(space, FrozenSpace) else space.holder
    return type(space), id(holder), id(place.key)


def _place(reference: _Reference) -> tuple[Any, ...]:
    """A key that is equal for references to one place, as long as both are there."""
    if isinstance(reference, PartReference):
        return *_place(reference.whole), reference.name
    if isinstance(reference, ScalerReference):
        return id(reference.scaler), reference.key
    parameter = _parameter(reference.parameter)
    if isinstance(reference, GradientReference):
        return parameter
    return id(reference.optimizer), id(reference.key), *parameter
