"""Checks in a run: operators of PyTorch's check data, for example whether a matrix is singular. A
plan takes for granted that these checks pass. If one fails, the run restores what it has written,
and the user's own function runs instead, meets it again, and raises what eager PyTorch raises, or
goes on in its `except`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

aten = torch.ops.aten


class CheckFailed(Exception):
    """What code of PyTorch's asks for is not so."""


def holds(value: Any, expected: bool) -> None:
    """Raises `CheckFailed` if a value is not what code of PyTorch's, in C++, asks for."""
    if bool(value) is not expected:
        raise CheckFailed("what an operator of PyTorch's asks for is not so")


DATA_CHECKS: Final = frozenset((
    aten._linalg_check_errors.default, aten._assert_async.default, aten._assert_async.msg, holds,
))  # fmt: skip
"""What does nothing but raise an error if data is not as an operator of PyTorch wants it."""

RAISING: Final = frozenset(
    f"aten::{name}"
    for base in (
        "_embedding_bag", "_embedding_bag_forward_only", "_histogramdd_bin_edges", "_linalg_eigh", "_linalg_svd",
        "bernoulli", "binary_cross_entropy", "bincount", "cholesky_inverse", "embedding", "gather", "histc", "histogram",
        "index", "index_add", "index_copy", "index_fill", "index_put", "index_reduce",
        "index_select", "linspace", "linalg_eig", "linalg_ldl_solve", "linalg_lstsq", "linalg_lu_solve",
        "linalg_matrix_sqrth", "linalg_pinv", "linalg_polar", "lu_unpack", "max_unpool2d", "max_unpool3d",
        "multi_margin_loss", "multilabel_margin_loss_forward", "multinomial", "nll_loss_forward", "nll_loss2d_forward",
        "normal", "put", "scatter", "scatter_add", "scatter_reduce", "take",
    )
    for name in (base, f"{base}_")
) | {
    *(f"torch_nn::_linear_cross_entropy_batch_chunked{end}" for end in ("", "_no_reduction")),
    "roam::nll_loss_of_picked",
}  # fmt: skip
"""Kernels that raise an error for some data, on the CPU: for indices that are out of range, or for
what an algorithm does not converge on. `tests/tracing/test_data_checks.py` looks for them among all
of PyTorch's operators."""
SOUND: Final = {"bernoulli": ("p", 0.0, 1.0), "normal": ("std", 0.0, math.inf)}
"""Of those, kernels that draw numbers, and raise no error where an argument is a constant of a
range: a mask of dropout orders nothing."""
DIVIDING: Final = frozenset(
    f"aten::{name}" for base in ("div", "floor_divide", "fmod", "remainder") for name in (base, f"{base}_")
)  # fmt: skip
"""Kernels that raise an error where an integer is divided by zero."""


def check_data(
    operator: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Runs an operator that checks data. If it raises an error, the run's changes are undone first.

    Args:
        operator: the check.
        args, kwargs: its arguments.
        copies: what has been written to, each with a copy from before.
    """
    try:
        operator(*args, **kwargs)
    except Exception:
        for tensor, copy in copies:
            tensor.copy_(copy)
        raise
