"""Steps on distributed tensors: what PyTorch's `DTensor` does while one is traced.

The recorder leaves operators on distributed tensors to PyTorch's own dispatch. This decides how the
result is placed, moves parts between processes, and runs the operator on this process's parts. The
recorder sees only these last operators. What the dispatch does besides is taken out of the
recording here, or refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from roam.state.trace_context import TraceContext
from roam.torch_compat.patches import Replacement, replaced
from roam.torch_compat.private import (
    disable_current_modes,
    gives_arguments,
    is_dtensor,
    layout_of,
    layout_rules,
    local_of,
    mask_buffer,
    pytree,
    spread_generators,
    with_numbers,
)
from roam.tracing.fake_kernels.cache import tensors_in


def stand_ins(trace: TraceContext, layouts: dict[Any, Any]) -> Iterator[Replacement]:
    """What stands in for functions of `torch.distributed.tensor`; nothing where nobody has imported
    it.

    Args:
        trace: the trace.
        layouts: by what operators are given, how their results are placed, as other traces of the
            same capture have found; more are added. `DTensor` keeps none while anything traces.
    """
    if (found := layout_rules()) is not None:
        rules: Callable[..., Any] = getattr(*found)

        def rules_alone(propagator: Any, schema: Any) -> Any:
            live: list[Any] = []

            def plain_number(value: Any) -> Any:
                # Lists of tensors get a number by way of C++, which makes the plain class of it.
                if not isinstance(value, torch.SymFloat):
                    return value
                live.append(value)
                return _ANY_NUMBER

            plain = with_numbers(schema, plain_number)
            is_kept = not live
            try:
                known = layouts.get(plain) if is_kept else None
            except TypeError:  # such as a size that is no number, which has no hash
                known, is_kept = None, False
            if known is not None:
                return known
            with disable_current_modes():  # the operators that it runs are none of the step's
                sharding = rules(propagator, plain)
            if is_kept:
                layouts[plain] = sharding
            if live and gives_arguments(sharding):
                trace.refuse(
                    "a number that changes from call to call decides the placement of its result; pass "
                    "a constant instead",
                    code="value_reached_python", op=str(schema.op),
                )  # fmt: skip
            return sharding

        yield *found, rules_alone

    def refuse_random(*_: Any, **__: Any) -> Any:
        trace.refuse(
            "on this device DTensor moves the generator's state by an amount that depends on "
            "the rank before it draws random numbers, which capture cannot see; leave dropout "
            "out where tensors are distributed, or apply it to x.to_local()",
            code="dtensor_random",
        )

    for holder, name in spread_generators():
        asks: Callable[..., Any] = getattr(holder, name)
        is_question = isinstance(holder, ModuleType)
        yield (
            holder,
            name,
            functools.partial(_if_so, asks, refuse_random) if is_question else refuse_random,
        )


_ANY_NUMBER = 0.5
"""Layouts are found for this instead of a live float; no rule looks at one."""


def _if_so(asks: Callable[[Any], bool], refuse: Callable[[], Any], mesh: Any) -> bool:
    """Refuses if the answer is yes."""
    return bool(asks(mesh) and refuse())


def parts_of_update(
    trace: TraceContext, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an element-wise update, with this process's parts instead of distributed
    tensors, which must have equal placements.
    """
    tensors = tensors_in((args, kwargs))
    layouts = [layout_of(tensor) for tensor in tensors if is_dtensor(tensor)]
    if not layouts:
        return args, kwargs
    first = layouts[0]
    are_alike = all(
        layout.mesh == first.mesh and layout.placements == first.placements for layout in layouts
    )
    if (
        not are_alike
        or any(placement.is_partial() for placement in first.placements)
        or any(not is_dtensor(tensor) and tensor.numel() != 1 for tensor in tensors)
    ):
        trace.refuse(
            "a fused update is not captured where a parameter, its gradient and its state are "
            "DTensors with different placements; leave fused=True out",
            code="dtensor", op=name,
        )  # fmt: skip
    return pytree.tree_map_only(torch.Tensor, local_of, (args, kwargs))  # type: ignore[no-any-return]


@contextmanager
def masks_kept() -> Iterator[None]:
    """Lookups in spread tables keep masks until their results are reduced. After the block these
    masks are as before, even if the trace has ended between lookup and reduction.
    """
    kind = mask_buffer()
    if kind is None:
        yield
        return
    plain = kind.materialize_mask
    touched: dict[int, tuple[Any, Any, int]] = {}

    def materialize(buffer: Any, mask: Any) -> Any:
        touched.setdefault(id(buffer), (buffer, buffer.data, buffer.refcount))
        return plain(buffer, mask)

    try:
        with replaced([(kind, "materialize_mask", materialize)]):
            yield
    finally:
        for buffer, data, count in touched.values():
            buffer.data, buffer.refcount = data, count
