"""Steps on modules that `fully_shard` shards (FSDP2).

PyTorch's own hooks run while a step is traced, on the objects of the user's model, with fakes in
the place of the local parts. Their collectives, copies into and out of buffers, and divisions are
recorded like any other operator. No operator shows that they free the memory of gathered parameters
and allocate it again: from then on the same tensors lie in other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch

from roam.errors import CaptureError
from roam.torch_compat.patches import Replacement
from roam.torch_compat.private import (
    chunk_cat,
    exchange_shard,
    flat_shape,
    forget_forward_passes,
    local_of,
    schema_of,
    shard_faults,
    shard_groups,
    shard_holders,
    shard_kernel,
    shard_memory,
    shard_settings,
    shard_states,
    shards,
)


class Recording(Protocol):
    """The part of a recorder that is needed here."""

    def refuse_collective(self, name: str) -> NoReturn: ...
    def add_alias(self, tensor: Any, of: Any) -> None: ...
    def give_memory_back(self, tensor: Any) -> None: ...
    def take_memory(self, tensor: Any) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...


def check_sharded(modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
    """Refuses sharded modules that are in a state in which no step can begin.

    Raises:
        CaptureError: the message says what to do.
    """
    for path, module in modules:
        for state in shard_states([module]):
            for fault in shard_faults(state):
                error = CaptureError(
                    f"{path} is sharded by fully_shard and "
                    + (
                        fault
                        or "has not run yet; PyTorch sets it up in its first run: call the step once"
                    ),
                    code="fully_shard",
                )
                error.settles = not fault
                raise error


@contextmanager
def sharded(
    recorder: Recording, modules: Sequence[torch.nn.Module], fake: Callable[[Any], Any]
) -> Iterator[None]:
    """A block for the time in which a step is traced: `fully_shard` holds the fakes of its
    parameters. Afterwards everything that it holds is as before.

    Args:
        recorder: the recorder of the trace.
        modules: all modules of the step.
        fake: a function that gives the fake of a tensor.

    Raises:
        CaptureError: the step leaves parameters gathered, or gradients to be reduced.
    """
    states = shard_states(modules)
    if not states:
        yield
        return
    kept = [(one, dict(vars(one)), _contents(one)) for one in shard_holders(states)]
    before = [shard_settings(state) for state in states]
    try:
        for group in shard_groups(modules):
            forget_forward_passes(group)
            for parameter in shards(group):
                whole = fake(parameter.sharded_param)
                local, (numel,) = local_of(whole), flat_shape(parameter)
                flat = local.as_strided((numel,), (1,), 0)
                recorder.add_alias(flat, local)
                exchange_shard(parameter, whole, flat)
        yield
        for state in states:
            if any(shard_faults(state)):
                raise CaptureError(
                    "the step leaves parameters gathered that fully_shard has sharded, or gradients "
                    "to be reduced; run forward and backward in one step, with "
                    "set_requires_gradient_sync(True) for the last backward pass, and evaluations "
                    "by functions that are not compiled",
                    code="fully_shard",
                )
    finally:
        for one, attributes, contents in kept:
            vars(one).clear()
            vars(one).update(attributes)
            for holder, items in contents:
                holder.clear()
                holder.update(items) if isinstance(holder, (dict, set)) else holder.extend(items)
    if before != [shard_settings(state) for state in states]:
        raise CaptureError(
            "the step changes how fully_shard shards a module; do that outside of the step",
            code="fully_shard",
        )


def _contents(holder: Any) -> list[tuple[Any, Any]]:
    return [
        (value, value.copy())
        for value in vars(holder).values()
        if isinstance(value, (list, dict, set))
    ]


def stand_ins(recorder: Recording) -> Iterator[Replacement]:
    """What stands in for taking memory and giving it back."""
    for holder, name in shard_memory():
        takes = name == "alloc_storage"
        yield holder, name, recorder.take_memory if takes else recorder.give_memory_back


def _copied_out(
    all_gather_output: Any, all_gather_input_split_sizes: list[int], dim: int = 0, *, out: Any
) -> tuple[Any, list[int], int]:
    """What is gathered, and how it is cut."""
    return all_gather_output, all_gather_input_split_sizes, dim


def record(recorder: Recording, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records an operator of `torch.ops.fsdp` by what its kernel runs.

    Raises:
        CaptureError: the operator is not known.
    """
    name = schema_of(func).name.partition("::")[2]
    with recorder:
        if name == "chunk_cat_mixed_dtype":
            # What differs in its dtype is cast first, as the kernel does for most mixtures.
            dtype = kwargs["out"].dtype
            if len({tensor.dtype for tensor in args[0]}) > 1:
                args = ([tensor.to(dtype) for tensor in args[0]], *args[1:])
            chunk_cat(*args, **kwargs)
            return None
        if name == "split_with_sizes_copy":
            # One copy for each parameter, so that a plan may drop and make each by itself.
            whole, sizes, dimension = _copied_out(*args, **kwargs)
            for part, out in zip(whole.split(sizes, dimension), kwargs["out"], strict=True):
                out.copy_(part)
            return None
        kernel = shard_kernel(name)
        if kernel is None:
            recorder.refuse_collective(str(func))
        return kernel(*args, **kwargs)
