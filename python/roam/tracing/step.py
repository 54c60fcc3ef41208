"""Captures a whole training step: traces until two runs agree, and leaves the user's objects as
they were.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal
from weakref import WeakSet

import torch

from roam._core import Graph
from roam.distributed.agreement import note_rank
from roam.errors import MOST_SETTLING, CaptureError
from roam.garbage import collections_wait
from roam.interrupts import interrupts_wait, signals_wait
from roam.kernels.calls import Placed, placed_calls
from roam.program.collectives import check_sequence
from roam.program.diff import agrees, asks_the_same, difference, is_resized, share
from roam.program.early_checks import checks_first
from roam.program.effects import rebound
from roam.program.gradient_lifetime import settle_gradients, used_gradients
from roam.program.ir import Program
from roam.program.lower import Lowering, device_of
from roam.program.notes import notes_on
from roam.program.operators import on_list
from roam.program.passes import (
    accumulate_in_place,
    assign_early,
    prune,
    with_numbers,
    with_state,
    with_used_state,
)
from roam.program.resized import expressions_of, replaced_in
from roam.state.arguments import Taken, Taker, argument_path, live_integers
from roam.state.attribute_reads import Reads
from roam.state.autograd_hooks import check_beneath
from roam.state.code_guards import Reliance
from roam.state.discovery import reach_of
from roam.state.equality import MISSING, Misfit
from roam.state.freed_gradients import REMEDY, lacks
from roam.state.global_flags import Switches
from roam.state.global_state import check_surroundings
from roam.state.guards import ArgGuard, Guards
from roam.state.policies import Policies, Policy, Retrace
from roam.state.reach import Reach
from roam.state.references import ArgumentReference, GradientReference, number_references
from roam.state.settings import Setting, Settings, in_place
from roam.state.sizes import plain_number
from roam.state.snapshot import DRAWN, Snapshot, place_of
from roam.state.step_call import StepCall
from roam.torch_compat.private import set_up_shards
from roam.tracing.compiled.code import UsedCode
from roam.tracing.compiled.regions import Regions
from roam.tracing.compiled.repeated_blocks import compile_blocks
from roam.tracing.cuda_estimate.absent import estimate_of
from roam.tracing.endings import OUTSIDE
from roam.tracing.fake_kernels.cache import Remembered
from roam.tracing.fake_kernels.sized import SizedKernels
from roam.tracing.fake_kernels.tensors import marked_fakes
from roam.tracing.fakes.imports import clear_fakes
from roam.tracing.numbers.rng import watched
from roam.tracing.numbers.scalar_guards import CHANCE
from roam.tracing.stand_ins.fake_state import FakeState, refuse
from roam.tracing.stand_ins.grad_scaler import check_scaler
from roam.tracing.stand_ins.unnoticed_reads import may_miss
from roam.tracing.tracer import trace

_MOST_TRACES = 3
"""A first step, a steady one, and the steady one again."""
_MOST_KNOWN = 8
"""Programs that are remembered for later captures of the same step."""


@dataclass(frozen=True)
class Variant:
    """One program with its graph: of the first step, which makes the optimizer's state, or of every
    later one.

    What takes time to find out about the program is found out only when it is asked for.
    """

    program: Program
    """What a run does; see `checks_first`."""
    name: str
    notes: Sequence[tuple[str, str]] = ()
    """What to tell people about its graph."""
    _: KW_ONLY
    as_written: Program
    """What eager PyTorch does."""
    runs_once: bool = False

    @cached_property
    def device(self) -> torch.device:
        """The device that most of its bytes are on."""
        return device_of(self.program)

    @cached_property
    def placed(self) -> list[Placed | None]:
        """For each call, how its kernel can write where a plan wants."""
        return placed_calls(self.program, self.device)

    @property
    def estimate(self) -> str:
        """What its graphs may be wrong about; empty if they are exact."""
        return estimate_of(torch.device(self.device.type))

    @cached_property
    def graph(self) -> Graph:
        """The graph, as if every kernel could write where a plan wants."""
        return self.lowering().graph()

    @property
    def graph_with_states(self) -> Graph:
        """The same for plans within a memory limit: see `capture`."""
        return self.lowering().with_states().graph()

    def lowering(self) -> Lowering:
        """The program, lowered as for `graph`."""
        return Lowering(
            self.program,
            self.placed,
            name=self.name,
            device=self.device.type,
            notes=self.notes,
            estimate=self.estimate,
        )


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured step and what its plans depend on."""

    first: Variant | None
    """The step that makes state; None if a call leaves the same state behind that it found."""
    steady: Variant | None
    """None if it can be captured only when the first step has run."""
    guards: Guards
    arguments: ArgGuard
    compiled: UsedCode
    settings: list[Settings]
    """What the step sets itself before it does what was captured; the guards expect it set."""

    def failure(self, call: StepCall) -> Misfit | None:
        """None if a call finds everything as capture did, else what changed."""
        return self.state_failure(call) or self.arguments.failure(call) or self.compiled.failure()

    def state_failure(self, call: StepCall, *, is_first: bool | None = None) -> Misfit | None:
        """The same for the state alone; what the step sets itself need not be set yet.

        Args:
            is_first: of the variant, as in `Settings`; None for any.
        """
        failure = self._guards_failure(call)
        return None if failure is None or self.pending(call, is_first=is_first) else failure

    def pending(self, call: StepCall, *, is_first: bool | None = None) -> Settings | None:
        """What has to be set, as the step would, for a call to find all as capture did; None if
        that is nothing, or if there is more to it.
        """
        if not self.settings or self._guards_failure(call) is None:
            return None
        return next((one for one in self.settings if self._waits_for(one, is_first)), None)

    def _guards_failure(self, call: StepCall) -> Misfit | None:
        if self.guards not in call.asked:
            call.asked[self.guards] = self.guards.failure()
        return call.asked[self.guards]

    def _waits_for(self, settings: Settings, is_first: bool | None) -> bool:
        if is_first not in (None, settings.is_first) or not settings.is_pending():
            return False
        with in_place(settings.all):
            return self.guards.failure() is None

    def sets_too(self, other: CapturedStep) -> bool:
        """Takes over what another capture has found that the step sets, if that one is the same
        apart from this. Returns whether it is.
        """
        (settings,) = other.settings
        pairs = (self.first, other.first) if settings.is_first else (self.steady, other.steady)
        mine, its = (None if one is None else one.as_written for one in pairs)
        if (
            mine is None
            or its is None
            or self.guards is not other.guards
            or mine.lacking != its.lacking
            or _absent(mine) != _absent(its)
            or not asks_the_same(mine, its)
            or difference(mine, its) is not None
        ):
            return False
        self.settings[:] = [settings, *self.settings][:_MOST_KNOWN]
        return True


