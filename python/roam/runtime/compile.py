"""`roam.compile`: the user's training step, run by its plan."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from roam import Plan
from roam.capture.answers import Answers, Seen, watching
from roam.capture.arguments import Taker
from roam.capture.checks import CheckFailed
from roam.capture.generators import watched
from roam.capture.history import VIEW, Histories
from roam.capture.owners import ArgumentOwner, GradientOwner, RateOwner, ScalerOwner, Skeleton, StateOwner
from roam.capture.step import CapturedStep, Known, Variant, capture_step
from roam.capture.trace import is_tracing
from roam.capture.values import MISSING, same, show
from roam.errors import CaptureError, ExecutionError
from roam.garbage import collections_wait
from roam.interrupts import interrupts_wait
from roam.kernels.table import is_proven
from roam.program import Call, Program, TensorMeta
from roam.runtime.captures import BUCKETS, MANY, Captured, Captures, call_key
from roam.runtime.choose import MAX_PLANS, Choice, Options, choose, is_disabled
from roam.runtime.culprit import PlannedValues
from roam.runtime.execute import Executor, Failure
from roam.runtime.lanes import CudaLanes
from roam.runtime.measure import MemoryTrace, measure_peak
from roam.runtime.memory import KeptPlan, KeptPlans, StepMemory, host_bytes
from roam.runtime.pool import Pool
from roam.runtime.timings import Timings

logger = logging.getLogger("roam")
_MOST_SEEN = 256
"""Runs of the user's function of which it is kept what they saw."""
_MANY_IN_VAIN = 8

OnChange = Literal["replan", "raise", "eager"]
_MOST_SETTLING = 8
"""Calls in a row that may set something up, each for another mode or shape."""


def compile(
    train_step: Callable[..., Any],
    *,
    on_change: OnChange = "replan",
    keep_grads: bool = False,
    time_limit_s: float | None = None,
    pool: bool | None = None,
    poison: bool = False,
    streams: int = 1,
    max_plans: int = MAX_PLANS,
) -> Step:
    """A training step that runs by its plan, with the same signature and, bit for bit, the same results.

    The first call captures and plans, and runs one real step like every later call. Parameters, buffers and optimizer
    state are updated in place in the user's own objects, so checkpoints, schedulers and evaluation work as ever.

    Args:
        train_step: the user's function: forward, backward and optimizer.
        on_change: what to do with a call that no plan fits (another batch shape, `model.eval()`, another dropout):
            ``"replan"`` captures and plans anew, ``"raise"`` raises `ExecutionError`, ``"eager"`` runs the user's
            function itself. The first call and the change from the first step to the steady one are no such calls.
        keep_grads: keep `.grad` after the step as eager PyTorch does. By default gradients from which an optimizer has updated
            their parameters die early, and `.grad` is None after the step.
        time_limit_s: limit for planning, in seconds.
        pool: whether planned tensors lie in one static pool per device, allocated before step 1 (see `Step.release`), or come
            from PyTorch's allocator, in the plan's order and with its reuse. None: the pool, unless it takes over 2 % more.
        poison: overwrite each range of the pool as soon as its tensor is dead, to find out what reads it later. Slow.
        max_plans: for how many kinds of calls plans are kept: shapes of the batch, training or evaluation, values that are no
            tensors. Beyond that the least recently used ones are dropped, and made anew when they are needed again. `Step.kept`
            tells what each costs.
        streams: on CUDA, how many streams may run operators side by side. More take more memory, but never more than eager.

    Raises:
        CaptureError: at a call, where the step cannot be captured exactly.
        ExecutionError: at a call that no plan fits (``on_change="raise"``), or where running failed.

    The environment variable ``ROAM_DISABLE=1`` makes every call run the user's function.
    """
    if on_change not in ("replan", "raise", "eager"):
        raise ValueError(f"on_change is 'replan', 'raise' or 'eager', not {on_change!r}")
    if streams > 1 and (pool is False or poison):
        raise ValueError("a plan for several streams needs the pool, which poison cannot watch")
    if max_plans < 1:
        raise ValueError(f"max_plans is at least 1, not {max_plans}")
    options = Options(time_limit_s=time_limit_s, pool=pool, poison=poison, streams=streams)
    return Step(train_step, on_change=on_change, keep_grads=keep_grads, options=options, max_plans=max_plans)


