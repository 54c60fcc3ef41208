"""Replaces two calls by one, if that takes less memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from roam.kernels.fused import CROSS_ENTROPY_BACKWARD
from roam.kernels.table import placement
from roam.program.ir import Call, Program, Ref
from roam.program.passes import prune

aten = torch.ops.aten


def fused(program: Program, device: torch.device) -> Program:
    """The program with each pair that `roam.kernels.fused` knows as one call, where its equal
    kernel is cleared; itself if there is none.
    """
    calls = dict(_fused_calls(program, device))
    if not calls:
        return program
    changed = [calls.get(index, call) for index, call in enumerate(program.calls)]
    # The first of each pair has no users any more.
    return prune(replace(program, calls=changed))


def _fused_calls(program: Program, device: torch.device) -> Iterator[tuple[int, Call]]:
    """(number of the second call, what replaces both)."""
    users: dict[int, list[int]] = {}
    for index, call in enumerate(program.calls):
        for slot in call.refs():
            users.setdefault(slot, []).append(index)
    outgoing = program.outgoing()
    for index, first in enumerate(program.calls):
        if first.target is not aten.nll_loss_backward.default or first.kwargs:
            continue
        (between,) = first.outputs
        if between is None or between in outgoing or len(users.get(between, ())) != 1:
            continue
        (later,) = users[between]
        if _is_pair(program, first, program.calls[later]) and not _changes(program, index, later):
            both = replace(
                program.calls[later], target=CROSS_ENTROPY_BACKWARD, args=first.args, kwargs={}
            )
            if _is_cleared(program, both, device):
                yield later, both


def _is_pair(program: Program, first: Call, second: Call) -> bool:
    """Whether the second is the gradient of a log-softmax over the classes that the first picks
    from.
    """
    if (
        second.target is not aten._log_softmax_backward_data.default
        or second.kwargs
        or len(first.args) != 7
    ):
        return False
    grad, output, dim, dtype = second.args
    # Autograd detaches what it saves.
    meta, other = program.slots[first.args[1].slot], program.slots[output.slot]
    is_one = meta is not None and meta == other and grad == Ref(first.outputs[0])  # type: ignore[arg-type]
    return (
        is_one
        and len(meta.shape) == 2
        and meta.shape[0] > 0
        and dim in (1, -1)
        and dtype == meta.dtype
    )


def _changes(program: Program, start: int, end: int) -> bool:
    """Whether calls between two change what the first of them reads."""
    read = {program.storage_of(slot) for slot in program.calls[start].refs()}
    changed: set[Any] = {
        program.storage_of(slot) for call in program.calls[start:end] for slot in call.mutates
    }
    return not read.isdisjoint(changed)


def _is_cleared(program: Program, call: Call, device: torch.device) -> bool:
    (slot,) = call.outputs
    inputs = [meta for item in call.refs() if (meta := program.slots[item]) is not None]
    outputs = [meta for meta in (program.slots[slot],) if meta is not None]  # type: ignore[index]
    if (
        any(meta.device != device for meta in (*inputs, *outputs))
        or outputs[0].storage in program.leaving()
    ):
        return False
    return placement(call.target, device.type).clears(inputs, outputs)
