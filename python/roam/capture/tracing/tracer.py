"""Runs the user's step once on fake tensors and records it: one `Program` per trace."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import operator
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from roam.capture.cuda_estimate.absent import PRESENT
from roam.capture.tracing import (
    composite_gradients,
    custom_ops,
    dtensors,
    fully_shard,
    multi_tensor,
)
from roam.capture.tracing.ddp import Reductions
from roam.capture.tracing.fake_cache import tensors_in
from roam.capture.tracing.fake_identity import hooks_on, is_parameter, own_attributes
from roam.capture.tracing.fake_state import FakeState
from roam.capture.tracing.grad_scaler import check_skippable, check_updated, scaler_stand_ins
from roam.capture.tracing.gradient_history import VIEW, give_history, watched_engine
from roam.capture.tracing.imports import imports_leave
from roam.capture.tracing.opened_files import open_stand_ins
from roam.capture.tracing.recorder import Recorder
from roam.capture.tracing.rng import Watch, stand_ins
from roam.capture.tracing.scalar_guards import may_be_asked
from roam.capture.tracing.source_location import (
    Frames,
    is_torch_file,
    is_user_code,
    shown_path,
)
from roam.distributed.ddp import is_ddp
from roam.errors import UNKNOWN_LINE, CaptureError, ExecutionError
from roam.interrupts import interrupts_allowed
from roam.program.ir import History, HostCall, Program, Ref
from roam.state.attribute_reads import ReadMore
from roam.state.autograd_hooks import node_stand_in
from roam.state.containers import ArraySpace, FrozenSpace, RenewedSpace, entries_of, memory_of
from roam.state.equality import MISSING, is_plain, same, show
from roam.state.library_code import is_library
from roam.state.live_scalars import LiveFloat, LiveInt, as_live, number_stand_ins
from roam.state.made_objects import opened
from roam.state.optimizer_spaces import SCHEDULER_COUNTERS
from roam.state.references import (
    ArgumentReference,
    AttributeReference,
    EntryReference,
    GradientReference,
    OptimizerReference,
    PlaceReference,
    RateReference,
    Skeleton,
    StateKeys,
    StateReference,
    as_tuple,
    optimizer_references,
)
from roam.state.spaces import Items
from roam.torch_compat.patches import SCHEDULERS, Replacement, replaced
from roam.torch_compat.private import (
    C_NN,
    VF,
    C,
    DataDependentOutputException,
    FakeTensor,
    dispatch_modes,
    engine,
    foreach_types,
    forget_layouts,
    frame_evaluation,
    is_dtensor,
    is_of_dynamo,
    is_view,
    layout_of,
    local_of,
    pytree,
    set_step_called,
    was_step_called,
)


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
        live_arguments: whether float arguments are live numbers; where a float decides something in
            Python it cannot be.
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
        fake_state.results,
        fake_state.answers.replay(),
    )
    before: list[tuple[StateReference, Any]] = [
        (reference, reference.get()) for reference in fake_state.references()
    ]
    tied = [(reference, reference.get()) for reference in fake_state.places if reference.tied]
    state = [
        (reference, reference.get())
        for reference in optimizer_references(fake_state.reach, fake_state.parameters, plain=True)
    ]
    numbers = [
        (reference, number) for reference, number in state if reference.path in fake_state.changing
    ]
    plain = [
        (reference, value)
        for reference, value in state
        if reference.path not in fake_state.changing
    ]
    recorder.program.state_keys = [
        StateKeys.of(optimizer, path, fake_state.parameters)
        for path, optimizer in fake_state.reach.optimizers
    ]
    kept = [(reference, reference.get()) for reference in fake_state.numbers]
    held: list[tuple[OptimizerReference | PlaceReference, Any]] = [
        *numbers,
        *(kept if live_numbers else ()),
    ]
    placed = {id(reference): reference.get() for reference in fake_state.places}
    fake_state.refuse = recorder.refuse
    elsewhere = fake_state.state_elsewhere()
    rates = [reference.get() for reference in fake_state.rates]
    entries = fake_state.entries()
    renewed = [
        (space, space.now(), space.items())
        for space in fake_state.tuples()
        if isinstance(space, RenewedSpace)
    ]
    reductions = Reductions(recorder, recorder.is_original)
    has_parts = any(is_dtensor(slot.tensor) for slot in fake_state.reach.slots)
    if has_parts:
        forget_layouts()  # whose keys may be live numbers of another trace
    originals: list[_Original] = []
    received: _Received = []
    try:
        for reference, tensor in before:
            recorder.add_referenced(reference, tensor, reference.path)
        args, kwargs, received = _own_arguments(fake_state, recorder, args, kwargs, live_arguments)
        originals += [_Original(tensor, slot) for tensor, slot in recorder.given()]
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
            frozenset(_known_objects(fake_state)),
            _not_tracing,
            recorder.watch_numbers,
            [reference for reference, _ in held],
            is_real=fake_state.is_real,
        )
        with ExitStack() as stack:
            stack.enter_context(_watched(fake_state, recorder, frames, reductions))
            # In the thread of the step, where its lines can be seen, on whatever device.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if fake_state.lacks_device:
                stack.enter_context(replaced(PRESENT))
            stack.enter_context(imports_leave(_not_tracing))
            stack.enter_context(fake_state.mode)
            stack.enter_context(recorder)
            modules = [module for _, module in fake_state.reach.modules]
            stack.enter_context(fully_shard.sharded(recorder, modules, fake_state.fake_of))
            given = fake_state.taker.take(args, kwargs)
            fake_state.regions.run_begins()
            try:
                result = _run(recorder, step, args, kwargs)
            except CaptureError:
                fake_state.regions.check_failure()
                raise
            reductions.check()
        recorder.program.reduced = reductions.modules
        recorder.program.synced = reductions.taken_back()
        taken = fake_state.taker.take(args, kwargs)
        if taken.spec != given.spec or not all(map(operator.is_, taken.leaves, given.leaves)):
            raise ArgumentsChange
        for reference, _ in before:
            if isinstance(reference, PlaceReference) and reference.get() is MISSING:
                raise CaptureError(
                    f"the step removes {reference.path}; assign another value instead",
                    code="owner_removed",
                )
        _check_tuples(fake_state, (args, kwargs, result))
        _check_renewed(renewed)
        now = fake_state.state_elsewhere()
        if not same(elsewhere, now):
            changed = next((entry for entry in now if not _is_in(elsewhere, entry)), None)
            key = "" if changed is None else f" under {show(changed[0])}"
            raise CaptureError(
                f"the step keeps optimizer state{key}, which belongs to no parameter; keep one entry "
                "for each parameter",
                code="optimizer_state",
            )
        recorder.finish()
        fake_state.regions.check()
        check_updated(fake_state)
        _results(fake_state, recorder, result)
        _check_literals(fake_state, recorder)
        _keep_lists(plain)
        _endings(fake_state, recorder, before, renewed)
        _argument_endings(recorder, received)
        _original_endings(fake_state, recorder, originals)
        _tied_endings(recorder, before, tied)
        _plain_endings(fake_state, recorder, plain, {reference.path for reference, _ in numbers})
        _rate_endings(fake_state, recorder)
        _entry_endings(fake_state, recorder, entries)
        _attribute_endings(fake_state, recorder, (args, kwargs), result)
        _number_endings(
            fake_state,
            recorder,
            {reference.path for reference, number in kept if number is not None},
        )
        recorder.note_assigned()
        check_skippable(recorder.program)
        fake_state.note_numbers(recorder)
        fake_state.made = recorder.made_tensor
        fake_state.end_histories(placed)
        return recorder.program
    finally:
        fake_state.regions.end()
        for fresh in fake_state.fresh:
            fresh.set(None)
        reductions.taken_back()
        if has_parts:
            forget_layouts()
        watch.restore()
        recorder.close()
        for one in originals:
            one.restore()
        for _, tensor, gradient in received:
            tensor.grad = gradient
        for rate_reference, rate in zip(fake_state.rates, rates, strict=True):
            rate_reference.set(rate)
        for number_reference, number in held:
            number_reference.set(number)
        for entry in fake_state.entries().keys() - entries.keys():
            entry.optimizer.param_groups[entry.group].pop(entry.key, None)
        fake_state.forget_values()


_state = threading.local()
_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""What PyTorch's own schedulers change in a group."""
_TWO_WAYS = "the step sets a learning rate itself and steps a scheduler of the same optimizer; do one of them outside of the step"


