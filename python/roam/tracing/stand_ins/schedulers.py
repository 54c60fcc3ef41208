"""Schedulers of learning rates that a step steps: a plan steps them after each of its runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from roam.errors import CaptureError
from roam.program.effects import SetPlain, StepScheduler, rebound
from roam.program.ir import Program, refs
from roam.state.containers import MappingSpace
from roam.state.equality import is_numpy_float, same
from roam.state.live_scalars import is_live
from roam.state.nests import level
from roam.state.optimizer_spaces import SCHEDULER_COUNTERS
from roam.state.references import AttributeReference, EntryReference, RateReference
from roam.torch_compat.patches import SCHEDULERS, replaced
from roam.tracing.recording.recorder import Recorder
from roam.tracing.stand_ins.fake_state import FakeState
from roam.tracing.stand_ins.scheduler_functions import changed_for

_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""What PyTorch's own schedulers change in a group."""
_ELSEWHERE: Final = "call it outside of the step, between two calls"


@contextmanager
def called_later(fake_state: FakeState, recorder: Recorder, *, live: bool) -> Iterator[None]:
    """In the block, a scheduler's `step` is only noted: each run calls it at its end, on the real
    optimizer. Until then nobody can know the next rate, and who asks for it is refused.

    Args:
        live: whether numbers are live.
    """
    schedulers = [
        _Scheduler(fake_state, recorder, path, scheduler, live)
        for path, scheduler in fake_state.reach.schedulers
    ]

    def stepped() -> None:
        for one in schedulers:  # it may have stepped others
            one.hide()

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
        self._add = recorder.add_number if live else recorder.add_plain

    @contextmanager
    def replaced(self, stepped: Callable[[], None]) -> Iterator[None]:
        """In the block, its `step` is only noted; `stepped` is called then. Its counters and rates
        are numbers that each run reads.
        """

        def step(*arguments: Any, **keywords: Any) -> None:
            self._note(arguments, keywords)
            stepped()

        own = self._own.holder
        rates = own.get("_last_lr")
        before = list(rates) if type(rates) is list else []
        counters = [name for name in SCHEDULER_COUNTERS if type(own.get(name)) is int]
        replacements = [(self._scheduler, "step", step)] + [
            (self._scheduler, name, self._add(self._place(name), own[name])) for name in counters
        ]
        with replaced(replacements, of=SCHEDULERS):
            found = list(map(self._rate, range(len(before)), before))
            if before:
                rates[:] = found
            held = dict(own)
            try:
                yield
                now = rates if before else []
                if (
                    held.keys() != own.keys()
                    or not all(same(held[key], value) for key, value in own.items())
                    or len(now) != len(found)
                    or any(one is not other for one, other in zip(now, found, strict=True))
                ):
                    raise CaptureError(
                        f"the step changes attributes of {self._path} itself, not by its step(); change them "
                        "outside of the step",
                        code="moved",
                    )
            finally:
                if before:
                    rates[:] = before

    def hide(self) -> None:
        """To be called after the `step` of any scheduler: what it changes cannot be read now."""
        self._reads.ask_before(self._scheduler, self._refuse_if_changed)

    def _place(self, name: str) -> AttributeReference:
        return AttributeReference(self._own, name, f"{self._path}.{name}")

    def _rate(self, place: int, rate: Any) -> Any:
        reference = EntryReference(
            self._place("_last_lr"), (place,), f"{self._path}.get_last_lr()[{place}]"
        )
        if is_live(rate):  # of a scheduler within, which has the same list
            return rate
        if type(rate) in (int, float) or is_numpy_float(rate):
            return self._add(reference, rate)
        return self._recorder.unknown(reference.path)

    def _note(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        recorder, path, scheduler = self._recorder, self._path, self._scheduler
        if any(isinstance(group["lr"], torch.Tensor) for group in scheduler.optimizer.param_groups):
            recorder.refuse(
                f"{path}.step() inside of the step sets a learning rate that is a tensor; {_ELSEWHERE}",
                code="tensor_rate",
            )
        if not all(
            recorder.is_as_given(reference) or recorder.is_unknown(reference.get())
            for reference in self._rates
        ):
            recorder.refuse(
                f"the step sets a learning rate itself before {path}.step(), which a plan calls when the step has ended; "
                f"{_ELSEWHERE}",
                code="unknown_number",
            )
        if not self._reads.is_noted(scheduler) or any(
            level(value) is not None for value in (*arguments, *keywords.values())
        ):
            recorder.refuse(
                f"the step calls {path}.step(), which a plan calls when the step has ended, with a container, or in a way in "
                f"which capture cannot see what the step reads of it; {_ELSEWHERE}",
                code="unknown_number",
            )
        if torch.is_grad_enabled():
            arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
        recorder.program.effects.append(
            StepScheduler(
                scheduler,
                path,
                recorder.references((arguments, keywords), f"{path}.step()"),
                len(recorder.program.calls),
            )
        )
        for reference in self._rates:
            reference.set(recorder.unknown(f"{reference.path} after {path}.step()"))

    def _refuse_if_changed(self, name: str) -> None:
        is_changed = name in self._own.holder or name in ("__dict__", "__getstate__")
        if is_changed and name not in _kept_by_step(self._scheduler):
            self._recorder.refuse(
                f"the step reads {self._path}.{name} after {self._path}.step(), which a plan calls when the "
                "step has ended; read it before, or outside of the step",
                code="unknown_number",
            )


def _kept_by_step(scheduler: Any) -> frozenset[str]:
    """The attributes of a scheduler that the step may read after its `step()`: its optimizer, and
    what the constructors of PyTorch's own schedulers are given, which `step()` leaves as it is.
    """
    kept = {"step", "optimizer"}
    kind = type(scheduler)
    if kind.__module__ == torch.optim.lr_scheduler.__name__:
        kept |= {"base_lrs", *inspect.signature(kind.__init__).parameters}
    return frozenset(kept - set(SCHEDULER_COUNTERS))


def check_schedulers(fake_state: FakeState, program: Program) -> None:
    """To be called when all that a step leaves is recorded: refuses a step that changes what it has
    given to a scheduler's `step()`, what functions of the scheduler may read, or a rate that the
    scheduler sets, since a run calls it at its end.
    """
    for one in program.of(StepScheduler):
        written = program.written(program.calls[one.position :])
        places = [reference for reference, _ in rebound(program)]
        places += [plain.reference for plain in program.of(SetPlain)]
        rates = [place for place in places if isinstance(place, RateReference)]
        changed = next(
            (rate.path for rate in rates if may_change(one.scheduler, rate)),
            "what it has given to it"
            if any(program.storage_of(slot) in written for slot in refs(one.given))
            else changed_for(one.scheduler, fake_state, program),
        )
        if changed is not None:
            raise CaptureError(
                f"the step calls {one.path}.step(), which a plan calls when the step has ended, and changes {changed}; {_ELSEWHERE}",
                code="unknown_number",
            )


def may_change(scheduler: Any, reference: RateReference) -> bool:
    """Whether a scheduler's step may give a number of a group another value."""
    is_own = type(scheduler).__module__ == torch.optim.lr_scheduler.__name__
    group = reference.optimizer.param_groups[reference.group]
    is_scheduled = any(group is scheduled for scheduled in scheduler.optimizer.param_groups)
    return is_scheduled and (reference.key in _SCHEDULED or not is_own)
