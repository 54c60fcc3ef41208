"""Reads the states of random generators where random tensors are made that may be made again.

A random call draws from the state of its generator, and advances it. A call before it reads the
state into a tensor of a few kilobytes at most, from which the same numbers can be drawn later. The
reading keeps its place among the random calls; drawing again may happen at any place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roam.program.ir import Call, Program, Storage, TensorMeta
from roam.program.operators import is_ours, is_region
from roam.program.replay import GENERATOR, generator_state, state_bytes
from roam.torch_compat.private import schema_of

EXACT = frozenset(
    f"aten::{name}"
    for name in (
        "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
        "native_dropout", "normal", "normal_", "rand", "rand_like", "randint", "randint_like",
        "randn", "randn_like", "random_", "uniform_",
    )
)  # fmt: skip
"""Random operators that make the same bits from the same state.
`tests/program/test_random_states.py` shows this; for CUDA, PyTorch's documentation of
`torch.Generator` says it.
"""


READ = torch.random.get_rng_state, torch.cuda.random.get_rng_state
SET = torch.random.set_rng_state, torch.cuda.random.set_rng_state
"""The functions that read and set a device's generator, of the CPU and of CUDA."""


@dataclass(frozen=True, slots=True)
class WithStates:
    """A program that reads states.

    Attributes:
        program: slots and storages keep their numbers, and those of the states follow.
        calls: for each call, the number of the original call; -1 for a call that reads a state.
    """

    program: Program
    calls: tuple[int, ...]


def with_states(program: Program) -> WithStates | None:
    """The program with the state read before each random call that may be replayed, and that makes
    or fills more bytes than its state has; None if there is no such call.
    """
    leaving = program.leaving()
    sources = [_source(program, call, leaving) for call in program.calls]
    if not any(sources):
        return None
    calls, slots, storages = list(program.calls), list(program.slots), list(program.storages)
    before: dict[int, list[Call]] = {}
    numbers: list[int] = []
    for number, (call, source) in enumerate(zip(program.calls, sources, strict=True)):
        if source is not None:
            slot = add_state(slots, storages, source.size_bytes, f"state of {call.name}")
            before[number] = [
                Call(
                    generator_state, (source.generator,), {}, (slot,), False, call.phase,
                    call.source, random=True,
                )
            ]  # fmt: skip
            numbers.append(-1)
            calls[number] = replace(call, state=slot)
        numbers.append(number)
    read = inserted(replace(program, calls=calls, slots=slots, storages=storages), before)
    return WithStates(read, tuple(numbers))


def add_state(
    slots: list[TensorMeta | None], storages: list[Storage], size_bytes: int, name: str
) -> int:
    """The slot of a new tensor for a generator's state."""
    cpu = torch.device("cpu")
    slots.append(TensorMeta((size_bytes,), (1,), 0, torch.uint8, cpu, len(storages)))
    storages.append(Storage(size_bytes, -1, name))
    return len(slots) - 1


def inserted(program: Program, before: Mapping[int, Sequence[Call]]) -> Program:
    """The program with further calls, each before one of its own, or, for their number, at its end.
    What they make is in the program's slots and storages already.
    """
    calls: list[Call] = []
    storages = list(program.storages)
    makes: dict[int, list[int]] = {}
    for number, storage in enumerate(storages):
        makes.setdefault(storage.creator, []).append(number)
    for number in range(len(program.calls) + 1):
        for call in before.get(number, ()):
            for slot in call.made():
                made = program.storage_of(slot)
                storages[made] = replace(storages[made], creator=len(calls))
            calls.append(call)
        if number < len(program.calls):
            for made in makes.get(number, ()):
                storages[made] = replace(storages[made], creator=len(calls))
            calls.append(program.calls[number])
    return replace(program, calls=calls, storages=storages)


def reading(device: torch.device) -> tuple[Any, tuple[int, ...]]:
    """The function that reads the state of a device's generator, and its arguments."""
    return (READ[1], (device.index or 0,)) if device.type == "cuda" else (READ[0], ())


def setting(device: torch.device) -> tuple[Any, tuple[int, ...]]:
    """The function that sets it, and its arguments after the state."""
    return (SET[1], (device.index or 0,)) if device.type == "cuda" else (SET[0], ())


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a state comes from, and how large it is."""

    generator: torch.Generator | torch.device
    size_bytes: int


def _source(program: Program, call: Call, leaving: set[int]) -> _Source | None:
    """Where a random call draws from; None if it is not worth or not able to be replayed."""
    if not call.random or call.skip_if is not None or not is_ours(call.target):
        return None
    is_region_alone = is_region(call.target) and not call.mutates
    if schema_of(call.target).name not in EXACT and not is_region_alone:
        return None
    metas = [
        meta
        for slot in (*call.outputs, *call.mutates)
        if slot is not None and (meta := program.slots[slot]) is not None
    ]
    filled = {meta.storage for meta in metas}
    if not metas or not leaving.isdisjoint(filled) or _is_there(program, filled):
        return None
    if is_region_alone and any(meta.device.type != "cpu" for meta in metas):
        return None  # there its kernels may add in any order, so it runs once
    given = call.kwargs.get(GENERATOR)
    generator = metas[0].device if given is None else given
    size_bytes = state_bytes(generator)
    if size_bytes is None or sum(program.storages[n].size_bytes for n in filled) <= size_bytes:
        return None
    return _Source(generator, size_bytes)


def _is_there(program: Program, storages: Iterable[int]) -> bool:
    """Whether any is there before the step."""
    return any(program.storages[number].creator < 0 for number in storages)
