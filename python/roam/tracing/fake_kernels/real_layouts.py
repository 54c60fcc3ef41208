"""Asks real kernels for the strides of their results, where fake kernels may give other ones.

On contiguous arguments fake kernels and real ones agree (`tests/tracing/test_real_layouts.py`
compares them). On permuted, channels-last, expanded or sliced ones they choose strides by rules of
their own, and dozens of operators differ in some case. So where kernels may be run, the real one is
asked: once per kernel and metadata in a process, on zeros, with the memory of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from roam.kernels.recurrent import ASKED
from roam.program.operators import is_ours
from roam.program.replay import generator_of
from roam.torch_compat.private import c_pointer, disable_current_modes, pytree

aten = torch.ops.aten
Results = TypeVar("Results")

_SLOW = frozenset(
    {
        *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
        *(aten.convolution.default, aten.convolution_backward.default),
    }
)
"""Kernels that take long to ask, and need not be asked: products are contiguous, and the fake
convolutions ask PyTorch for the format.
"""
_SIZED_BY_KERNEL = frozenset(
    {aten._embedding_bag.default, aten._embedding_bag_forward_only.default}
)
"""Kernels whose results get another size in bytes from fake kernels, even for contiguous
arguments.
"""


def is_sure(func: Any, tensors: Sequence[Any]) -> bool:
    """Whether a fake kernel lays its results out as the real one does, for arguments like these."""
    if func in _SLOW:
        return True
    return func not in _SIZED_BY_KERNEL and all(map(_is_plain, tensors))


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor is contiguous, also by the strides of dimensions of one element. These mean
    nothing, but kernels choose those of their results by them.
    """
    if not tensor.is_contiguous():
        return False
    if 1 not in tensor.shape:
        return True
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def may_be_asked(func: Any, tensors: Sequence[Any]) -> bool:
    """Whether nothing happens but that memory is made, if a kernel is run on zeros instead of
    these tensors.
    """
    return (
        is_ours(func)
        and func not in ASKED  # is asked already
        and not any(
            tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided
            for tensor in tensors
        )
    )


def on_zeros(
    func: Any, given: Any, tensors: Sequence[Any], look: Callable[[Any, list[Any]], Results]
) -> Results | None:
    """What `look` says of a real kernel's results and its arguments; None if the kernel does not
    take zeros.

    Args:
        func: the kernel.
        given: its (args, kwargs), with fake tensors.
        tensors: the fake tensors among them, in their order.
        look: is given the results, and the real tensors instead of `tensors`.
    """
    try:
        with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            zeros = _zeros(tensors)
            remaining = iter(zeros)
            args, kwargs = pytree.tree_map(
                lambda value: next(remaining) if isinstance(value, torch.Tensor) else value, given
            )
            with generator_kept(pytree.tree_leaves((args, kwargs))):
                return look(func(*args, **kwargs), zeros)
    except Exception:  # noqa: BLE001 - no memory for it, or zeros are no indices of it; the first run checks it all the same
        return None


def _zeros(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Real tensors with the same metadata that share memory in the same way; zeros are numbers,
    indices and choices alike.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    made = []
    for fake in tensors:
        storage = fake.untyped_storage()
        if c_pointer(storage) not in storages:
            real = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=fake.fake_device)
            storages[c_pointer(storage)] = real.untyped_storage()
        zeros = torch.empty(0, dtype=fake.dtype, device=fake.fake_device)
        made.append(
            zeros.set_(
                storages[c_pointer(storage)], fake.storage_offset(), fake.shape, fake.stride()
            )
        )
    return made


@contextmanager
def generator_kept(arguments: Sequence[Any]) -> Iterator[None]:
    """Puts back the state of the generator that a kernel with these arguments may draw from."""
    devices = [value.device for value in arguments if isinstance(value, torch.Tensor)]
    on_cuda = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
    given = (value for value in arguments if isinstance(value, torch.Generator))
    generator = next(given, generator_of(on_cuda))
    state = generator.get_state()
    try:
        yield
    finally:
        if not generator.get_state().equal(state):
            generator.set_state(state)
