"""Results of common kernels by rules of roam's own, for plain arguments.

PyTorch's meta kernels for these are written in Python and take up to milliseconds, once for every
new shape. `tests/tracing/test_meta_kernels.py` compares the rules
with the fake mode and with real kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from roam.torch_compat.private import DisableTorchDispatch, OpOverload

aten = torch.ops.aten
_FLOATS = frozenset({torch.float32, torch.float64})
_NUMBERS = frozenset({bool, int, float})


def by_rule(func: Any, args: Sequence[Any], kwargs: Any, tensors: Sequence[Any]) -> Any:
    """What a kernel makes of fake tensors on the CPU, as meta tensors; None if no rule says
    so.
    """
    rule = _RULES.get(func)
    if rule is None or kwargs or not tensors:
        return None
    dtype = tensors[0].dtype
    if dtype not in _FLOATS or any(
        tensor.dtype is not dtype or 0 in tensor.shape for tensor in tensors
    ):
        return None
    found = rule(*args)
    if found is None:
        return None
    with DisableTorchDispatch():
        made = [
            torch.empty_strided(shape, _packed(shape), dtype=dtype, device="meta")
            for shape in found
        ]
    return tuple(made) if type(found) is list else made[0]


_Shapes = tuple[tuple[int, ...], ...] | list[tuple[int, ...]] | None
"""The shapes of the results: a tuple with the shape of one result, or a list of several, which are
returned as a tuple.
"""


def _pointwise(*args: Any) -> _Shapes:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if len(tensors) < len(args) and not all(
        type(arg) in _NUMBERS for arg in args if not isinstance(arg, torch.Tensor)
    ):
        return None
    shape = tensors[0].shape
    if any(tensor.shape != shape or not _is_packed(tensor) for tensor in tensors):
        return None
    return (tuple(shape),)


def _softmax(value: Any, dim: int, other: Any) -> _Shapes:
    """`other`: whether half precision becomes single, or a dtype to convert to."""
    is_whole = value.dim() > 0 and -value.dim() <= dim < value.dim() and other in (False, None)
    return _pointwise(value) if is_whole else None


def _safe_softmax(value: Any, dim: int, dtype: Any = None) -> _Shapes:
    return _softmax(value, dim, dtype)


def _softmax_backward(gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> _Shapes:
    is_whole = output.dim() > 0 and -output.dim() <= dim < output.dim() and dtype is output.dtype
    return _pointwise(gradient, output) if is_whole else None


def _mm(left: Any, right: Any) -> _Shapes:
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
        return None
    return ((left.shape[0], right.shape[1]),)


def _addmm(bias: Any, left: Any, right: Any) -> _Shapes:
    found = _mm(left, right)
    return found if found is not None and tuple(bias.shape) == found[0][1:] else None


def _bmm(left: Any, right: Any) -> _Shapes:
    if (
        left.dim() != 3
        or right.dim() != 3
        or left.shape[0] != right.shape[0]
        or left.shape[2] != right.shape[1]
    ):
        return None
    return ((left.shape[0], left.shape[1], right.shape[2]),)


def _layer_norm(value: Any, normalized: Any, weight: Any, bias: Any, eps: Any) -> _Shapes:
    shape, kept = tuple(value.shape), value.dim() - len(normalized)
    given = [part for part in (weight, bias) if part is not None]
    if (
        not _is_packed(value)
        or shape[kept:] != tuple(normalized)
        or any(tuple(one.shape) != shape[kept:] for one in given)
    ):
        return None
    statistics = (*shape[:kept], *(1 for _ in normalized))
    return [shape, statistics, statistics]


def _layer_norm_backward(
    gradient: Any,
    value: Any,
    normalized: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    mask: Any,
) -> _Shapes:
    if (
        weight is None
        or bias is None
        or not all(mask)
        or gradient.shape != value.shape
        or not _is_packed(gradient)
    ):
        return None
    found = _layer_norm(value, normalized, weight, bias, None)
    if found is None or any(
        tuple(one.shape) != found[1] or not _is_packed(one) for one in (mean, rstd)
    ):
        return None
    return [found[0], tuple(weight.shape), tuple(bias.shape)]


_RULES: dict[OpOverload, Callable[..., _Shapes]] = {
    **dict.fromkeys(
        (
            aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.neg.default, aten.exp.default,
            aten.tanh.default, aten.sigmoid.default, aten.relu.default, aten.sqrt.default, aten.rsqrt.default,
            aten.tanh_backward.default, aten.sigmoid_backward.default,
        ),
        _pointwise,
    ),
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}  # fmt: skip


def _is_packed(tensor: Any) -> bool:
    """Whether elements lie one behind the other, dimensions of one element included."""
    return bool(tensor.stride() == _packed(tuple(tensor.shape)))


@functools.lru_cache(4096)
def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
