"""Arguments: a call's arguments taken apart to tensors, plain values and what is compared by
identity.

`torch.utils._pytree` takes containers apart, but not objects of the user's classes, such as a batch
of graphs or a dataclass. If a later call brings another object of the same class, such objects are
taken apart here.
"""

from __future__ import annotations

import functools
import struct
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from roam.errors import CaptureError
from roam.state.classes import HEAP_TYPE, dictionary_of, flags_of, mro_of
from roam.state.containers import FrozenSpace, MappingSpace, SequenceSpace
from roam.state.equality import attributes_of, is_plain
from roam.state.library_code import is_opaque
from roam.state.namespaces import SlotsSpace, slots_of
from roam.state.nests import flattened, leaves_at, lost_attribute, with_dicts_opened
from roam.state.policies import Policies, Policy
from roam.state.spaces import Place, Space, child
from roam.state.value_stand_ins import StandIn, kinds
from roam.torch_compat.private import pytree

_POINTER: Final = struct.calcsize("P")
_DICTIONARIES: Final = (dict, OrderedDict, defaultdict)
_MOST_VALUES: Final = 5_000
"""The most values that a batch holds. An object with more of them is rather a data set."""
_TRAINED: Final = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
_NO_BATCHES: Final = (
    *_TRAINED,
    StandIn,
    torch.Tensor,
    type,
    dict,
    list,
    tuple,
    set,
    frozenset,
    deque,
    BaseException,
)


def is_object(value: Any) -> bool:
    """Whether a value is an object that may be taken apart: of a class written in Python that is
    none of PyTorch's machinery.
    """
    kind = type(value)
    if kind is types.SimpleNamespace:
        return True
    return (
        not issubclass(kind, _NO_BATCHES)
        and not is_opaque(kind)
        and not is_plain(value)
        and bool(flags_of(kind) & HEAP_TYPE)
        and _is_all_python(kind)  # type: ignore[arg-type]
    )


@functools.cache
def _is_all_python(kind: type) -> bool:
    """Whether objects of a class hold nothing beside attributes and slots."""
    fields = sum(
        type(field) is types.MemberDescriptorType or name in ("__dict__", "__weakref__")
        for base in mro_of(kind)
        for name, field in dictionary_of(base).items()
    )
    return kind.__basicsize__ <= object.__basicsize__ + _POINTER * fields


class _NoBatch(Exception):
    """An object is too large for a batch, or holds what is trained."""


@dataclass(slots=True, eq=False)
class Parts:
    """What an object is made of: nothing, if it has been taken apart at another place already.

    Attributes:
        shape: equal for two objects that differ only in the values of their parts.
        places: where the parts are, in order.
        spaces: all spaces that hold parts.
        objects: what has been opened: the object itself, and objects and containers inside it.
    """

    value: Any
    shape: Any = None
    places: list[Place] = field(default_factory=list)
    spaces: list[Space] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    _seen: dict[int, int] = field(default_factory=dict)

    def open(self, path: str) -> None:
        """Takes the object apart."""
        self.shape = self._opened(self.value, path, None)

    def values(self) -> list[Any]:
        """The parts."""
        return [space.get(key) for space, key in self.places]

    def paths(self) -> list[str]:
        """How a reader would write each part."""
        return [space.label(key) for space, key in self.places]

    def _entered(self, value: Any, path: str, place: Place) -> Any:
        kind = type(value)
        if kind is weakref.ref and id(value()) in self._seen:
            return "a weak reference", self._seen[id(value())]
        is_container = (
            kind in _DICTIONARIES
            or kind is list
            or (issubclass(type(value), tuple) and not is_plain(value))
        )
        if not (is_container or is_object(value)):
            self.places.append(place)
            if len(self.places) > _MOST_VALUES or issubclass(kind, _TRAINED):
                raise _NoBatch
            return None
        return self._opened(value, path, place)

    def _opened(self, value: Any, path: str, place: Place | None) -> Any:
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self.objects.append(value)
        kind = type(value)
        if kind in _DICTIONARIES:
            return (
                kind,
                getattr(value, "default_factory", None),
                self._of(MappingSpace(value, path)),
            )
        if kind is list:
            return kind, self._of(SequenceSpace(value, path))
        if issubclass(type(value), tuple):
            places = [] if place is None else [place]
            return kind, self._of(FrozenSpace(value, path, places))
        found: list[Any] = [kind]
        attributes = attributes_of(value)
        if type(attributes) is dict:
            found.append(self._of(MappingSpace(attributes, path, label=child)))
        if slots := slots_of(kind):
            found.append(self._of(SlotsSpace(value, slots, path, label=child)))
        return tuple(found)

    def _of(self, space: Space) -> tuple[Any, ...]:
        self.spaces.append(space)
        return tuple(
            (key, self._entered(value, space.label(key), (space, key)))
            for key, value in space.items()
        )


