"""Finds by DTensor's own rules, for one mesh dimension, which runs of an operator on local tensors
give the parts of its result.

A *state* says how a plain local tensor stands for a whole one: `WHOLE`, each rank has all of it,
and all of its gradient; or a dimension `d >= 0`, each rank has an equal part along it. `SPREAD` is
a whole DTensor, on which only styles of modules work: there gradients may be partial sums, which
DTensor reduces.

A run on parts is right if each rank's result depends only on its own parts; then its gradients are
right too. A whole input beside inputs in parts gets a partial gradient, which nothing in plain code
reduces. So such a run is a strategy only if no gradient flows into that input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roam.sharding.trace import Operator, Reference, Trace, Value
from roam.torch_compat.private import (
    pytree,
    schema_of,
    single_dimension_rules,
    spec_rules,
)

WHOLE = -1
SPREAD = -2
STRIDED = 8
"""Added `factor` times to a dimension, it says that the dimension consists of `factor` blocks, that
each block is split into equal parts, and that a rank has one part of each block. This happens when
a view joins two dimensions of which the second is split.
"""
State = int

aten = torch.ops.aten
Rule = tuple[tuple[State | None, ...], tuple[State | None, ...]]
"""States of the inputs and of the outputs; None for what is neither whole nor an equal part."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """States of an operator's inputs and outputs."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]

    @property
    def is_split(self) -> bool:
        """Whether each rank does a part of the work."""
        return any(state >= 0 for state in (*self.inputs, *self.outputs))


