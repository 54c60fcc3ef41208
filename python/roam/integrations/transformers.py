"""`transformers.Trainer` and its subclasses, such as TRL's: every step by a plan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from accelerate import DistributedType
from transformers import Trainer, TrainerCallback

import roam
from roam.errors import CaptureError
from roam.integrations.versions import require
from roam.runtime import Step

_METRICS = "_metrics"
"""TRL's name for what its trainers collect for their logs, by mode; there is no public one."""
_BETWEEN = ("on_pre_optimizer_step", "on_optimizer_step")
"""Events between the backward pass and the end of the update, which are one step here."""


def compile(trainer: Trainer, **options: Any) -> Step:
    """Makes a trainer run its steps by plans: forward, backward, clipping and update as one.

    `Trainer.train` works as before, with its schedule, logs, evaluation, checkpoints and resuming.
    With gradient accumulation each micro-batch is a call of the step, and the last call updates.

    Args:
        trainer: a `transformers.Trainer`, or an object of any subclass.
        options: those of `roam.compile`.

    Returns:
        The compiled step, for `Step.memory` and the like.

    Raises:
        CaptureError: roam does not know this major version of transformers or TRL
            (``library_version``). Raised in `train`: the step cannot be captured; a callback runs
            between the backward pass and the update (``trainer_hook``); or training is on several
            devices (``trainer_devices``).
    """
    require("transformers", 5)
    if hasattr(trainer, _METRICS):
        require("trl", 1)
    training_step = trainer.training_step

    def whole_step(model: Any, inputs: Any, num_items_in_batch: Any) -> tuple[Any, Any, Any]:
        with _NewMetrics(trainer) as metrics:
            loss = training_step(model, inputs, num_items_in_batch)
        if not trainer.accelerator.sync_gradients:
            return loss, None, metrics.found
        limit = trainer.args.max_grad_norm
        norm = trainer.accelerator.clip_grad_norm_(
            model.parameters(), limit if limit > 0 else math.inf
        )
        trainer.optimizer.step()
        model.zero_grad()
        return loss, norm, metrics.found

    step = roam.compile(whole_step, **options)

    def planned_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        _check(trainer)
        loss, norm, metrics = step(model, inputs, num_items_in_batch)
        for name, (is_added, values) in metrics.items():
            kept = getattr(trainer, _METRICS)["train"]
            kept[name] = kept[name] + values if is_added else values
        if trainer.accelerator.sync_gradients:
            _is_updated(trainer, norm)
        return loss

    trainer.training_step = planned_step
    return step


class _Added(list[Any]):
    """What a step adds to a list of metrics; a list of another class replaces it."""


class _NewMetrics:
    """TRL's trainers append to lists of metrics as they calculate the loss: lists of the step's
    own while it runs.

    Attributes:
        found: by name, whether the step has added to the metric, and the values.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.found: dict[str, tuple[bool, list[Any]]] = {}

    def __enter__(self) -> _NewMetrics:
        self.kept = getattr(self.trainer, _METRICS, None)
        if self.kept is not None:
            new: dict[str, Any] = {mode: defaultdict(_Added) for mode in self.kept}
            setattr(self.trainer, _METRICS, new)
        return self

    def __exit__(self, *_: object) -> None:
        if self.kept is not None:
            self.found = {
                name: (isinstance(values, _Added), list(values))
                for name, values in getattr(self.trainer, _METRICS)["train"].items()
            }
            setattr(self.trainer, _METRICS, self.kept)


def _check(trainer: Trainer) -> None:
    if trainer.accelerator.distributed_type != DistributedType.NO or trainer.args.n_gpu > 1:
        raise CaptureError(
            "this Trainer trains on several devices or shards its model; roam plans steps of one device. Run one process "
            "that sees one device (CUDA_VISIBLE_DEVICES=0), or train without roam",
            code="trainer_devices",
        )
    for callback in trainer.callback_handler.callbacks:
        for event in _BETWEEN:
            if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                raise CaptureError(
                    f"{type(callback).__name__}.{event} runs between the backward pass and the end of the update, which a "
                    "plan runs as one. Use on_step_end, or hooks of the parameters (Tensor.register_hook) for what it does "
                    "to gradients; or train without roam",
                    code="trainer_hook",
                )


def _is_updated(trainer: Trainer, norm: Any) -> None:
    """Has the trainer's own clipping give the norm and its own update do nothing, once: the step
    has done both.
    """

    def restore() -> None:
        put_back_norm()
        put_back_step()

    put_back_norm = _set(trainer.accelerator, "clip_grad_norm_", lambda *_: norm)
    put_back_step = _set(trainer.optimizer, "step", restore)


def _set(holder: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of an object; what puts back how it was."""
    had, before = name in vars(holder), vars(holder).get(name)
    setattr(holder, name, value)
    return lambda: setattr(holder, name, before) if had else delattr(holder, name)
