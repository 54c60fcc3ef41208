"""`roam.compile`: the user's training step, run by its plan."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from html import escape
from numbers import Integral, Real
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch

from roam._core import Plan
from roam.distributed.agreement import announce, announce_beside
from roam.errors import MOST_SETTLING, CaptureError, ExecutionError, PlanError
from roam.garbage import collections_wait
from roam.memory_limit import MemoryLimit
from roam.own_code import compiled_step
from roam.program.chunks import HOST, is_available
from roam.program.ir import Program
from roam.program.links import Links
from roam.program.lower import traffic
from roam.report.anatomy import Anatomy
from roam.report.changes import tried
from roam.report.communication import Communication
from roam.report.export import write_export
from roam.report.page import ReportUnavailable, page, write_page
from roam.report.progress import Progress
from roam.runtime.beside.placeholders import is_possible
from roam.runtime.beside.step import PYTHONS_OWN, Beside
from roam.runtime.captures import MANY, Captured, Captures
from roam.runtime.cuda_graph import refuse_graph
from roam.runtime.divergence import PlannedValues
from roam.runtime.log import logger, replans
from roam.runtime.memory_report import KeptPlan, KeptPlans, StepMemory, host_bytes
from roam.runtime.planned import plain_of, planned_by
from roam.runtime.ranges import Ranges, given_sizes, limit_to_kernels
from roam.runtime.runner import Declined, PartialUpdate, Runner, listed
from roam.runtime.strategy import MAX_PLANS, Choice, Effort, Options, choose
from roam.runtime.timings import Timings
from roam.state.equality import Misfit
from roam.state.freed_gradients import freed_stood_for
from roam.state.policies import Policy
from roam.state.references import ArgumentReference
from roam.state.settings import in_place, put
from roam.state.sizes import OneLength
from roam.state.step_call import StepCall
from roam.state.wrappers import is_faked
from roam.switch import is_disabled
from roam.torch_compat.private import left_by_dynamo, local_of, version_of
from roam.tracing.stand_ins.function_stand_ins import is_tracing
from roam.tracing.step import CapturedStep, Known, Variant, capture_step

OnChange = Literal["replan", "raise", "eager"]
Python = Literal["auto", "idle", "beside"]


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
    memory: int | str | None = None,
    keep_checkpoints: bool = False,
    offload: str | os.PathLike[str] | None = None,
    kernels: Literal["eager", "inductor"] = "eager",
    cuda_graph: bool = False,
    sizes: bool | Mapping[str, Mapping[Any, int]] = True,
    python: Python = "auto",
) -> Step:
    """Compiles a training step: the result has the function's signature, runs by a plan, and gives
    eager PyTorch's bits.

    The first call captures and plans the step, and runs one real step like every later call.
    Parameters, buffers and optimizer state are updated in place in the user's own objects. So
    checkpoints, schedulers and evaluation need no change.

    Args:
        train_step: the user's function: forward, backward and optimizer.
        on_change: what to do with a call that no plan fits (another batch shape, `model.eval()`,
            another dropout): ``"replan"`` captures and plans anew, ``"raise"`` raises
            `ExecutionError`, ``"eager"`` runs the user's function itself. It does not forbid the
            first plan, nor the change from the first step to the steady one.
        keep_grads: keep `.grad` after the step as eager PyTorch does. By default gradients from
            which an optimizer has updated their parameters die early, and `.grad` is None after the
            step.
        time_limit_s: limit for planning, in seconds.
        pool: If True, planned tensors lie in one static pool per device, allocated before step 1
            (see `Step.release`). If False, they come from PyTorch's allocator; the plan's order and
            its reuse still save memory. None means True, with three exceptions: the planned total
            with the pool is over 2 % above the total with the allocator; it is above the total in
            program order; or compiled blocks of the step free tensors while they run, and the pool
            costs any memory at all. With several streams only the second of these counts.
        poison: overwrite each range of the pool as soon as its tensor is dead, to find kernels that
            read dead memory. Slow.
        max_plans: how many plans are kept. Calls with other batch shapes, with other values that
            are not tensors, or in evaluation mode need other plans. Beyond this number the least
            recently used plan is dropped, and made anew if it is needed again. `Step.kept` lists
            the plans with their costs.
        streams: on CUDA, how many streams may run operators at the same time. More streams take
            more memory, but the total is never above the laid-out total of program order.
        memory: the most that a step that runs by a plan may take, parameters and optimizer state
            included: bytes, text such as ``"12GiB"``, a share such as ``"60%"`` of what the plan
            without recomputation takes, or ``"auto"`` for what the device has free when the step
            is planned. If order and layout need more, operators whose results are the same bits run
            again. See docs/how-to/memory-budget.md.
        keep_checkpoints: with `memory`, run regions of `torch.utils.checkpoint` again as they are
            written. By default the plan chooses what runs again, inside of these regions and
            elsewhere.
        offload: with `memory`, a folder on a disk for a step on the CPU, or ``"host"`` for the
            host's pinned memory for a step on CUDA. Activations may be stored there and loaded in
            the backward pass, if that takes less time than making them again, or if no other plan
            is found. Likewise parameters, state and gradients may lie there between their uses, if
            they take more than half of the limit. See docs/how-to/memory-budget.md.
        kernels: ``"eager"`` runs eager PyTorch's kernels, or those of blocks that the user has
            compiled. ``"inductor"`` compiles the repeated blocks of the step's models by
            `torch.nn.Module.compile`, in place, at the first call. The bits are then those of
            compiled blocks, in roam and elsewhere. See docs/how-to/compiled-blocks.md.
        cuda_graph: on CUDA, run each call as one CUDA graph once its plan has run twice, so that
            Python no longer launches kernels one by one. The step may read no value of the device,
            use the CPU, change its arguments, or launch collectives. See
            docs/how-to/cuda-graph.md.
        sizes: whether one plan may hold for many sizes of the arguments, as the lengths of batches
            are. If True, a dimension in which two calls differ becomes a range. If False, each size
            has a plan of its own. A mapping says from the first call on which dimensions of which
            arguments change, and the largest size of each: ``{"input_ids": {1: 512}}``. An argument
            is named by its parameter, by its key, or in full, as in ``"args[0]['input_ids']"``.
            ``{"input_ids": {0: 64, 1: 512, "elements": 8192}}`` bounds their product, too.
            Totals and memory budgets are those of the largest sizes. See docs/how-to/shapes.md.
        python: what becomes of the step's own Python. ``"idle"``: it runs when the step is
            captured, and no more; a step whose Python does what a plan cannot repeat is refused.
            ``"beside"``: it runs at every call, and its kernels run by the plan, which takes host
            time for each operator. ``"auto"``: as ``"beside"`` for steps that ``"idle"`` would
            refuse, from the first refusal on. See docs/explanation/beside.md.

    Raises:
        CaptureError: at a call, if the step cannot be captured exactly.
        PlanError: at a call, if it is proved that no plan keeps within `memory` (code
            ``memory_floor``), or if none was found (code ``memory_limit_not_found``), or if the
            step's device and `offload` do not belong together (code ``offload_device``).
            Nothing has run then.
        ValueError: an argument is not valid.
        ExecutionError: at a call that no plan fits (``on_change="raise"``), or if running failed.

    The environment variable ``ROAM_DISABLE=1``, or `roam.disabled` around calls, makes calls run
    the user's function.
    """
    if on_change not in ("replan", "raise", "eager"):
        raise ValueError(f"on_change must be 'replan', 'raise' or 'eager', not {on_change!r}")
    if python not in ("auto", "idle", "beside"):
        raise ValueError(f"python must be 'auto', 'idle' or 'beside', not {python!r}")
    if python == "beside" and (streams > 1 or cuda_graph or offload is not None):
        raise ValueError(
            "Python runs beside a plan of one stream, without a CUDA graph and without offloading; leave python= out, or "
            "streams=, cuda_graph= and offload="
        )
    if not _is_at_least(1, streams, Integral):
        raise ValueError(f"streams must be an integer of at least 1, not {streams!r}")
    if type(pool) not in (bool, type(None)):
        raise ValueError(f"pool must be True, False or None, not {pool!r}")
    if time_limit_s is not None and not _is_at_least(0, time_limit_s, Real):
        raise ValueError(f"time_limit_s must be seconds, 0 or more, not {time_limit_s!r}")
    if streams > 1 and (pool is False or poison):
        raise ValueError(
            "a plan for several streams supports neither pool=False nor poison=True; leave them "
            "out, or streams="
        )
    if not _is_at_least(1, max_plans, Integral):
        raise ValueError(f"max_plans must be an integer of at least 1, not {max_plans!r}")
    if streams > 1 and memory is not None:
        raise ValueError("a memory limit is for plans of one stream; leave streams= or memory= out")
    if cuda_graph and (streams > 1 or poison or memory is not None):
        raise ValueError(
            "a CUDA graph is of one stream, does not poison the pool, and keeps memory that no "
            "limit counts; leave cuda_graph= out, or streams=, poison= and memory="
        )
    if kernels not in ("eager", "inductor"):
        raise ValueError(f"kernels must be 'eager' or 'inductor', not {kernels!r}")
    if not isinstance(sizes, bool):
        sizes = given_sizes(sizes)
    options = Options(
        sizes=sizes,
        time_limit_s=time_limit_s,
        pool=pool,
        poison=poison,
        streams=streams,
        memory=None if memory is None else MemoryLimit.of(memory),
        keep_checkpoints=keep_checkpoints,
        offload=None if offload is None else _offload(offload, memory),
        kernels=kernels,
        cuda_graph=cuda_graph,
    )
    return Step(
        train_step,
        on_change=on_change,
        keep_grads=keep_grads,
        options=options,
        max_plans=max_plans,
        python=python,
    )


def _is_at_least(least: int, value: Any, kind: type[Any]) -> bool:
    """Whether a value is a number of a kind, also one of NumPy's, and no less."""
    return isinstance(value, kind) and bool(value >= least)


