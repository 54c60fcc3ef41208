"""Operators that stand for two of PyTorch's, so that what lies between them is never whole in memory.

Each is registered with the two ordinary calls as its kernel, and has an equal kernel that works through it piece by piece with the
very same kernels. As everywhere, that the bits are equal is established by ``benches/kernel_table.py``, not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from roam.capture.rewrite import prune
from roam.kernels.substitutes import Outs, equal
from roam.kernels.table import placement
from roam.program import Call, Program, Ref

aten = torch.ops.aten

_PIECE_BYTES = 4 << 20
_MOST_PIECES = 64
_LEAST_PIECES = 16

_library = torch.library.Library("roam", "DEF")
_library.define(
    "nll_loss_log_softmax_backward(Tensor grad_output, Tensor output, Tensor target, Tensor? weight, int reduction, "
    "SymInt ignore_index, Tensor total_weight) -> Tensor"
)


def _one_after_the_other(
    grad_output: Tensor, output: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int,
    total_weight: Tensor,
) -> Tensor:  # fmt: skip
    between = aten.nll_loss_backward(grad_output, output, target, weight, reduction, ignore_index, total_weight)
    return aten._log_softmax_backward_data(between, output, 1, output.dtype)  # type: ignore[no-any-return]


_library.impl("nll_loss_log_softmax_backward", _one_after_the_other, "CompositeExplicitAutograd")
CROSS_ENTROPY_BACKWARD = torch.ops.roam.nll_loss_log_softmax_backward.default
"""The gradient of a classification loss with respect to the logits: `nll_loss_backward`, then `_log_softmax_backward_data`."""


@equal("aten::nll_loss_backward, aten::_log_softmax_backward_data.out, by rows", CROSS_ENTROPY_BACKWARD.name())
def _by_rows(
    outs: Outs, grad_output: Tensor, output: Tensor, target: Tensor, weight: Tensor | None, reduction: int,
    ignore_index: int, total_weight: Tensor,
) -> None:  # fmt: skip
    for part in _parts(output.shape[0], output.nbytes):
        grad = grad_output[part] if grad_output.dim() else grad_output
        between = aten.nll_loss_backward(
            grad, output[part], target[part], weight, reduction, ignore_index, total_weight
        )
        aten._log_softmax_backward_data.out(between, output[part], 1, output.dtype, out=outs[0][part])
        del between  # before the next one is made


def _parts(rows: int, nbytes: int) -> Iterator[slice]:
    """Rows to be taken together."""
    pieces = min(max(nbytes // _PIECE_BYTES, _LEAST_PIECES), _MOST_PIECES, rows)
    return (slice(rows * piece // pieces, rows * (piece + 1) // pieces) for piece in range(pieces))


def workspace_bytes(program: Program, call: Call) -> int:
    """Bytes that an equal kernel for a pair of calls takes while it runs; 0 for other calls."""
    meta = program.slots[call.args[1].slot] if call.target is CROSS_ENTROPY_BACKWARD else None
    if meta is None:
        return 0
    rows, classes = meta.shape
    most = max(part.stop - part.start for part in _parts(rows, rows * classes * meta.dtype.itemsize))
    return int(most * classes * meta.dtype.itemsize)


def fused(program: Program, device: torch.device) -> Program:
    """The program with such pairs of calls as one call each, where its equal kernel is cleared; itself if there is none."""
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
            both = replace(program.calls[later], target=CROSS_ENTROPY_BACKWARD, args=first.args, kwargs={})
            if _is_cleared(program, both, device):
                yield later, both


def _is_pair(program: Program, first: Call, second: Call) -> bool:
    """Whether the second is the gradient of a log-softmax over the classes that the first picks from."""
    if second.target is not aten._log_softmax_backward_data.default or second.kwargs or len(first.args) != 7:
        return False
    grad, output, dim, dtype = second.args
    # Autograd detaches what it saves.
    meta, other = program.slots[first.args[1].slot], program.slots[output.slot]
    is_one = meta is not None and meta == other and grad == Ref(first.outputs[0])  # type: ignore[arg-type]
    return is_one and len(meta.shape) == 2 and meta.shape[0] > 0 and dim in (1, -1) and dtype == meta.dtype


def _changes(program: Program, start: int, end: int) -> bool:
    """Whether calls between two change what the first of them reads."""
    read = {program.storage_of(slot) for slot in program.calls[start].refs()}
    changed: set[Any] = {program.storage_of(slot) for call in program.calls[start:end] for slot in call.mutates}
    return not read.isdisjoint(changed)


def _is_cleared(program: Program, call: Call, device: torch.device) -> bool:
    (slot,) = call.outputs
    inputs = [meta for item in call.refs() if (meta := program.slots[item]) is not None]
    outputs = [meta for meta in (program.slots[slot],) if meta is not None]  # type: ignore[index]
    if any(meta.device != device for meta in (*inputs, *outputs)) or outputs[0].storage in program.leaving():
        return False
    return placement(call.target, device.type).clears(inputs, outputs)