def is_tracing() -> bool:
    """Whether this thread runs a user's step on fake tensors now."""
    return getattr(_state, "is_tracing", False)


@contextmanager
def _not_tracing() -> Iterator[None]:
    """Leaves the trace for a while: nothing stands in for PyTorch's functions."""
    before = is_tracing()
    _state.is_tracing = False
    try:
        yield
    finally:
        _state.is_tracing = before


def _is_in(entries: tuple[Any, ...], wanted: Any) -> bool:
    return any(same(entry, wanted) for entry in entries)


def _check_literals(fake_state: FakeState, recorder: Recorder) -> None:
    """Refuses to write to, and to return, a tensor that shares its memory with an array from before
    the step, as `torch.from_numpy` makes it: each run of a plan has a copy.
    """
    arrays = [
        (place.space.path, memory_of(place.space.holder))
        for place in fake_state.reach.places
        if isinstance(place.space, ArraySpace)
    ]
    if not arrays:
        return
    program = recorder.program
    leaves, _ = program.result
    used = program.written()
    used |= {
        program.storage_of(leaf.slot)
        for leaf in leaves
        if isinstance(leaf, Ref) and program.slots[leaf.slot] is not None
    }
    for real, slot, source in recorder.literals:
        if program.storage_of(slot) not in used:
            continue
        storage = real.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for path, memory in arrays:
            if start < memory.stop and memory.start < end:
                recorder.refuse(
                    f"the step writes to, or returns, a tensor in the memory of {path}, a NumPy "
                    "array from before the step; make the tensor outside of the step and pass it "
                    "to the step, or copy it (torch.tensor(array))",
                    code="moved",
                    source=source,
                )


