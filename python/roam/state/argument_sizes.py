"""Which sizes of a call's arguments follow from symbols, and for which values a capture holds."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from roam.state.equality import Misfit
from roam.state.sizes import Expression, Symbols
from roam.torch_compat.private import FakeTensor


class Larger(Misfit):
    """Why a plan does not fit a call that it would fit if it were made for larger sizes."""

    values: tuple[int, ...]


@dataclass(slots=True)
class ArgumentSizes:
    """What a capture that holds for a range of sizes expects of them.

    Attributes:
        symbols: those of the capture.
        dims: for each of the flattened arguments with such sizes, the symbol of each dimension.
        shapes: those of these arguments at capture.
        least: the values of the symbols from which on the plan holds.
        corners: it holds up to each of these, one value for each symbol.
        excluded: values for which a run has found that it does not.
    """

    symbols: Symbols
    dims: Mapping[int, Mapping[int, Expression]]
    shapes: Mapping[int, tuple[int, ...]]
    corners: tuple[tuple[int, ...], ...] = ()
    least: int = Symbols.LEAST
    excluded: set[tuple[int, ...]] = field(default_factory=set)
    first_places: list[tuple[int, int]] = field(init=False)
    """For each symbol an argument, by its place, and a dimension of it that has this size."""

    def __post_init__(self) -> None:
        first: dict[Expression, tuple[int, int]] = {}
        for place, dims in self.dims.items():
            for dim, symbol in dims.items():
                first.setdefault(symbol, (place, dim))
        self.first_places = [first[symbol] for symbol in self.symbols.symbols.values()]

    def captured(self) -> dict[str, int]:
        """The values of the symbols in the call that was captured."""
        return dict(self.symbols.points[0])

    def values(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """Of the symbols in a call with these flattened arguments, which fit `failure`."""
        return tuple([leaves[place].shape[dim] for place, dim in self.first_places])

    def largest(self) -> tuple[int, ...]:
        """Of each symbol, the largest value that a corner has."""
        return tuple(map(max, zip(*self.corners, strict=True)))

    def admits(self, values: tuple[int, ...]) -> bool:
        """Whether the recording holds for values of the symbols, if not the plan."""
        return (
            is_within(values, tuple(self.symbols.most.values()))
            and min(values) >= self.least
            and self.symbols.hold(values)
        )

    def shape(self, place: int, values: Sequence[int]) -> tuple[int, ...]:
        """What the shape of an argument has to be."""
        of = dict(zip(self.symbols.symbols.values(), values, strict=True))
        dims = self.dims[place]
        return tuple(
            of[dims[dim]] if dim in dims else size for dim, size in enumerate(self.shapes[place])
        )

    def failure(self, leaves: Sequence[Any]) -> Misfit | None:
        """None if the capture holds for the sizes of a call, and has been planned for them."""
        try:
            values = self.values(leaves)
        except (AttributeError, IndexError):
            return Misfit("an argument is no tensor, or has another number of dimensions")
        if values in self.excluded:
            return Misfit(f"the plan for many sizes does not hold for {values}")
        for value, most in zip(values, self.symbols.most.values(), strict=True):
            if not self.least <= value <= most:
                return Misfit(
                    f"the size {value} is beyond those of the plan for many sizes, {self.least} to {most}"
                )
        for place in self.dims:
            tensor = leaves[place]
            if tuple(tensor.shape) != self.shape(place, values) or not is_whole(tensor):
                return Misfit("the plan for many sizes is for arguments of other shapes")
        if not self.symbols.hold(values):
            return Misfit(
                "a condition on the sizes of the arguments, on which the capture relies, does not hold"
            )
        if not any(map(partial(is_within, values), self.corners)):
            larger = Larger("the arguments are larger than the plan is made for")
            larger.values = values
            return larger
        return None


def is_within(values: Sequence[int], most: Sequence[int]) -> bool:
    """Whether no value is above the one in the same place."""
    return all(map(operator.le, values, most))


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie one after another, with all of its storage for themselves."""
    return bool(
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    )


def may_have_symbols(tensor: torch.Tensor) -> bool:
    """Whether sizes of an argument may be taken for symbols."""
    return (
        type(tensor) is torch.Tensor
        and not isinstance(tensor, FakeTensor)
        and tensor.grad_fn is None
        and tensor.grad is None
        and not tensor.requires_grad
        and is_whole(tensor)
    )
