"""Objects of classes written in Python that a step makes, such as a cache of keys and values: taken
apart into what their attributes hold, and put together again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from roam.state.equality import attributes_of, is_plain
from roam.torch_compat.private import pytree

_NO_OTHERS: Final[Mapping[int, tuple[Any, Any]]] = {}


class _Bare:
    """Holds attributes and nothing else."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """An object taken apart: a node of a tree, which becomes the object when the tree is put
    together again.
    """

    kind: type
    names: tuple[str, ...]
    values: list[Any]


def together(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    """An object of a class, given what its attributes hold, and their names."""
    kind, names = context
    made: Any = object.__new__(kind)
    made.__dict__.update(zip(names, values, strict=True))
    return made


pytree.register_pytree_node(
    _Parts, lambda parts: (parts.values, (parts.kind, parts.names)), together
)


def opened(
    tree: Any,
    is_known: Callable[[Any], bool],
    is_leaf: Callable[[Any], bool],
    others: Mapping[int, tuple[Any, Any]] = _NO_OTHERS,
) -> Any:
    """A tree with its objects taken apart, so that its leaves are what these hold. An object stays
    as it is if another one with the same attributes could not stand for it.

    Args:
        tree: of containers that PyTorch's pytree knows.
        is_known: whether a container or an object is somebody else's too, such as one from before
            the step.
        is_leaf: whether a value may be in an object. (Tensors, plain values and classes always
            may.)
        others: by identity, containers from before the step that may be in an object, each with
            what stands for it.
    """
    opening = _Opening(is_known, is_leaf, others)
    return pytree.tree_map(opening.leaf, tree, is_leaf=lambda value: type(value) is torch.Size)


class _Refused(Exception):
    pass


@dataclass(slots=True)
class _Opening:
    is_known: Callable[[Any], bool]
    is_leaf: Callable[[Any], bool]
    others: Mapping[int, tuple[Any, Any]]
    _met: set[int] = field(default_factory=set)

    def leaf(self, value: Any) -> Any:
        try:
            return self._part(value) if is_bare(value) else value
        except _Refused:
            return value

    def _part(self, value: Any) -> Any:
        if issubclass(type(value), (torch.Tensor, type)) or is_plain(value) or self.is_leaf(value):
            return value
        if id(value) in self.others:
            return self.others[id(value)][1]
        kind = type(value)
        if id(value) in self._met or self.is_known(value):
            raise _Refused
        self._met.add(id(value))
        if kind is list or kind is tuple:
            return kind(map(self._part, value))
        if kind is not dict and not is_bare(value):
            raise _Refused
        entries = value if kind is dict else attributes_of(value)
        if not all(map(is_plain, entries)):
            raise _Refused
        parts = {name: self._part(part) for name, part in entries.items()}
        return parts if kind is dict else _Parts(kind, tuple(parts), list(parts.values()))


def is_bare(value: Any) -> bool:
    """Whether an object is its attributes and nothing else."""
    kind = type(value)
    layout = ("__basicsize__", "__itemsize__", "__dictoffset__", "__weakrefoffset__")
    return (
        all(getattr(kind, name) == getattr(_Bare, name) for name in layout)
        and not hasattr(kind, "__del__")
        and not issubclass(type(value), (torch.nn.Module, torch.optim.Optimizer))
        and not weakref.getweakrefcount(value)
    )
