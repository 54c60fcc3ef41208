"""Containers that have attributes beside their entries: `outputs.extra = x` gives one to an output
of transformers, `batch.note = x` to an ordered dictionary, and a class that derives from a named
tuple may have some.

PyTorch's pytree takes a container apart to its entries, and makes another container of these. It
loses such attributes without an error, so they are looked for here, and refused.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import torch

from roam.state.equality import MISSING, attributes_of, is_plain, same
from roam.torch_compat.private import pytree

_WITHOUT_ATTRIBUTES: Final = (dict, list, tuple, defaultdict, deque)
_OF_TYPING: Final = "__orig_class__"
"""What `typing.OrderedDict(...)` and `Pair[int](...)` note on what they make."""
_LEAVES: Final = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


class Lost(NamedTuple):
    """A container that another one, made of the same entries, could not stand for.

    Attributes:
        fault: what the other one lacks, as a message says it of the container.
    """

    container: Any
    fault: str


def lost_attribute(tree: Any, closed: Collection[int] = ()) -> Lost | None:
    """The first container in a tree with an attribute that pytree would lose or change.

    An attribute counts if a container made of the same entries lacks it, or has another tensor or
    plain value there. Other values, such as a list that the class makes itself, are made anew.

    Args:
        closed: identities of containers that are not taken apart.
    """
    kind = type(tree)
    if kind in _LEAVES or pytree.tree_is_leaf(tree) or id(tree) in closed:
        return None
    if kind is dict:
        parts = list(tree.values())
    elif kind is list or kind is tuple:
        parts = list(tree)
    else:
        own = id(tree)  # pytree keeps the function, and what it holds, until a collection
        parts, spec = pytree.tree_flatten(tree, is_leaf=lambda part: id(part) != own)
        fault = _fault(tree, parts, spec)
        if fault is not None:
            return Lost(tree, fault)
    return next(
        (lost for part in parts if (lost := lost_attribute(part, closed)) is not None), None
    )


def loses_attributes(container: Any, parts: list[Any], spec: Any) -> bool:
    """Whether another container that pytree makes of these parts of one would lack or change an
    attribute.
    """
    return _fault(container, parts, spec) is not None


def _fault(container: Any, parts: list[Any], spec: Any) -> str | None:
    attributes = None if type(container) in _WITHOUT_ATTRIBUTES else attributes_of(container)
    if not attributes:
        return None
    try:
        made = attributes_of(pytree.tree_unflatten(parts, spec)) or {}
    except Exception as error:  # noqa: BLE001 - of the class, which may not know an entry
        return f"entries of which its class cannot be made again ({error})"
    names = (
        name
        for name, value in attributes.items()
        if name != _OF_TYPING and _is_other(value, made.get(name, MISSING))
    )
    return next((f"the attribute {name!r} beside its entries" for name in names), None)


def _is_other(value: Any, made: Any) -> bool:
    if value is made:
        return False
    if is_plain(value) and is_plain(made):
        return not same(value, made)
    return type(value) is not type(made) or issubclass(type(value), torch.Tensor)


__all__ = ["Lost", "loses_attributes", "lost_attribute"]
