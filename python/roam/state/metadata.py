"""Metadata of tensors: what capture takes for granted of those that may be replaced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress
from typing import Any, Final

import torch

from roam.state.equality import Misfit, changed, same, show
from roam.state.wrappers import Form, has_inner, is_wrapper, parts_of
from roam.torch_compat.private import (
    DisableTorchFunction,
    c_pointer,
    disable_current_modes,
    gradient_hooks_of,
    hooks_of,
    is_dtensor,
    is_view,
    layout_check,
    layout_of,
    local_of,
    seen_from,
)


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype that gradients of a tensor have; None if they have any."""
    try:
        return tensor.grad_dtype
    except RuntimeError:  # PyTorch 2.11 tells it of leaves only; of others, nobody can set it
        return tensor.dtype


def gradient_of(value: Any) -> torch.Tensor | None:
    """The gradient of a tensor; None if it has none, as what is no tensor."""
    # Asking a tensor that is no leaf for its gradient warns.
    return value.grad if issubclass(type(value), torch.Tensor) and value.is_leaf else None


def metadata_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All of a tensor but its values, its memory, and what it is called."""
    hooks, post_hooks = hooks_of(tensor), gradient_hooks_of(tensor)
    is_strided = tensor.layout is torch.strided
    return (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride() if is_strided else tensor.layout,
        tensor.storage_offset() if is_strided else 0,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.retains_grad,
        gradient_dtype(tensor),
        tensor.is_conj() or tensor.is_neg(),
        tensor.is_inference(),
        is_cut_off(tensor),
        _attributes_of(tensor),
        _hooks_in(hooks),
        _hooks_in(post_hooks),
        layout_over_devices(tensor),
    )


class Held:
    """What hangs on a tensor: attributes, or hooks. They are compared as guards compare values
    (`same`), except for tensors among the attributes, which are compared elsewhere.
    """

    __slots__ = ("_keys", "_values")

    def __init__(self, keys: Iterable[object], values: Iterable[object]) -> None:
        self._keys = tuple(keys)
        self._values = tuple(
            torch.Tensor if issubclass(type(value), torch.Tensor) else value for value in values
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Held)
            and self._keys == other._keys
            and same(self._values, other._values)
        )

    def __hash__(self) -> int:
        return hash(self._keys)


def _attributes_of(tensor: torch.Tensor) -> Held | None:
    attributes = tensor.__dict__
    if not attributes or is_dtensor(tensor):
        return None
    # Dynamo notes here which sizes it takes as dynamic.
    names = [name for name in attributes if not name.startswith("_dynamo")]
    return Held(names, [attributes[name] for name in names])


def _hooks_in(hooks: Any) -> Held | None:
    return Held(range(len(hooks)), hooks.values()) if hooks else None


def is_cut_off(tensor: torch.Tensor) -> bool:
    """Whether a tensor requires a gradient, and has neither a history nor a node that would
    accumulate its gradient: a view of what requires one, made while gradients were not recorded.
    """
    base = seen_from(tensor)
    if base is None or not (base.requires_grad and tensor.requires_grad and tensor.is_leaf):
        return False
    with (
        disable_current_modes(),
        DisableTorchFunction(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        node = tensor.view_as(tensor).grad_fn
    return node is not None and node.next_functions[0][0] is None


def layout_over_devices(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Of a distributed tensor how it lies on its mesh, and how this process's part lies in memory;
    of a wrapper its form, and the metadata of its inner tensors; None for any other.
    """
    if is_wrapper(tensor):
        return Form.of(tensor).kept(), *map(metadata_of, parts_of(tensor))
    if not is_dtensor(tensor):
        return None
    local = local_of(tensor)
    return (
        layout_of(tensor),
        type(local),
        local.dtype,
        local.shape,
        local.stride() if local.layout is torch.strided else local.layout,
        local.storage_offset() if local.layout is torch.strided else 0,
        local.device,
    )


_NAMES: Final = (
    "type", "dtype", "shape", "strides", "storage offset", "device", "requires_grad", "is_leaf", "retains_grad", "grad_dtype", "conjugate or negative bit", "inference mode", "way to its gradient", "attributes", "gradient hooks", "gradient hooks", "layout over devices, or form of the inner tensors,"
)  # fmt: skip


def metadata_change(path: str, expected: tuple[Any, ...], actual: tuple[Any, ...]) -> Misfit:
    """The first difference, for people to read."""
    what, old, new = next(
        item for item in zip(_NAMES, expected, actual, strict=True) if item[1] != item[2]
    )
    return changed(f"the {what} of {path}", show(old), show(new))


def storage_of(tensor: torch.Tensor) -> int:
    """An identity of a tensor's memory, unique among those alive; tensors without a storage of
    their own stand for themselves.
    """
    try:
        return int(c_pointer(local_of(tensor).untyped_storage()))
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def storages_of(tensors: list[Any]) -> list[int]:
    """`storage_of` of many."""
    try:
        if not has_inner(tensors):
            return list(map(c_pointer, map(torch.Tensor.untyped_storage, tensors)))
    except (NotImplementedError, RuntimeError):
        pass  # one has no storage of its own
    return list(map(storage_of, tensors))


