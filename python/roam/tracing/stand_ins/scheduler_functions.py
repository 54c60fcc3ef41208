"""Functions of users that schedulers call, as `LambdaLR` does: a run calls them when the step has
ended, so they must not read what the step changes after the scheduler's `step()`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import torch

from roam.state.equality import attributes_of, same
from roam.state.library_code import nested_code
from roam.state.optimizer_spaces import OptimizerSpace
from roam.state.references import AttributeReference
from roam.tracing.compiled.frames import contents_of
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import is_user_code
from roam.tracing.stand_ins.fake_state import FakeState

_ALL: Final = frozenset(
    {"__dict__", "eval", "exec", "getattr", "globals", "locals", "vars", "state_dict"}
)
"""Names by which code may read whatever it reaches."""
_TENSORS: Final = frozenset({"parameters", "named_parameters", "buffers", "named_buffers"})
"""Names by which code may read all tensors of a module."""
_MOST_FUNCTIONS: Final = 1_000


class Later:
    """What the functions of a scheduler may read, by the names in their code."""

    def __init__(self, fake_state: FakeState, recorder: Recorder, scheduler: Any) -> None:
        self._fake_state = fake_state
        self._recorder = recorder
        self._position = 0
        self._names = _names_in(list(_codes_of(scheduler)), fake_state)
        self._is_noted = False
        self._noted: list[tuple[str, Any, Any]] = []

    def note(self) -> None:
        """To be called when the step of the scheduler is noted."""
        if self._names and not self._is_noted:
            self._is_noted = True
            self._position = len(self._recorder.program.calls)
            self._noted = list(self._found())

    def changed(self) -> str | None:
        """The path of what the step has changed since it was first noted, if it has."""
        if not self._is_noted:
            return None
        now = {key: value for _, key, value in self._found()}
        for path, key, value in self._noted:
            new = now.get(key, value)
            if new is not value and not same(new, value):
                return path
        return self._written()

    def _written(self) -> str | None:
        """The path of a tensor that the step has written to since."""
        program = self._recorder.program
        written = program.written(program.calls[self._position :])
        reads_all = not _TENSORS.isdisjoint(self._names)
        for reference in self._fake_state.places:
            slot = self._recorder.slot_of(reference.get())
            is_written = slot is not None and program.storage_of(slot) in written
            if is_written and (reads_all or self._has(_last_word(reference.path))):
                return reference.path
        return None

    def _found(self) -> Iterator[tuple[str, Any, Any]]:
        reach = self._fake_state.reach
        own = {id(attributes_of(scheduler)) for _, scheduler in reach.schedulers}
        for place in reach.places:
            space = place.space
            if isinstance(space, OptimizerSpace) or id(space.holder) in own:
                continue  # what the steps of schedulers themselves change
            is_named = self._has(_last_word(space.path))
            try:
                items = space.items()
            except (AttributeError, RuntimeError, TypeError):  # gone, or changed by another thread
                continue
            for key, value in items:
                if self._has(key) if type(key) is str else is_named:
                    yield space.label(key), (id(space), str(key)), value
        for space, name, _ in reach.overwritten:
            if self._has(name):
                attribute = AttributeReference(space, name, space.label(name))
                yield attribute.path, (id(space), name), attribute.get()

    def _has(self, name: str) -> bool:
        return name in self._names or not _ALL.isdisjoint(self._names)


def _last_word(path: str) -> str:
    words = re.findall(r"\w+", path)
    return words[-1] if words else ""


def _codes_of(scheduler: Any) -> Iterator[CodeType]:
    """The code of the users' functions that a scheduler, or one within it, holds or consists of."""
    waiting, met = [scheduler], dict[int, Any]()
    while waiting and len(met) < _MOST_FUNCTIONS:
        value = waiting.pop()
        if id(value) in met:
            continue
        met[id(value)] = value
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif type(value) is MethodType:
            waiting.append(value.__func__)
        elif type(value) is FunctionType:
            if is_user_code(value.__code__):
                yield value.__code__
                waiting += map(contents_of, value.__closure__ or ())
                waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        elif type(value) in (list, tuple):
            waiting += value
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            waiting += [*attributes_of(value).values(), *_methods_of(type(value))]
        elif callable(value) and not isinstance(value, (type, torch.nn.Module)):
            waiting += _methods_of(type(value))


def _methods_of(kind: type) -> list[Any]:
    found = [value for base in kind.__mro__ for value in vars(base).values()]
    functions = [value.fget if isinstance(value, property) else value for value in found]
    return [value for value in functions if type(value) is FunctionType]


def _names_in(codes: list[CodeType], fake_state: FakeState) -> frozenset[str]:
    """The names in code, and in that of the users' functions that it may call by them."""
    names, waiting, met = set[str](), list(codes), set[CodeType]()
    others = [code for code in fake_state.reach.code if is_user_code(code)]
    while waiting:
        for code in nested_code(waiting.pop()):
            met.add(code)
            texts = (constant for constant in code.co_consts if type(constant) is str)
            names.update(code.co_names, code.co_freevars, texts)
        if not waiting:
            waiting += [
                one for one in others if one not in met and one.co_name in {*names, "<lambda>"}
            ]
    return frozenset(names)


__all__ = ["Later"]