def parts_of(value: Any, path: str = "") -> Parts | None:
    """What an object is made of. None if the object is no batch: it holds too many values, or a
    model, an optimizer, a scheduler, or a scaler.
    """
    parts = Parts(value)
    try:
        parts.open(path)
    except _NoBatch:
        return None
    return parts


@dataclass(frozen=True, slots=True)
class Taken:
    """The arguments of a call, taken apart."""

    leaves: list[Any]
    spec: Any
    """The structure of the arguments, equal for calls that differ only in their leaves."""
    plain_spec: Any
    """The structure as `torch.utils._pytree` gives it: objects are leaves."""
    objects: dict[int, Parts]
    """The parts of each leaf of `plain_spec` that is taken apart, by the leaf's place."""
    closed: Mapping[int, Any]
    """Containers that are leaves, by identity."""
    outer: Collection[int]
    """The places, among the leaves, of those that lie in no object."""

    def put(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other leaves: new containers, but the same objects, with the leaves
        put in them.
        """
        remaining = iter(leaves)
        outer = []
        for index in range(self.plain_spec.num_leaves):
            parts = self.objects.get(index)
            if parts is None:
                outer.append(next(remaining))
                continue
            for (space, key), old in zip(parts.places, parts.values(), strict=True):
                if (new := next(remaining)) is not old:
                    space.set(key, new)
            outer.append(parts.value)
        return pytree.tree_unflatten(outer, self.plain_spec)  # type: ignore[no-any-return]

    def paths(
        self, shown: Callable[[Any], str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[str]:
        """How a reader would write each leaf; `shown` writes a path of `torch.utils._pytree`."""
        found: list[str] = []
        for index, (keys, _) in enumerate(
            flatten_with_paths((args, kwargs), closed=self.closed)[0]
        ):
            parts = self.objects.get(index)
            found += (
                [shown(keys)] if parts is None else [shown(keys) + path for path in parts.paths()]
            )
        return found

    def plain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[int, str, Any]]:
        """The place, the path and the value of each leaf that may be another one next time."""
        paths, known = self.paths(argument_path, args, kwargs), kinds()
        for place, (path, leaf) in enumerate(zip(paths, self.leaves, strict=True)):
            if type(leaf) in known:
                yield place, path, leaf


Opened = frozenset[tuple[str, type]]
"""Paths of arguments, each with the class of the object there."""


@dataclass(slots=True)
class Taker:
    """Takes calls' arguments apart.

    Attributes:
        opened: which objects among the arguments are taken apart.
        varied: paths of plain values that have not been the same in all calls.
        live: classes of arguments that are live, so that no key has them.
        closed: by identity, containers that the step's state holds too. They are not taken apart:
            the step gets them themselves, as state.
    """

    opened: Opened = frozenset()
    varied: frozenset[str] = frozenset()
    live: frozenset[type] = frozenset()
    closed: Mapping[int, Any] = field(default_factory=dict)
    _last: dict[str, Any] = field(default_factory=dict)
    _last_values: dict[str, Any] = field(default_factory=dict)

    def take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, rebuilds: bool = True
    ) -> Taken:
        """The arguments of a call, taken apart.

        Args:
            rebuilds: whether containers are put together again, without attributes of their own.

        Raises:
            CaptureError: a container has attributes that would be lost.
        """
        leaves, spec, tree = flattened((args, kwargs), self.closed)
        if rebuilds:
            _check_attributes(tree, self.closed)
        if not self.opened:
            return Taken(leaves, spec, spec, {}, self.closed, range(len(leaves)))
        leaves_and_paths, spec = flatten_with_paths((args, kwargs), closed=self.closed)
        found: list[Any] = []
        outer: list[int] = []
        objects: dict[int, Parts] = {}
        shapes: list[Any] = []
        first: dict[int, int] = {}
        for index, (keys, leaf) in enumerate(leaves_and_paths):
            if id(leaf) in first:
                parts, shape = Parts(leaf), ("again", first[id(leaf)])
            elif is_opened(self.opened, keys, leaf) and (own := parts_of(leaf)) is not None:
                parts, shape = own, own.shape
                first[id(leaf)] = index
            else:
                outer.append(len(found))
                found.append(leaf)
                shapes.append(None)
                continue
            objects[index] = parts
            found += parts.values()
            shapes.append(shape)
        return Taken(found, (spec, shapes), spec, objects, self.closed, outer)

    def learning(self, args: tuple[Any, ...], kwargs: dict[str, Any], policies: Policies) -> Taker:
        """A taker for the calls after this one. It takes apart also each object in whose place the
        call before this one had another object of the same class, if its policy is not fixed, and
        knows of the plain values that are others than in that call.
        """
        taker = self._opening_more(args, kwargs, policies)
        plain = taker.take(args, kwargs).plain(args, kwargs)
        values = {path: value for _, path, value in plain}
        varied = {
            path
            for path, value in values.items()
            if type(last := self._last_values.get(path)) is type(value) and last != value
        }
        return replace(taker, varied=self.varied | varied, _last_values=values)

    def _opening_more(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], policies: Policies
    ) -> Taker:
        leaves, _ = flatten_with_paths((args, kwargs), closed=self.closed)
        objects = {
            pytree.keystr(keys): leaf
            for keys, leaf in leaves
            if is_object(leaf) and not is_opened(self.opened, keys, leaf)
        }
        others = {
            (path, type(leaf))
            for path, leaf in objects.items()
            if type(self._last.get(path)) is type(leaf)
            and self._last[path] is not leaf
            and parts_of(leaf) is not None
        }
        opened = policies.below(Policy.FIXED, self.opened | others)
        return replace(self, opened=frozenset(opened), _last=objects)


def _check_attributes(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], closed: Collection[int]
) -> None:
    """Refuses containers with attributes that those of a plan's run would not have."""
    lost = lost_attribute(arguments, closed)
    if lost is None:
        return
    leaves, _ = flatten_with_paths(arguments, lambda part: part is lost.container)
    path = next(argument_path(keys) for keys, leaf in leaves if leaf is lost.container)
    raise CaptureError(
        f"{path} has {lost.fault}, before or after the step, and a plan would keep the entries alone; put the value under a key of a "
        "dictionary, or pass or return it by itself",
        code="container_attribute",
    )


def is_opened(objects: Opened, keys: Any, value: Any) -> bool:
    """Whether an argument at a path of `torch.utils._pytree` is taken apart."""
    return bool(objects) and (pytree.keystr(keys), type(value)) in objects


def flatten_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, closed: Collection[int] = ()
) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """As `pytree.tree_flatten_with_path`, and also for nodes of a class that was registered without
    a function that names its parts: their parts are numbered. Objects of `collections.UserDict` are
    nodes too, and what is `closed` is a leaf.
    """
    tree = with_dicts_opened(tree, closed)
    is_leaf = leaves_at(closed) if is_leaf is None else is_leaf
    try:
        return pytree.tree_flatten_with_path(tree, is_leaf)
    except ValueError:
        spec = pytree.tree_structure(tree, is_leaf)
        return list(_leaves_and_paths((), tree, is_leaf)), spec


