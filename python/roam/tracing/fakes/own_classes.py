"""Parameters of others' classes that are plain tensors to operators, such as quantized weights with
what their numbers mean beside them.

Operators see no difference, so fakes stand for them as for any parameter. Python's code sees the
class: what it defines beside PyTorch's methods is looked up there, its own `__torch_function__`
runs, and a call of a method of PyTorch's that it overrides is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from roam.state.classes import mro_of
from roam.state.equality import MISSING
from roam.torch_compat.patches import methods_added
from roam.torch_compat.private import COMMON_TENSORS, FakeTensor, is_wrapper_subclass

Refuse = Callable[..., NoReturn]
_UNLIKE = ("__getattribute__", "__setattr__", "__delattr__", "__torch_dispatch__")
_NO_METHODS = frozenset(dir(object)) | {"__torch_function__", "__dict__", "__weakref__"}


@functools.cache
def is_own_class(kind: Any) -> bool:
    """Whether tensors of a class are parameters that differ from PyTorch's only by attributes and
    methods.
    """
    return (
        kind not in COMMON_TENSORS
        and issubclass(kind, torch.nn.Parameter)
        and type(kind) is type(torch.nn.Parameter)
        and not is_wrapper_subclass(kind)
        and not any(name in vars(base) for base in _own(kind) for name in _UNLIKE)
    )


def _own(kind: type) -> list[type]:
    return [base for base in mro_of(kind) if base not in mro_of(torch.nn.Parameter)]


class _Asked(TorchFunctionMode):
    """Sees what is called with parameters of these classes."""

    def __init__(self, real_of: Callable[[Any], Any], kinds: set[type], refuse: Refuse) -> None:
        super().__init__()
        self._real_of, self._kinds, self._refuse = real_of, kinds, refuse
        self._overridden = {kind: _overridden(kind) for kind in kinds}
        self._functions = {
            kind for kind in kinds if any("__torch_function__" in vars(one) for one in _own(kind))
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for place, value in enumerate((*args, *kwargs.values())):
            for one in value if type(value) in (list, tuple) else (value,):
                kind = type(self._real_of(one)) if type(one) is FakeTensor else None
                if kind not in self._kinds:
                    continue
                if place == 0 and (name := self._overridden[kind].get(func)) is not None:
                    self._refuse(
                        f"the step calls {name} of a {kind.__name__}, which this class has for itself; call it outside of "
                        "the step, or call torch.Tensor's on parameter.detach()",
                        code="subclass",
                    )  # fmt: skip
                if kind in self._functions:
                    return kind.__torch_function__(func, (kind,), args, kwargs)
        return func(*args, **kwargs)


def _overridden(kind: type) -> dict[Any, str]:
    """The functions of PyTorch's that a class has others for, with their names."""
    found: dict[Any, str] = {}
    for name in {name for base in _own(kind) for name in vars(base)} - _NO_METHODS:
        plain = getattr(torch.Tensor, name, None)
        for one in (plain, getattr(plain, "__get__", None)):
            if one is not None and getattr(one, "__hash__", None) is not None:
                found[one] = name
    return found


@contextmanager
def seen(real_of: Callable[[Any], Any], kinds: set[type], refuse: Refuse) -> Iterator[None]:
    """A block in which Python's code sees what classes have for themselves.

    Args:
        real_of: gives the tensor that a fake stands for, or None.
        kinds: the classes.
    """

    def missing(fake: Any, name: str) -> Any:
        kind = type(real_of(fake))
        if kind in kinds:
            for base in _own(kind):
                if (found := vars(base).get(name, MISSING)) is not MISSING:
                    bound = getattr(type(found), "__get__", None)
                    return found if bound is None else bound(found, fake, kind)
        raise AttributeError(f"{torch.Tensor.__name__!r} object has no attribute {name!r}")

    with ExitStack() as stack:
        if kinds:
            stack.enter_context(methods_added([(FakeTensor, "__getattr__", missing)]))
            stack.enter_context(_Asked(real_of, kinds, refuse))
        yield
