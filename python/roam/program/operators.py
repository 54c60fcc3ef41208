"""Which library an operator comes from, and kinds of operators that need care."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from roam.torch_compat.private import OpOverload

REGION = "roam::region_"
"""How the names of operators begin that stand for compiled regions."""
_OURS = frozenset({"aten", "roam"})

aten = torch.ops.aten
UNINITIALIZED: Final = (
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
)
"""Overloads whose results have no values yet."""
ATTENTION: Final[dict[Any, tuple[int, tuple[int, int]]]] = {
    aten._scaled_dot_product_efficient_attention.default: (5, (2, 3)),
    aten._scaled_dot_product_flash_attention.default: (3, (6, 7)),
    aten._scaled_dot_product_cudnn_attention.default: (5, (6, 7)),
}
"""Operators of attention on CUDA. They draw random numbers for dropout alone, and may keep seed and
offset on the CPU. For each, the places of dropout among its arguments, and of seed and offset among
its results.
"""


def is_ours(func: object) -> bool:
    """Whether it is an operator of PyTorch's or of this library."""
    return type(func) is OpOverload and func.namespace in _OURS


def is_foreign(func: object) -> bool:
    """Whether it is an operator of others."""
    return isinstance(func, OpOverload) and func.namespace not in _OURS


def is_region(func: object) -> bool:
    """Whether it stands for a compiled region: a graph that `torch.compile` has compiled."""
    return isinstance(func, OpOverload) and func.name().startswith(REGION)


OnList = Callable[[list[Any]], Any]
"""Runs an operator on a list of its arguments, and empties the list as soon as it has them."""
_on_lists: dict[OpOverload, OnList] = {}


def add_region(func: OpOverload, run: OnList) -> None:
    """Makes known how a compiled region runs so that arguments which nothing else holds are freed
    when it has used them, not when it ends.
    """
    _on_lists[func] = run


def on_list(func: object) -> OnList | None:
    """How an operator runs on a list of its arguments; None for one that is no compiled region."""
    return _on_lists.get(func) if isinstance(func, OpOverload) else None
