"""Runs one variant of a captured step by its plan, on the user's own tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from traceback import clear_frames
from typing import Any, Final

import torch

from roam.distributed.agreement import AGAIN, begin, leave
from roam.distributed.buckets import give_back
from roam.distributed.collectives import Group, settle, unsettled
from roam.distributed.ddp import unsupported
from roam.errors import ExecutionError
from roam.interrupts import interrupts_allowed, interrupts_wait
from roam.kernels.table import is_proven
from roam.program import copies
from roam.program.checks import check, check_data
from roam.program.collectives import sequences
from roam.program.effects import (
    Drop,
    Ending,
    Rebind,
    SetSync,
    Skip,
    held,
    rebound,
)
from roam.program.gradient_lifetime import used_gradients
from roam.program.ir import Call, ComputedGuard, Joined, Program, TensorMeta
from roam.program.pages import take_out
from roam.program.resized import guards_with, numbers_at
from roam.runtime.cuda_graph import OnCuda
from roam.runtime.divergence import PlannedValues
from roam.runtime.executor import Executor, Failure
from roam.runtime.inputs import Inputs, Places
from roam.runtime.log import logger
from roam.runtime.memory_profiler import MemoryTrace, measure_peak
from roam.runtime.memory_report import StepMemory
from roam.runtime.pool import Pool
from roam.runtime.strategy import Choice, Options
from roam.runtime.streams import CudaStreams
from roam.runtime.timings import Stopwatch
from roam.state.argument_sizes import ArgumentSizes
from roam.state.arguments import Taker
from roam.state.equality import MISSING, Misfit, changed, same, show
from roam.state.freed_gradients import Notes, gradients_left, lacks, note_freed
from roam.state.references import (
    ArgumentReference,
    GradientReference,
    OptimizerReference,
    RateReference,
    ScalerReference,
    root_of,
)
from roam.state.state_guard import Kind, StateGuard
from roam.state.state_lookup import getter, picker
from roam.state.step_call import StepCall
from roam.state.wrappers import Form
from roam.torch_compat.private import (
    DisableTorchFunction,
    expects_backward,
    has_dtensors,
    joined,
    local_of,
    pytree,
    version_of,
)
from roam.tracing.fakes.gradient_history import Histories
from roam.tracing.numbers.rng import watched
from roam.tracing.step import Variant

_GRADIENT: Final = operator.attrgetter("grad")
Gradients = list[tuple[Any, Any]]
"""Parameters, each with a gradient from before the step that nothing reads."""


class PartialUpdate(Exception):
    """A run failed after it had written to the user's tensors."""

    def __init__(self, error: ExecutionError, references: list[tuple[Any, Any, int]]) -> None:
        super().__init__(str(error))
        self.error = error
        self.references = references


class Declined(Exception):
    """The plan does not fit the call, as was found before the run or in it. All is as it was before
    the run.
    """

    def __init__(self, misfit: Misfit) -> None:
        super().__init__(misfit)
        self.misfit = misfit


