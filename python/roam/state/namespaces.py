"""The spaces in which code finds values by name: globals, closures, defaults, attributes."""

from __future__ import annotations

import types
from collections.abc import Iterable
from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Any, Final

from roam.state.classes import dictionary_of, mro_of
from roam.state.equality import MISSING
from roam.state.spaces import Items, NamedSpace, Space


class VariableSpace(Space):
    """A context variable, as the thread of the step finds it."""

    __slots__ = ("_unset",)

    def __init__(self, holder: ContextVar[Any], path: str) -> None:
        super().__init__(holder, path)
        self._unset: tuple[Token[Any], Any] | None = None

    def items(self) -> Items:
        try:
            return [("", self.holder.get())]  # an argument would hide the variable's default
        except LookupError:
            return [("", MISSING)]

    def put(self, items: Items) -> None:
        [(_, value)], [(_, now)] = items, self.items()
        if value is MISSING or value is now:
            return
        if self._unset is not None and value is self._unset[1]:
            token, self._unset = self._unset[0], None
            with suppress(RuntimeError, ValueError):  # it was set in another context
                self.holder.reset(token)
                return
        token = self.holder.set(value)
        if token.old_value is Token.MISSING:
            self._unset = token, now  # to be put back to its default

    def set(self, key: Any, value: Any) -> None:
        self.put([(key, value)])

    def label(self, key: Any) -> str:
        return f"{self.path}.get()"


class PartialSpace(NamedSpace):
    """The positional arguments of a `functools.partial`."""

    __slots__ = ()

    def items(self) -> Items:
        return [("args", self.holder.args)]

    def set(self, key: Any, value: Any) -> None:
        if value is not self.holder.args:
            held: Any = self.holder
            held.__setstate__((held.func, value, held.keywords, held.__dict__))


class CellSpace(Space):
    """A variable that a function closes over."""

    __slots__ = ("name",)

    def __init__(self, holder: types.CellType, name: str, path: str, **options: Any) -> None:
        super().__init__(holder, path, **options)
        self.name = name

    def items(self) -> Items:
        try:
            return [(self.name, self.holder.cell_contents)]
        except ValueError:  # the variable has no value yet
            return [(self.name, MISSING)]

    def set(self, key: Any, value: Any) -> None:
        if value is not MISSING:
            self.holder.cell_contents = value
        elif self.items()[0][1] is not MISSING:
            del self.holder.cell_contents

    def label(self, key: Any) -> str:
        return self.path


class NamesSpace(Space):
    """Some names of a namespace: the globals that a function uses."""

    __slots__ = ("names",)

    def __init__(
        self, holder: dict[str, Any], names: Iterable[str], path: str, **options: Any
    ) -> None:
        super().__init__(holder, path, **options)
        self.names = tuple(names)

    def items(self) -> Items:
        return [(name, dict.get(self.holder, name, MISSING)) for name in self.names]

    def get(self, key: Any) -> Any:
        return dict.get(self.holder, key, MISSING)

    def set(self, key: Any, value: Any) -> None:
        if value is MISSING:
            dict.pop(self.holder, key, None)
        else:
            dict.__setitem__(self.holder, key, value)


class AttributesSpace(NamesSpace):
    """The attributes in an object's ``__dict__`` that the step looks at, there or not."""

    __slots__ = ()


class ClassNamesSpace(AttributesSpace):
    """Some attributes of a class, there or not."""

    __slots__ = ()

    def items(self) -> Items:
        held = dictionary_of(self.holder)
        return [(name, held.get(name, MISSING)) for name in self.names]

    def get(self, key: Any) -> Any:
        return dictionary_of(self.holder).get(key, MISSING)

    def set(self, key: Any, value: Any) -> None:
        kind: Any = self.holder
        if value is not MISSING:
            type.__setattr__(kind, key, value)
        elif key in dictionary_of(kind):
            type.__delattr__(kind, key)


def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """The ``__slots__`` of a class and of those that it is derived from, by name."""
    return {
        name: slot
        for base in reversed(mro_of(kind))
        for name, slot in dictionary_of(base).items()
        if type(slot) is types.MemberDescriptorType
    }


class SlotsSpace(Space):
    """The attributes that an object keeps in ``__slots__``."""

    __slots__ = ("_slots",)

    def __init__(
        self,
        holder: object,
        slots: dict[str, types.MemberDescriptorType],
        path: str,
        **options: Any,
    ) -> None:
        super().__init__(holder, path, **options)
        self._slots = slots

    def items(self) -> Items:
        return [(name, self._read(slot)) for name, slot in self._slots.items()]

    def _read(self, slot: types.MemberDescriptorType) -> Any:
        try:
            return slot.__get__(self.holder, type(self.holder))
        except (AttributeError, TypeError):  # not set, or the object has another class now
            return MISSING

    def set(self, key: Any, value: Any) -> None:
        slot = self._slots[key]
        if value is not MISSING:
            try:
                slot.__set__(self.holder, value)
            except AttributeError:  # a read-only member of a type written in C
                if self._read(slot) != value:
                    raise
        elif self._read(slot) is not MISSING:
            slot.__delete__(self.holder)


class FunctionSpace(NamedSpace):
    """What a function object holds besides its closure: its code and its defaults."""

    __slots__ = ()
    KEYS: Final = ("__code__", "__defaults__", "__kwdefaults__")

    def items(self) -> Items:
        return [(key, getattr(self.holder, key)) for key in self.KEYS]

    def put(self, items: Items) -> None:
        for key, value in items:
            setattr(self.holder, key, value)


class DefaultsSpace(Space):
    """The defaults of a function's arguments, by position. Their tuple is an entry of the
    function's own space, which guards and snapshots look at.
    """

    __slots__ = ()

    @property
    def is_immutable(self) -> bool:
        return True

    @property
    def takes_others(self) -> bool:
        return True

    def items(self) -> Items:
        return list(enumerate(self.holder.__defaults__ or ()))

    def set(self, key: Any, value: Any) -> None:
        defaults = self.holder.__defaults__ or ()
        self.holder.__defaults__ = (*defaults[:key], value, *defaults[key + 1 :])


class ClassSpace(Space):
    """The attributes of a class."""

    __slots__ = ()

    def items(self) -> Items:
        # Dunder entries that are no functions are the interpreter's book-keeping, some of it made
        # when first asked for.
        return [
            (key, value)
            for key, value in dictionary_of(self.holder).items()
            if not (key.startswith("__") and key.endswith("__"))
            or type(value) is types.FunctionType
        ]

    def put(self, items: Items) -> None:
        kept = dict(items)
        for key, value in self.items():
            if key not in kept:
                type.__delattr__(self.holder, key)
            elif kept[key] is not value:
                type.__setattr__(self.holder, key, kept[key])
        present = dict(self.items())
        for key, value in items:
            if key not in present:
                type.__setattr__(self.holder, key, value)

    def set(self, key: Any, value: Any) -> None:
        type.__setattr__(self.holder, key, value)
