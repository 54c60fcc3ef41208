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
from roam.state.equality import attributes_of, is_plain
from roam.state.library_code import nested_code
from roam.state.references import AttributeReference, EntryReference, PlaceReference, root_of
from roam.tracing.compiled.frames import contents_of
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import is_user_code
from roam.tracing.stand_ins.fake_state import FakeState

# What no scheduler of PyTorch's sets, in a group or of its own; packages that no step changes.
_LEFT: Final = frozenset({"params", "optimizer"})
_PURE: Final = frozenset({"math", "numpy", "torch"})
_SETTING: Final[tuple[type[Any], ...]] = (Assemble, Overwrite, Rebind, SetPlain)
_OF_VARIABLES: Final = (AttributeReference, EntryReference, PlaceReference)
_ASKED: Final = {  # methods by which a value is asked for, or changed
    *(name for kind in (int, float, list, dict) for name in vars(kind)),
    *("__getattr__", "__call__", "__str__", "__copy__", "__deepcopy__", "__reduce_ex__"),
} - {"__new__", "__init__", "__getattribute__", "__doc__", "__class_getitem__"}


class _Unknown:
    """What refuses all that asks for its value."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        self.recorder.refuse(
            "the step calls step() of a scheduler, which sets other rates at each call, in a way that no plan repeats after "
            "a run; call it outside of the step, between two calls",
            code="moved",
        )


_Unknown.__name__ = "rate or counter that a scheduler's step() sets"  # for who returns one
for _name in _ASKED:
    setattr(_Unknown, _name, _Unknown.refuse)


class SteppedSchedulers:
    """The schedulers that a trace steps."""

    def __init__(self, fake_state: FakeState, recorder: Recorder, *, live: bool) -> None:
        self._schedulers = [scheduler for _, scheduler in fake_state.reach.schedulers]
        self._optimizers = [optimizer for _, optimizer in fake_state.reach.optimizers]
        self._recorder, self._live, self._unknown = recorder, live, _Unknown(recorder)
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._calls = 0

    def step(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for `step` of a scheduler."""
        optimizer = attributes_of(scheduler).get("optimizer")
        is_known = (
            type(scheduler).__module__ == "torch.optim.lr_scheduler"
            and any(optimizer is one for one in self._optimizers)
            and not any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
            and all(map(is_plain, _read_by(scheduler, set())))
        )
        if args or kwargs or not is_known or not self._live:
            self._unknown.refuse()
        program = self._recorder.program
        program.effects.append(StepScheduler(scheduler, len(program.of(StepScheduler))))
        if not self._before:
            self._calls = len(program.calls)
            groups = [group for one in self._optimizers for group in one.param_groups]
            for table in (*map(attributes_of, self._schedulers), *groups):
                self._before += [(table, name, table[name]) for name in table.keys() - _LEFT]
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
        program = self._recorder.program
        later = map(program.may_raise, program.calls[self._calls :])
        if self._before and (is_kept or len(gc.get_referrers(self._unknown)) > 1 or any(later)):
            self._unknown.refuse()


def check_schedulers(program: Program) -> None:
    """Refuses a scheduler that is stepped after a run if it may read what the step sets."""
    setting: list[Any] = [one for kind in _SETTING for one in program.of(kind)]
    sets = any(isinstance(root_of(one.reference), _OF_VARIABLES) for one in setting)
    if sets and any([*_read_by(one.scheduler, set())] for one in program.of(StepScheduler)):
        raise CaptureError(
            "a function of a scheduler that the step steps may read what the step sets; call the scheduler's step() "
            "outside of the step, between two calls",
            code="moved",
        )


def _read_by(value: Any, seen: set[int]) -> Iterator[Any]:
    """What users' functions that a scheduler holds, or one within it, read of variables."""
    kind, held = type(value), list[Any]()  # an instance may have noted who asks for its class
    if id(value) in seen or issubclass(kind, (type, torch.optim.Optimizer)):
        return
    seen.add(id(value))
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        held = list(attributes_of(value).values())
    elif issubclass(kind, (list, tuple)):
        held = list(value)
    elif kind is functools.partial:
        held = [value.func, *value.args, *value.keywords.values()]
    elif kind is FunctionType and is_user_code(value.__code__):
        names = {name for code in nested_code(value.__code__) for name in code.co_names}
        read = [value.__globals__[name] for name in names if name in value.__globals__]
        read += map(contents_of, value.__closure__ or ())
        held = [*read, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        yield from (one for one in read if type(one) not in (FunctionType, ModuleType))
    elif kind is ModuleType:
        yield from () if value.__name__.partition(".")[0] in _PURE else (value,)
    elif kind is not FunctionType and callable(value):
        yield value
    for one in held:
        yield from _read_by(one, seen)
