"""`lightning.Trainer`: every training step of a module by a plan."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy

import roam
from roam.errors import CaptureError
from roam.integrations.versions import require
from roam.runtime import Step
from roam.torch_compat.private import pytree

_BETWEEN = (
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
)
"""Hooks between the forward pass and the end of the update, which are one step here."""
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
_REPLACED = ("optimizer_step", "optimizer_zero_grad")


def compile(module: LightningModule, **options: Any) -> Step:
    """Makes a module's training steps run by plans: forward, backward, clipping and update as one.

    Call it before `Trainer.fit`, which works as before, with its schedule, logs, validation,
    checkpoints and resuming. With manual optimization all of `training_step` is the step. Values
    that the step passes to `self.log` are logged when it has run.

    Args:
        module: the module that is trained.
        options: those of `roam.compile`.

    Returns:
        The compiled step, for `Step.memory` and the like.

    Raises:
        CaptureError: roam does not know this major version of Lightning (``library_version``).
            Raised in `fit`: the step cannot be captured; the module or a callback has a hook
            between the forward pass and the update (``trainer_hook``); the Trainer's precision is
            not supported (``trainer_precision``); or training is on several devices
            (``trainer_devices``).
    """
    require("lightning", 2)
    user_step = module.training_step
    reads_index = _reads_index(user_step)
    log, backward = module.log, module.backward
    is_updating = False

    def forward(given: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        logged: list[Any] = []
        module.log = lambda *args, **kwargs: logged.append(_detached((args, kwargs)))
        try:
            return user_step(*given), logged
        finally:
            del module.log

    def manual_step(given: tuple[Any, ...], *_: bool) -> Any:
        result, logged = forward(given)
        return _detached(result), logged

    def automatic_step(given: tuple[Any, ...], is_first: bool, is_last: bool) -> Any:
        trainer = module.trainer
        (optimizer,) = trainer.optimizers
        result, logged = forward(given)
        with torch.autocast(module.device.type, enabled=False):  # it is for the forward pass
            if is_first:
                optimizer.zero_grad()
            loss = result["loss"] if isinstance(result, dict) else result
            precision = trainer.precision_plugin  # it has the scaler, and clips
            if loss is not None:
                loss = precision.pre_backward(loss / trainer.accumulate_grad_batches, module)
                backward(loss)
            if is_last:
                precision.optimizer_step(optimizer, model=module, closure=lambda: loss)
        return _detached(result), logged

    is_automatic = module.automatic_optimization
    step = roam.compile(automatic_step if is_automatic else manual_step, **options)

    @functools.wraps(user_step)
    def training_step(batch: Any, *index: int) -> Any:
        _check(module)
        trainer = module.trainer
        is_first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        given = (batch, *index) if reads_index else (batch, *(0 for _ in index))
        result, logged = step(given, is_first, is_updating)
        for args, kwargs in logged:
            log(*args, **kwargs)
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


def _check(module: LightningModule) -> None:
    trainer = module.trainer
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise CaptureError(
            f"this Trainer trains by {type(trainer.strategy).__name__}; roam plans steps of one device. Pass it "
            "devices=1 and no strategy, or train without roam",
            code="trainer_devices",
        )
    if trainer.precision not in _PRECISIONS:
        raise CaptureError(
            f"with precision {trainer.precision} the Trainer changes more around the step than autocast, and roam would not see it. "
            f"Use one of {', '.join(_PRECISIONS)}, or a loop of your own",
            code="trainer_precision",
        )
    hooks = (*_BETWEEN, *(_REPLACED if module.automatic_optimization else ()))
    of_module = [(module, LightningModule, hook) for hook in hooks]
    of_callbacks = [(held, Callback, hook) for held in trainer.callbacks for hook in _BETWEEN]
    for holder, base, hook in (*of_module, *of_callbacks):
        if getattr(type(holder), hook) is not getattr(base, hook):
            raise CaptureError(
                f"{type(holder).__name__}.{hook} runs between the forward pass and the end of the update, which a plan runs "
                "as one. Use on_train_batch_end, or configure_gradient_clipping or hooks of the parameters "
                "(Tensor.register_hook) for what it does to gradients; or train without roam",
                code="trainer_hook",
            )
