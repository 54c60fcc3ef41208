"""What a step leaves beside its state: its result, and what it has added to lists. It may not
change the lists and dictionaries among a call's arguments, as `batch.pop("labels")` does.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from roam.state.containers import MappingSpace, SequenceSpace
from roam.state.equality import attributes_of, same
from roam.state.nests import is_user_dict, may_be_opened
from roam.state.spaces import Items, Space
from roam.torch_compat.private import pytree

_CHANGEABLE: Final = (list, dict, OrderedDict, defaultdict)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Left(NamedTuple):
    """What a step returns, and what it has added to each of the lists of its state to which it only
    adds.
    """

    result: Any
    added: list[list[Any]]


class Containers:
    """The lists and dictionaries among arguments, as they are before a step.

    Args:
        arguments: of a trace. Containers within others count too.
        closed: identities of those that are part of the step's state.
    """

    def __init__(self, arguments: Arguments, closed: Collection[int] = ()) -> None:
        self._held = [
            (space, space.items())
            for container in _containers(arguments, closed)
            if (type(container) in _CHANGEABLE or is_user_dict(container))
            and id(container) not in closed
            for space in (_space(container),)
        ]

    def restore(self) -> bool:
        """Makes them as they were before the step; whether the step has changed any."""
        changed = [
            (space, before) for space, before in self._held if not _are_same(before, space.items())
        ]
        for space, before in changed:
            space.put(before)
        return bool(changed)


def with_others(tree: Any, others: Mapping[int, tuple[Any, Any]]) -> Any:
    """What a step leaves, with what stands for each of some containers.

    Args:
        others: by identity, containers from before the step, each with what stands for it.
    """
    if not others:
        return tree
    return pytree.tree_map(
        lambda value: others[id(value)][1] if id(value) in others else value,
        tree,
        is_leaf=lambda value: id(value) in others,
    )


def added_by(spec: Any) -> bool:
    """Whether a step adds anything to lists of its state.

    Args:
        spec: of a `Left`.
    """
    _, added = spec.children()
    return any(values.children() for values in added.children())


def leave(left: Left, growing: Iterable[Any]) -> Any:
    """Adds what a step has added to lists of its state, in the order of `Left.added`; returns what
    the step returns.
    """
    for container, values in zip(growing, left.added, strict=True):
        container.extend(values)
    return left.result


def _containers(value: Any, closed: Collection[int]) -> Iterator[Any]:
    """All containers that PyTorch's pytree knows, apart from tuples, and objects that derive from
    `collections.UserDict`; nothing that is in a closed one.
    """
    is_opened = may_be_opened(value)
    if not is_opened and (
        not issubclass(type(value), (dict, list, tuple, deque)) or pytree.tree_is_leaf(value)
    ):
        return
    if not issubclass(type(value), tuple):
        yield value
    if id(value) in closed:
        return
    held = _held(value)
    for part in held.values() if issubclass(type(held), dict) else held:
        yield from _containers(part, closed)


def _held(container: Any) -> Any:
    """What holds the entries of a container: its attributes, if pytree does not know it."""
    return attributes_of(container) if is_user_dict(container) else container


def _space(container: Any) -> Space:
    held = _held(container)
    return SequenceSpace(held, "") if type(held) is list else MappingSpace(held, "")


def _are_same(one: Items, other: Items) -> bool:
    return len(one) == len(other) and all(
        same(key, other_key) and value is other_value
        for (key, value), (other_key, other_value) in zip(one, other, strict=True)
    )


__all__ = ["Arguments", "Containers", "Left", "added_by", "leave", "with_others"]