class Rules:
    """Strategies of operators, remembered by what they depend on."""

    def __init__(self, trace: Trace, size: int) -> None:
        """`size`: how many ranks share the parts."""
        self._trace = trace
        self.size = size
        self._known: dict[Any, tuple[Strategy, ...]] = {}

    def divides(self, value: Value, state: State) -> bool:
        """Whether a value has equal parts along a dimension."""
        if state < 0:
            return True
        dim, factor = dimension(state), max(1, state // STRIDED)
        return (
            self.size > 1
            and dim < len(value.shape)
            and value.shape[dim] > 0
            and value.shape[dim] % (self.size * factor) == 0
        )

    def strategies(
        self,
        operator: Operator,
        *,
        is_distributed: bool = False,
        factors: frozenset[int] = frozenset(),
    ) -> tuple[Strategy, ...]:
        """All ways to run an operator on parts, the whole one first.

        Args:
            operator: an operator of the trace.
            is_distributed: whether the operator is in a module that a style runs on DTensors. There
                the gradients of whole parameters may be partial.
        """
        values = [self._trace.values[number] for number in operator.inputs]
        flows = tuple(value.is_differentiable and not is_distributed for value in values)
        key = (
            operator.target,
            tuple((value.shape, value.stride, value.dtype) for value in values),
            flows,
            factors,
            _plain(operator),
        )
        if key not in self._known:
            self._known[key] = tuple(self._find(operator, values, flows, factors))
        return self._known[key]

    def _find(
        self,
        operator: Operator,
        values: Sequence[Value],
        flows: Sequence[bool],
        factors: frozenset[int],
    ) -> list[Strategy]:
        count = sum(output is not None for output in operator.outputs)
        whole = Strategy((WHOLE,) * len(values), (WHOLE,) * count)
        found = [whole]
        if self.size == 1 or not values or (operator.is_random and not _draws_nothing(operator)):
            return found
        for inputs, outputs in self._rules(operator, values, factors):
            if len(outputs) == 1 != count:
                outputs = outputs * count
            if None in inputs or None in outputs or len(outputs) != count:
                continue
            one = Strategy(inputs, outputs)  # type: ignore[arg-type]
            made = [self._trace.values[slot] for slot in operator.outputs if slot is not None]
            is_even = all(map(self.divides, (*values, *made), (*one.inputs, *one.outputs)))
            is_alone = not any(
                flow and state == WHOLE for flow, state in zip(flows, inputs, strict=True)
            )
            if one.is_split and is_even and is_alone and one not in found:
                found.append(one)
        return found

    def _rules(
        self, operator: Operator, values: Sequence[Value], factors: frozenset[int]
    ) -> list[Rule]:
        own = _OWN.get(operator.target)
        if own is not None:
            return own(operator, values)

        def meta(reference: Reference) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
            value = self._trace.values[reference.value]
            return value.shape, value.stride, value.dtype

        arguments = operator.args, operator.kwargs
        made = operator.outputs
        rows = single_dimension_rules(operator.target, arguments, Reference, meta)
        if rows is None:
            rows = spec_rules(
                operator.target, arguments, Reference, meta, self.size, len(made), sorted(factors)
            )
            found = [tuple(_state(placement) for placement in row) for row in rows]
        else:
            found = [
                tuple(_state(placement, factor) for placement in row)
                for row in rows
                for factor in (0, *sorted(factors))
                # A rule that names no dimension is no rule for blocks.
                if factor == 0 or any(map(_is_placeholder, row))
            ]
        return [
            (row[len(row) - len(values) :], row[: len(row) - len(values)])
            for row in found
            if len(row) > len(values)
        ]


def dimension(state: State) -> int:
    """The dimension of a part."""
    return state % STRIDED


def _state(placement: Any, factor: int = 0) -> State | None:
    """The state that a placement stands for; None if it stands for none. `factor` is used for
    placeholders.
    """
    kind = type(placement).__name__
    if placement is None or kind == "Replicate":
        return WHOLE
    if kind == "Shard":
        return int(placement.dim) if factor == 0 else None
    if _is_placeholder(placement):
        return int(placement.dim) + STRIDED * factor
    if kind == "_StridedShard":
        return int(placement.dim) + STRIDED * int(placement.split_factor)
    return None


def _is_placeholder(placement: Any) -> bool:
    """Whether it stands for all parts along a dimension."""
    return type(placement).__name__ == "_ShardingPlaceholder"


def _plain(operator: Operator) -> str:
    """The arguments that are no tensors, as text."""
    blank = pytree.tree_map_only(Reference, lambda _: "*", (operator.args, operator.kwargs))
    return repr(blank)


def _draws_nothing(operator: Operator) -> bool:
    """Whether an operator that is marked as random is given probability 0."""
    for place, argument in enumerate(schema_of(operator.target).arguments):
        if argument.name in ("dropout_p", "p"):
            value = operator.kwargs.get(argument.name, argument.default_value)
            if place < len(operator.args):
                value = operator.args[place]
            return not isinstance(value, Reference) and value == 0
    return False


def _attention(operator: Operator, values: Sequence[Value]) -> list[Rule]:
    """Rules of attention, whose samples and heads are independent of each other. Its inputs are
    query, key, value, and perhaps a mask that is broadcast along these dimensions.
    """
    found: list[Rule] = []
    for dim in (0, 1):
        inputs: list[State | None] = [dim] * 3
        for mask in values[3:]:
            place = dim - (4 - len(mask.shape))
            inputs.append(WHOLE if place < 0 or mask.shape[place] == 1 else place)
        found.append((tuple(inputs), (dim, dim)))
    return found


def _stack(operator: Operator, values: Sequence[Value]) -> list[Rule]:
    """Parts are stacked along the new dimension, of which each rank has all."""
    ndim = len(values[0].shape)
    place = operator.args[1] if len(operator.args) > 1 else operator.kwargs.get("dim", 0)
    new = place % (ndim + 1)
    return [((dim,) * len(values), (dim if dim < new else dim + 1,)) for dim in range(ndim)]


_OWN: dict[Any, Callable[[Operator, Sequence[Value]], list[Rule]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten.stack.default: _stack,
}
"""Operators for which DTensor has no rule, or one that starts from a single placement."""


def fraction(value: Value, state: State, size: int) -> int:
    """Bytes of a value that a rank has."""
    return value.size_bytes // size if state >= 0 else value.size_bytes


def elements(value: Value) -> int:
    """How many numbers a value has."""
    return math.prod(value.shape)