def _leaves_and_paths(
    path: tuple[Any, ...], node: Any, is_leaf: Callable[[Any], bool] | None
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if pytree.tree_is_leaf(node, is_leaf):
        yield path, node
        return
    try:
        parts, _ = pytree.tree_flatten_with_path(node, is_leaf=lambda part: part is not node)
    except ValueError:
        leaves = pytree.tree_leaves(node, is_leaf=lambda part: part is not node)
        parts = [((pytree.SequenceKey(index),), leaf) for index, leaf in enumerate(leaves)]
    for keys, part in parts:
        yield from _leaves_and_paths((*path, *keys), part, is_leaf)


def live_integers(
    taken: Taken,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    varied: Collection[str] | None,
    policies: Policies,
) -> Collection[int]:
    """The places, among the leaves, of integers that have not been the same in all calls, and are
    arguments or lie in containers among the arguments. Those inside objects do not count: they are
    compared by value, and so are those of which the step needs the value itself.

    Args:
        taken, args, kwargs: of a call.
        varied: the paths of such values; None for all.
        policies: that of the latter is fixed.
    """
    paths = taken.paths(argument_path, args, kwargs)
    return [
        place
        for place in taken.outer
        if type(taken.leaves[place]) is int
        and (varied is None or paths[place] in varied)
        and policies.of((paths[place], int)) < Policy.FIXED
    ]


def argument_path(path: tuple[Any, ...]) -> str:
    """What messages call a part of a call's arguments, as in ``args[0]['mask']``.

    Args:
        path: where it is in the pair of positional arguments and keyword arguments.
    """
    is_keyword, rest = path[0].idx == 1, path[1:]
    if is_keyword:
        return f"{rest[0].key}{pytree.keystr(rest[1:])}"
    return f"args{pytree.keystr(rest)}"
