"""Schedulers of learning rates that a step steps: a plan steps them after each of its runs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, Final, NoReturn

import torch

from roam.errors import CaptureError
from roam.program.effects import Assemble, Overwrite, Rebind, SetPlain, StepScheduler
from roam.program.ir import Program
from roam.state.equality import attributes_of
from roam.state.library_code import nested_code
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import is_user_code
from roam.tracing.stand_ins.fake_state import FakeState

# What PyTorch's own schedulers set, in a group and of their own.
_SET: Final = frozenset({"lr", "momentum", "betas"})
_COUNTED: Final = frozenset({"last_epoch", "_step_count", "_last_lr"})
_SETTING: Final = (Assemble, Overwrite, Rebind, SetPlain)
_OPERATORS: Final = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs", "float", "int",
    "bool", "str", "repr", "format", "eq", "lt", "le", "gt", "ge", "hash", "getitem", "iter", "len",
)  # fmt: skip


class _Unknown:
    """What refuses all that asks for its value."""

    def __init__(self, recorder: Recorder, message: str) -> None:
        self.recorder, self.message = recorder, message

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        self.recorder.refuse(self.message, code="moved")


for _name in _OPERATORS:
    setattr(_Unknown, f"__{_name}__", _Unknown.refuse)


class SteppedSchedulers:
    """The schedulers that a trace steps."""

    def __init__(self, fake_state: FakeState, recorder: Recorder, *, live: bool) -> None:
        self._schedulers = [scheduler for _, scheduler in fake_state.reach.schedulers]
        self._optimizers = [optimizer for _, optimizer in fake_state.reach.optimizers]
        self._recorder, self._live = recorder, live
        kinds = ", ".join(sorted({type(one).__name__ for one in self._schedulers}))
        self._unknown = _Unknown(
            recorder,
            f"the step calls step() of a {kinds}, which sets other rates at each call, in a way that no plan repeats "
            "after a run; call it outside of the step, between two calls",
        )
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._calls = 0

    def step(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for `step` of a scheduler."""
        optimizer = attributes_of(scheduler).get("optimizer")
        is_known = (
            type(scheduler).__module__ == "torch.optim.lr_scheduler"
            and any(optimizer is one for one in self._optimizers)
            and not any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
        )
        if args or kwargs or not is_known or not self._live:
            self._unknown.refuse()
        program = self._recorder.program
        program.effects.append(StepScheduler(scheduler, len(program.of(StepScheduler))))
        if not self._before:
            self._calls = len(program.calls)
            tables = [(attributes_of(one), _COUNTED) for one in self._schedulers]
            tables += [(one, _SET) for some in self._optimizers for one in some.param_groups]
            for table, names in tables:
                self._before += [(table, name, table[name]) for name in names & table.keys()]
            for table, name, _ in self._before:
                table[name] = self._unknown

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around the user's function: it keeps nothing unknown, and does not fail after `step`."""
        try:
            yield
            is_kept = any(table.get(name) is not self._unknown for table, name, _ in self._before)
        finally:
            for table, name, value in self._before:
                table[name] = value
        if not self._before:
            return
        program, own = self._recorder.program, attributes_of(self)
        others = {*map(id, gc.get_referrers(self._unknown))} - {id(self), id(own)}
        if is_kept or others or any(map(program.may_raise, program.calls[self._calls :])):
            self._unknown.refuse()


def check_schedulers(program: Program) -> None:
    """Refuses a scheduler that is stepped after a run if it may read what the step sets."""
    sets = [*program.result.growing, *(one for kind in _SETTING for one in program.of(kind))]
    if sets and any(_reads(one.scheduler) for one in program.of(StepScheduler)):
        raise CaptureError(
            "a function of a scheduler that the step steps may read what the step sets; call the scheduler's step() "
            "outside of the step, between two calls",
            code="moved",
        )


def _reads(value: Any) -> bool:
    """Whether a scheduler, or one within it, has a function of a user's that reads variables."""
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return any(map(_reads, attributes_of(value).values()))
    if isinstance(value, (list, tuple)):
        return any(map(_reads, value))
    if isinstance(value, functools.partial):
        return _reads(value.func) or any(map(_reads, (*value.args, *value.keywords.values())))
    if not isinstance(value, FunctionType):
        return callable(value) and not isinstance(value, (type, torch.optim.Optimizer))
    if not is_user_code(value.__code__):
        return False
    names = {name for code in nested_code(value.__code__) for name in code.co_names}
    read = [value.__globals__[name] for name in names if name in value.__globals__]
    return bool(value.__closure__) or any(
        not isinstance(one, (type, FunctionType, ModuleType)) for one in read
    )
