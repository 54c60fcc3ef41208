"""Lets a dispatch mode see what `DistributedDataParallel` does, whose hooks are in C++ and read
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch

from roam.distributed.collectives import Launch
from roam.distributed.ddp import buckets_of, unsupported
from roam.errors import CaptureError
from roam.state.autograd_hooks import in_group
from roam.torch_compat.patches import replaced
from roam.torch_compat.private import engine
from roam.tracing.distributed.ddp import Reductions


class Watching(Protocol):
    """Sees the operators of a step."""

    def unseen(self, what: str, code: str) -> None:
        """Python is about to do what cannot be followed.

        Raises:
            CaptureError, ExecutionError: it ends here.
        """

    def unsettled(self, failed: CaptureError) -> None:
        """Nothing of this call is to be repeated; a later one may be."""


class _Reduced:
    """Reduces gradients by operators. The step does not wait before its backward pass has ended."""

    def __init__(self, watching: Watching) -> None:
        self._watching = watching
        self._working: list[Any] = []

    def refuse(self, message: str, *, code: str) -> NoReturn:
        self._watching.unseen(message, code)
        raise AssertionError("what cannot be followed raises")

    def add_collective(self, target: Launch, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        work = target.start(outputs, inputs)
        if target.kind == "allreduce_":
            self._working.append(work)
        else:  # buffers, which the forward pass reads
            work.wait()

    def running(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A backward pass that returns when all gradients are reduced."""

        def waits(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            while self._working:
                self._working.pop(0).wait()
            return result

        return waits


@contextmanager
def reducing(watching: Watching) -> Iterator[None]:
    """In the block, modules reduce gradients and send buffers by operators that modes see."""
    if not in_group():
        yield
        return
    reduced = _Reduced(watching)
    reductions = Reductions(reduced, lambda _: True)
    original: Callable[..., Any] = torch.nn.parallel.DistributedDataParallel.forward

    def forward(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
        is_first = unsupported(ddp) is None and torch.is_grad_enabled() and buckets_of(ddp) is None
        if not is_first:
            return reductions.forward(ddp, *inputs, **kwargs)
        # Only this backward pass decides in which buckets all later ones reduce gradients.
        failed = CaptureError("the first step of a DistributedDataParallel", code="ddp_first_step")
        failed.settles = 1
        watching.unsettled(failed)
        return original(ddp, *inputs, **kwargs)

    with replaced(
        [
            (torch.nn.parallel.DistributedDataParallel, "forward", forward),
            (torch.autograd, "_engine_run_backward", reductions.engine(reduced.running(engine()))),
        ]
    ):
        yield
    reductions.check()
