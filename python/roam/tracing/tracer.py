"""Runs the user's step once on fake tensors and records it: one `Program` per trace."""

from __future__ import annotations

import dis
import operator
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from roam.errors import UNKNOWN_LINE, CaptureError, ExecutionError
from roam.interrupts import interrupts_allowed
from roam.program.effects import SetSync
from roam.program.ir import Program
from roam.state.arguments import Taken, Taker
from roam.state.library_code import is_library
from roam.state.live_scalars import LOOK_UP, LiveFloat, LiveInt
from roam.state.nests import with_dicts_opened
from roam.state.policies import Policy, Retrace
from roam.state.references import ArgumentReference, OptimizerReference, PlaceReference, StateKeys
from roam.state.wrappers import is_faked
from roam.torch_compat.patches import replaced
from roam.torch_compat.private import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    forget_layouts,
    is_dtensor,
    is_of_dynamo,
    pytree,
    set_step_called,
)
from roam.tracing.cuda_estimate.absent import PRESENT
from roam.tracing.distributed import fully_shard
from roam.tracing.distributed.ddp import Reductions
from roam.tracing.endings import Before, Original, Received, known_objects, record_endings
from roam.tracing.fakes.fake_mode import quiet_fakes
from roam.tracing.fakes.imports import imports_leave
from roam.tracing.numbers.rng import Watch
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import Frames, is_user_code, shown_path
from roam.tracing.stand_ins.fake_state import FakeState
from roam.tracing.stand_ins.function_stand_ins import not_tracing, stand_ins_placed, tracing
from roam.tracing.stand_ins.inner_tracers import refusal_of_tracer
from roam.tracing.stand_ins.reporters import reports_refused


def trace(
    fake_state: FakeState,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    live_arguments: bool,
    live_numbers: bool = True,
) -> Program:
    """One recorded run on fake state, which is left as the step leaves it.

    Args:
        fake_state: entered, with its fakes in place.
        step: the user's function.
        args, kwargs: its arguments with fakes.
        live_arguments: whether float arguments, and some integers, are live numbers; where a float
            decides something in Python it cannot be.
        live_numbers: whether numbers of optimizers' groups are live, and those that the step keeps
            outside of optimizers' state. If not, it changes them.

    Raises:
        CaptureError: something cannot be captured exactly; the error has the operator and the
            user's line.
    """
    frames = Frames(
        {id(module): path for path, module in fake_state.reach.modules}, fake_state.reliance.code
    )
    frames.root = _run.__code__
    watch = Watch(generator for _, generator in fake_state.reach.generators)
    recorder = Recorder(
        frames,
        fake_state.leaves,
        fake_state.kernels,
        watch,
        fake_state.number_of,
        True,
        fake_state.sized,
    )
    before = Before.of(fake_state)
    recorder.program.state_keys = [
        StateKeys.of(optimizer, path, fake_state.parameters)
        for path, optimizer in fake_state.reach.optimizers
    ]
    held: list[tuple[OptimizerReference | PlaceReference, Any]] = [
        *before.numbers,
        *(before.kept if live_numbers else ()),
    ]
    fake_state.refuse = recorder.refuse
    reductions = Reductions(recorder, recorder.is_original)
    has_parts = any(is_dtensor(slot.tensor) for slot in fake_state.reach.slots)
    if has_parts:
        forget_layouts()  # whose keys may be live numbers of another trace
    try:
        for reference, tensor in before.tensors:
            recorder.add_given(reference, tensor)
        with fake_state.classes_told():
            args, kwargs, before.received = _own_arguments(
                fake_state, recorder, args, kwargs, live_arguments
            )
        before.originals = [Original(*one) for one in recorder.given()]
        for rate_reference in fake_state.rates:
            rate_reference.set(
                (recorder.add_number if live_numbers else recorder.add_plain)(
                    rate_reference, rate_reference.get()
                )
            )
        for number_reference, number in held:
            if number is not None:
                number_reference.set(recorder.add_number(number_reference, number))
        for optimizer in fake_state.optimizers:
            set_step_called(optimizer, False)
        fake_state.regions.begin(
            recorder.refuse,
            lambda: frames.here()[1],
            fake_state.fakes(),
            fake_state.reach.modules,
            frozenset(known_objects(fake_state)),
            not_tracing,
            recorder.watch_numbers,
            [reference for reference, _ in held],
            is_real=fake_state.is_real,
        )
        with ExitStack() as stack:
            placed = stand_ins_placed(fake_state, recorder, frames, reductions, live=live_numbers)
            stack.enter_context(placed)
            # In the thread of the step, where its lines can be seen, on whatever device.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if fake_state.lacks_device:
                stack.enter_context(replaced(PRESENT))
            stack.enter_context(imports_leave(not_tracing))
            stack.enter_context(quiet_fakes())  # the step may catch what they raise
            stack.enter_context(_in_one_thread(recorder, fake_state.mode))
            stack.enter_context(fake_state.mode)
            stack.enter_context(recorder)
            modules = [module for _, module in fake_state.reach.modules]
            stack.enter_context(fully_shard.sharded(recorder, modules, fake_state.fake_of))
            if fake_state.reach.has_reporters:
                stack.enter_context(reports_refused(recorder))
            given = fake_state.taker.take(args, kwargs)
            fake_state.regions.run_begins()
            grown = [(one, len(one.container)) for one in fake_state.reach.growing]
            try:
                result = _run(step, args, kwargs)
            except CaptureError:
                fake_state.regions.check_failure()
                fake_state.check_caches()
                raise
            reductions.check()
        fake_state.check_caches()
        recorder.program.reduced = reductions.modules
        recorder.program.effects += [SetSync(*synced) for synced in reductions.taken_back()]
        _check_arguments(fake_state, given, args, kwargs)
        added = [(one, one.container[before:]) for one, before in grown]
        added = [(one, values) for one, values in added if values]
        recorder.program.result.growing = [(one.path, one.container) for one, _ in added]
        left = result, [values for _, values in added]
        record_endings(fake_state, recorder, before, (args, kwargs), left)
        fake_state.note_numbers(recorder)
        fake_state.end_histories(before.placed)
        fake_state.part_from(given.leaves, (tensor for _, tensor in before.tensors))
        return recorder.program
    finally:
        fake_state.regions.end()
        reductions.taken_back()
        if has_parts:
            forget_layouts()
        watch.restore()
        recorder.close()
        for one in before.originals:
            one.restore()
        for _, tensor, gradient in before.received:
            tensor.grad = gradient
        for rate_reference, rate in zip(fake_state.rates, before.rates, strict=True):
            rate_reference.set(rate)
        for number_reference, number in held:
            number_reference.set(number)
        fake_state.forget_values()


