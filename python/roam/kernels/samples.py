"""Values for the arguments of calls that are tried, where zeros would take another way than the
step's own values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from roam.program.ir import Call, Program, TensorMeta
from roam.torch_compat.private import pytree


def _all_ones(args: Sequence[Any], result: TensorMeta | None) -> None:
    """`matrix_exp` has shorter ways for small norms; gradients of products take care of zeros."""
    pytree.tree_map_only(Tensor, lambda tensor: tensor.fill_(1), args)


def _full_bags(args: Sequence[Any], result: TensorMeta | None) -> None:
    """The gradient of a bag's maximum leaves out bags that are empty."""
    sizes = args[4]
    sizes.fill_(1)


def _selected(args: Sequence[Any], result: TensorMeta | None) -> None:
    """A mask selects as many elements as the result has."""
    if result is not None:
        _select(args[1], result.shape[0])


def _indexed(args: Sequence[Any], result: TensorMeta | None) -> None:
    """Masks select as many elements as the result, or what is put in their place, has."""
    tensor, indices = args[:2]
    masks = [index for index in indices if index is not None and index.dtype == torch.bool]
    if not masks or len(masks) < sum(index is not None for index in indices):
        return  # other indices tell nothing of how many are selected
    whole = tensor.dim() - sum(mask.dim() for mask in masks)
    shape = result.shape if len(args) == 2 and result is not None else args[2].shape
    if len(shape) != whole + 1:
        return  # one number is put in all places, or not every dimension is told
    # The selected elements are where the masks are, or in front if something lies between those.
    places = [place for place, index in enumerate(indices) if index is not None]
    is_one_group = places[-1] - places[0] + 1 == len(places)
    for mask in masks:
        _select(mask, shape[places[0] if is_one_group else 0])


def _select(mask: Tensor, count: int) -> None:
    """Makes `count` elements of a mask true, or a few more where an element of an expanded mask's
    memory stands for several.
    """
    own = mask[tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride())]
    flat = torch.zeros(own.numel(), dtype=mask.dtype, device=mask.device)
    flat[: -(-count * own.numel() // max(mask.numel(), 1))] = True
    own.copy_(flat.view(own.shape))


_Set = Callable[[Sequence[Any], TensorMeta | None], None]
_SETS: Final[Mapping[str, _Set]] = MappingProxyType(
    {
        "aten._embedding_bag_backward.default": _full_bags,
        "aten.cumprod_backward.default": _all_ones,
        "aten.index.Tensor": _indexed,
        "aten.index_put.default": _indexed,
        "aten.index_put_.default": _indexed,
        "aten.linalg_matrix_exp.default": _all_ones,
        "aten.masked_select.default": _selected,
    }
)


def wants_values(call: Call) -> bool:
    """Whether zeros are not enough for a call; then no two of its arguments may share memory."""
    return call.name in _SETS


def set_values(program: Program, call: Call, args: Sequence[Any]) -> None:
    """Writes to arguments that are zeros what the call's kernel has to find there."""
    if call.name in _SETS:
        slot = call.outputs[0]
        _SETS[call.name](args, None if slot is None else program.slots[slot])
