"""Looks at classes and objects without running their code: no metaclass, property, or
`__getattr__` is asked.
"""

from __future__ import annotations

from typing import Any, Final

_MRO: Final = type.__dict__["__mro__"].__get__
_DICTIONARY: Final = type.__dict__["__dict__"].__get__
_MODULE: Final = type.__dict__["__module__"].__get__
_QUALNAME: Final = type.__dict__["__qualname__"].__get__
_FLAGS: Final = type.__dict__["__flags__"].__get__
_MISSING: Final = object()
HEAP_TYPE: Final = 1 << 9
IMMUTABLE_TYPE: Final = 1 << 8


def mro_of(kind: type) -> tuple[type, ...]:
    """A class and those that it is derived from."""
    found: tuple[type, ...] = _MRO(kind)
    return found


def dictionary_of(kind: type) -> Any:
    """The attributes of a class itself."""
    return _DICTIONARY(kind)


def module_of(kind: type) -> Any:
    """A class's `__module__`, which need not be a text."""
    return _MODULE(kind)


def qualname_of(kind: type) -> str:
    """A class's qualified name."""
    found: str = _QUALNAME(kind)
    return found


def flags_of(kind: type) -> int:
    """The flags of a class (`HEAP_TYPE`, `IMMUTABLE_TYPE`)."""
    found: int = _FLAGS(kind)
    return found


def takes_attributes(kind: type) -> bool:
    """Whether attributes of a class can be set."""
    return bool(_FLAGS(kind) & HEAP_TYPE) and not _FLAGS(kind) & IMMUTABLE_TYPE


def member_of(value: object, name: str) -> Any:
    """What a type written in C keeps under a name of an object; None if there is no such member."""
    for base in mro_of(type(value)):
        member = dictionary_of(base).get(name, _MISSING)
        if member is not _MISSING:
            is_in_c = type(member).__module__ == "builtins" and type(member).__name__ in _IN_C
            return member.__get__(value) if is_in_c else None
    return None


_IN_C: Final = frozenset({"member_descriptor", "getset_descriptor"})