class Runner:
    """Runs one variant of a captured step by its plan."""

    def __init__(
        self,
        variant: Variant,
        choice: Choice,
        options: Options,
        *,
        taker: Taker,
        guards: Iterable[StateGuard] = (),
        sizes: ArgumentSizes | None = None,
    ) -> None:
        """Prepares the runs.

        Args:
            choice: how the variant runs.
            guards: guards of other runners. If one of them compares the same, it is shared.
            sizes: which sizes of the arguments follow from symbols, if any do.
        """
        self._sizes = sizes
        self._resized_guards: tuple[tuple[int, ...], Sequence[tuple[ComputedGuard, Any]]] = (), ()
        self.name = variant.name
        self._taker = taker
        self.choice = choice
        program = self._program = choice.program
        self.plan = choice.plan
        self.memory = StepMemory.planned(choice)
        logger.debug("%s: %s", self.name, choice)
        self._device = variant.device
        self._pool = Pool.of(variant.device) if choice.uses_pool else None
        self.is_first, self._offloads = variant.runs_once, options.offload is not None
        shrinks = None
        if choice.memory_limit_bytes is not None:
            spare_bytes = choice.memory_limit_bytes - choice.checks_bytes - choice.total_bytes
            shrinks = Pool.of(variant.device), self.memory.pool_bytes + max(spare_bytes, 0)
        streams = None
        if len(set(self.plan.streams.tolist())) > 1:
            streams = CudaStreams(variant.device, options.streams, len(self.plan.syncs))
        again = choice.recomputation
        offloaded = None if again is None else again.offloaded
        self._tier = None if offloaded is None else offloaded.tier
        self._paged = list[tuple[str, int]]()
        self._kept = list[tuple[str, int]]()
        """Of what may lie in files before the step, what does, and what its plan has in memory."""
        for place, (reference, slot) in enumerate(program.referenced):
            if program.slots[slot] is not None and not isinstance(reference, ArgumentReference):
                is_paged = program.storages[program.storage_of(slot)].is_paged
                (self._paged if is_paged else self._kept).append((reference.path, place))
        self._generators = list(_generators(program))
        self._executor = Executor(
            program,
            choice.placed,
            self.plan,
            pool=self._pool,
            streams=streams,
            poison=options.poison,
            proven=is_proven(variant.device.type),
            shrinks=shrinks,
            tier=None if offloaded is None else (offloaded.tier, offloaded.tier_bytes),
            pages=choice.pages,
            recorder=OnCuda(variant.device, self._generators) if options.cuda_graph else None,
            symbols=() if sizes is None else sizes.symbols.names,
        )
        self._references = [reference for reference, _ in program.referenced]
        # Gradients that a run uses up are kept until it is done: it may fail, and be tried again.
        used = {reference.path for reference in self._references}
        self._consumed: list[Any] = []
        dropped = []
        for drop in program.of(Drop):
            if drop.reference.path in used or isinstance(drop.reference, ArgumentReference):
                self._consumed.append(drop.reference)
            else:
                dropped.append(drop)
        self._dropped = [drop.reference.parameter for drop in dropped]
        """Parameters whose gradients nothing reads."""
        self._parameters = Places(self._dropped, self._references)
        self._notes = Notes([drop.frees for drop in dropped])
        ignored = set(map(id, dropped))
        self._effects = sorted(
            (
                (place, effect)
                for place, effect in enumerate(program.effects)
                if id(effect) not in ignored
            ),
            key=lambda pair: pair[1].stage,
        )
        self._unlike_freed = [
            reference
            for reference in (*program.absent, *used_gradients(program))
            if isinstance(reference, GradientReference) and reference.path not in program.lacking
        ]
        """Gradients that have to be eager PyTorch's, which an earlier plan may have freed."""
        self._skips = [
            (place, id(effect.optimizer))
            for place, effect in enumerate(program.effects)
            if isinstance(effect, Skip)
        ]
        histories = [*program.result.histories, *(one.history for one in program.of(Rebind))]
        self._sources = {
            id(history): Places(history, self._references)
            for history in histories
            if history != "leaf" and history != "none"
        }
        """What each history leads to, by the history's identity."""
        self._has_checks = any(call.is_check for call in program.calls)
        self._may_be_left = self._has_checks or any(
            call.source.is_tried and program.may_raise(call) for call in program.calls
        )
        """Whether the user's own function may take over a run and go on, with the gradients from
        before it."""
        expected = [
            (reference, _kind(program.slots[slot], program.given_layouts.get(reference.path)))
            for reference, slot in program.referenced
            if isinstance(
                root_of(reference), (OptimizerReference, ScalerReference, GradientReference)
            )
            and program.slots[slot] is not None
        ]
        gradients = [one for one in program.absent if isinstance(one, GradientReference)]
        others = [one for one in program.absent if not isinstance(one, GradientReference)]
        self._absent = others, gradients
        self._bare = [getter(one.parameter) for one in gradients]
        places = {id(reference): place for place, reference in enumerate(self._references)}
        self._guarded = picker([places[id(reference)] for reference, _ in expected])
        wholes = [
            (reference, form)
            for reference, form in program.wholes
            if isinstance(reference, (OptimizerReference, ScalerReference))
        ]
        state = StateGuard(expected, program.state_keys, wholes)
        self.state_guard = next((known for known in guards if known.stands_for(state)), state)
        self._inputs = Inputs(program)
        self._rates = [
            (place, reference)
            for place, reference in enumerate(self._references)
            if isinstance(reference, RateReference)
        ]
        groups: list[Group] = [call.target.group for call in program.launches()]
        self._groups = list(dict.fromkeys(groups))
        self._sequences = sequences(program, self.plan.order.tolist())
        self._has_begun = False
        self._is_fake = any(group.is_fake() for group in self._groups)
        self._draws = any(call.random for call in program.calls)
        self._devices = {meta.device.type for meta in program.slots if meta is not None}

    def failure(self, call: StepCall) -> Misfit | None:
        """None if this variant is for a call in which the step's guards have found no difference.
        The call then has its inputs, and knows what else keeps the plan from running it.
        """
        return (
            self._absent_failure()
            or self._held_failure(call)
            or self._module_failure()
            or self._number_failure()
            or self._answer_failure(call)
        )

    def _absent_failure(self) -> Misfit | None:
        # A first step's plan, which later calls ask too, fails here, before it looks at all state.
        others, gradients = self._absent
        for reference in others:
            if reference.get() is not MISSING:
                return Misfit(f"{reference.path} exists already")
        found = map(_GRADIENT, [get() for get in self._bare])
        place = next((place for place, one in enumerate(found) if one is not None), None)
        if place is not None:
            return Misfit(f"{gradients[place].path} exists already")
        for reference in self._unlike_freed:
            if lacks(reference.parameter.get()):
                return Misfit(f"an earlier plan has freed {reference.path}")
        return None

    def _held_failure(self, call: StepCall) -> Misfit | None:
        """Whether optimizers' state, gradients and scales are of other kinds; looks up all inputs,
        and how they share memory.
        """
        held, entries = self._inputs.read(call.taken(self._taker).leaves)
        guarded = list(self._guarded(held))
        if (failure := self.state_guard.failure(guarded, entries)) is not None:
            return failure
        call.held, call.inputs = held, list(map(local_of, held)) if has_dtensors(held) else held
        call.misfit = self._rate_failure(call.inputs) or self._sharing_failure(call.inputs)
        return None

    def _module_failure(self) -> Misfit | None:
        for group in self._groups:
            if (failure := group.failure()) is not None:
                return failure
        for synced in self._program.of(SetSync):
            # A reducer's hook is in C++, where no guard sees it.
            if (reason := unsupported(synced.module)) is not None:
                return Misfit(f"a DistributedDataParallel of the step has changed: {reason}")
        return None

    def _number_failure(self) -> Misfit | None:
        for reference, comparison, constants, answer in self._program.decisions:
            number = reference.get()
            if (
                not isinstance(number, (float, int))
                or bool(comparison(number, *constants)) is not answer
            ):
                return Misfit(
                    f"{reference.path} is {show(number)} now, for which the step does "
                    "something else",
                    reference.path,
                )
        for reference, value in self._program.plain_before:
            if not same(value, reference.get()):
                return changed(reference.path, show(value), show(reference.get()))
        return None

    def _answer_failure(self, call: StepCall) -> Misfit | None:
        """Whether numbers and the arguments' values decide otherwise than at capture."""
        if not self._program.computed_guards:
            return None
        leaves = call.taken(self._taker).leaves
        guards: Sequence[tuple[ComputedGuard, Any]] = self._program.computed_guards
        if self._sizes is not None:
            guards = self._guards_at(self._sizes.values(leaves))

        with self._kernels_alone():
            for guard, answer in guards:
                if guard.has_other_answer(answer, lambda reference: _found(reference, leaves)):
                    return Misfit(
                        f"a condition on values, at {guard.source}, has another result than at "
                        "capture"
                    )
        return None

    def _guards_at(self, values: tuple[int, ...]) -> Sequence[tuple[ComputedGuard, Any]]:
        """The computed guards at sizes."""
        if values != self._resized_guards[0]:
            assert self._sizes is not None, "the sizes follow from symbols"
            new = numbers_at(self._program.computed_guards, self._sizes.symbols.names, values)
            self._resized_guards = values, guards_with(self._program.computed_guards, new)
        return self._resized_guards[1]

    def _rate_failure(self, inputs: list[Any]) -> Misfit | None:
        for place, reference in self._rates:
            value = inputs[place]
            if not isinstance(value, torch.Tensor) and (
                type(value) is bool or not isinstance(value, (float, int))
            ):
                return Misfit(
                    f"{reference.path} is a {type(value).__name__}, not a float; set a float",
                    way="refuse",
                    code="rate",
                )
        return None

    def _sharing_failure(self, inputs: list[Any]) -> Misfit | None:
        if self._inputs.share_as_captured(inputs):
            return None
        if (places := self._inputs.overlap(inputs)) is None:
            text = (
                "tensors of the step do not share memory as they did at capture; tie or untie "
                "weights before the first call of the compiled step, or compile it again"
            )
        else:
            one, other = (self._references[place].path for place in places)
            text = (
                f"{one} and {other} are tensors with the same memory that PyTorch takes for "
                "different ones, as torch.from_numpy and DLPack make them, and the step writes "
                "to it; use the same tensor or views of it in both places, or copy one"
            )
        return Misfit(text, way="refuse", code="sharing")

    def _last_failure(self) -> Misfit | None:
        """What runs of other steps, and of this one's modules, have left that no plan may meet."""
        if (busy := unsettled()) is not None:
            return Misfit(
                f"an earlier step failed on this rank, and {busy} may still write into its "
                f"memory; {AGAIN}",
                way="refuse",
                code="rank_left",
            )
        if any(expects_backward(module.reducer) for module in self._program.reduced):
            return Misfit(
                "a forward pass of a DistributedDataParallel outside of the step has had no backward "
                "pass. The module waits for it, and only your own function can run it; evaluate "
                "under torch.no_grad()",
                way="own",
            )
        return None

    @property
    def has_news(self) -> bool:
        """Whether its first run has shown that kernels of others take more than the plan knows."""
        return bool(self._executor.news)

    @property
    def joins_processes(self) -> bool:
        """Whether its runs launch collectives."""
        return bool(self._groups)

    def run(self, call: StepCall) -> Any:
        """Runs a call of which `failure` said that this variant is for it.

        Raises:
            Declined: all is as before, and the call is for another plan or the user's own function.
        """
        program = self._program
        if self._is_fake:
            raise ExecutionError(
                'the process group is a "fake" one, whose collectives do nothing; plan under it '
                "(step.plan), and run on a group of processes",
                code="fake_group",
            )
        with self._telling():
            misfit, inputs = call.misfit or self._last_failure(), call.inputs
            if misfit is not None and misfit.way == "refuse":
                raise ExecutionError(misfit, code=misfit.code)
            leaves = call.taken(self._taker).leaves
            if self._sizes is not None:
                self._executor.at(self._sizes.values(leaves))
            found = [effect.look_up(leaves) for _, effect in self._effects]
            sources = {key: one.found(call.held, leaves) for key, one in self._sources.items()}
            parameters = self._parameters.found(call.held, leaves)
            call.held, call.inputs = [], []  # what nothing else holds is freed after its last use
        inputs += [tensor for tensor, _ in program.constants]
        if misfit is not None:
            raise Declined(misfit)
        gradients = gradients_left(parameters)
        if self.choice.pages is not None:
            with self._telling():
                self.choice.pages.take_in([(path, inputs[place]) for path, place in self._paged])
                for path, place in self._kept:
                    if type(inputs[place]) in (torch.Tensor, torch.nn.Parameter):
                        take_out(inputs[place], path)
        with interrupts_wait():
            with (
                self._together(gradients),
                self._undisturbed(),
                self._executor.held(),
                self._kernels_alone(),
            ):
                # Not by `get_state`: it makes a tensor, which would count as memory of the step.
                drawn = [generator.clone_state() for generator in self._generators]
                try:
                    run = (
                        self._executor.run
                        if self._executor.is_checked
                        else self._executor.run_checked
                    )
                    result, given = run(inputs)
                except KeyboardInterrupt:
                    leave(self._sequences, "it was interrupted")
                    raise
                except Exception as error:
                    if self._groups:
                        leave(self._sequences, str(error))
                    failure = self._failed(error, drawn)
                    clear_frames(error.__traceback__)  # who keeps the error keeps no tensors
                    for parameter, gradient in gradients if isinstance(failure, Declined) else ():
                        parameter.grad = gradient
                    if failure is error:
                        raise
                    raise failure from error
                self._notes.note(parameters)
                histories, joins = Histories(sources), self._joins(leaves)
                for place, layout in program.result.joined.items():
                    result[place] = joins(result[place], layout)
                result = histories.all(result, program.result.histories)
                ending = Ending(leaves, histories.of, joins, self._skipped(given))
                for (place, effect), what in zip(self._effects, found, strict=True):
                    effect.apply(ending, given[place], what)
            returned, added = pytree.tree_unflatten(result, program.result.spec)
            for (_, container), values in zip(program.result.growing, added, strict=True):
                container.extend(values)
        if self.is_first and self._pool is not None:
            self._pool.release()  # later steps may need less
        return returned

    def _skipped(self, given: list[Any]) -> set[int]:
        """Identities of the optimizers of which every step was left out."""
        stepped = {optimizer for place, optimizer in self._skips if not given[place]}
        return {optimizer for _, optimizer in self._skips} - stepped

    def _joins(self, leaves: list[Any]) -> Callable[[Any, Joined], Any]:
        """Gives the distributed tensors and wrappers that one run leaves, each once."""
        made: dict[int, Any] = {}

        def whole(value: Any, layout: Joined) -> Any:
            if id(layout) not in made:
                form = layout.layout
                if layout.reference is not None:
                    made[id(layout)] = held(layout.reference, leaves)
                else:
                    made[id(layout)] = (
                        form.joined(value) if isinstance(form, Form) else joined(value, form)
                    )
            return made[id(layout)]

        return whole

    @contextmanager
    def _together(self, left: Gradients) -> Iterator[None]:
        """Around a run: sees to it that all ranks launch the same collectives, and makes room. If
        anything fails, the other ranks are told.
        """
        with self._telling():
            if self._groups:
                with interrupts_allowed():
                    begin(self._sequences, is_new=not self._has_begun)
                self._has_begun = True
            self._make_room(left)
            yield

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """In the block, the other ranks are told of what fails: their runs may have begun, and wait
        for this one's.
        """
        try:
            yield
        except BaseException as error:
            leave(self._sequences, str(error) or type(error).__name__)
            raise

    def _undisturbed(self) -> AbstractContextManager[Any]:
        """Around a run that draws random numbers, or watches who draws them: keeps others from
        doing either.
        """
        return watched if self._draws or not self._executor.is_checked else nullcontext()

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
        # What a run does first, and what outlasts it, does not count as its own.
        with self._telling():
            self._make_room(self._left_gradients())
            with self._executor.held():
                held_bytes = 0 if self._pool is None else self._pool.nbytes
        with self._timed() as stopwatch:
            trace = measure_peak(work, device=self._device.type)
        known_bytes = max(self._entering_bytes() - (trace.unseen_freed_bytes or 0), 0)
        self.memory = replace(
            self.memory,
            measured_bytes=self.memory.persistent_bytes
            + held_bytes
            + known_bytes
            + trace.peak_bytes,
            workspace_bytes=_workspace(trace),
            group_bytes=trace.group_bytes,
            extra_measured_s=None if stopwatch is None else stopwatch.extra_s,
            transfers_measured_s=None if stopwatch is None else stopwatch.transfers_s,
            step_measured_s=None if stopwatch is None else stopwatch.step_s,
        )
        return trace.value

    @contextmanager
    def _timed(self) -> Iterator[Stopwatch | None]:
        """In the block, runs have their extra runs timed; None if there are none, or no clock
        would tell: on CUDA, and in a first run, which checks every call.
        """
        again = self.choice.recomputation
        if again is None or self._device.type != "cpu" or not self._executor.is_checked:
            yield None
            return
        transfers = () if again.offloaded is None else again.offloaded.calls
        stopwatch = Stopwatch(again.calls, transfers)
        self._executor.watch(stopwatch)
        try:
            yield stopwatch
        finally:
            self._executor.watch(None)

    def measured_eagerly(self, work: Callable[[], Any]) -> Any:
        """The result of an eager run of the same step; `memory` then tells what it took."""
        # The plan does not contain gradients that the last step left, and eager PyTorch keeps them
        # until the step drops them.
        left_bytes = self._entering_bytes() + sum(
            local_of(gradient).untyped_storage().nbytes() for _, gradient in self._left_gradients()
        )
        self._give_buckets_back()  # eager PyTorch needs them, so they are to count
        trace = measure_peak(work, device=self._device.type)
        known_bytes = max(left_bytes - (trace.unseen_freed_bytes or 0), 0)
        self.memory = replace(
            self.memory,
            eager_measured_bytes=self.memory.persistent_bytes + known_bytes + trace.peak_bytes,
            eager_workspace_bytes=_workspace(trace),
            eager_group_bytes=trace.group_bytes,
        )
        return trace.value

    def _left_gradients(self) -> Gradients:
        """Parameters with the gradients from before the step that nothing reads."""
        return gradients_left([reference.get() for reference in self._dropped])

    def _entering_bytes(self) -> int:
        """Memory from before the step that dies in it, since its tensors are given other data."""
        return sum(self._program.storages[number].size_bytes for number in self._program.entering)

    def _make_room(self, left: Gradients) -> None:
        """Frees what only eager PyTorch keeps from one step to the next."""
        for parameter, _ in left:
            parameter.grad = None
            note_freed(parameter)  # unless the run is done
        if not self._may_be_left:
            left.clear()
        self._give_buckets_back()

    def _give_buckets_back(self) -> None:
        for module in self._program.reduced:
            give_back(module)

    def held(self) -> list[Any]:
        """The largest of the Python objects that the runner is made of."""
        bindings, text = self._executor.bindings, self._executor.generated
        held = [
            self._program,
            self.choice.placed,
            bindings.order,
            bindings.dying,
            bindings.offsets,
            bindings.views,
        ]
        return held if text is None else [*held, text.source, text.steps]

    def take_out(self) -> None:
        """Brings what lies in files back to ordinary memory, until the next run."""
        if not self._offloads:
            return
        program = self._program
        given = [(reference, program.storage_of(slot)) for reference, slot in program.referenced]
        left = [(one.reference, program.storage_of(one.slot)) for one in program.of(Rebind)]
        for reference, number in (*given, *left):
            if number >= 0 and not isinstance(reference, ArgumentReference):
                tensor = reference.get()
                if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    take_out(tensor, reference.path)

    def release(self) -> None:
        """Gives the pool, what a CUDA graph holds, and the room on the disk back until the next
        run, and brings tensors back that lie in files.
        """
        self.take_out()
        self._executor.forget_graph()
        if self._pool is not None:
            self._pool.release()
        if self._tier is not None:
            self._tier.release()
        if self.choice.pages is not None:
            self.choice.pages.release()

    @contextmanager
    def _kernels_alone(self) -> Iterator[None]:
        """Keeps autograd, autocast and function modes out: the program contains the backward pass
        and all casts itself.
        """
        casting = [
            device
            for device in self._devices
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        ]
        around = _without_autocast(casting) if casting else nullcontext()
        with torch.no_grad(), DisableTorchFunction(), around:  # modes have been recorded
            yield

    def _failed(self, error: Exception, drawn: list[torch.Generator]) -> Exception:
        """What to raise for an error of a run."""
        settle()  # until then, collectives under way use memory of the run's
        copies.settle()
        failure = self._executor.failure(error)
        if failure is None:
            return self._left_at_size(error) or error
        changed = self._executor.changed_before(failure)
        if failure.call.is_check:
            restored = self._restored_by(failure.call)
            changed = [path for path in changed if path not in restored]
        where, cause = f"{failure.call.name} at {failure.call.source}", str(error).removesuffix(".")
        if not changed:
            for generator, state in zip(self._generators, drawn, strict=True):
                generator.set_state(state.get_state())
            if failure.call.is_check and not self._groups:
                reason = f"a check at {failure.call.source} does not pass"
                return Declined(Misfit(reason, way="own"))
            if self._may_go_on(error, failure):
                return Declined(Misfit(f"{where} failed: {error}", way="own"))
            if isinstance(error, ExecutionError):
                return self._left_at_size(error) or error
            advice = AGAIN if self._groups else "call the step again"
            return ExecutionError(
                f"{where} failed: {cause}. Nothing had been updated yet; fix the cause and {advice}",
                code="failed", operator=failure.call.name,
                source=str(failure.call.source),
            )  # fmt: skip
        if not isinstance(error, ExecutionError) and self._leaves_what_eager_leaves(failure):
            return ExecutionError(
                f"{where} failed: {cause}. Before that the step has updated {listed(changed)}, as it does in eager PyTorch. All is as "
                "eager PyTorch leaves it; fix the cause or leave this batch out, and go on",
                code="failed_as_eager", operator=failure.call.name, source=str(failure.call.source),
            )  # fmt: skip
        references = [
            (reference, local_of(reference.get()))
            for reference in self._references
            if reference.path in set(changed) and not isinstance(reference, ArgumentReference)
        ]
        if self._groups:
            advice = f"; {AGAIN}"
        elif references:
            advice = ". Load these from a checkpoint before the next call"
        else:  # the next call brings arguments of its own
            advice = ""
        partial = ExecutionError(
            f"{where} failed: {cause}. Already updated, perhaps in part: {listed(changed)}{advice}",
            code="torn", operator=failure.call.name, source=str(failure.call.source),
        )  # fmt: skip
        partial.__cause__ = error
        return PartialUpdate(
            partial, [(reference, tensor, version_of(tensor)) for reference, tensor in references]
        )

    def _left_at_size(self, error: Exception) -> Declined | None:
        """Where a plan for many sizes turns out not to hold for those of the call, before anything
        has changed: leaves this call to the step's own function, and has others of the same sizes
        captured by themselves. None for any other error, and where other ranks have heard of this
        run.
        """
        is_code = isinstance(error, ExecutionError) and error.code == "differs_from_capture"
        if self._sizes is None or self._groups or not is_code:
            return None
        self._sizes.excluded.add(self._executor.sizes)
        return Declined(Misfit(str(error), way="own"))

    def _may_go_on(self, error: Exception, failure: Failure) -> bool:
        """Whether the step's own code may go on where a call has failed before any change: it may
        not come there, or catch the error.
        """
        call = failure.call
        if self._groups:
            return False
        made = [self._program.slots[slot] for slot in call.outputs if slot is not None]
        if isinstance(error, (ArithmeticError, ValueError)) and not any(made):
            return True  # an error of Python's numbers
        if self._program.may_raise(call):
            # The step's own function raises it with the type that the caller may handle.
            return not isinstance(error, (ExecutionError, torch.OutOfMemoryError))
        return call.source.is_tried and not isinstance(error, ExecutionError)

    def _leaves_what_eager_leaves(self, failure: Failure) -> bool:
        """After a step has failed that has changed something: leaves the state as eager PyTorch
        does. False if that cannot be done, or cannot be proved.
        """
        program, number = self._program, self._number(failure)
        is_simple = not (
            self._groups
            or failure.call.source.is_tried  # in eager PyTorch the step may have gone on
            or self._device.type != "cpu"
            or self._has_checks
            or self.choice.recomputation is not None
            or any(isinstance(reference, GradientReference) for reference in self._consumed)
            or not all(effect.is_by_calls for effect in program.effects)
            or program.result.growing
            or program.assigned()
            or any(call.skip_if is not None for call in program.calls[:number])
        )
        # What the step puts into a place, it puts there once it has made it.
        made = {slot for call in program.calls[number:] for slot in call.outputs}
        if not is_simple or any(slot not in made for _, slot in rebound(program)):
            return False
        missing = self._executor.missing_before(failure)
        places = {
            slot: reference
            for reference, slot in program.referenced
            if not isinstance(reference, ArgumentReference)
        }
        if missing is None or any(slot not in places for call in missing for slot in call.refs()):
            return False
        values = {slot: local_of(places[slot].get()) for call in missing for slot in call.refs()}
        for call in missing:
            call.run(values)
        return True

    def _number(self, failure: Failure) -> int:
        """The number of the call that a run stopped at."""
        return self._executor.bindings.order[failure.step]

    def _restored_by(self, call: Call) -> set[str]:
        """Paths of what a check has put back, and of what the step overwrites before it reads it,
        whatever the check's outcome.
        """
        program = self._program
        copies = call.args[-1] if call.target in (check, check_data) and call.args[2:] else ()
        storages = {program.storage_of(original.slot) for original, _ in copies}
        storages |= {place for place, one in enumerate(program.storages) if one.is_begun_anew}
        return {
            reference.path
            for reference, slot in program.referenced
            if program.storage_of(slot) in storages
        }