@dataclass(slots=True)
class Known:
    """What captures of a step found, for the later ones of the same step.

    Attributes:
        policies: how plans treat what the step, or its caller, changes.
        programs: steady ones that two traces agreed on; the most recent last.
        guards: of the captures that are kept.
        traces: how many times the user's function has been run on fakes.
        taker: takes the arguments of calls apart.
        kernels: what kernels made of fake tensors.
        layouts: during a capture, how results of operators on distributed tensors are placed.
        caches: by identity, functions that keep results. Snapshots drop those results that hold
            fakes.
        regions: the compiled functions that the step calls.
        compiles_blocks: whether the repeated blocks of the step's models are to be compiled.
        is_captured_once: whether all later calls are to run by the plans of the first one.
        recorded: the last trace as it was recorded. The next trace shares its calls where they are
            equal.
        settling: at how many calls in a row the user's function has run in a plan's place, because
            it may still set something up.
    """

    policies: Policies = field(default_factory=Policies)
    programs: list[Program] = field(default_factory=list)
    guards: WeakSet[Guards] = field(default_factory=WeakSet)
    traces: int = 0
    settling: int = 0
    taker: Taker = field(default_factory=Taker)
    kernels: Remembered = field(default_factory=Remembered)
    layouts: dict[Any, Any] = field(default_factory=dict)
    caches: dict[int, Any] = field(default_factory=dict)
    regions: Regions = field(default_factory=Regions)
    compiles_blocks: bool = False
    is_captured_once: bool = False
    recorded: Program = field(default_factory=Program)

    def climb(self, policy: Policy, places: Collection[Any]) -> None:
        """Gives places a policy, where theirs is a lower one."""
        self.policies.climb(policy, places)
        opened = self.policies.below(Policy.FIXED, self.taker.opened)
        self.taker = replace(self.taker, opened=frozenset(opened))

    def share(self, program: Program) -> None:
        """Makes a trace that has just been recorded share what it can with the last one."""
        share(program, self.recorded)
        self.recorded = Program(list(program.calls), list(program.slots), list(program.storages))

    def pruned(self, program: Program) -> Program:
        """A trace pruned, which shares what it can with the last program that two traces agreed
        on.
        """
        program = prune(program)
        if self.programs:
            share(program, self.programs[-1])
        return program

    def has_agreed(self, program: Program) -> bool:
        """Whether two traces have agreed on a program already, for arguments of these sizes or
        others, with the same state or other state that it does not use.
        """
        if self.programs and next(expressions_of(program), None) is not None:
            program = replaced_in(program, plain_number)
        if any(is_resized(known, program) for known in reversed(self.programs)):
            return True
        alike = [known for known in self.programs if len(known.calls) == len(program.calls)]
        if not alike:
            return False
        program = with_used_state(program)
        return any(is_resized(with_used_state(known), program) for known in reversed(alike))

    def add(self, program: Program) -> None:
        """Notes a program on which two traces agree. A copy of it is kept, since settling gradients
        changes the program.
        """
        self.programs.append(
            replace(program, effects=list(program.effects), absent=list(program.absent))
        )
        del self.programs[:-_MOST_KNOWN]

    def shared(self, guards: Guards) -> Guards:
        """Guards of an earlier capture that expect the same, if there are any; so one stands for
        all shapes of a batch.
        """
        alike = (
            known for known in self.guards if known.stands_for(guards) and known.failure() is None
        )
        found = next(alike, guards)
        self.guards.add(found)
        return found


