"""Runs the user's step once on fake tensors and records it: one `Program` per trace."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from roam.capture.frames import Frames, shown_path
from roam.capture.live import as_live
from roam.capture.owners import GradientOwner, Owner, StateOwner, state_owners
from roam.capture.program import HostCall, Program, Ref
from roam.capture.record import Recorder
from roam.capture.values import is_plain, same
from roam.capture.world import World
from roam.errors import CaptureError


def trace(
    world: World, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, live_arguments: bool
) -> Program:
    """One recorded run in a world of fakes. The world is left as the step leaves it.

    Args:
        world: entered, with its fakes in place.
        step: the user's function.
        args, kwargs: its arguments with fakes.
        live_arguments: whether float arguments are live numbers; where a float decides something in Python it cannot be.

    Raises:
        CaptureError: whatever cannot be captured exactly, with operator and user line.
    """
    frames = Frames({id(module): path for path, module in world.reach.modules})
    frames.root = _run.__code__
    recorder = Recorder(frames)
    before: list[tuple[Owner, Any]] = [(owner, owner.get()) for owner in world.owners()]
    plain = {owner.path: owner.get() for owner in state_owners(world.reach, world.parameters, plain=True)}
    rates = [owner.get() for owner in world.rates]
    try:
        for owner, tensor in before:
            recorder.add_owned(owner, tensor, owner.path)
        args, kwargs = _own_arguments(world, recorder, args, kwargs, live_arguments)
        for rate_owner in world.rates:
            rate_owner.set(recorder.add_live(rate_owner, f"the learning rate {rate_owner.path}"))
        for optimizer in world.optimizers:
            optimizer._opt_called = False  # type: ignore[attr-defined]
        with ExitStack() as stack:
            stack.enter_context(_watched(world, recorder))
            stack.enter_context(world.mode)
            stack.enter_context(recorder)
            result = _run(recorder, step, args, kwargs)
        recorder.finish()
        _results(world, recorder, result)
        _endings(world, recorder, before)
        _plain_endings(world, recorder, plain)
        return recorder.program
    finally:
        recorder.close()
        for rate_owner, rate in zip(world.rates, rates, strict=True):
            rate_owner.set(rate)
        world.forget_values()


def _run(recorder: Recorder, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return step(*args, **kwargs)
    except CaptureError:
        raise
    except DataDependentOutputException as error:
        raise CaptureError(
            f"{error.func} at {user_line(error)}: its result depends on data and reached Python",
            code="data_dependent", operator=str(error.func), source=user_line(error),
        ) from error  # fmt: skip
    except Exception as error:
        line = user_line(error)
        raise CaptureError(
            f"the step raised {type(error).__name__} at {line} when it was run on fake tensors: {error}",
            code="step_raised", source=line,
        ) from error  # fmt: skip


def user_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame of an exception that is the user's own code."""
    torch_folder = str(torch.__file__).removesuffix("__init__.py")
    roam_folder = __file__.removesuffix("trace.py")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((torch_folder, roam_folder, "<")):
            return f"{shown_path(frame.filename)}:{frame.lineno}"
    return "unknown line"


def _own_arguments(
    world: World, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], live: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    leaves = pytree.tree_leaves((args, kwargs))
    for position, (leaf, owner) in enumerate(zip(leaves, world.arguments, strict=True)):
        if isinstance(leaf, FakeTensor):
            if recorder.slot_of(leaf) is None:
                recorder.add_owned(owner, leaf, owner.path)
        elif live and type(leaf) is float:
            leaves[position] = recorder.add_live(owner, owner.path)
    return pytree.tree_unflatten(leaves, world.spec)  # type: ignore[no-any-return]


@contextmanager
def _watched(world: World, recorder: Recorder) -> Iterator[None]:
    """Stands in for what acts on Python state that no operator shows."""

    def generator_set(*_: object, **__: object) -> None:
        recorder.generator_state_set()

    def shown(tensor: Any, *_: object, **__: object) -> str:
        if recorder.slot_of(tensor) is None or not _called_by_user():
            return object.__repr__(tensor)
        recorder.refuse("printing a tensor brings its value to Python", code="value_reached_python")

    plain_item = torch.Tensor.item

    def item(tensor: Any) -> Any:
        return as_live(plain_item(tensor))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "item", item))
        transformers = sys.modules.get("transformers.utils.import_utils")
        if hasattr(transformers, "is_fake_tensor"):
            # It would take other attention masks, hence other kernels, than on real tensors.
            stack.enter_context(mock.patch.object(transformers, "is_fake_tensor", lambda _: False))
        for holder in (torch, torch.random):
            for name in ("set_rng_state", "manual_seed", "seed"):
                stack.enter_context(mock.patch.object(holder, name, generator_set))
        for name in ("__repr__", "__str__", "__format__"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, shown))
        for path, scheduler in world.reach.schedulers:
            stack.enter_context(_scheduler(world, recorder, path, scheduler))
        yield