@contextmanager
def _in_one_thread(recorder: Recorder, mode: FakeTensorMode) -> Iterator[None]:
    """Refuses a step another thread of which runs operators on its tensors: nothing records them.
    An error in that thread might end nowhere.
    """
    thread = threading.get_ident()
    original: Any = vars(FakeTensor)["__torch_dispatch__"].__func__
    elsewhere: list[CaptureError] = []

    def dispatch(kind: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() != thread and any(
            isinstance(value, FakeTensor) and value.fake_mode is mode
            for value in pytree.tree_leaves((args, kwargs))
        ):
            try:
                recorder.refuse(
                    "another thread runs it on a tensor of the step's, where capture does not see it; run all "
                    "operators in one thread",
                    code="thread", op=str(func),
                )  # fmt: skip
            except CaptureError as refusal:
                elsewhere.append(refusal)
        return original(kind, func, types, args, kwargs or {})

    with replaced([(FakeTensor, "__torch_dispatch__", classmethod(dispatch))]):
        yield
    for refusal in elsewhere:
        raise refusal


def _check_arguments(
    fake_state: FakeState, given: Taken, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuses a step that changes a container among its arguments."""
    with fake_state.classes_told():  # to users' functions that take nodes of the pytree apart
        taken = fake_state.taker.take(args, kwargs)
    if taken.spec != given.spec or not all(map(operator.is_, taken.leaves, given.leaves)):
        raise _closing(fake_state.taker)


def _closing(taker: Taker) -> Exception:
    """What to raise where a step changes a container among its arguments, or an object that has
    been taken apart, or such an object holds a container that is an argument too: a trace with
    whole objects, if any is taken apart.
    """
    if taker.opened:
        return Retrace({Policy.FIXED: taker.opened})
    return CaptureError(
        "the step changes a container among its arguments, as batch.pop(key) does; let it work on a copy, as in dict(batch)",
        code="moved",
    )


def _run(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the step; what it raises becomes a refusal."""
    try:
        with tracing(), interrupts_allowed():
            return step(*args, **kwargs)
    except CaptureError as error:
        told = error.code == "unknown_tensor" and refusal_of_tracer(error, user_line(error))
        if told:
            raise told from error
        raise
    except ExecutionError:  # if another rank has left
        raise
    except DataDependentOutputException as error:
        raise CaptureError(
            f"{error.func} at {user_line(error)}: its result depends on data and reached Python; "
            "use a form that stays on tensors, such as torch.where",
            code="data_dependent", operator=str(error.func), source=user_line(error),
        ) from error  # fmt: skip
    except Exception as error:
        if (refusal := _refused_before(error)) is not None:
            raise refusal from None
        line = user_line(error)
        if is_of_dynamo(type(error).__module__):
            raise CaptureError(
                f"the step calls a function at {line} that torch.compile has compiled; call the plain function, or compile the "
                "step by torch.compile alone",
                code="compiled_function", source=line,
            ) from error  # fmt: skip
        if (refusal := refusal_of_tracer(error, line)) is not None:
            raise refusal from error
        settles = _is_raised_by_user(error)
        if not settles and (given := _GIVEN_AS_NUMBER.search(_text(error))) is not None:
            raise CaptureError(
                f"{line}: {given[1]} gets a tensor as its argument {given[2]}, which is a number, so that the call reads the "
                "tensor's value, which only a run knows; give it the tensor's item(), or turn off what needs the number",
                code="value_reached_python", operator=given[1].replace("::", "."), source=line,
            ) from error  # fmt: skip
        if not settles and _is_about_live_number(error):
            raise CaptureError(
                f"{line}: a number that the step computes or changes has reached code that needs "
                f"its value ({type(error).__name__}: {_text(error)}); only calculate with "
                f"it, or return it and look at it outside of the step; {LOOK_UP}",
                code="value_reached_python", source=line,
            ) from error  # fmt: skip
        remedy = "" if settles else "; run it eagerly, and report it if it works there"
        refusal = CaptureError(
            f"the step raised {type(error).__name__} at {line} when it was run on fake tensors{remedy}: {_text(error)}",
            code="step_raised", source=line,
        )  # fmt: skip
        refusal.settles = settles
        raise refusal from error


_GIVEN_AS_NUMBER = re.compile(
    r"(\w+::\w+)\(\) Expected a value of type '[^']+' for argument '(\w+)' but instead found type"
    r"[^\0]*cannot extract \w+ from tensor with meta storage"
)
"""How PyTorch says that an operator's schema wants a number where it got a fake tensor."""


def _text(error: BaseException) -> str:
    """What an exception says; nothing if that has numbers in it which only a run knows."""
    try:
        return str(error)
    except CaptureError:
        return ""


def _refused_before(error: BaseException) -> CaptureError | None:
    """The refusal after which the step's own handling of errors has raised an exception."""
    before = error.__context__
    while before is not None and not isinstance(before, CaptureError):
        before = before.__context__
    return before


def _is_raised_by_user(error: BaseException) -> bool:
    """Whether a statement of the user's own code, a `raise` or an `assert`, has raised this."""
    innermost = _innermost(error)
    if innermost is None or is_library(innermost.tb_frame.f_globals.get("__name__")):
        return False
    operation = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return dis.opname[operation] == "RAISE_VARARGS"


def _innermost(error: BaseException) -> TracebackType | None:
    """Where an exception was raised."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost


def _is_about_live_number(error: Exception) -> bool:
    """Whether an exception names a live number's class, or comes from code that was given one."""
    innermost = _innermost(error)
    held = [] if innermost is None else list(innermost.tb_frame.f_locals.values())
    return any(kind.__name__ in _text(error) for kind in (LiveFloat, LiveInt)) or any(
        isinstance(value, (LiveFloat, LiveInt)) for value in held
    )


def user_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame of an exception that is the user's own code."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_user_code(frame.f_code):
            return f"{shown_path(frame.f_code.co_filename)}:{line}"
    return UNKNOWN_LINE


def _own_arguments(
    fake_state: FakeState,
    recorder: Recorder,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    live: bool,
) -> tuple[tuple[Any, ...], dict[str, Any], Received]:
    """The arguments with live numbers, and those of them that are tensors which nothing else of the
    step's holds.
    """
    if fake_state.shares_parts:
        raise _closing(fake_state.taker)
    taken = fake_state.taker.take(args, kwargs)
    leaves = list(taken.leaves)
    received: Received = []
    for position, (leaf, reference) in enumerate(zip(leaves, fake_state.arguments, strict=True)):
        if issubclass(type(leaf), torch.Tensor) and is_faked(leaf):
            if recorder.slot_of(leaf) is None and not recorder.is_original(leaf):
                recorder.add_given(reference, leaf)
                if leaf.is_leaf:
                    received.append((reference, leaf, leaf.grad))
        elif fake_state.sized is not None and position in fake_state.sized.numbers:
            leaves[position] = fake_state.sized.numbers[position]
        elif live and type(leaf) is float:
            leaves[position] = recorder.add_live(reference, reference.path)
        elif live and position in fake_state.integers:
            integer = ArgumentReference(position, reference.path, "integer")
            leaves[position] = recorder.add_live(integer, reference.path)
    for reference, _, gradient in received:
        if gradient is not None and recorder.slot_of(gradient) is None:
            recorder.add_referenced(reference.gradient, gradient, reference.gradient.path)
    closed = fake_state.taker.closed
    made = pytree.tree_map_only(
        PackedSequence,
        recorder.with_values,
        with_dicts_opened(taken.put(leaves), closed),
        is_leaf=lambda value: issubclass(type(value), PackedSequence) or id(value) in closed,
    )
    return *made, received