@dataclass(slots=True)
class _Settled:
    """Plain values that a step sets, maybe to the same whatever they are.

    Attributes:
        settings: these.
        program: what the step does where they are not set yet.
        refusal: to be raised if it does something else where they are.
    """

    settings: list[Setting]
    program: Program
    refusal: CaptureError


def capture(
    train_step: Callable[..., Any],
    *args: Any,
    step: Literal["first", "steady"] = "steady",
    random_states: bool = False,
    **kwargs: Any,
) -> Graph:
    """Captures one whole training step (forward, backward and optimizer) as a graph.

    Runs the user's function on fake tensors, unmodified, with the user's own modules and
    optimizers, and leaves these exactly as they were. No weights are allocated and nothing is
    computed.

    Args:
        train_step: the user's function. Modules, optimizers and schedulers are found among its
            arguments, in its closure, in the object that it is bound to, and in the globals that it
            names.
        *args, **kwargs: what it would be called with.
        step: ``"steady"``, a step that finds the optimizer's state in place, or ``"first"``, the
            step that makes it.
        random_states: whether the graph reads the states of random generators (5,056 bytes each on
            the CPU), so that plans within a memory limit may make dropout's masks and other random
            tensors again.

    Returns:
        The graph, with sizes in bytes and operators in the order in which eager PyTorch runs them.

    Raises:
        CaptureError: the step cannot be captured exactly; the error names the operator and the
            user's line.

    Example:
        >>> def train_step(model, optimizer, x, y):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> graph = roam.capture(train_step, model, optimizer, x, y)
    """
    with collections_wait():
        variant = capture_variant(train_step, args, kwargs, step)
        return variant.graph_with_states if random_states else variant.graph


def capture_variant(
    train_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: Literal["first", "steady"] = "steady",
) -> Variant:
    """As `capture`, with the program that the graph is of."""
    if step not in ("first", "steady"):
        raise CaptureError(f"step must be 'first' or 'steady', not {step!r}", code="argument")
    captured = capture_step(train_step, args, kwargs)
    if step == "steady" and captured.steady is None and captured.first is not None:
        raise captured.first.program.unsettled or CaptureError(
            "what the steady step does is not known before the first step has run; call the compiled step, or capture "
            "with step='first'",
            code="unsettled",
        )
    variant = captured.first if step == "first" else captured.steady or captured.first
    if variant is None:
        raise CaptureError(
            "there is no first step to capture: the optimizer has its state already, or keeps "
            "none; capture with step='steady'",
            code="no_first_step",
        )
    return variant


def capture_step(
    train_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    keep_grads: bool = False,
    known: Known | None = None,
    asks_kernels: bool = False,
    sized: SizedKernels | None = None,
) -> CapturedStep:
    """As `capture`, with the programs that the runtime runs and the guards that tell when they fit.

    Args:
        train_step, args, kwargs: the user's function and a call of it.
        keep_grads: whether `.grad` of every parameter outlives the step, as under eager PyTorch.
        known: what earlier captures of the same step found; what this one finds is added.
        asks_kernels: whether real kernels may be run on zeros, where fake ones do not know how
            results lie in memory.
        sized: makes what follows from the symbols of sizes; None if all sizes are those of the
            call.
    """
    # No other capture meanwhile: tracing puts fakes and stand-ins where other threads would find
    # them.
    with signals_wait(), watched, collections_wait():
        note_rank()
        check_surroundings()
        if torch.is_autocast_cache_enabled() and any(
            map(torch.is_autocast_enabled, ("cpu", "cuda"))
        ):
            raise CaptureError(
                "autocast is on around the step, and its cache may hold casts of weights from before; enter it in the step, "
                "or with cache_enabled=False",
                code="autocast_cache",
            )
        known = Known() if known is None else known
        known.regions.start()
        call = _Call(train_step, args, kwargs, keep_grads, known, asks_kernels, sized)
        are_left: Callable[[], bool] | None = None
        try:
            with marked_fakes() as are_left:
                while True:
                    try:
                        # Captured as if all that the step sets were set, as it is next time.
                        with in_place(call.settings):
                            return _captured(call)
                    except Retrace as found:
                        if found.first is not None:
                            with in_place(call.settings):
                                found.first()
                            continue
                        call.settled = found.settled
                        for policy, places in found.climbs.items():
                            known.climb(policy, places)
                    except CaptureError as error:
                        if call.settled is not None and error.code == "step_raised":
                            # It was run with less than it leaves at once.
                            raise call.settled.refusal from error
                        raise
        finally:
            known.layouts.clear()  # those of another rank, or of a new mesh, may be others
            if are_left is None or are_left():
                clear_fakes(known.caches)


