"""What stands in for functions of PyTorch and of other libraries while a step is traced: those that
act on Python state which no operator shows.
"""

from __future__ import annotations

import builtins
import copy
import functools
import json.encoder
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Final

import torch

from roam.distributed.ddp import is_ddp
from roam.errors import CaptureError
from roam.state.autograd_hooks import node_stand_in
from roam.state.live_scalars import as_live, number_stand_ins
from roam.state.sizes import is_size
from roam.torch_compat.patches import SCHEDULERS, STREAMS, Replacement, globals_added, replaced
from roam.torch_compat.private import (
    C_NN,
    VF,
    C,
    FakeTensor,
    dispatch_modes,
    engine,
    foreach_types,
    frame_evaluation,
)
from roam.tracing.distributed import dtensors, fully_shard
from roam.tracing.distributed.ddp import Reductions
from roam.tracing.fake_kernels.cache import tensors_in
from roam.tracing.fakes.fake_identity import is_parameter
from roam.tracing.fakes.gradient_history import watched_engine
from roam.tracing.numbers.rng import stand_ins
from roam.tracing.numbers.scalar_guards import may_be_asked
from roam.tracing.recording import composite_gradients, composite_spectra, custom_ops, multi_tensor
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import Frames, is_torch_file
from roam.tracing.stand_ins.fake_state import FakeState
from roam.tracing.stand_ins.grad_scaler import scaler_stand_ins
from roam.tracing.stand_ins.inner_tracers import tracer_stand_ins
from roam.tracing.stand_ins.opened_files import open_stand_ins
from roam.tracing.stand_ins.reporters import report_stand_ins, stream_stand_ins
from roam.tracing.stand_ins.schedulers import SteppedSchedulers

_state = threading.local()


def is_tracing() -> bool:
    """Whether this thread runs a user's step on fake tensors now."""
    return getattr(_state, "is_tracing", False)


@contextmanager
def tracing(value: bool = True) -> Iterator[None]:
    """A block in which this thread's calls of PyTorch's functions reach their stand-ins, or, if the
    value is False, PyTorch's own functions.
    """
    before = is_tracing()
    _state.is_tracing = value
    try:
        yield
    finally:
        _state.is_tracing = before


not_tracing = functools.partial(tracing, False)
"""Leaves the trace for a while."""


OWN_BATCHES: Final = (
    "let the step take one batch as its argument, and go through the loader outside of it, as in "
    "for batch in loader: step(batch)"
)
"""What to change where a step goes through a loader."""


