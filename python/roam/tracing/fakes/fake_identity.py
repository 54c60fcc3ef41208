"""Hides how a fake tensor differs from the tensor that it stands for: identity, class, and what
only real memory has.

The user's code gets eager PyTorch's answers, or is refused. The code of libraries, which keeps
tables by identity, sees the fakes themselves.
"""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NoReturn

import torch

from roam.state.live_scalars import LiveFloat, LiveInt
from roam.state.value_stand_ins import class_stood_for, read
from roam.state.wrappers import has_inner, inner, is_wrapper
from roam.torch_compat.patches import Replacement, globals_added, replaced
from roam.torch_compat.private import (
    ASKS_FOR_FAKES,
    DYNAMIC_INDICES,
    HOOKS,
    FakeTensor,
    dtensor_class,
)
from roam.tracing.fakes.own_classes import is_own_class, seen
from roam.tracing.source_location import is_user_code

_identity, _hash, _type = id, hash, type
Refuse = Callable[..., NoReturn]

_REAL_MEMORY = (
    (FakeTensor, "_version", "how often a tensor was written to"),
    (FakeTensor, "_cdata", "the address of a tensor"),
    (torch.UntypedStorage, "_cdata", "the address of a storage"),
    (torch.UntypedStorage, "device", "the device of a storage, which is its tensor's,"),
)

_ABOUT_OBJECTS = ((sys, ("getrefcount", "getsizeof")), (gc, ("get_referrers", "get_referents")))


