"""Kernels that write what another one returns, bit for bit, into memory that they are given.

Each is called as ``kernel(outs, *args, **kwargs)`` with the arguments of the overload that it
stands for. ``benches/kernel_table.py`` tests that the bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roam.program.operators import UNINITIALIZED
from roam.torch_compat.private import OpOverload

aten = torch.ops.aten

Outs = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Equal:
    """A kernel that stands for an overload; see `roam.kernels.table.Placement` for the
    attributes.
    """

    kernel: Callable[..., Any]
    name: str
    not_if: str = ""
    rows: Callable[..., int] | None = None


EQUAL: dict[str, Equal] = {}
"""By the full name of the overload that it stands for."""


def copy_then(in_place: OpOverload, outs: Outs, self: Tensor, *args: Any, **kwargs: Any) -> None:
    """What generated functional overloads do: copy the first argument, then change the copy."""
    _copy(outs[0], self)
    in_place(outs[0], *args, **kwargs)


def _copy(out: Tensor, value: Tensor) -> None:
    # In place there is nothing to copy.
    if out.data_ptr() != value.data_ptr() or out.dtype != value.dtype:
        out.copy_(value)


def equal(
    name: str, *overloads: str, not_if: str = "", rows: Callable[..., int] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enters a kernel that stands for overloads, of the namespace ``aten`` unless they name
    theirs.
    """

    def enter(kernel: Callable[..., None]) -> Callable[..., None]:
        full = (overload if "::" in overload else f"aten::{overload}" for overload in overloads)
        EQUAL.update((overload, Equal(kernel, name, not_if, rows)) for overload in full)
        return kernel

    return enter


@equal("nothing", *(name.removeprefix("aten::") for name in UNINITIALIZED))
def _leave(outs: Outs, *args: Any, **kwargs: Any) -> None:
    aten.empty.out(outs[0].shape, out=outs[0])  # writes only in deterministic mode


@equal("copy_", "clone", "_to_copy", "lift_fresh_copy")
def _copied(outs: Outs, self: Tensor, **kwargs: Any) -> None:
    _copy(outs[0], self)


@equal("fill_", "full", "full_like", "fill.Scalar")
def _full(outs: Outs, like: Any, fill_value: Any, **kwargs: Any) -> None:
    outs[0].fill_(fill_value)


@equal("fill_", "new_full")
def _new_full(outs: Outs, self: Tensor, size: Any, fill_value: Any, **kwargs: Any) -> None:
    outs[0].fill_(fill_value)


@equal("fill_", "scalar_tensor")
def _scalar_tensor(outs: Outs, value: Any, **kwargs: Any) -> None:
    outs[0].fill_(value)


@equal("fill_", "ones", "ones_like", "new_ones")
def _ones(outs: Outs, *args: Any, **kwargs: Any) -> None:
    outs[0].fill_(1)


@equal("zero_", "zeros", "zeros_like", "new_zeros")
def _zeros(outs: Outs, *args: Any, **kwargs: Any) -> None:
    outs[0].zero_()


@equal("aten::clamp_min.out", "relu")
def _relu(outs: Outs, self: Tensor) -> None:
    aten.clamp_min.out(self, 0, out=outs[0])


@equal("aten::index_select.out", "embedding")
def _embedding(outs: Outs, weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> None:
    aten.index_select.out(weight, 0, indices.reshape(-1), out=outs[0].view(-1, weight.shape[1]))


@equal("aten::sum.IntList_out", "sum")
def _sum(outs: Outs, self: Tensor, *, dtype: torch.dtype | None = None) -> None:
    aten.sum.IntList_out(self, None, False, dtype=dtype, out=outs[0])


@equal("aten::_softmax.out", "_safe_softmax", not_if="dtype")
def _safe_softmax(outs: Outs, self: Tensor, dim: int, dtype: None = None) -> None:
    masked_rows = (self == float("-inf")).all(dim, keepdim=True)
    aten._softmax.out(self, dim, False, out=outs[0]).masked_fill_(masked_rows, 0)


@equal("zero_, aten::index_add_", "embedding_dense_backward", not_if="scale_grad_by_freq")
def _embedding_dense_backward(
    outs: Outs,
    grad_output: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> None:
    grad = outs[0].zero_()
    grad.index_add_(0, indices.reshape(-1), grad_output.reshape(-1, grad.shape[1]))
    if 0 <= padding_idx < num_weights:
        grad[padding_idx].zero_()


@equal("bernoulli_, aten::mul.out", "native_dropout")
def _native_dropout(outs: Outs, input: Tensor, p: float, train: bool | None) -> None:
    result, mask = outs
    if input.numel() == 0:
        return
    if not train and train is not None:
        mask.fill_(True)
        _copy(result, input)
        return
    mask.bernoulli_(1 - p)
    aten.mul.out(input, mask, out=result)
    result.mul_(0.0 if p == 1 else 1 / (1 - p))


@equal("aten::mul.out", "native_dropout_backward")
def _native_dropout_backward(outs: Outs, grad_output: Tensor, mask: Tensor, scale: float) -> None:
    aten.mul.out(grad_output, mask, out=outs[0]).mul_(scale)


@equal("zero_, copy_", "slice_backward")
def _slice_backward(
    outs: Outs, grad_output: Tensor, input_sizes: Any, dim: int, start: int, end: int, step: int
) -> None:
    aten.slice.Tensor(outs[0].zero_(), dim, start, end, step).copy_(grad_output)


@equal("zero_, copy_", "select_backward")
def _select_backward(
    outs: Outs, grad_output: Tensor, input_sizes: Any, dim: int, index: int
) -> None:
    outs[0].zero_().select(dim, index).copy_(grad_output)


@equal("copy_", "slice_scatter")
def _slice_scatter(outs: Outs, self: Tensor, src: Tensor, *where: Any, **kwargs: Any) -> None:
    _copy(outs[0], self)
    aten.slice.Tensor(outs[0], *where, **kwargs).copy_(src)


@equal("copy_", "select_scatter")
def _select_scatter(outs: Outs, self: Tensor, src: Tensor, dim: int, index: int) -> None:
    _copy(outs[0], self)
    outs[0].select(dim, index).copy_(src)


@equal("uniform_", "rand_like")
def _rand_like(outs: Outs, self: Tensor, **kwargs: Any) -> None:
    outs[0].uniform_()


@equal("normal_", "randn_like")
def _randn_like(outs: Outs, self: Tensor, **kwargs: Any) -> None:
    outs[0].normal_()
