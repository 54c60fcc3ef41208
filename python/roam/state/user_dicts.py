"""Dictionaries written in Python among a call's arguments: objects of `collections.UserDict` and of
classes that derive from it, such as the batches that tokenizers of transformers make.

PyTorch's pytree takes them for leaves. Here they become nodes of a tree, whose parts are what their
attributes hold: the dictionary itself, `data`, is one of them. Their classes are not registered
with pytree, since that would change what users' own code sees.
"""

from __future__ import annotations

import functools
import operator
from collections import UserDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import torch

from roam.state.equality import attributes_of, pattern
from roam.state.made_objects import is_bare, together
from roam.torch_compat.private import pytree

_DATA: Final = "data"
_EMPTY: Final = ()
_LEAVES: Final = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


@dataclass(frozen=True, slots=True)
class _Node:
    """Such an object, taken apart."""

    kind: type
    names: tuple[str, ...]
    values: list[Any]


@dataclass(frozen=True, slots=True)
class _OfData:
    """The key of the dictionary itself. In a path it is not written."""

    def __str__(self) -> str:
        return ""


def _apart(node: _Node) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return node.values, (node.kind, node.names)


def _apart_with_keys(node: _Node) -> tuple[list[tuple[Any, Any]], tuple[type, tuple[str, ...]]]:
    keys = [_OfData() if name == _DATA else pytree.GetAttrKey(name) for name in node.names]
    return list(zip(keys, node.values, strict=True)), (node.kind, node.names)


pytree.register_pytree_node(_Node, _apart, together, flatten_with_keys_fn=_apart_with_keys)


def is_user_dict(value: Any) -> bool:
    """Whether a value is such an object, and pytree does not know its class."""
    return _is_kind(type(value)) and pytree.tree_is_leaf(value)


def may_be_opened(value: Any) -> bool:
    """Whether a value is such an object, is nothing but its attributes, and is not in itself."""
    return _is_apart(value) and not _is_within(value, attributes_of(value), frozenset())


def opened(tree: Any, closed: Collection[int] = ()) -> Any:
    """A tree in which such objects are nodes. The same tree if there are none; otherwise, the
    containers in it are other ones. Putting a flattened tree together makes new objects.

    Args:
        closed: identities of what is to stay as it is, with all that is in it.
    """
    return flattened(tree, closed)[2]


def flattened(tree: Any, closed: Collection[int] = ()) -> tuple[list[Any], Any, Any]:
    """As `pytree.tree_flatten`, and the tree itself: `opened`. What is closed is a leaf."""
    is_leaf = leaves_at(closed)
    leaves, spec = pytree.tree_flatten(tree, is_leaf)
    if any(map(_is_kind, set(map(type, leaves)))):
        part = functools.partial(_opened, closed=closed)
        tree = pytree.tree_map(part, tree, is_leaf=is_leaf)
        leaves, spec = pytree.tree_flatten(tree, is_leaf)
    return leaves, spec, tree


def leaves_at(closed: Collection[int]) -> Callable[[Any], bool] | None:
    """What tells pytree that values of these identities are leaves."""
    return (lambda node: id(node) in closed) if closed else None


def visit(tree: Any, look: Callable[[Any], bool]) -> None:
    """Shows each node and each leaf of a tree to a function, that of such objects before their
    parts. What it returns True for has no parts.
    """

    def seen(node: Any) -> bool:
        if look(node):
            return True
        if may_be_opened(node):
            for part in attributes_of(node).values():
                pytree.tree_flatten(part, is_leaf=seen)
        return False

    pytree.tree_flatten(tree, is_leaf=seen)


def containers_in(tree: Any, closed: Collection[int] = ()) -> list[Any]:
    """The lists, dictionaries, tuples and the like in a tree, and such objects, in order, without
    closed ones.
    """
    found = list[Any]()

    def noted(node: Any) -> bool:
        if id(node) in closed:
            return True
        if _is_container(node):
            found.append(node)
        return False

    def walk(node: Any) -> None:  # in the usual case much faster than PyTorch's
        kind = type(node)
        if kind in _LEAVES or id(node) in closed:
            return
        if kind is not dict and kind is not list and kind is not tuple:
            visit(node, noted)
            return
        found.append(node)
        for part in node.values() if kind is dict else node:
            walk(part)

    walk(tree)
    return found


def pattern_of(containers: list[Any]) -> list[int]:
    """For each container, the place of the first that is the same; nothing if no two are. An empty
    tuple is always the same one.
    """
    names = [id(one) for one in containers if one is not _EMPTY]
    if len(set(names)) == len(names):
        return []
    return pattern(map(id, containers))


def joined(tree: Any, places: list[int], closed: Collection[int] = ()) -> Any:
    """A tree of new containers in which those are the same that `pattern_of` says, as places."""
    made = list[Any]()

    def walk(node: Any) -> Any:
        if type(node) in _LEAVES or id(node) in closed:
            return node
        place = len(made)
        is_counted = _is_container(node)
        if is_counted:
            made.append(node)
        is_apart = may_be_opened(node)
        if not is_apart and pytree.tree_is_leaf(node):
            return node
        held = attributes_of(node) if is_apart else node
        own = id(held)
        parts, spec = pytree.tree_flatten(held, is_leaf=lambda part: id(part) != own)
        others = list(map(walk, parts))
        if any(map(operator.is_not, parts, others)):
            if issubclass(type(held), dict):
                for key, part in zip(list(held), others, strict=True):
                    held[key] = part
            elif issubclass(type(held), (list, deque)):
                for index, part in enumerate(others):
                    held[index] = part
            else:
                node = pytree.tree_unflatten(others, spec)
        if is_counted:
            made[place] = made[places[place]] if places[place] < place else node
            return made[place]
        return node

    return walk(tree) if places else tree


def _is_container(node: Any) -> bool:
    return issubclass(type(node), (list, dict, tuple, deque)) or _is_kind(type(node))


def _opened(leaf: Any, closed: Collection[int]) -> Any:
    if id(leaf) in closed or not may_be_opened(leaf):
        return leaf
    attributes = attributes_of(leaf)
    part, is_leaf = functools.partial(_opened, closed=closed), leaves_at(closed)
    values = [pytree.tree_map(part, value, is_leaf=is_leaf) for value in attributes.values()]
    return _Node(type(leaf), tuple(attributes), values)


def _is_apart(value: Any) -> bool:
    return (
        is_user_dict(value)
        and is_bare(value)
        and issubclass(type(attributes_of(value).get(_DATA)), dict)
    )


def _is_within(wanted: Any, attributes: dict[str, Any], outer: frozenset[int]) -> bool:
    inner = [leaf for leaf in pytree.tree_leaves(attributes) if _is_apart(leaf)]
    outer |= {id(attributes)}
    return any(
        leaf is wanted
        or id(attributes_of(leaf)) in outer
        or _is_within(wanted, attributes_of(leaf), outer)
        for leaf in inner
    )


def _is_kind(kind: type) -> bool:
    mro: tuple[type, ...] = type.__dict__["__mro__"].__get__(kind)
    return UserDict in mro


__all__ = [
    "containers_in",
    "flattened",
    "is_user_dict",
    "joined",
    "leaves_at",
    "may_be_opened",
    "opened",
    "pattern_of",
    "visit",
]
