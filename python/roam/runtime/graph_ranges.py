"""Recordings of graphs that hold for a range of sizes: Dynamo says which sizes follow from
symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from roam.errors import CaptureError
from roam.program.ir import Program
from roam.program.resized import at
from roam.runtime.ranges import is_same_program
from roam.state.argument_sizes import ArgumentSizes, Layout, is_within
from roam.state.sizes import OneLength
from roam.tracing.fake_kernels.sized import SizedKernels
from roam.tracing.frontends.graph_sizes import sizes_of


def recorded_range(
    graph: GraphModule,
    args: Sequence[Any],
    before: Mapping[int, Layout],
    record: Callable[..., Program],
) -> tuple[Program, ArgumentSizes]:
    """A graph's program for a range of sizes, and which sizes these are. It is, at smaller sizes
    than the call's, what is recorded for these alone.

    Args:
        graph: one of AOTAutograd's.
        args: a call's arguments.
        before: how arguments lay in an earlier call that an earlier range does not hold for.
        record: records the graph for arguments; takes `sized` and `layouts` as `record_graph` does.

    Raises:
        OneLength: none is found.
        CaptureError: the graph cannot be recorded.
    """
    args = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
    found = sizes_of(graph, args, before)
    symbols = found.symbols
    tensors, numbers = {}, {}
    for place, layout in found.layouts.items():
        if isinstance(args[place], torch.Tensor):
            tensors[id(args[place])] = args[place], layout
        else:
            numbers[place] = layout.shape[0]
    sized = SizedKernels(symbols, tensors, numbers)
    try:
        program = record(args, sized=sized)
    except CaptureError:
        if symbols.refused is None:
            raise
    finally:
        sized.forget_fakes()
    if symbols.refused is not None:
        raise symbols.refused
    sizes = replace(found, least=())  # it may be narrower now
    now = tuple(sizes.captured().values())
    points = [tuple(point.values()) for point in symbols.points]
    there = next(
        (one for one in points if one != now and is_within(one, now) and sizes.admits(one)), now
    )
    alone = record(args, layouts=sizes.layouts_at(there))
    if not is_same_program(alone, at(program, dict(zip(symbols.names, there, strict=True)))):
        raise OneLength("it goes another way for other sizes")
    return program, sizes
