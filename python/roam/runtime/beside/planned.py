"""A script with its plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch

from roam.errors import ExecutionError
from roam.runtime.beside.script import Script
from roam.runtime.executor import Executor
from roam.runtime.memory_report import StepMemory
from roam.runtime.pool import Pool
from roam.runtime.strategy import Choice
from roam.torch_compat.private import DisableTorchFunction, storage_of, storage_pointer


@dataclass(eq=False)
class Planned:
    """A script with its plan."""

    script: Script
    choice: Choice
    executor: Executor
    memory: StepMemory
    inputs: list[int]
    devices: frozenset[str]
    pool: Pool | None
    outside: dict[int, list[Any]] = field(default_factory=dict)
    """For each slot that comes from outside, what was there last: a weak reference to the tensor,
    the pointer of its storage, the storage, and, from the second call on, a tensor that counts its
    own versions. A batch, which is another one at each call, is not kept."""

    def __post_init__(self) -> None:
        _all.add(self)

    def changed_before(self, error: BaseException) -> list[int]:
        """Slots from outside that kernels have written to, up to the one that has failed."""
        program, order = self.executor.program, self.executor.bindings.order
        failure = self.executor.failure(error)
        slot_of = {program.storage_of(slot): outside.slot for outside, slot in program.referenced}
        done = order if failure is None else order[: failure.step + 1]
        written = (
            program.storage_of(slot) for index in done for slot in program.calls[index].mutates
        )
        return [slot_of[storage] for storage in written if storage in slot_of]

    def failed(self, error: BaseException, *, is_torn: bool) -> ExecutionError:
        """See `kernel_failed`."""
        failure = self.executor.failure(error)
        of = ("", "") if failure is None else (failure.call.name, str(failure.call.source))
        return kernel_failed(error, *of, is_torn=is_torn)


def kernel_failed(
    error: BaseException, operator: str, source: str, *, is_torn: bool
) -> ExecutionError:
    """What to raise where a kernel has failed. Python is further on than in eager PyTorch, so
    nothing else runs of the call.
    """
    where = f"{operator} at {source}: " if operator else ""
    after = (
        "some state has been updated, and the rest has not"
        if is_torn
        else "no state has been updated"
    )
    return ExecutionError(
        f"{where}a kernel failed: {error}. The step's own code has gone on to where it asked for a value, or went another "
        f"way than its plan, or to its end; {after}",
        code="torn" if is_torn else "failed",
        operator=operator,
        source=source,
    )


@contextmanager
def kernels_alone(devices: Iterable[str]) -> Iterator[None]:
    """What kernels run in: autograd, autocast and function modes are left to Python."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(DisableTorchFunction())
        for device in devices:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


_all: WeakSet[Planned] = WeakSet()


def let_go_of_old_data() -> None:
    """Lets plans keep no memory of tensors that have got other data since the plans' last calls."""
    for planned in list(_all):  # another thread may plan meanwhile
        for last in planned.outside.values():
            tensor = last[0]()
            if tensor is None or storage_pointer(storage_of(tensor)) != last[1]:
                last[3] = None