def _called_by_user() -> bool:
    """Whether the code that shows a tensor is the user's, not torch's own messages."""
    torch_folder = str(torch.__file__).removesuffix("__init__.py")
    frame = sys._getframe(2)
    return not frame.f_code.co_filename.startswith(torch_folder)


@contextmanager
def _scheduler(world: World, recorder: Recorder, path: str, scheduler: Any) -> Iterator[None]:
    """A scheduler's `step` inside the user's step is run for real after each run, on the real optimizer.

    Until then nobody can know the next rate, so whoever asks for it is refused.
    """
    rates = [owner for owner in world.rates if owner.optimizer is scheduler.optimizer]

    def step(*arguments: Any, **keywords: Any) -> None:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
            arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
        recorder.program.after.append(
            HostCall(
                scheduler,
                path,
                recorder.references((arguments, keywords), f"{path}.step()"),
                len(recorder.program.calls),
            )
        )
        for owner in rates:
            owner.set(recorder.unknown(f"the learning rate after {path}.step()"))

    def last_rates() -> list[Any]:
        return [owner.get() for owner in rates]

    unknown = recorder.unknown(f"{path}'s own counters")
    with (
        mock.patch.object(scheduler, "step", step),
        mock.patch.object(scheduler, "get_last_lr", last_rates),
        mock.patch.dict(scheduler.__dict__, dict.fromkeys(("last_epoch", "_step_count", "_last_lr"), unknown)),
    ):
        yield


def _results(world: World, recorder: Recorder, result: Any) -> None:
    """What the step returns: tensors and live numbers by slot, plain values as they are."""
    leaves, spec = pytree.tree_flatten(result)
    references = []
    for leaf in leaves:
        slot = recorder.slot_of(leaf)
        if slot is not None:
            references.append(Ref(slot))
        elif is_plain(leaf):
            references.append(leaf)
        else:
            raise CaptureError(
                f"the step returns a {type(leaf).__name__}; it may return tensors, numbers and the containers that "
                "torch.utils._pytree knows",
                code="result",
            )
    recorder.program.result = (references, spec)


def _endings(world: World, recorder: Recorder, before: list[tuple[Owner, Any]]) -> None:
    """What each owner holds after the step, where that is another tensor than before."""
    program = recorder.program
    program.stepped = [optimizer for optimizer in world.optimizers if optimizer.__dict__.get("_opt_called")]
    held = {owner.path: tensor for owner, tensor in before}
    now = {owner.path: owner for owner in world.owners()}
    for path, owner in now.items():
        tensor = owner.get()
        if held.get(path) is tensor:
            continue
        if not isinstance(owner, (StateOwner, GradientOwner)) and owner.kind == "parameter":
            raise CaptureError(f"the step puts another parameter at {path}", code="parameter_replaced")
        slot = recorder.slot_of(tensor)
        if slot is None:
            raise CaptureError(f"the step puts a tensor of unknown origin at {path}", code="unknown_tensor")
        program.rebinds.append((owner, slot))
    for owner, _ in before:
        if owner.path not in now:
            if isinstance(owner, GradientOwner):
                program.dropped.append(owner)
            else:
                raise CaptureError(f"the step removes {owner.path}", code="owner_removed")


def _plain_endings(world: World, recorder: Recorder, before: dict[str, Any]) -> None:
    """What the step adds to optimizer state beside tensors. Numbers that change from step to step are refused."""
    for owner in state_owners(world.reach, world.parameters, plain=True):
        value = owner.get()
        if not is_plain(value):
            raise CaptureError(f"{owner.path} is a {type(value).__name__}", code="optimizer_state")
        if owner.path not in before:
            recorder.program.plain_state.append((owner, value))
            recorder.program.absent.append(owner)
        elif not same(before[owner.path], value):
            raise CaptureError(
                f"{owner.path} is a Python number that the step changes; a plan would freeze it", code="optimizer_state"
            )
