"""One step whose Python runs beside its plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from roam.capture.step import Variant
from roam.capture.tracing.source_location import Frames
from roam.errors import CaptureError, ExecutionError
from roam.kernels.table import is_proven
from roam.runtime.beside.looks import looking
from roam.runtime.beside.matched import Matched
from roam.runtime.beside.recording import Recorder, Recording
from roam.runtime.beside.script import Place, Script, changed_numbers, script_of
from roam.runtime.executor import Executor
from roam.runtime.log import logger
from roam.runtime.memory_report import StepMemory
from roam.runtime.pool import Pool
from roam.runtime.strategy import Choice, Options, choose
from roam.torch_compat.private import DisableTorchFunction

_MOST_RECORDED = 8
"""After so many recordings in a row of which no plan has come a step runs as it is."""


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


class Beside:
    """Runs a user's function, whose operators are recorded, planned and matched.

    Args:
        function: the user's function.
        name: the name of its graphs.
        options: how plans are made.
        may_leave: whether a call may leave its plan.
    """

    def __init__(self, function: Callable[..., Any], name: str, options: Options, *, may_leave: bool) -> None:
        self._function, self._name, self._options = function, name, options
        self._may_leave = may_leave
        self._recorded: dict[Hashable, tuple[Recording, set[Place], list[frozenset[int]]]] = {}
        self._planned: dict[Hashable, Planned] = {}
        self._in_vain = 0
        self.last: Planned | None = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> Any:
        """One call; `key` says of which kind its arguments are."""
        planned = self._planned.get(key)
        if planned is None:
            return self._record(args, kwargs, key)
        return self._match(planned, args, kwargs, key)

    def _record(self, args: Any, kwargs: Any, key: Hashable) -> Any:
        frames = Frames({}, {})
        frames.root = sys._getframe().f_code
        recorder = Recorder(frames)
        with looking(recorder), recorder:
            result = self._function(*args, **kwargs)
        recording = recorder.end()
        if recording.failed is not None:
            raise recording.failed
        alive = [*(entry.alive for entry in recording.entries), recording.alive]
        known = self._recorded.get(key)
        changed = None if known is None else changed_numbers(known[0], recording)
        if known is None or changed is None:
            self._in_vain += 1
            self._recorded[key] = recording, set(), alive
            return result
        places = known[1] | changed
        alive = [one | other for one, other in zip(alive, known[2], strict=True)]
        self._recorded[key] = recording, places, alive
        self._planned[key] = self._plan(script_of(recording, alive, places))
        return result

    def _plan(self, script: Script) -> Planned:
        program = script.program
        variant = Variant(program, self._name, as_written=program)
        (choice,) = choose(
            [variant], pool=self._options.pool, time_limit_s=self._options.time_limit_s, memory=self._options.memory
        )
        pool = Pool.of(variant.device) if choice.uses_pool else None
        executor = Executor(
            choice.program,
            choice.placed,
            choice.plan,
            pool=pool,
            poison=self._options.poison,
            proven=is_proven(variant.device.type),
        )
        slot_of = {slot: outside.slot for outside, slot in choice.program.referenced}
        inputs = [slot_of[slot] for slot in executor.bindings.input_slots()]
        devices = frozenset(meta.device.type for meta in program.slots if meta is not None)
        logger.info("%s: %s", self._name, choice)
        return Planned(script, choice, executor, StepMemory.planned(choice), inputs, devices, pool)

    def _match(self, planned: Planned, args: Any, kwargs: Any, key: Hashable) -> Any:
        with planned.executor.held():
            matched = Matched(
                planned.script, planned.executor, planned.inputs, {}, planned.around, self._may_leave
            )
            try:
                with looking(matched), matched:
                    result = self._function(*args, **kwargs)
            except BaseException as error:
                matched.leave(f"it raised {type(error).__name__}")
                matched.release()
                raise
            matched.finish()
            matched.release()
        if matched.left:
            logger.warning("%s has left its plan: %s", self._name, matched.left)
            del self._planned[key]
        else:
            self.last = planned
        return result
