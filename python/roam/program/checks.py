"""Checks in a run: the step's code asks about a value that the step computes, and one answer ends
in an error. The plan assumes the other.

Only a run can find the answer. If it is not the assumed one, the run restores what it has written,
and the user's own function runs instead.

Operators of PyTorch check data as well, for example whether a matrix is singular. A plan takes for
granted that these checks pass. If one fails, the user's own function meets it again, and raises
what eager PyTorch raises, or goes on in its `except`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

aten = torch.ops.aten


class CheckFailed(Exception):
    """A check of the step's code does not pass."""


def check(
    value: Any, expected: bool, copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
) -> None:
    """Raises `CheckFailed` if a value is not what the plan assumes, with the copies by which the
    run's changes can be undone.

    Args:
        value: what the code asks about.
        expected: its truth.
        copies: what has been written to, each with a copy from before.
    """
    if bool(value) is not expected:
        for tensor, copy in copies:
            tensor.copy_(copy)
        raise CheckFailed("a branch or check of the step has another outcome than in the plan")


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