@dataclass(slots=True)
class _Call:
    """A call that is captured, and what its traces have found so far.

    Attributes:
        train_step, args, kwargs, keep_grads, known, asks_kernels, sized: as of
            `capture_step`.
        reads: what is known of the attributes that the step looks at.
        lacking: paths of the gradients that are not there if an earlier plan has freed them.
        settled: what the step is supposed to have set.
    """

    train_step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keep_grads: bool
    known: Known
    asks_kernels: bool
    sized: SizedKernels | None
    reads: Reads = field(default_factory=Reads)
    lacking: set[str] = field(default_factory=set)
    settled: _Settled | None = None

    @property
    def settings(self) -> list[Setting]:
        """What the next trace supposes to be set."""
        return [] if self.settled is None else self.settled.settings

    def reached(self, taken: Taken) -> Reach:
        """What the step can reach, with the arguments taken apart like this."""
        policies = self.known.policies
        return reach_of(
            self.train_step,
            self.args,
            self.kwargs,
            self.reads,
            [id(parts.value) for parts in taken.objects.values()],
            taken.closed,
            policies.places(Policy.APPENDED),
        )


def _captured(call: _Call) -> CapturedStep:
    args, kwargs, known, reads = call.args, call.kwargs, call.known, call.reads
    taker = call.known.taker
    taken = taker.take(args, kwargs)
    reach = call.reached(taken)
    # As the first forward pass would, so that it can be planned.
    is_changed = set_up_shards([module for _, module in reach.modules])
    if known.compiles_blocks and compile_blocks(module for _, module in reach.modules):
        is_changed = True
    if is_changed:
        reach = call.reached(taken)
    if reads.is_narrow or reads.everything:
        _close_shared(reach, known)
    if not reads.is_traced:  # those of modules that a trace has imported may hold its fakes
        known.caches.update((id(cache), cache) for _, cache in reach.caches)
    floats: Collection[int] = [place for place in taken.outer if type(taken.leaves[place]) is float]
    integers: Collection[int] = ()
    if known.is_captured_once or taker.varied:
        varied = None if known.is_captured_once else taker.varied
        integers = live_integers(taken, args, kwargs, varied, known.policies)
    if integers and any(map(may_miss, reach.code)):
        integers = ()
    reliance = Reliance()
    try:
        _refuse_unseen_state(reach)
        tracer = _Tracer(call, reach, reliance)
        programs = None
        if integers:
            programs = replace(tracer, integers=integers).live_programs()
            if programs is None:
                paths = taken.paths(argument_path, args, kwargs)
                known.climb(Policy.FIXED, [(paths[place], int) for place in integers])
                integers = ()
        if floats and programs is None:
            programs = tracer.live_programs()
        tracer = replace(tracer, integers=integers)
        if programs is None:
            # An argument whose very value Python needs cannot be live; it is guarded by value
            # instead, and so is a float that decides something.
            floats, programs = (), tracer.programs(live_arguments=False)
        if call.settled is not None and not _is_settled(call.settled, programs[0]):
            raise call.settled.refusal
        kept = list(number_references(reach, known.policies.places(Policy.COUNTED)))
        if (kept or not _has_known_optimizers(reach)) and not tracer.does_the_same(
            programs[0], live_numbers=False
        ):
            raise CaptureError(
                "the step does not treat a number that may change (of an optimizer's group, or that the step keeps) like a "
                "plain number: capture puts an object of another type in its place; test with isinstance(x, float) instead of "
                "type(x), or keep the number in a tensor",
                code="value_reached_python",
            )  # fmt: skip
        if without := _freed_before(programs[0]) - call.lacking:
            call.lacking |= without
            raise Retrace
    except CaptureError as error:
        reads.check()
        reads.add_functions(reliance.unreached(reach))
        if error.path is not None and reads.defer(reach.edge_to(error.path)):
            raise Retrace from error
        _close_shared(reach, known)
        if reach.may_be_narrower():
            reads.narrow()
            raise Retrace from error
        raise
    for program in programs:
        check_sequence(program)
        program.lacking = set(call.lacking)
    reads.check()
    if known.compiles_blocks and not any(
        on_list(call.target) for program in programs for call in program.calls
    ):
        raise CaptureError(
            "kernels='inductor' compiles repeated blocks, and the step runs none that it can compile: modules with children, at "
            "least two of one class in one ModuleList or Sequential, without hooks; compile what you want by module.compile(), "
            "and leave kernels= out",
            code="no_repeated_blocks",
        )  # fmt: skip
    held_elsewhere = reach.held_elsewhere
    reach = _what_was_read(call, reach, taken)
    reach.held_elsewhere = held_elsewhere
    first, steady = programs[0], programs[-1]
    name = getattr(call.train_step, "__name__", type(call.train_step).__name__)
    guards = known.shared(
        Guards(
            reach,
            [reference.path for reference in kept if reference.get() is not None],
            reliance.settled(reach),
        )
    )
    received = {
        reference.index
        for reference, _ in programs[0].referenced
        if isinstance(reference, ArgumentReference)
    }
    live = [*floats, *integers]
    arguments = ArgGuard(args, kwargs, guards, live, received, taker)
    if integers:
        known.taker = replace(known.taker, live=frozenset({int}))
    if first.unsettled is not None:
        settle_gradients(first, set(), keep_grads=True)
        first_step = _first(first, name, guards)
        settings = [Settings(call.settings, is_first=True)] if call.settings else []
        return CapturedStep(first_step, None, guards, arguments, known.regions.used(), settings)
    if steady is not first and call.sized is None:
        known.add(steady)
    carried = {
        reference.path
        for reference, _ in steady.referenced
        if isinstance(reference, GradientReference)
    }
    for program in programs:
        settle_gradients(program, carried, call.keep_grads)
    steady = prune(steady)
    is_steady = difference(first, programs[-1]) is None and _absent(first) == _absent(steady)
    return CapturedStep(
        None if is_steady else _first(first, name, guards),
        Variant(checks_first(steady), name, notes_on(steady, guards), as_written=steady),
        guards,
        arguments,
        known.regions.used(),
        [Settings(call.settings, is_first=not is_steady)] if call.settings else [],
    )


