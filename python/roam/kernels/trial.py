"""Runs a call on trial with planned memory, and compares it, byte for byte, with the ordinary one.

`try_placed` gives the results views into a poisoned pool, `try_in_place` gives one of them an
argument's memory. Both run on copies of the arguments, which have the same layouts and share
storages in the same way, and restore the state of the random generator.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roam.kernels.table import Kernel, layout, named
from roam.program.bits import as_bytes, copied, differ
from roam.program.operators import UNINITIALIZED
from roam.program.replay import generator_of
from roam.torch_compat.private import OpOverload, c_pointer, pytree

_ALIGNMENT_BYTES = 64
_POISON = 0xFF  # not a number in floating point, and no valid bool


class Unusable(Exception):
    """The ordinary call fails, or its results are not such as a plan could place."""


@dataclass(frozen=True, slots=True)
class Ordinary:
    """A call as eager runs it.

    Attributes:
        target, args, kwargs: the call; its tensors stay as they were.
        results: what it returned, on copies of its arguments.
        after: bytes of the arguments' storages afterwards, in the order of `_storages`.
        generator: state of the random generator afterwards.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]
    after: list[Tensor]
    generator: Tensor

    @classmethod
    def run(cls, target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ordinary:
        """Run the call.

        Raises:
            Unusable: see its description.
        """
        if any(map(_is_special, _tensors((args, kwargs)))):
            raise Unusable("not all of its tensors are plain and strided")
        copies = copied((tuple(args), dict(kwargs)))
        with _undisturbed(copies):
            try:
                returned = target(*copies[0], **copies[1])
            except Exception as error:
                raise Unusable(str(error)) from error
            generator = _generator(copies).get_state()
        results = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        if not all(isinstance(result, Tensor) for result in results):
            raise Unusable("it does not return tensors alone")
        if any(map(_is_special, results)):
            raise Unusable("not all of its tensors are plain and strided")
        own = {c_pointer(tensor.untyped_storage()) for tensor in _tensors(copies)}
        if any(c_pointer(result.untyped_storage()) in own for result in results) or "E" in map(
            layout, results
        ):
            raise Unusable("its results share memory")
        return cls(target, tuple(args), dict(kwargs), results, _storages(copies), generator)

    def is_reproducible(self) -> bool:
        """Whether the call gives the same bits again; where several indices write to one element,
        it may not.
        """
        again = Ordinary.run(self.target, self.args, self.kwargs)
        return not differ(again.results, self.results)


def try_placed(ordinary: Ordinary, kernel: Kernel) -> str:
    """What is wrong with the results that the kernel writes into views of a pool; empty if
    nothing.
    """
    args, kwargs = copied((ordinary.args, ordinary.kwargs))
    pool, views = _pool(ordinary.results)
    wrong = _call(ordinary, kernel, views, args, kwargs)
    if wrong:
        return wrong
    if _is_uninitialized(ordinary):
        return ""
    expected, places = _pool(ordinary.results)
    _write(places, ordinary.results)
    if not torch.equal(pool, expected):
        return "other bits" if differ(views, ordinary.results) else "wrote beside its results"
    return "" if _same(_storages((args, kwargs)), ordinary.after) else "changed an argument"


def in_place_pairs(ordinary: Ordinary) -> list[tuple[str, int]]:
    """(argument, result): arguments whose memory would fit a result."""
    values = named(ordinary.target, ordinary.args, ordinary.kwargs)
    return [
        (name, number)
        for name, value in values.items()
        if isinstance(value, Tensor) and value.numel()
        for number, result in enumerate(ordinary.results)
        if _fits(value, result)
    ]


def try_in_place(ordinary: Ordinary, kernel: Kernel, argument: str, result: int) -> str:
    """What is wrong when one result takes the argument's own memory; empty if nothing."""
    args, kwargs = copied((ordinary.args, ordinary.kwargs))
    taken = named(ordinary.target, args, kwargs)[argument]
    pool, views = _pool(ordinary.results)
    views[result] = taken
    wrong = _call(ordinary, kernel, views, args, kwargs)
    if wrong:
        return wrong
    # What all memory must look like: the arguments as after the ordinary call, with the result in
    # its place.
    own, own_kwargs = copied((ordinary.args, ordinary.kwargs))
    for storage, after in zip(
        _storages((own, own_kwargs), alias=True), ordinary.after, strict=True
    ):
        storage.copy_(after)
    expected, places = _pool(ordinary.results)
    places[result] = named(ordinary.target, own, own_kwargs)[argument]
    _write(places, ordinary.results)
    if differ(views, ordinary.results):
        return "other bits"
    if not torch.equal(pool, expected):
        return "wrote beside its results"
    return (
        ""
        if _same(_storages((args, kwargs)), _storages((own, own_kwargs)))
        else "changed another argument"
    )


def _call(ordinary: Ordinary, kernel: Kernel, views: list[Tensor], args: Any, kwargs: Any) -> str:
    places = [(view.data_ptr(), view.shape, view.stride()) for view in views]
    with _undisturbed((args, kwargs)):
        try:
            kernel(views, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a warning that an out is resized among them
            return f"raised {type(error).__name__}"
        drew_as_before = torch.equal(_generator((args, kwargs)).get_state(), ordinary.generator)
    if [(view.data_ptr(), view.shape, view.stride()) for view in views] != places:
        return "did not keep the memory that it was given"
    return "" if drew_as_before else "drew other random numbers"


def _pool(results: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A poisoned pool and views into it that are strided as the results, with room between them."""
    offsets, end = [], _ALIGNMENT_BYTES
    for result in results:
        offsets.append(end)
        end += (_extent_bytes(result) // _ALIGNMENT_BYTES + 2) * _ALIGNMENT_BYTES
    pool = torch.full((end,), _POISON, dtype=torch.uint8, device=results[0].device)
    views = []
    for offset, result in zip(offsets, results, strict=True):
        typed = pool[offset : offset + _extent_bytes(result)].view(result.dtype)
        views.append(typed.as_strided(result.shape, result.stride(), typed.storage_offset()))
    return pool, views


def _extent_bytes(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (reach + 1) * tensor.element_size()


def _write(places: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    for place, result in zip(places, results, strict=True):
        as_bytes(place).copy_(as_bytes(result))


def _storages(nest: Any, *, alias: bool = False) -> list[Tensor]:
    """Bytes of the distinct storages of a nest's tensors, copied unless they are to be an alias."""
    found = {c_pointer(tensor.untyped_storage()): tensor for tensor in _tensors(nest)}
    flat = [
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        for tensor in found.values()
    ]
    return flat if alias else [item.clone() for item in flat]


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def _fits(argument: Tensor, result: Tensor) -> bool:
    return (
        argument.dtype == result.dtype
        and argument.shape == result.shape
        and argument.stride() == result.stride()
        and layout(argument) in "CLP"
    )


def _is_special(tensor: Tensor) -> bool:
    return (
        tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    )


def _is_uninitialized(ordinary: Ordinary) -> bool:
    return ordinary.target.name() in UNINITIALIZED


def _generator(nest: Any) -> torch.Generator:
    on_cuda = (tensor.device for tensor in _tensors(nest) if tensor.is_cuda)
    return generator_of(next(on_cuda, torch.device("cpu")))


@contextmanager
def _undisturbed(nest: Any) -> Iterator[None]:
    """Without autograd, with a fixed seed that is put back, and with warnings as errors, since
    PyTorch warns if it resizes an `out`.
    """
    generator = _generator(nest)
    state = generator.get_state()
    generator.manual_seed(0)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        generator.set_state(state)
