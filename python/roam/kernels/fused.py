"""Operators that each replace two of PyTorch's, so that the tensor between the two is never whole
in memory.

The registered kernel of each consists of the two ordinary calls. An equal kernel calls the very
same two kernels piece by piece. As for all equal kernels, ``benches/kernel_table.py`` tests that
the bits are equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from roam.kernels.substitutes import Outs, equal
from roam.program.ir import Call, Program

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
    between = aten.nll_loss_backward(
        grad_output, output, target, weight, reduction, ignore_index, total_weight
    )
    return aten._log_softmax_backward_data(between, output, 1, output.dtype)  # type: ignore[no-any-return]


_library.impl("nll_loss_log_softmax_backward", _one_after_the_other, "CompositeExplicitAutograd")
CROSS_ENTROPY_BACKWARD = torch.ops.roam.nll_loss_log_softmax_backward.default
"""The gradient of a classification loss with respect to the logits: `nll_loss_backward`, then
`_log_softmax_backward_data`."""


@equal(
    "aten::nll_loss_backward, aten::_log_softmax_backward_data.out, by rows",
    CROSS_ENTROPY_BACKWARD.name(),
)
def _by_rows(
    outs: Outs, grad_output: Tensor, output: Tensor, target: Tensor, weight: Tensor | None, reduction: int,
    ignore_index: int, total_weight: Tensor,
) -> None:  # fmt: skip
    for part in _parts(output.shape[0], output.nbytes):
        grad = grad_output[part] if grad_output.dim() else grad_output
        between = aten.nll_loss_backward(
            grad, output[part], target[part], weight, reduction, ignore_index, total_weight
        )
        aten._log_softmax_backward_data.out(
            between, output[part], 1, output.dtype, out=outs[0][part]
        )
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
    most = max(
        part.stop - part.start for part in _parts(rows, rows * classes * meta.dtype.itemsize)
    )
    return int(most * classes * meta.dtype.itemsize)