def _is_settled(settled: _Settled, after: Program) -> bool:
    """Whether the step does the same where the values are set as it did before, except for setting
    them.
    """
    before = settled.program
    return asks_the_same(before, after) and difference(before, after) is None


def _freed_before(program: Program) -> set[str]:
    """Paths of the gradients, freed by earlier plans, to which the traced step adds.

    Raises:
        CaptureError: it uses one for anything else.
    """
    slots = {reference.path: slot for reference, slot in program.referenced}
    for reference in used_gradients(program):
        if lacks(reference.parameter.get()):
            user = next(call for call in program.calls if slots[reference.path] in call.refs())
            raise CaptureError(
                f"{user.name} at {user.source} uses {reference.path} of an earlier step, whose plan has freed it where eager "
                f"PyTorch still has it; {REMEDY}",
                code="freed_gradient", operator=user.name, source=str(user.source),
            )  # fmt: skip
    return {
        reference.path
        for reference, _ in program.referenced
        if isinstance(reference, GradientReference)
        and reference.get() is MISSING
        and lacks(reference.parameter.get())
    }


def _what_was_read(call: _Call, reach: Reach, taken: Taken) -> Reach:
    """What of a traced step's reach is to be guarded.

    Args:
        reach: of the trace.
        taken: the arguments.

    Raises:
        Retrace: the trace was made with more tensors, optimizers or live numbers than that.
    """
    if reach.reads.is_narrow or reach.reads.everything:
        return reach
    changing = call.known.policies.places(Policy.COUNTED)
    reach.reads.narrow()
    narrow = call.reached(taken)
    _close_shared(narrow, call.known)
    if reach.reads.has_strays() or reach.reads.everything:
        reach.reads.everything = True
        raise Retrace
    if narrow.faked() != reach.faked() or _numbers(narrow, changing) != _numbers(reach, changing):
        raise Retrace
    return narrow


def _close_shared(reach: Reach, known: Known) -> None:
    """Counts the containers among the arguments as state that the step's state holds too.

    Raises:
        Retrace: there are such containers, and the trace had others in their places.
    """
    if reach.shared:
        closed = {id(container): container for container in reach.shared}
        known.taker = replace(known.taker, closed={**known.taker.closed, **closed})
        raise Retrace


def _numbers(reach: Reach, changing: Collection[str]) -> list[tuple[str, int]]:
    return [
        (reference.path, id(reference.space.holder))
        for reference in number_references(reach, changing)
    ]


def _first(program: Program, name: str, guards: Guards) -> Variant:
    program = prune(program)
    notes = notes_on(program, guards)
    return Variant(
        checks_first(program), f"{name} (first step)", notes, as_written=program, runs_once=True
    )