def _run(
    recorder: Recorder, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    _state.is_tracing = True
    try:
        with interrupts_allowed():
            return step(*args, **kwargs)
    except (CaptureError, ExecutionError):  # the latter if another rank has left
        raise
    except DataDependentOutputException as error:
        raise CaptureError(
            f"{error.func} at {user_line(error)}: its result depends on data and reached Python; "
            "use a form that stays on tensors, such as torch.where",
            code="data_dependent", operator=str(error.func), source=user_line(error),
        ) from error  # fmt: skip
    except Exception as error:
        line = user_line(error)
        if is_of_dynamo(type(error).__module__):
            raise CaptureError(
                f"the step calls a function at {line} that torch.compile has compiled; call the plain function, or compile the "
                "step by torch.compile alone",
                code="compiled_function", source=line,
            ) from error  # fmt: skip
        settles = _is_raised_by_user(error)
        if not settles and _is_about_live_number(error):
            raise CaptureError(
                f"{line}: a number that the step computes or changes has reached code that needs "
                f"its value ({type(error).__name__}: {error}); only calculate with "
                "it, or return it and look at it outside of the step",
                code="value_reached_python", source=line,
            ) from error  # fmt: skip
        remedy = "" if settles else "; run it eagerly, and report it if it works there"
        refusal = CaptureError(
            f"the step raised {type(error).__name__} at {line} when it was run on fake tensors{remedy}: {error}",
            code="step_raised", source=line,
        )  # fmt: skip
        refusal.settles = settles
        raise refusal from error
    finally:
        _state.is_tracing = False


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
    return any(kind.__name__ in str(error) for kind in (LiveFloat, LiveInt)) or any(
        isinstance(value, (LiveFloat, LiveInt)) for value in held
    )


def user_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame of an exception that is the user's own code."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_user_code(frame.f_code):
            return f"{shown_path(frame.f_code.co_filename)}:{line}"
    return UNKNOWN_LINE


class _Original:
    """A tensor from before the step, as it is then. Guards make sure that every call, and every
    trace, finds it so.
    """

    __slots__ = (
        "flag", "gradient_dtype", "history", "hooks", "keeps_gradient", "layout", "notes", "part",
        "slot", "tensor",
    )  # fmt: skip

    def __init__(self, tensor: FakeTensor, slot: int) -> None:
        self.tensor = tensor
        self.slot = slot
        self.flag = tensor.requires_grad
        self.history: Any = tensor.grad_fn
        self.part, self.layout = local_of(tensor), layout_of(tensor)
        self.keeps_gradient = tensor.retains_grad
        self.hooks = hooks_on(tensor)
        self.notes = own_attributes(tensor)
        self.gradient_dtype = _own_gradient_dtype(tensor)

    def is_detached(self) -> bool:
        """Whether the step has taken its history away in place, and given it nothing instead."""
        tensor = self.tensor
        return (
            self.history is not None
            and tensor.is_leaf
            and not tensor.requires_grad
            and tensor.grad is None
        )

    def has_other_flag(self) -> bool:
        """Whether the step has left another `requires_grad`; a history is none of the tensor's
        own.
        """
        return (
            self.history is None
            and self.tensor.is_leaf
            and self.tensor.requires_grad is not self.flag
        )

    def restore(self) -> None:
        if self.is_detached():
            give_history(self.tensor, self.history.refuse)
        elif self.has_other_flag():
            self.tensor.requires_grad_(self.flag)


def _own_gradient_dtype(tensor: FakeTensor) -> tuple[torch.dtype | None, ...]:
    """The `grad_dtype` that the user has set; empty if gradients have the tensor's own dtype."""
    return () if tensor.grad_dtype == tensor.dtype else (tensor.grad_dtype,)


_Received = list[tuple[ArgumentReference, FakeTensor, Any]]
"""Arguments, each with its gradient from before the step."""


def _own_arguments(
    fake_state: FakeState,
    recorder: Recorder,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    live: bool,
) -> tuple[tuple[Any, ...], dict[str, Any], _Received]:
    """The arguments with live numbers, and those of them that are tensors which nothing else of the
    step's holds.
    """
    taken = fake_state.taker.take(args, kwargs)
    leaves = list(taken.leaves)
    received: _Received = []
    for position, (leaf, reference) in enumerate(zip(leaves, fake_state.arguments, strict=True)):
        if isinstance(local_of(leaf), FakeTensor):
            if recorder.slot_of(leaf) is None:
                recorder.add_referenced(reference, leaf, reference.path)
                if leaf.is_leaf:
                    received.append((reference, leaf, leaf.grad))
        elif live and type(leaf) is float:
            leaves[position] = recorder.add_live(reference, reference.path)
    for reference, _, gradient in received:
        if gradient is not None and recorder.slot_of(gradient) is None:
            recorder.add_referenced(reference.gradient, gradient, reference.gradient.path)
    given = taken.put(leaves)
    return *pytree.tree_map_only(
        PackedSequence, recorder.with_values, given, is_leaf=_is_packed
    ), received


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


@contextmanager
def _watched(
    fake_state: FakeState, recorder: Recorder, frames: Frames, reductions: Reductions
) -> Iterator[None]:
    """Stands in for what acts on Python state that no operator shows."""

    def shown(name: str, tensor: Any, form: Any = "", **_: object) -> str:
        if recorder.slot_of(tensor) is None or not _called_by_user():
            return object.__repr__(tensor)
        if name == "__format__" and tensor.dim() == 0 and not _is_floating(tensor):
            return format(tensor.item(), form)  # which may be known, if the batch decides it
        recorder.refuse(
            "the step prints a tensor, whose value does not exist during capture; "
            "return it, and print it outside of the step",
            code="value_reached_python",
        )

    def address(of: Callable[[Any], int]) -> Callable[[Any], int]:
        def asked(holder: Any) -> int:
            if _called_by_user():
                recorder.refuse(
                    "the step asks for a tensor's address, which differs from run to run; compare "
                    "tensors with `is`, or use names as keys",
                    code="address",
                )
            return of(holder)

        return asked

    def scripted(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(function: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(function, *args, **kwargs)
            # Code on sizes and positions is the same however it is run.
            if any(map(_is_floating, tensors_in((args, kwargs)))) and any(
                map(_is_floating, tensors_in(result))
            ):
                recorder.refuse(
                    f"TorchScript's {function.name} runs by other kernels once it has been called a few times; call the plain "
                    "function, or set PYTORCH_JIT=0 in the environment",
                    code="script_function",
                )
            return result

        return called

    plain_item = torch.Tensor.item

    def item(tensor: Any) -> Any:
        return as_live(plain_item(tensor))

    plain_numpy = torch.Tensor.numpy

    def numpy(tensor: Any, **options: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            recorder.refuse(
                "the step gives a tensor to NumPy, which would see its values; use torch's "
                "operators, or return the tensor and call numpy() outside of the step",
                code="value_reached_python",
            )
        return plain_numpy(tensor, **options)

    plain_truth = torch.Tensor.__bool__

    def truth(tensor: Any) -> bool:
        # C++ would ask for a number's truth without the recorder's knowledge.
        is_number = tensor.dtype is not torch.bool and tensor.numel() == 1
        return plain_truth(tensor != 0 if is_number else tensor)

    plain_cross_entropy = C_NN.cross_entropy_loss

    def cross_entropy(
        input: Any,
        target: Any,
        weight: Any = None,
        reduction: int = 1,
        ignored: Any = -100,
        smoothing: float = 0.0,
    ) -> Any:
        if weight is not None and smoothing and reduction == 1 and not target.is_floating_point():
            is_ignored = recorder.slot_of(target.eq(ignored).any())
            if is_ignored is None or recorder.known_value(is_ignored, may_be_asked) is not False:
                recorder.refuse(
                    "PyTorch computes the mean of a weighted cross-entropy with label smoothing "
                    "by other kernels for real tensors than for fake ones, depending on how "
                    "many targets are ignored; take reduction='sum' and divide",
                    code="hidden_branch",
                )
        return plain_cross_entropy(input, target, weight, reduction, ignored, smoothing)

    plain_ctc_loss = torch.ctc_loss

    def ctc_loss(
        log_probs: Any, targets: Any, inputs: Any, lengths: Any, *options: Any, **named: Any
    ) -> Any:
        if not isinstance(
            lengths, torch.Tensor
        ):  # code in C++ would make it one, by writing to real memory
            inputs, lengths = torch.tensor(inputs), torch.tensor(lengths)
        return plain_ctc_loss(log_probs, targets, inputs, lengths, *options, **named)

    def swapped(tensor: torch.Tensor, other: torch.Tensor) -> None:
        is_moved = sys._getframe(2).f_code is torch.nn.Module._apply.__code__
        if not is_moved or torch.__future__.get_swap_module_params_on_conversion():
            recorder.refuse(
                "the step exchanges a tensor for another one; write into the tensor under "
                "torch.no_grad() with copy_",
                code="parameter_replaced",
            )
        tensor.data = other  # as `Module.to` and its like do with all but fakes, which they swap

    replacements: list[Replacement] = [(FakeTensor, "data", _data(recorder))]

    def replace(holder: Any, name: str, stand_in: Callable[..., Any]) -> None:
        original = getattr(holder, name, None) or getattr(builtins, name)
        replacements.append((holder, name, _in_trace(recorder, original, stand_in)))

    with ExitStack() as stack:
        replace(torch.Tensor, "item", item)
        replace(torch.Tensor, "numpy", numpy)
        replace(torch.Tensor, "__bool__", truth)
        for holder in (torch.Tensor, torch.UntypedStorage, torch.TypedStorage):
            replace(holder, "data_ptr", address(holder.data_ptr))
        replace(C_NN, "cross_entropy_loss", cross_entropy)
        replace(torch, "ctc_loss", ctc_loss)
        replace(torch.utils, "swap_tensors", swapped)
        replace(
            VF, "_pad_packed_sequence", functools.partial(recorder.padded, VF._pad_packed_sequence)
        )
        for kind in (C.ScriptFunction, C.ScriptMethod):
            replace(kind, "__call__", scripted(kind.__call__))
        replace(C, "_will_engine_execute_node", node_stand_in(fake_state.fakes()))
        run_engine = engine()
        if fake_state.reach.held_elsewhere:
            run_engine = _refusing(recorder, next(iter(fake_state.reach.held_elsewhere.values())))
        elif fake_state.has_histories():
            run_engine = watched_engine(recorder.is_original, frames.made_by)
        if any(is_ddp(module) for _, module in fake_state.reach.modules):
            run_engine = reductions.engine(run_engine)
            forward = fake_state.regions.outside(
                reductions.forward,
                "a DistributedDataParallel",
                "compile the module inside of it",
            )
            replace(torch.nn.parallel.DistributedDataParallel, "forward", forward)
        if frame_evaluation() is not None:
            # Where Dynamo looks at functions, it looks at hooks too, in some threads.
            run_engine = fake_state.regions.outside(
                run_engine,
                "a backward pass",
                "compile the forward pass alone, and not the whole step: roam plans the plain function too",
            )  # fmt: skip
        if run_engine is not engine():
            replace(torch.autograd, "_engine_run_backward", run_engine)
        for holder, name, stand_in in fake_state.regions.stand_ins():
            replace(holder, name, stand_in)
        for holder, name, stand_in in scaler_stand_ins(fake_state, recorder):
            replace(holder, name, stand_in)
        for holder, name, stand_in in number_stand_ins(recorder):
            replace(holder, name, stand_in)
        for holder, name, stand_in in fake_state.reliance.stand_ins(
            lambda reason: recorder.refuse(reason, code="moved")
        ):
            replace(holder, name, stand_in)
        for holder, name, stand_in in open_stand_ins(recorder):
            replace(holder, name, stand_in)
        for holder, name, stand_in in dtensors.stand_ins(recorder, fake_state.layouts):
            replace(holder, name, stand_in)
        stack.enter_context(dtensors.masks_kept())
        stack.enter_context(composite_gradients.kept_whole())
        for holder, name, stand_in in fully_shard.stand_ins(recorder):
            replace(holder, name, stand_in)
        for holder, name, stand_in in custom_ops.collective_stand_ins(recorder):
            replace(holder, name, stand_in)
        for name in multi_tensor.FUSED:
            replace(torch, name, multi_tensor.fused_stand_in(recorder, name))
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            # Where PyTorch chooses the form, a fake tensor is as good as a real one.
            module = sys.modules[name]
            types = [*foreach_types(module), FakeTensor]
            replacements.append((module, "_foreach_supported_types", types))
        transformers = sys.modules.get("transformers.utils.import_utils")
        if hasattr(transformers, "is_fake_tensor"):
            # It would take other attention masks, hence other kernels, than on real tensors.
            replace(transformers, "is_fake_tensor", lambda _: False)
        for holder, name, stand_in in stand_ins(recorder, fake_state.mode):
            replace(holder, name, stand_in)
        for name in ("__repr__", "__str__", "__format__"):
            replace(torch.Tensor, name, functools.partial(shown, name))
        stack.enter_context(replaced(replacements))
        stack.enter_context(
            fake_state.identities.asked(fake_state.globals_of_users(), recorder.refuse)
        )
        for path, scheduler in fake_state.reach.schedulers:
            stack.enter_context(_scheduler(fake_state, recorder, path, scheduler))
        stack.enter_context(fake_state.reach.reads.watching())
        yield


def _in_trace(
    recorder: Recorder, original: Callable[..., Any], stand_in: Callable[..., Any]
) -> Callable[..., Any]:
    """The stand-in for the thread that traces, and for autograd's in its service; other threads
    keep the original.
    """

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        is_ours = is_tracing() or recorder in dispatch_modes()
        return (stand_in if is_ours else original)(*args, **kwargs)

    return function


def _refusing(recorder: Recorder, refusal: CaptureError) -> Callable[..., Any]:
    """What runs autograd's engine in a step that may run no backward pass."""

    def run(*_: Any, **__: Any) -> Any:
        try:
            recorder.refuse(str(refusal), code=refusal.code)
        except CaptureError as error:
            error.path = refusal.path
            raise

    return run


def _data(recorder: Recorder) -> property:
    """The property `data` of fakes: PyTorch's own, but the recorder sees each assignment."""
    plain: Any = FakeTensor.data
    return property(plain.__get__, _in_trace(recorder, plain.__set__, recorder.assign))


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _called_by_user() -> bool:
    """Whether the code that shows a tensor is the user's, not torch's own messages."""
    frame = sys._getframe(3)  # past the stand-in and its wrapper
    return not is_torch_file(frame.f_code.co_filename)


@contextmanager
def _scheduler(
    fake_state: FakeState, recorder: Recorder, path: str, scheduler: Any
) -> Iterator[None]:
    """A scheduler's `step` inside the user's step is run for real after each run, on the real
    optimizer.

    Until then nobody can know the next rate, so whoever asks for it is refused.
    """
    rates = [reference for reference in fake_state.rates if _may_change(scheduler, reference)]

    def step(*arguments: Any, **keywords: Any) -> None:
        if any(isinstance(group["lr"], torch.Tensor) for group in scheduler.optimizer.param_groups):
            recorder.refuse(
                f"{path}.step() inside of the step sets a learning rate that is a tensor; call it outside of the step",
                code="tensor_rate",
            )
        if not all(
            recorder.is_as_given(reference) or recorder.is_unknown(reference.get())
            for reference in rates
        ):
            recorder.refuse(_TWO_WAYS, code="unknown_number")
        if torch.is_grad_enabled() and any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in arguments
        ):
            arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
        recorder.program.after.append(
            HostCall(
                scheduler,
                path,
                recorder.references((arguments, keywords), f"{path}.step()"),
                len(recorder.program.calls),
            )
        )
        for reference in rates:
            reference.set(recorder.unknown(f"{reference.path} after {path}.step()"))
        fake_state.reach.reads.ask_before(scheduler, refuse_if_changed)

    unchanged = _kept_by_step(scheduler)

    def refuse_if_changed(name: str) -> None:
        if (name in held or name in ("__dict__", "__getstate__")) and name not in unchanged:
            recorder.refuse(
                f"the step reads {path}.{name} after {path}.step(), which a plan calls when the "
                "step has ended; read it before, or outside of the step",
                code="unknown_number",
            )

    def last_rates() -> list[Any]:
        return [reference.get() for reference in rates if reference.key == "lr"]

    held: dict[str, Any] = {}
    unknown = recorder.unknown(f"{path}'s own counters")
    names = [name for name in SCHEDULER_COUNTERS if name in vars(scheduler)]
    replacements = [(scheduler, "step", step), (scheduler, "get_last_lr", last_rates)]
    with replaced([*replacements, *((scheduler, name, unknown) for name in names)], of=SCHEDULERS):
        held |= object.__getattribute__(scheduler, "__dict__")
        yield
        now = object.__getattribute__(scheduler, "__dict__")
        if held.keys() != now.keys() or any(
            not same(held[key], value) for key, value in now.items()
        ):
            raise CaptureError(
                f"the step changes attributes of {path} itself, not by its step(); change them "
                "outside of the step",
                code="moved",
            )


def _kept_by_step(scheduler: Any) -> frozenset[str]:
    """The attributes of a scheduler that the step may read after its `step()`: the counters and
    methods, of which a trace gives the step something else, its optimizer, and what the
    constructors of PyTorch's own schedulers are given, which `step()` leaves as it is.
    """
    kept = {*SCHEDULER_COUNTERS, "step", "get_last_lr", "optimizer"}
    kind = type(scheduler)
    if kind.__module__ == torch.optim.lr_scheduler.__name__:
        kept |= {"base_lrs", *inspect.signature(kind.__init__).parameters}
    return frozenset(kept)


def _may_change(scheduler: Any, reference: RateReference) -> bool:
    """Whether a scheduler's step may give a number of a group another value."""
    is_own = type(scheduler).__module__ == torch.optim.lr_scheduler.__name__
    group = reference.optimizer.param_groups[reference.group]
    is_scheduled = any(group is scheduled for scheduled in scheduler.optimizer.param_groups)
    return is_scheduled and (reference.key in _SCHEDULED or not is_own)


def _results(fake_state: FakeState, recorder: Recorder, result: Any) -> None:
    """What the step returns: tensors and live numbers by slot, plain values as they are."""
    changeable = [one for one in _containers(result) if not isinstance(one, tuple)]
    known = _known_objects(fake_state)
    if any(id(one) in known for one in changeable):
        raise CaptureError(
            "the step returns a list or dictionary from before the step, and a plan would return "
            "another one; return a copy, such as list(x) or dict(x)",
            code="result",
        )
    known.update(map(id, changeable))
    if len({id(one) for one in changeable}) < len(changeable):
        raise CaptureError(
            "the step returns the same list or dictionary in two places, and a plan would return "
            "two of them; return a copy in one of the places",
            code="result",
        )
    parts = opened(
        result, lambda value: id(value) in known, lambda value: recorder.slot_of(value) is not None
    )
    leaves, spec = pytree.tree_flatten(parts, is_leaf=lambda value: type(value) is torch.Size)
    references, histories = list[Any](), list[History]()
    for leaf in leaves:
        history: History = "none"
        if isinstance(leaf, torch.Tensor):
            references.append(Ref(recorder.leaving(leaf, "the step's result")))
            recorder.note_joined(len(references) - 1, leaf)
            if not recorder.is_original(leaf):
                history = _result_history(recorder, leaf)
        elif (slot := recorder.slot_of(leaf)) is not None:
            references.append(Ref(slot))
        elif is_plain(leaf) or isinstance(leaf, type):
            references.append(leaf)
        else:
            raise CaptureError(
                f"the step returns a {type(leaf).__name__}; it may return tensors, numbers, the containers that "
                "torch.utils._pytree knows, and objects that it makes of these",
                code="result",
            )
        histories.append(history)
    recorder.program.result = (references, spec)
    recorder.program.histories = histories


def _result_history(recorder: Recorder, tensor: torch.Tensor) -> History:
    """How autograd sees a tensor that the step makes and returns."""
    try:
        _ = tensor.grad_fn
    except RuntimeError as error:  # which eager PyTorch raises when the history is asked for
        raise CaptureError(
            "the step returns a view that it made under torch.inference_mode, and changes the "
            "memory outside of that mode; return a copy, such as x.clone()",
            code="result",
        ) from error
    if is_parameter(tensor) or (tensor.is_leaf and tensor.grad is not None):
        raise CaptureError(
            "the step returns a parameter that it makes, or a tensor with a gradient; return "
            "x.detach(), and the gradient as another result",
            code="result",
        )
    if tensor.requires_grad and not tensor.is_leaf:
        return recorder.history_of(tensor)
    return "leaf" if tensor.requires_grad else "none"


def _endings(
    fake_state: FakeState,
    recorder: Recorder,
    before: list[tuple[StateReference, Any]],
    renewed: list[tuple[RenewedSpace, Any, Items]],
) -> None:
    """Records what each reference holds after the step, if that is another tensor than before, or
    the same tensor in another list or dictionary.
    """
    program = recorder.program
    program.stepped = [
        optimizer for optimizer in fake_state.optimizers if was_step_called(optimizer)
    ]
    held = {reference.path: tensor for reference, tensor in before}
    now = {reference.path: reference for reference in fake_state.references()}
    others = [space for space, container, _ in renewed if space.now() is not container]
    for reference, tensor in before:
        recorder.leaving(tensor, reference.path)
    for path, reference in now.items():
        tensor = reference.get()
        if held.get(path) is tensor:
            if isinstance(reference, PlaceReference) and reference.space in others:
                program.rebinds.append((reference, recorder.leaving(tensor, path)))
                recorder.note_joined(path, tensor)
            continue
        _check_replaceable(recorder, reference, tensor)
        if tensor.grad_fn is not None and not recorder.is_original(tensor):
            program.historic[path] = recorder.history_of(tensor)
        program.rebinds.append((reference, recorder.leaving(tensor, path)))
        recorder.note_joined(path, tensor)
    for reference, _ in before:
        if reference.path not in now:
            if isinstance(reference, GradientReference):
                program.dropped.append(reference)
            else:
                raise CaptureError(
                    f"the step removes {reference.path}; assign another value instead",
                    code="owner_removed",
                )
    # A gradient that was not there may well matter when it is.
    program.absent += [
        GradientReference(parameter, path)
        for parameter in fake_state.parameters
        if (path := f"{parameter.path}.grad") not in held and path not in now
    ]


def _check_tuples(fake_state: FakeState, outside: Any) -> None:
    """Refuses steps after which several places, or parts of the step's arguments and result, hold
    one and the same tuple in a way that a run would not reproduce, since it puts tuples together
    anew.
    """
    held = {id(container) for container in _containers(outside)}
    for space in fake_state.tuples():
        if not space.is_in_all_places():
            error = CaptureError(
                f"the step puts another {space.kind} in one of several places that hold {space.path}; put the same one in all "
                "of them, or keep it in one place",
                code="moved",
            )
            error.settles = True
            raise error
        if id(space.now()) in held and space.places:
            raise CaptureError(
                f"the step puts one {space.kind} at {space.path} and in another place, or returns "
                f"it; give each place a {space.kind} of its own",
                code="moved",
            )
        held.add(id(space.now()))


def _check_renewed(before: list[tuple[RenewedSpace, Any, Items]]) -> None:
    """Refuses a step that changes one of the lists and dictionaries that it replaces at other
    times.
    """
    for space, held, items in before:
        now = entries_of(held)
        if len(now) != len(items) or not all(
            key is old_key and value is old
            for (key, value), (old_key, old) in zip(now, items, strict=True)
        ):
            raise CaptureError(
                f"the step changes the {space.kind} at {space.path}, and in this or another call "
                "puts another one in its place; let it do only one of these",
                code="moved",
            )


def _tied_endings(
    recorder: Recorder,
    before: list[tuple[StateReference, Any]],
    tied: list[tuple[PlaceReference, torch.Tensor]],
) -> None:
    """What the step puts in one of several places that hold one tensor. The next step finds two
    tensors.
    """
    first = {id(tensor): reference for reference, tensor in reversed(before)}
    for reference, tensor in tied:
        now = reference.get()
        if now is not tensor:
            if not isinstance(now, torch.Tensor):
                raise CaptureError(
                    f"the step removes {reference.path}; assign another value instead",
                    code="owner_removed",
                )
            _check_replaceable(recorder, reference, now)
            place = AttributeReference(reference.space, reference.key, reference.path)
            recorder.program.rebinds.append((place, recorder.leaving(now, reference.path)))
            recorder.note_joined(reference.path, now)
            if now.grad_fn is not None and not recorder.is_original(now):
                recorder.program.historic[reference.path] = recorder.history_of(now)
        if now is first[id(tensor)].get():
            continue
        recorder.program.unsettled = CaptureError(
            f"{reference.path} and another place hold one tensor before the step and two after it, so "
            "the steady step can be captured only when the first has run; roam.compile does so, "
            "and capture(step='first') captures the first",
            code="unsettled",
        )


def _check_replaceable(recorder: Recorder, reference: StateReference, tensor: torch.Tensor) -> None:
    """Refuses another tensor in a parameter's place or in a frozen set, and one that requires a
    gradient itself.
    """
    if (
        isinstance(reference, PlaceReference)
        and isinstance(reference.space, FrozenSpace)
        and isinstance(reference.space.now(), frozenset)
    ):
        raise CaptureError(
            f"the step puts another tensor at {reference.path}, in a frozen set; keep it in a list",
            code="moved",
        )
    if (
        not isinstance(reference, (OptimizerReference, GradientReference))
        and reference.kind == "parameter"
    ):
        raise CaptureError(
            f"the step puts another tensor in the place of the parameter {reference.path}; write into "
            "the parameter under torch.no_grad(), as in p.copy_(...)",
            code="parameter_replaced",
        )
    check_no_leaf(tensor, reference.path, is_new=not recorder.is_original(tensor))


def _original_endings(
    fake_state: FakeState, recorder: Recorder, originals: list[_Original]
) -> None:
    """What the step leaves on tensors from before it, apart from their values."""
    references = {slot: reference for reference, slot in recorder.program.referenced}
    for one in originals:
        if local_of(one.tensor) is not one.part or layout_of(one.tensor) != one.layout:
            raise CaptureError(
                f"the step gives the DTensor {references[one.slot].path} another local part or other "
                "placements; put another DTensor in its place, or write into it",
                code="dtensor",
            )
        if one.is_detached():
            if is_view(fake_state.identities.of(one.tensor)):
                raise CaptureError(f"{references[one.slot].path} {VIEW}", code="outer_history")
            recorder.program.detached.append(one.slot)
        elif one.tensor.grad_fn is not one.history:
            raise CaptureError(
                f"{references[one.slot].path} would have a gradient history of this step afterwards, "
                "and a plan keeps none; detach what the step writes into it, or write under "
                "torch.no_grad()",
                code="outer_history",
            )
        if one.tensor.retains_grad is not one.keeps_gradient and one.history is not None:
            raise CaptureError(
                f"the step calls retain_grad() on {references[one.slot].path}, which keeps no gradient "
                "after a plan has run; leave it out, or detach the tensor",
                code="moved",
            )
        if hooks_on(one.tensor) != one.hooks:
            raise CaptureError(
                f"the step leaves hooks on {references[one.slot].path}; remove them in the step "
                "itself, or add them outside of it",
                code="moved",
            )
        if _own_gradient_dtype(one.tensor) != one.gradient_dtype:
            raise CaptureError(
                f"the step sets grad_dtype of {references[one.slot].path}, which a plan cannot repeat; "
                "set it once, before the first step",
                code="moved",
            )
        notes = own_attributes(one.tensor)
        for name in one.notes | notes:
            if not same(one.notes.get(name, MISSING), notes.get(name, MISSING)):
                raise CaptureError(
                    f"the step sets the attribute {name!r} of {references[one.slot].path}, which "
                    "a plan cannot repeat; set it outside of the step, or keep its "
                    "value in a dictionary",
                    code="tensor_attribute",
                )
        if one.has_other_flag():
            if references[one.slot].kind in ("optimizer_state", "gradient"):
                raise CaptureError(
                    f"the step changes requires_grad of {references[one.slot].path}, which a captured "
                    "step would not do; leave it as it is",
                    code="moved",
                )
            recorder.program.flags.append((one.slot, not one.flag))


def _argument_endings(recorder: Recorder, received: _Received) -> None:
    """What the gradients of arguments are after the step."""
    program = recorder.program
    for reference, tensor, before in received:
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is before:
            continue
        if gradient is None:
            program.dropped.append(reference.gradient)
        else:
            check_no_leaf(gradient, reference.gradient.path)
            if gradient.grad_fn is not None:
                program.historic[reference.gradient.path] = recorder.history_of(gradient)
            program.rebinds.append(
                (reference.gradient, recorder.leaving(gradient, reference.gradient.path))
            )
            recorder.note_joined(reference.gradient.path, gradient)


def check_no_leaf(tensor: Any, path: str, *, is_new: bool = True) -> None:
    """Refuses what a run by a plan would leave a plain tensor without `requires_grad`, and what is
    no tensor in a tensor's place.
    """
    if not isinstance(tensor, torch.Tensor):
        raise CaptureError(
            f"the step puts {show(tensor)} at {path}, where a tensor was; keep the two in places of their "
            "own",
            code="moved",
        )
    if (tensor.requires_grad and tensor.is_leaf) or (is_new and is_parameter(tensor)):
        raise CaptureError(
            f"the step puts a parameter, or another leaf that requires a gradient, at {path}; "
            "write into the tensor there under torch.no_grad(), as in x.copy_(...)",
            code="parameter_replaced",
        )


def _rate_endings(fake_state: FakeState, recorder: Recorder) -> None:
    """Records the values by which the step replaces learning rates."""
    program = recorder.program
    for reference in fake_state.rates:
        rate = reference.get()
        if recorder.is_as_given(reference) or recorder.is_unknown(rate):
            continue
        if any(_may_change(host_call.scheduler, reference) for host_call in program.after):
            raise CaptureError(f"{reference.path}: {_TWO_WAYS}", code="unknown_number")
        if (slot := recorder.slot_of(rate)) is not None and not isinstance(rate, torch.Tensor):
            program.rebinds.append((reference, slot))
        elif issubclass(type(rate), (float, int)) and type(rate) is not bool:
            program.plain_state.append((reference, rate))
        else:
            raise CaptureError(
                f"the step makes {reference.path} a {type(rate).__name__}; set a float", code="rate"
            )


def _entry_endings(
    fake_state: FakeState, recorder: Recorder, before: dict[RateReference, None]
) -> None:
    """What the step adds to optimizers' groups, such as a step count of the whole group."""
    program = recorder.program
    for reference in [reference for reference in fake_state.entries() if reference not in before]:
        value = reference.get()
        if isinstance(value, torch.Tensor):
            program.rebinds.append((reference, recorder.leaving(value, reference.path)))
            recorder.note_joined(reference.path, value)
        elif (slot := recorder.slot_of(value)) is not None:
            program.rebinds.append((reference, slot))
        elif is_plain(value):
            program.plain_state.append((reference, value))
        else:
            raise CaptureError(
                f"the step makes {reference.path}, a {type(value).__name__}, which a plan cannot make; "
                "keep numbers and tensors there",
                code="moved",
            )
        program.absent.append(reference)
        program.state_order.append(reference)
        program.unsettled = CaptureError(
            f"the step makes {reference.path}, so the steady step can be captured only when the first has run; roam.compile does "
            'so, and capture(step="first") captures the first',
            code="unsettled",
        )


def _number_endings(fake_state: FakeState, recorder: Recorder, given: set[str]) -> None:
    """Records the values by which the step replaces the numbers that it keeps. Those at `given`
    were there before.
    """
    for reference in fake_state.numbers:
        number = reference.get()
        if (slot := recorder.slot_of(number)) is not None and not isinstance(number, torch.Tensor):
            if not recorder.is_as_given(reference):
                recorder.program.rebinds.append((reference, slot))
        elif type(number) in (int, float) or (number is None and reference.path in given):
            recorder.program.plain_state.append((reference, number))
        elif number is not None:
            raise CaptureError(
                f"the step makes {reference.path} a {type(number).__name__}, which was a number "
                "before; keep a number there",
                code="moved",
            )


def _attribute_endings(
    fake_state: FakeState, recorder: Recorder, arguments: Any, result: Any
) -> None:
    """Records the attributes that the step sets before it looks at them.

    Raises:
        ReadMore: an attribute holds something that is not made of tensors, numbers and plain
            values. From then on it counts as looked at.
    """
    program = recorder.program
    shared = _known(fake_state) | {id(container) for container in _containers((arguments, result))}
    for space, name, key in fake_state.reach.overwritten:
        reference = AttributeReference(space, name, space.label(name))
        value = reference.get()
        if value is MISSING:
            continue  # a property, which has set something else
        skeleton, entries = _nest(recorder, reference, value, shared)
        if skeleton is MISSING:
            fake_state.reach.reads.keep(key, name)
            raise ReadMore
        program.overwritten.append(reference)
        _leave_nest(program, reference, skeleton, entries)
    for reference in fake_state.fresh:
        value = reference.get()
        if value is None:
            continue
        skeleton, entries = _nest(recorder, reference, value, shared)
        if skeleton is MISSING:
            error = CaptureError(
                f"the step changes Python state in a way that a plan cannot repeat: {reference.path} changed from None to "
                f"{show(value)}; return the value, and change the state outside of the step",
                code="moved",
            )
            error.settles = True
            raise error
        _leave_nest(program, reference, skeleton, entries)


def _leave_nest(
    program: Program, reference: AttributeReference, skeleton: Any, entries: list[tuple[Any, int]]
) -> None:
    """Has runs put what `_nest` found into its place."""
    if not entries or entries[0][0] is not reference:
        program.plain_state.append(
            (reference, skeleton if is_plain(skeleton) else Skeleton(skeleton))
        )
    program.rebinds += entries


def _known_objects(fake_state: FakeState) -> set[int]:
    """Identities of the objects and containers that the step reaches."""
    return {id(value) for _, value in fake_state.reach.objects} | _known(fake_state)


def _known(fake_state: FakeState) -> set[int]:
    """Identities of the containers that the step reaches."""
    places = (place.space for place in fake_state.reach.places)
    renewed = (space for space in fake_state.tuples() if isinstance(space, RenewedSpace))
    return {id(space.holder) for space in places if hasattr(space, "holder")} | {
        id(space.now()) for space in renewed
    }


def _containers(value: Any) -> Iterator[Any]:
    """All lists, tuples, dictionaries and deques in a nest."""
    if isinstance(value, (list, tuple, dict, deque)):
        yield value
        for part in dict.values(value) if isinstance(value, dict) else value:
            yield from _containers(part)


def _nest(
    recorder: Recorder,
    reference: AttributeReference,
    value: Any,
    shared: set[int],
    keys: tuple[Any, ...] = (),
    path: str = "",
) -> tuple[Any, list[tuple[Any, int]]]:
    """What the step has put in a place, without tensors and live numbers, and these with their
    references; `MISSING` if a run could not put the like there: other objects, or containers that
    somebody else holds too.
    """
    path = path or reference.path
    place = EntryReference(reference, keys, path) if keys else reference
    if isinstance(value, torch.Tensor):
        left, is_original = recorder.leaving(value, path), recorder.is_original(value)
        recorder.note_joined(path, value)
        if not is_original and (is_parameter(value) or (value.is_leaf and value.requires_grad)):
            return MISSING, []
        if value.grad_fn is not None and not is_original:
            recorder.program.historic[path] = recorder.history_of(value)
        return None, [(place, left)]
    if (slot := recorder.slot_of(value)) is not None:
        return None, [(place, slot)]
    if is_plain(value):
        return value, []
    is_tuple = type(value) is tuple or (
        hasattr(type(value), "_make") and not hasattr(value, "__dict__")
    )
    if not (type(value) in (list, dict) or is_tuple) or (id(value) in shared and value != ()):
        return MISSING, []
    shared.add(id(value))
    found: list[tuple[Any, int]] = []
    parts: dict[Any, Any] = {}
    for key, part in value.items() if type(value) is dict else enumerate(value):
        if not is_plain(key):
            return MISSING, []
        parts[key], entries = _nest(
            recorder, reference, part, shared, (*keys, key), f"{path}[{key!r}]"
        )
        if parts[key] is MISSING:
            return MISSING, []
        found += entries
    if type(value) is dict:
        return parts, found
    return (as_tuple(type(value), parts.values()) if is_tuple else list(parts.values())), found


def _keep_lists(before: list[tuple[OptimizerReference, Any]]) -> None:
    """If the step replaces lists and dictionaries in an optimizer's state by others of the same
    form, puts the contents of the new ones into the old ones.
    """
    lists = [
        (reference, held, reference.get())
        for reference, held in before
        if type(held) in (list, dict)
    ]
    if len({id(now) for _, _, now in lists}) == len(lists):
        for reference, held, now in lists:
            if now is not held and _is_alike(held, now):
                _refill(held, now)
                reference.set(held)


def _is_alike(held: Any, now: Any) -> bool:
    if type(held) is not type(now):
        return False
    if type(held) is list:
        return len(held) == len(now) and all(map(_is_alike, held, now))
    if type(held) is dict:
        return list(held) == list(now) and all(map(_is_alike, held.values(), now.values()))
    return isinstance(held, torch.Tensor) or same(held, now)


def _refill(held: Any, now: Any) -> None:
    for key, value in list(now.items() if type(now) is dict else enumerate(now)):
        if type(value) in (list, dict):
            _refill(held[key], value)
        else:
            held[key] = value


def _plain_endings(
    fake_state: FakeState, recorder: Recorder, before: list[tuple[Any, Any]], live: set[str]
) -> None:
    """What the step leaves in optimizer state, apart from tensors.

    Args:
        before: (reference, value) of what was there and is no live number.
        live: paths of the live numbers.

    Raises:
        NumbersChange: numbers other than the live ones differ from those before.
    """
    recorder.program.plain_before = before
    known = {reference.path: value for reference, value in before}
    changed, made = set(), list[tuple[OptimizerReference, Callable[[], Any] | None]]()
    for reference in optimizer_references(fake_state.reach, fake_state.parameters, plain=True):
        value = reference.get()
        if (slot := recorder.slot_of(value)) is not None and reference.path in known:
            changed.add(reference.path)
        elif slot is not None:
            recorder.program.rebinds.append((reference, slot))
            if reference.path not in live:
                made.append((reference, recorder.made_number(slot)))
        elif reference.path in known and value is known[reference.path]:
            continue
        elif not is_plain(value):
            error = CaptureError(
                f"{reference.path} is a {type(value).__name__}, which no plan can hold; keep each "
                "tensor or number under a key of its own",
                code="optimizer_state",
            )
            error.settles = type(value) in (list, dict)
            raise error
        elif reference.path not in known and reference.path not in live:
            recorder.program.plain_state.append((reference, value))
            recorder.program.absent.append(reference)
        elif reference.path in known and same(known[reference.path], value):
            continue
        elif type(value) in (int, float) and type(value) is type(known.get(reference.path)):
            changed.add(reference.path)
        else:
            raise CaptureError(
                f"{reference.path} has another value after each step, which the step does not "
                "calculate from the value before; keep tensors and numbers there",
                code="optimizer_state",
            )
    if changed:
        raise NumbersChange(changed)
    for reference, calculate in made:
        number = None if calculate is None else calculate()
        if number is None:
            recorder.program.unsettled = CaptureError(
                f"the first step makes {reference.path}, a Python number, from weights or data, and "
                "the next step uses it; roam.compile captures that step when the first has run. "
                "To capture both at once, keep it a tensor",
                code="unsettled",
            )
        else:
            reference.set(number)
            fake_state.changing.add(reference.path)
        recorder.program.absent.append(reference)
    if recorder.program.plain_state or made:
        recorder.program.state_order = list(
            optimizer_references(fake_state.reach, fake_state.parameters, plain=None)
        )


class NumbersChange(Exception):
    """A step changes Python numbers that its optimizer's state holds: they have to be live."""

    def __init__(self, paths: set[str]) -> None:
        super().__init__()
        self.paths = paths


class ArgumentsChange(Exception):
    """A step changes a container among its arguments, or an object that has been taken apart."""

    def refusal(self) -> CaptureError:
        """What to raise if there is no such object."""
        return CaptureError(
            "the step changes a list or dictionary among its arguments in a way that a plan cannot repeat; let it "
            "work on a copy",
            code="moved",
        )
