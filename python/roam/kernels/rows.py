"""Attention on the CPU, a few samples at a time, each piece copied to its planned place.

PyTorch's kernels for attention allocate their results themselves, and its gradient consists of
three results at once. Samples do not depend on each other, so the very same kernels are called for
a few samples at a time, and only a piece of the results is allocated at once.
``benches/kernel_table.py`` tests that the bits are equal, as for other equal kernels. Nothing is
split if the bits could depend on the split or on the number of threads:

- In half precision the kernel chooses its matrix products by the size of the batch.
- A matrix product may round differently if its operands lie at other places in their cache lines.
  So a sample of what it writes to, and the scratchpad of each thread, must be whole cache lines.
- A matrix product that is the only work may use several threads itself. So there must be several
  heads, which are work for several threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from roam.kernels.substitutes import Outs, equal
from roam.program.ir import TensorMeta, extents, is_dense
from roam.torch_compat.private import OpOverload

DEVICE = "cpu"
WORTH_BYTES = 1 << 19
"""Smaller results are copied whole: calls would take longer than they save."""
_MOST_PIECES = 4
_CACHE_LINE_BYTES = 64
_QUERIES = 32
"""The least number of queries that the kernel takes together, if there are as many. The sizes of
its scratchpads are multiples of it.
"""

_Known = Tensor | TensorMeta


def piece_bytes(samples: int, nbytes: int) -> int:
    """The most bytes that one piece takes of results that take `nbytes` bytes."""
    return nbytes // samples * -(-samples // _MOST_PIECES)


def _parts(samples: int) -> Iterator[slice]:
    pieces = min(_MOST_PIECES, samples)
    return (
        slice(samples * piece // pieces, samples * (piece + 1) // pieces) for piece in range(pieces)
    )


def _samples(
    query: _Known,
    key: _Known,
    value: _Known,
    *args: Any,
    attn_mask: _Known | None = None,
    **kwargs: Any,
) -> int:
    tensors = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    # The kernel reads the elements of a row as neighbours in memory. If they are none, what it
    # reads depends on who calls it.
    if any(0 in tensor.shape or _strides(tensor)[-1] != 1 for tensor in tensors):
        return 0
    heads, queries = query.shape[1:3]
    is_safe = query.dtype in (torch.float32, torch.float64) and heads > 1 and queries >= _QUERIES
    return int(query.shape[0]) if is_safe else 0


def _samples_backward(
    grad_out: _Known,
    query: _Known,
    key: _Known,
    value: _Known,
    out: _Known,
    *args: Any,
    **kwargs: Any,
) -> int:
    sizes = [math.prod(tensor.shape[1:]) * tensor.dtype.itemsize for tensor in (query, key)]
    is_aligned = all(size_bytes % _CACHE_LINE_BYTES == 0 for size_bytes in sizes)
    # The kernel copies a gradient that has gaps. It must copy every piece if and only if it copies
    # the whole.
    is_regular = not _has_dense_samples(grad_out) or _strides(grad_out)[0] == math.prod(
        grad_out.shape[1:]
    )
    return (
        _samples(query, key, value, **kwargs)
        if is_aligned and is_regular and _strides(out)[-1] == 1
        else 0
    )


def _has_dense_samples(tensor: _Known) -> bool:
    """Whether heads lie side by side in each query, and queries behind each other."""
    _, heads, queries, width = tensor.shape
    _, head_stride, query_stride, stride = _strides(tensor)
    return is_dense(extents((width, heads, queries), (stride, head_stride, query_stride)))


def _by_samples(kernel: OpOverload) -> Callable[..., None]:
    """Attention, or its gradient, for a few samples at a time."""

    def run(outs: Outs, *inputs: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> None:
        samples = len(outs[0])
        for part in _parts(samples):
            piece = (value[part] if isinstance(value, Tensor) else value for value in inputs)
            _copy_piece(
                outs, part, kernel(*piece, attn_mask=_mask_of(attn_mask, part, samples), **kwargs)
            )

    return run


def _mask_of(mask: Tensor | None, part: slice, samples: int) -> Tensor | None:
    """A piece of the mask, if each sample has a mask of its own; otherwise the whole mask."""
    return mask[part] if mask is not None and mask.dim() == 4 and len(mask) == samples else mask


def _copy_piece(outs: Outs, part: slice, results: Sequence[Tensor]) -> None:
    for out, result in zip(outs, results, strict=True):
        out[part].copy_(result)


def _strides(tensor: _Known) -> Sequence[int]:
    return tensor.stride() if isinstance(tensor, Tensor) else tensor.stride


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
for _kernel, _rows in ((_ATTENTION, _samples), (_BACKWARD, _samples_backward)):
    equal(f"{_kernel.name()}, by rows", _kernel.name(), rows=_rows)(_by_samples(_kernel))
