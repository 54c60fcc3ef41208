"""Remembers the results of operators on fake tensors: a deep model asks for the same ones in each
of its layers, and in every trace.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from roam.kernels.recurrent import ASKED
from roam.kernels.workspace import settings
from roam.program.ir import Ref, TensorMeta
from roam.program.operators import is_ours
from roam.state.nests import leaves_of
from roam.torch_compat.private import (
    DisableTorchDispatch,
    FakeTensor,
    FakeTensorMode,
    c_pointer,
    disable_fake_tensor_cache,
)
from roam.tracing.fake_kernels.meta_corrections import as_real
from roam.tracing.fake_kernels.meta_kernels import on_meta
from roam.tracing.fake_kernels.real_layouts import is_sure, may_be_asked, on_zeros
from roam.tracing.fake_kernels.tensors import Maker

LIVE_FLOAT: Final = -1
LIVE_INT: Final = -2
"""Signatures of live numbers."""
_NEVER: Final = {
    torch.Tag.inplace_view,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}


@dataclass(frozen=True, slots=True)
class Made:
    """A new tensor, or a view of an argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    base: int | None
    """The place, among the argument tensors, of the tensor that it is a view of."""
    size_bytes: int | None
    """Bytes of its storage, if these are more than its elements take."""

    def bytes(self) -> int:
        """Bytes of its storage, if that is its own."""
        if self.size_bytes is not None:
            return self.size_bytes
        return reach(self.shape, self.stride) * self.dtype.itemsize

    def again(self, maker: Maker, mode: FakeTensorMode, tensors: list[Any]) -> FakeTensor:
        if self.base is None and self.size_bytes is None:
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        else:
            storage: Any = torch.UntypedStorage(self.size_bytes or 0, device="meta")
            if self.base is not None:
                storage = tensors[self.base].untyped_storage()
            meta = torch.empty(0, dtype=self.dtype, device="meta")
            meta.set_(storage, self.offset, self.shape, self.stride)
        return maker.make(mode, meta, self.device)


@dataclass(frozen=True, slots=True)
class Given:
    """One of the arguments, as kernels that work in place return it."""

    place: int

    def again(self, _: Maker, __: FakeTensorMode, tensors: list[Any]) -> Any:
        return tensors[self.place]


@dataclass(frozen=True, slots=True)
class Results:
    """What a kernel gives, and in what container."""

    items: list[Made | Given | None]
    container: type | None

    def makes_memory(self) -> bool:
        """Whether any result has memory of its own."""
        return any(
            type(item) is Made and item.base is None and 0 not in item.shape for item in self.items
        )

    def is_like(self, other: Results) -> bool:
        """Whether the results are those of the other except for how they lie in memory."""
        return self.container is other.container and [_told(item) for item in self.items] == [
            _told(item) for item in other.items
        ]

    def again(self, maker: Maker, tensors: list[Any]) -> Any:
        mode = tensors[0].fake_mode
        with DisableTorchDispatch():
            made = [
                None if item is None else item.again(maker, mode, tensors) for item in self.items
            ]
        return made[0] if self.container is None else self.container(made)


_signatures: dict[Any, int] = {}
_numbers = itertools.count(1)
_MOST_REMEMBERED = 20_000
"""If there are more results than this, all are forgotten. A deep step has a few hundred for each
shape.
"""
_asked: dict[Any, Results | None] = {}
"""What real kernels have answered so far in the process."""


class Remembered:
    """The results of kernels on fake tensors, which are valid as long as PyTorch's settings, by
    which kernels are chosen, stay the same.
    """

    def __init__(self) -> None:
        self.results: dict[Any, Results | None] = {}
        self._settings: tuple[object, ...] = ()

    def enter(self) -> None:
        """Before a capture: forgets what was found under other settings, or is too much."""
        if self._settings != settings() or len(self.results) > _MOST_REMEMBERED:
            self.results.clear()
        self._settings = settings()


