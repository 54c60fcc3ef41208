"""Wrapper subclasses: tensors of others' classes that have inner tensors instead of memory, such as
quantized weights and optimizer state.

PyTorch's protocol takes one apart (`__tensor_flatten__`) and puts one together
(`__tensor_unflatten__`), and the class's own `__torch_dispatch__` runs operators on the inner
tensors. So a program knows these only: each has a reference of its own (`PartReference`), and what
the step leaves is put together again by its form. Distributed tensors, which PyTorch's dispatch
handles in ways of their own, are apart (`local_of`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from roam.errors import CaptureError
from roam.state.equality import is_plain, same
from roam.state.live_scalars import is_live
from roam.state.nests import alike, leaves_of
from roam.torch_compat.private import (
    COMMON_TENSORS,
    FakeTensor,
    disable_current_modes,
    is_dtensor_class,
    is_pending_class,
    is_wrapper_subclass,
    local_of,
    mark_parameter,
    pytree,
)


@functools.cache
def _is_wrapper_class(kind: type) -> bool:
    return is_wrapper_subclass(kind) and not is_dtensor_class(kind) and not is_pending_class(kind)


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor with inner tensors that PyTorch's protocol takes apart."""
    kind: Any = type(value)
    return kind not in COMMON_TENSORS and _is_wrapper_class(kind)


def has_inner(values: Sequence[object]) -> bool:
    """Whether any of many values is one, or a distributed tensor."""
    kinds = set(map(type, values)) - COMMON_TENSORS
    return any(_is_wrapper_class(kind) or is_dtensor_class(kind) for kind in kinds)


def inner(wrapper: Any) -> list[tuple[str, Any]]:
    """The inner tensors with their names; some may be wrappers themselves."""
    return [(name, getattr(wrapper, name)) for name in wrapper.__tensor_flatten__()[0]]


def parts_of(value: Any) -> list[Any]:
    """The plain tensors of which a wrapper, however deep, is made; of any other value, itself, and
    of a distributed tensor, this process's part.
    """
    if not is_wrapper(value):
        return [local_of(value)]
    return [part for _, one in inner(value) for part in parts_of(one)]


def is_faked(value: Any) -> bool:
    """Whether a value is a fake tensor, or has one in it."""
    return any(issubclass(type(part), FakeTensor) for part in parts_of(value))


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What a wrapper is apart from the values of its inner tensors.

    Attributes:
        kind: the class.
        context: what the class keeps beside the tensors.
        parts: the name of each inner tensor, with its form if it is a wrapper too.
        layout: shape, strides, offset and dtype that the wrapper shows.
    """

    kind: Any
    context: Any
    parts: tuple[tuple[str, Form | None], ...]
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, wrapper: Any) -> Form:
        """The form of a wrapper as it is now; `kept` is one that stays so."""
        names, context = wrapper.__tensor_flatten__()
        parts = [(name, getattr(wrapper, name)) for name in names]
        layout = tuple(wrapper.shape), wrapper.stride(), wrapper.storage_offset(), wrapper.dtype
        forms = ((name, cls.of(part) if is_wrapper(part) else None) for name, part in parts)
        return cls(type(wrapper), context, tuple(forms), layout)

    def kept(self) -> Form:
        """The same form, whatever becomes of the context."""
        parts = tuple((name, form and form.kept()) for name, form in self.parts)
        return Form(self.kind, copy.deepcopy(self.context), parts, self.layout)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Form)
            and self.kind is other.kind
            and self.layout == other.layout
            and self.parts == other.parts
            and alike(self.context, other.context, _are_alike)
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.layout))

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({self.context!r}, {self.layout})"

    def joined(self, parts: Iterable[Any]) -> Any:
        """A wrapper of this form around plain tensors, which are given in the order of
        `parts_of`.
        """
        return self._joined(iter(parts))

    def _joined(self, parts: Iterator[Any]) -> Any:
        made = {
            name: next(parts) if form is None else form._joined(parts) for name, form in self.parts
        }
        # The class may keep the context, and change it.
        context = copy.deepcopy(self.context)
        with torch.no_grad():
            shape, strides, *_ = self.layout
            return self.kind.__tensor_unflatten__(made, context, torch.Size(shape), strides)


def _are_alike(one: Any, other: Any) -> bool:
    if is_plain(one) or one is other:
        return same(one, other)
    return type(one) is type(other) and bool(one == other)


def with_parts(wrapper: Any, parts: Iterable[Any]) -> Any:
    """Another wrapper like one, around other tensors, with the attributes that were noted on it."""
    with disable_current_modes():
        made = Form.of(wrapper).joined(parts)
    if wrapper.requires_grad:
        made.requires_grad_()
    if isinstance(wrapper, torch.nn.Parameter):
        mark_parameter(made)
    for name, value in wrapper.__dict__.items():
        made.__dict__.setdefault(name, value)
    return made


def checked_form(wrapper: Any, path: str) -> Form:
    """The form of a wrapper.

    Raises:
        CaptureError: a plan could not put the wrapper together again, or would not notice that it
            has become another one.
    """

    def refuse(fault: str) -> NoReturn:
        error = CaptureError(
            f"{path} is a {type(wrapper).__name__}, which {fault}", code="subclass"
        )
        error.path = path
        raise error

    try:
        form = Form.of(wrapper)
        kept = form.kept()
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001 - of the class's own code
        refuse(f"cannot be taken apart ({type(error).__name__}: {error}); use plain tensors")
    if any(map(is_live, leaves_of(_contexts(form)))):
        refuse(
            "keeps a number in its context that changes from call to call, or that the step computes; keep it in a tensor"
        )
    if kept != form:
        refuse(
            f"has a context that does not equal a copy of itself ({form.context!r}); give what is "
            "in it an __eq__ by value"
        )
    for name, part in _named_parts(wrapper):
        if type(part) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
            refuse(f"holds a {type(part).__name__} as its inner tensor {name}; use a plain tensor")
        if part.layout is not torch.strided or part.requires_grad:
            refuse(
                f"has an inner tensor {name} that is not strided, or requires a gradient itself; "
                "make it of dense tensors without"
            )
    names = {name for name, _ in form.parts}
    for name, value in vars(wrapper).items():
        if name not in names and issubclass(type(value), torch.Tensor):
            refuse(
                f"keeps a tensor in its attribute {name!r}, which __tensor_flatten__ leaves out; "
                "let it name the tensor"
            )
    return kept


def _contexts(form: Form) -> list[Any]:
    """The context of a form, and those of the wrappers inside."""
    return [form.context, *(_contexts(part) for _, part in form.parts if part is not None)]


def _named_parts(wrapper: Any) -> Iterator[tuple[str, Any]]:
    for name, part in inner(wrapper):
        if is_wrapper(part):
            yield from _named_parts(part)
        else:
            yield name, part


@dataclass(frozen=True, slots=True)
class Whole:
    """A wrapper taken apart: a node of a tree, which becomes a wrapper when the tree is put
    together.
    """

    form: Form
    parts: list[Any]


pytree.register_pytree_node(
    Whole, lambda node: (node.parts, node.form), lambda parts, form: form.joined(parts)
)
