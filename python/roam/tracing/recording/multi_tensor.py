"""Multi-tensor and fused updates: one call for many tensors, recorded as several calls.

A `torch._foreach_*` or `torch._fused_*` call updates all parameters at once, so every gradient
would have to be alive at once. If the call is split, each gradient dies as soon as its own update
has run. The bits stay the same. On the CPU a multi-tensor kernel is a loop over its lists, which is
run here so that the trace sees what it calls. On other devices a call is split if each part takes
the same path as the whole, and stays whole otherwise. There the launch of a kernel takes longer
than the update of a small tensor, so small tensors share a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from roam.program.ir import has_no_gaps
from roam.state.trace_context import TraceContext
from roam.torch_compat.private import base_name, run_composite

FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
"""Functions of torch that update all parameters by one kernel, in which the update of each element
is independent of all others.
"""

_SHARE, _SMALL = 1 / 64, 1 << 14
"""Neighbours share a call until together they have this share of all elements of the list, and at
least so many elements."""


def is_multi_tensor(func: Any) -> bool:
    """Whether an operator is one of `torch._foreach_*`."""
    return bool(base_name(func).startswith("_foreach_"))


def runs_by_loop(args: tuple[Any, ...]) -> bool:
    """Whether a multi-tensor call on these arguments is a loop over its lists."""
    return all(tensor.device.type == "cpu" for tensors in _tensor_lists(args) for tensor in tensors)


def looped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a multi-tensor kernel's loop, whose calls go through the dispatcher one by one."""
    return run_composite(func, *args, is_implicit=False, **kwargs)


def splits(args: tuple[Any, ...]) -> bool:
    """Whether the whole multi-tensor call on an accelerator takes the fast path, and so each part
    of it does. This is so if all tensors have one floating dtype and one device, are dense, and
    have one shape and strides at each place of the lists.
    """
    lists = _tensor_lists(args)
    first = lists[0][0]
    return (
        all(
            isinstance(argument, (list, tuple, int, float, torch.SymFloat, torch.SymInt))
            or (
                isinstance(argument, torch.Tensor)
                and (argument.dtype, argument.device, argument.dim())
                == (first.dtype, first.device, 0)
            )
            for argument in args
        )
        and first.dtype.is_floating_point
        and all(len(tensors) == len(lists[0]) for tensors in lists)
        and all(
            t.dtype is first.dtype and t.device == first.device and has_no_gaps(t.shape, t.stride())
            for ts in lists
            for t in ts
        )
        and all(len({(t.shape, t.stride()) for t in at}) == 1 for at in zip(*lists, strict=True))
    )


def parts(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of a call on lists for one part of the lists after the other."""
    count = max(len(argument) for argument in args if isinstance(argument, (list, tuple)))

    def at(argument: Any, places: slice) -> Any:
        is_whole = not isinstance(argument, (list, tuple)) or len(argument) != count
        return argument if is_whole else list(argument[places])

    for places in _places(_tensor_lists(args)[0]):
        yield (
            tuple(at(argument, places) for argument in args),
            {key: at(kwargs[key], places) for key in kwargs},
        )


def _places(tensors: list[torch.Tensor]) -> Iterator[slice]:
    """Places of the lists that stay together: one on the CPU; on other devices as many neighbours
    as have together `_SHARE` of all elements, and at least `_SMALL` elements.
    """
    least = 0.0
    if tensors[0].device.type != "cpu":
        least = max(_SHARE * sum(tensor.numel() for tensor in tensors), _SMALL)
    start, elements = 0, 0
    for place, tensor in enumerate(tensors):
        elements += tensor.numel()
        if elements >= least or place == len(tensors) - 1:
            yield slice(start, place + 1)
            start, elements = place + 1, 0


def fused_stand_in(trace: TraceContext, name: str) -> Any:
    """Records a fused update, whose numbers C++ would take as plain floats only."""
    packet = getattr(torch.ops.aten, name)

    def update(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("grad_scale") is not None or kwargs.get("found_inf") is not None:
            trace.refuse(
                "a fused optimizer that takes the loss scale itself is not captured; unscale the gradients before",
                code="scaler", op=str(packet),
            )  # fmt: skip
        has_tensor_rate = isinstance(kwargs["lr"], torch.Tensor)
        made = list(parts(args, kwargs))
        for part, keywords in made:
            trace.effect(packet.tensor_lr if has_tensor_rate else packet.default, part, keywords)
        trace.note_split(name, len(made))

    return update


def _tensor_lists(args: tuple[Any, ...]) -> list[list[torch.Tensor]]:
    lists = (
        list(argument) for argument in args if isinstance(argument, (list, tuple)) and argument
    )
    return [tensors for tensors in lists if isinstance(tensors[0], torch.Tensor)]