@contextmanager
def stand_ins_placed(
    fake_state: FakeState,
    recorder: Recorder,
    frames: Frames,
    reductions: Reductions,
    *,
    live: bool,
) -> Iterator[None]:
    """Stands in for what acts on Python state that no operator shows. `live`: numbers are."""

    def shown(name: str, tensor: Any, form: Any = "", **_: object) -> str:
        if recorder.slot_of(tensor) is None or not _called_by_user():
            return object.__repr__(tensor)
        is_number = type(tensor) is FakeTensor and tensor.dim() == 0 and not is_parameter(tensor)
        if name == "__format__" and is_number:
            return format(tensor.item(), form)
        recorder.refuse(
            "the step makes a text of a tensor, whose values do not exist during capture; show a "
            "number, as in print(loss.item()), or return the tensor, and make the text outside of the step",
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

    plain_batches = torch.utils.data.DataLoader.__iter__

    def batches(loader: Any) -> Any:
        if loader.num_workers:
            recorder.refuse(
                f"the step goes through a DataLoader, which starts processes for it; {OWN_BATCHES}",
                code="iterator",
            )
        return plain_batches(loader)

    plain_item = torch.Tensor.item

    def item(tensor: Any) -> Any:
        return as_live(plain_item(tensor))

    def as_float(tensor: Any) -> float:
        return float(tensor.item())  # C++ would ask for the number as for an integer

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

    plain_reconstruct = copy._reconstruct  # type: ignore[attr-defined]

    def reconstruct(value: Any, *args: Any, **kwargs: Any) -> Any:
        if any(value is source for _, source in fake_state.reach.random_sources):
            recorder.refuse(
                "the step copies a random generator, whose state may be another one at the next call; draw outside of the step, "
                "and pass the numbers to it",
                code="moved",
            )
        return plain_reconstruct(value, *args, **kwargs)

    replacements: list[Replacement] = [(FakeTensor, "data", _data(recorder))]

    def replace(holder: Any, name: str, stand_in: Callable[..., Any]) -> None:
        original = getattr(holder, name, None) or getattr(builtins, name)
        replacements.append((holder, name, _in_trace(recorder, original, stand_in)))

    with ExitStack() as stack:
        replace(torch.Tensor, "item", item)
        replace(torch.Tensor, "__float__", as_float)
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
                reductions.forward, "a DistributedDataParallel", "compile the module inside of it"
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
        for holder, name, stand_in in chain(
            fake_state.regions.stand_ins(),
            scaler_stand_ins(fake_state, recorder),
            number_stand_ins(recorder),
            fake_state.reliance.stand_ins(lambda reason: recorder.refuse(reason, code="moved")),
            tracer_stand_ins(recorder),
            open_stand_ins(recorder),
            dtensors.stand_ins(recorder, fake_state.layouts),
            fully_shard.stand_ins(recorder),
            custom_ops.collective_stand_ins(recorder),
            stand_ins(recorder, fake_state.mode),
            report_stand_ins(fake_state.reliance.levels, recorder),
        ):
            replace(holder, name, stand_in)
        replace(torch.utils.data.DataLoader, "__iter__", batches)
        stack.enter_context(dtensors.masks_kept())
        stack.enter_context(composite_gradients.kept_whole())
        stack.enter_context(composite_spectra.as_for_real())
        for name in multi_tensor.FUSED:
            replace(torch, name, multi_tensor.fused_stand_in(recorder, name))
        # The one in C asks the user's own function what to write for a live number.
        replacements.append((json.encoder, "c_make_encoder", None))
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            # Where PyTorch chooses the form, a fake tensor is as good as a real one.
            module = sys.modules[name]
            types = [*foreach_types(module), FakeTensor]
            replacements.append((module, "_foreach_supported_types", types))
        transformers = sys.modules.get("transformers.utils.import_utils")
        if hasattr(transformers, "is_fake_tensor"):
            # It would take other attention masks, hence other kernels, than on real tensors.
            replace(transformers, "is_fake_tensor", lambda _: False)
        replace(copy, "_reconstruct", reconstruct)
        for name in ("__repr__", "__str__", "__format__"):
            replace(torch.Tensor, name, functools.partial(shown, name))
        stack.enter_context(replaced(replacements))
        writes = [
            (stream, name, _in_trace(recorder, getattr(stream, name), stand_in))
            for stream, name, stand_in in stream_stand_ins(recorder)
        ]
        stack.enter_context(replaced(writes, of=STREAMS))
        tables = fake_state.globals_of_users()
        stack.enter_context(fake_state.identities.asked(tables, recorder.refuse))
        stack.enter_context(globals_added(tables, "len", _in_trace(recorder, len, _length)))
        kinds = {type(scheduler) for _, scheduler in fake_state.reach.schedulers}
        stepped = SteppedSchedulers(fake_state, recorder, live=live)
        steps = [(kind, "step", _in_trace(recorder, kind.step, stepped.step)) for kind in kinds]
        stack.enter_context(replaced(steps, of=SCHEDULERS))
        stack.enter_context(stepped.held())
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


def _length(*args: Any) -> Any:
    """What `len` gives, which makes a plain number of a size that follows from symbols."""
    value: Any = args[0] if len(args) == 1 else None
    if issubclass(type(value), torch.Tensor) and value.dim() and is_size(value.shape[0]):
        return value.shape[0]
    return len(*args)


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _called_by_user() -> bool:
    """Whether the code that shows a tensor is the user's, not torch's own messages."""
    frame = sys._getframe(3)  # past the stand-in and its wrapper
    return not is_torch_file(frame.f_code.co_filename)