class LayoutCheck:
    """Decides the usual case, in which tensors are as those that passed a longer comparison last:
    see `layout_check`. Distributed tensors and wrappers never pass.
    """

    __slots__ = ("_check", "_left")

    def __init__(self) -> None:
        self._check: Callable[..., bool] | None = None
        self._left = 8
        """How many more times it learns, since that takes longer than to compare."""

    def passes(self, tensors: list[Any]) -> bool:
        """Whether tensors are known to be as those that `learn` was given last."""
        return self._check is not None and self._check(*tensors)

    def learn(self, tensors: list[Any]) -> None:
        """From now on, tensors like these pass; what is not known to pass is compared at length."""
        check = None if not self._left or has_inner(tensors) else layout_check(tensors)
        if check is not None:
            self._check = check
            self._left -= 1


class Table:
    """The metadata of many tensors, which is compared with that of others in a few passes.

    Args:
        tensors: the tensors. Only their metadata is kept.
    """

    __slots__ = ("_are_strided", "_attributes", "_check", "_held", "_others", "_seen", "_unchecked")

    def __init__(self, tensors: list[Any]) -> None:
        self._check = LayoutCheck()
        self._unchecked: list[Any] = []
        self._seen = _seen(tensors)
        self._held = list(map(_attributes_of, tensors))
        self._attributes = _flat_attributes(tensors)
        self._are_strided = all(layout is torch.strided for layout, *_ in self._seen)
        self._others = _others(tensors) if self._are_strided else []

    def fits(self, tensors: list[Any], *, are_unhooked: bool = False) -> bool:
        """Whether each of as many tensors has the metadata of the one in its place. If one of those
        that the table was made of is not strided, the answer is always False and says nothing.

        Args:
            are_unhooked: these are the tensors that it was last asked of, and nobody has registered
                a hook since.
        """
        if (
            self._check.passes(tensors)
            and _unchecked(tensors) == self._unchecked
            and (are_unhooked or not _are_hooked(tensors))
        ):
            return self._have_attributes(tensors)
        fits = (
            self._are_strided
            and _seen(tensors) == self._seen
            and _others(tensors) == self._others
            and self._have_attributes(tensors)
        )
        if fits:
            self._unchecked = _unchecked(tensors)
            if not _are_hooked(tensors):  # of hooks there is more to compare
                self._check.learn(tensors)
        return fits

    def _have_attributes(self, tensors: list[Any]) -> bool:
        counts, names, values = _flat_attributes(tensors)
        old_counts, old_names, old_values = self._attributes
        return (
            counts == old_counts
            and names == old_names
            and all(map(operator.is_, values, old_values))
        ) or list(map(_attributes_of, tensors)) == self._held


_VISIBLE: Final = "layout", "dtype", "shape", "device", "requires_grad", "is_leaf", "retains_grad"
_visible: Final = operator.attrgetter(*_VISIBLE)
_all_visible: Final = operator.attrgetter(*_VISIBLE, "grad_dtype")
_attributes: Final = operator.attrgetter("__dict__")
_METHODS: Final = (
    torch.Tensor.stride,
    torch.Tensor.storage_offset,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
    torch.Tensor.is_inference,
)


def _seen(tensors: list[Any]) -> list[tuple[Any, ...]]:
    try:
        return list(map(_all_visible, tensors))
    except RuntimeError:  # as in `gradient_dtype`
        return [(*_visible(tensor), gradient_dtype(tensor)) for tensor in tensors]


def _others(tensors: list[Any]) -> list[Any]:
    """What `metadata_of` says of strided tensors and `_seen` does not."""
    kinds = list(map(type, tensors))
    return [
        kinds,
        list(map(layout_over_devices, tensors)) if has_inner(tensors) else [],
        [place for place in _views(tensors) if is_cut_off(tensors[place])],
        *[list(map(method, tensors)) for method in _METHODS],
        *[_held_hooks(list(map(hooks, tensors))) for hooks in (hooks_of, gradient_hooks_of)],
    ]


def _views(tensors: list[Any]) -> Iterator[int]:
    """The places of the views."""
    return compress(range(len(tensors)), map(is_view, tensors))


_are_leaves: Final = operator.attrgetter("is_leaf")
_gradient_dtype: Final = operator.attrgetter("grad_dtype")
_retains: Final = operator.attrgetter("retains_grad")


def _unchecked(tensors: list[Any]) -> list[Any]:
    """What `_seen` and `_others` say of strided tensors without hooks, and `layout_check` does
    not. No leaf retains its gradient in the sense of `retains_grad`.
    """
    leaves = list(map(_are_leaves, tensors))
    try:
        dtypes = list(map(_gradient_dtype, tensors))
    except RuntimeError:
        dtypes = list(map(gradient_dtype, tensors))
    return [
        leaves,
        dtypes,
        [] if all(leaves) else list(map(_retains, tensors)),
        [place for place in _views(tensors) if is_cut_off(tensors[place])],
        list(map(torch.Tensor.storage_offset, tensors)),
    ]


def _are_hooked(tensors: list[Any]) -> bool:
    return any(map(hooks_of, tensors)) or any(map(gradient_hooks_of, tensors))


def _flat_attributes(tensors: list[Any]) -> tuple[list[int], list[str], list[Any]]:
    """How many attributes of its own each tensor has, and the names and values of all, without
    tensors.
    """
    found = list(map(_attributes, tensors))
    if not any(found):
        return [], [], []
    values = chain.from_iterable(map(dict.values, found))
    return (
        list(map(len, found)),
        list(chain.from_iterable(found)),
        [None if issubclass(type(value), torch.Tensor) else value for value in values],
    )


def _held_hooks(hooks: list[Any]) -> list[Held | None]:
    """The hooks of each tensor; an empty list if none has any."""
    return list(map(_hooks_in, hooks)) if any(hooks) else []
