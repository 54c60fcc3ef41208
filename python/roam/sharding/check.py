"""Whether a rank does what was chosen: its own step, traced with the styles applied, against the
step of one process, operator by operator. It shares no code with the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roam.sharding.nodes import Node, Option
from roam.sharding.rules import dimension
from roam.sharding.trace import Operator, Reference, Trace
from roam.torch_compat.private import pytree

aten = torch.ops.aten
GIVEN_SIZES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.split_with_sizes.default,
}
"""Operators whose numbers are sizes. On a part they are other sizes, so the shapes of the results
are compared instead.
"""
_VIEWS = {aten._unsafe_view.default: aten.view.default, aten.reshape.default: aten.view.default}
"""`reshape` is a view, or a copy and a view, depending on the strides of a part."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a rank first does something else than was chosen. `path` is the path of the module
    whose code does it.
    """

    path: str
    message: str


def first_difference(
    trace: Trace,
    nodes: Sequence[Node],
    options: Sequence[Option],
    rank: Trace,
    raised: Exception | None,
    size: int,
) -> Difference | None:
    """The first operator between modules in which a rank's forward pass differs from what was
    chosen for it; None if there is none.

    Args:
        trace: the step of one process.
        nodes: the nodes of this step.
        options: the option that was chosen for each node.
        rank: the trace of one rank.
        raised: what the rank's forward pass raised.
        size: how many ranks share the step.
    """
    chosen = {
        id(node.subject): option
        for node, option in zip(nodes, options, strict=True)
        if node.what == "operator"
    }
    styled = {trace.calls[node.subject].path for node in nodes if node.what == "style"}
    wanted = _between(trace, styled)
    found = _between(rank, styled)
    for one, other in zip(wanted, found, strict=False):
        option = chosen.get(id(one))
        path = rank.calls[other.call].path if other.call >= 0 else ""
        states = [-1] * len(one.outputs) if option is None else list(option.outputs)
        slots = [slot for slot in one.outputs if slot is not None]
        shapes = [
            _local(trace.values[slot].shape, state, size)
            for slot, state in zip(slots, states, strict=False)
        ]
        made = [rank.values[slot].shape for slot in other.outputs if slot is not None]
        if target_of(one) is not target_of(other):
            return Difference(path, f"it runs {other.target} where one process runs {one.target}")
        if shapes != made:
            return Difference(path, f"{one.target} makes {made} on a rank, not {shapes}")
        if one.target not in GIVEN_SIZES and plain_arguments(one) != plain_arguments(other):
            return Difference(
                path, f"{one.target} is given {plain_arguments(other)}, not {plain_arguments(one)}"
            )
    if raised is not None:
        path = rank.calls[rank.innermost].path if rank.innermost >= 0 else ""
        return Difference(path, f"it raises {type(raised).__name__}: {raised}")
    if len(wanted) != len(found):
        return Difference("", f"it runs {len(found)} operators, not {len(wanted)}")
    return None


def _between(trace: Trace, styled: set[str]) -> list[Operator]:
    """The operators that are in no call of these modules, without copies."""
    within: dict[int, bool] = {-1: False}

    def is_within(call: int) -> bool:
        if call not in within:
            one = trace.calls[call]
            within[call] = one.path in styled or is_within(one.parent)
        return within[call]

    return [
        one
        for one in trace.operators
        if one.target is not aten.clone.default and not is_within(one.call)
    ]


def target_of(operator: Operator) -> Any:
    """The kernel that an operator calls; the same for all kinds of `view`."""
    return _VIEWS.get(operator.target, operator.target)


def _local(shape: Sequence[int], state: int, size: int) -> tuple[int, ...]:
    return tuple(
        length // size if state >= 0 and dim == dimension(state) else length
        for dim, length in enumerate(shape)
    )


def plain_arguments(operator: Operator) -> Any:
    """The arguments that are no tensors."""
    return pytree.tree_map_only(Reference, lambda _: None, (operator.args, operator.kwargs))
