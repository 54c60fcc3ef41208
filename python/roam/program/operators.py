"""Which library an operator comes from."""

from __future__ import annotations

from roam.torch_compat.private import OpOverload

REGION = "roam::region_"
"""How the names of operators begin that stand for compiled regions."""
_OURS = frozenset({"aten", "roam"})


def is_ours(func: object) -> bool:
    """Whether it is an operator of PyTorch's or of this library."""
    return type(func) is OpOverload and func.namespace in _OURS


def is_foreign(func: object) -> bool:
    """Whether it is an operator of others."""
    return isinstance(func, OpOverload) and func.namespace not in _OURS


def is_region(func: object) -> bool:
    """Whether it stands for a compiled region: a graph that `torch.compile` has compiled."""
    return isinstance(func, OpOverload) and func.name().startswith(REGION)
