"""Reads: which attributes of the user's own objects a step reads, or sets before it reads them.

While the step is traced, the classes of the objects that it reaches note every attribute that is
asked for, whether it is there or not. Attributes that were not asked for do not matter, and need be
neither compared from call to call nor faked. If a read could go unnoticed, the whole object counts
as read.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any, Final

import torch

from roam.errors import CaptureError
from roam.state.classes import HEAP_TYPE, IMMUTABLE_TYPE, dictionary_of, flags_of, module_of, mro_of
from roam.state.equality import attributes_of
from roam.state.growing_lists import appends_next
from roam.state.library_code import is_library
from roam.state.policies import Policies, Policy, Retrace
from roam.torch_compat.patches import methods_added, replaced

Edge = tuple[int | None, str]
"""A way from one value to others: the key of an object and the name of one of its attributes; or
None and the name of a method of an object's class.
"""

# Asking for one of these hands out all attributes.
_ALL: Final = frozenset(
    {
        "__dict__",
        "__dir__",
        "__getattr__",
        "__getattribute__",
        "__getstate__",
        "__reduce__",
        "__reduce_ex__",
    }
)
# Functions that ask for `__dict__` for the sake of one name, which has been noted just before.
_ONE_NAME: Final = frozenset(
    function.__code__
    for function in (
        functools.cached_property.__get__,
        torch.nn.Module.__getattr__,
        torch.nn.Module.__setattr__,
    )
)
# Names in code that reads or writes attributes past the methods of the object's class.
_BEHIND: Final = frozenset(
    {
        "__delattr__",
        "__delete__",
        "__get__",
        "__getattribute__",
        "__getstate__",
        "__set__",
        "__setattr__",
    }
)
_SETTERS: Final = ("__setattr__", "__delattr__")
CONSTRUCTORS: Final = ("__new__", "__init__", "__post_init__")
"""What runs when an object is made. It sets attributes of the new object, whose reads do not
count.
"""
_ABOUT_ITSELF: Final = frozenset({*CONSTRUCTORS, "__repr__", "__str__", "__format__"})
"""Methods that look at the attributes of their own object."""
# Names in code that may look up functions of a class by computed names.
_BY_COMPUTED_NAME: Final = frozenset(
    {"attrgetter", "dir", "getattr", "getmembers", "methodcaller", "vars"}
)
# How often a trace may begin again because the step reads attributes that earlier traces did not.
# After that, all attributes count as read.
_MOST_BEGINNINGS: Final = 16
_MOST_FUNCTIONS: Final = 100
# How often a capture begins again because other threads change what the step looks at.
_MOST_DISTURBANCES: Final = 8


class Reads:
    """What is known of the attributes that one step looks at; it grows with every trace.

    A walk over the step's state asks it what to enter. The first walks enter everything that is not
    `deferred`; when the step has been traced, walks enter what it has read (`is_narrow`). With
    `everything`, all attributes count as read.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self.is_narrow = False
        self.is_traced = False
        self.everything = everything
        self._policies = Policies()
        """Of attributes: those that every trace has set before it looked at them are `WRITTEN`,
        others that a trace has looked at `READ`."""
        self._set_now: set[Edge] = set()
        self._written: set[Edge] = set()
        """The attributes that any trace has set or deleted."""
        self._kinds: defaultdict[int, set[type]] = defaultdict(set)
        """The classes of the objects that have a key."""
        self.disturbed: list[str] = []
        """Paths of the attributes that the step has looked at, and that other threads have changed
        during its trace."""
        self._disturbances = 0
        self._names: set[str] = set()
        self._whole: set[int] = set()
        self._held: set[int] = set()
        """Those objects of `_whole` whose attributes no trace has read all at once. They are in
        `_whole` because something that a walk met holds their dictionary.
        """
        self._deferred: set[Edge] = set()
        self._known_before: tuple[Policies, frozenset[int]] = Policies(), frozenset()
        self._reached: set[int] = set()
        self._keys: dict[int, int] = {}
        self._kept: list[object] = []  # alive, so that no id is used twice
        self.appended: dict[Edge, tuple[bool, set[str]]] = {}
        """The attributes that hold lists to which the step only adds, as far as is known, with
        their paths; True for dictionaries of such lists."""
        self.looked_into: set[str] = set()
        """The paths of those lists that a trace has done something else with."""
        self._classes: dict[type, tuple[Callable[..., None], Callable[..., None]]] = {}
        """The `__setattr__` and `__delattr__` of each class."""
        self._has_more = False
        self._beginnings = 0
        self.functions: list[tuple[str, Any]] = []
        """(path, function) of the user's functions that only a trace has found."""

    # -- for the walk

    def begin(self) -> None:
        """Begins a walk. From now on, a read is new if it is not among those that are known at this
        moment.
        """
        self._known_before = self._policies.copy(), frozenset(self._whole)
        self._reached = set()
        self._has_more = False
        self.appended, self.looked_into = {}, set()

    def key_of(self, value: object, attributes: dict[str, Any] | None) -> int | None:
        """The key of an object whose reads are noted; None if they cannot be. Objects that share
        a ``__dict__`` share a key.
        """
        if self.everything or not is_watchable(type(value)):
            return None
        holder = value if attributes is None else attributes
        if id(value) not in self._keys:
            self._keys[id(value)] = id(holder)
            self._kept += (value, holder)
            self._kinds[id(holder)].add(type(value))
            look: Any = functools.partial(type.__getattribute__, type(value))  # past a metaclass
            self._classes[type(value)] = look("__setattr__"), look("__delattr__")
        self._reached.add(id(holder))
        return id(holder)

    def is_noted(self, value: object) -> bool:
        """Whether `key_of` gave this object a key."""
        return not self.everything and id(value) in self._keys

    def names_of(self, key: int | None) -> set[str] | None:
        """The attributes that a narrow walk enters; None if it is all of them."""
        if key is None or not self.is_narrow or key in self._whole:
            return None
        return {name for holder, name in self._policies.places(Policy.READ) if holder == key}

    def overwritten(self, key: int | None) -> list[str]:
        """The attributes of an object that the step sets before it looks at them, in order; for a
        narrow walk.
        """
        if key is None or not self.is_narrow or self.everything or key in self._whole:
            return []
        return [name for holder, name in self._policies.places(Policy.WRITTEN) if holder == key]

    def overwrites(self) -> bool:
        """Whether the step sets any attribute before it looks at it."""
        return any(key not in self._whole for key, _ in self._policies.places(Policy.WRITTEN))

    def was_set(self, key: int, name: str) -> bool:
        """Whether the last trace has set an attribute before it looked at it."""
        return (key, name) in self._set_now

    def keep(self, key: int, name: str) -> None:
        """Has an attribute count as looked at, since what the step sets there cannot be set
        again, or not at each call.
        """
        self._policies.climb(Policy.READ, [(key, name)])

    def has(self, edge: Edge) -> bool:
        """Whether the step has looked at what an edge leads to."""
        key, name = edge
        if key is None:
            return name in self._names or (name.startswith("__") and name.endswith("__"))
        return self._policies.of(edge) is Policy.READ or key in self._whole

    def is_whole(self, key: int) -> bool:
        """Whether all attributes of an object count as read."""
        return key in self._whole

    def may_have_changed(self, key: int, name: str, *, is_new: bool) -> bool:
        """Whether the traced thread may have given an attribute its value of now. `is_new`: it had
        none before; `functools.cached_property` puts values there past `__setattr__`.
        """
        if self.everything or key in self._whole or (key, name) in self._written:
            return True
        return (
            is_new
            and self._policies.of((key, name)) is Policy.READ
            and any(
                name in dictionary_of(base) for kind in self._kinds[key] for base in mro_of(kind)
            )
        )

    def takes_whole(self, holder: int) -> bool:
        """Makes all attributes of an object count as read, since something holds their dictionary
        itself. Returns whether they did not count as read before.
        """
        if self.everything or holder not in self._reached or holder in self._whole:
            return False
        self._whole.add(holder)
        self._held.add(holder)
        return True

    def narrow(self) -> Reads:
        """Makes later walks enter only what has been read. Returns self."""
        self.is_narrow = True
        return self

    def is_deferred(self, edge: Edge) -> bool:
        """Whether a walk leaves out what an edge leads to."""
        return edge in self._deferred and not self.has(edge)

    def defer(self, edge: Edge | None) -> bool:
        """Leaves out of the next walk what an edge leads to and what cannot be captured, unless the
        step looks at it. Returns whether it can be left out.
        """
        if edge is None or self.everything or edge in self._deferred or self.has(edge):
            return False
        self._deferred.add(edge)
        return True

    def gives_up(self, name: str, names: Set[str]) -> bool:
        """Makes everything count as read if the code of a function names a way around the methods
        that note reads. Returns whether it does so now.
        """
        if self.everything or name in _BEHIND or name in _ABOUT_ITSELF or not names & _BEHIND:
            return False
        self.everything = True
        return True

    def takes_by_computed_name(self, name: str, names: Set[str]) -> bool:
        """Whether the code of a function that names these may look up functions of a class by
        computed names.
        """
        return name not in _ABOUT_ITSELF and bool(names & _BY_COMPUTED_NAME)

    def has_strays(self) -> bool:
        """After a narrow walk: whether the step looked at objects that the walk did not reach."""
        read = {key for key, _ in self._policies} | (self._whole - self._held)
        return not read <= self._reached

    # -- for the trace

    def check(self) -> None:
        """To be called after a trace, also after one that failed.

        Raises:
            Retrace: if the step looked at something that the walk had left out.
        """
        if self._has_more:
            self._beginnings += self.is_narrow
            self.everything = self.everything or self._beginnings > _MOST_BEGINNINGS
            raise Retrace

    def check_others(self) -> None:
        """To be called when the state is as it was before the trace.

        Raises:
            Retrace: if other threads have changed what the step had looked at.
            CaptureError: if they do so all the time.
        """
        paths, self.disturbed = self.disturbed, []
        if not paths:
            return
        self._disturbances += 1
        if self._disturbances > _MOST_DISTURBANCES:
            raise CaptureError(
                f"another thread changes {paths[0]} again and again while the step, which looks at "
                "it, is captured; let the thread keep it where the step does not look",
                code="moved",
            )
        raise Retrace

    def add_functions(self, found: list[tuple[str, Any]]) -> None:
        """To be called after a trace, with the user's functions that it ran and that the walk had
        not reached.

        Raises:
            Retrace: if there are new ones, up to a limit: every trace may make new functions.
        """
        known = {id(function) for _, function in self.functions}
        new = [entry for entry in found if id(entry[1]) not in known]
        if new and len(self.functions) < _MOST_FUNCTIONS:
            self.functions += new
            raise Retrace

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes what is read and set of the objects that the walks have met, by this thread and
        those that it starts.
        """
        if self.everything:
            yield
            return
        self.is_traced = True
        self._set_now = set()
        others = frozenset(sys._current_frames()) - {threading.get_ident()}
        plain_check: Any = inspect._check_instance  # type: ignore[attr-defined]

        def check_instance(value: Any, name: str) -> Any:
            self._note(value, "__dict__", others)
            return plain_check(value, name)

        methods = (
            (kind, name, method)
            for kind in self._classes
            for name, method in self._methods(kind, others)
        )
        with methods_added(methods), replaced([(inspect, "_check_instance", check_instance)]):
            yield

    def _methods(
        self, kind: type, others: frozenset[int]
    ) -> Iterator[tuple[str, Callable[..., Any]]]:
        """What a class is given for the time of a trace."""
        read, (write, delete), note = object.__getattribute__, self._classes[kind], self._note

        def __getattribute__(self: Any, name: str) -> Any:
            note(self, name, others)
            return read(self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            note(self, name, others, is_set=True)
            write(self, name, value)

        def __delattr__(self: Any, name: str) -> None:
            note(self, name, others, is_deleted=True)
            delete(self, name)

        yield "__getattribute__", __getattribute__
        yield "__setattr__", __setattr__
        yield "__delattr__", __delattr__

    def _note(
        self,
        value: object,
        name: str,
        others: frozenset[int],
        *,
        is_set: bool = False,
        is_deleted: bool = False,
    ) -> None:
        if threading.get_ident() in others:
            return
        key = self._keys.get(id(value))
        if key is None:  # made by the step, perhaps with the dictionary of another
            attributes = attributes_of(value)
            key = id(value if attributes is None else attributes)
            if key not in self._reached:
                return
        if is_set or is_deleted:
            self._written.add((key, name))
        is_all = name in _ALL
        if is_all and sys._getframe(2).f_code in _ONE_NAME:
            return
        if is_all:
            is_new = self._is_whole_new(key)
            held = (paths for (holder, _), (_, paths) in self.appended.items() if holder == key)
            self.looked_into.update(*held)
            self._whole.add(key)
            self._held.discard(key)
        elif (key, name) in self._set_now and not is_deleted:
            return
        elif (
            is_set and self._policies.of((key, name)) is not Policy.READ and key not in self._whole
        ):
            is_new = self._is_set_new(key, name)
            self._policies.climb(Policy.WRITTEN, [(key, name)])
            self._set_now.add((key, name))
            self._names.add(name)
        else:
            is_held, paths = self.appended.get((key, name), (False, set()))
            if paths and not appends_next(sys._getframe(2), is_held=is_held):
                self.looked_into |= paths
            is_new = self._is_new(key, name)
            self._policies.climb(Policy.READ, [(key, name)])
            self._names.add(name)
        if is_new:
            self._has_more = True
            raise CaptureError(
                f"the step looks at {name}, which nothing has reached yet", code="moved"
            )

    def _is_new(self, key: int, name: str) -> bool:
        policies, whole = self._known_before
        is_noted = policies.of((key, name)) is Policy.READ
        if not self.is_narrow:
            return ((key, name) in self._deferred and not is_noted and key not in whole) or (
                (None, name) in self._deferred
                and name not in {known for _, known in policies.places(Policy.READ)}
            )
        if key not in self._reached and is_noted:
            self.everything = True  # reached in a way that no walk follows
        return key not in self._reached or (not is_noted and key not in whole)

    def _is_set_new(self, key: int, name: str) -> bool:
        policies, _ = self._known_before
        if not self.is_narrow:
            return (None, name) in self._deferred and name not in {known for _, known in policies}
        is_noted = policies.of((key, name)) is Policy.WRITTEN
        if key not in self._reached and is_noted:
            self.everything = True
        return key not in self._reached or not is_noted

    def _is_whole_new(self, key: int) -> bool:
        whole = self._known_before[1]
        if not self.is_narrow:
            return key not in whole and any(holder == key for holder, _ in self._deferred)
        if key not in self._reached and key in whole:
            self.everything = True
        return key not in self._reached or key not in whole


def is_watchable(kind: type) -> bool:
    """Whether a class can tell what is read of its objects: one written in Python that leaves
    reading and setting to Python, or to `torch.nn.Module`. Modules of libraries are taken as a
    whole.
    """
    flags = flags_of(kind)
    if not flags & HEAP_TYPE or flags & IMMUTABLE_TYPE:
        return False
    if any(_definer(type(kind), name) is not type for name in ("__setattr__", "__delattr__")):
        return False  # its metaclass controls how attributes of the class are set
    if _definer(kind, "__getattribute__") is not object:
        return False
    if issubclass(kind, torch.nn.Module) and is_library(module_of(kind)):
        return False
    return all(_definer(kind, name) in (object, torch.nn.Module) for name in _SETTERS)


def _definer(kind: type, name: str) -> type:
    return next(base for base in mro_of(kind) if name in dictionary_of(base))
