"""Finds the first operator of a step that makes another value by plan than in eager PyTorch.

Both runs are watched, operator by operator, and a digest of every result is kept. A plan runs in an
order of its own, and some calls of its program stand for others (one per parameter for a
multi-tensor kernel), so calls cannot be paired. The operator that is looked for is the first one in
program order that made a value which no operator of the eager step made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from roam.program.ir import Call, Program
from roam.program.operators import UNINITIALIZED
from roam.program.replay import Replay
from roam.torch_compat.private import OpOverload, TorchDispatchMode, disable_current_modes, pytree


@dataclass(frozen=True, slots=True)
class DifferentOperator:
    """An operator that made another value by plan than eagerly.

    Attributes:
        step: the step, counted from 1.
        name: the operator, such as ``aten.mul.Tensor``.
        position: its place in program order.
        source: the user's line, and the module.
    """

    step: int
    name: str
    position: int
    source: str

    def __str__(self) -> str:
        return (
            f"first operator with another result: {self.name}, operator {self.position} of step {self.step}, "
            f"at {self.source}"
        )


@dataclass(slots=True)
class EagerValues:
    """What the operators of an eager step made."""

    digests: set[bytes] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


class _Recording(TorchDispatchMode):
    """Notes every value that an operator makes, and its arguments as they are after it."""

    def __init__(self, values: EagerValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._values.names.add(str(func))
        # Some operators change arguments although their schema does not say so.
        for value in pytree.tree_leaves((result, args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._values.digests.add(digest(value))
        return result


def eager_values(work: Callable[[], object]) -> EagerValues:
    """What the operators of an eager step make while `work` runs it."""
    values = EagerValues()
    with _Recording(values):
        work()
    return values


class PlannedValues:
    """Digests of what the calls of a program made, noted while it runs by a plan."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.digests: dict[int, list[bytes]] = {}

    def slots(self, index: int) -> list[int]:
        """What to note of a call: its results and what it changes."""
        call = self.program.calls[index]
        slots = (*(slot for slot in call.outputs if slot is not None), *call.mutates)
        return [slot for slot in dict.fromkeys(slots) if self.program.slots[slot] is not None]

    def note(self, index: int, values: Iterable[torch.Tensor]) -> None:
        """To be called as soon as a call has run, with the values of `slots`."""
        self.digests[index] = [digest(value) for value in values]


def first_different(
    step: int, program: Program, planned: PlannedValues, eager: EagerValues
) -> DifferentOperator | None:
    """The first call in program order that made a value which the eager step did not make.

    Calls of operators that the eager step ran come before those that stand for others: these may
    make values of their own on the way to the same end.
    """
    found: int | None = None
    for index, call in enumerate(program.calls):
        if not _has_values(call) or eager.digests.issuperset(planned.digests.get(index, ())):
            continue
        if call.name in eager.names:
            found = index
            break
        found = index if found is None else found
    if found is None:
        return None
    call = program.calls[found]
    return DifferentOperator(step, call.name, found, str(call.source))


def _has_values(call: Call) -> bool:
    if isinstance(call.target, Replay):
        return True
    return isinstance(call.target, OpOverload) and call.target.name() not in UNINITIALIZED


_PIECE_BYTES: Final = 1 << 20


def digest(tensor: torch.Tensor) -> bytes:
    """Tells tensors of another dtype, shape or bits of any element apart; strides do not count."""
    with disable_current_modes(), torch.no_grad():
        found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
            for piece in flat.view(torch.uint8).split(_PIECE_BYTES):
                # A tensor that is given to NumPy cannot be resized any more, so it gets a copy.
                found.update(piece.clone().numpy().data)
    return found.digest()