class Step:
    """What `compile` returns. Call it like the user's function."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        *,
        on_change: OnChange = "replan",
        keep_grads: bool = False,
        options: Options = Options(),  # noqa: B008 - it cannot change
        max_plans: int = MAX_PLANS,
    ) -> None:
        functools.update_wrapper(self, train_step)
        self._train_step = train_step
        self._on_change: OnChange = on_change
        self._keep_grads = keep_grads
        self._options = options
        self._captures: Captures[Runner] = Captures(max_plans)
        self._known = Known()
        self._last: Runner | None = None
        self._timings: Timings | None = None
        self._torn: list[tuple[Any, Any, int]] = []
        self._torn_reason = ""
        self._seen: OrderedDict[tuple[Any, ...], Seen] = OrderedDict()
        """What runs of the user's function saw, by the kind of call and the first answers to its branches."""
        self._shown: Seen | None = None
        self._in_vain = 0
        """How many calls in a row no plan had the answers of."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner = self._runner(args, kwargs)
        return self._own(args, kwargs) if runner is None else self._run(runner, args, kwargs)

    def _runner(self, args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[bool, ...] = ()) -> Runner | None:
        """What runs this call, whose first answers to branches are `known`; None where the user's function itself does."""
        if is_disabled() or is_tracing():
            return None
        self._refuse_torn()
        found = self._captures.find(args, kwargs, self._known.taker, known)
        if isinstance(found, str):
            if known and self._on_change != "replan":
                return None
            if len(self._captures) and self._on_change == "eager":
                logger.info("no plan fits this call, so it runs eagerly: %s", found)
                return None
            if len(self._captures) and self._on_change == "raise":
                raise ExecutionError(f"no plan fits this call: {found}", code="no_plan_fits")
            self._known.taker = self._known.taker.learning(args, kwargs)
            capture = self._capture_seen(args, kwargs, found, known)
            if capture is None:
                return None
            found = capture
        captured, self._last = found
        for setting in captured.step.settings:
            setting.apply()  # as the user's function would now
        return self._last

    def _capture_seen(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str, known: tuple[bool, ...]
    ) -> tuple[Captured[Runner], Runner] | None:
        """A capture for the answers that a run has seen; None where one has to be watched first, or plans are for enough of them."""
        seen = self._seen.get((self._key(args, kwargs), known), self._shown)
        if known and (seen is None or len(self._captures) >= self._captures.most):
            return None
        answers = Answers(known, seen)
        try:
            captured = self._capture(args, kwargs, reason, answers, may_guess=seen is not None)
        except Unseen:
            logger.info("the step branches on values, so its own function runs, watched; the next call is captured")
            return None
        except CaptureError as refusal:
            if answers.guessed and seen is None:  # the way that it would not have gone
                return None
            if not refusal.settles or self._known.settling == _MOST_SETTLING:
                raise
            self._known.settling += 1
            logger.info("%s. The step's own function runs, and the next call is captured", refusal)
            return None
        self._known.settling = 0
        return captured

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, ...]:
        """What calls for one plan have in common."""
        return call_key(args, kwargs, self._known.taker)

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[bool, ...] = ()) -> Any:
        """The user's function itself, watched by a step that is to be captured when its answers have been seen."""
        is_captured_once = self._on_change != "replan" and len(self._captures) > 0
        if is_disabled() or is_tracing() or is_captured_once:
            return self._train_step(*args, **kwargs)
        key, seen = (self._key(args, kwargs), known), Seen()
        with watching(seen):
            result = self._train_step(*args, **kwargs)
        self._seen[key] = seen
        self._seen.move_to_end(key)
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return result

    def _run(self, runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call by a plan; where its answers are other ones, by a plan for these, or by the user's function."""
        if runner.plan.estimate:
            raise ExecutionError(f"this plan is an estimate and cannot be run: {runner.plan.estimate}", code="estimate")
        other: Runner | None = runner
        known: tuple[bool, ...] = ()
        while other is not None:
            try:
                result = self._run_once(other, args, kwargs)
                self._in_vain = 0
                return result
            except Declined as declined:
                if not declined.answers:
                    logger.warning("%s; the step's own function runs in the plan's place", declined)
                    return self._train_step(*args, **kwargs)
                logger.info("%s", declined)
                known = declined.answers
            other = self._runner(args, kwargs, known)
        self._in_vain += 1
        if self._in_vain == _MANY_IN_VAIN:
            logger.warning(
                "no plan had the answers that the last %d calls gave to branches on values (docs/guards.md), so the step's own function "
                "ran: use torch.where there, or ROAM_DISABLE=1",
                self._in_vain,
            )
        return self._own(args, kwargs, known)

    def _run_once(self, runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            timings = self._timings
            if timings is None or timings.first_run.count:
                return runner.run(args, kwargs)
            timings.first_run.count = 1
            with timings.running(timings.first_run):
                result = runner.run(args, kwargs)
            logger.info("%s: ready after %s", runner.name, timings)
            return result
        except Torn as torn:
            self._torn = torn.owners
            self._torn_reason = str(torn.error)
            raise torn.error from torn.error.__cause__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A compiled method, bound like any other."""
        return self if instance is None else MethodType(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan by which this call would run; nothing of it is run.

        Kernels that may take memory for themselves are tried on zeros, once in a process. The plan's `total_bytes` is the memory that the step will take, known before step 1.
        Of a step that branches on values which no run has shown yet, it is a plan for conditions that do not hold.
        """
        found = self._captures.find(args, kwargs, self._known.taker)
        if isinstance(found, str):
            seen = self._seen.get((self._key(args, kwargs), ()))
            found = self._capture(args, kwargs, found, Answers(seen=seen))
        return found[1].plan

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function."""
        return self._train_step

    def anew(self, train_step: Callable[..., Any] | None = None) -> Step:
        """A step with the same options that has no plans yet, of the same function or another."""
        function = train_step or self._train_step
        return Step(
            function,
            on_change=self._on_change,
            keep_grads=self._keep_grads,
            options=self._options,
            max_plans=self._captures.most,
        )

    def show(self, seen: Seen) -> None:
        """Has captures go the way of a run that was watched, where the step has seen none of its own."""
        self._shown = seen

    def watched(self, *args: Any, **kwargs: Any) -> tuple[Program, PlannedValues]:
        """Runs one step as ever, and tells what each call of its program made.

        Raises:
            ExecutionError: no plan fits the call, and ``on_change`` is ``"eager"`` or ``"raise"``.
        """
        runner = self._runner(args, kwargs)
        if runner is None:
            raise ExecutionError("no plan runs this call", code="no_plan_fits")
        with runner.watched() as values:
            self._run(runner, args, kwargs)
        return values.program, values

    @property
    def plans(self) -> list[tuple[str, Plan]]:
        """Every plan made so far, with the name of its graph; the most recently used capture first."""
        return [(runner.name, runner.plan) for captured in self._captures for runner in captured.runners]

    @property
    def timings(self) -> Timings | None:
        """Where the time of the call went that was captured last; None before the first call."""
        return self._timings

    def kept(self) -> KeptPlans:
        """What the plans that are kept cost, each with the arguments that it is for."""
        seen: set[int] = set()
        plans = []
        for captured in self._captures:
            memory = captured.runners[-1].memory
            size = sum(host_bytes(runner.held(), seen) for runner in captured.runners)
            plans.append(
                KeptPlan(
                    str(captured.step.arguments), captured.reason, captured.seconds, memory.total_bytes, memory.pool_bytes, size
                )
            )  # fmt: skip
        return KeptPlans(tuple(plans), self._captures.most)

    def memory(self) -> StepMemory:
        """What the most recent call that had a plan takes of memory, by that plan and as far as it was measured.

        Raises:
            ExecutionError: before the first call.
        """
        if self._last is None:
            raise ExecutionError("no call has been run by a plan yet, so none has memory to tell of", code="no_call")
        runners = [captured.runners for captured in self._captures if self._last in captured.runners]
        totals = [runner.memory.total_bytes for runner in (runners[0] if runners else [self._last])]
        return replace(self._last.memory, run_bytes=max(totals))

    def measured(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step as ever, measures its memory for `memory`, and returns its result.

        See docs/measurement.md for what is counted. A call that no plan runs is not measured.
        """
        runner = self._runner(args, kwargs)
        if runner is None:
            return self._own(args, kwargs)
        return runner.measured(lambda: self._run(runner, args, kwargs))

    def measured_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        """As `measured`, but runs the user's own function: a real step too, with the same results, for comparison."""
        runner = self._runner(args, kwargs)
        if runner is None:
            return self._own(args, kwargs)
        return runner.measured_eagerly(lambda: self._train_step(*args, **kwargs))

    def release(self) -> None:
        """Gives the pools of this step's plans back to the allocator, for evaluation or sampling; the next call allocates them again.

        All compiled steps of a process share one pool per device.
        """
        for captured in self._captures:
            for runner in captured.runners:
                runner.release()

    def _capture(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: str,
        answers: Answers,
        *,
        may_guess: bool = True,
    ) -> tuple[Captured[Runner], Runner]:
        """Captures and plans.

        Raises:
            Unseen: where an answer had to be guessed and may not; then nothing is planned.
        """
        timings, traces = Timings(), self._known.traces
        self._timings = timings
        with collections_wait():
            with timings.running(timings.capture):
                step = capture_step(
                    self._train_step,
                    args,
                    kwargs,
                    keep_grads=self._keep_grads,
                    known=self._known,
                    asks_kernels=True,
                    answers=answers,
                )
            if answers.guessed and not may_guess:
                raise Unseen
            timings.capture.count = self._known.traces - traces
            runners = self._planned(step, timings, is_real=not _has_fakes(step, args, kwargs))
        captured = Captured(step, runners, self._key(args, kwargs), reason, timings.total_s)
        dropped = self._captures.add(captured)
        logger.info(
            "%s: captured and planned in %.2f s for %s, since %s; %d of at most %d plans kept",
            runners[-1].name, timings.total_s, step.arguments, reason, len(self._captures), self._captures.most,
        )  # fmt: skip
        if dropped is not None and (self._captures.dropped - 1) % self._captures.most == 0:
            logger.warning(
                "this step has plans for %d kinds of calls and the least recently used is dropped for another: %s. %s",
                self._captures.most, reason, self._captures.advice(),
            )  # fmt: skip
        if self._captures.repeats(captured):
            logger.warning("%s: %d plans were made for one reason: %s. %s", runners[-1].name, MANY, reason, BUCKETS)
        for runner in captured.runners:
            if (runner.state_failure() or runner.answer_failure(args, kwargs)) is None:
                return captured, runner
        raise ExecutionError(
            f"no plan fits the state that it was captured from: {captured.runners[-1].state_failure()}",
            code="no_plan_fits",
        )

    def _planned(self, step: CapturedStep, timings: Timings, *, is_real: bool) -> list[Runner]:
        """What runs the first step, if there is one, and the later ones."""
        earlier = [runner.choice for captured in self._captures for runner in captured.runners]
        runners: list[Runner] = []
        for variant in filter(None, (step.steady, step.first)):
            # The process has to have room for later steps anyway, and so a first one is not searched below that.
            enough_bytes = runners[0].plan.total_bytes if runners else 0
            runner = Runner(
                variant,
                self._options,
                timings,
                taker=step.arguments.taker,
                is_real=is_real,
                earlier=earlier,
                enough_bytes=enough_bytes,
            )
            runners.insert(0, runner)
        return runners

    def _refuse_torn(self) -> None:
        """After a step that failed half-way nothing runs until what it had written to is loaded again."""
        waiting = [
            owner.path for owner, tensor, version in self._torn if owner.get() is tensor and tensor._version == version
        ]
        if waiting:
            raise ExecutionError(
                f"an earlier step failed half-way ({self._torn_reason}); load {_listed(waiting)} again first",
                code="torn",
            )
        self._torn = []


class Torn(Exception):
    """A run failed after it had written to the user's tensors."""

    def __init__(self, error: ExecutionError, owners: list[tuple[Any, Any, int]]) -> None:
        super().__init__(str(error))
        self.error = error
        self.owners = owners


class Declined(Exception):
    """A check in the step's code does not pass. All is as it was before the run.

    `answers`: the first ones that the step's code gets at branches; none where it is no branch.
    """

    def __init__(self, message: str, answers: tuple[bool, ...] = ()) -> None:
        super().__init__(message)
        self.answers = answers


class Unseen(Exception):
    """A step branches on values that no run has shown yet."""


class Runner:
    """Runs one variant of a captured step by its plan."""

    def __init__(
        self,
        variant: Variant,
        options: Options,
        timings: Timings,
        *,
        taker: Taker,
        is_real: bool = True,
        earlier: Sequence[Choice] = (),
        enough_bytes: int = 0,
    ) -> None:
        if options.streams > 1 and variant.device.type != "cuda":
            raise ExecutionError(f"streams are CUDA's, and the step runs on {variant.device.type}", code="streams")
        self.name = variant.name
        self._taker = taker
        choice = self.choice = choose(
            variant,
            pool=options.pool,
            time_limit_s=options.time_limit_s,
            streams=options.streams,
            is_real=is_real,
            earlier=earlier,
            enough_bytes=enough_bytes,
            timings=timings,
        )
        program = self._program = choice.program
        self.plan = choice.plan
        self.memory = StepMemory.planned(choice)
        logger.info("%s: %s", self.name, choice)
        self._device = variant.device
        self._pool = Pool.of(variant.device) if choice.uses_pool else None
        lanes = None
        if len(set(self.plan.streams.tolist())) > 1:
            lanes = CudaLanes(variant.device, options.streams, len(self.plan.syncs))
        self._executor = Executor(
            program,
            choice.placed,
            self.plan,
            pool=self._pool,
            lanes=lanes,
            poison=options.poison,
            proven=is_proven(variant.device.type),
        )
        self._owners = [owner for owner, _ in program.owned]
        # Gradients that a run uses up are kept until it is done: it may fail, and be tried again.
        used = {owner.path for owner in self._owners}
        self._consumed = [owner for owner in program.dropped if owner.path in used or isinstance(owner, ArgumentOwner)]
        self._ignored = [owner for owner in program.dropped if owner not in self._consumed]
        places = {slot: place for place, (_, slot) in enumerate(program.owned)}
        self._historic = [
            (place, program.historic[owner.path])
            for place, (owner, _) in enumerate(program.rebinds)
            if owner.path in program.historic
        ]
        histories = [*program.histories, *program.historic.values()]
        self._sources = {
            owner.path: owner for history in histories if history != "leaf" and history != "none" for owner in history
        }
        self._flags = [(places[slot], flag) for slot, flag in program.flags]
        self._detached = [places[slot] for slot in program.detached]
        self._has_checks = any(call.is_check for call in program.calls)
        self._answers = program.answers
        self._live_state = [
            (owner, _expected(program.slots[slot]))
            for owner, slot in program.owned
            if isinstance(owner, (StateOwner, ScalerOwner, GradientOwner)) and program.slots[slot] is not None
        ]
        self._sharing = _pattern([program.slots[slot].storage for _, slot in program.owned if program.slots[slot]])  # type: ignore[union-attr]
        self._generators = list(_generators(program))
        self._draws = any(call.random for call in program.calls)
        self._devices = {meta.device.type for meta in program.slots if meta is not None}

    def state_failure(self) -> str | None:
        """None where optimizer state and gradients are as this variant finds them, else what is not."""
        for owner, expected in self._live_state:
            tensor = owner.get()
            if tensor is MISSING:
                return f"{owner.path} does not exist yet"
            if (tensor.shape, tensor.dtype, tensor.device, tensor.stride()) != expected:
                return f"{owner.path} has another shape, dtype, device or strides than before"
        for owner in self._program.absent:
            if owner.get() is not MISSING:
                return f"{owner.path} exists already"
        for owner, comparison, constants, answer in self._program.decisions:
            number = owner.get()
            if not isinstance(number, (float, int)) or bool(comparison(number, *constants)) is not answer:
                return f"{owner.path} is {show(number)} now, with which the step does something else"
        for owner, value in self._program.plain_before:
            if not same(value, owner.get()):
                return f"{owner.path} changed from {show(value)} to {show(owner.get())}"
        return None

    def branch_failure(self, known: tuple[bool, ...]) -> str | None:
        """None where this variant may be for a call whose first answers to branches are known."""
        return None if self._answers[: len(known)] == known else "a branch on a value goes another way"

    def answer_failure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """None where numbers and the arguments' values decide as they did at capture, else which question has another answer."""
        if not self._program.questions:
            return None
        leaves = self._taker.take(args, kwargs).leaves

        with self._kernels_alone():
            for question, answer in self._program.questions:
                if question.has_other_answer(answer, lambda owner: _found(owner, leaves)):
                    return f"{question.source} asks about values that change, and the answer is another one"
        return None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        program = self._program
        leaves = self._taker.take(args, kwargs).leaves
        inputs = [_found(owner, leaves) for owner in self._owners]
        self._check_inputs(inputs)
        flagged = [(inputs[place], flag) for place, flag in self._flags]
        sources = {path: _found(owner, leaves) for path, owner in self._sources.items()}
        detached = [inputs[place] for place in self._detached]
        inputs += [tensor for tensor, _ in program.constants]
        kept = [(owner, owner.get()) for owner in self._ignored] if self._has_checks else []
        self._drop_ignored()
        # Not as tensors: those would count as memory of the step.
        drawn = [generator.get_state().numpy().tobytes() for generator in self._generators]
        with interrupts_wait():
            with self._undisturbed(), self._executor.held(), self._kernels_alone():
                try:
                    run = self._executor.run_checked if self._executor.text is None else self._executor.run
                    result, rebinds, after, skips = run(inputs)
                except Exception as error:
                    failure = self._failed(error, drawn)
                    for owner, gradient in kept if isinstance(failure, Declined) else ():
                        owner.set(None if gradient is MISSING else gradient)
                    if failure is error:
                        raise
                    raise failure from error
                histories = Histories(sources)
                for place, history in self._historic:
                    rebinds[place] = histories.of(rebinds[place], history)
                result = histories.all(result, program.histories)
                self._leave(leaves, rebinds, _skipped(program, skips))
                for owner, layout in program.reshaped:
                    leaves[owner.index].as_strided_(*layout)
                for tensor, flag in flagged:
                    tensor.requires_grad_(flag)
                for tensor in detached:
                    tensor.detach_()
            for host_call, (arguments, keywords) in zip(program.after, after, strict=True):
                host_call.scheduler.step(*arguments, **keywords)
        return pytree.tree_unflatten(result, program.result[1])

    def _undisturbed(self) -> AbstractContextManager[Any]:
        """Around a run: others neither draw random numbers nor watch who does, where this run does either."""
        return watched if self._draws or self._executor.text is None else nullcontext()

    def _leave(self, leaves: list[Any], rebinds: list[Any], skipped: set[int]) -> None:
        """Puts where they belong what outlives the step, but for the state of optimizers that were skipped."""
        program = self._program
        for owner in self._consumed:
            if isinstance(owner, ArgumentOwner):
                owner.put(leaves, None)
            else:
                owner.set(None)
        new = [owner for owner in program.overwritten if owner.get() is MISSING]
        for owner, value in program.plain_state:
            owner.set(value.build() if isinstance(value, Skeleton) else value)
        for (owner, _), value in zip(program.rebinds, rebinds, strict=True):
            if isinstance(owner, ArgumentOwner):
                owner.put(leaves, value)
            elif not isinstance(owner, StateOwner) or id(owner.optimizer) not in skipped:
                owner.set(value)
        for owner in (*program.state_order, *new):
            owner.put_last()
        for optimizer in program.stepped:
            if id(optimizer) not in skipped:
                optimizer._opt_called = True  # what a scheduler looks for

    @contextmanager
    def watched(self) -> Iterator[PlannedValues]:
        """In the block, runs note what each call made."""
        values = PlannedValues(self._program)
        self._executor.watch(values)
        try:
            yield values
        finally:
            self._executor.watch(None)

    def measured(self, work: Callable[[], Any]) -> Any:
        """The result of a run by the plan; `memory` then tells what it took."""
        # What a run does before anything else, and what outlasts it, is not its own.
        self._drop_ignored()
        with self._executor.held():
            held_bytes = 0 if self._pool is None else self._pool.nbytes
        trace = measure_peak(work, device=self._device.type)
        known_bytes = max(self._entering_bytes() - (trace.unseen_freed_bytes or 0), 0)
        self.memory = replace(
            self.memory,
            measured_bytes=self.memory.persistent_bytes + held_bytes + known_bytes + trace.peak_bytes,
            workspace_bytes=_workspace(trace),
        )
        return trace.value

    def measured_eagerly(self, work: Callable[[], Any]) -> Any:
        """The result of an eager run of the same step; `memory` then tells what it took."""
        # Gradients that the last step left are no part of the plan, and eager PyTorch keeps them until the step drops them.
        left = [owner.get() for owner in self._ignored]
        left_bytes = sum(gradient.untyped_storage().nbytes() for gradient in left if gradient is not MISSING)
        left_bytes += self._entering_bytes()
        del left
        trace = measure_peak(work, device=self._device.type)
        known_bytes = max(left_bytes - (trace.unseen_freed_bytes or 0), 0)
        self.memory = replace(
            self.memory,
            eager_measured_bytes=self.memory.persistent_bytes + known_bytes + trace.peak_bytes,
            eager_workspace_bytes=_workspace(trace),
        )
        return trace.value

    def _entering_bytes(self) -> int:
        """Memory from before the step that dies in it, since its tensors are given other data."""
        return sum(self._program.storages[number].size_bytes for number in self._program.entering)

    def _drop_ignored(self) -> None:
        for owner in self._ignored:
            owner.parameter.get().grad = None

    def held(self) -> list[Any]:
        """The largest of the Python objects that it is made of."""
        bindings, text = self._executor.bindings, self._executor.text
        held = [self._program, self.choice.placed, bindings.order, bindings.dying, bindings.offsets, bindings.views]
        return held if text is None else [*held, text.source, text.steps]

    def release(self) -> None:
        """Gives the pool back until the next run."""
        if self._pool is not None:
            self._pool.release()

    def _check_inputs(self, inputs: list[Any]) -> None:
        """The last look before anything is changed."""
        storages = []
        for owner, value in zip(self._owners, inputs, strict=True):
            if isinstance(value, torch.Tensor):
                storages.append(value.untyped_storage()._cdata)
            elif isinstance(owner, RateOwner) and (type(value) is bool or not isinstance(value, (float, int))):
                raise ExecutionError(f"{owner.path} is a {type(value).__name__}, not a float", code="rate")
        for place in self._detached:
            if inputs[place]._is_view():
                raise ExecutionError(f"{self._owners[place].path} {VIEW}", code="failed")
        if _pattern(storages) != self._sharing:
            raise ExecutionError("tensors of the step share memory in another way than at capture", code="sharing")

    @contextmanager
    def _kernels_alone(self) -> Iterator[None]:
        """The program holds its own backward pass and its own casts: autograd, autocast and function modes stay out."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch._C.DisableTorchFunction())  # modes around the call have been recorded
            for device in self._devices:
                if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _failed(self, error: Exception, drawn: list[bytes]) -> Exception:
        """What to raise for an error of a run."""
        failure = self._executor.failure(error)
        if failure is None:
            return error
        changed = self._executor.changed_before(failure)
        if isinstance(error, CheckFailed):
            restored = self._restored_by(failure.call)
            changed = [path for path in changed if path not in restored]
        where = f"{failure.call.name} at {failure.call.source}"
        if not changed:
            for generator, state in zip(self._generators, drawn, strict=True):
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            if failure.call.is_branch:
                place = sum(call.is_branch for call in self._program.calls[: self._number(failure)])
                answers = (*self._answers[:place], not self._answers[place])
                return Declined(f"a branch at {failure.call.source} goes the other way than the plan", answers)
            if failure.call.is_check:
                return Declined(f"a check at {failure.call.source} does not pass")
            left = self._executor.bindings.order[failure.step + 1 :]
            if any(self._program.calls[index].is_branch for index in left):  # maybe on a way that the step does not go
                return Declined(f"{where} failed: {error}")
            if isinstance(error, ExecutionError):
                return error
            return ExecutionError(
                f"{where} failed: {error}. Nothing had been updated yet", code="failed", operator=failure.call.name,
                source=str(failure.call.source),
            )  # fmt: skip
        owners = [
            (owner, owner.get())
            for owner in self._owners
            if owner.path in set(changed) and not isinstance(owner, ArgumentOwner)
        ]
        torn = ExecutionError(
            f"{where} failed: {error}. Already updated, perhaps in part: {_listed(changed)}",
            code="torn", operator=failure.call.name, source=str(failure.call.source),
        )  # fmt: skip
        torn.__cause__ = error
        return Torn(torn, [(owner, tensor, tensor._version) for owner, tensor in owners])

    def _number(self, failure: Failure) -> int:
        """The number of the call that a run stopped at."""
        return self._executor.bindings.order[failure.step]

    def _restored_by(self, call: Call) -> set[str]:
        """Paths of what a check has put back."""
        program = self._program
        copies = call.args[2] if len(call.args) > 2 else ()
        storages = {program.storage_of(original.slot) for original, _ in copies}
        return {owner.path for owner, slot in program.owned if program.storage_of(slot) in storages}


def _found(owner: Any, leaves: list[Any]) -> Any:
    """What an owner holds at a call with these flattened arguments."""
    return owner.find(leaves) if isinstance(owner, ArgumentOwner) else owner.get()


def _skipped(program: Program, numbers: list[Any]) -> set[int]:
    """Identities of the optimizers of which every step was left out."""
    steps = [(id(optimizer), number) for (optimizer, _), number in zip(program.skippable, numbers, strict=True)]
    return {optimizer for optimizer, _ in steps} - {optimizer for optimizer, number in steps if not number}


def _generators(program: Program) -> Iterator[torch.Generator]:
    """PyTorch's own random generator, and those that calls are given."""
    given = {id(value): value for call in program.calls for value in (*call.args, *call.kwargs.values())}
    yield torch.default_generator
    yield from (value for value in given.values() if isinstance(value, torch.Generator))


def _has_fakes(step: CapturedStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the step is of tensors without memory: it can be planned, and never run."""
    variant = step.steady or step.first
    assert variant is not None, "one of them is there"
    held = [owner.get() for owner, _ in variant.program.owned if not isinstance(owner, ArgumentOwner)]
    given = step.arguments.taker.take(args, kwargs).leaves
    return any(isinstance(value, FakeTensor) for value in (*held, *given))


def _workspace(trace: MemoryTrace) -> int | None:
    without = trace.peak_without_workspace_bytes
    return None if without is None else trace.peak_bytes - without


def _expected(meta: TensorMeta | None) -> tuple[Any, ...]:
    assert meta is not None, "state is made of tensors"
    return torch.Size(meta.shape), meta.dtype, meta.device, meta.stride


def _pattern(storages: list[int]) -> list[int]:
    """For each storage, the place of the first that is the same."""
    first: dict[int, int] = {}
    return [first.setdefault(storage, place) for place, storage in enumerate(storages)]


def _listed(paths: list[str], most: int = 4) -> str:
    shown = ", ".join(paths[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"
