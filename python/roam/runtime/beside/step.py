"""One step whose Python runs beside its plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Final

import torch

from roam.errors import CaptureError, ExecutionError, PlanError
from roam.kernels.table import is_proven
from roam.memory_limit import MemoryLimit
from roam.own_code import is_own_file
from roam.program.replay import cpu_state
from roam.runtime.available import known_limit
from roam.runtime.beside.lazy import Lazy
from roam.runtime.beside.looks import failures_seen, looking
from roam.runtime.beside.matched import Matched
from roam.runtime.beside.placeholders import UNREAD, WeakStorage, is_possible, is_unread
from roam.runtime.beside.planned import Planned, let_go_of_old_data
from roam.runtime.beside.ranks import reducing
from roam.runtime.beside.recording import Recorder, Recording, is_plain
from roam.runtime.beside.script import Place, Script, changed_numbers, script_of
from roam.runtime.executor import Executor
from roam.runtime.log import logger, replans
from roam.runtime.memory_profiler import measure_peak
from roam.runtime.memory_report import StepMemory
from roam.runtime.pool import Pool
from roam.runtime.strategy import Effort, Options, choose
from roam.state.discovery import reach_of
from roam.state.global_flags import kernel_switches
from roam.state.global_state import AMBIENT
from roam.torch_compat.private import (
    dispatch_modes,
    storage_of,
    storage_pointer,
    version_of,
)
from roam.tracing.fake_kernels.cache import Remembered
from roam.tracing.source_location import Frames, calls_seen
from roam.tracing.step import Variant

PYTHONS_OWN = frozenset((
    "moved", "value_reached_python", "unstable", "unsettled", "result", "file", "iterator",
    "pickled", "tensor_attribute", "container_attribute", "wrapped_place", "owner_removed", "data_dependent",
    "optimizer_state", "scaler", "live_power", "reach", "thread",
    "trainer_log", "varied_argument", "parameter_replaced", "outer_history", "identity", "optimizer",
    "optimizer_form", "nested_state", "generator_state", "rate", "argument_gradient",
    "collective", "collective_branch", "inplace_view",
))  # fmt: skip
"""Codes of refusals that are due to what a step does in Python, which a plan cannot repeat."""
_HOST_S = 20e-6
"""What an operator takes beside its kernel."""
_MOST_RECORDED = 8
"""After so many recordings in a row, with no call by plan between them, no more are made."""


@dataclass(slots=True, eq=False)
class _Way:
    """One way that calls go, as far as recordings have shown."""

    recording: Recording
    alive: list[frozenset[int]]
    numbers: set[Place] = field(default_factory=set)
    planned: Planned | None = None
    is_to_be_planned: bool = False
    has_run: bool = False
    """Whether a call has gone this way by its plan."""


@dataclass(slots=True)
class _Calls:
    """Calls with arguments of one kind. The way that calls went last is the first."""

    ways: list[_Way] = field(default_factory=list)
    in_vain: int = 0
    """How many recordings there have been since the last call by plan."""

    def prefer(self, way: _Way) -> None:
        """Makes a way the first."""
        self.ways.remove(way)
        self.ways.insert(0, way)


_ASKED_OF_GENERATORS: Final = ("get_state", "set_state", "manual_seed", "seed", "initial_seed")


@contextmanager
def _generators_watched(recorder: Recorder) -> Iterator[None]:
    """Fails a recording in which a method of PyTorch's default generator is called by other code
    than PyTorch's functions, which `looking` tells of: nothing shows it in later calls.
    """
    generator = torch.default_generator

    def see(frame: FrameType, event: str, arg: Any) -> None:
        if (
            event == "c_call"
            and getattr(arg, "__self__", None) is generator
            and arg.__name__ in _ASKED_OF_GENERATORS
            and frame.f_globals.get("__name__") != torch.random.__name__
            and not is_own_file(frame.f_code.co_filename)
        ):
            recorder.fail(
                f"it calls torch.default_generator.{arg.__name__}, which shows nowhere later; call torch.get_rng_state, "
                "torch.set_rng_state or torch.manual_seed, or pass a generator of your own to what draws",
                "generator_state",
            )

    with calls_seen(see):
        yield


def _around(key: Hashable) -> Hashable:
    """The kind of a call, by its arguments' and by what is around it."""
    return key, kernel_switches(), tuple(read() for _, read in AMBIENT)


def _refuse_unread(error: BaseException) -> None:
    """Says what is behind an error of PyTorch's."""
    if type(error) is RuntimeError and is_unread(error):
        raise ExecutionError(UNREAD, code="unread") from error


