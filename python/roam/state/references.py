"""State references: where a step's tensors live between calls.

A plan never keeps a tensor of the user's. It keeps a reference to the place that holds the tensor
(a module's table, an optimizer's state, a list) and looks the tensor up at every call. So
`load_state_dict`, checkpoints and evaluation between steps need no new plan. During capture each of
these places holds a fake tensor instead of the real one.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roam.state.containers import MappingSpace
from roam.state.equality import MISSING, is_numpy_float
from roam.state.metadata import gradient_of
from roam.state.nests import as_tuple
from roam.state.optimizer_spaces import is_live_number
from roam.state.reach import Reach
from roam.state.spaces import Space
from roam.state.wrappers import inner, is_wrapper


@dataclass(frozen=True, slots=True, eq=False)
class _SpaceReference:
    """A key of a space."""

    space: Space
    key: Any
    path: str

    def get(self) -> Any:
        return self.space.get(self.key)

    def set(self, value: Any) -> None:
        self.space.set(self.key, value)


@dataclass(frozen=True, slots=True, eq=False)
class PlaceReference(_SpaceReference):
    """A place that the step's function can reach: a module's table, an attribute, a closure cell, a
    global, a list.
    """

    kind: str
    tied: bool
    """Whether an earlier place holds the same tensor; that one is asked at run time."""


@dataclass(frozen=True, slots=True, eq=False)
class AttributeReference(_SpaceReference):
    """An attribute that the step sets before it looks at it, so that what it holds before does not
    matter.
    """

    kind: str = "output"

    def put_last(self) -> None:
        """Makes it the last of its object's attributes."""
        if isinstance(self.space, MappingSpace):
            self.space.holder[self.key] = self.space.holder.pop(self.key)


@dataclass(frozen=True, slots=True, eq=False)
class EntryReference:
    """An entry, however deep, of a list, tuple or dictionary that another reference leads to. A
    tuple is replaced by one that has the new entry.
    """

    reference: AttributeReference
    keys: tuple[Any, ...]
    path: str
    kind: str = "output"

    def get(self) -> Any:
        held = self.reference.get()
        for key in self.keys:
            held = held[key]
        return held

    def set(self, value: Any) -> None:
        self.reference.set(_with_entry(self.reference.get(), self.keys, value))


def _with_entry(held: Any, keys: tuple[Any, ...], value: Any) -> Any:
    if not keys:
        return value
    key, entry = keys[0], _with_entry(held[keys[0]], keys[1:], value)
    if issubclass(type(held), tuple):
        return as_tuple(type(held), (*held[:key], entry, *held[key + 1 :]))
    held[key] = entry
    return held


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerReference:
    """An entry of an optimizer's state, such as one tensor. `load_state_dict` replaces these, so
    nothing but the way to them is kept.
    """

    optimizer: torch.optim.Optimizer
    parameter: PlaceReference
    key: str
    path: str
    kind: str = "optimizer_state"

    def get(self) -> Any:
        entry = self.optimizer.state.get(self.parameter.get())
        return MISSING if entry is None else entry.get(self.key, MISSING)

    def set(self, value: Any) -> None:
        self.optimizer.state[self.parameter.get()][self.key] = value

    def put_last(self) -> None:
        """Makes it the last of its parameter's entries, and these entries the last of the state."""
        state, parameter = self.optimizer.state, self.parameter.get()
        entry = state[parameter] = state.pop(parameter)
        entry[self.key] = entry.pop(self.key)


@dataclass(frozen=True, slots=True, eq=False)
class GradientReference:
    """A parameter's `.grad`."""

    parameter: PlaceReference
    path: str
    kind: str = "gradient"

    def get(self) -> Any:
        gradient = self.parameter.get().grad
        return MISSING if gradient is None else gradient

    def set(self, value: Any) -> None:
        self.parameter.get().grad = value


@dataclass(frozen=True, slots=True, eq=False)
class ScalerReference:
    """The scale or the growth tracker of a gradient scaler, which it makes when it is first
    used.
    """

    scaler: torch.amp.GradScaler
    key: str
    path: str
    kind: str = "optimizer_state"

    def get(self) -> Any:
        tensor = getattr(self.scaler, self.key, None)
        return MISSING if tensor is None else tensor

    def set(self, value: Any) -> None:
        setattr(self.scaler, self.key, value)


