"""Schedulers of learning rates that a step steps: a plan steps them after each of its runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from roam.capture.tracing.fake_state import FakeState
from roam.capture.tracing.recorder import Recorder
from roam.errors import CaptureError
from roam.program.ir import HostCall
from roam.state.containers import MappingSpace
from roam.state.equality import same
from roam.state.optimizer_spaces import SCHEDULER_COUNTERS
from roam.state.references import AttributeReference, EntryReference, RateReference
from roam.torch_compat.patches import SCHEDULERS, replaced

_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""What PyTorch's own schedulers change in a group."""


TWO_WAYS = (
    "the step sets a learning rate itself and steps a scheduler of the same optimizer; do one of "
    "them outside of the step"
)


@contextmanager
def called_later(fake_state: FakeState, recorder: Recorder, *, live: bool) -> Iterator[None]:
    """A scheduler's `step` inside the user's step is run for real after each run, on the real
    optimizer.

    Until then nobody can know the next rate. The step may return it, and whoever else asks for it
    is refused.

    Args:
        live: whether numbers are live.
    """
    schedulers = [
        _Scheduler(fake_state, recorder, path, scheduler, live)
        for path, scheduler in fake_state.reach.schedulers
    ]

    def stepped() -> None:
        for one in schedulers:  # it may have stepped others
            one.renew()

    with ExitStack() as stack:
        for one in schedulers:
            stack.enter_context(one.replaced(stepped))
        yield


class _Scheduler:
    """A scheduler in a trace."""

    def __init__(
        self, fake_state: FakeState, recorder: Recorder, path: str, scheduler: Any, live: bool
    ) -> None:
        self._recorder = recorder
        self._reads = fake_state.reach.reads
        self._path = path
        self._scheduler = scheduler
        self._rates = [one for one in fake_state.rates if may_change(scheduler, one)]
        self._own = MappingSpace(object.__getattribute__(scheduler, "__dict__"), path)
        self._has_own_getter = (
            getattr(type(scheduler), "get_last_lr", None)
            is not torch.optim.lr_scheduler.LRScheduler.get_last_lr
        )
        self._add = recorder.add_number if live else recorder.add_plain
        rates = self._own.get("_last_lr")
        self._last = [
            (EntryReference(AttributeReference(self._own, "_last_lr", f"{path}._last_lr"), (place,), f"{path}.get_last_lr()[{place}]"), rate)
            for place, rate in enumerate(rates if type(rates) is list else ())
        ]  # fmt: skip
        self._last_now: list[Any] | None = None
        self._held: dict[str, Any] = {}

    @contextmanager
    def replaced(self, stepped: Callable[[], None]) -> Iterator[None]:
        """In the block, its `step` is only noted; `stepped` is called then."""

        def step(*arguments: Any, **keywords: Any) -> None:
            self._note(arguments, keywords)
            stepped()
            self._reads.ask_before(self._scheduler, self._refuse_if_changed)

        scheduler = self._scheduler
        replacements: list[tuple[Any, str, Any]] = [(scheduler, "step", step)]
        if not self._has_own_getter:
            replacements.append((scheduler, "get_last_lr", self._last_rates))
        replacements += [(scheduler, name, number) for name, number in self._counters().items()]
        with replaced(replacements, of=SCHEDULERS):
            self._held |= self._own.holder
            yield
            now = self._own.holder
            if self._held.keys() != now.keys() or any(
                not same(self._held[key], value) for key, value in now.items()
            ):
                raise CaptureError(
                    f"the step changes attributes of {self._path} itself, not by its step(); change them "
                    "outside of the step",
                    code="moved",
                )

    def renew(self) -> None:
        """To be called after the `step` of any scheduler."""
        self._last_now = None
        counters = self._counters()
        self._held.update(counters)
        self._own.holder.update(counters)

    def _note(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        recorder, path, scheduler = self._recorder, self._path, self._scheduler
        if any(isinstance(group["lr"], torch.Tensor) for group in scheduler.optimizer.param_groups):
            recorder.refuse(
                f"{path}.step() inside of the step sets a learning rate that is a tensor; call it outside of the step",
                code="tensor_rate",
            )
        if not all(
            recorder.is_as_given(reference) or recorder.is_unknown(reference.get())
            for reference in self._rates
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
        for reference in self._rates:
            reference.set(recorder.unknown(f"{reference.path} after {path}.step()", reference))

    def _refuse_if_changed(self, name: str) -> None:
        unchanged = _kept_by_step(self._scheduler)
        if (name in self._held or name in ("__dict__", "__getstate__")) and name not in unchanged:
            self._recorder.refuse(
                f"the step reads {self._path}.{name} after {self._path}.step(), which a plan calls when the "
                "step has ended; read it before, or outside of the step",
                code="unknown_number",
            )

    def _last_rates(self) -> list[Any]:
        if self._last_now is None:
            calls = self._recorder.program.after
            self._last_now = [
                self._recorder.unknown(f"{reference.path} after {calls[-1].path}.step()", reference)
                if calls
                else self._recorder.unknown(reference.path, None)
                if type(rate) not in (int, float)
                else self._add(reference, rate)
                for reference, rate in self._last
            ]
        return list(self._last_now)

    def _counters(self) -> dict[str, Any]:
        """What a trace finds in the place of the counters."""
        counters: dict[str, Any] = {}
        for name in SCHEDULER_COUNTERS:
            if name not in self._own.holder:
                continue
            if name != "_last_lr":
                place = AttributeReference(self._own, name, f"{self._path}.{name}")
                counters[name] = self._recorder.unknown(f"{self._path}'s own counters", place)
            elif self._has_own_getter:
                counters[name] = self._last_rates()
            else:
                counters[name] = self._recorder.unknown(f"{self._path}'s own counters", None)
        return counters


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
