"""What tiles call beside PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


def add_product(total: Tensor, is_first: bool, left: Tensor, right: Tensor) -> None:
    """Adds the product of a block's parts of two matrices, or two batches of them, to a total."""
    if is_first:
        torch.matmul(left, right, out=total)
    elif left.dim() == 3:
        total.baddbmm_(left, right)
    else:
        total.addmm_(left, right)


def add_rows(total: Tensor, is_first: bool, grad: Tensor, indices: Tensor, padding: int) -> None:
    """Adds what a block's indices have to the gradient of an embedding's weight. The very kernel
    adds one row after the other: first what there is already, which no sum from zero on changes.
    """
    own, grad = indices.flatten(), grad.reshape(-1, grad.shape[-1])
    rows = total.shape[0]
    before = torch.arange(rows, device=own.device)
    # Each piece takes what the total takes, too.
    row_bytes = max(grad.itemsize * grad.shape[1], torch.int64.itemsize)
    for piece in pieces(grad, -(-row_bytes // grad.shape[1]), least=rows):
        at, new = own[piece].to(torch.int64), grad[piece]
        if not is_first:
            at, new = torch.cat([before, at]), torch.cat([total, new])
        total.copy_(aten.embedding_dense_backward(new, at, rows, padding, False))
        is_first = False


MOST_ROWS = 255
"""Indices of more rows, and what is none, do not go into a byte."""


def pick(scores: Tensor, label: Tensor) -> Tensor:
    """The score of each row's label, as a column; of any other where the label is none."""
    return scores.gather(1, label.clamp(0, scores.shape[1] - 1).unsqueeze(1))


_PIECE_BYTES = 1 << 17
"""Pieces of rows of about so many bytes are made of what takes memory for itself."""


def read_rows(table: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of a table at indices; the last row where an index is none."""
    rows, width = table.shape
    made = table.new_empty((*indices.shape, width)) if out is None else out
    flat, own = made.view(-1, width), indices.reshape(-1)
    if width == 1:  # a quicker kernel
        table, flat = table.reshape(-1), flat.view(-1)
    for piece in pieces(own, torch.int64.itemsize):
        within = rows_at(own[piece], rows).to(torch.int64)
        torch.index_select(table, 0, within, out=flat[piece])
    return made


def rows_at(indices: Tensor, rows: int, none: int | None = None) -> Tensor:
    """Indices of rows, with `none`, or else the last row, where an index is none."""
    is_row = (indices >= 0) & (indices < rows)
    return torch.where(is_row, indices, rows - 1 if none is None else none)


def as_bytes(indices: Tensor, rows: int) -> Tensor:
    """Indices of no more than `MOST_ROWS` rows in a byte each; the largest one is none."""
    made = indices.new_empty(indices.shape, dtype=torch.uint8)
    flat, own = indices.reshape(-1), made.view(-1)
    for piece in pieces(flat):
        own[piece].copy_(rows_at(flat[piece], rows, MOST_ROWS))
    return made


def row_total(grad: Tensor, output: Tensor | None = None) -> Tensor:
    """The sums of rows of which the gradient of a softmax, or of a log-softmax (whose output is not
    needed), takes shares, in the kernel's own order. A sum shows in one more element at the end of
    the row, which adds nothing to it, not even a sign of zero.
    """
    found = grad.new_empty((*grad.shape[:-1], 1))
    size, column = grad.shape[-1], found.view(-1, 1)
    grad = grad.reshape(-1, size)
    output = None if output is None else output.reshape(-1, size)
    for rows in pieces(grad):
        wide = functional.pad(grad[rows], (0, 1), value=-0.0)
        if output is None:
            less = aten._log_softmax_backward_data(wide, torch.zeros_like(wide), -1, grad.dtype)
        else:
            ones = functional.pad(output[rows], (0, 1), value=1.0)
            less = aten._softmax_backward_data(wide, ones, -1, grad.dtype)
        torch.neg(less[:, -1:], out=column[rows])
    return found


def safe_softmax(scores: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
    """As `_safe_softmax`, which takes three times the memory: rows that are masked are zeros."""
    is_masked = scores.amax(dim, keepdim=True) == float("-inf")
    made = torch.empty_like(scores) if out is None else out
    aten._softmax.out(scores, dim, False, out=made)
    return made.masked_fill_(is_masked, 0)


def less_exponential(values: Tensor, out: Tensor | None = None) -> Tensor:
    """The exponential's negative, by the function of the softmax kernels, which is not that of
    `torch.exp`: the gradient of a log-softmax takes it from rows of zeros whose sum is one.
    """
    made = values.new_empty(values.shape) if out is None else out
    size = values.shape[-1]
    flat, own = values.reshape(-1, size), made.view(-1, size)
    for rows in pieces(flat):
        wide = functional.pad(flat[rows], (0, 1))
        one = torch.full_like(wide, -0.0)
        one[:, -1] = 1
        less = aten._log_softmax_backward_data(one, wide, -1, values.dtype)
        own[rows].copy_(less[:, :-1])
    return made


def less_share_of_one(
    grad: Tensor, output: Tensor, total: Tensor, out: Tensor | None = None
) -> Tensor:
    """Some columns of the gradient of a log-softmax, of rows in which no more than one element of
    what comes in is not zero. The very kernel has to sum what the whole row has. So where that
    element is not among the columns, the first column stands in for it, and the result of the first
    column is computed apart.
    """
    made = grad.clone(memory_format=torch.contiguous_format) if out is None else out
    if out is not None and out is not grad:
        made.copy_(grad)
    first = made[..., :1]
    pair = torch.cat([first, total.masked_fill(first != 0, 0)], -1)
    aten._log_softmax_backward_data.out(
        pair, functional.pad(output[..., :1], (0, 1)), -1, grad.dtype, out=pair
    )
    is_here = made.sum(-1, keepdim=True) != 0
    first.copy_(torch.where(is_here, first, total))
    aten._log_softmax_backward_data.out(made, output, -1, grad.dtype, out=made)
    first.copy_(pair[..., :1])
    return made


def pieces(tensor: Tensor, element_bytes: int | None = None, least: int = 1) -> list[slice]:
    """Rows of a tensor in pieces of about `_PIECE_BYTES`, of no fewer than `least` rows; one piece
    of a tensor without memory.
    """
    if tensor.is_meta:
        return [slice(None)]
    rows = tensor.shape[0]
    whole_bytes = tensor.numel() * (element_bytes or tensor.itemsize)
    each = max(rows * _PIECE_BYTES // max(whole_bytes, 1), least)
    return [slice(start, start + each) for start in range(0, rows, each)]


def less_share(grad: Tensor, output: Tensor, total: Tensor) -> Tensor:
    """Some columns of the gradient of a softmax."""
    return (grad - total) * output


@dataclass(frozen=True, slots=True)
class Step:
    """The way from the elements of an axis to those of another one, where a dimension of one is a
    slice of a dimension of the other.

    Attributes:
        behind: elements of the axis' dimensions behind that one.
        whole, part: the size of the dimension, and of its slice.
        first, stride: the slice's first element, and how far the next one is.
        to_part: whether the other axis has the slice.
    """

    behind: int
    whole: int
    part: int
    first: int
    stride: int
    to_part: bool


def places_at(start: int, length: int, steps: Sequence[Step], device: torch.device) -> Tensor:
    """Where the elements of a tile lie along the axis to which steps lead; for one that is not
    there, anywhere.
    """
    places = torch.arange(start, start + length, device=device)
    for step in steps:
        outer, place, rest = _split(places, step)
        size = step.whole
        if step.to_part:
            size = step.part
            place = ((place - step.first) // step.stride).clamp(0, size - 1)
        else:
            place = step.first + place * step.stride
        places = (outer * size + place) * step.behind + rest
    return places


def is_outside(start: int, length: int, steps: Sequence[Step], device: torch.device) -> Tensor:
    """Which elements of a tile are not there after the last step, which leads to a slice."""
    last = steps[-1]
    _, place, _ = _split(places_at(start, length, steps[:-1], device), last)
    place = place - last.first
    return (place < 0) | (place >= last.part * last.stride) | (place % last.stride != 0)


def _split(places: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the dimensions before, of that which is sliced, and of those behind."""
    size = step.whole if step.to_part else step.part
    outer = places // step.behind
    return outer // size, outer % size, places % step.behind


ELSEWHERE = -100


def labels_from(target: Tensor, start: int, length: int, ignored: int) -> Tensor:
    """Labels among some columns; `ELSEWHERE` for others and those that are ignored."""
    is_here = (target >= start) & (target < start + length) & (target != ignored)
    return torch.where(is_here, target - start, ELSEWHERE)


def scatter_from(
    zeros: Tensor, dim: int, indices: Tensor, values: Tensor, start: int, length: int
) -> Tensor:
    """Some columns of zeros to which values are added; what belongs to others adds zeros here."""
    is_here = (indices >= start) & (indices < start + length)
    return zeros.scatter_add(
        dim, torch.where(is_here, indices - start, 0), torch.where(is_here, values, 0)
    )


def embedding_from(grad: Tensor, indices: Tensor, start: int, length: int, padding: int) -> Tensor:
    """Some rows of the gradient of an embedding's weight."""
    nowhere = -1
    is_here = (indices >= start) & (indices < start + length) & (indices != padding)
    here = torch.where(is_here, indices - start, nowhere)
    return aten.embedding_dense_backward(grad, here, length, nowhere, False)  # type: ignore[no-any-return]