@dataclass(frozen=True, slots=True, eq=False)
class ArgumentReference:
    """The call's own argument, by its place among the flattened arguments: a tensor of the batch, a
    live float, or a live integer (its kind is ``integer``). Or the `.grad` of such a tensor.
    """

    index: int
    path: str
    kind: str = "input"

    @property
    def gradient(self) -> ArgumentReference:
        """The reference to its gradient."""
        return ArgumentReference(self.index, f"{self.path}.grad", "gradient")

    def find(self, leaves: Sequence[Any]) -> Any:
        """Its value among a call's flattened arguments."""
        return leaves[self.index].grad if self.kind == "gradient" else leaves[self.index]

    def put(self, leaves: Sequence[Any], value: Any) -> None:
        """Gives a call's argument another gradient, or None."""
        leaves[self.index].grad = value


@dataclass(frozen=True, slots=True)
class RateReference:
    """An entry of an optimizer's group, or a part of one: the learning rate, a weight decay, one of
    the betas.
    """

    optimizer: torch.optim.Optimizer
    group: int
    path: str
    key: str
    index: int | None = None
    """Its place where the group's entry is a tuple, such as the betas."""
    kind: str = "live"

    def get(self) -> Any:
        entry = self.optimizer.param_groups[self.group].get(self.key, MISSING)
        if self.index is None:
            return entry
        return (
            entry[self.index]
            if issubclass(type(entry), (tuple, list)) and self.index < len(entry)
            else MISSING
        )

    def set(self, value: Any) -> None:
        group = self.optimizer.param_groups[self.group]
        if self.index is not None:
            entry = group[self.key]
            value = type(entry)([*entry[: self.index], value, *entry[self.index + 1 :]])
        group[self.key] = value

    def place(self) -> tuple[Any, ...]:
        """Equal for references to the same number, whichever optimizer has the group."""
        return id(self.optimizer.param_groups[self.group]), self.key, self.index


@dataclass(frozen=True, slots=True, eq=False)
class PartReference:
    """An inner tensor of the wrapper that another reference leads to."""

    whole: Any
    name: str
    path: str
    kind: str

    def get(self) -> Any:
        return getattr(self.whole.get(), self.name, MISSING)

    def set(self, value: Any) -> None:
        setattr(self.whole.get(), self.name, value)


@dataclass(frozen=True, slots=True, eq=False)
class ArgumentPartReference(ArgumentReference):
    """An inner tensor of a wrapper among the call's arguments."""

    names: tuple[str, ...] = ()

    def find(self, leaves: Sequence[Any]) -> Any:
        return functools.reduce(_part, self.names, leaves[self.index])

    def put(self, leaves: Sequence[Any], value: Any) -> None:
        """Puts another tensor in its place."""
        *outer, name = self.names
        setattr(functools.reduce(_part, outer, leaves[self.index]), name, value)


def root_of(reference: Any) -> Any:
    """The reference to the wrapper, however deep a reference leads into it."""
    return root_of(reference.whole) if isinstance(reference, PartReference) else reference


def _part(wrapper: Any, name: str) -> Any:
    return getattr(wrapper, name, MISSING)


def part_references(reference: Any, wrapper: Any) -> Iterator[Any]:
    """References to the plain tensors of which a wrapper is made, in the order of `parts_of`."""
    for name, part in inner(wrapper):
        path = f"{reference.path}.{name}"
        if isinstance(reference, ArgumentReference):
            names = (*getattr(reference, "names", ()), name)
            one: Any = ArgumentPartReference(reference.index, path, reference.kind, names)
        else:
            one = PartReference(reference, name, path, reference.kind)
        if is_wrapper(part):
            yield from part_references(one, part)
        else:
            yield one


def rate_references(optimizer: torch.optim.Optimizer, path: str) -> Iterator[RateReference]:
    """The live numbers of an optimizer's groups."""
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(group, key=str):
            value, where = group[key], f"{path}.param_groups[{number}][{key!r}]"
            if is_live_number(key, value):
                yield RateReference(optimizer, number, where, key)
            elif type(value) in (tuple, list):
                for index, part in enumerate(value):
                    if is_live_number(key, part):
                        yield RateReference(optimizer, number, f"{where}[{index}]", key, index)


