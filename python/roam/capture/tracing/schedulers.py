"""Schedulers of learning rates that a step steps: a plan steps them after each of its runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roam.capture.tracing.fake_state import FakeState
from roam.capture.tracing.recorder import Recorder
from roam.errors import CaptureError
from roam.program.ir import HostCall
from roam.state.equality import same
from roam.state.optimizer_spaces import SCHEDULER_COUNTERS
from roam.state.references import (
    RateReference,
)
from roam.torch_compat.patches import SCHEDULERS, replaced

_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""What PyTorch's own schedulers change in a group."""


TWO_WAYS = (
    "the step sets a learning rate itself and steps a scheduler of the same optimizer; do one of "
    "them outside of the step"
)


@contextmanager
def called_later(
    fake_state: FakeState, recorder: Recorder, path: str, scheduler: Any
) -> Iterator[None]:
    """A scheduler's `step` inside the user's step is run for real after each run, on the real
    optimizer.

    Until then nobody can know the next rate, so whoever asks for it is refused.
    """
    rates = [reference for reference in fake_state.rates if may_change(scheduler, reference)]

    def step(*arguments: Any, **keywords: Any) -> None:
        if any(isinstance(group["lr"], torch.Tensor) for group in scheduler.optimizer.param_groups):
            recorder.refuse(
                f"{path}.step() inside of the step sets a learning rate that is a tensor; call it outside of the step",
                code="tensor_rate",
            )
        if not all(
            recorder.is_as_given(reference) or recorder.is_unknown(reference.get())
            for reference in rates
        ):
            recorder.refuse(TWO_WAYS, code="unknown_number")
        if torch.is_grad_enabled() and any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in arguments
        ):
            arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
        recorder.program.after.append(
            HostCall(
                scheduler,
                path,
                recorder.references((arguments, keywords), f"{path}.step()"),
                len(recorder.program.calls),
            )
        )
        for reference in rates:
            reference.set(recorder.unknown(f"{reference.path} after {path}.step()"))
        fake_state.reach.reads.ask_before(scheduler, refuse_if_changed)

    unchanged = _kept_by_step(scheduler)

    def refuse_if_changed(name: str) -> None:
        if (name in held or name in ("__dict__", "__getstate__")) and name not in unchanged:
            recorder.refuse(
                f"the step reads {path}.{name} after {path}.step(), which a plan calls when the "
                "step has ended; read it before, or outside of the step",
                code="unknown_number",
            )

    def last_rates() -> list[Any]:
        return [reference.get() for reference in rates if reference.key == "lr"]

    held: dict[str, Any] = {}
    unknown = recorder.unknown(f"{path}'s own counters")
    names = [name for name in SCHEDULER_COUNTERS if name in vars(scheduler)]
    replacements = [(scheduler, "step", step), (scheduler, "get_last_lr", last_rates)]
    with replaced([*replacements, *((scheduler, name, unknown) for name in names)], of=SCHEDULERS):
        held |= object.__getattribute__(scheduler, "__dict__")
        yield
        now = object.__getattribute__(scheduler, "__dict__")
        if held.keys() != now.keys() or any(
            not same(held[key], value) for key, value in now.items()
        ):
            raise CaptureError(
                f"the step changes attributes of {path} itself, not by its step(); change them "
                "outside of the step",
                code="moved",
            )


def _kept_by_step(scheduler: Any) -> frozenset[str]:
    """The attributes of a scheduler that the step may read after its `step()`: the counters and
    methods, of which a trace gives the step something else, its optimizer, and what the
    constructors of PyTorch's own schedulers are given, which `step()` leaves as it is.
    """
    kept = {*SCHEDULER_COUNTERS, "step", "get_last_lr", "optimizer"}
    kind = type(scheduler)
    if kind.__module__ == torch.optim.lr_scheduler.__name__:
        kept |= {"base_lrs", *inspect.signature(kind.__init__).parameters}
    return frozenset(kept)


def may_change(scheduler: Any, reference: RateReference) -> bool:
    """Whether a scheduler's step may give a number of a group another value."""
    is_own = type(scheduler).__module__ == torch.optim.lr_scheduler.__name__
    group = reference.optimizer.param_groups[reference.group]
    is_scheduled = any(group is scheduled for scheduled in scheduler.optimizer.param_groups)
    return is_scheduled and (reference.key in _SCHEDULED or not is_own)