@contextmanager
def _without_autocast(devices: Iterable[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _found(reference: Any, leaves: list[Any]) -> Any:
    """What a run takes from a reference. For a distributed tensor this is this process's part."""
    return local_of(held(reference, leaves))


def _generators(program: Program) -> Iterator[torch.Generator]:
    """PyTorch's own random generators that calls may draw from, and those that calls are given."""
    given = {
        id(value): value for call in program.calls for value in (*call.args, *call.kwargs.values())
    }
    yield torch.default_generator
    if any(call.random for call in program.calls):
        devices = {meta.device for meta in program.slots if meta is not None}
        used = {device.index or 0 for device in devices if device.type == "cuda"}
        for index, generator in enumerate(torch.cuda.default_generators):
            if index in used:
                yield generator
    yield from (value for value in given.values() if isinstance(value, torch.Generator))


def _workspace(trace: MemoryTrace) -> int | None:
    without = trace.peak_without_workspace_bytes
    return None if without is None else trace.peak_bytes - without


def _kind(meta: TensorMeta | None, layout: Any) -> Kind:
    assert meta is not None, "state is made of tensors"
    return meta.shape, meta.dtype, meta.device, meta.stride, layout


def listed(paths: list[str], most: int = 4) -> str:
    """Paths for a message, no more than a few of them."""
    shown = ", ".join(paths[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"