class FakeKernels:
    """Runs kernels on fake tensors.

    A fake kernel depends only on its arguments' metadata, so its results are known from an earlier
    call with the same metadata. PyTorch's own cache serves all uses of fake tensors; this cache
    serves capture alone, and is several times as fast.
    """

    def __init__(self, *, asks: bool = False, remembered: Remembered | None = None) -> None:
        """Kernels of one fake mode.

        Args:
            asks: whether real kernels may be run, on zeros, for what fake ones need not know; see
                `roam.tracing.fake_kernels.real_layouts`.
            remembered: results of earlier captures, to which those of this one are added. They are
                used only if real kernels are asked, since what is guessed is noted anew for each
                program.
        """
        self._known = Remembered() if remembered is None or not asks else remembered
        self._known.enter()
        self._of_others: dict[Any, Results | None] = {}
        """Results of operators of other libraries, which may get another fake kernel before the
        next capture.
        """
        self._maker = Maker()
        self._asks = asks
        self.guessed: set[Any] = set()
        """Kernels whose real layouts would have been asked for, and were not known yet."""

    def signature(self, meta: TensorMeta, tensor: Any) -> int:
        """A number for all that a kernel can see of a fake tensor."""
        size_bytes = tensor.untyped_storage().nbytes()
        bits = tensor.is_conj(), tensor.is_neg()
        seen = (meta.shape, meta.stride, meta.offset, meta.dtype, meta.device, size_bytes, bits)
        return _signatures.get(seen) or _signatures.setdefault(seen, next(_numbers))

    def run(
        self,
        func: Any,
        given: Any,
        tensors: list[Any],
        recorded: Any,
        signatures: Sequence[int] | Mapping[int, int],
    ) -> Any:
        """The results of a kernel, as the real one lays them out.

        Args:
            func: the kernel.
            given: its (args, kwargs).
            tensors: the fake tensors among them.
            recorded: (args, kwargs) with a `Ref` for each tensor and live number.
            signatures: `signature` of each slot that a `Ref` may name.
        """
        args, kwargs = given
        if not is_known_by_metadata(func):
            return as_real(func, args, func(*args, **kwargs))
        # A dtype that nobody names is the default one, which the step may set.
        key = func, key_of(recorded, signatures), torch.get_default_dtype()
        results = self._known.results if is_ours(func) else self._of_others
        known = results.get(key)
        if known is not None:
            return known.again(self._maker, tensors)
        result, found = self.run_once(func, args, kwargs, tensors)
        if key not in results:
            real = None if is_sure(func, tensors) else self.real(key, given, tensors, found)
            results[key] = real or found
            if real is not None:
                return real.again(self._maker, tensors)
        return result

    def forget_fakes(self) -> None:
        """Lets go of the fake tensors' mode; what kernels make of them is still known."""
        self._maker.forget()

    def run_once(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Any]
    ) -> tuple[Any, Results | None]:
        """A kernel's results on fake tensors, and how to make them again where that is known."""
        shown = on_meta(func, args, kwargs, tensors)
        found = (
            None if shown is NotImplemented else _remembered(shown, tensors, tensors[0].fake_device)
        )
        if found is not None:
            result = found.again(self._maker, tensors)
        else:
            # What was found is remembered here.
            with disable_fake_tensor_cache(tensors[0].fake_mode) if tensors else nullcontext():
                result = func(*args, **kwargs)
        real = as_real(func, args, result)
        return real, found if found is not None and real is result else _remembered(real, tensors)

    def real(
        self, key: Any, given: Any, tensors: list[Any], fake: Results | None
    ) -> Results | None:
        """How the real kernel lays out the results of the fake one; None if that is not
        known.
        """
        func = key[0]
        if fake is None or not fake.makes_memory() or not may_be_asked(func, tensors):
            return None
        key = *key, settings()
        if key not in _asked:
            if not self._asks:
                self.guessed.add(func)
                return None
            _asked[key] = on_zeros(func, given, tensors, _remembered)
        real = _asked[key]
        return real if real is not None and real.is_like(fake) else None


@functools.cache
def is_known_by_metadata(func: Any) -> bool:
    """Whether the metadata of its arguments decide what a fake kernel gives."""
    return func not in ASKED and _NEVER.isdisjoint(func.tags)


def key_of(value: Any, signatures: Sequence[Any] | Mapping[int, Any]) -> Any:
    """A nest of arguments as a key, with the signature of a slot for each `Ref`."""
    kind = type(value)
    if kind is Ref:
        return signatures[value.slot]
    if kind is tuple or kind is list:
        return (kind, *[key_of(item, signatures) for item in value])
    if kind is dict:
        return (kind, *[(name, key_of(item, signatures)) for name, item in value.items()])
    return kind, value


def _remembered(
    result: Any, tensors: list[Any], device: torch.device | None = None
) -> Results | None:
    """As `described`; None also where no argument is a tensor."""
    return described(result, tensors, device) if tensors else None


def described(
    result: Any, tensors: list[Any], device: torch.device | None = None
) -> Results | None:
    """How to make the same results again on fake tensors; None if that is not known.

    `device`: where the results are to be, if not where they are.
    """
    is_one = not isinstance(result, (tuple, list))
    items = [_item(item, tensors, device) for item in ((result,) if is_one else result)]
    if any(item is NotImplemented for item in items):
        return None
    return Results(items, None if is_one else type(result))


def reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements there are from a tensor's first one to its last."""
    if 0 in shape:
        return 0
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


def _told(item: Made | Given | None) -> object:
    return (item.shape, item.dtype, item.device, item.base) if type(item) is Made else item


def _item(item: Any, tensors: list[Any], device: torch.device | None) -> Any:
    if item is None:
        return None
    for place, tensor in enumerate(tensors):
        if item is tensor:
            return Given(place)
    if type(item) not in (FakeTensor, torch.Tensor) or item.layout is not torch.strided:
        return NotImplemented
    if item.is_conj() or item.is_neg():
        return NotImplemented
    shape, stride, offset = tuple(item.shape), item.stride(), item.storage_offset()
    if not isinstance(offset, int) or any(not isinstance(size, int) for size in shape):
        return NotImplemented
    storages = [c_pointer(tensor.untyped_storage()) for tensor in tensors]
    storage = item.untyped_storage()
    base = storages.index(c_pointer(storage)) if c_pointer(storage) in storages else None
    needed = reach(shape, stride)
    is_tight = base is not None or (not offset and storage.nbytes() == needed * item.element_size())
    return Made(
        shape,
        stride,
        offset,
        item.dtype,
        device or item.device,
        base,
        None if is_tight else storage.nbytes(),
    )


def tensors_in(value: Any) -> list[Any]:
    """The tensors in a nest of tuples, lists and dictionaries, in its order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]