class Identities:
    """The identities of the tensors that fakes stand for."""

    def __init__(self) -> None:
        self._real: dict[int, torch.Tensor] = {}
        self._stack = ExitStack()

    def enter(self) -> None:
        """From now on a fake has the hash of its tensor, in whatever set or dictionary it is
        put.
        """
        real = self._real

        def hashed(fake: Any) -> int:
            return _identity(real.get(_identity(fake), fake))

        replacements: list[Replacement] = [(FakeTensor, "__hash__", hashed)]
        if (kind := dtensor_class()) is not None:
            replacements.append((kind, "__hash__", hashed))
        self._stack.enter_context(replaced(replacements))

    def leave(self) -> None:
        """Fakes have their own hash again."""
        self._stack.close()
        self._real.clear()

    def add(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Notes what a fake stands for."""
        self._real[_identity(fake)] = real

    def own_classes(self) -> set[type]:
        """The classes of others among those of these tensors, which are plain to operators."""
        return set(filter(is_own_class, map(_type, self._real.values())))

    def of(self, fake: Any) -> Any:
        """The tensor that a fake stands for, or None for one that the step made."""
        return self._real.get(_identity(fake))

    @contextmanager
    def asked(self, globals_of_users: Iterable[dict[str, Any]], refuse: Refuse) -> Iterator[None]:
        """A block for the time in which the step runs: its code sees the identities and the classes
        of the tensors that fakes stand for.
        """

        def fixed(value: Any) -> int:
            real = self.of(value)
            if real is None:
                return _identity(value)  # the step made it, as it does at every run
            if not (isinstance(real, torch.nn.Parameter) or (real.requires_grad and real.is_leaf)):
                refuse(
                    "the step asks for the identity (id or hash) of a tensor, which may be "
                    "another tensor at the next call; compare tensors with `is`, or use names as "
                    "keys",
                    code="identity",
                )
            return _identity(real)

        def identity(value: Any, /) -> int:
            if _represents(_type(value)) and _asked_by_user():
                value = read(value)
                if _type(value) in _NUMBERS:
                    value = value.node._value()
            return fixed(value) if _is_stand_in(value) and _asked_by_user() else _identity(value)

        def hashed(value: Any, /) -> int:
            return fixed(value) if _is_stand_in(value) and _asked_by_user() else _hash(value)

        def refusing(function: Callable[..., Any], text: str, about: Any = None) -> Any:
            def asked(*args: Any, **kwargs: Any) -> Any:
                if (about is None or (args and about(args[0]))) and _asked_by_user():
                    refuse(f"the step {text}; leave it out of the step", code="identity")
                return function(*args, **kwargs)

            return asked

        def real(holder: Any, name: str, shown: str) -> Replacement:
            text = f"calls {shown} while a fake tensor stands for the real one"
            return holder, name, refusing(getattr(holder, name), text, _is_stand_in)

        def attribute(kind: type, name: str, what: str) -> property:
            original = getattr(kind, name)

            def read(holder: Any) -> Any:
                if _asked_by_user():
                    refuse(
                        f"the step reads {what} ({name}), which a fake tensor does not have; leave "
                        "it out of the step",
                        code="identity",
                    )
                return original.__get__(holder)

            return property(read)

        def attributes(tensor: Any) -> Any:
            if _asked_by_user():
                refuse(
                    "the step asks for all attributes of a tensor at once; ask for each by its "
                    "name, as in getattr(x, name, None)",
                    code="identity",
                )
            return _plain_attributes.__get__(tensor)

        def handed_out(*_: object, **__: object) -> None:
            refuse(
                "the step saves, pickles or copies a tensor; do that outside of the "
                "step, and use x.clone() within it",
                code="pickled",
            )

        replacements: list[Replacement] = [(builtins, "id", identity), (builtins, "hash", hashed)]
        replacements += [real(builtins, name, f"{name}(tensor)") for name in ("vars", "dir")]
        for module, names in _ABOUT_OBJECTS:
            replacements += [
                real(module, name, f"{module.__name__}.{name}(tensor)") for name in names
            ]
        replacements.append(real(torch.Tensor, "storage", "tensor.storage()"))
        for holder, name in ASKS_FOR_FAKES:
            text = (
                f"asks by {name}() whether its tensors are fake, as they are during capture alone"
            )
            replacements.append((holder, name, refusing(getattr(holder, name), text)))
        replacements += [
            (FakeTensor, name, handed_out)
            for name in ("__reduce_ex__", "__deepcopy__", "__dlpack__")
        ]
        replacements.append((torch.utils.dlpack, "to_dlpack", handed_out))
        replacements += [
            (kind, name, attribute(kind, name, what)) for kind, name, what in _REAL_MEMORY
        ]
        replacements.append((FakeTensor, "__dict__", property(attributes)))
        own = self.own_classes()
        with (
            self.classes_told(globals_of_users),
            replaced(replacements),
            seen(self.of, own, refuse),
        ):
            yield

    @contextmanager
    def classes_told(self, globals_of_users: Iterable[dict[str, Any]]) -> Iterator[None]:
        """A block in which the user's code sees the classes of the tensors that fakes stand for, as
        when his own nodes of PyTorch's trees are taken apart.
        """
        with (
            globals_added(globals_of_users, "type", _type_stand_in(self.class_of)),
            replaced([(FakeTensor, "__class__", property(self.class_of))]),
        ):
            yield

    def class_of(self, fake: Any) -> type:
        """The class of the tensor that a fake stands for, or would be."""
        real = self.of(fake)
        if real is not None:
            return _type(real)
        return torch.nn.Parameter if getattr(fake, "_is_param", False) else torch.Tensor


_OF_FAKES: set[str] = {"_roam_mark", "_roam_slot", "_is_param", "_is_buffer"}
"""What fakes have for themselves."""


def hooks_on(tensor: Any) -> list[int]:
    """The hooks on a tensor's gradient, by their own numbers."""
    return [number for name in HOOKS for number in getattr(tensor, name) or ()]


def own_attributes(fake: FakeTensor) -> dict[str, Any]:
    """The attributes that the user's code has set on a tensor."""
    if _type(fake) is FakeTensor and "fake_mode" not in _OF_FAKES:
        _OF_FAKES.update(
            vars(FakeTensor(fake.fake_mode, torch.empty(0, device="meta"), fake.fake_device))
        )
    names = [name for name, _ in inner(fake)] if is_wrapper(fake) else ()
    return {
        name: value
        for name, value in vars(fake).items()
        if name not in _OF_FAKES
        and name not in names
        and name != DYNAMIC_INDICES
        and not name.startswith("_roam_")  # of tensors whose sizes follow from symbols
    }


def is_parameter(fake: Any) -> bool:
    """Whether a fake stands for a `torch.nn.Parameter`."""
    return bool(getattr(fake, "_is_param", False))


def _is_stand_in(value: Any) -> bool:
    """Whether a fake tensor, or a distributed one or a wrapper of fakes, stands for one."""
    return _type(value) is FakeTensor or has_inner((value,))


_plain_attributes: Any = torch.Tensor.__dict__["__dict__"]


_NUMBERS: Final[dict[type, type]] = {LiveFloat: float, LiveInt: int}
"""The classes of live numbers, each with the class of the numbers."""


def _represents(kind: type) -> bool:
    return kind in _NUMBERS or class_stood_for(kind) is not kind


def _type_stand_in(class_of: Callable[[Any], type]) -> Any:
    """What the user's code has for `type` while it runs: the same, except for fakes."""

    class Asking(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs:
                return _type(*args, **kwargs)
            kind = _type(args[0])
            if kind is FakeTensor:
                return class_of(args[0])
            return cls if kind is _type else _NUMBERS.get(kind) or class_stood_for(kind)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, _type)

        def __subclasscheck__(cls, value: Any) -> bool:
            return issubclass(value, _type)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is _type

        def __hash__(cls) -> int:
            return _hash(_type)

    return Asking("type", (type,), {})


def _asked_by_user() -> bool:
    return is_user_code(sys._getframe(2).f_code)