def _offload(offload: str | os.PathLike[str], memory: int | str | None) -> Path | Literal["host"]:
    """The folder to offload to, or the host.

    Raises:
        ValueError: there is no such folder, or the system cannot offload, or there is no memory
            limit.
    """
    folder = Path(offload).resolve()
    if memory is None:
        raise ValueError("tensors are offloaded to keep within a memory limit; pass memory= too")
    if not is_available():
        raise ValueError("this system cannot offload tensors; leave offload= out")
    if offload == HOST:
        return HOST
    if not folder.is_dir():
        raise ValueError(
            f'offload= must be a folder that exists, or "host", not {os.fspath(offload)!r}'
        )
    return folder


@compiled_step
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
        python: Python = "auto",
    ) -> None:
        functools.update_wrapper(self, train_step)
        self._python: Python = python
        self._beside: Beside | None = None
        self._train_step = train_step
        self._on_change: OnChange = on_change
        self._keep_grads = keep_grads
        self._options = options
        self._captures: Captures[Runner] = Captures(max_plans)
        self._known = Known(
            compiles_blocks=options.kernels == "inductor", is_captured_once=on_change != "replan"
        )
        self._ranges = Ranges(options, train_step)
        self._last: Runner | None = None
        self._timings: Timings | None = None
        self._partly_updated: list[tuple[Any, Any, int]] = []
        self._failed_because = ""
        self._is_told = False
        """Whether the user has been warned that a call may have exceeded the limit."""
        self._settled: Hashable = None
        """The kind of call to which `Known.settling` belongs."""
        self._declined: set[str] = set()
        """Why runs have been left to the user's function, as far as that has been logged."""

    @left_by_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(args, kwargs)

    def _called(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_measured: bool = False
    ) -> Any:
        call = StepCall(args, kwargs)
        if is_disabled():
            self._take_out()
        if not self._runs_beside():
            try:
                runner = self._runner(call)
                if runner is not None:
                    return self._run(runner, call, is_measured=is_measured)
            except CaptureError as refusal:
                self._begin_beside(refusal)
            else:
                return self._own(call)
        beside = self._beside
        assert beside is not None
        run = beside.measured if is_measured else beside.run
        return run(args, kwargs, call.form(self._known.taker))

    def _runs_beside(self) -> bool:
        """Whether a call's Python runs beside plans."""
        if is_disabled() or is_tracing():
            return False
        if self._python == "beside" and self._beside is None:
            self._begin_beside(None)
        return self._beside is not None

    def _begin_beside(self, refusal: CaptureError | None) -> None:
        """From now on the step's Python runs beside plans, since it was refused or is to.

        Raises:
            CaptureError: the refusal, where another way cannot help, or is not wanted.
        """
        if refusal is not None and not self.may_run_beside(refusal):
            raise refusal
        if refusal is not None:
            logger.warning(
                "%s runs its own Python at each call from now on, beside a plan once two calls are alike, which takes some 20 "
                "microseconds for each operator (docs/explanation/beside.md), since a plan alone cannot repeat it: %s",
                self._name, refusal,
            )  # fmt: skip
        announce_beside()
        most = self._captures.most
        self._beside = Beside(
            self._train_step, self._name, self._options, self._on_change, most, refusal
        )

    @property
    def runs_beside(self) -> bool:
        """Whether the step's Python runs at each call, beside plans."""
        return self._python == "beside" or self._beside is not None

    def may_run_beside(self, refusal: CaptureError) -> bool:
        """Whether the step's Python is to run beside plans where a plan alone is refused."""
        options = self._options
        return self._python == "beside" or (
            self._python == "auto"
            and refusal.code in PYTHONS_OWN
            and options.streams == 1
            and not options.cuda_graph
            and options.offload is None
            and options.kernels == "eager"
            and is_possible()
        )

    def _runner(self, call: StepCall) -> Runner | None:
        """What runs this call; None if the user's function itself does."""
        if is_disabled() or is_tracing():
            return None
        self._refuse_after_partial_update()
        found = self._captures.find(call, self._known.taker)
        if isinstance(found, Misfit) and self._captures.larger and self._on_change == "replan":
            found = self._enlarged(*self._captures.larger, call)
        if isinstance(found, Misfit):
            if len(self._captures) and self._on_change == "eager":
                replans.info("%s runs eagerly, since no plan fits: %s", self._name, found)
                return None
            if len(self._captures) and self._on_change == "raise":
                raise ExecutionError(
                    f"no plan fits this call, and on_change='raise' makes no other: {found}; call the "
                    "step with arguments like those at capture, or leave on_change= out",
                    code="no_plan_fits",
                )
            self._known.taker = self._known.taker.learning(
                call.args, call.kwargs, self._known.policies
            )
            self._check_worth(found)
            capture = self._capture_unless_unsettled(call, found)
            if capture is None:
                return None
            found = capture
        captured, runner = found
        if any(one.has_news for one in captured.runners) and not _has_ranks():
            captured, runner = self._planned_again(captured, call)
        pending = captured.step.pending(call, is_first=runner.is_first)
        if pending is not None:
            put(pending.all)  # as the user's function would now
        return runner

    def _check_worth(self, misfit: Misfit) -> None:
        """Refuses a plan that only one value in the arguments or the state asks for, as others did
        before it, if the step can run beside a plan for all of them.
        """
        if (
            (misfit.may_recur or misfit.place in self._known.taker.varied)
            and self._captures.has_made(misfit.place)
            and not (self._is_fixed(misfit.place) and self._ranges.may_follow(misfit.place))
        ):
            refusal = CaptureError(
                f"{misfit}, as in earlier calls, and each value has a plan of its own; if the step only shows or counts such "
                "values, leave them out of its arguments and its state",
                code="varied_argument",
            )
            if self.may_run_beside(refusal):
                raise refusal

    def _is_fixed(self, path: str) -> bool:
        """Whether the step has been found to need the value of the whole number at a path."""
        return self._known.policies.of((path, int)) is Policy.FIXED

    def _capture_unless_unsettled(
        self, call: StepCall, reason: Misfit
    ) -> tuple[Captured[Runner], Runner] | None:
        """A capture; None if the user's function has to run first."""
        try:
            captured = self._capture(call, reason)
        except CaptureError as refusal:
            # Where other calls could be captured, this call's data may be at fault, and the user's
            # own function raises the same.
            most = refusal.settles
            if refusal.code == "step_raised" and len(self._captures) > 0:
                most = MOST_SETTLING
            key = call.kind(self._known.taker)
            if key != self._settled:  # calls of one kind do not count for another
                self._settled, self._known.settling = key, 0
            if self._known.settling >= most:
                raise
            self._known.settling += 1
            logger.info("%s. Your own function runs, and the next call is captured", refusal)
            return None
        self._known.settling = 0
        return captured

    def _own(self, call: StepCall) -> Any:
        """Runs the user's function itself."""
        is_captured_once = self._on_change != "replan" and len(self._captures) > 0
        is_planned = not (is_disabled() or is_tracing() or is_captured_once)
        if is_planned and self._options.memory is not None and not self._is_told:
            self._is_told = True
            logger.warning(
                "%s: no plan fits this call, so your own function runs, and its memory may "
                "exceed the limit",
                self._name,
            )
        try:
            with nullcontext() if is_tracing() else freed_stood_for():
                return self._eagerly(call)
        except Exception:
            self._known.settling = 0  # it has set nothing up
            raise

    def _eagerly(self, call: StepCall) -> Any:
        call.forget()  # nothing is to live longer than in eager PyTorch
        return self._train_step(*call.args, **call.kwargs)

    def _run(self, runner: Runner, call: StepCall, *, is_measured: bool = False) -> Any:
        """Runs a call by a plan, or by the user's function where a check does not pass. If asked,
        the run by the plan is measured.
        """
        if runner.plan.estimate:
            raise ExecutionError(
                "this plan is an estimate and cannot be run; compile on the machine that trains. "
                f"{runner.plan.estimate}",
                code="estimate",
            )
        try:
            once = partial(self._run_once, runner, call)
            result = runner.measured(once) if is_measured else once()
        except Declined as declined:
            misfit = declined.misfit
            level = logging.INFO if misfit in self._declined else logging.WARNING
            self._declined.add(misfit)
            logger.log(level, "%s; your own function runs in the plan's place", misfit)
            with freed_stood_for():
                return self._eagerly(call)
        self._known.settling, self._last = 0, runner
        return result

    def _run_once(self, runner: Runner, call: StepCall) -> Any:
        try:
            timings = self._timings
            if timings is None or timings.first_run.count:
                return runner.run(call)
            timings.first_run.count = 1
            with (
                timings.running(timings.first_run),
                Progress(f"first run of {runner.name}", only_live=True),
            ):
                result = runner.run(call)
            logger.info(
                "%s: %s; ready after %s",
                self._name,
                max(self._alongside(runner), key=lambda one: one.plan.total_bytes).choice,
                timings,
            )
            return result
        except PartialUpdate as partial:
            self._partly_updated = partial.references
            self._failed_because = str(partial.error)
            raise partial.error from partial.error.__cause__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A compiled method, bound like any other."""
        return self if instance is None else MethodType(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan by which a call with these arguments would run. The step itself does not run.

        The plan's `total_bytes` is the memory that the step will take, known before step 1. Kernels
        that may take memory for themselves are tried on zeros, once in a process.
        """
        call = StepCall(args, kwargs)
        if self._beside is not None:
            planned = self._beside.planned(call.form(self._known.taker))
            if planned is not None:
                return planned.choice.plan
        found = self._captures.find(call, self._known.taker)
        if isinstance(found, Misfit):
            found = self._capture(call, found)
        return found[1].plan

    @property
    def _name(self) -> str:
        return getattr(self._train_step, "__name__", type(self._train_step).__name__)

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function."""
        return self._train_step

    def anew(self, train_step: Callable[..., Any] | None = None) -> Step:
        """A compiled step with the same options and no plans yet, of this function or another."""
        make, (function,) = self.__reduce__()
        return make(train_step or function)

    def __reduce__(self) -> tuple[Callable[..., Step], tuple[Callable[..., Any]]]:
        """Copies and files have the function and the options, and no plans."""
        make = partial(
            Step,
            on_change=self._on_change,
            keep_grads=self._keep_grads,
            options=self._options,
            max_plans=self._captures.most,
            python=self._python,
        )
        return make, (self._train_step,)

    @property
    def keeps_gradients(self) -> bool:
        """Whether plans keep `.grad` after the step as eager PyTorch does."""
        return self._keep_grads

    def keep_gradients(self) -> None:
        """Makes plans keep `.grad` from now on, as ``keep_grads=True`` does. It is for trainers'
        integrations, which know what reads gradients only at a call.
        """
        if not self._keep_grads:
            self._keep_grads = True
            self.release()
            self._captures = Captures(self._captures.most)

    def watched(self, *args: Any, **kwargs: Any) -> tuple[Program, PlannedValues]:
        """Runs one step like a call of the object, and tells what each call of its program made.

        Raises:
            ExecutionError: no plan fits the call, and ``on_change`` is ``"eager"`` or ``"raise"``.
        """
        call = StepCall(args, kwargs)
        runner = self._runner(call)
        if runner is None:
            raise ExecutionError(
                "no plan fits this call, so its values cannot be compared; call the step with "
                "arguments like those at capture",
                code="no_plan_fits",
            )
        with runner.watched() as values:
            self._run(runner, call)
        return values.program, values

    @property
    def plans(self) -> list[tuple[str, Plan]]:
        """All plans that are kept, most recently used first, each with the name of its graph."""
        beside = [] if self._beside is None else self._beside.plans
        return [
            *((self._name, planned.choice.plan) for planned in beside),
            *(
                (runner.name, runner.plan)
                for captured in self._captures
                for runner in captured.runners
            ),
        ]

    @property
    def joins_processes(self) -> bool:
        """Whether a call that has a plan launches collectives."""
        return any(
            runner.joins_processes for captured in self._captures for runner in captured.runners
        )

    @property
    def timings(self) -> Timings | None:
        """How long each stage took in the last captured call; None before the first call."""
        return self._timings

    def kept(self) -> KeptPlans:
        """The plans that are kept, each with the arguments that it is for and its cost."""
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
        """The memory of the most recent call that had a plan: the planned figures, and the
        measured ones if the call was made through `measured` or `measured_eagerly`.

        Raises:
            ExecutionError: no call has run by a plan yet (code ``no_call``).
        """
        if self._beside is not None and self._beside.last is not None:
            return self._beside.last.memory
        if self._last is None:
            raise ExecutionError(
                "no call has run by a plan yet, so there is no memory to report; call the step "
                "first",
                code="no_call",
            )
        totals = [runner.memory.total_bytes for runner in self._alongside(self._last)]
        return replace(self._last.memory, run_bytes=max(totals))

    def _captured(self, runner: Runner | None) -> Captured[Runner] | None:
        """The capture that a runner belongs to; None if that was dropped."""
        return next((one for one in self._captures if runner in one.runners), None)

    def _alongside(self, runner: Runner) -> list[Runner]:
        """The runners of the capture that a runner belongs to: for the first step and for later
        ones.
        """
        captured = self._captured(runner)
        return [runner] if captured is None else captured.runners

    def report(self, path: str | os.PathLike[str], *, limits: Iterable[int | str] = ()) -> None:
        """Writes one HTML page that explains the plan of the most recent call: see `Plan.report`.

        Before the first call, it is the plan that `plan` made.

        Args:
            path: of the page.
            limits: memory limits as in ``memory=`` of `compile`. The page lists what a plan takes
                within each limit, and the time of its extra runs.

        Raises:
            ValueError: a limit is not valid.
            ExecutionError: nothing is planned yet (code ``no_call``).
            PlanError: there are limits, and the plan is for several streams (code
                ``invalid_memory_limit``).
            RoamError: Bokeh is not installed (code ``report_unavailable``).
            OSError: the page cannot be written.
        """
        write_page(self._anatomy(limits), path)

    def _repr_html_(self) -> str | None:
        """In a notebook: the page of `report`; None before the first call, or without Bokeh."""
        try:
            shown = escape(page(self._anatomy()))
        except (ExecutionError, PlanError, ReportUnavailable):
            return None
        return f'<iframe srcdoc="{shown}" style="width: 100%; height: 40rem; border: 0"></iframe>'

    def _anatomy(self, limits: Iterable[int | str] = ()) -> Anatomy:
        """What `report` says."""
        asked = {str(limit): MemoryLimit.of(limit) for limit in limits}
        if asked and self._options.streams > 1:
            raise PlanError(
                "memory limits are for plans of one stream; leave limits= out, or compile the step "
                "without streams=",
                code="invalid_memory_limit",
            )
        choice, other = self._last_choice(), None
        if self._beside is not None and self._beside.last is not None:
            program = self._beside.last.script.program
            later: Variant | None = Variant(program, self._name, as_written=program)
        else:
            captured = self._reported()
            later = captured.step.steady or captured.step.first
            if len(captured.runners) > 1:
                other = planned_by(captured.runners[0].choice)
        assert later is not None, "one of them is there"
        changes = [
            tried(f"memory={name}", partial(self._figures_within, later, choice, limit))
            for name, limit in asked.items()
        ]
        moved = traffic(choice.program)
        return Anatomy(later.name, planned_by(choice), plain_of(choice), other, changes, moved)

    def _figures_within(
        self, variant: Variant, known: Choice, limit: MemoryLimit
    ) -> Mapping[str, Any]:
        """The figures of a later step's plan within a limit."""
        with Progress(f"planning {self._name} within a limit", only_live=True):
            (choice,) = choose(
                [variant],
                pool=self._options.pool,
                time_limit_s=self._options.time_limit_s,
                is_real=known.kernel_bytes is not None,
                memory=limit,
                keep_checkpoints=self._options.keep_checkpoints,
                offload=self._options.offload,
            )
            return planned_by(choice).values

    def communication(self, links: Links | None = None) -> Communication:
        """How long this rank waits for others in the plan of the most recent call, by the cost
        model: how long collectives take, and for how much of that the rank computes nothing.

        Before the first call, it is the plan that `plan` made.

        Args:
            links: the links between ranks; None for machines with eight A100 GPUs.

        Raises:
            ExecutionError: nothing is planned yet (code ``no_call``).
            ValueError: the plan is for several streams.
        """
        choice = self._last_choice()
        return Communication.of(choice.program, choice.graph, choice.plan, links)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan of the most recent call in the format of another tool: see `Plan.export`.

        Before the first call, it is the plan that `plan` made.

        Raises:
            ExecutionError: nothing is planned yet (code ``no_call``).
            ValueError: no format has the path's ending.
            OSError: the file cannot be written.
        """
        write_export(planned_by(self._last_choice()), path)

    def _last_choice(self) -> Choice:
        """The plan of the most recent call, with its program."""
        if self._beside is not None and self._beside.last is not None:
            return self._beside.last.choice
        return self._reported().runners[-1].choice

    def _reported(self) -> Captured[Runner]:
        """The capture of the most recent call."""
        found = self._captured(self._last) or next(iter(self._captures), None)
        if found is None:
            raise ExecutionError(
                "no call has a plan yet, so there is nothing to report; call the step first, or "
                "its plan() with the same arguments",
                code="no_call",
            )
        return found

    def measured(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one real step like a call, measures its memory for `memory`, and returns its result.

        See docs/explanation/measurement.md for what is counted. A call that runs without a plan is
        not measured.
        """
        return self._called(args, kwargs, is_measured=True)

    def measured_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        """As `measured`, but runs the user's own function, for comparison. This too is a real
        training step, with the same results.

        A call that no plan fits is not measured.
        """
        call = StepCall(args, kwargs)
        runner = None if self._runs_beside() else self._runner(call)
        if runner is None:
            return self._own(call)
        self._last = runner
        call.forget()
        return runner.measured_eagerly(lambda: self._own(call))

    def release(self) -> None:
        """Frees the pools and the CUDA graphs of this step's plans, for example before evaluation
        or sampling, and brings parameters and state that ``offload=`` keeps elsewhere back to
        ordinary memory. Later calls allocate and record them again, and move them again.

        All compiled steps of a process share one pool per device.
        """
        for captured in self._captures:
            for runner in captured.runners:
                runner.release()
        if self._beside is not None:
            self._beside.release()

    def _take_out(self) -> None:
        """Brings what lies in files back to ordinary memory."""
        if self._options.offload is not None:
            for captured in self._captures:
                for runner in captured.runners:
                    runner.take_out()

    def _capture(self, call: StepCall, reason: Misfit) -> tuple[Captured[Runner], Runner]:
        """Captures and plans."""
        if len(self._captures):
            replans.info("%s is planned anew: %s", self._name, reason)
        announce()
        timings, traces = Timings(), self._known.traces
        self._timings = timings
        with collections_wait(), Progress(lambda: f"{timings.doing} {self._name}", only_live=True):
            regions = self._known.regions
            compiled, regions.around = regions.compiled, lambda: timings.running(timings.compile)
            with timings.running(timings.capture):
                capture = partial(
                    capture_step,
                    self._train_step,
                    call.args,
                    call.kwargs,
                    keep_grads=self._keep_grads,
                    known=self._known,
                    asks_kernels=True,
                )
                known = [captured.step for captured in self._captures]
                varies = not self._captures.has_run_again()
                of_range = self._ranges.capture(capture, known, call, self._is_fixed, varies=varies)
                step = of_range or capture()
                if step.settings and (found := self._that_sets(step, call)) is not None:
                    return found
            timings.capture.count = self._known.traces - traces
            timings.compile.count = regions.compiled - compiled
            call.forget()
            is_real = self._options.tries_kernels or not _has_fakes(step, call)
            try:
                runners = self._planned(step, timings, is_real=is_real)
            except (OneLength, PlanError) as error:
                if step.arguments.sizes is None or (
                    isinstance(error, PlanError) and self._ranges.promises
                ):
                    raise
                self._ranges.has_failed(step)
                replans.info(
                    "%s is planned for the sizes of this call alone: %s", self._name, error
                )
                step = capture()
                runners = self._planned(step, timings, is_real=is_real)
        captured = Captured(step, runners, call.key(self._known.taker), reason, timings.total_s)
        dropped = self._captures.add(captured)
        logger.debug(
            "%s: captured and planned in %.2f s for %s, because %s; %d of at most %d plans kept",
            runners[-1].name, timings.total_s, step.arguments, reason, len(self._captures), self._captures.most,
        )  # fmt: skip
        is_due = dropped is not None and (self._captures.dropped - 1) % self._captures.most == 0
        if is_due and self._captures.is_news(captured):
            logger.warning(
                "this step has plans for %d kinds of calls and the least recently used is dropped for another: %s. %s",
                self._captures.most, reason, self._captures.advice(dropped),
            )  # fmt: skip
        if self._captures.repeats(captured):
            logger.warning(
                "%s: %d plans were made for one reason, and no later call could use them: %s. Making a plan takes longer than "
                "running the step. %s",
                self._name, MANY, reason, self._captures.advice(dropped),
            )  # fmt: skip
        for runner in captured.runners:
            if (misfit := runner.failure(call)) is None:
                return captured, runner
        raise ExecutionError(
            f"the new plan does not fit the state that it was captured from: {misfit}",
            code="no_plan_fits",
        )

    def _that_sets(
        self, step: CapturedStep, call: StepCall
    ) -> tuple[Captured[Runner], Runner] | None:
        """An earlier capture that a new one is, apart from what the step sets itself. From now on
        it is for such calls too.
        """
        call.forget()
        with in_place(step.settings[0].all):
            found = self._captures.find(call, self._known.taker)
        call.forget()
        if isinstance(found, Misfit) or not found[0].step.sets_too(step):
            return None
        replans.info("%s keeps its plan, since the step sets this itself", self._name)
        again = self._captures.find(call, self._known.taker)
        return None if isinstance(again, Misfit) else again

    def _planned_again(
        self, captured: Captured[Runner], call: StepCall
    ) -> tuple[Captured[Runner], Runner]:
        """Plans a capture anew, since a first run has shown what kernels of others take for
        themselves.
        """
        logger.info("%s is planned anew, with what registered operators allocate", self._name)
        announce()
        timings = self._timings = Timings()
        with collections_wait(), Progress(lambda: f"{timings.doing} {self._name}", only_live=True):
            runners = self._planned(captured.step, timings, is_real=True)
        seconds = captured.seconds + timings.total_s
        self._captures.replace(captured, replace(captured, runners=runners, seconds=seconds))
        found = self._captures.find(call, self._known.taker)
        assert not isinstance(found, Misfit), "the same capture fits"
        return found

    def _enlarged(
        self,
        captured: Captured[Runner],
        values: tuple[int, ...],
        call: StepCall,
    ) -> tuple[Captured[Runner], Runner] | Misfit:
        """Plans a capture anew for larger sizes, of which its recording holds, too."""
        replans.info("%s is planned anew for larger arguments: %s", self._name, values)
        announce()
        timings = self._timings = Timings()
        with collections_wait(), Progress(lambda: f"{timings.doing} {self._name}", only_live=True):
            is_real = self._options.tries_kernels or not _has_fakes(captured.step, call)
            failure: Exception | None = None
            for larger, effort in self._ranges.larger(captured.step, values):
                try:
                    runners = self._planned(larger, timings, is_real=is_real, effort=effort)
                    break
                except (OneLength, PlanError) as error:
                    failure = error
            else:
                return Misfit(
                    f"no plan is found for sizes {values} and all smaller ones: {failure}"
                )
        seconds = captured.seconds + timings.total_s
        self._captures.replace(
            captured, replace(captured, step=larger, runners=runners, seconds=seconds)
        )
        return self._captures.find(call, self._known.taker)

    def _planned(
        self, step: CapturedStep, timings: Timings, *, is_real: bool, effort: Effort = "all"
    ) -> list[Runner]:
        """What runs the first step, if there is one, and the later ones."""
        known = [runner for captured in self._captures for runner in captured.runners]
        options = self._options
        variants = [variant for variant in (step.steady, step.first) if variant is not None]
        if options.streams > 1 and variants[0].device.type != "cuda":
            raise ExecutionError(
                f"several streams need CUDA, and the step runs on {variants[0].device.type}; leave "
                "streams= out",
                code="streams",
            )
        choices = choose(
            variants,
            pool=options.pool,
            time_limit_s=options.time_limit_s,
            streams=options.streams,
            is_real=is_real,
            earlier=[runner.choice for runner in known],
            memory=options.memory,
            keep_checkpoints=options.keep_checkpoints,
            offload=options.offload,
            effort=effort,
            timings=timings,
        )
        if step.arguments.sizes is not None:
            limit_to_kernels(step.arguments.sizes, variants[0].device, choices)
        if options.cuda_graph:
            refuse_graph(choices[0].program, variants[0].device)
        guards = [runner.state_guard for runner in known]
        runners = [
            Runner(
                variant,
                choice,
                options if place == 0 else replace(options, cuda_graph=False),  # it runs once
                taker=step.arguments.taker,
                guards=guards,
                sizes=step.arguments.sizes,
            )
            for place, (variant, choice) in enumerate(zip(variants, choices, strict=True))
        ]
        return runners[::-1]

    def _refuse_after_partial_update(self) -> None:
        """After a step that failed half-way nothing runs until what it had written to is loaded
        again.
        """
        waiting = [
            reference.path
            for reference, tensor, version in self._partly_updated
            if local_of(reference.get()) is tensor and version_of(tensor) == version
        ]
        if waiting:
            raise ExecutionError(
                f"an earlier step failed half-way ({self._failed_because}); load {listed(waiting)} again first",
                code="torn",
            )
        self._partly_updated = []


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _has_fakes(step: CapturedStep, call: StepCall) -> bool:
    """Whether the step is of tensors without memory: it can be planned, and never run."""
    variant = step.steady or step.first
    assert variant is not None, "one of them is there"
    held = [
        local_of(reference.get())
        for reference, _ in variant.program.referenced
        if not isinstance(reference, ArgumentReference)
    ]
    given = call.taken(step.arguments.taker).leaves
    return any(map(is_faked, (*held, *given)))
