"""A script with its plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from roam.runtime.beside.script import Script
from roam.runtime.executor import Executor
from roam.runtime.memory_report import StepMemory
from roam.runtime.pool import Pool
from roam.runtime.strategy import Choice
from roam.torch_compat.private import DisableTorchFunction


@dataclass(slots=True, eq=False)
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

    @contextmanager
    def around(self) -> Iterator[None]:
        """What kernels run in: autograd, autocast and function modes are left to Python."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(DisableTorchFunction())
            for device in self.devices:
                if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield
