"""Lists and dictionaries among a call's arguments that a step changes, as `batch.pop("labels")`
does.

A trace has containers of its own, so nothing of the call's changes then. What a step has done to
them is recorded beside its result, and each run does the same to the containers of its call.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

from roam.state.containers import MappingSpace, SequenceSpace
from roam.state.equality import Misfit, attributes_of, is_plain, same
from roam.state.nests import fault_of, is_user_dict, level, may_be_opened, visit
from roam.state.spaces import Items, Space
from roam.torch_compat.private import pytree

_CHANGEABLE: Final = (list, dict, OrderedDict, defaultdict)
_NEW: Final = -1

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Change(NamedTuple):
    """What has become of one list or dictionary. A node of PyTorch's pytree, as results are.

    Attributes:
        path: where it is in the pair of positional and keyword arguments.
        kept: of a dictionary its keys, in order; of a list the former index of each item, or -1.
        put: by key or index what has been put there.
    """

    path: tuple[Any, ...]
    kept: list[Any]
    put: dict[Any, Any]


class Given(NamedTuple):
    """Stands for a container of the call's, at a path as in `Change`, in what a step returns or
    puts in another one.
    """

    path: tuple[Any, ...]


class Left(NamedTuple):
    """What a step returns, what it has done to its arguments, and what it has added to each of the
    lists of its state to which it only adds; `has_given` says whether there is any `Given` in it.
    """

    result: Any
    changes: list[Change]
    added: list[list[Any]]
    has_given: bool


class Containers:
    """The lists and dictionaries among arguments, as they are before a step.

    Args:
        arguments: of a trace. Containers within others count too.
        closed: identities of those that are part of the step's state.
    """

    def __init__(self, arguments: Arguments, closed: Collection[int] = ()) -> None:
        self._all = list(_containers(arguments, closed))
        self._held = [
            (path, space, space.items())
            for path, container in self._all
            if (type(container) in _CHANGEABLE or is_user_dict(container))
            and id(container) not in closed
            for space in (_space(container),)
        ]

    def left(self, result: Any, added: Iterable[list[Any]] = ()) -> Left | None:
        """What a step that returns a result has left; the containers are then as before the step.
        None if no run could repeat it, since a dictionary has keys that are not plain values.

        Args:
            result: of the step.
            added: what it has added to lists of its state.
        """
        changed = [
            (path, space, before, now)
            for path, space, before in self._held
            if not _are_same(before, now := space.items())
        ]
        changes = [
            _change(path, isinstance(space, SequenceSpace), before, now)
            for path, space, before, now in changed
        ]
        for _, space, before, _ in changed:
            space.put(before)
        if not all(is_plain(key) for path, kept, _ in changes for key in (*path, *kept)):
            return None
        naming = _Naming({id(container): path for path, container in self._all})
        result = naming.named(result)
        added = [list(map(naming.named, values)) for values in added]
        changes = [Change(path, kept, naming.named(put)) for path, kept, put in changes]
        if not all(is_plain(key) for path in naming.met for key in path):
            return None
        return Left(result, changes, added, bool(naming.met))


class _Naming:
    """Names containers of the call's in others, of which it makes new ones. What holds none stays
    the same object.
    """

    def __init__(self, paths: dict[int, tuple[Any, ...]]) -> None:
        self.met: list[tuple[Any, ...]] = []
        self._paths = paths
        self._made: dict[int, tuple[Any, Any]] = {}

    def named(self, value: Any) -> Any:
        if (path := self._paths.get(id(value))) is not None:
            self.met.append(path)
            return Given(path)
        if (taken := level(value)) is None:
            return value
        if id(value) not in self._made:
            parts, spec = taken
            named = list(map(self.named, parts))
            # What would lose attributes stays too, and is refused where results are looked at.
            stays = all(map(operator.is_, named, parts)) or fault_of(value, parts, spec)
            self._made[id(value)] = value, value if stays else pytree.tree_unflatten(named, spec)
        return self._made[id(value)][1]


def changed_paths(leaves: list[Any], spec: Any) -> list[tuple[Any, ...]]:
    """Where the containers are that a step changes.

    Args:
        leaves, spec: of a `Left`; the leaves of results may be anything.
    """
    result, changes, *_ = spec.children()
    start, found = result.num_leaves, []
    for change in changes.children():
        path = change.children()[0]
        found.append(pytree.tree_unflatten(leaves[start : start + path.num_leaves], path))
        start += change.num_leaves
    return found


def unchangeable(
    paths: list[tuple[Any, ...]], arguments: Arguments, is_state: Callable[[object], bool]
) -> Misfit | None:
    """None if a run may change the lists and dictionaries that it will change, else why it may not:
    one of them is also where no step may change it.

    Args:
        paths: as `changed_paths` gives them.
        is_state: whether one of them is part of the step's state.
    """
    if not paths:
        return None
    places = Counter[int]()

    def counted(node: Any) -> bool:
        places[id(node)] += 1
        return False

    visit(arguments, counted)  # also in containers that no step may change
    containers = [_at(arguments, path) for path in paths]
    changed = Counter(map(id, containers))
    for container in containers:
        if places[id(container)] > changed[id(container)] or is_state(container):
            return Misfit(
                "the step changes a list or dictionary that is in several places among its "
                "arguments and its state; pass a copy",
                way="refuse",
                code="sharing",
            )
    return None


def added_by(spec: Any) -> bool:
    """Whether a step adds anything to lists of its state.

    Args:
        spec: of a `Left`.
    """
    _, _, added, _ = spec.children()
    return any(values.children() for values in added.children())


def leave(left: Left, arguments: Arguments, growing: Iterable[Any] = ()) -> Any:
    """Does to a call's containers what the step has done to those of its trace.

    Args:
        left: what the step has left.
        arguments: of the call.
        growing: the lists of the step's state to which it adds, in the order of `Left.added`.

    Returns:
        What the step returns.
    """
    result, changes, added, has_given = left

    def put_in(value: Any) -> Any:
        return _at(arguments, value.path) if type(value) is Given else value

    def with_given(tree: Any) -> Any:
        if not has_given:
            return tree
        return pytree.tree_map(put_in, tree, is_leaf=lambda value: type(value) is Given)

    result = with_given(result)
    added = [with_given(values) for values in added]
    filled = []
    for path, kept, put in changes:
        container, now = _at(arguments, path), with_given(put)
        held = _held(container)
        entries = (
            [(key, now[key] if key in now else held[key]) for key in kept]
            if type(container) is not list
            else [
                (index, now[index] if old == _NEW else held[old]) for index, old in enumerate(kept)
            ]
        )
        filled.append((container, entries))
    for container, entries in filled:
        _space(container).put(entries)
    for container, values in zip(growing, added, strict=True):
        container.extend(values)
    return result


def _containers(
    value: Any, closed: Collection[int], path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All containers that PyTorch's pytree knows, apart from tuples, and objects that derive from
    `collections.UserDict`, each with its path; nothing that is in a closed one.
    """
    is_opened = may_be_opened(value)
    if not is_opened and (
        not issubclass(type(value), (dict, list, tuple, deque)) or pytree.tree_is_leaf(value)
    ):
        return
    if not issubclass(type(value), tuple):
        yield path, value
    if id(value) in closed:
        return
    held = _held(value)
    for key, part in held.items() if issubclass(type(held), dict) else enumerate(held):
        yield from _containers(part, closed, (*path, key))


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


def _change(path: tuple[Any, ...], is_list: bool, before: Items, now: Items) -> Change:
    if not is_list:
        held = dict(before)
        put = {key: value for key, value in now if key not in held or held[key] is not value}
        return Change(path, [key for key, _ in now], put)
    left = dict(before)
    kept = []
    for index, value in now:
        old = index if left.get(index, left) is value else _NEW
        if old == _NEW:
            old = next((place for place, one in left.items() if one is value), _NEW)
        left.pop(old, None)
        kept.append(old)
    return Change(path, kept, {index: value for index, value in now if kept[index] == _NEW})


def _at(arguments: Arguments, path: tuple[Any, ...]) -> Any:
    value: Any = arguments
    for key in path:
        value = _held(value)[key]
    return value