class Beside:
    """Runs a user's function beside plans, which are made of recordings of real calls.

    Args:
        function: the user's function.
        name: the name of its graphs.
        options: how plans are made.
        on_change: as for `roam.compile`.
        most: for how many kinds of calls plans are kept.
        refusal: why a plan alone cannot repeat the function; None if it is not known.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: Options,
        on_change: str,
        most: int,
        refusal: CaptureError | None = None,
    ) -> None:
        if not is_possible():
            raise ExecutionError(
                "Python runs beside a plan with PyTorch 2.15 or newer; leave python= out",
                code="beside",
            )
        self._function, self._name, self._options = function, name, options
        self._on_change, self._most, self._why = on_change, most, refusal
        self._calls: dict[Hashable, _Calls] = {}
        self._is_told = False
        self._refusal: Exception | None = None
        self._torn: list[tuple[Any, int]] = []
        self.last: Planned | None = None
        self._remembered = Remembered()
        self._left: dict[int, WeakStorage] = {}
        """What the last call that was recorded used or made, by the pointers of storages."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> Any:
        """One call; `key` says of which kind its arguments are."""
        if any(isinstance(mode, (Recorder, Matched)) for mode in dispatch_modes()):
            # A part of another step, which sees its operators.
            return self._function(*args, **kwargs)
        key = _around(key)
        if any(version_of(tensor) == version for tensor, version in self._torn):
            raise ExecutionError(
                "an earlier step failed half-way; load the model's and the optimizer's state again first",
                code="torn",
            )
        self._torn = []
        if self._refusal is not None:
            raise self._refusal
        calls = self._calls.pop(key, None)
        if calls is None:
            if self._on_change == "raise" and self.plans:
                raise ExecutionError(
                    "no plan fits this call, and on_change='raise' makes no other; call the step with arguments like "
                    "those of the first calls, or leave on_change= out",
                    code="no_plan_fits",
                )
            calls = _Calls()
        self._calls[key] = calls  # the last one
        if len(self._calls) > self._most:
            del self._calls[next(iter(self._calls))]
        for way in calls.ways:
            if way.is_to_be_planned:  # before the call, so that nothing has run if there is no plan
                way.planned = self._plan(
                    script_of(
                        way.recording,
                        way.alive,
                        way.numbers,
                        holds_all=self._options.memory is None,
                    ),
                    self._options.memory,
                )
                way.is_to_be_planned = False
        planned = calls.ways[0].planned if calls.ways else None
        if planned is None:
            if self._on_change == "eager" and self.plans and not calls.ways:
                return self._function(*args, **kwargs)
            return self._record(args, kwargs, calls)
        return self._match(planned, args, kwargs, calls)

    def planned(self, key: Hashable) -> Planned | None:
        """By what a call with arguments of this kind runs, unless it goes another way."""
        calls = self._calls.get(_around(key))
        return calls.ways[0].planned if calls and calls.ways else None

    @property
    def plans(self) -> list[Planned]:
        """All plans."""
        return [
            way.planned
            for calls in self._calls.values()
            for way in calls.ways
            if way.planned is not None
        ]

    def measured(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> Any:
        """As `run`; `last.memory` then tells what the call took, if it ran by a plan."""
        planned = self.planned(key)
        if planned is None:
            return self.run(args, kwargs, key)
        with planned.executor.held():
            held_bytes = 0 if planned.pool is None else planned.pool.nbytes
        device = next((one for one in planned.devices if one != "cpu"), "cpu")
        trace = measure_peak(lambda: self.run(args, kwargs, key), device=device)
        planned.memory = replace(
            planned.memory,
            measured_bytes=planned.memory.persistent_bytes + held_bytes + trace.peak_bytes,
        )
        return trace.value

    def release(self) -> None:
        """Frees the pools."""
        for planned in self.plans:
            if planned.pool is not None:
                planned.pool.release()

    # -- recordings

    def _record(self, args: Any, kwargs: Any, calls: _Calls) -> Any:
        frames = Frames({}, {})
        frames.root = sys._getframe().f_code
        # A step that has plans runs as it is in a call that can have none.
        stops = not self.plans
        recorder = self._lazy(frames, args, kwargs, stops=stops)
        drawn = cpu_state()
        try:
            with ExitStack() as watching:
                watching.enter_context(_generators_watched(recorder))
                watching.enter_context(looking(recorder))
                if self._options.memory is not None:
                    watching.enter_context(failures_seen(recorder))
                watching.enter_context(reducing(recorder))
                watching.enter_context(recorder)
                result = self._function(*args, **kwargs)
            recorder.finish()
        except Exception as error:
            if recorder.stopped is None:
                if error is not recorder.failure:
                    recorder.raised(error)
                    _refuse_unread(error)
                raise
        finally:
            recorder.release()
            self._torn = recorder.torn
        if recorder.stopped is not None:  # also where the step's own code has caught it
            torch.default_generator.set_state(torch.frombuffer(bytearray(drawn), dtype=torch.uint8))
            raise self._refused(recorder.stopped) from None
        self._recorded(recorder, calls)
        return result

    def _recorded(self, recorder: Lazy, calls: _Calls) -> None:
        """Takes note of a call that has been recorded."""
        recording = recorder.end()
        if recorder.has_assigned:
            let_go_of_old_data()
        self.last = recorder.planned or self.last
        self._left = recorder.left()
        if recording.failed is None:
            self._learn(recording, calls, recorder.planned)
        elif recording.failed.settles:
            logger.info("%s runs as it is: %s", self._name, recording.failed)
        elif not self.plans:
            self._refusal = self._refused(recording.failed)  # of later calls: this one has run
        else:
            calls.in_vain += 1
            replans.info("%s runs as it is in a call: %s", self._name, recording.failed)

    def _lazy(self, frames: Frames, args: Any, kwargs: Any, *, stops: bool) -> Lazy:
        """What records a call, and plans what it does if there is a limit."""

        def persistent() -> dict[int, WeakStorage]:
            try:
                slots = reach_of(self._function, args, kwargs).slots
            except CaptureError:  # what it reaches cannot be guarded, which is not wanted here
                slots = []
            storages = (
                storage_of(slot.tensor)
                for slot in slots
                if slot.kind in ("parameter", "buffer", "group", "state") and is_plain(slot.tensor)
            )
            found = {storage_pointer(storage): WeakStorage(storage) for storage in storages}
            return {**self._left, **found}

        plan = None if self._options.memory is None else self._segment
        return Lazy(frames, plan, self._remembered, persistent, stops=stops)

    def _refused(self, failed: CaptureError) -> CaptureError:
        """What says why the step can run neither by a plan alone nor beside one."""
        if self._why is None:
            return failed
        refusal = copy(self._why)
        refusal.args = (f"{refusal}. Nor can its Python run beside a plan: {failed}",)
        return refusal

    def _learn(self, recording: Recording, calls: _Calls, planned: Planned | None) -> None:
        """Takes note of what a call has done, and of the plan that all of it has run by."""
        calls.in_vain += 1
        alive = [*(entry.alive for entry in recording.entries), recording.alive]
        for way in calls.ways:
            changed = changed_numbers(way.recording, recording)
            if changed is None:
                continue
            numbers = way.numbers | changed
            held = [one | other for one, other in zip(alive, way.alive, strict=True)]
            if planned is not None and held == alive and numbers <= planned.script.live.keys():
                way.planned, numbers = planned, set(planned.script.live)
                way.numbers, way.alive = numbers, held
            is_new = way.planned is None or numbers != way.numbers or held != way.alive
            if is_new:
                way.numbers, way.alive, way.is_to_be_planned = numbers, held, True
            calls.prefer(way)
            return
        way = _Way(
            recording, alive, set() if planned is None else set(planned.script.live), planned
        )
        is_usual = bool(calls.ways) and calls.ways[0].has_run
        calls.ways.insert(int(is_usual), way)
        unplanned = [one for one in calls.ways if one.planned is None and not one.is_to_be_planned]
        for one in unplanned[_MOST_RECORDED:]:
            calls.ways.remove(one)
        if calls.in_vain >= _MOST_RECORDED:
            usual = next((one for one in calls.ways if one.planned is not None), None)
            if calls.in_vain == _MOST_RECORDED:
                logger.warning(
                    "%s did something else in each of the last %d calls, so that none runs by a plan; its own function "
                    "runs, as it is",
                    self._name, calls.in_vain,
                )  # fmt: skip
            if usual is not None:
                calls.prefer(usual)

    def _segment(
        self,
        script: Script,
        other_bytes: int,
        so_far: Callable[[], Script] | None,
        *,
        is_last: bool,
    ) -> Planned:
        """See `lazy.Plan`."""
        given = limit = self._options.memory
        assert given is not None, "only then calls run in segments"
        assert limit is not None
        variant = Variant(script.program, self._name, as_written=script.program)
        if given.share is not None and so_far is not None:
            program = so_far().program
            (plain,) = choose(
                [Variant(program, self._name, as_written=program)],
                pool=self._options.pool,
                time_limit_s=self._options.time_limit_s,
            )
            limit = MemoryLimit(int(given.share * (plain.total_bytes + plain.checks_bytes)))
        elif given.is_auto:
            held_bytes = variant.graph.persistent_bytes + other_bytes
            limit = known_limit(given, variant.device, held_bytes)
        if limit.size_bytes is not None:
            limit = MemoryLimit(max(limit.size_bytes - other_bytes, 1))
        try:
            return self._plan(script, limit, is_last=is_last)
        except PlanError as error:
            if given.share is None or not is_last or error.least_bytes is None:
                raise
            # What the share is of is not known before the call is whole.
            return self._plan(script, MemoryLimit(error.least_bytes))

    def _plan(self, script: Script, limit: MemoryLimit | None, *, is_last: bool = True) -> Planned:
        """A plan of a script. Tiles are tried, for which the limit has no room, if nothing else is
        found and `is_last`.
        """
        program = script.program
        variant = Variant(program, self._name, as_written=program)
        options = self._options
        efforts: tuple[Effort, ...] = ("runs", "all") if is_last else ("runs",)
        for effort in efforts if limit is not None else efforts[-1:]:
            try:
                (choice,) = choose(
                    [variant],
                    pool=options.pool,
                    time_limit_s=options.time_limit_s,
                    earlier=[planned.choice for planned in self.plans],
                    memory=limit,
                    keep_checkpoints=True,
                    effort=effort,
                )
                break
            except PlanError as error:
                if effort is efforts[-1] or not error.code.startswith("memory_"):
                    raise
        pool = Pool.of(variant.device) if choice.uses_pool else None
        shrinks = None
        memory = StepMemory.planned(choice)
        if choice.memory_limit_bytes is not None:
            spare_bytes = choice.memory_limit_bytes - choice.checks_bytes - choice.total_bytes
            shrinks = Pool.of(variant.device), memory.pool_bytes + max(spare_bytes, 0)
        executor = Executor(
            choice.program,
            choice.placed,
            choice.plan,
            pool=pool,
            poison=options.poison,
            proven=is_proven(variant.device.type),
            shrinks=shrinks,
        )
        slot_of = {slot: outside.slot for outside, slot in choice.program.referenced}
        inputs = [slot_of[slot] for slot in executor.bindings.input_slots()]
        devices = frozenset(meta.device.type for meta in program.slots if meta is not None)
        count = sum(entry.kind != "settle" for entry in script.entries)
        logger.info(
            "%s: %s. Its own Python runs beside the plan at each call, which takes about %.1f ms for %d operators",
            self._name, choice, count * _HOST_S * 1e3, count,
        )  # fmt: skip
        return Planned(script, choice, executor, memory, inputs, devices, pool)

    # -- calls by plan

    def _match(self, planned: Planned, args: Any, kwargs: Any, calls: _Calls) -> Any:
        others = [way.planned for way in calls.ways if way.planned is not None]
        frames = Frames({}, {})
        frames.root = sys._getframe().f_code
        matched: Any = None
        try:
            with ExitStack() as watching, ExitStack() as held:

                def enter(one: Planned | None) -> None:
                    held.close()
                    if one is not None:
                        held.enter_context(one.executor.held())

                def lazy() -> Lazy:
                    one = self._lazy(frames, args, kwargs, stops=False)
                    watching.enter_context(_generators_watched(one))
                    return one

                enter(planned)
                matched = Matched(planned, others, enter, lazy)
                matched.may_leave = self._on_change != "raise"
                is_first = not all(way.has_run for way in calls.ways if way.planned is not None)
                try:
                    with (
                        looking(matched),
                        failures_seen(matched) if is_first else nullcontext(),
                        reducing(matched),
                        matched,
                    ):
                        result = self._function(*args, **kwargs)
                    matched.finish()
                except BaseException as error:
                    if error is matched.failure or (
                        matched.lazy is not None and error is matched.lazy.failure
                    ):
                        raise
                    matched.raised(error)
                    _refuse_unread(error)
                    raise
                finally:
                    matched.release()
        finally:
            self._torn = [] if matched is None else matched.torn
        if matched.left:
            self._tell_left(matched.left)
            if self._on_change == "replan":
                self._recorded(matched.lazy, calls)
        else:
            self.last, calls.in_vain = matched.planned, 0
            way = next(way for way in calls.ways if way.planned is matched.planned)
            way.has_run = True
            calls.prefer(way)
        return result

    def _tell_left(self, why: str) -> None:
        tell = replans.info if self._is_told else logger.warning
        self._is_told = True
        goes_on = "runs as it is from there" if self._options.memory is None else "is planned anew"
        tell("%s goes another way than its plan, and %s: %s", self._name, goes_on, why)
