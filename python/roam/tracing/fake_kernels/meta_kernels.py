"""Operators that are run on meta tensors instead of fake ones, with equal results and many times as
fast.

A fake mode runs Python code for an operator: decompositions, and shape functions for symbolic
sizes. For the operators here PyTorch's own meta kernels give the same results if all tensors are on
the CPU (`tests/tracing/test_meta_kernels.py` compares them).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from roam.torch_compat.private import OpOverload, base_name, in_kernel_invocation_manager

_VIEWS = (
    "_unsafe_view", "alias", "detach", "diagonal", "expand", "permute", "select", "slice", "split", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view",
)  # fmt: skip
_POINTWISE = (
    "abs", "add", "addcdiv", "addcmul", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "clamp_min", "copy", "cos", "div", "elu", "eq", "exp",
    "fill", "ge", "gelu", "gt", "hardtanh", "le", "leaky_relu", "lerp", "log", "logical_and", "logical_not", "logical_or", "lt",
    "masked_fill", "maximum", "minimum", "mul", "ne", "neg", "pow", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid", "sign", "silu", "sin",
    "sqrt", "sub", "tanh", "tril", "triu", "where", "zero",
)  # fmt: skip
_GRADIENTS = (
    "_log_softmax_backward_data", "_softmax_backward_data", "elu_backward", "embedding_dense_backward", "gelu_backward",
    "hardtanh_backward", "leaky_relu_backward", "native_batch_norm_backward", "native_layer_norm_backward", "nll_loss_backward",
    "select_backward", "sigmoid_backward", "silu_backward", "slice_backward", "tanh_backward", "threshold_backward",
)  # fmt: skip
_OTHERS = (
    "_log_softmax", "_safe_softmax", "_softmax", "addmm", "all", "amax", "amin", "any", "argmax", "baddbmm", "bmm", "cat", "clone", "cumsum",
    "embedding", "gather", "linalg_vector_norm", "mean", "mm", "native_batch_norm", "native_layer_norm", "nll_loss_forward",
    "scatter_add", "stack", "sum", "var",
)  # fmt: skip
SHOWN = frozenset(name for names in (_VIEWS, _POINTWISE, _GRADIENTS, _OTHERS) for name in names)
"""Their names, without the underscore of those that work in place."""
_NORMS = frozenset(
    {
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
    }
)
"""Kernels that also return statistics. In half precision, the dtype of these depends on the device.
In evaluation, batch norm returns none.
"""
_HALF = frozenset({torch.bfloat16, torch.float16})


def on_meta(func: Any, args: Any, kwargs: Any, tensors: Sequence[Any]) -> Any:
    """The results of a kernel for fake tensors' metadata: meta tensors, and arguments that it
    returns. NotImplemented if only the fake mode knows them, or if the kernel refuses its
    arguments.
    """
    if (
        not _is_shown(func)
        or "device" in kwargs
        or not tensors
        or any(not _is_simple(tensor) for tensor in tensors)
    ):
        return NotImplemented
    if _plain_name(func) in _NORMS and _hangs_on_device(func, args, tensors):
        return NotImplemented
    try:
        with in_kernel_invocation_manager(tensors[0].fake_mode):
            return func(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the fake mode says it in the words that are expected of it
        return NotImplemented


@functools.cache
def _is_shown(func: Any) -> bool:
    return (
        type(func) is OpOverload
        and func.namespace == "aten"
        and _plain_name(func) in SHOWN
        and torch.Tag.inplace_view not in func.tags
    )


def _hangs_on_device(func: OpOverload, args: Any, tensors: Sequence[Any]) -> bool:
    is_evaluating = func is torch.ops.aten.native_batch_norm.default and not args[5]
    return is_evaluating or any(tensor.dtype in _HALF for tensor in tensors)


def _plain_name(func: OpOverload) -> str:
    return base_name(func).removesuffix("_")


def _is_simple(tensor: Any) -> bool:
    return (
        tensor.fake_device.type == "cpu"
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
