"""Schedulers of learning rates that a step steps: a plan steps them after each of its runs."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from roam.errors import CaptureError
from roam.program.effects import StepScheduler
from roam.program.ir import Program, substitute
from roam.state.containers import MappingSpace
from roam.state.equality import same
from roam.state.nests import flattened
from roam.state.optimizer_spaces import SCHEDULER_COUNTERS
from roam.state.references import AttributeReference, EntryReference, RateReference
from roam.torch_compat.patches import SCHEDULERS, replaced
from roam.tracing.recording.recorder import Recorder
from roam.tracing.stand_ins.fake_state import FakeState
from roam.tracing.stand_ins.scheduler_functions import Later

_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""What PyTorch's own schedulers change in a group."""
_MODULES: Final = frozenset({"torch.optim.lr_scheduler", "torch.optim.swa_utils"})
"""Where PyTorch's own schedulers are."""


TWO_WAYS = (
    "the step sets a learning rate itself and steps a scheduler of the same optimizer; do one of "
    "them outside of the step"
)


class _Given:
    """What a `step` was given.

    Args:
        call: its place among the program's calls of schedulers.
    """

    def __init__(self, arguments: Any, call: int) -> None:
        self._arguments = arguments
        self._call = call
        self._leaves, self._spec = flattened(arguments)[:2]

    def is_changed(self, program: Program) -> bool:
        """Whether the step has changed it since then."""
        leaves, spec = flattened(self._arguments)[:2]
        if spec != self._spec or any(map(operator.is_not, leaves, self._leaves)):
            return True
        call, slots = program.of(StepScheduler)[self._call], set[int]()
        substitute(call.arguments, lambda ref: slots.add(ref.slot))
        written = program.written(program.calls[call.position :])
        return not written.isdisjoint(map(program.storage_of, slots))


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
        self._all = AttributeReference(self._own, "_last_lr", f"{path}._last_lr")
        rates = self._own.get("_last_lr")
        self._last: list[Any] = rates if type(rates) is list else []
        self._integers = {name for name in SCHEDULER_COUNTERS if type(self._own.get(name)) is int}
        self._is_stepped = False
        self._last_now: list[Any] | None = None
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._given: list[_Given] = []
        self._later = Later(fake_state, recorder, scheduler)
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
            self._check_given()
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
        self._is_stepped = True
        steps = recorder.program.of(StepScheduler)
        self._given.append(_Given((arguments, keywords), len(steps)))
        recorder.program.effects.append(
            StepScheduler(
                scheduler,
                path,
                recorder.references((arguments, keywords), f"{path}.step()"),
                len(recorder.program.calls),
            )
        )
        for reference in self._rates:
            reference.set(recorder.unknown(f"{reference.path} after {path}.step()", reference))
        self._later.note()

    def _refuse_if_changed(self, name: str) -> None:
        unchanged = _kept_by_step(self._scheduler)
        if (name in self._held or name in ("__dict__", "__getstate__")) and name not in unchanged:
            self._recorder.refuse(
                f"the step reads {self._path}.{name} after {self._path}.step(), which a plan calls when the "
                "step has ended; read it before, or outside of the step",
                code="unknown_number",
            )

    def _check_given(self) -> None:
        """Refuses a step that changes what `step()` was given, which a run gives it at the end, or
        a list of `get_last_lr()`, which is the scheduler's own.
        """
        program = self._recorder.program
        if any(given.is_changed(program) for given in self._given):
            raise CaptureError(
                f"the step changes what it has given to {self._path}.step(), which a plan calls when the step has ended; give it "
                "a clone of a tensor, or a copy of a container",
                code="unknown_number",
            )
        if (path := self._later.changed()) is not None:
            raise CaptureError(
                f"the step changes {path} after {self._path}.step(), which a plan calls when the step has ended, and which may "
                "call a function that reads it; change it before, or outside of the step",
                code="unknown_number",
            )
        if any(
            len(rates) != len(given) or any(map(operator.is_not, rates, given))
            for rates, given in self._lists
        ):
            raise CaptureError(
                f"the step changes the list that {self._path}.get_last_lr() returns, which is the scheduler's own; change a "
                "copy of it (list(x))",
                code="moved",
            )

    def _last_rates(self) -> list[Any]:
        if self._last_now is None:
            recorder, calls = self._recorder, self._recorder.program.of(StepScheduler)
            getter = f"{self._path}.get_last_lr()"
            rates = self._last if not calls else [None] * self._count()
            self._last_now = []
            for place, rate in enumerate(rates):
                reference = EntryReference(self._all, (place,), f"{getter}[{place}]")
                self._last_now.append(
                    recorder.unknown(f"{reference.path} after {calls[-1].path}.step()", reference)
                    if calls
                    else recorder.unknown(reference.path, None)
                    if type(rate) not in (int, float)
                    else self._add(reference, rate)
                )
            self._lists.append((self._last_now, list(self._last_now)))
            recorder.note_late(self._last_now, getter, self._all)
        return self._last_now

    def _count(self) -> int:
        """How many rates there are after a scheduler's `step()`."""
        count = len(self._scheduler.optimizer.param_groups)
        if len(self._last) != count and not (
            self._is_stepped and type(self._scheduler).__module__ in _MODULES
        ):
            self._recorder.refuse(
                f"the step asks for {self._path}.get_last_lr(), which does not have the rates of all groups yet, after a "
                "scheduler's step(); call it outside of the step",
                code="unknown_number",
            )
        return count

    def _counters(self) -> dict[str, Any]:
        """What a trace finds in the place of the counters: numbers that each run reads, until a
        `step` is called, and then such as nobody can know.
        """
        counters: dict[str, Any] = {}
        is_before = not self._recorder.program.of(StepScheduler)
        for name in SCHEDULER_COUNTERS:
            if name not in self._own.holder:
                continue
            if name != "_last_lr":
                place = AttributeReference(self._own, name, f"{self._path}.{name}")
                counters[name] = (
                    self._add(place, self._own.get(name))
                    if is_before and name in self._integers
                    else self._recorder.unknown(
                        f"{self._path}'s own counters", place, is_integer=name in self._integers
                    )
                )
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
