"""Operators of which PyTorch checks the data of real tensors, but not that of fake ones.

PyTorch takes these operators apart in C++, where it looks at values: whether classes are in range,
or quantiles between 0 and 1. While a step is traced, the functions here take the operators apart,
and record these checks as operators of their own. If a check fails in a run, the user's function
runs in the plan's place, and PyTorch raises its own error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from roam.torch_compat.private import run_composite

aten = torch.ops.aten


def _one_hot(classes: Any, num_classes: int = -1) -> Any:
    if classes.dtype is not torch.int64 or not classes.numel():
        return run_composite(aten.one_hot.default, classes, num_classes, is_implicit=True)
    if classes.device.type == "cpu":  # a CUDA device checks the indices of `scatter_`
        aten._assert_async.msg(classes.min() >= 0, "a class is negative")
        if num_classes != -1:
            aten._assert_async.msg(classes.max() < num_classes, "a class is too large")
    if num_classes == -1:
        return run_composite(aten.one_hot.default, classes, is_implicit=True)
    zeros = classes.new_zeros((*classes.shape, num_classes))
    return zeros.scatter_(-1, classes.unsqueeze(-1), 1)


def _quantile(operator: Any, values: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
    if values.device.type == "cpu":
        aten._assert_async.msg(((q >= 0) & (q <= 1)).all(), "a quantile is out of range")
    return run_composite(operator, values, q, *args, is_implicit=True, **kwargs)


def _tensor_split(values: Any, places: Any, dim: int = 0) -> Any:
    """PyTorch reads the places from memory, which fake tensors have not."""
    if places.dim() != 1:
        operator = aten.tensor_split.tensor_indices_or_sections
        return run_composite(operator, values, places, dim, is_implicit=True)
    return aten.tensor_split.indices(values, [place.item() for place in places.unbind()], dim)


CHECKED: dict[Any, Callable[..., Any]] = {
    aten.one_hot.default: _one_hot,
    aten.tensor_split.tensor_indices_or_sections: _tensor_split,
    **{
        operator: partial(_quantile, operator)
        for operator in (aten.quantile.default, aten.nanquantile.default)
    },
}
"""How these operators are taken apart."""