def _refusal(moved: list[str], lasting: list[str], *, may_settle: bool) -> CaptureError:
    """The refusal of a step that changes Python state.

    Args:
        moved: all that it changes.
        lasting: what it changes at later calls too. One of these is named if there is any, since
            the others are allowed.
        may_settle: whether the step may change nothing once it has run.
    """
    places = set(map(place_of, lasting))
    reason = next((reason for reason in moved if place_of(reason) in places), moved[0])
    remedy = (
        f"{CHANCE}; seed the generator outside of the step" if reason.endswith(DRAWN) else OUTSIDE
    )
    if may_settle:
        remedy += "; if the step sets this only once, call it once first"
    error = CaptureError(
        f"the step changes Python state in a way that a plan cannot repeat: {reason}; {remedy}",
        code="moved",
    )
    if may_settle:  # what is exchanged once is rather exchanged at every call
        is_exchanged = any(isinstance(one, Misfit) and one.may_recur for one in moved)
        error.settles = 1 if is_exchanged else MOST_SETTLING
    return error


def _resized(program: Program) -> str | None:
    """Which tensor of the step's state has another shape each time, and what to do; None if none
    has.
    """
    found = {reference.path: program.slots[slot] for reference, slot in program.referenced}
    for reference, slot in rebound(program):
        before, after = found.get(reference.path), program.slots[slot]
        if before is not None and after is not None and before.shape != after.shape:
            return (
                f"the step finds a tensor of shape {before.shape} at {reference.path} and leaves one of shape {after.shape}, so each "
                "call would need another plan; make a tensor of full size there before the first call, and write the rows into "
                "it in place (bank.copy_(torch.cat([bank, rows])[-n:])), with a mask or a count where it is not full yet"
            )
    return None


def _needs_others(error: CaptureError, programs: list[Program]) -> bool:
    """Whether the step cannot be traced once more because other code has to run in between: the
    state of an optimizer is not known yet, or the step uses up gradients that it does not make.
    """
    if error.code == "unknown_state":
        return True
    return (
        error.code == "step_raised"
        and len(programs) == 1
        and any(isinstance(reference, GradientReference) for reference, _ in programs[0].referenced)
    )


def _has_known_optimizers(reach: Reach) -> bool:
    """Whether all optimizers are PyTorch's own, which keep what they know in their state and take
    numbers for what they are.
    """
    return all(
        type(optimizer).__module__.startswith("torch.optim.") for _, optimizer in reach.optimizers
    )


def _absent(program: Program) -> set[str]:
    return {reference.path for reference in program.absent}


@dataclass(slots=True)
class _Faked:
    """What a tracer traces: the user's objects with fakes.

    Attributes:
        state, args, kwargs: the fakes, and the step's arguments with them.
        inside: what the objects held before the first trace.
        starts: which places shared tensors before each trace.
    """

    state: FakeState
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inside: Snapshot
    switches: Switches
    starts: list[list[int]] = field(default_factory=list)

    def moved(self) -> list[str]:
        """What traces have changed that they may not."""
        return [*self.inside.moved(), *filter(None, [self.switches.moved()])]


