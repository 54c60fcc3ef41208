"""Nests: structured values with holes, such as a call's arguments, a step's result, and what it
puts in one of its places.

PyTorch's pytree takes containers apart and puts them together. Here is what it does not say: how
two nests differ, which of their containers are one and the same, and what becomes of objects. Those
of `collections.UserDict` and of classes that derive from it, such as the batches that tokenizers of
transformers make, and objects that a step makes, such as a cache of keys and values, become nodes
of a tree, whose parts are what their attributes hold. Their classes are not registered with pytree,
since that would change what users' own code sees.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from roam.state.equality import MISSING, attributes_of, is_plain, pattern, same
from roam.torch_compat.private import pytree

_DATA: Final = "data"
PLAIN: Final = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
"""Classes of values that hold nothing; to ask whether something is a container or a tensor takes
several times as long."""
_LEAVES: Final = PLAIN | {torch.Tensor, torch.nn.Parameter}
_WITHOUT_ATTRIBUTES: Final = (dict, list, tuple, defaultdict, deque)
_OF_TYPING: Final = "__orig_class__"
"""What `typing.OrderedDict(...)` and `Pair[int](...)` note on what they make."""

# -- plain nests


def mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """A nest of plain lists, tuples and dictionaries, with what a function gives for each leaf but
    those in `PLAIN`.
    """
    if type(nest) in PLAIN:
        return nest
    if isinstance(nest, (tuple, list)):
        parts = [part if type(part) in PLAIN else mapped(function, part) for part in nest]
        return parts if isinstance(nest, list) else tuple(parts)
    if issubclass(type(nest), dict):
        return {key: mapped(function, part) for key, part in nest.items()}
    return function(nest)


def leaves_of(nest: Any) -> list[Any]:
    """The leaves of a nest of lists, tuples and dictionaries, in order, but for those in `PLAIN`.
    The classes of its containers are not asked.
    """
    found: list[Any] = []
    _collect((nest,), found)
    return found


def _collect(parts: Iterable[Any], found: list[Any]) -> None:
    for part in parts:  # no call for each leaf, and no inner function, which would be a cycle
        kind = type(part)
        if kind in PLAIN:
            continue
        if kind is tuple or kind is list:
            _collect(part, found)
        elif issubclass(kind, (tuple, list)):
            _collect((tuple if issubclass(kind, tuple) else list).__iter__(part), found)
        elif issubclass(kind, dict):
            base = OrderedDict if issubclass(kind, OrderedDict) else dict
            _collect(base.values(part), found)
        else:
            found.append(part)


def copied(nest: Any) -> Any:
    """A new nest of the same form: containers are new ones of the same class, which is not asked
    for it.
    """
    if type(nest) is list:
        return list(map(copied, nest))
    if type(nest) is dict or type(nest) is OrderedDict:
        return type(nest)((key, copied(part)) for key, part in nest.items())
    if issubclass(type(nest), tuple) and not is_plain(nest):
        return as_tuple(type(nest), map(copied, nest))
    return nest


def as_tuple(kind: type, entries: Iterable[Any]) -> Any:
    """A tuple of a class, such as a named one, without running its constructor."""
    return tuple.__new__(kind, entries)


def alike(
    one: Any,
    other: Any,
    are_alike: Callable[[Any, Any], bool],
    kinds: Collection[type] = (list, tuple, dict),
) -> bool:
    """Whether two nests have the same form, and leaves in the same places that are alike.

    Args:
        kinds: the classes of their containers.
    """
    kind = type(one)
    if kind not in kinds or kind is not type(other):
        return are_alike(one, other)
    if issubclass(kind, dict):
        if not all(map(same, one, other)):
            return False
        one, other = one.values(), other.values()
    return len(one) == len(other) and all(
        alike(part, its, are_alike, kinds) for part, its in zip(one, other, strict=True)
    )


# -- trees of pytree's


def level(node: Any) -> tuple[list[Any], Any] | None:
    """The parts of a node of a tree, and what puts others together; None for a leaf."""
    if pytree.tree_is_leaf(node):
        return None
    own = id(node)  # pytree keeps the function, and what it holds, until a collection
    return pytree.tree_flatten(node, is_leaf=lambda part: id(part) != own)


def leaves_at(closed: Collection[int]) -> Callable[[Any], bool] | None:
    """What tells pytree that values of these identities are leaves."""
    return (lambda node: id(node) in closed) if closed else None


def visit(node: Any, look: Callable[[Any], bool]) -> None:
    """Shows each node of a tree, and each leaf that may be a container, to a function before their
    parts. What it returns True for has no parts. Objects of `UserDict` are nodes.
    """
    if look(node):
        return
    kind = type(node)
    parts: Iterable[Any]
    if kind is dict:
        parts = node.values()
    elif kind is list or kind is tuple:
        parts = node
    elif may_be_opened(node):
        parts = attributes_of(node).values()
    else:
        taken = level(node)
        parts = () if taken is None else taken[0]
    for part in parts:  # quicker without a generator, and without a call for each leaf
        if type(part) not in _LEAVES:
            visit(part, look)


def containers_in(tree: Any, closed: Collection[int] = ()) -> list[Any]:
    """The lists, dictionaries, tuples and the like in a tree, and objects of `UserDict`, in order,
    without closed ones.
    """
    found = list[Any]()

    def noted(node: Any) -> bool:
        is_closed = id(node) in closed
        if not is_closed and _is_container(node):
            found.append(node)
        return is_closed

    visit(tree, noted)
    return found


def _is_container(node: Any) -> bool:
    return issubclass(type(node), (list, dict, tuple, deque)) or _is_kind(type(node))


def pattern_of(containers: list[Any]) -> list[int]:
    """For each container, the place of the first that is the same; nothing if no two are. Plain
    tuples do not count: Python may take one for another.
    """
    names = [id(one) for one in containers if not is_plain(one)]
    if len(set(names)) == len(names):
        return []
    return pattern(map(id, containers))


# -- objects


@dataclass(frozen=True, slots=True)
class _Node:
    """An object taken apart: a node of a tree, which becomes another object of the class when the
    tree is put together again.
    """

    kind: type
    names: tuple[str, ...]
    values: list[Any]


@dataclass(frozen=True, slots=True)
class _OfData:
    """The key of the dictionary in a `UserDict`. In a path it is not written."""

    def __str__(self) -> str:
        return ""


def _apart(node: _Node) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return node.values, (node.kind, node.names)


def _apart_with_keys(node: _Node) -> tuple[list[tuple[Any, Any]], tuple[type, tuple[str, ...]]]:
    keys = [_OfData() if name == _DATA else pytree.GetAttrKey(name) for name in node.names]
    return list(zip(keys, node.values, strict=True)), (node.kind, node.names)


def _together(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    made: Any = object.__new__(kind)
    made.__dict__.update(zip(names, values, strict=True))
    return made


pytree.register_pytree_node(_Node, _apart, _together, flatten_with_keys_fn=_apart_with_keys)


class _Bare:
    """Holds attributes and nothing else."""


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


def is_bare_ordered(value: Any) -> bool:
    """Whether a value is an `OrderedDict` without attributes beside its entries."""
    return type(value) is OrderedDict and not vars(value)


class _Refused(Exception):
    pass


def with_made_opened(
    tree: Any,
    is_known: Callable[[Any], bool],
    is_leaf: Callable[[Any], bool],
    apart: Callable[[Any], Any] = lambda tensor: tensor,
) -> Any:
    """A tree with the objects that a step has made taken apart, so that its leaves are what these
    hold. An object stays as it is if another one with the same attributes could not stand for it.

    Args:
        tree: of containers that PyTorch's pytree knows.
        is_known: whether a container or an object is somebody else's too, such as one from before
            the step.
        is_leaf: whether a value may be in an object. (Tensors, plain values and classes always
            may.)
        apart: gives what stands for a tensor.
    """
    opening = _Opening(is_known, is_leaf, apart)
    return pytree.tree_map(opening.leaf, tree, is_leaf=lambda value: type(value) is torch.Size)


@dataclass(slots=True)
class _Opening:  # no inner functions, which would be a cycle
    is_known: Callable[[Any], bool]
    is_leaf: Callable[[Any], bool]
    apart: Callable[[Any], Any]
    _met: set[int] = field(default_factory=set)

    def leaf(self, value: Any) -> Any:
        if issubclass(type(value), torch.Tensor):
            return self.apart(value)
        try:
            return self._part(value) if is_bare(value) else value
        except _Refused:
            return value

    def _part(self, value: Any) -> Any:
        if issubclass(type(value), torch.Tensor):
            return self.apart(value)
        if issubclass(type(value), type) or is_plain(value) or self.is_leaf(value):
            return value
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
        return parts if kind is dict else _Node(kind, tuple(parts), list(parts.values()))


def is_user_dict(value: Any) -> bool:
    """Whether a value is an object of `UserDict`, and pytree does not know its class."""
    return _is_kind(type(value)) and pytree.tree_is_leaf(value)


def may_be_opened(value: Any) -> bool:
    """Whether a value is such an object, is nothing but its attributes, and is not in itself."""
    return _is_apart(value) and not _is_within(value, attributes_of(value), frozenset())


def with_dicts_opened(tree: Any, closed: Collection[int] = ()) -> Any:
    """A tree in which such objects are nodes. The same tree if there are none; otherwise, the
    containers in it are other ones. Putting a flattened tree together makes new objects.

    Args:
        closed: identities of what is to stay as it is, with all that is in it.
    """
    return flattened(tree, closed)[2]


def flattened(tree: Any, closed: Collection[int] = ()) -> tuple[list[Any], Any, Any]:
    """As `pytree.tree_flatten`, and the tree itself: `with_dicts_opened`. What is closed is a
    leaf.
    """
    is_leaf = leaves_at(closed)
    leaves, spec = pytree.tree_flatten(tree, is_leaf)
    if any(map(_is_kind, set(map(type, leaves)))):
        part = functools.partial(_opened, closed=closed)
        tree = pytree.tree_map(part, tree, is_leaf=is_leaf)
        leaves, spec = pytree.tree_flatten(tree, is_leaf)
    return leaves, spec, tree


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


# -- attributes beside the entries


class Lost(NamedTuple):
    """A container that another one, made of the same entries, could not stand for.

    Attributes:
        fault: what the other one lacks, as a message says it of the container.
    """

    container: Any
    fault: str


def lost_attribute(tree: Any, closed: Collection[int] = ()) -> Lost | None:
    """The first container in a tree with an attribute that pytree would lose or change, since it
    makes another container of the entries alone: `outputs.extra = x` gives one to an output of
    transformers, and a class that derives from a named tuple may have some.

    An attribute counts if a container made of the same entries lacks it, or has another tensor or
    plain value there. Other values, such as a list that the class makes itself, are made anew.

    Args:
        closed: identities of containers that are not taken apart.
    """
    lost: Lost | None = None

    def look(node: Any) -> bool:
        nonlocal lost
        if lost is not None or id(node) in closed:
            return True
        taken = None if type(node) in _WITHOUT_ATTRIBUTES else level(node)
        fault = None if taken is None else fault_of(node, *taken)
        if fault is not None:
            lost = Lost(node, fault)
        return lost is not None

    visit(tree, look)
    return lost


def fault_of(container: Any, parts: list[Any], spec: Any) -> str | None:
    """What another container that pytree makes of these parts of one would lack or change; None if
    nothing.
    """
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
