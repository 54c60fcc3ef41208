"""Singular values and eigenvalues as PyTorch computes them of real tensors.

PyTorch takes these operators apart in C++. For a real tensor without a gradient it computes the
values alone, but for a fake one the vectors too, by another method of LAPACK's, whose values have
other bits. Norms, condition numbers and ranks of matrices call the same operators. While a step is
traced, the functions here take the operators apart, as PyTorch does for real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from roam.torch_compat.private import (
    FakeTensor,
    FakeTensorMode,
    dispatch_modes,
    function_transform,
    implemented,
)
from roam.tracing.recording.composite_checks import CHECKED
from roam.tracing.recording.recorded_values import Values

aten = torch.ops.aten
_KEYS = ("AutogradCPU", "AutogradCUDA")


def _needs_vectors(matrix: torch.Tensor) -> bool:
    """Whether PyTorch would compute vectors too: for a gradient, and of tensors that are not plain,
    inside of a transform of `torch.func` or of a mode of the step's own.
    """
    is_plain = type(matrix) is FakeTensor or (
        type(matrix) in (torch.Tensor, torch.nn.Parameter) and function_transform() is None
    )
    return (
        not is_plain
        or (torch.is_grad_enabled() and matrix.requires_grad)
        or forward_ad.unpack_dual(matrix).tangent is not None
        or any(not isinstance(mode, (FakeTensorMode, Values)) for mode in dispatch_modes())
    )


def _singular_values(matrix: Any, *, driver: str | None = None) -> Any:
    return aten._linalg_svd.default(matrix, False, _needs_vectors(matrix), driver=driver)[1]


def _symmetric_eigenvalues(matrix: Any, uplo: str = "L") -> Any:
    return aten._linalg_eigh.default(matrix, uplo, _needs_vectors(matrix))[0]


def _eigenvalues(matrix: Any) -> Any:
    if _needs_vectors(matrix):
        return aten.linalg_eig.default(matrix)[0]
    return aten._linalg_eigvals.default(matrix)


AS_FOR_REAL: dict[Any, Callable[..., Any]] = {
    aten.linalg_svdvals.default: _singular_values,
    aten.linalg_eigvalsh.default: _symmetric_eigenvalues,
    aten.linalg_eigvals.default: _eigenvalues,
    **CHECKED,
}
"""How operators are taken apart whose parts are others for real tensors than for fake ones."""


@contextmanager
def as_for_real() -> Iterator[None]:
    """Autograd takes the operators apart as it does for real tensors."""
    with ExitStack() as stack:
        for operator, parts in AS_FOR_REAL.items():
            name = operator.name().removeprefix("aten::")
            stack.enter_context(implemented("aten", name, parts, _KEYS))
        yield