@dataclass(slots=True)
class _Tracer:
    """Traces one call of the user's function, any number of times, each from the state in which it
    was found.
    """

    call: _Call
    reach: Reach
    reliance: Reliance
    """What its traces rely on without holding it."""
    integers: Collection[int] = ()
    """The places of the integers among the flattened arguments that are live where floats are."""
    same_with_plain: bool = False
    """Whether one of the traces that agree had plain arguments where another had live ones."""

    @interrupts_wait()
    def programs(self, *, live_arguments: bool) -> list[Program]:
        """Successive steps, until two in a row are the same program, or one is known."""
        self.reach.reads.disturbed.clear()
        try:
            programs = self._programs(live_arguments, True, only_first=False)
        except CaptureError:
            self.reach.reads.check_others()
            raise
        self.reach.reads.check_others()
        self._check_alone(programs, live_arguments)
        return programs

    def _check_alone(self, programs: list[Program], live_arguments: bool) -> None:
        """Refuses a step of which no two traces in a row agree if another trace from the same state
        differs: it depends on something that no guard sees.
        """
        error = programs[0].unsettled
        if isinstance(error, _Unlike):
            error = error.refusal
        elif not isinstance(error, CaptureError) or error.code != "step_raised":
            return
        if not self.does_the_same(programs[0], live_arguments=live_arguments, stirs=True):
            raise error

    def does_the_same(
        self,
        program: Program,
        *,
        live_arguments: bool = False,
        live_numbers: bool = True,
        stirs: bool = False,
    ) -> bool:
        """Whether the step does what a program of it does if it is traced once more, from the state
        in which it was found, with other things in some places.

        Args:
            program: of a trace with live numbers.
            live_arguments, live_numbers: as of `trace`.
            stirs: whether Python's and NumPy's generators give other numbers. Then the trace has
                the same live numbers as the program.
        """
        (other,) = self._programs(live_arguments, live_numbers, only_first=True, stirs=stirs)
        if stirs:
            return difference(program, other) is None
        self.reach.reads.check_others()
        if self.call.sized is not None and not live_numbers:
            program, other = (replaced_in(one, plain_number) for one in (program, other))
        return agrees(program, other)

    def _programs(
        self, live_arguments: bool, live_numbers: bool, *, only_first: bool, stirs: bool = False
    ) -> list[Program]:
        programs: list[Program] = []
        plain: Program | None = None
        change: str | None = None
        with self._faked() as faked:
            if stirs:
                faked.inside.stir()
            tries_plain = live_arguments and not only_first and self.call.sized is None
            while len(programs) < _MOST_TRACES:
                # The trace that agrees also shows what the step does with plain arguments.
                is_plain = tries_plain and len(programs) == 1
                tries_plain = tries_plain and not programs
                try:
                    program = self._traced(faked, live_arguments and not is_plain, live_numbers)
                except CaptureError as error:
                    if not programs or not _needs_others(error, programs):
                        raise
                    programs[-1].unsettled = error
                    return programs
                has_moved = bool(faked.moved())
                if is_plain and not has_moved:
                    plain = program
                    live = _with_live(plain, programs[0], faked.state.leaves)
                    if asks_the_same(programs[0], live) and not self._unlike(programs[0], live):
                        self.same_with_plain = True
                        return [programs[0], live]
                    faked.inside.stir()
                    continue
                programs.append(program)
                if not live_numbers:
                    return programs
                if has_moved:
                    raise self._followed(faked, programs)
                if (
                    only_first
                    or program.unsettled is not None
                    or self.call.known.has_agreed(program)
                ):
                    return programs
                if len(programs) == 2 and (change := self._unlike(*programs)) is None:
                    self.same_with_plain = plain is not None and agrees(programs[1], plain)
                    return programs
                if len(programs) == 2 and plain is not None:
                    live = _with_live(plain, programs[1], faked.state.leaves)
                    if asks_the_same(programs[1], live) and not difference(programs[1], live):
                        return programs
                if len(programs) > 2 and (change := difference(*programs[-2:])) is None:
                    return programs
                faked.inside.stir()
        refusal = CaptureError(
            _resized(programs[0])
            or f"the step did different things in two traces from the same state: {change}; let the "
            "step depend on its arguments and state alone",
            code="unstable",
        )
        if faked.starts[-1] == faked.starts[-2]:
            raise refusal
        programs[0].unsettled = _Unlike(refusal)
        return programs[:1]

    @contextmanager
    def _faked(self) -> Iterator[_Faked]:
        """A block in which the user's objects hold fakes."""
        state = FakeState(
            self.reach,
            self.call.args,
            self.call.kwargs,
            self.call.known.policies,
            taker=self.call.known.taker,
            asks_kernels=self.call.asks_kernels,
            remembered=self.call.known.kernels,
            reliance=self.reliance,
            regions=self.call.known.regions,
            layouts=self.call.known.layouts,
            integers=self.integers,
            lacking=self.call.lacking,
            sized=self.call.sized,
        )
        snapshot, switches = Snapshot(self.reach, leaves_others=True), Switches()
        try:
            args, kwargs = state.enter()
            yield _Faked(state, args, kwargs, Snapshot(self.reach, leaves_others=True), switches)
        finally:
            switches.restore()
            snapshot.restore(state.fakes())
            state.leave()

    def _traced(self, faked: _Faked, live_arguments: bool, live_numbers: bool) -> Program:
        """One more trace, pruned.

        Raises:
            Retrace: the step looks at more than was known.
        """
        reads, known = self.reach.reads, self.call.known
        known.traces += 1
        faked.starts.append(faked.state.sharing())
        try:
            program = trace(
                faked.state,
                self.call.train_step,
                faked.args,
                faked.kwargs,
                live_arguments=live_arguments,
                live_numbers=live_numbers,
            )
        except CaptureError:
            self._check_unread()
            raise
        self._check_unread()
        if self.call.sized is None:  # of equal numbers only some may follow from symbols
            known.share(program)
        reads.check()
        reads.add_functions(self.reliance.unreached(self.reach))
        if self.reach.may_be_narrower():
            reads.narrow()
            raise Retrace
        accumulate_in_place(program)
        program = assign_early(program)
        return known.pruned(program) if self.call.sized is None else prune(program)

    def _followed(self, faked: _Faked, programs: list[Program]) -> Exception:
        """What to raise for changes of Python state that the last of these programs has made:
        `Retrace` with the policies that follow them, or with what to set before, or else the
        refusal.
        """
        found = {
            policy: self.call.known.policies.below(policy, paths)
            for policy, paths in faked.inside.following().items()
        }
        climbs: dict[Policy, Collection[Any]] = {
            policy: paths for policy, paths in found.items() if paths
        }
        if climbs:
            return Retrace(climbs)
        moved = faked.moved()
        if self.call.settled is None and len(programs) == 1 and not faked.switches.moved():
            settings = faked.inside.settings()
            if settings:
                refusal = _refusal(moved, [], may_settle=True)
                return Retrace(settled=_Settled(settings, programs[0], refusal))
        lasting = self._lasting(faked)
        return _refusal(moved, lasting, may_settle=not faked.switches.moved() and not lasting)

    def _unlike(self, first: Program, later: Program) -> str | None:
        """None if a later trace is the same program, or the first one again but for the state that
        the first one makes (optimizers of others may keep what they know elsewhere); else what
        differs.
        """
        expected = with_state(first, later) if _has_known_optimizers(self.reach) else None
        if expected is not None and difference(expected, later) is None:
            return None
        return difference(first, later)

    def _check_unread(self) -> None:
        """Checks, after a trace, whether the step may depend on what is in the lists that grow.

        Raises:
            Retrace: it may.
        """
        read = self.reach.reads.looked_into
        if self.call.known.regions.used().calls:  # by which instructions, nobody knows
            read = {growing.path for growing in self.reach.growing}
        if read:
            raise Retrace({Policy.FIXED: set(read)})

    def _lasting(self, faked: _Faked) -> list[str]:
        """What the step, run again on what the last trace has left, changes in Python state that no
        later capture could follow. That run makes no program, since the last trace has left fakes
        that the fake state does not know. If the run ends in an error, the answer is a guess: none,
        unless the error is about such a change itself.
        """
        inside = Snapshot(self.reach, leaves_others=True)
        inside.stir()  # so that a generator that the step seeds each time is seen to move
        try:
            trace(faked.state, self.call.train_step, faked.args, faked.kwargs, live_arguments=False)
        except Retrace as found:
            if not found.climbs:
                raise
            return []
        except CaptureError as error:
            return [] if error.code != "moved" or error.settles else [str(error)]
        return inside.lasting(self.call.known.policies)

    def live_programs(self) -> list[Program] | None:
        """The same with live float arguments; None if the step does something else with them
        than with floats.
        """
        try:
            programs = self.programs(live_arguments=True)
        except CaptureError as error:
            self.reach.reads.check()
            if error.path is not None:
                raise
            return None
        is_same = self.same_with_plain or self.does_the_same(programs[0])
        return programs if is_same else None


