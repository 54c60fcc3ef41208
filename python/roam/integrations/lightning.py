"""`lightning.Trainer`: every training step of a module by a plan."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy

import roam
from roam.errors import CaptureError
from roam.integrations.gradient_readers import is_overridden, may_read, overridden
from roam.integrations.versions import require
from roam.runtime import Step
from roam.torch_compat.private import pytree

_HOOK, _SKIPS = "_current_fx_name", "_skip_backward"
"""Attributes of Lightning's: of a module, the hook that runs; of the loop, whether an epoch has no
backward pass.
"""
_BETWEEN = (
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
)
"""Hooks between the forward pass and the end of the update, which are one step here."""
_OF_UPDATE = ("optimizer_step", "optimizer_zero_grad")
_REPLACED = (*_OF_UPDATE, "backward", "training_step")
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
_LIBRARIES = ("lightning.pytorch", "torchmetrics")
_BEFORE_OR_WITHIN = frozenset(
    (
        *("training_step", "forward", "backward", "configure_gradient_clipping"),
        *("configure_optimizers", "configure_callbacks", "configure_model", "prepare_data"),
        *("setup", "validation_step", "test_step", "predict_step", "optimizer_step"),
        *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
        *("optimizer_zero_grad", "log"),
    )
)
"""Methods that do not run between an update and the next zeroing of gradients. Lightning zeroes
them before it validates.
"""


def compile(module: LightningModule, *, keep_grads: bool | None = None, **options: Any) -> Step:
    """Makes a module's training steps run by plans: forward, backward, clipping and update as one.

    Call it before `Trainer.fit`, which works as before, with its schedule, logs, validation,
    checkpoints and resuming. With manual optimization all of `training_step` is the step. Values
    that the step passes to `self.log` are logged when it has run.

    Args:
        module: the module that is trained.
        keep_grads: as in `roam.compile`. None keeps gradients if code that may read them runs
            between an update and the next zeroing: hooks of the module, callbacks and schedules
            that are not Lightning's or PyTorch's own.
        options: the others of `roam.compile`.

    Returns:
        The compiled step, for `Step.memory` and the like.

    Raises:
        CaptureError: roam does not know this major version of Lightning (``library_version``), or
            the module has a method of its own where roam puts one (``trainer_hook``). Raised in
            `fit`: the step cannot be captured; the module or a callback has a hook between the
            forward pass and the update, or the Trainer has loops of another class
            (``trainer_hook``); the Trainer's precision is not supported (``trainer_precision``); or
            training is on several devices (``trainer_devices``).
    """
    require("lightning", 2)
    for name in _REPLACED:
        if name in vars(module):
            raise CaptureError(
                f"{name} of this {type(module).__name__} is an attribute of the object, where roam would put its own. Write it "
                "as a method of the class, and compile a module once",
                code="trainer_hook",
            )
    user_step = module.training_step
    reads_index = _reads_index(user_step)
    backward = module.backward
    is_updating = False

    def manual_step(given: tuple[Any, ...], *_: bool) -> Any:
        with _apart(module) as logged:
            result = user_step(*given)
        return _detached(result), logged

    def automatic_step(
        given: tuple[Any, ...], is_first: bool, is_last: bool, is_backward: bool
    ) -> Any:
        trainer, result = module.trainer, None
        (optimizer,) = trainer.optimizers
        precision = trainer.precision_plugin  # it has the scaler, and clips

        def closure() -> Any:
            nonlocal result
            with precision.train_step_context():
                result = user_step(*given)
            kept = ClosureResult.from_training_step_output(result, trainer.accumulate_grad_batches)
            if is_first:
                optimizer.zero_grad()
            if kept.closure_loss is not None and is_backward:
                backward(precision.pre_backward(kept.closure_loss, module))
            return kept.loss

        with _apart(module) as logged, torch.autocast(module.device.type, enabled=False):
            if is_last:
                precision.optimizer_step(optimizer, model=module, closure=closure)
            else:
                closure()
        return _detached(result), logged

    is_automatic = module.automatic_optimization
    step = roam.compile(
        automatic_step if is_automatic else manual_step, keep_grads=bool(keep_grads), **options
    )

    @functools.wraps(user_step)
    def training_step(batch: Any, *index: int) -> Any:
        _check(module)
        trainer = module.trainer
        if keep_grads is None and _may_read_gradients(module):
            step.keep_gradients()
        is_backward = not getattr(trainer.fit_loop, _SKIPS)  # set for an epoch of averaged weights
        is_first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        given = (batch, *index) if reads_index else (batch, *(0 for _ in index))
        result, logged = step(given, is_first and is_backward, is_updating, is_backward)
        hook = getattr(module, _HOOK)
        for name, args, kwargs in logged:
            setattr(module, _HOOK, name)
            module.log(*_with_modules(args, module), **_with_modules(kwargs, module))
        setattr(module, _HOOK, hook)
        return result

    def optimizer_step(_: int, __: int, ___: Any, closure: Callable[[], Any]) -> None:
        nonlocal is_updating
        is_updating = True
        try:
            closure()
        finally:
            is_updating = False

    module.training_step = training_step
    if is_automatic:
        module.optimizer_step = optimizer_step
        module.backward = module.optimizer_zero_grad = lambda *_, **__: None  # the step did it
    return step


class _Part(NamedTuple):
    """Stands for a metric, or another part of the module, among the results of a step."""

    name: str


@contextmanager
def _apart(module: LightningModule) -> Iterator[list[Any]]:
    """Has the Trainer's profiler leave the step alone, and collects what the step logs: the hook
    that does, and the arguments.

    Raises:
        CaptureError: a metric that is logged is no part of the module, or has another value at the
            end of the step.
    """
    names = {id(part): name for name, part in module.named_modules() if name}
    logged: list[Any] = []
    metrics: list[tuple[str, Any, Any]] = []

    def part_of(part: torch.nn.Module) -> _Part:
        if id(part) not in names:
            raise CaptureError(
                f"self.log got a {type(part).__name__} that is no part of the module; make it an attribute of the module, or log "
                "its value",
                code="trainer_log",
            )
        metrics.append((names[id(part)], part, getattr(part, "_forward_cache", None)))
        return _Part(names[id(part)])

    def log(*args: Any, **kwargs: Any) -> None:
        given = pytree.tree_map_only(torch.nn.Module, part_of, (args, kwargs))
        logged.append((getattr(module, _HOOK), *_detached(given)))

    profiler, module.trainer.profiler = module.trainer.profiler, PassThroughProfiler()
    module.log = log
    try:
        yield logged
    finally:
        del module.log
        module.trainer.profiler = profiler
    for name, metric, value in metrics:
        if getattr(metric, "_forward_cache", None) is not value:
            raise CaptureError(
                f"the step logs the metric {name} and calls it afterwards, and self.log runs after the step here; log it after "
                "its last call of the step",
                code="trainer_log",
            )


def _with_modules(values: Any, module: LightningModule) -> Any:
    return pytree.tree_map(
        lambda value: module.get_submodule(value.name) if isinstance(value, _Part) else value,
        values,
        is_leaf=lambda value: isinstance(value, _Part),
    )


def _detached(values: Any) -> Any:
    """Values with copies of their tensors, which a later part of the step leaves alone."""
    return pytree.tree_map_only(torch.Tensor, lambda value: value.detach().clone(), values)


def _reads_index(training_step: Callable[..., Any]) -> bool:
    """Whether the code of a `training_step` reads its `batch_idx`, which nearly none does: a step
    that does has a plan for each value.
    """
    code = getattr(inspect.unwrap(training_step), "__code__", None)
    return code is None or any(
        instruction.argval == "batch_idx" or "batch_idx" in _several(instruction.argval)
        for instruction in dis.get_instructions(code)
    )


def _several(value: object) -> tuple[object, ...]:
    """What an instruction names that loads several variables at once."""
    return value if isinstance(value, tuple) else ()


def _may_read_gradients(module: LightningModule) -> bool:
    """Whether code that may read gradients runs between an update and the next zeroing."""
    trainer = module.trainer
    data = getattr(trainer, "datamodule", None)
    hooks = set(overridden(module, LightningModule))
    hooks.update(() if data is None else overridden(data, LightningDataModule))
    held = [*trainer.callbacks, *trainer.loggers]
    return (
        not hooks <= _BEFORE_OR_WITHIN
        or any(isinstance(one, StochasticWeightAveraging) for one in held)
        or any(may_read(one, _LIBRARIES) for one in held)
        or any(may_read(config.scheduler, ()) for config in trainer.lr_scheduler_configs)
    )


def _check(module: LightningModule) -> None:
    trainer = module.trainer
    if type(trainer.strategy) is not SingleDeviceStrategy:
        raise CaptureError(
            f"this Trainer trains by {type(trainer.strategy).__name__}; roam plans steps of one device. Pass it "
            "devices=1 and no strategy, or train without roam",
            code="trainer_devices",
        )
    if trainer.precision not in _PRECISIONS or type(trainer.precision_plugin) not in (Precision, MixedPrecision):  # fmt: skip
        raise CaptureError(
            f"with precision {trainer.precision} by {type(trainer.precision_plugin).__name__} the Trainer changes more around the "
            f"step than autocast, and roam would not see it. Use one of {', '.join(_PRECISIONS)} and no plugin of your own, or a "
            "loop of your own",
            code="trainer_precision",
        )
    epoch = trainer.fit_loop.epoch_loop
    for loop in (trainer.fit_loop, epoch, epoch.automatic_optimization, epoch.manual_optimization):
        if not type(loop).__module__.startswith("lightning.pytorch.loops."):
            raise CaptureError(
                f"this Trainer's steps are run by {type(loop).__name__}, which is none of Lightning's loops. Compile the step that "
                "it runs by roam.compile; or train without roam",
                code="trainer_hook",
            )
    hooks = [(held, Callback, hook) for held in trainer.callbacks for hook in _BETWEEN]
    hooks += [(module, LightningModule, hook) for hook in _BETWEEN]
    if module.automatic_optimization:
        hooks += [(type(module), LightningModule, hook) for hook in _OF_UPDATE]
    for holder, base, hook in hooks:
        if is_overridden(holder, base, hook):
            name = holder.__name__ if isinstance(holder, type) else type(holder).__name__
            raise CaptureError(
                f"{name}.{hook} runs between the forward pass and the end of the update, which a plan runs "
                "as one. Use on_train_batch_end, or configure_gradient_clipping or hooks of the parameters "
                "(Tensor.register_hook) for what it does to gradients; or train without roam",
                code="trainer_hook",
            )