def number_references(reach: Reach, paths: Collection[str]) -> Iterator[PlaceReference]:
    """The numbers at these paths that the step keeps in Python, outside of optimizers' state, or
    the None in their place.
    """
    found: dict[str, list[PlaceReference]] = {}
    for place in reach.places:
        space = place.space
        for key, value in space.items() if paths and place.guarded else ():
            if value is not MISSING and (path := space.label(key)) in paths:
                is_number = value is None or type(value) in (int, float) or is_numpy_float(value)
                found.setdefault(path, []).append(
                    PlaceReference(space, key, path, "live" if is_number else "", tied=False)
                )
    # Keys without a text of their own share a path, and nobody could tell which of them is meant.
    yield from (
        references[0]
        for references in found.values()
        if len(references) == 1 and references[0].kind
    )


StateReference = (
    PlaceReference | OptimizerReference | ScalerReference | GradientReference | PartReference
)
"""Where a tensor lives between calls."""


def optimizer_references(
    reach: Reach, parameters: list[PlaceReference], *, plain: bool | None = False
) -> Iterator[OptimizerReference]:
    """What the optimizers' state holds now, in its own order: tensors; if `plain` is True,
    everything else; if it is None, both.

    State of parameters that have been replaced, and that no group holds any more, is left out: it
    does not belong to the step.
    """
    references = {id(reference.get()): reference for reference in parameters}
    for path, optimizer in reach.optimizers:
        for parameter, entry in optimizer.state.items():
            reference = references.get(id(parameter))
            if reference is None or not issubclass(type(entry), dict):
                continue
            for key, value in entry.items():
                if plain is None or issubclass(type(value), torch.Tensor) is not plain:
                    yield OptimizerReference(
                        optimizer, reference, key, f"{path}.state[{reference.path}][{key!r}]"
                    )


@dataclass(frozen=True, slots=True)
class StateKeys:
    """Which entries an optimizer's state has. A parameter without state and one whose state is
    empty count as the same, since asking for a parameter's state makes an empty one.

    Attributes:
        filled: the parameters that have state, each with the keys of its entries.
        empty: the other parameters.
        others: how many entries are of no such parameter.
    """

    optimizer: torch.optim.Optimizer
    path: str
    filled: tuple[tuple[PlaceReference, frozenset[Any]], ...]
    empty: tuple[PlaceReference, ...]
    others: int

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, path: str, parameters: list[PlaceReference]
    ) -> StateKeys:
        """Those of now."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        held.update(map(id, optimizer.state))
        places = {
            id(parameter): place for place in parameters if id(parameter := place.get()) in held
        }
        entries: list[tuple[PlaceReference, Any]] = [
            (place, optimizer.state.get(place.get())) for place in places.values()
        ]
        filled = [
            (place, frozenset(entry if issubclass(type(entry), dict) else ()))
            for place, entry in entries
            if is_filled(entry)
        ]
        return cls(
            optimizer,
            path,
            tuple(filled),
            tuple(place for place, entry in entries if not is_filled(entry)),
            filled_entries(optimizer) - len(filled),
        )


def is_filled(entry: object) -> bool:
    """Whether an entry of an optimizer's state is there and holds something."""
    return entry is not None and not (issubclass(type(entry), dict) and not entry)


def filled_entries(optimizer: torch.optim.Optimizer) -> int:
    """How many entries of an optimizer's state are not empty."""
    return sum(map(is_filled, optimizer.state.values()))


def scaler_references(reach: Reach) -> Iterator[ScalerReference]:
    """What the gradient scalers hold now."""
    for path, scaler in reach.scalers:
        for key in ("_scale", "_growth_tracker"):
            reference = ScalerReference(scaler, key, f"{path}.{key}")
            if reference.get() is not MISSING:
                yield reference


def gradient_references(places: list[PlaceReference]) -> Iterator[GradientReference]:
    """The gradients that exist now."""
    for reference in places:
        if gradient_of(reference.get()) is not None:  # of none, if a step has removed the tensor
            yield GradientReference(reference, f"{reference.path}.grad")