def _with_live(plain: Program, live: Program, leaves: list[Any]) -> Program:
    """A trace with plain arguments as it is with the live ones of another.

    Args:
        leaves: the arguments' leaves.
    """
    values = {
        reference.path: leaves[reference.index]
        for reference, slot in live.referenced
        if isinstance(reference, ArgumentReference) and live.slots[slot] is None
    }
    return with_numbers(plain, live, values)


class _Unlike(CaptureError):
    """A step puts tensors in places so that the next step, with the same arguments, finds other
    places that share one, as `self.last, self.obs = self.obs, obs.detach()` does.

    Attributes:
        refusal: of a step that differs in two traces for another reason.
    """

    def __init__(self, refusal: CaptureError) -> None:
        super().__init__(
            "after the step other places share tensors, with one another or with the arguments, than before it, "
            "so the next step can be captured only when this one has run; roam.compile does so, and "
            'capture(step="first") captures this one',
            code="unsettled",
        )  # fmt: skip
        self.refusal = refusal


def refuse_shapeless(reach: Reach) -> None:
    """Refuses parameters and buffers of lazy modules that have not run yet."""
    for slot in reach.slots:
        if isinstance(
            slot.tensor, (torch.nn.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)
        ):
            refuse(
                slot.path,
                "has no shape yet; run the module once before the step",
                code="uninitialized_parameter",
            )


def _refuse_unseen_state(reach: Reach) -> None:
    """Refuses what the step holds and no guard can compare."""
    refuse_shapeless(reach)
    for path, iterator in reach.iterators:
        if id(iterator) in map(id, (sys.stdout, sys.stderr)):  # writing is refused where it is done
            continue
        if isinstance(iterator, io.IOBase):
            refuse(
                path,
                "is a stream, of which no guard sees what it is connected to; let the step name "
                "sys.stdout or sys.stderr where it prints, or write to the stream outside of it",
                code="iterator",
            )
        refuse(
            path,
            "is an iterator, and every later step would get the item that it gives at capture; "
            "take the next batch outside of the step, and pass it as an argument; if the step does "
            "not use it, delete it, or keep a list in its place",
            code="iterator",
        )
    for path, scaler in reach.scalers:
        try:
            check_scaler(scaler, path)
        except CaptureError as error:
            error.path = path
            raise
    check_beneath(reach)
